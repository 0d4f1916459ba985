"""The guides that make the weight matrices of a model from few numbers, by :mod:`.reparam`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from pyro import poutine
from pyro.distributions import ImproperUniform
from pyro.infer.autoguide.initialization import InitMessenger
from torch import Tensor
from torch.distributions import AffineTransform, Transform, biject_to, constraints

from ..families import FullRankNormal, MeanFieldNormal, ProductFamily, WalshHadamardNormal
from ..families.base import Family, Tensors
from ..linalg.walsh_hadamard_matrix import WalshHadamardMatrix, matrix_for
from ..optim.rule import require
from ..runtime.density import feasible_value
from ..runtime.pyro_adapter import model_as_given
from .marginals import factor, place
from .normal import AutoProduct, joint_family, part_name
from .reparam import WalshHadamardTransform, hold_diagonals, normal_of, seed_of


class _Support(constraints.Constraint):
    """Of a site in the guide's own copy of the model's trace: where its values come from."""

    def __init__(self, transform: Any) -> None:
        self.transform, self.event_dim = transform, transform.codomain.event_dim

    def check(self, value: Tensor) -> Tensor:
        return torch.isfinite(value).flatten(-self.event_dim).all(-1)


@biject_to.register(_Support)
def _to_support(support: _Support) -> Transform:
    return support.transform


class AutoWalshHadamard(AutoProduct):
    r"""Weight matrices W = loc + scale o sqrt(D) S1 H diag(g) H S2 with a Gaussian g.

    Each chosen site W ~ N(loc, scale^2), n x m, gets max(n, m) latent numbers g, up to rounding to
    powers of two, in place of n m, and about n + m numbers in the diagonals S1 and S2.  q(g) is
    Gaussian; all other sites share one more.  Rules for Gaussian families train both, ``others`` the
    diagonals: ``NGVB(guide, others=pyro.optim.Adam({"lr": 0.01}))``.  A full Gaussian among the parts
    leaves NGVB, IFVB and AIFVB.  While diagonals are trained the guide holds the last iterate.

    **The objective** is the bound of the reparameterised model, not of yours: the site W carries
    log p(W) - log p(g) in its log density, p(g) = N(0, g_scale^2 I), because W, a linear image of fewer
    dimensions, has no density.  So compare predictions with other guides, not ELBOs.
    :class:`AutoProperWalshHadamard` bounds the evidence of your own model.

    Scale and mask of such a site have to be the same in model and guide: ``poutine.scale`` around the
    model alone leaves a share of log p(W) behind, without bound.  ``BatchedELBO`` refuses that, Pyro's
    losses do not; use ``BatchedELBO(kl_weight=...)``.  The prior of a chosen site has to be the same at
    every call, which is not checked.

    g starts at the matrix nearest to the starting value of W, made as long.  Start networks away from
    zero, the default (:class:`~pyro_ngvi.nn.WalshHadamardLinear` says why): at the weights of a module
    (``init_loc_fn=model.init_to_module``) or at draws of the prior.  Not for a few hundred weights,
    which :class:`AutoMatrixNormal` or :class:`AutoFullRankNormal` fit better.

    Args:
        sites: names of the sites to reparameterise, of any shape with at least one dimension.  By
            default all Gaussian matrix sites, both dimensions above 1, but the last of two or more, an
            output layer, which keeps its own prior and a mean and an sd for each weight.
        g: "mean_field" or "full_rank" for q(g) of each site.
        rest: the same for all other sites together.
        g_scale: prior sd of g; 1 keeps the prior variance of each W_ij while the diagonals are signs.
        train_diagonals: ``False`` keeps S1 and S2 at their random signs.
        kwargs: those of :class:`~pyro_ngvi.guides.AutoFamily`, whose errors it raises, but no ``init``.

    Raises:
        ValueError: at the first call, for a named site that does not exist, has no dimension, is in a
            plate, scaled or masked, or whose prior is not Gaussian, is trained or depends on other
            latent sites; when nothing is named and there is no such matrix.

    Example:
        >>> import pyro, torch, pyro_ngvi as ngvi
        >>> from pyro.infer import SVI
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
        >>> model = ngvi.nn.bayesianize(net, "normal", num_data=20, noise=0.1)
        >>> guide = ngvi.AutoWalshHadamard(model, init_loc_fn=model.init_to_module)
        >>> optim = ngvi.NGVB(guide, others=pyro.optim.Adam({"lr": 0.01}))
        >>> svi = SVI(model, guide, optim, ngvi.BatchedELBO(4))
        >>> loss = svi.step(torch.randn(20, 4), torch.randn(20))
        >>> guide.matrices["0.weight"].num_g, guide.median()["0.weight"].shape
        (64, torch.Size([64, 4]))
    """

    starts = ()

    def __init__(
        self,
        model: Callable[..., Any],
        sites: Sequence[str] | None = None,
        *,
        g: str = "mean_field",
        rest: str = "mean_field",
        g_scale: float = 1.0,
        train_diagonals: bool = True,
        **kwargs: Any,
    ) -> None:
        listed = sites is None or isinstance(sites, list | tuple | set)
        require(listed, "sites", "be a list of names", sites)
        require(0.0 < g_scale < float("inf"), "g_scale", "be a positive number", g_scale)
        self._sites = None if sites is None else list(sites)
        self._g, self._rest = joint_family("g", g), joint_family("rest", rest)
        self._g_scale, self._train = float(g_scale), train_diagonals
        # an average of g over the past would not belong to the diagonals of today
        self.holds_average = not train_diagonals
        #: names of the parts of the family, and the blocks, by the site that is made of g
        self.parts: dict[str, str] = {}
        self.matrices: dict[str, WalshHadamardMatrix] = {}
        super().__init__(model, **kwargs)

    def make_family(self) -> Family:
        if self._g is self._rest is MeanFieldNormal:
            return MeanFieldNormal()
        return ProductFamily({}, [], linear=False)  # its parts are known once the sites are

    @property
    def replaced_priors(self) -> tuple[str, ...]:
        """The sites whose prior in the model gives way to that of g."""
        return tuple(self.parts)

    def _transform(self, name: str) -> Any:
        """From what the family draws for a site to its value."""
        return self.prototype_trace.nodes[name]["fn"].support.transform

    @torch.no_grad()
    def _define_family(self, args: Any, kwargs: Any) -> None:
        self.parts, self.matrices = {}, {}
        chosen = self._chosen()
        self._check_priors(chosen, args, kwargs)
        for name, (loc, scale) in chosen.items():
            part = self.parts[name] = part_name("g", name, self.parts.values())
            matrix = self.matrices[name] = matrix_for(loc.shape)
            hold_diagonals(self, f"_{part}", matrix.signs(seed_of(name), loc), self._train)
            transform: Any = self._make_transform(name, loc.detach(), scale.detach())
            site = self.prototype_trace.nodes[name]
            site["fn"] = ImproperUniform(_Support(transform), (), site["value"].shape)
            self._unconstrained_shapes[name] = transform.inv(site["value"]).shape
        self.latent_dim = sum(shape.numel() for shape in self._unconstrained_shapes.values())
        if isinstance(self.family, ProductFamily):
            super()._define_family(args, kwargs)

    def _chosen(self) -> dict[str, tuple[Tensor, Tensor]]:
        """loc and scale of the sites to reparameterise, by name."""
        kind, sites = type(self).__name__, dict(self.prototype_trace.iter_stochastic_nodes())
        shapes = ", ".join(f"{n!r} {tuple(site['value'].shape)}" for n, site in sites.items())
        normals: dict[str, Any] = {name: normal_of(site["fn"]) for name, site in sites.items()}
        names = self._sites
        if names is None:
            events = {n: s["fn"].event_shape for n, s in sites.items() if not s["cond_indep_stack"]}
            matrices = [name for name, shape in events.items() if len(shape) == 2]
            hidden = matrices[:-1] if len(matrices) > 1 else matrices
            names = [name for name in hidden if min(events[name]) > 1 and normals[name]]
        if not names:
            raise ValueError(
                f"{kind} found no Gaussian matrix, declared by .to_event(2), to reparameterise, the "
                f"last one left out: {shapes}. Name some by sites=[...], or use "
                f"pyro_ngvi.AutoMeanFieldNormal(model)."
            )
        for name in names:
            if not normals.get(name) or not _is_plain_event(sites[name]):
                raise ValueError(
                    f"{kind}: {name!r} is no latent site of independent normals, declared as one event "
                    f"by .to_event(...) outside of plates, neither scaled nor masked. The model has "
                    f"{shapes}."
                )
        return {name: normals[name] for name in sites if name in names}

    def _check_priors(self, chosen: dict[str, Any], args: Any, kwargs: Any) -> None:
        """Refuse priors that are trained, or that move with other latent sites."""
        nodes = self.prototype_trace.nodes

        def moved(site: Any) -> Tensor:
            if site["name"] not in nodes:
                return feasible_value(site)
            transform = biject_to(site["fn"].support)
            return transform(transform.inv(nodes[site["name"]]["value"]) + 0.37)

        model = InitMessenger(moved)(model_as_given(self))
        with poutine.block(), torch.enable_grad():
            other: Any = poutine.trace(model).get_trace(*args, **kwargs)
        for name, before in chosen.items():
            after = normal_of(other.nodes[name]["fn"])
            same = after is not None and all(map(torch.equal, before, after))
            if not same or any(x.requires_grad for x in after or ()):
                raise ValueError(
                    f"AutoWalshHadamard: the prior of {name!r} is trained or depends on other latent "
                    f"sites, which it does not follow. Use poutine.reparam(model, {{{name!r}: "
                    f"pyro_ngvi.nn.WalshHadamardReparam()}}), or AutoProperWalshHadamard(model)."
                )

    def _diagonals(self, part: str) -> tuple[Tensor, Tensor]:
        """S1 and S2 of one site, without telling Pyro."""
        held: Any = {**self._parameters, **self._buffers}
        return held[f"left_{part}"], held[f"right_{part}"]

    def _make_transform(self, name: str, loc: Tensor, scale: Tensor) -> Transform:
        diagonals = partial(self._diagonals, self.parts[name])
        return WalshHadamardTransform(self.matrices[name], loc, scale, diagonals, self._g_scale)

    def _part(self, name: str) -> tuple[str, Family]:
        if name not in self.parts:
            return "rest", self._rest()
        return self.parts[name], self._g()

    def _apply(self, fn: Any, *args: Any, **kwargs: Any) -> Any:
        for name in self.parts:
            transform, site = self._transform(name), self.prototype_trace.nodes[name]
            transform.loc, transform.scale = fn(transform.loc), fn(transform.scale)
            site["value"] = fn(site["value"])  # whose shape in g a loss asks the transform for
        return super()._apply(fn, *args, **kwargs)

    def site_moments(self, name: str) -> tuple[Tensor, Tensor]:
        """Mean and sd of every entry of a site in ``matrices`` under q, in the shape of the site."""
        params, shapes = self._current(), self._unconstrained_shapes
        transform, found = self._transform(name), factor(self.family, params, place(shapes, name))
        assert found is not None  # a site is independent of the rest
        family, own = found
        mean = transform(family.mean(own).view(shapes[name]))
        return mean.detach(), self._stddev(transform, family, own).detach()

    def _stddev(self, transform: Any, family: Family, own: Tensors) -> Tensor:
        """sd of every entry of a site, from its part of q."""
        full = isinstance(family, FullRankNormal)
        return transform.stddev(family.covariance(own) if full else family.stddev(own).square())

    def _exact_quantiles(self, name: str, levels: Tensor) -> Tensor | None:
        if name not in self.parts:
            return None
        mean, sd = self.site_moments(name)
        return mean + sd * torch.special.ndtri(levels).reshape(-1, *(1 for _ in mean.shape))


def _is_plain_event(site: Any) -> bool:
    """Whether all dimensions of a site are one event, outside of plates, scales and masks."""
    plain = not site["cond_indep_stack"] and site["scale"] == 1.0 and site["mask"] is None
    return plain and 0 < site["value"].dim() == site["fn"].event_dim


class AutoProperWalshHadamard(AutoWalshHadamard):
    r"""Matrices of :class:`AutoWalshHadamard` and noise: a bound of the evidence of your own model.

    White noise on every entry, W = loc + scale o (A g + sigma E) with A g the matrix of g and E
    standard normal, gives W a density (:class:`~pyro_ngvi.families.WalshHadamardNormal`).  The
    diagonals stay signs, and all is trained by natural gradients.  Arguments are the others of
    :class:`AutoWalshHadamard`.

    The bound is often loose: the mean of q moves in about max(n, m) of n m directions, and one number
    sigma is the sd in all others.  A step is O(n m), as with a mean-field guide.  The prior of W may
    change from call to call, or with other latent sites: loc and scale stay those of the first.

    Example:
        >>> import torch, pyro, pyro.distributions as dist, pyro_ngvi as ngvi
        >>> def model():
        ...     return pyro.sample("W", dist.Normal(torch.zeros(8, 4), 1.0).to_event(2))
        >>> guide = ngvi.AutoProperWalshHadamard(model)
        >>> guide()["W"].shape, guide.get_posterior().event_shape, guide.g_W_loc.shape
        (torch.Size([8, 4]), torch.Size([32]), torch.Size([8]))
    """

    replaced_priors = ()  # pyright: ignore[reportAssignmentType]

    def __init__(
        self, model: Callable[..., Any], sites: Sequence[str] | None = None, **kwargs: Any
    ) -> None:
        super().__init__(model, sites, g_scale=1.0, train_diagonals=False, **kwargs)

    def make_family(self) -> Family:
        return ProductFamily({}, [], linear=False)

    def _check_priors(self, chosen: dict[str, Any], args: Any, kwargs: Any) -> None:
        pass  # W has a density, and the model its own prior

    def _make_transform(self, name: str, loc: Tensor, scale: Tensor) -> Transform:
        return AffineTransform(loc, scale, event_dim=loc.dim())

    def _part(self, name: str) -> tuple[str, Family]:
        part, family = super()._part(name)
        if name not in self.parts:
            return part, family
        base: Any = family
        return part, WalshHadamardNormal(self.matrices[name], partial(self._diagonals, part), base)

    def _stddev(self, transform: Any, family: Family, own: Tensors) -> Tensor:
        return transform.scale * family.stddev(own).view(transform.loc.shape)
