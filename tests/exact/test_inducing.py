"""Inducing points: collapsed bounds, the dense algebra at Z = X, minibatches, gradients, new inputs."""

import copy
import math
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Predictive, Trace_ELBO
from pyro.optim import Adam  # pyright: ignore[reportAttributeAccessIssue]
from torch import nn

import pyro_ngvi as ngvi
from pyro_ngvi.distributions import GaussianProcess
from tests.exact.process_cases import (
    LEVEL,
    NOISE,
    Matern,
    data,
    gradients_are_slopes,
    make_model,
    minibatches_agree_with_all_data,
    trained,
)

JITTER = 1e-4
Z = torch.linspace(0.1, 4.9, 9, dtype=torch.float64)
NEW = torch.linspace(-1, 6, 13, dtype=torch.float64)


def nystrom(A, B, kernel=None):
    """k(A, Z) (k(Z, Z) + jitter I)^-1 k(Z, B)."""
    kernel = kernel or Matern()
    return kernel(A, Z) @ torch.linalg.solve(kernel(Z) + JITTER * torch.eye(len(Z)), kernel(Z, B))


def collapsed_bound(X, y, kernel=None):
    """Titsias (2009), equation (9), for a process with jitter."""
    kernel = kernel or Matern()
    Q = nystrom(X, X, kernel)
    fit = dist.MultivariateNormal(torch.full_like(y, LEVEL), Q + NOISE**2 * torch.eye(len(X)))
    rest = kernel(X, diag=True) + JITTER - Q.diagonal()
    return fit.log_prob(y) - 0.5 * rest.sum() / NOISE**2


def closed_form(X, y, new):
    """Mean and covariance of f at new inputs under the best q(u): Titsias (2009), equation (6)."""
    S = nystrom(X, X) + NOISE**2 * torch.eye(len(X))
    gain = torch.linalg.solve(S, nystrom(X, new)).mT
    C = Matern()(new) + JITTER * torch.eye(len(new)) - gain @ nystrom(X, new)
    return LEVEL + gain @ (y - LEVEL), C


def test_a_gaussian_likelihood_reaches_the_collapsed_bound_in_one_step():
    X, y = data()
    _, losses = trained(make_model(Matern(), JITTER), X, y, 2, Z)
    assert abs(losses[1] + float(collapsed_bound(X, y))) < 1e-10


@pytest.mark.parametrize("count", [13, 40])
def test_prediction_at_any_inputs(count):
    X, y = data()
    new = torch.linspace(-1, 6, count)
    guide, _ = trained(make_model(Matern(), JITTER), X, y, 1, Z)
    mean, C = closed_form(X, y, new)
    found, variance = guide.predict(new)["f"]
    torch.testing.assert_close(found, mean, rtol=0, atol=1e-10)
    torch.testing.assert_close(variance, C.diagonal(), rtol=0, atol=1e-10)
    q = guide.get_posterior(new)
    torch.testing.assert_close(q.covariance_matrix, C, rtol=0, atol=1e-10)
    assert guide.quantiles([0.1, 0.5, 0.9], new)["f"].shape == (3, count)
    torch.testing.assert_close(guide.median()["f"], closed_form(X, y, X)[0], rtol=0, atol=1e-10)
    for _ in range(2):
        trace: Any = pyro.poutine.trace(guide).get_trace(new)
        expected = dist.MultivariateNormal(mean, C).log_prob(trace.nodes["f"]["value"])
        torch.testing.assert_close(trace.log_prob_sum(), expected, rtol=1e-8, atol=1e-8)
    S = 200
    drawn = Predictive(make_model(Matern(), JITTER), guide=guide, num_samples=S)(new, None)
    z = (drawn["y"].reshape(S, -1).mean(0) - mean) / ((C.diagonal() + NOISE**2) / S).sqrt()
    assert z.abs().max() < 4  # in standard errors


@pytest.mark.parametrize("binary", [False, True])
def test_inducing_inputs_at_all_data_are_the_dense_algebra(binary):
    X, y = data(25, binary)
    model = make_model(Matern(), 0.0, binary)  # two processes with jitter would differ by it
    dense, dense_losses = trained(model, X, y, 8)
    sparse, losses = trained(model, X, y, 8, X.clone())
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(dense_losses), rtol=0, atol=1e-10)
    for at in ((), (NEW,)):
        a, b = dense.get_posterior(*at), sparse.get_posterior(*at)
        torch.testing.assert_close(a.mean, b.mean, rtol=0, atol=1e-9)
        torch.testing.assert_close(a.covariance_matrix, b.covariance_matrix, rtol=0, atol=1e-9)


@pytest.mark.parametrize("binary", [False, True])
def test_minibatches_converge_to_where_all_data_do(binary):
    X, y = data(60, binary)
    model = make_model(Matern(), JITTER, binary)
    whole, losses = trained(model, X, y, 12, Z)
    small, _ = trained(model, X, y, 10 if not binary else 250, Z, batch=20)
    if not binary:  # exact once every datum has been seen
        seen = small.site_tensors()["y"][1].flatten() > 0
        while not seen.all():
            SVI(model, small, ngvi.CVI(small), ngvi.SitesELBO()).step(X, y, batch=20)
            seen = small.site_tensors()["y"][1].flatten() > 0
    for a, b in zip(whole.site_tensors()["y"], small.site_tensors()["y"], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-8)
    # the evidence that was gathered in minibatches is that of all sites
    torch.testing.assert_close(small.predict(NEW)["f"], whole.predict(NEW)["f"], rtol=0, atol=1e-8)
    assert abs(ngvi.SitesELBO().loss(model, small, X, y) - losses[-1]) < 1e-8


def test_the_loss_of_a_minibatch_is_unbiased():
    X, y = data(20, binary=True)
    model = make_model(Matern(), JITTER, binary=True)
    guide, losses = trained(model, X, y, 8, Z)
    values = torch.tensor([ngvi.SitesELBO().loss(model, guide, X, y, batch=5) for _ in range(150)])
    error = values.std() / 150**0.5
    assert abs(values.mean() - losses[-1]) < 4 * error


def test_a_draw_under_a_minibatch_belongs_to_the_data_of_the_model():
    X, y = data(20)
    model = make_model(Matern(), JITTER)
    guide, _ = trained(model, X, y, 2, Z)
    trace: Any = pyro.poutine.trace(guide).get_trace(X, y, batch=5)
    replayed: Any = pyro.poutine.trace(pyro.poutine.replay(model, trace)).get_trace(X, y, batch=5)
    index = trace.nodes["data"]["value"]
    assert torch.equal(replayed.nodes["data"]["value"], index)
    q = guide.get_posterior(X[index])
    value = replayed.nodes["f"]["value"]
    assert value.shape == (5,)
    torch.testing.assert_close(trace.log_prob_sum(), q.log_prob(value), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("binary", [False, True])
def test_gradients_hold_the_sites(binary):
    """In hyperparameters and in Z, against differences of the loss."""
    X, y = data(15, binary)
    kernel = Matern(learn=True)
    model = make_model(kernel, JITTER, binary, learn=True)
    points = nn.Parameter(Z[::2].clone())
    guide, _ = trained(model, X, y, 3, points, Adam({"lr": 0.02}))
    assert (points - Z[::2]).abs().min() > 1e-3  # trained too
    assert [p is points for p in guide.parameters()].count(True) == 1
    parameters = [kernel.log_variance, kernel.log_lengthscale, points]
    gradients_are_slopes(ngvi.SitesELBO(), parameters, model, guide, X, y)


def test_gradients_are_those_of_the_collapsed_bound():
    X, y = data(30)
    kernel = Matern(0.5, 1.0, learn=True)
    model = make_model(kernel, JITTER, learn=True)
    guide, _ = trained(model, X, y, 20, Z, Adam({"lr": 0.05}))
    bound = collapsed_bound(X, y, kernel)
    expected = torch.autograd.grad(bound, list(kernel.parameters()))
    kernel.zero_grad()
    value = ngvi.SitesELBO().loss_and_grads(model, guide, X, y)
    assert abs(float(value) + float(bound.detach())) < 1e-9
    for p, slope in zip(kernel.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, -slope, rtol=1e-8, atol=1e-8)


def test_minibatches_follow_hyperparameters_learned_before():
    """The step before moved them after the evidence was collected."""
    X, y = data(30)
    kernel = Matern(0.5, 1.0, learn=True)
    model = make_model(kernel, JITTER, learn=True)
    guide, _ = trained(model, X, y, 5, Z, Adam({"lr": 0.1}))
    held = make_model(kernel, JITTER)
    kernel.requires_grad_(False)
    frozen = ngvi.AutoSites(held, inducing=Z)
    SVI(held, frozen, ngvi.CVI(frozen), ngvi.SitesELBO()).step(X, y)
    guide._model = (held,)
    svi = SVI(held, guide, ngvi.CVI(guide), ngvi.SitesELBO())
    svi.step(X, y, batch=10)
    torch.testing.assert_close(guide.predict(NEW)["f"], frozen.predict(NEW)["f"], rtol=0, atol=1e-9)


def test_no_kernel_matrix_of_all_data_is_formed():
    """Not in the search for predictors, nor in steps, predictions, medians and quantiles."""
    sizes = []
    plain = Matern()

    def kernel(X, Z=None, diag=False):
        if not diag:
            sizes.append((len(X), len(X if Z is None else Z)))
        return plain(X, Z, diag)

    X, y = data(50)
    model = make_model(kernel, JITTER)
    for how in ({}, {"batch": 20}):
        guide, _ = trained(model, X, y, 2, Z, **how)
        guide.predict(NEW)
        guide.median(X)
        guide.quantiles([0.5], X)
        ngvi.SitesELBO().loss(model, guide, X, y)
    assert sizes and all(rows == len(Z) for rows, _ in sizes)


def test_two_kinds_of_data_share_the_process():
    """Both see f at the same inputs; NaN is missing."""
    X, y = data(30)
    y, other = y.clone(), y + 0.1
    y[::3] = torch.nan
    kernel = Matern()

    def model(X):
        f = pyro.sample("f", GaussianProcess(kernel, X, mean=LEVEL, jitter=JITTER))
        with pyro.plate("data", len(X)):
            pyro.sample("a", dist.Normal(f, NOISE), obs=y)
            pyro.sample("b", dist.Normal(f, 1.0), obs=other)

    guide = ngvi.AutoSites(model, inducing=Z)
    svi = SVI(model, guide, ngvi.CVI(guide), ngvi.SitesELBO())
    svi.step(X)
    there = ~y.isnan()
    inputs, values = torch.cat([X[there], X]), torch.cat([y[there], other])
    noise = torch.cat([torch.full((int(there.sum()),), NOISE**2), torch.ones(30)])
    Q = nystrom(inputs, NEW)
    mean = LEVEL + Q.mT @ torch.linalg.solve(nystrom(inputs, inputs) + noise.diag(), values - LEVEL)
    torch.testing.assert_close(guide.predict(NEW)["f"][0], mean, rtol=0, atol=1e-10)


def test_inputs_of_several_dimensions():
    X, y = data(30)
    X = torch.stack([X, X.cos()], -1)

    def kernel(X, Z=None, diag=False):
        return torch.ones(len(X)) if diag else (-torch.cdist(X, X if Z is None else Z)).exp()

    guide, losses = trained(make_model(kernel, JITTER), X, y, 3, X[:8])
    assert math.isfinite(losses[-1]) and abs(losses[-1] - losses[-2]) < 1e-9
    assert guide.predict(X[:5])["f"][0].shape == (5,)


def test_a_copy_and_a_saved_guide_predict_the_same():
    X, y = data(20)
    points = nn.Parameter(Z.clone())
    guide, _ = trained(make_model(Matern(), JITTER), X, y, 3, points, Adam({"lr": 0.01}))
    expected = guide.predict(NEW)["f"]
    other, _ = trained(
        make_model(Matern(), JITTER), X, -y, 1, nn.Parameter(Z + 0.1), Adam({"lr": 0.01})
    )
    other.load_state_dict(guide.state_dict())
    other.refresh(X, y)
    twin = copy.deepcopy(guide)
    twin._model = guide._model
    assert twin.algebra.inducing is twin.inducing
    for g in (other, twin):
        torch.testing.assert_close(g.predict(NEW)["f"], expected)


def test_sweeps_with_another_kernel_are_not_compared():
    """What an optimizer compares with its last sweep changes with the prior, and only then."""
    X, y = data(20)
    kernel = Matern()
    guide, _ = trained(make_model(kernel, JITTER), X, y, 1, Z)

    def prints():
        call = guide.call_of((X, y), {})
        guide.algebra.view(call)
        return call.fingerprint()["y"]

    before = prints()
    assert torch.equal(prints(), before)
    kernel.log_lengthscale.data += 0.1
    assert (prints() != before).any(-1).all()


def test_the_bound_agrees_with_draws():
    X, y = data(15, binary=True)
    model = make_model(Matern(), JITTER, binary=True)
    guide, losses = trained(model, X, y, 6, Z)
    loss = Trace_ELBO()
    draws = torch.tensor([loss.loss(model, guide, X, y) for _ in range(120)])
    assert losses[-1] - draws.mean() > -4 * draws.std() / math.sqrt(120)
    # log q(f) is that of f, so the draws' bound is not below that over (f, u)
    full, dense_losses = trained(model, X, y, 6)
    draws = torch.tensor([loss.loss(model, full, X, y) for _ in range(120)])
    assert abs(draws.mean() - dense_losses[-1]) < 4 * draws.std() / math.sqrt(120)


def test_minibatches_in_a_list_of_guides():
    X, y = data(20)
    kernel = Matern()

    def model(X, y, batch=None):
        scale = pyro.sample("scale", dist.LogNormal(-1.0, 0.5))
        plate = pyro.plate("data", len(X), subsample_size=batch)
        f = pyro.sample("f", GaussianProcess(kernel, X[plate.indices], jitter=JITTER))
        with plate:
            pyro.sample("y", dist.Normal(f, scale), obs=y[plate.indices])

    trace = minibatches_agree_with_all_data(model, Z, X, y, batch=5)
    assert len(trace.nodes["data"]["value"]) == 5 == len(trace.nodes["f"]["value"])
