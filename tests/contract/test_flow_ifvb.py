"""IFVB and AIFVB on flow guides through SVI: their defaults, layers, resumed runs, bad arguments."""

from functools import partial
from pathlib import Path
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI
from pyro.infer.autoguide import AutoGuideList, AutoNormal
from torch import Tensor

import pyro_ngvi as ngvi
from pyro_ngvi.fisher import (
    ConjugateGradients,
    LowRank,
    Window,
)
from pyro_ngvi.optim.ifvb import SLOW
from pyro_ngvi.optim.state import flat
from tests.contract.resume import assert_resumes

ORIGIN = torch.zeros(3, dtype=torch.float64)


def banana(origin: Tensor) -> None:
    """x ~ N(0, 2), y_i given x ~ N(x^2 / 2 - 2, 0.5), i = 1, 2: log Z = 0."""
    x = pyro.sample("x", dist.Normal(origin[0], 2.0))
    y = dist.Normal((0.5 * x.square() - 2.0).unsqueeze(-1).expand(2), 0.5)
    pyro.sample("y", y.to_event(1))


def coupling_flow(model: Any) -> Any:
    """From sds of 0.1, far from the posterior, so that there is something to gain."""
    return ngvi.AutoCouplingFlow(model, layers=2, hidden=(8,), init=None)


class Run:
    """What a script holds."""

    def __init__(self, optimizer: Any = ngvi.IFVB, guide: Any = None, **arguments: Any) -> None:
        make = guide or coupling_flow
        self.guide: Any = make(banana)
        self.optim = optimizer(self.guide, **arguments)
        self.svi = SVI(banana, self.guide, self.optim, ngvi.BatchedELBO(8))

    def steps(self, n: int) -> list[Any]:
        return [self.svi.step(ORIGIN) for _ in range(n)]

    @property
    def rule(self) -> Any:
        (rule,) = self.optim._rules.values()
        return rule

    def fisher(self) -> dict[str, Tensor]:
        (state,) = self.optim.get_state()["natural"].values()
        return flat(state["fisher"])

    @torch.no_grad()
    def loss(self, n: int = 2000) -> tuple[float, float]:
        """The negative ELBO in nats on 2,000 draws of one seed, and its standard error."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(99)
            q = self.guide.get_posterior(ORIGIN)
            z = q.sample((n,))
        x, y = z[:, 0], z[:, 1:]
        joint = dist.Normal(0.0, 2.0).log_prob(x)
        joint = joint + dist.Normal((0.5 * x.square() - 2.0)[:, None], 0.5).log_prob(y).sum(-1)
        weights = q.log_prob(z) - joint
        return float(weights.mean()), float(weights.std()) / n**0.5


@pytest.mark.parametrize("optimizer", [ngvi.IFVB, ngvi.AIFVB])
@pytest.mark.parametrize("arguments", [{}, {"fisher": Window(32, 3.0)}])
def test_sixty_steps_lower_the_loss(optimizer: Any, arguments: dict[str, Any]) -> None:
    pyro.set_rng_seed(0)
    run = Run(optimizer, **arguments)
    run.guide(ORIGIN)
    (start, start_error), _ = run.loss(20000), run.steps(60)
    end, end_error = run.loss(20000)
    # 4.7 nats at the start, 1.0 for the best Gaussian (500 steps of NGVB); the low-rank estimate is
    # at 4.0 with this seed
    assert end < start - 3.0 - 5.0 * (start_error + end_error)
    assert run.optim.report().skipped == 0


def test_defaults_of_flows() -> None:
    run = Run()
    run.steps(1)
    assert run.rule.fisher == Window(128, 1.0) and run.rule.rule.schedule == SLOW
    # 32 scores of the first guess and 8 of the step
    assert run.fisher()["weights"].sum() == 40.0
    run.steps(2)
    assert run.fisher()["weights"].sum() == 56.0


def test_defaults_of_other_guides() -> None:
    run = Run(guide=ngvi.AutoFullRankNormal)
    run.steps(3)
    assert isinstance(run.rule.fisher, LowRank) and run.rule.rule.schedule != SLOW
    assert run.fisher()["updates"] == 3
    run = Run(guide=AutoNormal)
    run.steps(1)
    assert run.rule.fisher == ConjugateGradients() and run.rule.rule.schedule == SLOW


def test_each_guide_of_a_list_has_what_suits_it() -> None:
    def model() -> None:
        pyro.sample("a", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        pyro.sample("b", dist.Normal(torch.zeros(2), 1.0).to_event(1))

    pyro.set_rng_seed(0)
    guide = AutoGuideList(model)
    guide.append(coupling_flow(pyro.poutine.block(model, hide=["b"])))
    guide.append(ngvi.AutoFullRankNormal(pyro.poutine.block(model, hide=["a"])))
    optim = ngvi.IFVB(guide)
    svi = SVI(model, guide, optim, ngvi.BatchedELBO(4))
    for _ in range(3):
        svi.step()
    kinds = [type(rule.fisher) for rule in optim._rules.values()]
    assert kinds == [Window, LowRank]


def test_low_rank_can_be_chosen() -> None:
    run = Run(fisher=LowRank(4, growth=1.0))
    run.steps(3)
    assert run.rule.fisher == LowRank(4, growth=1.0)
    assert run.fisher()["basis"].shape[0] == 4


def test_the_window_can_be_chosen_for_other_guides() -> None:
    pyro.set_rng_seed(0)
    run = Run(guide=partial(ngvi.AutoFullRankNormal, init=None), fisher=Window(16, 0.5))
    run.guide(ORIGIN)
    start, _ = run.loss()
    run.steps(60)
    assert run.rule.fisher == Window(16, 0.5)
    assert run.loss()[0] < start - 3.0


@pytest.mark.parametrize("optimizer", [ngvi.IFVB, ngvi.AIFVB])
@pytest.mark.parametrize("before", [3, 15])
def test_resumed_run_is_the_unbroken_one(optimizer: Any, before: int, tmp_path: Path) -> None:
    """15 steps are beyond the first turn of the ring."""
    assert_resumes(lambda: Run(optimizer), (ORIGIN,), before, 6, tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_scores": 2.0}, "num_scores must be"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Run(**arguments)
