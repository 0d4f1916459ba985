"""SVI on several processes: each has its data, and all take the same step, as :func:`.wrap` says."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from pyro import poutine
from pyro.infer import SVI
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_flatten_with_path, tree_unflatten

from ..linalg.host import own_random_state
from ..optim.host import NaturalGradientOptim, describe, find_blocks
from ..optim.state import OthersState, is_power_of_two
from ..runtime.run import Minibatches, run_both
from ..runtime.store import BASELINES, traced_params
from .processes import (
    Ranks,
    extremes,
    from_all,
    is_alone,
    is_anywhere,
    rank,
    share_random_state,
    take_from_first,
    world_size,
)
from .shards import Term, Whole, check_terms, terms_of
from .statistics import average

#: keeps the random numbers of ranks apart
APART = 0x9E3779B97F4A7C15


class DistributedSVI(SVI):
    """What :func:`wrap` returns, with an example: an ``SVI`` whose losses are those of all ranks.

    ``step``, ``evaluate_loss`` and ``pyro_ngvi.load`` are calls of all ranks together.

    Attributes:
        alone: the ``SVI`` of this rank.
        program: the model for what evaluates the log density of all data on all ranks together.
        own_noise: whether each rank draws for itself.
    """

    #: how names of a guide's buffers begin that each rank has of its own
    of_rank: tuple[str, ...] = ()

    def __init__(
        self, svi: SVI, plates: Sequence[str], scaled_to: str | None, own_noise: bool, every: int
    ) -> None:
        vars(self).update(vars(svi))
        self.alone: Any = svi
        self._plates, self._scaled_to, self._check_every = tuple(plates), scaled_to, every
        self.own_noise = own_noise
        self._is_open = False
        # plates of all data have the scale of all data
        factor = 1 if scaled_to == "whole" else world_size()
        self.program = Whole(svi.model, self._plates, factor)
        self._leaves: dict[str, Tensor] = {}
        self._steps = 0
        self.loss, self.loss_and_grads = self._loss, self.over_ranks(svi.loss_and_grads)

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """One step, as ``SVI.step``: the loss of all ranks before it, a number in nats."""
        loss = super().step(*args, **kwargs)
        self._steps += 1
        early = self._steps < self._check_every and is_power_of_two(self._steps)
        if early or self._steps % self._check_every == 0:
            self.check()
        return loss

    def check(self) -> None:
        """Compare parameters, the optimizer's state and the random state of all ranks; not buffers.

        Raises:
            RuntimeError: on all ranks, where they are not the same bits; it names the first tensor.
        """
        if is_alone():
            return
        held = self._alike()
        held["the random state of torch"] = torch.get_rng_state()
        held = dict(sorted(held.items()))  # Pyro's optimizers meet parameters in any order
        where = next(iter(held.values())).device
        sums = torch.stack([_checksum(v).to(where) for v in held.values()])
        least, most = extremes(sums, "comparing parameters")
        if not torch.equal(least, most):
            first = [*held][int((least != most).nonzero()[0])]
            raise RuntimeError(
                f"distributed: ranks have come apart after {self._steps} steps: {first} differs. Draw "
                f"numbers that only one rank needs from a torch.Generator of their own."
            )

    def _alike(self) -> dict[str, Tensor]:
        """Parameters and the optimizer's state, the same on all ranks."""
        held: dict[str, Tensor] = dict(self._leaves)
        ours = isinstance(self.optim, NaturalGradientOptim)
        state = self.optim.get_state() if ours else OthersState(self.guide).save(self.optim)
        for path, value in tree_flatten_with_path(state)[0]:
            if isinstance(value, Tensor):
                held["state" + "".join(map(str, path))] = value
        return held

    def _loss(self, model: Any, guide: Any, *args: Any, **kwargs: Any) -> Any:
        with self._as_one_of_all(args, kwargs):
            loss = self.alone.loss(self.program, guide, *args, **kwargs)
        return self._averaged(loss, [])

    def over_ranks(self, loss_and_grads: Callable[..., Any]) -> Callable[..., Any]:
        """That of a loss of this rank, made that of all ranks."""
        return partial(self._loss_and_grads, loss_and_grads)

    def agreed(self, reason: str | None) -> str | None:
        """The first reason to stop that a rank has: all ranks ask this at each step, or none."""
        found = from_all(reason) if is_anywhere(reason is not None) else []
        return next((r for r in found if r is not None), None)

    def _loss_and_grads(
        self, own: Callable[..., Any], model: Any, guide: Any, *args: Any, **kwargs: Any
    ) -> Any:
        with self._as_one_of_all(args, kwargs), poutine.trace(param_only=True) as seen:
            loss = own(self.program, guide, *args, **kwargs)
        found = dict(zip(seen.trace.nodes, traced_params(seen), strict=True))
        # running means of Pyro's baselines are a matter of each rank
        found = self._shared({k: p for k, p in found.items() if not k.startswith(BASELINES)})
        new = sorted(found.keys() - self._leaves.keys())
        if new and not is_alone():
            raise RuntimeError(
                f"distributed: the parameter {new[0]!r} was made after the first look at model and "
                f"guide, so the ranks may have others. Make it before the first step."
            )
        self._leaves |= found  # what was loaded from a file may stand in another tensor
        return self._averaged(loss, [p for p in self._leaves.values() if p.requires_grad])

    def _averaged(self, loss: Any, params: list[Tensor]) -> Any:
        if is_alone():
            return loss
        losses, spec = tree_flatten(loss)
        blocks = [block for _, block in find_blocks(self.guide)] if params else []
        like = next(iter(self._leaves.values()), torch.zeros(()))
        how: Any = {"own_draws": self.own_noise, "step": self._steps, "like": like}
        return tree_unflatten(average(losses, params, blocks, **how), spec)

    @contextmanager
    def _as_one_of_all(self, args: Any, kwargs: Any) -> Iterator[None]:
        """Around a loss of this rank: the random numbers meant for it.

        The random state is that of all ranks before and after, so that the optimizer draws alike.
        """
        if not self._is_open:
            with poutine.block():
                self._open(args, kwargs)
            self._is_open = True
        seed = int(torch.randint(2**62, (), device="cpu"))
        if self.own_noise:
            seed = (seed + rank() * APART) % 2**62
        with own_random_state(seed):
            yield

    def _open(self, args: Any, kwargs: Any) -> None:
        """Before the first step: one random state and one set of parameters, and what the data are."""
        share_random_state()
        with poutine.trace(param_only=True) as seen:
            self._look(args, kwargs)
        found = zip(seen.trace.nodes, traced_params(seen), strict=True)
        self._leaves = self._shared(dict(sorted(found, key=lambda item: item[0])))
        self._prepare(args, kwargs)
        buffers = {
            f"{what}.{name}": x
            for what, root in (("guide", self.guide), ("model", self.model))
            for name, x in (root.named_buffers() if isinstance(root, nn.Module) else ())
            if not name.startswith(self.of_rank)
        }
        tensors = self._leaves | buffers
        _check_alike(from_all({k: (tuple(v.shape), str(v.dtype)) for k, v in tensors.items()}))
        take_from_first([v.detach() for v in tensors.values()])
        self._check_terms(terms_of(self._look(args, kwargs), self._plates))

    def _check_terms(self, own: dict[str, Term]) -> None:
        """Refuse models of which it is not known what to sum."""
        check_terms(from_all(own), self._plates, self._scaled_to)

    def _shared(self, params: dict[str, Tensor]) -> dict[str, Tensor]:
        """Those of the parameters of model and guide that are the same on all ranks."""
        return params

    def _prepare(self, args: Any, kwargs: Any) -> None:
        """Make the guide ready, once it was called."""

    def _look(self, args: Any, kwargs: Any) -> Any:
        """The model's sites at a draw of the guide, the same on all ranks once parameters are."""
        with own_random_state(), torch.no_grad():
            return run_both(self.model, self.guide, args, kwargs, Minibatches())[1].sites


class SitesSVI(DistributedSVI):
    """With a guide of sites: each rank has those of its data, and the guide sums what they say.

    Of the data of a rank nothing has to be known elsewhere but c, h and P of
    :mod:`pyro_ngvi.sites.dense`, sums over all of its rows, and a sum of expected log likelihoods.
    """

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


class UnitsSVI(DistributedSVI):
    """With a guide of units: each rank has those of its data, their latent variables and their sites.

    They take their steps where they are, and only what they say of the globals is summed.
    """

    of_rank = ("sites.",)

    @contextmanager
    def _as_one_of_all(self, args: Any, kwargs: Any) -> Iterator[None]:
        guide = self.guide
        with super()._as_one_of_all(args, kwargs):
            guide.share, guide.apart = float(self.program.factor), rank() * APART
            try:
                yield
            finally:
                guide.share, guide.apart = 1.0, None

    def _check_terms(self, own: dict[str, Term]) -> None:
        units = self.guide.units
        if units.plate not in self._plates:
            where = "are a block, which" if units.is_block else f"stand in {units.plate!r}, which"
            raise ValueError(
                f"distributed.wrap: the units {where} is no plate of the shards {self._plates}. Name "
                f"it, and the plates of their data, or take one process."
            )
        of_rank = units.names
        super()._check_terms(
            {n: replace(t, numbers=()) if n in of_rank else t for n, t in own.items()}
        )


def _check_alike(layouts: list[dict[str, Any]]) -> None:
    for r, layout in enumerate(layouts):
        for name in sorted(layout.keys() | layouts[0].keys()):
            here, there = layout.get(name), layouts[0].get(name)
            if here != there:
                raise ValueError(
                    f"distributed: {name!r} is {there} on rank 0 and {here} on rank {r}. Latent "
                    f"variables and parameters must not depend on the shard."
                )


def _checksum(x: Tensor) -> Tensor:
    """A number of all bits of a tensor and their places, int64."""
    kinds = {4: torch.int32, 8: torch.int64}
    bits = x.detach().contiguous().reshape(-1).view(kinds.get(x.element_size(), torch.uint8))
    places = torch.arange(1, len(bits) + 1, device=x.device)
    return (bits.long() * places).sum()
