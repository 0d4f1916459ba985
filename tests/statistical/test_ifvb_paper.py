"""Examples 1 and 2 of Godichon-Baggioni, Nguyen & Tran (2024): the figures that can be checked.

Gradients are exact wherever a limit is far below the noise of draws; only the scores are random then.
"""

import itertools
import math
from typing import Any

import pytest
import torch

import pyro_ngvi as ngvi
from benchmarks.baselines import algorithm_1, algorithm_2
from benchmarks.ifvb_paper import calibration, example1, normal_model, poisson


@pytest.mark.parametrize(
    ("start", "error"), [((5.0, 45.0), 0.128630305), ((25.0, 25.0), 0.141455774)]
)
def test_exact_ngvb_on_the_beta_example(start: tuple[float, float], error: float) -> None:
    """The results that the authors store: after k steps the error is the first one over k + 1."""
    found = example1.errors(example1.exact(start, 872))[-1]
    assert f"{found:.9f}" == f"{error:.9f}"


@pytest.mark.parametrize("start", example1.STARTS)
def test_euclidean_gradient_is_slow(start: tuple[float, float]) -> None:
    """After 4,000 steps more than 90 of 112 (123) away."""
    assert example1.errors(example1.euclidean(start, 4000))[-1] > 90.0


@pytest.mark.slow
@pytest.mark.parametrize("start", example1.STARTS)
@pytest.mark.parametrize("seed", [0, 1])
def test_ifvb_on_the_beta_example(start: tuple[float, float], seed: int) -> None:
    run = example1.ifvb(start, 5000, seed=seed)
    assert run.left is None
    found = example1.errors(run.iterates)
    # an independent run had 3.5 (3.6) and 3e-8; its seed and ours differ
    assert 2.5 < found[1000] < 5.0
    assert found[5000] < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("start", example1.STARTS)
def test_ifvb_paper_in_svi_on_the_beta_example(start: tuple[float, float]) -> None:
    def make(guide: Any) -> ngvi.IFVB:
        return algorithm_1(guide, c_a=10.0, c_a_prime=2.0, alpha=0.6, c_beta=0.0)

    assert example1.through_svi(make, start, 5000)[-1] < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("start", example1.STARTS)
def test_averaging_delays_where_gradients_are_exact(start: tuple[float, float]) -> None:
    run = example1.ifvb(start, 5000, averaging=True)
    assert 1.0 < example1.errors(run.averages)[-1] < 4.0


@pytest.mark.parametrize("start", example1.STARTS)
def test_default_ifvb_on_the_beta_example(start: tuple[float, float]) -> None:
    assert example1.through_svi(ngvi.IFVB, start, 120, positive=True)[-1] < 1e-6


def test_poisson_gradients_are_those_of_the_bound() -> None:
    generator = torch.Generator().manual_seed(1)
    mu = 0.3 * torch.randn(3, generator=generator)
    A = torch.randn(3, 3, generator=generator)
    Sigma = 0.02 * (A @ A.T + torch.eye(3))
    in_mu, in_Sigma = poisson.gradients(mu, Sigma)
    v = torch.randn(3, generator=generator)
    h = 1e-6
    slope = poisson.bound(mu + h * v, Sigma) - poisson.bound(mu - h * v, Sigma)
    assert slope / (2 * h) == pytest.approx(float(in_mu @ v), rel=1e-6)
    V = A + A.T
    slope = poisson.bound(mu, Sigma + h * V) - poisson.bound(mu, Sigma - h * V)
    assert slope / (2 * h) == pytest.approx(float((in_Sigma * V).sum()), rel=1e-6)


def test_poisson_scores_have_the_fisher_matrix_of_rank_nine() -> None:
    """20,000 scores: entries in units of their sds have standard errors of about 0.02 (4 sigma)."""
    torch.manual_seed(0)
    Sigma = torch.tensor([[0.03, 0.01, 0.0], [0.01, 0.02, -0.005], [0.0, -0.005, 0.01]])
    lam = torch.cat([torch.zeros(3), Sigma.reshape(-1)])
    scores = poisson.scores(lam, 20000)
    P = torch.linalg.inv(Sigma)
    F = torch.zeros(12, 12)
    F[:3, :3] = P
    pairs = torch.einsum("ik,jl->ijkl", P, P) + torch.einsum("il,jk->ijkl", P, P)
    F[3:, 3:] = 0.25 * pairs.reshape(9, 9)
    sd = F.diag().sqrt()
    got = (scores.T @ scores) / len(scores)
    error = ((got - F) / sd / sd[:, None]).abs().max()
    assert error < 0.1
    assert torch.linalg.matrix_rank(got, rtol=1e-9) == 9


def test_poisson_exact_pair_reaches_the_optimum() -> None:
    _, _, best = poisson.optimum()
    found = poisson.ngvb(1000, poisson.printed_step)[2]
    assert 0.0 <= best - found[-1] < 0.001
    assert all(later > earlier for earlier, later in itertools.pairwise(found))


@pytest.mark.parametrize("optimizer", [ngvi.NGVB, ngvi.IFVB])
def test_poisson_defaults_in_svi(optimizer: type) -> None:
    _, _, best = poisson.optimum()
    assert best - poisson.through_svi(optimizer, 100)[-1] < 0.01


def test_poisson_ifvb_as_printed_leaves_the_domain_at_once() -> None:
    """H_0 = I against Fisher entries near 5,000: Sigma is not positive definite after one step."""
    assert [poisson.ifvb(3, seed=seed).left for seed in range(3)] == [1, 1, 1]


@pytest.mark.slow
@pytest.mark.parametrize(("averaging", "limit"), [(False, 0.01), (True, 0.5)])
def test_poisson_ifvb_with_a_guard(averaging: bool, limit: float) -> None:
    """With scores before the first step and bounded changes of variances, singular F and all.

    The average still carries the early iterates: 0.02 to 0.12 nat over three seeds.
    """
    _, _, best = poisson.optimum()
    run = poisson.ifvb(1000, guarded=True, averaging=averaging)
    assert run.left is None
    path = run.averages if averaging else run.iterates
    assert best - poisson.bounds(path[-1:])[0] < limit


def test_normal_model_optimum() -> None:
    best = normal_model.optimum()
    torch.testing.assert_close(best, torch.tensor(normal_model.OPTIMUM), rtol=0.0, atol=6e-6)
    assert float(normal_model.bound(*best)) == pytest.approx(normal_model.BEST, abs=6e-6)


def test_normal_model_exact_natural_gradient() -> None:
    assert normal_model.BEST - normal_model.ngvb(200)[-1] < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "settings"),
    [(algorithm_1, normal_model.SCRIPT_IFVB), (algorithm_2, normal_model.SCRIPT_AIFVB)],
)
def test_normal_model_with_the_settings_of_the_script(
    algorithm: Any, settings: dict[str, Any]
) -> None:
    """In logarithms of v, a, b, exact gradients: within 0.01 nat."""
    found = normal_model.through_svi(
        lambda guide: algorithm(guide, **settings),
        500,
        positive=True,
        average=algorithm is algorithm_2,
    )
    assert normal_model.BEST - found[-1] < 0.01


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "settings", "limit"),
    # stored runs of the authors stopped 0.0085 and 0.0135 short of the optimum
    [(algorithm_1, normal_model.SCRIPT_IFVB, 0.01), (algorithm_2, normal_model.SCRIPT_AIFVB, 0.02)],
)
def test_normal_model_in_the_coordinates_of_the_script(
    algorithm: Any, settings: dict[str, Any], limit: float
) -> None:
    found = normal_model.through_svi(
        lambda guide: algorithm(guide, **settings),
        3000,
        positive=False,
        average=algorithm is algorithm_2,
    )
    assert normal_model.BEST - found[-1] < limit


def test_normal_model_by_exponential_family_guide() -> None:
    found = normal_model.exponential_family(ngvi.NGVB, 150)
    assert normal_model.BEST - found[-1] < 0.01


@pytest.mark.slow
def test_normal_model_with_default_ifvb() -> None:
    """32 particles; the mean of the last 200 gaps, some 0.0004 nat."""
    found = normal_model.through_svi(ngvi.IFVB, 1500, positive=True, particles=32)
    assert math.fsum(normal_model.BEST - x for x in found[-200:]) / 200 < 0.01


def test_only_the_window_loses_calibration() -> None:
    """D = 50, 1,000 scores: edges of the recursion are (1 -+ sqrt(D/n))^-2 = 0.67 and 1.66."""
    F = calibration.fisher_matrix("decaying", 50)
    found = {
        name: calibration.eigenvalues(estimate, F, [1000])[1000]
        for name, estimate in calibration.forms().items()
    }
    assert 0.6 < found["dense"][0] < found["dense"][2] < 1.8
    assert found["printed window"][1] > 50.0
    low, middle, high = found["low rank"]
    assert 0.4 < low < 0.9 < middle < 1.1 < high < 2.0
