"""Our guides do what Pyro demands of its own autoguides: densities, shapes, supports, summaries."""

from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import Predictive, Trace_ELBO
from torch.distributions import biject_to, constraints

from pyro_ngvi import AutoFullRankNormal
from tests.contract.registry import (
    GUIDES,
    NORMAL,
    SHAPES,
    D,
    called,
    constrained,
    data,
    entry_supports,
    perturbed,
    plates,
    regression,
    supports,
)

pytestmark = pytest.mark.usefixtures("plain_start")

guides = pytest.mark.parametrize("kind", GUIDES)
models = pytest.mark.parametrize("model", SHAPES)


@guides
@models
def test_shapes_of_samples_median_and_quantiles(kind: str, model: Any) -> None:
    guide = GUIDES[kind](model)
    sites = {name: torch.Size(shape) for name, shape in SHAPES[model].items()}
    for values in (guide(), guide.median(), guide()):
        assert {name: value.shape for name, value in values.items()} == sites
    quantiles = guide.quantiles([0.1, 0.5, 0.9])
    assert {name: q.shape[1:] for name, q in quantiles.items()} == sites
    assert all(len(q) == 3 for q in quantiles.values())


@guides
@models
def test_density_of_the_sample_sites(kind: str, model: Any) -> None:
    """All sites of the guide together: q of the flat vector over the volume of the transforms."""
    guide = perturbed(called(kind, model))
    trace: Any = poutine.trace(guide).get_trace()
    latent = trace.nodes[next(name for name in trace.nodes if name.endswith("_latent"))]["value"]
    expected = guide.get_posterior().log_prob(latent)
    end = 0
    for name, support in supports(model).items():
        transform = biject_to(support)
        value = trace.nodes[name]["value"]
        unconstrained = transform.inv(value)
        size = unconstrained.numel()
        torch.testing.assert_close(unconstrained.reshape(-1), latent[end : end + size])
        end += size
        expected = expected - transform.log_abs_det_jacobian(unconstrained, value).sum()
    assert end == latent.numel()
    torch.testing.assert_close(trace.log_prob_sum(), expected)


@guides
@models
def test_sites_carry_the_plates_of_the_model(kind: str, model: Any) -> None:
    guide_trace: Any = poutine.trace(called(kind, model)).get_trace()
    model_trace: Any = poutine.trace(poutine.replay(model, trace=guide_trace)).get_trace()
    model_trace.compute_log_prob()
    guide_trace.compute_log_prob()
    for name in SHAPES[model]:
        ours, theirs = guide_trace.nodes[name], model_trace.nodes[name]
        frames = [{(f.name, f.dim, f.size) for f in s["cond_indep_stack"]} for s in (ours, theirs)]
        assert frames[0] == frames[1]
        assert ours["log_prob"].shape == theirs["log_prob"].shape


@guides
@models
def test_median_and_quantiles_lie_in_the_supports(kind: str, model: Any) -> None:
    guide = perturbed(called(kind, model), scale=1.0)
    median, quantiles = guide.median(), guide.quantiles([1e-6, 0.5, 1 - 1e-6])
    for name, support in entry_supports(model).items():
        assert support.check(median[name]).all()
        assert support.check(quantiles[name]).all()
        torch.testing.assert_close(quantiles[name][1], median[name])
        assert (quantiles[name].diff(dim=0) >= 0).all()
    for name in {"real", "gamma", "half_normal", "uniform"} & set(median):
        assert (quantiles[name].diff(dim=0) > 0).all()


@guides
def test_quantiles_are_those_of_the_samples(kind: str) -> None:
    """The transforms of these supports are increasing, entry by entry."""
    guide = perturbed(called(kind, constrained))
    levels, n = [0.1, 0.5, 0.8], 4000
    samples = Predictive(constrained, guide=guide, num_samples=n, parallel=True)()
    for name in ("real", "gamma", "half_normal", "uniform"):
        quantiles = guide.quantiles(levels)[name]
        for level, quantile in zip(levels, quantiles, strict=True):
            below = (samples[name].reshape(n, -1) < quantile.reshape(1, -1)).double().mean(0)
            standard_error = (level * (1 - level) / n) ** 0.5
            assert ((below - level).abs() < 4.5 * standard_error).all()


def decreasing() -> None:
    """The transform of "below" falls in every entry, that of "mixed" in the last two."""
    below = constraints.less_than(torch.tensor([1.0, -2.0]))
    pyro.sample("below", dist.ImproperUniform(below, (), (2,)))
    halves = [constraints.positive, constraints.less_than(1.0)]
    mixed = constraints.cat(halves, dim=-1, lengths=[1, 2])
    pyro.sample("mixed", dist.ImproperUniform(mixed, (), (3,)))


@guides
def test_quantiles_where_the_transform_decreases(kind: str) -> None:
    """As for the increasing ones: the share of the draws below each quantile is its level."""
    guide = perturbed(called(kind, decreasing))
    levels, n = [0.1, 0.5, 0.8], 4000
    nodes: Any = poutine.trace(poutine.condition(decreasing, guide())).get_trace().nodes
    z = guide.get_posterior().sample((n,))
    for name, own in (("below", z[:, :2]), ("mixed", z[:, 2:])):
        samples: Any = biject_to(nodes[name]["fn"].support)(own)
        quantiles = guide.quantiles(levels)[name]
        torch.testing.assert_close(quantiles[1], guide.median()[name])
        for level, quantile in zip(levels, quantiles, strict=True):
            below = (samples < quantile).double().mean(0)
            standard_error = (level * (1 - level) / n) ** 0.5
            assert ((below - level).abs() < 4.5 * standard_error).all()


@guides
def test_posterior_is_a_distribution_over_the_flat_vector(kind: str) -> None:
    guide = perturbed(called(kind, constrained))
    q = guide.get_posterior()
    d = guide.latent_dim
    assert q.batch_shape == () and q.event_shape == (d,)
    assert q.mean.shape == q.variance.shape == (d,)
    assert q.sample((5, 2)).shape == (5, 2, d)
    assert q.log_prob(q.sample((5, 2))).shape == (5, 2)
    assert q.expand((4,)).sample((3,)).shape == (3, 4, d)
    assert q.expand((4,)).entropy().shape == (4,)
    torch.testing.assert_close(q.covariance_matrix.diagonal(), q.variance)
    if kind not in NORMAL:
        return
    normal = torch.distributions.MultivariateNormal(q.mean, q.covariance_matrix)
    z = q.sample((5,))
    torch.testing.assert_close(q.log_prob(z), normal.log_prob(z))
    torch.testing.assert_close(q.entropy(), normal.entropy())


@guides
@models
@pytest.mark.parametrize("vectorize_particles", [False, True])
def test_gradients_reach_every_parameter(kind: str, model: Any, vectorize_particles: bool) -> None:
    guide = perturbed(called(kind, model))
    elbo = Trace_ELBO(4, vectorize_particles=vectorize_particles, max_plate_nesting=2)
    assert torch.isfinite(torch.as_tensor(elbo.loss_and_grads(model, guide)))
    for parameter in guide.natural_params().values():
        grad = parameter.grad
        assert grad is not None and torch.isfinite(grad).all() and (grad != 0).any()


@guides
def test_vectorised_particles_put_their_plate_on_the_left(kind: str) -> None:
    guide = called(kind, plates)
    with pyro.plate("particles", 7, dim=-3):
        shapes = {name: value.shape for name, value in guide().items()}
    assert shapes == {"a": (7, 1, 1), "b": (7, 1, 2), "c": (7, 4, 1, 3), "d": (7, 4, 2)}


@guides
def test_factor_sites_of_the_model_stay_in_the_model(kind: str) -> None:
    def model(factor: float) -> None:
        pyro.sample("x", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        pyro.factor("constant", torch.tensor(factor))

    guide = called(kind, model, 0.0)
    assert set(guide(0.0)) == {"x"}
    losses = []
    for factor in (0.0, 2.5):
        torch.manual_seed(1)
        losses.append(Trace_ELBO(2).loss_and_grads(model, guide, factor))
    assert losses[0] - losses[1] == pytest.approx(2.5)


@guides
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_guide_takes_the_dtype_of_the_model(kind: str, dtype: torch.dtype) -> None:
    guide = called(kind, regression, *data(dtype))
    assert all(p.dtype == dtype for p in guide.natural_params().values())
    assert guide.median()["w"].dtype == guide.get_posterior().sample().dtype == dtype


def test_site_of_an_entry_of_the_latent_vector() -> None:
    guide = called("full rank", constrained)
    names = [guide.site_of(i) for i in range(guide.latent_dim)]
    assert names.count("gamma") == names.count("simplex") == names.count("correlation") == D
    assert names[0] == "real" and len(names) == 3 + 3 * D
    with pytest.raises(IndexError, match="12 entries, and there is no entry 12"):
        guide.site_of(12)


def test_summaries_before_the_first_call() -> None:
    guide = AutoFullRankNormal(constrained)
    for read in (guide.get_posterior, guide.median, lambda: guide.quantiles([0.5])):
        with pytest.raises(RuntimeError, match="call it once with the arguments of the model"):
            read()
