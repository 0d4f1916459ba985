"""Parameters and the time of a training step against the width of a layer, D inputs to D outputs.

The model: 64 standard normal rows x, y ~ N(sum of ReLU(x W') over D outputs / sqrt(D), 0.1^2), W (D, D)
with N(0, 1 / D) entries.  One draw a step, float32, one thread.

* mean field: Bayes by backprop in plain torch without Pyro, with local reparameterisation (two products
  with D x D matrices) and the closed KL, Adam: as lean as this method gets;
* matrix normal: ``AutoMatrixNormal`` and ``NGVB``, up to D = 512 (its step multiplies D x D matrices);
* WHVI: ``nn.WalshHadamardLinear`` with local reparameterisation, ``AutoMeanFieldNormal`` and
``NGVB``, Adam
  for the diagonals, through ``SVI``.

Blocks of steps of WHVI and one other alternate in one process; ratios are taken within a round.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import init_to_sample
from pyro.nn import PyroModule
from pyro.optim import Adam  # pyright: ignore[reportAttributeAccessIssue]
from torch import Tensor, nn

import pyro_ngvi as ngvi

from ..blr_papers.common import Row
from ..stepping import Step, compare

WIDTHS = (64, 128, 256, 512, 1024, 2048, 4096)
ROWS, NOISE = 64, 0.1
MATRIX_NORMAL_UP_TO = 512


def data(D: int) -> tuple[Tensor, Tensor]:
    return torch.randn(ROWS, D), torch.randn(ROWS)


class Wide(PyroModule):
    """The model with a Walsh-Hadamard layer."""

    def __init__(self, D: int) -> None:
        super().__init__()
        self.layer = ngvi.nn.WalshHadamardLinear(D, D, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> None:
        mean = self.layer(x).relu().sum(-1) / math.sqrt(x.shape[-1])
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(mean, NOISE), obs=y)


def walsh_hadamard(D: int) -> tuple[Step, int]:
    x, y = data(D)
    net = Wide(D)
    guide = ngvi.AutoMeanFieldNormal(net, init_loc_fn=init_to_sample)
    guide(x, y)
    model = ngvi.nn.local_reparameterization(net, guide)
    optim = ngvi.NGVB(guide, others=Adam({"lr": 0.01}))
    svi = SVI(model, guide, optim, Trace_ELBO(1))
    count = sum(p.numel() for module in (guide, net) for p in module.parameters())
    return lambda: svi.step(x, y), count


def mean_field(D: int) -> tuple[Step, int]:
    x, y = data(D)
    loc = nn.Parameter(torch.randn(D, D) / math.sqrt(D))
    log_scale = nn.Parameter(torch.full((D, D), math.log(0.1 / math.sqrt(D))))
    adam = torch.optim.Adam([loc, log_scale], lr=0.01)
    likelihood: Any = dist.Normal

    def step() -> None:
        adam.zero_grad()
        variance = (2.0 * log_scale).exp()
        spread = (x.square() @ variance.mT).sqrt()
        hidden = (x @ loc.mT + spread * torch.randn_like(spread)).relu()
        mean = hidden.sum(-1) / math.sqrt(D)
        kl = 0.5 * (D * (variance + loc.square()) - 1.0 - math.log(D) - 2.0 * log_scale).sum()
        (kl - likelihood(mean, NOISE).log_prob(y).sum()).backward()
        adam.step()

    return step, 2 * D * D


def matrix_normal(D: int) -> tuple[Step, int]:
    x, y = data(D)

    def model(x: Tensor, y: Tensor) -> None:
        W = pyro.sample("W", dist.Normal(x.new_zeros(D, D), 1.0 / math.sqrt(D)).to_event(2))
        mean = (x @ W.mT).relu().sum(-1) / math.sqrt(D)
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(mean, NOISE), obs=y)

    guide = ngvi.AutoMatrixNormal(model, init_loc_fn=init_to_sample)
    svi = SVI(model, guide, ngvi.NGVB(guide), ngvi.BatchedELBO(1))
    svi.step(x, y)
    return lambda: svi.step(x, y), sum(p.numel() for p in guide.parameters())


def run(quick: bool, seeds: int, data: Sequence[str] | None) -> Iterator[Row]:
    """``data`` names widths; ``seeds`` is not used."""
    torch.set_default_dtype(torch.float32)
    for D in [int(d) for d in data or ()] or WIDTHS:
        for label, make in (("mean field", mean_field), ("matrix normal", matrix_normal)):
            if label == "matrix normal" and D > MATRIX_NORMAL_UP_TO:
                continue
            pyro.clear_param_store()
            (other, theirs), (ours, own) = make(D), walsh_hadamard(D)
            timing = compare(other, ours, rounds=5 if quick else 11)
            first, second, ratio = timing.cells()
            found = (
                f"{theirs:,} and {own:,} parameters; {first} and {second} ms a step; ratio {ratio}"
            )
            yield Row(f"D = {D}, {label} and WHVI", "-", found, {"D": D, "other": label})
