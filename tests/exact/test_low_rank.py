"""The streaming low-rank estimate: its product, its merges, its book-keeping."""

from typing import Any

import pytest
import torch
from torch import Tensor

from pyro_ngvi.families.base import Tensors
from pyro_ngvi.fisher import LowRank

D = 12
FIRST_GUESS = torch.linspace(0.5, 3.0, D, dtype=torch.float64)


def some_scores(n: int, d: int = D, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Scores with two strong directions, correlated and of unequal sizes."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, d, generator=g, dtype=dtype)
    factors = torch.randn(2, d, generator=g, dtype=dtype)
    x = x + 4.0 * torch.randn(n, 2, generator=g, dtype=dtype) @ factors
    return x * torch.logspace(-1, 1, d, dtype=dtype)


def start(estimate: LowRank, d: int = D, dtype: torch.dtype = torch.float64) -> Tensors:
    guess = torch.linspace(0.5, 3.0, d, dtype=dtype)
    return estimate.init(guess, 2.0)


def matrix(estimate: LowRank, state: Tensors) -> Tensor:
    unit = torch.eye(len(state["diagonal"]), dtype=state["diagonal"].dtype)
    return torch.stack([estimate.product(state, e) for e in unit])


def copy(state: Tensors) -> Tensors:
    return {name: value.clone() for name, value in state.items()}


def same(one: Tensors, other: Tensors) -> bool:
    assert one.keys() == other.keys()
    return all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("rank", [1, 3, 8])
@pytest.mark.parametrize("growth", [0.0, 2.0])
@pytest.mark.parametrize("n", [9, 300])  # with and without rows that wait
def test_product_is_the_inverse(rank: int, growth: float, n: int) -> None:
    estimate = LowRank(rank, growth)
    state = start(estimate)
    for row in some_scores(n).split(1):
        state = estimate.update(state, row)
    W, U = torch.diag(1.0 / state["inverse_unit"]), state["basis"]
    spikes, level = state["spikes"], state["level"]
    assert n == 9 or (spikes > 1.5 * level).any()
    F = W @ (U.T @ torch.diag(spikes - level) @ U + level * torch.eye(D)) @ W
    got, wanted = matrix(estimate, state), torch.linalg.inv(F)
    # relative to the size of the coordinates, which differ by a factor 100
    error = W @ (got - wanted) @ W / (W @ wanted @ W).abs().max()
    assert error.abs().max() < 1e-10


def test_diagonal_is_the_mean_square_with_the_first_guess() -> None:
    estimate, scores = LowRank(3), some_scores(50)
    state = estimate.update(start(estimate), scores)
    wanted = (2.0 * FIRST_GUESS + scores.square().sum(0)) / 52.0
    torch.testing.assert_close(state["diagonal"], wanted, rtol=1e-12, atol=0)
    assert float(state["diagonal_total"]) == 52.0 and float(state["total"]) == 50.0


def test_growing_weights() -> None:
    """Score k has weight k^2, in the diagonal, in the eigenvectors and in the number of scores."""
    estimate, scores = LowRank(D, growth=2.0), some_scores(8)
    state = start(estimate)
    for row in scores.split(1):
        state = estimate.update(state, row)
    w = torch.arange(1.0, 9.0) ** 2
    weighted = (w[:, None] * scores).T @ scores
    wanted = (2.0 * FIRST_GUESS + weighted.diagonal()) / (2.0 + w.sum())
    torch.testing.assert_close(state["diagonal"], wanted, rtol=1e-12, atol=0)
    torch.testing.assert_close(second_moment(state), weighted, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(state["mean_weight"], w.square().sum() / w.sum())


def second_moment(state: Tensors) -> Tensor:
    """The sum of phi phi' that the merged rows stand for."""
    root = state["values"].sqrt()[:, None] * state["basis"] * state["merged_unit"]
    return root.T @ root


def test_basis_is_orthonormal_after_merges() -> None:
    estimate = LowRank(5)
    state = start(estimate)
    for row in some_scores(200).split(1):
        state = estimate.update(state, row)
    assert int(state["waiting"]) == 0
    torch.testing.assert_close(state["basis"] @ state["basis"].T, torch.eye(5), rtol=0, atol=1e-12)
    assert (state["values"].diff() <= 0).all()  # largest first


@pytest.mark.parametrize("cuts", [[8], [4, 4], [1] * 8, [3, 5]])
def test_nothing_is_lost_where_all_scores_fit(cuts: list[int]) -> None:
    """The rows held stand for every score, however these came; the last merge has taken all."""
    estimate, scores = LowRank(D), some_scores(8)
    state = start(estimate)
    for block in scores.split(cuts):
        state = estimate.update(state, block)
    if int(state["waiting"]):
        state = estimate._merge(state)
    torch.testing.assert_close(second_moment(state), scores.T @ scores, rtol=1e-10, atol=1e-10)


def test_two_merges_equal_one() -> None:
    estimate, scores = LowRank(16), some_scores(14, d=30)
    twice = estimate._merge(estimate.update(start(estimate, 30), scores[:6]))
    twice = estimate._merge(estimate.update(twice, scores[6:13]))
    once = start(estimate, 30)
    once["next_merge"] = torch.tensor(16)
    once["buffer"] = torch.zeros(16, 30)
    once = estimate._merge(estimate.update(once, scores[:13]))
    torch.testing.assert_close(second_moment(twice), second_moment(once), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(matrix(estimate, twice), matrix(estimate, once))


@pytest.mark.parametrize("rank", [3, 40])
def test_blocks_equal_rows(rank: int) -> None:
    """Up to a block that fills the buffer; merges fall on the same rows."""
    estimate, scores = LowRank(rank), some_scores(96, d=60)
    by_rows = by_blocks = start(estimate, 60)
    by_blocks = copy(by_blocks)
    for row in scores.split(1):
        by_rows = estimate.update(by_rows, row)
    for block in scores.split(4):
        by_blocks = estimate.update(by_blocks, block)
    torch.testing.assert_close(matrix(estimate, by_rows), matrix(estimate, by_blocks))
    assert by_rows["total"] == by_blocks["total"] == 96.0


@pytest.mark.parametrize("size", [1, 7, 8, 9, 100])
def test_blocks_of_any_size_are_taken_whole(size: int) -> None:
    estimate, scores = LowRank(D), some_scores(100)
    state = start(estimate)
    for block in scores.split(size):
        state = estimate.update(state, block)
    state = estimate._merge(state)
    assert float(state["total"]) == 100.0
    torch.testing.assert_close(second_moment(state), scores.T @ scores, rtol=1e-9, atol=1e-9)


def test_rows_that_are_not_finite_are_left_out() -> None:
    estimate = LowRank(D)
    bad = some_scores(16)
    bad[3, 0], bad[10, 5] = float("nan"), float("inf")
    bad[11] = 0.5 * torch.finfo(torch.float64).max  # finite, but no length that is
    good = bad.clone()
    good[[3, 10, 11]] = 0.0
    state = estimate.update(start(estimate), bad)
    wanted = estimate.update(start(estimate), good)
    assert float(state["total"]) == 13.0
    torch.testing.assert_close(second_moment(state), second_moment(wanted), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(state["diagonal"] * 15.0, wanted["diagonal"] * 18.0)


def test_nothing_but_bad_rows_leaves_the_first_guess() -> None:
    estimate = LowRank(4)
    state = estimate.update(start(estimate), torch.full((20, D), float("nan")))
    g = torch.randn(D)
    torch.testing.assert_close(estimate.product(state, g), g / FIRST_GUESS)


def test_starts_at_the_first_guess() -> None:
    estimate, g = LowRank(4), torch.randn(D)
    torch.testing.assert_close(estimate.product(start(estimate), g), g / FIRST_GUESS)


@pytest.mark.parametrize("n", [3, 20])  # with and without a merge
def test_the_state_before_an_update_is_still_good(n: int) -> None:
    """A step that is cut off goes on from it; rows of its buffer that do not count may change."""
    estimate, scores = LowRank(4), some_scores(n)
    state = estimate.update(start(estimate), some_scores(2))
    kept, before = copy(state), dict(state)
    after = estimate.update(state, scores)
    assert n == 20 or torch.equal(after["buffer"][2:5], scores)
    assert state == before  # the dict itself is left alone
    used = int(state["waiting"])
    for name, value in kept.items():
        rows = used if name == "buffer" else None
        assert (
            torch.equal(state[name][:rows], value[:rows]) if value.dim() else state[name] == value
        )
    assert same(after, estimate.update(state, scores))
    assert torch.equal(after["guess"], FIRST_GUESS)


@pytest.mark.parametrize("cut", [5, 16, 50])
@pytest.mark.parametrize("growth", [0.0, 3.0])
def test_resumed_from_a_copy_bit_for_bit(cut: int, growth: float, tmp_path: Any) -> None:
    estimate, scores = LowRank(6, growth), some_scores(90)
    state = start(estimate)
    saved: Tensors = {}
    for k, row in enumerate(scores.split(1)):
        if k == cut:
            assert all(isinstance(value, Tensor) for value in state.values())
            torch.save(state, tmp_path / "state.pt")
        state = estimate.update(state, row)
    saved = torch.load(tmp_path / "state.pt", weights_only=True)
    for row in scores[cut:].split(1):
        saved = estimate.update(saved, row)
    assert same(state, saved)


@pytest.mark.parametrize("d", [1, 2, 5])
def test_fewer_dimensions_than_rank(d: int) -> None:
    estimate, scores = LowRank(20), some_scores(1500, d=d)
    state = estimate.update(start(estimate, d), scores)
    assert state["basis"].shape == (d, d)
    F = scores.T @ scores / len(scores)
    whitened = torch.linalg.cholesky(F).T @ matrix(estimate, state) @ torch.linalg.cholesky(F)
    # eigenvalues within the edge, 2 sqrt(d / n) wide, count as the level
    torch.testing.assert_close(whitened, torch.eye(d), rtol=0, atol=3.0 * (d / 1500.0) ** 0.5)


@pytest.mark.parametrize("first_guess", [1.0, 0.0])
def test_a_coordinate_without_scores_is_left_alone(first_guess: float) -> None:
    estimate, scores = LowRank(5), some_scores(200)
    scores[:, 4] = 0.0
    guess = FIRST_GUESS.clone()
    guess[4] = first_guess
    state = estimate.update(estimate.init(guess, 1.0), scores)
    product = matrix(estimate, state)
    assert product.isfinite().all() and product[4, 4] > 0
    keep = torch.arange(D) != 4
    assert (product[4, keep] == 0).all()
    others = LowRank(5)
    wanted = matrix(others, others.update(others.init(guess[keep], 1.0), scores[:, keep]))
    torch.testing.assert_close(product[keep][:, keep], wanted)


def test_float32_follows_float64() -> None:
    estimate, scores = LowRank(5), some_scores(300)
    double, single = start(estimate), start(estimate, dtype=torch.float32)
    for row in scores.split(1):
        double, single = estimate.update(double, row), estimate.update(single, row.float())
    reals = [value for value in single.values() if value.is_floating_point()]
    assert all(value.dtype == torch.float32 for value in reals)
    torch.testing.assert_close(
        matrix(estimate, single).double(), matrix(estimate, double), rtol=1e-3, atol=1e-4
    )


def test_a_million_growing_weights_fit_into_float32() -> None:
    """Sums of the squares of k^3 would overflow after half a million scores."""
    estimate = LowRank(3, growth=3.0)
    state = start(estimate, dtype=torch.float32)
    state["updates"] = torch.tensor(1_000_000)
    for row in some_scores(40, dtype=torch.float32).split(1):
        state = estimate.update(state, row)
    assert all(value.isfinite().all() for value in state.values())
    # forty scores of nearly equal weight
    assert float(state["total"] / state["mean_weight"]) == pytest.approx(40.0, rel=1e-4)


@pytest.mark.parametrize("n", [1, 5, 60])
def test_positive_definite_from_the_first_score(n: int) -> None:
    estimate = LowRank(5)
    state = estimate.update(start(estimate), some_scores(n))
    assert (torch.linalg.eigvalsh(matrix(estimate, state)) > 0).all()


def test_repeated_scores_in_float32() -> None:
    """A Gram matrix of low rank, on which LAPACK's float32 eigenvalues do not converge."""
    g = torch.Generator().manual_seed(0)
    scores = torch.randn(8, 1, 1000, generator=g, dtype=torch.float32)
    estimate = LowRank(100, growth=1.0)
    state = estimate.init(torch.ones(1000, dtype=torch.float32), 100.0)
    for k in range(60):
        state = estimate.update(state, scores[k % 8])
    found = estimate.product(state, scores[0, 0])
    assert found.dtype == torch.float32
    assert bool(torch.isfinite(found).all())
