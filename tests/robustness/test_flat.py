"""Latent sites that nothing else of a model depends on, or only where no gradient sees it."""

from __future__ import annotations

from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.contrib.gp.kernels import RBF
from torch import Tensor

import pyro_ngvi as ngvi
from pyro_ngvi.distributions import GaussianProcess
from pyro_ngvi.probing.flat import flat_sites

Y = torch.tensor([0.4, 1.1, 0.7, 1.6, 0.2])


def mixed(y: Tensor) -> None:
    """``seen`` by data, ``parent`` by a prior, ``weight`` by a factor; ``cut`` without a gradient,
    ``alone`` and ``masked`` by nothing."""
    parent = pyro.sample("parent", dist.Normal(0.0, 1.0))
    seen = pyro.sample("seen", dist.Normal(parent.expand(2), 1.0).to_event(1))
    cut = pyro.sample("cut", dist.HalfNormal(1.0))
    weight = pyro.sample("weight", dist.Beta(2.0, 2.0))
    pyro.factor("penalty", -weight.square())
    pyro.sample("alone", dist.Normal(seen[0], 1.0))
    masked = pyro.sample("masked", dist.Normal(0.0, 1.0))
    with pyro.plate("data", 5):
        pyro.sample("y", dist.Normal(seen[0], cut.detach()), obs=y)
        hidden = dist.Normal(masked, 1.0).mask(torch.zeros(5, dtype=torch.bool))
        pyro.sample("z", hidden, obs=y)


def draws(model: Any, *args: Any) -> dict[str, Tensor]:
    traces: Any = [pyro.poutine.trace(model).get_trace(*args) for _ in range(2)]
    sites = [{n: s["value"] for n, s in t.iter_stochastic_nodes() if n != "data"} for t in traces]
    return {name: torch.stack([s[name].detach() for s in sites]) for name in sites[0]}


def test_each_site_is_told() -> None:
    pyro.set_rng_seed(0)
    with torch.no_grad():
        found = flat_sites(mixed, draws(mixed, Y), (Y,), {})
    assert found == {"cut": True, "alone": False, "masked": False}


def test_a_residual_that_is_observed_counts() -> None:
    def residual(y: Tensor) -> None:
        m = pyro.sample("m", dist.Normal(0.0, 1.0))
        pyro.sample("error", dist.Normal(torch.zeros(5), 1.0).to_event(1), obs=y - m)

    assert flat_sites(residual, draws(residual, Y), (Y,), {}) == {}


def test_a_fit_names_what_keeps_its_prior() -> None:
    def model(y: Tensor) -> None:
        m = pyro.sample("m", dist.Normal(0.0, 1.0))
        pyro.sample("m_next", dist.Normal(m, 1.0))
        with pyro.plate("data", 5):
            pyro.sample("y", dist.Normal(m, 1.0), obs=y)

    fit = ngvi.fit(model, Y, seed=0, progress=False)
    words = "Nothing else in the model depends on 'm_next': the posterior of that is its prior."
    assert fit.verdict.ok and str(fit).endswith(words)


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad")
def test_a_bad_fit_names_what_has_no_gradient() -> None:
    def model(y: Tensor) -> None:
        s = pyro.sample("s", dist.LogNormal(0.0, 1.0))
        with pyro.plate("data", 5):
            pyro.sample("y", dist.Normal(0.8, 0.1 * s.detach()), obs=y)

    # corrected draws of a full-rank guide need none
    how: Any = {"guide": "AutoMeanFieldNormal", "seed": 0, "progress": False, "max_steps": 20}
    fit = ngvi.fit(model, Y, **how)
    assert not fit.verdict.ok and "log p depends on 's' and has no gradient there" in str(fit)


def test_a_kernel_of_pyro_made_from_draws_keeps_the_first() -> None:
    """Its numbers are parameters, by name, in Pyro's store."""
    X = torch.linspace(0.0, 3.0, 8).unsqueeze(-1)
    y = (X.squeeze(-1).sin() > 0.5).double()

    def model(X: Tensor, y: Tensor) -> None:
        scale = pyro.sample("scale", dist.LogNormal(0.0, 0.7))
        kernel = RBF(1, lengthscale=scale)
        f = pyro.sample("f", GaussianProcess(kernel, X, jitter=1e-4))
        with pyro.plate("data", 8):
            pyro.sample("y", dist.Bernoulli(logits=f), obs=y)

    pyro.clear_param_store()
    found = ngvi.integrate(model, X, y)
    assert "In doubt: nothing else in the model depends on 'scale'" in str(found)


def test_a_hinge_that_is_idle_at_some_draws_is_seen() -> None:
    def hinge(y: Tensor) -> None:
        bend = pyro.sample("bend", dist.Normal(0.0, 1.0))
        with pyro.plate("data", 5):
            pyro.sample("y", dist.Normal(torch.relu(bend), 1.0), obs=y)

    values = {"bend": torch.tensor([-1.0, -0.5, -2.0, 0.7])}
    assert flat_sites(hinge, values, (Y,), {}) == {}
    idle = {"bend": values["bend"][:3]}
    assert flat_sites(hinge, idle, (Y,), {}) == {}  # draws of the prior are beyond the bend


def test_a_sigmoid_that_is_flat_where_a_guide_lies_is_seen() -> None:
    def separated(y: Tensor) -> None:
        slope = pyro.sample("slope", dist.Cauchy(0.0, 2.5))
        with pyro.plate("data", 5):
            logits = slope * torch.arange(-2.0, 3.0)
            pyro.sample("y", dist.Bernoulli(logits=logits), obs=(logits > 0.0).to(y))

    assert flat_sites(separated, {"slope": torch.tensor([1e4, 2e4])}, (Y,), {}) == {}


def test_a_site_that_is_rounded_away_beside_another_is_seen() -> None:
    x = torch.linspace(-2.0, 2.0, 6, dtype=torch.float32)

    def separated(y: Tensor) -> None:
        a = pyro.sample("a", dist.Cauchy(0.0, 10.0))
        b = pyro.sample("b", dist.Cauchy(0.0, 2.5))
        with pyro.plate("data", 6):
            pyro.sample("y", dist.Bernoulli(logits=a + b * x), obs=y)

    values = {"a": torch.tensor([-5.0, 4.0]), "b": torch.tensor([1e14, -1e14])}
    values = {name: v.float() for name, v in values.items()}
    assert flat_sites(separated, values, (1.0 * (x > 0.1),), {}) == {}
