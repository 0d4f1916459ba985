"""MGVI: the metric of every likelihood, white noise as every prior, draws, densities, exact models."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import SVI, Trace_ELBO
from torch import Tensor

import pyro_ngvi as ngvi
from pyro_ngvi.curvature.derivatives import jvp
from pyro_ngvi.linalg.positive import log_forms
from pyro_ngvi.metric import COORDINATES, PRIORS, family
from pyro_ngvi.metric.likelihoods import coordinates
from pyro_ngvi.metric.whitening import from_white
from pyro_ngvi.runtime.run import Minibatches, run_plainly

N, D = 6, 3


def tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


# --- likelihoods: F against E[score score'], by enumeration or trapezoids that converge exponentially

T = torch.linspace(-45.0, 45.0, 9001, dtype=torch.float64)
REAL = T.sinh(), T.cosh() * (T[1] - T[0])
POSITIVE = T.exp(), T.exp() * (T[1] - T[0])
KINKED = torch.cat([0.1 - T.exp(), 0.1 + T.exp()]), POSITIVE[1].repeat(2)  # a kink at 0.1
UNIT = T.sigmoid(), T.sigmoid() * (-T).sigmoid() * (T[1] - T[0])


def counts(most: int) -> tuple[Tensor, Tensor]:
    k = torch.arange(most + 1.0, dtype=torch.float64)
    return k, torch.ones_like(k)


CUBES = tensor(*[float(x) for ks in product(range(4), repeat=3) if sum(ks) == 3 for x in ks])
SUMS = CUBES.reshape(-1, 3), torch.ones(len(CUBES) // 3, dtype=torch.float64)

#: the distribution of parameters, values of these, and values of the data with their weights
LIKELIHOODS: dict[str, tuple[Callable[[Tensor], Any], Tensor, tuple[Tensor, Tensor]]] = {
    "normal": (lambda t: dist.Normal(t[0], t[1].exp()), tensor(0.3, -0.4), REAL),
    "log normal": (lambda t: dist.LogNormal(t[0], t[1]), tensor(0.3, 0.6), POSITIVE),
    "laplace": (lambda t: dist.Laplace(t[0], t[1]), tensor(0.1, 0.7), KINKED),
    "cauchy": (lambda t: dist.Cauchy(t[0], t[1]), tensor(0.1, 0.7), REAL),
    "logistic": (lambda t: dist.Logistic(t[0], t[1]), tensor(0.1, 0.7), REAL),
    "student": (lambda t: dist.StudentT(t[0], t[1], t[2]), tensor(3.5, 0.2, 1.3), REAL),
    "gumbel": (lambda t: dist.Gumbel(t[0], t[1]), tensor(0.2, 0.8), REAL),
    "weibull": (lambda t: dist.Weibull(t[0], t[1]), tensor(1.2, 1.7), POSITIVE),
    "half normal": (lambda t: dist.HalfNormal(t[0]), tensor(1.4), POSITIVE),
    "exponential": (lambda t: dist.Exponential(t[0]), tensor(1.4), POSITIVE),
    "gamma": (lambda t: dist.Gamma(t[0], t[1]), tensor(2.3, 0.8), POSITIVE),
    "inverse gamma": (lambda t: dist.InverseGamma(t[0], t[1]), tensor(2.3, 0.8), POSITIVE),
    "beta": (lambda t: dist.Beta(t[0], t[1]), tensor(1.7, 2.6), UNIT),
    "poisson": (lambda t: dist.Poisson(t[0]), tensor(2.2), counts(60)),
    "bernoulli": (lambda t: dist.Bernoulli(logits=t[0]), tensor(0.7), counts(1)),
    "bernoulli, probs": (lambda t: dist.Bernoulli(t[0]), tensor(0.3), counts(1)),
    "binomial": (lambda t: dist.Binomial(7, logits=t[0]), tensor(0.7), counts(7)),
    "geometric": (lambda t: dist.Geometric(t[0]), tensor(0.3), counts(200)),
    "negative binomial": (
        lambda t: dist.NegativeBinomial(2.5, logits=t[0]),
        tensor(0.4),
        counts(400),
    ),
    "categorical": (lambda t: dist.Categorical(logits=t), tensor(0.3, -0.5, 1.0), counts(2)),
    "one hot": (
        lambda t: dist.OneHotCategorical(logits=t),
        tensor(0.3, -0.5, 1.0),
        (torch.eye(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)),
    ),
    "multinomial": (
        lambda t: dist.Multinomial(3, logits=t, validate_args=False),
        tensor(0.3, -0.5, 1.0),
        SUMS,
    ),
}


def metric_of(model: Callable[[Tensor], Any], t: Tensor) -> Tensor:
    """F as the rows of the package have it, for a site observed as ``model(t)`` says."""

    def rows(t: Tensor) -> Tensor:
        return coordinates(run_plainly(model, {}, (t,), {}, Minibatches()))

    J: Any = torch.autograd.functional.jacobian(rows, t)
    return J.mT @ J


@pytest.mark.parametrize("kind", LIKELIHOODS)
def test_the_metric_is_the_fisher_matrix(kind: str) -> None:
    make, at, (values, weights) = LIKELIHOODS[kind]

    def observed(t: Tensor) -> None:
        pyro.sample("y", make(t), obs=values[0])

    def log_prob(t: Tensor) -> Tensor:
        fn = make(t)
        fn._validate_args = False
        return (
            torch.stack([fn.log_prob(v) for v in values])
            if values.dim() > 1
            else fn.log_prob(values)
        )

    scores = torch.stack([jvp(log_prob, (at,), (e,))[1] for e in torch.eye(len(at)).double()], -1)
    p = log_prob(at).exp() * weights
    there = p > 0.0  # scores overflow where there is no mass
    p, scores = p[there], scores[there]
    assert abs(float(p.sum()) - 1.0) < 1e-9
    F = scores.mT @ (p.unsqueeze(-1) * scores)
    torch.testing.assert_close(metric_of(observed, at), F, rtol=2e-8, atol=2e-8)


def test_the_metric_of_covariances() -> None:
    """F_ab = mu_a' P mu_b + tr(P S_a P S_b) / 2."""
    at = tensor(0.3, -0.2, 0.9, 0.4, 1.3)

    def mvn(t: Tensor) -> Any:
        L = torch.stack([torch.stack([t[2], t[0] * 0.0]), t[3:5]])
        return dist.MultivariateNormal(t[:2], scale_tril=L)

    S: Any = torch.autograd.functional.jacobian(lambda t: mvn(t).covariance_matrix, at)
    P = mvn(at).precision_matrix
    PS = torch.einsum("ij,jka->aik", P, S)
    F = 0.5 * torch.einsum("aij,bji->ab", PS, PS)
    F[:2, :2] += P
    found = metric_of(lambda t: pyro.sample("y", mvn(t), obs=torch.zeros(2).double()), at)
    torch.testing.assert_close(found, F)


def test_every_likelihood_is_tested() -> None:
    known = {type(make(at)) for make, at, _ in LIKELIHOODS.values()}
    covered = {kind for kind in COORDINATES if any(issubclass(k, kind) for k in known)}
    assert set(COORDINATES) - covered == {torch.distributions.MultivariateNormal}


def test_scales_masks_and_events() -> None:
    """F of a site is the sum over data of scale times mask times F of each, however it is written."""
    t = tensor(0.4, -0.3, 0.8)
    mask: Any = torch.tensor([True, False, True])
    one = metric_of(lambda t: pyro.sample("y", dist.Normal(t, 2.0).to_event(1), obs=t.detach()), t)
    torch.testing.assert_close(one, torch.eye(3).double() / 4.0)
    kept = torch.diag(mask.double()) / 4.0

    def masked(t: Tensor) -> None:
        with pyro.plate("data", 3), poutine.mask(mask=mask), poutine.scale(scale=3.0):
            pyro.sample("y", dist.Normal(t, 2.0), obs=t.detach())

    def inside(t: Tensor) -> None:
        pyro.sample("y", dist.Normal(t, 2.0).mask(mask).to_event(1), obs=t.detach())

    def several(t: Tensor) -> None:  # more data than the distribution has entries
        pyro.sample("y", dist.Normal(t[0], 2.0), obs=torch.zeros(5).double())

    def classes(t: Tensor) -> None:
        logits = torch.stack([t, -t], -1)
        with pyro.plate("data", 3), poutine.mask(mask=mask):
            pyro.sample("y", dist.Categorical(logits=logits), obs=torch.zeros(3))

    torch.testing.assert_close(metric_of(masked, t), 3.0 * kept)
    torch.testing.assert_close(metric_of(inside, t), kept)
    torch.testing.assert_close(metric_of(several, t)[0, 0], tensor(1.25)[0])
    p = (2.0 * t).sigmoid()
    torch.testing.assert_close(metric_of(classes, t), torch.diag(4.0 * p * (1.0 - p) * mask))


# --- priors


TRIL = torch.tensor([[1.2, 0.0], [0.5, 0.7]], dtype=torch.float64)
SCALAR_PRIORS: dict[str, Any] = {
    "normal": dist.Normal(tensor(0.4), 1.7),
    "uniform": dist.Uniform(tensor(-1.0), 3.0),
    "exponential": dist.Exponential(tensor(0.6)),
    "half normal": dist.HalfNormal(tensor(2.5)),
    "half cauchy": dist.HalfCauchy(tensor(2.5)),
    "cauchy": dist.Cauchy(tensor(0.3), 2.5),
    "laplace": dist.Laplace(tensor(0.3), 2.5),
    "gumbel": dist.Gumbel(tensor(0.3), 2.5),
    "logistic": dist.Logistic(tensor(0.3), 2.5),
    "log normal": dist.LogNormal(tensor(0.3), 0.5),
    "weibull": dist.Weibull(tensor(1.3), 0.8),
    "pareto": dist.Pareto(tensor(1.3), 0.8),
}
#: those that go on without end, whose tails keep all digits
UPPER = ("exponential", "half normal", "half cauchy")
VECTOR_PRIORS: dict[str, Any] = {
    "tril": dist.MultivariateNormal(tensor(1.0, -1.0), scale_tril=TRIL),
    "low rank": dist.LowRankMultivariateNormal(tensor(1.0, -1.0), TRIL[:, :1], tensor(0.3, 0.4)),
    "process": ngvi.distributions.GaussianProcess(
        lambda X, Z=None, diag=False: (-(X[:, None] - X).square()).exp(), tensor(0.0, 0.7)
    ),
    "event": dist.Normal(tensor(0.0, 1.0), tensor(1.0, 3.0)).to_event(1),
}


@pytest.mark.parametrize("kind", SCALAR_PRIORS)
def test_white_noise_becomes_a_draw_of_the_prior(kind: str) -> None:
    """log N(xi) = log p(x) + log |dx/dxi|, and back to the same xi, far into both tails."""
    fn, most = SCALAR_PRIORS[kind], 20.0 if kind in UPPER else 5.5
    transform: Any = from_white(fn)
    xi = torch.linspace(-5.5, most, 261, dtype=torch.float64).requires_grad_()
    x = transform(xi)
    (slope,) = torch.autograd.grad(x.sum(), xi)
    assert bool((slope > 0.0).all())
    left = dist.Normal(0.0, 1.0).log_prob(xi) - slope.log()
    torch.testing.assert_close(left, fn.log_prob(x), rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(transform.inv(x), xi, rtol=1e-7, atol=1e-7)
    single: Any = from_white(type(fn)(tensor(1.5).float())) if kind in UPPER else None
    assert single is None or bool(single(tensor(9.0, -9.0).float()).isfinite().all())


@pytest.mark.parametrize("kind", VECTOR_PRIORS)
def test_white_noise_becomes_a_draw_of_a_joint_prior(kind: str) -> None:
    fn, xi = VECTOR_PRIORS[kind], tensor(0.8, -1.4)
    transform: Any = from_white(fn)
    J: Any = torch.autograd.functional.jacobian(transform, xi)
    left = dist.Normal(0.0, 1.0).log_prob(xi).sum() - torch.linalg.slogdet(J)[1]
    torch.testing.assert_close(left, fn.log_prob(transform(xi)))
    torch.testing.assert_close(transform.inv(transform(xi)), xi)


def test_every_prior_is_tested() -> None:
    known = [fn.base_dist if kind == "event" else fn for kind, fn in VECTOR_PRIORS.items()]
    for kind in PRIORS:
        assert any(isinstance(fn, kind) for fn in (*SCALAR_PRIORS.values(), *known)), kind


# --- the family


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    X = torch.randn(N, D, generator=generator, dtype=torch.float64)
    return X, X.sum(-1) + 0.5 * torch.randn(N, generator=generator, dtype=torch.float64)


SCALE = tensor(1.0, 2.0, 0.5)


def regression(X: Tensor, y: Tensor) -> None:
    w = pyro.sample("w", dist.Normal(torch.zeros(D).double(), SCALE).to_event(1))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal((X * w).sum(-1), 0.7), obs=y)


def hierarchy(y: Tensor) -> None:
    m = pyro.sample("m", dist.Normal(tensor(0.5)[0], 2.0))
    s = pyro.sample("s", dist.HalfCauchy(tensor(1.0)[0]))
    with pyro.plate("units", len(y)):
        u = pyro.sample("u", dist.Normal(m, s))
        v = pyro.sample("v", dist.Exponential(s))
        pyro.sample("y", dist.Poisson(u.exp() + v), obs=y)


Y = tensor(2.0, 0.0, 3.0)


def trained(model: Any, *args: Any, steps: int = 12, loss: Any = None) -> Any:
    pyro.set_rng_seed(0)
    guide = ngvi.AutoMetricNormal(model)
    svi = SVI(model, guide, ngvi.NGVB(guide), loss or ngvi.BatchedELBO(4))
    for _ in range(steps):
        svi.step(*args)
    return guide, svi


def metric(guide: Any) -> tuple[Any, Any, Tensor]:
    """The metric of a guide, its parameters and the metric made whole."""
    params = {"loc": guide.loc.detach()}
    found = guide.family.metric(params)
    return found, params, found.product(torch.eye(found.d, dtype=torch.float64))


@pytest.fixture(params=["whole", "products"])
def small(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    if request.param == "products":
        monkeypatch.setattr(family, "SMALL", 0)
    return request.param


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("loss", [None, Trace_ELBO(2), Trace_ELBO(2, vectorize_particles=True)])
def test_a_linear_model_is_exact(loss: Any) -> None:
    X, y = data()
    guide, _ = trained(regression, X, y, loss=loss)
    precision = torch.diag(SCALE**-2) + X.mT @ X / 0.49
    mean = torch.linalg.solve(precision, X.mT @ y / 0.49)
    torch.testing.assert_close(guide.loc.detach() * SCALE, mean, rtol=0.0, atol=1e-8)
    found = metric(guide)[0].solve(torch.eye(D).double()) * SCALE * SCALE[:, None]
    torch.testing.assert_close(found, torch.linalg.inv(precision), rtol=0.0, atol=1e-8)


def test_the_elbo_of_a_linear_model_is_its_evidence(small: str) -> None:
    X, y = data()
    guide, svi = trained(regression, X, y)
    S = X @ torch.diag(SCALE**2) @ X.mT + 0.49 * torch.eye(N).double()
    evidence = dist.MultivariateNormal(torch.zeros(N).double(), S).log_prob(y)
    loss = svi.evaluate_loss(X, y)
    log_det, error = guide.log_det()
    if small == "whole":
        assert float(error) == 0.0
        assert abs(loss + float(evidence)) < 1e-8
    else:  # the draws are exact, so that log det M is all that is uncertain
        assert 0.0 < float(error) < 1.0
        assert abs(loss + float(evidence)) < 4.0 * 0.5 * float(error)
    found, _, M = metric(guide)
    whole = log_forms(found.product, torch.eye(D).double(), 20).sum()
    torch.testing.assert_close(whole, torch.logdet(M))
    if small == "whole":
        torch.testing.assert_close(log_det, whole)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(("model", "args"), [(regression, data()), (hierarchy, (Y,))])
def test_draws_have_the_covariance_of_the_family(model: Any, args: Any) -> None:
    """r is a linear map of (e, e'), whose Gram matrix is M^-1; pairs are antithetic."""
    guide, _ = trained(model, *args, steps=3)
    found, params, M = metric(guide)
    noise = torch.eye(guide.family.noise_dim(params), dtype=torch.float64)
    R = found.draws(noise)
    torch.testing.assert_close(R.mT @ R, torch.linalg.inv(M), rtol=1e-6, atol=1e-6)
    assert torch.equal(M, M.mT) or (M - M.mT).abs().max() < 1e-12
    torch.testing.assert_close(found.solve(M), torch.eye(found.d).double(), rtol=0.0, atol=1e-5)
    pairs = guide.family.centred_draw(params, torch.Size((6,)))
    xi = guide.family.bound().white(pairs)[0] - params["loc"]
    torch.testing.assert_close(xi[:3], -xi[3:])


def test_products_are_those_of_the_jacobian() -> None:
    guide, _ = trained(hierarchy, Y, steps=3)
    found, params, _ = metric(guide)
    bound = guide.family.bound()

    def rates(xi: Tensor) -> Tensor:
        return bound.sites({"_white": xi})["y"]["fn"].rate

    J: Any = torch.autograd.functional.jacobian(rates, params["loc"])
    A = J / rates(params["loc"]).sqrt().unsqueeze(-1)
    torch.testing.assert_close(found.push(torch.eye(8).double()), A.mT)
    torch.testing.assert_close(found.pull(torch.eye(3).double()), A)
    torch.testing.assert_close(found.log_det[0], torch.logdet(torch.eye(8) + A.mT @ A))


def test_the_density_is_that_of_the_image_of_the_gaussian() -> None:
    guide, _ = trained(hierarchy, Y, steps=3)
    _, params, M = metric(guide)
    bound, q = guide.family.bound(), guide.get_posterior()
    theta = q.rsample((5,)).detach().requires_grad_()
    gaussian = dist.MultivariateNormal(params["loc"], precision_matrix=M)
    xi, log_jacobian = bound.white(theta)
    torch.testing.assert_close(bound.theta(xi), theta)

    def one(x: Tensor) -> Tensor:
        return bound.theta(x[None])[0]

    J: Any = torch.stack([torch.autograd.functional.jacobian(one, x) for x in xi.detach()])
    torch.testing.assert_close(log_jacobian, -torch.linalg.slogdet(J)[1])
    right = gaussian.log_prob(xi) + log_jacobian
    torch.testing.assert_close(q.log_prob(theta), right)
    (found,) = torch.autograd.grad(q.log_prob(theta).sum(), theta)
    (wanted,) = torch.autograd.grad(right.sum(), theta)
    torch.testing.assert_close(found, wanted)
    score = guide.family.score(params, theta.detach())["loc"]
    torch.testing.assert_close(score, (xi - params["loc"]).detach() @ M)


@pytest.mark.slow
def test_the_mean_is_best_for_its_covariance() -> None:
    """After a run E[grad log p(y, xi)] = 0 under q, up to the noise of the draws that say so."""
    guide, _ = trained(hierarchy, Y, steps=400)
    found, params, _ = metric(guide)
    bound = guide.family.bound()
    pyro.set_rng_seed(1)
    half = found.draws(torch.randn(4000, found.d + found.n, dtype=torch.float64))
    xi = (params["loc"] + torch.cat([half, -half])).requires_grad_()
    density = ngvi.diagnostics.ModelDensity(hierarchy, (Y,))
    theta = bound.theta(xi)
    log_p = density(theta) - bound.white(theta)[1]
    (g,) = torch.autograd.grad(log_p.sum(), xi)
    each = found.solve(0.5 * (g[:4000] + g[4000:]))  # natural gradients, of a pair
    slope, error = each.mean(0), each.std(0) / 4000**0.5
    sd = torch.linalg.inv(metric(guide)[2]).diagonal().sqrt()
    assert bool((slope.abs() < 0.05 * sd + 4.0 * error).all()), slope / sd


def test_gamma_is_refused_with_what_to_take() -> None:
    def model() -> None:
        s = pyro.sample("s", dist.Gamma(2.0, 1.0))
        pyro.sample("y", dist.Normal(0.0, s), obs=torch.tensor(1.0))

    with pytest.raises(ValueError, match=r"'s' \(Gamma\) is no closed form.*take LogNormal"):
        ngvi.AutoMetricNormal(model)()


def test_conjugate_gradients_end_in_float32() -> None:
    """Of a smooth field, with eigenvalues up to 10^5: 191 steps, not the 274 of float64's residual."""
    n, k = 1200, torch.fft.rfftfreq(1200) * 1200
    amplitude = 300.0 / (1.0 + k.square() / 9.0)

    def model() -> None:
        xi = pyro.sample("xi", dist.Normal(torch.zeros(n), 1.0).to_event(1))
        f = torch.fft.irfft(amplitude * torch.fft.rfft(xi), n=n)
        pyro.sample("y", dist.Normal(f, 1.0).to_event(1), obs=torch.zeros(n))

    guide = ngvi.AutoMetricNormal(model, init=None, cg_steps=230)
    guide()
    found = guide.family.metric({"loc": guide.loc.detach()})
    assert found.root is None
    noise = torch.randn(2, found.d + found.n, generator=torch.Generator().manual_seed(0))
    r = found.draws(noise)  # a warning, which is an error here, would say that they do not end
    b = noise[:, : found.d] + found.pull(noise[:, found.d :])
    assert float((found.product(r) - b).norm() / b.norm()) < 1e-3
    exact = (1.0 + amplitude.double().square()).log()
    log_det = 2.0 * exact.sum() - exact[0] - exact[-1]
    value, error = found.log_det
    assert abs(float(value) - float(log_det)) < 4.0 * float(error)
