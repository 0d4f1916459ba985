"""When to stop: once the ELBO that is still to gain is below so many nats."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import astuple
from functools import partial
from typing import Any

import pyro
import torch
from pyro.infer import SVI
from torch import nn

from ..distributed import DistributedSVI
from ..guides.deadline import is_asked
from ..linalg.host import own_random_state
from ..losses import BatchedELBO
from ..optim.host import NaturalGradientOptim, find_blocks
from ..optim.von import VON
from ..runtime.run import CannotBatch
from ..runtime.store import traced_params
from ..sites import CVI
from .batches import Batches
from .falls import SETTLED, BestLook, PairedFall, has_stalled, is_flat, last_fall, still_to_fall
from .gap import HALF, Gap, GapMeter
from .twin import Twin, has_twin

#: the first step after which to look, and steps that are lost, less those that are taken since
FIRST, LOST = 5, 20
#: particles of a look, in those of a step: batched, they cost little more
WIDER, FEWEST_PARTICLES = 4, 8
#: rows of noise behind a mean gradient, for few latents, and for each of many
ROWS, ROWS_EACH = 128, 2
#: about how many gradients a look takes at most, until there were more steps than that; of Newton
#: steps, in those of a look, and for a stalled run in those that it took
MOST_GRADIENTS, NEWTON, POLISH = 80, 4, 3


class StopRule:
    r"""Tells a loop over ``svi.step`` when to end, by what is still to gain.

    "converged": the ELBO of what the guide holds is at most ``tol`` nats below the best of its family
    *near by*: a :class:`~pyro_ngvi.fitting.Gap` plus its error is at most that, the error at most
    tol / 2.  It needs a guide of ours with a known Fisher matrix; or Pyro's ``AutoNormal``,
    ``AutoDiagonalNormal``, ``AutoMultivariateNormal`` or ``AutoLowRankMultivariateNormal``, with Pyro's
    ``Trace_ELBO``, ``TraceGraph_ELBO`` or ``TraceEnum_ELBO`` and a model that ``vmap`` can run.  For
    others, for means of which float32 hardly resolves the sds, or where the model has parameters, the
    rule says "settled": the trimmed mean loss of the last quarter of the steps is no more than ``tol``
    below that before, by a standard error of at most tol / 2 (of natural gradients on all data also by
    common noise, of ``CVI`` by the ratio of its last falls).  That says nothing of what a rate too
    small leaves to gain.

    It looks where losses have ceased to fall, after step 5, then after 10 to 25 % more, with as many
    gradients as steps at most; but for ``newton``, and a guide that goes back, a run is as without it.
    Not for a loss that changes between steps, nor for several modes, of which it sees the one at hand.
    Whether the best of the family is near the posterior is :func:`pyro_ngvi.khat`'s question.

    Args:
        svi: the ``pyro.infer.SVI`` of the loop.
        tol: nats; 0 to go on until one of the limits below.
        batches: for loops over minibatches, what they go over: an iterable that can be gone through
            again, such as a ``DataLoader``, of tuples of arguments, or of single ones.
        max_steps: steps after which to stop in any case; ``max_time`` in seconds since it was made.
        newton: whether a look moves a guide of ours to what it finds to gain, as in :func:`fit`, under
            an optimizer of ours and a ``BatchedELBO`` of all data.

    Attributes:
        reason: why to stop, or ``None``: "converged"; "settled"; "stalled" (three quarters of the steps
            have not halved a gap above ``tol``; where optimizer or noise hide that, losses are flat; or
            they rose, and the guide holds what was best); "max_steps"; "max_time"; "diverged" (20 more
            steps were skipped, or had no finite loss, than since).
        gap: nats still to gain at the last look (:class:`~pyro_ngvi.fitting.Gap`), before a step of it;
            ``None``: no look.
        losses: what it has seen, in nats, and ``steps``, how many.
        looks: step and gap of each look so far.

    Raises:
        ValueError: for what is no SVI, and limits or a ``tol`` that are not positive.

    Example:
        >>> import pyro, pyro.distributions as dist, pyro_ngvi as ngvi
        >>> from pyro.infer import SVI
        >>> def model():
        ...     pyro.sample("x", dist.Gamma(9.0, 3.0))
        >>> pyro.set_rng_seed(0)
        >>> guide = ngvi.AutoFullRankNormal(model)
        >>> svi = SVI(model, guide, ngvi.NGVB(guide), ngvi.BatchedELBO(8))
        >>> stop = ngvi.StopRule(svi, max_steps=1000)
        >>> while not stop(svi.step()):
        ...     pass
        >>> stop.reason, stop.steps < 100, stop.gap.nats < 0.05
        ('converged', True, True)
    """

    def __init__(
        self,
        svi: SVI,
        tol: float = 0.05,
        *,
        batches: Iterable[Any] | None = None,
        max_steps: int | None = None,
        max_time: float | None = None,
        newton: bool = False,
    ) -> None:
        if not isinstance(svi, SVI):
            raise ValueError(
                f"StopRule looks at a pyro.infer.SVI, and got {type(svi).__name__}. Make it with the "
                f"SVI of the loop: stop = StopRule(svi)."
            )
        self.svi: Any = svi
        self._alone = svi.alone if isinstance(svi, DistributedSVI) else svi
        self._loss = getattr(self._alone.loss_and_grads, "__self__", None)
        self.batches = None if batches is None else Batches(batches)
        self.reason: str | None = None
        self.gap: Gap | None = None
        self.looks: list[tuple[int, Gap]] = []
        self.losses: list[float] = []
        self._lost, self._next, self._started = 0, FIRST, time.monotonic()
        self._wide, self._paired, self.best, self.newton = None, PairedFall(), BestLook(), newton
        self.limit(max_steps, max_time, tol)

    def limit(
        self,
        max_steps: int | None = None,
        max_time: float | None = None,
        tol: float | None = None,
    ) -> None:
        """Put other limits, which count from here, in the place of those of before, as
        ``stop.limit(max_steps=500)``; so a ``tol``, in nats."""
        limits = {"tol": tol or None, "max_steps": max_steps, "max_time": max_time}
        for name, value in limits.items():
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be positive, got {value!r}.")
        self.tol = self.tol if tol is None else float(tol)
        so_far = time.monotonic() - self._started
        self.max_steps = None if max_steps is None else self.steps + max_steps
        self.max_time = None if max_time is None else so_far + max_time

    @property
    def steps(self) -> int:
        """How many losses the rule has seen."""
        return len(self.losses)

    def __call__(self, loss: Any, *args: Any, **kwargs: Any) -> bool:
        """Whether to stop after a step whose loss was ``loss``, taken at these arguments."""
        self.losses.append(float(loss))
        reports = getattr(self.svi.optim, "reports", {}).values()
        lost = not math.isfinite(self.losses[-1]) or not all(r.finite for r in reports)
        self._lost = self._lost + 1 if lost else max(0, self._lost - 1)
        self.reason = self._reason(args, kwargs)
        return self.reason is not None

    def _reason(self, args: Any, kwargs: Any) -> str | None:
        if self._lost >= LOST:
            return "diverged"
        if self.tol and self.steps >= self._next and not self._lost:
            if (found := self._look(args, kwargs)) is not None:
                return found
        if self.max_steps is not None and self.steps >= self.max_steps:
            return "max_steps"
        return self._late()

    def _late(self) -> str | None:
        """Whether the time is up, on any rank."""
        if self.max_time is None:
            return None
        late = "max_time" if time.monotonic() - self._started >= self.max_time else None
        return late if self._alone is self.svi else self.svi.agreed(late)

    def _look(self, args: Any, kwargs: Any) -> str | None:
        fall, error = last_fall(self.losses)
        self._next = self.steps + max(1, self.steps // 10)
        sweeps = isinstance(self.svi.optim, CVI) and self.svi.optim.sweeps
        if sweeps and still_to_fall(self.losses) <= self.tol:
            return "settled"
        if fall > self.tol + 2.0 * error:
            return None
        natural = isinstance(self.svi.optim, NaturalGradientOptim) and bool(self._blocks())
        gap = meter = None
        with suppress(CannotBatch):  # what Pyro's losses run one by one
            if meter := self._meter(args, kwargs):
                most = NEWTON * max(MOST_GRADIENTS, self.steps)
                gap = self._descend(meter, most, self.newton and natural and meter.sees_all)
        if meter is None or gap is None:
            flat = is_flat(self.steps, fall, error)
            enough = self.steps >= SETTLED or flat
            whole = self.batches is None and self._alone is self.svi
            if whole and (error > 0.5 * self.tol if enough else self._follows()):
                how = self.svi, self._loss, args, kwargs, self.steps, self.tol
                if paired := self._paired(*how):
                    enough, (fall, error) = True, paired
                    if self._paired.go_back(self.svi, fall, error):
                        return "stalled"
            # of few steps, before noise of the iterates is all that is left, a fall tells less
            most = self.tol if self.steps >= SETTLED else 0.5 * self.tol
            if enough and fall + error <= most and error <= 0.5 * self.tol:
                return "settled"
            return "stalled" if flat else None
        if natural and meter.sees_all and self.best.went_back(meter, gap):
            gap = self._descend(meter, 0, self.newton)
            return "converged" if gap.is_below(self.tol) else "stalled"
        self._next = self.steps + max(self.steps // 4, meter.count // 4, 1)
        if gap.is_below(self.tol):
            return "converged"
        # losses tell of others, whose rates may be too small, as in minibatches those of VON and its
        # kin, and where noise leaves no curvature
        adapts = natural and (meter.sees_all or not isinstance(self.svi.optim, VON))
        creeps = has_stalled(self.looks, self.steps, self.tol, meter.sees_all)
        stalls = creeps if adapts and gap.curved else is_flat(self.steps, fall, error)
        return "stalled" if stalls else None

    def _descend(self, meter: GapMeter, most: int, newton: bool, patient: bool = False) -> Gap:
        """The gap; with ``newton``, step, and measure again where it was above ``tol``, until a step is
        refused, or about ``most`` gradients are taken.  Who is ``patient``, or has stepped before,
        takes twice as many gradients where one is refused."""
        while True:
            gap = meter(self.tol, max(MOST_GRADIENTS, self.steps), whole=newton)
            if is_asked():  # it has seen nothing
                return gap
            self.gap = gap
            self.looks.append((self.steps, gap))
            if not newton:
                return gap
            moved = meter.newton_step(self.tol)
            enough = gap.is_below(self.tol) or meter.count >= most
            if enough or not (moved or patient) or self._late():
                return gap
            if not moved:
                meter.widen()
            patient = True

    def polish(self, *args: Any, **kwargs: Any) -> bool:
        """Newton steps for a run that has stalled, at the arguments of a step: whether it "converged".

        Natural gradients creep where H is a small part of the Fisher matrix, as for a mean field of
        correlated latents.  A guide of ours moves along H^-1 g while losses of other noise fall so,
        within ``max_time`` and three times the gradients of the run, as :func:`pyro_ngvi.fit` does.
        """
        meter = self._meter(args, kwargs) if self._blocks() else None
        most = POLISH * (self.steps + sum(gap.gradients for _, gap in self.looks))
        if meter is None or not self._descend(meter, most, True, True).is_below(self.tol):
            return False
        self.reason = "converged"
        return True

    def _meter(self, args: Any, kwargs: Any) -> GapMeter | None:
        """What measures the gap, if that is to be had."""
        svi, loss = self.svi, self._loss
        # a twin would see the data of one rank
        of_pyro, blocks = self._alone is svi and has_twin(svi.guide, loss), self._blocks()
        if not of_pyro and not blocks:
            return None
        ours = [p for b in blocks for p in b.natural_params().values()]
        known = {id(p) for p in (svi.guide.parameters() if of_pyro else ours)}
        # of the first noise, none of it used before
        number = 1_000 * (self.steps + len(self.looks))
        first = self._arguments(number, [], args)
        with own_random_state(), torch.no_grad(), pyro.poutine.trace(param_only=True) as seen:
            svi.loss(svi.model, svi.guide, *first, **kwargs)
        if not all(id(p) in known for p in traced_params(seen) if p.requires_grad):
            return None
        particles = max(WIDER * getattr(loss, "num_particles", 1), FEWEST_PARTICLES)
        sees_all = self.batches is None
        if of_pyro:
            with own_random_state():
                twin = Twin(svi.guide, svi.model, first, kwargs, particles)
            if not twin.fits:
                return None
            blocks, gradient, sees_all = [twin], twin.gradient, sees_all and not twin.subsamples
        else:
            gradient = partial(self._loss_and_grads(loss, particles), svi.model, svi.guide)
            sees_all = sees_all and isinstance(loss, BatchedELBO) and not loss.subsamples
        d = max(b.family.dim(b.natural_params()) for b in blocks)
        pieces = min(HALF, -(-max(ROWS, ROWS_EACH * d) // particles)) if sees_all else HALF
        batches: list[Any] = []

        def numbered(s: int) -> Any:
            while self.batches is not None and len(batches) <= s:
                self._arguments(number + len(batches), batches, args)
            own = batches[s] if batches else args
            with own_random_state(number + s):
                return gradient(*own, **kwargs)

        meter = GapMeter(blocks, numbered, pieces, sees_all=sees_all)
        return meter if meter.resolves() else None

    def _loss_and_grads(self, loss: Any, particles: int) -> Callable[..., Any]:
        """That of the loss, with more particles where they are batched."""
        if not isinstance(loss, BatchedELBO):
            return self.svi.loss_and_grads
        self._wide = wide = self._wide or BatchedELBO(particles, chunk_size=loss.chunk_size)
        wide.kl_weight = loss.kl_weight
        gradient = wide.loss_and_grads
        return gradient if self._alone is self.svi else self.svi.over_ranks(gradient)

    def _follows(self) -> bool:
        """Whether units of the guide take steps of their own, after which few of q(v) are left."""
        parts = self.svi.guide.modules() if isinstance(self.svi.guide, nn.Module) else ()
        return any(hasattr(part, "draw_units") for part in parts)

    def _blocks(self) -> list[Any]:
        """The parts of a guide of ours, if the Fisher matrices of all are known."""
        blocks = [] if self._follows() else [block for _, block in find_blocks(self.svi.guide)]
        known = (not hasattr(b, "holds_sites") and b.family.known_fisher for b in blocks)
        return blocks if all(known) else []

    def _arguments(self, seed: int, batches: list[Any], args: Any) -> tuple[Any, ...]:
        """Those of a gradient, put after ``batches`` of before, which in one order are correlated."""
        if self.batches is None:
            return args
        with own_random_state(seed), self.batches.apart():
            if len(batches) % HALF == 0:
                self.batches.reshuffle()
            batch = next(self.batches)
        if args and len(args) != len(batch):
            raise ValueError(
                f"StopRule: a step has {len(args)} arguments and a minibatch of batches= has "
                f"{len(batch)}. Pass by keyword what is no part of a minibatch."
            )
        batches.append(batch)
        return batch

    def state_dict(self) -> dict[str, Any]:
        """What the rule has seen, as plain data: for :func:`pyro_ngvi.save`."""
        return {
            "losses": torch.tensor(self.losses, dtype=torch.float64),
            "looks": [(steps, astuple(gap)) for steps, gap in self.looks],
            "lost": self._lost,
            **self._paired.state_dict(),
            "best_look": self.best.best,
            "next": self._next,
            "seconds": time.monotonic() - self._started,
            "batches": None if self.batches is None else self.batches.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what another rule has seen, of its :meth:`state_dict`."""
        self.losses = state["losses"].tolist()
        self.looks = [(steps, Gap(*gap)) for steps, gap in state["looks"]]
        self.gap = self.looks[-1][1] if self.looks else None
        self._lost, self._next = state["lost"], state["next"]
        self._paired.load_state_dict(state)
        self.best.best = state.get("best_look")
        self._started = time.monotonic() - state["seconds"]
        if self.batches is not None and state["batches"] is not None:
            self.batches.load_state_dict(state["batches"])
