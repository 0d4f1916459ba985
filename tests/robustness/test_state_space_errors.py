"""Chains of states and their sites: wrong arguments are refused in a sentence that says what to do."""

from typing import Any

import pytest
import torch

from pyro_ngvi.distributions import GaussianStateSpace, local_level, matern_state_space
from pyro_ngvi.sites.state_space import chain_posterior

I2 = ((1.0, 0.0), (0.0, 1.0))


def chain(**changes: Any) -> GaussianStateSpace:
    """Four states in R^2, with some arguments changed."""
    arguments: dict[str, Any] = {
        "initial_loc": torch.zeros(2),
        "initial_covariance": torch.tensor(I2),
        "transition": torch.tensor(I2).expand(3, 2, 2),
        "noise_covariance": torch.tensor(I2).expand(3, 2, 2),
    }
    return GaussianStateSpace(**arguments | changes)


WRONG = {
    "loc": ({"initial_loc": torch.zeros(3, 2)}, r"initial_loc has shape \(3, 2\).*expand\(\)"),
    "initial": ({"initial_covariance": torch.eye(3)}, r"initial_covariance has shape \(3, 3\)"),
    "no transition": ({"transition": None}, "transition is missing"),
    "transition": ({"transition": torch.eye(3)}, r"transition has shape \(3, 3\).*\(T-1, 2, 2\)"),
    "noise": ({"noise_covariance": torch.ones(3, 2)}, r"noise_covariance has shape \(3, 2\)"),
    "offset": ({"offset": torch.zeros(3, 3)}, r"offset has shape \(3, 3\).*\(T-1, 2\), or \(2,\)"),
    "steps": ({"offset": torch.zeros(2, 2)}, r"not one: 4 by transition, .*, 3 by offset"),
    "num_steps": ({"num_steps": 3}, "not one: 3 by num_steps, 4 by transition"),
    "no steps": ({"num_steps": 0}, "num_steps must be at least 1, got 0"),
    "unknown": (
        {"transition": torch.eye(2), "noise_covariance": torch.eye(2)},
        "T is not known: give num_steps, or one of transition, noise_covariance",
    ),
    "neither": ({"noise_covariance": None}, "one of noise_covariance and noise_scale_tril; neither"),
    "both": ({"initial_scale_tril": torch.eye(2)}, "initial_covariance and initial_scale_tril; both"),
    "singular": ({"initial_covariance": torch.ones(2, 2)}, "initial_covariance is not positive"),
    "one singular": (
        {"noise_covariance": torch.stack([torch.eye(2), torch.eye(2), -torch.eye(2)])},
        r"noise_covariance\[2\] is not positive definite",
    ),
    "not lower": (
        {"noise_covariance": None, "noise_scale_tril": torch.ones(3, 2, 2)},
        r"noise_scale_tril\[0\] is not lower triangular with a positive diagonal",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "message"), WRONG.values(), ids=WRONG)
def test_wrong_chain(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        chain(**changes)


def test_without_validation_no_value_is_read() -> None:
    chain(noise_covariance=-torch.eye(2), validate_args=False)
    matern_state_space(torch.zeros(3), -1.0, 1.0, validate_args=False)


def test_wrong_value_and_batch() -> None:
    with pytest.raises(ValueError, match=r"value has shape \(3, 2\).*\(T, S\) = \(4, 2\)"):
        chain().log_prob(torch.zeros(3, 2))
    with pytest.raises(ValueError, match="within the support"):
        chain().log_prob(torch.full((4, 2), torch.nan))
    for shape in ((2,), (3, 2), ()):
        with pytest.raises(ValueError, match=r"Batch shape \(3,\) cannot be expanded"):
            chain().expand((3,)).expand(shape)


def test_wrong_matern() -> None:
    times = torch.tensor([0.0, 1.0, 3.0])
    with pytest.raises(ValueError, match=r"nu must be 0.5, 1.5 or 2.5, got 2"):
        matern_state_space(times, 1.0, 1.0, nu=2)
    with pytest.raises(ValueError, match=r"times has shape \(3, 1\)"):
        matern_state_space(times[:, None], 1.0, 1.0)
    with pytest.raises(ValueError, match=r"times has shape \(0,\)"):
        matern_state_space(times[:0], 1.0, 1.0)
    with pytest.raises(ValueError, match=r"times\[1\] and times\[2\] are not in increasing order"):
        matern_state_space(times[[0, 2, 1]], 1.0, 1.0)
    with pytest.raises(ValueError, match=r"times\[0\] and times\[1\] are the same"):
        matern_state_space(times[[0, 0, 1]], 1.0, 1.0)
    with pytest.raises(ValueError, match=r"lengthscale must be positive, got -1.0"):
        matern_state_space(times, -1.0, 1.0)
    with pytest.raises(ValueError, match=r"variance has shape \(2,\); it must be one number"):
        matern_state_space(times, 1.0, torch.ones(2))


def test_wrong_local_level() -> None:
    with pytest.raises(ValueError, match="num_steps must be at least 1, got 0"):
        local_level(0, 1.0, 1.0)
    with pytest.raises(ValueError, match=r"step_scale must be positive, got 0.0"):
        local_level(3, 1.0, 0.0)
    with pytest.raises(ValueError, match=r"initial_scale has shape \(1,\)"):
        local_level(3, torch.ones(1), 1.0)


def test_wrong_sites() -> None:
    prior = chain()
    h, P = torch.zeros(4, 2), torch.zeros(4, 2, 2)
    with pytest.raises(
        ValueError, match=r"linear has shape \(4, 1\).*4 states of 2 numbers.*\(4, 2\)"
    ):
        chain_posterior(prior, h[:, :1], P)
    with pytest.raises(ValueError, match=r"precision has shape \(4, 2\).*must be \(4, 2, 2\)"):
        chain_posterior(prior, h, h)
    with pytest.raises(ValueError, match=r"batch shape \(3,\).*one chain"):
        chain_posterior(prior.expand((3,)), h, P)
