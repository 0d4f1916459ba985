"""The guide that gives each latent site the exponential family of its support."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pyro.distributions as dist
from torch import Tensor
from torch.distributions import biject_to, transforms

from ..families import MeanFieldDirichlet, MeanFieldGamma, MeanFieldNormal, ProductFamily
from ..families.base import Family, Tensors
from .normal import AutoProduct

FAMILIES: dict[str, Callable[[], Family]] = {
    "normal": MeanFieldNormal,
    "gamma": MeanFieldGamma,
    "beta": partial(MeanFieldDirichlet, 2),
}
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

    On a conjugate model with one latent site the guide contains the posterior, and a natural-gradient
    step of length 1 with the exact gradient is Bayes' rule.  With several sites it is the best
    independent approximation, which is what coordinate ascent finds where that has closed forms: where
    sites are correlated a posteriori its sds are too small; compare the ELBO with
    :class:`AutoFullRankNormal`.

    Not where much of the posterior lies within rounding of 1, or of 0 in the last entry of a simplex:
    Beta(20, 0.1) has a quarter of its mass within 1e-7 of 1, which float32 cannot tell from 1, and the
    model is flat there.  Write the model of the rare outcome, or use float64; :func:`~pyro_ngvi.khat`
    and :func:`~pyro_ngvi.to_arviz` warn.

    With minibatches take 64 particles rather than 8: draws of these families are not paired as those of
    a Gaussian are, so that the noise of a minibatch reaches the shapes.  Batches of 50 of 1,000 counts
    left the shape of a Gamma 3 to 4 % too large after 2,400 steps of 64, 5 to 14 % of 8.

    Args:
        families: name of the family for sites that shall not have the one above: "normal", "gamma",
            "beta" or "dirichlet".  "normal" fits every site.

    See :class:`~pyro_ngvi.guides.AutoFamily` for the other arguments and the errors.

    Raises:
        ValueError: at the first call, for a site that the model does not have, or a family that does
            not fit the support of its site.

    Example:
        >>> import pyro, torch, pyro.distributions as dist
        >>> from pyro.infer import SVI
        >>> import pyro_ngvi as ngvi
        >>> def model(y):
        ...     rate = pyro.sample("rate", dist.Gamma(2.0, 1.0))
        ...     with pyro.plate("data", len(y)):
        ...         pyro.sample("y", dist.Poisson(rate), obs=y)
        >>> guide = ngvi.AutoExponentialFamily(model)
        >>> svi = SVI(model, guide, ngvi.NGVB(guide), ngvi.BatchedELBO(8))
        >>> for _ in range(300):
        ...     loss = svi.step(torch.tensor([3.0, 5.0, 4.0]))
        >>> q = guide.site_distribution("rate")
        >>> f"Gamma({q.concentration:.2f}, {q.rate:.2f})"
        'Gamma(14.00, 4.00)'
    """

    def __init__(
        self,
        model: Callable[..., Any],
        families: Mapping[str, str] | None = None,
        **kwargs: Any,
    ) -> None:
        self._families = dict(families or {})
        super().__init__(model, **kwargs)

    def make_family(self) -> Family:
        return ProductFamily({}, [])  # its parts are known once the sites are

    def _define_family(self, args: Any, kwargs: Any) -> None:
        sites = dict(self.prototype_trace.iter_stochastic_nodes())
        #: name of the family of each site
        self._members: dict[str, str] = {}
        for name, site in sites.items():
            fitting = _fitting(site["fn"].support)
            if fitting == "dirichlet" and self._unconstrained_shapes[name][-1] == 0:
                fitting = "normal"  # a simplex of one entry: nothing to infer
            self._members[name] = self._families.get(name, fitting)
            if self._members[name] not in (fitting, "normal"):
                choices = " or ".join(map(repr, dict.fromkeys((fitting, "normal"))))
                raise ValueError(
                    f"families[{name!r}] is {self._members[name]!r}, which does not fit the support "
                    f"{site['fn'].support} of that site. Choose {choices}."
                )
        if unknown := [name for name in self._families if name not in sites]:
            raise ValueError(
                f"families names {', '.join(map(repr, unknown))}, which the model does not have. Its "
                f"latent sites are {', '.join(map(repr, sites))}."
            )
        super()._define_family(args, kwargs)

    def _part(self, name: str) -> tuple[str, Family]:
        member = self._members[name]
        if member == "dirichlet":
            size = self._unconstrained_shapes[name][-1] + 1
            return f"dirichlet{size}", MeanFieldDirichlet(size)
        return member, FAMILIES[member]()

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

        Its batch and event shape are those of the site in the model.  A Gamma, Beta, Dirichlet or
        Normal where the support is the standard one; else (``x > a``, an interval, "normal" on a
        constrained site) the transform of one.  Detached from the parameters of the guide.

        Raises:
            ValueError: when the guide has no such site.
        """
        self._require_setup()
        if name not in self._members:
            raise ValueError(
                f"The guide has no latent site {name!r}; it has "
                f"{', '.join(map(repr, self._members))}."
            )
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
    # x < a begins like x > a and goes on by -1
    increasing = all(
        isinstance(step, transforms.AffineTransform)
        and (isinstance(step.scale, Tensor) or step.scale > 0)
        for step in moves
    )
    fitting = [name for name, kind in HEADS.items() if increasing and isinstance(head, kind)]
    return next(iter(fitting), "normal")


def _stays(step: Any) -> bool:
    """Whether an affine step moves nothing, such as the one that Pyro's ``positive`` has."""
    still = isinstance(step.loc, int | float) and isinstance(step.scale, int | float)
    return still and step.loc == 0 and step.scale == 1


def _transformed(base: Any, steps: list[Any]) -> Any:
    return dist.TransformedDistribution(base, steps) if steps else base
