"""Linear-response covariances against closed forms, and against refits of tilted models."""

import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pyro
import pyro.distributions
import pytest
import torch
from pyro import poutine
from pyro.infer.autoguide import AutoDiagonalNormal, AutoGuideList, AutoNormal
from torch import Tensor

import pyro_ngvi as ngvi
from benchmarks.problems import load
from benchmarks.problems.logistic import _wdbc
from benchmarks.problems.optimum import gaussian_optimum
from pyro_ngvi.diagnostics import ModelDensity, linear_response
from pyro_ngvi.diagnostics.linear_response import antithetic
from pyro_ngvi.linalg.hessian import derivatives
from pyro_ngvi.linalg.positive import solve_positive

dist: Any = pyro.distributions  # its annotations do not know what its distributions can do

X = torch.tensor([[1.0, 0.9, 0.2], [1.0, 1.1, 0.0], [1.0, 1.3, -0.5], [1.0, 0.7, 0.4]]).double()
Y = torch.tensor([1.0, 1.4, 1.5, 0.2]).double()
NOISE = 0.3


def linear(X: Tensor, y: Tensor) -> None:
    w = pyro.sample("w", dist.Normal(X.new_zeros(X.shape[1]), 1.0).to_event(1))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(X @ w, NOISE), obs=y)


def counts(X: Tensor, y: Tensor) -> None:
    """Correlated, skewed, with a positive site, an interval and a simplex."""
    w = pyro.sample("w", dist.Normal(X.new_zeros(2), 1.0).to_event(1))
    scale = pyro.sample("scale", dist.HalfNormal(X.new_tensor(1.0)))
    share = pyro.sample("share", dist.Beta(X.new_tensor(2.0), X.new_tensor(3.0)))
    p = pyro.sample("p", dist.Dirichlet(X.new_tensor([2.0, 3.0, 4.0])))
    rate = (scale + p[0] + share * (X[:, :2] @ w)).exp()
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Poisson(rate), obs=y)


def at(kind: Callable[..., Any], model: Any, mu: Tensor, sd: Tensor, *args: Any) -> Any:
    """A guide of independent normals at ``mu`` and ``sd`` (d,)."""
    pyro.clear_param_store()
    guide = kind(model)
    guide(*args)
    if isinstance(guide, AutoNormal):
        start = 0
        for name in guide.median():
            shape = getattr(guide.locs, name).shape
            part = slice(start, start := start + shape.numel())
            setattr(guide.locs, name, mu[part].reshape(shape))
            setattr(guide.scales, name, sd[part].reshape(shape))
    elif isinstance(guide, AutoDiagonalNormal):
        guide.loc.data = mu.clone()
        guide.__setattr__("scale", sd.clone())
    else:
        guide.loc.data, guide.log_scale.data = mu.clone(), sd.log()
    return guide


def exact_linear() -> tuple[Tensor, Tensor]:
    precision = torch.eye(3).double() + X.mT @ X / NOISE**2
    return torch.linalg.solve(precision, X.mT @ Y / NOISE**2), precision


@pytest.mark.parametrize(("num_samples", "seed"), [(2, 0), (16, 1), (128, 2)])
def test_gaussian_posteriors_are_exact_for_any_draws(num_samples: int, seed: int) -> None:
    mean, precision = exact_linear()
    covariance = torch.linalg.inv(precision)
    guide = at(ngvi.AutoMeanFieldNormal, linear, mean, precision.diagonal().rsqrt(), X, Y)
    found = linear_response(linear, guide, X, Y, num_samples=num_samples, seed=seed)
    torch.testing.assert_close(found.covariance, covariance, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(found.sd["w"], covariance.diagonal().sqrt(), rtol=1e-11, atol=0.0)
    torch.testing.assert_close(found.mean["w"], mean)
    factor = (precision.diagonal() * covariance.diagonal()).rsqrt()
    torch.testing.assert_close(found.guide_sd["w"] / found.sd["w"], factor)
    assert float(factor.min()) < 0.3


def test_gaussian_posteriors_are_exact_wherever_the_guide_stands() -> None:
    covariance = torch.linalg.inv(exact_linear()[1])
    mu, sd = torch.tensor([3.0, -1.0, 0.5]).double(), torch.tensor([0.1, 2.0, 0.7]).double()
    found = linear_response(linear, at(ngvi.AutoMeanFieldNormal, linear, mu, sd, X, Y), X, Y)
    torch.testing.assert_close(found.covariance, covariance, rtol=1e-10, atol=1e-12)


S = 32
COUNTS = torch.tensor([4.0, 6.0, 9.0, 2.0]).double()


def refit(tilt: Callable[[Tensor], Tensor], density: ModelDensity, eta: Tensor) -> Tensor:
    """(mu, log sd) at the optimum of the ELBO on fixed draws, by Newton."""
    e = antithetic(S, density.dim, seed=0)

    def loss(eta: Tensor) -> Tensor:
        mu, log_sd = eta.chunk(2)
        z = mu + log_sd.exp() * e
        return -(density(z) + tilt(z)).mean() - log_sd.sum()

    for _ in range(50):
        value, g, H = derivatives(loss, eta)
        h, Q = torch.linalg.eigh(H)
        step, t = -Q @ ((Q.mT @ g) / h.abs().clamp_min(1e-3)), 1.0
        while not loss(eta + t * step) <= value + 1e-12 and t > 1e-6:
            t /= 2.0
        eta = eta + t * step
        if float(g.abs().max()) < 1e-11:
            return eta
    raise AssertionError(f"no optimum: {g}")


@cache
def counts_optimum() -> Tensor:
    density = ModelDensity(counts, (X, COUNTS))
    start = torch.cat([density.initial, torch.full((6,), -1.0).double()])
    return refit(lambda z: z.new_zeros(len(z)), density, start)


def test_it_is_the_derivative_of_means_by_a_tilt_of_the_model() -> None:
    density, e = ModelDensity(counts, (X, COUNTS)), antithetic(S, 6, seed=0)

    def values(z: Tensor) -> Tensor:  # (S, K)
        return torch.cat([x.reshape(len(z), -1) for x in density.unpack(z).values()], 1)

    eta = counts_optimum()
    guide = at(ngvi.AutoMeanFieldNormal, counts, eta[:6], eta[6:].exp(), X, COUNTS)
    found = linear_response(counts, guide, X, COUNTS, num_samples=S)
    t, columns = 1e-3, []
    for k in range(len(found.covariance)):
        ends = []
        for sign in (t, -t):
            tilted = refit(lambda z, k=k, sign=sign: sign * values(z)[:, k], density, eta)
            ends.append(values(tilted[:6] + tilted[6:].exp() * e).mean(0))
        columns.append((ends[0] - ends[1]) / (2.0 * t))
    # central differences: the error is of order t^2
    torch.testing.assert_close(found.covariance, torch.stack(columns), rtol=1e-5, atol=1e-7)
    part = linear_response(counts, guide, X, COUNTS, num_samples=S, sites=["p", "scale"])
    torch.testing.assert_close(part.sd["scale"], found.sd["scale"])
    torch.testing.assert_close(part.covariance[:3, :3], found.covariance[4:, 4:])
    assert part.sd.keys() == {"p", "scale"}


def test_a_logistic_regression_has_the_sds_of_the_best_full_rank_gaussian() -> None:
    problem, regression = load("wdbc"), _wdbc()
    best = {family: gaussian_optimum(regression, family) for family in ("mean_field", "full_rank")}
    mu = torch.tensor(best["mean_field"].loc)
    own, full = (torch.tensor(np.diag(x.covariance)).sqrt() for x in best.values())
    guide = at(ngvi.AutoMeanFieldNormal, problem.model, mu, own, *problem.args)
    found = linear_response(problem.model, guide, *problem.args, num_samples=64)
    # measured over five seeds: 0.014 and 0.067, of which 0.003 come from the draws
    error = (found.sd["w"] / full).log().abs()
    assert float(error.mean()) < 0.025
    assert float(error.max()) < 0.1
    assert float((own / full).median()) < 0.8


@pytest.mark.parametrize("kind", [AutoNormal, AutoDiagonalNormal])
def test_pyros_guides_are_taken_too(kind: Any) -> None:
    mu, log_sd = counts_optimum().chunk(2)
    ours, theirs = (
        linear_response(
            counts, at(k, counts, mu, log_sd.exp(), X, COUNTS), X, COUNTS, num_samples=S
        )
        for k in (ngvi.AutoMeanFieldNormal, kind)
    )
    for name, x in ours.sd.items():
        torch.testing.assert_close(theirs.sd[name], x)
        torch.testing.assert_close(theirs.mean[name], ours.mean[name])


def test_a_guide_beside_its_optimum_gives_what_the_optimum_gives() -> None:
    mu, log_sd = counts_optimum().chunk(2)
    beside = at(AutoNormal, counts, mu + 0.3 * log_sd.exp(), 0.8 * log_sd.exp(), X, COUNTS)
    found = linear_response(counts, beside, X, COUNTS, num_samples=S)
    best = at(AutoNormal, counts, mu, log_sd.exp(), X, COUNTS)
    expected = linear_response(counts, best, X, COUNTS, num_samples=S)
    # Newton steps end 1e-4 nats, 0.014 sds, before the optimum at most
    torch.testing.assert_close(found.covariance, expected.covariance, rtol=0.02, atol=1e-4)
    assert float((found.mean["scale"] / expected.mean["scale"]).log()) > 0.05  # the guide's own


def test_lists_of_guides_and_guides_written_by_hand_are_taken() -> None:
    pair = AutoGuideList(linear_pair)
    pair.append(ngvi.AutoMeanFieldNormal(poutine.block(linear_pair, expose=["a"])))
    pair.append(AutoNormal(poutine.block(linear_pair, expose=["b"]), init_scale=0.7))
    pair()

    def by_hand() -> None:
        pyro.sample("a", dist.Normal(0.2, 0.1))
        pyro.sample("b", dist.Normal(0.1, 0.3))

    for guide in (pair, by_hand):
        found = linear_response(linear_pair, guide)
        exact = torch.linalg.inv(torch.tensor([[1.81, -0.9], [-0.9, 1.0]]))
        torch.testing.assert_close(found.covariance, exact, rtol=1e-4, atol=1e-5)


def linear_pair() -> None:
    a = pyro.sample("a", dist.Normal(0.0, 1.0))
    pyro.sample("b", dist.Normal(0.9 * a, 1.0))


def test_enumerated_sites_are_summed_out() -> None:
    y = torch.tensor([-2.1, -1.8, 1.4, 2.2, 2.0]).double()
    share = torch.tensor([0.4, 0.6]).double()

    def enumerated() -> None:
        loc = pyro.sample("loc", dist.Normal(torch.tensor([-2.0, 2.0]).double(), 1.0).to_event(1))
        with pyro.plate("data", len(y)):
            k = pyro.sample("k", dist.Categorical(share), infer={"enumerate": "parallel"})
            pyro.sample("y", dist.Normal(loc[k], 0.8), obs=y)

    def by_hand() -> None:
        loc = pyro.sample("loc", dist.Normal(torch.tensor([-2.0, 2.0]).double(), 1.0).to_event(1))
        mixture = dist.MixtureSameFamily(dist.Categorical(share), dist.Normal(loc, 0.8))
        with pyro.plate("data", len(y)):
            pyro.sample("y", mixture, obs=y)

    hidden: Any = poutine.block(enumerated, hide=["k"])
    mu, sd = torch.tensor([-1.9, 1.8]).double(), torch.tensor([0.5, 0.4]).double()
    one = linear_response(enumerated, at(AutoNormal, hidden, mu, sd))
    other = linear_response(by_hand, at(AutoNormal, by_hand, mu, sd))
    torch.testing.assert_close(one.covariance, other.covariance)


def test_one_site_of_a_large_model_by_conjugate_gradients() -> None:
    n = 1100

    def intercepts() -> None:
        b = pyro.sample("b", dist.Normal(torch.zeros(()).double(), 10.0))
        with pyro.plate("groups", n):
            a = pyro.sample("a", dist.Normal(b, 1.0))
            pyro.sample("y", dist.Normal(a, 2.0), obs=torch.linspace(-1.0, 1.0, n).double())

    sd = torch.tensor([(0.01 + n) ** -0.5] + n * [1.25**-0.5]).double()
    guide = at(ngvi.AutoMeanFieldNormal, intercepts, torch.zeros(n + 1).double(), sd)
    found = linear_response(intercepts, guide, sites=["b"], num_samples=16)
    exact = (0.01 + n / 5.0) ** -0.5
    assert float(found.sd["b"]) == pytest.approx(exact, rel=1e-8)
    assert float(found.guide_sd["b"]) < 0.5 * exact


def test_pieces_of_draws_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    mu, log_sd = counts_optimum().chunk(2)
    guide = at(AutoNormal, counts, mu, log_sd.exp(), X, COUNTS)
    whole = linear_response(counts, guide, X, COUNTS, num_samples=S)
    monkeypatch.setattr(sys.modules[linear_response.__module__], "MOST_NUMBERS", 3 * 16 * 4)
    pieces = linear_response(counts, guide, X, COUNTS, num_samples=S)
    torch.testing.assert_close(pieces.covariance, whole.covariance)


def test_the_random_state_and_the_parameters_are_left_alone() -> None:
    guide = at(AutoNormal, linear, torch.zeros(3).double(), torch.ones(3).double(), X, Y)
    state = torch.random.get_rng_state()
    linear_response(linear, guide, X, Y)
    assert torch.equal(state, torch.random.get_rng_state())
    assert all(p.grad is None for p in guide.parameters())


@pytest.mark.parametrize("P", [30, 2400])
def test_solve_positive(P: int) -> None:
    generator = torch.Generator().manual_seed(1)
    u, diagonal, B = (
        torch.randn(n, P, generator=generator, dtype=torch.float64) for n in (3, 1, 2)
    )
    diagonal = 1.0 + diagonal[0].square()

    def product(V: Tensor, sign: float = 1.0) -> Tensor:
        return V * diagonal + sign * (V @ u.mT) @ u

    found, direction = solve_positive(product, B, diagonal)
    assert direction is None
    torch.testing.assert_close(product(found), B, rtol=0.0, atol=1e-4)
    _, direction = solve_positive(lambda V: product(V, -1.0), B, diagonal)
    assert direction is not None
    assert float(direction @ product(direction[None], -1.0)[0]) < 0.0


def test_products_that_are_not_known_well_enough_are_refused() -> None:
    spread, one = torch.logspace(0.0, 12.0, 2400), torch.ones(1, 2400)
    with pytest.raises(ArithmeticError, match="have not solved"):
        solve_positive(lambda V: V * spread, one, one[0])


def test_messages() -> None:
    guide = at(AutoNormal, linear, torch.zeros(3).double(), torch.ones(3).double(), X, Y)
    with pytest.raises(ValueError, match=r"no latent sites \['v'\]; choose sites among \['w'\]"):
        linear_response(linear, guide, X, Y, sites=["v"])
    with pytest.raises(ValueError, match="no latent sites without a name; choose"):
        linear_response(linear, guide, X, Y, sites=[])
    with pytest.raises(ValueError, match="num_samples is 0; give a pair of draws"):
        linear_response(linear, guide, X, Y, num_samples=0)
    full = ngvi.AutoFullRankNormal(linear)
    full(X, Y)
    with pytest.raises(ValueError, match="AutoFullRankNormal is none"):
        linear_response(linear, full, X, Y)

    def dependent() -> None:
        a = pyro.sample("a", dist.Normal(0.0, 1.0))
        pyro.sample("b", dist.Normal(a, 1.0))

    with pytest.raises(ValueError, match="dependent is none"):
        linear_response(linear_pair, dependent)

    def laplace() -> None:
        pyro.sample("w", dist.Laplace(torch.zeros(2).double(), 1.0).to_event(1))

    with pytest.raises(ValueError, match="'w' jumps"):
        linear_response(laplace, at(AutoNormal, laplace, *torch.ones(2, 2).double()))

    def two_modes() -> None:
        w = pyro.sample("w", dist.Normal(torch.zeros(()).double(), 1.0))
        v = pyro.sample("v", dist.Normal(torch.zeros(()).double(), 5.0))
        pyro.sample("y", dist.Normal(v.square(), 1.0), obs=9.0 + 0.0 * w)

    def steep() -> None:  # Newton goes down an exponential by 1 a step
        w = pyro.sample("w", dist.Normal(torch.zeros(()).double(), 1.0))
        pyro.factor("wall", -w.exp())

    far = at(AutoNormal, steep, *torch.tensor([[60.0], [0.1]]).double())
    with pytest.raises(ValueError, match=r"20 Newton steps.*'w'"):
        linear_response(steep, far)

    narrow = at(AutoNormal, two_modes, torch.zeros(2).double(), torch.full((2,), 0.1).double())
    with pytest.raises(ValueError, match=r"no minimum within .* along 'v'"):
        linear_response(two_modes, narrow)
