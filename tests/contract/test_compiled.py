"""Steps by graphs are those of eager SVI, bit for bit, or are refused by a sentence."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoMultivariateNormal, AutoNormal
from pyro.nn import PyroModule
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import pyro_ngvi as ngvi
from pyro_ngvi import BatchedELBO
from pyro_ngvi.compiled import CompiledSVI

pytestmark = pytest.mark.usefixtures("plain_start")

N, D = 12, 3


def data(n: int = N, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(n, D, generator=generator)
    return X, (X.sum(-1) + torch.randn(n, generator=generator) > 0.0).double()


def logistic(X: Tensor, y: Tensor, subsample: int | None = None) -> None:
    w = pyro.sample("w", dist.Normal(X.new_zeros(D), 2.0).to_event(1))
    with pyro.plate("data", len(y), subsample_size=subsample) as index:
        pyro.sample("y", dist.Bernoulli(logits=X[index] @ w), obs=y[index])


def matrices(X: Tensor, y: Tensor) -> None:
    """The model of the registry's guides: a matrix and a positive site."""
    W = pyro.sample("W", dist.Normal(X.new_zeros(2, D), 1.0).to_event(2))
    s = pyro.sample("s", dist.Gamma(X.new_full((), 2.0), 1.0))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal((X @ W.mT).sum(-1), s), obs=y)


def units(X: Tensor, y: Tensor) -> None:
    mean, scale = pyro.sample("m", dist.Normal(0.0, 3.0)), pyro.sample("s", dist.HalfNormal(2.0))
    with pyro.plate("unit", N, dim=-1):
        effect = pyro.sample("effect", dist.Normal(mean, scale))
        with pyro.plate("visit", D, dim=-2):
            pyro.sample("x", dist.Normal(effect, 1.0), obs=X.mT)


def learnt(X: Tensor, y: Tensor) -> None:
    noise = pyro.param("noise", torch.tensor(1.0), constraint=dist.constraints.positive)
    w = pyro.sample("w", dist.Normal(X.new_zeros(D), 2.0).to_event(1))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(X @ w, noise), obs=y)


def make(
    model: Any = logistic,
    guide: Callable[..., Any] = ngvi.AutoFullRankNormal,
    rule: Callable[[Any], Any] = ngvi.NGVB,
    loss: Any = None,
) -> SVI:
    pyro.clear_param_store()
    pyro.set_rng_seed(1)
    built = guide(model)
    return SVI(model, built, rule(built), BatchedELBO(4) if loss is None else loss)


def compiled(*args: Any, **kwargs: Any) -> CompiledSVI:
    return ngvi.compile(make(*args, **kwargs), inductor=False)


def everything(svi: SVI) -> list[Tensor]:
    """Parameters, buffers and the state of the optimizer."""
    params = [p.detach().clone() for _, p in pyro.get_param_store().named_parameters()]
    buffers = [
        b.clone() for m in (svi.model, svi.guide) if isinstance(m, nn.Module) for b in m.buffers()
    ]
    state = tree_leaves(dict(sorted(svi.optim.get_state().items())))
    return params + buffers + [x for x in state if isinstance(x, Tensor)]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


Setting = tuple[Any, Callable[..., Any], Callable[[Any], Any], Callable[[], Any]]
adam = pyro.optim.Adam  # pyright: ignore[reportAttributeAccessIssue]

#: for what depends on no rule: a recording with a fifth of the operations
SMALL: Any = {"guide": AutoNormal, "rule": lambda guide: adam({"lr": 0.01})}

CASES: dict[str, Setting] = {
    "full rank": (logistic, ngvi.AutoFullRankNormal, ngvi.NGVB, partial(BatchedELBO, 4)),
    "averaged, of a minibatch": (
        partial(logistic, subsample=5),
        ngvi.AutoMeanFieldNormal,
        ngvi.NGVB,
        partial(BatchedELBO, 4),
    ),
    "VOGN": (
        logistic,
        ngvi.AutoMeanFieldNormal,
        ngvi.optim.VOGN,
        partial(BatchedELBO, 4, curvature="gauss_newton"),
    ),
    "VON": (
        logistic,
        ngvi.AutoFullRankNormal,
        ngvi.optim.VON,
        partial(BatchedELBO, 2, curvature="hessian"),
    ),
    "sites": (logistic, ngvi.AutoSites, ngvi.CVI, ngvi.SitesELBO),
    "units given globals": (units, ngvi.AutoHierarchical, ngvi.NGVB, partial(BatchedELBO, 4)),
    "a parameter of the model": (
        learnt,
        ngvi.AutoFullRankNormal,
        ngvi.NGVB,
        partial(BatchedELBO, 4),
    ),
    "Adam on Pyro's guide": (
        logistic,
        AutoMultivariateNormal,
        lambda guide: adam({"lr": 0.01}),
        partial(BatchedELBO, 4),
    ),
}


@pytest.mark.parametrize("kind", CASES)
@pytest.mark.filterwarnings("ignore:NGVB leaves what is not natural")
def test_steps_are_those_of_eager_svi(kind: str) -> None:
    model, guide, rule, loss = CASES[kind]
    X, y = data()
    runs: list[Any] = []
    svi: Any = None
    for build in (make, compiled):
        svi = build(model, guide, rule, loss())
        losses = [svi.step(X, y) for _ in range(12)]
        runs.append((losses, everything(svi), torch.get_rng_state()))
    assert svi.tier == "replay"
    assert runs[0][0] == runs[1][0]
    assert same(runs[0][1], runs[1][1])
    assert torch.equal(runs[0][2], runs[1][2])


def test_other_data_have_their_graphs_and_answers() -> None:
    batches = [data(8, 1), data(8, 2), data(5, 3), data(8, 4), data(5, 5), data(8, 6)]
    runs: list[Any] = []
    svi: Any = None
    for build in (make, compiled):
        svi = build()
        runs.append([svi.step(*batch) for _ in range(4) for batch in batches] + everything(svi))
    assert svi.tier == "replay"
    assert runs[0][:24] == runs[1][:24] and same(runs[0][24:], runs[1][24:])


def test_a_run_is_its_steps() -> None:
    X, y = data()
    svi: Any = make()
    seen: list[tuple[int, int]] = []
    losses = [svi.step(X, y) for _ in range(30)]
    eager = everything(svi)
    svi = compiled()
    found = svi.run(30, X, y, callback=lambda k, losses: seen.append((k, len(losses))), every=10)
    assert found.tolist() == losses and same(everything(svi), eager)
    assert seen == [(10, 10), (20, 20), (30, 30)]
    assert svi.optim.report().outcome in ("accepted", "damped")
    assert len(svi.run(50, X, y, callback=lambda k, losses: k == 20, every=10)) == 20


def test_runs_do_not_pass_over_comparisons() -> None:
    """So a run finds a program that has changed as steps do, by use number 8 or 64."""
    scale = [1.0]

    def model(X: Tensor, y: Tensor) -> None:
        w = pyro.sample("w", dist.Normal(X.new_zeros(D), scale[0]).to_event(1))
        pyro.sample("y", dist.Normal(X @ w, 1.0).to_event(1), obs=y)

    X, y = data()
    svi = compiled(model)
    svi.run(20, X, y)
    scale[0] = 3.0
    with pytest.warns(UserWarning, match="at use 64 it gave other numbers than the program"):
        svi.run(60, X, y)
    assert svi.tier == "eager" and "steps since their last comparison may be wrong" in svi.reason
    before = everything(svi)
    svi.step(X, y)
    assert not same(before, everything(svi))


def test_graphs_outlive_guides_that_come_later() -> None:
    X, y = data()
    svi = compiled()
    for _ in range(5):
        svi.step(X, y)
    other = ngvi.AutoMeanFieldNormal(logistic)
    SVI(logistic, other, ngvi.NGVB(other), BatchedELBO(2)).step(X, y)
    for _ in range(10):  # past a comparison
        svi.step(X, y)
        assert svi.tier == "replay"


def test_what_is_skipped_is_told() -> None:
    X, y = data()
    svi = compiled()
    for _ in range(5):
        svi.step(X, y)
    before = [p.detach().clone() for _, p in pyro.get_param_store().named_parameters()]
    with pytest.warns(RuntimeWarning, match="skipped a step"):
        svi.step(X * torch.nan, y)
    after = [p.detach() for _, p in pyro.get_param_store().named_parameters()]
    assert same(before, after) and svi.tier == "replay"


def test_a_restored_store_is_followed() -> None:
    X, y = data()
    results = []
    for build in (make, compiled):
        svi = build()
        for _ in range(6):
            svi.step(X, y)
        kept, state = pyro.get_param_store().get_state(), svi.optim.get_state()
        for _ in range(5):
            svi.step(X, y)
        pyro.get_param_store().set_state(kept)
        svi.optim.set_state(state)
        pyro.set_rng_seed(7)
        results.append([svi.step(X, y) for _ in range(6)])
    assert results[0] == results[1]


def test_settings_of_the_loss_are_part_of_the_structure() -> None:
    X, y = data()
    results: list[Any] = []
    svi: Any = None
    for build in (make, compiled):
        loss = BatchedELBO(4)
        svi, losses = build(loss=loss, **SMALL), []
        for weight in (0.5, 0.5, 0.5, 0.5, 1.0, 1.0, 1.0, 1.0):
            loss.kl_weight = weight
            losses.append(svi.step(X, y))
        results.append(losses)
    assert results[0] == results[1] and svi.tier == "replay"


def test_numbers_around_the_program_are_part_of_the_structure() -> None:
    """Of the names in a function, and among the attributes of a module, at once."""
    X, y = data()

    class Module(PyroModule):
        scale = 1.0

        def __init__(self) -> None:
            super().__init__()
            self.scale = 1.0

        def forward(self, X: Tensor, y: Tensor) -> None:
            w = pyro.sample("w", dist.Normal(X.new_zeros(D), self.scale).to_event(1))
            pyro.sample("y", dist.Normal(X @ w, 1.0).to_event(1), obs=y)

    results: list[Any] = []
    for build in (make, compiled):
        scale, module = 1.0, Module()

        def function(X: Tensor, y: Tensor) -> None:
            w = pyro.sample("w", dist.Normal(X.new_zeros(D), scale).to_event(1))  # noqa: B023
            pyro.sample("y", dist.Normal(X @ w, 1.0).to_event(1), obs=y)

        losses = []
        for model in (function, module):
            scale, module.scale = 1.0, 1.0
            svi = build(model, **SMALL)
            losses += [svi.step(X, y) for _ in range(20)]
            scale, module.scale = 3.0, 3.0
            losses += [svi.step(X, y) for _ in range(5)]
        results.append(losses)
    assert results[0] == results[1]


def noisy(X: Tensor, y: Tensor, scale: Any, offset: Any = None) -> None:
    w = pyro.sample("w", dist.Normal(X.new_zeros(D), 2.0).to_event(1))
    mean = X @ w if offset is None else X @ w + offset["of all"]
    pyro.sample("y", dist.Normal(mean, scale).to_event(1), obs=y)


def other(X: Tensor, y: Tensor, scale: Any) -> None:
    noisy(X, y - 10.0, scale)


def replaced() -> Iterator[Any]:
    yield from (partial(noisy, scale=scale) for scale in (1.0, 1.0, 3.0))
    yield from (partial(other, scale=3.0), partial(partial(other, scale=2.0), scale=1.0))
    changed = partial(noisy, scale=1.0)
    for changed.keywords["scale"] in (2.0, torch.tensor(2.0), torch.tensor(4.0)):
        yield changed
    yield from (partial(noisy, scale=2.0, offset={"of all": torch.tensor(a)}) for a in (1.0, 5.0))


def test_the_model_and_what_a_partial_binds_are_part_of_the_structure() -> None:
    """Replaced, or its keywords changed in place; tensors are inputs, and equal partials are one."""
    (X, y), results, tiers = data(), list[Any](), list[str]()
    for build in (make, compiled):
        svi, losses = build(partial(noisy, scale=1.0), **SMALL), []
        for model in replaced():
            svi.model = model
            for _ in range(5):
                losses.append(svi.step(X, y))
                tiers += [svi.tier] if isinstance(svi, CompiledSVI) else []
        results.append(losses)
    assert results[0] == results[1]
    new, known = ["eager", "recorded"] + ["replay"] * 3, ["replay"] * 5
    assert tiers == [*new, *known, *new * 5, *known, *new, *known]


def test_another_guide_function_has_a_graph_of_its_own() -> None:
    def guide(X: Tensor, y: Tensor, scale: float) -> None:
        loc = pyro.param("loc", torch.zeros(D))
        pyro.sample("w", dist.Normal(loc, scale).to_event(1))

    X, y = data()
    results: list[Any] = []
    for build in (make, compiled):
        svi = build(guide=lambda _: partial(guide, scale=0.1), rule=lambda _: adam({"lr": 0.01}))
        losses = [svi.step(X, y) for _ in range(5)]
        svi.guide = partial(guide, scale=2.0)
        results.append(losses + [svi.step(X, y) for _ in range(5)])
    assert results[0] == results[1]


# --- what is refused ----------------------------------------------------------------------------

ELSEWHERE = torch.ones(N)


def of_globals(X: Tensor, y: Tensor) -> None:
    w = pyro.sample("w", dist.Normal(X.new_zeros(D), 2.0).to_event(1))
    pyro.sample("y", dist.Normal(X @ w + ELSEWHERE, 1.0).to_event(1), obs=y)


def of_values(X: Tensor, y: Tensor) -> None:
    w = pyro.sample("w", dist.Normal(X.new_zeros(D), float(y.mean()) + 1.0).to_event(1))
    pyro.sample("y", dist.Normal(X @ w, 1.0).to_event(1), obs=y)


def branching(X: Tensor, y: Tensor) -> None:
    scale = 2.0 if y.sum() > 3 else 1.0
    w = pyro.sample("w", dist.Normal(X.new_zeros(D), scale).to_event(1))
    pyro.sample("y", dist.Normal(X @ w, 1.0).to_event(1), obs=y)


def of_arrays(X: Tensor, y: Tensor) -> None:
    shift = torch.from_numpy(y.numpy() + 1.0)
    w = pyro.sample("w", dist.Normal(X.new_zeros(D), 2.0).to_event(1))
    pyro.sample("y", dist.Normal(X @ w + shift, 1.0).to_event(1), obs=y)


def of_lists(X: Tensor, y: Tensor) -> None:
    logistic(torch.tensor(X.tolist()), y)


def sorting(X: Tensor, y: Tensor) -> None:
    logistic(X[y.nonzero()[:, 0]], y[y.nonzero()[:, 0]])


counted = [0.0]


def counting(X: Tensor, y: Tensor) -> None:
    counted[0] += 1.0
    w = pyro.sample("w", dist.Normal(X.new_zeros(D), 1.0 + counted[0]).to_event(1))
    pyro.sample("y", dist.Normal(X @ w, 1.0).to_event(1), obs=y)


def drawing(X: Tensor, y: Tensor) -> None:
    generator = torch.Generator().manual_seed(0)
    logistic(X + torch.randn(X.shape, generator=generator), y)


REFUSED: dict[str, tuple[Any, str]] = {
    "a tensor of the surroundings": (of_globals, r"uses a tensor of shape \(12,\) that it finds"),
    "a number from a tensor": (of_values, "test_compiled.py, line .* reads the value of a tensor"),
    "a branch": (branching, "test_compiled.py, line .* reads the value of a tensor"),
    "a generator": (drawing, "it draws from a random generator of its own"),
    "a count": (counting, "gave other numbers than the program"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_a_graph_cannot_do_stays_eager(kind: str) -> None:
    model, why = REFUSED[kind]
    X, y = data()
    counted[0] = 0.0
    svi = make(model, **SMALL)
    losses = [svi.step(X, y) for _ in range(8)]
    eager = everything(svi)
    counted[0] = 0.0
    svi = compiled(model, **SMALL)
    with pytest.warns(UserWarning, match=why) as told:
        found = [svi.step(X, y) for _ in range(8)]
    assert len(told) == 1 and len(str(told[0].message)) <= 240
    assert svi.tier == "eager" and svi.reason
    if kind != "a count":  # which an extra run of the program changes
        assert found == losses and same(everything(svi), eager)


def test_other_optimizers_get_the_gradient_of_an_eager_step_once() -> None:
    """Where a recording is refused after its backward pass."""
    X, y = data()
    how: Any = (of_globals, AutoMultivariateNormal, lambda guide: adam({"lr": 0.01}))
    svi = make(*how)
    losses = [svi.step(X, y) for _ in range(8)]
    svi = compiled(*how)
    with pytest.warns(UserWarning, match="uses a tensor"):
        assert [svi.step(X, y) for _ in range(8)] == losses


def test_one_tensor_in_two_places_is_another_structure() -> None:
    def model(X: Tensor, Z: Tensor, y: Tensor) -> None:
        logistic(X + 2.0 * Z, y)

    X, y = data()
    Z = data(seed=1)[0]
    calls = [(X, X, y)] * 6 + [(X, Z, y)] * 6
    svi = make(model, **SMALL)
    losses = [svi.step(*call) for call in calls]
    svi = compiled(model, **SMALL)
    assert [svi.step(*call) for call in calls] == losses
    assert svi.tier == "replay"


@pytest.mark.parametrize("model", [of_arrays, of_lists])
def test_data_that_take_another_way_are_found_with_the_next_data(model: Any) -> None:
    """What NumPy or a list make of the data stands in the graph like a number of the program."""
    batches = [data(seed=k // 4) for k in range(12)]
    svi = make(model, **SMALL)
    losses = [svi.step(*batch) for batch in batches]
    svi = compiled(model, **SMALL)
    with pytest.warns(UserWarning, match="gave other numbers than the program"):
        assert [svi.step(*batch) for batch in batches] == losses


def test_settings_that_a_graph_does_not_know_stay_eager() -> None:
    X, y = data()
    svi = compiled()
    for _ in range(3):
        svi.step(X, y)
    with pytest.warns(UserWarning, match="effect handlers are around"), poutine.scale(scale=0.5):
        svi.step(X, y)
    with pytest.warns(UserWarning, match="of type ndarray, neither tensor nor number"):
        compiled(lambda X, y: logistic(torch.as_tensor(X), torch.as_tensor(y))).step(X.numpy(), y)
    with pytest.warns(UserWarning, match=r"take loss=pyro_ngvi.BatchedELBO|reads the value"):
        svi = compiled(loss=Trace_ELBO())
        for _ in range(6):
            svi.step(X, y)


def test_errors_of_the_program_are_its_own() -> None:
    X, y = data()
    svi = compiled(**SMALL)
    for _ in range(3):
        svi.step(X, y)
    with pytest.raises(RuntimeError, match="size"):
        svi.step(X[:, :2], y)
    assert svi.step(X, y) > 0.0


def test_only_an_svi_is_compiled() -> None:
    guide: Any = ngvi.AutoFullRankNormal(logistic)
    with pytest.raises(TypeError, match="compile takes an SVI, got AutoFullRankNormal"):
        ngvi.compile(guide)


@pytest.mark.filterwarnings("error")
def test_inductor_that_fails_is_told_and_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "pyro_ngvi.compiled.lowered.PROGRAM", "raise SystemExit('no compiler here')"
    )
    X, y = data()
    svi = ngvi.compile(make(), wait=True)
    with pytest.warns(UserWarning, match="Inductor failed: no compiler here"):
        for _ in range(6):
            svi.step(X, y)
    assert svi.tier == "replay" and "no compiler" in svi.reason


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler")
def test_inductors_code_gives_the_same_numbers() -> None:
    X, y = data()
    svi = make()
    losses = [svi.step(X, y) for _ in range(20)]
    eager = everything(svi)
    validates = torch.distributions.Distribution._validate_args
    svi = ngvi.compile(make(), wait=True)
    found = [svi.step(X, y) for _ in range(20)]
    assert svi.tier == "inductor" and svi.reason == ""
    assert torch.distributions.Distribution._validate_args is validates
    torch.testing.assert_close(torch.tensor(found), torch.tensor(losses), rtol=1e-12, atol=0.0)
    for x, z in zip(everything(svi), eager, strict=True):
        torch.testing.assert_close(x, z, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    "guide",
    [
        AutoNormal,
        pytest.param(AutoMultivariateNormal, marks=pytest.mark.slow),
        pytest.param(ngvi.AutoCouplingFlow, marks=pytest.mark.slow),
    ],
)
def test_inversion_free(guide: Any) -> None:
    """Conjugate gradients end, steps are shortened, and a ring of scores turns, without the host."""
    X, y = data(60)
    results: list[Any] = []
    svi: Any = None
    for build in (make, compiled):
        svi = build(logistic, guide, ngvi.AIFVB)
        losses, shortened = [], 0
        for _ in range(30):
            losses.append(svi.step(X, y))
            shortened += svi.optim.report().outcome == "damped"
        results.append((losses, everything(svi), torch.get_rng_state()))
    assert getattr(svi, "tier", "") == "replay" and shortened > 0
    assert results[0][0] == results[1][0]
    assert same(results[0][1], results[1][1])
    assert torch.equal(results[0][2], results[1][2])
