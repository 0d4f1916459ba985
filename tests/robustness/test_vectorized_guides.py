"""Our guides run check_vectorized by themselves, at their first call with vectorised particles."""

import copy
from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import SVI, Predictive, Trace_ELBO
from pyro.infer.autoguide import (
    AutoGuideList,
    AutoNormal,
    init_to_feasible,
    init_to_median,
    init_to_sample,
)
from pyro.optim import Adam  # pyright: ignore[reportAttributeAccessIssue]
from torch import Tensor

from pyro_ngvi import NGVB, AutoFullRankNormal, AutoMeanFieldNormal
from pyro_ngvi.guides import base
from pyro_ngvi.probing import vectorized
from tests.contract.registry import GUIDES, D, N, data, plates, regression
from tests.robustness.test_vectorized_check import silent_broadcast, wrong_matmul

pytestmark = pytest.mark.usefixtures("plain_start")


def loss(num_particles: int = 4, **how: Any) -> Trace_ELBO:
    return Trace_ELBO(num_particles, vectorize_particles=True, **how)


def run(model: Any, guide: Any, *args: Any, steps: int = 3, **how: Any) -> list[float]:
    svi = SVI(model, guide, Adam({"lr": 0.01}), loss(**how))
    return [float(torch.as_tensor(svi.step(*args))) for _ in range(steps)]


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What each comparison of the test found: an entry for each site that was compared."""
    found: list[str] = []
    compare: Callable[..., None] = vectorized._compare

    def spied(site: Any, expected: Any) -> None:
        found.append(site["name"])
        compare(site, expected)

    monkeypatch.setattr(vectorized, "_compare", spied)
    return found


def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "check_vectorized_call", lambda *_: None)


@pytest.mark.parametrize("kind", GUIDES)
@pytest.mark.parametrize("how", [{}, {"max_plate_nesting": 1}, {"max_plate_nesting": 3}])
def test_the_first_step_names_site_and_fix(kind: str, how: dict[str, Any]) -> None:
    args = torch.ones(5, 3), torch.ones(5)
    svi = SVI(wrong_matmul, GUIDES[kind](wrong_matmul), Adam({}), loss(**how))
    for _ in range(2):  # and the second, to whoever goes on
        with pytest.raises(ValueError, match=r"after the site 'data': .*\(X \* w\).sum\(-1\)"):
            svi.step(*args)


def test_the_first_step_names_a_silently_wrong_site() -> None:
    args = torch.ones(4, 2), torch.ones(4)
    with pytest.raises(ValueError, match=r"the site 'y' has shape \(4, 4\) and differs"):
        run(silent_broadcast, AutoFullRankNormal(silent_broadcast), *args)


def test_the_first_step_names_a_site_whose_log_prob_fails() -> None:
    def model(y: Tensor) -> None:
        w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        pyro.sample("y", dist.Normal(w.flatten(), 1.0).to_event(1), obs=y)

    with pytest.raises(ValueError, match=r"program fails in the log_prob of the site 'y'"):
        run(model, AutoFullRankNormal(model), torch.ones(2))


@pytest.mark.parametrize("kind", GUIDES)
@pytest.mark.parametrize("how", [{}, {"max_plate_nesting": 1}])
def test_a_right_model_is_checked_once_and_keeps_its_random_numbers(
    kind: str, how: dict[str, Any], checks: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    results = []
    for _ in range(2):
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        guide = GUIDES[kind](regression)
        losses = run(regression, guide, *data(), 4, **how)  # minibatches of 4
        results.append((losses, guide.median(), torch.get_rng_state()))
        assert checks == ["w", "y"]
        unchecked(monkeypatch)
    (losses, median, state), (losses_0, median_0, state_0) = results
    assert losses == losses_0 and torch.equal(state, state_0)
    assert torch.equal(median["w"], median_0["w"])


@pytest.mark.parametrize("init", [init_to_feasible, init_to_median, init_to_sample])
def test_any_initialisation_is_checked(init: Any, checks: list[str]) -> None:
    """Those of Pyro draw random numbers, which are not the model's."""
    guide = AutoFullRankNormal(regression, init_loc_fn=init)
    run(regression, guide, *data())
    assert checks == ["w", "y"]


def test_plates_and_sequential_plates(checks: list[str]) -> None:
    def sequential(X: Tensor, y: Tensor) -> None:
        w = pyro.sample("w", dist.Normal(X.new_zeros(D), 1.0).to_event(1))
        for i in map(int, pyro.plate("data", N)):
            pyro.sample(f"y_{i}", dist.Normal((X[i] * w).sum(-1), 1.0), obs=y[i])

    run(plates, AutoFullRankNormal(plates))
    assert checks == ["a", "b", "c", "d", "x"]
    checks.clear()
    run(sequential, AutoFullRankNormal(sequential), *data())
    assert checks == ["w", *(f"y_{i}" for i in range(N))]


def test_nothing_leaks(checks: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A parameter that the model makes only when its particles are vectorised stays its own."""

    def model(y: Tensor) -> None:
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        scale = pyro.param("scale", torch.ones(()))
        if z.dim() > 0:
            scale = scale * pyro.param("late", lambda: torch.ones(()))
        pyro.sample("y", dist.Normal(z, scale), obs=y)

    guide = AutoFullRankNormal(model)
    guide(torch.ones(()))
    names: list[set[str]] = []
    check = base.check_vectorized_call

    def spied(*args: Any) -> None:
        names.append(set(pyro.get_param_store().keys()))
        check(*args)
        names.append(set(pyro.get_param_store().keys()))

    monkeypatch.setattr(base, "check_vectorized_call", spied)
    with pyro.plate("num_particles_vectorized", 3, dim=-1):
        trace: Any = poutine.trace(guide).get_trace(torch.ones(()))
    assert checks == ["z", "y"] and names[0] == names[1] and "late" not in names[0]
    assert set(trace.nodes) & {"y", "scale", "late"} == set()
    run(model, guide, torch.ones(()))
    assert "late" in pyro.get_param_store()


def test_only_the_particles_of_an_elbo_are_looked_at(checks: list[str]) -> None:
    args = torch.ones(5, 3), torch.ones(5)
    guide = AutoFullRankNormal(wrong_matmul)
    SVI(wrong_matmul, guide, Adam({}), Trace_ELBO(2)).step(*args)
    with pyro.plate("draws", 3):
        guide(*args)
    Predictive(wrong_matmul, guide=guide, num_samples=3)(*args)
    assert checks == []
    with pytest.raises(ValueError, match="after the site 'data'"):
        run(wrong_matmul, guide, *args)


def branching(y: Tensor) -> None:
    z = pyro.sample("z", dist.Normal(0.0, 1.0))
    scale = 1.0 if bool((z > 0).all()) else 2.0
    pyro.sample("y", dist.Normal(z, scale), obs=y)


def noisy(y: Tensor) -> None:
    z = pyro.sample("z", dist.Normal(0.0, 1.0))
    pyro.sample("y", dist.Normal(z + torch.randn(()), 1.0), obs=y)


def mixture(y: Tensor) -> None:
    z = pyro.sample("z", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    k = pyro.sample("k", dist.Bernoulli(0.5))
    loc = z.gather(-1, k.long()[..., None]).squeeze(-1)  # needs k and z in the same plates
    pyro.sample("y", dist.Normal(loc, 1.0), obs=y)


@pytest.mark.parametrize("model", [branching, noisy])
def test_what_can_not_be_compared_is_passed_over(model: Any, checks: list[str]) -> None:
    guide = AutoMeanFieldNormal(model)
    run(model, guide, torch.ones(()))
    assert checks == [] and guide._broadcasting_checked


def test_a_model_with_hidden_sites_is_passed_over(checks: list[str]) -> None:
    part = AutoMeanFieldNormal(poutine.block(mixture, hide=["k"]))

    def guide(y: Tensor) -> None:
        part(y)
        pyro.sample("k", dist.Bernoulli(0.5))

    run(mixture, guide, torch.ones(()))
    assert checks == [] and part._broadcasting_checked


def test_a_part_of_a_list_is_passed_over(checks: list[str]) -> None:
    def model(X: Tensor, y: Tensor) -> None:
        w = pyro.sample("w", dist.Normal(X.new_zeros(D), 1.0).to_event(1))
        scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal((X * w).sum(-1), scale), obs=y)

    guide = AutoGuideList(model)
    guide.append(AutoFullRankNormal(poutine.block(model, expose=["w"])))
    guide.append(AutoNormal(poutine.block(model, expose=["scale"])))
    run(model, guide, *data())
    assert checks == []


def test_a_copy_is_passed_over(checks: list[str]) -> None:
    guide = AutoFullRankNormal(regression)
    guide(*data())
    run(regression, copy.deepcopy(guide), *data())
    assert checks == []
    run(regression, guide, *data())
    assert checks == ["w", "y"]


def test_a_checked_guide_runs_under_our_optimizer(checks: list[str]) -> None:
    guide = AutoFullRankNormal(regression, init=None)
    svi = SVI(regression, guide, NGVB(guide), loss())
    losses = [float(torch.as_tensor(svi.step(*data()))) for _ in range(50)]
    assert checks == ["w", "y"] and losses[-1] < losses[0]
