"""Draws for every datum: their distribution, an unbiased gradient, less noise, and when they act."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import SVI, Predictive, Trace_ELBO
from pyro.infer.autoguide import AutoGuideList, init_to_sample
from pyro.nn import PyroModule, PyroSample
from pyro.optim import Adam  # pyright: ignore[reportAttributeAccessIssue]
from torch import Tensor

import pyro_ngvi as ngvi
from pyro_ngvi.nn import WalshHadamardLinear, local_reparameterization
from pyro_ngvi.runtime.run import Minibatches, run_particles

M = 4


class Net(PyroModule):
    """A network of Walsh-Hadamard layers; its output is the site "mean"."""

    def __init__(self, *widths: int, square: bool = False) -> None:
        super().__init__()
        self.depth = len(widths) - 1
        for i, (m, n) in enumerate(pairwise(widths)):
            setattr(self, f"l{i}", WalshHadamardLinear(m, n, square=square and n == 1))

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        for i in range(self.depth):
            x = getattr(self, f"l{i}")(torch.tanh(x) if i else x)
        with pyro.plate("data", x.shape[-2]):
            pyro.deterministic("mean", x, event_dim=1)
            pyro.sample("y", dist.Normal(x, 0.5).to_event(1), obs=y)
        return x


def regression(num: int = 256) -> tuple[Tensor, Tensor]:
    x = torch.randn(num, 8)
    return x, (x[:, :1].sin() + 0.3 * x[:, 1:2] * x[:, 2:3] + 0.3 * torch.randn(num, 1))


def ready(kind: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    guide = kind(model, init_loc_fn=init_to_sample, **kwargs)
    guide(*args)
    return guide


def by_layer(model: Any, init_loc_fn: Any) -> AutoGuideList:
    """A full-rank guide for each g, a mean-field guide for the rest."""
    guide = AutoGuideList(model)
    for name in ("l0.g", "l1.g"):
        part = poutine.block(model, expose=[name])
        guide.append(ngvi.AutoFullRankNormal(part, init_loc_fn=init_loc_fn))
    rest = poutine.block(model, expose=["l0.bias", "l1.bias"])
    guide.append(ngvi.AutoFullRankNormal(rest, init_loc_fn=init_loc_fn))
    return guide


GUIDES: dict[str, Callable[..., Any]] = {
    "mean field": ngvi.AutoMeanFieldNormal,
    "product": ngvi.AutoExponentialFamily,
    "a guide for each g": by_layer,
}


def outputs(model: Any, guide: Any, x: Tensor, num: int, how: str) -> Tensor:
    """The output (num, M, n) of ``model`` at ``num`` draws of the guide, as an ELBO runs it."""
    if how == "plain":
        traces = [poutine.trace(guide).get_trace(x) for _ in range(num)]
        return torch.stack([poutine.replay(model, trace=trace)(x) for trace in traces]).detach()
    q = guide.sampling_posterior()
    values, start, z = {}, 0, q.rsample((num,))
    for name, shape in guide._unconstrained_shapes.items():
        values[name] = z[:, start : start + shape.numel()]
        start += shape.numel()
    how_to: Any = {"minibatches": Minibatches(), "sampling": True}
    mean = run_particles(model, lambda s: s["mean"]["value"], values, num, (x,), {}, **how_to)
    return mean.detach()


@pytest.mark.parametrize("how, square", [("plain", False), ("vmap", False), ("vmap", True)])
def test_each_datum_has_the_marginal_of_the_shared_draw(how: str, square: bool) -> None:
    model: Any = Net(5, 1, square=True) if square else Net(5, 3)
    layer, x = model.l0, torch.randn(M, 5)
    guide = ready(ngvi.AutoMeanFieldNormal, model, x, torch.zeros(M, 1), init_scale=0.4)
    for side in (layer.left, layer.right):
        side.data = side * (0.5 + torch.rand_like(side))
    guide.log_scale.data += 0.3 * torch.randn_like(guide.log_scale)
    K = layer.matrix.num_g
    loc, variance = guide.loc.detach(), (2.0 * guide.log_scale.detach()).exp()
    mean = x @ layer.weight(loc[:K]).mT + loc[K:]
    # the derivative of W in g is constant: W at the unit vectors
    units = layer.weight(torch.eye(K))
    sensitivity = torch.einsum("kom,im->iok", units, x)
    var = (sensitivity.square() * variance[:K]).sum(-1) + variance[K:]
    shared = torch.einsum("iok,jok,k->ijo", sensitivity, sensitivity, variance[:K]) + variance[K:]

    n = 600 if how == "plain" else 20_000
    local = local_reparameterization(model, guide)
    y = outputs(local, guide, x, n, how).reshape(n, M, -1)
    assert ((y.mean(0) - mean) / (var / n).sqrt()).abs().max() < 4.5
    assert ((y.var(0) - var) / (var * (2.0 / n) ** 0.5)).abs().max() < 4.5
    centred = y - mean
    covariance = torch.einsum("sio,sjo->ijo", centred, centred) / n
    standard_error = (var.unsqueeze(0) * var.unsqueeze(1) / n).sqrt()
    off = ~torch.eye(M, dtype=torch.bool)
    assert (covariance / standard_error)[off].abs().max() < 4.5  # no datum knows of another
    assert (shared / standard_error)[off].abs().max() > 10.0  # which in the model itself they do
    y = outputs(model, guide, x, n, how).reshape(n, M, -1) - mean
    covariance = torch.einsum("sio,sjo->ijo", y, y) / n
    bound = ((var.unsqueeze(0) * var.unsqueeze(1) + shared.square()) / n).sqrt()
    assert ((covariance - shared) / bound).abs().max() < 4.5


def gradients(loss: Any, model: Any, guide: Any, net: Any, args: Any, num: int) -> Tensor:
    """(num, D): the gradients of all parameters, and the loss itself."""
    parameters = [*guide.parameters(), *net.parameters()]
    rows = []
    for _ in range(num):
        for p in parameters:
            p.grad = None
        value = torch.as_tensor(loss.loss_and_grads(model, guide, *args))
        rows.append(torch.cat([*(p.grad.flatten() for p in parameters), value.reshape(1)]))
    return torch.stack(rows)


def assert_same_mean(one: Tensor, other: Tensor) -> None:
    """Of some hundred columns, within 4.7 standard errors: a false alarm in 2,000 runs."""
    standard_error = (one.var(0) / len(one) + other.var(0) / len(other)).sqrt()
    # entries above the diagonal of a Cholesky factor have no gradient, and no noise either
    assert ((one.mean(0) - other.mean(0)).abs() <= 4.7 * standard_error).all()
    assert (standard_error > 0.0).sum() > 50


def assert_unbiased(kind: Any, prior: Any = None, **kwargs: Any) -> None:
    x, y = regression(6)
    model: Any = Net(8, 4, 1)
    if prior is not None:
        model.l0.g = PyroSample(prior.expand([model.l0.matrix.num_g]).to_event(1))
    guide = ready(kind, model, x, y, **kwargs)
    local = local_reparameterization(model, guide)
    args, loss = (model, (x, y), 40), ngvi.BatchedELBO(90)
    assert_same_mean(gradients(loss, local, guide, *args), gradients(loss, model, guide, *args))


@pytest.mark.parametrize("name", GUIDES)
def test_loss_and_gradient_are_unbiased(name: str) -> None:
    assert_unbiased(GUIDES[name])


#: as it comes, without ``stick`` and with a closed KL, it is the mean field above
@pytest.mark.parametrize(
    ("prior", "stick"),
    [
        pytest.param(None, True, id="True-closed KL"),
        pytest.param(dist.Laplace(0.0, 1.0), True, id="True-sampled KL"),
        pytest.param(dist.Laplace(0.0, 1.0), False, id="False-sampled KL"),
    ],
)
def test_unbiased_with_other_estimates_of_the_kl(prior: Any, stick: bool) -> None:
    assert_unbiased(ngvi.AutoMeanFieldNormal, prior, sticking_the_landing=stick)


def test_less_noise_where_data_are_many() -> None:
    """Measured with 400 draws: 0.06 of the variance."""
    x, y = regression(256)
    model = Net(8, 32, 1)
    guide = ready(ngvi.AutoMeanFieldNormal, model, x, y)
    local = local_reparameterization(model, guide)
    sd, d = guide.log_scale.detach().exp(), guide.latent_dim

    def noise(program: Any) -> Tensor:
        """Of the gradient of q, in the local frame of its family."""
        rows = gradients(ngvi.BatchedELBO(1), program, guide, model, (x, y), 100)
        return rows[:, :d].mul(sd).var(0).sum() + rows[:, d : 2 * d].var(0).sum()

    assert noise(local) < 0.15 * noise(model)


def test_exact_kl_leaves_no_noise_without_data() -> None:
    """A layer whose output nobody observes: the loss is the KL, and so is its gradient."""
    x = torch.randn(3, 5)
    model = WalshHadamardLinear(5, 7, g_scale=0.5)
    guide = ready(ngvi.AutoMeanFieldNormal, model, x)
    local = local_reparameterization(model, guide)
    prior = torch.cat([torch.full((8,), 0.5), torch.ones(7)]).log()
    own = guide.natural_params()
    kl = guide.family.kl(own, {"loc": torch.zeros(15), "log_scale": prior})
    expected = torch.autograd.grad(kl, list(own.values()))
    guide.zero_grad()
    value = torch.as_tensor(ngvi.BatchedELBO(60).loss_and_grads(local, guide, x))
    torch.testing.assert_close(value, kl.detach())
    torch.testing.assert_close(tuple(p.grad for p in own.values()), expected)


def test_evaluation_and_draws_of_the_prior_are_those_of_the_model() -> None:
    x, y = regression(6)
    model = Net(8, 4, 1)
    guide = ready(ngvi.AutoMeanFieldNormal, model, x, y)
    local = local_reparameterization(model, guide)

    def evaluated(program: Any, loss: Any) -> float:
        pyro.set_rng_seed(1)
        with torch.no_grad():
            return loss.loss(program, guide, x, y)

    def predicted(program: Any) -> Tensor:
        pyro.set_rng_seed(1)
        return Predictive(program, guide=guide, num_samples=3)(x)["y"]

    def drawn(program: Any) -> Tensor:
        pyro.set_rng_seed(1)
        return program(x)

    for loss in (ngvi.BatchedELBO(3), Trace_ELBO(3)):
        assert evaluated(local, loss) == evaluated(model, loss)
    assert torch.equal(predicted(local), predicted(model))
    assert torch.equal(drawn(local), drawn(model))  # gradients on, but the values are the prior's
    given = {"l0.g": guide.median()["l0.g"].requires_grad_()}
    assert torch.equal(
        drawn(poutine.condition(local, given)), drawn(poutine.condition(model, given))
    )


@pytest.mark.parametrize("curvature", ["hessian", "gauss_newton"])
def test_curvature_is_that_of_the_model_at_the_shared_draws(curvature: str) -> None:
    x, y = regression(6)
    model = Net(8, 4, 1)
    guide = ready(ngvi.AutoMeanFieldNormal, model, x, y)
    found = []
    for program in (model, local_reparameterization(model, guide)):
        loss = ngvi.BatchedELBO(2, curvature=curvature)
        for _ in range(2):  # the second step may take a faster way
            pyro.set_rng_seed(1)
            loss.loss_and_grads(program, guide, x, y)
            left = guide.take_curvature()
            assert left is not None
            found.append(left.parts["diagonal"])
    for other in found[1:]:
        torch.testing.assert_close(other, found[0])


class Twice(PyroModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = WalshHadamardLinear(5, 5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.layer(x), self.layer(x)


def replayed(model: Any, guide: Any, x: Tensor) -> Any:
    return poutine.replay(model, trace=poutine.trace(guide).get_trace(x))(x)


def test_a_layer_that_is_called_twice_keeps_its_draws() -> None:
    model, x = Twice(), torch.randn(M, 5)
    guide = ready(ngvi.AutoMeanFieldNormal, model, x)
    first, second = replayed(local_reparameterization(model, guide), guide, x)
    assert torch.equal(first, second)


def test_steps_of_a_sequence_share_the_draw_of_their_datum() -> None:
    model = WalshHadamardLinear(5, 7)
    x = torch.randn(5).expand(M, 3, 5)
    guide = ready(ngvi.AutoMeanFieldNormal, model, x)
    y = replayed(local_reparameterization(model, guide), guide, x)
    torch.testing.assert_close(y, y[:, :1].expand_as(y))
    assert y[:, 0].std(0).min() > 0.0


def test_biases_stay_shared_where_the_guide_correlates_them() -> None:
    x = torch.zeros(M, 8)
    model = Net(8, 4, 1)
    for kind, shared in ((by_layer, True), (ngvi.AutoMeanFieldNormal, False)):
        guide = ready(kind, model, x, torch.zeros(M, 1))
        local = local_reparameterization(model.l0, guide)
        with poutine.replay(trace=poutine.trace(guide).get_trace(x)):
            y = local(x)  # the bias alone, as x is zero
        assert bool((y == y[0]).all()) == shared


@pytest.mark.parametrize("name", GUIDES)
def test_training_lowers_the_loss(name: str) -> None:
    x, y = regression(64)
    model = Net(8, 16, 1)
    guide = ready(GUIDES[name], model, x, y)
    adam = Adam({"lr": 0.01})
    optim = ngvi.NGVB(guide, others=adam)
    svi = SVI(local_reparameterization(model, guide), guide, optim, ngvi.BatchedELBO(2))
    before = ngvi.BatchedELBO(200).loss(model, guide, x, y)
    for _ in range(30):
        svi.step(x, y)
    assert ngvi.BatchedELBO(200).loss(model, guide, x, y) < 0.8 * before
