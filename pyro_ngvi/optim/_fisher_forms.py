"""Which estimate of the inverse Fisher matrix IFVB makes for a guide, and the keywords for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..fisher import Dense, InverseFisher, LowRank, Window

__all__ = ["Suited", "as_estimate"]

#: number of eigenvectors of the low-rank estimate
RANK = 32
#: score k has weight k^GROWTH: the estimate follows a Fisher matrix that moves with q
GROWTH = 1.0
#: number of scores in the damped window
WINDOW = 128
#: ridge of the damped window, as a share of the mean of the diagonal
DAMPING = 1.0


@dataclass(frozen=True)
class Suited:
    """The window for flows and guides with networks, else the low-rank estimate."""

    window: Window
    low_rank: LowRank
    damping: float | None = None

    def estimate(self, family: Any) -> InverseFisher:
        """The estimate for a family, or for the plain coordinates of a guide that is not ours."""
        if family.nearly_singular:
            return self.window
        _refuse_damping(self.damping, "low_rank")
        return self.low_rank


def as_estimate(fisher: InverseFisher | None, **keywords: Any) -> InverseFisher | Suited:
    """``fisher``, or else what the ``keywords`` stand for."""
    if fisher is None:
        return named_estimate(**keywords)
    if not hasattr(fisher, "product"):
        raise ValueError(
            f"fisher must be an estimate such as pyro_ngvi.fisher.LowRank(32, growth=1.0), "
            f"got {fisher!r}."
        )
    if keywords:
        raise ValueError(
            f"fisher={fisher!r} is the whole estimate, and {', '.join(keywords)} would change it. "
            f"Leave one of the two out."
        )
    return fisher


def named_estimate(
    form: str | None = None,
    window: int | None = None,
    damping: float | None = None,
    eps: float | None = None,
    c_beta: float = 0.0,
    beta: float = 0.25,
) -> InverseFisher | Suited:
    """The estimate called ``form``; ``None`` for what suits the guide."""
    ridge = DAMPING if damping is None else damping
    scores = Window(WINDOW if window is None else window, ridge)
    low_rank = LowRank(RANK if window is None else window, growth=GROWTH)
    known = {"low_rank": low_rank, "window": scores, "dense": Dense(eps, c_beta, beta)}
    if form is None:
        return Suited(scores, low_rank, damping)
    if form not in known:
        names = ", ".join(f'"{name}"' for name in known)
        raise ValueError(f"form must be {names} or None, got {form!r}.")
    if form != "window":
        _refuse_damping(damping, form)
    return known[form]


def _refuse_damping(damping: float | None, form: str) -> None:
    if damping is not None:
        raise ValueError(
            f'damping={damping!r} is the ridge of form="window", and the form here is "{form}". '
            f'Leave it out, or set form="window".'
        )
