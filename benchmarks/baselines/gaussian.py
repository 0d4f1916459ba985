"""What the Gaussian baselines share: where they report to, and the common start."""

from collections.abc import Callable

import torch
from torch import Tensor

#: log density of draws (S, d), as (S,)
LogDensity = Callable[[Tensor], Tensor]
#: loc (d,) and scale_tril (d, d)
Gaussian = tuple[Tensor, Tensor]
#: sees every answer that a method has on its way; true to end it
Report = Callable[[Tensor, Tensor], bool]


def ignore(loc: Tensor, scale_tril: Tensor) -> bool:
    """A report that never ends a run."""
    return False


def value_and_gradient(log_density: LogDensity, theta: Tensor) -> tuple[Tensor, Tensor]:
    """Log density (S,) and its gradient (S, d) at draws (S, d)."""
    theta = theta.detach().requires_grad_()
    value = log_density(theta)
    (gradient,) = torch.autograd.grad(value.sum(), theta)
    return value.detach(), gradient
