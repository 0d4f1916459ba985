"""Which estimate of the Fisher matrix IFVB makes for a guide, and the arguments that say so."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..fisher import Dense, InverseFisher, LowRank, PaperWindow, Window

__all__ = ["FisherForm"]

#: number of eigenvectors of the low-rank estimate
RANK = 32
#: number of scores in the damped window, and how many of them are drawn at a step
WINDOW, WINDOW_SCORES = 128, 8
#: ridge of the damped window, as a share of the mean of the diagonal
DAMPING = 1.0
#: score k has weight k^GROWTH: the estimate follows a Fisher matrix that moves with q
GROWTH = 1.0
FORMS = ("low_rank", "window", "dense", "paper")


@dataclass(frozen=True)
class FisherForm:
    """Checked arguments; ``None`` stands for what suits the guide.  See :class:`~pyro_ngvi.IFVB`."""

    form: str | None = None
    window: int | None = None
    damping: float | None = None
    eps: float | None = None
    c_beta: float = 0.0
    beta: float = 0.25
    by_layer: bool = False
    num_scores: int | None = None

    def __post_init__(self) -> None:
        if self.form is not None and self.form not in FORMS:
            known = ", ".join(f'"{form}"' for form in FORMS)
            raise ValueError(f"form must be {known} or None, got {self.form!r}.")
        for name, count in (("window", self.window), ("num_scores", self.num_scores)):
            if count is not None and (not isinstance(count, int) or count < 1):
                raise ValueError(
                    f"{name} must be a whole number of at least 1 or None, got {count!r}."
                )
        if self.eps is not None and not self.eps > 0:
            raise ValueError(f"eps must be positive or None, got {self.eps!r}.")
        if not (self.c_beta >= 0 and self.beta >= 0):
            raise ValueError(
                f"c_beta and beta must not be negative, got {self.c_beta!r} and {self.beta!r}."
            )
        if self.damping is not None and not 0.0 < self.damping < float("inf"):
            raise ValueError(f"damping must be a positive number or None, got {self.damping!r}.")
        if self.form is not None:
            self._check_damping(self.form)
        if self.form == "paper" and self.window is None:
            raise ValueError('form="paper" is a window of K vectors: say how many, window=100.')
        if self.by_layer and (self.form == "paper" or self.eps is not None):
            raise ValueError(
                'by_layer=True goes with the forms "window", "low_rank" and "dense" without eps: the '
                "printed recursion is one for all parameters."
            )

    def _check_damping(self, form: str) -> None:
        if self.damping is not None and form != "window":
            raise ValueError(
                f'damping={self.damping!r} is the ridge of form="window", and the form here is '
                f'"{form}". Leave it out, or set form="window".'
            )

    @property
    def counts_from_zero(self) -> bool:
        """Whether H_0 = eps I, which needs no first guess, as in the paper, whose scores start at 0."""
        return self.form == "paper" or (self.form == "dense" and self.eps is not None)

    def estimate(self, family: Any) -> InverseFisher:
        """The estimate for a family, or for the plain coordinates of a guide that is not ours."""
        form = self.form or ("window" if family.nearly_singular else "low_rank")
        self._check_damping(form)
        if form == "window":
            return Window(self.window or WINDOW, DAMPING if self.damping is None else self.damping)
        if form == "low_rank":
            return LowRank(self.window or RANK, growth=GROWTH)
        if form == "dense":
            return Dense(eps=self.eps, c_beta=self.c_beta, beta=self.beta)
        assert self.window is not None
        return PaperWindow(
            self.window, 1.0 if self.eps is None else self.eps, self.c_beta, self.beta
        )

    def scores_a_step(self, estimate: InverseFisher) -> int:
        """How many scores are drawn at a step."""
        return self.num_scores or (WINDOW_SCORES if isinstance(estimate, Window) else 1)
