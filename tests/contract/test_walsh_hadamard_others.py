"""Who trains the diagonals of AutoWalshHadamard, and where a reader finds them."""

from __future__ import annotations

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO

import pyro_ngvi as ngvi

X = torch.randn(12, 3, dtype=torch.double, generator=torch.Generator().manual_seed(0))
Y = X @ torch.randn(3, 4, dtype=torch.double, generator=torch.Generator().manual_seed(1))


def model(X: torch.Tensor, Y: torch.Tensor) -> None:
    W = pyro.sample("W", dist.Normal(torch.zeros(3, 4), 1.0).to_event(2))
    with pyro.plate("data", len(X)):
        pyro.sample("Y", dist.Normal(X @ W, 0.5).to_event(1), obs=Y)


def diagonals(guide: ngvi.AutoWalshHadamard) -> dict[str, torch.Tensor]:
    natural = {id(p) for p in guide.natural_params().values()}
    return {n: p.detach().clone() for n, p in guide.named_parameters() if id(p) not in natural}


def test_the_default_trains_them_and_says_so() -> None:
    pyro.set_rng_seed(0)
    guide = ngvi.AutoWalshHadamard(model, sites=["W"])
    guide(X, Y)
    before = diagonals(guide)
    svi = SVI(model, guide, ngvi.NGVB(guide), Trace_ELBO(2))  # pyright: ignore[reportArgumentType]
    with pytest.warns(UserWarning, match=r"left_\w*W.*pyro\.optim\.Adam\(\{'lr': 0\.01\}\)"):
        svi.step(X, Y)
    svi.step(X, Y)  # says it once
    after = diagonals(guide)
    assert before and all(not torch.equal(after[n], v) for n, v in before.items())
    # they are parameters of q, which its draws show in full: an export has them no more than it has
    # the means and scales
    found = ngvi.to_arviz(model, guide, X, Y, num_samples=50)
    assert found["posterior"]["W"].shape == (1, 50, 3, 4)
    assert not [n for n in found["constant_data"].data_vars if "left" in n or "right" in n]


def test_without_anybody_it_is_an_error() -> None:
    guide = ngvi.AutoWalshHadamard(model, sites=["W"])
    optim = ngvi.NGVB(guide, others=None)
    svi = SVI(model, guide, optim, Trace_ELBO(2))  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"Say who trains them"):
        svi.step(X, Y)
