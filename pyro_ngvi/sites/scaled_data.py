"""Minibatches that come as a scale instead of a plate, which sites can not tell apart.

In stochastic gradients poutine.scale(scale=N / M) around M data stands for all N of them.  A guide with
a site for each datum would give the M sites to one batch after the other, and end at the last.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..linalg.host_bool import at_hand
from .bound_model import BoundModel
from .log_likelihood import own_scale
from .probe_points import same

__all__ = ["ScaledData"]


class ScaledData:
    """The data of the last step, if a scale above 1 makes them count for more than themselves."""

    def __init__(self) -> None:
        self._before: list[Tensor] | None = None
        self._edition = 0

    def __reduce__(self) -> Any:  # a copy begins anew
        return ScaledData, ()

    def check(self, call: BoundModel, edition: int) -> None:
        """Refuse other data than those of the last step, unless they were announced (``edition``).

        Raises:
            ValueError: with the name of the site.
        """
        name = _scaled(call)
        now = None if name is None else _data(call, name)
        before = self._before if edition == self._edition else None
        if name and now and before and not all(map(_same, before, now)):
            raise ValueError(
                f"AutoSites: the data of {name!r} are not those of the step before, under a "
                f"poutine.scale. "
                f"For a minibatch write pyro.plate({_plate(call, name)!r}, N, subsample=index), "
                f"without "
                f"the scale. For new data in the place of the old call guide.reset() before."
            )
        # copies, since a loader may write each batch into the same tensors
        self._before = None if now is None else [x.detach().clone() for x in now]
        self._edition = edition


def _scaled(call: BoundModel) -> str | None:
    """An observed site whose scale is a number above 1, of a group with all its data here."""
    for group in call.plan.groups:
        for name in group.observed if call.index[group.name] is None else ():
            scale = torch.as_tensor(own_scale(call.sites[name]))
            if at_hand(scale) and scale.numel() == 1 and float(scale) > 1.0:
                return name
    return None


def _data(call: BoundModel, name: str) -> list[Tensor]:
    """The tensors among the arguments; where there are none, what is observed.

    What is observed may be made of parameters and draws, and be another tensor with the same data.
    """
    given = [*call.runner.args, *call.runner.kwargs.values()]
    tensors = [x for x in given if isinstance(x, Tensor) and x.numel() > 1]
    found = tensors or [call.sites[name]["value"]]
    return [x for x in found if at_hand(x) and not x.requires_grad]


def _same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors agree; data of another number were announced, or are refused elsewhere."""
    return a.shape != b.shape or same(a, b)


def _plate(call: BoundModel, name: str) -> str:
    frames = call.sites[name]["cond_indep_stack"]
    return frames[-1].name if frames else "data"
