"""Chains of Gaussian states and Matern processes against dense Gaussians and kernels."""

import math
from typing import Any

import pyro
import pytest
import torch

from pyro_ngvi.distributions import GaussianStateSpace, matern_state_space
from tests.exact.chain_cases import (
    LENGTHSCALE,
    NUS,
    VARIANCE,
    close,
    dense,
    generator,
    kernel,
    matern_dense,
    matern_equation,
    random_chain,
)


@pytest.mark.parametrize(("T", "S"), [(1, 2), (2, 1), (3, 2), (8, 3), (13, 2)])
def test_chain_is_its_dense_gaussian(T: int, S: int) -> None:
    chain = random_chain(T, S)
    m, K = dense(chain)
    close(chain.mean, m.reshape(T, S))
    close(chain.variance, K.diagonal().reshape(T, S))
    _, covariance = chain.moments()
    close(covariance, torch.stack([K[i : i + S, i : i + S] for i in range(0, T * S, S)]))
    s = torch.randn(4, 2, T, S, generator=generator(3))
    normal = torch.distributions.MultivariateNormal(m, K)
    expected = normal.log_prob(s.flatten(-2))
    close(chain.log_prob(s), expected)
    one = torch.func.vmap(torch.func.vmap(unchecked(chain).log_prob))(s)
    close(one, expected)


def unchecked(chain: GaussianStateSpace) -> GaussianStateSpace:
    """Without validation, which branches on values."""
    return GaussianStateSpace(
        chain.initial_loc,
        chain.initial_covariance,
        chain.transition,
        chain.noise_covariance,
        chain.offset,
        validate_args=False,
    )


def test_draws_are_the_recursion(monkeypatch: pytest.MonkeyPatch) -> None:
    chain = random_chain(7, 2).expand((3,))
    noise = torch.randn(5, 3, 7, 2, generator=generator(4))
    monkeypatch.setattr(torch, "randn", lambda shape, **_: noise.reshape(shape))
    s = chain.rsample((5,))
    monkeypatch.undo()
    now = chain.initial_loc + noise[..., 0, :] @ chain.initial_scale_tril.mT
    close(s[..., 0, :], now)
    for t in range(6):
        now = now @ chain.transition[t].mT + chain.offset[t]
        now = now + noise[..., t + 1, :] @ chain.noise_scale_tril[t].mT
        close(s[..., t + 1, :], now)


def test_same_step_at_all_times_need_be_given_once() -> None:
    A, Q, c = (
        torch.tensor([[0.9, 0.1], [0.0, 0.8]]),
        torch.diag(torch.tensor([0.1, 0.3])),
        torch.ones(2),
    )
    C = torch.eye(2)
    once = GaussianStateSpace(torch.zeros(2), C, A, Q, c, num_steps=5)
    each = GaussianStateSpace(
        torch.zeros(2), C, A.expand(4, 2, 2), Q, offset=c.expand(4, 2), num_steps=5
    )
    by_tril = GaussianStateSpace(
        torch.zeros(2),
        transition=A,
        offset=c,
        num_steps=5,
        initial_scale_tril=C,
        noise_scale_tril=Q.sqrt(),
    )
    s = torch.randn(5, 2, generator=generator(0))
    assert once.event_shape == (5, 2)
    for other in (each, by_tril):
        close(other.log_prob(s), once.log_prob(s))
        close(other.noise_covariance, once.noise_covariance)


def test_copies_in_a_plate() -> None:
    chain = random_chain(4, 2)

    def model() -> None:
        with pyro.plate("chains", 3):
            pyro.sample("s", chain)

    trace: Any = pyro.poutine.trace(model).get_trace()
    s = trace.nodes["s"]["value"]
    assert s.shape == (3, 4, 2)
    close(trace.log_prob_sum(), chain.log_prob(s).sum())
    copies = chain.expand((5, 1)).expand((5, 3))
    assert copies.batch_shape == (5, 3) and copies.rsample((2,)).shape == (2, 5, 3, 4, 2)
    assert copies.mean.shape == copies.variance.shape == (5, 3, 4, 2)
    close(copies.log_prob(s), chain.log_prob(s).expand(5, 3))


@pytest.mark.parametrize("nu", NUS)
def test_matern_has_its_kernel(nu: float) -> None:
    times = torch.tensor([0.0, 1e-3, 0.2, 0.25, 1.0, 1.7, 4.0, 30.0])
    chain = matern_state_space(times, LENGTHSCALE, VARIANCE, nu)
    T, S = chain.event_shape
    _, K = dense(chain)
    x = math.sqrt(2.0 * nu) / LENGTHSCALE * (times[:, None] - times).abs()
    close(K[::S, ::S], kernel(nu, x))
    close(K, matern_dense(times, nu))
    close(chain.variance, matern_equation(nu)[1].diagonal().expand(T, S))


@pytest.mark.parametrize("nu", NUS)
@pytest.mark.parametrize("step", [1e-6, 1e-2, 0.5, 3.0, 40.0])
def test_matern_noise_is_accurate_entry_by_entry(nu: float, step: float) -> None:
    """Against Gauss-Legendre quadrature of int_0^x b b' du with b = exp(F u) e_last."""
    F, P = matern_equation(nu)
    S = len(F)
    x = math.sqrt(2.0 * nu) / LENGTHSCALE * step
    density = -(F @ P + P @ F.T)[-1, -1]
    i = torch.arange(1, 40, dtype=torch.float64)
    nodes, vectors = torch.linalg.eigh(torch.diag(i / (4 * i.square() - 1).sqrt(), 1), UPLO="U")
    weights = vectors[0].square()  # of integrals over (0, 1)
    pieces = max(1, math.ceil(x / 5.0))
    u = ((torch.arange(pieces)[:, None] + 0.5 * (nodes + 1.0)) * (x / pieces)).reshape(-1)
    # exp(F u) e_last = e^-u sum_j N^j e_last u^j / j!, N = F + I nilpotent: without cancellation
    power, b = torch.eye(S)[-1], torch.zeros(len(u), S)
    for j in range(S):
        b = b + u[:, None] ** j / math.factorial(j) * power
        power = (F + torch.eye(S)) @ power
    b = b * (-u).exp()[:, None]
    w = (weights.repeat(pieces) * (x / pieces))[:, None, None]
    expected = density * (w * b[:, :, None] * b[:, None, :]).sum(0)
    chain = matern_state_space(torch.tensor([0.0, step]), LENGTHSCALE, VARIANCE, nu)
    sd = expected.diagonal().sqrt()
    close(chain.noise_covariance[0] / sd / sd[:, None], expected / sd / sd[:, None], 1e-12)
