"""Sites that batched_trace draws itself have the distribution that Pyro gives them."""

from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_ngvi.runtime.model_density import batched_trace

S = 4


@pytest.mark.parametrize("randomness", ["different", "same"])
def test_sites_without_a_value_are_drawn(randomness: Any) -> None:
    def model() -> None:
        w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        pyro.sample("v", dist.Normal(w, 1.0).to_event(1))

    w = torch.zeros(S, 2)
    trace = batched_trace(model, {"w": w}, randomness=randomness)
    v = trace.sites["v"].value
    assert trace.sites["w"].value is not v and torch.equal(trace.sites["w"].value, w)
    assert torch.equal(v, v[:1].expand(S, 2)) == (randomness == "same")
    both = batched_trace(model, {}, num_particles=S, randomness=randomness)
    assert both.sites["v"].value.shape == (S, 2)


@pytest.mark.parametrize(
    "fn",
    [
        dist.Normal(1.0, 2.0),
        dist.Uniform(1.0, 3.0),
        dist.Exponential(2.0),
        dist.Laplace(1.0, 2.0),
        dist.Cauchy(1.0, 2.0),
        dist.Gumbel(1.0, 2.0),
        dist.Gamma(0.7, 2.0),
        dist.Weibull(2.0, 1.5),
    ],
    ids=lambda fn: type(fn).__name__,
)
def test_draws_under_vmap_have_the_right_distribution(fn: Any) -> None:
    """The distribution function of the draws is uniform: mean 1/2, mean square 1/3.

    Standard errors at n draws: sqrt(1/12 / n) and sqrt(4/45 / n); a check at 5 of them.
    """
    n = 20_000
    draws = batched_trace(lambda: pyro.sample("x", fn), {}, num_particles=n).sites["x"].value
    u = fn.cdf(draws)
    assert abs(u.mean() - 1 / 2) < 5 * (1 / 12 / n) ** 0.5
    assert abs((u**2).mean() - 1 / 3) < 5 * (4 / 45 / n) ** 0.5


def test_random_fill_that_is_used_in_place_shows_as_nan() -> None:
    def model() -> None:
        eps = torch.empty(2)
        eps.normal_()  # the returned tensor is dropped
        pyro.deterministic("eps", eps)

    assert batched_trace(model, {}, num_particles=S).sites["eps"].value.isnan().all()
