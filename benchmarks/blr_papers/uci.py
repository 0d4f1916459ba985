"""UCI regression with one hidden layer of 50 ReLU units, on the usual splits (90 % to train).

Published: BBB and Vadam (Khan et al. 2018, arXiv:1806.04854; 40 epochs) and SLANG with BBB (Mishkin et
al. 2018; 120 epochs), both with noise and prior precision by Bayesian optimisation on cross-validated
log-likelihood, 20 splits.  Here neither is tuned: the noise sd is latent, with a HalfCauchy(1) prior in
units of the sd of y, and weights have N(0, 1) priors.  Inputs and targets are standardised on the train
rows; RMSE and test log-likelihood (nats, 100 draws) are on the scale of y.

Minibatches of 32 (kin8nm 128), 4 draws a step, sd 0.1 at the start.  Rates: BBB Adam 0.01 as published,
SLANG 0.02; NoisyKFAC 0.05 with factors that average over 100 steps (published: 0.01 and 1,000 steps,
for 1,000 epochs of minibatches of 10, which is far from its end here); VOGN, IVON and NGVB their
defaults.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import pyro
import torch
from pyro.infer import SVI
from torch import Tensor, nn

import pyro_ngvi as ngvi

from ..problems.problem import data_file
from .common import Row, bbb, spread, train, trained_by

HIDDEN, DRAWS, SCALE = 50, 4, 0.1
EPOCHS, QUICK_EPOCHS = 120, 40
DATA = ("boston", "concrete", "energy", "yacht", "kin8nm")

#: RMSE / log-likelihood of SLANG, and of BBB beside it (Mishkin et al. 2018, table 2)
SLANG_PAPER = {
    "boston": "3.21 / -2.58",
    "concrete": "5.58 / -3.13",
    "energy": "0.64 / -1.12",
    "kin8nm": "0.08 / 1.06",
    "yacht": "1.08 / -1.88",
}
BBB_PAPER = {
    "boston": "3.43 / -2.66",
    "concrete": "6.16 / -3.25",
    "energy": "0.97 / -1.45",
    "kin8nm": "0.08 / 1.07",
    "yacht": "1.13 / -1.56",
}


#: on a mean-field guide, if no other is named
_ours = partial(trained_by, draws=DRAWS, init_scale=SCALE)

METHODS: dict[str, Callable[[Any], tuple[Any, SVI]]] = {
    "BBB": partial(bbb, draws=DRAWS, lr=0.01, init_scale=SCALE),
    "VOGN": partial(_ours, ngvi.optim.VOGN, "gauss_newton"),
    "IVON": partial(_ours, ngvi.optim.IVON, None),
    "matrix normal, NGVB": partial(_ours, ngvi.NGVB, None, guide_of=ngvi.AutoMatrixNormal),
    "matrix normal, NoisyKFAC": partial(
        _ours,
        partial(ngvi.optim.NoisyKFAC, lr=0.05, curvature_lr=0.01),
        "kronecker",
        guide_of=ngvi.AutoMatrixNormal,
    ),
    "SLANG 1": partial(
        _ours,
        partial(ngvi.optim.SLANG, lr=0.02),
        "gauss_newton",
        guide_of=partial(ngvi.AutoFactorPrecision, rank=1),
    ),
}


def run(quick: bool, seeds: int, data: Sequence[str] | None) -> Iterator[Row]:
    torch.set_default_dtype(torch.float32)
    epochs = QUICK_EPOCHS if quick else EPOCHS
    for name in data or DATA:
        for label, make in METHODS.items():
            runs = [_trained(name, split, make, epochs) for split in range(seeds)]
            rmse, log_likelihood, seconds = zip(*runs, strict=True)
            paper = {"BBB": BBB_PAPER, "SLANG 1": SLANG_PAPER}.get(label, {}).get(name, "-")
            ours = f"{spread(rmse, 2)} / {spread(log_likelihood, 2)}"
            ours += f" ({seeds} splits, {epochs} epochs, {np.mean(seconds):.3f} s a step)"
            detail = {"rmse": rmse, "log_likelihood": log_likelihood, "seconds_per_step": seconds}
            yield Row(f"uci {name}, {label}, RMSE / log-likelihood", paper, ours, detail)


def _trained(
    name: str, split: int, make: Callable[[Any], tuple[Any, SVI]], epochs: int
) -> tuple[float, float, float]:
    pyro.clear_param_store()
    pyro.set_rng_seed(split)
    X, y, X_test, y_test, shift, scale = load(name, split)
    net = nn.Sequential(nn.Linear(X.shape[1], HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 1))
    model = ngvi.nn.bayesianize(net, "normal", num_data=len(X))
    guide, svi = make(model)
    seconds = train(svi, X, y, 128 if name == "kin8nm" else 32, epochs)
    standard = (y_test - shift) / scale
    prediction = ngvi.nn.predict(model, guide, X_test, standard, num_samples=100, seed=0)
    assert prediction.log_density is not None
    rmse = scale * float((prediction.mean - standard).square().mean().sqrt())
    return rmse, float(prediction.log_density.mean()) - float(np.log(scale)), seconds


def load(name: str, split: int) -> tuple[Tensor, Tensor, Tensor, Tensor, float, float]:
    """Standardised X, y and X_test; y_test as it is; mean and sd of the train targets."""
    with np.load(data_file(f"uci/{name}.npz")) as table:
        X, y, test = table["X"], table["y"], table["test_mask"][split]
    mean, sd = X[~test].mean(0), X[~test].std(0)
    X = (X - mean) / np.where(sd > 0.0, sd, 1.0)
    shift, scale = float(y[~test].mean()), float(y[~test].std())
    arrays = X[~test], (y[~test] - shift) / scale, X[test], y[test]
    X_train, y_train, X_test, y_test = (torch.tensor(a, dtype=torch.float32) for a in arrays)
    return X_train, y_train, X_test, y_test, shift, scale
