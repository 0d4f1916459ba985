"""The recursion without inversion against the inverse, and the window that the paper prints."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from benchmarks.baselines import PaperDense, PaperWindow
from pyro_ngvi.families.base import Tensors
from pyro_ngvi.fisher import Dense, InverseFisher

D = 6
FORMS: dict[str, Dense | PaperDense] = {
    "paper": PaperDense(0.7),
    "paper, regularised": PaperDense(0.7, c_beta=0.5, beta=0.3),
    "calibrated": Dense(),
    "calibrated, growing": Dense(growth=1.5),
}
WEIGHT = 2.0
FIRST_GUESS = torch.linspace(0.5, 3.0, D, dtype=torch.float64)


def run(estimate: InverseFisher, blocks: list[Tensor], seed: int = 1) -> Tensors:
    """The state after ``blocks`` of scores (S, D); ``seed`` is that of the regularisation."""
    torch.manual_seed(seed)
    state = estimate.init(FIRST_GUESS, WEIGHT)
    for scores in blocks:
        state = estimate.update(state, scores)
    return state


def matrix(estimate: InverseFisher, state: Tensors, d: int = D) -> Tensor:
    return torch.stack([estimate.product(state, e) for e in torch.eye(d)])


def by_inversion(estimate: Dense | PaperDense, blocks: list[Tensor], seed: int = 1) -> Tensor:
    """n_s H_s^-1 as (4.6) defines it, with the matrix H_s itself."""
    torch.manual_seed(seed)
    H, total, growth, c_beta = torch.diag(WEIGHT * FIRST_GUESS), WEIGHT, 0.0, 0.0
    if isinstance(estimate, PaperDense):
        H, total, c_beta = estimate.eps * torch.eye(D), 0.0, estimate.c_beta
    else:
        growth = estimate.growth
    for k, scores in enumerate(blocks, 1):
        weight = float(k) ** growth
        total += weight * len(scores)
        H = H + weight * scores.T @ scores
        if isinstance(estimate, PaperDense) and c_beta:
            z = torch.randn(D)
            H = H + c_beta * float(k) ** -estimate.beta * torch.outer(z, z)
    return total * torch.linalg.inv(H)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", [1, 2, 9])
def test_recursion_against_the_inverse(form: str, size: int) -> None:
    estimate = FORMS[form]
    blocks = [torch.randn(size, D) for _ in range(12)]
    got = matrix(estimate, run(estimate, blocks))
    torch.testing.assert_close(got, by_inversion(estimate, blocks), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("form", ["paper", "calibrated"])
def test_a_block_equals_its_rows(form: str) -> None:
    estimate, scores = FORMS[form], torch.randn(8, D)
    at_once = run(estimate, [scores])
    one_by_one = run(estimate, list(scores.split(1)))
    torch.testing.assert_close(at_once["inverse"], one_by_one["inverse"], rtol=1e-12, atol=1e-12)
    assert at_once["total"] == one_by_one["total"]


@pytest.mark.parametrize("d", [5, 17, 50])
@pytest.mark.parametrize("size", [1, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_symmetric_to_the_last_bit(d: int, size: int, dtype: torch.dtype) -> None:
    estimate = Dense()
    state = estimate.init(torch.rand(d, dtype=dtype) + 0.5, 1.0)
    for _ in range(20):
        state = estimate.update(state, torch.randn(size, d, dtype=dtype))
        assert torch.equal(state["inverse"], state["inverse"].mT)
        assert state["inverse"].dtype == dtype


@given(
    seed=st.integers(0, 10_000),
    exponents=st.lists(st.floats(-100.0, 4.0), min_size=1, max_size=12),
    size=st.integers(1, 3),
)
@settings(deadline=None, max_examples=60)
def test_positive_definite_whatever_the_size_of_the_scores(
    seed: int, exponents: list[float], size: int
) -> None:
    """H grows from 1 to at most 1e10 here, so that float64 can hold its inverse."""
    g = torch.Generator().manual_seed(seed)
    estimate = Dense()
    state = estimate.init(torch.ones(D), 1.0)
    for exponent in exponents:
        scores = 10.0**exponent * torch.randn(size, D, generator=g)
        state = estimate.update(state, scores)
    eigenvalues = torch.linalg.eigvalsh(state["inverse"])
    assert (eigenvalues > 0).all() and (eigenvalues < 1.0 + 1e-12).all()


@pytest.mark.parametrize("estimate", [*FORMS.values(), PaperWindow(5, c_beta=0.5)], ids=repr)
def test_rows_that_are_not_finite_are_left_out(estimate: InverseFisher) -> None:
    bad = torch.randn(4, D)
    good = bad.clone()
    bad[1, 2], bad[3, 0] = float("nan"), float("-inf")
    huge = bad.clone()
    huge[1] = 0.5 * torch.finfo(torch.float64).max  # finite, but no length that is
    good[1], good[3] = 0.0, 0.0
    for scores in (bad, huge):
        state, wanted = run(estimate, [scores]), run(estimate, [good])
        assert wanted["total"] == state["total"] + 2.0
        for name in ("inverse", "psi"):
            if name in state:
                torch.testing.assert_close(state[name], wanted[name], rtol=1e-14, atol=0)


def test_nothing_but_bad_rows_changes_nothing() -> None:
    estimate = Dense()
    state = run(estimate, [torch.randn(3, D)])
    after = estimate.update(state, torch.full((2, D), float("nan")))
    assert torch.equal(matrix(estimate, state), matrix(estimate, after))


def test_calibrated_form_starts_at_the_first_guess_and_the_paper_at_nothing() -> None:
    g = torch.randn(D)
    estimate: InverseFisher = Dense()
    torch.testing.assert_close(
        estimate.product(estimate.init(FIRST_GUESS, WEIGHT), g), g / FIRST_GUESS
    )
    estimate = PaperDense(0.7)
    assert torch.equal(estimate.product(estimate.init(FIRST_GUESS, WEIGHT), g), torch.zeros_like(g))


@pytest.mark.parametrize("c_beta", [0.0, 0.5])
def test_window_equals_the_recursion_until_it_is_full(c_beta: float) -> None:
    scores = [torch.randn(2, D) for _ in range(10)]
    vectors = 30 if c_beta else 20  # two scores and, with c_beta, one draw of the regularisation
    window, dense = PaperWindow(vectors, 0.7, c_beta), PaperDense(0.7, c_beta)
    for steps in (1, 4, 10):
        got = matrix(window, run(window, scores[:steps]))
        # the recursion forms one block of two scores, the window takes them in turn
        torch.testing.assert_close(got, matrix(dense, run(dense, scores[:steps])))
    # one more vector than there is room for, and they come apart
    scores.append(torch.randn(2, D))
    got = matrix(window, run(window, scores))
    assert (got - matrix(dense, run(dense, scores))).abs().max() > 1e-3


def test_window_forgets_the_oldest_vector_first() -> None:
    estimate = PaperWindow(3)
    psi = [run(estimate, list(torch.eye(D)[:n].split(1)))["psi"] for n in range(6)]
    assert (psi[3].abs().sum(1) > 0).all() and (psi[2][2] == 0).all()
    for full, kept in ((4, [1, 2]), (5, [2])):
        assert torch.equal(psi[full][kept], psi[3][kept])
        assert not torch.equal(psi[full][full - 4], psi[3][full - 4])


def test_full_window_is_positive_definite_and_no_estimate() -> None:
    """D = 50, K = 100, 3,000 scores: the median eigenvalue is some 500 times that of F^-1."""
    d, n = 50, 3000
    g = torch.Generator().manual_seed(0)
    fisher = torch.linspace(0.5, 4.5, d)  # diagonal: the estimates do not know
    scores = torch.randn(n, d, generator=g) * fisher.sqrt()
    medians = {}
    for name, estimate in {"window": PaperWindow(100), "dense": PaperDense(1.0)}.items():
        state = estimate.init(torch.ones(d), 1.0)
        for row in scores.split(1):
            state = estimate.update(state, row)
        product = matrix(estimate, state, d)
        eigenvalues = torch.linalg.eigvalsh(0.5 * (product + product.T))
        assert (eigenvalues > 0).all()
        medians[name] = float(eigenvalues.median())
    true = float((1.0 / fisher).median())
    assert medians["window"] > 100.0 * true
    # sampling spreads eigenvalues by sqrt(D / n) = 0.13 each way and leaves the median
    assert medians["dense"] == pytest.approx(true, rel=0.13)
