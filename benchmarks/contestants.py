"""Who takes part in the leaderboard, and the watch that says what each holds at a budget."""

import math
import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pyro
import torch
from pyro.infer import SVI
from torch import Tensor

import pyro_ngvi as ngvi

from . import jax_methods, methods
from .baselines import batch_and_match, dadvi, laplace, pathfinder
from .particles import GUIDES
from .problems import LogJoint, Problem
from .problems.problem import FAMILIES
from .problems.sample_average import maximise, standard_noise

SETTLED, LOOKS = 0.02, 4
Gaussian = tuple[Tensor, Tensor]


class Watch:
    """What a method holds at each budget.  Its clock stands still while anything here runs."""

    def __init__(self, budgets: tuple[float, ...], look: Callable[[Tensor, Tensor], float]) -> None:
        self.held: dict[float, Gaussian | None] = {}
        self.budgets, self.until = budgets, budgets[-1]
        self._look, self._last, self._good = look, None, 0
        self.seconds, self._next, self._read = 0.0, 0.0, 0.0
        self.compile_seconds = 0.0
        self._from = time.process_time()

    def go(self) -> None:
        self._from = time.process_time()

    def pause(self) -> None:
        self.seconds += time.process_time() - self._from
        self._close(self.seconds)

    def _close(self, seconds: float) -> None:
        for budget in self.budgets:
            if budget < seconds and budget not in self.held:
                self.held[budget] = self._last

    @property
    def settled(self) -> bool:
        return self._good >= LOOKS

    def report(self, loc: Tensor, scale_tril: Tensor) -> bool:
        """Takes an answer; true where the run may end."""
        self.pause()
        try:
            finite = bool(torch.isfinite(loc).all() and torch.isfinite(scale_tril).all())
            self._last = (loc.detach().clone(), scale_tril.detach().clone()) if finite else None
            if self.seconds >= self._next:
                self._next = max(1.25 * self.seconds, 0.02)
                good = finite and self._look(loc.detach(), scale_tril.detach()) < SETTLED
                self._good = self._good + 1 if good else 0
            return not finite or self.settled or self.seconds >= self.until
        finally:
            self.go()

    def see(self, answer: Callable[[], Gaussian], final: bool = False) -> bool:
        """As :meth:`report`, of an answer that costs something to read: once in 1 % of the time."""
        self.pause()
        if self.seconds < self._read and not final:
            self.go()
            return False
        self._read = 1.01 * self.seconds
        given = answer()
        self.go()
        return self.report(*given)

    def compiled(self, make: Callable[[], Any]) -> Any:
        """What ``make`` returns; its time is not on the clock, but in ``compile_seconds``."""
        self.pause()
        before = time.process_time()
        made = make()
        self.compile_seconds = time.process_time() - before
        self.go()
        return made

    def fail(self) -> None:
        """Nothing is left of a run that raised an error."""
        self._last = None

    def end(self) -> None:
        """What is held now is held at all later budgets."""
        self._close(math.inf)


class Start:
    """What a method that knows no model of Pyro is given: the density, and the start of all."""

    def __init__(self, problem: Problem, seed: int) -> None:
        pyro.clear_param_store()
        pyro.set_rng_seed(seed)
        self.log_joint = LogJoint(problem)
        self.zero = torch.zeros(problem.dim)
        self.scale = methods.INIT_SCALE * torch.eye(problem.dim)


def run_fit(problem: Problem, family: str, seed: int, watch: Watch) -> None:
    """`ngvi.fit` with the guide of the family, and no other argument that matters."""
    pyro.clear_param_store()

    def callback(fit: Any) -> bool:
        return watch.see(lambda: answer(fit.guide))

    name = GUIDES[family].__name__
    how: dict[str, Any] = {"seed": seed, "progress": False, "callbacks": [callback]}
    fit = ngvi.fit(problem.model, *problem.args, guide=name, **how)
    watch.see(lambda: answer(fit.guide), final=True)


def answer(guide: Any) -> Gaussian:
    """The Gaussian of one of our guides."""
    with torch.no_grad():
        q = guide.get_posterior()
        return q.mean, q.scale_tril if hasattr(q, "scale_tril") else q.stddev.diag()


def run_loop(problem: Problem, family: str, seed: int, watch: Watch) -> None:
    """Our guide, `NGVB` and `BatchedELBO(8)` in a loop without a stop rule."""
    pyro.clear_param_store()
    pyro.set_rng_seed(seed)
    guide = GUIDES[family](problem.model)
    svi = SVI(problem.model, guide, ngvi.NGVB(guide), ngvi.BatchedELBO(8))
    while True:
        svi.step(*problem.args)
        if watch.see(lambda: answer(guide)):
            return


def run_laplace(problem: Problem, family: str, seed: int, watch: Watch) -> None:
    start = Start(problem, seed)
    found = laplace(start.log_joint.single, start.zero)
    if found is not None:
        watch.report(*found)


def run_pathfinder(problem: Problem, family: str, seed: int, watch: Watch) -> None:
    start = Start(problem, seed)
    pathfinder(start.log_joint, start.zero, report=watch.report)


def run_batch_and_match(problem: Problem, family: str, seed: int, watch: Watch) -> None:
    """From N(0, I), with 32 draws an update and the falling rate of the paper."""
    start = Start(problem, seed)
    scale = torch.eye(problem.dim)
    batch_and_match(start.log_joint, start.zero, scale, report=watch.report)


def run_dadvi(problem: Problem, family: str, seed: int, watch: Watch) -> None:
    start = Start(problem, seed)
    noise = torch.randn(30, problem.dim)
    dadvi(start.log_joint, start.zero, start.scale.diagonal(), noise, report=watch.report)


def run_sample_average(problem: Problem, family: str, seed: int, watch: Watch) -> None:
    """As DADVI with L-BFGS and quasi-random draws: 512, or the power of two from 8 d on.

    L-BFGS begins again at its end, with that for its metric, until this gains less than 0.001 nat: a
    line search that has met an infinite density ends a run early.
    """
    start = Start(problem, seed)
    draws = max(512, 2 ** math.ceil(math.log2(8 * problem.dim)))
    noise = standard_noise(draws, problem.dim, seed)
    loc, scale, last, value = start.zero, start.scale, -math.inf, -1e300
    while value > last + 0.001 and watch.seconds < watch.until:
        last = value
        value, loc, scale = maximise(
            start.log_joint, family, noise, loc, scale, report=watch.report
        )
        scale = scale if family == "full_rank" else scale.diagonal().diag()


def run_blackjax(problem: Problem, family: str, seed: int, watch: Watch) -> None:
    """BlackJAX's Pathfinder from zero with its defaults, on the density of NumPyro's model."""
    start = Start(problem, seed)
    find = watch.compiled(lambda: jax_methods.blackjax_pathfinder(problem))
    watch.report(*find(seed, start.zero))


Racer = Callable[[Problem, str, int], Callable[[float], methods.Run]]


def adam(problem: Problem, family: str, seed: int) -> Callable[[float], methods.Run]:
    """Pyro's guide with Adam, under names of its own, for runs that take turns."""
    from pyro_ngvi.runtime.store import claim_name, rename

    def begin(rate: float) -> methods.Run:
        run: Any = methods.pyro_adam(problem, family, seed, 8, "feasible", rate)
        rename(run.guide, claim_name(type(run.guide).__name__))
        return run

    return begin


def numpyro_adam(problem: Problem, family: str, seed: int) -> Callable[[float], methods.Run]:
    """NumPyro's guide with Adam in a compiled loop."""
    program = jax_methods.NumPyroProgram(problem, family, 8, "feasible")
    return lambda rate: jax_methods.NumPyroRun(program, seed, rate)


def advance(run: Any, watch: Watch) -> None:
    """Steps up to the watch's limit."""
    watch.go()
    try:
        while True:
            run.advance(run.stride)
            if watch.see(run.gaussian):
                return
    except ValueError:  # Pyro's validation, once a parameter is NaN
        watch.fail()


CONTESTANTS: dict[str, tuple[tuple[str, ...], Callable[..., None]]] = {
    "fit": (FAMILIES, run_fit),
    "NGVB loop": (FAMILIES, run_loop),
    "Laplace": (("full_rank",), run_laplace),
    "Pathfinder": (("full_rank",), run_pathfinder),
    "BlackJAX Pathfinder": (("full_rank",), run_blackjax),
    "batch and match": (("full_rank",), run_batch_and_match),
    "DADVI": (("mean_field",), run_dadvi),
    "sample average": (FAMILIES, run_sample_average),
}
#: what has a rate, from a problem, a family and a seed to the run of each rate
RACERS: dict[str, Racer] = {"Adam": adam, "NumPyro": numpyro_adam}
NEEDS = {"NumPyro": ("numpyro",), "BlackJAX Pathfinder": ("numpyro", "blackjax")}


def present(chosen: tuple[str, ...]) -> list[str]:
    """The methods whose packages are installed; the others are left out, and printed."""
    absent = {m for m in chosen if not all(map(find_spec, NEEDS.get(m, ())))}
    for method in sorted(absent):
        print(f"{' or '.join(NEEDS[method])} is not installed: the rows of {method} are left out.")
    return [method for method in chosen if method not in absent]
