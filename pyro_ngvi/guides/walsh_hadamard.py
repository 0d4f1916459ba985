"""The guide that makes the weight matrices of a model from few Gaussian numbers.

Rossi, Marmin & Filippone (2020, NeurIPS), "Walsh-Hadamard variational inference for Bayesian deep
learning"; the equations are in :mod:`pyro_ngvi.reparam`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from pyro import poutine
from pyro.infer.autoguide.initialization import InitMessenger
from torch import Tensor, nn
from torch.distributions import biject_to, constraints

from .._pyro_adapter import model_as_given
from ..families import FullRankNormal, MeanFieldNormal, ProductFamily
from ..families.base import Family, Tensors
from ..layout import feasible_value
from ..reparam import WalshHadamardTransform, check_g_scale, matrix_for, normal_of, seed_of
from .base import AutoFamily

__all__ = ["AutoWalshHadamard"]

NORMAL: dict[str, type[Family]] = {"mean_field": MeanFieldNormal, "full_rank": FullRankNormal}


class _Support(constraints.Constraint):
    """Of a site in the guide's own copy of the model's trace: where its values come from."""

    def __init__(self, transform: WalshHadamardTransform) -> None:
        self.transform = transform
        self.event_dim = transform.value_dim

    def check(self, value: Tensor) -> Tensor:
        return torch.isfinite(value).flatten(-self.event_dim).all(-1)


@biject_to.register(_Support)
def _to_support(support: _Support) -> WalshHadamardTransform:
    return support.transform


class _Stub:
    """What autoguides read of the distribution of a site: its support, and how long an event is."""

    def __init__(self, support: _Support, shape: torch.Size) -> None:
        self.support, self.event_dim, self._shape = support, support.event_dim, shape

    def shape(self) -> torch.Size:
        return self._shape


class AutoWalshHadamard(AutoFamily):
    r"""Weight matrices W = loc + scale o sqrt(D) S1 H diag(g) H S2 with a Gaussian g.

    Each chosen site W ~ N(loc, scale^2), n x m, gets max(n, m) numbers g, up to rounding to powers of
    two, and as many in the diagonals S1 and S2, in place of 2 n m for a mean-field guide.  q(g) is
    Gaussian; all other sites share one more Gaussian; both are trained by the rules for Gaussian
    families, the diagonals by ``others``:

        NGVB(guide, others=pyro.optim.Adam({"lr": 0.01}))

    **The objective** is the bound of the reparameterised model, not of yours: the KL term is that
    between q(g) and p(g) = N(0, g_scale^2 I), for W, a linear image of fewer dimensions, has no density
    (:mod:`pyro_ngvi.reparam`).  The guide still goes with the model as it is written: its site W
    carries log p(W) - log p(g) in its log density, which puts p(g) in the place of p(W) in every ELBO.
    So do not compare this ELBO with those of other guides; compare predictions.

    The prior of a chosen site has to be the same at every call, and may not depend on other latent
    sites: use :class:`~pyro_ngvi.WalshHadamardReparam` with ``poutine.reparam`` for these.

    For a few hundred weights :class:`AutoMatrixNormal` or :class:`AutoFullRankNormal` fit better;
    this is for layers so wide that n m numbers are too many, or that mean-field guides drive to the
    prior.

    Args:
        sites: names of the sites to reparameterise, of any shape with at least one dimension (vectors
            become square matrices).  By default all Gaussian matrix sites, both dimensions above 1,
            but the last of the model's (n, m) sites, an output layer, if there are two or more.
        g: "mean_field" or "full_rank" for q(g) of each site.
        rest: the same for all other sites together.
        g_scale: prior sd of g; 1 keeps the prior variance of each W_ij while the diagonals are signs.
        shared: one g for all blocks of a site that has more rows than D, the power of two from its
            columns on.
        train_diagonals: ``False`` keeps S1 and S2 at their random signs, a function of the site's name.

    g starts at the matrix nearest to the starting value of W, made as long: start networks at the
    weights of a module (``init_loc_fn=model.init_to_module``) or at draws of the prior
    (``init_loc_fn=pyro.infer.autoguide.init_to_sample``), not at zero, where no gradient
    reaches a hidden layer.

    See :class:`~pyro_ngvi.guides.base.AutoFamily` for the other arguments and errors; ``init="map"`` is
    not for this guide.

    Raises:
        ValueError: at the first call, for a named site that does not exist, has no dimension or
        entries,
            is in a plate, scaled or masked, or whose prior is not Gaussian or depends on other latent
            sites; when nothing is named and there is no such matrix.

    Example:
        >>> import pyro, torch
        >>> from pyro.infer import SVI
        >>> import pyro_ngvi as ngvi
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
        >>> model = ngvi.nn.bayesianize(net, "normal", num_data=20, noise=0.1)
        >>> guide = ngvi.AutoWalshHadamard(model, init_loc_fn=model.init_to_module)
        >>> optim = ngvi.NGVB(guide, others=pyro.optim.Adam({"lr": 0.01}))
        >>> svi = SVI(model, guide, optim, ngvi.BatchedELBO(4))
        >>> x = torch.randn(20, 4)
        >>> loss = svi.step(x, x.sum(-1))
        >>> guide.matrices["0.weight"].num_g, guide.median()["0.weight"].shape
        (64, torch.Size([64, 4]))
    """

    family: ProductFamily

    def __init__(
        self,
        model: Callable[..., Any],
        sites: Sequence[str] | None = None,
        *,
        g: str = "mean_field",
        rest: str = "mean_field",
        g_scale: float = 1.0,
        shared: bool = False,
        train_diagonals: bool = True,
        **kwargs: Any,
    ) -> None:
        for argument, value in (("g", g), ("rest", rest)):
            if value not in NORMAL:
                names = " or ".join(map(repr, NORMAL))
                raise ValueError(f"{argument} must be {names}, got {value!r}.")
        if isinstance(sites, str):
            raise ValueError(f"sites must be a list of names, got the string {sites!r}.")
        if kwargs.get("init") is not None:
            raise ValueError("AutoWalshHadamard has no init; start it by init_loc_fn.")
        check_g_scale(g_scale)
        self._sites = None if sites is None else list(sites)
        self._g, self._rest = g, rest
        self._g_scale, self._shared = float(g_scale), shared
        self._train_diagonals = train_diagonals
        #: names of the parts of the family, by the site that is made of g
        self.parts: dict[str, str] = {}
        super().__init__(model, **kwargs)

    def _make_family(self) -> Family:
        return ProductFamily({}, [], linear=False)  # its parts are known once the sites are

    @property
    def matrices(self) -> dict[str, Any]:
        """The blocks of each reparameterised site, by name."""
        self._require_setup()
        return {name: self._transform(name).matrix for name in self.parts}

    def _transform(self, name: str) -> WalshHadamardTransform:
        prototype: Any = self.prototype_trace
        return prototype.nodes[name]["fn"].support.transform

    def _setup_latents(self, *args: Any, **kwargs: Any) -> None:
        super()._setup_latents(*args, **kwargs)
        chosen = self._choose()
        if chosen:
            self._check_priors(chosen, args, kwargs)
        prototype: Any = self.prototype_trace
        self.parts = {}
        for name in chosen:
            site = prototype.nodes[name]
            part = "g_" + name.replace(".", "_")
            while part in self.parts.values():
                part += "_"
            self.parts[name] = part
            transform = self._make_transform(name, part, site["fn"])
            site["fn"] = _Stub(_Support(transform), site["value"].shape)
            self._unconstrained_shapes[name] = torch.Size([transform.matrix.num_g])
        self.latent_dim = sum(shape.numel() for shape in self._unconstrained_shapes.values())

    def _make_transform(self, name: str, part: str, fn: Any) -> WalshHadamardTransform:
        normal = normal_of(fn)
        assert normal is not None
        loc, scale = (x.detach() for x in normal)
        matrix = matrix_for(loc.shape, self._shared)
        for side, signs in zip(("left", "right"), matrix.signs(seed_of(name), loc), strict=True):
            if self._train_diagonals:
                setattr(self, f"{side}_{part}", nn.Parameter(signs))
            else:
                self.register_buffer(f"{side}_{part}", signs)
        diagonals = _Diagonals(self, part)
        return WalshHadamardTransform(matrix, loc, scale, diagonals, loc.dim(), self._g_scale)

    def _choose(self) -> list[str]:
        """The sites to reparameterise; refuses what can not be."""
        prototype: Any = self.prototype_trace
        sites = dict(prototype.iter_stochastic_nodes())
        if self._sites is not None:
            for name in self._sites:
                if name not in sites:
                    raise ValueError(
                        f"AutoWalshHadamard: the model has no latent site {name!r}; it has "
                        f"{', '.join(map(repr, sites))}."
                    )
                if reason := _refusal(sites[name]):
                    raise ValueError(f"AutoWalshHadamard: the site {name!r} {reason}")
            return [name for name in sites if name in self._sites]
        matrices = [name for name, site in sites.items() if site["value"].dim() == 2]
        hidden = matrices[:-1] if len(matrices) > 1 else matrices
        chosen = [
            name
            for name in hidden
            if min(sites[name]["value"].shape) > 1 and not _refusal(sites[name])
        ]
        if not chosen:
            shapes = ", ".join(f"{n!r} {tuple(site['value'].shape)}" for n, site in sites.items())
            raise ValueError(
                f"AutoWalshHadamard found no Gaussian matrix, declared by .to_event(2), to "
                f"reparameterise, the last one left out: {shapes}. Name some by sites=[...], or use "
                f"pyro_ngvi.AutoMeanFieldNormal(model)."
            )
        return chosen

    def _check_priors(self, chosen: list[str], args: Any, kwargs: Any) -> None:
        """Refuse a prior that moves when other latent sites do."""
        prototype: Any = self.prototype_trace

        def moved(site: Any) -> Tensor:
            if site["name"] not in prototype.nodes:
                return feasible_value(site)
            transform = biject_to(site["fn"].support)
            return transform(transform.inv(prototype.nodes[site["name"]]["value"]) + 0.37)

        with poutine.block():
            model = InitMessenger(moved)(model_as_given(self))
            other: Any = poutine.trace(model).get_trace(*args, **kwargs)
        for name in chosen:
            before, after = (normal_of(t.nodes[name]["fn"]) for t in (prototype, other))
            if after is None or not all(map(torch.equal, before or (), after)):
                raise ValueError(
                    f"AutoWalshHadamard: the prior of the site {name!r} depends on other latent sites. "
                    f"Use poutine.reparam(model, {{{name!r}: pyro_ngvi.WalshHadamardReparam()}}) and "
                    f"a guide of its result, or name other sites."
                )

    def _define_family(self) -> None:
        parts: dict[str, Family] = {}
        segments: list[tuple[str, int]] = []
        for name, shape in self._unconstrained_shapes.items():
            part = self.parts.get(name, "rest")
            parts.setdefault(part, NORMAL[self._g if name in self.parts else self._rest]())
            segments.append((part, shape.numel()))
        self.family.define(parts, segments)

    def _current(self) -> Tensors:
        if self._train_diagonals:
            for part in self.parts.values():  # attribute access registers them with Pyro
                for side in ("left", "right"):
                    getattr(self, f"{side}_{part}")
        return super()._current()

    def _apply(self, fn: Any, *args: Any, **kwargs: Any) -> Any:
        moved = super()._apply(fn, *args, **kwargs)
        for name in self.parts:
            transform = self._transform(name)
            transform.loc, transform.scale = fn(transform.loc), fn(transform.scale)
        return moved

    def site_moments(self, name: str) -> tuple[Tensor, Tensor]:
        """Mean and sd of every entry of a reparameterised site under q, in the shape of the site.

        Raises:
            ValueError: when the site is not one of those in ``matrices``.
        """
        self._require_setup()
        if name not in self.parts:
            raise ValueError(
                f"The guide makes no site {name!r} of g; it makes {', '.join(map(repr, self.parts))}."
            )
        part = self.parts[name]
        transform: Any = self._transform(name)
        own, family = self.family.own(part, self._current()), self.family.parts[part]
        full = isinstance(family, FullRankNormal)
        spread = family.covariance(own) if full else family.stddev(own).square()
        return transform(family.mean(own)).detach(), transform.stddev(spread).detach()

    @torch.no_grad()
    def quantiles(self, quantiles: Any, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Marginal quantiles of every latent site, by name; a dimension for the levels in front."""
        result = super().quantiles(quantiles, *args, **kwargs)
        for name in self.parts:
            mean, sd = self.site_moments(name)
            levels = torch.as_tensor(quantiles, dtype=mean.dtype, device=mean.device)
            z = torch.special.ndtri(levels)
            result[name] = mean + sd * z.reshape(z.shape + (1,) * mean.dim())
        return result


class _Diagonals:
    """S1 and S2 of one site, read from the guide that holds them, without telling Pyro."""

    def __init__(self, guide: nn.Module, part: str) -> None:
        self.guide, self.names = guide, (f"left_{part}", f"right_{part}")

    def __call__(self) -> tuple[Tensor, Tensor]:
        held: Any = {**self.guide._parameters, **self.guide._buffers}
        left, right = (held[name] for name in self.names)
        return left, right


def _refusal(site: Any) -> str | None:
    """Why a site can not be reparameterised: the end of a sentence."""
    fn, shape = site["fn"], tuple(site["value"].shape)
    if normal_of(fn) is None:
        return f"has a prior that is not independent normals ({type(fn).__name__})."
    if site["cond_indep_stack"] or fn.event_dim != len(shape) or not shape:
        return (
            f"has shape {shape} and event shape {tuple(fn.event_shape)}; declare all its dimensions "
            f"as one event by .to_event({len(shape) or 1}), outside of plates."
        )
    if not site["value"].numel():
        return f"has shape {shape} and no entries."
    if site["scale"] != 1.0 or site["mask"] is not None:
        return "is scaled or masked by poutine, which the prior of g would not follow."
    return None
