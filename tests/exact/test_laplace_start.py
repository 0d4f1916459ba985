"""A start at a Gaussian: exact for Gaussian posteriors, the best of what was seen for others."""

from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor
from torch.distributions import kl_divergence
from torch.func import jacrev

import pyro_ngvi as ngvi
from pyro_ngvi.families import FactorPrecisionNormal
from pyro_ngvi.guides.laplace import LARGEST, best_gaussian, gradient_and_hessian, newton
from pyro_ngvi.linalg.spectral import principal_factors
from tests.contract.registry import data, exact_posterior, regression

LAPLACE = [ngvi.AutoMeanFieldNormal, ngvi.AutoFullRankNormal, ngvi.AutoFactorPrecision]


def started(kind: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    guide = kind(model, init="laplace", **kwargs)
    guide(*args)
    return guide


def test_gradient_and_hessian_are_those_of_autograd() -> None:
    def f(x: Tensor) -> Tensor:
        return (x.prod() + x[0].exp()) * x[1].cos()

    x = torch.randn(20)
    g, H = gradient_and_hessian(f, x)
    torch.testing.assert_close(g, torch.func.grad(f)(x))
    torch.testing.assert_close(H, jacrev(jacrev(f))(x), rtol=1e-5, atol=1e-6)


def test_full_rank_starts_at_a_gaussian_posterior() -> None:
    X, y = data(torch.float64)
    guide = started(ngvi.AutoFullRankNormal, regression, X, y)
    mean, precision = exact_posterior(X, y)
    q = guide.get_posterior()
    torch.testing.assert_close(q.mean.detach(), mean)
    torch.testing.assert_close(q.covariance_matrix.detach(), torch.linalg.inv(precision))
    # all points lead there, and the point start is far below
    *found, given = guide.start_elbos
    assert max(found) - min(found) < 1e-6 and given < max(found) - 1.0


def test_mean_field_starts_at_its_optimum_for_a_gaussian_posterior() -> None:
    X, y = data(torch.float64)
    guide = started(ngvi.AutoMeanFieldNormal, regression, X, y)
    mean, precision = exact_posterior(X, y)
    torch.testing.assert_close(guide.loc.detach(), mean)
    torch.testing.assert_close(guide.log_scale.detach(), -0.5 * precision.diagonal().log())


def test_principal_factors_give_a_matrix_of_their_form_back() -> None:
    g = torch.Generator().manual_seed(0)
    B = torch.randn(8, 2, generator=g, dtype=torch.float64)
    s = torch.rand(8, generator=g, dtype=torch.float64) + 0.5
    M = B @ B.mT + torch.diag(s)
    factor, rest = principal_factors(M, 2)
    torch.testing.assert_close(factor @ factor.mT + torch.diag(rest), M, rtol=1e-3, atol=1e-3)
    family = FactorPrecisionNormal(2)
    q = family.matched(torch.zeros(8, dtype=torch.float64), M)
    torch.testing.assert_close(family.covariance(q), torch.linalg.inv(M), rtol=2e-3, atol=2e-3)


def test_principal_factors_have_the_least_divergence() -> None:
    """Within 0.01 nats of what L-BFGS finds from there, for a matrix that has no such form."""
    root = torch.randn(6, 9, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    M = root @ root.mT
    B, s = principal_factors(M, 2)
    leaves = [B.contiguous().requires_grad_(), s.log().requires_grad_()]

    def kl() -> Tensor:
        fitted = leaves[0] @ leaves[0].mT + torch.diag(leaves[1].exp())
        square = torch.trace(torch.linalg.solve(fitted, M)) - len(M)
        return 0.5 * (square + torch.logdet(fitted) - torch.logdet(M))

    def closure() -> Tensor:
        loss = kl()
        for leaf, g in zip(leaves, torch.autograd.grad(loss, leaves), strict=True):
            leaf.grad = g.contiguous()
        return loss

    before = kl().item()
    optim = torch.optim.LBFGS(leaves, max_iter=200, line_search_fn="strong_wolfe")
    optim.step(closure)  # pyright: ignore[reportArgumentType]
    assert 0.0 <= before - kl().item() < 0.01 < before


def test_no_step_rises_where_plain_newton_steps_would_grow_without_end() -> None:
    """f = 10 sqrt(1 + z^2), whose Newton step goes from z to -z^3."""
    density = lambda z: -10.0 * (1.0 + z.square()).sqrt().sum(-1)  # noqa: E731
    path = torch.stack([loc for loc, _ in newton(density, torch.tensor([2.0]))])
    assert bool((density(path).diff() > 0.0).all())
    assert abs(path[-1].item()) < 0.05


@pytest.mark.parametrize("slope", [0.0, 1.0])
def test_a_density_without_curvature_ends_the_search(slope: float) -> None:
    path = list(newton(lambda z: slope * z.sum(-1), torch.zeros(2)))
    assert all(bool(P.isfinite().all()) for _, P in path)


def test_elbos_are_in_nats() -> None:
    """Of a density that integrates to one: zero, and minus KL of the point start."""
    q = dist.Normal(torch.tensor([1.0, -1.0]), torch.tensor([0.5, 2.0])).to_event(1)
    found = best_gaussian(q.log_prob, torch.tensor([1.0, -1.0]), 0.1)
    assert found.better and max(found.elbos) == pytest.approx(0.0, abs=1e-4)
    point = dist.Normal(torch.tensor([1.0, -1.0]), 0.1).to_event(1)
    assert found.elbos[-1] == pytest.approx(-float(kl_divergence(point, q)), abs=0.05)


def test_it_leaves_a_saddle() -> None:
    """Two modes at +-2 and a saddle between them, at which gradients are zero."""

    def density(z: Tensor) -> Tensor:
        return -(z.square() - 4.0).square().sum(-1)

    found = best_gaussian(density, torch.zeros(1), 0.1)
    # an iterate near one of them has the largest ELBO, since the modes are skewed
    assert float(found.loc.abs()) == pytest.approx(2.0, abs=0.05)
    torch.testing.assert_close(found.precision, 12.0 * found.loc.square().reshape(1, 1) - 16.0)


def test_the_largest_elbo_wins_where_the_mode_is_no_place_to_be() -> None:
    """A funnel: its density rises without end where its sd goes to zero."""

    def density(z: Tensor) -> Tensor:
        v, x = z[:, 0], z[:, 1:]
        return -v.square() / 18.0 - 0.5 * x.square().sum(-1) * (-v).exp() - 2.5 * v

    def elbo(loc: Tensor, precision: Tensor) -> float:
        q = dist.MultivariateNormal(loc, torch.linalg.inv(precision))
        z = q.sample((20_000,))
        return float((density(z) - q.log_prob(z)).mean())

    torch.manual_seed(0)
    start = torch.zeros(6, dtype=torch.float64)
    found = best_gaussian(density, start, 0.1)
    *_, last = newton(density, start)
    # log Z is 2.5 log(2 pi) + log(3 sqrt(2 pi)) = 6.6
    assert elbo(*last) < 0.0 < 1.0 < elbo(found.loc, found.precision) < 6.6


def test_a_point_that_throws_is_one_point_less() -> None:
    def density(z: Tensor) -> Tensor:
        if bool((z.detach().abs() > 1.5).any()):
            raise RuntimeError("linalg.cholesky: the input is not positive-definite")
        return -4.0 * z.square().sum(-1)

    found = best_gaussian(density, torch.zeros(3), 0.1)
    torch.testing.assert_close(found.precision, 8.0 * torch.eye(3))
    assert found.elbos[0] > -torch.inf in found.elbos


@pytest.mark.parametrize("kind", LAPLACE)
def test_random_numbers_are_left_alone_and_the_start_is_the_same_twice(kind: Any) -> None:
    X, y = data(torch.float64)
    torch.manual_seed(3)
    expected = torch.randn(3)
    torch.manual_seed(3)
    guides = []
    for _ in range(2):
        guide = kind(regression, init="laplace")
        guide._setup_prototype(X, y)  # its first call, without the draw of z that follows
        guides.append(guide)
    assert torch.equal(torch.randn(3), expected)
    for name, p in guides[0].natural_params().items():
        assert torch.equal(p, guides[1].natural_params()[name]), name


def test_a_minibatch_is_held_during_the_search() -> None:
    def model(x: Tensor) -> None:
        mean: Any = pyro.sample("mean", dist.Normal(0.0, 10.0))
        with pyro.plate("data", len(x), subsample_size=5) as index:
            pyro.sample("x", dist.Normal(mean, 1.0), obs=x[index])

    torch.manual_seed(0)
    guide = started(ngvi.AutoFullRankNormal, model, 3.0 + torch.randn(20))
    assert guide.scale_tril.item() == pytest.approx((20.0 + 0.01) ** -0.5, rel=1e-3)


def test_what_it_refuses() -> None:
    def wide() -> None:
        pyro.sample("z", dist.Normal(torch.zeros(LARGEST + 1), 1.0).to_event(1))

    with pytest.raises(
        ValueError, match='AutoMeanFieldNormal: init="laplace" takes Hessians of 501'
    ):
        started(ngvi.AutoMeanFieldNormal, wide)
    with pytest.raises(ValueError, match="init must be None or \"map\", got 'laplace'"):
        ngvi.AutoFactorNormal(wide, init="laplace")


def test_a_search_that_finds_nothing_says_so() -> None:
    def model() -> None:
        z: Any = pyro.sample("z", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        # its value is zero, and its gradient is not finite
        pyro.factor("nan", (z - z.detach()).square().sum().sqrt() * 0.0)

    with pytest.warns(UserWarning, match="found no Gaussian with a larger ELBO"):
        guide = started(ngvi.AutoFullRankNormal, model)
    torch.testing.assert_close(guide.scale_tril.detach(), 0.1 * torch.eye(2))
    assert guide.start_elbos[:-1] == (-torch.inf,) * 4
