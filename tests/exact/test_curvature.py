"""The curvature that a loss leaves, against loops over data and torch's own Hessian."""

from functools import partial
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import SVI
from pyro.infer.autoguide import AutoNormal

import pyro_ngvi as ngvi
from pyro_ngvi.curvature.estimators import Curvature
from pyro_ngvi.runtime.model_density import ModelDensity
from tests.covering import covering

pytestmark = pytest.mark.usefixtures("plain_start")

N, M = 7, 3
X = torch.linspace(-1.0, 1.0, N * 2, dtype=torch.float64).reshape(N, 2).sin() + 0.3
Y = torch.tensor([1.0, 0.0, 2.0, 1.0, 3.0, 0.0, 1.0], dtype=torch.float64)
GROUPS = torch.linspace(0.0, 2.0, 6, dtype=torch.float64).reshape(2, 3)


def hierarchical(mask=None):
    """A constrained site in the prior of another one, two observed sites, nested plates."""
    scale = pyro.sample("scale", dist.HalfNormal(1.0))
    w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    b = pyro.sample("b", dist.Normal(0.0, scale))
    with pyro.plate("data", N), poutine.scale(scale=2.5):
        noise = dist.Poisson((X @ w + b).exp())
        pyro.sample("y", noise if mask is None else noise.mask(mask), obs=Y)
    with pyro.plate("columns", 3, dim=-1), pyro.plate("rows", 2, dim=-2):
        pyro.sample("g", dist.StudentT(4.0, b, scale), obs=GROUPS)
    pyro.factor("extra", -0.1 * w.pow(4).sum())


def flat(mask=None):
    """Independent priors: the Hessian of the rest is diagonal."""
    w = pyro.sample("w", dist.SoftLaplace(torch.zeros(2), 1.0).to_event(1))
    b = pyro.sample("b", dist.StudentT(3.0, 0.0, 2.0))
    s = pyro.sample("s", dist.Exponential(1.0))
    with pyro.plate("data", N), poutine.mask(mask=True if mask is None else mask):
        pyro.sample("y", dist.Normal(X @ w + b, s), obs=Y)


def curvature(model, guide_class, kind, **kwargs):
    """What the loss leaves, and the draws it was taken at."""
    torch.manual_seed(1)
    guide = guide_class(model)
    loss = ngvi.BatchedELBO(2, curvature=kind)
    loss.loss_and_grads(model, guide, **kwargs)
    left = guide.take_curvature()
    assert isinstance(left, Curvature) and left.kind == kind
    assert guide.take_curvature() is None
    torch.manual_seed(1)
    return left.parts, guide.sampling_posterior().rsample((2,)).detach()


def hessian(f, t) -> torch.Tensor:
    return torch.as_tensor(torch.autograd.functional.hessian(f, t))


def reference(model, theta, kind, **kwargs):
    """The dense curvature at one draw: torch's Hessian, and a loop over data for the products."""
    density = ModelDensity(model, (), kwargs)

    def terms(t):
        sites = density.trace(t[None]).sites.items()
        return {name: site.log_prob for name, site in sites}

    if kind == "hessian":
        return hessian(lambda t: -density(t[None])[0], theta)
    total = torch.zeros(len(theta), len(theta))

    sites = density.trace(theta[None]).sites
    observed = [name for name, site in sites.items() if site.kind == "observed"]
    for name in observed:
        scale = 2.5 if name == "y" and model is hierarchical else 1.0
        count = terms(theta)[name].numel()
        for i in range(count):
            t = theta.clone().requires_grad_()
            (g,) = torch.autograd.grad(terms(t)[name].reshape(-1)[i], t, allow_unused=True)
            g = torch.zeros_like(theta) if g is None else g
            total += torch.outer(g, g) / scale  # the term carries its scale, the square once only

    def rest(t):
        return -density(t[None])[0] + sum(terms(t)[name].sum() for name in observed)

    return total + hessian(rest, theta)


@pytest.mark.parametrize(
    ("model", "kind", "masked"),
    covering([hierarchical, flat], ["hessian", "gauss_newton"], [False, True]),
)
def test_dense_and_diagonal(model, kind, masked):
    kwargs = {"mask": torch.arange(N) % 3 != 1} if masked else {}
    for guide_class, form in (
        (ngvi.AutoFullRankNormal, "dense"),
        (ngvi.AutoMeanFieldNormal, "diagonal"),
    ):
        parts, theta = curvature(model, guide_class, kind, **kwargs)
        expected = torch.stack([reference(model, t, kind, **kwargs) for t in theta]).mean(0)
        expected = expected if form == "dense" else expected.diagonal()
        torch.testing.assert_close(parts[form], expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("masked", [False, True])
def test_rows_and_the_diagonal_of_the_rest(masked):
    """With a prior of a diagonal Hessian they are all of the Gauss-Newton matrix, over two draws."""
    kwargs = {"mask": torch.arange(N) % 3 != 1} if masked else {}
    guide = partial(ngvi.AutoFactorPrecision, rank=1)
    parts, theta = curvature(flat, guide, "gauss_newton", **kwargs)
    expected = torch.stack([reference(flat, t, "gauss_newton", **kwargs) for t in theta]).mean(0)
    found = parts["rows"].mT @ parts["rows"] + torch.diag(parts["diagonal"])
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("model", [hierarchical, flat])
def test_squared_gradient(model):
    parts, theta = curvature(model, ngvi.AutoMeanFieldNormal, "squared_gradient")
    density = ModelDensity(model)
    weights = N * 2.5 + 6 if model is hierarchical else N

    def likelihood(t):
        sites = density.trace(t[None]).sites.values()
        return sum(site.log_prob_sum[0] for site in sites if site.kind == "observed")

    squares = [torch.func.grad(likelihood)(t).square() for t in theta]
    prior = [hessian(lambda t: likelihood(t) - density(t[None])[0], t).diagonal() for t in theta]
    torch.testing.assert_close(parts["prior"], sum(prior) / len(theta))
    torch.testing.assert_close(parts["count"], torch.tensor(float(weights)))
    expected = sum(squares) / len(theta) / weights + parts["prior"]
    torch.testing.assert_close(parts["diagonal"], expected)


def test_minibatches_average_to_the_whole():
    """Over all minibatches of a partition the Gauss-Newton curvature averages to the whole one."""
    w = torch.tensor([[0.3, -0.2]])

    def model(index, size):
        w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        with pyro.plate("data", size, subsample=index):
            pyro.sample("y", dist.Normal(X[index] @ w, 0.5), obs=Y[index])

    def at(index):
        guide = ngvi.AutoFullRankNormal(model, init_scale=1e-30)
        guide(index, 6)
        with torch.no_grad():
            guide.loc.copy_(w[0])
        ngvi.BatchedELBO(1, curvature="gauss_newton").loss_and_grads(model, guide, index, 6)
        left = guide.take_curvature()
        assert left is not None
        return left.parts["dense"]

    parts = [at(torch.tensor(index)) for index in ([0, 4], [1, 5], [2, 3])]
    torch.testing.assert_close(sum(parts) / 3, at(torch.arange(6)))


def test_price_leaves_nothing_but_its_name():
    parts, _ = curvature(flat, ngvi.AutoMeanFieldNormal, "price")
    assert parts == {}


def test_ngvb_takes_curvature_too():
    """The exact Hessian in the place of the gradient of the scales: one particle converges."""

    def model():
        w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        with pyro.plate("data", N):
            pyro.sample("y", dist.Normal(X @ w, 0.5), obs=Y)

    torch.manual_seed(0)
    guide = ngvi.AutoFullRankNormal(model)
    svi = SVI(model, guide, ngvi.NGVB(guide), ngvi.BatchedELBO(1, curvature="hessian"))
    for _ in range(80):
        svi.step()
    P = torch.eye(2) + 4.0 * X.T @ X
    q = guide.get_posterior()
    torch.testing.assert_close(q.covariance_matrix, torch.linalg.inv(P), rtol=1e-6, atol=0)
    torch.testing.assert_close(q.mean, torch.linalg.solve(P, 4.0 * X.T @ Y), rtol=1e-3, atol=1e-3)


def no_plate():
    w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    pyro.sample("y", dist.Normal(X @ w, 0.5).to_event(1), obs=Y)


@pytest.mark.parametrize(
    "guide_class, kind, model, message",
    [
        (ngvi.AutoMeanFieldNormal, "gauss_newton", no_plate, "no observed site of the model lies"),
        (ngvi.AutoFullRankNormal, "squared_gradient", flat, "AutoMeanFieldNormal"),
        (
            lambda m: ngvi.AutoFactorNormal(m, rank=1),
            "hessian",
            flat,
            "AutoFactorNormal has no use for",
        ),
        (AutoNormal, "hessian", flat, "AutoNormal has no use for.*Take AutoMeanFieldNormal itself"),
    ],
)
def test_refusals(guide_class, kind, model, message):
    guide = guide_class(model)
    loss = ngvi.BatchedELBO(1, curvature=kind)
    with pytest.raises(ValueError, match=message):
        loss.loss_and_grads(model, guide)


def test_unknown_kind():
    with pytest.raises(ValueError, match=r"'exact'.*'gauss_newton'"):
        ngvi.BatchedELBO(1, curvature="exact")


def regression_network(x, y=None):
    """A network with a latent, constrained noise scale, a bias and other priors than normal ones."""
    w1 = pyro.sample("w1", dist.Normal(torch.zeros(4, 2), 1.0).to_event(2))
    b1 = pyro.sample("b1", dist.StudentT(3.0, torch.zeros(4), 1.0).to_event(1))
    w2 = pyro.sample("w2", dist.SoftLaplace(torch.zeros(1, 4), 1.0).to_event(2))
    noise = pyro.sample("noise", dist.HalfCauchy(1.0))
    with pyro.plate("data", 20, subsample=torch.arange(len(x))):
        hidden = torch.nn.functional.linear(x, w1, b1).tanh()
        mean = torch.nn.functional.linear(hidden, w2).squeeze(-1)
        pyro.sample("y", dist.Normal(mean, noise), obs=y)


def partly_covered(x, y=None):
    """The layers see w; the exponent a acts on the data in another way."""
    w = pyro.sample("w", dist.Normal(torch.zeros(1, 2), 1.0).to_event(2))
    a = pyro.sample("a", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(x)):
        mean = torch.nn.functional.linear(x, w).squeeze(-1)
        pyro.sample("y", dist.Normal(mean, a.exp()), obs=y)


def hierarchical_network(x, y=None):
    """The Hessian of the prior is not diagonal, so there is no fast route."""
    scale = pyro.sample("scale", dist.Normal(0.0, 1.0))
    w = pyro.sample("w", dist.Normal(torch.zeros(1, 2), scale.exp()).to_event(2))
    with pyro.plate("data", len(x)):
        mean = torch.nn.functional.linear(x, w).squeeze(-1)
        pyro.sample("y", dist.Normal(mean, 0.5), obs=y)


@pytest.mark.parametrize(
    "model, uncovered, particles",
    [
        (regression_network, {"noise"}, 3),
        (partly_covered, {"a"}, 1),
        (hierarchical_network, {"scale", "w"}, 3),
    ],
)
def test_fast_route_equals_the_general_one(model, uncovered, particles):
    """From the second step on a network's squares come from the loss's own backward pass."""
    guide = ngvi.AutoMeanFieldNormal(model, init_scale=0.3)
    batches = [(X[:5], Y[:5]), (X, Y), (X[2:], Y[2:])]
    fast = ngvi.BatchedELBO(particles, curvature="gauss_newton")
    for seed, (x, y) in enumerate(batches):
        left = []
        for loss in (fast, ngvi.BatchedELBO(particles, curvature="gauss_newton")):
            torch.manual_seed(seed)
            guide.zero_grad()
            value = loss.loss_and_grads(model, guide, x, y)
            curvature = guide.take_curvature()
            assert curvature is not None
            grads = torch.cat([torch.as_tensor(p.grad).reshape(-1) for p in guide.parameters()])
            left.append((value, grads, curvature.parts["diagonal"]))
        for one, other in zip(*left, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)
    assert set(fast.curvature_reasons) == uncovered


@pytest.mark.parametrize("guide_class", [ngvi.AutoFullRankNormal, ngvi.AutoMeanFieldNormal])
def test_kl_weight_is_a_tempered_likelihood(guide_class):
    """Loss, gradient and curvature are those of the model with its data scaled by 1 / tau."""

    def scaled(weight):
        def model(x, y):
            w = pyro.sample("w", dist.Normal(torch.zeros(1, 2), 2.0).to_event(2))
            mean = torch.nn.functional.linear(x, w).squeeze(-1)
            with pyro.plate("data", len(x)), poutine.scale(scale=weight):
                pyro.sample("y", dist.Normal(mean, 0.5), obs=y)
            pyro.factor("extra", -w.pow(4).sum())

        return model

    left = []
    for model, weight in ((scaled(4.0), 1.0), (scaled(1.0), 0.25)):
        guide = guide_class(model, init=None)
        loss = ngvi.BatchedELBO(2, curvature="gauss_newton", kl_weight=weight)
        for seed in range(2):
            torch.manual_seed(seed)
            value = loss.loss_and_grads(model, guide, X, Y)
            curvature = guide.take_curvature()
        assert curvature is not None
        grads = [torch.as_tensor(p.grad).clone() for p in guide.parameters()]
        left.append([value, *grads, *curvature.parts.values()])
    for one, other in zip(*left, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)
    loss.kl_weight = 0.0
    with pytest.raises(ValueError, match="kl_weight is 0"):
        loss.loss_and_grads(model, guide, X, Y)


def linear(x, y=None):
    w = pyro.sample("w", dist.Normal(torch.zeros(1, 2), 1.0).to_event(2))
    with pyro.plate("data", len(x)):
        mean = torch.nn.functional.linear(x, w).squeeze(-1)
        pyro.sample("y", dist.Normal(mean, 0.5), obs=y)


def mixing(x, y=None):
    """Each datum sees the mean over the minibatch, which one datum alone does not show."""
    w = pyro.sample("w", dist.Normal(torch.zeros(1, 2), 1.0).to_event(2))
    with pyro.plate("data", len(x)):
        h = torch.nn.functional.linear(x, w).squeeze(-1)
        pyro.sample("y", dist.Normal(h - 0.5 * h.mean(), 0.5), obs=y)


def test_evaluate_loss_between_steps():
    guide = ngvi.AutoMeanFieldNormal(linear)
    loss = ngvi.BatchedELBO(4, curvature="gauss_newton")
    svi = SVI(linear, guide, ngvi.optim.VOGN(guide), loss)
    for _ in range(3):
        svi.step(X, Y)
        assert isinstance(svi.evaluate_loss(X, Y), float)
    assert loss.curvature_reasons == {}
    loss.curvature = None
    SVI(linear, guide, ngvi.NGVB(guide), loss).step(X, Y)


def test_a_first_minibatch_of_one_decides_nothing():
    guide = ngvi.AutoMeanFieldNormal(mixing)
    loss = ngvi.BatchedELBO(2, curvature="gauss_newton")
    for x, y in ((X[:1], Y[:1]), (X, Y), (X, Y)):
        loss.loss_and_grads(mixing, guide, x, y)
        guide.take_curvature()
    assert "w" in loss.curvature_reasons


def test_a_diagonal_prior_is_not_taken_from_a_degenerate_start():
    """Near w = 0 with a tiny sd the Hessian of the prior of (t, w) only looks diagonal."""

    def model():
        t = pyro.sample("t", dist.LogNormal(0.0, 1.0))
        w = pyro.sample("w", dist.Normal(torch.zeros(2), t).to_event(1))
        with pyro.plate("data", N):
            pyro.sample("y", dist.Normal(X @ w, 1.0), obs=Y)

    guide = ngvi.AutoMeanFieldNormal(model, init_scale=1e-5)
    loss = ngvi.BatchedELBO(1, curvature="gauss_newton")
    loss.loss_and_grads(model, guide)
    assert loss.curvature_reasons.keys() == {"t", "w"}


@pytest.mark.parametrize("unit", [1.0, 1e5])
def test_a_coupled_prior_in_any_units(unit):
    """A change of units changes no precision in units; the entries of b are far smaller here."""

    def model():
        mu = pyro.sample("mu", dist.Normal(0.0, unit))
        pyro.sample("b", dist.Normal(0.0, 1.0))
        with pyro.plate("groups", 3):
            a = pyro.sample("a", dist.Normal(mu, unit))
        with pyro.plate("data", 3):
            pyro.sample("y", dist.Normal(a, 3 * unit), obs=unit * torch.tensor([-1.0, 0.0, 1.0]))

    guide = ngvi.AutoMeanFieldNormal(model)
    loss = ngvi.BatchedELBO(2, curvature="squared_gradient")
    loss.loss_and_grads(model, guide)
    left = guide.take_curvature()
    assert left is not None
    exact = torch.tensor([4.0, unit**2, 1.0, 1.0, 1.0])  # times unit^2, by hand
    torch.testing.assert_close(left.parts["prior"] * unit**2, exact)


@pytest.mark.filterwarnings("ignore:.*of 'w' jumps:RuntimeWarning")  # Laplace
@pytest.mark.parametrize("prior", ["StudentT", "Cauchy", "mixture", "Laplace", "HalfCauchy"])
def test_many_independent_priors_in_float32_are_diagonal(prior):
    """Of 40,000 entries some lie where the terms of their second derivative cancel."""
    zeros, ones = torch.zeros(40_000, dtype=torch.float32), torch.ones(40_000, dtype=torch.float32)
    spike, slab = dist.Normal(zeros, 0.1), dist.Normal(zeros, 1.0)
    fns = {
        "StudentT": dist.StudentT(3.0 * ones, zeros, ones),
        "Cauchy": dist.Cauchy(zeros, ones),
        "mixture": slab,
        "Laplace": dist.Laplace(zeros, ones),
        "HalfCauchy": dist.HalfCauchy(ones),
    }

    def model():
        w = pyro.sample("w", fns[prior].to_event(1))
        if prior == "mixture":
            both = torch.stack([spike.log_prob(w), slab.log_prob(w)])
            pyro.factor("spike", both.logsumexp(0).sum())
        with pyro.plate("data", 3):
            pyro.sample("y", dist.Normal(w.sum(), 1.0).expand([3]), obs=zeros[:3])

    torch.set_default_dtype(torch.float32)
    guide = ngvi.AutoMeanFieldNormal(model, init_scale=1.0)
    loss = ngvi.BatchedELBO(1, curvature="squared_gradient")
    loss.loss_and_grads(model, guide)  # not diagonal, so many would be refused
    left = guide.take_curvature()
    assert left is not None and bool(left.parts["prior"].isfinite().all())


@pytest.mark.parametrize("first", ["all", "masked"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_predictor_centred_over_many_data_mixes_them(dtype, first):
    """Each datum moves another by 1 / N only; a first batch that is masked shows nothing."""
    rows = 10_000 if first == "all" else 50
    X, Y = 5.0 + torch.randn(rows, 2, dtype=dtype), torch.randn(rows, dtype=dtype)

    def model(mask):
        w = pyro.sample("w", dist.Normal(torch.zeros(2, dtype=dtype), 1.0).to_event(1))
        with pyro.plate("data", rows), poutine.mask(mask=mask):
            f = X @ w
            pyro.sample("y", dist.Normal(f - f.mean(), 1.0), obs=Y)

    guide = ngvi.AutoMeanFieldNormal(model)
    loss = ngvi.BatchedELBO(1, curvature="gauss_newton")
    start = torch.full((rows,), first == "all")
    for mask in (start, torch.ones(rows, dtype=torch.bool), torch.ones(rows, dtype=torch.bool)):
        loss.loss_and_grads(model, guide, mask)
        guide.take_curvature()
    assert "mix" in loss.curvature_reasons["w"]


@pytest.mark.parametrize("on", ["site", "distribution", "parts"])
def test_masks_of_the_distribution_count_as_those_of_the_site(on):
    seen = torch.tensor([True] * 4 + [False] * 4)
    y = torch.linspace(-1.0, 1.0, 16).reshape(8, 2)

    def model():
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        fn = dist.Normal(w + torch.zeros(8, 2), 1.0)
        site_mask: Any = seen if on == "site" else True
        parts = torch.stack([seen, torch.zeros_like(seen)], -1)
        fn = fn.mask(parts).to_event(1) if on == "parts" else fn.to_event(1)
        with pyro.plate("data", 8), poutine.mask(mask=site_mask):
            pyro.sample("y", fn.mask(seen) if on == "distribution" else fn, obs=y)

    guide = ngvi.AutoMeanFieldNormal(model)
    loss = ngvi.BatchedELBO(2, curvature="squared_gradient")
    loss.loss_and_grads(model, guide)
    left = guide.take_curvature()
    assert left is not None and left.parts["count"] == 4


@pytest.mark.parametrize("kind", ["hessian", "gauss_newton"])
def test_a_scale_around_model_and_guide_is_refused(kind):
    guide = ngvi.AutoMeanFieldNormal(linear)
    svi = SVI(linear, guide, ngvi.NGVB(guide), ngvi.BatchedELBO(1, curvature=kind))
    with poutine.scale(scale=0.01), pytest.raises(ValueError, match=r"Leave it out.*kl_weight"):
        svi.step(X, Y)


@pytest.mark.parametrize(
    "make, kind",
    [
        (ngvi.NGVB, "squared_gradient"),
        (ngvi.IFVB, "hessian"),
        (ngvi.optim.IVON, "gauss_newton"),
    ],
)
def test_curvature_without_a_use_is_refused(make, kind):
    guide = ngvi.AutoMeanFieldNormal(linear)
    svi = SVI(linear, guide, make(guide), ngvi.BatchedELBO(1, curvature=kind))
    with pytest.raises(RuntimeError, match=f'makes no use of curvature="{kind}"'):
        svi.step(X, Y)


def test_a_hierarchical_prior_over_many_weights_is_refused():
    def model(x):
        scale = pyro.sample("scale", dist.Normal(0.0, 1.0))
        w = pyro.sample("w", dist.Normal(torch.zeros(30_000), scale.exp()).to_event(1))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(w.sum(), 1.0).expand([len(x)]), obs=x)

    guide = ngvi.AutoMeanFieldNormal(model)
    loss = ngvi.BatchedELBO(1, curvature="gauss_newton")
    with pytest.raises(ValueError, match="30,001 passes"):
        loss.loss_and_grads(model, guide, Y)
