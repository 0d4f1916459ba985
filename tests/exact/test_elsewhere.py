"""Mass that no draw of a guide is near, and draws of the prior are."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

import pyro_ngvi as ngvi
from pyro_ngvi.diagnostics.draws import Fitted
from pyro_ngvi.diagnostics.elsewhere import mass_elsewhere
from pyro_ngvi.diagnostics.verdict import evidence_of

X = torch.linspace(0.0, 10.0, 30)


def frequency(y: Tensor) -> None:
    w = pyro.sample("w", dist.Uniform(0.0, 5.0))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(torch.sin(w * X), 1.5), obs=y)


def data(seed: int) -> Tensor:
    noise = torch.randn(30, generator=torch.Generator().manual_seed(seed))
    return torch.sin(1.7 * X) + 1.5 * noise


def exact(y: Tensor) -> tuple[float, float]:
    """Mean and sd of w, by 20,000 points."""
    w = torch.linspace(1e-4, 5.0 - 1e-4, 20_001)
    p = (-0.5 * ((y - torch.sin(w[:, None] * X)) / 1.5).square().sum(1)).softmax(0)
    mean = (p * w).sum()
    return float(mean), float((p * (w - mean).square()).sum().sqrt())


@pytest.mark.parametrize("seed", range(4))
def test_a_few_percent_of_the_mass_far_away_are_no_small_thing(seed: int) -> None:
    """Either corrected draws have the sd, up to ten times that of the guide, or none are offered."""
    y = data(seed)
    mean, sd = exact(y)
    fit = ngvi.fit(frequency, y, seed=0, progress=False)
    if fit.verdict.decision == "intervals":
        w = fit.sample(4000, seed=1)["w"]
        # standard errors of draws worth some 2,000 exact ones
        assert float(w.mean()) == pytest.approx(mean, abs=0.1 * sd)
        assert float(w.std()) == pytest.approx(sd, rel=0.1)
    else:
        assert fit.verdict.decision in ("unusable", "unclear")


def test_the_words_say_how_much() -> None:
    def peaks(x: Tensor) -> None:
        z = pyro.sample("z", dist.Uniform(-10.0, 10.0))
        both = dist.MixtureSameFamily(
            dist.Categorical(torch.tensor([0.95, 0.05])),
            dist.Normal(torch.tensor([-4.0, 4.0]), 0.1),
        )
        pyro.factor("both", both.log_prob(z))

    def guide(x: Tensor) -> None:
        base = dist.Normal(math.log(0.3 / 0.7), 0.1 / 4.2)  # z of logits, a sd of 0.1
        to = torch.distributions.biject_to(dist.constraints.interval(-10.0, 10.0))
        pyro.sample("z", dist.TransformedDistribution(base, [to]))

    found = ngvi.khat(peaks, guide, X, seed=0)
    assert found.decision == "unusable"
    # of one part in twenty, two standard errors less
    share = float(found.verdict.partition("at least ")[2].partition(" %")[0])
    assert 3.0 < share < 5.5
    assert len(found.verdict) <= 240


def test_a_long_tail_is_no_other_mode() -> None:
    """Draws of a Cauchy are 6 sds of a Gaussian away, 8 % of them, and log p does not fall before."""

    def model() -> None:
        pyro.sample("z", dist.Cauchy(0.0, 1.0))

    def guide() -> None:
        pyro.sample("z", dist.Normal(0.0, 1.0))

    fitted = Fitted(model, guide, (), {})
    draws = fitted.draw(1000, None)
    assert mass_elsewhere(fitted, draws, evidence_of(draws.log_ratio), None) == 0.0


def test_a_guide_that_draws_a_discrete_site_has_a_verdict() -> None:
    """Of such a site there is no way from one mode to another."""

    def model(y: Tensor) -> None:
        k = pyro.sample("k", dist.Poisson(3.0))
        pyro.sample("y", dist.Normal(k, 2.0), obs=y)

    found = ngvi.khat(model, lambda y: pyro.sample("k", dist.Poisson(3.0)), X[3], seed=0)
    assert found.missed is not None and found.missed < 0.1 and found.ess > 100.0
