"""The guides that make the weight matrices of a model from few Gaussian numbers.

Rossi, Marmin & Filippone (2020, NeurIPS), "Walsh-Hadamard variational inference for Bayesian deep
learning"; the equations are in :mod:`pyro_ngvi.guides.reparam`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor
from torch.distributions import AffineTransform, Transform

from ..families import FullRankNormal, MeanFieldNormal, ProductFamily, WalshHadamardNormal
from ..families.base import Family, Tensors
from ..linalg.walsh_hadamard_matrix import WalshHadamardMatrix, matrix_for
from ..runtime.pyro_adapter import model_as_given
from ._walsh_hadamard_sites import Stub, check_priors, choose_sites, start_within_memory
from .base import AutoFamily
from .initialization import check_position, init_to_center
from .parts import NORMAL, check_normal, factor, part_name, place
from .reparam import WalshHadamardTransform, check_g_scale, hold_diagonals, normal_of, seed_of

__all__ = ["AutoProperWalshHadamard", "AutoWalshHadamard"]


class _WalshHadamardGuide(AutoFamily):
    """What the guides below share: their sites, and that each of these has a part of q to itself."""

    #: whether the diagonals are trained, by ``others``
    _train_diagonals = False

    def __init__(
        self,
        model: Callable[..., Any],
        sites: Sequence[str] | None = None,
        *,
        g: str = "mean_field",
        rest: str = "mean_field",
        shared: bool = False,
        **kwargs: Any,
    ) -> None:
        name = type(self).__name__
        check_position(self, "sites", sites)
        check_normal("g", g)
        check_normal("rest", rest)
        if isinstance(sites, str):
            raise ValueError(f"sites must be a list of names, got the string {sites!r}.")
        if kwargs.get("init") is not None:
            raise ValueError(f"{name} has no init; start it by init_loc_fn.")
        if sites is not None and not list(sites):
            raise ValueError(
                "sites is empty, so nothing would be made of g. Name some, leave sites out, or use "
                "pyro_ngvi.AutoMeanFieldNormal(model)."
            )
        self._sites = None if sites is None else list(sites)
        self._g, self._rest, self._shared = g, rest, shared
        #: names of the parts of the family, by the site that is made of g
        self.parts: dict[str, str] = {}
        self._blocks: dict[str, WalshHadamardMatrix] = {}
        start = kwargs.pop("init_loc_fn", init_to_center)
        super().__init__(model, init_loc_fn=start_within_memory(name, start), **kwargs)

    def make_family(self) -> Family:
        return ProductFamily({}, [], linear=False)  # its parts are known once the sites are

    @property
    def matrices(self) -> dict[str, WalshHadamardMatrix]:
        """The blocks of each reparameterised site, by name."""
        self._require_setup()
        return dict(self._blocks)

    def _transform(self, name: str) -> Any:
        prototype: Any = self.prototype_trace
        return prototype.nodes[name]["fn"].support.transform

    def _setup_latents(self, *args: Any, **kwargs: Any) -> None:
        super()._setup_latents(*args, **kwargs)
        prototype: Any = self.prototype_trace
        chosen = choose_sites(type(self).__name__, prototype, self._sites)
        self._check_priors(chosen, args, kwargs)
        self.parts, self._blocks = {}, {}
        for name in chosen:
            site, normal = prototype.nodes[name], normal_of(prototype.nodes[name]["fn"])
            assert normal is not None
            loc, scale = (x.detach() for x in normal)
            part = self.parts[name] = part_name("g", name, self.parts.values())
            matrix = self._blocks[name] = matrix_for(loc.shape, self._shared)
            signs = matrix.signs(seed_of(name), loc)
            hold_diagonals(self, (f"left_{part}", f"right_{part}"), signs, self._train_diagonals)
            transform: Any = self._make_transform(matrix, loc, scale, part)
            site["fn"] = Stub(transform, site["value"].shape)
            self._unconstrained_shapes[name] = transform.inv(site["value"]).shape
        self.latent_dim = sum(shape.numel() for shape in self._unconstrained_shapes.values())

    def _check_priors(self, chosen: list[str], args: Any, kwargs: Any) -> None:
        """Refuse priors of the ``chosen`` sites that the guide would not follow."""

    def _make_transform(
        self, matrix: WalshHadamardMatrix, loc: Tensor, scale: Tensor, part: str
    ) -> Transform:
        """From what the family draws for a site to its value."""
        raise NotImplementedError

    def _diagonals(self, part: str) -> tuple[Tensor, Tensor]:
        """S1 and S2 of one site, without telling Pyro."""
        held: Any = {**self._parameters, **self._buffers}
        return held[f"left_{part}"], held[f"right_{part}"]

    def _define_family(self) -> None:
        if not isinstance(self.family, ProductFamily):
            return
        parts: dict[str, Family] = {}
        segments: list[tuple[str, int]] = []
        for name, shape in self._unconstrained_shapes.items():
            part = self.parts.get(name, "rest")
            if name in self.parts:
                parts[part] = self._family_of(name)
            elif part not in parts:
                parts[part] = NORMAL[self._rest]()
            segments.append((part, shape.numel()))
        self.family.define(parts, segments)

    def _family_of(self, name: str) -> Family:
        """The part of q for a site."""
        return NORMAL[self._g]()

    def _apply(self, fn: Any, *args: Any, **kwargs: Any) -> Any:
        moved = super()._apply(fn, *args, **kwargs)
        prototype: Any = self.prototype_trace
        for name in self.parts:
            transform, site = self._transform(name), prototype.nodes[name]
            transform.loc, transform.scale = fn(transform.loc), fn(transform.scale)
            site["value"] = fn(site["value"])  # whose shape in g a loss asks the transform for
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
        transform, shapes = self._transform(name), self._unconstrained_shapes
        found = factor(self.family, self._current(), place(shapes, name))
        assert found is not None  # a site is independent of the rest
        family, own = found
        mean = transform(family.mean(own).view(shapes[name]))
        return mean.detach(), self._stddev(transform, family, own).detach()

    def _stddev(self, transform: Any, family: Family, own: Tensors) -> Tensor:
        """sd of every entry of a site, from its part of q."""
        raise NotImplementedError

    def _exact_quantiles(self, name: str, levels: Tensor) -> Tensor | None:
        if name not in self.parts:
            return None
        mean, sd = self.site_moments(name)
        return mean + sd * torch.special.ndtri(levels).reshape(-1, *(1 for _ in mean.shape))


class AutoWalshHadamard(_WalshHadamardGuide):
    r"""Weight matrices W = loc + scale o sqrt(D) S1 H diag(g) H S2 with a Gaussian g.

    Each chosen site W ~ N(loc, scale^2), n x m, gets max(n, m) latent numbers g, up to rounding to
    powers of two, in place of n m, and about n + m or more numbers in the diagonals S1 and S2.  q(g) is
    Gaussian; all other sites share one more Gaussian; both are trained by the rules for Gaussian
    families, the diagonals by ``others``:

        NGVB(guide, others=pyro.optim.Adam({"lr": 0.01}))

    By default all is one mean-field Gaussian, for VON, VOGN and IVON too; with a full one among its
    parts it is for NGVB, IFVB and AIFVB.  While diagonals are trained, the guide holds the last iterate
    and not the average that NGVB would make: the past's g does not fit today's diagonals.

    **The objective** is the bound of the reparameterised model, not of yours: the KL term is that
    between q(g) and p(g) = N(0, g_scale^2 I), for W, a linear image of fewer dimensions, has no density
    (:mod:`pyro_ngvi.guides.reparam`).  The guide still goes with the model as it is written: its site W
    carries log p(W) - log p(g) in its log density, which puts p(g) in the place of p(W) in every ELBO.
    So do not compare this ELBO with those of other guides; compare predictions.

    So scale and mask of such a site have to be the same in model and guide: ``poutine.scale``
    around the model alone leaves a share of log p(W) behind, without bound. ``BatchedELBO`` refuses
    that at its first call, Pyro's losses do not. To weigh the KL term use
    ``BatchedELBO(kl_weight=...)``.

    The prior of a chosen site has to be the same at every call, which is not checked, and may not
    depend on other latent sites or have trained parameters: use
    :class:`~pyro_ngvi.nn.WalshHadamardReparam` with ``poutine.reparam`` for these.

    :class:`AutoProperWalshHadamard` bounds the evidence of your own model.

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
        proper: ``True`` makes an :class:`AutoProperWalshHadamard`.

    g starts at the matrix nearest to the starting value of W, made as long: start networks at the
    weights of a module (``init_loc_fn=model.init_to_module``) or at draws of the prior
    (``init_loc_fn=pyro.infer.autoguide.init_to_sample``).  At zero, the default start, hidden
    layers get a gradient from the noise of q alone.

    See :class:`~pyro_ngvi.guides.base.AutoFamily` for the other arguments and errors; ``init="map"`` is
    not for this guide.

    Raises:
        ValueError: for arguments that do not go together; at the first call, for a named site that
            does not exist, has no dimension or entries, is in a plate, scaled or masked, or whose prior
            is not Gaussian, is trained or depends on other latent sites; for a site of more than 2^30
            entries, since every draw of W is made; when nothing is named and there is no such matrix.

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

    def __new__(cls, *args: Any, proper: bool = False, **kwargs: Any) -> Self:
        made: Any = AutoProperWalshHadamard(*args, **kwargs) if proper else super().__new__(cls)
        return made

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
        proper: bool = False,
        **kwargs: Any,
    ) -> None:
        check_g_scale(g_scale)
        self._g_scale, self._train_diagonals = float(g_scale), train_diagonals
        # an average of g over the past would not belong to the diagonals of today
        self.holds_average = not train_diagonals
        super().__init__(model, sites, g=g, rest=rest, shared=shared, **kwargs)

    def make_family(self) -> Family:
        if self._g == self._rest == "mean_field":
            return MeanFieldNormal()
        return super().make_family()

    @property
    def replaced_priors(self) -> tuple[str, ...]:
        """The sites whose prior in the model gives way to that of g."""
        return tuple(self.parts)

    def _check_priors(self, chosen: list[str], args: Any, kwargs: Any) -> None:
        check_priors(self.prototype_trace, model_as_given(self), chosen, args, kwargs)

    def _make_transform(
        self, matrix: WalshHadamardMatrix, loc: Tensor, scale: Tensor, part: str
    ) -> Transform:
        diagonals = partial(self._diagonals, part)
        return WalshHadamardTransform(matrix, loc, scale, diagonals, self._g_scale)

    def _current(self) -> Tensors:
        if self._train_diagonals:
            for part in self.parts.values():  # attribute access registers them with Pyro
                for side in ("left", "right"):
                    getattr(self, f"{side}_{part}")
        return super()._current()

    def _stddev(self, transform: Any, family: Family, own: Tensors) -> Tensor:
        full = isinstance(family, FullRankNormal)
        return transform.stddev(family.covariance(own) if full else family.stddev(own).square())


class AutoProperWalshHadamard(_WalshHadamardGuide):
    r"""Matrices of :class:`AutoWalshHadamard` and noise: a bound of the evidence of your own model.

    White noise on every entry, W = loc + scale o (A g + sigma E) with A g the matrix of g and E
    standard normal, gives W a density (:class:`~pyro_ngvi.families.WalshHadamardNormal`).  The
    diagonals stay signs, and all is trained by natural gradients.

    The bound is often loose: the mean of q moves in about max(n, m) of n m directions, and one number
    sigma is the sd in all others, about that of the prior unless the data say much about most of them.
    A step is O(n m), as with a mean-field guide.  The prior of W may change from call to call, or with
    other latent sites: loc and scale stay those of the first.

    Args:
        sites, g, rest, shared: as for :class:`AutoWalshHadamard`, where the start is told too.

    See :class:`~pyro_ngvi.guides.base.AutoFamily` for the other arguments and errors; ``init="map"`` is
    not for this guide.

    Example:
        >>> import torch, pyro, pyro.distributions as dist
        >>> import pyro_ngvi as ngvi
        >>> def model():
        ...     return pyro.sample("W", dist.Normal(torch.zeros(8, 4), 1.0).to_event(2))
        >>> guide = ngvi.AutoProperWalshHadamard(model)
        >>> guide()["W"].shape, guide.get_posterior().event_shape, guide.g_W_loc.shape
        (torch.Size([8, 4]), torch.Size([32]), torch.Size([8]))
    """

    def _make_transform(
        self, matrix: WalshHadamardMatrix, loc: Tensor, scale: Tensor, part: str
    ) -> Transform:
        return AffineTransform(loc, scale, event_dim=loc.dim())

    def _family_of(self, name: str) -> Family:
        signs = partial(self._diagonals, self.parts[name])
        return WalshHadamardNormal(self._blocks[name], signs, super()._family_of(name))

    def _stddev(self, transform: Any, family: Family, own: Tensors) -> Tensor:
        return transform.scale * family.stddev(own).view(transform.loc.shape)
