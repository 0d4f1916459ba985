"""What the leaderboard says of a run: the answer that was held at a budget, and the tables."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.contestants import Watch, present
from benchmarks.jax_methods import reordered
from benchmarks.leaderboard_report import BEST, FIXED, collect, losses, medians, report, summary
from benchmarks.problems import load


@pytest.fixture
def wait(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Moves the clock of the process."""
    now = [100.0]
    monkeypatch.setattr("time.process_time", lambda: now[0])

    def wait(seconds: float) -> None:
        now[0] += seconds

    return wait


def answer(value: float) -> tuple[Tensor, Tensor]:
    return torch.full((2,), value), torch.eye(2)


def held(watch: Watch) -> dict[float, float | None]:
    return {b: None if given is None else float(given[0][0]) for b, given in watch.held.items()}


def test_an_answer_counts_from_when_it_is_there(wait: Callable[[float], None]) -> None:
    watch = Watch((1.0, 2.0, 4.0), lambda loc, scale_tril: math.inf)
    watch.go()
    for k in range(1, 4):  # at 0.75, 1.5 and 2.25 s
        wait(0.75)
        assert not watch.report(*answer(k))
    watch.end()
    assert held(watch) == {1.0: 1.0, 2.0: 2.0, 4.0: 3.0}


def test_the_clock_stands_still_while_answers_are_read(wait: Callable[[float], None]) -> None:
    def slow() -> tuple[Tensor, Tensor]:
        wait(5.0)
        return answer(1.0)

    def look(loc: Tensor, scale_tril: Tensor) -> float:
        wait(7.0)
        return 1.0

    watch = Watch((1.0,), look)
    watch.go()
    wait(0.5)
    assert not watch.see(slow)
    assert watch.seconds == 0.5
    wait(0.4)
    watch.pause()
    assert watch.seconds == pytest.approx(0.9)


def test_compilation_is_not_on_the_clock(wait: Callable[[float], None]) -> None:
    watch = Watch((1.0,), lambda loc, scale_tril: 1.0)
    watch.go()
    wait(0.25)
    watch.compiled(lambda: wait(8.0))
    wait(0.5)
    watch.pause()
    assert (watch.seconds, watch.compile_seconds) == (0.75, 8.0)


def test_absent_packages_leave_their_methods_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("benchmarks.contestants.find_spec", lambda name: None)
    assert present(("fit", "NumPyro")) == ["fit"]
    assert "the rows of NumPyro are left out" in capsys.readouterr().out


def test_a_factor_in_another_order_has_the_covariance() -> None:
    """Also where the covariance itself has no factor any more in float64."""
    scale = torch.tensor([[1.0, 0.0, 0.0], [1.0, 1e-9, 0.0], [2.0, 1.0, 3.0]])
    order = torch.tensor([1, 2, 0])
    assert torch.linalg.cholesky_ex((scale @ scale.T)[order][:, order]).info > 0
    found = reordered(scale, order)
    assert bool((found.diagonal() > 0).all()) and bool((found.triu(1) == 0).all())
    torch.testing.assert_close(found @ found.T, (scale @ scale.T)[order][:, order])
    noise = torch.linalg.solve(found, scale[order])  # a rotation
    torch.testing.assert_close(noise @ noise.T, torch.eye(3), rtol=0, atol=1e-6)


def test_blackjax_is_given_the_gaussian_of_its_draws() -> None:
    """Its own density of its draws."""
    jax = pytest.importorskip("jax", reason="JAX is not installed")
    pytest.importorskip("numpyro", reason="NumPyro is not installed")
    pathfinder = pytest.importorskip("blackjax.vi.pathfinder", reason="BlackJAX is not installed")
    from benchmarks.jax_methods import blackjax_pathfinder
    from benchmarks.numpyro_models import log_joint

    problem, key = load("varying_intercepts"), jax.random.PRNGKey(3)
    loc, scale_tril = blackjax_pathfinder(problem)(3, torch.zeros(problem.dim))
    state, _ = pathfinder.approximate(key, log_joint(problem), jax.numpy.zeros(problem.dim))
    draws, log_q = map(np.array, pathfinder.sample(key, state, 5))
    q = torch.distributions.MultivariateNormal(loc, scale_tril=scale_tril)
    found = q.log_prob(torch.as_tensor(draws))
    np.testing.assert_allclose(found.numpy(), log_q, rtol=1e-8)


def test_late_failed_and_infinite_runs_have_nothing(wait: Callable[[float], None]) -> None:
    late = Watch((1.0, 2.0), lambda loc, scale_tril: 1.0)
    late.go()
    wait(1.5)
    late.report(*answer(1.0))
    late.end()
    assert held(late) == {1.0: None, 2.0: 1.0}
    failed = Watch((1.0, 2.0), lambda loc, scale_tril: 1.0)
    failed.go()
    wait(0.5)
    assert not failed.report(*answer(1.0))
    wait(0.1)
    assert failed.report(*answer(math.nan))
    failed.end()
    assert held(failed) == {1.0: None, 2.0: None}


def test_a_run_ends_at_its_limit_or_when_it_has_settled(wait: Callable[[float], None]) -> None:
    watch = Watch((1.0, 10.0), lambda loc, scale_tril: 0.0)
    watch.go()
    ended = []
    while not ended or not ended[-1]:
        wait(0.3)
        ended.append(watch.report(*answer(0.0)))
    assert watch.settled and len(ended) == 4
    watch = Watch((1.0, 10.0), lambda loc, scale_tril: 1.0)
    watch.go()
    wait(9.9)
    assert not watch.report(*answer(0.0))
    wait(0.1)
    assert watch.report(*answer(1.0))


def row(problem: str, method: str, errors: list[float]) -> dict[str, object]:
    base = {"dim": 2, "family": "full_rank", "seed": 0, "seconds": 1.0, "standard_error": 0.001}
    return base | {"problem": problem, "method": method, "errors": errors}


def test_tables() -> None:
    """Adam's best rate by budget; shares, worst errors, and the rows in which we are behind."""
    rows = [
        row("a", "fit", [math.inf, 0.05]),
        row("a", "NGVB loop", [0.3, 0.01]),
        row("a", "Adam 0.01", [5.0, 2.0]),
        row("a", "Adam 0.1", [0.08, 3.0]),
        row("b", "fit", [0.0, 0.0]),
        row("b", "NGVB loop", [0.2, 0.2]),
        row("b", "Adam 0.01", [0.05, 0.05]),
        row("b", "Adam 0.1", [9.0, 0.01]),
        row("b", "NumPyro 0.01", [0.5, 0.4]),
        row("b", "NumPyro 0.1", [0.6, 0.3]),
        row("a", "NumPyro 0.01", [0.5, 0.3]),
    ]
    table = collect(rows, "full_rank")
    assert table[("a", 2, 0)][BEST] == (0.08, 2.0)
    assert table[("a", 2, 0)][FIXED] == (5.0, 2.0)
    assert table[("b", 2, 0)]["NumPyro's " + BEST] == (0.5, 0.3)
    assert table[("b", 2, 0)]["NumPyro's " + FIXED] == (0.5, 0.4)
    lines = summary(table, (1.0, 2.0)).splitlines()
    assert lines[2].startswith("| `ngvi.fit` | 50 % | 100 % | none | 0.050 |")
    behind = losses(table, (1.0, 2.0))
    assert "| a, d = 2 | 1 s | 0.300 | Adam, best of five rates 0.080 |" in behind
    assert "b, d" not in behind
    assert "### full_rank: 2 problems" in report(rows, (1.0, 2.0))


def test_several_seeds_are_shares_of_runs_and_medians_of_problems() -> None:
    errors = {0: [3.0, 0.05], 1: [1.0, 0.2], 2: [2.0, 0.01]}
    rows = [row("a", "fit", e) | {"seed": seed} for seed, e in errors.items()]
    table = collect(rows, "full_rank")
    assert "| 0 % | 67 % | 3.0 | 0.200 |" in summary(table, (0.3, 1.0))
    assert list(medians(table).values()) == [{"`ngvi.fit`": (2.0, 0.05)}]
