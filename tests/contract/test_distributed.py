"""Two and four processes take the steps of one that has all data: real processes, joined by gloo."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO
from torch.nn.parallel import DistributedDataParallel

import pyro_ngvi as ngvi
from pyro_ngvi.distributed.shards import Term, shards_among
from tests.contract import ranks

ROOT = Path(__file__).parents[2]
WORLDS = [2, pytest.param(4, marks=pytest.mark.slow)]


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What rank 0 of a world of so many processes found, started when first asked for."""
    known: dict[int, Any] = {}

    def world(size: int) -> Any:
        if size not in known:
            folder = tmp_path_factory.mktemp("ranks")
            command = [sys.executable, "-m", "tests.contract.ranks"]
            env = os.environ | {"OMP_NUM_THREADS": "1"}
            running = [
                subprocess.Popen(
                    [*command, str(r), str(size), str(folder / "store"), str(folder / "out")],
                    cwd=ROOT,
                    env=env,
                    stderr=subprocess.PIPE,
                    text=True,
                )
                for r in range(size)
            ]
            said = [p.communicate()[1] for p in running]
            assert not any(p.returncode for p in running), said
            known[size] = torch.load(folder / "out", weights_only=False)
        return known[size]

    return world


@pytest.mark.parametrize("size", WORLDS)
@pytest.mark.parametrize("name", [*ranks.FITS, "minibatches", "NoisyKFAC"])
def test_as_one_process(worlds: Any, name: str, size: int) -> None:
    expected, found = worlds(1)[name], worlds(size)[name]
    assert expected.keys() == found.keys()
    # a factor's Fisher matrix is nearly singular at the start: rows in another order give 4e-8 too
    tol = 1e-6 if name == "NGVB, factor" else 1e-10
    for key, value in expected.items():
        if key != "shards":
            torch.testing.assert_close(found[key], value, rtol=tol, atol=tol)


@pytest.mark.parametrize(
    ("name", "shards"),
    [
        ("NGVB, full rank", ["y"]),
        ("NGVB, terms of all ranks", ["y"]),
        ("NGVB, summed out", ["k", "y"]),
        ("minibatches", []),
    ],
)
def test_what_is_summed(worlds: Any, name: str, shards: list[str]) -> None:
    assert worlds(2)[name]["shards"] == shards


@pytest.mark.parametrize("size", WORLDS)
@pytest.mark.parametrize("number", [0, 1, 2])
def test_one_data_set_on_all_ranks_is_more_particles(worlds: Any, number: int, size: int) -> None:
    """The mean of the losses and gradients of single ranks; rows and draws side by side."""
    found = worlds(size)["own noise"][number]
    assert found["own"] and not found["shards"]
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


def test_faults(worlds: Any) -> None:
    found = worlds(2)["faults"]
    assert found["skipped"] == 1 and "skipped a step" in found["message"]
    assert not torch.tensor(found["losses"])[3].isfinite()
    assert torch.tensor(found["losses"])[[0, 1, 2, 4, 5]].isfinite().all()
    assert "the random state of torch differs" in found["apart"] and len(found["apart"]) <= 240


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("scale", "'y' is scaled"),
        ("local", "'z' is latent in the plate 'data'"),
        ("local, named", "each rank would have others"),
        ("plates", "no plates of observed or latent"),
        ("site", "only one has the site 'x0'"),
        ("squares", "'gauss_newton' in place of"),
    ],
)
def test_refused_on_all_ranks(worlds: Any, name: str, match: str) -> None:
    message = worlds(2)["refused"][name]
    assert match in message and len(message) <= 240


@pytest.mark.slow
@pytest.mark.parametrize("kills", [["3:1", "9:0", "9:1", "16:1"]])
def test_killed_ranks_change_nothing(kills: list[str], tmp_path: Path) -> None:
    """``torchrun`` restarts after each kill, from a file of rank 0: bit for bit the unbroken run."""
    found = []
    for name, plan in (("unbroken", []), ("broken", kills)):
        folder = tmp_path / name
        folder.mkdir()
        command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        script = ["-m", "tests.contract.killed", str(folder), *plan]
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


def term(*numbers: float, **further: Any) -> Term:
    how = {"plates": ("data",), "observed": True, "enumerated": False, "scaled": False, "size": 3}
    return Term(**(how | further), numbers=numbers)


def test_same_data_up_to_rounding() -> None:
    a, b = {"y": term(100.0, 150.0)}, {"y": term(100.0 * (1 + 1e-7), 150.0)}
    assert shards_among([a, b]) == (set(), False)
    assert shards_among([a, {"y": term(100.0, 150.1)}]) == ({"y"}, True)
    assert shards_among([a, {"y": term(100.0, 150.0, size=4)}]) == ({"y"}, True)


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_nothing_is_seen_where_log_p_is_not_finite(bad: float) -> None:
    for terms in ([term(bad, 1.0), term(bad, 1.0)], [term(2.0, 1.0), term(bad, 1.0)]):
        with pytest.raises(ValueError, match="Name the plates of the shards") as caught:
            shards_among([{"y": t} for t in terms])
        assert len(str(caught.value)) <= 240
        assert shards_among([{"y": t} for t in terms], plates=["data"]) == ({"y"}, True)


def test_scales_of_shards_are_multiplied_on() -> None:
    both = [{"y": term(1.0, scaled=True)}, {"y": term(2.0, scaled=True)}]
    assert shards_among(both, scaled_to="shard") == ({"y"}, True)
    assert shards_among(both, scaled_to="whole") == (set(), True)


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
        ngvi.distributed.wrap(plain())


def test_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    svi = plain()
    with pytest.raises(ValueError, match="compiled steps run on one process"):
        ngvi.distributed.wrap(ngvi.compile(svi))
    with pytest.raises(ValueError, match="takes a plain"):
        ngvi.distributed.wrap(ngvi.distributed.wrap(svi))
    with pytest.raises(TypeError, match="a step of its own"):
        ngvi.compile(ngvi.distributed.wrap(svi))
    with pytest.raises(ValueError, match="scaled_to must be"):
        ngvi.distributed.wrap(svi, scaled_to="all")
    sites = ngvi.AutoSites(model)
    svi = SVI(model, sites, ngvi.CVI(sites), ngvi.SitesELBO())
    with pytest.raises(ValueError, match="for each unit or datum"):
        ngvi.distributed.wrap(svi)
    monkeypatch.setattr(DistributedDataParallel, "__init__", torch.nn.Module.__init__)
    broken: Any = DistributedDataParallel
    svi.model = broken()
    with pytest.raises(ValueError, match="its attribute module"):
        ngvi.distributed.wrap(svi)


def test_shards_hold_each_row_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, n = [], 11
    monkeypatch.setattr("pyro_ngvi.distributed.rows.world_size", lambda: 4)
    for r in range(4):
        monkeypatch.setattr("pyro_ngvi.distributed.rows.rank", lambda r=r: r)
        X, y = ngvi.distributed.shard(torch.arange(n)[:, None], torch.arange(n).numpy())
        assert X[:, 0].tolist() == y.tolist()
        rows += y.tolist()
    assert rows == [*range(n)]
    with pytest.raises(ValueError, match="too few for 4 ranks"):
        ngvi.distributed.shard(torch.zeros(3))
    with pytest.raises(ValueError, match="equally many"):
        ngvi.distributed.shard(torch.zeros(5), torch.zeros(6))
