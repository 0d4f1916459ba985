"""Guides with more scales than a mean field, which goes ahead of them."""

from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI
from torch import Tensor
from torch.distributions import kl_divergence

import pyro_ngvi as ngvi
from pyro_ngvi.families import FactorNormal, FactorPrecisionNormal, FullRankNormal, MeanFieldNormal
from pyro_ngvi.guides import narrow
from pyro_ngvi.guides.deadline import ending_by
from pyro_ngvi.guides.search import UNASKED


@pytest.mark.parametrize(
    "family",
    [MeanFieldNormal(), FullRankNormal(), FactorNormal(2), FactorPrecisionNormal(2)],
    ids=lambda f: type(f).__name__,
)
def test_a_member_has_the_sds_that_it_is_given(family: Any) -> None:
    loc, sd = torch.linspace(-1.0, 1.0, 5), torch.tensor([0.1, 1.0, 3.0, 10.0, 0.5])
    params = family.init(loc, sd)
    torch.testing.assert_close(family.stddev(params), sd)
    torch.testing.assert_close(family.mean(params), loc)
    same = family.init(loc, 0.3)
    torch.testing.assert_close(family.stddev(same), torch.full((5,), 0.3))


def independent(y: Tensor) -> None:
    z: Any = pyro.sample("z", dist.Normal(torch.zeros_like(y), 10.0).to_event(1))
    pyro.sample("y", dist.Normal(z, 0.2).to_event(1), obs=y)


def test_factors_start_near_a_posterior_of_independent_variables() -> None:
    """Means are 50 sds away; from the point 9 factors take 190 steps to .01 d nats."""
    d = 1000
    torch.manual_seed(0)
    y = 10.0 * torch.randn(d)
    guide = ngvi.AutoFactorNormal(independent, rank=9)
    guide(y)
    precision = 10.0**-2 + 0.2**-2
    best = dist.MultivariateNormal(
        y * 0.2**-2 / precision, precision_matrix=precision * torch.eye(d)
    )
    found = dist.LowRankMultivariateNormal(
        guide.loc.detach(), guide.factor.detach(), (2.0 * guide.log_scale.detach()).exp()
    )
    found = dist.MultivariateNormal(found.loc, found.covariance_matrix)
    # by sharing a twentieth of each variance the factors themselves cost 9 nats
    assert float(kl_divergence(found, best)) < 0.03 * d
    assert guide.start_report is not None and guide.start_report.evaluations < 2_000


def products(y: Tensor) -> None:
    """A saddle at the centre of the prior, where a b = 0."""
    s = pyro.sample("s", dist.HalfNormal(1.0))
    a: Any = pyro.sample("a", dist.Normal(torch.zeros(15, 8), 1.0).to_event(2))
    b: Any = pyro.sample("b", dist.Normal(torch.zeros(15, 8), 1.0).to_event(2))
    pyro.sample("y", dist.Normal(a @ b.mT, s).to_event(2), obs=y)


@pytest.mark.parametrize("kind", [ngvi.AutoFullRankNormal, ngvi.AutoFactorNormal])
def test_they_leave_a_saddle(kind: Any) -> None:
    """1,000 steps of a mean field come to as much, within a nat for each ten latent variables."""
    torch.manual_seed(1)
    y = torch.randn(15, 8) @ torch.randn(15, 8).mT + 0.3 * torch.randn(15, 15)
    pyro.set_rng_seed(0)
    guide, plain = kind(products), ngvi.AutoMeanFieldNormal(products)
    loss = ngvi.BatchedELBO(num_particles=64)
    with torch.no_grad():
        found = loss.loss(products, guide, y)
    svi = SVI(products, plain, ngvi.NGVB(plain), ngvi.BatchedELBO(8))
    for _ in range(1000):
        svi.step(y)
    with torch.no_grad():
        best = loss.loss(products, plain, y)
    assert guide.latent_dim > UNASKED
    assert found < best + 0.1 * guide.latent_dim


def test_no_time_or_no_gain_leaves_the_point() -> None:
    y = torch.zeros(300)
    with ending_by(0.0):
        late = ngvi.AutoFactorNormal(independent, rank=2)
        late(y)
    assert late.start_report is not None and late.start_report.params is None
    torch.testing.assert_close(late.loc.detach(), y)

    given = FactorNormal(2).init(y, 0.1)
    found = narrow.by_mean_field(
        lambda z: torch.full_like(z[:, 0], torch.nan), FactorNormal(2), given
    )
    assert found.params is None


@pytest.mark.parametrize("how", [{"init": None}, {"init_scale": 0.3}])
def test_who_says_where_to_start_is_taken_at_their_word(how: Any) -> None:
    guide = ngvi.AutoFactorNormal(independent, rank=2, **how)
    guide(torch.ones(300))
    assert guide.start_report is None and bool((guide.loc == 0.0).all())
