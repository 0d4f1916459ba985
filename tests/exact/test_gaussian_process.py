"""Gaussian processes: the distribution, exact regression, and prediction at new inputs."""

import copy
import io
import math
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.contrib.gp.kernels import RBF, Sum, WhiteNoise
from pyro.infer import SVI, Predictive
from pyro.nn import PyroModule, PyroSample
from pyro.optim import Adam  # pyright: ignore[reportAttributeAccessIssue]

import pyro_ngvi as ngvi
from pyro_ngvi.distributions import GaussianProcess
from tests.exact.process_cases import LEVEL, NOISE, Matern, data, make_model, trained

JITTER = 1e-4


def covariance(X, kernel=None):
    return (kernel or Matern())(X) + JITTER * torch.eye(len(X))


def closed_form(X, y, new, kernel=None):
    """Mean and covariance of f at new inputs, which have jitter of their own."""
    kernel = kernel or Matern()
    cross = kernel(new, X)
    gain = torch.linalg.solve(covariance(X, kernel) + NOISE**2 * torch.eye(len(X)), cross.mT).mT
    return LEVEL + gain @ (y - LEVEL), covariance(new, kernel) - gain @ cross.mT


def test_density_draws_and_noise_are_those_of_the_multivariate_normal():
    X, y = data(7)
    f = GaussianProcess(Matern(), X, mean=lambda x: x.cos(), jitter=JITTER)
    reference = dist.MultivariateNormal(X.cos(), covariance(X))
    values = torch.stack([y, 2 * y])
    torch.testing.assert_close(f.log_prob(values), reference.log_prob(values))
    torch.testing.assert_close(f.variance, reference.variance)
    pyro.set_rng_seed(3)
    draws = f.rsample((2,))
    pyro.set_rng_seed(3)
    noise = torch.randn(2, 7)
    torch.testing.assert_close(draws, f.from_noise(noise))
    white = dist.Normal(0.0, 1.0).log_prob(noise).sum(-1)
    torch.testing.assert_close(f.log_prob(draws), white - f.log_det_root())


def test_nothing_is_computed_before_it_is_asked_for():
    calls = []

    def kernel(X, Z=None, diag=False):
        calls.append(diag)
        return Matern()(X, Z, diag)

    f = GaussianProcess(kernel, torch.arange(3.0))
    assert f.shape() == (3,) and torch.equal(f.loc, torch.zeros(3)) and not calls
    assert f.scale_tril is f.scale_tril
    assert calls == [False]


def test_regression_is_exact_after_one_step():
    X, y = data()
    guide, losses = trained(make_model(Matern(), JITTER), X, y, 2)
    evidence = dist.MultivariateNormal(
        torch.full_like(y, LEVEL), covariance(X) + NOISE**2 * torch.eye(len(X))
    ).log_prob(y)
    assert abs(losses[1] + evidence) < 1e-10
    q = guide.get_posterior()
    K = covariance(X)
    gain = torch.linalg.solve(K + NOISE**2 * torch.eye(len(X)), K).mT
    torch.testing.assert_close(q.mean, LEVEL + gain @ (y - LEVEL), rtol=0, atol=1e-10)
    torch.testing.assert_close(q.covariance_matrix, K - gain @ K, rtol=0, atol=1e-10)


@pytest.mark.parametrize("count", [23, 40])  # 40 is also the number of data
def test_prediction_at_new_inputs_is_exact(count):
    X, y = data()
    new = torch.linspace(-1, 6, count)
    guide, _ = trained(make_model(Matern(), JITTER), X, y, 1)
    mean, C = closed_form(X, y, new)
    found, variance = guide.predict(new)["f"]
    torch.testing.assert_close(found, mean, rtol=0, atol=1e-10)
    torch.testing.assert_close(variance, C.diagonal(), rtol=0, atol=1e-10)
    q = guide.get_posterior(new)
    torch.testing.assert_close(q.covariance_matrix, C, rtol=0, atol=1e-10)
    assert guide.quantiles([0.1, 0.9], new)["f"].shape == (2, count)
    torch.testing.assert_close(guide.median(new)["f"], mean, rtol=0, atol=1e-10)
    # and the training inputs are still themselves
    torch.testing.assert_close(guide.predict(X)["f"][0], guide.get_posterior().mean)


@pytest.mark.parametrize("mean", ["number", "function", "values", "process"])
def test_a_mean_that_is_another_site_is_followed_to_new_inputs(mean):
    """f ~ GP(b, k), where b is a number with a prior in one of three forms, or a process itself."""
    X, y = data(15)
    new, kernel, wide = torch.linspace(-1, 8, 4), Matern(), Matern(4.0, 3.0)

    def model(X, y=None):
        if mean == "process":
            b: Any = pyro.sample("b", GaussianProcess(wide, X, mean=10.0, jitter=JITTER))
        else:
            b = pyro.sample("b", dist.Normal(10.0, 2.0))
        means = {"function": lambda x: b + 0.0 * x, "values": b.expand(len(X))}
        f = pyro.sample("f", GaussianProcess(kernel, X, mean=means.get(mean, b), jitter=JITTER))
        with pyro.plate("data", len(X)):
            pyro.sample("y", dist.Normal(f, NOISE), obs=y)

    guide, _ = trained(model, X, y + 10.0, 1)
    both, one = torch.cat([X, new]), torch.eye(19)
    B = wide(both) + JITTER * one if mean == "process" else torch.full((19, 19), 4.0)
    K = B + kernel(both) + JITTER * one
    gain = torch.linalg.solve(K[:15, :15] + NOISE**2 * torch.eye(15), K[:15, 15:]).mT
    C = K[15:, 15:] - gain @ K[:15, 15:]
    found = guide.predict(new)["f"]
    torch.testing.assert_close(found[0], 10.0 + gain @ y, rtol=0, atol=1e-9)
    torch.testing.assert_close(found[1], C.diagonal(), rtol=0, atol=1e-9)
    q = guide.get_posterior(new)  # draws
    torch.testing.assert_close(q.mean[-4:], found[0], rtol=0, atol=1e-9)
    torch.testing.assert_close(q.covariance_matrix[-4:, -4:], C, rtol=0, atol=1e-9)


def test_draws_at_new_inputs_have_their_density():
    X, y = data(20)
    new = torch.linspace(-1, 6, 5)
    guide, _ = trained(make_model(Matern(), JITTER), X, y, 1)
    q = dist.MultivariateNormal(*closed_form(X, y, new))
    for _ in range(2):  # the second one reuses what the first has computed
        trace: Any = pyro.poutine.trace(guide).get_trace(new)
        torch.testing.assert_close(
            trace.log_prob_sum(), q.log_prob(trace.nodes["f"]["value"]), rtol=1e-9, atol=1e-9
        )
    S = 500
    drawn = Predictive(guide, num_samples=S)(new)["f"].reshape(S, -1)
    z = (drawn - q.mean) / q.variance.sqrt()
    assert (z.mean(0).abs() < 4 / math.sqrt(S)).all()  # standard error 1 / sqrt(S)
    assert ((z.var(0) - 1).abs() < 4 * math.sqrt(2 / S)).all()
    C = z.mT @ z / S - torch.linalg.inv(q.variance.sqrt().diag()) @ q.covariance_matrix @ (
        torch.linalg.inv(q.variance.sqrt().diag())
    )
    assert (C.abs() < 5 * math.sqrt(2 / S)).all()


def test_pyro_predictive_takes_new_inputs():
    X, y = data(20)
    model = make_model(Matern(), JITTER)
    guide, _ = trained(model, X, y, 1)
    new = torch.linspace(-1, 6, 5)
    S = 500
    drawn = Predictive(model, guide=guide, num_samples=S)(new, None)["y"].reshape(S, -1)
    mean, C = closed_form(X, y, new)
    z = (drawn.mean(0) - mean) / ((C.diagonal() + NOISE**2) / S).sqrt()
    assert z.abs().max() < 4  # in standard errors


def test_a_new_step_changes_what_is_predicted_at_the_same_inputs():
    X, y = data(20)
    model = make_model(Matern(), JITTER)
    guide = ngvi.AutoSites(model)
    svi = SVI(model, guide, ngvi.CVI(guide), ngvi.SitesELBO())
    new = torch.linspace(-1, 6, 5)
    for sign in (1, -1):
        svi.step(X, sign * y)
        expected = closed_form(X, sign * y, new)[0]
        torch.testing.assert_close(guide.get_posterior(new).mean, expected, rtol=0, atol=1e-10)


def test_other_training_inputs_of_the_same_number_are_followed():
    X, y = data(20)
    model = make_model(Matern(), JITTER)
    guide = ngvi.AutoSites(model)
    svi = SVI(model, guide, ngvi.CVI(guide), ngvi.SitesELBO())
    new = torch.linspace(-1, 6, 5)
    for inputs in (X, X + 0.5):
        svi.step(inputs, y)
        expected = closed_form(inputs, y, new)[0]
        torch.testing.assert_close(guide.predict(new)["f"][0], expected, rtol=0, atol=1e-10)
    svi.step(X, y)
    X.add_(0.25)  # written into: these are new inputs now
    expected = closed_form(X - 0.25, y, X)[0]
    torch.testing.assert_close(guide.predict(X)["f"][0], expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("nested", [False, True])
def test_a_block_with_other_sites_predicts_them_together(nested):
    """A line and a process, or a process whose values have noise of their own: one Gaussian."""
    X, y = data(15)
    new = torch.linspace(-1, 6, 4)
    kernel = Matern()

    def model(X, y=None):
        w = pyro.sample("w", dist.Normal(0.0, 2.0))
        f = pyro.sample("f", GaussianProcess(kernel, X, jitter=JITTER))
        g = pyro.sample("g", dist.Normal(f, 0.1).to_event(1)) if nested else f
        with pyro.plate("data", len(X)):
            pyro.sample("y", dist.Normal(g + w * X, NOISE), obs=y)

    guide, _ = trained(model, X, y, 1)
    own = 0.01 if nested else 0.0
    lines = torch.cat([X, new])
    K = kernel(lines) + JITTER * torch.eye(19)
    rows = torch.cat([torch.cat([torch.zeros(1, 19), torch.eye(19)]).mT, torch.eye(20)[:1]])
    rows = rows[15:]  # f at new inputs, then w
    prior = torch.block_diag(torch.tensor([[4.0]]), K)
    see = torch.cat([X[:, None], torch.eye(15), torch.zeros(15, 4)], 1)
    S = see @ prior @ see.mT + (NOISE**2 + own) * torch.eye(15)
    gain = torch.linalg.solve(S, see @ prior).mT
    C = rows @ (prior - gain @ see @ prior) @ rows.mT
    mean = rows @ gain @ y
    found = guide.predict(new)
    torch.testing.assert_close(found["f"][0], mean[:4], rtol=0, atol=1e-10)
    torch.testing.assert_close(found["f"][1], C.diagonal()[:4], rtol=0, atol=1e-10)
    torch.testing.assert_close(found["w"][0], mean[4], rtol=0, atol=1e-10)
    torch.testing.assert_close(found["w"][1], C[4, 4], rtol=0, atol=1e-10)
    assert set(found) == {"w", "f"}
    if nested:  # the noise of new data is not that of the first four
        for ask in (guide.get_posterior, guide.median, guide):
            with pytest.raises(ValueError, match=r"'g' has the shape \(4,\) with these arguments"):
                ask(new)
        return
    q = guide.get_posterior(new)
    keep = torch.tensor([1, 2, 3, 4, 0])
    torch.testing.assert_close(q.covariance_matrix[keep][:, keep], C, rtol=0, atol=1e-10)
    trace: Any = pyro.poutine.trace(guide).get_trace(new)
    z = torch.cat(
        [trace.nodes[n]["value"].reshape(-1) for n in ("w", "f", "g") if n in trace.nodes]
    )
    torch.testing.assert_close(trace.log_prob_sum(), q.log_prob(z), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("binary", [False, True])
def test_gradients_in_hyperparameters_hold_the_sites(binary):
    X, y = data(15, binary)
    kernel = Matern(learn=True)
    model = make_model(kernel, JITTER, binary, learn=True)
    guide, _ = trained(model, X, y, 2, others=Adam({"lr": 0.02}))
    loss = ngvi.SitesELBO()
    parameters = [kernel.log_variance, kernel.log_lengthscale]
    for p in parameters:
        p.grad = None
    loss.loss_and_grads(model, guide, X, y)
    for p in parameters:
        assert p.grad is not None
        at = p.detach().clone()
        ends = []
        for step in (1e-5, -1e-5):
            p.data.copy_(at + step)
            ends.append(loss.loss(model, guide, X, y))
        p.data.copy_(at)
        slope = (ends[0] - ends[1]) / 2e-5
        assert abs(float(p.grad) - slope) < 1e-6 * (1 + abs(slope))


def test_learning_follows_the_gradient_of_the_marginal_likelihood():
    X, y = data()
    kernel = Matern(0.2, 3.0, learn=True)
    model = make_model(kernel, JITTER, learn=True)

    def evidence():
        S = covariance(X, kernel) + NOISE**2 * torch.eye(len(X))
        return dist.MultivariateNormal(torch.full_like(y, LEVEL), S).log_prob(y)

    guide, losses = trained(model, X, y, 30, others=Adam({"lr": 0.05}))
    assert losses[-1] < losses[1] - 5
    expected = torch.autograd.grad(evidence(), list(kernel.parameters()))
    loss = ngvi.SitesELBO()
    kernel.zero_grad()
    value = loss.loss_and_grads(model, guide, X, y)
    assert abs(float(value) + float(evidence().detach())) < 1e-9
    for p, slope in zip(kernel.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, -slope, rtol=1e-8, atol=1e-8)
    # q is that of the hyperparameters as they are now, at new inputs too
    new = torch.linspace(-1, 6, 5)
    with torch.no_grad():
        mean = closed_form(X, y, new, kernel)[0]
    torch.testing.assert_close(guide.predict(new)["f"][0], mean, rtol=0, atol=1e-9)


def test_pyro_kernels_learn_as_parts_of_a_module():
    class Model(PyroModule):
        def __init__(self):
            super().__init__()
            self.kernel = RBF(1, torch.tensor(0.5), torch.tensor(1.5))

        def forward(self, X, y=None):
            f = pyro.sample("f", GaussianProcess(self.kernel, X, jitter=JITTER))
            with pyro.plate("data", len(X)):
                pyro.sample("y", dist.Normal(f, NOISE), obs=y)

    X, y = data()
    model = Model()
    guide, _ = trained(model, X, y, 60, others=Adam({"lr": 0.05}))
    assert model.kernel.lengthscale_unconstrained.exp().item() < 1.2
    with torch.no_grad():
        S = covariance(X, model.kernel) + NOISE**2 * torch.eye(len(X))
    evidence = dist.MultivariateNormal(torch.zeros_like(y), S).log_prob(y)
    assert abs(ngvi.SitesELBO().loss(model, guide, X, y) + float(evidence)) < 1e-9


def test_a_copy_and_a_saved_guide_predict_the_same():
    X, y = data(20)
    guide, _ = trained(make_model(Matern(), JITTER), X, y, 1)
    new = torch.linspace(-1, 6, 5)
    expected = guide.predict(new)["f"]
    buffer = io.BytesIO()
    torch.save(guide.state_dict(), buffer)
    buffer.seek(0)
    other, _ = trained(make_model(Matern(), JITTER), X + 1, -y, 1)
    other.load_state_dict(torch.load(buffer))
    twin = copy.deepcopy(guide)
    twin._model = guide._model
    for g in (other, twin):
        torch.testing.assert_close(g.predict(new)["f"], expected)


def test_float32_all_the_way():
    X, y = (t.float() for t in data(15))
    guide, losses = trained(make_model(Matern().float(), 1e-3), X, y, 2)
    mean, variance = guide.predict(torch.linspace(-1, 6, 5, dtype=torch.float32))["f"]
    assert mean.dtype == variance.dtype == torch.float32
    assert torch.isfinite(mean).all() and math.isfinite(losses[1])


class _Level(PyroModule):
    def forward(self, X):
        return self.value.expand(len(X))


class _WithPriors(PyroModule):
    """A kernel that is a sum of Pyro's, whose numbers have priors, and a mean that has one."""

    def __init__(self):
        super().__init__()
        self.kernel: Any = Sum(RBF(1), WhiteNoise(1))
        self.level: Any = _Level()
        self.kernel.kern0.lengthscale = PyroSample(dist.LogNormal(0.0, 0.5))
        self.kernel.kern0.variance = PyroSample(dist.LogNormal(0.0, 0.5))
        self.kernel.kern1.variance = PyroSample(dist.LogNormal(-2.0, 0.5))
        self.level.value = PyroSample(dist.Normal(0.0, 1.0))

    def forward(self, X, y=None):
        f = pyro.sample("f", GaussianProcess(self.kernel, X, mean=self.level, jitter=JITTER))
        with pyro.plate("data", len(X)):
            pyro.sample("y", dist.Normal(f, NOISE), obs=y)
        return f


def test_numbers_of_kernel_and_mean_with_priors_are_drawn_once_in_the_model():
    """Read after the run, as by a density, they would be other draws, of no site."""
    X, y = data(6)
    pyro.clear_param_store()
    model = _WithPriors()
    names = ("kernel.kern0.lengthscale", "kernel.kern0.variance", "kernel.kern1.variance")
    given = dict(zip(names, torch.tensor([0.7, 1.3, 0.2]), strict=True))
    given |= {"level.value": torch.tensor(0.5), "f": y}
    trace: Any = pyro.poutine.trace(pyro.poutine.condition(model, data=given)).get_trace(X, y)
    matrix = 1.3 * (-0.5 * ((X[:, None] - X) / 0.7).square()).exp()
    matrix = matrix + (0.2 + JITTER) * torch.eye(6)
    exact = dist.MultivariateNormal(torch.full((6,), 0.5), matrix)
    fn = trace.nodes["f"]["fn"]
    torch.testing.assert_close(fn.log_prob(y), exact.log_prob(y))
    torch.testing.assert_close(fn.kernel(X[:2], X[2:]), matrix[:2, 2:])
    torch.testing.assert_close(fn.variance, matrix.diagonal())
    assert {n for n in trace.nodes if "." in n} == {*names, "level.value"}
    assert torch.equal(model.kernel.kern0.lengthscale, model.kernel.kern0.lengthscale) is False


def test_a_fit_and_quadrature_know_of_priors_in_a_kernel():
    """Their evidence is that of a grid over the length-scale."""
    X, y = data(12)
    kernel: Any = RBF(1, variance=torch.tensor(1.0))
    kernel.requires_grad_(False)
    kernel.lengthscale = PyroSample(dist.LogNormal(0.0, 0.5))

    def model(X, y):
        f = pyro.sample("f", GaussianProcess(kernel, X, jitter=JITTER))
        with pyro.plate("data", len(X)):
            pyro.sample("y", dist.Normal(f, NOISE), obs=y)

    u = torch.linspace(-2.5, 2.5, 2001)
    matrices = (-0.5 * ((X[:, None] - X) / u.exp()[:, None, None]).square()).exp()
    matrices = matrices + (JITTER + NOISE**2) * torch.eye(12)
    log_p = dist.MultivariateNormal(torch.zeros(12), matrices).log_prob(y)
    log_p = log_p + dist.Normal(0.0, 0.5).log_prob(u)
    weights = torch.softmax(log_p, 0)
    evidence = float(torch.logsumexp(log_p, 0) + (u[1] - u[0]).log())
    pyro.clear_param_store()
    found = ngvi.integrate(model, X, y)
    assert found.log_evidence == pytest.approx(evidence, abs=0.01) and not found.doubts
    assert float(found.mean["lengthscale"]) == pytest.approx(float(weights @ u.exp()), abs=0.01)
    fit = ngvi.fit(model, X, y, seed=0, progress=False)
    assert str(fit.advice).startswith("AutoHierarchical, for a block of 12 latent variables (f)")
    assert evidence - 0.1 < fit.elbo[0] < evidence + 3.0 * fit.elbo[1]
