"""``save`` and ``load``: a run that was broken off gives what an unbroken one gives, bit for bit."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO, TraceGraph_ELBO
from pyro.infer.autoguide import AutoNormal
from pyro.nn import PyroModule, PyroSample
from pyro.optim import ExponentialLR, PyroOptim  # pyright: ignore[reportAttributeAccessIssue]
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import pyro_ngvi as ngvi
from pyro_ngvi.fitting import Batches
from pyro_ngvi.fitting.checkpoint import FORMAT, read, write
from pyro_ngvi.optim.host import NaturalGradientOptim
from pyro_ngvi.optim.state import flat
from tests.contract.registry import data, regression
from tests.contract.test_every_pair import ALL, COLUMNS, LOSSES, ROWS, RULES, WORKS, N
from tests.contract.test_every_pair import model as two_sites

pytestmark = pytest.mark.usefixtures("plain_start")

X, y = data()


class Loop:
    """A run as a script has it: ``take(n)`` gives n losses."""

    def __init__(
        self,
        make: Callable[[], SVI],
        args: tuple[Any, ...] = (),
        loader: Any = None,
        stop: Callable[[SVI], ngvi.StopRule] | None = None,
    ) -> None:
        pyro.clear_param_store()
        self.svi, self.args = make(), args
        self.batches = None if loader is None else Batches(loader())
        self.stop = None if stop is None else stop(self.svi)

    def take(self, n: int) -> list[Any]:
        losses = []
        for _ in range(n):
            args = self.args if self.batches is None else next(self.batches)
            losses.append(self.svi.step(*args))
            if self.stop is not None:
                self.stop(losses[-1], *args)
        return losses

    def tensors(self) -> dict[str, Tensor]:
        """Parameters, and the state of an optimizer of ours."""
        parameters = sorted(pyro.get_param_store().named_parameters())
        found = {name: p.detach().clone() for name, p in parameters}
        ours = isinstance(self.svi.optim, NaturalGradientOptim)
        return found | (flat(self.svi.optim.get_state()["natural"]) if ours else {})

    def save(self, path: Path, **more: Any) -> None:
        ngvi.save(path, self.svi, stop=self.stop, batches=self.batches, **more)

    def load(self, path: Path) -> Any:
        args = self.args if self.batches is None else next(iter(self.batches.source))
        return ngvi.load(path, self.svi, *args, stop=self.stop, batches=self.batches)


def assert_resumes(path: Path, loop: Callable[[], Loop], before: int = 3, after: int = 4) -> None:
    pyro.set_rng_seed(1)
    unbroken = loop()
    unbroken.take(before)
    unbroken.save(path / "run")
    expected = unbroken.take(after)
    final = unbroken.tensors()
    pyro.set_rng_seed(2)  # another process
    resumed = loop()
    resumed.load(path / "run")
    assert resumed.take(after) == expected
    for (name, old), (_, new) in zip(final.items(), resumed.tensors().items(), strict=True):
        assert torch.equal(old, new), name


PAIRS = [(r, g, losses[0]) for r, rows in WORKS.items() for guides, losses in rows for g in guides]


@pytest.mark.filterwarnings(
    "ignore:Failed to verify mean field", "ignore:.*leaves what is not natural"
)
@pytest.mark.parametrize(("rule", "guide", "loss"), PAIRS)
def test_every_pair_resumes(
    rule: str, guide: str, loss: str, tmp_path: Path, few_first_scores: None
) -> None:
    def make() -> SVI:
        made = ALL[guide](two_sites)
        return SVI(two_sites, made, RULES[rule](made), LOSSES[loss](3))

    A = torch.linspace(-1.0, 1.0, N * COLUMNS).view(N, COLUMNS).sin()
    assert_resumes(tmp_path, lambda: Loop(make, (A, A[:, :ROWS].cos())), 2, 2)


def test_a_loss_that_goes_another_way_after_its_first_step(tmp_path: Path) -> None:
    def make() -> SVI:
        guide = ngvi.AutoMeanFieldNormal(two_sites)
        loss = ngvi.BatchedELBO(4, curvature="gauss_newton")
        return SVI(two_sites, guide, ngvi.optim.VOGN(guide), loss)

    for before in (1, 2, 3, 11):  # the other way is the same up to roundings
        assert_resumes(tmp_path, lambda: Loop(make, (X, X[:, :ROWS].cos())), before, 1)


def by_function(X: Tensor, y: Tensor) -> None:
    loc = pyro.param("loc", lambda: torch.zeros(3, dtype=X.dtype))
    scale = pyro.param("scale", lambda: 0.1 + torch.rand(3), constraint=dist.constraints.positive)
    pyro.sample("w", dist.Normal(loc, scale).to_event(1))


class Layer(PyroModule):
    """A regression as a module, with a trained parameter and a buffer that a run changes."""

    seen: Tensor
    w: Any

    def __init__(self) -> None:
        super().__init__()
        self.bias = torch.nn.Parameter(torch.zeros((), dtype=X.dtype))
        self.register_buffer("seen", torch.zeros(()))
        self.w = PyroSample(dist.Normal(torch.zeros_like(X[0]), 1.0).to_event(1))

    def forward(self, X: Tensor, y: Tensor) -> None:
        self.seen += 1.0
        w = self.w
        with pyro.plate("data", len(X)):
            pyro.sample("y", dist.Normal(X @ w + self.bias, 1.0 + 1.0 / self.seen), obs=y)


def grouped(g: Tensor, y: Tensor, size: int = 2) -> None:
    s = pyro.sample("s", dist.HalfNormal(torch.ones((), dtype=y.dtype)))
    with pyro.plate("units", len(y), subsample_size=size) as index:
        u = pyro.sample("u", dist.Normal(0.0, s))
        pyro.sample("y", dist.Normal(u, 1.0), obs=y[index])


def counted(X: Tensor, y: Tensor) -> None:
    w = pyro.sample("w", dist.Normal(X.new_zeros(3), 1.0).to_event(1))
    with pyro.plate("data", 6, subsample_size=2) as index:
        pyro.sample("y", dist.Poisson((X[index] @ w).exp()), obs=y[index].abs().round())


def adam(**settings: Any) -> PyroOptim:
    return PyroOptim(torch.optim.Adam, {"lr": 0.05} | settings)


def decaying() -> Any:
    how = {"optimizer": torch.optim.Adam, "optim_args": {"lr": 0.05}, "gamma": 0.9}
    return ExponentialLR(how)


def _module() -> SVI:
    model = Layer()
    guide = ngvi.AutoFullRankNormal(model, init=None)
    return SVI(model, guide, ngvi.NGVB(guide, others=adam()), Trace_ELBO())


def _of(model: Any, guide: Any, optim: Any, loss: Any = None) -> Callable[[], SVI]:
    def make() -> SVI:
        made = guide(model) if isinstance(guide, type) else guide
        opt = optim(made) if isinstance(optim, type) else optim()
        return SVI(model, made, opt, Trace_ELBO() if loss is None else loss())

    return make


CASES: dict[str, Callable[[], SVI]] = {
    "Pyro's guide, Adam": _of(regression, AutoNormal, adam),
    "a schedule of Pyro's": _of(regression, AutoNormal, decaying),
    "a function": _of(regression, by_function, adam),
    "running baselines": _of(regression, by_function, adam, TraceGraph_ELBO),
    "a module": _module,
    "units in minibatches": _of(
        grouped, ngvi.AutoHierarchical, ngvi.NGVB, lambda: ngvi.BatchedELBO(8)
    ),
    "sites": _of(counted, ngvi.AutoSites, ngvi.CVI, ngvi.SitesELBO),
}


@pytest.mark.parametrize("case", CASES)
def test_other_runs_resume(case: str, tmp_path: Path) -> None:
    assert_resumes(tmp_path, lambda: Loop(CASES[case], (X, y)))


def _loader(how: str) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(5) if "own" in how else None
    workers = 1 if "worker" in how else 0
    dataset = TensorDataset(X, y)
    return DataLoader(dataset, 4, shuffle=True, generator=generator, num_workers=workers)


def _minibatched() -> SVI:
    def model(X: Tensor, y: Tensor) -> None:
        w = pyro.sample("w", dist.Normal(X.new_zeros(3), 1.0).to_event(1))
        with pyro.plate("data", 6, subsample=y):
            pyro.sample("y", dist.Normal(X @ w, 1.0 + 0.1 * random.random()), obs=y)
            pyro.factor("noise", X.new_tensor(0.01 * np.random.randn()))

    guide = ngvi.AutoMeanFieldNormal(model, init=None)
    return SVI(model, guide, ngvi.NGVB(guide), Trace_ELBO())


@pytest.mark.parametrize("before", [1, 2, 3])
def test_minibatches_of_unequal_size_that_the_plate_draws(before: int, tmp_path: Path) -> None:
    """An index that was drawn in the size of the minibatch before leaves nothing behind."""

    def model(X: Tensor, y: Tensor) -> None:
        w = pyro.sample("w", dist.Normal(X.new_zeros(3), 1.0).to_event(1))
        with pyro.plate("data", 6, subsample_size=len(y)):
            pyro.sample("y", dist.Normal(X @ w, 1.0), obs=y)

    def make() -> SVI:
        guide = ngvi.AutoMeanFieldNormal(model, init=None)
        return SVI(model, guide, ngvi.NGVB(guide), ngvi.BatchedELBO(4))

    parts = [(X[:4], y[:4]), (X[4:], y[4:])]
    assert_resumes(tmp_path, lambda: Loop(make, loader=lambda: parts), before, 5)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("how", ["shuffled", "own generator", "worker", "list"])
@pytest.mark.parametrize("before", [1, 3])  # within an epoch of two, and at the end of one
def test_minibatches_go_on_where_they_were(how: str, before: int, tmp_path: Path) -> None:
    def loader() -> Any:
        return [(X[:4], y[:4]), (X[4:], y[4:])] if how == "list" else _loader(how)

    assert_resumes(tmp_path, lambda: Loop(_minibatched, loader=loader), before, 5)


def test_a_stop_rule_goes_on_where_it_was(tmp_path: Path) -> None:
    def stop(svi: SVI) -> ngvi.StopRule:
        return ngvi.StopRule(svi, batches=_loader("own"))

    def loop() -> Loop:
        return Loop(_minibatched, loader=lambda: _loader("shuffled"), stop=stop)

    pyro.set_rng_seed(3)
    whole = loop()
    whole.take(12)
    whole.save(tmp_path / "run")
    whole.take(20)
    resumed = loop()
    resumed.load(tmp_path / "run")
    resumed.take(20)
    assert whole.stop and resumed.stop
    assert resumed.stop.looks == whole.stop.looks
    assert len(whole.stop.looks) >= 2
    assert (resumed.stop.gap, resumed.stop.steps) == (whole.stop.gap, 32)


def test_looks_leave_the_loader_s_own_generator_alone() -> None:
    loader: Any = _loader("own")
    batches = Batches(loader)
    before = loader.generator.get_state()
    with batches.apart():
        next(batches)
    assert torch.equal(loader.generator.get_state(), before)


def test_what_was_beside_comes_back(tmp_path: Path) -> None:
    loop = Loop(CASES["Pyro's guide, Adam"], (X, y))
    loop.take(1)
    extra = {"epoch": 3, "note": "a", "best": torch.ones(2)}
    loop.save(tmp_path / "run", extra=extra)
    found = loop.load(tmp_path / "run")
    assert (found["epoch"], found["note"]) == (3, "a")
    assert torch.equal(found["best"], extra["best"])


# --- refusals


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    loop = Loop(_of(regression, ngvi.AutoFullRankNormal, ngvi.NGVB), (X, y))
    loop.take(2)
    loop.save(tmp_path / "run")
    return tmp_path / "run"


def other_name(X: Tensor, y: Tensor) -> None:
    w = pyro.sample("v", dist.Normal(X.new_zeros(3), 1.0).to_event(1))
    with pyro.plate("data", len(X)):
        pyro.sample("y", dist.Normal(X @ w, 1.0), obs=y)


def wider(X: Tensor, y: Tensor) -> None:
    pyro.sample("more", dist.Normal(X.new_zeros(2), 1.0).to_event(1))
    regression(X, y)


FULL = ngvi.AutoFullRankNormal


@pytest.mark.parametrize(
    ("model", "guide", "optim", "says"),
    [
        (other_name, FULL, ngvi.NGVB, r"its latent sites are w \(3,\), and here they are v \(3,\)"),
        (regression, ngvi.AutoMeanFieldNormal, ngvi.NGVB, "of a run with the guide AutoFullRank"),
        (regression, FULL, ngvi.IFVB, "of a run with the optimizer NGVB, and this one has IFVB"),
        (regression, FULL, adam, "of a run with the optimizer NGVB, and this one has Adam"),
    ],
)
def test_another_run_is_refused(model: Any, guide: Any, optim: Any, says: str, saved: Path) -> None:
    with pytest.raises(ValueError, match=says) as refused:
        Loop(_of(model, guide, optim), (X, y)).load(saved)
    assert len(str(refused.value).replace(str(saved), "")) <= 240


def test_a_state_of_another_shape_is_refused_by_torch(saved: Path) -> None:
    with pytest.raises(RuntimeError, match="size mismatch for loc: copying a param with shape"):
        Loop(_of(wider, FULL, ngvi.NGVB), (X, y)).load(saved)


def test_another_precision_is_refused(saved: Path) -> None:
    loop = Loop(_of(regression, FULL, ngvi.NGVB), (X.float(), y.float()))
    with pytest.raises(
        ValueError, match=r"holds loc of the guide in torch.float64, .* torch.float32"
    ):
        loop.load(saved)


def test_parts_that_were_not_saved_are_refused(saved: Path) -> None:
    loop = Loop(_of(regression, FULL, ngvi.NGVB), (X, y))
    with pytest.raises(ValueError, match="saved without stop=: leave it out"):
        ngvi.load(saved, loop.svi, X, y, stop=ngvi.StopRule(loop.svi))


def test_damaged_files_are_refused(saved: Path, tmp_path: Path) -> None:
    whole = saved.read_bytes()
    other = tmp_path / "other"
    for size in (0, 1, 100, len(whole) // 2, len(whole) - 1):
        other.write_bytes(whole[:size])
        with pytest.raises(ValueError, match="damaged, cut off, or something else"):
            read(other)
    chosen = random.Random(0)
    for _ in range(200):
        at = chosen.randrange(len(whole))
        flipped = bytes([whole[at] ^ (1 << chosen.randrange(8))])
        other.write_bytes(whole[:at] + flipped + whole[at + 1 :])
        with pytest.raises(ValueError, match="damaged, cut off, or something else"):
            read(other)
    assert torch.load(saved, weights_only=True)["format"] == FORMAT


def test_foreign_and_older_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with pytest.raises(FileNotFoundError, match=r"No such file or directory: .*file"):
        read(path)
    path.write_text("hello")
    with pytest.raises(ValueError, match="something else"):
        read(path)
    torch.save({"weights": torch.ones(2)}, path)
    with pytest.raises(ValueError, match="something else"):
        read(path)
    write(path, {"format": FORMAT + 1, "versions": {"pyro_ngvi": "9.0"}})
    with pytest.raises(ValueError, match=f"has format {FORMAT + 1}, written by pyro_ngvi 9.0"):
        read(path)


def test_no_code_in_a_file_runs(saved: Path, tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return (tmp_path / "ran").write_text, ("!",)

    torch.save({"format": FORMAT, "evil": Evil()}, saved)
    with pytest.raises(ValueError, match="something else"):
        read(saved)
    assert not (tmp_path / "ran").exists()


def test_what_could_not_be_read_back_is_not_written(saved: Path) -> None:
    before = saved.read_bytes()
    with pytest.raises(ValueError, match="would run code"):
        write(saved, {"format": FORMAT, "extra": test_no_code_in_a_file_runs})
    assert saved.read_bytes() == before


def test_a_write_that_fails_leaves_the_file(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = saved.read_bytes()

    def full(tree: Any, file: Any) -> None:
        file.write(b"half of it")
        raise OSError("No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match="No space"):
        write(saved, {"format": FORMAT})
    assert saved.read_bytes() == before


def test_there_is_nothing_to_save_before_a_step(tmp_path: Path) -> None:
    loop = Loop(_of(regression, FULL, ngvi.NGVB), (X, y))
    with pytest.raises(ValueError, match="Take a step of SVI first"):
        loop.save(tmp_path / "run")


def test_minibatches_must_be_an_iterable_that_lasts() -> None:
    with pytest.raises(ValueError, match="gone through again"):
        Batches(iter([(1,)]))
    with pytest.raises(ValueError, match="is empty"):
        next(Batches([]))
    batches = Batches([(1,), (2,)])
    assert [next(batches) for _ in range(2)] == [(1,), (2,)]
    with pytest.raises(ValueError, match="at minibatch 2 of an epoch, and this loader has 1"):
        Batches([(1,)]).load_state_dict(batches.state_dict())


def test_a_file_of_a_gpu_is_read_where_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file says of its tensors that they lie on cuda:0, as torch.save writes there, and holds a
    GPU's random state.  (Nothing is computed on a GPU.)"""
    if torch.cuda.is_available():
        pytest.skip("needs a machine without a GPU")

    def loop() -> Loop:
        guide = ngvi.AutoMeanFieldNormal(regression)
        return Loop(lambda: SVI(regression, guide, ngvi.NGVB(guide), ngvi.BatchedELBO(4)), (X, y))

    run = loop()
    run.take(3)
    with monkeypatch.context() as gpu:
        gpu.setattr(torch.serialization, "location_tag", lambda storage: "cuda:0")
        gpu.setattr(torch.cuda, "is_initialized", lambda: True)
        gpu.setattr(torch.cuda, "get_rng_state_all", lambda: [torch.get_rng_state()])
        run.save(tmp_path / "run")
    with pytest.raises(RuntimeError, match="CUDA"):
        torch.load(tmp_path / "run", weights_only=True)
    expected = run.take(2)
    other = loop()
    other.load(tmp_path / "run")
    assert other.take(2) == expected
