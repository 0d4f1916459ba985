"""Quantiles and medians of constrained sites against draws of the guide, for every guide class."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer.autoguide import AutoGuideList
from torch.distributions import biject_to

import pyro_ngvi as ngvi
from pyro_ngvi.families import MeanFieldNormal
from pyro_ngvi.families.base import Family

LEVELS = torch.tensor([0.05, 0.5, 0.95], dtype=torch.float64)
#: draws behind a share, and behind a quantile that is not exact
N, M = 20_000, 16_384
MIXED = ("simplex", "ordered", "correlation", "matrix")


def model() -> None:
    """Supports whose transforms mix entries, and two whose do not."""
    pyro.sample("w", dist.Normal(torch.zeros(3, 3), 1.0).to_event(2))
    pyro.sample("scale", dist.LogNormal(torch.zeros(2), 1.0).to_event(1))
    with pyro.plate("two", 2):
        pyro.sample("simplex", dist.Dirichlet(torch.tensor([0.5, 1.0, 2.0, 4.0])))
    ordered = dist.TransformedDistribution(
        dist.Normal(torch.zeros(3), 1.0).to_event(1), [dist.transforms.OrderedTransform()]
    )
    pyro.sample("ordered", ordered)
    pyro.sample("correlation", dist.LKJCholesky(3, 2.0))
    pyro.sample("matrix", dist.LKJ(3, 2.0))


GUIDES: dict[str, Callable[..., Any]] = {
    "mean field": ngvi.AutoMeanFieldNormal,
    "full rank": ngvi.AutoFullRankNormal,
    "factor": lambda m, **k: ngvi.AutoFactorNormal(m, rank=2, **k),
    "factor precision": lambda m, **k: ngvi.AutoFactorPrecision(m, rank=2, **k),
    "matrix normal": ngvi.AutoMatrixNormal,
    "walsh-hadamard": lambda m, **k: ngvi.AutoWalshHadamard(m, sites=["w"], **k),
    "exponential": ngvi.AutoExponentialFamily,
    "orthogonal flow": ngvi.AutoOrthogonalFlow,
    "coupling flow": lambda m, **k: ngvi.AutoCouplingFlow(m, init=None, **k),
    "flow": lambda m, **k: ngvi.AutoFlow(
        m, lambda d: [dist.transforms.affine_coupling(d, [8])], init=None, **k
    ),
}


def made(kind: str) -> Any:
    """A guide of wide and skewed sites, moved away from its symmetric start."""
    torch.manual_seed(1)
    guide = GUIDES[kind](model, init_scale=0.7)
    guide()
    with torch.no_grad():
        loc = next((v for n, v in guide.natural_params().items() if n.endswith("loc")), None)
        if loc is not None:
            loc.add_(0.5 * torch.randn_like(loc))
    return guide


def draws(guide: Any) -> dict[str, torch.Tensor]:
    z = guide.get_posterior().rsample((N,)).detach()
    result, start = {}, 0
    for name, site in guide.prototype_trace.iter_stochastic_nodes():
        shape = guide._unconstrained_shapes[name]
        own = z[:, start : start + shape.numel()].reshape(N, *shape)
        result[name] = biject_to(site["fn"].support)(own)
        start += shape.numel()
    return result


@pytest.mark.parametrize("kind", GUIDES)
def test_marginal_quantiles(kind: str) -> None:
    guide = made(kind)
    found, median = guide.quantiles(LEVELS), guide.median()
    sampled = draws(guide)
    assert set(found) == set(sampled) == set(median)
    for name, x in sampled.items():
        assert found[name].shape == (3, *x.shape[1:])
        assert torch.equal(found[name][1], median[name])
        fixed = x.std(0) < 1e-5  # zeros, and ones up to rounding
        torch.testing.assert_close(found[name][:, fixed], x[:3, fixed], atol=1e-5, rtol=0)
        share = (x.unsqueeze(1) <= found[name]).double().mean(0)[:, ~fixed]
        p = LEVELS.unsqueeze(-1)
        # 4,096 draws at least are behind a quantile, if it is not exact
        exact = kind not in ("orthogonal flow", "coupling flow", "flow") and name not in MIXED
        exact = exact or (kind == "exponential" and name == "simplex")
        behind = 0.0 if exact else 1 / M if name in MIXED else 1 / 4096
        error = (p * (1 - p) * (1 / N + behind)).sqrt()
        worst = ((share - p).abs() / error).max()
        assert worst < 4.5, (name, share)  # of some 60 shares for each of ten guides


def test_exact_quantiles_of_a_dirichlet() -> None:
    guide = made("exponential")
    concentration = guide.site_distribution("simplex").concentration
    x = guide.quantiles(LEVELS)["simplex"]
    for row in range(2):
        for k, a in enumerate(concentration[row]):
            beta = torch.distributions.Beta(a.double(), concentration[row].sum() - a.double())
            # the mass below by 2^18 points
            grid = torch.linspace(0.0, 1.0, 2**18 + 1, dtype=torch.float64)
            middle = 0.5 * (grid[1:] + grid[:-1])
            mass = beta.log_prob(middle).exp() / 2**18
            mass = mass / mass.sum()
            below = [mass[middle <= q].sum() for q in x[:, row, k].double()]
            torch.testing.assert_close(torch.stack(below), LEVELS, atol=2e-3, rtol=0.0)


def test_draws_leave_the_random_state_alone() -> None:
    guide = made("full rank")
    state = torch.get_rng_state()
    first = guide.quantiles([0.1, 0.9])
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(7)
    second = guide.quantiles([0.1, 0.9])
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_ordered_vectors_stay_ordered_and_one_level_will_do() -> None:
    guide = made("mean field")
    found = guide.quantiles(LEVELS)["ordered"]
    assert (found.diff(dim=-1) > 0).all() and (found.diff(dim=0) > 0).all()
    assert torch.equal(guide.quantiles(0.95)["ordered"], guide.quantiles([0.95])["ordered"][0])


def test_guide_lists_hand_on_the_quantiles_of_their_parts() -> None:
    guide: Any = AutoGuideList(model)
    guide.append(ngvi.AutoExponentialFamily(poutine.block(model, expose=["simplex"])))
    guide.append(ngvi.AutoMeanFieldNormal(poutine.block(model, hide=["simplex"])))
    guide()
    found = guide.quantiles([0.05, 0.5])
    for part in guide:
        for name, value in part.quantiles([0.05, 0.5]).items():
            assert torch.equal(found[name], value)


class Laplace(MeanFieldNormal):
    """A family that is not Gaussian and says nothing of its quantiles."""

    icdf = Family.icdf

    def rsample(self, params: Any, noise: torch.Tensor) -> torch.Tensor:
        p = torch.special.ndtr(noise)
        return params["loc"] + params["log_scale"].exp() * torch.distributions.Laplace(0, 1).icdf(p)


def test_default_quantiles_assume_no_gaussian() -> None:
    family = Laplace()
    params = {"loc": torch.tensor([2.0]), "log_scale": torch.tensor([0.0])}
    found = family.icdf(params, torch.tensor([0.5, 0.99])).squeeze(-1)
    exact = 2.0 + torch.tensor([0.0, -torch.log(torch.tensor(0.02))])
    density = torch.tensor([0.5, 0.01])
    error = torch.tensor([0.25, 0.99 * 0.01]).sqrt() / 64 / density  # of 4,096 draws
    assert ((found - exact).abs() < 4 * error).all()  # a Gaussian's is 8 of these off at 0.99
