"""Chains of Gaussian states with sites, and the same as dense Gaussians."""

import math

import torch
from torch import Tensor

from pyro_ngvi.distributions import GaussianStateSpace, matern_state_space

__all__ = [
    "LENGTHSCALE", "NUS", "VARIANCE", "close", "dense", "dense_posterior", "generator", "is_proper",
    "kernel", "matern", "matern_dense", "matern_equation", "random_chain", "sites",
]  # fmt: skip

NUS = [0.5, 1.5, 2.5]
LENGTHSCALE, VARIANCE = 1.3, 0.7


def close(actual: Tensor, expected: Tensor, tol: float = 1e-10) -> None:
    torch.testing.assert_close(actual, expected, rtol=tol, atol=tol)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_chain(T: int, S: int, seed: int = 0) -> GaussianStateSpace:
    """Nothing in it is the same for two steps."""
    g = generator(seed)
    root = torch.randn(T, S, S, generator=g)
    covariance = root @ root.mT + 0.1 * torch.eye(S)
    return GaussianStateSpace(
        torch.randn(S, generator=g),
        covariance[0],
        torch.randn(T - 1, S, S, generator=g) / S,
        covariance[1:],
        torch.randn(T - 1, S, generator=g),
    )


def matern(T: int, nu: float, seed: int = 0) -> GaussianStateSpace:
    times = torch.rand(T, generator=generator(seed)).cumsum(0)
    return matern_state_space(times, LENGTHSCALE, VARIANCE, nu)


def sites(T: int, S: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    """h and P: none, of rank one, indefinite and positive definite, in turn."""
    g = generator(seed)
    h, root = torch.randn(T, S, generator=g), torch.randn(T, S, S, generator=g)
    P = root @ root.mT
    h[::4], P[::4] = 0.0, 0.0
    P[1::4] = root[1::4, :, :1] * root[1::4, :, :1].mT
    P[2::4] = root[2::4, :, 1:] @ root[2::4, :, 1:].mT - 0.03 * torch.eye(S)
    return h, P


def dense(chain: GaussianStateSpace) -> tuple[Tensor, Tensor]:
    """Mean (T S,) and covariance (T S, T S), from s = (I - A shifted)^-1 (c + noise)."""
    T, S = chain.event_shape
    system = torch.eye(T * S)
    for t in range(1, T):
        system[t * S : (t + 1) * S, (t - 1) * S : t * S] = -chain.transition[t - 1]
    inverse = torch.linalg.inv(system)
    c = torch.cat((chain.initial_loc, chain.offset.reshape(-1)))
    Q = torch.block_diag(chain.initial_covariance, *chain.noise_covariance)
    return inverse @ c, inverse @ Q @ inverse.T


def dense_posterior(m: Tensor, K: Tensor, h: Tensor, P: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Marginal means (T, S) and covariances (T, S, S), and the log normaliser; K may be singular."""
    T, S = h.shape
    precision, h = torch.block_diag(*P), h.reshape(-1)
    left = torch.eye(T * S) + K @ precision
    V = torch.linalg.solve(left, K)
    mean = torch.linalg.solve(left, m + K @ h)
    u = h - precision @ m
    exponent = m @ h - 0.5 * m @ precision @ m + 0.5 * u @ V @ u
    blocks = torch.stack([V[i : i + S, i : i + S] for i in range(0, T * S, S)])
    return mean.reshape(T, S), blocks, exponent - 0.5 * torch.linalg.slogdet(left)[1]


def is_proper(K: Tensor, P: Tensor) -> bool:
    """Whether K^-1 + P is positive definite."""
    root = torch.linalg.cholesky(K)
    whole = torch.eye(len(K)) + root.T @ torch.block_diag(*P) @ root
    return bool(torch.linalg.eigvalsh(whole)[0] > 0.0)


def kernel(nu: float, x: Tensor) -> Tensor:
    polynomial = {0.5: torch.ones_like(x), 1.5: 1 + x, 2.5: 1 + x + x.square() / 3}[nu]
    return VARIANCE * polynomial * (-x).exp()


def matern_equation(nu: float) -> tuple[Tensor, Tensor]:
    """F of ds/dx = F s + white noise on the last entry, and the stationary covariance."""
    S = round(nu + 0.5)
    F = torch.diag(torch.ones(S - 1), 1)
    F[-1] = -torch.tensor([float(math.comb(S, i)) for i in range(S)])
    noise = torch.zeros(S, S)
    noise[-1, -1] = 1.0
    identity = torch.eye(S)
    lyapunov = torch.kron(F, identity) + torch.kron(identity, F)
    P = torch.linalg.solve(lyapunov, -noise.reshape(-1)).reshape(S, S)
    return F, VARIANCE * P / P[0, 0]


def matern_dense(times: Tensor, nu: float) -> Tensor:
    """Covariance (T S, T S) of all states from the matrix exponential, which knows no steps."""
    F, P = matern_equation(nu)
    x = math.sqrt(2.0 * nu) / LENGTHSCALE * (times[:, None] - times)
    forward = torch.linalg.matrix_exp(x.clamp_min(0.0)[..., None, None] * F) @ P
    blocks = torch.where((x >= 0.0)[..., None, None], forward, forward.permute(1, 0, 3, 2))
    return blocks.permute(0, 2, 1, 3).reshape(len(times) * len(F), -1)
