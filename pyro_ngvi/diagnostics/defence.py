r"""A proposal with a share of long tails on all sides, so that weights see what it lacks.

    r = (1 - a) q + a t,        p / r <= p / (a t),

q the proposal and t a multivariate Student t around the same mean, of more than its covariance
(Hesterberg 1995, "Weighted average importance sampling and defensive mixture distributions",
Technometrics 37).  A copula has one correlation everywhere.  Where an entry is the wider the larger
another one is, as the mean of few data and their scale, it has the far end of that on one side alone,
draws hardly ever the other, and its weights look well.
"""

from __future__ import annotations

from typing import Any, ClassVar

import pyro.distributions as dist
import torch
from torch import Tensor
from torch.distributions import constraints

#: a, and where other modes are seen, degrees of freedom of t, and its scale matrix by that covariance
SHARE, SEVERAL, DEGREES, WIDER = 0.2, 0.5, 3.0, 2.0


def defended(q: Any, mean: Tensor, covariance: Tensor, share: float) -> Defended:
    """r of a distribution q over vectors (d,), t of such moments, and a."""
    root = torch.linalg.cholesky(WIDER * covariance)
    degrees = mean.new_tensor(DEGREES)
    t = dist.MultivariateStudentT(degrees, mean, root, validate_args=False)
    return Defended(q, t, share)


class Defended(dist.TorchDistribution):
    """r of both."""

    arg_constraints: ClassVar[dict[str, Any]] = {}  # pyright: ignore[reportAssignmentType]
    support: Any = constraints.real_vector

    def __init__(self, q: Any, t: Any, share: float) -> None:
        self.parts, self.share = (q, t), share
        super().__init__(q.batch_shape, q.event_shape, validate_args=False)

    def expand(self, batch_shape: Any, _instance: Any = None) -> Defended:
        q, t = (part.expand(batch_shape) for part in self.parts)
        return Defended(q, t, self.share)

    def sample(self, sample_shape: Any = ()) -> Tensor:
        with torch.no_grad():
            q, t = (part.sample(torch.Size(sample_shape)) for part in self.parts)
            return torch.where(torch.rand_like(q[..., :1]) < self.share, t, q)

    def log_prob(self, value: Tensor) -> Tensor:
        of_q, of_t = (part.log_prob(value) for part in self.parts)
        a = of_q.new_tensor(self.share)
        return torch.logaddexp(torch.log1p(-a) + of_q, a.log() + of_t)
