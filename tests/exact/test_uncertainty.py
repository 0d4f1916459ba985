"""Covariance of averaged parameters where Hessian and noise are known, and its use through AIFVB."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoNormal

import pyro_ngvi as ngvi
from pyro_ngvi.families.vectors import pack
from pyro_ngvi.optim.aifvb import measure_covariance
from pyro_ngvi.optim.state import flat

H = torch.tensor([[2.0, 0.5, 0.0], [0.5, 1.0, 0.2], [0.0, 0.2, 3.0]], dtype=torch.float64)
L = torch.tensor([[1.0, 0.0, 0.0], [0.3, 2.0, 0.0], [-0.5, 0.1, 0.5]], dtype=torch.float64)


def quadratic(hessian=H):
    leaves = {"a": torch.tensor([1.0, -2.0]), "b": torch.tensor(0.5)}
    return leaves, lambda: hessian @ pack(leaves) + L @ torch.randn(3)


def test_sandwich_of_known_matrices():
    torch.manual_seed(0)
    leaves, gradient = quadratic()
    before = {name: v.clone() for name, v in leaves.items()}
    n, weight = 20_000, torch.tensor(0.01)
    scale = torch.tensor([0.5, 1.0, 2.0])  # units change nothing
    covariance = measure_covariance(gradient, leaves, scale, weight, n, 2)
    inverse = torch.linalg.inv(H)
    expected = weight * inverse @ L @ L.mT @ inverse
    # a sample covariance of n draws: entries have standard error sqrt((S_ii S_jj + S_ij^2) / n)
    d = expected.diagonal()
    error = ((d[:, None] * d + expected.square()) / n).sqrt()
    assert ((covariance.matrix - expected).abs() < 5.0 * error).all()
    assert all(torch.equal(leaves[name], before[name]) for name in leaves)
    assert covariance.stddev["b"].shape == ()
    torch.testing.assert_close(covariance.stddev["a"], covariance.matrix.diagonal()[:2].sqrt())


def test_flat_directions_are_left_out():
    torch.manual_seed(0)
    flat = torch.diag(torch.tensor([2.0, 1.0, 0.0]))
    leaves, gradient = quadratic(flat)
    covariance = measure_covariance(gradient, leaves, torch.ones(3), torch.tensor(1.0), 500, 1)
    assert covariance.matrix[2].abs().max() < 1e-12
    assert (covariance.matrix.diagonal()[:2] > 0.1).all()


def test_no_covariance_away_from_a_minimum():
    leaves, gradient = quadratic(torch.diag(torch.tensor([2.0, -1.0, 1.0])))
    with pytest.raises(ValueError, match="has not converged"):
        measure_covariance(gradient, leaves, torch.ones(3), torch.tensor(1.0), 50, 1)


def model(y):
    mu = pyro.sample("mu", dist.Normal(0.0, 3.0))
    tau = pyro.sample("tau", dist.Gamma(2.0, 1.0))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(mu, tau.rsqrt()), obs=y)


@pytest.mark.parametrize(
    "make", [AutoNormal, lambda m: ngvi.AutoMeanFieldNormal(m, sticking_the_landing=False)]
)
def test_through_the_optimizer(make):
    pyro.set_rng_seed(0)
    y = torch.tensor([1.0, 2.0, 2.5, 0.5, 1.5])
    guide = make(model)
    optim = ngvi.AIFVB(guide)
    elbo = Trace_ELBO(4, vectorize_particles=True, max_plate_nesting=1)
    svi = SVI(model, guide, optim, elbo)
    with pytest.raises(RuntimeError, match="before the first step"):
        optim.asymptotic_covariance(svi, y)
    for _ in range(100):
        svi.step(y)
    held = {name: p.detach().clone() for name, p in guide.named_parameters()}
    state = optim.get_state()
    covariance = optim.asymptotic_covariance(svi, y, num_gradients=64, num_hessians=8)
    # neither the guide nor the optimizer have moved
    assert all(torch.equal(p, held[name]) for name, p in guide.named_parameters())
    assert all(p.grad is None for p in guide.parameters())
    for path, saved in optim.get_state()["natural"].items():
        for name, value in flat(saved).items():
            assert torch.equal(value, flat(state["natural"][path])[name]), name
    assert covariance.matrix.shape == (4, 4)
    assert all((v > 0).all() for v in covariance.stddev.values())
    # about a quarter of 100 steps of 4 particles: far below one posterior sd, and not nothing
    assert 1e-3 < max(v.max() for v in covariance.stddev.values()) < 0.5


def of_minibatch(y, drawn=None):
    mu = pyro.sample("mu", dist.Normal(0.0, 10.0))
    with pyro.plate("data", 8, subsample_size=drawn or len(y)) as index:
        pyro.sample("y", dist.Normal(mu, 1.0), obs=y[index] if drawn else y)


def test_the_noise_of_minibatches_is_measured():
    """One datum at a time: at the optimum draws have no noise of their own, and the gradients of the
    location are the prior's and 8 (mu - y_b).  256 gradients know their sd to 4 %."""
    pyro.set_rng_seed(0)
    y = torch.tensor([1.0, 2.0, 2.5, 0.5, 1.5, 4.0, -1.0, 0.0])
    guide = AutoNormal(of_minibatch)
    optim = ngvi.AIFVB(guide)
    svi = SVI(of_minibatch, guide, optim, Trace_ELBO(4, vectorize_particles=True))
    for i in range(200):
        svi.step(y[i % 8, None])
    weight = next(iter(optim._states.values()))["average_square"]
    expected = (weight * 64.0 * y.var(correction=0)).sqrt() / 8.01
    for batches, drawn in ((y.split(1), None), ([y], 1)):
        found = optim.asymptotic_covariance(svi, batches=batches, drawn=drawn)
        assert found.stddev["AutoNormal.locs.mu"] == pytest.approx(float(expected), rel=0.15)
    for args, drawn in ((y[:1], None), (y, 1)):
        with pytest.raises(ValueError, match=r"The plate 'data' takes 1 of 8 .* Pass batches="):
            optim.asymptotic_covariance(svi, args, drawn=drawn)
    optim.asymptotic_covariance(svi, y, num_gradients=8, num_hessians=1)
    with pytest.raises(ValueError, match="a step or batches=, not both"):
        optim.asymptotic_covariance(svi, y, batches=y.split(1))
    for batches in ([], iter(y.split(1))):
        with pytest.raises(ValueError, match="batches= is empty, or was gone through"):
            optim.asymptotic_covariance(svi, batches=batches)
