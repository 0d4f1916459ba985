"""Verdicts on models whose log p float32 does not hold: large counts cancel within a term."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

import pyro_ngvi as ngvi
from pyro_ngvi.runtime.in_double import InDouble

WORDS = "Rounding puts log p off by"


@pytest.fixture(autouse=True)
def _float32() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    pyro.clear_param_store()
    yield
    torch.set_default_dtype(before)


def trials(n: Tensor, y: Tensor) -> None:
    a: Any = pyro.sample("a", dist.Normal(0.0, 2.0))
    with pyro.plate("data", len(n)):
        pyro.sample("y", dist.Binomial(n, logits=a), obs=y)


def counts(x: Tensor, y: Tensor) -> None:
    a: Any = pyro.sample("a", dist.Normal(0.0, 20.0))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Poisson((a + 0.3 * x).exp()), obs=y)


def fitted(model: Any, *args: Tensor) -> Any:
    return ngvi.fit(model, *args, seed=0, progress=False)


def test_a_level_that_cancels_is_told_of() -> None:
    n, y = torch.full((10,), 1e6), (3e5 + 400.0 * torch.linspace(-1.0, 1.0, 10)).round()
    fit = fitted(trials, n, y)
    torch.set_default_dtype(torch.float64)
    exact = fitted(trials, n.double(), y.double())
    torch.set_default_dtype(torch.float32)
    assert fit.verdict.ok and exact.verdict.ok and exact.khat.rounded == ""
    off = abs(fit.elbo[0] - exact.elbo[0])
    told = float(repr(fit).split(WORDS)[1].split()[0])
    assert off > 0.3 and told == pytest.approx(off, abs=0.1)
    with pytest.warns(RuntimeWarning, match=f"loo: {WORDS}"):
        fit.loo()


def test_weights_that_are_rounding_are_not_called_heavy() -> None:
    x = torch.linspace(-1.0, 1.0, 20)
    fit = fitted(counts, x, (15.0 + 0.3 * x).exp().round())
    assert math.isnan(fit.khat.khat) and fit.verdict.decision == "unclear"
    told = repr(fit).splitlines()[2]
    assert "cannot be told from rounding" in told and WORDS in told and "auto" not in told


def test_others_are_not_told_of_it() -> None:
    small = torch.full((10,), 100.0)
    assert fitted(trials, small, (0.3 * small).round()).khat.rounded == ""

    def random(y: Tensor) -> None:
        trials(10_000.0 * small, y)
        pyro.factor("noise", torch.randn(()))

    guide = fitted(trials, 10_000.0 * small, (3_000.0 * small).round()).guide
    assert ngvi.khat(random, guide, (3_000.0 * small).round(), seed=0).rounded == ""


def test_what_a_model_writes_into_stays_what_it_was() -> None:
    held, x = torch.zeros(3), torch.full((3,), 1.0 / 3.0)
    with InDouble():
        held += x
        held[0] = 1.0
        held.mul_(2.0)
        assert (x * x).dtype == x.float().sum().dtype == torch.float64
    assert held.dtype == x.dtype == torch.float32
    assert torch.equal(held, torch.tensor([2.0, 2.0 / 3.0, 2.0 / 3.0]))
