"""UCI regression with two hidden layers of 128 ReLU units: table 1 of the paper.

Published (Rossi, Marmin & Filippone 2020, table 1; 8 random splits, 50,500 steps of Adam, batches
of 64): the WHVI column as quoted in the report of the reproduction github.com/ltdung/WHVI, the NNG
column (noisy natural gradient, a matrix normal) as quoted there too. The authors' library scores
the mean of the log likelihoods over draws, with log2(pi) for log(2 pi), and the RMSE of single
draws: so compare trends.

Here: N(0, 1 / fan-in) weights, N(0, 1) biases, latent noise sd with a HalfCauchy(1) prior in units
of the sd of y; inputs and targets standardised on the train rows of the given splits; the RMSE of
the predictive mean and minus the log of the mean density (100 draws), on the scale of y. 4 draws a
step, sd 0.1 at the start, default rates of NGVB; Adam 0.01 for the diagonals and for mean field,
0.003 for dropout.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI
from pyro.optim import Adam  # pyright: ignore[reportAttributeAccessIssue]
from torch import Tensor, nn

import pyro_ngvi as ngvi

from ..blr_papers.common import Row, bbb, spread, train, trained_by
from ..blr_papers.uci import load

WIDTH, DRAWS, SCALE = 128, 4, 0.1
#: sets with more rows than this get batches of 128 and twice the steps
LARGE = 2_000
STEPS, QUICK_STEPS = 20_000, 2_000
DROPOUT, DECAY = 0.05, 1e-4

#: RMSE / MNLL of WHVI and of NNG
PAPER = {
    "boston": ("3.14 / 4.33", "3.56 / 2.72"),
    "concrete": ("4.70 / 3.17", "8.21 / 3.56"),
    "energy": ("0.58 / 2.00", "1.96 / 2.11"),
    "kin8nm": ("0.08 / -1.19", "0.07 / -1.19"),
    "naval": ("0.01 / -6.25", "0.00 / -6.52"),
    "powerplant": ("4.00 / 2.71", "4.23 / 2.86"),
    "protein": ("4.36 / 2.79", "4.57 / 2.95"),
    "yacht": ("0.69 / 1.80", "5.16 / 3.06"),
}

Score = tuple[float, float]  # RMSE and MNLL of standardised targets


def network(inputs: int, dropout: float = 0.0) -> nn.Sequential:
    hidden = [nn.Linear(inputs, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU()]
    if dropout:
        hidden = [hidden[0], hidden[1], nn.Dropout(dropout), *hidden[2:], nn.Dropout(dropout)]
    return nn.Sequential(*hidden, nn.Linear(WIDTH, 1))


def prior(name: str, p: Tensor) -> Any:
    sd = 1.0 / math.sqrt(p.shape[-1]) if p.dim() == 2 else 1.0
    return dist.Normal(p.new_zeros(()), p.new_tensor(sd), validate_args=False)


def _with_diagonals(guide: Any) -> ngvi.NGVB:
    return ngvi.NGVB(guide, others=Adam({"lr": 0.01}))


_ours = partial(trained_by, draws=DRAWS, init_scale=SCALE)
whvi = partial(_ours, _with_diagonals, None)


def variational(
    make: Callable[[Any], tuple[Any, SVI]], data: Sequence[Tensor], batch: int, epochs: int
) -> tuple[Score, float]:
    X, y, X_test, y_test = data
    model = ngvi.nn.bayesianize(network(X.shape[1]), "normal", num_data=len(X), prior=prior)
    guide, svi = make(model)
    seconds = train(svi, X, y, batch, epochs)
    found = ngvi.nn.predict(model, guide, X_test, y_test, num_samples=100, seed=0)
    assert found.log_density is not None
    rmse = float((found.mean - y_test).square().mean().sqrt())
    return (rmse, -float(found.log_density.mean())), seconds


class _Dropout:
    """MC dropout (Gal & Ghahramani 2016) in the clothes of an SVI: maximum likelihood, noise too."""

    def __init__(self, inputs: int) -> None:
        self.net, self.log_noise = network(inputs, DROPOUT), torch.zeros((), requires_grad=True)
        groups = [
            {"params": self.net.parameters(), "weight_decay": DECAY},
            {"params": [self.log_noise]},
        ]
        self.adam = torch.optim.Adam(groups, lr=0.003)

    def step(self, X: Tensor, y: Tensor) -> None:
        self.adam.zero_grad()
        error = (y - self.net(X).squeeze(-1)) * torch.exp(-self.log_noise)
        (0.5 * error.square().mean() + self.log_noise).backward()
        self.adam.step()


def dropout(data: Sequence[Tensor], batch: int, epochs: int) -> tuple[Score, float]:
    X, y, X_test, y_test = data
    model: Any = _Dropout(X.shape[1])
    seconds = train(model, X, y, batch, epochs)
    with torch.no_grad():
        draws = torch.stack([model.net(X_test).squeeze(-1) for _ in range(100)])
        density = dist.Normal(draws, model.log_noise.exp()).log_prob(y_test)
        mean_density = density.logsumexp(0) - math.log(len(draws))
    rmse = float((draws.mean(0) - y_test).square().mean().sqrt())
    return (rmse, -float(mean_density.mean())), seconds


METHODS: dict[str, Callable[[Sequence[Tensor], int, int], tuple[Score, float]]] = {
    "WHVI, diagonal g": partial(variational, partial(whvi, guide_of=ngvi.AutoWalshHadamard)),
    "WHVI, full g": partial(
        variational, partial(whvi, guide_of=partial(ngvi.AutoWalshHadamard, g="full_rank"))
    ),
    "MC dropout": dropout,
    "mean field, Adam": partial(variational, partial(bbb, draws=DRAWS, lr=0.01, init_scale=SCALE)),
    "matrix normal, NGVB": partial(
        variational, partial(_ours, ngvi.NGVB, None, guide_of=ngvi.AutoMatrixNormal)
    ),
}


def run(quick: bool, seeds: int, data: Sequence[str] | None) -> Iterator[Row]:
    torch.set_default_dtype(torch.float32)
    for name in data or PAPER:
        for label, method in METHODS.items():
            runs = [_trained(name, split, method, quick) for split in range(seeds)]
            rmse, mnll, seconds, steps = zip(*runs, strict=True)
            theirs, nng = PAPER[name]
            paper = theirs if label.startswith("WHVI") else nng if "matrix" in label else "-"
            ours = f"{spread(rmse, 4 if name == 'naval' else 3)} / {spread(mnll, 2)}"
            ours += f" ({seeds} splits, {steps[0]:,} steps, {1e3 * np.mean(seconds):.0f} ms a step)"
            detail = {"rmse": rmse, "mnll": mnll, "seconds_per_step": seconds, "steps": steps}
            yield Row(f"{name}, {label}", paper, ours, detail)


def _trained(name: str, split: int, method: Any, quick: bool) -> tuple[float, float, float, int]:
    pyro.clear_param_store()
    pyro.set_rng_seed(split)
    X, y, X_test, y_test, shift, scale = load(name, split)
    large = len(X) > LARGE
    batch, steps = 128 if large else 64, (QUICK_STEPS if quick else STEPS) * (2 if large else 1)
    per_epoch = -(-len(X) // batch)
    epochs = max(1, round(steps / per_epoch))
    data = X, y, X_test, (y_test - shift) / scale
    (rmse, mnll), seconds = method(data, batch, epochs)
    return scale * rmse, mnll + math.log(scale), seconds, epochs * per_epoch
