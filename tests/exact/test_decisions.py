"""The bounds of the three decisions, from both sides, on weights and shifts made by hand."""

from typing import Any

import numpy as np
import pytest
import torch
from torch.distributions import Normal, kl_divergence

from pyro_ngvi.diagnostics.khat import KHat
from pyro_ngvi.diagnostics.shifts import Shift
from pyro_ngvi.diagnostics.weights import Slope

S = 2000


def weights_of(nats: float) -> np.ndarray:
    """Normalised log weights of q = N(m, 1) for p = N(0, 1), KL(q || p) = m^2 / 2, at its quantiles."""
    levels = torch.arange(S, dtype=torch.float64).add(0.5) / S
    x = (2 * nats) ** 0.5 * Normal(0.0, 1.0).icdf(
        levels
    ).numpy()  # log p - log q = -m eps - m^2 / 2
    return x - np.logaddexp.reduce(x)


def khat_of(log_weights: np.ndarray, **known: Any) -> KHat:
    ess = float(1 / np.exp(2 * log_weights).sum())
    arguments: dict[str, Any] = {"khat": 0.1, "threshold": 0.7, "ess": ess} | known
    return KHat(log_weights=log_weights, **arguments)


def shift(**entries: float) -> Shift:
    zero = dict.fromkeys(("mean", "mean_error", "log_sd", "log_sd_error"), 0.0) | entries
    return Shift(**{name: np.array([value]) for name, value in zero.items()})


@pytest.mark.parametrize("nats", [0.0, 0.045, 0.5])
def test_kl_of_gaussians_from_their_weights(nats: float) -> None:
    # the quantiles leave a little of the tails out
    assert khat_of(weights_of(nats)).kl == pytest.approx(nats, rel=0.02, abs=1e-12)


def test_without_shifts_the_bound_is_that_of_means_three_tenths_of_an_sd_apart() -> None:
    at = float(kl_divergence(Normal(0.3, 1.0), Normal(0.0, 1.0)))
    assert khat_of(weights_of(0.9 * at)).decision == "intervals"
    assert khat_of(weights_of(1.1 * at)).decision == "resample"


@pytest.mark.parametrize(
    ("entries", "decision"),
    [
        ({"mean": -0.29}, "intervals"),
        ({"mean": 0.31}, "resample"),
        # two standard errors count as if they were there
        ({"mean": 0.20, "mean_error": 0.049}, "intervals"),
        ({"mean": -0.20, "mean_error": 0.051}, "resample"),
        # 30 % either way
        ({"log_sd": float(np.log(1.29))}, "intervals"),
        ({"log_sd": float(np.log(1.31))}, "resample"),
        ({"log_sd": -float(np.log(1.31))}, "resample"),
        ({"log_sd": 0.2, "log_sd_error": 0.5 * (float(np.log(1.31)) - 0.2)}, "resample"),
    ],
)
def test_shifts_at_their_bounds(entries: dict[str, float], decision: str) -> None:
    found = khat_of(weights_of(0.02), shifts={"z": shift(**entries)})
    assert found.decision == decision


@pytest.mark.parametrize(
    ("share", "excess", "decision"),
    [
        (0.6, 1.0, "resample"),  # half of the draws correct a fit that is on its way
        (0.4, 1.0, "unusable"),
        (0.4, 0.11, "unusable"),
        (0.4, 0.09, "resample"),  # fewer correct one that has ended
        (0.11, 0.0, "resample"),
        (0.09, 0.0, "unusable"),
    ],
)
def test_how_many_draws_correct_a_fit(share: float, excess: float, decision: str) -> None:
    slope = Slope("z", "mean", 2.0 * excess, 0.1, excess)
    far = {"z": shift(mean=1.0)}
    found = khat_of(weights_of(0.5), khat=0.6, ess=share * S, shifts=far, slope=slope)
    assert found.decision == decision


def test_a_verdict_contradicts_itself_nowhere() -> None:
    near = {"z": shift(mean=0.1, log_sd=float(np.log(1.25)))}
    good = khat_of(weights_of(0.02), shifts=near)
    assert good.verdict.startswith(
        "Take the intervals as they are: means are right to 0.10 sd and sds to 25 % by the weights (k"
    )
    assert good.verdict.endswith("the bounds are 0.3 sd and 30 %).")
    uneven = khat_of(weights_of(0.5), khat=0.6, ess=0.2 * S, shifts=near)
    assert uneven.decision == "resample"
    assert "by the weights, but may be further off where these are so uneven." in uneven.verdict
    at_bound = khat_of(weights_of(0.5), khat=0.7003, ess=0.2 * S, shifts=near)
    assert "k-hat is 0.70, just above 0.70: " in at_bound.verdict
    far = khat_of(weights_of(0.5), shifts={"z": shift(log_sd=float(np.log(1.4)))})
    assert "Resample, do not take the intervals as they are: weights change the sd" in far.verdict


def test_what_cannot_be_relied_on_is_unusable_and_so_is_a_missed_mode() -> None:
    assert khat_of(weights_of(0.02), khat=0.71).decision == "unusable"
    assert khat_of(weights_of(0.02), khat=float("nan")).decision == "unusable"
    assert khat_of(weights_of(0.02), missed=0.1).decision == "unusable"
    assert khat_of(weights_of(0.02), missed=-0.1).decision == "intervals"
    # a tail of any shape does not matter where the weights correct next to nothing
    assert khat_of(weights_of(0.005), khat=2.0).decision == "intervals"
