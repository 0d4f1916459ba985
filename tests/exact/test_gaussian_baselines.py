"""Batch and match, Pathfinder, DADVI and Laplace: exact on Gaussian targets, and as printed."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from benchmarks.baselines import (
    batch_and_match,
    batch_and_match_update,
    dadvi,
    laplace,
    pathfinder,
)
from benchmarks.baselines.pathfinder import diagonal_update, inverse_hessian

D = 5


def target(seed: int = 0, d: int = D) -> tuple[Tensor, Tensor]:
    """Mean and covariance of a correlated Gaussian with sds from 0.2 to 4."""
    g = torch.Generator().manual_seed(seed)
    root = torch.randn(d, d, generator=g) + 2.0 * torch.eye(d)
    root = torch.logspace(-0.7, 0.6, d).unsqueeze(-1) * root / root.square().sum(-1).sqrt()[:, None]
    return torch.randn(d, generator=g), root @ root.mT


def log_density(mean: Tensor, covariance: Tensor) -> Callable[[Tensor], Tensor]:
    normal = torch.distributions.MultivariateNormal(mean, covariance)
    return normal.log_prob


def skewed(theta: Tensor) -> Tensor:
    """A log density that is not Gaussian, in any dimension."""
    return -(theta.square() + (theta.roll(1, -1) - theta**2 / 4.0).square()).sum(-1)


def batch(seed: int, size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A Gaussian, draws of it and scores of ``skewed`` there."""
    mean, covariance = target(seed)
    g = torch.Generator().manual_seed(50 + seed)
    draws = mean + torch.randn(size, D, generator=g) @ torch.linalg.cholesky(covariance).mT
    scores = torch.func.vmap(torch.func.grad(skewed))(draws)
    return mean, covariance, draws, scores


@pytest.mark.parametrize("size", [2, 32])
@pytest.mark.parametrize("rate", [0.1, 20.0])
def test_update_is_stationary_in_the_papers_objective(size: int, rate: float) -> None:
    """1/B sum |grad log q - g|^2_Cov(q) + 2 / lambda KL(q_t || q), differentiated by autograd."""
    loc, covariance, draws, scores = batch(1, size)
    old = torch.distributions.MultivariateNormal(loc, covariance)

    def objective(mu: Tensor, factor: Tensor) -> Tensor:
        q = torch.distributions.MultivariateNormal(mu, scale_tril=factor)
        own = -torch.cholesky_solve((draws - mu).mT, factor).mT
        misfit = ((own - scores) @ factor).square().sum(-1).mean()
        return misfit + 2.0 / rate * torch.distributions.kl_divergence(old, q)

    mu, sigma = batch_and_match_update(loc, covariance, draws, scores, rate)
    at = mu, torch.linalg.cholesky(sigma)
    found = torch.func.grad(objective, argnums=(0, 1))(*at)
    before = torch.func.grad(objective, argnums=(0, 1))(loc, torch.linalg.cholesky(covariance))
    assert found[0].abs().max() < 1e-8 * before[0].abs().max()
    assert found[1].tril().abs().max() < 1e-8 * before[1].abs().max()


def test_update_is_the_printed_root() -> None:
    """2 V (I + (I + 4 U V)^(1/2))^-1, the square root of a matrix that is not symmetric."""
    loc, covariance, draws, scores = batch(2, 8)
    rate = 3.0
    share = rate / (1.0 + rate)
    g, z = scores.mean(0), draws.mean(0)
    U = rate * torch.cov(scores.mT, correction=0) + share * torch.outer(g, g)
    V = covariance + rate * torch.cov(draws.mT, correction=0)
    V = V + share * torch.outer(loc - z, loc - z)
    eigenvalues, vectors = torch.linalg.eig(torch.eye(D) + 4.0 * U @ V)
    root = (vectors * eigenvalues.sqrt()) @ torch.linalg.inv(vectors)
    printed = 2.0 * V @ torch.linalg.inv(torch.eye(D) + root.real)
    mu, sigma = batch_and_match_update(loc, covariance, draws, scores, rate)
    torch.testing.assert_close(sigma, printed, rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(sigma @ U @ sigma + sigma, V, rtol=1e-8, atol=1e-10)
    expected = loc / (1.0 + rate) + share * (sigma @ g + z)
    torch.testing.assert_close(mu, expected, rtol=1e-12, atol=1e-12)


def test_batch_and_match_is_exact_on_a_gaussian() -> None:
    """The target is a fixed point, and from elsewhere a large rate reaches it in one update."""
    mean, covariance = target(3)
    precision = torch.linalg.inv(covariance)
    draws = mean + torch.randn(12, D) @ torch.linalg.cholesky(covariance).mT
    scores = (mean - draws) @ precision
    mu, sigma = batch_and_match_update(mean, covariance, draws, scores, 7.0)
    torch.testing.assert_close(mu, mean, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(sigma, covariance, rtol=1e-9, atol=1e-9)
    far = torch.randn(12, D)
    mu, sigma = batch_and_match_update(
        torch.zeros(D), torch.eye(D), far, (mean - far) @ precision, 1e10
    )
    torch.testing.assert_close(mu, mean, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(sigma, covariance, rtol=1e-5, atol=1e-5)


def test_batch_and_match_runs_to_a_gaussian_and_stops_when_told() -> None:
    mean, covariance = target(4)
    seen = []

    def report(loc: Tensor, scale_tril: Tensor) -> bool:
        seen.append(loc)
        return len(seen) == 60

    start = torch.zeros(D), torch.eye(D)
    loc, scale = batch_and_match(log_density(mean, covariance), *start, 16, report=report)
    assert len(seen) == 60
    torch.testing.assert_close(loc, mean, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(scale @ scale.mT, covariance, rtol=1e-2, atol=1e-3)


def test_inverse_hessian_is_the_recursion_of_bfgs() -> None:
    """H <- (I - r s z') H (I - r z s') + r s s', r = 1 / s'z, from diag(alpha)."""
    _, covariance = target(5)
    precision = torch.linalg.inv(covariance)
    S = torch.randn(D, 3)
    Z = precision @ S + 0.01 * torch.randn(D, 3)
    alpha = torch.rand(D) + 0.5
    H = alpha.diag()
    for s, z in zip(S.mT, Z.mT, strict=True):
        r = 1.0 / (s @ z)
        left = torch.eye(D) - r * torch.outer(s, z)
        H = left @ H @ left.mT + r * torch.outer(s, s)
    torch.testing.assert_close(inverse_hessian(alpha, S, Z), H, rtol=1e-8, atol=1e-8)


def test_inverse_hessian_of_conjugate_steps_is_the_covariance() -> None:
    """d steps that are orthogonal in the precision tell all of it."""
    _, covariance = target(6)
    S = torch.linalg.cholesky(covariance) @ torch.linalg.qr(torch.randn(D, D))[0]
    Z = torch.linalg.inv(covariance) @ S
    found = inverse_hessian(torch.rand(D) + 0.5, S, Z)
    torch.testing.assert_close(found, covariance, rtol=1e-8, atol=1e-8)


def test_diagonal_update_is_printed_and_exact_in_one_dimension() -> None:
    alpha, s, z = torch.rand(D) + 0.5, torch.randn(D), torch.randn(D)
    z = torch.where((s * z).sum() > 0.0, z, -z)
    a, b, c = z @ (alpha * z), z @ s, s @ (s / alpha)
    for i, new in enumerate(diagonal_update(alpha, s, z)):
        inverse = a / (b * alpha[i]) + z[i] ** 2 / b - a * s[i] ** 2 / (b * c * alpha[i] ** 2)
        torch.testing.assert_close(new, 1.0 / inverse)
    one = diagonal_update(torch.tensor([3.0]), torch.tensor([2.0]), torch.tensor([5.0]))
    torch.testing.assert_close(one, torch.tensor([0.4]))


def kl(loc: Tensor, scale: Tensor, mean: Tensor, covariance: Tensor) -> float:
    q = torch.distributions.MultivariateNormal(loc, scale_tril=scale)
    p = torch.distributions.MultivariateNormal(mean, covariance)
    return float(torch.distributions.kl_divergence(q, p))


def test_pathfinder_finds_a_gaussian() -> None:
    """Its mean is the target's once the path has ended; the covariance is that of the history."""
    mean, covariance = target(7)
    found = pathfinder(log_density(mean, covariance), torch.zeros(D), history=30, draws=100)
    assert found is not None
    assert kl(*found, mean, covariance) < 0.02
    g = torch.Generator().manual_seed(0)
    diagonal = torch.rand(D, generator=g).diag() + 0.2 * torch.eye(D)
    found = pathfinder(log_density(mean, diagonal), torch.zeros(D), draws=100)
    assert found is not None
    assert kl(*found, mean, diagonal) < 0.05


def test_pathfinder_stops_when_told_and_says_where_it_has_nothing() -> None:
    calls = []

    def report(loc: Tensor, scale_tril: Tensor) -> bool:
        calls.append(loc)
        return True

    assert pathfinder(log_density(*target(7)), torch.zeros(D), report=report) is not None
    assert len(calls) == 1
    assert pathfinder(lambda theta: theta.sum(-1) * 0.0, torch.zeros(D)) is None


def test_laplace_is_exact_on_a_gaussian() -> None:
    mean, covariance = target(8)
    found = laplace(log_density(mean, covariance), torch.zeros(D))
    assert found is not None
    assert kl(*found, mean, covariance) < 1e-10
    assert laplace(lambda theta: theta.square().sum() * 0.0, torch.zeros(D)) is None


def test_dadvi_is_exact_on_a_gaussian() -> None:
    """Draws with mean 0 and covariance I integrate a quadratic exactly: sds of the precision."""
    mean, covariance = target(9)
    noise = torch.cat([torch.eye(D), -torch.eye(D)]) * math.sqrt(D)
    loc, scale = dadvi(log_density(mean, covariance), torch.zeros(D), torch.ones(D), noise)
    sd = torch.linalg.inv(covariance).diagonal().rsqrt()
    torch.testing.assert_close(loc, mean, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(scale.diagonal(), sd, rtol=1e-5, atol=1e-5)


def test_dadvi_stops_when_told() -> None:
    calls = []

    def report(loc: Tensor, scale_tril: Tensor) -> bool:
        calls.append(loc)
        return True

    dadvi(skewed, torch.ones(D), torch.ones(D), torch.randn(30, D), report=report)
    assert len(calls) == 1
