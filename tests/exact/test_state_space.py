"""Chains of Gaussian states with Gaussian sites against dense Gaussians and the Kalman smoother."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from pyro_ngvi.distributions import GaussianStateSpace, local_level, matern_state_space
from pyro_ngvi.sites.chain import chain_posterior
from tests.exact.chain_cases import (
    LENGTHSCALE,
    NUS,
    VARIANCE,
    close,
    dense,
    dense_posterior,
    generator,
    is_proper,
    matern,
    matern_dense,
    random_chain,
    sites,
)


@pytest.mark.parametrize("T", [1, 2, 3, 5, 12, 13])
@pytest.mark.parametrize("S", [1, 2, 3])
def test_posterior_is_the_dense_gaussian(T: int, S: int) -> None:
    chain, (h, P) = random_chain(T, S), sites(T, S)
    m, K = dense(chain)
    mean, covariance, log_z = dense_posterior(m, K, h, P)
    assert is_proper(K, P) and bool((torch.linalg.eigvalsh(P) < -0.01).any()) == (T > 2)
    q = chain_posterior(chain, h, P)
    assert bool(q.proper)
    close(q.mean, mean)
    close(q.covariance, covariance)
    close(q.log_normalizer, log_z)


@pytest.mark.parametrize("nu", NUS)
def test_posterior_of_matern_is_the_dense_gaussian(nu: float) -> None:
    chain = matern(12, nu)
    h, P = sites(*chain.event_shape)
    mean, covariance, log_z = dense_posterior(*dense(chain), h, P)
    q = chain_posterior(chain, h, P)
    assert bool(q.proper)
    close(q.mean, mean)
    close(q.covariance, covariance)
    close(q.log_normalizer, log_z)


STEPS = {
    "short": [1e-4] * 23,
    "very short": [1e-7] * 23,
    "long": [10.0] * 23,
    "all": [10.0 ** (1.0 - 9.0 * ((7 * i) % 23) / 22.0) for i in range(23)],  # 1e-8 to 10
}


@pytest.mark.parametrize("nu", NUS)
@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("size", [1.0, 100.0])
def test_no_digits_are_lost_in_short_steps(nu: float, steps: str, size: float) -> None:
    """The noise of a Matern-5/2 step of 1e-7 has variances of 1e-36 and of 1e-7."""
    times = torch.tensor([0.0, *STEPS[steps]]).cumsum(0)
    chain = matern_state_space(times, LENGTHSCALE, VARIANCE, nu)
    T, S = chain.event_shape
    g = generator(2)
    h, P = torch.zeros(T, S), torch.zeros(T, S, S)
    P[:, 0, 0] = size * torch.rand(T, generator=g)
    P[::3, 0, 0] = 0.0
    P[1::5, 0, 0] = -0.01
    h[:, 0] = P[:, 0, 0] * (times.sin() + torch.randn(T, generator=g) / math.sqrt(size))
    q = chain_posterior(chain, h, P)
    mean, covariance, log_z = dense_posterior(torch.zeros(T * S), matern_dense(times, nu), h, P)
    assert bool(q.proper)
    sd = covariance.diagonal(dim1=-2, dim2=-1).sqrt()
    close((q.mean - mean) / sd, torch.zeros(T, S), 1e-10)
    scale = sd[:, :, None] * sd[:, None]
    close(q.covariance / scale, covariance / scale)
    close(q.log_normalizer, log_z)


def kalman(y: Tensor, noise: float, first: float, step: float) -> tuple[Tensor, Tensor, Tensor]:
    """Filter and Rauch-Tung-Striebel smoother of a random walk, one datum after the other."""
    T = len(y)
    m, v = torch.zeros(T), torch.zeros(T)
    log_z = torch.zeros(())
    for t in range(T):
        before = m[t - 1] if t else torch.zeros(())
        spread = v[t - 1] + step**2 if t else torch.tensor(first**2)
        log_z += torch.distributions.Normal(before, (spread + noise**2).sqrt()).log_prob(y[t])
        gain = spread / (spread + noise**2)
        m[t], v[t] = before + gain * (y[t] - before), gain * noise**2
    for t in range(T - 2, -1, -1):
        back = v[t] / (v[t] + step**2)
        m[t] = m[t] + back * (m[t + 1] - m[t])
        v[t] = v[t] + back**2 * (v[t + 1] - v[t] - step**2)
    return m, v, log_z


@pytest.mark.parametrize("noise", [1e-3, 0.5, 30.0])
def test_local_level_is_the_kalman_smoother(noise: float) -> None:
    T, first, step = 200, 3.0, 0.2
    g = generator(5)
    level = (step * torch.randn(T, generator=g)).cumsum(0)
    y = level + noise * torch.randn(T, generator=g)
    m, v, log_z = kalman(y, noise, first, step)
    precision = torch.full((T, 1, 1), noise**-2)
    q = chain_posterior(local_level(T, first, step), y[:, None] / noise**2, precision)
    constant = -0.5 * (y.square().sum() / noise**2 + T * math.log(2.0 * math.pi * noise**2))
    close(q.mean[:, 0], m)
    close(q.covariance[:, 0, 0] / v, torch.ones(T))
    close(q.log_normalizer + constant, log_z)


def test_without_sites_it_is_the_prior() -> None:
    chain = random_chain(9, 2)
    q = chain_posterior(chain, torch.zeros(9, 2), torch.zeros(9, 2, 2))
    mean, covariance = chain.moments()
    close(q.mean, mean, 1e-13)
    close(q.covariance, covariance, 1e-13)
    assert float(q.log_normalizer) == 0.0 and bool(q.proper)
    s = torch.randn(9, 2, generator=generator(6))
    close(q.distribution().log_prob(s), chain.log_prob(s), 1e-12)


def test_proper_though_the_filter_is_not() -> None:
    """The data up to t = 1 and up to t = 20 leave no proper law of s_t; those after them do."""
    chain = local_level(50, 1.0, 0.1)
    P = torch.zeros(50, 1, 1)
    P[0], P[1], P[20], P[22] = -15.0, 60.0, -3.0, 10.0
    h = torch.randn(50, 1, generator=generator(7))
    m, K = dense(chain)
    assert is_proper(K, P) and not is_proper(K[:1, :1], P[:1])
    mean, covariance, log_z = dense_posterior(m, K, h, P)
    q = chain_posterior(chain, h, P)
    assert bool(q.proper)
    close(q.mean, mean)
    close(q.covariance, covariance)
    close(q.log_normalizer, log_z)


@pytest.mark.parametrize("T", [1, 2, 17, 50])
@pytest.mark.parametrize("t", [0, 7, -1])
def test_edge_of_the_proper(T: int, t: int) -> None:
    """One site at t makes q improper exactly when -P_t exceeds the prior's precision there."""
    chain = local_level(T, 1.0, 0.1)
    t = t % T
    P = torch.zeros(T, 1, 1)
    P[t] = -1.0 / chain.variance[t]
    for share, proper in ((1.0 - 1e-12, True), (1.0 + 1e-12, False), (1e3, False)):
        q = chain_posterior(chain, torch.ones(T, 1), share * P)
        assert bool(q.proper) == proper
    assert not bool(chain_posterior(chain, torch.ones(T, 1), P * torch.nan).proper)


def test_posterior_density_is_prior_times_sites() -> None:
    chain = matern(13, 2.5)
    h, P = sites(*chain.event_shape)
    q = chain_posterior(chain, h, P)
    s = torch.randn(6, *chain.event_shape, generator=generator(8))
    site = (h * s - 0.5 * s * (P @ s.unsqueeze(-1)).squeeze(-1)).sum((-2, -1))
    close(q.distribution().log_prob(s), chain.log_prob(s) + site - q.log_normalizer)
    mean, covariance = q.distribution().moments()
    close(mean, q.mean)
    close(covariance, q.covariance)


def test_draws_have_the_moments_of_the_posterior() -> None:
    """z-scores of 40 means and 40 variances of 20,000 draws; 4.5 of their standard errors."""
    chain = random_chain(20, 2)
    h, P = sites(20, 2)
    q = chain_posterior(chain, h, P)
    n = 20_000
    variance = q.covariance.diagonal(dim1=-2, dim2=-1)
    deviation = (q.distribution().sample((n,)) - q.mean) / variance.sqrt()
    z_mean = deviation.mean(0) * math.sqrt(n)
    z_variance = (deviation.square().mean(0) - 1.0) * math.sqrt(n / 2.0)
    assert float(z_mean.abs().max()) < 4.5 and float(z_variance.abs().max()) < 4.5


# Gradients, dtypes, devices


def test_gradients_of_the_log_normaliser_are_the_moments() -> None:
    chain = random_chain(13, 3)
    h, P = (x.requires_grad_() for x in sites(13, 3))
    q = chain_posterior(chain, h, P)
    d_h, d_P = torch.autograd.grad(q.log_normalizer, (h, P))
    close(d_h, q.mean)
    second = q.covariance + q.mean.unsqueeze(-1) * q.mean.unsqueeze(-2)
    close(d_P, -0.5 * second)


@pytest.mark.parametrize("nu", NUS)
def test_gradients_by_differences(nu: float) -> None:
    times = torch.tensor([0.0, 0.4, 1.2])
    S = round(nu + 0.5)

    def outputs(lengthscale: Tensor, variance: Tensor, h: Tensor, P: Tensor) -> tuple[Tensor, ...]:
        chain = matern_state_space(times, lengthscale, variance, nu)
        q = chain_posterior(chain, h, P)
        return q.mean, q.covariance, q.log_normalizer, q.distribution().log_prob(s)

    s = torch.randn(3, S, generator=generator(0))
    inputs = torch.tensor(LENGTHSCALE), torch.tensor(VARIANCE), *sites(3, S)
    assert torch.autograd.gradcheck(outputs, [x.requires_grad_() for x in inputs])


def test_gradients_in_the_chain_by_differences() -> None:
    chain, s = random_chain(4, 2), torch.randn(4, 2, generator=generator(1))
    h, P = sites(4, 2)
    parts = [
        chain.initial_loc, chain.initial_scale_tril, chain.transition, chain.noise_scale_tril,
        chain.offset,
    ]  # fmt: skip

    def outputs(m: Tensor, C: Tensor, A: Tensor, L: Tensor, c: Tensor) -> tuple[Tensor, ...]:
        made = GaussianStateSpace(
            m, C.tril() @ C.tril().mT, A, L.tril() @ L.tril().mT, c, validate_args=False
        )
        q = chain_posterior(made, h, P)
        return made.log_prob(s), *made.moments(), q.mean, q.log_normalizer

    parts = [x.detach().clone().requires_grad_() for x in parts]
    assert torch.autograd.gradcheck(outputs, parts)


@pytest.mark.parametrize("nu", NUS)
def test_float32(nu: float) -> None:
    times = torch.rand(40, generator=generator(0)).cumsum(0).float().double()
    exact, single = (
        matern_state_space(times.to(dtype), LENGTHSCALE, VARIANCE, nu)
        for dtype in (torch.float64, torch.float32)
    )
    h, P = sites(*exact.event_shape)
    q, q32 = chain_posterior(exact, h, P), chain_posterior(single, h.float(), P.float())
    assert bool(q32.proper) and q32.distribution().sample().dtype == torch.float32
    for name in ("mean", "covariance", "log_normalizer"):
        assert getattr(q32, name).dtype == torch.float32
        close(getattr(q32, name).double(), getattr(q, name), 2e-4)


@pytest.mark.parametrize("T", [1, 2, 7])
@pytest.mark.parametrize("nu", NUS)
def test_meta_tensors(T: int, nu: float) -> None:
    """Reading a value of a meta tensor raises, so nothing here waits for a device."""
    place: Any = {"device": "meta"}
    number = torch.ones((), **place)
    chain = matern_state_space(torch.empty(T, **place), number, number, nu, validate_args=False)
    shape = chain.event_shape
    q = chain_posterior(chain, torch.empty(shape, **place), torch.empty(*shape, shape[1], **place))
    assert q.mean.shape == shape and q.covariance.shape == (*shape, shape[1])
    assert q.log_normalizer.shape == q.proper.shape == () and q.proper.dtype == torch.bool
    draws = q.distribution().rsample((3,))
    assert draws.shape == (3, *shape) and draws.device.type == "meta"
    assert q.distribution().log_prob(draws).shape == (3,)


def test_vmap_over_lengthscales() -> None:
    times = torch.tensor([0.0, 0.4, 0.5, 1.2])
    h, P = sites(4, 3)
    s = torch.randn(4, 3, generator=generator(0))

    def both(lengthscale: Tensor) -> tuple[Tensor, Tensor]:
        chain = matern_state_space(times, lengthscale, VARIANCE, 2.5, validate_args=False)
        return chain.log_prob(s), chain_posterior(chain, h, P).log_normalizer

    lengthscales = torch.tensor([0.5, 1.0, 2.0])
    expected = [torch.stack(x) for x in zip(*map(both, lengthscales), strict=True)]
    for one, other in zip(torch.func.vmap(both)(lengthscales), expected, strict=True):
        close(one, other)
