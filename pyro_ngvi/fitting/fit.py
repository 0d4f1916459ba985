"""A fit in one call: a thin layer over Pyro's own loop."""

from __future__ import annotations

import math
import operator
import os
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pyro
import torch
from pyro import poutine

from ..compiled import CompiledSVI
from ..compiled import compile as compile_svi
from ..distributed import wrap
from ..distributed.processes import rank
from ..guides.deadline import ending_by
from ..linalg.host import apart, own_random_state
from ..optim.rule import require
from ..runtime.run import Minibatches
from ..runtime.store import ModuleParams
from . import door
from .advice import Advice, advise
from .batches import Batches
from .checkpoint import called, collect, restore, write
from .kept import Kept
from .ladder import climb
from .progress import Progress, signals
from .result import Result
from .stop import StopRule
from .structure import Structure

#: seconds between checkpoints
EVERY = 60.0
#: seconds and steps after which ``compile="auto"`` records a step, which takes as long as 100 to 400
LONG = 5.0, 300
#: share of ``max_time`` that the search of a start may take
SEARCH = 0.5


class Fit(Result):
    """A run of :func:`pyro_ngvi.fit`, ended or not; what is read from it is found when first asked for.

    Attributes:
        svi: the ``pyro.infer.SVI``.
        stop: the :class:`~pyro_ngvi.StopRule`.
        advice: guide, optimizer and loss, and the reasons for what was not given.
        model, args, kwargs: the model and its arguments.
        why_stopped: "converged", "settled", "stalled", "max_steps", "max_time" or "diverged", as
            :class:`~pyro_ngvi.StopRule` says; "interrupted", "terminated", or "callback".
        rungs: with ``guide="auto"`` what each guide has reached; this is the fit of the best.

    Example:
        >>> import pyro, torch, pyro.distributions as dist, pyro_ngvi as ngvi
        >>> def model(y=None):
        ...     m = pyro.sample("m", dist.Normal(0.0, 10.0))
        ...     with pyro.plate("data", 30):
        ...         pyro.sample("y", dist.Normal(m, 1.0), obs=y)
        >>> fit = ngvi.fit(model, torch.linspace(1.0, 3.0, 30), seed=0, progress=False)
        >>> fit.verdict.ok, fit.predict(seed=0)["y"].shape, fit.sample(100, seed=0)["m"].shape
        (True, torch.Size([1000, 30]), torch.Size([100]))
        >>> float(fit.summary(round_to=1).loc["m", "mean"]), round(fit.elbo[0]), fit.loo().n_data_points
        (2.0, -37, 30)
        >>> fit.resume(tol=0.01, progress=False).why_stopped  # with no arguments, the data of before
        'converged'
    """

    def __init__(
        self,
        advice: Advice,
        args: Any,
        kwargs: Any,
        data: Iterable[Any] | None,
        tol: float,
        compile: bool | str = False,
        distributed: Mapping[str, Any] | None = None,
    ) -> None:
        door.check_names(advice.model, kwargs)
        super().__init__(advice.model, args, kwargs)
        self.advice = advice
        self.svi: Any = advice.svi(known=True)
        fits = distributed is None or isinstance(distributed, Mapping)
        require(fits, "distributed", "be a dict, as {'plates': ['data']}", distributed)
        self.distributed = None if distributed is None else dict(distributed)
        if distributed is not None:
            door.check_spread(self.svi.guide, compile)
            self.svi = wrap(self.svi, **distributed)
        self.batches = None if data is None else Batches(data)
        self.stop = StopRule(self.svi, tol, batches=self.batches, newton=True)
        require(compile in (True, False, "auto"), "compile", 'be True, False or "auto"', compile)
        self.compile = compile
        self._saved: dict[str, Any] | None = None
        self._path: Any = None
        self._kept, self._unseen = Kept(), True  # whether no step has seen the arguments of now

    @torch.inference_mode(False)
    def resume(
        self,
        *args: Any,
        data: Iterable[Any] | None = None,
        tol: float | None = None,
        max_steps: int | None = None,
        max_time: float | None = None,
        progress: bool = True,
        checkpoint: str | os.PathLike[str] | None = None,
        every: float = EVERY,
        callbacks: Iterable[Callable[[Fit], Any]] = (),
        **kwargs: Any,
    ) -> Fit:
        """Take more steps, until the stop rule or a limit, counted from here, ends them; gives itself.

        Args:
            args: those of the model, and ``kwargs``; those of before where there are none.
            data: minibatches, and ``tol`` in nats, for those of before; the same loader goes on.
            max_steps: as for :func:`pyro_ngvi.fit`, which refuses the same, and the others below it.
        """
        self._unseen = self._unseen or bool(args or kwargs)
        if args or kwargs:
            door.check_names(self.model, kwargs)
            self.args, self.kwargs = args, kwargs
        if data is not None and data is not getattr(self.batches, "source", None):
            self.batches = Batches.after(self.batches, data)
            self.stop.batches = Batches(self.batches)
        if self._unseen or data is not None:
            self.stop.best.best = None  # of other data, perhaps
        door.take_guide(self.svi.guide, self._kept.mark)
        self.put_back()
        stop = self.stop
        stop.limit(max_steps, max_time, tol)
        if checkpoint is not None and not Path(checkpoint).parent.is_dir():
            raise ValueError(f"checkpoint={str(checkpoint)!r}: there is no such folder. Make it.")
        callbacks, saved, self._shows = list(callbacks), time.monotonic(), progress
        is_first = self.distributed is None or rank() == 0
        if checkpoint is not None and self.is_spread and hasattr(self.svi.guide, "holds_sites"):
            raise ValueError(
                "checkpoint= holds what is the same on all ranks, and each has its own sites here. "
                "Write the loop, and save by ranks, each with pyro_ngvi.save to a file of its own."
            )
        checkpoint, bar = checkpoint if is_first else None, Progress(stop, progress and is_first)
        try:
            end = time.monotonic() + SEARCH * (max_time or math.inf)
            with signals(not self.is_spread) as noted, ending_by(end), self._kept.training():
                while True:
                    ended = self._step(bar)
                    # a list, so that all of them are called
                    asked = [door.is_true(callback(self)) for callback in callbacks]
                    reasons = [*noted, *[stop.reason] * ended, *["callback"] * any(asked)]
                    why = next(iter(reasons), None)
                    why = why if self.distributed is None else self.svi.agreed(why)
                    if why is not None:
                        self.why_stopped = why
                        break
                    if checkpoint is not None and time.monotonic() - saved >= every:
                        self.save(checkpoint)
                        saved = time.monotonic()
        finally:
            bar.close()
        if self.why_stopped != "diverged":  # nor could guide and model run
            self._kept.keep(self.model, self.svi.guide, self._last, self.kwargs)
        if checkpoint is not None:
            self.save(checkpoint)
        if self.is_spread:  # now, as print(fit) may be a call of one rank
            with suppress(ValueError):
                self.khat  # noqa: B018
        return self

    def _step(self, bar: Progress) -> bool:
        start = time.perf_counter()
        self._last = args = self.args if self.batches is None else next(self.batches)
        if self._unseen:
            with own_random_state() if self.steps else nullcontext():
                self._check(args)
            self._unseen = False
            if self.batches is not None and self.distributed is None:
                if door.begins_with(self.svi.guide, args, self.kwargs):
                    self._last = args = next(self.batches)
        if self.compile and not isinstance(self.svi, CompiledSVI):
            is_long = self.steps >= LONG[1] and self.seconds >= LONG[0]
            if self.compile is True or is_long:
                self.svi = compile_svi(self.svi, warn=self.compile is True)
        with door.naming_arguments(self.model, args, self.kwargs):
            loss: Any = self.svi.step(*args, **self.kwargs)
        ended = self.stop(loss, *args, **self.kwargs)
        if self.batches is not None and not math.isfinite(self.stop.losses[-1]):
            door.check_numbers(self.model, args, self.kwargs, Minibatches())
        if self.stop.reason == "stalled":
            self.stop.polish(*args, **self.kwargs)
        self.record(time.perf_counter() - start)
        bar.update()
        return ended

    def _check(self, args: Any) -> None:
        """What arguments tell that no step has seen."""
        with poutine.block(), ModuleParams(), pyro.validation_enabled(False):
            batch = Minibatches()
            seen = door.check_numbers(self.model, args, self.kwargs, batch)
            door.check_sums(self.advice.loss, self.svi.guide, seen, args, self.kwargs)
        if self.batches is None:
            door.warn_of_minibatches(seen, batch)
            door.warn_of_no_globals(seen)
        else:
            self.batches.warn_of_no_share(seen)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write all of it to a file, for :func:`pyro_ngvi.load`; see :func:`pyro_ngvi.save`."""
        self.put_back()
        record = {
            "seconds": self._seconds,
            "why_stopped": self.why_stopped,
            "rungs": [*map(astuple, self.rungs)],
            "recipe": self.advice.recipe,
            "reasons": self.advice.reasons,
            "tol": self.stop.tol,
            "compile": self.compile,
            "distributed": self.distributed,
        }
        write(path, collect(self.svi, self.stop, self.batches, {"fit": record}))

    def put_back(self) -> None:
        """Restore parameters that another fit has trained on, or that left the store, or of a file."""
        door.check_guide_of(self.svi.guide, self._kept.mark)
        self._kept.put_back()
        if self._saved is None:
            return
        if (self.batches is None) != (self._saved["batches"] is None):
            how = "out data=: leave it out" if self.batches else " data=: pass it, or all data,"
            raise ValueError(f"load: {self._path} is of a fit with{how} here too.")
        args = self.args if self.batches is None else next(Batches(self.batches))
        parts = self.stop, self.batches
        restore(self._saved, self.svi, args, self.kwargs, *parts, f"load: {self._path}")
        self._saved = None
        self._kept.keep(self.model, self.svi.guide, args, self.kwargs)


def fit(
    model: Callable[..., Any],
    *args: Any,
    guide: Any = None,
    optim: Any = None,
    loss: Any = None,
    num_particles: int | None = None,
    data: Iterable[Any] | None = None,
    max_steps: int | None = None,
    max_time: float | None = None,
    tol: float = 0.05,
    seed: int | None = None,
    compile: bool | str = False,
    distributed: Mapping[str, Any] | None = None,
    progress: bool = True,
    checkpoint: str | os.PathLike[str] | None = None,
    every: float = EVERY,
    callbacks: Iterable[Callable[[Fit], Any]] = (),
    **kwargs: Any,
) -> Fit:
    """From a model to its posterior: choose guide, rule and loss, step until nothing is left to gain.

    The same as ``SVI(model, guide, optim, loss)`` with what is given, the rest of
    :func:`pyro_ngvi.advise`, a loop over ``svi.step``, and :class:`~pyro_ngvi.StopRule` to end it.
    Ctrl-C or SIGTERM end it after the step at hand.  The :class:`Fit` prints as what was chosen, why it
    stopped, and whether to believe it.  Not for a loss that changes between steps (``kl_weight`` in a
    warm-up), nor for several optimizers: write the loop.  Parameters of ``pyro.param`` begin where
    Pyro's store has them; what is read of a fit later first puts its own back.

    Args:
        model: a Pyro model; bind keyword arguments that have the name of an option here, or of what
            reads a fit, as :func:`pyro_ngvi.to_arviz`, first with ``functools.partial``.
        args: its arguments, with the data, and ``kwargs``.
        guide: a guide, a class of guides, or the name of one of this package or of Pyro; ``"auto"`` for
            the best of several: the one that would be chosen, for a minute at first, a mixture where
            several modes were seen, :class:`~pyro_ngvi.AutoHierarchical` where there are units,
            :class:`~pyro_ngvi.AutoExponentialFamily` where all latent variables are rates, shares or
            the like, and :class:`~pyro_ngvi.AutoCouplingFlow` up to 100 of them, until one is good.
        optim: as for :func:`pyro_ngvi.advise`; so ``loss`` and ``num_particles``.
        data: minibatches: a ``DataLoader``, or another iterable that can be gone through again, of
            tuples of arguments.  ``args`` are then those of all data, for what is read afterwards;
            without them that goes over minibatches (:class:`~pyro_ngvi.diagnostics.OverBatches`).
        max_steps: steps after which to stop in any case; ``None`` for no such limit, as ``max_time``.
        max_time: the same in seconds, of which the search for a start takes half at most.
        tol: nats of ELBO that may be left to gain within the guide's family; 0 to go on to a limit.
        seed: of torch, NumPy and Python; other numbers than after ``pyro.set_rng_seed(seed)``.
        compile: whether to :func:`pyro_ngvi.compile`; ``"auto"``: after five seconds and 300 steps.
        distributed: options of :func:`pyro_ngvi.distributed.wrap`, ``{"plates": ["data"]}``, for a run
            on several processes, whose reads are calls of all of them, but ``print``, ``elbo`` and
            ``khat``; the guide is a Gaussian over all latent variables, if not given.
        progress: whether to show bars, of slow verdicts too; lines now and then without a terminal.
        checkpoint: a file for :func:`pyro_ngvi.load`, written ``every`` so many seconds and at the end.
        callbacks: functions of the fit, called after each step; one that returns ``True`` ends it.

    Raises:
        ValueError: for options out of range or unknown names, and what guide, optimizer or loss refuse.

    Example:
        >>> import pyro, torch, pyro.distributions as dist, pyro_ngvi as ngvi
        >>> def model(y):
        ...     m = pyro.sample("m", dist.Normal(0.0, 10.0))
        ...     with pyro.plate("data", len(y)):
        ...         pyro.sample("y", dist.Normal(m, 2.0), obs=y)
        >>> fit = ngvi.fit(model, torch.linspace(-2.0, 6.0, 100), seed=0)
        >>> fit.why_stopped, fit.guide.median()["m"].round()
        ('converged', tensor(2.))
    """
    door.check_names(model, kwargs)
    if seed is not None:
        pyro.set_rng_seed(apart(operator.index(seed), 1))  # of NumPy's integers too
    by_ladder = isinstance(guide, str) and guide == "auto"
    if by_ladder and distributed is not None:
        raise ValueError(
            'guide="auto" runs several fits against the clock, which processes have each of their own: '
            "name a guide."
        )
    first, batches = args, None if data is None else Batches(data)
    if batches is not None:
        first = next(Batches(batches))
        door.check_batch(model, first, kwargs)
    parts = {"optim": optim, "loss": loss, "num_particles": num_particles}
    how: dict[str, Any] = {"max_steps": max_steps, "progress": progress, "every": every}
    how["callbacks"] = list(callbacks)

    def one(guide: Any, max_time: float | None, best: Fit | None = None) -> Fit:
        if best is not None and guide is None:
            how["max_steps"] = None if max_steps is None else max_steps - best.steps
            return best.resume(max_time=max_time, checkpoint=checkpoint, **how)
        why = "by the ladder" if by_ladder else ""
        if distributed is not None and guide is None:
            guide, why = Structure(model, first, kwargs).normal()
        advice = advise(model, *first, guide=guide, **parts, **kwargs)
        if why:
            advice.reasons = (f"{called(guide)}, {why}", *advice.reasons[1:])
        made = Fit(advice, args, kwargs, batches, tol, compile, distributed)
        # the file holds the best that has ended
        path = checkpoint if best is None else None
        return made.resume(max_time=max_time, checkpoint=path, **how)

    with door.naming_arguments(model, first, kwargs):
        door.check_source(model, data, first, kwargs)
        if not by_ladder:
            return one(guide, max_time)
        best = climb(Structure(model, first, kwargs), one, max_time)
    if checkpoint is not None:
        best.save(checkpoint)
    return best
