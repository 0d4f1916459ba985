"""One natural-gradient step on a conjugate Gaussian model, without a seed.

The 2d sphere points as noise integrate the quadratic log density exactly, so the sampled gradient is
the exact one.
"""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO

import pyro_ngvi as ngvi
from pyro_ngvi.families import FactorNormal, FullRankNormal, MeanFieldNormal
from pyro_ngvi.families.base import Tensors
from pyro_ngvi.optim.natural_gradient import NaturalGradientRule
from pyro_ngvi.optim.schedules import Constant
from tests.cubature import sphere_points

D = 4


def target(scale: float = 1.0):
    """Precision P and mean m of a Gaussian posterior on coordinates of very different scales."""
    g = torch.Generator().manual_seed(0)
    root = torch.randn(D, D, generator=g)
    scales = torch.logspace(-scale, scale, D)
    P = (root @ root.T + torch.eye(D)) * torch.outer(scales, scales)
    return P, torch.randn(D, generator=g) / scales


def gradients(family, params: Tensors, P, m) -> Tensors:
    """Gradient of the negative ELBO with sticking-the-landing, by sphere points."""
    leaves = {k: v.clone().requires_grad_() for k, v in params.items()}
    z = family.rsample(leaves, sphere_points(family.noise_dim(params)))
    log_p = -0.5 * ((z - m) @ P * (z - m)).sum(-1)
    (family.log_prob(params, z) - log_p).mean().backward()
    return {k: v.grad for k, v in leaves.items() if v.grad is not None}


def natural_rule(family, coordinates):
    return NaturalGradientRule(
        family,
        trust_radius=float("inf"),
        noise_radius=float("inf"),
        schedule=Constant(1.0),
        coordinates=coordinates,
    )


def test_full_rank_lands_on_the_posterior_in_one_natural_step():
    family = FullRankNormal()
    P, m = target()
    params = family.init(torch.zeros(D), 30.0)  # wide: a step may not divide a precision by over 4
    rule = natural_rule(family, "natural")
    new, _, report = rule.update(params, gradients(family, params, P, m), rule.init(params))
    precision = torch.cholesky_inverse(new["scale_tril"])
    torch.testing.assert_close(precision, P, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(new["loc"], m, rtol=1e-10, atol=1e-10)
    assert bool(report.finite)


def test_mean_field_lands_on_its_optimum_in_one_natural_step():
    """The best mean-field precision is diag(P); the step gives it, and the mean of its own P."""
    family = MeanFieldNormal()
    P, m = target(0.3)
    params = family.init(m, 3.0)
    rule = natural_rule(family, "natural")
    new, _, _ = rule.update(params, gradients(family, params, P, m), rule.init(params))
    torch.testing.assert_close((-2 * new["log_scale"]).exp(), P.diagonal(), rtol=1e-10, atol=0)
    torch.testing.assert_close(new["loc"], m, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("family", [FullRankNormal(), MeanFieldNormal()], ids=["full", "mean"])
def test_local_coordinates_agree_to_first_order(family):
    """The derivative of the precision along the local step at 0 is E[H] - P(q)."""
    P, m = target(0.3)
    params = family.init(torch.ones(D), 0.5)
    h = 1e-5
    moved = {}
    for sign in (1, -1):
        gradient = family.pull(params, gradients(family, params, P, m))
        tangent = family.natural_gradient(params, gradient)
        new = family.retract(params, tangent, -sign * h, "local")
        moved[sign] = torch.linalg.inv(family.covariance(new)), new["loc"]
    slope = (moved[1][0] - moved[-1][0]) / (2 * h)
    wanted = P - torch.linalg.inv(family.covariance(params))
    if isinstance(family, MeanFieldNormal):
        wanted = torch.diag(wanted.diagonal())
    torch.testing.assert_close(slope, wanted, rtol=1e-6, atol=1e-6)
    drift = (moved[1][1] - moved[-1][1]) / (2 * h)
    torch.testing.assert_close(
        drift, -family.covariance(params) @ P @ (params["loc"] - m), rtol=1e-6, atol=1e-6
    )


FIXED_POINTS = {
    "full": FullRankNormal(),
    "mean": MeanFieldNormal(),
    "factor": FactorNormal(2, cg_iterations=40),
}


@pytest.mark.parametrize(
    "name, coordinates", [(n, c) for n, f in FIXED_POINTS.items() for c in f.coordinates]
)
def test_the_optimum_is_a_fixed_point(name, coordinates):
    family = FIXED_POINTS[name]
    P, m = target(0.3)
    params = family.init(m, 1.0)
    if "scale_tril" in params:
        params["scale_tril"] = torch.linalg.cholesky(torch.linalg.inv(P))
    elif "factor" in params:
        P = torch.linalg.inv(family.covariance(params))
    else:
        params["log_scale"] = -0.5 * P.diagonal().log()
    rule = natural_rule(family, coordinates)
    new, _, report = rule.update(params, gradients(family, params, P, m), rule.init(params))
    for key in params:
        torch.testing.assert_close(new[key], params[key], rtol=1e-9, atol=1e-9)
    assert float(report.step_norm) < 1e-9


def test_exact_gradients_make_the_noise_clock_take_full_steps():
    """Without noise the share of signal is 1: the gain goes to 1, and convergence is Newton's."""
    family = FullRankNormal()
    P, m = target()
    params = family.init(torch.zeros(D), 0.1)
    rule = NaturalGradientRule(family)
    state = rule.init(params)
    largest = 0.0
    for _ in range(60):
        params, state, report = rule.update(params, gradients(family, params, P, m), state)
        largest = max(largest, float(report.gain))
    assert largest > 0.9
    torch.testing.assert_close(
        torch.cholesky_inverse(params["scale_tril"]), P, rtol=1e-9, atol=1e-9
    )
    torch.testing.assert_close(params["loc"], m, rtol=1e-9, atol=1e-9)


def test_price_gradients_come_from_stock_elbo():
    """Through SVI: .grad of Trace_ELBO holds E[gradient] and E[Hessian] of a conjugate model."""
    P, m = target(0.3)
    L = torch.linalg.cholesky(P)

    def model():
        pyro.sample("z", dist.MultivariateNormal(m, precision_matrix=P))

    guide = ngvi.AutoFullRankNormal(model)
    guide()
    # as many draws as the sphere has points, with their noise replaced by the points, whose mean is 0
    points = ((2 * D - 1) / (2 * D)) ** 0.5 * sphere_points(D)  # centring widens them again
    original, torch.randn = torch.randn, lambda *a, **k: points.reshape(a[0])
    try:
        loss = Trace_ELBO(num_particles=2 * D, vectorize_particles=True, max_plate_nesting=0)
        svi = SVI(model, guide, ngvi.NGVB(guide), loss)
        svi.loss_and_grads(model, guide)
    finally:
        torch.randn = original
    scale = guide.scale_tril.detach()
    # STL: gradient of E[log q - log p] at q = N(loc, scale scale')
    torch.testing.assert_close(guide.loc.grad, P @ (guide.loc.detach() - m))
    whitened = scale.T @ P @ scale - torch.eye(D)
    torch.testing.assert_close((scale.T @ guide.scale_tril.grad).tril(), whitened.tril())
    assert torch.linalg.eigvalsh(L @ L.T).min() > 0
