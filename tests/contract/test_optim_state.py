"""Saving and resuming NGVB: bit for bit what an unbroken run does."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoGuideList
from pyro.nn import PyroModule, PyroParam
from pyro.optim import Adam  # pyright: ignore[reportAttributeAccessIssue]
from torch import Tensor
from torch.utils._pytree import tree_map

from pyro_ngvi import NGVB, AutoFactorNormal, AutoFullRankNormal, AutoMeanFieldNormal, BatchedELBO
from pyro_ngvi.optim import RobbinsMonro
from pyro_ngvi.optim.state import flat
from pyro_ngvi.runtime.store import module_name
from tests.contract.registry import GUIDES, LOSSES, D, N, data, regression
from tests.covering import covering

guides = pytest.mark.parametrize("kind", GUIDES)

SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "tail average": {"averaging": True},
    "log average": {"averaging": 2.0, "momentum": 0.5, "schedule": RobbinsMonro()},
}
settings = pytest.mark.parametrize("setting", SETTINGS)


class Model(PyroModule):
    """A regression on features that an ordinary optimizer trains."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.features = torch.nn.Linear(D, D)

    def forward(self, X: Tensor, y: Tensor) -> None:
        regression(self.features(X), y, 3)


class Run:
    """Everything that a script holds: model, guide, optimizer, SVI."""

    def __init__(self, kind: str, setting: str, loss: str) -> None:
        self.model = Model()
        self.guide = GUIDES[kind](self.model)
        self.optim = NGVB(self.guide, others=Adam({"lr": 0.01}), **SETTINGS[setting])
        self.svi = SVI(self.model, self.guide, self.optim, LOSSES[loss](2))

    def steps(self, n: int) -> list[Any]:
        return [self.svi.step(*data()) for _ in range(n)]

    def parameters(self) -> dict[str, Tensor]:
        return {
            name: p.detach().clone()
            for module in (self.model, self.guide)
            for name, p in module.named_parameters()
        }

    def checkpoint(self, path: Path) -> None:
        self.optim.save(str(path / "optim"))
        modules = self.model.state_dict(), self.guide.state_dict()
        torch.save((*modules, torch.get_rng_state()), path / "rest")

    def restore(self, path: Path, order: str = "call first") -> None:
        model, guide, rng = torch.load(path / "rest")
        if order == "optimizer first":
            self.optim.load(str(path / "optim"))
        self.model.load_state_dict(model)
        if order == "call first":
            self.guide(*data())  # the guide learns its sites
        self.guide.load_state_dict(guide)
        if order != "optimizer first":
            self.optim.load(str(path / "optim"))
        torch.set_rng_state(rng)


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name


@pytest.mark.parametrize(
    ("kind", "setting", "loss", "order"),
    covering(GUIDES, SETTINGS, LOSSES, ["documented", "optimizer first", "call first"]),
)
def test_a_fresh_run_resumes(
    kind: str, setting: str, loss: str, order: str, tmp_path: Path
) -> None:
    run = Run(kind, setting, loss)
    run.steps(4)
    run.checkpoint(tmp_path)
    losses = run.steps(4)
    parameters, report = run.parameters(), run.optim.report()
    pyro.clear_param_store()
    resumed = Run(kind, setting, loss)
    resumed.restore(tmp_path, order)
    assert resumed.steps(4) == losses
    assert_same(resumed.parameters(), parameters)
    assert resumed.optim.report() == report


@guides
@settings
def test_a_run_goes_back(kind: str, setting: str, tmp_path: Path) -> None:
    """set_state of an optimizer that has taken steps since."""
    run = Run(kind, setting, "Trace")
    run.steps(3)
    run.checkpoint(tmp_path)
    losses = run.steps(4)
    parameters = run.parameters()
    run.restore(tmp_path)
    assert run.steps(4) == losses
    assert_same(run.parameters(), parameters)


@guides
@settings
def test_states_are_copies(kind: str, setting: str) -> None:
    """Steps taken after get_state change no saved state, and what is set is what is got."""
    run = Run(kind, setting, "Trace")
    run.steps(3)
    saved = run.optim.get_state()
    numbers = tree_map(torch.clone, saved["natural"])
    run.steps(2)
    for path, state in numbers.items():
        assert_same(flat(saved["natural"][path]), flat(state))
    fresh = NGVB(run.guide, others=Adam({"lr": 0.01}), **SETTINGS[setting])
    fresh.set_state(saved)
    for path, state in numbers.items():
        assert_same(flat(fresh.get_state()["natural"][path]), flat(state))


def test_state_of_a_list_of_guides(tmp_path: Path) -> None:
    def model() -> None:
        pyro.sample("a", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        pyro.sample("b", dist.Normal(torch.ones(2), 1.0).to_event(1))

    def run() -> tuple[Any, NGVB, Callable[[], list[Any]]]:
        guide = AutoGuideList(model)
        guide.append(AutoFullRankNormal(poutine.block(model, expose=["a"])))
        guide.append(AutoFactorNormal(poutine.block(model, hide=["a"]), rank=1))
        optim = NGVB(guide, averaging=True)
        svi = SVI(model, guide, optim, Trace_ELBO())
        return guide, optim, lambda: [svi.step() for _ in range(3)]

    guide, optim, steps = run()
    steps()
    optim.save(str(tmp_path / "optim"))
    parameters, rng = guide.state_dict(), torch.get_rng_state()
    parameters = {name: p.clone() for name, p in parameters.items()}
    losses = steps()
    guide, optim, steps = run()
    guide()
    guide.load_state_dict(parameters)
    optim.load(str(tmp_path / "optim"))
    torch.set_rng_state(rng)
    assert steps() == losses


@pytest.mark.parametrize("listed", [False, True])
def test_others_go_on_under_another_name_of_the_guide(listed: bool) -> None:
    """A second guide of a process gets another name, and the names of its parameters begin with it."""
    y = torch.tensor([1.0, 2.0, 4.0])

    class Shifted(AutoMeanFieldNormal):
        def __init__(self, model: Any) -> None:
            super().__init__(model)
            self.shift: Any = PyroParam(torch.zeros(3))

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            pyro.factor("pull", -(self.shift - y).square().sum(), has_rsample=True)
            return super().forward(*args, **kwargs)

    def model() -> None:
        x = pyro.sample("x", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        pyro.sample("y", dist.Normal(x, 1.0).to_event(1), obs=y)

    def run() -> tuple[Any, NGVB, Callable[[], list[Tensor]]]:
        guide: Any = Shifted(model)
        own = guide
        if listed:
            guide = AutoGuideList(model)
            guide.append(own)
        optim = NGVB(guide, others=Adam({"lr": 0.1}))
        svi = SVI(model, guide, optim, Trace_ELBO())
        return (
            guide,
            optim,
            lambda: [(svi.step(), own.shift.detach().clone())[1] for _ in range(5)],
        )

    guide, optim, steps = run()
    steps()
    saved, parameters = copy.deepcopy(optim.get_state()), copy.deepcopy(guide.state_dict())
    shifts = steps()
    other, optim, steps = run()
    names = [module_name(g[0] if listed else g) for g in (guide, other)]
    assert names[0] != names[1]
    poutine.trace(other).get_trace()
    other.load_state_dict(parameters)
    optim.set_state(saved)
    for again, shift in zip(steps(), shifts, strict=True):
        assert torch.equal(again, shift)


def test_others_of_another_guide() -> None:
    def guide() -> None:
        pyro.sample("x", dist.Normal(0.0, 1.0))

    optim = NGVB(AutoMeanFieldNormal(guide), others=Adam({"lr": 0.1}))
    optim.set_state({"natural": {}, "others": {".gone": {}}})
    assert optim.get_state()["others"] == {".gone": {}}
    with pytest.raises(ValueError, match=r"AutoMeanFieldNormal does not have: \.gone"):
        optim._others_state.step(optim.others, [], "NGVB")  # type: ignore[arg-type]


@guides
@pytest.mark.usefixtures("plain_start")  # which is away from the posterior
def test_a_second_optimizer_starts_from_the_answer_of_the_first(kind: str) -> None:
    """It does not inherit the lag behind the average of an optimizer that is no longer there."""
    guide = GUIDES[kind](regression)
    svi = SVI(regression, guide, NGVB(guide, averaging=True), BatchedELBO(2))
    for _ in range(5):
        svi.step(*data())
    answer = guide.get_posterior().mean.detach().clone()
    assert not torch.equal(guide.sampling_posterior().mean, answer)
    NGVB(guide, averaging=False)
    assert torch.equal(guide.sampling_posterior().mean, answer)


@pytest.mark.parametrize("kind", ["mean_field", "factor"])
def test_an_average_begins_anew_where_the_data_change(kind: str) -> None:
    """After 400 steps on others the guide was 26 sds off 200 steps later, and .2 after 1,600, while the
    losses of the iterate were those of the optimum."""

    def model(y: Tensor) -> None:
        m = pyro.sample("m", dist.Normal(y.new_zeros(3), 10.0).to_event(1))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(m, 1.0).to_event(1), obs=y)

    pyro.set_rng_seed(0)
    y = torch.randn(50, 3)
    guide: Any = AutoMeanFieldNormal(model)
    guide = AutoFactorNormal(model, rank=1) if kind == "factor" else guide
    svi = SVI(model, guide, NGVB(guide), BatchedELBO(4))
    for seen, steps in ((y, 400), (y + 5.0, 200)):
        for _ in range(steps):
            svi.step(seen)
    exact = 50.0 * (y + 5.0).mean(0) / 50.01
    off = (guide.median()["m"] - exact) * 50.01**0.5
    assert float(off.abs().max()) < 0.05


def test_state_of_something_else() -> None:
    optim = NGVB(AutoFullRankNormal(regression))
    with pytest.raises(ValueError, match=r"not the state of NGVB: it has the entries \['loc'\]"):
        optim.set_state({"loc": {}})
    with pytest.raises(ValueError, match=r"part for `others`: pass others= to the optimizer"):
        NGVB(AutoFullRankNormal(regression), others=None).set_state(
            {"natural": {}, "others": {".gone": {}}}
        )


def small(X: Tensor, y: Tensor) -> None:
    w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    with pyro.plate("data", N):
        pyro.sample("y", dist.Normal(X[:, :2] @ w, 1.0), obs=y)


@pytest.mark.parametrize(
    ("model", "setting"),
    [(small, {}), (regression, {"averaging": True}), (regression, {"momentum": 0.9})],
)
def test_state_of_another_model_or_setting(model: Any, setting: dict[str, Any]) -> None:
    guide = AutoFullRankNormal(model)
    optim = NGVB(guide, **setting)
    SVI(model, guide, optim, Trace_ELBO()).step(*data())
    state = optim.get_state()
    guide = AutoFullRankNormal(regression)
    optim = NGVB(guide)
    optim.set_state(state)
    with pytest.raises(ValueError, match=r"saved optimizer state does not fit .* another model"):
        SVI(regression, guide, optim, Trace_ELBO()).step(*data())
