"""No step of CVI waits for the device: it runs on tensors that hold no values."""

from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import SVI
from pyro.optim import Adam  # pyright: ignore[reportAttributeAccessIssue]
from torch import Tensor

import pyro_ngvi as ngvi
from pyro_ngvi.distributions import GaussianProcess, matern_state_space

N, D, B = 12, 3, 5


def regression(X: Tensor, y: Tensor) -> None:
    w: Any = pyro.sample("w", dist.Normal(X.new_zeros(X.shape[1]), X.new_ones(())).to_event(1))
    with pyro.plate("data", len(X)):
        pyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)


def robust(X: Tensor, y: Tensor) -> None:
    """Not log-concave, so that steps may have to be halved or taken back."""
    w: Any = pyro.sample("w", dist.Normal(X.new_zeros(X.shape[1]), X.new_ones(())).to_event(1))
    with pyro.plate("data", len(X)):
        pyro.sample("y", dist.StudentT(X.new_tensor(3.0), X @ w, X.new_ones(())), obs=y)


def pair(X: Tensor, y: Tensor) -> None:
    zeros, one = X.new_zeros(X.shape[1]), X.new_ones(())
    w: Any = pyro.sample("w", dist.Normal(zeros, one).to_event(1))
    v: Any = pyro.sample("v", dist.Normal(zeros, one).to_event(1))
    with pyro.plate("data", len(X)):
        pyro.sample("y", dist.Normal(X @ w, (X @ v).exp()), obs=y)


def minibatch(X: Tensor, y: Tensor, i: Tensor) -> None:
    w: Any = pyro.sample("w", dist.Normal(X.new_zeros(X.shape[1]), X.new_ones(())).to_event(1))
    with pyro.plate("data", N, subsample=i):
        pyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)


def learned(X: Tensor, y: Tensor) -> None:
    sd = pyro.param("sd", X.new_ones(()), constraint=dist.constraints.positive)
    w: Any = pyro.sample("w", dist.Normal(X.new_zeros(X.shape[1]), sd).to_event(1))
    with pyro.plate("data", len(X)):
        pyro.sample("y", dist.Normal(X @ w, X.new_ones(())), obs=y)


def kernel(a: Tensor, b: Tensor | None = None, diag: bool = False) -> Tensor:
    if diag:
        return a.new_ones(len(a))
    b = a if b is None else b
    return torch.exp(-0.5 * (a.unsqueeze(-2) - b.unsqueeze(-3)).square().sum(-1))


def process(X: Tensor, y: Tensor) -> None:
    f: Any = pyro.sample("f", GaussianProcess(kernel, X, jitter=1e-3))
    with pyro.plate("data", len(X)):
        pyro.sample("y", dist.Bernoulli(logits=f), obs=y)


def part_of_process(X: Tensor, y: Tensor, i: Tensor) -> None:
    f: Any = pyro.sample("f", GaussianProcess(kernel, X, jitter=1e-3))
    with pyro.plate("data", N, subsample=i):
        pyro.sample("y", dist.Bernoulli(logits=f), obs=y)


def learned_process(X: Tensor, y: Tensor, i: Tensor) -> None:
    sd = pyro.param("sd", X.new_ones(()), constraint=dist.constraints.positive)

    def scaled(a: Tensor, b: Tensor | None = None, diag: bool = False) -> Tensor:
        return sd**2 * kernel(a, b, diag)

    f: Any = pyro.sample("f", GaussianProcess(scaled, X, jitter=1e-3))
    with pyro.plate("data", N, subsample=i):
        pyro.sample("y", dist.Bernoulli(logits=f), obs=y)


def additive(X: Tensor, y: Tensor) -> None:
    f: Any = pyro.sample("f", GaussianProcess(kernel, X, jitter=1e-3))
    g: Any = pyro.sample("g", GaussianProcess(lambda *a, **k: 2 * kernel(*a, **k), X, jitter=1e-3))
    with pyro.plate("data", len(X)):
        pyro.sample("y", dist.Bernoulli(logits=f + 0.5 * g), obs=y)


def part_of_pair(X: Tensor, y: Tensor, i: Tensor) -> None:
    f: Any = pyro.sample("f", GaussianProcess(kernel, X, jitter=1e-3))
    g: Any = pyro.sample("g", GaussianProcess(kernel, X, jitter=1e-3))
    with pyro.plate("data", N, subsample=i):
        pyro.sample("y", dist.Normal(f, g.exp()), obs=y)


def series(X: Tensor, y: Tensor) -> None:
    one = X.new_ones(())
    x: Any = pyro.sample("x", matern_state_space(X[:, 0].cumsum(0), one, one))
    with pyro.plate("data", len(X)):
        pyro.sample("y", dist.Bernoulli(logits=x[..., 0]), obs=y)


def data(n: int = N, d: int = D) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(n, d, generator=generator, dtype=torch.float32)
    return [X, (X[:, 0] > 0).to(X)]


def times() -> list[Tensor]:
    X, y = data(4)  # away from values every halving of a step is tried
    return [X.abs() + 0.1, y]


#: model, arguments, and inputs of inducing points
CASES: dict[str, tuple[Any, list[Tensor], Tensor | None]] = {
    "all data": (regression, data(), None),
    "more latent variables than data": (regression, data(N, 2 * N), None),
    "not log-concave": (robust, data(), None),
    "pairs": (pair, data(), None),
    "minibatch": (minibatch, [*data(B), torch.arange(B)], None),
    "hyperparameter": (learned, data(), None),
    "process": (process, data(), None),
    "inducing points": (process, data(), data(4)[0]),
    "inducing points, minibatch": (part_of_process, [*data(B), torch.arange(B)], data(4)[0]),
    "inducing points, learned": (
        learned_process,
        [*data(B), torch.arange(B)],
        data(4)[0],
    ),
    "two processes": (additive, data(), data(4)[0]),
    "two processes, minibatch": (part_of_pair, [*data(B), torch.arange(B)], data(4)[0]),
    "state space": (series, times(), None),
}


#: without steps before, state is made on the device; with some it moves there, whatever the model
@pytest.mark.parametrize(
    ("case", "steps_before"), [(case, (3, 0)[i % 2]) for i, case in enumerate(CASES)]
)
def test_step(case: str, steps_before: int) -> None:
    """What ``SVI.step`` does up to the number that it returns, in the dtype of the data."""
    model, args, inducing = CASES[case]
    pyro.clear_param_store()
    guide = ngvi.AutoSites(model, inducing=inducing)
    others = None if model not in (learned, learned_process) else Adam({"lr": 0.01})
    optim, elbo = ngvi.CVI(guide, others=others), ngvi.SitesELBO()

    def step(args: list[Tensor]) -> Tensor:
        with pyro.validation_enabled(False):
            with poutine.trace(param_only=True) as capture:
                loss = elbo.loss_and_grads(model, guide, *args)
            nodes: Any = capture.trace.nodes
            optim({site["value"].unconstrained() for site in nodes.values()})
        return loss

    guide(*args)  # the structure is found where values are
    for _ in range(steps_before):
        step(args)
    pyro.clear_param_store()
    guide.to("meta")
    away = [x.to("meta") for x in args]
    shapes = {name: p.shape for name, p in guide.natural_params().items()}
    for _ in range(1 if steps_before else 2):
        loss = step(away)
        assert loss.device.type == "meta" and loss.shape == () and loss.dtype == torch.float32
    after = guide.natural_params()
    assert {name: p.shape for name, p in after.items()} == shapes
    assert all(p.device.type == "meta" and p.dtype == torch.float32 for p in after.values())
    assert all(t.device.type == "meta" for t in guide.algebra.buffers())
    with pyro.validation_enabled(False):
        drawn = guide(*away)
    assert all(z.device.type == "meta" for z in drawn.values())


def test_moves_between_dtypes_and_goes_on() -> None:
    """``guide.double()`` after steps in float32: the posterior of the same data, now more exact."""
    guide = ngvi.AutoSites(regression)
    optim = ngvi.CVI(guide)
    svi: Any = SVI(regression, guide, optim, ngvi.SitesELBO())
    for _ in range(5):
        svi.step(*data())
    guide.double()
    args = [x.double() for x in data()]
    loss = [svi.step(*args) for _ in range(8)][-1]
    other = ngvi.AutoSites(regression)
    fresh: Any = SVI(regression, other, ngvi.CVI(other), ngvi.SitesELBO())
    reference = [fresh.step(*args) for _ in range(13)][-1]
    assert abs(loss - reference) < 1e-10
    assert guide.get_posterior().mean.dtype == torch.float64
