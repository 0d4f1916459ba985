"""Names and copies: no two guides share parameters by accident, and a copy is a guide of its own."""

import copy
import io
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoGuideList, AutoNormal

import pyro_ngvi
from pyro_ngvi import NGVB, AutoFullRankNormal, AutoMeanFieldNormal
from pyro_ngvi.runtime.store import module_name
from tests.contract.registry import GUIDES, called, constrained, data, perturbed, plates, regression

pytestmark = pytest.mark.usefixtures("plain_start")

guides = pytest.mark.parametrize("kind", GUIDES)


def by_torch(guide: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(guide, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


COPIES: dict[str, Callable[[Any], Any]] = {
    "pickle": lambda guide: pickle.loads(pickle.dumps(guide)),
    "torch.save": by_torch,
    "deepcopy": copy.deepcopy,
}
copies = pytest.mark.parametrize("how", COPIES)


def trained(kind: str, steps: int = 5) -> tuple[Any, Any]:
    guide = GUIDES[kind](regression)
    svi = SVI(regression, guide, NGVB(guide), Trace_ELBO())
    for _ in range(steps):
        svi.step(*data())
    return guide, svi


def state(guide: Any) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in guide.state_dict().items()}


def same(one: Any, other: Any) -> bool:
    assert one.keys() == other.keys()
    return all(torch.equal(one[name], other[name]) for name in one)


@guides
@copies
@pytest.mark.parametrize("model", [constrained, plates])
def test_copy_is_the_same_distribution(kind: str, how: str, model: Any) -> None:
    guide = perturbed(called(kind, model))
    other = COPIES[how](guide)
    assert type(other) is type(guide)
    assert same(other.median(), guide.median())
    assert same(other.quantiles([0.2, 0.9]), guide.quantiles([0.2, 0.9]))
    torch.manual_seed(1)
    ours = guide()
    torch.manual_seed(1)
    assert same(other(), ours)


@guides
@copies
def test_copy_and_original_are_independent(kind: str, how: str) -> None:
    guide, svi = trained(kind)
    other = COPIES[how](guide)
    before = state(guide)
    assert same(state(other), before)
    other_svi = SVI(regression, other, NGVB(other), Trace_ELBO())
    # other data: the guide may be at the optimum of its own
    x, y = data()
    for _ in range(3):
        other_svi.step(x, y + 1.0)
    assert same(state(guide), before)
    assert not same(state(other), before)
    copied = state(other)
    svi.step(x, y - 1.0)
    assert same(state(other), copied)
    assert not same(state(guide), before)


@guides
@copies
def test_original_is_whole_after_copying(kind: str, how: str) -> None:
    """Also before its first call, when it still needs its model."""
    guide = GUIDES[kind](regression)
    if how == "deepcopy":
        COPIES[how](guide)
    guide(*data())
    COPIES[how](guide)
    assert callable(guide.model)


@guides
def test_copy_of_a_guide_under_an_averaging_optimizer_is_the_average(kind: str) -> None:
    guide = GUIDES[kind](regression)
    svi = SVI(regression, guide, NGVB(guide, averaging=True), Trace_ELBO())
    for _ in range(5):
        svi.step(*data())
    average, iterate = guide.get_posterior().mean, guide.sampling_posterior().mean
    assert not torch.equal(average, iterate)
    other = copy.deepcopy(guide)
    assert torch.equal(other.get_posterior().mean, average)
    assert torch.equal(other.sampling_posterior().mean, average)
    assert torch.equal(guide.sampling_posterior().mean, iterate)


@guides
def test_state_dict_into_a_fresh_guide(kind: str) -> None:
    guide, _ = trained(kind)
    fresh = called(kind, regression, *data())
    assert not same(state(fresh), state(guide))
    fresh.load_state_dict(guide.state_dict())
    assert same(state(fresh), state(guide))
    assert same(fresh.median(), guide.median())
    # the tensors that Pyro trains are the ones that were loaded
    store = pyro.get_param_store()
    for name, parameter in guide.natural_params().items():
        assert torch.equal(store[f"{module_name(fresh)}.{name}"], parameter)


@guides
def test_parameter_store_into_a_fresh_guide_of_the_same_name(kind: str) -> None:
    guide = called(kind, regression, *data(), name="mine")
    perturbed(guide)
    saved = pyro.get_param_store().get_state()
    pyro.clear_param_store()
    fresh = GUIDES[kind](regression, name="mine")
    pyro.get_param_store().set_state(saved)
    fresh(*data())
    assert same(state(fresh), state(guide))
    optim = NGVB(fresh)
    SVI(regression, fresh, optim, Trace_ELBO()).step(*data())
    assert optim.report().step_norm > 0


@guides
def test_guides_of_one_class_do_not_share_parameters(kind: str) -> None:
    first, second = called(kind, regression, *data()), called(kind, constrained)
    assert module_name(first) != module_name(second)
    before = state(first)
    perturbed(second)
    assert same(state(first), before)


def list_with(part: Callable[[Any], Any]) -> Any:
    guide = AutoGuideList(constrained)
    guide.append(part(poutine.block(constrained, expose=["real", "gamma"])))
    guide.append(AutoNormal(poutine.block(constrained, hide=["real", "gamma"])))
    guide()
    return guide


@guides
def test_parts_of_two_lists_do_not_share_parameters(kind: str) -> None:
    first, second = list_with(GUIDES[kind]), list_with(GUIDES[kind])
    before = state(first[0])
    perturbed(second[0])
    second()
    assert same(state(first[0]), before)
    assert not same(state(second[0]), before)


@guides
@copies
def test_part_of_a_copied_list_is_independent(kind: str, how: str) -> None:
    first = list_with(GUIDES[kind])
    second = COPIES[how](first)
    second()
    assert module_name(first[0]) != module_name(second[0])
    before = state(first[0])
    perturbed(second[0])
    second()
    first()
    assert same(state(first[0]), before)


def test_a_name_of_ones_own() -> None:
    guide = AutoFullRankNormal(regression, name="weights")
    guide(*data())
    assert set(pyro.get_param_store().keys()) == {"weights.loc", "weights.scale_tril"}


def test_names_are_the_same_in_every_process() -> None:
    """They follow the order of construction, copies included, and nothing else."""
    program = (
        "import copy, pyro_ngvi as ngvi\n"
        "from pyro_ngvi.runtime.store import module_name as name\n"
        "model = lambda: None\n"
        "a, b = ngvi.AutoFullRankNormal(model), ngvi.AutoMeanFieldNormal(model)\n"
        "c = ngvi.AutoFullRankNormal(model)\n"
        "d, e = copy.deepcopy(a), copy.deepcopy(c)\n"
        "print(name(a), name(b), name(c), name(d), name(e))\n"
    )
    command = [sys.executable, "-W", "ignore", "-c", program]
    root = Path(pyro_ngvi.__file__).parents[1]
    output = subprocess.run(command, capture_output=True, text=True, check=True, cwd=root).stdout
    assert output.split() == [
        "AutoFullRankNormal",
        "AutoMeanFieldNormal",
        "AutoFullRankNormal_2",
        "AutoFullRankNormal_3",
        "AutoFullRankNormal_2_2",
    ]


def test_a_guide_can_be_given_up_and_built_again() -> None:
    """A model changed in a notebook: the parameters of the old guide do not come back."""

    def model(d: int) -> None:
        pyro.sample("x", dist.Normal(torch.zeros(d), 1.0).to_event(1))

    for d in (3, 5):
        guide = AutoMeanFieldNormal(model)
        guide(d)
        assert guide.loc.shape == (d,)


@guides
@pytest.mark.parametrize("strict", [True, False])
def test_state_dict_before_the_first_call(kind: str, strict: bool) -> None:
    guide, _ = trained(kind)
    saved = state(guide)
    fresh = GUIDES[kind](regression)
    fresh.load_state_dict(saved, strict=strict)
    for v in saved.values():  # a copy waits
        v.zero_()
    fresh(*data())
    assert same(state(fresh), state(guide))
    store = pyro.get_param_store()
    for name, parameter in fresh.natural_params().items():
        assert store[f"{module_name(fresh)}.{name}"] is parameter


@guides
def test_state_dict_of_another_guide_before_the_first_call(kind: str) -> None:
    fresh = GUIDES[kind](regression)
    fresh.load_state_dict({"strange": torch.zeros(1)})
    for _ in range(2):  # the next call says the same again
        with pytest.raises(RuntimeError, match=r'Unexpected key.*"strange"'):
            fresh(*data())
    fresh.load_state_dict(state(trained(kind)[0]))
    fresh(*data())


@guides
def test_state_dict_of_a_list_before_the_first_call(kind: str) -> None:
    first = perturbed_list(kind)
    fresh: Any = AutoGuideList(constrained)
    fresh.append(GUIDES[kind](poutine.block(constrained, expose=["real", "gamma"])))
    fresh.load_state_dict({f"0.{k}": v for k, v in state(first[0]).items()})
    fresh.append(AutoNormal(poutine.block(constrained, hide=["real", "gamma"])))
    fresh()
    assert same(state(fresh[0]), state(first[0]))


def perturbed_list(kind: str) -> Any:
    guide = list_with(GUIDES[kind])
    perturbed(guide[0])
    return guide
