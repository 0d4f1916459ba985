"""The factor of a guide that is the distribution of one site, where the guide has such a factor."""

from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from pyro.infer.autoguide import AutoDiagonalNormal, AutoGuide, AutoGuideList, AutoNormal
from torch import Tensor
from torch.distributions import biject_to

from ..families import MeanFieldNormal
from ..families.base import LOG_2PI, Family, Tensors
from ..guides.base import AutoFamily
from ..guides.marginals import factor, place


class NoFactor(ValueError):
    """The distribution of a site is no factor of the guide's, or none that is known here."""


@dataclass(frozen=True)
class SitePosterior:
    """q of one site, a real vector (K,): a member of a family.

    ``sticking``: its log density has no gradient in the parameters, as in the guide it comes from.
    """

    family: Family
    params: Tensors
    sticking: bool

    def log_prob(self, g: Tensor) -> Tensor:
        """log q(g) in nats, (...,) for g (..., K)."""
        params = self.params
        if self.sticking:
            params = {name: tensor.detach() for name, tensor in params.items()}
        return self.family.log_prob(params, g)

    def kl(self, loc: Tensor, scale: Tensor) -> Tensor:
        """KL(q || p) in nats for independent normals p of that ``loc`` and ``scale`` (..., K)."""
        mean, sd = self.family.mean(self.params), self.family.stddev(self.params)
        square = (sd.square() + (mean - loc).square()) / scale.square()
        cross_entropy = (0.5 * (square + LOG_2PI) + scale.log()).sum(-1)
        return cross_entropy - self.family.entropy(self.params)


class SitePosteriors:
    """q of each site of a guide, as it is at one step; ``caller`` is what needs it, for errors."""

    def __init__(self, guide: AutoGuide, caller: str) -> None:
        self.guide, self.caller = guide, caller
        self._found: dict[str, SitePosterior] = {}
        self._joint: dict[int, Any] = {}  # by guide, for several sites

    def __getitem__(self, name: str) -> SitePosterior:
        if name not in self._found:
            self._found[name] = self._find(name)
        return self._found[name]

    def _find(self, name: str) -> SitePosterior:
        known: list[str] = []
        for guide in self.guide.modules():
            trace: Any = getattr(guide, "prototype_trace", None)
            if (
                trace is None
                or not isinstance(guide, AutoGuide)
                or isinstance(guide, AutoGuideList)
            ):
                continue
            sites = dict(trace.iter_stochastic_nodes())
            if name in sites:
                return self._of(guide, name, sites)
            known += sites
        kind = type(self.guide).__name__
        if not known:
            raise RuntimeError(
                f"The guide of {self.caller}, {kind}, was never called, though a guide gives the "
                f"value of {name!r}. Hand the same guide to SVI."
            )
        raise ValueError(
            f"The guide of {self.caller}, {kind}, has no site {name!r}; it has "
            f"{', '.join(map(repr, known))}. Hand over the guide of this model."
        )

    def _of(self, guide: Any, name: str, sites: dict[str, Any]) -> SitePosterior:
        site, value = sites[name], sites[name]["value"]
        if biject_to(site["fn"].support)(value) is not value or site["cond_indep_stack"]:
            raise NoFactor(
                f"The site {name!r} is constrained or in a plate; {self.caller} takes a real "
                f"vector outside of plates."
            )
        if isinstance(guide, AutoNormal):
            return _normal(*(attrgetter(name)(part) for part in (guide.locs, guide.scales)))
        if not isinstance(guide, AutoFamily | AutoDiagonalNormal):
            raise NoFactor(
                f"{self.caller} cannot draw {name!r} alone from {type(guide).__name__}. Use "
                f"pyro_ngvi.AutoMeanFieldNormal(model), or Pyro's AutoNormal or AutoDiagonalNormal."
            )
        own = place(guide._unconstrained_shapes, name)
        if isinstance(guide, AutoDiagonalNormal):
            scale: Any = guide.scale
            return _normal(guide.loc[own], scale[own])
        if id(guide) not in self._joint:
            self._joint[id(guide)] = guide.sampling_posterior()
        q = self._joint[id(guide)]
        found = factor(q.family, q.params, own, alone=len(sites) == 1)
        if found is None:
            raise NoFactor(
                f"{type(guide).__name__} correlates {name!r} with other sites, which draws of it "
                f"alone would lose. Use pyro_ngvi.AutoMeanFieldNormal(model), or an AutoGuideList "
                f"in which a guide has no other site."
            )
        return SitePosterior(*found, guide.sticking_the_landing)


def _normal(loc: Tensor, scale: Tensor) -> SitePosterior:
    return SitePosterior(MeanFieldNormal(), {"loc": loc, "log_scale": scale.log()}, False)
