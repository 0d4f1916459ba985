"""Marginals by slices, and verdicts on the globals of a hierarchy, against closed forms and a grid."""

import math
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI
from pyro.infer.autoguide import AutoDelta
from pyro.optim import Adam  # pyright: ignore[reportAttributeAccessIssue]
from torch import Tensor

import pyro_ngvi as ngvi
from pyro_ngvi.diagnostics.defence import SHARE, Place, defended
from pyro_ngvi.diagnostics.slices import Pieces, Quantiles, copula
from pyro_ngvi.runtime.model_density import NaNWhereSingular

POINTS = torch.tensor([-5.0, -2.0, -0.5, 0.0, 1.0, 2.5, 6.0]).double()
#: heights with slopes of both signs, one flat piece, and a second mode
HEIGHTS = torch.tensor(
    [[-9.0, -4.0, -1.0, 0.0, 0.0, -2.0, -30.0], [-6.0, -1.0, -2.0, -4.0, -3.0, -0.5, -3.0]]
).double()


def test_masses_quantiles_and_densities_of_pieces_belong_together() -> None:
    pieces = Pieces(POINTS, HEIGHTS)
    x = torch.linspace(-45.0, 45.0, 900_001).double()[:, None].expand(-1, 2)
    f = pieces.log_prob(x).exp()
    total = torch.cumulative_trapezoid(f, x, dim=0)
    # the trapezoidal rule errs by h^2 f'' / 12, h = 1e-4
    assert total[-1] == pytest.approx([1.0, 1.0], abs=1e-6)
    assert (pieces.cdf(x[1:]) - total).abs().max() < 1e-6
    p = torch.logspace(-250.0, math.log10(0.5), 2001).double()[:, None].expand(-1, 2)
    assert torch.allclose(pieces.cdf(pieces.quantile(p)), p, rtol=1e-9, atol=0.0)
    # the heights that were asked for, up to a constant
    at = pieces.log_prob(POINTS[:, None].expand(-1, 2)).mT - HEIGHTS
    assert torch.allclose(at, at[:, :1].expand_as(at), atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_quantiles_rise_come_back_and_have_their_derivative(dtype: torch.dtype) -> None:
    move: Any = Quantiles(POINTS, HEIGHTS)
    z = torch.linspace(-9.0, 9.0, 181, dtype=dtype)[:, None].expand(-1, 2)
    t = move(z)
    assert t.dtype == dtype and bool((t.diff(dim=0) > 0.0).all())
    eps = torch.finfo(dtype).eps
    assert torch.allclose(move.inv(t.clone()), z, atol=1e4 * eps)
    if dtype == torch.float64:
        # at places that are in no piece's end
        z = z + 0.0137
        h = 1e-6
        slope = (move(z + h) - move(z - h)) / (2.0 * h)
        assert torch.allclose(move.log_abs_det_jacobian(z, move(z)), slope.log().sum(-1), atol=1e-4)


def test_a_defended_proposal_is_a_distribution_of_both_parts() -> None:
    mean, root = torch.tensor([1.0, -2.0]).double(), torch.tensor([[0.5, 0.0], [0.3, 0.2]]).double()
    q = dist.Normal(mean, 0.01).to_event(1)
    both = defended(q, (mean, root @ root.mT), SHARE)
    z = torch.linspace(-60.0, 60.0, 2401).double()
    x = mean + torch.cartesian_prod(z, z) @ root.mT
    t = both.parts[0].log_prob(x).exp()
    total = float(t.sum() * (z[1] - z[0]) ** 2 * root.det())
    # beyond 60 sds are 3e-4 of t; the spike of q is between the points of the grid
    assert total == pytest.approx(1.0, abs=2e-3)
    density = (1.0 - SHARE) * q.log_prob(x).exp() + SHARE * t
    assert torch.allclose(both.log_prob(x).exp(), density, rtol=1e-10)
    pyro.set_rng_seed(0)
    draws = both.expand([2]).sample((20_000,))
    assert draws.shape == (20_000, 2, 2) and both.log_prob(draws).shape == (20_000, 2)
    far = ((draws - mean).abs() > 0.06).any(-1).double().mean()  # six sds of q
    inside = ((both.parts[0].sample((40_000,)) - mean).abs() <= 0.06).all(-1).double().mean()
    assert float(far) == pytest.approx(SHARE * (1.0 - float(inside)), abs=0.008)  # four errors


def test_a_proposal_has_a_share_at_each_other_end() -> None:
    """As large as its part of the mass, a tenth at least; draws come from all by their shares."""
    mean, one = torch.zeros(1).double(), torch.eye(1).double()
    ends = [Place(mean + 40.0, 0.01 * one, 1.0), Place(mean - 40.0, 0.01 * one, 1e-4)]
    r = defended(dist.Normal(mean, 1.0).to_event(1), (mean, one), SHARE, ends)
    assert r.shares.tolist() == pytest.approx([0.2, 0.8 / 2.0001, 0.1, 0.7 - 0.8 / 2.0001])
    wide = defended(
        dist.Normal(mean, 1.0).to_event(1), (mean, one), 0.5, [*ends[:1], *3 * ends[1:]]
    )
    assert (wide.shares > 0.05).all() and float(wide.shares.sum()) == pytest.approx(1.0)
    x = torch.linspace(-80.0, 80.0, 64_001).double().unsqueeze(-1)
    assert float(r.log_prob(x).exp().sum() * 0.0025) == pytest.approx(1.0, abs=1e-3)
    pyro.set_rng_seed(0)
    draws = r.sample((40_000,))
    for at, share in ((40.0, 0.8 / 2.0001), (-40.0, 0.1)):  # four errors, and a t beyond 20 sds
        near = ((draws - at).abs() < 20.0).double().mean()
        assert float(near) == pytest.approx(share, abs=0.011)


def test_a_laplace_density_is_its_own_slices() -> None:
    """Straight logarithms to both sides of the mean: nothing is approximated, so weights are equal to
    those of the noise alone, and quantiles are ln(2 p)."""

    def log_p(v: Tensor) -> Tensor:
        return -((v - 1.0).abs() / torch.tensor([0.3, 2.0]).to(v)).sum(-1)

    mean = torch.ones(2).double()
    q = copula(log_p, mean, torch.tensor([0.1, 5.0]).double().diag())
    z = torch.tensor([[-3.0, 1.0], [0.5, 4.0]]).double()
    y: Any = z
    for move in q.transforms:
        y = move(y)
    ln = (2.0 * 0.5 * torch.erfc(z.abs() / 2.0**0.5)).log()
    assert torch.allclose(y, 1.0 - z.sign() * ln * torch.tensor([0.3, 2.0]).double(), atol=1e-9)


def test_importance_weights_of_skewed_tails_are_nearly_even() -> None:
    """The log of a Gamma(1.5), whose left tail is exp(1.5 x), beside a Gaussian that depends on it."""

    def log_p(v: Tensor) -> Tensor:
        x, y = v.unbind(-1)
        return 1.5 * x - x.exp() - 0.5 * (y - 0.5 * x).square() / 0.25

    a = torch.tensor(1.5).double()
    var = torch.polygamma(1, a)
    C = torch.stack([torch.stack([var, 0.5 * var]), torch.stack([0.5 * var, 0.25 + 0.25 * var])])
    # a Gaussian of two thirds of the width, as q of a skewed marginal is
    mean = torch.stack([torch.digamma(a), 0.5 * torch.digamma(a)])
    q = copula(log_p, mean, C / 2.0)
    torch.manual_seed(0)
    v = q.sample((20_000,))
    w = torch.softmax(log_p(v) - q.log_prob(v), 0)
    ess = float(1.0 / w.square().sum())
    assert ess > 0.8 * 20_000
    z = ((w @ v[:, 0]) - torch.digamma(a)) / var.sqrt() * ess**0.5
    assert abs(float(z)) < 4.0
    # the evidence, Gamma(1.5) times that of the Gaussian
    found = torch.logsumexp(log_p(v) - q.log_prob(v), 0) - math.log(20_000)
    wanted = torch.lgamma(a) + 0.5 * math.log(2.0 * math.pi * 0.25)
    assert float(found - wanted) == pytest.approx(0.0, abs=4.0 * (1.0 / ess - 5e-5) ** 0.5)


def alike(y: Tensor, index: Tensor | None = None) -> None:
    """Groups that differ by little more than their noise: the scale may be anything below."""
    s: Any = pyro.sample("s", dist.HalfNormal(y.new_ones(())))
    with pyro.plate("groups", len(y), subsample=index) as i:
        u: Any = pyro.sample("u", dist.Normal(0.0, s))
        pyro.sample("y", dist.Normal(u, 1.0), obs=y[i])


@pytest.mark.parametrize("first", [8, 3])
def test_a_verdict_sees_the_tail_of_a_log_scale(first: int) -> None:
    """Also of a guide that a minibatch of units has set up."""
    y = torch.tensor([0.9, -1.4, 0.3, 1.6, -0.8, 0.2, -1.1, 1.2]).double()
    pyro.set_rng_seed(0)
    guide = ngvi.AutoHierarchical(alike)
    guide(y, torch.arange(first))
    svi = SVI(alike, guide, ngvi.NGVB(guide), ngvi.BatchedELBO(32))
    for _ in range(40):
        svi.step(y)
    found = ngvi.diagnose(alike, guide, y, seed=1)
    # without u: y_i ~ N(0, 1 + s^2)
    x = torch.linspace(-25.0, 4.0, 20_001).double()
    s = x.exp()
    log_p = dist.HalfNormal(1.0).log_prob(s) + x
    log_p = log_p + dist.Normal(0.0, (1.0 + s**2).sqrt()[:, None]).log_prob(y).sum(-1)
    w = torch.softmax(log_p, 0)
    mean, sd = w @ x, (w @ (x - w @ x).square()).sqrt()
    layout = guide.globals.quantiles([0.158655, 0.5, 0.841345])["s"].log()  # Gaussian in log s
    q_mean, q_sd = layout[1], (layout[2] - layout[0]) / 2.0
    assert float(sd / q_sd) > 1.4  # else there is nothing to see
    moved = found.unconstrained["s"]
    assert float(moved.log_sd) == pytest.approx(
        float((sd / q_sd).log()), abs=4.0 * float(moved.log_sd_error) + 1e-3
    )
    assert float(moved.mean) == pytest.approx(
        float((mean - q_mean) / sd), abs=4.0 * float(moved.mean_error) + 1e-3
    )
    assert (
        found.integrated and found.decision == "unusable" and "'s, unconstrained'" in found.verdict
    )


@pytest.mark.parametrize("how", [torch.linalg.cholesky, torch.linalg.inv, torch.inverse])
def test_singular_matrices_do_not_take_the_others_with_them(how: Any) -> None:
    x = torch.tensor([1.0, 0.0, 4.0], requires_grad=True)

    def log_p(x: Tensor) -> Tensor:
        return (
            how(x * torch.eye(2)).sum() + torch.linalg.solve(x * torch.eye(2), torch.ones(2)).sum()
        )

    with NaNWhereSingular():
        found = torch.vmap(log_p)(x)
    assert found.isnan().tolist() == [False, True, False]
    (slope,) = torch.autograd.grad(found.sum(), x)
    for i in (0, 2):
        one = x[i].detach().requires_grad_()
        value = log_p(one)
        assert torch.allclose(value, found[i])
        assert torch.allclose(torch.autograd.grad(value, one)[0], slope[i])


def test_chains_go_on_where_one_of_them_meets_a_singular_matrix() -> None:
    """A covariance that is positive definite for x > 0 alone, where x has a half-normal density."""

    def model() -> None:
        x: Any = pyro.sample("x", dist.Normal(0.0, 1.0))
        K = torch.stack([torch.stack([x, 0.0 * x]), torch.stack([0.0 * x, x])])
        L = torch.linalg.cholesky(K)
        pyro.factor("flat", 0.0 * L.sum())

    def guide() -> None:
        pyro.sample("x", dist.HalfNormal(1.0))

    found = ngvi.diagnose(model, guide, seed=0)
    assert found.sites["x"].is_good


def test_globals_that_are_a_point_stay_one() -> None:
    y = torch.tensor([0.9, -1.4, 0.3, 1.6]).double()
    pyro.set_rng_seed(0)
    guide = ngvi.AutoHierarchical(alike, AutoDelta)
    svi = SVI(alike, guide, Adam({"lr": 0.05}), ngvi.BatchedELBO(8))
    for _ in range(20):
        svi.step(y)
    with pytest.warns(UserWarning, match="are the same point"):
        data = ngvi.to_arviz(alike, guide, y, num_samples=50, seed=0, corrected=True)
    s = data["posterior"]["s"].values
    assert float(s.max() - s.min()) == 0.0
    # given s an effect is normal: variance s^2 / (1 + s^2), to 4 standard errors of it
    z = data["posterior"]["u"].values[0] - y.numpy() * s[0, 0] ** 2 / (1.0 + s[0, 0] ** 2)
    wanted = s[0, 0] ** 2 / (1.0 + s[0, 0] ** 2)
    assert z.var() == pytest.approx(wanted, rel=4.0 * (2.0 / z.size) ** 0.5)
