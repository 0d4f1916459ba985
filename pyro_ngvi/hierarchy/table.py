"""The sites of all units, as buffers of a guide."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from .runs import Seen
from .unit_sites import Sites


class SiteTable(nn.Module):
    """nu (n, k), Lambda (n, k, k), C (n, k, D), a (n, D) of n units, and how often each moved (n,)."""

    linear: Tensor
    precision: Tensor
    cross: Tensor
    growth: Tensor
    visits: Tensor
    #: how many were never moved; ``None``: not counted
    _new: int | None = None
    #: how often units were left out
    removals: int = 0

    def __init__(self, like: Tensor, n: int, k: int, D: int) -> None:
        super().__init__()
        self.register_buffer("linear", like.new_zeros(n, k))
        self.register_buffer("precision", like.new_zeros(n, k, k))
        self.register_buffer("cross", like.new_zeros(n, k, D))
        self.register_buffer("growth", like.new_zeros(n, D))
        self.register_buffer("visits", like.new_zeros(n))

    def __len__(self) -> int:
        return len(self.visits)

    def any_new(self) -> bool:
        """Whether one was never moved; the device is waited for as long as that is so."""
        if self._new is None or self._new > 0:
            self._new = int((self.visits == 0.0).sum())
        return self._new > 0

    def rows(self, seen: Seen) -> Sites:
        """The sites of the units of a call; zero for numbers beyond those of the table."""
        every = Sites(self.linear, self.precision, self.cross, self.growth, self.visits)
        if seen.whole and seen.size == len(self):
            # copies: graphs through them outlive what is put here in their backward pass
            return Sites(*(x.clone() for x in vars(every).values()))
        index = seen.index.to(self.visits.device)
        known = index < len(self)
        rows = [x.index_select(0, torch.where(known, index, 0)) for x in vars(every).values()]
        return Sites(*(x * known.to(x).reshape(-1, *[1] * (x.dim() - 1)) for x in rows))

    def put(self, seen: Seen, sites: Sites) -> None:
        """Write those of the units of a call."""
        index = seen.index.to(self.visits.device)
        for name, new in vars(sites).items():
            own = getattr(self, name)
            own.copy_(new) if seen.whole else own.index_copy_(0, index, new)

    def keep(self, kept: Tensor, added: int) -> None:
        """Leave out all units but those ``kept``, and make room for more."""
        self.removals += len(kept) < len(self)
        for name, own in self.named_buffers():
            rows = own.index_select(0, kept.to(own.device))
            setattr(self, name, torch.cat([rows, own.new_zeros(added, *own.shape[1:])]))
        self._new = None

    def forget(self, seen: Seen) -> None:
        """Count the units of a call as never moved: their next steps are long again."""
        sites = self.rows(seen)
        self.put(seen, replace(sites, visits=0.0 * sites.visits))

    def _load_from_state_dict(self, state: Any, prefix: str, *args: Any, **kwargs: Any) -> None:
        saved = state.get(prefix + "visits")
        if saved is not None and len(saved) != len(self):  # units came or went
            for name, own in self.named_buffers():
                setattr(self, name, own.new_zeros(len(saved), *own.shape[1:]))
        super()._load_from_state_dict(state, prefix, *args, **kwargs)
        self._new = None
