"""Minibatches that come as a scale instead of a plate, which sites can not tell apart.

In stochastic gradients poutine.scale(scale=N / M) around M data stands for all N of them.  A guide with
a site for each datum would give the M sites to one batch after the other, and end at the last.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._known import at_hand
from ..sites.call import Call
from ..sites.terms import own_scale

__all__ = ["ScaledData"]


class ScaledData:
    """The data of the last step that a scale above 1 makes count for more than themselves."""

    def __init__(self) -> None:
        self._before: dict[str, Tensor] = {}
        self._edition = 0

    def __reduce__(self) -> Any:  # a copy begins anew
        return ScaledData, ()

    def check(self, call: Call, edition: int) -> None:
        """Refuse other data than those of the last step, unless they were announced (``edition``).

        Raises:
            ValueError: with the name of the site.
        """
        now = _scaled(call)
        for name, value in now.items() if edition == self._edition else ():
            before = self._before.get(name)
            if before is not None and before.shape == value.shape and not _equal(before, value):
                raise ValueError(
                    f"AutoSites: the data of {name!r} are not those of the step before, and "
                    f"poutine.scale makes each of them count for more than one. A minibatch that "
                    f"stands for all data needs a plate of all of them, since every datum has a site "
                    f"of its own: pyro.plate({_plate(call, name)!r}, N, subsample=index), without the "
                    f"scale. For new data in the place of the old call guide.reset() before."
                )
        self._before, self._edition = now, edition


def _scaled(call: Call) -> dict[str, Tensor]:
    """The observed values whose scale is a number above 1, of groups with all their data here."""
    found = {}
    for group in call.plan.groups:
        for name in group.observed if call.index[group.name] is None else ():
            scale, value = torch.as_tensor(own_scale(call.sites[name])), call.sites[name]["value"]
            at_host = at_hand(scale) and at_hand(value)
            if at_host and scale.numel() == 1 and float(scale) > 1.0:
                found[name] = value
    return found


def _equal(a: Tensor, b: Tensor) -> bool:
    return a is b or torch.equal(a.nan_to_num(), b.nan_to_num())


def _plate(call: Call, name: str) -> str:
    frames = call.sites[name]["cond_indep_stack"]
    return frames[-1].name if frames else "data"
