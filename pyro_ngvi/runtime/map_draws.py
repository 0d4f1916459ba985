"""A Pyro program at many draws: batched by ``torch.func.vmap``, in pieces that bound the memory.

A program that cannot run under ``vmap`` (data-dependent control flow, a sampler without a batching
rule) runs once for each draw instead.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from pyro.poutine.util import site_is_subsample
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..linalg.host import own_random_state
from .vmap import Minibatches, Sites, run_in_loop, run_particles

__all__ = ["Parts", "Program", "map_draws", "without_plates"]

Program = Callable[..., Any]
Parts = dict[str, dict[str, Tensor]]

MOST_NUMBERS = 2**20  # in the largest tensor of one piece: 8 MB in float64


def map_draws(
    program: Program,
    reduce: Callable[[Sites], Parts],
    values: Mapping[str, Tensor],
    num_samples: int,
    batch_size: int | None = None,
) -> Parts:
    """``reduce`` of the sites of ``program`` at each draw, stacked along a new first dimension.

    Args:
        program: a model or a guide, its arguments bound.
        reduce: maps the sites of one draw, without those of plates, to tensors in two levels of names.
        values: constrained values by site, (S, ...); other sites are drawn.
        num_samples: S.
        batch_size: draws that run at once; ``None`` for as many as leave every tensor of the run
            below a million numbers.

    Raises:
        ValueError: when the sites of the program differ between draws.

    Example:
        >>> import pyro, pyro.distributions as dist
        >>> def model():
        ...     pyro.deterministic("y", torch.ones(2) * pyro.sample("w", dist.Normal(0.0, 1.0)))
        >>> def reduce(sites):
        ...     return {"model": {"y": sites["y"]["value"]}}
        >>> w = torch.tensor([1.0, 2.0, 3.0])
        >>> map_draws(model, reduce, {"w": w}, 3)["model"]["y"]
        tensor([[1., 1.],
                [2., 2.],
                [3., 3.]])
    """
    minibatches = Minibatches()
    names: set[str] = set()

    def chosen(sites: Sites) -> Parts:
        sites = without_plates(sites)
        if names and (changed := names ^ sites.keys()):
            raise ValueError(
                f"The sites {sorted(changed)} are there in some draws and not in others, so they "
                "cannot be stored as arrays. Write the model with the same sites in every run."
            )
        names.update(sites)
        return reduce(sites)

    def piece(run: Callable[..., Parts], start: int, stop: int) -> Parts:
        at = {name: x[start:stop] for name, x in values.items()}
        return run(program, chosen, at, stop - start, (), {}, minibatches=minibatches)

    together = partial(piece, partial(run_particles, sampling=True))
    with torch.no_grad(), warnings.catch_warnings():
        # torch.binomial under vmap resizes its own output, correctly, and warns about it.
        warnings.filterwarnings("ignore", "An output with one or more elements was resized")
        try:
            if batch_size is None:
                with own_random_state(), _Largest() as largest:
                    together(0, 1)
                batch_size = max(1, MOST_NUMBERS // largest.numel)
            return _joined(together, num_samples, batch_size)
        except RuntimeError:
            # A program that is wrong rather than unbatchable shows its own error in the loop.
            return _joined(partial(piece, run_in_loop), num_samples, 1)


def without_plates(sites: Sites) -> Sites:
    """The sites but for the indices of plates."""
    return {name: site for name, site in sites.items() if not site_is_subsample(site)}


class _Largest(TorchFunctionMode):
    """The size of the largest tensor that differs between draws, for one draw, under ``vmap``."""

    numel = 1

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.numel() > self.numel:
            try:
                result[(0,) * result.dim()].item()
            except RuntimeError:  # one value for each draw
                self.numel = result.numel()
        return result


def _joined(piece: Callable[[int, int], Parts], num_samples: int, size: int) -> Parts:
    """``piece(start, stop)`` of that size, one after the other, written into place.

    So none of them is held twice.
    """
    if size >= num_samples:
        return piece(0, num_samples)
    whole: Parts = {}
    for start in range(0, num_samples, size):
        stop = min(start + size, num_samples)
        for group, tensors in piece(start, stop).items():
            parts = whole.setdefault(group, {})
            for name, x in tensors.items():
                if start == 0:
                    parts[name] = x.new_empty(num_samples, *x.shape[1:])
                parts[name][start:stop] = x
    return whole
