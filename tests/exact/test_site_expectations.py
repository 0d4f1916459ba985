"""Expectations of single log likelihoods under Gaussian predictors, and their derivatives."""

import math
from collections.abc import Callable, Mapping

import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

from pyro_ngvi.linalg.cubature import gauss_hermite
from pyro_ngvi.sites.expectation import (
    MOST_POINTS,
    ORDERS,
    Expected,
    enough_points,
    expectations,
    quadrature_points,
)

LogP = Callable[[Tensor], Tensor]
SHAPES = [1, 2, 3, 5]
MEANS = torch.tensor([-2.0, -0.3, 0.0, 1.5], dtype=torch.float64)


def points(k: int, count: int | None = None, dtype: torch.dtype = torch.float64):
    return quadrature_points(k, count, torch.zeros((), dtype=dtype))


def expected(log_p: LogP, mean: Tensor, covariance: Tensor, count: int | None = None) -> Expected:
    """For ``log_p``, which takes f (..., N, k) to (..., N)."""

    def program(f: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {"y": log_p(f["y"])}

    at = points(mean.shape[-1], count, mean.dtype)
    return expectations(program, {"y": (mean, covariance)}, {"y": at})["y"]


def marginals(k: int, n: int = 4, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(k)
    root = torch.randn(n, k, k, generator=generator)
    mean = torch.randn(n, k, generator=generator)
    return mean, scale * (root @ root.mT + 0.1 * torch.eye(k))


def each(mean: Tensor, v: float) -> tuple[Tensor, Tensor]:
    """m (N,) and one variance, as marginals of k = 1."""
    return mean[:, None], torch.full((len(mean), 1, 1), v).to(mean)


# --- the points


@pytest.mark.parametrize("k", [*SHAPES, 9])
def test_moments_of_the_points(k: int) -> None:
    p = points(k)
    assert abs(p.weights.sum() - 1.0) < 1e-13
    assert (p.weights @ p.x).abs().max() < 1e-13
    second = torch.einsum("q,qi,qj->ij", p.weights, p.x, p.x)
    assert (second - torch.eye(k)).abs().max() < 1e-12
    third = torch.einsum("q,qi,qj,ql->ijl", p.weights, p.x, p.x, p.x)
    assert third.abs().max() < 1e-12


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("count", [2, 5, None])
def test_product_rules_are_exact_to_degree_two_counts_less_one(k: int, count: int | None) -> None:
    """E x^(2 p) = (2 p - 1)!! in every entry up to that degree, and not beyond it."""
    p, order = points(k, count), count or ORDERS[k]
    for power in range(1, min(order, 6)):
        moment = p.weights @ p.x.pow(2 * power)
        exact = math.prod(range(1, 2 * power, 2))
        assert (moment - exact).abs().max() < 1e-11 * exact
    if order <= 5:
        beyond = p.weights @ p.x.pow(2 * order)
        assert (beyond - math.prod(range(1, 2 * order, 2))).abs().min() > 0.5


def test_sobol_points_are_the_same_every_time() -> None:
    before = torch.get_rng_state()
    assert torch.equal(points(5).x, points(5).x)
    assert torch.equal(torch.get_rng_state(), before)


# --- against closed forms


@pytest.mark.parametrize("k", SHAPES)
def test_a_quadratic_is_exact(k: int) -> None:
    """log p = b'f - f'Pf / 2 with an indefinite P."""
    generator = torch.Generator().manual_seed(10 + k)
    P = torch.randn(4, k, k, generator=generator)
    P, b = P + P.mT, torch.randn(4, k, generator=generator)
    m, C = marginals(k)
    e = expected(
        lambda f: (b * f).sum(-1) - 0.5 * torch.einsum("...i,...ij,...j->...", f, P, f), m, C
    )
    value = (b * m).sum(-1) - 0.5 * (P * (C + m[:, :, None] * m[:, None])).sum((-2, -1))
    assert (e.value - value).abs().max() < 1e-11
    assert (e.gradient - (b - (P @ m[..., None])[..., 0])).abs().max() < 1e-11
    assert (e.hessian + P).abs().max() < 1e-10
    assert e.quadratic.all()


@pytest.mark.parametrize("v", [1e-6, 0.1, 10.0])
def test_a_gaussian_likelihood(v: float) -> None:
    y, sd = torch.tensor([0.4, -1.0, 3.0, 20.0]), 0.3
    e = expected(lambda f: dist.Normal(f[..., 0], sd).log_prob(y), *each(MEANS, v))
    value = dist.Normal(MEANS, sd).log_prob(y) - 0.5 * v / sd**2
    assert ((e.value - value) / value).abs().max() < 1e-12
    assert (e.gradient[:, 0] - (y - MEANS) / sd**2).abs().max() < 1e-10
    # differences of d over points that lie sqrt(v) apart
    assert (e.hessian[:, 0, 0] * sd**2 + 1.0).abs().max() < 1e-10 + 1e-12 / math.sqrt(v)
    assert e.quadratic.all()


@pytest.mark.parametrize("v", [1e-3, 0.5, 4.0])
def test_poisson_with_the_exponential_link(v: float) -> None:
    """E log p = y m - exp(m + v/2) - log y!, whose derivatives are known too."""
    y = torch.tensor([0.0, 1.0, 3.0, 9.0])
    e = expected(lambda f: dist.Poisson(f[..., 0].exp()).log_prob(y), *each(MEANS, v))
    rate = (MEANS + 0.5 * v).exp()
    value = y * MEANS - rate - (y + 1.0).lgamma()
    assert ((e.value - value) / rate).abs().max() < 1e-11
    assert ((e.gradient[:, 0] - (y - rate)) / rate).abs().max() < 1e-11
    assert (e.hessian[:, 0, 0] / rate + 1.0).abs().max() < 1e-10
    assert not e.quadratic.any()


@pytest.mark.parametrize("k", [2, 3])
def test_exponential_of_a_combination(k: int) -> None:
    """E exp(a'f) = exp(a'm + a'Ca/2), with gradient a E and Hessian aa' E."""
    a = torch.tensor([0.5, -0.4, 0.3])[:k]
    m, C = marginals(k, scale=0.3)
    e = expected(lambda f: (f @ a).exp(), m, C)
    exact = (m @ a + 0.5 * torch.einsum("i,nij,j->n", a, C, a)).exp()
    assert (e.value / exact - 1.0).abs().max() < 1e-9
    assert (e.gradient / exact[:, None] - a).abs().max() < 1e-8
    assert (e.hessian / exact[:, None, None] - torch.outer(a, a)).abs().max() < 1e-7


def test_heteroscedastic_normal() -> None:
    """log p(y | f, s) with sd exp(s): E log p = -E s - E (y - f)^2 exp(-2 s) / 2 - log(2 pi) / 2.

    With f and s independent, E (y - f)^2 = (y - m)^2 + v and E exp(-2 s) = exp(-2 m_s + 2 v_s).
    """
    y = torch.tensor([0.5, -1.0])
    m = torch.tensor([[0.1, 0.3], [1.0, -0.5]])
    v = torch.tensor([[0.2, 0.1], [0.5, 0.3]])
    e = expected(lambda f: dist.Normal(f[..., 0], f[..., 1].exp()).log_prob(y), m, v.diag_embed())
    w = (-2.0 * m[:, 1] + 2.0 * v[:, 1]).exp()
    square = (y - m[:, 0]).square() + v[:, 0]
    value = -m[:, 1] - 0.5 * square * w - 0.5 * math.log(2 * math.pi)
    gradient = torch.stack([(y - m[:, 0]) * w, square * w - 1.0], -1)
    cross = -2.0 * (y - m[:, 0]) * w
    hessian = torch.stack([-w, cross, cross, -2.0 * square * w], -1).reshape(2, 2, 2)
    assert (e.value - value).abs().max() < 1e-9
    assert (e.gradient - gradient).abs().max() < 1e-8
    assert (e.hessian - hessian).abs().max() < 1e-7
    assert not e.quadratic.any()


@pytest.mark.parametrize(("v", "error"), [(1e-4, 1e-13), (0.1, 1e-12), (2.0, 1e-6), (25.0, 2e-2)])
def test_bernoulli_against_a_fine_rule(v: float, error: float) -> None:
    """The sigmoid has poles at +-i pi, so the rule gets worse as the predictor gets wide."""
    y = torch.tensor([0.0, 1.0, 0.0, 1.0])
    e = expected(lambda f: dist.Bernoulli(logits=f[..., 0]).log_prob(y), *each(MEANS, v))
    x = torch.linspace(-12.0, 12.0, 4_001)  # the trapezoidal rule converges geometrically
    w = torch.softmax(-0.5 * x.square(), 0)
    f = MEANS + math.sqrt(v) * x[:, None]
    p = f.sigmoid()
    assert (e.value - w @ dist.Bernoulli(logits=f).log_prob(y)).abs().max() < error
    assert (e.gradient[:, 0] - w @ (y - p)).abs().max() < error
    assert (e.hessian[:, 0, 0] + w @ (p * (1.0 - p))).abs().max() < max(error, 1e-11)


# --- the identities of Bonnet and Price hold for the sums themselves


@pytest.mark.parametrize(
    "log_p",
    [
        pytest.param(lambda f: dist.Bernoulli(logits=f).log_prob(torch.ones(4)), id="bernoulli"),
        pytest.param(lambda f: dist.StudentT(3.0, f, 0.5).log_prob(torch.ones(4)), id="student"),
        pytest.param(lambda f: dist.Poisson(f.exp()).log_prob(torch.ones(4)), id="poisson"),
    ],
)
@pytest.mark.parametrize("v", [0.2, 3.0])
@pytest.mark.parametrize("count", [4, 32])
def test_derivatives_are_those_of_the_sum(log_p: LogP, v: float, count: int) -> None:
    """With 4 points too, whose sum is far from the integral."""

    def value(m: Tensor, v: float) -> Tensor:
        return expected(lambda f: log_p(f[..., 0]), *each(m, v), count).value

    e = expected(lambda f: log_p(f[..., 0]), *each(MEANS, v), count)
    h = 1e-4
    steps = torch.tensor([-2.0, -1.0, 1.0, 2.0])
    stencil = torch.tensor([1.0, -8.0, 8.0, -1.0]) / (12.0 * h)
    by_mean = stencil @ torch.stack([value(MEANS + s * h, v) for s in steps])
    by_variance = stencil @ torch.stack([value(MEANS, v + float(s) * h) for s in steps])
    size = 1.0 + e.hessian.abs().max()
    assert (e.gradient[:, 0] - by_mean).abs().max() < 1e-8 * size
    assert (0.5 * e.hessian[:, 0, 0] - by_variance).abs().max() < 1e-8 * size


def test_gradients_of_the_value_reach_marginals_and_parameters() -> None:
    """By autograd: dE/dm = g and dE/dC = H / 2, and the derivative in a parameter of log p."""
    m, C = (x.requires_grad_() for x in marginals(1))
    sd = torch.tensor(0.7, requires_grad=True)
    y = torch.ones(4)
    e = expected(lambda f: dist.StudentT(4.0, f[..., 0], sd).log_prob(y), m, C)
    by_m, by_C, by_sd = torch.autograd.grad(e.value.sum(), (m, C, sd))
    assert (by_m - e.gradient).abs().max() < 1e-12
    assert (by_C - 0.5 * e.hessian).abs().max() < 1e-12
    x, w = gauss_hermite(32)
    f = (m + C[..., 0].sqrt() * x).detach()
    slope = torch.func.grad(
        lambda s: dist.StudentT(4.0, f, s).log_prob(torch.ones(4, 1)).sum(0) @ w
    )
    assert abs(by_sd - slope(sd.detach())) < 1e-11
    assert not (e.gradient.requires_grad or e.hessian.requires_grad)


# --- which terms are quadratic


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("v", [0.05, 1.0])
def test_quadratic_is_told_from_not(dtype: torch.dtype, v: float) -> None:
    m, C = (x.to(dtype) for x in each(MEANS, v))
    y = torch.ones(4, dtype=dtype)
    normal = expected(lambda f: dist.Normal(f[..., 0], 0.5).log_prob(y), m, C)
    student = expected(lambda f: dist.StudentT(3.0, f[..., 0], 0.5).log_prob(y), m, C)
    bernoulli = expected(lambda f: dist.Bernoulli(logits=f[..., 0]).log_prob(y), m, C)
    assert normal.quadratic.all()
    assert not student.quadratic.any()
    assert not bernoulli.quadratic.any()


def test_quadratic_is_told_datum_by_datum() -> None:
    def log_p(f: Tensor) -> Tensor:
        return torch.where(torch.arange(4) < 2, -f[..., 0].square(), -f[..., 0].pow(4))

    assert expected(log_p, *each(MEANS, 0.5)).quadratic.tolist() == [True, True, False, False]


# --- limits


@pytest.mark.parametrize("k", SHAPES)
@pytest.mark.parametrize("v", [0.0, 1e-14])
def test_no_variance_gives_the_derivatives_at_the_mean(k: int, v: float) -> None:
    m, _ = marginals(k)
    a = torch.linspace(0.5, 1.0, k)

    def log_p(f: Tensor) -> Tensor:
        return -(1.0 + (f @ a).square()).log()

    e = expected(log_p, m, v * torch.eye(k).expand(len(m), k, k))
    gradient = torch.func.vmap(torch.func.grad(log_p))(m)
    hessian = torch.func.vmap(torch.func.jacrev(torch.func.grad(log_p)))(m)
    assert (e.value - log_p(m)).abs().max() < 1e-12
    assert (e.gradient - gradient).abs().max() < 1e-11
    # differences of first derivatives over sqrt(eps)
    assert (e.hessian - hessian).abs().max() < 1e-5


def test_a_datum_that_is_nan_spoils_no_other() -> None:
    y = torch.tensor([1.0, float("nan"), 0.0, 1.0])
    e = expected(
        lambda f: dist.Normal(f[..., 0], 1.0, validate_args=False).log_prob(y), *each(MEANS, 0.5)
    )
    rest = torch.tensor([0, 2, 3])
    for part in (e.value, e.gradient, e.hessian):
        assert part[1].isnan().all() and torch.isfinite(part[rest]).all()
    assert e.quadratic.tolist() == [True, False, True, True]


def test_groups_with_other_numbers_of_points_share_a_run() -> None:
    """The shorter rule is padded with points of weight 0."""
    runs = []

    def program(f: Mapping[str, Tensor]) -> dict[str, Tensor]:
        runs.append({name: x.shape for name, x in f.items()})
        return {"a": -f["a"][..., 0].pow(4), "b": -f["b"].exp().sum(-1)}

    at = {"a": marginals(1), "b": marginals(5, n=3, scale=0.1)}
    both = expectations(program, at, {"a": points(1), "b": points(5)})
    assert runs == [{"a": (1024, 4, 1), "b": (1024, 3, 5)}]
    alone = expected(lambda f: -f[..., 0].pow(4), *at["a"])
    for ours, theirs in zip(both["a"], alone, strict=True):
        assert (ours.double() - theirs.double()).abs().max() < 1e-11


# --- how many points


def laplace_terms(m: Tensor, v: float) -> Tensor:
    """E log p(0 | f) of a Laplace likelihood of scale 1, f ~ N(m, v): |f| is folded normal."""
    sd = v**0.5
    normal = torch.distributions.Normal(0.0, 1.0)
    folded = 2.0 * sd * normal.log_prob(m / sd).exp() + m * (2.0 * normal.cdf(m / sd) - 1.0)
    return -math.log(2.0) - folded


def counted(log_p: LogP, mean: Tensor, v: float, weight: float = 1.0) -> int:
    at = {"y": each(mean, v)}
    return enough_points(lambda f: {"y": log_p(f["y"])}, at, {"y": weight})["y"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_smooth_data_keep_their_points(dtype: torch.dtype) -> None:
    mean = torch.linspace(-3.0, 3.0, 2000, dtype=dtype)
    assert counted(lambda f: -torch.nn.functional.softplus(f[..., 0]), mean, 0.3) == ORDERS[1]
    assert counted(lambda f: -(f[..., 0].exp()), mean, 0.3) == ORDERS[1]


def test_kinks_get_more_points_and_a_smaller_error() -> None:
    mean, v = torch.linspace(-1.0, 1.0, 300, dtype=torch.float64), 0.04

    def log_p(f: Tensor) -> Tensor:
        return -math.log(2.0) - f[..., 0].abs()

    count = counted(log_p, mean, v)
    assert count == MOST_POINTS
    exact = laplace_terms(mean, v)
    errors = [
        (expected(log_p, *each(mean, v), n).value - exact).abs().sum() for n in (ORDERS[1], count)
    ]
    assert errors[0] > 0.1 and errors[1] < 0.15 * errors[0]
    # of few data, or such as count for little, the error is too small to matter
    assert counted(log_p, mean[:3], v) == counted(log_p, mean, v, weight=0.01) == ORDERS[1]


def test_data_whose_expectation_is_not_finite_need_no_more_points() -> None:
    mean = torch.linspace(-1.0, 1.0, 5, dtype=torch.float64)
    assert counted(lambda f: torch.where(f[..., 0] > 0.0, 0.0, -math.inf), mean, 1.0) == ORDERS[1]
