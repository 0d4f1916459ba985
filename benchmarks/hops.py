"""Files of the package that a warm step runs through, in the order in which they are entered.

    python -m benchmarks.hops

A count of files is a measure of how much a reader has to open to follow a step, not of time.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI
from torch import Tensor, nn

import pyro_ngvi as ngvi

PACKAGE = Path(ngvi.__file__).parent


def files_of(call: Callable[[], Any]) -> list[str]:
    """Files below the package whose code runs in ``call``, by their first appearance."""
    found: dict[str, None] = {}

    def profile(frame: FrameType, event: str, arg: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and PACKAGE in path.parents:
            found[str(path.relative_to(PACKAGE))] = None

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return list(found)


def regression(X: Tensor, y: Tensor) -> None:
    w: Any = pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    with pyro.plate("data", len(X)):
        pyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)


def steps(X: Tensor, y: Tensor) -> dict[str, tuple[SVI, tuple[Tensor, ...]]]:
    full = ngvi.AutoFullRankNormal(regression)
    sites = ngvi.AutoSites(regression)
    net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1), nn.Flatten(0))
    network: Any = ngvi.nn.bayesianize(net, "bernoulli", num_data=len(X))
    mean_field = ngvi.AutoMeanFieldNormal(network)
    curvature = ngvi.BatchedELBO(2, curvature="gauss_newton")
    return {
        "NGVB": (SVI(regression, full, ngvi.NGVB(full), ngvi.BatchedELBO(8)), (X, y)),
        "CVI": (SVI(regression, sites, ngvi.CVI(sites), ngvi.SitesELBO()), (X, y)),
        "VOGN": (SVI(network, mean_field, ngvi.optim.VOGN(mean_field), curvature), (X, y)),
    }


def main() -> None:
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    X = torch.randn(20, 3)
    y = (X.sum(1) > 0).float()
    for name, (svi, args) in steps(X, y).items():
        for _ in range(5):
            svi.step(*args)
        files = files_of(lambda svi=svi, args=args: svi.step(*args))
        print(f"{name}: {len(files)} files\n    " + "\n    ".join(files))


if __name__ == "__main__":
    main()
