"""The guide that gives each latent site the exponential family of its support."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pyro.distributions as dist
import torch
from torch import Tensor
from torch.distributions import biject_to, transforms

from ..families import MeanFieldDirichlet, MeanFieldGamma, MeanFieldNormal, ProductFamily
from ..families.base import Family
from .base import AutoFamily
from .initialization import check_position

__all__ = ["AutoExponentialFamily"]

NAMES = ("normal", "gamma", "beta", "dirichlet")
#: what the transform from the real line to a support begins with, by the family that fits the support
HEADS: dict[str, type[transforms.Transform]] = {
    "gamma": transforms.ExpTransform,
    "beta": transforms.SigmoidTransform,
    "dirichlet": transforms.StickBreakingTransform,
}


class AutoExponentialFamily(AutoFamily):
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

    See :class:`~pyro_ngvi.guides.base.AutoFamily` for the other arguments and the errors.

    Raises:
        ValueError: for a name that is not a family; at the first call, for a site that the model does
            not have, or a family that does not fit the support of its site.

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

    family: ProductFamily

    def __init__(
        self,
        model: Callable[..., Any],
        families: Mapping[str, str] | None = None,
        **kwargs: Any,
    ) -> None:
        check_position(self, "families", families)
        self._families = dict(families or {})
        for name, family in self._families.items():
            if family not in NAMES:
                raise ValueError(
                    f"families[{name!r}] must be one of {', '.join(map(repr, NAMES))}, got {family!r}."
                )
        super().__init__(model, **kwargs)

    def make_family(self) -> Family:
        return ProductFamily({}, [])  # its parts are known once the sites are

    def _define_family(self) -> None:
        prototype: Any = self.prototype_trace
        sites = dict(prototype.iter_stochastic_nodes())
        unknown = [name for name in self._families if name not in sites]
        if unknown:
            raise ValueError(
                f"families names {', '.join(map(repr, unknown))}, which the model does not have. Its "
                f"latent sites are {', '.join(map(repr, sites))}."
            )
        self._members = {
            name: self._member(name, site["fn"].support) for name, site in sites.items()
        }
        parts: dict[str, Family] = {}
        segments = []
        for name, member in self._members.items():
            shape = self._unconstrained_shapes[name]
            part = f"dirichlet{shape[-1] + 1}" if member == "dirichlet" else member
            if part not in parts:
                parts[part] = _family(member, shape)
            segments.append((part, shape.numel()))
        self.family.define(parts, segments)

    def _member(self, name: str, support: Any) -> str:
        fitting = _fitting(support)
        if fitting == "dirichlet" and self._unconstrained_shapes[name][-1] == 0:
            fitting = "normal"  # a simplex of one entry: nothing to infer
        chosen = self._families.get(name, fitting)
        if chosen not in (fitting, "normal"):
            choices = dict.fromkeys((fitting, "normal"))
            raise ValueError(
                f"families[{name!r}] is {chosen!r}, which does not fit the support {support} of that "
                f"site. Choose {' or '.join(map(repr, choices))}."
            )
        return chosen

    def _exact_quantiles(self, name: str, levels: Tensor) -> Tensor | None:
        if self._members[name] != "dirichlet":
            return None
        index = list(self._members).index(name)
        part: Any = self.family.parts[self.family.segments[index][0]]
        prototype: Any = self.prototype_trace
        found = part.entry_icdf(self.family.segment(self._current(), index), levels)
        return found.reshape(levels.shape + prototype.nodes[name]["value"].shape)

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
        prototype: Any = self.prototype_trace
        site = prototype.nodes[name]
        member, event_dim = self._members[name], site["fn"].event_dim
        shape, value_shape = self._unconstrained_shapes[name], site["value"].shape
        index = list(self._members).index(name)
        params = {k: v.detach() for k, v in self._current().items()}
        own = self.family.segment(params, index)
        transform: Any = biject_to(site["fn"].support)
        if member == "normal":
            base = dist.Normal(own["loc"].reshape(shape), own["log_scale"].exp().reshape(shape))
            inner = event_dim + len(shape) - len(value_shape)
            rest = [transform] if _parts(transform) else []
            return _transformed(base.to_event(inner), rest)
        concentration = own["log_concentration"].exp()
        if member == "dirichlet":
            return dist.Dirichlet(concentration.reshape(value_shape)).to_event(event_dim - 1)
        if member == "gamma":
            rate = concentration * (-own["log_mean"]).exp()
            base = dist.Gamma(concentration.reshape(shape), rate.reshape(shape))
        else:
            one, zero = concentration.unbind(-1)
            base = dist.Beta(one.reshape(shape), zero.reshape(shape))
        return _transformed(base, _moves(_parts(transform)[1:])).to_event(event_dim)


def _parts(transform: Any) -> list[Any]:
    """The steps of a transform from the real line, element by element where it is."""
    while isinstance(transform, transforms.IndependentTransform):
        transform = transform.base_transform
    return (
        list(transform.parts) if isinstance(transform, transforms.ComposeTransform) else [transform]
    )


def _fitting(support: Any) -> str:
    """The family of a support."""
    steps = _parts(biject_to(support))
    for name, head in HEADS.items():
        # x < a begins like x > a and goes on by -1
        if steps and isinstance(steps[0], head) and all(map(_increasing, steps[1:])):
            return name
    return "normal"


def _increasing(step: Any) -> bool:
    if not isinstance(step, transforms.AffineTransform):
        return False
    return isinstance(step.scale, Tensor) or step.scale > 0


def _family(member: str, shape: torch.Size) -> Family:
    if member == "normal":
        return MeanFieldNormal()
    if member == "gamma":
        return MeanFieldGamma()
    return MeanFieldDirichlet(2 if member == "beta" else shape[-1] + 1)


def _moves(steps: list[Any]) -> list[Any]:
    """Affine steps without those that move nothing, such as the one that Pyro's ``positive`` has."""
    still = [
        s for s in steps if isinstance(s.loc, int | float) and isinstance(s.scale, int | float)
    ]
    still = [s for s in still if s.loc == 0 and s.scale == 1]
    return [s for s in steps if s not in still]


def _transformed(base: Any, steps: list[Any]) -> Any:
    return dist.TransformedDistribution(base, steps) if steps else base
