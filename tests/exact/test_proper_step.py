"""A step of the sites that would leave the proper densities: the share of it that is taken."""

from typing import Any

import pytest
import torch
from torch import Tensor

from pyro_ngvi.sites.algebra import proper_step
from tests.exact.site_cases import N, fit, gp_kernel, student, with_outliers


def before_a_step() -> tuple[Any, Any, Tensor, Tensor]:
    """A guide after some sweeps, the targets of the next, its site precisions and those of q."""
    K, y = gp_kernel(N), with_outliers()
    run = fit(student, K, y, sweeps=3)
    run.svi.loss_and_grads(student, run.guide, K, y)
    sites = run.guide.sites()["y"].precision[:, 0, 0]
    return run.guide, run.guide.curvature, sites, torch.linalg.inv(K) + torch.diag(sites)


def step_by(amount: float | Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    linear = torch.linspace(-1.0, 1.0, N)[:, None]
    return {"y": (linear, torch.full((N, 1, 1), -1.0) * amount)}


@pytest.mark.parametrize(("bound", "share"), [(1.1, 1.0), (0.9, 0.5), (0.2, 0.125), (0.017, 2**-6)])
def test_the_largest_proper_share_in_halves_is_taken(bound: float, share: float) -> None:
    """P + s (-t I) is positive definite up to s = smallest eigenvalue of P / t, here ``bound``."""
    guide, targets, _, P = before_a_step()
    change = step_by(torch.linalg.eigvalsh(P)[0] / bound)
    step = proper_step(guide.algebra, targets, change)
    assert float(step.share) == share
    # the evidence is that of the sites after the share, summed anew
    (linear, precision), (nu, Lambda) = guide.site_tensors()["y"], step.change["y"]
    moved = {"y": (linear + share * nu, precision + share * Lambda)}
    wanted = guide.algebra.collect(targets.view, moved)
    for name in ("constant", "linear", "precision"):
        torch.testing.assert_close(getattr(step.evidence, name), getattr(wanted, name))
    normalizer = guide.algebra.posterior(targets.view, wanted).log_normalizer
    torch.testing.assert_close(step.log_normalizer, normalizer)


def test_where_no_share_is_proper_sites_lose_their_negative_precision() -> None:
    guide, targets, sites, P = before_a_step()
    size = torch.linalg.eigvalsh(P)[0] / 0.01  # below 2^-6
    step = proper_step(guide.algebra, targets, step_by(size))
    nu, Lambda = step.change["y"]
    assert float(step.share) == 1.0
    torch.testing.assert_close(sites + Lambda[:, 0, 0], (sites - size).clamp_min(0.0))
    assert torch.equal(nu, step_by(size)["y"][0])
