r"""A proposal with a share of long tails on all sides, so that weights see what it lacks.

    r = (1 - sum_j a_j) q + sum_j a_j t_j,        p / r <= p / (a_j t_j),

q the proposal and t_0 a multivariate Student t around the same mean, of more than its covariance
(Hesterberg 1995, "Weighted average importance sampling and defensive mixture distributions",
Technometrics 37).  A copula has one correlation everywhere.  Where an entry is the wider the larger
another one is, as the mean of few data and their scale, it has the far end of that on one side alone,
draws hardly ever the other, and its weights look well.

Others are around the places where a search for a start ended that q may have nothing of: small modes,
and the other half of one that is bent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import pyro.distributions as dist
import torch
from pyro.distributions import TorchDistribution
from torch import Tensor
from torch.distributions import constraints

#: a_0, and where other modes are seen, degrees of freedom of t, and its scale matrix by that covariance
SHARE, SEVERAL, DEGREES, WIDER = 0.2, 0.5, 3.0, 2.0
#: a_j of each other place at least, and of how many at most
LEAST, PLACES = 0.1, 4
#: mean and covariance
Moments = tuple[Tensor, Tensor]


class Place(NamedTuple):
    """Mean (d,), covariance, and mass in those of the largest, of an end of a search."""

    mean: Tensor
    covariance: Tensor
    mass: float


def defended(q: Any, own: Moments, share: float, others: Sequence[Place] = ()) -> Defended:
    """r of a distribution q over vectors (d,), the moments behind t_0 and its share, and ``others``."""
    others = others[:PLACES]
    whole = 1.0 + sum(place.mass for place in others)
    each = [max(LEAST, (1.0 - share) * place.mass / whole) for place in others]
    long = [_student(*moments) for moments in (own, *(place[:2] for place in others))]
    shares = own[0].new_tensor([share, *each, max(LEAST, 1.0 - share - sum(each))])
    return Defended([*long, q], shares / shares.sum())


def _student(mean: Tensor, covariance: Tensor) -> Any:
    root = torch.linalg.cholesky(WIDER * covariance)
    return dist.MultivariateStudentT(mean.new_tensor(DEGREES), mean, root, validate_args=False)


class Defended(TorchDistribution):
    """r of its parts and their shares (J,)."""

    arg_constraints: ClassVar[dict[str, Any]] = {}  # pyright: ignore[reportAssignmentType]
    support: Any = constraints.real_vector

    def __init__(self, parts: Sequence[Any], shares: Tensor) -> None:
        self.parts, self.shares = parts, shares
        super().__init__(parts[0].batch_shape, parts[0].event_shape, validate_args=False)

    def expand(self, batch_shape: Any, _instance: Any = None) -> Defended:
        return Defended([part.expand(batch_shape) for part in self.parts], self.shares)

    def sample(self, sample_shape: Any = ()) -> Tensor:
        with torch.no_grad():
            drawn = [part.sample(torch.Size(sample_shape)) for part in reversed(self.parts)]
            drawn = torch.stack(drawn[::-1])
            which = torch.rand_like(drawn[0, ..., :1]) >= self.shares.cumsum(0)[:-1]
            return drawn.gather(0, which.sum(-1, keepdim=True).expand(drawn.shape[1:])[None])[0]

    def log_prob(self, value: Tensor) -> Tensor:
        terms = torch.stack([part.log_prob(value) for part in self.parts], -1)
        return (terms + self.shares.log()).logsumexp(-1)
