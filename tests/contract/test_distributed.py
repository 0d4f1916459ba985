"""Two and four processes take the steps of one that has all data: real processes, joined by gloo."""

from __future__ import annotations

import os
import subprocess
import sys
import traceback
from pathlib import Path
from random import Random
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from filelock import FileLock
from pyro import poutine
from pyro.infer import SVI, RenyiELBO, Trace_ELBO
from pyro.infer.autoguide import AutoGuideList
from torch.nn.parallel import DistributedDataParallel

import pyro_ngvi as ngvi
from tests.contract import killed, ranks
from tests.forked import imported_before, processes

ROOT = Path(__file__).parents[2]
OTHERS = ["minibatches", "NoisyKFAC", "CVI", "CVI, minibatches"]
WORLDS = [2, pytest.param(4, marks=pytest.mark.slow)]


def a_rank(number: int, size: int, folder: Path) -> None:
    try:
        ranks.main(number, size, str(folder / "store"), str(folder / "out"))
    except BaseException:
        (folder / f"error {number}").write_text(traceback.format_exc())
        raise


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What rank 0 of a world of so many processes found, started when first asked for: once, also for
    several workers of pytest, which share a folder and wait for each other."""
    known: dict[int, Any] = {}
    own = tmp_path_factory.mktemp("ranks")
    shared = own.parent.parent if "PYTEST_XDIST_WORKER" in os.environ else own

    def world(size: int) -> Any:
        folder = shared / f"ranks_{size}"
        with FileLock(f"{folder}.lock"):
            run(size, folder)
        if size not in known:
            known[size] = torch.load(folder / "out", weights_only=False)
            known[size]["folder"] = folder
        return known[size]

    def run(size: int, folder: Path) -> None:
        if not folder.exists():
            folder.mkdir()
            imported_before("tests.contract.ranks", "tests.robustness.test_kills", "arviz")
            running = [
                processes.Process(target=a_rank, args=(r, size, folder)) for r in range(size)
            ]
            for process in running:
                process.start()
            for process in running:
                process.join()
            said = [path.read_text() for path in sorted(folder.glob("error*"))]
            assert not any(process.exitcode for process in running), "\n".join(said)

    return world


@pytest.mark.parametrize("size", WORLDS)
@pytest.mark.parametrize("name", [*ranks.FITS, *OTHERS])
def test_as_one_process(worlds: Any, name: str, size: int) -> None:
    expected, found = worlds(1)[name], worlds(size)[name]
    assert expected.keys() == found.keys()
    # a factor's Fisher matrix is nearly singular at the start: rows in another order give 4e-8 too
    tol = 1e-6 if name == "NGVB, factor" else 1e-10
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=tol, atol=tol)


@pytest.mark.parametrize("size", WORLDS)
@pytest.mark.parametrize("number", [0, 1, 2])
def test_one_data_set_on_all_ranks_is_more_particles(worlds: Any, number: int, size: int) -> None:
    """The mean of the losses and gradients of single ranks; rows and draws side by side."""
    found = worlds(size)["own noise"][number]
    assert found["own"]
    for name, value in found["all"].items():
        single = [s[name] for s in found["single"]]
        if name == "rows":
            value, expected = value.mT @ value, sum(s.mT @ s for s in single) / size
        elif name in ("draws", "residuals"):
            expected = torch.cat(single)
        else:
            expected = sum(single) / size
        torch.testing.assert_close(value, expected, rtol=1e-10, atol=1e-10)
    assert not torch.equal(found["single"][0]["loss"], found["single"][1]["loss"])


@pytest.mark.parametrize("size", WORLDS)
def test_shared_noise_vanishes_at_a_gaussian_posterior(worlds: Any, size: int) -> None:
    found = worlds(size)
    assert found["shared noise"] < 1e-10
    assert found["noise of ranks"] > 1e-6


@pytest.mark.parametrize("size", WORLDS)
def test_a_fit_in_one_call(worlds: Any, size: int) -> None:
    """Steps, looks of the stop rule, ELBO, k-hat, leave-one-out and draws are those of one process."""
    expected, found = worlds(1)["fit"], worlds(size)["fit"]
    assert found["why"] == expected["why"] and found["why"][0] == "converged"
    for key in ("losses", "looks", "read", "loo", "draws", "sites"):
        torch.testing.assert_close(found[key], expected[key], rtol=1e-7, atol=1e-9, msg=key)
    assert found["alike"] == [ranks.N, 1]
    ends = found["ends"]
    assert ends == [ends[0]] * size
    assert ends[0][0] == "max_time" and ends[0][2:] == ("callback", 3)
    assert found["written"]
    refused = ["name a guide", "compile", "Write the loop", "save by ranks"]
    for message, says in zip(found["refused"], refused, strict=True):
        assert says in message and len(message) <= 240


@pytest.mark.parametrize("size", WORLDS)
def test_units_of_ranks(worlds: Any, size: int) -> None:
    """Where units are Gaussian given their globals, their draws make no noise, and what is left is that
    of one process; else within that noise."""
    expected, found = worlds(1)["units"], worlds(size)["units"]
    for name, value in expected.items():  # the first sites are made of draws
        value, other = (x[-20:] if name == "losses" else x for x in (value, found[name]))
        torch.testing.assert_close(other, value, rtol=1e-7, atol=1e-7, msg=name)
    for name in ("units, labels", "units, minibatches"):
        expected, found = worlds(1)[name], worlds(size)[name]
        sd = expected["covariance"].diagonal().sqrt()
        assert ((found["loc"] - expected["loc"]).abs() < 0.25 * sd).all()
        assert ((found["covariance"].diagonal().sqrt() / sd).log().abs() < 0.25).all()
        assert abs(found["losses"][-30:].mean() - expected["losses"][-30:].mean()) < 1.5
    # data of the second half are those of the first, and draws of a rank are its own
    first, second = found["linear"].chunk(2)
    assert not torch.equal(first, second)


def test_a_fit_of_two_processes_goes_on_in_one(worlds: Any) -> None:
    """From the file of rank 0, with all data: the steps after it are those of the other world."""
    losses = []
    for size in (1, 2):
        pyro.clear_param_store()
        path = worlds(size)["folder"] / "out.fit"
        fit = ngvi.load(path, ranks.regression, *ranks.data()).resume(max_steps=4, progress=False)
        losses.append(torch.tensor(fit.losses))
    assert len(losses[0]) == 12
    torch.testing.assert_close(*losses, rtol=1e-10, atol=1e-10)
    assert fit.diagnosis.sites.keys() == {"w", "s"}


def test_faults(worlds: Any) -> None:
    found = worlds(2)["faults"]
    assert found["skipped"] == 1 and "skipped a step" in found["message"]
    assert not torch.tensor(found["losses"])[3].isfinite()
    assert torch.tensor(found["losses"])[[0, 1, 2, 4, 5]].isfinite().all()
    assert "calls of all ranks together" in found["calls"] and len(found["calls"]) <= 240
    assert "the random state of torch differs" in found["apart"] and len(found["apart"]) <= 240


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("scale", "'y' is scaled"),
        ("no scale", "'y' is not scaled"),
        ("local", "'z' is latent in the plate 'data'"),
        ("no such plate", "no plates of the model"),
        ("shards", "the data or parameters of 'y' are not the same on ranks 0 and 1"),
        ("site", "only one has the site 'x0'"),
        ("prior", "the prior, or the draw of the guide, of 'm'"),
        ("guide", "the prior, or the draw of the guide, of 'w'"),
        ("label", "share an enumerated variable but not their scale"),
        ("squares", "'gauss_newton' in place of"),
        ("sites, learned", "learns 's'"),
        ("sites, outside", "the data 'measured' are in no plate of the shards"),
        ("sites, no plates", "are in no plate of the shards"),
        ("units, no plate", "the units stand in 'units', which is no plate of the shards"),
        ("units, a block", "the units are a block, which is no plate of the shards"),
    ],
)
def test_refused_on_all_ranks(worlds: Any, name: str, match: str) -> None:
    message = worlds(2)["refused"][name]
    assert match in message and len(message) <= 240


@pytest.mark.slow
@pytest.mark.parametrize(("how", "number"), [("loop", 4), ("fit", 4), ("fit", 50)])
def test_killed_ranks_change_nothing(how: str, number: int, tmp_path: Path) -> None:
    """``torchrun`` restarts after each kill, from a file of rank 0: bit for bit the unbroken run."""
    at = Random(number).sample([(s, r) for s in range(1, killed.STEPS) for r in range(2)], number)
    found, kills = [], [f"{step}:{rank}" for step, rank in at]
    for name, plan in (("unbroken", []), ("broken", kills)):
        folder = tmp_path / name
        folder.mkdir()
        command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        script = ["-m", "tests.contract.killed", str(folder), how, *plan]
        run = subprocess.run(
            [sys.executable, *command, f"--max-restarts={len(plan)}", *script],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert run.returncode == 0, run.stderr[-2000:]
        found.append(torch.load(folder / "result", weights_only=True))
        assert sorted(p.name for p in folder.glob("killed*")) == sorted(f"killed {k}" for k in plan)
    assert "lost touch while" in run.stderr or "Signal 9" in run.stderr
    for name, value in found[0].items():
        assert torch.equal(value, found[1][name])


def model(y: torch.Tensor) -> None:
    z = pyro.sample("z", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(z, 1.0), obs=y)


def plain() -> SVI:
    guide = ngvi.AutoFullRankNormal(model)
    return SVI(model, guide, ngvi.NGVB(guide), Trace_ELBO())


def test_unconnected_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match=r"distributed.connect\(\) first"):
        ngvi.distributed.wrap(plain(), ["data"])


def test_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    svi = plain()
    with pytest.raises(ValueError, match="compiled steps run on one process"):
        ngvi.distributed.wrap(ngvi.compile(svi), ["data"])
    with pytest.raises(ValueError, match="takes a plain"):
        ngvi.distributed.wrap(ngvi.distributed.wrap(svi, []), [])
    with pytest.raises(TypeError, match="a step of its own"):
        ngvi.compile(ngvi.distributed.wrap(svi, []))
    with pytest.raises(ValueError, match="scaled_to must be"):
        ngvi.distributed.wrap(svi, [], scaled_to="all")
    with pytest.raises(ValueError, match="be a list of names"):
        ngvi.distributed.wrap(svi, "data")
    with pytest.raises(ValueError, match="check_every must be"):
        ngvi.distributed.wrap(svi, [], check_every=0)
    with pytest.raises(ValueError, match="RenyiELBO is not linear in log p"):
        ngvi.distributed.wrap(SVI(model, svi.guide, svi.optim, RenyiELBO()), ["data"])
    parts = AutoGuideList(model)
    parts.append(ngvi.AutoSites(poutine.block(model, expose=["z"])))
    svi = SVI(model, parts, ngvi.IFVB(parts), Trace_ELBO())
    with pytest.raises(ValueError, match="for each unit or datum"):
        ngvi.distributed.wrap(svi, [])
    monkeypatch.setattr(DistributedDataParallel, "__init__", torch.nn.Module.__init__)
    broken: Any = DistributedDataParallel
    svi.model = broken()
    with pytest.raises(ValueError, match="its attribute module"):
        ngvi.distributed.wrap(svi, [])


def test_shards_hold_each_row_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, n = [], 11
    monkeypatch.setattr("pyro_ngvi.distributed.shards.world_size", lambda: 4)
    for r in range(4):
        monkeypatch.setattr("pyro_ngvi.distributed.shards.rank", lambda r=r: r)
        X, y = ngvi.distributed.shard(torch.arange(n)[:, None], torch.arange(n).numpy())
        assert X[:, 0].tolist() == y.tolist()
        rows += y.tolist()
    assert rows == [*range(n)]
    with pytest.raises(ValueError, match="too few for 4 ranks"):
        ngvi.distributed.shard(torch.zeros(3))
    with pytest.raises(ValueError, match="equally many"):
        ngvi.distributed.shard(torch.zeros(5), torch.zeros(6))
