"""Where guides start, and the gradients that they give."""

from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import (
    init_to_feasible,
    init_to_mean,
    init_to_median,
    init_to_sample,
    init_to_uniform,
    init_to_value,
)

from pyro_ngvi import NGVB, BatchedELBO
from pyro_ngvi.optim import Constant
from tests.contract.registry import (
    GUIDES,
    INDEPENDENT,
    NORMAL,
    called,
    constrained,
    data,
    entry_supports,
    exact_posterior,
    perturbed,
    plates,
    regression,
)
from tests.cubature import sphere_points

guides = pytest.mark.parametrize("kind", GUIDES)


@pytest.mark.parametrize(("kind", "model"), [("full rank", plates), ("exponential", constrained)])
def test_start_is_the_same_twice_and_draws_nothing(kind: str, model: Any) -> None:
    """The search is the same for all kinds, but for what a family makes of its Gaussian."""
    first, second = called(kind, model), called(kind, model)
    for ours, other in zip(
        first.natural_params().values(), second.natural_params().values(), strict=True
    ):
        assert torch.equal(ours, other)


STARTS = {
    "feasible": init_to_feasible,
    "mean": init_to_mean,
    "median": init_to_median(num_samples=3),
    "sample": init_to_sample,
    "uniform": init_to_uniform,
    "value": init_to_value(values={"real": torch.tensor(0.75)}),
}


@guides
@pytest.mark.parametrize("start", STARTS)
def test_init_loc_fn(kind: str, start: str) -> None:
    guide = called(kind, constrained, init_loc_fn=STARTS[start])
    median = guide.median()
    for name, support in entry_supports(constrained).items():
        assert support.check(median[name]).all()
    if start == "value":
        assert median["real"].item() == 0.75
    if start == "mean":
        # the logarithm of a Gamma variable of sd s has its median about s^2 / 6 from its mean
        tolerance = 1e-7 if kind in NORMAL else guide.init_scale**2 / 5
        torch.testing.assert_close(median["gamma"], torch.full((3,), 2.0), rtol=tolerance, atol=0)


@guides
@pytest.mark.parametrize("init_scale", [1e-3, 0.1, 2])
def test_init_scale_is_the_sd_of_every_variable(kind: str, init_scale: float) -> None:
    guide = called(kind, constrained, init_scale=init_scale)
    sd = guide.get_posterior().variance.sqrt()
    if kind not in NORMAL:  # K parameters for K - 1 means: the variances have the right average
        simplex = [guide.site_of(i) == "simplex" for i in range(guide.latent_dim)]
        sd[simplex] = sd[simplex].square().mean().sqrt()
    torch.testing.assert_close(sd, torch.full_like(sd, init_scale))


@guides
def test_map_start_is_the_mode(kind: str) -> None:
    guide = called(kind, regression, *data(), init="map")
    mode, precision = exact_posterior(*data())
    sd = torch.linalg.inv(precision).diagonal().sqrt()
    assert ((guide.get_posterior().mean.detach() - mode).abs() < 1e-3 * sd).all()


@guides
def test_map_start_falls_back_where_there_is_no_mode(kind: str) -> None:
    def model() -> None:
        x = pyro.sample("x", dist.Normal(torch.ones(3), 1.0).to_event(1))
        pyro.factor("nan", x.sum(-1) * torch.nan)

    with pyro.validation_enabled(False):
        guide = called(kind, model, init="map")
    assert guide.get_posterior().mean.tolist() == [1.0, 1.0, 1.0]


@guides
def test_sticking_the_landing_changes_no_value(kind: str) -> None:
    losses = []
    for on in (True, False):
        guide = called(kind, regression, *data(), sticking_the_landing=on)
        torch.manual_seed(1)
        losses.append(Trace_ELBO(3).loss(regression, guide, *data()))
    assert losses[0] == losses[1]


@pytest.mark.parametrize("kind", NORMAL)
def test_sticking_the_landing_has_the_same_expected_gradient(kind: str) -> None:
    """On a Gaussian posterior the points of the sphere take the expectation without error."""
    mean, precision = exact_posterior(*data())
    gradients = []
    for on in (True, False):
        torch.manual_seed(2)
        guide = perturbed(called(kind, regression, *data(), sticking_the_landing=on))
        q = guide.get_posterior()
        z = q.family.rsample(q.params, sphere_points(q.family.noise_dim(q.params)))
        log_p = -0.5 * ((z - mean) @ precision * (z - mean)).sum(-1)
        (q.log_prob(z) - log_p).mean().backward()
        gradients.append([p.grad for p in guide.natural_params().values()])
    for with_it, without in zip(*gradients, strict=True):
        # entries above the diagonal of a Cholesky factor are no parameters
        torch.testing.assert_close(with_it, without, rtol=1e-10, atol=1e-10)
        assert (with_it != 0).any()


@guides
def test_sticking_the_landing_has_no_noise_at_the_posterior(kind: str) -> None:
    guide = perturbed(called(kind, regression, *data()))
    q = guide.get_posterior()
    posterior = dist.MultivariateNormal(q.mean.detach(), q.covariance_matrix.detach())
    Trace_ELBO(1).loss_and_grads(lambda *_: pyro.sample("w", posterior), guide, *data())
    for parameter in guide.natural_params().values():
        assert parameter.grad is not None
        assert parameter.grad.abs().max() < 1e-12


@guides
def test_training_reaches_the_conjugate_posterior(kind: str) -> None:
    """Exactly, since sticking the landing leaves no noise at the optimum of a Gaussian posterior."""
    X, y = data()
    if kind in INDEPENDENT:
        X = 2.0 * torch.linalg.qr(X)[0]  # independent weights
    guide = GUIDES[kind](regression)
    svi = SVI(regression, guide, NGVB(guide, schedule=Constant(0.2)), BatchedELBO(8))
    for _ in range(150):  # 0.8^150 = 3e-15
        svi.step(X, y)
    mean, precision = exact_posterior(X, y)
    torch.testing.assert_close(guide.median()["w"], mean, rtol=1e-10, atol=1e-10)
    covariance = guide.get_posterior().covariance_matrix
    torch.testing.assert_close(covariance, torch.linalg.inv(precision), rtol=1e-9, atol=1e-12)
