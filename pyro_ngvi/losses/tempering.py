r"""A weight on the KL term of an ELBO, for a warm-up.

    loss_tau = -E_q[log p(y | z)] / tau + KL(q || prior)

has the optimum of -E_q[log p(y | z)] + tau KL(q || prior).  Dividing by tau rather than multiplying the
KL keeps the entropy of q at weight 1, on which natural-gradient rules are built: their precision is
then that of the tempered posterior, prior x likelihood^(1 / tau), with no change in the rule.
"""

from __future__ import annotations

from typing import Any

from pyro.poutine.messenger import Messenger

from ..runtime.density import site_kind

__all__ = ["Tempered"]


class Tempered(Messenger):
    """Multiplies the log probability of observed sites (not factors) by ``1 / kl_weight``."""

    def __init__(self, kl_weight: float) -> None:
        super().__init__()
        self.kl_weight = kl_weight

    def _pyro_sample(self, msg: Any) -> None:
        if self.kl_weight != 1.0 and msg["is_observed"] and site_kind(msg) == "observed":
            msg["scale"] = msg["scale"] / self.kl_weight
