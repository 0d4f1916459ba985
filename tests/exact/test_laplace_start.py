"""A start at a Gaussian: exact for Gaussian posteriors, the best of what was seen for others."""

import math
import re
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from itertools import islice
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import init_to_feasible
from torch import Tensor
from torch.distributions import kl_divergence
from torch.func import jacrev
from torch.nn.functional import logsigmoid

import pyro_ngvi as ngvi
from pyro_ngvi.families import FactorPrecisionNormal, FullRankNormal, MeanFieldNormal
from pyro_ngvi.guides import expectations, laplace
from pyro_ngvi.guides.ascent import ascended
from pyro_ngvi.guides.deadline import ending_by
from pyro_ngvi.guides.found import rounding
from pyro_ngvi.guides.laplace import LARGEST, Found, Search, best_gaussian
from pyro_ngvi.guides.scouts import looks_convex
from pyro_ngvi.guides.search import UNASKED, start_points
from pyro_ngvi.linalg.cubature import gauss_hermite
from pyro_ngvi.linalg.hessian import absolute, bfgs, derivatives
from pyro_ngvi.linalg.spectral import principal_factors
from tests.contract.registry import data, exact_posterior, regression

FULL = FullRankNormal()
LAPLACE = [ngvi.AutoMeanFieldNormal, ngvi.AutoFullRankNormal, ngvi.AutoFactorPrecision]


def started(kind: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    guide = kind(model, init="laplace", **kwargs)
    guide(*args)
    return guide


def around(center: Tensor) -> Iterator[Tensor]:
    """A point and others at most 2 away."""
    yield center
    generator = torch.Generator().manual_seed(0)  # apart from the noise of a search
    while True:
        yield center + 4.0 * torch.rand(center.shape, generator=generator).to(center) - 2.0


def found_from(density: Any, center: Tensor, family: Any = FULL) -> Found:
    torch.manual_seed(0)
    return best_gaussian(density, family, family.init(center, 0.1), around(center))


def test_derivatives_are_those_of_autograd_in_one_evaluation() -> None:
    points = []

    def f(x: Tensor) -> Tensor:
        points.append(x)
        return (x.prod() + x[0].exp()) * x[1].cos()

    x = torch.randn(20)
    value, g, H = derivatives(f, x)
    assert len(points) == 1
    torch.testing.assert_close(value, f(x))
    torch.testing.assert_close(g, torch.func.grad(f)(x))
    torch.testing.assert_close(H, jacrev(jacrev(f))(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_scales_may_be_far_apart(dtype: torch.dtype) -> None:
    """A Gaussian whose sds are 10^-6 to 10^6: found whole, where |H| by its eigenvalues is rounded."""
    scale = torch.logspace(-6.0, 6.0, 9, dtype=dtype)
    precision = torch.eye(9, dtype=dtype) + 0.5
    precision = precision / scale / scale[:, None]
    mean = 3.0 * scale

    def density(theta: Tensor) -> Tensor:
        x = theta - mean
        return -0.5 * (x @ precision * x).sum(-1)

    found = found_from(density, torch.zeros(9, dtype=dtype)).params
    assert found is not None
    root = found["scale_tril"] / scale[:, None]
    wanted = torch.linalg.inv(torch.eye(9, dtype=dtype) + 0.5)
    assert torch.allclose(root @ root.mT, wanted, rtol=1e-3, atol=1e-3)
    assert ((found["loc"] - mean) / scale).abs().max() < 1e-2


def test_absolute_values_of_a_hessian() -> None:
    H = torch.randn(6, 6)
    for sign in (1.0, -1.0):
        S = 0.5 * (H + H.mT) if sign < 0 else H @ H.mT + torch.eye(6)
        P, h, Q = absolute(S)
        e, V = torch.linalg.eigh(S)
        assert torch.allclose(P, (V * e.abs()) @ V.mT, atol=1e-6)
        assert torch.allclose((Q / h) @ Q.mT @ P, torch.eye(6), atol=1e-6) and (h > 0.0).all()


def test_bfgs_knows_the_last_difference() -> None:
    g = torch.Generator().manual_seed(0)
    root = torch.randn(5, 5, generator=g, dtype=torch.float64)
    W, (s, y) = root @ root.mT, torch.randn(2, 5, generator=g, dtype=torch.float64)
    y = y if s @ y > 0 else -y
    new = bfgs(W, s, y)
    torch.testing.assert_close(new @ y, s)
    torch.testing.assert_close(new, new.mT)
    assert bool((torch.linalg.eigvalsh(new) > 0.0).all())
    assert torch.equal(bfgs(W, s, -y), W)  # a curvature below zero


def test_full_rank_starts_at_a_gaussian_posterior() -> None:
    X, y = data(torch.float64)
    guide = started(ngvi.AutoFullRankNormal, regression, X, y)
    mean, precision = exact_posterior(X, y)
    q = guide.get_posterior()
    torch.testing.assert_close(q.mean.detach(), mean)
    torch.testing.assert_close(q.covariance_matrix.detach(), torch.linalg.inv(precision))
    # one point is enough where log p is concave, and the point start is far below
    report = guide.start_report
    assert report.concave and report.given < report.elbos[0] - 1.0 and len(report.elbos) == 1
    assert str(report).startswith(
        "log p is concave as far as was seen: one point leads to all there"
    )


def logistic(theta: Tensor) -> Tensor:
    """With 50 data and a wide prior, (S,) of (S, 3)."""
    X = torch.randn(50, 3, generator=torch.Generator().manual_seed(3)).to(theta)
    sign = torch.ones(50).index_fill(0, torch.arange(0, 50, 3), -1.0).to(theta)
    return logsigmoid(sign * (theta @ X.mT)).sum(-1) - 5e-4 * theta.square().sum(-1)


def two_normals(theta: Tensor, apart: float, sd: float) -> Tensor:
    """Densities at -apart and apart in each of (S, d), under a wide prior, (S,)."""
    each = [-0.5 * ((theta - m) / sd).square().sum(-1) for m in (-apart, apart)]
    return torch.logaddexp(*each) - 5e-4 * theta.square().sum(-1)


# in float32 values of 3 million are known to nats only
@pytest.mark.parametrize(
    ("scale", "dtype"), [(1.0, torch.float32), (1e3, torch.float32), (1e5, torch.float64)]
)
def test_one_path_is_enough_where_log_p_is_concave(scale: float, dtype: torch.dtype) -> None:
    found = found_from(lambda theta: scale * logistic(theta), torch.zeros(3, dtype=dtype))
    assert found.concave and len(found.elbos) == 1
    torch.manual_seed(0)
    W = torch.eye(3, dtype=dtype) / scale
    assert looks_convex(lambda theta: -scale * logistic(theta), 2.0 * torch.randn(32, 3).to(W), W)


# they have one mode, and are concave on a line, if and only if apart <= sd
@pytest.mark.parametrize(("d", "apart", "sd"), [(1, 1.0, 0.9), (1, 3.0, 0.1), (4, 1.0, 0.4)])
def test_a_density_that_bends_is_searched_from_more_points(d: int, apart: float, sd: float) -> None:
    found = found_from(lambda theta: two_normals(theta, apart, sd), torch.zeros(d))
    assert not found.concave and len(found.elbos) > 1


@pytest.mark.parametrize("constant", [0.0, 1e4])
@pytest.mark.parametrize(("d", "apart", "sd"), [(1, 2.0, 0.9), (1, 3.0, 0.1), (4, 1.0, 0.4)])
def test_tangents_tell_two_modes(d: int, apart: float, sd: float, constant: float) -> None:
    """Each pair's own curvature is that of one normal; in float32, far from 0 too."""
    points = torch.cat([x + sd * torch.randn(16, d) for x in (-apart, apart)]).float()
    W = torch.eye(d).float() * sd**2
    assert not looks_convex(lambda x: constant - two_normals(x, apart, sd), points, W)
    assert looks_convex(lambda x: constant - two_normals(x, 0.0, sd), points, W)
    assert not looks_convex(lambda x: 1e9 - two_normals(x, 0.0, sd), points, W)  # all is rounding


def test_two_normals_that_are_near_are_concave() -> None:
    assert found_from(lambda theta: two_normals(theta, 1.0, 1.0), torch.zeros(1)).concave


def test_what_is_not_finite_is_not_taken_for_convex() -> None:
    def f(theta: Tensor) -> Tensor:
        return torch.where((theta < 1.0).all(-1), theta.square().sum(-1), torch.nan)

    inside = torch.linspace(-0.9, 0.9, 32).unsqueeze(-1)
    assert looks_convex(f, inside, torch.eye(1))
    assert not looks_convex(f, inside + 1.5, torch.eye(1))


def test_mean_field_starts_at_its_optimum_for_a_gaussian_posterior() -> None:
    X, y = data(torch.float64)
    guide = started(ngvi.AutoMeanFieldNormal, regression, X, y)
    mean, precision = exact_posterior(X, y)
    torch.testing.assert_close(guide.loc.detach(), mean)
    torch.testing.assert_close(guide.log_scale.detach(), -0.5 * precision.diagonal().log())


def test_principal_factors_give_a_matrix_of_their_form_back() -> None:
    g = torch.Generator().manual_seed(0)
    B = torch.randn(8, 2, generator=g, dtype=torch.float64)
    s = torch.rand(8, generator=g, dtype=torch.float64) + 0.5
    M = B @ B.mT + torch.diag(s)
    factor, rest = principal_factors(M, 2)
    torch.testing.assert_close(factor @ factor.mT + torch.diag(rest), M, rtol=1e-3, atol=1e-3)
    family = FactorPrecisionNormal(2)
    q = family.matched(torch.zeros(8, dtype=torch.float64), M)
    torch.testing.assert_close(family.covariance(q), torch.linalg.inv(M), rtol=2e-3, atol=2e-3)


def test_principal_factors_have_the_least_divergence() -> None:
    """Within 0.01 nats of what L-BFGS finds from there, for a matrix that has no such form."""
    root = torch.randn(6, 9, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    M = root @ root.mT
    B, s = principal_factors(M, 2)
    leaves = [B.contiguous().requires_grad_(), s.log().requires_grad_()]

    def kl() -> Tensor:
        fitted = leaves[0] @ leaves[0].mT + torch.diag(leaves[1].exp())
        square = torch.trace(torch.linalg.solve(fitted, M)) - len(M)
        return 0.5 * (square + torch.logdet(fitted) - torch.logdet(M))

    def closure() -> Tensor:
        loss = kl()
        for leaf, g in zip(leaves, torch.autograd.grad(loss, leaves), strict=True):
            leaf.grad = g.contiguous()
        return loss

    before = kl().item()
    optim = torch.optim.LBFGS(leaves, max_iter=200, line_search_fn="strong_wolfe")
    optim.step(closure)  # pyright: ignore[reportArgumentType]
    assert 0.0 <= before - kl().item() < 0.01 < before


def newton_path(density: Any, theta: Tensor) -> list[tuple[Tensor, Tensor]]:
    with torch.no_grad():
        return list(Search(density, theta).newton(theta))


def test_no_step_rises_where_plain_newton_steps_would_grow_without_end() -> None:
    """f = 10 sqrt(1 + z^2), whose Newton step goes from z to -z^3."""
    density = lambda z: -10.0 * (1.0 + z.square()).sqrt().sum(-1)  # noqa: E731
    path = torch.stack([loc for loc, _ in newton_path(density, torch.tensor([2.0]))])
    assert bool((density(path).diff() > 0.0).all())
    # what is left to gain is half the squared gradient over the curvature of 10
    assert 5.0 * path[-1].square().item() < laplace.DECREASE


@pytest.mark.parametrize("slope", [0.0, 1.0])
def test_a_density_without_curvature_ends_the_search(slope: float) -> None:
    path = newton_path(lambda z: slope * z.sum(-1), torch.zeros(2))
    assert all(bool(P.isfinite().all()) for _, P in path)


def test_a_density_that_rises_without_end_is_left_where_it_is() -> None:
    found = found_from(lambda z: z.sum(-1), torch.zeros(2))
    assert found.params is None and str(found).startswith("no better start from ")


def test_elbos_are_in_nats() -> None:
    """Of a density that integrates to one: zero, and minus KL of the point start."""
    q = dist.Normal(torch.tensor([1.0, -1.0]), torch.tensor([0.5, 2.0])).to_event(1)
    found = found_from(q.log_prob, torch.tensor([1.0, -1.0]))
    assert found.params is not None and max(found.elbos) == pytest.approx(0.0, abs=1e-4)
    point = dist.Normal(torch.tensor([1.0, -1.0]), 0.1).to_event(1)
    # log p - log q is nearly half a chi^2 of two, with an error of .18 for the mean of 32 draws
    assert found.given == pytest.approx(-float(kl_divergence(point, q)), abs=0.5)


def test_it_leaves_a_saddle() -> None:
    """Two modes at +-2 and a saddle between them, at which gradients are zero."""

    def density(z: Tensor) -> Tensor:
        return -(z.square() - 4.0).square().sum(-1)

    for loc, precision in newton_path(density, torch.full((1,), 1e-3)):
        torch.testing.assert_close(precision, (12.0 * loc.square() - 16.0).abs().reshape(1, 1))
    params = found_from(density, torch.zeros(1)).params
    assert params is not None and float(params["loc"].abs()) == pytest.approx(2.0, abs=0.1)


def log_gamma(z: Tensor) -> Tensor:
    """Logarithms of independent Gamma(a, 1): a z - exp(z), for a = 2 and 5."""
    return (torch.tensor([2.0, 5.0], dtype=z.dtype) * z - z.exp()).sum(-1)


@pytest.mark.parametrize("family", [FULL, MeanFieldNormal()])
def test_steps_on_expectations_end_at_the_best_gaussian(
    family: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """E exp(z) = exp(m + v / 2) = a at the optimum, so that v = 1 / a and m = log a - v / 2.

    And for f = z^2 / 2 + z^4 / 4, whose mode is 0 with curvature 1: m = 0 and 1 / v = 1 + 3 v.
    """

    def density(z: Tensor) -> Tensor:
        x = z[:, 2].square()
        return log_gamma(z[:, :2]) - 0.5 * x - 0.25 * x.square()

    monkeypatch.setattr(expectations, "DRAWS", 4000)
    monkeypatch.setattr(laplace, "FINAL", 24_000)
    monkeypatch.setattr(expectations, "LEFT", -torch.inf)
    a = torch.tensor([2.0, 5.0], dtype=torch.float64)
    torch.manual_seed(0)
    zero, one = torch.zeros(1, dtype=a.dtype), torch.ones(1, dtype=a.dtype)
    search = Search(density, torch.cat([a, one]))
    with torch.no_grad():
        mode = search.gaussian(torch.cat([a.log(), zero]), torch.diag(torch.cat([a, one])))
        loc, precision = expectations.smoothed(search, mode, family)
    # the least certain draws, of exp(z) with sd .8, say the mean to .8 / sqrt(4,000) = .013
    best = torch.cat([a.log() - 0.5 / a, zero])
    torch.testing.assert_close(loc, best, atol=0.04, rtol=0.0)
    best = torch.cat([a, 6.0 * one / (13.0**0.5 - 1.0)])
    torch.testing.assert_close(precision.diagonal(), best, atol=0.0, rtol=0.05)


def test_they_are_worth_it_with_few_draws() -> None:
    """KL in closed form, E log p = a m - exp(m + v / 2): at the mode 0.02 and 0.12 nats too much."""
    params = found_from(log_gamma, torch.zeros(2, dtype=torch.float64)).params
    assert params is not None
    a = torch.tensor([2.0, 5.0], dtype=torch.float64)

    def lost(m: Tensor, L: Tensor) -> float:
        v = L.square().sum(-1)
        best = a * (a.log() - 0.5 / a) - a - 0.5 * a.log()
        value = a * m - (m + 0.5 * v).exp()
        return float(best.sum() - value.sum() - L.diagonal().log().sum())

    at_mode = lost(a.log(), torch.diag(a.rsqrt()))
    assert at_mode == pytest.approx(float((a * (0.5 / a).exp() - a - 0.5).sum()))
    assert 0.0 <= lost(params["loc"], params["scale_tril"]) < 0.5 * at_mode


def funnel(z: Tensor) -> Tensor:
    """Its density rises without end where its sd goes to zero."""
    v, x = z[:, 0], z[:, 1:]
    return -v.square() / 18.0 - 0.5 * x.square().sum(-1) * (-v).exp() - 2.5 * v


def test_the_largest_elbo_wins_where_the_mode_is_no_place_to_be() -> None:
    def elbo(loc: Tensor, covariance: Tensor) -> float:
        q = dist.MultivariateNormal(loc, covariance)
        z = q.sample((20_000,))
        return float((funnel(z) - q.log_prob(z)).mean())

    start = torch.zeros(6, dtype=torch.float64)
    params = found_from(funnel, start).params
    assert params is not None
    loc, precision = newton_path(funnel, start)[-1]
    # log Z is 2.5 log(2 pi) + log(3 sqrt(2 pi)) = 6.6
    at_mode = elbo(loc, torch.linalg.inv(precision))
    assert at_mode < 0.0 < 1.0 < elbo(params["loc"], FULL.covariance(params)) < 6.6


def two_modes(z: Tensor) -> Tensor:
    """N(-3, 0.2^2 I) with weight 1/4 and N(3, 0.2^2 I) with weight 3/4, in three dimensions."""
    logits = torch.tensor([1.0, 3.0], dtype=z.dtype).log() - torch.tensor(4.0, dtype=z.dtype).log()
    centers = torch.tensor([[-3.0], [3.0]], dtype=z.dtype).expand(2, 3)
    parts = dist.Normal(centers, 0.2).to_event(1)
    return torch.logsumexp(parts.log_prob(z.unsqueeze(-2)) + logits, -1)


def test_it_takes_the_higher_of_two_modes_and_tells_of_the_other() -> None:
    found = found_from(two_modes, torch.full((3,), -0.5, dtype=torch.float64))
    assert found.elbos[0] == pytest.approx(math.log(0.25), abs=1e-6)  # the nearest
    assert max(found.elbos) == pytest.approx(math.log(0.75), abs=1e-6)
    assert found.params is not None
    torch.testing.assert_close(found.params["loc"], torch.full((3,), 3.0, dtype=torch.float64))
    # they are 1.1 nats apart, and a nat is the least that is called another mode
    assert re.search(r"others to 1\.1(, 1\.1)* nats less; \d+ evaluations$", str(found))


def test_evaluations_are_counted() -> None:
    rows, values = [0], [0]

    def density(z: Tensor) -> Tensor:
        rows[0] += len(z)
        values[0] += 1
        return -z.square().sum(-1)

    d = 3
    search = Search(density, torch.zeros(d))
    search.f(torch.zeros(5, d))
    search.value_and_gradient(torch.zeros(d))
    assert search.evaluations == rows[0] == 6
    with torch.no_grad():
        next(search.newton(torch.ones(d)))
    # the Hessian's d rows; the value comes with them
    assert search.evaluations == 6 + d


def test_a_point_that_throws_is_one_point_less() -> None:
    def density(z: Tensor) -> Tensor:
        if bool((z.detach().abs() > 1.5).any()):
            raise RuntimeError("linalg.cholesky: the input is not positive-definite")
        return -4.0 * z.square().sum(-1)

    found = found_from(density, torch.zeros(3))
    assert found.params is not None
    torch.testing.assert_close(found.params["scale_tril"], torch.eye(3) * 8.0**-0.5)
    assert found.elbos[0] > -torch.inf in found.elbos


@pytest.mark.parametrize("kind", LAPLACE)
def test_random_numbers_are_left_alone_and_the_start_is_the_same_twice(kind: Any) -> None:
    X, y = data(torch.float64)
    torch.manual_seed(3)
    expected = torch.randn(3)
    torch.manual_seed(3)
    guides = []
    for _ in range(2):
        guide = kind(regression, init="laplace")
        guide._setup_prototype(X, y)  # its first call, without the draw of z that follows
        guides.append(guide)
    assert torch.equal(torch.randn(3), expected)
    for name, p in guides[0].natural_params().items():
        assert torch.equal(p, guides[1].natural_params()[name]), name


@pytest.mark.parametrize("asked", [False, True])
def test_a_minibatch_is_held_during_the_search(asked: bool) -> None:
    """p(mean | 5 data of 20), of these alone, is wide enough for the data that it has not seen."""

    def model(x: Tensor) -> None:
        mean: Any = pyro.sample("mean", dist.Normal(0.0, 10.0))
        with pyro.plate("data", len(x), subsample_size=5) as index:
            pyro.sample("x", dist.Normal(mean, 1.0), obs=x[index])

    torch.manual_seed(0)
    y = 3.0 + torch.randn(20)
    guide = ngvi.AutoFullRankNormal(model, init="laplace" if asked else "auto")
    guide.begins_with_part = not asked
    guide(y)
    n = 20.0 if asked else 5.0  # as the model scales them, or alone
    assert guide.scale_tril.item() == pytest.approx((n + 0.01) ** -0.5, rel=1e-3)
    assert abs(float(guide.loc.detach()) - float(y.mean())) < 3.0 * (1.0 / 5.0 - 1.0 / 20.0) ** 0.5


def test_what_it_refuses() -> None:
    def wide() -> None:
        pyro.sample("z", dist.Normal(torch.zeros(LARGEST + 1), 1.0).to_event(1))

    with pytest.raises(
        ValueError, match='AutoMeanFieldNormal: init="laplace" takes Hessians of 1001'
    ):
        started(ngvi.AutoMeanFieldNormal, wide)
    with pytest.raises(ValueError, match='init must be None or "map" or "auto", got \'laplace\''):
        ngvi.AutoFactorNormal(wide, init="laplace")


def test_a_search_that_finds_nothing_says_so() -> None:
    def model() -> None:
        z: Any = pyro.sample("z", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        # its value is zero, and its gradient is not finite
        pyro.factor("nan", (z - z.detach()).square().sum().sqrt() * 0.0)

    with pytest.warns(UserWarning, match="found no Gaussian with a larger ELBO"):
        guide = started(ngvi.AutoFullRankNormal, model)
    torch.testing.assert_close(guide.scale_tril.detach(), 0.1 * torch.eye(2))
    assert set(guide.start_report.elbos) == {-torch.inf}
    assert str(guide.start_report).startswith("no better start from ")


# --- unasked -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", LAPLACE)
def test_it_searches_unasked(kind: Any) -> None:
    X, y = data(torch.float64)
    guide, asked = kind(regression), kind(regression, init="laplace")
    guide(X, y)
    asked(X, y)
    for name, p in guide.natural_params().items():
        assert torch.equal(p, asked.natural_params()[name]), name
    assert str(guide.start_report) == str(asked.start_report)


def other_latent(X: Tensor, y: Tensor) -> None:
    pyro.sample("other", dist.Normal(0.0, 1.0))
    regression(X, y)


UNSEARCHED: dict[str, Any] = {
    "init=None": lambda X, y: ngvi.AutoFullRankNormal(regression, init=None),
    "a scale": lambda X, y: ngvi.AutoFullRankNormal(regression, init_scale=0.1),
    "a point": lambda X, y: ngvi.AutoFullRankNormal(regression, init_to_feasible),
    "a minibatch": lambda X, y: ngvi.AutoFullRankNormal(partial(regression, minibatch=2)),
    "another guide's site": lambda X, y: ngvi.AutoFullRankNormal(
        pyro.poutine.block(other_latent, hide=["other"])
    ),
}


@pytest.mark.parametrize("case", UNSEARCHED)
def test_it_does_not_search_with(case: str) -> None:
    X, y = data(torch.float64)
    guide = UNSEARCHED[case](X, y)
    guide(X, y)
    assert guide.start_report is None
    torch.testing.assert_close(
        guide.get_posterior().covariance_matrix.detach(),
        0.01 * torch.eye(3, dtype=torch.float64),
    )


def test_a_mean_field_does_not_search_many_latent_variables() -> None:
    def model(d: int) -> None:
        pyro.sample("z", dist.Normal(torch.zeros(d), 2.0).to_event(1))

    mean_field, full_rank = ngvi.AutoMeanFieldNormal, ngvi.AutoFullRankNormal
    for kind, d, searched in (
        (mean_field, UNASKED, True),
        (mean_field, UNASKED + 1, False),
        (full_rank, UNASKED + 1, True),
        (full_rank, LARGEST + 1, True),
    ):
        guide = kind(model)
        guide(d)
        assert (guide.start_report is not None) == searched


def test_many_coefficients_start_near_the_best_gaussian() -> None:
    """Logistic regression of 300 data on 220 columns, against fixed points by Gauss-Hermite."""
    n, d = 300, 220
    torch.manual_seed(0)
    X = 0.4 * torch.randn(n, d).double()
    y = torch.bernoulli(torch.sigmoid(X @ torch.randn(d).double()))

    def model() -> None:
        w = pyro.sample("w", dist.Normal(torch.zeros(d).double(), 1.0).to_event(1))
        with pyro.plate("data", n):
            pyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)

    nodes, weights = gauss_hermite(30, dtype=X.dtype, device=X.device)
    m, V = torch.zeros(d).double(), torch.eye(d).double()
    for _ in range(60):
        p = torch.sigmoid(X @ m + nodes[:, None] * (X @ V * X).sum(-1).sqrt())
        g, w = weights @ p - y, weights @ (p * (1.0 - p))
        V = torch.linalg.inv(torch.eye(d).double() + X.mT @ (w[:, None] * X))
        m = m - V @ (X.mT @ g + m)
    assert float((X.mT @ g + m).abs().max()) < 1e-6
    best = dist.MultivariateNormal(m, V)
    guide = ngvi.AutoFullRankNormal(model)
    guide()
    assert guide.start_report is not None
    # Laplace's approximation is 25 nats off
    found = dist.MultivariateNormal(guide.loc.detach(), scale_tril=guide.scale_tril.detach())
    assert float(kl_divergence(found, best)) < 1.0


def test_it_does_not_search_where_a_state_is_to_be_loaded() -> None:
    X, y = data()
    first, second = (ngvi.AutoFullRankNormal(regression) for _ in range(2))
    first(X, y)
    second.load_state_dict(first.state_dict())
    second(X, y)
    assert second.start_report is None and torch.equal(first.loc, second.loc)


def test_a_model_that_fails_away_from_its_start_is_started_there() -> None:
    """An error of a class that no library raises, which init="laplace" passes on."""

    class Far(Exception):
        pass

    def model() -> None:
        z: Any = pyro.sample("z", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        if torch.func.debug_unwrap(z) is not z:
            raise Far

    guide = ngvi.AutoFullRankNormal(model)
    guide()
    torch.testing.assert_close(guide.scale_tril.detach(), 0.1 * torch.eye(2))
    with pytest.raises(Far):
        started(ngvi.AutoFullRankNormal, model)


def test_points_are_those_of_prior_and_neighbourhood() -> None:
    def model() -> None:
        pyro.sample("x", dist.LogNormal(3.0 * torch.ones(2), 0.1).to_event(1))

    guide = ngvi.AutoFullRankNormal(model, init=None)
    guide()
    start = guide.loc.detach()
    points = torch.stack(list(islice(start_points(["x"], model, start, (), {}), 201)))
    assert torch.equal(points[0], start)
    prior, near = points[1::2], points[2::2]
    # 200 draws of N(3, 0.1^2); and uniform within 2 of the start
    assert float((prior - 3.0).abs().max()) < 0.5 and float(prior.std()) == pytest.approx(
        0.1, rel=0.2
    )
    assert 1.5 < float((near - start).abs().max()) <= 2.0


def test_a_mode_without_mass_is_no_start() -> None:
    """Effects of 80 groups, centred: log p rises without end where their scale falls to 0."""
    generator = torch.Generator().manual_seed(0)
    effects = 0.8 * torch.randn(80, 1, generator=generator).double()
    y = effects + 0.6 * torch.randn(80, 5, generator=generator).double()

    def model() -> None:
        zero = torch.zeros(()).double()
        m: Any = pyro.sample("m", dist.Normal(zero, 5.0))
        s: Any = pyro.sample("s", dist.HalfNormal(zero + 2.0))
        noise: Any = pyro.sample("noise", dist.HalfNormal(zero + 2.0))
        with pyro.plate("groups", 80):
            u: Any = pyro.sample("u", dist.Normal(m, s))
            pyro.sample("y", dist.Normal(u[..., None], noise).to_event(1), obs=y)

    guide = ngvi.AutoFullRankNormal(model)
    guide()
    report: Any = guide.start_report
    path, *others, steps = report.elbos
    # the path takes s to 0, and has a larger ELBO than the point start; the effects have s = 0.8, and
    # steps on expectations from the best of the others end where natural gradients do
    assert report.given < path < steps - 100.0 and abs(steps - max(others)) < 1.0
    assert 0.6 < float(guide.median()["s"]) < 1.1


def counts(dtype: torch.dtype) -> tuple[Any, Tensor, Tensor]:
    """Negative binomial: where the dispersion is large log p is a difference of large log gammas."""
    torch.manual_seed(3)
    X, b = torch.randn(150, 12, dtype=torch.float32), 0.3 * torch.randn(12, dtype=torch.float32)
    six = torch.tensor(0.6, dtype=torch.float32)
    y = dist.GammaPoisson(six, six / torch.exp(0.5 + X @ b)).sample()

    def model(X: Tensor, y: Tensor) -> None:
        one = torch.ones((), dtype=dtype)
        a: Any = pyro.sample("a", dist.Normal(0.0 * one, 3.0))
        w: Any = pyro.sample("w", dist.Normal(torch.zeros(12, dtype=dtype), 1.0).to_event(1))
        phi: Any = pyro.sample("phi", dist.HalfCauchy(one))
        with pyro.plate("data", len(X)):
            pyro.sample("y", dist.GammaPoisson(phi, phi * torch.exp(-a - X @ w)), obs=y)

    return model, X.to(dtype), y.to(dtype)


def test_a_mode_that_is_rounding_is_no_start() -> None:
    """In float32 a path goes to a dispersion of 1e7, where log p is 1,700 and no number."""
    found = []
    for dtype in (torch.float32, torch.float64):
        model, *args = counts(dtype)
        guide = ngvi.AutoFullRankNormal(model)
        guide(*args)
        assert guide.start_report is not None and max(guide.start_report.elbos) < -290.0
        found.append((max(guide.start_report.elbos), float(guide.median()["phi"])))
    assert found[0] == pytest.approx(found[1], abs=0.1)  # of 32 draws, other ones by dtype


@pytest.mark.parametrize("phi", [1e-1, 1e7, 1e13])
def test_rounding_is_measured_in_float64(phi: float) -> None:
    """At 1e13 all neighbours round alike: float32 loses all of phi + y."""

    def f(z: Tensor) -> Tensor:
        y = torch.arange(40.0, dtype=torch.float32)
        phi = z[..., 0].exp().unsqueeze(-1)
        return -((phi + y).lgamma() - phi.lgamma() - y * phi.log()).sum(-1)

    single = torch.tensor([[math.log(phi)], [math.log(phi) + 0.1]], dtype=torch.float32)
    off = rounding(f, single)
    assert off == float((f(single.double()) - f(single)).mean()) * (phi > 1.0)
    assert (abs(off) > 100.0) == (phi > 1.0) and rounding(f, single.double()) == 0.0


def test_a_gaussian_of_a_mode_is_compared_with_nothing() -> None:
    """With no steps on expectations, and none of natural gradients in its place."""
    precision = torch.linspace(1.0, 9.0, laplace.FEW + 1)
    found = found_from(lambda z: -0.5 * (precision * z.square()).sum(-1), 1.0 / precision)
    assert len(found.elbos) == 1 and found.params is not None
    torch.testing.assert_close(found.params["scale_tril"].diagonal(), precision.rsqrt())


def test_effects_under_a_spike_and_a_slab_are_found_from_several_points() -> None:
    """Of 80: from the centres of the priors all of them go to the spike, 57 nats below."""
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(60, 80, generator=generator)
    effects = torch.tensor([2.0, -2.0, 1.5, 1.0])
    y = X[:, :4] @ effects + 0.5 * torch.randn(60, generator=generator)
    weights = dist.Categorical(torch.tensor([0.95, 0.05]))

    def model() -> None:
        sds = dist.Normal(torch.zeros(80, 2), torch.tensor([0.05, 2.0]))
        b: Any = pyro.sample("b", dist.MixtureSameFamily(weights.expand([80]), sds).to_event(1))
        s: Any = pyro.sample("s", dist.HalfNormal(2.0))
        with pyro.plate("data", 60):
            pyro.sample("y", dist.Normal(b @ X.mT, s[..., None]), obs=y)

    guide = ngvi.AutoFullRankNormal(model)
    guide()
    report: Any = guide.start_report
    assert report.elbos[0] < max(report.elbos) - 50.0
    torch.testing.assert_close(guide.median()["b"][:4], effects.to(y), rtol=0.0, atol=0.4)


def test_a_search_ends_in_time_with_what_it_has() -> None:
    whole = found_from(funnel, torch.zeros(9))
    with ending_by(-math.inf):
        found = found_from(funnel, torch.zeros(9))
    assert len(whole.elbos) > 4 and len(found.elbos) == 1 and math.isfinite(found.elbos[0])
    # a Gaussian at the first point of a path, and what compares it with the start
    assert found.evaluations < 0.05 * whole.evaluations
    params = FULL.init(torch.zeros(6), 0.1)
    with ending_by(-math.inf):
        assert ascended(funnel, FULL, params, 50)["loc"].equal(params["loc"])
    assert not ascended(funnel, FULL, params, 50)["loc"].equal(params["loc"])


def test_a_fit_leaves_time_for_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    def model() -> None:
        s = pyro.sample("s", dist.HalfNormal(1.0))
        pyro.sample("x", dist.Normal(torch.zeros(25), s).to_event(1))

    def searched(**how: Any) -> int:
        fit = ngvi.fit(
            model, guide="AutoFullRankNormal", seed=0, max_steps=3, progress=False, **how
        )
        assert fit.steps == 3
        return fit.guide.start_report.evaluations

    whole = searched(max_time=1e6)
    monkeypatch.setattr(import_module("pyro_ngvi.fitting.fit"), "SEARCH", 1e-12)
    assert searched() == whole > 20 * searched(max_time=1e6)


def test_steps_on_expectations_are_not_taken_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """From a point that leads to where one led; nor where they cannot reach the best end."""
    d, shift = 14, torch.tensor(10.0)

    def density(x: Tensor) -> Tensor:
        """Skewed modes around 0 and, with e^-30 of the mass, around the shift in every entry."""
        parts = [2.0 * (x - c) - (2.0 * (x - c)).exp() for c in (0.0, shift)]
        return torch.stack([parts[0].sum(-1), parts[1].sum(-1) - 30.0]).logsumexp(0)

    search, calls = Search(density, torch.zeros(d)), []
    steps = expectations.smoothed
    monkeypatch.setattr(laplace, "smoothed", lambda *how: calls.append(how) or steps(*how))
    with torch.no_grad():
        first = search.visit(torch.full((d,), 0.3))
        # so far from the posterior that no path ends in its typical set
        assert first is not None and len(calls) == 1 and first.spread > 1.0
        assert search.visit(torch.full((d,), -0.4)) is first and len(calls) == 1
        far = search.visit(shift + torch.full((d,), 0.3))
        assert far is not None and len(calls) == 1
        assert first.elbo - far.elbo > 20.0
