"""Guides of sites on several processes: each has the sites of its data.

    q(eps) prop. p(eps) prod_r t_r(eps),   t_r = exp(c_r + h_r' eps - eps' P_r eps / 2),

so that of the data of rank r nothing has to be known elsewhere but c_r, h_r and P_r, sums over all of
its rows, and a sum of expected log likelihoods.  The steps are those of one process with all data:
synchronous partitioned VI (Bui, Nguyen, Swaroop & Turner 2018, arXiv:1811.11206).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..optim.host import describe
from .processes import Ranks, is_alone
from .shards import Term
from .svi import DistributedSVI


class SitesSVI(DistributedSVI):
    """Each rank has the sites of its data, and the guide sums what they say."""

    def _averaged(self, loss: Any, params: list[Tensor]) -> Any:
        return loss  # the loss has summed over ranks

    def _alike(self) -> dict[str, Tensor]:
        return self.guide.algebra.evidence._asdict()

    def _shared(self, params: dict[str, Tensor]) -> dict[str, Tensor]:
        own = {id(p) for p in self.guide.natural_params().values()}
        return {name: p for name, p in params.items() if id(p) not in own}

    def _prepare(self, args: Any, kwargs: Any) -> None:
        guide, algebra = self.guide, self.guide.algebra
        learned = [name for name, p in self._leaves.items() if p.requires_grad]
        if learned or not hasattr(algebra, "basis"):
            what = f"learns {learned[0]!r}" if learned else f"has a {type(algebra).__name__}"
            raise ValueError(
                f"distributed.wrap: this {describe(guide)} {what}. Several processes take a dense one, "
                f"and parameters that are held: requires_grad_(False)."
            )
        algebra.ranks = Ranks(not is_alone())
        algebra.make_room(guide.plan)
        if not guide.fresh:  # the evidence is that of this rank, or of other shards
            guide.refresh(*args, **kwargs)

    def _check_terms(self, own: dict[str, Term]) -> None:
        super()._check_terms(own)
        sites = {name for group in self.guide.plan.groups for name in group.observed}
        for name, term in own.items():
            if not term.latent and (name in sites) != any(p in self._plates for p in term.plates):
                where = "in no plate of" if name in sites else "without a site, and in a plate of"
                raise ValueError(
                    f"distributed.wrap: the data {name!r} are {where} the shards {self._plates}. Name "
                    f"the plates of all data that depend on latent variables, and of no others."
                )
