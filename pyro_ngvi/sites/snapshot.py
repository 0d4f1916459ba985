"""q, its marginals and its sites at one call with all data: what diagnostics of sites start from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..linalg.host import host_bool
from .algebra import Algebra, Marginals, View, apart
from .bound_model import BoundModel

__all__ = ["Snapshot", "take_snapshot"]


@dataclass(frozen=True)
class Snapshot:
    """``sites`` are nu (N, k) and Lambda (N, k, k) by group, copies without a graph.

    ``basis`` (D, R) are the directions of a dense algebra that does not keep all.
    """

    call: BoundModel
    view: View
    posterior: Any
    marginals: dict[str, Marginals]
    sites: dict[str, tuple[Tensor, Tensor]]
    basis: Tensor | None


@torch.no_grad()
def take_snapshot(
    algebra: Algebra, sites: Mapping[str, tuple[Tensor, Tensor]], call: BoundModel
) -> Snapshot:
    """q as its sites and the model's parameters make it now, for a call with all data.

    Raises:
        RuntimeError: where prior and sites do not make a proper Gaussian.
    """
    algebra = apart(algebra)  # a look at other data leaves q alone
    view = algebra.view(call)
    copies = {name: (a.clone(), b.clone()) for name, (a, b) in sites.items()}
    # the view may have changed the coordinates of the evidence, so it is made anew
    q = algebra.posterior(view, algebra.recollect(view, copies))
    if host_bool(q.proper) is False:
        raise RuntimeError(
            "AutoSites: with the parameters of the model as they are now, prior and sites do not make "
            "a proper Gaussian. Take more steps, or guide.reset()."
        )
    return Snapshot(
        call, view, q, algebra.marginals(view, q), copies, getattr(algebra, "basis", None)
    )
