"""CVI on y ~ N(f, exp(g)^2) whose log scale is small a priori: E exp(-2 g) is huge at the prior."""

import math
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI
from torch import Tensor

import pyro_ngvi as ngvi
from pyro_ngvi.sites.cvi import next_sweep, start_sweeps
from tests.exact.site_cases import gp_kernel, seeded


def design(kind: str, n: int) -> Tensor:
    """B (n, D) of f = B u and g = mean + sd B v, with u and v standard normal."""
    if kind == "gp":
        return torch.linalg.cholesky(gp_kernel(n))
    if kind == "linear":
        return torch.stack([torch.ones(n), torch.linspace(-1.0, 1.0, n)], -1)
    return torch.eye(n) if kind == "iid" else torch.ones(n, 1)


def data(n: int) -> Tensor:
    return torch.linspace(0.0, 6.0, n).sin() + torch.randn(n, generator=seeded(0))


def location_scale(B: Tensor, mean: float, sd: float, y: Tensor) -> None:
    u: Any = pyro.sample("u", dist.Normal(torch.zeros(B.shape[1]), 1.0).to_event(1))
    v: Any = pyro.sample("v", dist.Normal(torch.zeros(B.shape[1]), 1.0).to_event(1))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(B @ u, torch.exp(mean + sd * (B @ v))), obs=y)


def best_elbo(B: Tensor, mean: float, sd: float, y: Tensor) -> float:
    """Of all Gaussians, by L-BFGS: E exp(-2 g) (y - f)^2 is that under a shifted Gaussian."""
    n, d = B.shape
    loc = torch.zeros(2 * d, requires_grad=True)
    below = torch.zeros(2 * d, 2 * d, requires_grad=True)
    log_diagonal = torch.full((2 * d,), -1.0, requires_grad=True)
    A = torch.zeros(n, 2, 2 * d)
    A[:, 0, :d], A[:, 1, d:] = B, sd * B
    optim = torch.optim.LBFGS(
        [loc, below, log_diagonal], max_iter=1000, history_size=30, line_search_fn="strong_wolfe"
    )

    def loss() -> Tensor:
        root = below.tril(-1) + log_diagonal.exp().diag()
        m, half = A @ loc, A @ root
        C = half @ half.mT
        square = (y - m[:, 0] + 2.0 * C[:, 0, 1]).square() + C[:, 0, 0]
        weight = torch.exp(-2.0 * (mean + m[:, 1]) + 2.0 * C[:, 1, 1])
        log_p = -mean - m[:, 1] - 0.5 * (math.log(2.0 * math.pi) + weight * square)
        kl = 0.5 * (root.square().sum() + loc.square().sum() - 2 * d) - log_diagonal.sum()
        return kl - log_p.sum()

    def closure() -> float:
        optim.zero_grad()
        value = loss()
        value.backward()
        return float(value.detach())

    optim.step(closure)
    return -float(loss().detach())


@pytest.mark.parametrize(
    ("kind", "n", "mean", "sd"),
    [
        ("iid", 1, -1.0, 1.0),
        ("iid", 5, -1.0, 1.0),
        ("shared", 5, -1.0, 1.0),
        ("shared", 20, -3.0, 0.5),
        ("linear", 5, -0.5, 1.0),
        ("linear", 20, -2.0, 1.0),
        ("gp", 5, -1.0, 1.0),
        ("gp", 20, -0.5, 2.0),
        ("gp", 20, -2.0, 1.0),
        ("gp", 20, -3.0, 2.0),
    ],
)
def test_twenty_sweeps_reach_the_best_gaussian(kind, n, mean, sd):
    B, y = design(kind, n), data(n)
    guide = ngvi.AutoSites(location_scale)
    svi: Any = SVI(location_scale, guide, ngvi.CVI(guide), ngvi.SitesELBO())
    losses = [float(svi.step(B, mean, sd, y)) for _ in range(21)]
    assert -losses[-1] == pytest.approx(best_elbo(B, mean, sd, y), abs=0.03)


def test_a_bound_of_minus_infinity_is_a_fall():
    """Its roundings are as large as it is, and would excuse any."""
    sites = {"linear_y": torch.ones(2, 1), "precision_y": torch.ones(2, 1, 1)}
    prints = {"y": torch.ones(2, 2)}
    memory = start_sweeps(sites) | {"elbo": torch.tensor(-5.0), "print": prints}
    pairs = {"y": (torch.ones(2, 1), torch.ones(2, 1, 1))}
    exact, elbo = {"y": torch.zeros(2, dtype=torch.bool)}, torch.tensor(-torch.inf)
    sweep = next_sweep(memory, pairs, exact, pairs, elbo, -elbo, 1.0, prints)
    assert sweep.back


@pytest.mark.parametrize("scale", [1e3, 1e5])
def test_data_in_other_units_in_float32(scale: float) -> None:
    """The variance of f is 10^8 times that of g and more, whose own is not rounding of it."""
    y = scale * torch.randn(12, generator=seeded(1), dtype=torch.float64)

    def model(y: Tensor) -> None:
        f = pyro.sample("f", dist.Normal(y.new_tensor(0.0), 3.0 * scale))
        g = pyro.sample("g", dist.Normal(y.new_tensor(math.log(scale)), 1.0))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(f, g.exp()), obs=y)

    figures = []
    for dtype in (torch.float64, torch.float32):
        values = y.to(dtype)
        guide = ngvi.AutoSites(model)
        svi = SVI(model, guide, ngvi.CVI(guide), ngvi.SitesELBO())
        for _ in range(40):
            svi.step(values)
        found = guide.marginals()
        sds = [float(guide.predict()["g"][1].sqrt()), float(found.sd["g"])]
        elbo = -ngvi.SitesELBO().loss(model, guide, values)
        figures.append(torch.tensor([elbo, found.log_evidence, guide.loo().elpd, *sds]).double())
    assert (figures[0] - figures[1]).abs().max() < 2e-3
