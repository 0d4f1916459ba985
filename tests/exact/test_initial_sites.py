"""The first site of a datum: the one that it would have alone, under a prior narrower than 1."""

import pytest
import torch
from torch import Tensor

from pyro_ngvi.linalg.products import matvec
from pyro_ngvi.sites.expectation import _Newton, _Place, first_targets, quadrature_points
from pyro_ngvi.sites.loss import site_targets


def first_sites(log_likelihood, mean: Tensor, covariance: Tensor) -> tuple[Tensor, Tensor]:
    """nu (n, k) and Lambda (n, k, k) of every datum, from a prior for each."""
    k = mean.shape[-1]
    points = quadrature_points(k, {1: 32, 2: 14}[k], mean)
    found = first_targets(log_likelihood, {"y": (mean, covariance)}, {"y": points})["y"]
    return site_targets(found.gradient, found.hessian, mean)


def alone(mean: Tensor, covariance: Tensor, nu: Tensor, Lambda: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and covariance of prior times site, datum by datum."""
    precision = torch.linalg.inv(covariance)
    V = torch.linalg.inv(precision + Lambda)
    return matvec(V, matvec(precision, mean) + nu), V


def test_counts_have_the_sites_of_their_own_best_gaussians() -> None:
    """E[y f - exp f] = y a - exp(a + v / 2): at the best N(a, v) its slopes are those of the KL."""
    y = torch.tensor([0.0, 1.0, 5.0, 40.0, 1000.0])
    mean = torch.tensor([-1.0, 0.5, 0.0, -2.0, 1.0])[:, None]
    covariance = torch.tensor([0.9, 0.5, 0.1, 0.9, 0.9])[:, None, None]
    nu, Lambda = first_sites(
        lambda f: {"y": y * f["y"][..., 0] - f["y"][..., 0].exp()}, mean, covariance
    )
    a, V = (x.flatten() for x in alone(mean, covariance, nu, Lambda))
    rate = (a + 0.5 * V).exp()
    # the rounds end with a step below 0.2 of the last one's error, and are of second order
    torch.testing.assert_close(Lambda.flatten(), rate, rtol=0.1, atol=0)
    pull = (y - rate) - (a - mean.flatten()) / covariance.flatten()
    assert float((pull * V).abs().max()) < 0.05  # the step that would be left


def test_quadratic_terms_are_their_own_sites() -> None:
    """log N(y; f, s^2) in two dimensions, whatever the prior: nu = y / s^2 and Lambda = 1 / s^2."""
    g = torch.Generator().manual_seed(0)
    n = 4
    y, root = torch.randn(n, 2, generator=g), torch.randn(n, 2, 2, generator=g)
    noise = root @ root.mT + 0.3 * torch.eye(2)
    P = torch.linalg.inv(noise)
    mean, other = torch.randn(n, 2, generator=g), torch.randn(n, 2, 2, generator=g)

    def log_likelihood(f):
        x = y - f["y"]
        return {"y": -0.5 * torch.einsum("qni,nij,qnj->qn", x, P, x)}

    nu, Lambda = first_sites(log_likelihood, mean, other @ other.mT + 0.1 * torch.eye(2))
    torch.testing.assert_close(Lambda, P)
    torch.testing.assert_close(nu, matvec(P, y))


def test_the_distance_from_the_prior_is_a_kl() -> None:
    """KL(N(m + R x, R W W' R') || N(m, R R')), but for the constant k / 2, for one W or another."""
    g = torch.Generator().manual_seed(0)
    n, k = 3, 2
    m, x = torch.randn(n, k, generator=g), torch.randn(n, k, generator=g)
    R = torch.randn(n, k, k, generator=g).tril() + 2.0 * torch.eye(k)
    W = torch.randn(n, k, k, generator=g) + 2.0 * torch.eye(k)
    q = torch.distributions.MultivariateNormal(m + matvec(R, x), R @ W @ W.mT @ R.mT)
    p = torch.distributions.MultivariateNormal(m, R @ R.mT)
    place = _Place(x, W, torch.linalg.slogdet(W)[1])
    kl = torch.distributions.kl_divergence(q, p)
    torch.testing.assert_close(place.kl - 0.5 * k, kl)


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_the_spread_moves_along_the_geodesic(share: float) -> None:
    """V^1/2 (V^-1/2 V_new V^-1/2)^t V^1/2, where r are the precisions of V_new in units of V^-1."""
    g = torch.Generator().manual_seed(0)
    n, k = 3, 2
    W = torch.randn(n, k, k, generator=g) + 2.0 * torch.eye(k)
    r = torch.tensor([4.0, 0.5]).expand(n, k)
    log_det = torch.linalg.slogdet(W)[1]
    at = _Place(torch.zeros(n, k), W, log_det)
    moved = _Newton(torch.ones(n, k), W, r).moved(at, torch.full((n,), share))
    torch.testing.assert_close(moved.log_det, torch.linalg.slogdet(moved.W)[1])
    wanted = W @ torch.diag_embed(r**-share) @ W.mT
    torch.testing.assert_close(moved.W @ moved.W.mT, wanted)
    torch.testing.assert_close(moved.x, torch.full((n, k), share))
