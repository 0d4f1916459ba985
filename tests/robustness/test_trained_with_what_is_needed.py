"""No guide is trained by a loss or an optimizer that lacks what it needs, and no wrapper hides one."""

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, RenyiELBO, Trace_ELBO, TraceGraph_ELBO, TraceMeanField_ELBO
from pyro.optim import HorovodOptimizer
from torch import Tensor

import pyro_ngvi as ngvi

pytestmark = pytest.mark.usefixtures("plain_start")


def model(X: Tensor, y: Tensor) -> None:
    w = pyro.sample("w", dist.Normal(X.new_zeros(2), 1.0).to_event(1))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)


DATA = (
    torch.tensor([[1.0, 0.5], [-0.5, 1.0], [0.2, -1.0]], dtype=torch.float64),
    torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64),
)


def adam(guide: Any) -> Any:
    return pyro.optim.Adam({"lr": 0.1})  # pyright: ignore[reportAttributeAccessIssue]


def take_steps(guide: Any, optim: Any, loss: Any) -> None:
    svi = SVI(model, guide, optim, loss)
    for _ in range(2):
        svi.step(*DATA)


@pytest.mark.parametrize("kind", ["hessian", "gauss_newton", "price"])
@pytest.mark.parametrize("call", ["module", "callable"])
def test_curvature_that_the_loss_would_not_leave(kind: str, call: str) -> None:
    guide, elbo = ngvi.AutoFullRankNormal(model), ngvi.BatchedELBO(2, curvature=kind)
    step: Callable[..., Any] = (
        elbo(model, guide)  # pyright: ignore[reportArgumentType]
        if call == "module"
        else SVI(model, guide, ngvi.NGVB(guide), elbo.differentiable_loss).step
    )
    with pytest.raises(ValueError, match=r"loss_and_grads only.*Pass it as SVI's loss="):
        step(*DATA)
    with torch.no_grad():  # to look at the loss is free
        assert torch.isfinite(elbo.differentiable_loss(model, guide, *DATA))


@pytest.mark.parametrize("kind", ["scores", "hessian"])
def test_curvature_that_nobody_takes(kind: str) -> None:
    guide = ngvi.AutoFullRankNormal(model)
    taker = "SPRING" if kind == "scores" else "NGVB"
    with pytest.raises(RuntimeError, match=rf"No optimizer took .*pyro_ngvi.{taker}\(guide\)"):
        take_steps(guide, adam(guide), ngvi.BatchedELBO(2, curvature=kind))
    # a new optimizer, as the sentence says, and what the failed step left is not in its way
    take_steps(guide, getattr(ngvi.optim, taker)(guide), ngvi.BatchedELBO(2, curvature=kind))


def test_a_step_that_failed_is_not_in_the_way_of_the_next_optimizer() -> None:
    guide, other = ngvi.AutoFullRankNormal(model), ngvi.AutoFullRankNormal(model)
    loss = ngvi.BatchedELBO(2, curvature="hessian")
    with pytest.raises(ValueError, match="SVI trains another guide"):
        take_steps(guide, ngvi.NGVB(other), loss)
    take_steps(guide, ngvi.NGVB(guide), loss)


@pytest.mark.parametrize(
    "loss",
    [
        Trace_ELBO(),
        TraceMeanField_ELBO(),
        TraceGraph_ELBO(),
        RenyiELBO(num_particles=2),
        ngvi.BatchedELBO(2),
        ngvi.SitesELBO(),
    ],
    ids=lambda loss: type(loss).__name__,
)
def test_sites_with_an_optimizer_that_can_not_move_them(loss: Any) -> None:
    guide = ngvi.AutoSites(model)
    with pytest.raises(RuntimeError, match=r"pyro_ngvi.CVI\(guide\)"):
        take_steps(guide, adam(guide), loss)


def test_the_draws_of_fitted_sites_can_be_differentiated() -> None:
    """As an acquisition function is, in the inputs: with sites that were fitted nothing is refused."""
    guide = ngvi.AutoSites(model)
    take_steps(guide, ngvi.CVI(guide), ngvi.SitesELBO())
    x = torch.ones(2, dtype=torch.float64, requires_grad=True)
    (guide(*DATA)["w"] * x).sum().backward()
    assert x.grad is not None and torch.isfinite(x.grad).all()


def wrapped_by_horovod(optim: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    package: Any = ModuleType("horovod")
    submodule: Any = ModuleType("horovod.torch")
    package.torch = submodule
    submodule.DistributedOptimizer = lambda optim, **kwargs: optim
    monkeypatch.setitem(sys.modules, "horovod", package)
    monkeypatch.setitem(sys.modules, "horovod.torch", package.torch)
    return HorovodOptimizer(optim)


def wrapped_by_schedule(optim: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    how = {"optimizer": optim.pt_optim_constructor, "optim_args": optim.pt_optim_args, "gamma": 0.9}
    return pyro.optim.ExponentialLR(how)  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("wrap", [wrapped_by_horovod, wrapped_by_schedule])
@pytest.mark.parametrize(
    "make", [ngvi.NGVB, ngvi.IFVB, lambda guide: ngvi.optim.VON(guide, lr=0.5)]
)
def test_wrappers_that_want_an_optimizer_for_each_tensor(
    wrap: Any, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    guide = ngvi.AutoFullRankNormal(model)
    with pytest.raises(RuntimeError, match="steps a whole guide"):
        take_steps(guide, wrap(make(guide), monkeypatch), ngvi.BatchedELBO(2))
