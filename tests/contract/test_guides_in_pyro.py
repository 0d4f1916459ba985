"""Our guides beside the rest of Pyro: lists, handlers, modules, Predictive, subsampling."""

from itertools import combinations
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import SVI, Predictive, Trace_ELBO
from pyro.infer.autoguide import AutoDelta, AutoGuideList, AutoNormal
from pyro.infer.reparam import LocScaleReparam
from pyro.nn import PyroModule, PyroParam, PyroSample
from pyro.optim import Adam, ClippedAdam  # pyright: ignore[reportAttributeAccessIssue]
from torch import Tensor
from torch.distributions import constraints

from pyro_ngvi import NGVB, AutoFullRankNormal, AutoMeanFieldNormal, BatchedELBO
from pyro_ngvi.optim import Constant
from pyro_ngvi.runtime.store import module_name
from tests.contract.registry import GUIDES, LOSSES, D, N, called, data, exact_posterior, regression

guides = pytest.mark.parametrize("kind", GUIDES)


def two_sites() -> None:
    pyro.sample("x", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
    pyro.sample("y", dist.Normal(0.0, scale), obs=torch.tensor(2.0))


@guides
@pytest.mark.parametrize("other", [AutoDelta, AutoNormal])
def test_list_with_a_guide_of_pyro(kind: str, other: Any) -> None:
    guide = AutoGuideList(two_sites)
    guide.append(GUIDES[kind](poutine.block(two_sites, expose=["x"])))
    guide.append(other(poutine.block(two_sites, hide=["x"])))
    svi = SVI(two_sites, guide, NGVB(guide, others=Adam({"lr": 0.01})), Trace_ELBO(2))
    for _ in range(3):
        assert torch.isfinite(torch.tensor(svi.step()))
    assert set(guide()) == set(guide.median()) == {"x", "scale"}
    assert Predictive(two_sites, guide=guide, num_samples=4)()["y"].shape == (4,)
    if other is AutoNormal:
        assert set(guide.quantiles([0.1, 0.9])) == {"x", "scale"}


def test_list_of_two_guides_of_ours_trains_both() -> None:
    """Blocks that the model makes independent reach their own exact posteriors."""

    def model() -> None:
        pyro.sample("x", dist.Normal(torch.tensor([1.0, 2.0]), 0.5).to_event(1))
        pyro.sample("z", dist.Normal(torch.tensor([3.0, 4.0]), 2.0).to_event(1))

    guide = AutoGuideList(model)
    guide.append(AutoFullRankNormal(poutine.block(model, expose=["x"])))
    guide.append(AutoMeanFieldNormal(poutine.block(model, hide=["x"])))
    optim = NGVB(guide, schedule=Constant(0.5))
    svi = SVI(model, guide, optim, Trace_ELBO(4))
    for _ in range(70):
        svi.step()
    parts: Any = list(guide)
    x, z = (part.get_posterior() for part in parts)
    for q, mean, sd in ((x, [1.0, 2.0], 0.5), (z, [3.0, 4.0], 2.0)):
        torch.testing.assert_close(q.mean.detach(), torch.tensor(mean))
        torch.testing.assert_close(q.variance.detach(), torch.full((2,), sd**2))
    assert optim.report("0").outcome == optim.report("1").outcome == "accepted"
    with pytest.raises(ValueError, match="Name one of the parts: '0', '1'"):
        optim.report()


def test_part_appended_after_the_optimizer_was_built() -> None:
    guide = AutoGuideList(two_sites)
    guide.append(AutoFullRankNormal(poutine.block(two_sites, expose=["x"])))
    optim = NGVB(guide)
    guide.append(AutoMeanFieldNormal(poutine.block(two_sites, hide=["x"])))
    SVI(two_sites, guide, optim, Trace_ELBO()).step()
    assert optim.report("1").step_norm > 0


@guides
def test_nested_lists(kind: str) -> None:
    inner = AutoGuideList(poutine.block(two_sites, expose=["x"]))
    inner.append(GUIDES[kind](poutine.block(two_sites, expose=["x"])))
    guide = AutoGuideList(two_sites)
    guide.append(inner)
    guide.append(AutoDelta(poutine.block(two_sites, hide=["x"])))
    optim = NGVB(guide, others=Adam({"lr": 0.01}))
    SVI(two_sites, guide, optim, Trace_ELBO()).step()
    assert optim.report().step_norm > 0
    assert set(guide.median()) == {"x", "scale"}


@guides
@pytest.mark.parametrize("parallel", [False, True])
def test_predictive(kind: str, parallel: bool) -> None:
    def model(y: Tensor | None = None) -> None:
        w = pyro.sample("w", dist.Normal(torch.zeros(D), 1.0).to_event(1))
        with pyro.plate("data", N):
            pyro.sample("y", dist.Normal(w.sum(-1, keepdim=True), 1.0), obs=y)

    guide = called(kind, model, torch.zeros(N))
    samples = Predictive(model, guide=guide, num_samples=5, parallel=parallel)()
    assert samples["w"].shape == (5, 1, D)
    assert samples["y"].shape == (5, N)
    assert not samples["w"].requires_grad


@guides
@pytest.mark.parametrize("loss", LOSSES)
def test_minibatches_of_data_under_global_latents(kind: str, loss: str) -> None:
    """For the same draw of the guide, the losses of all minibatches average to that of all data."""
    guide = called(kind, regression, *data(), 2)

    def evaluate(*minibatch: Any) -> float:
        torch.manual_seed(1)
        return LOSSES[loss](2).loss(regression, guide, *data(), *minibatch)

    losses = [evaluate(torch.tensor(index)) for index in combinations(range(N), 2)]
    assert max(losses) - min(losses) > 1.0
    assert sum(losses) / len(losses) == pytest.approx(evaluate())


@guides
def test_new_data_of_another_length(kind: str) -> None:
    guide = called(kind, regression, *data())
    svi = SVI(regression, guide, NGVB(guide), Trace_ELBO())
    X, y = data()
    for n in (N, N - 2, 1):
        svi.step(X[:n], y[:n])
    assert torch.isfinite(guide.get_posterior().mean).all()


class Network(PyroModule):
    """A layer with a prior, a trained parameter and an ordinary submodule."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = PyroSample(dist.Normal(torch.zeros(D), 1.0).to_event(1))
        self.noise: Any = PyroParam(torch.tensor(0.5), constraint=constraints.positive)
        self.features = torch.nn.Linear(D, D)

    def forward(self, X: Tensor, y: Tensor) -> None:
        mean = (self.features(X) * self.weight).sum(-1)
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(mean, self.noise), obs=y)


@guides
@pytest.mark.parametrize("loss", LOSSES)
def test_pyro_module_as_a_model(kind: str, loss: str) -> None:
    model = Network()
    guide = GUIDES[kind](model, init=None)
    before = {name: p.clone() for name, p in model.named_parameters()}
    optim = NGVB(guide, others=ClippedAdam({"lr": 0.01}))
    svi = SVI(model, guide, optim, LOSSES[loss](2))
    for _ in range(2):
        svi.step(*data())
    assert set(guide.median()) == {"weight"}
    # the model's parameters are the model's: they were trained, and are no part of the guide
    for name, p in model.named_parameters():
        assert not torch.equal(p, before[name]), name
    assert {id(p) for p in guide.parameters()}.isdisjoint({id(p) for p in model.parameters()})
    assert optim.report().step_norm > 0


@guides
def test_sites_hidden_by_block_are_left_alone(kind: str) -> None:
    guide = called(kind, poutine.block(two_sites, hide=["scale"]))
    assert set(guide()) == {"x"} and guide.latent_dim == 3


@guides
def test_keyword_arguments_of_the_model(kind: str) -> None:
    def model(X: Tensor, *, y: Tensor) -> None:
        regression(X, y)

    X, y = data()
    guide = GUIDES[kind](model, init=None)
    svi = SVI(model, guide, NGVB(guide), Trace_ELBO())
    svi.step(X, y=y)
    assert guide.median(X, y=y)["w"].shape == (D,)


@guides
def test_ordinary_optimizer(kind: str) -> None:
    """The parameters are plain tensors: Adam lowers the loss of our guide as of any other."""
    guide = called(kind, regression, *data(), init=None)
    svi = SVI(regression, guide, Adam({"lr": 0.02}), BatchedELBO(8))
    torch.manual_seed(1)
    before = BatchedELBO(200).loss(regression, guide, *data())
    for _ in range(100):
        svi.step(*data())
    torch.manual_seed(1)
    assert BatchedELBO(200).loss(regression, guide, *data()) < before - 1.0


def test_posterior_of_a_reparameterised_model() -> None:
    """poutine.reparam around model and guide alike."""
    X, y = data()
    reparam = poutine.reparam(regression, config={"w": LocScaleReparam(0.0)})
    guide = AutoFullRankNormal(reparam)
    svi = SVI(reparam, guide, NGVB(guide, schedule=Constant(0.5)), Trace_ELBO(4))
    for _ in range(40):
        svi.step(X, y)
    assert set(guide.median()) == {"w_decentered"}
    draws = Predictive(reparam, guide=guide, num_samples=400)(X, y)["w"]
    mean, precision = exact_posterior(X, y)
    standard_error = (torch.linalg.inv(precision).diagonal() / 400).sqrt()
    assert ((draws.mean(0) - mean).abs() < 4.5 * standard_error).all()


@guides
def test_clearing_the_store_keeps_the_guide(kind: str) -> None:
    guide = called(kind, regression, *data())
    svi = SVI(regression, guide, NGVB(guide), Trace_ELBO())
    svi.step(*data())
    before = guide.get_posterior().mean.detach().clone()
    pyro.clear_param_store()
    assert torch.equal(guide.get_posterior().mean, before)
    svi.step(*data())
    assert set(pyro.get_param_store().keys()) == {
        f"{module_name(guide)}.{name}" for name in guide.family.names
    }
