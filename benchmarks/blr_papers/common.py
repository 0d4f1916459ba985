"""What the parts share: a line of output, data, the loop over minibatches, the published methods."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyro
import torch
from pyro.infer import SVI, TraceMeanField_ELBO
from pyro.infer.autoguide import AutoNormal
from pyro.optim import Adam  # pyright: ignore[reportAttributeAccessIssue]
from torch import Tensor

import pyro_ngvi as ngvi

from ..problems.problem import data_file

__all__ = ["PRESPLIT", "Row", "bbb", "presplit", "spread", "train", "trained_by"]

PRESPLIT = {
    "australian": "australian/australian_presplit.csv",
    "breast_cancer": "breast_cancer_wisconsin_original/breast_cancer_presplit.csv",
}


@dataclass(frozen=True)
class Row:
    """One line: what was measured, the published value ("-" if there is none), and ours."""

    what: str
    paper: str
    ours: str
    detail: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.what}: paper {self.paper} / ours {self.ours}"


def presplit(name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """X, y, X_test, y_test of a fixed split, features as they are."""
    table = np.genfromtxt(data_file(PRESPLIT[name]), delimiter=",", skip_header=1)
    train, test = table[table[:, -1] == 0], table[table[:, -1] == 1]
    return train[:, :-2], train[:, -2], test[:, :-2], test[:, -2]


def train(
    svi: SVI,
    X: Tensor,
    y: Tensor,
    batch: int,
    epochs: int,
    after: Callable[[int], None] | None = None,
) -> float:
    """Shuffled epochs, ``after(epoch)`` each; the seconds per step, without those of ``after``."""
    spent, steps = 0.0, 0
    for epoch in range(1, epochs + 1):
        start = time.perf_counter()
        for index in torch.randperm(len(X)).split(batch):
            svi.step(X[index], y[index])
            steps += 1
        spent += time.perf_counter() - start
        if after is not None:
            after(epoch)
    return spent / steps


def bbb(model: Any, draws: int, lr: float, init_scale: float) -> tuple[Any, SVI]:
    """Bayes by backprop: Pyro's mean-field guide (softplus scales), closed-form KL, Adam."""
    guide = AutoNormal(model, init_loc_fn=model.init_to_module, init_scale=init_scale)
    loss = TraceMeanField_ELBO(draws, vectorize_particles=True, max_plate_nesting=1)
    return guide, SVI(model, guide, Adam({"lr": lr}), loss)


def trained_by(
    optim: Callable[[Any], Any],
    curvature: str | None,
    model: Any,
    draws: int,
    guide_of: Callable[..., Any] = ngvi.AutoMeanFieldNormal,
    **kwargs: Any,
) -> tuple[Any, SVI]:
    """A guide of this package, started at the module, and its SVI."""
    pyro.clear_param_store()
    guide = guide_of(model, init_loc_fn=model.init_to_module, **kwargs)
    return guide, SVI(model, guide, optim(guide), ngvi.BatchedELBO(draws, curvature=curvature))


def spread(values: Sequence[float], digits: int = 3) -> str:
    """``mean +- sd`` over runs; nan where one of them is not finite."""
    with np.errstate(invalid="ignore"):
        extra = f" +- {np.std(values, ddof=1):.{digits}f}" if len(values) > 1 else ""
        return f"{np.mean(values):.{digits}f}{extra}"
