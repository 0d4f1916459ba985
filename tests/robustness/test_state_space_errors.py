"""Chains of states: wrong arguments are refused in a sentence that says what to do."""

from typing import Any

import pytest
import torch

from pyro_ngvi.distributions import GaussianStateSpace, local_level, matern_state_space

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
    "initial": ({"initial_covariance": torch.eye(3)}, r"initial covariance has shape \(3, 3\)"),
    "transition": ({"transition": torch.eye(3)}, r"transition has shape \(3, 3\).*\(2, 2\)"),
    "noise": ({"noise_covariance": torch.eye(3)}, r"noise covariance has shape \(3, 3\).*\(2, 2\)"),
    "offset": ({"offset": torch.zeros(3, 3)}, r"offset has shape \(3, 3\).*\(2,\)"),
    "steps": ({"offset": torch.zeros(2, 2)}, "offset is for 3 states"),
    "num_steps": ({"num_steps": 3}, "transition is for 4 states, .*says 3"),
    "no steps": ({"num_steps": 0}, "num_steps >= 1"),
    "unknown": (
        {"transition": torch.eye(2), "noise_covariance": torch.eye(2)},
        "give the number of states, num_steps",
    ),
    "neither": ({"noise_covariance": None}, "one of noise_covariance and noise_scale_tril"),
    "both": ({"initial_scale_tril": torch.eye(2)}, "initial_covariance and initial_scale_tril"),
    "singular": (
        {"initial_covariance": torch.ones(2, 2)},
        "initial_covariance is not positive definite; it is singular where a part of the state",
    ),
    "not lower": (
        {"noise_covariance": None, "noise_scale_tril": torch.ones(3, 2, 2)},
        r"noise_scale_tril is not lower triangular with a positive diagonal",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "message"), WRONG.values(), ids=WRONG)
def test_wrong_chain(changes: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, RuntimeError), match=message):
        chain(**changes)


def test_without_validation_no_value_is_read() -> None:
    chain(noise_covariance=-torch.eye(2), validate_args=False)
    matern_state_space(torch.zeros(3), -1.0, 1.0, validate_args=False)


def test_wrong_value() -> None:
    with pytest.raises(ValueError, match="right-most size of value must match event_shape"):
        chain().log_prob(torch.zeros(3, 2))
    with pytest.raises(ValueError, match="within the support"):
        chain().log_prob(torch.full((4, 2), torch.nan))


def test_wrong_matern() -> None:
    times = torch.tensor([0.0, 1.0, 3.0])
    with pytest.raises(ValueError, match=r"nu = 0.5, 1.5 or 2.5, .* nu = 2"):
        matern_state_space(times, 1.0, 1.0, nu=2)
    for wrong in (times[:, None], times[:0]):
        with pytest.raises(ValueError, match="takes times"):
            matern_state_space(wrong, 1.0, 1.0)
    for order in ([0, 2, 1], [0, 1, 1]):
        with pytest.raises(ValueError, match=r"times\[1\] is not below the next"):
            matern_state_space(times[order], 1.0, 1.0)
    with pytest.raises(ValueError, match="lengthscale and variance must be positive"):
        matern_state_space(times, -1.0, 1.0)
    with pytest.raises(ValueError, match=r"variance has shape \(2,\); it must be one number"):
        matern_state_space(times, 1.0, torch.ones(2))


def test_wrong_local_level() -> None:
    with pytest.raises(ValueError, match="num_steps >= 1"):
        local_level(0, 1.0, 1.0)
    with pytest.raises(ValueError, match="positive diagonal"):
        local_level(3, 1.0, 0.0)
    with pytest.raises(ValueError, match=r"initial_scale has shape \(1,\)"):
        local_level(3, torch.ones(1), 1.0)
