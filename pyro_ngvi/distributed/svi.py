"""SVI on several processes: each has its data, and all take the same step.

Every rank runs the same script.  What its loss leaves (gradients, curvature, the loss itself) is
averaged over ranks *before* the optimizer sees it, so that gain, trust region and momentum are those of
one process with all data, and parameters never have to be sent again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from pyro import poutine
from pyro.infer import (
    SVI,
    EnergyDistance,
    RenyiELBO,
    ReweightedWakeSleep,
    Trace_MMD,
    TraceTailAdaptive_ELBO,
)
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_flatten, tree_flatten_with_path, tree_unflatten

from ..linalg.host import own_random_state
from ..optim.host import NaturalGradientOptim, describe, find_blocks
from ..optim.rule import require
from ..optim.state import OthersState, is_power_of_two
from ..runtime.run import Minibatches, run_both
from ..runtime.store import BASELINES, traced_params
from .processes import (
    check_connected,
    extremes,
    from_all,
    is_alone,
    rank,
    share_random_state,
    take_from_first,
    world_size,
)
from .shards import Multiplied, check_terms, terms_of
from .statistics import average

#: keeps the random numbers of ranks apart
APART = 0x9E3779B97F4A7C15


#: losses that are not linear in log p, so that means over ranks are not theirs
NOT_LINEAR = (RenyiELBO, ReweightedWakeSleep, TraceTailAdaptive_ELBO, EnergyDistance, Trace_MMD)


class DistributedSVI(SVI):
    """What :func:`wrap` returns: an ``SVI`` whose losses and gradients are those of all ranks.

    ``step``, ``evaluate_loss`` and ``pyro_ngvi.load`` are calls of all ranks together.

    Attributes:
        own_noise: whether each rank draws for itself.
    """

    def __init__(
        self, svi: SVI, plates: Sequence[str], scaled_to: str | None, own_noise: bool, every: int
    ) -> None:
        vars(self).update(vars(svi))
        self._own: Any = svi
        self._plates, self._scaled_to, self._check_every = tuple(plates), scaled_to, every
        self.own_noise = own_noise
        self._is_open = False
        # plates of all data have the scale of all data
        factor = 1 if scaled_to == "whole" else world_size()
        self._program = Multiplied(self._plates, factor)(svi.model)
        self._leaves: dict[str, Tensor] = {}
        self._steps = 0
        self.loss, self.loss_and_grads = self._loss, self._loss_and_grads

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """One step, as ``SVI.step``: the loss of all ranks before it, in nats."""
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
        held: dict[str, Tensor] = dict(self._leaves)
        ours = isinstance(self.optim, NaturalGradientOptim)
        state = self.optim.get_state() if ours else OthersState(self.guide).save(self.optim)
        for path, value in tree_flatten_with_path(state)[0]:
            if isinstance(value, Tensor):
                held["state" + "".join(map(str, path))] = value
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

    def _loss(self, model: Any, guide: Any, *args: Any, **kwargs: Any) -> Any:
        with self._as_one_of_all(args, kwargs):
            loss = self._own.loss(self._program, guide, *args, **kwargs)
        return self._averaged(loss, [])

    def _loss_and_grads(self, model: Any, guide: Any, *args: Any, **kwargs: Any) -> Any:
        with self._as_one_of_all(args, kwargs), poutine.trace(param_only=True) as seen:
            loss = self._own.loss_and_grads(self._program, guide, *args, **kwargs)
        found = dict(zip(seen.trace.nodes, traced_params(seen), strict=True))
        # running means of Pyro's baselines are a matter of each rank
        found = {k: p for k, p in found.items() if not k.startswith(BASELINES)}
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
        self._leaves = dict(sorted(found, key=lambda item: item[0]))
        buffers = {
            f"{what}.{name}": x
            for what, root in (("guide", self.guide), ("model", self.model))
            for name, x in (root.named_buffers() if isinstance(root, nn.Module) else ())
        }
        tensors = self._leaves | buffers
        _check_alike(from_all({k: (tuple(v.shape), str(v.dtype)) for k, v in tensors.items()}))
        take_from_first([v.detach() for v in tensors.values()])
        terms = from_all(terms_of(self._look(args, kwargs)))
        check_terms(terms, self._plates, self._scaled_to)

    def _look(self, args: Any, kwargs: Any) -> Any:
        """The model's sites at a draw of the guide, the same on all ranks once parameters are."""
        with own_random_state(), torch.no_grad():
            return run_both(self.model, self.guide, args, kwargs, Minibatches())[1].sites


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


def wrap(
    svi: SVI,
    plates: Sequence[str],
    *,
    scaled_to: str | None = None,
    own_noise: bool | None = None,
    check_every: int = 100,
) -> DistributedSVI:
    r"""An ``SVI`` on several processes, which takes the steps of one process with all data.

    With R ranks, of which number r has the data y_r in the ``plates`` of the model,

        ELBO = 1/R sum_r E_q[R log p(y_r | z) + log p(z) - log q(z)],

    and gradients and curvatures likewise are averaged before the optimizer's step, which is the same on
    all ranks.  With ``plates=[]`` all ranks have all data: R ranks of S particles are R S particles.
    At the first call all ranks take the parameters and the random state of rank 0, and it is refused
    where anything outside those plates is not the same on all.

    A step sends once all gradients, curvatures and the loss: for a full-rank guide in d dimensions
    about d^2 numbers.

    Not for models whose data fit one process and take a few milliseconds a step; latent sites for each
    datum (in a plate of the shards, which is refused, or in one vector, which cannot be seen);
    likelihoods that are no product over the rows of the shards; losses that are not linear in log p;
    ``CVI``.  Do not wrap model or guide in DistributedDataParallel.

    Args:
        svi: with any guide, loss and optimizer but those above.
        plates: names of the plates that hold the shards; ``[]``: all ranks have the same data.
        scaled_to: for minibatches and other scales in them, whether they lead to the "whole"
            (``plate("data", N, subsample=...)``, N of all ranks), or to the "shard" of a rank.
        own_noise: whether each rank draws particles of its own; by default only where all have the
            same data.  The same draws on all ranks leave the noise of one process, which vanishes at a
            Gaussian posterior; own ones do not.
        check_every: steps between comparisons of parameters, optimizer and random state of all ranks;
            also after steps 1, 2, 4, 8, ...

    Raises:
        RuntimeError: where processes are not connected; at a step, where a rank is gone, is at another
            call, or has come apart from the others.
        ValueError: for what is named above; at the first step, where ranks have different models or a
            scale is not explained.

    Source: sums before the step as in synchronous partitioned VI (Bui et al. 2018, arXiv:1811.11206).

    Example (the same script on each rank, ``torchrun --nproc-per-node 2 script.py``):
        >>> import pyro, torch, pyro.distributions as dist, pyro_ngvi as ngvi
        >>> ngvi.distributed.connect()
        >>> def model(y):
        ...     mu = pyro.sample("mu", dist.Normal(0.0, 10.0))
        ...     with pyro.plate("data", len(y)):
        ...         pyro.sample("y", dist.Normal(mu, 1.0), obs=y)
        >>> guide = ngvi.AutoFullRankNormal(model)
        >>> svi = pyro.infer.SVI(model, guide, ngvi.NGVB(guide), ngvi.BatchedELBO(8))
        >>> svi = ngvi.distributed.wrap(svi, plates=["data"])
        >>> y = ngvi.distributed.shard(torch.tensor([1.0, 2.0, 3.0, 4.0]))
        >>> losses = [svi.step(y) for _ in range(100)]
        >>> round(guide.median()["mu"].item(), 1)
        2.5
    """
    check_connected()
    if not isinstance(svi, SVI) or type(svi).step is not SVI.step:
        raise ValueError(
            f"distributed.wrap takes a plain pyro.infer.SVI, got {type(svi).__name__}. Wrap before "
            f"anything else; compiled steps run on one process."
        )
    require(not isinstance(plates, str), "plates", "be a list of names", plates)
    valid = scaled_to in (None, "whole", "shard")
    require(valid, "scaled_to", "be 'whole', 'shard' or None", scaled_to)
    require(check_every >= 1, "check_every", "be at least 1", check_every)
    modules = [m for m in (svi.model, svi.guide) if isinstance(m, nn.Module)]
    parts = [part for module in modules for part in module.modules()]
    if any(isinstance(part, DistributedDataParallel) for part in parts):
        raise ValueError(
            "distributed.wrap: a DistributedDataParallel module averages gradients behind the "
            "optimizer's back, and not curvature. Pass the module within it, its attribute module."
        )
    if any(hasattr(part, "draw_units") or hasattr(part, "holds_sites") for part in parts):
        raise ValueError(
            f"distributed.wrap: {describe(svi.guide)} holds numbers for each unit or datum, which all "
            f"have to be on one process. Take pyro_ngvi.AutoFullRankNormal, or one process."
        )
    loss = getattr(svi.loss_and_grads, "__self__", None)
    if plates and isinstance(loss, NOT_LINEAR):
        raise ValueError(
            f"distributed.wrap: {type(loss).__name__} is not linear in log p: means over shards are "
            f"not those of all data. Take an ELBO, or all data on all ranks with plates=[]."
        )
    return DistributedSVI(
        svi, plates, scaled_to, not plates if own_noise is None else own_noise, check_every
    )
