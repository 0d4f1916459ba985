"""Steady draws: the right distribution, unbiased gradients, none at the optimum."""

from functools import cache
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, ReweightedWakeSleep, Trace_ELBO, TraceMeanField_ELBO
from pyro.infer.autoguide import AutoMultivariateNormal, AutoNormal
from pyro.poutine.runtime import _PYRO_STACK
from torch import Tensor

import pyro_ngvi as ngvi
from pyro_ngvi.distributions.steady import Steady, can_be_steady
from tests.contract.same_noise import gradients
from tests.covering import covering

MEAN = torch.tensor([1.0, -2.0], dtype=torch.float64)
FACTOR = torch.tensor([[1.0, 0.0], [0.7, 0.5]], dtype=torch.float64)


def normal() -> Any:
    return dist.MultivariateNormal(MEAN, scale_tril=FACTOR)


def test_draws_are_centred_and_each_is_one_of_q() -> None:
    torch.manual_seed(0)
    # 20,000 distributions, each with three draws whose mean is its own
    z = Steady(normal().expand((20_000,))).rsample((3,)).transpose(0, 1)
    torch.testing.assert_close(z.mean(1), MEAN.expand(len(z), 2))
    noise = (z[:, 1] - MEAN) @ torch.linalg.inv(FACTOR).mT
    # second and fourth moments of N(0, I): standard errors 0.01 and 0.07
    torch.testing.assert_close(torch.cov(noise.mT), torch.eye(2), rtol=0, atol=0.05)
    torch.testing.assert_close(noise.pow(4).mean(0), torch.full((2,), 3.0), rtol=0, atol=0.35)


@pytest.mark.parametrize("S", [1, 4])
def test_particles_of_a_plate_are_made_together(S: int) -> None:
    plain = dist.Normal(torch.tensor([3.0, 5.0]), 1.0)
    expanded = Steady(plain).expand((S, 2))
    z = expanded.rsample()
    assert z.shape == (S, 2) and expanded.batch_shape == (S, 2)
    centred = (z.mean(0) - plain.mean).abs().max() < 1e-6
    assert bool(centred) is (S > 1)
    # its own batch dimension is no plate of particles
    assert (Steady(plain).rsample() - plain.mean).abs().min() > 1e-6


def test_masked_draws_are_centred_too() -> None:
    masked = dist.Normal(torch.tensor([3.0, 5.0]), 1.0).mask(torch.tensor([True, False]))
    torch.testing.assert_close(Steady(masked).rsample((4,)).mean(0), masked.mean)


def test_the_density_has_the_gradient_of_the_path_alone() -> None:
    loc = torch.tensor([0.5], requires_grad=True)
    q = Steady(dist.Normal(loc, 2.0))
    fixed = torch.tensor([1.5])
    with pytest.raises(ValueError, match=r"log q at fixed values"):
        q.log_prob(fixed)
    with torch.no_grad():
        torch.testing.assert_close(q.log_prob(fixed), dist.Normal(loc, 2.0).log_prob(fixed))
    z = q.rsample()
    (found,) = torch.autograd.grad(q.log_prob(z).sum(), loc)
    torch.testing.assert_close(found, -(z.detach() - loc.detach()) / 4.0)


@pytest.mark.parametrize(
    ("fn", "can"),
    [
        (dist.Normal(0.0, 1.0), True),
        (dist.Gamma(1.0, 1.0), True),
        (dist.LogNormal(0.0, 1.0), True),
        (dist.MixtureOfDiagNormals(torch.zeros(2, 3), torch.ones(2, 3), torch.zeros(2)), True),
        (dist.Bernoulli(0.5), False),
        (dist.Delta(torch.tensor(0.0)), False),
        (Steady(dist.Normal(0.0, 1.0)), False),
        (
            dist.TransformedDistribution(
                dist.Normal(torch.zeros(2), 1.0), [dist.transforms.affine_autoregressive(2)]
            ),
            False,
        ),
        (
            dist.TransformedDistribution(
                dist.Normal(torch.zeros(2), 1.0), [dist.transforms.affine_autoregressive(2)]
            ).mask(True),
            False,
        ),
    ],
)
def test_which_distributions_can_be(fn: Any, can: bool) -> None:
    assert can_be_steady(fn) is can


def model(X: Tensor, y: Tensor) -> None:
    w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal((X * w).sum(-1), 1.0), obs=y)


def data() -> tuple[Tensor, Tensor]:
    X = torch.tensor([[1.0, 0.2], [-0.5, 1.0], [0.3, -1.2], [0.9, 0.4]])
    return X, torch.tensor([1.0, -0.3, 0.2, 1.4])


LOSSES = {
    "Trace": lambda: Trace_ELBO(4),
    "vectorised": lambda: Trace_ELBO(4, vectorize_particles=True),
    "mean field": lambda: TraceMeanField_ELBO(4, vectorize_particles=True, max_plate_nesting=1),
    "batched": lambda: ngvi.BatchedELBO(4),
}


#: the loss decides how particles are made, the guide what is made of them
@pytest.mark.parametrize(
    ("kind", "loss"), covering([AutoMultivariateNormal, AutoNormal], LOSSES, strength=1)
)
def test_gradients_are_unbiased_under_every_loss(kind: Any, loss: str) -> None:
    X, y = data()
    plain = without_steady_draws(kind)
    guide = started(kind)
    optim = ngvi.IFVB(guide)
    steady = repeated(LOSSES[loss](), guide, X, y)
    assert optim._rest is not None
    error = ((plain.var(0) + steady.var(0)) / len(plain)).sqrt()
    assert ((plain.mean(0) - steady.mean(0)).abs() < 5.0 * error + 1e-9).all()
    assert steady.var(0).sum() < plain.var(0).sum()


def started(kind: Any) -> Any:
    pyro.clear_param_store()
    torch.manual_seed(0)
    guide = kind(model, init_scale=0.4)
    guide(*data())
    return guide


@cache
def without_steady_draws(kind: Any) -> Tensor:
    return repeated(LOSSES["Trace"](), started(kind), *data())


def repeated(elbo: Any, guide: Any, X: Tensor, y: Tensor, n: int = 120) -> Tensor:
    rows = []
    for _ in range(n):
        _, grads = gradients(elbo, model, guide, (X, y))
        rows.append(torch.cat([grads[name].reshape(-1) for name in sorted(grads)]))
    return torch.stack(rows)


@pytest.mark.parametrize("loss", LOSSES)
def test_no_noise_is_left_at_the_posterior(loss: str) -> None:
    X, y = data()
    pyro.clear_param_store()
    guide = AutoMultivariateNormal(model)
    guide(X, y)
    ngvi.IFVB(guide)
    precision = X.mT @ X + torch.eye(2)
    factor = torch.linalg.cholesky(torch.linalg.inv(precision))
    with torch.no_grad():
        guide.loc.copy_(torch.linalg.solve(precision, X.mT @ y))
    guide.scale = factor.diagonal().detach()
    guide.scale_tril = (factor / factor.diagonal()[:, None]).detach()
    _, grads = gradients(LOSSES[loss](), model, guide, (X, y))
    assert all(g.abs().max() < 1e-9 for g in grads.values())


class Stop(BaseException):
    """As Ctrl-C."""


def test_an_interrupted_call_leaves_nothing_behind() -> None:
    X, y = data()
    pyro.clear_param_store()
    guide = AutoNormal(model)
    guide(X, y)
    svi = SVI(model, guide, ngvi.IFVB(guide), Trace_ELBO(2))

    def stop(*args: Any, **kwargs: Any) -> None:
        raise Stop

    guide.forward = stop  # type: ignore[method-assign]
    with pytest.raises(Stop):
        svi.step(X, y)
    del guide.forward
    assert not _PYRO_STACK
    svi.step(X, y)
    assert not _PYRO_STACK


def test_losses_that_are_no_elbo_ask_for_the_score() -> None:
    """ReweightedWakeSleep learns by the score at fixed values, which steady draws do not have.

    Its half that sleeps has a gradient, and what is left of the other is rounding: neither hides it.
    """
    X, y = data()

    def run(steps: int, insomnia: float = 1.0, **how: Any) -> float:
        pyro.clear_param_store()
        torch.manual_seed(0)
        guide = AutoMultivariateNormal(model)
        loss = ReweightedWakeSleep(
            20, insomnia=insomnia, vectorize_particles=True, max_plate_nesting=1
        )
        svi = SVI(model, guide, ngvi.IFVB(guide, **how), loss)
        for _ in range(steps):
            svi.step(X, y)
        return Trace_ELBO(200, vectorize_particles=True).loss(model, guide, X, y)

    for insomnia in (1.0, 0.5):
        with pytest.raises(ValueError, match=r"log q at fixed values.*steady=False"):
            run(1, insomnia)
    assert run(150, steady=False) < run(1, steady=False) - 1.0


def test_a_second_optimizer_says_how_a_guide_draws() -> None:
    X, y = data()
    pyro.clear_param_store()
    guide = AutoMultivariateNormal(model)
    guide(X, y)
    for steady in (True, False, True):
        ngvi.IFVB(guide, steady=steady)
        with pyro.plate("particles", 4, dim=-2):
            w = guide(X, y)["w"]
        assert bool((w.mean(0) - guide.loc).abs().max() < 1e-9) is steady
    assert len(guide._forward_pre_hooks) == 1


def test_draws_without_gradients_are_independent() -> None:
    X, y = data()
    pyro.clear_param_store()
    guide = AutoMultivariateNormal(model)
    guide(X, y)
    ngvi.IFVB(guide)
    with torch.no_grad(), pyro.plate("particles", 4, dim=-2):
        w = guide(X, y)["w"]
    assert (w.mean(0) - guide.loc).abs().max() > 1e-6
