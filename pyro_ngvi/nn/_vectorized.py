"""A module at many weights at once, for vectorised particles."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["broadcasts_to", "over_rows", "run_vectorized"]


def broadcasts_to(shape: torch.Size, target: torch.Size) -> bool:
    """Whether a tensor of that ``shape`` is broadcast to ``target`` as it stands."""
    try:
        return torch.broadcast_shapes(shape, target) == target
    except RuntimeError:
        return False


def over_rows(value: Tensor, event_dim: int) -> Tensor:
    """A latent value of particles (S, *event) as (S, 1, *event), to meet the rows of the data.

    ``pyro.infer.Predictive(parallel=True)`` leaves that dimension out; any other value stays as it is.
    """
    split = value.dim() - event_dim
    return value.unsqueeze(1) if split == 1 else value


def run_vectorized(
    module: nn.Module, weights: Mapping[str, Tensor], dims: Mapping[str, int], inputs: Any
) -> tuple[Any, int]:
    """The output (*lead, M, ...) at weights (*lead, 1, *shape), and the length of ``lead``.

    The 1 is the place of the plate of the data; ``pyro.infer.Predictive(parallel=True)`` leaves it
    out. ``dims`` counts the dimensions of a single weight. Weights without ``lead`` are shared.

    Raises:
        ValueError: when the weights have different ``lead``.
        RuntimeError: when the module cannot run under ``vmap``.
    """
    batched, shared, leads = {}, {}, set()
    for name, w in weights.items():
        split = w.dim() - dims[name]
        lead, shape = w.shape[:split], w.shape[split:]
        lead = lead[:-1] if len(lead) > 1 else lead
        if lead.numel() == 1:
            shared[name] = w.reshape(shape)
        else:
            batched[name] = w.reshape(lead.numel(), *shape)
            leads.add(lead)
    if len(leads) > 1:
        raise ValueError(
            f"The weights have batch shapes {sorted(map(tuple, leads))} in front of their own; all "
            f"must have the same: one dimension of vectorised particles."
        )

    def run(weights: dict[str, Tensor]) -> Any:
        return torch.func.functional_call(module, {**weights, **shared}, inputs)

    if not batched:
        return run({}), 0
    (lead,) = leads
    try:
        output = torch.func.vmap(run, randomness="different")(batched)
    except RuntimeError as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__).rstrip(". ")
        raise RuntimeError(
            f"{type(module).__name__} cannot run at vectorised particles, under torch.func.vmap: "
            f"{reason}. Use Trace_ELBO without vectorize_particles, which runs it once for each."
        ) from error
    if isinstance(output, Tensor):
        output = output.reshape(lead + output.shape[1:])
    return output, len(lead)
