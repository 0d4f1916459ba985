"""AutoExponentialFamily: which family a site gets, what a user reads, and what is refused.

The walk over all guides (``registry.py``) has it too.
"""

import copy
import pickle
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import SVI, Predictive, Trace_ELBO
from pyro.infer.autoguide import AutoGuideList, AutoNormal
from pyro.optim import Adam  # pyright: ignore[reportAttributeAccessIssue]
from scipy import stats
from torch import Tensor

from pyro_ngvi import NGVB, AutoExponentialFamily, BatchedELBO, khat, to_arviz
from tests.contract.registry import SHAPES, called, constrained, perturbed, plates

# not of the start
pytestmark = pytest.mark.usefixtures("plain_start")


class Negative(dist.TransformedDistribution):
    """That tells its support, as an affine TransformedDistribution does not by itself."""

    support = dist.constraints.less_than(0.0)


def many_supports() -> None:
    pyro.sample("real", dist.Normal(0.0, 1.0))
    pyro.sample("vector", dist.MultivariateNormal(torch.zeros(3), torch.eye(3)))
    pyro.sample("positive", dist.LogNormal(0.0, torch.ones(2)).to_event(1))
    pyro.sample("half_line", dist.Pareto(2.0, 3.0))
    pyro.sample("left_half", Negative(dist.Exponential(1.0), NEGATIVE))
    pyro.sample("unit", dist.Beta(torch.ones(2, 3), 1.0).to_event(2))
    pyro.sample("interval", dist.Uniform(-1.0, torch.tensor([3.0, 4.0])).to_event(1))
    with pyro.plate("rows", 4):
        pyro.sample("simplex", dist.Dirichlet(torch.ones(5)))
    pyro.sample("pair", dist.Dirichlet(torch.ones(2)))
    pyro.sample("correlation", dist.LKJCholesky(3, 2.0))


NEGATIVE = torch.distributions.transforms.AffineTransform(0.0, -1.0)


def guide_of(model: Any, *args: Any, **kwargs: Any) -> AutoExponentialFamily:
    guide = AutoExponentialFamily(model, **kwargs)
    guide(*args)
    return guide


def test_family_of_each_support() -> None:
    guide = guide_of(many_supports)
    assert guide._members == {
        "real": "normal",
        "vector": "normal",
        "positive": "gamma",
        "half_line": "gamma",
        "left_half": "normal",
        "unit": "beta",
        "interval": "beta",
        "simplex": "dirichlet",
        "pair": "dirichlet",
        "correlation": "normal",
    }
    shapes = {name: tuple(p.shape) for name, p in guide.natural_params().items()}
    assert shapes == {
        "normal_loc": (8,),
        "normal_log_scale": (8,),
        "gamma_log_mean": (3,),
        "gamma_log_concentration": (3,),
        "beta_log_concentration": (8, 2),
        "dirichlet5_log_concentration": (4, 5),
        "dirichlet2_log_concentration": (1, 2),
    }


@pytest.mark.parametrize("model", [constrained, plates, many_supports])
def test_site_distributions_are_those_of_the_draws(model: Any) -> None:
    """Same shapes as the model's own sites, and the same density as the guide's, site by site."""
    guide = perturbed(guide_of(model))
    assert isinstance(guide, AutoExponentialFamily)
    trace: Any = poutine.trace(model).get_trace()
    draw: Any = poutine.trace(guide).get_trace()
    latent = draw.nodes[next(n for n in draw.nodes if n.endswith("_latent"))]["value"]
    total = torch.zeros(())
    for name, _ in guide._members.items():
        q, site = guide.site_distribution(name), trace.nodes[name]
        assert q.batch_shape == site["fn"].batch_shape, name
        assert q.event_shape == site["fn"].event_shape, name
        value = draw.nodes[name]["value"]
        if name == "correlation":  # a Cholesky factor has no density that is smooth in all entries
            base = torch.distributions.biject_to(site["fn"].support)
            total = total - base.log_abs_det_jacobian(base.inv(value), value).sum()
            part = q.base_dist.log_prob(base.inv(value))
            total = total + part.sum()
            continue
        total = total + q.log_prob(value).sum()
    # log q(theta) = log q(x) + log |dx/dtheta|, and the sites carry the latter with a minus
    jacobian = sum(
        node["log_prob_sum"]
        for n, node in _with_log_prob(draw).items()
        if node["type"] == "sample" and n in guide._members
    )
    expected = guide.get_posterior().log_prob(latent) + jacobian
    torch.testing.assert_close(total, expected, rtol=1e-8, atol=1e-8)


def _with_log_prob(trace: Any) -> Any:
    trace.compute_log_prob()
    return trace.nodes


def test_site_distributions_have_plain_types_and_no_gradient() -> None:
    guide = guide_of(many_supports)
    types = {
        "real": dist.Normal,
        "positive": dist.Independent,
        "half_line": dist.TransformedDistribution,
        "simplex": dist.Dirichlet,
        "correlation": dist.TransformedDistribution,
    }
    for name, expected in types.items():
        assert type(guide.site_distribution(name)) is expected
    inner = guide.site_distribution("positive").base_dist
    assert type(inner) is dist.Gamma and not inner.concentration.requires_grad
    assert type(guide.site_distribution("unit").base_dist) is dist.Beta


def test_distributions_before_the_first_call_are_refused() -> None:
    guide = AutoExponentialFamily(constrained)
    with pytest.raises(RuntimeError, match="call it once"):
        guide.site_distribution("real")


# summaries


def test_quantiles_are_those_of_gamma_and_beta() -> None:
    guide = perturbed(guide_of(constrained))
    assert isinstance(guide, AutoExponentialFamily)
    levels = [0.01, 0.25, 0.5, 0.9, 0.999]
    quantiles, median = guide.quantiles(levels), guide.median()
    gamma = guide.site_distribution("gamma").base_dist
    for level, value in zip(levels, quantiles["gamma"], strict=True):
        expected = stats.gamma.ppf(level, gamma.concentration, scale=1 / gamma.rate)
        torch.testing.assert_close(value, torch.as_tensor(expected), rtol=1e-8, atol=0)
    beta = guide.site_distribution("uniform").base_dist
    for level, value in zip(levels, quantiles["uniform"], strict=True):
        expected = stats.beta.ppf(level, beta.concentration1, beta.concentration0)
        torch.testing.assert_close(value, torch.as_tensor(-1 + 4 * expected), rtol=1e-8, atol=0)
    for name, value in median.items():
        torch.testing.assert_close(value, quantiles[name][2])
        assert not value.requires_grad


def test_quantiles_of_tiny_concentrations_do_not_underflow_in_theta() -> None:
    guide = guide_of(constrained)
    with torch.no_grad():
        guide.gamma_log_concentration.fill_(-7.0)
        guide.beta_log_concentration.fill_(-7.0)
    params = {k: v.detach() for k, v in guide.natural_params().items()}
    theta = guide.family.icdf(params, torch.tensor([0.01, 0.5, 0.99]))
    assert theta.isfinite().all() and (theta[1:] >= theta[:-1]).all()
    # P(x < t) = t^a / Gamma(a + 1) for a tiny t
    a = torch.tensor(-7.0).exp()
    log_x = (torch.tensor(0.5).log() + torch.lgamma(a + 1)) / a
    rate = a / params["gamma_log_mean"][0].exp()
    torch.testing.assert_close(theta[1, 1], log_x - rate.log(), rtol=1e-9, atol=0)


# with the rest of the package and of Pyro


def poisson(y: Tensor) -> None:
    with pyro.plate("group", 3):
        rate = pyro.sample("rate", dist.Gamma(2.0, torch.tensor(0.5, dtype=y.dtype)))
        pyro.sample("y", dist.Poisson(rate), obs=y)
    weights = pyro.sample("weights", dist.Dirichlet(torch.ones(3, dtype=y.dtype)))
    pyro.sample("k", dist.Categorical(weights), obs=torch.tensor(1))


COUNTS = torch.tensor([3.0, 5.0, 0.0])


def trained(dtype: torch.dtype = torch.float64, steps: int = 250) -> AutoExponentialFamily:
    torch.manual_seed(0)
    y = COUNTS.to(dtype)
    guide = AutoExponentialFamily(poisson)
    svi = SVI(poisson, guide, NGVB(guide), BatchedELBO(8))
    for _ in range(steps):
        svi.step(y)
    return guide


def test_trained_guide_is_the_posterior_for_khat_arviz_and_predictive() -> None:
    y = COUNTS.double()
    guide = trained()
    assert khat(poisson, guide, y, seed=1).ok
    data = to_arviz(poisson, guide, y, num_samples=4000, seed=1)
    rate = torch.as_tensor(data["posterior"]["rate"].values)[0]
    exact_mean = (2 + y) / 1.5
    standard_error = (2 + y).sqrt() / 1.5 / 4000**0.5
    assert ((rate.mean(0) - exact_mean).abs() < 4.5 * standard_error).all()
    weights = torch.as_tensor(data["posterior"]["weights"].values)[0]
    assert (
        (weights.mean(0) - torch.tensor([0.25, 0.5, 0.25])).abs() < 4.5 * 0.25 / 4000**0.5
    ).all()
    draws = Predictive(poisson, guide=guide, num_samples=7)(y)
    assert draws["rate"].shape == (7, 3) and draws["weights"].shape == (7, 1, 3)


def test_float32_reaches_the_posterior_too() -> None:
    guide = trained(torch.float32)
    q = guide.site_distribution("rate")
    assert q.concentration.dtype == torch.float32
    torch.testing.assert_close(q.concentration, 2 + COUNTS, rtol=2e-3, atol=0)
    torch.testing.assert_close(q.rate, torch.full_like(q.rate, 1.5), rtol=2e-3, atol=0)
    assert guide.median()["rate"].dtype == torch.float32


def test_copies_pickles_and_state_dicts() -> None:
    guide = trained(steps=5)
    for other in (copy.deepcopy(guide), pickle.loads(pickle.dumps(guide))):
        for name in ("rate", "weights"):
            ours, theirs = guide.site_distribution(name), other.site_distribution(name)
            assert torch.equal(ours.mean, theirs.mean)
        assert all(torch.equal(v, other.median()[k]) for k, v in guide.median().items())
    fresh = guide_of(poisson, COUNTS.double())
    fresh.load_state_dict(guide.state_dict())
    assert torch.equal(fresh.site_distribution("rate").mean, guide.site_distribution("rate").mean)


def test_part_of_a_list() -> None:
    y = COUNTS.double()
    guide = AutoGuideList(poisson)
    guide.append(AutoExponentialFamily(poutine.block(poisson, expose=["rate"])))
    guide.append(AutoNormal(poutine.block(poisson, expose=["weights"])))
    optim = NGVB(guide, others=Adam({"lr": 0.02}))
    loss = Trace_ELBO(4, vectorize_particles=True, max_plate_nesting=1)
    svi = SVI(poisson, guide, optim, loss)
    torch.manual_seed(0)
    for _ in range(150):
        svi.step(y)
    first: Any = guide[0]
    q = first.site_distribution("rate")
    torch.testing.assert_close(q.mean, (2 + y) / 1.5, rtol=2e-2, atol=0)


def test_optimizer_made_before_the_guide_knows_its_sites_resumes() -> None:
    y = COUNTS.double()

    def run(guide: Any, optim: NGVB, steps: int) -> None:
        svi = SVI(poisson, guide, optim, BatchedELBO(4))
        for _ in range(steps):
            svi.step(y)

    torch.manual_seed(3)
    guide = AutoExponentialFamily(poisson)
    optim = NGVB(guide)
    run(guide, optim, 6)
    saved, random_state = copy.deepcopy(guide.state_dict()), torch.get_rng_state()
    state = optim.get_state()
    run(guide, optim, 4)
    other = AutoExponentialFamily(poisson)
    other(y)
    other.load_state_dict(saved)
    resumed = NGVB(other)
    resumed.set_state(state)
    torch.set_rng_state(random_state)
    run(other, resumed, 4)
    for ours, theirs in zip(
        guide.natural_params().values(), other.natural_params().values(), strict=True
    ):
        assert torch.equal(ours, theirs)


def test_step_on_meta_tensors() -> None:
    """Gamma, Beta and Dirichlet sites: nothing waits for the device."""

    def model() -> None:
        x = torch.ones(3)
        pyro.sample("gamma", dist.Gamma(x, 1.0).to_event(1))
        pyro.sample("beta", dist.Beta(x, 1.0).to_event(1))
        pyro.sample("dirichlet", dist.Dirichlet(x))
        pyro.sample("normal", dist.Normal(x, 1.0).to_event(1))

    guide = AutoExponentialFamily(model)
    guide()
    family = guide.family
    params = {name: p.detach().to("meta") for name, p in guide.natural_params().items()}
    optim = NGVB(guide)
    rule: Any = optim._rules[""]
    state = rule.init(params)
    leaves = {name: p.clone().requires_grad_() for name, p in params.items()}
    z = family.draw(leaves, torch.Size((4,)))
    assert z.shape == (4, 11) and z.device.type == "meta"
    assert family.log_prob(params, z).shape == (4,)
    grads = {name: torch.zeros_like(p) for name, p in params.items()}
    for _ in range(2):
        params, state, _ = rule.update(params, grads, state)
    assert all(p.device.type == "meta" for p in params.values())


@pytest.mark.parametrize("model", SHAPES)
def test_a_bad_gradient_names_its_site(model: Any) -> None:
    guide: Any = called("exponential", model)
    optim = NGVB(guide)
    for p in guide.natural_params().values():
        p.grad = torch.zeros_like(p)
    name = "gamma" if model is constrained else "c"
    guide.gamma_log_concentration.grad[0] = torch.nan
    with pytest.warns(RuntimeWarning, match=f"not finite at '{name}'"):
        optim(guide.natural_params().values())
    assert optim.report().skipped_sites == (name,)
