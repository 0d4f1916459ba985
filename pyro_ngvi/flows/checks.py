"""What AutoFlow refuses: flows that are no fixed, smooth, invertible map of R^d onto itself."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pyro
import torch
from torch import Tensor, nn

from ..families.base import log_normal
from ..runtime.checks import plain_support
from ..runtime.pyro_adapter import with_inner

__all__ = ["check_base", "check_fixed", "check_round_trip", "check_steps"]

#: parts of networks that draw, or change with the batch
NOT_FIXED = (
    nn.modules.dropout._DropoutNd,
    nn.modules.batchnorm._NormBase,
    pyro.distributions.transforms.BatchNorm,  # pyright: ignore[reportAttributeAccessIssue]
)


#: maps with a kink, where their density jumps
KINKED = (pyro.distributions.transforms.LeakyReLUTransform,)  # pyright: ignore[reportAttributeAccessIssue]


def check_fixed(module: nn.Module, name: str) -> None:
    """Refuse networks that are another map at every call, or with every batch."""
    for part in module.modules():
        if isinstance(part, NOT_FIXED) and getattr(part, "p", 1.0) > 0.0:
            raise ValueError(
                f"The flow {name} has a {type(part).__name__}, which makes another map of every call: "
                f"log q would not be the density of the draws. Build the flow without it."
            )


def check_steps(steps: Iterable[Any], d: int) -> None:
    """Refuse transforms of Pyro that do not map R^d smoothly onto R^d, or hold numbers nobody trains.

    Gradients and scores are derivatives within the pieces of a density, and miss its jumps: behind a
    leaky ReLU the scores of mu average 39.5 and not 0.
    """
    before, last = "Real()", "its base"
    for t in (part for step in steps for part in getattr(step, "parts", [step])):
        if str(plain_support(t.domain)) != before:
            raise ValueError(
                f"The transform {type(t).__name__} begins at {plain_support(t.domain)}, and what "
                f"comes before it ({last}) fills {before}. A flow is a smooth map of R^{d} onto itself."
            )
        if kinked := [part for part in with_inner(t) if isinstance(part, KINKED)]:
            raise ValueError(
                f"The transform {type(kinked[0]).__name__} has a kink at 0, where the density of its "
                f"draws jumps. Gradients do not see a jump, so the answer would be wrong. Take a "
                f"smooth map of R^{d} onto itself, such as a coupling or a spline."
            )
        before, last = str(plain_support(t.codomain)), type(t).__name__
        for name, v in (pair for part in with_inner(t) for pair in vars(part).items()):
            if isinstance(v, Tensor) and v.requires_grad and v.is_leaf:
                raise ValueError(
                    f"The tensor {name!r} of the transform {last} requires a gradient, but is no "
                    f"parameter of a module, so nothing would train it. Detach it, or use a transform "
                    f"that is an nn.Module."
                )
    if before != "Real()":
        raise ValueError(
            f"The transform {last} maps onto {before}, by its codomain. A flow is a smooth map of "
            f"R^{d} onto itself."
        )


def check_base(flow: Any, name: str, d: int) -> None:
    base = flow.base()
    with torch.no_grad():
        like = next(flow.parameters())
        x = torch.linspace(-1.0, 2.0, d, dtype=like.dtype, device=like.device)
        try:
            found = base.log_prob(x)
        except (RuntimeError, ValueError):
            return  # another dimension: the round trip says so
        wanted = log_normal(x)
    if found.shape != wanted.shape or not torch.allclose(found, wanted, rtol=1e-4):
        raise ValueError(
            f"The base of {name} is {type(base).__name__}, and not the standard normal from which the "
            f"guide draws. Pass the transform alone, if it is a map of R^{d}."
        )


@torch.no_grad()
def check_round_trip(flow: nn.Module, name: str, d: int) -> None:
    like = next(iter(flow.parameters()), torch.zeros(()))
    x = torch.linspace(-1.0, 1.5, 2 * d, dtype=like.dtype, device=like.device).reshape(2, d)
    try:
        y, log_det = flow(x, False)
        back, inverse_log_det = flow(y, True)
    # KeyError: transforms of Pyro that look into their cache and nowhere else
    except (NotImplementedError, KeyError) as error:
        raise ValueError(
            f"The flow {name} has no inverse, so log q cannot be evaluated at a given point, and "
            f"there are no scores. Take one with an inverse, such as a coupling or a spline."
        ) from error
    except (RuntimeError, ValueError, AssertionError, AttributeError, TypeError) as error:
        raise ValueError(
            f"The flow {name} does not map vectors of length {d}, the number of unconstrained latent "
            f"variables of the model: {error}"
        ) from error
    if y.shape != x.shape or log_det.shape != x.shape[:1]:
        raise ValueError(
            f"The flow {name} gives an image of shape {tuple(y.shape)} and log-determinants of shape "
            f"{tuple(log_det.shape)} for {tuple(x.shape)}: it has to map R^{d} to itself."
        )
    if not (
        torch.allclose(back, x, atol=1e-3) and torch.allclose(log_det, -inverse_log_det, atol=1e-2)
    ):
        raise ValueError(
            f"The flow {name} is not inverted by its inverse: the round trip of a point is off by "
            f"{float((back - x).abs().max()):.2g}."
        )
