"""Every call that stands in a message is run, with what its reader would have at hand.

tests/robustness/test_advice.py follows some of the advice to its end; here no call is left out: a call
in a new message fails until it runs among the names of :func:`reader`, or has an entry in ``FILLED``.
"""

import copy
import functools
import math
from typing import Any

import pyro
import pyro.contrib.gp
import pyro.distributions as dist
import pyro.optim
import pytest
import torch
from pyro import poutine
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoGuideList, AutoNormal
from torch import Tensor, nn

import pyro_ngvi
from tests.robustness.advice_cases import TEXTS, calls

N = 6
X = torch.linspace(-1.0, 1.0, N, dtype=torch.float64)
Y = torch.sin(3.0 * X)


def scaled() -> None:
    tau = pyro.sample("tau", dist.HalfNormal(1.0))
    w = pyro.sample("w", dist.Normal(0.0, tau))
    with pyro.plate("data", N):
        pyro.sample("y", dist.Normal(w, 1.0), obs=Y)


def line(x: Tensor = X, y: Tensor | None = Y, index: Any = None) -> Any:
    w: Any = pyro.sample("w", dist.Normal(0.0, 1.0))
    b: Any = pyro.sample("b", dist.Normal(0.0, 1.0))
    with pyro.plate("data", N, subsample=index) as at:
        return pyro.sample("y", dist.Normal(w * x[at] + b, 0.5), obs=None if y is None else y[at])


def matrix() -> None:
    pyro.sample("W", dist.Normal(torch.zeros(4, 4), 1.0).to_event(2))


def layer(x: Tensor) -> Any:
    W: Any = pyro.sample("W", dist.Normal(torch.zeros(2, 3), 1.0).to_event(2))
    return nn.functional.linear(x, W)


CALLS = sorted({call for text in TEXTS.values() for _, call in calls(text)})

#: what a reader puts in the place of {} and ..., and for a method what it is called on
FILLED = {
    "poutine.scale(scale={})": "poutine.scale(scale=0.5)",
    "pyro.plate(name, N, subsample_size=len(x))": 'pyro.plate("data", N, subsample_size=len(x))',
    'pyro.sample("y", ..., obs=y)': 'pyro.sample("y", dist.Normal(0.0, 1.0).expand([N]), obs=y)',
    "BatchedELBO(curvature={})": 'BatchedELBO(curvature="hessian")',
    "pyro.poutine.condition(model, data=...)": 'pyro.poutine.condition(model, data={"w": x[0]})',
    "predict(..., from_prior=[{}])": 'predict(model, normal, x, from_prior=["w"])',
    "predict(model, to_arviz(model, guide, X, y), X_new)": (
        "predict(model, to_arviz(model, normal, X, y), X_new)"
    ),
    "to_arviz(model, guide, X, y)": "to_arviz(model, normal, X, y)",
    "to_arviz(..., resample='psis')": "to_arviz(model, normal, X, y, resample='psis')",
    "pyro_ngvi.predict(model, guide, x)": "pyro_ngvi.predict(model, normal, x)",
    "functools.partial(model, {}=...)": "functools.partial(model, y=y)",
    "pyro.deterministic({}, ...)": 'pyro.deterministic("f", X)',
    'pyro.deterministic("{}", loc + scale * x)': 'pyro.deterministic("a", 1.0 - 2.0 * x)',
    "pyro_ngvi.integrate(model)": "pyro_ngvi.integrate(scaled)",
    "expand()": "dist.Normal(0.0, 1.0).expand([3])",
    "MatrixNormal({}, {})": "families.MatrixNormal(2, 3)",
    "poutine.reparam(model, {{}: pyro_ngvi.nn.WalshHadamardReparam()})": (
        'poutine.reparam(matrix, {"W": pyro_ngvi.nn.WalshHadamardReparam()})()'
    ),
    "AutoProperWalshHadamard(model)": 'AutoProperWalshHadamard(matrix, sites=["W"])',
    "requires_grad_(False)": "module.requires_grad_(False)",
    "NGVB(guide, schedule=lambda k: 0.5 / (1 + k))": (
        "NGVB(normal, schedule=lambda k: 0.5 / (1 + k))"
    ),
    'pyro_ngvi.BatchedELBO(num_particles, curvature="{}")': (
        'pyro_ngvi.BatchedELBO(num_particles, curvature="price")'
    ),
    "BatchedELBO(...)": "BatchedELBO(8)",
    "IFVB(guide)": "IFVB(normal)",
    "IFVB(guide, steady=False)": "IFVB(normal, steady=False)",
    "IFVB(averaging=True)": "IFVB(normal, averaging=True)",
    'pyro.sample("{}", dist.Uniform(-math.pi, math.pi))': (
        'pyro.sample("angle", dist.Uniform(-math.pi, math.pi))'
    ),
    "BatchedELBO(kl_weight=...)": "BatchedELBO(kl_weight=0.5)",
    "AutoGuideList(model, create_plates=f)": "AutoGuideList(model, create_plates=plate_of)",
    "AutoNormal(poutine.block(model, expose=[{}]))": (
        'AutoNormal(poutine.block(model, expose=["w"]))()'
    ),
    "poutine.block(model, expose=[{}])": 'poutine.block(model, expose=["w"])()',
    "pyro.plate({}, {}, subsample=index)": 'pyro.plate("data", N, subsample=index)',
    "pyro.plate({}, N, subsample=index)": 'pyro.plate("data", N, subsample=index)',
    "CVI(guide, others=...)": 'CVI(guide, others=pyro.optim.Adam({"lr": 0.01}))',
    "SVI(model, guide, ...)": "SVI(model, guide, optim, SitesELBO())",
    "AutoSites(inducing=...)": "AutoSites(model, inducing=X[:2, None])",
    "AutoSites(model, inducing=Z)": "AutoSites(model, inducing=X[:2, None])",
    "pyro.plate('data', {})": "pyro.plate('data', N)",
    "pyro.sample({}, ...)": 'pyro.sample("y", dist.Normal(0.0, 1.0))',
    "torch.zeros(...)": "torch.zeros(N)",
    "AutoSites(block(model, hide=[{}]))": 'AutoSites(block(model, hide=["b"]))',
    "block(model, hide=[{}])": 'block(model, hide=["b"])()',
    "AutoMeanFieldNormal(block(model, expose=[{}]))": (
        'AutoMeanFieldNormal(block(model, expose=["b"]))()'
    ),
    "block(model, expose=[{}])": 'block(model, expose=["b"])()',
}


#: what a call may change: each has copies
CHANGED = "guide", "optim", "svi", "normal", "module", "params"


def reader() -> dict[str, Any]:
    """A reader's names: a model, guides that have made a step, data, and what was imported."""
    names = at_hand()
    return names | copy.deepcopy({name: names[name] for name in CHANGED})


@functools.cache
def at_hand() -> dict[str, Any]:
    guide = pyro_ngvi.AutoSites(line)
    optim = pyro_ngvi.CVI(guide)
    svi = SVI(line, guide, optim, pyro_ngvi.SitesELBO())
    svi.step(X, Y)
    normal = pyro_ngvi.AutoFullRankNormal(line)
    SVI(line, normal, pyro_ngvi.NGVB(normal), Trace_ELBO()).step()
    family = pyro_ngvi.families.MeanFieldNormal()
    here: dict[str, Any] = {
        "model": line,
        "matrix": matrix,
        "scaled": scaled,
        "layer": layer,
        "guide": guide,
        "optim": optim,
        "svi": svi,
        "normal": normal,
        "plate_of": lambda *args: pyro.plate("data", N),
        "X": X,
        "x": X,
        "X_new": X,
        "y": Y,
        "p": X,
        "z": X[0],
        "N": N,
        "index": torch.arange(3),
        "indices": [0, 1],
        "count": 2,
        "args": (X, Y),
        "kernel": pyro.contrib.gp.kernels.RBF(1),
        "plate": pyro.plate("data", N),
        "num_particles": 4,
        "module": nn.Linear(2, 1),
        "dataset": range(N),
        "flow": dist.transforms.affine_coupling(2, [4]),
        "family": family,
        "params": family.init(torch.zeros(2), 1.0),
        "shape": torch.Size((3,)),
        "s": 2.0,
        "hi": 2.0,
        "a": 0.0,
        "b": 1.0,
        "loc": X[0],
        "concentration": torch.ones(()),
    }
    modules = (
        poutine,
        pyro_ngvi.fisher,
        pyro_ngvi.diagnostics,
        pyro_ngvi.distributions,
        pyro_ngvi.nn,
        pyro_ngvi.optim,
        pyro_ngvi,
    )
    imported: dict[str, Any] = {}
    for module in modules:
        imported |= {name: v for name, v in vars(module).items() if not name.startswith("_")}
    imported |= {
        "pyro": pyro,
        "dist": dist,
        "torch": torch,
        "poutine": poutine,
        "block": poutine.block,
        "math": math,
        "copy": copy,
        "functools": functools,
        "pyro_ngvi": pyro_ngvi,
        "Uniform": dist.Uniform,
        "AutoGuideList": AutoGuideList,
        "AutoNormal": AutoNormal,
        "SVI": SVI,
        "nn": pyro_ngvi.nn,
    }
    return imported | here


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("call", CALLS)
def test_a_call_in_a_message_runs(call: str) -> None:
    code = FILLED.get(call, call)
    assert "{}" not in code and "..." not in code, f"say in FILLED what stands for {call}"
    eval(code, reader())  # the code of our own messages


def test_what_is_filled_in_still_stands_in_a_message() -> None:
    assert set(FILLED) <= set(CALLS)
