"""What a loss leaves on a guide for its optimizer, beside the gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..families.base import Tensors

__all__ = ["Curvature", "leave_curvature"]


@dataclass(frozen=True)
class Curvature:
    """What a loss leaves beside the gradients: the expected Hessian of -log p(y, z), in nats.

    ``parts`` are those of :meth:`pyro_ngvi.families.Family.pull_curvature`; empty for "price".
    """

    kind: str
    parts: Tensors


def leave_curvature(block: Any, curvature: Any) -> None:
    """Leave on ``block`` what the loss has for its optimizer beside the gradients.

    Raises:
        RuntimeError: where nobody has taken what the call before left.
    """
    if block.curvature is not None and curvature.kind != "price":  # which is in the gradients
        block.curvature = None
        kind = curvature.kind
        taker = {"sites": "CVI", "scores": "SPRING", "kronecker": "NoisyKFAC"}.get(kind, "NGVB")
        raise RuntimeError(
            f"No optimizer took what the loss last left on {type(block).__name__} ({kind}): it would "
            f"train wrongly or not at all. Take one step for each loss_and_grads, by an optimizer "
            f"that uses it: pyro_ngvi.{taker}(guide)."
        )
    block.curvature = curvature
