"""The guide that gives each latent site the exponential family of its support."""

from __future__ import annotations

from typing import Any

import pyro.distributions as dist
from torch import Tensor
from torch.distributions import biject_to, transforms

from ..families import MeanFieldDirichlet, MeanFieldGamma, MeanFieldNormal, ProductFamily
from ..families.base import Family, Tensors
from .member import best_member
from .normal import LAPLACE, AutoProduct

#: what the transform from the real line to a support begins with, by the family that fits the support
HEADS: dict[str, type[transforms.Transform]] = {
    "gamma": transforms.ExpTransform,
    "beta": transforms.SigmoidTransform,
    "dirichlet": transforms.StickBreakingTransform,
}


class AutoExponentialFamily(AutoProduct):
    """Each latent site, and each element of its batch, independently in a family for its support.

    ============================  ==========================================================
    support                       family
    ============================  ==========================================================
    x > 0, x > a                  Gamma, of x - a
    0 < x < 1, a < x < b          Beta, of (x - a) / (b - a)
    simplex                       Dirichlet
    real numbers, all the rest    Normal, for each coordinate of Pyro's unconstrained vector
    ============================  ==========================================================

    On a conjugate model with one latent site the guide contains the posterior, and up to 200 latent
    variables begins there.  Where sites are correlated a posteriori its sds are too small; compare the
    ELBO with :class:`AutoFullRankNormal`.

    Not where much of the posterior lies within rounding of 1, or of 0 in the last entry of a simplex:
    Beta(20, 0.1) has a quarter of its mass within 1e-7 of 1.  Write the model of the rare outcome, or
    use float64.  With minibatches take 64 particles: their noise reaches the shapes.

    Args:
        kwargs: those of :class:`~pyro_ngvi.guides.AutoFamily`, whose errors it raises.

    Example:
        >>> import pyro, torch, pyro.distributions as dist, pyro_ngvi as ngvi
        >>> def model(y):
        ...     rate = pyro.sample("rate", dist.Gamma(2.0, 1.0))
        ...     pyro.sample("y", dist.Poisson(rate).expand([3]).to_event(1), obs=y)
        >>> y = torch.tensor([3.0, 5.0, 4.0])
        >>> fit = ngvi.fit(model, y, guide="AutoExponentialFamily", seed=0, progress=False)
        >>> q = fit.guide.site_distribution("rate")
        >>> f"Gamma({q.concentration:.2f}, {q.rate:.2f})"
        'Gamma(14.00, 4.00)'
    """

    starts = LAPLACE
    search = staticmethod(best_member)

    def make_family(self) -> Family:
        return ProductFamily({}, [])  # its parts are known once the sites are

    def _define_family(self, args: Any, kwargs: Any) -> None:
        #: name of the family of each site
        self._members: dict[str, str] = {}
        for name, site in self.prototype_trace.iter_stochastic_nodes():
            member = _fitting(site["fn"].support)
            if member == "dirichlet" and self._unconstrained_shapes[name][-1] == 0:
                member = "normal"  # a simplex of one entry: nothing to infer
            self._members[name] = member
        super()._define_family(args, kwargs)

    def _part(self, name: str) -> tuple[str, Family]:
        member = self._members[name]
        if member == "dirichlet":
            size = self._unconstrained_shapes[name][-1] + 1
            return f"dirichlet{size}", MeanFieldDirichlet(size)
        if member == "beta":
            return member, MeanFieldDirichlet(2)
        return member, MeanFieldGamma() if member == "gamma" else MeanFieldNormal()

    def _own(self, name: str) -> tuple[Any, Tensors]:
        """The part of a site in the family, and its parameters."""
        params, index = self._current(), list(self._members).index(name)
        return self.family.parts[self.family.segments[index][0]], self.family.segment(params, index)

    def _exact_quantiles(self, name: str, levels: Tensor) -> Tensor | None:
        if self._members[name] != "dirichlet":
            return None
        part, own = self._own(name)
        shape = self.prototype_trace.nodes[name]["value"].shape
        return part.entry_icdf(own, levels).reshape(levels.shape + shape)

    def site_distribution(self, name: str) -> Any:
        """The distribution of one latent site, as a Pyro distribution over its own support.

        A Gamma, Beta, Dirichlet or Normal where the support is the standard one, else the transform of
        one, in the shapes of the site in the model; detached from the parameters of the guide.
        """
        self._require_setup()
        site, member = self.prototype_trace.nodes[name], self._members[name]
        event_dim, value_shape = site["fn"].event_dim, site["value"].shape
        shape = self._unconstrained_shapes[name]
        own = {k: v.detach() for k, v in self._own(name)[1].items()}
        transform: Any = biject_to(site["fn"].support)
        if member == "normal":
            base = dist.Normal(own["loc"].reshape(shape), own["log_scale"].exp().reshape(shape))
            base = base.to_event(event_dim + len(shape) - len(value_shape))
            return _transformed(base, [transform] if _steps(transform) else [])
        concentration = own["log_concentration"].exp()
        if member == "dirichlet":
            return dist.Dirichlet(concentration.reshape(value_shape)).to_event(event_dim - 1)
        if member == "gamma":
            rate = concentration * (-own["log_mean"]).exp()
            base = dist.Gamma(concentration.reshape(shape), rate.reshape(shape))
        else:
            one, zero = concentration.unbind(-1)
            base = dist.Beta(one.reshape(shape), zero.reshape(shape))
        moves = [step for step in _steps(transform)[1:] if not _stays(step)]
        return _transformed(base, moves).to_event(event_dim)


def _steps(transform: Any) -> list[Any]:
    """The steps of a transform from the real line, element by element where it is."""
    while isinstance(transform, transforms.IndependentTransform):
        transform = transform.base_transform
    composed = isinstance(transform, transforms.ComposeTransform)
    return list(transform.parts) if composed else [transform]


def _fitting(support: Any) -> str:
    """The family of a support."""
    head, *moves = _steps(biject_to(support)) or [None]
    for step in moves:  # x < a begins like x > a and goes on by -1
        affine = isinstance(step, transforms.AffineTransform)
        if not affine or not (isinstance(step.scale, Tensor) or step.scale > 0):
            return "normal"
    return next((name for name, kind in HEADS.items() if isinstance(head, kind)), "normal")


def _stays(step: Any) -> bool:
    """Whether an affine step moves nothing, such as the one that Pyro's ``positive`` has."""
    numbers = isinstance(step.loc, int | float) and isinstance(step.scale, int | float)
    return numbers and (step.loc, step.scale) == (0, 1)


def _transformed(base: Any, steps: list[Any]) -> Any:
    return dist.TransformedDistribution(base, steps) if steps else base
