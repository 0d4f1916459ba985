"""Jumps of a log density, which gradients do not see, are found; kinks and smooth ones have none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

import pyro_ngvi as ngvi
from pyro_ngvi.probing.kinks import jumping_sites

T = torch.arange(40.0)
Y = torch.where(T < 20.0, 3.0, 1.0)


def switched(rate: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[[Tensor], None]:
    def model(y: Tensor) -> None:
        when = pyro.sample("when", dist.Normal(20.0, 10.0))
        before = pyro.sample("before", dist.Gamma(2.0, 1.0))
        after = pyro.sample("after", dist.Gamma(2.0, 1.0))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Poisson(rate(when, before, after)), obs=y)

    return model


RATES: dict[str, tuple[Any, list[str]]] = {
    "jump": (lambda w, b, a: torch.where(w > T, b, a), ["when"]),
    "smooth": (lambda w, b, a: a + (b - a) * torch.sigmoid(w - T), []),
    "kink": (lambda w, b, a: a + (b - a).abs() * ((w - T) / 20.0).clamp(0.0, 1.0) + 0.1, []),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("case", RATES)
def test_jumps_are_told_from_kinks(case: str, dtype: torch.dtype) -> None:
    rate, wanted = RATES[case]
    density = ngvi.diagnostics.ModelDensity(switched(rate), (Y.to(dtype),))
    theta = torch.tensor([20.0, 1.0, 0.0]) + torch.tensor([4.0, 0.2, 0.2]) * torch.randn(6, 3)
    assert list(jumping_sites(density, theta.to(dtype))) == wanted


def test_rounding_is_no_jump() -> None:
    """``lgamma`` of large numbers in float32: log p of -750 is a difference of numbers of 10^7."""
    trials = torch.full((100,), 1e6)
    y = (0.12 * trials).round()

    def counts(y: Tensor) -> None:
        level = pyro.sample("level", dist.Normal(0.0, 5.0)).float()
        size = pyro.sample("size", dist.Normal(5.0, 3.0)).float().exp()
        mean = torch.sigmoid(level)
        counted: Any = dist.BetaBinomial
        with pyro.plate("data", 100):
            pyro.sample("y", counted(mean * size, (1.0 - mean) * size, trials), obs=y)

    trials = trials.float()
    density = ngvi.diagnostics.ModelDensity(counts, (y.float(),))
    theta = torch.tensor([-2.0, 9.0]) + torch.tensor([0.01, 1.0]) * torch.randn(6, 2)
    assert list(jumping_sites(density, theta.float())) == []


def test_a_fit_that_is_not_usable_names_the_jump() -> None:
    y = torch.poisson(Y)
    fit = ngvi.fit(switched(RATES["jump"][0]), y, seed=0, progress=False, max_steps=15)
    assert not fit.verdict.ok and "log p jumps along 'when', and a gradient" in str(fit)
