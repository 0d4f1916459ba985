"""Guides of sites, and densities of one or two numbers by sums over dense grids."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyro.distributions as dist
import torch
from pyro.infer import SVI
from torch import Tensor

from pyro_ngvi import CVI, AutoSites, SitesELBO


def fitted(model: Callable[..., Any], *args: Tensor, sweeps: int = 25) -> AutoSites:
    guide = AutoSites(model)
    svi = SVI(model, guide, CVI(guide), SitesELBO())
    for _ in range(sweeps):
        svi.step(*args)
    return guide


LINE = torch.linspace(-14.0, 14.0, 801, dtype=torch.float64)
PAIR = torch.stack(torch.meshgrid(LINE, LINE, indexing="ij"), -1)


def by_quadrature(log_joint: Tensor) -> tuple[Tensor, float]:
    """Marginals (2, P) on LINE of a density over LINE x LINE, and the log of its integral."""
    step = LINE[1] - LINE[0]
    evidence = torch.logsumexp(log_joint.flatten(), 0) + 2.0 * step.log()
    p = (log_joint - evidence).exp() * step
    return torch.stack([p.sum(1), p.sum(0)]), float(evidence)


def variation(truth: Tensor, x: Tensor, p: Tensor) -> float:
    """The total variation between a density (P,) on LINE and one at points x."""
    x, p = x.contiguous(), p.contiguous()
    at = torch.searchsorted(x, LINE).clamp(1, len(x) - 1)
    share = (LINE - x[at - 1]) / (x[at] - x[at - 1])
    found = torch.where((share >= 0) & (share <= 1), p[at - 1] + share * (p[at] - p[at - 1]), 0.0)
    return float(0.5 * torch.trapezoid((truth - found).abs(), LINE))


def gaussian_variation(truth: Tensor, mean: Tensor, variance: Tensor) -> float:
    q = dist.Normal(mean, variance.sqrt()).log_prob(LINE).exp()
    return float(0.5 * torch.trapezoid((truth - q).abs(), LINE))
