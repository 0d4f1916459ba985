"""Hyperparameters integrated out, against dense grids of closed forms and of quadrature."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

import pyro_ngvi as ngvi
from pyro_ngvi.distributions import local_level
from pyro_ngvi.sites.design import explore, find_mode
from pyro_ngvi.sites.integration import _doubts


def of_grid(log_p: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Log of the sum of a density over the first dimension of an even grid x, and mean and sd of x."""
    w = torch.softmax(log_p, 0)
    mean = w @ x
    return torch.logsumexp(log_p, 0) + (x[1] - x[0]).log(), mean, (w @ (x - mean).square()).sqrt()


Y = torch.tensor([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0], dtype=torch.float64)
SE = torch.tensor([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0], dtype=torch.float64)


def schools(y: Tensor, se: Tensor) -> None:
    """Rubin (1981), "Estimation in parallel randomized experiments"."""
    tau = pyro.sample("tau", dist.HalfNormal(10.0))
    mu = pyro.sample("mu", dist.Normal(0.0, 20.0))
    with pyro.plate("school", len(y)):
        effect = pyro.sample("effect", dist.Normal(mu, tau))
        pyro.sample("y", dist.Normal(effect, se), obs=y)


def test_eight_schools_against_the_closed_form_on_a_dense_grid() -> None:
    found = ngvi.integrate(schools, Y, SE)
    tau = torch.linspace(0.0, 60.0, 60_001)[1:].double()
    V = SE.square() + tau.unsqueeze(-1).square()
    P = 1.0 / 400.0 + (1.0 / V).sum(1)
    m = (Y / V).sum(1) / P
    log_p = -0.5 * ((2.0 * torch.pi * V).log().sum(1) + (400.0 * P).log())
    log_p = log_p - 0.5 * ((Y.square() / V).sum(1) - m.square() * P)
    log_p = log_p + dist.HalfNormal(10.0).log_prob(tau)
    evidence, mean, sd = of_grid(log_p, tau)
    assert abs(found.log_evidence - float(evidence)) < 1e-3
    assert abs(float(found.mean["tau"] - mean)) < 0.01 * float(sd)
    assert abs(float(found.sd["tau"] / sd) - 1.0) < 0.01
    w = torch.softmax(log_p, 0)
    mu = w @ m
    mu_sd = (w @ (1.0 / P + m.square()) - mu.square()).sqrt()
    assert abs(float(found.mean["mu"] - mu)) < 2e-3 * float(mu_sd)
    assert abs(float(found.sd["mu"] / mu_sd) - 1.0) < 2e-3
    cdf = w.cumsum(0)
    for level in (0.1, 0.5, 0.9):
        at = tau[torch.searchsorted(cdf, level)]
        assert abs(float(found.quantiles(level)["tau"] - at)) < 0.02 * float(sd)
    # draws: four standard errors of a mean of 1,000
    assert abs(float(found.samples["tau"].mean() - mean)) < 4.0 * float(sd) / 1000**0.5
    error = found.sd["effect"] / 1000**0.5
    assert ((found.samples["effect"].mean(0) - found.mean["effect"]).abs() < 4.0 * error).all()
    assert found.doubts == ()


T = torch.linspace(0.0, 3.0, 9, dtype=torch.float64)
SERIES = torch.tensor([0.4, 1.2, 0.7, -0.3, -1.1, -0.2, 0.9, 1.6, 1.1], dtype=torch.float64)
BASE = (-0.5 * (T.unsqueeze(-1) - T).square()).exp() + 1e-6 * torch.eye(9)


@pytest.mark.parametrize("count", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_several_hyperparameters(count: int) -> None:
    """y ~ N(0, a^2 K + b^2 I + c^2 1 1'), c given or not."""
    root = torch.linalg.cholesky(BASE)

    def model(y: Tensor) -> None:
        a = pyro.sample("a", dist.LogNormal(y.new_tensor(0.0), 0.7))
        b = pyro.sample("b", dist.LogNormal(y.new_tensor(-1.0), 0.7))
        c = pyro.sample("c", dist.LogNormal(y.new_tensor(-0.5), 0.5)) if count == 3 else 0.5
        z = pyro.sample("z", dist.Normal(y.new_zeros(9), 1.0).to_event(1))
        level = pyro.sample("level", dist.Normal(y.new_tensor(0.0), 1.0))
        f = pyro.deterministic("f", a * (root @ z) + c * level)
        with pyro.plate("data", 9):
            pyro.sample("y", dist.Normal(f, b), obs=y)

    found = ngvi.integrate(model, SERIES, names=["f"])
    lines = [
        torch.linspace(m - 5.0 * s, m + 5.0 * s, 41).double()
        for m, s in ((0.0, 0.7), (-1.0, 0.7), (-0.5, 0.5))
    ]
    grid = torch.stack(torch.meshgrid(*lines[:count], indexing="ij"), -1).reshape(-1, count)
    prior = dist.Normal(
        torch.tensor([0.0, -1.0, -0.5])[:count].double(),
        torch.tensor([0.7, 0.7, 0.5])[:count].double(),
    )
    a, b = (2.0 * grid[:, :2]).exp().unbind(-1)
    c = (2.0 * grid[:, 2]).exp() if count == 3 else torch.full_like(a, 0.25)
    one = torch.eye(9, dtype=torch.float64)
    K = a.reshape(-1, 1, 1) * BASE + c.reshape(-1, 1, 1)
    S = K + b.reshape(-1, 1, 1) * one
    log_p = dist.MultivariateNormal(torch.zeros(9).double(), S).log_prob(SERIES) + prior.log_prob(
        grid
    ).sum(-1)
    cell = sum(float((x[1] - x[0]).log()) for x in lines[:count])
    evidence = float(torch.logsumexp(log_p, 0)) + cell
    assert abs(found.log_evidence - evidence) < 5e-3
    w = torch.softmax(log_p, 0)
    for i, name in enumerate("abc"[:count]):
        x = grid[:, i].exp()
        mean = w @ x
        sd = (w @ (x - mean).square()).sqrt()
        share = 0.02
        assert abs(float(found.mean[name] - mean)) < share * float(sd)
        assert abs(float(found.sd[name] / sd) - 1.0) < 2.0 * share
    solved = torch.linalg.solve(S, SERIES.expand(len(S), 9).unsqueeze(-1))
    f = (K @ solved).squeeze(-1)
    V = (K - K @ torch.linalg.solve(S, K)).diagonal(dim1=-2, dim2=-1)
    mean = w @ f
    sd = (w @ (V + (f - mean).square())).sqrt()
    assert ((found.mean["f"] - mean).abs() < 0.02 * sd).all()
    assert ((found.sd["f"] / sd - 1.0).abs() < 0.02).all()


def test_a_chain_with_a_prior_on_its_steps() -> None:
    def model(y: Tensor) -> None:
        step = pyro.sample("step", dist.HalfNormal(y.new_tensor(1.0)))
        s = pyro.sample("s", local_level(9, initial_scale=y.new_tensor(1.0), step_scale=step))
        with pyro.plate("times", 9):
            pyro.sample("y", dist.Normal(s[:, 0], 0.4), obs=y)

    found = ngvi.integrate(model, SERIES)
    step = torch.linspace(0.0, 5.0, 5001).double()[1:]
    times = torch.arange(9).double()
    K = 1.0 + step.square().reshape(-1, 1, 1) * torch.minimum(times.unsqueeze(-1), times)
    S = K + 0.16 * torch.eye(9)
    log_p = dist.MultivariateNormal(torch.zeros(9).double(), S).log_prob(SERIES)
    evidence, mean, sd = of_grid(log_p + dist.HalfNormal(1.0).log_prob(step), step)
    assert abs(found.log_evidence - float(evidence)) < 2e-3
    assert abs(float(found.mean["step"] - mean)) < 0.01 * float(sd)
    assert abs(float(found.sd["step"] / sd) - 1.0) < 0.01


def test_random_effects_of_binary_data_against_quadrature() -> None:
    trials, hits = (
        torch.tensor([8.0, 6.0, 9.0, 7.0, 5.0]).double(),
        torch.tensor([7.0, 1.0, 5.0, 6.0, 0.0]).double(),
    )

    def model(hits: Tensor) -> None:
        tau = pyro.sample("tau", dist.HalfNormal(hits.new_tensor(1.5)))
        mu = pyro.sample("mu", dist.Normal(hits.new_tensor(0.0), 1.5))
        with pyro.plate("group", 5):
            effect = pyro.sample("effect", dist.Normal(hits.new_tensor(0.0), 1.0))
            pyro.sample("y", dist.Binomial(trials, logits=mu + tau * effect), obs=hits)

    found = ngvi.integrate(model, hits)
    tau, mu = torch.linspace(0.0, 9.0, 151).double()[1:], torch.linspace(-6.0, 6.0, 81).double()
    x, w = (torch.tensor(v) for v in np.polynomial.hermite_e.hermegauss(60))
    f = mu.reshape(-1, 1, 1, 1) + tau.reshape(-1, 1, 1) * x.reshape(-1, 1)
    each = dist.Binomial(trials, logits=f).log_prob(hits)
    each = torch.logsumexp(each + (w / w.sum()).log().unsqueeze(-1), 2).sum(-1)
    log_p = (
        each + dist.Normal(0.0, 1.5).log_prob(mu).unsqueeze(-1) + dist.HalfNormal(1.5).log_prob(tau)
    )
    evidence, mean, sd = of_grid(torch.logsumexp(log_p, 0) + (mu[1] - mu[0]).log(), tau)
    assert abs(found.log_evidence - float(evidence)) < 0.02
    assert abs(float(found.mean["tau"] - mean)) < 0.03 * float(sd)
    assert abs(float(found.sd["tau"] / sd) - 1.0) < 0.03
    x, p = found.density("mu")
    truth = torch.softmax(torch.logsumexp(log_p, 1), 0) / (mu[1] - mu[0])
    at = torch.tensor(np.interp(mu.numpy(), x.numpy(), p.numpy(), left=0.0, right=0.0))
    assert float(0.5 * torch.trapezoid((at - truth).abs(), mu)) < 0.015


def test_counts_of_zero_whose_effects_have_no_end() -> None:
    """Where tau is large the likelihood of a zero is flat to one side, and q a narrow part of it."""
    y = torch.tensor([0.0, 0.0, 0.0, 3.0], dtype=torch.float64)

    def model(y: Tensor) -> None:
        tau = pyro.sample("tau", dist.HalfNormal(y.new_tensor(2.0)))
        with pyro.plate("group", 4):
            effect = pyro.sample("effect", dist.Normal(y.new_zeros(4), tau))
            pyro.sample("y", dist.Poisson(effect.exp()), obs=y)

    found = ngvi.integrate(model, y)
    tau = torch.linspace(0.0, 12.0, 401, dtype=torch.float64)[1:]
    z = torch.linspace(-8.0, 8.0, 1001, dtype=torch.float64)
    each = dist.Poisson((tau.unsqueeze(-1) * z).exp()).log_prob(y.reshape(-1, 1, 1))
    each = each + dist.Normal(0.0, 1.0).log_prob(z)
    log_p = torch.logsumexp(each, -1).sum(0) + 4.0 * (z[1] - z[0]).log()
    log_p = log_p + dist.HalfNormal(2.0).log_prob(tau)
    evidence, mean, sd = of_grid(log_p, tau)
    assert abs(found.log_evidence - float(evidence)) < 0.02
    assert abs(float(found.mean["tau"] - mean)) < 0.05 * float(sd)
    assert abs(float(found.sd["tau"] / sd) - 1.0) < 0.05
    effect = torch.softmax(each[0], -1) @ z * tau  # of a zero, given tau
    assert abs(float(found.mean["effect"][0] - torch.softmax(log_p, 0) @ effect)) < 0.15


@pytest.mark.slow
def test_outliers_whose_sites_have_a_negative_precision() -> None:
    """At a wider prior of the effects they do not make a proper Gaussian, and begin anew."""
    y = torch.tensor([0.0, 0.3, -0.2, 0.5, 4.0, -0.4, 0.1, 0.2], dtype=torch.float64)

    def model(y: Tensor) -> None:
        s = pyro.sample("s", dist.HalfNormal(y.new_tensor(3.0)))
        m = pyro.sample("m", dist.Normal(y.new_tensor(0.0), 3.0))
        with pyro.plate("group", len(y)):
            u = pyro.sample("u", dist.Normal(m, s))
            pyro.sample("y", dist.StudentT(10.0, u, 0.5), obs=y)

    found = ngvi.integrate(model, y)
    s, m = torch.linspace(0.0, 9.0, 181).double()[1:], torch.linspace(-5.0, 6.0, 56).double()
    z = torch.linspace(-8.0, 8.0, 201).double().reshape(-1, 1)
    total = []
    for each in s:  # the integral over u, by the sum of an even grid
        f = m.reshape(-1, 1, 1) + each * z
        log_w = dist.Normal(0.0, 1.0).log_prob(z) + (z[1] - z[0]).log()
        total.append((dist.StudentT(10.0, f, 0.5).log_prob(y) + log_w).logsumexp(1).sum(-1))
    prior = dist.HalfNormal(3.0).log_prob(s)
    log_p = torch.stack(total) + dist.Normal(0.0, 3.0).log_prob(m) + prior.unsqueeze(-1)
    evidence, mean, sd = of_grid(torch.logsumexp(log_p, 1) + (m[1] - m[0]).log(), s)
    assert abs(found.log_evidence - float(evidence)) < 0.05
    assert abs(float(found.mean["s"] - mean)) < 0.05 * float(sd)
    assert abs(float(found.sd["s"] / sd) - 1.0) < 0.05


def test_scales_at_which_data_between_outliers_leave_no_proper_gaussian() -> None:
    """At s below 0.3 or so; the data of a unit see one f, integrated by the sum of a grid."""
    unit = torch.arange(8).repeat_interleave(3)
    y = torch.tensor(
        [
            1.54,
            1.97,
            1.64,
            0.04,
            0.19,
            -0.4,
            -1.34,
            -2.64,
            -1.94,
            1.05,
            0.87,
            0.39,
            -1.43,
            -1.29,
            -0.16,
            -0.75,
            -0.46,
            -1.04,
            -0.2,
            1.85,
            0.55,
            1.28,
            0.46,
            1.25,
        ],
        dtype=torch.float64,
    )

    def model(y: Tensor) -> None:
        s = pyro.sample("s", dist.HalfNormal(y.new_tensor(2.0)))
        with pyro.plate("unit", 8):
            u = pyro.sample("u", dist.Normal(y.new_tensor(0.3), 1.0))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.StudentT(4.0, u[unit], s), obs=y)

    found = ngvi.integrate(model, y)
    log_s, z = torch.linspace(-4.5, 2.0, 131).double(), torch.linspace(-7.0, 7.0, 701).double()
    s, log_w = (
        log_s.exp().reshape(-1, 1, 1),
        dist.Normal(0.0, 1.0).log_prob(z) + (z[1] - z[0]).log(),
    )
    each = dist.StudentT(4.0, 0.3 + z.unsqueeze(-1), s).log_prob(y).unflatten(-1, (8, 3)).sum(-1)
    log_p = torch.logsumexp(each + log_w.unsqueeze(-1), 1).sum(-1)
    log_p = log_p + dist.HalfNormal(2.0).log_prob(s.flatten()) + log_s
    evidence, _, _ = of_grid(log_p, log_s)
    x, w = log_s.exp(), torch.softmax(log_p, 0)
    mean = w @ x
    sd = (w @ (x - mean).square()).sqrt()
    assert abs(found.log_evidence - float(evidence)) < 0.01
    assert abs(float(found.mean["s"] - mean)) < 0.02 * float(sd)
    assert abs(float(found.sd["s"] / sd) - 1.0) < 0.02
    assert found.doubts == ()


@pytest.mark.slow
def test_priors_whose_medians_are_far_out() -> None:
    """That of Gamma(0.01, 0.01) is 10^-30: what AutoSites finds of a model there is rounding."""
    group = torch.arange(6).repeat_interleave(3)
    y = torch.tensor([0.4, -1.9, 1.1, 0.3, -0.8, 2.2]).double()[group]
    y = y + torch.tensor([0.5, -0.3, 0.9]).double().repeat(6)

    def model(y: Tensor) -> None:
        p = pyro.sample("p", dist.Gamma(y.new_tensor(0.01), 0.01))
        q = pyro.sample("q", dist.Gamma(y.new_tensor(0.01), 0.01))
        m = pyro.sample("m", dist.Normal(y.new_tensor(0.0), 10.0))
        with pyro.plate("group", 6):
            u = pyro.sample("u", dist.Normal(0.0, p.rsqrt()))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(m + u[group], q.rsqrt()), obs=y)

    found = ngvi.integrate(model, y)
    lines = torch.linspace(-8.0, 9.0, 171).double(), torch.linspace(-4.0, 5.0, 91).double()
    p, q = (x.exp().reshape(-1, 1, 1) for x in torch.cartesian_prod(*lines).unbind(-1))
    V = 100.0 + (group.unsqueeze(-1) == group) / p + torch.eye(18) / q
    log_p = dist.MultivariateNormal(torch.zeros(18).double(), V).log_prob(y)
    for x in (p, q):
        log_p = log_p + (dist.Gamma(0.01, 0.01).log_prob(x) + x.log()).reshape(-1)
    log_p = torch.logsumexp(log_p.reshape(171, 91), 1) + (lines[1][1] - lines[1][0]).log()
    evidence, _, _ = of_grid(log_p, lines[0])
    assert abs(found.log_evidence - float(evidence)) < 5e-3
    x, w = lines[0].exp(), torch.softmax(log_p, 0)
    mean = w @ x
    sd = (w @ (x - mean).square()).sqrt()
    assert abs(float(found.mean["p"] - mean)) < 0.02 * float(sd)


# --- designs, names and refusals


def test_points_without_a_value_and_a_lattice_that_does_not_end() -> None:
    zero, one = torch.zeros(1).double(), torch.eye(1).double()
    found = explore(lambda u: float(-0.5 * u.square()) if u < 3.2 else -torch.inf, zero, one)
    assert found.closed
    assert found.lost.tolist() == [[3.5]]
    assert abs(float(found.interpolated(found.lost)) + 0.5 * 3.5**2) < 1e-6
    assert abs(found.log_integral - 0.5 * float(torch.tensor(2.0 * torch.pi).log())) < 3e-3
    assert not explore(lambda u: -0.01 * float(u.abs().sqrt()), zero, one).closed


def test_points_far_below_the_others_do_not_bend_what_is_between() -> None:
    zero, one = torch.zeros(2).double(), torch.eye(2).double()
    low = 0.8 * torch.tensor([[-1, -4], [1, -5], [-4, -3], [-3, -3], [0, -4]]).double()

    def log_p(u: Tensor) -> float:
        return float(-0.5 * u.square().sum()) - 160.0 * bool(((u - low).norm(dim=-1) < 1e-6).any())

    found, wanted = explore(log_p, zero, one), float(torch.tensor(2.0 * torch.pi).log())
    assert abs(found.log_integral - wanted) < 0.03
    assert abs(found.log_sum - wanted) < 3e-3
    # next to the mode there is no saying what is between
    low = 0.8 * torch.tensor([[1, 0], [0, 1]]).double()
    at: Any = SimpleNamespace(where=lambda u: f"u = {u}", unsettled=0, keep_their_prior=list)
    assert not _doubts(at, found, True)
    assert "is rough: interpolated" in _doubts(at, explore(log_p, zero, one), True)[0]


@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.float64, marks=pytest.mark.slow)]
)
def test_a_prior_that_reaches_zero_is_refused_by_name(dtype: torch.dtype) -> None:
    def model(y: Tensor, se: Tensor) -> None:
        tau = pyro.sample("tau", dist.Gamma(y.new_tensor(0.01), 0.01))
        with pyro.plate("school", len(y)):
            effect = pyro.sample("effect", dist.Normal(y.new_tensor(0.0), tau))
            pyro.sample("y", dist.Normal(effect, se), obs=y)

    with pytest.raises(ValueError, match=r"tau.*prior") as caught:
        ngvi.integrate(model, Y.to(dtype), SE.to(dtype))
    assert len(str(caught.value)) <= 240


def test_a_lattice_standardises_itself() -> None:
    # a Gaussian of sd 5 from a start and a scale that are far off
    found = explore(
        lambda u: float(-0.5 * ((u[0] - 3.0) / 5.0) ** 2),
        torch.zeros(1).double(),
        torch.eye(1).double(),
    )
    wanted = float(torch.tensor(2.0 * torch.pi * 25.0).log()) / 2.0
    assert abs(found.log_integral - wanted) < 2e-3
    z, log_w = found.fine
    w = torch.softmax(log_w, 0)
    u = found.u(z)[:, 0]
    assert abs(float(w @ u) - 3.0) < 0.01
    assert abs(float((w @ (u - 3.0).square()).sqrt()) - 5.0) < 0.03


@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_search_ends_at_the_mode_however_far_the_slopes_are_apart(count: int) -> None:
    """Gamma densities of vague and of precise precisions, INLA's prior among them; closed forms."""
    a = torch.tensor([1.0, 12.0, 3.0], dtype=torch.float64)[:count]
    b = torch.tensor([5e-5, 14.0, 0.01], dtype=torch.float64)[:count]

    def log_p(u: Tensor) -> Tensor:
        return (a * u - b * u.exp()).sum()

    def gradient_at(u: Tensor) -> tuple[float, Tensor]:
        return float(log_p(u)), a - b * u.exp()

    start = torch.tensor([8.0, 9.2, 5.0], dtype=torch.float64)[:count]
    mode, root, found_one = find_mode(gradient_at, start)
    assert found_one
    # a Newton step gains no more than 1e-3 nat
    assert ((mode - (a / b).log()).square() * a).sum() < 3e-3
    found = explore(lambda u: float(log_p(u)), mode, root)
    assert abs(found.log_integral - float((a.lgamma() - a * b.log()).sum())) < 0.02
    z, log_w = found.fine
    w, x = torch.softmax(log_w, 0), found.u(z).exp()
    mean = w @ x
    share = 0.02 if count < 3 else 0.05
    assert ((mean - a / b).abs() < share * a.sqrt() / b).all()
    sd = (w @ (x - mean).square()).sqrt()
    assert (sd / (a.sqrt() / b) - 1.0).abs().max() < share


def test_a_gaussian_hyperparameter_is_named() -> None:
    def model(y: Tensor) -> None:
        log_tau = pyro.sample("log_tau", dist.Normal(y.new_tensor(0.0), 1.0))
        with pyro.plate("data", len(y)):
            z = pyro.sample("z", dist.Normal(0.0, log_tau.exp()))
            pyro.sample("y", dist.Normal(z, 1.0), obs=y)

    with pytest.raises(ValueError, match="Name those that are"):
        ngvi.integrate(model, SERIES)
    with pytest.raises(ValueError, match="'tau' is no latent site"):
        ngvi.integrate(model, SERIES, over=["tau"])
    found = ngvi.integrate(model, SERIES, over=["log_tau"])
    u = torch.linspace(-6.0, 6.0, 4001).double()
    log_p = dist.Normal(0.0, (1.0 + (2.0 * u).exp()).sqrt().unsqueeze(-1)).log_prob(SERIES).sum(-1)
    evidence, mean, sd = of_grid(log_p + dist.Normal(0.0, 1.0).log_prob(u), u)
    assert abs(found.log_evidence - float(evidence)) < 1e-3
    assert abs(float(found.mean["log_tau"] - mean)) < 0.01 * float(sd)
    text: Any = str(found)
    assert "Integrated over 'log_tau'" in text
