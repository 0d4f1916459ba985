"""AutoWalshHadamard, as it is and proper, with every optimizer, loss, copy, device and reader."""

import copy
import io
import pickle
from typing import Any

import pyro
import pytest
import torch
from pyro import poutine
from pyro.infer import SVI, Predictive, Trace_ELBO
from pyro.infer.autoguide import AutoGuideList
from pyro.optim import Adam  # pyright: ignore[reportAttributeAccessIssue]
from torch import Tensor

import pyro_ngvi as ngvi
from pyro_ngvi import (
    AIFVB,
    IFVB,
    NGVB,
    AutoMeanFieldNormal,
    AutoProperWalshHadamard,
    AutoWalshHadamard,
    BatchedELBO,
)
from tests import registry
from tests.contract.registry import perturbed
from tests.contract.walsh_hadamard_model import COLUMNS, ROWS, N, data, weights_and_bias
from tests.registry import some

GUIDES: dict[str, dict[str, Any]] = {
    "mean field": {},
    "full rank": {"g": "full_rank", "rest": "full_rank"},
    "proper": {"proper": True},
    "proper full rank": {"proper": True, "g": "full_rank"},
}
guides = pytest.mark.parametrize("how", GUIDES.values(), ids=GUIDES)
LOSSES = some(registry.LOSSES, "Batched", "Trace vectorised", "Trace")


def guide_of(model: Any, how: dict[str, Any], **kwargs: Any) -> Any:
    kind = AutoProperWalshHadamard if how.get("proper") else AutoWalshHadamard
    return kind(model, **{k: v for k, v in how.items() if k != "proper"}, **kwargs)


def make(how: dict[str, Any], **kwargs: Any) -> Any:
    return guide_of(weights_and_bias, how, sites=["W"], **kwargs)


def moved(how: dict[str, Any], **kwargs: Any) -> Any:
    guide = make(how, **kwargs)
    guide(*data())
    return perturbed(guide)


@guides
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_step_of_every_loss(how: dict[str, Any], loss: str, dtype: torch.dtype) -> None:
    guide = make(how)
    optim = NGVB(guide, others=Adam({"lr": 0.01}))
    svi = SVI(weights_and_bias, guide, optim, LOSSES[loss](2 if loss == "Trace" else 4))
    svi.step(*data(dtype))
    before = {name: p.detach().clone() for name, p in guide.named_parameters()}
    assert ("left_g_W" in before) is not how.get("proper", False)
    svi.step(*data(dtype))
    assert optim.report().outcome != "skipped"
    for name, p in guide.named_parameters():
        assert p.dtype == dtype and p.isfinite().all() and not torch.equal(p, before[name])


@guides
@pytest.mark.parametrize("optimizer", [IFVB, AIFVB])
def test_estimated_fisher_matrices(how: dict[str, Any], optimizer: Any) -> None:
    guide = make(how)
    proper = how.get("proper", False)
    optim = optimizer(guide, **({} if proper else {"others": Adam({"lr": 0.01})}))
    svi: Any = SVI(weights_and_bias, guide, optim, BatchedELBO(4))
    losses = [svi.step(*data()) for _ in range(30)]
    assert sum(losses[-9:]) < sum(losses[:9])
    assert all(p.isfinite().all() for p in guide.parameters())


@guides
@pytest.mark.parametrize("how_copied", ["deepcopy", "pickle", "torch.save"])
def test_copies_are_the_same_distribution(how: dict[str, Any], how_copied: str) -> None:
    guide = moved(how)
    if how_copied == "deepcopy":
        other = copy.deepcopy(guide)
    elif how_copied == "pickle":
        other = pickle.loads(pickle.dumps(guide))
    else:
        buffer = io.BytesIO()
        torch.save(guide, buffer)
        buffer.seek(0)
        other = torch.load(buffer, weights_only=False)
    before = [x.clone() for x in guide.site_moments("W")]
    for mine, theirs in zip(before, other.site_moments("W"), strict=True):
        assert torch.equal(mine, theirs)
    with torch.no_grad():  # diagonals and all: the copy has its own
        for p in [*other.parameters(), *other.buffers()]:
            p.mul_(1.1)
    assert torch.equal(guide.site_moments("W")[0], before[0])
    assert not torch.equal(other.site_moments("W")[0], before[0])


@guides
def test_state_dict(how: dict[str, Any]) -> None:
    guide = moved(how)
    for tensor in [*guide.buffers()]:
        tensor.mul_(-1.0)  # signs of another model's run come with it
    fresh = make(how)
    fresh(*data())
    assert not torch.equal(fresh.median()["W"], guide.median()["W"])
    fresh.load_state_dict(guide.state_dict())
    for mine, theirs in zip(fresh.site_moments("W"), guide.site_moments("W"), strict=True):
        assert torch.equal(mine, theirs)


@guides
def test_float(how: dict[str, Any]) -> None:
    guide = moved(how)
    mean, sd = guide.site_moments("W")
    guide.float()
    pyro.clear_param_store()
    for a, b in zip(guide.site_moments("W"), (mean, sd), strict=True):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a, b.float(), rtol=1e-5, atol=1e-5)
    assert guide(*data(torch.float32))["W"].dtype == torch.float32


@guides
def test_step_on_meta(how: dict[str, Any]) -> None:
    """What ``SVI.step`` does up to the number that it returns, without one look at a value."""
    guide = make(how)
    guide(*data())
    pyro.clear_param_store()
    guide.to("meta")
    optim, elbo = NGVB(guide, others=Adam({"lr": 0.01})), BatchedELBO(4)
    args = [x.to("meta") for x in data()]
    for _ in range(2):
        with pyro.validation_enabled(False), poutine.trace(param_only=True) as capture:
            loss = elbo.loss_and_grads(weights_and_bias, guide, *args)
        nodes: Any = capture.trace.nodes
        optim({site["value"].unconstrained() for site in nodes.values()})
    assert loss.device.type == "meta"
    assert all(p.device.type == "meta" for p in guide.parameters())


@guides
def test_a_resumed_run_goes_on_as_an_unbroken_one(how: dict[str, Any]) -> None:
    def run(steps: int, resume: Any = None) -> Any:
        pyro.clear_param_store()
        guide = make(how, name="guide")
        optim = NGVB(guide, others=Adam({"lr": 0.05}))
        svi = SVI(weights_and_bias, guide, optim, BatchedELBO(2))
        if resume is not None:
            guide(*data())
            guide.load_state_dict(resume[0])
            optim.set_state(resume[1])
        for step in range(0 if resume is None else 3, steps):
            torch.manual_seed(step)
            svi.step(*data())
        return copy.deepcopy(guide.state_dict()), copy.deepcopy(optim.get_state())

    half = run(3)
    whole, resumed = run(6), run(6, half)
    assert whole[0].keys() == resumed[0].keys()
    assert all(torch.equal(v, resumed[0][name]) for name, v in whole[0].items())
    assert not any(torch.equal(v, half[0][name]) for name, v in guide_parameters(whole[0], how))


def guide_parameters(state: dict[str, Tensor], how: dict[str, Any]) -> list[tuple[str, Tensor]]:
    """Those that are trained: the diagonals too, unless they are signs."""
    signs = ("left", "right") if how.get("proper") else ()
    found = [(name, v) for name, v in state.items() if not name.startswith(signs or ("-",))]
    assert len(found) == len(state) - len(signs)
    return found


@guides
def test_readers(how: dict[str, Any]) -> None:
    guide = moved(how)
    predictive = Predictive(weights_and_bias, guide=guide, num_samples=7)
    assert predictive(*data())["Y"].shape == (7, N, ROWS)
    result = ngvi.to_arviz(weights_and_bias, guide, *data(), num_samples=40, seed=0)
    assert result["posterior"]["W"].shape == (1, 40, ROWS, COLUMNS)
    assert len(ngvi.khat(weights_and_bias, guide, *data(), num_samples=40).log_weights) == 40


@guides
def test_network(how: dict[str, Any]) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(3, 20), torch.nn.Tanh(), torch.nn.Linear(20, 1))
    model = ngvi.nn.bayesianize(net, "normal", num_data=N, noise=0.1)
    guide = guide_of(model, how, init_loc_fn=model.init_to_module)
    X, Y = data()
    optim = NGVB(guide, others=Adam({"lr": 0.01}))
    svi: Any = SVI(model, guide, optim, BatchedELBO(4))
    losses = [svi.step(X[k : k + 10], Y[k : k + 10, 0]) for _ in range(10) for k in (0, 10, 20)]
    assert list(guide.matrices) == ["0.weight"]
    assert sum(losses[-9:]) < sum(losses[:9])
    found = ngvi.nn.predict(model, guide, X, num_samples=10)
    assert found.mean.shape[0] == N and found.mean.isfinite().all()
    drawn = Predictive(model, guide=guide, num_samples=7, parallel=True)(X)
    assert drawn["y"].shape[0] == 7 and drawn["y"].isfinite().all()


@guides
def test_part_of_a_list_of_guides(how: dict[str, Any]) -> None:
    guide = AutoGuideList(weights_and_bias)
    guide.append(guide_of(poutine.block(weights_and_bias, expose=["W"]), how))
    guide.append(AutoMeanFieldNormal(poutine.block(weights_and_bias, hide=["W"])))
    optim = NGVB(guide, others=Adam({"lr": 0.01}))
    for loss in (Trace_ELBO(), BatchedELBO(3)):
        svi: Any = SVI(weights_and_bias, guide, optim, loss)
        assert svi.step(*data()) < float("inf")
    draw: Any = guide(*data())
    assert draw["W"].shape == (ROWS, COLUMNS) and draw["b"].shape == (ROWS,)
