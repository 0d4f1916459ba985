"""Whether losses still fall: those of steps, of sweeps without noise, or of the same noise each time.

Losses of steps have noise of their own each, of which a difference of means has as much as of the fall.
With common noise most of it cancels (Owen 2013, "Monte Carlo theory, methods and examples", section
8.6).  Of natural gradients, whose gains shrink as 1 / steps, about as much is left to fall as they fell
while the steps doubled.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import deepcopy
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ..guides.deadline import is_asked
from ..linalg.host import own_random_state
from ..losses import BatchedELBO
from ..optim.host import NaturalGradientOptim, find_blocks
from .gap import HALF, Gap, GapMeter, Parts, at_answer

#: the fall of losses, in sds of theirs, that is given up
NOISY = 0.1
#: steps before which a run is not said to settle, by its losses, or to stall, by looks
SETTLED, STALLED = 40, 100
#: nats, and standard errors, by which a loss rises where sites of a block, which follow no gradient of
#: it, drift away
RISE, SURE = 1.0, 4.0
#: seeds of a look with common noise, for a standard error, at first and at most, and particles of each
#: at least; and steps between looks, in those of before
SEEDS, MOST_SEEDS, PARTICLES, FURTHER = 8, 32, 64, 1.25
#: noise that confirms a rise, in that which showed it, and rises in those looked for that are cut
MORE, HUGE = 4, 8.0


def last_fall(losses: Sequence[float]) -> tuple[float, float]:
    """By how much the mean loss of the last quarter is below that before it; standard error."""
    n = max(2, len(losses) // 4)
    window = torch.tensor(losses[-2 * n :], dtype=torch.float64)
    (before, error), (last, other) = map(trimmed_mean, window.split([len(window) - n, n]))
    return before - last, math.hypot(error, other)


def is_flat(steps: int, fall: float, error: float) -> bool:
    """Whether the losses of a quarter fell by a tenth of their own sd at most, by two errors: which
    takes some 3,000, or chance would end many a run that still falls."""
    sd = error * (steps / 8.0) ** 0.5  # of the difference of the means of two quarters
    return 2.0 * error + max(fall, 0.0) <= NOISY * sd


def has_stalled(
    looks: Sequence[tuple[int, Gap]], steps: int, tol: float, sees_all: bool = True
) -> bool:
    """Whether the steps of the last three quarters have not halved a gap that stays above tol; in
    minibatches, of which none sees all, where nothing else takes such a run further, also not made it
    smaller by more than two errors."""
    since = [gap for k, gap in looks if 4 * k >= steps]
    above = all(gap.curved and gap.nats - gap.error > tol for gap in since)
    enough = steps >= STALLED and len(since) >= 4
    if not (enough and above and since[0].nats < 2.0 * since[-1].nats):
        return False
    fall, error = since[0].nats - since[-1].nats, math.hypot(since[0].error, since[-1].error)
    return sees_all or fall <= 2.0 * error


class PairedFall:
    """How far the loss of a guide fell while the steps doubled, by common noise, and ``best``, of a
    block the lowest of the looks, with what the guide held then."""

    def __init__(self) -> None:
        self.looks: list[tuple[int, Tensor]] = []
        self.seeds = SEEDS
        self.best: tuple[float, dict[str, Tensor]] | None = None

    def __call__(
        self, svi: Any, loss: Any, args: Any, kwargs: Any, steps: int, tol: float
    ) -> tuple[float, float] | None:
        """The fall and its standard error; of few steps the largest change since half of them.

        ``None`` where no look is so old, for a loss of minibatches, and for other optimizers, whose
        iterates are as noisy as their losses.  Where the error hides whether that is below ``tol``
        nats, later looks take more draws."""
        blocks = [block for _, block in find_blocks(svi.guide)]
        of_all = isinstance(loss, BatchedELBO) and not loss.subsamples
        natural = isinstance(svi.optim, NaturalGradientOptim) and bool(blocks)
        soon = bool(self.looks) and steps < FURTHER * self.looks[-1][0]
        if soon or not (of_all and natural):
            return None
        wide = BatchedELBO(max(PARTICLES, loss.num_particles), chunk_size=loss.chunk_size)
        wide.kl_weight = loss.kl_weight

        def losses() -> Tensor:
            found = []
            for seed in range(self.seeds):
                with at_answer(blocks), own_random_state(seed):
                    found.append(wide.loss(svi.model, svi.guide, *args, **kwargs))
            return torch.tensor(found, dtype=torch.float64)

        self._losses, now = losses, losses()
        self.looks.append((steps, now))
        is_block = getattr(getattr(svi.guide, "units", None), "is_block", False)
        if is_block and float(now.mean()) < (self.best[0] if self.best else math.inf):
            self.best = float(now.mean()), deepcopy(svi.guide.state_dict())
        half = [at for at, _ in self.looks if 2 * at <= steps]
        if not half:
            return None
        falls = [then[: len(now)] - now[: len(then)] for at, then in self.looks if at >= half[-1]]
        chosen = falls[0]
        if steps < SETTLED:  # iterates may still move up and down by more than they fall
            chosen = max((f * f.mean().sign() for f in falls), key=lambda f: float(f.mean()))
        fall, error = float(chosen.mean()), float(chosen.std()) / len(chosen) ** 0.5
        if error > 0.5 * tol and fall - 2.0 * error <= tol:
            self.seeds = MOST_SEEDS
        return fall, error

    def go_back(self, svi: Any, fall: float, error: float) -> bool:
        """Whether the loss of a block has risen for sure, not by parameters of the model, nor because
        the data are others now; the guide holds the best of the looks then."""
        risen = math.isfinite(fall + error) and fall <= -max(RISE, SURE * error)
        if self.best is None or svi.optim._has_others or not risen:
            return False
        now = deepcopy(svi.guide.state_dict())
        svi.guide.load_state_dict(self.best[1])
        if float(self._losses().mean()) <= float(self.looks[-1][1].mean()) - RISE:
            return True
        svi.guide.load_state_dict(now)
        self.looks, self.best = self.looks[-1:], None
        return False

    def state_dict(self) -> dict[str, Any]:
        """Plain data, for a checkpoint of the rule."""
        return {"paired": self.looks, "seeds": self.seeds, "best": self.best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.looks, self.best = list(state.get("paired", [])), state.get("best")
        self.seeds = state.get("seeds", SEEDS)


class BestLook:
    """The look at which least was to gain, and what the guide held then; of natural gradients that know
    no noise of data.

    Where tails of the posterior are heavier than those of q, one draw in hundreds may be all that holds
    q back, by a huge loss.  A step on it is shortened as an outlier, and q runs away, along a direction
    in which wider is no different.  Gaps do not tell, of noise that misses such draws.
    """

    def __init__(self) -> None:
        self.best: tuple[float, Parts] | None = None

    def went_back(self, meter: GapMeter, gap: Gap) -> bool:
        """Whether the loss is above that of the best look by more nats than there are latent variables,
        as no noise of steps raises it, for sure; the guide holds what it held then."""
        if self.best is not None and not is_asked() and self._has_risen(meter, self.best[1]):
            meter.hold(self.best[1])
            return True
        most = abs(gap.nats) + 2.0 * gap.error
        if gap.curved and most < (self.best[0] if self.best else math.inf):
            self.best = most, meter.params
        return False

    def _has_risen(self, meter: GapMeter, before: Parts) -> bool:
        far = meter.far()
        if not meter.rises(before).mean() > far:
            return False
        # huge ones are cut, which lowers the mean, for an error that can be told
        rises = meter.rises(before, MORE * HALF).clamp_max(HUGE * far)
        return bool(rises.mean() > max(far, SURE * float(rises.std()) / len(rises) ** 0.5))


def trimmed_mean(x: Tensor) -> tuple[float, float]:
    """The mean without the tenths at both ends, and its standard error (Tukey & McLaughlin 1963)."""
    x, cut = x.sort().values, len(x) // 10
    kept = x[cut : len(x) - cut]
    winsorized = x.clamp(kept[0], kept[-1])
    return float(kept.mean()), float(winsorized.std()) * len(x) ** 0.5 / len(kept)


def still_to_fall(losses: Sequence[float]) -> float:
    """How far losses without noise still fall, fall q / (1 - q), where falls shrink by one factor, as
    near a fixed point (Aitken 1926): the largest of the last three, and by the last fall or the one
    before it, as one may be small by chance.  Infinite where they do not shrink."""
    recent = losses[-5:]
    falls = [abs(a - b) for a, b in pairwise(recent)]
    if falls[-1] == 0.0:
        return 0.0
    if not all(a > b for a, b in pairwise(falls)):
        return math.inf
    q = max(b / a for a, b in pairwise(falls))
    return max(falls[-1] * q, falls[-2] * q - falls[-1] * (1.0 - q)) / (1.0 - q)
