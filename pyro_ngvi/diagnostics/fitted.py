"""What a fit has learnt beside the guide: the parameters of the model, for exports."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from pyro import poutine

from ..linalg.random import own_random_state

__all__ = ["fitted_parameters"]


def fitted_parameters(
    model: Callable[..., Any], guide: Callable[..., Any], args: Any, kwargs: Any
) -> dict[str, np.ndarray]:
    """Parameters of the model by name, constrained; those of the guide are in its draws."""
    with own_random_state(), poutine.block(), torch.no_grad():
        of_guide: Any = poutine.trace(guide).get_trace(*args, **kwargs)
        of_model: Any = poutine.trace(poutine.replay(model, trace=of_guide)).get_trace(
            *args, **kwargs
        )
    return {
        name: of_model.nodes[name]["value"].detach().cpu().numpy()
        for name in of_model.param_nodes
        if name not in of_guide.nodes
    }
