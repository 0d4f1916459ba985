"""Data that see the same predictors, or nearly: evidence and marginals against dense quadrature."""

from __future__ import annotations

from math import factorial
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

from pyro_ngvi import SitesELBO
from pyro_ngvi.linalg.spectral import square_root
from pyro_ngvi.sites.corrections import DEGREE, _averages, _pairs
from pyro_ngvi.sites.expectation import quadrature_points
from pyro_ngvi.sites.joint import correlations, covariances, inverse_root, shared_of
from tests.exact.site_quadrature import (
    LINE,
    PAIR,
    by_quadrature,
    fitted,
    gaussian_variation,
    variation,
)

#: of five data of a group each
OUTCOMES = {
    "bernoulli": [[1, 1, 1, 1, 1], [1, 1, 0, 1, 1], [0, 0, 0, 1, 0], [0, 0, 0, 0, 0]],
    "poisson": [[0, 0, 0, 0, 0], [1, 0, 0, 0, 1], [3, 2, 5, 1, 0], [0, 0, 1, 0, 0]],
}


def likelihood(kind: str, f: Tensor) -> Any:
    return dist.Bernoulli(logits=f) if kind == "bernoulli" else dist.Poisson(f.exp())


@pytest.mark.parametrize("kind", OUTCOMES)
def test_an_effect_of_every_group(kind: str) -> None:
    rows = torch.tensor(OUTCOMES[kind], dtype=torch.float64)
    group = torch.arange(4).repeat_interleave(5)

    def model(y: Tensor) -> None:
        with pyro.plate("groups", 4):
            u = pyro.sample("u", dist.Normal(y.new_tensor(0.0), 2.5))
        with pyro.plate("data", 20):
            pyro.sample("y", likelihood(kind, u[group]), obs=y)

    guide = fitted(model, rows.flatten(), sweeps=40)
    found = guide.marginals()
    log_p = dist.Normal(0.0, 2.5).log_prob(LINE).unsqueeze(-1)
    log_p = log_p + likelihood(kind, LINE.reshape(-1, 1, 1)).log_prob(rows).sum(-1)
    evidence = torch.logsumexp(log_p, 0) + (LINE[1] - LINE[0]).log()
    truth = (log_p - evidence).exp()
    assert abs(found.log_evidence - float(evidence.sum())) < 1e-5
    (mean, variance), (x, p) = guide.predict()["u"], found.density("u")
    assert max(gaussian_variation(truth[:, i], mean[i], variance[i]) for i in range(4)) > 0.05
    assert max(variation(truth[:, i], x[:, i], p[:, i]) for i in range(4)) < 2e-4


@pytest.mark.parametrize("slope", [0.0, 1e-3])
def test_rows_that_are_equal_or_nearly(slope: float) -> None:
    y = torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0], dtype=torch.float64)
    A = torch.stack([torch.ones_like(y), slope * torch.linspace(-1.0, 1.0, 5).double()], -1)

    def model(y: Tensor) -> None:
        z = pyro.sample("z", dist.Normal(y.new_zeros(2), 1.6).to_event(1))
        with pyro.plate("data", 5):
            pyro.sample("y", dist.Bernoulli(logits=A @ z), obs=y)

    found = fitted(model, y).marginals()
    log_p = dist.Normal(0.0, 1.6).log_prob(PAIR).sum(-1)
    for row, value in zip(A, y, strict=True):
        log_p = log_p + dist.Bernoulli(logits=PAIR @ row).log_prob(value)
    truth, evidence = by_quadrature(log_p)
    assert abs(found.log_evidence - evidence) < 1e-5
    x, p = found.density("z")
    assert max(variation(truth[i], x[:, i], p[:, i]) for i in (0, 1)) < 2e-4


def test_a_binomial_is_its_trials() -> None:
    trials, hits = torch.tensor([5.0, 3.0, 4.0]).double(), torch.tensor([5.0, 1.0, 0.0]).double()
    group = torch.arange(3).repeat_interleave(trials.long())
    each = torch.cat([(torch.arange(n) < k).double() for n, k in ((5, 5), (3, 1), (4, 0))])

    def effects(y: Tensor) -> Tensor:
        level = pyro.sample("level", dist.Normal(y.new_tensor(0.0), 2.0))
        return level + pyro.sample("u", dist.Normal(y.new_zeros(3), 1.5).to_event(1))

    def counted(y: Tensor) -> None:
        f = effects(y)
        with pyro.plate("groups", 3):
            pyro.sample("y", dist.Binomial(trials, logits=f), obs=y)

    def one_by_one(y: Tensor) -> None:
        f = effects(y)
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Bernoulli(logits=f[group]), obs=y)

    one, other = (
        fitted(m, y, sweeps=60).marginals() for m, y in ((counted, hits), (one_by_one, each))
    )
    ways = (
        trials.add(1.0).lgamma() - hits.add(1.0).lgamma() - (trials - hits + 1.0).lgamma()
    ).sum()
    assert abs(one.log_evidence - other.log_evidence - float(ways)) < 1e-8
    for name in ("level", "u"):
        assert torch.allclose(one.mean[name], other.mean[name], rtol=0.0, atol=1e-8)
        assert torch.allclose(one.sd[name], other.sd[name], rtol=1e-8)


def test_linear_functions_of_one_number_in_several_sites() -> None:
    x = torch.tensor([0.5, 1.0, -1.5], dtype=torch.float64)
    offset = torch.tensor([0.3, -0.2, 0.1], dtype=torch.float64)
    counts, hits = torch.tensor([2.0, 0.0, 1.0]).double(), torch.tensor([1.0, 0.0]).double()

    def model(counts: Tensor, hits: Tensor) -> None:
        w = pyro.sample("w", dist.Normal(counts.new_tensor(0.0), 1.5))
        with pyro.plate("counted", 3):
            pyro.sample("n", dist.Poisson((offset + w * x).exp()), obs=counts)
        with pyro.plate("tried", 2):
            pyro.sample("y", dist.Bernoulli(logits=1.0 - w), obs=hits)

    found = fitted(model, counts, hits).marginals()
    f = LINE.unsqueeze(-1)
    log_p = dist.Normal(0.0, 1.5).log_prob(LINE)
    log_p = log_p + dist.Poisson((offset + f * x).exp()).log_prob(counts).sum(-1)
    log_p = log_p + dist.Bernoulli(logits=1.0 - f).log_prob(hits).sum(-1)
    evidence = torch.logsumexp(log_p, 0) + (LINE[1] - LINE[0]).log()
    assert abs(found.log_evidence - float(evidence)) < 1e-5
    x, p = found.density("w")
    assert variation((log_p - evidence).exp(), x, p) < 2e-4


def test_repeated_data_of_a_mean_and_a_log_scale() -> None:
    y = torch.tensor([0.3, -0.8, 1.9, 0.4], dtype=torch.float64)

    def model(y: Tensor) -> None:
        z = pyro.sample("z", dist.Normal(y.new_zeros(2), y.new_tensor([2.0, 1.0])).to_event(1))
        with pyro.plate("data", 4):
            pyro.sample("y", dist.Normal(z[0], z[1].exp()), obs=y)

    guide = fitted(model, y)
    found = guide.marginals()
    log_p = dist.Normal(0.0, 2.0).log_prob(PAIR[..., 0])
    log_p = log_p + dist.Normal(0.0, 1.0).log_prob(PAIR[..., 1])
    for value in y:
        log_p = log_p + dist.Normal(PAIR[..., 0], PAIR[..., 1].exp()).log_prob(value)
    truth, evidence = by_quadrature(log_p)
    assert evidence + SitesELBO().loss(model, guide, y) > 0.1
    assert abs(found.log_evidence - evidence) < 2e-4
    (mean, variance), (x, p) = guide.predict()["z"], found.density("z")
    assert gaussian_variation(truth[0], mean[0], variance[0]) > 0.05
    assert max(variation(truth[i], x[:, i], p[:, i]) for i in (0, 1)) < 2e-3
    assert found.doubts == ()


# --- pairs of data with several entries


def test_data_of_two_entries_that_move_together() -> None:
    """The mean of each depends on another linear function of two numbers, and the log scale on one."""
    y = torch.tensor([0.3, -0.8, 1.9, 0.4, 0.6, -0.5, 2.2, 0.7], dtype=torch.float64)
    inputs, sds = torch.linspace(-1.0, 1.0, 8).double(), torch.tensor([2.0, 1.0, 1.0]).double()

    def model(y: Tensor) -> None:
        z = pyro.sample("z", dist.Normal(y.new_zeros(3), sds).to_event(1))
        with pyro.plate("data", 8):
            pyro.sample("y", dist.Normal(z[0] + z[1] * inputs, z[2].exp()), obs=y)

    guide = fitted(model, y)
    found = guide.marginals()
    # the log scale by a grid, the rest in closed form
    A = torch.stack([torch.ones_like(inputs), inputs], -1)
    K = A @ sds[:2].square().diag() @ A.mT
    S = K + (2.0 * LINE).exp().reshape(-1, 1, 1) * torch.eye(8)
    log_p = dist.MultivariateNormal(torch.zeros_like(y), S).log_prob(y)
    log_p = log_p + dist.Normal(0.0, 1.0).log_prob(LINE)
    evidence = torch.logsumexp(log_p, 0) + (LINE[1] - LINE[0]).log()
    elbo = -SitesELBO().loss(model, guide, y)
    assert abs(found.log_evidence - float(evidence)) < 0.15 * float(evidence - elbo)
    truth = (log_p - evidence).exp()
    (mean, variance), (x, p) = guide.predict()["z"], found.density("z")
    gaussian = gaussian_variation(truth, mean[2], variance[2])
    assert variation(truth, x[:, 2], p[:, 2]) < 0.15 * gaussian
    means = A.mT @ torch.linalg.solve(S, y.expand(len(S), 8).unsqueeze(-1))
    mean = (torch.softmax(log_p, 0) @ means.squeeze(-1)) * sds[:2].square()
    assert ((found.mean["z"][:2] - mean).abs() < 2e-3 * found.sd["z"][:2]).all()


def test_data_of_one_entry_and_of_two() -> None:
    y, hits = torch.tensor([1.3, -0.9]).double(), torch.tensor([1.0, 1.0]).double()
    A = torch.tensor([[1.0, 1.5], [-1.0, 1.0]], dtype=torch.float64)

    def model(y: Tensor, hits: Tensor) -> None:
        z = pyro.sample("z", dist.Normal(y.new_zeros(2), 1.0).to_event(1))
        with pyro.plate("measured", 2):
            pyro.sample("y", dist.Normal(z[0], z[1].exp()), obs=y)
        with pyro.plate("tried", 2):
            pyro.sample("hit", dist.Bernoulli(logits=A @ z), obs=hits)

    guide = fitted(model, y, hits)
    found = guide.marginals()
    log_p = dist.Normal(0.0, 1.0).log_prob(PAIR).sum(-1)
    for value in y:
        log_p = log_p + dist.Normal(PAIR[..., 0], PAIR[..., 1].exp()).log_prob(value)
    truth, evidence = by_quadrature(
        log_p + dist.Bernoulli(logits=PAIR @ A.mT).log_prob(hits).sum(-1)
    )
    elbo = -SitesELBO().loss(model, guide, y, hits)
    assert abs(found.log_evidence - evidence) < 0.1 * (evidence - elbo)
    (mean, variance), (x, p) = guide.predict()["z"], found.density("z")
    gaussian = max(gaussian_variation(truth[i], mean[i], variance[i]) for i in (0, 1))
    assert max(variation(truth[i], x[:, i], p[:, i]) for i in (0, 1)) < 0.1 * gaussian


def test_pairs_of_exponentials_of_linear_functions() -> None:
    """E r_i r_j = E r_i E r_j exp(b_i' cov(f_i, f_j) b_j), of which the series of exp is known."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    counts = {1: 3, 2: 2, 3: 2}
    halves = {k: 0.4 * normal(7, n, k) for k, n in counts.items()}
    slopes = {k: 0.3 * normal(n, k) for k, n in counts.items()}
    K, root, a = covariances(halves), {}, {}
    for k, half in halves.items():
        points = quadrature_points(k, 20, torch.zeros((), dtype=torch.float64))
        root[k] = square_root(torch.einsum("mni,mnj->nij", half, half))
        f = torch.einsum("nij,qj->qni", root[k], points.x)
        log_r, none = (f * slopes[k]).sum(-1), torch.zeros(counts[k], dtype=torch.bool)
        log_mean, a[k] = _averages(log_r, points, none)
        size = torch.einsum("nij,ni->nj", root[k], slopes[k]).square().sum(-1)
        assert torch.allclose(log_mean, 0.5 * size, rtol=1e-12)
    found = _pairs(a, correlations(K, root))
    tied = torch.cat([torch.einsum("mni,ni->mn", halves[k], slopes[k]) for k in counts], -1)
    x = (tied.mT @ tied).fill_diagonal_(0.0)
    wanted = sum((x**degree / factorial(degree)).sum() for degree in range(1, DEGREE + 1)) / 2.0
    assert torch.allclose(found, wanted / (1.0 + wanted**2) ** 0.5, rtol=1e-9)


def test_entries_of_different_scale_in_float32() -> None:
    """The sd of a mean may be 10^4 times that of a log scale, which is not rounding of the mean."""
    white, scale = torch.eye(4, dtype=torch.float32), torch.tensor([1e4, 1.0], dtype=torch.float32)
    one, mixing = white[:2, :2], torch.tensor([[1.0, 0.6], [0.0, 0.8]], dtype=torch.float32)
    whole, other = (white[:, i] @ mixing * scale for i in ([0, 1], [0, 2]))
    half = torch.stack([whole + 0.5 * other, whole, 2.0 * whole], 1)
    C = torch.einsum("mni,mnj->nij", half, half)
    root = square_root(C)
    assert torch.allclose(inverse_root(root) @ root, one.expand(3, 2, 2), atol=1e-5)
    size = C.diagonal(dim1=-2, dim2=-1).sqrt()
    error = (root @ root.mT - C) / (size.unsqueeze(-1) * size.unsqueeze(-2))
    assert error.abs().max() < 1e-5
    owner, slope = shared_of(2, {"y": (torch.zeros(3, 2), half)}).data["y"]
    assert owner.tolist() == [0, 1, 1]
    assert torch.allclose(slope[2] * scale, 2.0 * one * scale, rtol=1e-5, atol=1e-2)


def test_what_tells_what() -> None:
    """Entries of rank one and constants are told by what has all of them, and not the other way."""
    white = torch.eye(4, dtype=torch.float64)
    whole, other = white[:, :2], white[:, 1:3]
    line = whole @ torch.tensor([[1.0, -2.0], [0.5, -1.0]], dtype=torch.float64)
    f = torch.stack([whole, line, 3.0 * whole, other, torch.zeros_like(whole)], 1)
    found = shared_of(2, {"y": (torch.zeros(5, 2), f)})
    owner, slope = found.data["y"]
    assert owner.tolist() == [0, 0, 0, 1, 0]
    told = torch.einsum("nij,mnj->mni", slope, found.half[:, owner])
    assert torch.allclose(told, f, atol=1e-12)
