"""A parameter store that was saved in another process: the guide takes the fit that is meant, or says
which ones there are, and never takes another."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer.autoguide import AutoGuideList, AutoNormal
from torch import Tensor

import pyro_ngvi as ngvi
from pyro_ngvi.runtime import store as _store
from pyro_ngvi.runtime.store import module_name
from tests.exact.site_cases import linear_data as data


@pytest.fixture(autouse=True)
def new_process(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Forget all names of guides, as a new process does."""

    def begin() -> None:
        pyro.clear_param_store()
        monkeypatch.setattr(_store, "_claimed", set())
        monkeypatch.setattr(_store, "_registered", WeakValueDictionary())

    begin()
    return begin


def model(X: Tensor, y: Tensor) -> None:
    w: Any = pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    with pyro.plate("data", len(X)):
        pyro.sample("y", dist.Normal(X @ w, 1.0), obs=y)


def listed(**how: Any) -> Any:
    guide: Any = AutoGuideList(two_sites)
    guide.append(ngvi.AutoFullRankNormal(poutine.block(two_sites, expose=["a"]), **how))
    guide.append(AutoNormal(poutine.block(two_sites, hide=["a"])))
    return guide


def two_sites(X: Tensor, y: Tensor) -> None:
    pyro.sample("a", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    pyro.sample("b", dist.Normal(torch.zeros(2), 1.0).to_event(1))


MAKE: dict[str, Callable[..., Any]] = {
    "full rank": lambda **how: ngvi.AutoFullRankNormal(model, **how),
    "flow": lambda **how: ngvi.AutoCouplingFlow(model, layers=2, hidden=(4,), init=None, **how),
    "sites": lambda **how: ngvi.AutoSites(model, **how),
    "list": listed,
}
kinds = pytest.mark.parametrize("kind", MAKE)


def ours(guide: Any) -> Any:
    return guide[0] if isinstance(guide, AutoGuideList) else guide


def run(kind: str, value: float, **how: Any) -> Any:
    """A "fit" that ends with all parameters at ``value``."""
    guide = MAKE[kind](**how)
    guide(*data())
    for p in ours(guide).parameters():
        p.data.fill_(value)
    return guide


def values(guide: Any) -> set[float]:
    return {float(v) for p in ours(guide).parameters() for v in p.detach().flatten()}


def save(path: Path) -> str:
    pyro.get_param_store().save(str(path / "store"))
    return str(path / "store")


@kinds
def test_one_fit_is_taken(kind: str, new_process: Any, tmp_path: Path) -> None:
    run(kind, 0.5)
    store = save(tmp_path)
    new_process()
    pyro.get_param_store().load(store)
    guide = MAKE[kind]()
    guide(*data())
    assert values(guide) == {0.5}


@kinds
def test_of_two_runs_of_a_cell_none_is_taken_unless_named(
    kind: str, new_process: Any, tmp_path: Path
) -> None:
    names = [module_name(ours(run(kind, value))) for value in (0.25, 0.5)]
    store = save(tmp_path)
    for first_load in (True, False):
        new_process()
        guide = MAKE[kind]()
        if not first_load:
            guide(*data())
        pyro.get_param_store().load(store)
        for _ in range(2):  # it says the same again
            with pytest.raises(
                ValueError, match=rf"several fits: '{names[0]}', '{names[1]}'"
            ) as error:
                guide(*data())
            assert f"name='{names[1]}'" in str(error.value) and len(str(error.value)) <= 240
    for name, value in zip(names, (0.25, 0.5), strict=True):
        new_process()
        pyro.get_param_store().load(store)
        guide = MAKE[kind](name=name)
        guide(*data())
        assert values(guide) == {value} and module_name(ours(guide)) == name


@kinds
def test_clearing_the_store_begins_anew(kind: str, new_process: Any, tmp_path: Path) -> None:
    for value in (0.25, 0.5):
        run(kind, value)
    store = save(tmp_path)
    new_process()
    pyro.get_param_store().load(store)
    pyro.clear_param_store()
    guide = MAKE[kind]()
    guide(*data())
    assert not values(guide) & {0.25, 0.5}


@kinds
def test_two_models_in_one_store_come_back_by_name(
    kind: str, new_process: Any, tmp_path: Path
) -> None:
    for name, value in (("one", 0.25), ("two", 0.5)):
        run(kind, value, name=name)
    store = save(tmp_path)
    new_process()
    pyro.get_param_store().load(store)
    for name, value in (("two", 0.5), ("one", 0.25)):  # in whatever order they are made
        guide = MAKE[kind](name=name)
        guide(*data())
        assert values(guide) == {value}


@kinds
def test_the_order_of_construction_is_no_name(kind: str, new_process: Any, tmp_path: Path) -> None:
    for value in (0.25, 0.5):
        run(kind, value)
    store = save(tmp_path)
    new_process()
    guides = [MAKE[kind]() for _ in range(2)]
    pyro.get_param_store().load(store)
    for guide in guides:
        with pytest.raises(ValueError, match=r"several fits"):
            guide(*data())


@kinds
def test_guides_in_use_go_back_with_the_store_of_their_process(kind: str) -> None:
    """Also where a cell was run twice, and where only the second of its guides is left."""
    guides = [run(kind, value) for value in (0.25, 0.5)]
    best = copy.deepcopy(pyro.get_param_store().get_state())
    for guide in guides:
        for p in ours(guide).parameters():
            p.data.fill_(0.75)
    pyro.get_param_store().set_state(best)
    del guides[0]
    guides[-1](*data())
    assert values(guides[-1]) == {0.5}


@kinds
def test_a_second_run_without_a_load_says_nothing(kind: str, recwarn: Any) -> None:
    run(kind, 0.25)
    pyro.get_param_store().get_state()
    run(kind, 0.5)
    assert not [w for w in recwarn if "parameter store" in str(w.message)]


@kinds
def test_a_store_loaded_in_its_own_process_is_not_passed_over_in_silence(
    kind: str, tmp_path: Path
) -> None:
    """The next guide has a name of its own, and would start anew beside what was loaded."""
    name = module_name(ours(run(kind, 0.5)))
    store = save(tmp_path)
    pyro.clear_param_store()
    pyro.get_param_store().load(store)
    guide = MAKE[kind]()
    with pytest.warns(UserWarning, match=rf"'{name}', which no guide .* name='{name}'"):
        guide(*data())
    guide = MAKE[kind](name=name)
    guide(*data())
    assert values(guide) == {0.5}


def test_a_guide_in_use_says_that_the_loaded_fit_has_another_name(
    new_process: Any, tmp_path: Path
) -> None:
    run("full rank", 0.25)
    pyro.clear_param_store()
    run("full rank", 0.5)
    store = save(tmp_path)
    new_process()
    guide = run("full rank", 1.0)
    pyro.get_param_store().load(store)
    with pytest.warns(UserWarning, match=r"name='AutoFullRankNormal_2'"):
        guide(*data())
    assert values(guide) == {1.0}


@pytest.mark.parametrize("kind", ["full rank", "flow", "sites"])
def test_a_store_loads_as_weights_only(kind: str, new_process: Any, tmp_path: Path) -> None:
    guide = run(kind, 0.5)
    guide(*data())
    state: Any = torch.load(save(tmp_path), weights_only=True)
    assert not any(vars(p) for p in state["params"].values())
    new_process()
    pyro.get_param_store().set_state(state)
    guide = MAKE[kind]()
    guide(*data())
    assert values(guide) == {0.5}
