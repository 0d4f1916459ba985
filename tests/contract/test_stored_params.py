"""A parameter store that was loaded before a guide's first use, and parameters that were frozen."""

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyro
import pyro.contrib.gp as gp
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoGuideList, AutoMultivariateNormal
from pyro.nn import PyroModule, PyroParam
from pyro.optim import Adam  # pyright: ignore[reportAttributeAccessIssue]
from torch import Tensor, nn

import pyro_ngvi as ngvi
from pyro_ngvi.distributions import GaussianProcess
from pyro_ngvi.guides import search
from tests.exact.site_cases import linear_data as data

positive = dist.constraints.positive
pytestmark = [
    pytest.mark.filterwarnings("ignore:Pyro's parameter store held other values"),
    pytest.mark.usefixtures("plain_start"),
]


@pytest.fixture(autouse=True)
def empty_store() -> None:
    pyro.clear_param_store()


def with_params(X: Tensor, y: Tensor) -> None:
    sd = pyro.param("sd", torch.tensor(2.0), constraint=positive)
    noise = pyro.param("noise", torch.tensor(1.0), constraint=positive)
    w: Any = pyro.sample("w", dist.Normal(torch.zeros(3), sd).to_event(1))
    with pyro.plate("data", len(X)):
        pyro.sample("y", dist.StudentT(4.0, X @ w, noise), obs=y)


class Module(PyroModule):
    """Parameters of every kind: plain, constrained, and of an ordinary module."""

    def __init__(self) -> None:
        super().__init__()
        self.log_sd = nn.Parameter(torch.tensor(0.7))
        self.noise = PyroParam(torch.tensor(1.0), positive)
        self.shift = nn.Linear(3, 1)
        with torch.no_grad():
            for p in self.shift.parameters():
                p.fill_(0.1)

    def forward(self, X: Tensor, y: Tensor) -> None:
        w: Any = pyro.sample("w", dist.Normal(torch.zeros(3), self.log_sd.exp()).to_event(1))
        with pyro.plate("data", len(X)):
            mean = X @ w + self.shift(X).squeeze(-1)
            pyro.sample("y", dist.StudentT(4.0, mean, self.noise), obs=y)


def process(X: Tensor, y: Tensor) -> None:
    f: Any = pyro.sample("f", GaussianProcess(gp.kernels.Matern32(3), X))
    with pyro.plate("data", len(X)):
        pyro.sample("y", dist.Normal(f, 0.5), obs=y)


def sites(model: Any) -> Any:
    guide = ngvi.AutoSites(model, name="mine")
    return SVI(model, guide, ngvi.CVI(guide, others=Adam({"lr": 0.1})), ngvi.SitesELBO())


def full_rank(model: Any) -> Any:
    guide = ngvi.AutoFullRankNormal(model, name="mine")
    return SVI(model, guide, ngvi.NGVB(guide, others=Adam({"lr": 0.1})), Trace_ELBO(4))


def batched(model: Any) -> Any:
    guide = ngvi.AutoMeanFieldNormal(model, name="mine")
    optim = ngvi.NGVB(guide, averaging=False, others=Adam({"lr": 0.1}))
    return SVI(model, guide, optim, ngvi.BatchedELBO(4))


def inversion_free(model: Any) -> Any:
    guide = AutoMultivariateNormal(model)
    return SVI(model, guide, ngvi.IFVB(guide, others=Adam({"lr": 0.1})), Trace_ELBO(4))


def function(model: Any) -> Any:
    def guide(X: Tensor, y: Tensor) -> None:
        loc = pyro.param("loc", torch.zeros(3))
        pyro.sample("w", dist.Normal(loc, 0.1).to_event(1))

    return SVI(model, guide, Adam({"lr": 0.1}), ngvi.BatchedELBO(4))


PLAIN = [sites, full_rank, batched, function]


def first(svi: Any, use: str) -> float:
    pyro.set_rng_seed(3)
    return float(getattr(svi, use)(*data()))


@pytest.mark.parametrize("use", ["evaluate_loss", "step"])
@pytest.mark.parametrize("make", PLAIN, ids=lambda f: f.__name__)
@pytest.mark.parametrize("model", [lambda: with_params, Module], ids=["params", "module"])
def test_a_store_loaded_before_the_first_use_counts(
    model: Callable[[], Any], make: Any, use: str, tmp_path: Path
) -> None:
    """Whatever uses the guide first: the value is the one of the run that was saved."""
    trained = make(model())
    for _ in range(4):
        trained.step(*data())
    pyro.get_param_store().save(str(tmp_path / "store"))
    saved = first(trained, use)
    pyro.clear_param_store()
    resumed = make(model())
    pyro.get_param_store().load(str(tmp_path / "store"))
    assert first(resumed, use) == pytest.approx(saved, abs=1e-9)
    # and what the optimizer trains is what the model reads
    before = {name: p.detach().clone() for name, p in pyro.get_param_store().items()}
    resumed.step(*data())
    resumed.step(*data())
    moved = {name for name, p in pyro.get_param_store().items() if not torch.equal(p, before[name])}
    assert moved == set(before)


@pytest.mark.parametrize("make", [*PLAIN, inversion_free], ids=lambda f: f.__name__)
def test_a_second_model_in_one_store_is_trained(make: Any) -> None:
    """As in a notebook whose cell is run twice; Pyro steps the parameters of the first model alone."""
    make(Module()).step(*data())
    model = Module()
    svi = make(model)
    svi.step(*data())
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    svi.step(*data())
    assert all(not torch.equal(p, before[name]) for name, p in model.named_parameters())


def matrix(X: Tensor, y: Tensor) -> None:
    W: Any = pyro.sample("W", dist.Normal(torch.zeros(3, 2), 1.0).to_event(2))
    with pyro.plate("data", len(X)):
        pyro.sample("y", dist.Normal((X @ W).sum(-1), 1.0), obs=y)


NGVB, IFVB = ngvi.NGVB, ngvi.IFVB
IN_USE: dict[str, tuple[Callable[[Any], Any], Any]] = {
    "mean field": (ngvi.AutoMeanFieldNormal, NGVB),
    "full rank": (ngvi.AutoFullRankNormal, NGVB),
    "factor": (lambda m: ngvi.AutoFactorNormal(m, rank=2), NGVB),
    "precision": (lambda m: ngvi.AutoFactorPrecision(m, rank=2), NGVB),
    "matrix": (ngvi.AutoMatrixNormal, NGVB),
    "exponential": (ngvi.AutoExponentialFamily, NGVB),
    "walsh hadamard": (lambda m: ngvi.AutoWalshHadamard(m, sites=["W"]), NGVB),
    "coupling": (lambda m: ngvi.AutoCouplingFlow(m, layers=2, hidden=(8,)), IFVB),
    "orthogonal": (ngvi.AutoOrthogonalFlow, IFVB),
}


@pytest.mark.parametrize("kind", IN_USE)
def test_a_store_restored_while_the_guide_is_in_use_counts(kind: str) -> None:
    """As with Pyro's guides: what reads the guide, and the steps to come, have the restored values."""
    make, rule = IN_USE[kind]
    X, y = data()
    guide = make(matrix)
    svi = SVI(matrix, guide, rule(guide, others=Adam({"lr": 0.01})), Trace_ELBO(4))
    for _ in range(4):
        svi.step(X, y)
    state = {name: p.detach().clone() for name, p in guide.state_dict().items()}
    loss = first(svi, "evaluate_loss")
    best = copy.deepcopy(pyro.get_param_store().get_state())
    for _ in range(4):
        svi.step(X, y - 10.0)
    last = pyro.get_param_store().get_state()
    moved = {name: p.detach().clone() for name, p in guide.state_dict().items()}
    pyro.get_param_store().set_state(best)
    assert first(svi, "evaluate_loss") == loss
    assert all(torch.equal(p, state[name]) for name, p in guide.state_dict().items())
    # and the other way round: what was replaced has not been written to
    pyro.get_param_store().set_state(last)
    guide(X, y)
    assert all(torch.equal(p, moved[name]) for name, p in guide.state_dict().items())
    pyro.get_param_store().set_state(best)
    svi.step(X, y)
    store = pyro.get_param_store()
    assert all(p is store[str(store.param_name(p))] for p in guide.parameters())
    assert not all(torch.equal(p, state[name]) for name, p in guide.state_dict().items())


@pytest.mark.parametrize("use", ["loss", "median", "draw", "step", "copy"])
def test_sites_restored_while_the_guide_is_in_use_count(use: str) -> None:
    X, y = data()
    guide = ngvi.AutoSites(matrix)
    svi = SVI(matrix, guide, ngvi.CVI(guide), ngvi.SitesELBO())
    svi.step(X, y)
    median, loss = guide.median()["W"], svi.evaluate_loss(X, y)
    best = copy.deepcopy(pyro.get_param_store().get_state())
    for _ in range(2):
        svi.step(X, y - 10.0)
    assert not torch.allclose(guide.median()["W"], median)
    svi.evaluate_loss(X, y)
    pyro.get_param_store().set_state(best)
    if use == "loss":
        assert svi.evaluate_loss(X, y) == pytest.approx(loss, abs=1e-9)
    if use == "draw":
        guide(X, y)
    if use == "step":
        assert svi.step(X, y) == pytest.approx(loss, abs=1e-9)
        store = pyro.get_param_store()
        assert all(p is store[str(store.param_name(p))] for p in guide.natural_params().values())
    other = copy.deepcopy(guide) if use == "copy" else guide
    torch.testing.assert_close(other.median()["W"], median)


def test_sites_restored_before_any_step_take_the_data_of_the_next_call() -> None:
    X, y = data()
    trained = ngvi.AutoSites(matrix, name="mine")
    SVI(matrix, trained, ngvi.CVI(trained), ngvi.SitesELBO()).step(X, y)
    saved, median = pyro.get_param_store().get_state(), trained.median()["W"]
    pyro.clear_param_store()
    guide = ngvi.AutoSites(matrix, name="mine")
    guide(X, y)
    pyro.get_param_store().set_state(saved)
    with pytest.raises(TypeError, match="missing 2 required positional arguments: 'X' and 'y'"):
        guide.median()
    torch.testing.assert_close(guide.median(X, y)["W"], median)


def test_state_dict_of_sites_before_the_first_call() -> None:
    X, y = data()
    trained = ngvi.AutoSites(matrix)
    SVI(matrix, trained, ngvi.CVI(trained), ngvi.SitesELBO()).step(X, y)
    guide = ngvi.AutoSites(matrix)
    guide.load_state_dict(trained.state_dict())
    guide(X, y)
    assert not guide.fresh
    torch.testing.assert_close(guide.median(X, y)["W"], trained.median()["W"])


@pytest.mark.parametrize("wrap", [lambda p: p.detach(), nn.Parameter], ids=["tensor", "parameter"])
def test_functional_call_takes_what_it_is_given(wrap: Any) -> None:
    X, y = data()
    guide = ngvi.AutoFullRankNormal(matrix)
    guide(X, y)
    given = {name: wrap(torch.full_like(p, 50.0)) for name, p in guide.named_parameters()}
    assert torch.func.functional_call(guide, given, (X, y))["W"].mean() > 40.0
    assert all((p == 50.0).all() for p in given.values())
    assert guide(X, y)["W"].abs().mean() < 5.0


@pytest.mark.parametrize("kind", [ngvi.AutoFullRankNormal, ngvi.AutoSites])
def test_a_loaded_guide_of_another_name_is_spoken_of(kind: Any) -> None:
    """A cell that was run twice: its second guide is another one than that of a new process."""
    name = f"{kind.__name__}_2000"
    pyro.get_param_store()[f"{name}.loc"] = torch.zeros(3)
    with pytest.warns(UserWarning, match=rf"'{name}', which no guide .* name='{name}'"):
        kind(with_params)(*data())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kind(with_params, name=name)(*data())


def test_inducing_inputs_of_a_loaded_store(tmp_path: Path) -> None:
    def made() -> tuple[Any, Any]:
        start = nn.Parameter(torch.linspace(-1.0, 1.0, 12).reshape(4, 3))
        guide = ngvi.AutoSites(process, inducing=start, name="mine")  # pyright: ignore[reportArgumentType]
        optim = ngvi.CVI(guide, others=Adam({"lr": 0.1}))
        return start, SVI(process, guide, optim, ngvi.SitesELBO())

    inducing, svi = made()
    for _ in range(4):
        svi.step(*data())
    moved, saved = inducing.detach().clone(), svi.evaluate_loss(*data())
    pyro.get_param_store().save(str(tmp_path / "store"))
    pyro.clear_param_store()
    inducing, svi = made()
    pyro.get_param_store().load(str(tmp_path / "store"))
    assert svi.evaluate_loss(*data()) == pytest.approx(saved, abs=1e-9)
    assert torch.equal(inducing, moved)


def test_what_is_taken_from_the_store_is_named() -> None:
    model = Module()
    pyro.get_param_store()["log_sd"] = torch.tensor(0.3)
    with pytest.warns(UserWarning, match=r"other values.*taken them: 'log_sd'\. If"):
        ngvi.AutoSites(model)(*data())
    with warnings.catch_warnings():  # the same values, or a store without them
        warnings.simplefilter("error")
        ngvi.AutoSites(model)(*data())
        pyro.clear_param_store()
        ngvi.AutoSites(Module())(*data())


@pytest.mark.parametrize("make", [*PLAIN, inversion_free], ids=lambda f: f.__name__)
def test_a_store_of_another_model_is_refused(make: Any) -> None:
    svi = make(Module())
    pyro.get_param_store()["log_sd"] = torch.zeros(2)
    with pytest.raises(ValueError, match=r"'log_sd' with the shape \(2,\).*shape \(\)"):
        svi.step(*data())


@pytest.mark.parametrize("make", [*PLAIN, inversion_free], ids=lambda f: f.__name__)
@pytest.mark.parametrize("stored", [False, True])
def test_a_frozen_parameter_stays_frozen(make: Any, stored: bool) -> None:
    """Pyro makes every parameter that it registers require gradients."""
    model = Module()
    model.log_sd.requires_grad_(False)
    if stored:
        pyro.get_param_store()["log_sd"] = torch.tensor(0.3)
    svi = make(model)
    for _ in range(3):
        svi.step(*data())
    assert not model.log_sd.requires_grad
    assert float(model.log_sd) == (0.3 if stored else 0.7)
    noise: Any = model.noise
    assert noise.item() != 1.0  # the others are learned


def test_no_trainer_is_asked_for_where_all_parameters_are_frozen() -> None:
    model = Module()
    for p in model.parameters():
        p.requires_grad_(False)
    model.shift.eval()  # or Pyro warns that it does not register them
    guide = ngvi.AutoSites(model)
    SVI(model, guide, ngvi.CVI(guide), ngvi.SitesELBO()).step(*data())


def test_part_of_a_list_takes_what_was_loaded() -> None:
    model = Module()
    pyro.get_param_store()["log_sd"] = torch.tensor(0.3)
    guide = AutoGuideList(model)
    guide.append(ngvi.AutoFullRankNormal(model))
    guide(*data())
    assert model.log_sd.item() == 0.3


def test_our_parts_of_a_list_know_the_others_under_ifvb(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a search for a start would see them redrawn, it is left out."""
    found, own = list[list[str]](), search._sites

    def sites(*how: Any) -> Any:
        found.append(sorted(own(*how)))
        return own(*how)

    monkeypatch.setattr(search, "_sites", sites)
    monkeypatch.setattr(search, "UNASKED", 10)

    def model() -> None:
        a = pyro.sample("a", dist.Normal(0.0, 1.0))
        b = pyro.sample("b", dist.Normal(1.0, 1.0))
        pyro.sample("y", dist.Normal(a * b, 0.2), obs=torch.tensor(0.5))

    for rule in (ngvi.NGVB, ngvi.IFVB):
        found.clear()
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        guide: Any = AutoGuideList(model)
        for name in ("a", "b"):
            guide.append(ngvi.AutoFullRankNormal(poutine.block(model, expose=[name])))
        SVI(model, guide, rule(guide), Trace_ELBO()).step()
        assert found == [["b"], ["a"]], rule


@pytest.mark.filterwarnings("ignore::UserWarning")  # Pyro's, of parameters not substituted
def test_a_value_that_a_handler_gives_stays_out_of_the_module() -> None:
    model = Module()
    with poutine.substitute(data={"log_sd": torch.tensor(5.0)}):
        ngvi.AutoFullRankNormal(model)(*data())
    assert model.log_sd.item() == pytest.approx(0.7)


class Own(PyroModule):
    """A guide that is a module."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.Parameter(torch.zeros(3))
        self.sd = PyroParam(torch.tensor(0.1), positive)

    def forward(self, X: Tensor, y: Tensor) -> None:
        sd: Any = self.sd
        pyro.sample("w", dist.Normal(self.mean, sd).to_event(1))


@pytest.mark.filterwarnings("ignore:[A-Z]+ leaves what is not natural")
@pytest.mark.parametrize("clear", [False, True])
@pytest.mark.parametrize("of_guide", [None, AutoMultivariateNormal, lambda model: Own()])
def test_what_is_read_of_a_fit_is_its_own_after_another_of_the_same_names(
    of_guide: Any, clear: bool
) -> None:
    X, y = data()

    def fitted(y: Tensor) -> Any:
        model = Module() if of_guide is None else with_params
        guide = None if of_guide is None else of_guide(model)
        return ngvi.fit(model, X, y, guide=guide, seed=0, max_steps=30, progress=False)

    def drawn(fit: Any) -> Tensor:
        return fit.sample(50, seed=0)["w"]

    first = fitted(y)
    own, elbo = drawn(first), first.elbo[0]
    if clear:
        pyro.clear_param_store()
    elif of_guide not in (None, AutoMultivariateNormal):
        with pytest.raises(ValueError, match="another module's 'mean'"):
            fitted(y)
        return
    second = fitted(5.0 - 3.0 * y)
    other = drawn(second)
    assert not torch.allclose(own, other, atol=0.1)
    del first.__dict__["khat"]  # as if it had not been read
    assert torch.equal(drawn(first), own) and torch.equal(drawn(second), other)
    assert first.elbo[0] == pytest.approx(elbo, abs=0.5)


@pytest.mark.filterwarnings("ignore:[A-Z]+ leaves what is not natural")
def test_a_guide_that_its_user_trains_on_is_read_as_it_is() -> None:
    X, y = data()
    guide = AutoMultivariateNormal(with_params)
    fit = ngvi.fit(with_params, X, y, guide=guide, seed=0, max_steps=5, progress=False)
    fit.sample(2)
    with torch.no_grad():
        guide.loc.fill_(7.0)
    assert fit.sample(200, seed=0)["w"].mean().item() == pytest.approx(7.0, abs=0.5)


@pytest.mark.filterwarnings("ignore:[A-Z]+ leaves what is not natural")
def test_a_fit_is_its_own_however_another_ends_and_after_it_was_loaded(tmp_path: Path) -> None:
    X, y = data()

    def fitted(y: Tensor, **how: Any) -> Any:
        guide = AutoMultivariateNormal(with_params)
        how = {"max_steps": 20, "progress": False} | how
        return ngvi.fit(with_params, X, y, guide=guide, seed=0, **how)

    def fails(fit: Any) -> None:
        if fit.steps > 10:
            raise KeyError("of the user's")

    def reads(fit: Any) -> None:
        if fit.steps > 10:
            first.sample(10)

    first = fitted(y)
    own = first.sample(50, seed=0)["w"]
    first.save(tmp_path / "fit")
    with pytest.raises(KeyError):
        fitted(5.0 - 3.0 * y, callbacks=[fails])
    assert torch.equal(first.sample(50, seed=0)["w"], own)
    with pytest.raises(ValueError, match="Another fit is running, which trains the parameter"):
        fitted(5.0 - 3.0 * y, callbacks=[reads])
    assert torch.equal(first.sample(50, seed=0)["w"], own)
    guide = AutoMultivariateNormal(with_params)
    loaded = ngvi.load(tmp_path / "fit", with_params, X, y, guide=guide)
    assert torch.equal(loaded.sample(50, seed=0)["w"], own)
    fitted(5.0 - 3.0 * y)
    assert torch.equal(loaded.sample(50, seed=0)["w"], own)
