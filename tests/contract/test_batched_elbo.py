"""BatchedELBO gives the loss and the gradients of Trace_ELBO, particle by particle."""

from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import Trace_ELBO
from pyro.infer.autoguide import (
    AutoDelta,
    AutoGuideList,
    AutoIAFNormal,
    AutoMultivariateNormal,
    AutoNormal,
)
from pyro.nn import PyroModule, PyroParam, PyroSample
from torch import Tensor, nn
from torch.distributions import constraints

from pyro_ngvi.losses import BatchedELBO
from tests.contract.same_noise import (
    GUIDES,
    D,
    N,
    assert_same_as_trace_elbo,
    data,
    gradients,
    hand_written_guide,
    logistic,
    nested_plates,
    param_model,
)
from tests.covering import covering


def constrained(X: Tensor, y: Tensor) -> None:
    rate = pyro.sample("rate", dist.Gamma(X.new_tensor(2.0), X.new_tensor(1.0)))
    p = pyro.sample("p", dist.Dirichlet(X.new_ones(D)))
    L = pyro.sample("L", dist.LKJCholesky(D, X.new_tensor(2.0)))
    u = pyro.sample("u", dist.Uniform(X.new_tensor(-1.0), X.new_tensor(2.0)))
    with pyro.plate("data", len(y)):
        pyro.sample("x", dist.MultivariateNormal(u + p, scale_tril=rate * L), obs=X)


def counts(X: Tensor, y: Tensor) -> None:
    """Multinomial: its log_prob writes by a boolean mask."""
    p = pyro.sample("p", dist.Dirichlet(X.new_ones(D)))
    with pyro.plate("data", len(y)):
        pyro.sample("c", dist.Multinomial(6, p), obs=X.new_tensor([1, 0, 5]).expand(len(y), D))
    pyro.sample("e", dist.Multinomial(3, p[None]).to_event(1), obs=X.new_tensor([[1, 0, 2]]))


def masked(X: Tensor, y: Tensor) -> None:
    w = pyro.sample("w", dist.Normal(X.new_zeros(D), 1.0).to_event(1))
    positive: Any = y > 0
    with pyro.plate("data", len(y)):
        with poutine.mask(mask=positive):
            pyro.sample("y", dist.Normal(X @ w, 1.0), obs=y)
        pyro.sample("y2", dist.Normal(X @ w, 1.0).mask(y < 1), obs=y)


def scaled(X: Tensor, y: Tensor) -> None:
    with poutine.scale(scale=0.3):
        w = pyro.sample("w", dist.Normal(X.new_zeros(D), 1.0).to_event(1))
    with pyro.plate("data", len(y)), poutine.scale(scale=1 + y):
        pyro.sample("y", dist.Normal(X @ w, 1.0), obs=y)


def factor_and_deterministic(X: Tensor, y: Tensor) -> None:
    w = pyro.sample("w", dist.Normal(X.new_zeros(D), 1.0).to_event(1))
    mean = pyro.deterministic("mean", X @ w)
    pyro.factor("penalty", -(w**4).sum())
    with pyro.plate("data", len(y)):
        pyro.factor("likelihood", -((y - mean) ** 2))


def matrix_events(X: Tensor, y: Tensor) -> None:
    W = pyro.sample("W", dist.Normal(X.new_zeros(2, D), 1.0).to_event(2))
    with pyro.plate("groups", 2):
        s = pyro.sample("s", dist.LogNormal(X.new_zeros(2), 1.0))
    with pyro.plate("data", len(y)):
        mean = (X @ W.mT)[..., None] * s
        pyro.sample("y", dist.Normal(mean, 1.0).to_event(2), obs=X.new_ones(N, 2, 2))


def sequential_plate(X: Tensor, y: Tensor) -> None:
    state = pyro.sample("z_init", dist.Normal(X.new_zeros(()), 1.0))
    for t in pyro.plate("time", N):
        state = torch.tanh(state + 0.1 * t)
        pyro.sample(f"y_{t}", dist.Normal(state, 1.0), obs=y[int(t)])


class Network(PyroModule):
    """A Bayesian last layer on a network with ordinary and constrained parameters."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        linear: Any = PyroModule[nn.Linear]
        self.hidden = linear(D, 4, dtype=dtype)
        self.out = linear(4, 1, bias=False, dtype=dtype)
        prior = dist.Normal(torch.zeros(1, 4, dtype=dtype), 1.0).to_event(2)
        self.out.weight = PyroSample(prior)
        self.noise: Any = PyroParam(torch.ones((), dtype=dtype), constraints.positive)

    def forward(self, X: Tensor, y: Tensor) -> None:
        mean = self.out(torch.tanh(self.hidden(X))).squeeze(-1)
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(mean, self.noise), obs=y)


MODELS: dict[str, Callable[..., Any]] = {
    f.__name__: f
    for f in (
        logistic,
        constrained,
        counts,
        masked,
        scaled,
        factor_and_deterministic,
        matrix_events,
        nested_plates,
        sequential_plate,
        param_model,
    )
}


@pytest.mark.parametrize(
    ("model", "guide", "num_particles", "dtype"),
    covering(MODELS, ["full rank", "site by site"], [1, 3], [torch.float64, torch.float32]),
    ids=str,
)
def test_every_model(model: str, guide: str, num_particles: int, dtype: torch.dtype) -> None:
    torch.set_default_dtype(dtype)
    fn = MODELS[model]
    assert_same_as_trace_elbo(fn, GUIDES[guide](fn), data(dtype), num_particles)


@pytest.mark.parametrize("guide", ["mean field", "low rank"])
def test_every_gaussian_guide_of_pyro(guide: str) -> None:
    args = data(torch.float64)
    assert_same_as_trace_elbo(constrained, GUIDES[guide](constrained), args, 3)


def test_flow_guide() -> None:
    args = data(torch.float64)
    assert_same_as_trace_elbo(logistic, AutoIAFNormal(logistic, hidden_dim=[8]), args, 3)


class PathDerivative(dist.MultivariateNormal):
    """Samples with live parameters and evaluates with detached ones (sticking the landing)."""

    def log_prob(self, value: Tensor) -> Tensor:
        detached = dist.MultivariateNormal(self.loc.detach(), scale_tril=self.scale_tril.detach())
        return detached.log_prob(value)


class PathDerivativeGuide(AutoMultivariateNormal):
    def get_posterior(self, *args: Any, **kwargs: Any) -> PathDerivative:
        scale: Any = self.scale
        return PathDerivative(self.loc, scale_tril=scale[..., None] * self.scale_tril)


def test_guide_that_sticks_the_landing() -> None:
    args = data(torch.float64)
    assert_same_as_trace_elbo(constrained, PathDerivativeGuide(constrained), args, 3)


@pytest.mark.parametrize("num_particles", [1, 3])
@pytest.mark.parametrize("guide", ["full rank", "site by site"])
def test_network(guide: str, num_particles: int) -> None:
    model = Network(torch.float64)
    assert_same_as_trace_elbo(model, GUIDES[guide](model), data(torch.float64), num_particles)


def test_network_with_local_parameters() -> None:
    """Pyro's modules with their own parameters go through ELBOModule and torch.optim, not SVI."""
    with pyro.settings.context(module_local_params=True):
        model = Network(torch.float64)
        guide = AutoMultivariateNormal(model, init_scale=0.3)
        args = data(torch.float64)
        guide(*args)
        results = []
        for elbo in (BatchedELBO(), Trace_ELBO()):
            torch.manual_seed(1)
            module = elbo(model, guide)
            loss = module(*args)
            results.append((loss, torch.autograd.grad(loss, list(module.parameters()))))
    assert len(results[0][1]) == 6
    torch.testing.assert_close(results[0], results[1], rtol=1e-10, atol=1e-10)


def test_guide_list() -> None:
    guide = AutoGuideList(constrained)
    guide.append(AutoMultivariateNormal(poutine.block(constrained, expose=["rate", "p"])))
    guide.append(AutoNormal(poutine.block(constrained, expose=["L"])))
    guide.append(AutoDelta(poutine.block(constrained, expose=["u"])))
    assert_same_as_trace_elbo(constrained, guide, data(torch.float64), 3)


@pytest.mark.parametrize("num_particles", [1, 3])
@pytest.mark.parametrize("model", [logistic, masked, factor_and_deterministic, param_model])
def test_hand_written_guide(model: Callable[..., Any], num_particles: int) -> None:
    args = data(torch.float64)
    assert_same_as_trace_elbo(model, hand_written_guide, args, num_particles)


def test_amortised_guide() -> None:
    encoder = nn.Linear(D, 2)

    def model(X: Tensor, y: Tensor) -> None:
        with pyro.plate("data", N):
            z = pyro.sample("z", dist.Normal(torch.zeros(N), 1.0))
            pyro.sample("y", dist.Normal(z, 1.0), obs=y)

    def guide(X: Tensor, y: Tensor) -> None:
        pyro.module("encoder", encoder)
        loc, log_scale = encoder(X).unbind(-1)
        with pyro.plate("data", N):
            pyro.sample("z", dist.Normal(loc, log_scale.exp()))

    assert_same_as_trace_elbo(model, guide, data(torch.float64), 3)


def test_gamma_guide_with_the_same_seed() -> None:
    """Gamma draws do not come from normal noise, but one particle uses the same random stream."""

    def model(y: Tensor) -> None:
        rate = pyro.sample("rate", dist.Gamma(2.0, 1.0))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Poisson(rate), obs=y)

    def guide(y: Tensor) -> None:
        a = pyro.param("a", torch.tensor(3.0), constraint=constraints.positive)
        pyro.sample("rate", dist.Gamma(a, 1.0))

    args = (torch.tensor([1.0, 3.0, 2.0]),)
    guide(*args)
    torch.manual_seed(2)
    loss, grads = gradients(BatchedELBO(), model, guide, args)
    torch.manual_seed(2)
    ref_loss, ref_grads = gradients(Trace_ELBO(), model, guide, args)
    torch.testing.assert_close(loss, ref_loss, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(grads["a"], ref_grads["a"], rtol=1e-10, atol=1e-10)
