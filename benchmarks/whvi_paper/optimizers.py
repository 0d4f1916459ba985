"""What natural gradients buy: the bound of one Walsh-Hadamard model by NGVB and by Adam.

The network, priors and batches of ``table1`` on split 0, W of both hidden weights made of g. Adam,
which the paper used, trains Pyro's guides of the reparameterised model (``poutine.reparam``), NGVB
``AutoWalshHadamard``; both have S1 and S2 under Adam, NGVB at 0.01 and Adam at its one rate.

"Diagonal": all latent sites independent.  "Full": a full covariance for g, one per matrix, under NGVB;
Adam has Pyro's ``AutoMultivariateNormal`` for each g, in an ``AutoGuideList``.

The bound, on all train rows with 64 draws, after 250, 500, 1,000 and 2,000 steps; 4 draws a step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pyro
import torch
from pyro import poutine
from pyro.infer import SVI
from pyro.infer.autoguide import AutoGuideList, AutoMultivariateNormal, AutoNormal
from pyro.optim import Adam  # pyright: ignore[reportAttributeAccessIssue]
from torch import Tensor

import pyro_ngvi as ngvi

from ..blr_papers.common import Row
from ..blr_papers.uci import load
from .table1 import DRAWS, SCALE, network, prior

MARKS = (250, 500, 1_000, 2_000)
RATES = (0.001, 0.003, 0.01)
HIDDEN = ("0.weight", "2.weight")
BATCH = 64


def ours(model: Any, g: str) -> tuple[Any, Any, Any]:
    """Model, guide and optimizer."""
    how: Any = {"init_loc_fn": model.init_to_module, "init_scale": SCALE}
    guide = ngvi.AutoWalshHadamard(model, list(HIDDEN), g=g, **how)
    return model, guide, ngvi.NGVB(guide, others=Adam({"lr": 0.01}))


def adam(model: Any, g: str, rate: float) -> tuple[Any, Any, Any]:
    """The same family in Pyro's own guides, on the model of g."""
    small = poutine.reparam(model, {name: ngvi.nn.WalshHadamardReparam() for name in HIDDEN})
    how: Any = {"init_loc_fn": model.init_to_module, "init_scale": SCALE}
    if g == "mean_field":
        return small, AutoNormal(small, **how), Adam({"lr": rate})
    guide = AutoGuideList(small)
    names = [f"{name}_g" for name in HIDDEN]
    for name in names:
        guide.append(AutoMultivariateNormal(poutine.block(small, expose=[name]), **how))
    guide.append(AutoNormal(poutine.block(small, hide=names), **how))
    return small, guide, Adam({"lr": rate})


def bounds(made: tuple[Any, Any, Any], X: Tensor, y: Tensor) -> list[float]:
    """The bound in nats at each of ``MARKS``."""
    model, guide, optim = made
    svi = SVI(model, guide, optim, ngvi.BatchedELBO(DRAWS))
    found: list[float] = []
    steps = 0
    while steps < MARKS[-1]:
        for index in torch.randperm(len(X)).split(BATCH):
            svi.step(X[index], y[index])
            steps += 1
            if steps in MARKS:
                found.append(-ngvi.BatchedELBO(64).loss(model, guide, X, y))
            if steps == MARKS[-1]:
                break
    return found


def run(quick: bool, seeds: int, data: Sequence[str] | None) -> Iterator[Row]:
    torch.set_default_dtype(torch.float32)
    for name in data or ("boston", "energy"):
        X, y = load(name, 0)[:2]
        for g in ("mean_field", "full_rank"):
            for rate in (None, *RATES):
                pyro.clear_param_store()
                pyro.set_rng_seed(0)
                net = network(X.shape[1])
                model = ngvi.nn.bayesianize(net, "normal", num_data=len(X), prior=prior)
                found = bounds(ours(model, g) if rate is None else adam(model, g, rate), X, y)
                cells = ", ".join(f"{k:,}: {v:.0f}" for k, v in zip(MARKS, found, strict=True))
                label = "NGVB" if rate is None else f"Adam {rate}"
                yield Row(f"{name}, {g} g, {label}: ELBO", "-", cells, {"elbo": found})
