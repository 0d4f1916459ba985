"""Checkpoints, compiled steps and processes on a GPU."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pyro
import pytest
import torch
from pyro.infer import SVI
from torch import Tensor

import pyro_ngvi as ngvi
from pyro_ngvi.fisher import Dense
from tests.contract.registry import data, regression
from tests.contract.test_compiled import make
from tests.pretend import DEVICE

pytestmark = pytest.mark.usefixtures("not_played")


@pytest.fixture
def not_played(device: torch.device) -> None:
    """Tensors on a device that the CPU plays are neither pickled nor recorded."""
    if device == DEVICE:
        pytest.skip("needs a device of PyTorch's")


ROOT = Path(__file__).parents[2]
GUIDES = ["AutoFullRankNormal", "AutoMeanFieldNormal", "AutoFactorNormal", "AutoExponentialFamily"]
CPU = torch.device("cpu")


def fitted(guide: str, device: torch.device, steps: int, **how: Any) -> Any:
    pyro.clear_param_store()
    args = [x.to(device) for x in data()]
    fixed: Any = {"seed": 0, "tol": 0.0, "progress": False, "guide": guide, "max_steps": steps}
    return ngvi.fit(regression, *args, **fixed, **how)


def resumed(path: Path, device: torch.device, steps: int) -> Any:
    pyro.clear_param_store()
    pyro.set_rng_seed(5)  # as another process would be
    args = [x.to(device) for x in data()]
    return ngvi.load(path, regression).resume(*args, max_steps=steps, progress=False)


def tensors(fit: Any) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in fit.guide.natural_params().items()}


@pytest.mark.parametrize("guide", GUIDES)
def test_a_resumed_fit_is_the_unbroken_one(
    guide: str, device: torch.device, tmp_path: Path
) -> None:
    unbroken = fitted(guide, device, 25)
    expected = {name: p.clone() for name, p in tensors(unbroken).items()}
    losses = unbroken.losses.tolist()
    fitted(guide, device, 10, checkpoint=tmp_path / "run")
    fit = resumed(tmp_path / "run", device, 15)
    assert fit.losses.tolist() == losses, "the losses differ"
    for name, p in tensors(fit).items():
        assert p.device == device, f"{name} is on {p.device}"
        assert torch.equal(p, expected[name]), f"{name} differs"


@pytest.mark.parametrize("guide", GUIDES)
@pytest.mark.parametrize("to_cpu", [True, False])
def test_a_file_goes_to_another_device(
    to_cpu: bool, guide: str, device: torch.device, tmp_path: Path
) -> None:
    source, target = (device, CPU) if to_cpu else (CPU, device)
    before = fitted(guide, source, 10, checkpoint=tmp_path / "run")
    kept = {name: p.cpu().clone() for name, p in tensors(before).items()}
    loaded = ngvi.load(tmp_path / "run", regression, *[x.to(target) for x in data()])
    loaded.put_back()
    for name, p in tensors(loaded).items():
        assert p.device == target, f"{name} is on {p.device}"
        assert torch.equal(p.cpu(), kept[name]), f"{name} is not what was written"
    fit = resumed(tmp_path / "run", target, 5)
    assert len(fit.losses) == 15 and bool(torch.tensor(fit.losses).isfinite().all())


@pytest.mark.parametrize("to_cpu", [True, False])
def test_a_loop_by_hand_goes_to_another_device(
    to_cpu: bool, device: torch.device, tmp_path: Path
) -> None:
    source, target = (device, CPU) if to_cpu else (CPU, device)

    def loop(steps: int, where: torch.device) -> tuple[SVI, list[Tensor]]:
        pyro.clear_param_store()
        guide = ngvi.AutoFullRankNormal(regression)
        svi = SVI(regression, guide, ngvi.IFVB(guide), ngvi.BatchedELBO(4))
        args = [x.to(where) for x in data()]
        for _ in range(steps):
            svi.step(*args)
        return svi, args

    svi, args = loop(5, source)
    ngvi.save(tmp_path / "run", svi)
    kept = {name: p.detach().cpu().clone() for name, p in svi.guide.natural_params().items()}
    svi, args = loop(0, target)
    ngvi.load(tmp_path / "run", svi, *args)
    for name, p in svi.guide.natural_params().items():
        assert p.device == target and torch.equal(p.detach().cpu(), kept[name]), name
    svi.step(*args)


# --- compiled steps -----------------------------------------------------------------------------

CASES: dict[str, Any] = {
    "NGVB, full rank": (ngvi.AutoFullRankNormal, ngvi.NGVB, partial(ngvi.BatchedELBO, 4)),
    "NGVB, mean field": (ngvi.AutoMeanFieldNormal, ngvi.NGVB, partial(ngvi.BatchedELBO, 4)),
    "VON": (
        ngvi.AutoFullRankNormal,
        ngvi.optim.VON,
        partial(ngvi.BatchedELBO, 2, curvature="hessian"),
    ),
    "IFVB": (
        ngvi.AutoFullRankNormal,
        partial(ngvi.IFVB, fisher=Dense()),
        partial(ngvi.BatchedELBO, 4),
    ),
}


def params() -> Tensor:
    named = sorted(pyro.get_param_store().named_parameters())
    return torch.cat([p.detach().cpu().reshape(-1) for _, p in named])


@pytest.mark.parametrize("by_run", [False, True], ids=["step", "run"])
@pytest.mark.parametrize("inductor", [False, True], ids=["replay", "inductor"])
@pytest.mark.parametrize("kind", CASES)
def test_compiled_steps_are_those_of_eager_svi(
    kind: str, inductor: bool, by_run: bool, device: torch.device
) -> None:
    """Whatever tier there is.  Fused kernels round otherwise; 200 steps magnify that as in
    test_steps.py."""
    if inductor and shutil.which("g++") is None and shutil.which("gcc") is None:
        pytest.skip("Inductor needs a C++ compiler")
    guide, rule, loss = CASES[kind]
    X, y = (x.to(device) for x in data())
    y = (y > 0).to(y)
    svi: Any = make(guide=guide, rule=rule, loss=loss())
    eager = [float(svi.step(X, y)) for _ in range(200)]
    expected = params()
    svi = ngvi.compile(make(guide=guide, rule=rule, loss=loss()), inductor=inductor, wait=inductor)
    if by_run:
        losses = svi.run(200, X, y).tolist()
    else:
        losses = [float(svi.step(X, y)) for _ in range(200)]
    assert svi.tier != "eager", f"the steps were eager: {svi.reason}"
    found = torch.tensor(losses).double() - torch.tensor(eager).double()
    worst, apart = float(found.abs().max()), float((params() - expected).norm() / expected.norm())
    assert worst < 1e-7 and apart < 1e-8, f"tier {svi.tier}: losses by {worst}, params by {apart}"


# --- processes ----------------------------------------------------------------------------------

ALONE = """
import sys, pyro, torch
from pyro.infer import SVI
import pyro_ngvi as ngvi
from tests.contract.registry import data, regression

torch.set_default_dtype(torch.float64)
backend, device = sys.argv[1:]
ngvi.distributed.connect(backend)
found = []
for spread in (False, True):
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    X, y = (x.to(device) for x in data())
    guide = ngvi.AutoFullRankNormal(regression)
    svi = SVI(regression, guide, ngvi.NGVB(guide), ngvi.BatchedELBO(4))
    if spread:
        svi = ngvi.distributed.wrap(svi, plates=["data"])
        X, y = ngvi.distributed.shard(X, y)
    losses = torch.tensor([float(svi.step(X, y)) for _ in range(20)])
    named = sorted(pyro.get_param_store().named_parameters())
    found.append((losses, torch.cat([p.detach().cpu().reshape(-1) for _, p in named])))
for a, b in zip(*found):
    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
"""


def test_one_process_takes_the_plain_steps(device: torch.device) -> None:
    backend = "nccl" if device.type == "cuda" else "gloo"
    port = 20_000 + os.getpid() % 20_000
    env = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", ALONE, backend, "cuda:0" if backend == "nccl" else "cpu"],
        env=os.environ | env,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, "\n".join(done.stderr.splitlines()[-5:])
