"""Loops without SVI: an ELBO as a module, its gradients, and one of our optimizers or torch's."""

from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoDiagonalNormal, AutoMultivariateNormal, AutoNormal
from pyro.nn import PyroModule, PyroSample
from torch import Tensor, nn

import pyro_ngvi as ngvi
from pyro_ngvi import BatchedELBO

pytestmark = pytest.mark.usefixtures("plain_start")

X = torch.linspace(-2.0, 2.0, 20).unsqueeze(-1) ** torch.arange(3)
Y = (X[:, 1] > 0.3).float()


def logistic(x: Tensor, y: Tensor | None = None) -> None:
    w = pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Bernoulli(logits=(x * w).sum(-1)), obs=y)


class Scaled(PyroModule):
    """The same with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.w = PyroSample(dist.Normal(torch.zeros(3), 1.0).to_event(1))

    def forward(self, x: Tensor, y: Tensor | None = None) -> None:
        w: Any = self.w  # a draw
        with pyro.plate("data", len(x)):
            logits = self.scale * (x * w).sum(-1)
            pyro.sample("y", dist.Bernoulli(logits=logits), obs=y)


def by_svi(model: Any, guide: Any, optim: Any, loss: Any, steps: int) -> None:
    svi = SVI(model, guide, optim, loss)
    for _ in range(steps):
        svi.step(X, Y)


def by_module(model: Any, guide: Any, optim: Any, loss: Any, steps: int) -> None:
    elbo = loss(model, guide)
    for _ in range(steps):
        elbo(X, Y).backward()
        optim(elbo.parameters())
        assert all(p.grad is None or not p.grad.any() for p in elbo.parameters())


def trained(
    run: Callable[..., None], make_model: Any, kind: Any, rule: Any, loss: Any, steps: int = 5
) -> dict[str, Tensor]:
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    model = make_model()
    guide = kind(model)
    guide(X, Y)
    run(model, guide, rule(guide), loss, steps)
    # the guide of each run has a name of its own
    kept = {
        f"guide {n}": p.detach().clone() for n, p in guide.named_parameters() if "model" not in n
    }
    if isinstance(model, nn.Module):
        kept |= {n: p.detach().clone() for n, p in model.named_parameters()}
    return kept


PAIRS = [
    (ngvi.AutoFullRankNormal, ngvi.NGVB),
    (ngvi.AutoMeanFieldNormal, ngvi.NGVB),
    (ngvi.AutoExponentialFamily, ngvi.NGVB),
    (AutoNormal, ngvi.IFVB),
    (AutoDiagonalNormal, ngvi.IFVB),
    (AutoMultivariateNormal, ngvi.IFVB),
    (AutoMultivariateNormal, ngvi.AIFVB),
]


@pytest.mark.parametrize("kind, rule", PAIRS, ids=lambda c: c.__name__)
@pytest.mark.parametrize("loss", [BatchedELBO(4), Trace_ELBO(4)], ids=lambda c: type(c).__name__)
def test_a_loop_over_the_module_takes_the_steps_of_svi(kind: Any, rule: Any, loss: Any) -> None:
    first = trained(by_svi, lambda: logistic, kind, rule, loss)
    second = trained(by_module, lambda: logistic, kind, rule, loss)
    assert len(first) >= 2
    torch.testing.assert_close(second, first, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind, rule", PAIRS, ids=lambda c: c.__name__)
@pytest.mark.parametrize("make_model", [lambda: logistic, Scaled], ids=["function", "module"])
@pytest.mark.filterwarnings("ignore:.*leaves what is not natural")
def test_parameters_may_be_local_to_their_modules(kind: Any, rule: Any, make_model: Any) -> None:
    """As Pyro advises for such loops."""
    first = trained(by_module, make_model, kind, rule, BatchedELBO(4))
    with pyro.settings.context(module_local_params=True):
        second = trained(by_module, make_model, kind, rule, BatchedELBO(4))
    torch.testing.assert_close(second, first)


@pytest.mark.parametrize("kind", [ngvi.AutoFullRankNormal, ngvi.AutoMeanFieldNormal, AutoNormal])
def test_torchs_optimizers_train_the_module(kind: Any) -> None:
    pyro.set_rng_seed(0)
    model: Any = logistic
    guide = kind(model)
    guide(X, Y)
    elbo = BatchedELBO(8)(model, guide)
    adam = torch.optim.Adam(elbo.parameters(), lr=0.02)
    losses = []
    for _ in range(200):
        adam.zero_grad()
        loss = elbo(X, Y)
        loss.backward()
        adam.step()
        losses.append(loss.detach())
    best = ngvi.fit(logistic, X, Y, guide=kind, seed=0, progress=False)
    assert torch.stack(losses[-50:]).mean() < -best.elbo[0] + 0.3
