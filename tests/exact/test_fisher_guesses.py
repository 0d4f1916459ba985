"""A first guess of the Fisher matrix, how much it weighs beside scores, and when it is given up."""

from typing import Any

import pytest
import torch
from torch import Tensor

from pyro_ngvi.families.base import Tensors
from pyro_ngvi.fisher import Dense, LowRank
from pyro_ngvi.fisher.inverse import first_guess, trust
from pyro_ngvi.optim.blocks import Coordinates
from pyro_ngvi.optim.ifvb_rule import IFVBRule
from pyro_ngvi.optim.natural_gradient import NaturalGradientRule

D = 6


def correlated(n: int, seed: int = 0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    common = 3.0 * torch.randn(n, 1, generator=g)
    return (torch.randn(n, D, generator=g) + common) * torch.logspace(-1, 1, D)


def fisher(estimate: LowRank, state: Tensors) -> Tensor:
    """The estimate of F itself."""
    inverse = torch.stack([estimate.product(state, e) for e in torch.eye(D)])
    return torch.linalg.inv(0.5 * (inverse + inverse.T))


def updated(guess: Tensor, weight: float, scores: Tensor) -> tuple[LowRank, Tensors]:
    estimate = LowRank(D)
    return estimate, estimate.update(estimate.init(guess, weight), scores)


@pytest.mark.parametrize("share", [0.5, 0.9])
def test_the_first_guess_counts_like_its_weight_of_scores(share: float) -> None:
    """F = (n F_scores + w diag(guess)) / (n + w), here with a guess that is right on the diagonal."""
    scores = correlated(400)
    guess, n = scores.square().mean(0), float(len(scores))
    alone = fisher(*updated(guess, 1e-9, scores))
    both = fisher(*updated(guess, n * (1.0 - share) / share, scores))
    wanted = share * alone + (1.0 - share) * torch.diag(guess)
    unit = guess.sqrt()
    torch.testing.assert_close(both / unit / unit[:, None], wanted / unit / unit[:, None])


@pytest.mark.parametrize("factor", [10.0, 0.1])
def test_a_wrong_guess_of_the_sizes_leaves_the_correlations(factor: float) -> None:
    """In units of its own diagonal the estimate has the correlations of the scores, by their share.

    4,000 scores leave eigenvalues an uncertainty of sqrt(D / n) = 4 %.
    """
    scores = correlated(4000)
    square = scores.square().mean(0)
    correlation = scores.T @ scores / len(scores) / torch.outer(square, square).sqrt()
    estimate, state = updated(factor * square, float(len(scores)), scores)
    unit = state["inverse_unit"]
    found = fisher(estimate, state) * torch.outer(unit, unit)
    wanted = 0.5 * correlation + 0.5 * torch.eye(D)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0.1)


@pytest.mark.parametrize("times", [1, 3])
def test_a_coordinate_with_few_scores_stays_near_its_guess(times: int) -> None:
    """In minibatches a local parameter has a score once in a while, and the first may be tiny."""
    scores = correlated(300)
    scores[:, 0] = 0.0
    scores[:times, 0] = 1e-6
    guess = scores.square().mean(0)
    guess[0] = 2.0
    estimate, state = updated(guess, 1.0, scores)
    # F_00 >= guess (1 - trust), and trust is 1/10 after one score and 1/2 after three
    assert float(2.0 * state["inverse_unit"][0].square()) == pytest.approx(
        {1: 10 / 9, 3: 2.0}[times], rel=0.01
    )
    # beside the level of the rest, which keeps the trace of the whitened F
    product = estimate.product(state, torch.eye(D)[0])[0]
    assert float(product * state["level"] * 2.0) < 2.5


def test_a_coordinate_with_many_scores_forgets_its_guess() -> None:
    scores = correlated(1000)
    _, state = updated(torch.full((D,), 1e4), 1.0, scores)
    wanted = (1e4 + scores.square().sum(0)) / 1001.0
    torch.testing.assert_close(state["inverse_unit"] ** -2, wanted, rtol=1e-2, atol=0)


def test_trust_is_even_after_three_scores_and_whole_in_the_end() -> None:
    assert trust(torch.tensor(0.0)) == 0.0
    assert trust(torch.tensor(3.0)) == 0.5
    m = torch.tensor([100.0, 200.0])
    doubt = 1.0 - trust(m)
    # one part in (m / 3)^2: less than the 1 / m that the mean square of m scores itself is unsure by
    torch.testing.assert_close(doubt * (m / 3.0).square(), torch.ones(2), rtol=1e-3, atol=0)


def test_first_guess_of_what_the_scores_have_not_shown() -> None:
    n = 64
    scores = torch.zeros(n, 9)
    scores[:, [0, 1]] = 2.0 * torch.tensor([1.0, -1.0]).repeat(n // 2)[:, None]
    scores[:3, 2] = 1e-9  # three scores of next to nothing: as much the mean of its parameter
    scores[:, [4, 5]] = 0.1
    guess = first_guess(scores, [4, 2, 3])
    mean = (4.0 + 4.0) / 3.0  # over the three entries that have had a score
    wanted = torch.tensor([4.0, 4.0, 0.5 * mean, mean, 0.01, 0.01])
    torch.testing.assert_close(guess[:6], wanted, rtol=1e-2, atol=0)
    # a parameter without any score: the mean square of all entries
    torch.testing.assert_close(guess[6:], scores.square().mean().expand(3))


@pytest.mark.parametrize("n", [4, 32])
def test_dense_steps_stay_short_where_no_score_has_been(n: int) -> None:
    """With H_0 of the weight of D scores, n of them lengthen steps elsewhere by 1 + n / D at most."""
    d = 50
    frame: Any = Coordinates(("x",))
    rule = IFVBRule(NaturalGradientRule(frame), Dense())
    params = {"x": torch.zeros(d)}
    scores = torch.randn(n, d)
    scores[:, 0] = 0.0
    state = rule.init(params, scores)["fisher"]
    guess = first_guess(scores, [d])[0]
    product = Dense().product(state, torch.eye(d)[0])
    torch.testing.assert_close(product[0], (1.0 + n / d) / guess)
