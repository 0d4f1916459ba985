"""The dense algebra of AutoSites against plain formulas, in sizes below and above its blocks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pyro_ngvi.linalg.products import BLOCK, symmetric_product
from pyro_ngvi.sites.algebra import GaussianPotential, potential_of
from pyro_ngvi.sites.dense import WhitePosterior, reduced
from pyro_ngvi.sites.structure import LinearMap

SIZES = [1, 3, BLOCK, 2 * BLOCK + 6]


def normal(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def problem(n: int, k: int, triangular: bool) -> tuple[LinearMap, Tensor, Tensor]:
    """A map onto n data of k entries each, and their sites; one of their precisions is negative."""
    A = normal(n * k, n * k) / (n * k) ** 0.5 if triangular else normal(n * k, 7) / n**0.5
    A = A.tril() if triangular else A
    root = normal(n, k, k, seed=1)
    precision = root @ root.mT
    precision[0] = -0.01 * precision[0]
    design = A.reshape(n, k, -1)
    return LinearMap(design, normal(n, k, seed=2), triangular=triangular), normal(n, k), precision


@pytest.mark.parametrize("n", SIZES)
def test_symmetric_product(n: int) -> None:
    L = normal(n, n).tril()
    B = normal(n).unsqueeze(-1) * L
    torch.testing.assert_close(symmetric_product(L, B), L.mT @ B)
    L.requires_grad_()
    B = normal(n).unsqueeze(-1) * L
    (found,) = torch.autograd.grad(symmetric_product(L, B).square().sum(), L, retain_graph=True)
    (plain,) = torch.autograd.grad((L.mT @ B).square().sum(), L)
    torch.testing.assert_close(found, plain)


@pytest.mark.parametrize("triangular", [True, False])
@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("n", SIZES)
def test_evidence_and_posterior(n: int, k: int, triangular: bool) -> None:
    at, linear, precision = problem(n, k, triangular)
    evidence = potential_of(at, linear, precision)
    A, b = at.design.flatten(0, 1), at.offset.flatten()
    full = torch.block_diag(*precision)
    torch.testing.assert_close(evidence.precision, A.mT @ full @ A)
    torch.testing.assert_close(evidence.linear, A.mT @ (linear.flatten() - full @ b))
    constant = linear.flatten() @ b - 0.5 * b @ full @ b
    torch.testing.assert_close(evidence.constant, constant)

    q = WhitePosterior(evidence)
    W = torch.eye(A.shape[1]).to(A) + evidence.precision
    covariance = torch.linalg.inv(W)
    assert bool(q.proper)
    torch.testing.assert_close(q.mean, covariance @ evidence.linear)
    log_z = evidence.constant + 0.5 * evidence.linear @ q.mean - 0.5 * torch.logdet(W)
    torch.testing.assert_close(q.log_normalizer, log_z)

    mean, C = q.marginals(at)
    torch.testing.assert_close(mean.flatten(), A @ q.mean + b)
    blocks = (A @ covariance @ A.mT).reshape(n, k, n, k)
    index = torch.arange(n)
    torch.testing.assert_close(C, blocks[index, :, index])


@pytest.mark.parametrize("n", SIZES)
def test_draws_densities_and_solutions(n: int) -> None:
    q = WhitePosterior(potential_of(*problem(n, 1, True)))
    half = q.half(torch.eye(n, dtype=torch.float64))
    covariance = half.mT @ half
    vectors = normal(4, 3, n)
    torch.testing.assert_close(q.solve(vectors), vectors @ covariance)
    # a draw is mean + R noise with R R' the covariance
    root = q.draw(torch.eye(n, dtype=torch.float64)) - q.mean
    torch.testing.assert_close(root.mT @ root, covariance)
    torch.testing.assert_close(-q.log_det_root, 0.5 * torch.logdet(covariance))


def test_divergence_and_what_sites_are_expected_to_say() -> None:
    q = WhitePosterior(potential_of(*problem(9, 1, True)))
    plain = torch.distributions.MultivariateNormal
    mean, covariance = q.mean, q.half(torch.eye(9).to(q.mean)).mT @ q.half(torch.eye(9).to(q.mean))
    prior = plain(torch.zeros_like(mean), torch.eye(9).to(mean))
    kl = torch.distributions.kl_divergence(plain(mean, covariance), prior)
    torch.testing.assert_close(q.kl(), kl)
    other = potential_of(*problem(9, 2, False))
    other = GaussianPotential(other.constant, normal(9, seed=3), torch.cov(normal(9, 40, seed=4)))
    x, P = other.linear, other.precision
    quadratic = (P * covariance).sum() + mean @ P @ mean
    torch.testing.assert_close(q.expected(other), other.constant + x @ mean - 0.5 * quadratic)


def test_evidence_of_other_coordinates() -> None:
    evidence, root, shift = (
        potential_of(*problem(5, 1, True)),
        normal(5, 5).tril(),
        normal(5, seed=6),
    )
    eta = normal(5, seed=5)
    eps = root @ eta + shift

    def says(e: GaussianPotential, x: Tensor) -> Tensor:
        return e.constant + e.linear @ x - 0.5 * x @ e.precision @ x

    torch.testing.assert_close(says(evidence.of(root, shift), eta), says(evidence, eps))


def test_columns_that_are_zero_may_be_left_out() -> None:
    q = WhitePosterior(potential_of(*problem(5, 1, False)))
    rows = normal(4, 7)
    rows[:, 3:] = 0.0
    whole, part = q.half(rows), q.half(rows[:, :3])
    torch.testing.assert_close(part.mT @ part, whole.mT @ whole)


@pytest.mark.parametrize("k", [1, 2])
def test_directions_that_the_data_see(k: int) -> None:
    """Fewer rows than latent variables: a triangle, and the directions it belongs to."""
    n, D = BLOCK, 3 * BLOCK
    at = LinearMap(normal(n, k, D) / D**0.5, normal(n, k))
    smaller, basis = reduced({"y": at})
    assert smaller["y"].triangular
    A = smaller["y"].design.flatten(0, 1)
    torch.testing.assert_close(A, A.tril())
    torch.testing.assert_close(A @ basis.mT, at.design.flatten(0, 1))


def test_gradients_in_a_triangle_that_is_learned() -> None:
    """Hyperparameters move A: gradients of log Z and of the marginals."""
    n = BLOCK + 5
    at, linear, precision = problem(n, 1, True)
    scale = torch.ones((), dtype=torch.float64, requires_grad=True)
    moved = LinearMap(scale * at.design, at.offset, triangular=True)
    q = WhitePosterior(potential_of(moved, linear, precision))
    mean, C = q.marginals(moved)
    (found,) = torch.autograd.grad(q.log_normalizer + mean.sum() + C.sum(), scale)

    A = scale * at.design.squeeze(1)
    P = A.mT @ (precision.flatten(1) * A)
    h = A.mT @ (linear - precision.squeeze(-1) * at.offset).squeeze(-1)
    W = torch.eye(n, dtype=torch.float64) + P
    m = torch.linalg.solve(W, h)
    plain = 0.5 * h @ m - 0.5 * torch.logdet(W) + (A @ m).sum()
    plain = plain + (A @ torch.linalg.inv(W) @ A.mT).diagonal().sum()
    torch.testing.assert_close(found, torch.autograd.grad(plain, scale)[0])
