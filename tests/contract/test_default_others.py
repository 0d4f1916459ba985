"""Parameters that are not natural: trained by Adam unless something else is said, and exported."""

import copy
import warnings
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.reparam import AutoReparam, LocScaleReparam
from pyro.optim import Adam  # pyright: ignore[reportAttributeAccessIssue]
from torch import Tensor

import pyro_ngvi as ngvi

pytestmark = pytest.mark.usefixtures("plain_start")

Y = torch.tensor([1.0, 2.0, 4.0, 8.0], dtype=torch.float64)


def learned(y: Tensor) -> None:
    noise = pyro.param("noise", torch.tensor(0.7), constraint=dist.constraints.positive)
    mu = pyro.sample("mu", dist.Normal(torch.zeros((), dtype=y.dtype), 10.0))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(mu, noise), obs=y)


def groups(y: Tensor) -> None:
    mu = pyro.sample("mu", dist.Normal(torch.zeros((), dtype=y.dtype), 10.0))
    with pyro.plate("data", len(y)):
        a = pyro.sample("a", dist.Normal(mu, 1.0))
        pyro.sample("y", dist.Normal(a, 1.0), obs=y)


MODELS: dict[str, Any] = {
    "pyro.param": (learned, "noise"),
    "LocScaleReparam": (poutine.reparam(groups, {"a": LocScaleReparam()}), "a_centered"),
    "AutoReparam": (AutoReparam()(groups), "a_centered"),
}
models = pytest.mark.parametrize("kind", MODELS)


def made(model: Any, optimizer: Any, name: str | None = None, **how: Any) -> Any:
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    guide = ngvi.AutoMeanFieldNormal(model, name=name)
    return SVI(model, guide, optimizer(guide, **how), Trace_ELBO())


def stored(name: str) -> Tensor:
    store = pyro.get_param_store()
    return store[next(key for key in store if key.endswith(name))].detach().clone()


@models
@pytest.mark.parametrize("optimizer", [ngvi.NGVB, ngvi.IFVB, ngvi.AIFVB])
def test_adam_trains_them_and_says_so_once(kind: str, optimizer: Any) -> None:
    """As the same Adam passed by hand does, to the last digit."""
    model, name = MODELS[kind]
    svi = made(model, optimizer)
    with pytest.warns(
        UserWarning, match=rf"{name}.* to pyro.optim.Adam.*0.01.*others=None"
    ) as seen:
        svi.step(Y)
    assert len(seen) == 1
    for _ in range(3):  # a warning is an error here
        svi.step(Y)
    by_default = stored(name)
    svi = made(model, optimizer, others=Adam({"lr": 0.01}))
    for _ in range(4):
        svi.step(Y)
    assert torch.equal(by_default, stored(name))


@models
def test_none_refuses_them(kind: str) -> None:
    model, name = MODELS[kind]
    with pytest.raises(ValueError, match=rf"others: .*{name}.*Say who trains them"):
        made(model, ngvi.NGVB, others=None).step(Y)


def test_nothing_is_said_where_there_is_nothing_to_train() -> None:
    svi = made(groups, ngvi.NGVB)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        svi.step(Y)
    state = svi.optim.get_state()
    made(groups, ngvi.NGVB, others=None).optim.set_state(state)  # nothing that it lacks


def test_each_optimizer_has_its_own() -> None:
    first, second = (ngvi.NGVB(ngvi.AutoMeanFieldNormal(groups)) for _ in range(2))
    assert first.others is not second.others


@pytest.mark.filterwarnings("ignore:NGVB leaves what is not natural:UserWarning")
def test_its_state_is_saved_and_restored() -> None:
    svi = made(learned, ngvi.NGVB)
    for _ in range(3):
        svi.step(Y)
    state = svi.optim.get_state()
    svi.optim.set_state(state)
    (moments,) = state["others"].values()
    assert moments["state"][0]["step"] == 3
    again = made(learned, ngvi.NGVB)
    again.optim.set_state(state)
    again.step(Y)
    assert again.optim.get_state()["others"]["noise"]["state"][0]["step"] == 4


@models
@pytest.mark.parametrize("kept", ["by the process", "in a file"])
@pytest.mark.filterwarnings("ignore:NGVB leaves what is not natural:UserWarning")
def test_restored_fit_goes_on_to_the_last_digit(kind: str, kept: str) -> None:
    """Twice from one state, which the steps after it, here and there, leave as it was."""
    model, name = MODELS[kind]

    def goes_on(svi: Any) -> list[Tensor]:
        pyro.set_rng_seed(1)
        for _ in range(3):
            svi.step(Y)
        return [stored(name), *(p.detach().clone() for p in svi.guide.parameters())]

    svi = made(model, ngvi.NGVB, name="fit")
    for _ in range(5):
        svi.step(Y)
    # the store and the modules hand out their own tensors
    modules, store = copy.deepcopy((svi.guide.state_dict(), pyro.get_param_store().get_state()))
    state = svi.optim.get_state()
    if kept == "in a file":
        state = copy.deepcopy(state)
    expected = goes_on(svi)
    for _ in range(2):
        again = made(model, ngvi.NGVB, name="fit")
        pyro.get_param_store().set_state(copy.deepcopy(store))
        again.guide.load_state_dict(modules)
        again.optim.set_state(state)
        found = goes_on(again)
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


@models
@pytest.mark.filterwarnings("ignore:NGVB leaves what is not natural:UserWarning")
def test_fitted_values_are_exported(kind: str) -> None:
    model, name = MODELS[kind]
    svi = made(model, ngvi.NGVB)
    for _ in range(2):
        svi.step(Y)
    data = ngvi.to_arviz(model, svi.guide, Y, num_samples=50, seed=0)
    constants = data["constant_data"]
    (found,) = [key for key in constants if str(key).endswith(name)]
    value = torch.as_tensor(constants[found].values)
    assert torch.equal(value.reshape(()), stored(name))  # ArviZ makes a vector of a number
