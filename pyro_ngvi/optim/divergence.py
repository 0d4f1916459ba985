r"""A step is taken as far as the guide moves as its Fisher matrix says.

KL(q || q_new) is |step|^2 / 2 while the metric at q holds, which in the coordinates in which other
guides are stored may not be so for a length of 1.  The KL costs no call of the model: the step is
shortened, along the line, until

    KL(q || q_new) <= TOLERANCE |step|^2 / 2.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from ..families.base import Tensors
from ..linalg.host import host_bool
from .natural_gradient import SHRINK
from .rule import State, Step

#: by how much the KL may exceed what the Fisher matrix says of it
TOLERANCE = 1.5
#: lengths that are tried; the last is taken as it is
TRIALS = 6
#: a KL below this is not told from none (nats)
NONE = 1e-9


def shortened(
    step: Step, params: Tensors, divergence: Callable[[Tensors], Tensor]
) -> tuple[Step, Tensor]:
    """``step`` from ``params``, as long as it may be; and whether it was longer, 0-dim."""
    bound = TOLERANCE * 0.5 * step.length.square()
    t, new = torch.ones_like(bound), step.params
    for _ in range(TRIALS):
        excess = divergence(new) / (t.square() * bound + NONE)
        too_far = ~(excess <= 1.0)
        if host_bool(too_far) is False:
            break
        # a KL grows like t^2 at first, and faster where the metric fails
        factor = (0.9 * excess.rsqrt()).nan_to_num(0.0).clamp(0.1, 0.7)
        t = torch.where(too_far, factor * t, t)
        new = {name: torch.lerp(p, step.params[name], t) for name, p in params.items()}
    short = t < 1.0
    reach = step.state["reach"]
    changed: State = {
        "descent": t * step.state["descent"],
        "reach": torch.where(short, (SHRINK * reach).clamp_min(1.0), reach),
    }
    if "move" in step.state:
        changed["move"] = {name: t * v for name, v in step.state["move"].items()}
        changed["move_energy"] = t.square() * step.state["move_energy"]
    damped = short if step.damped is None else step.damped | short
    state = step.state | changed
    return replace(step, params=new, length=t * step.length, damped=damped, state=state), short
