r"""Algorithms 1 and 2 of the paper on IFVB as printed, for ``pyro.infer.SVI``.

    H_0 = eps I,   lambda <- lambda - c_a / (c_a' + k)^alpha  n_s H_s^-1 g,   k = 0, 1, ...

in the coordinates in which the guide stores lambda, without a trust region.  All of H^-1 without
``window``, else its last K vectors (:class:`~benchmarks.baselines.PaperWindow`).  Algorithm 2 draws the
scores at the average of the iterates, with the weights (log(k + 1))^2: the printed (log k)^2 give 0/0
at the first step.

    1/2 < alpha < 1   and   0 < beta < alpha - 1/2                     (theorems 5.1 to 5.3)

are checked unless ``check=False``, which permits what the theorems exclude (as example 4 does).

Not for use beyond comparisons: :class:`pyro_ngvi.IFVB` and ``AIFVB`` have an estimate of the Fisher
matrix that keeps its size, and steps that need no tuning.

Source: Godichon-Baggioni, Nguyen & Tran (2024, JASA).
"""

from __future__ import annotations

from typing import Any

from pyro_ngvi import AIFVB, IFVB
from pyro_ngvi.optim.blocks import Coordinates, GuideBlock
from pyro_ngvi.optim.ifvb_rule import IFVBRule

from .paper_dense import PaperDense
from .paper_window import PaperWindow

__all__ = ["StoredIFVB", "algorithm_1", "algorithm_2", "check_convergence"]


def check_convergence(alpha: float, beta: float | None = None) -> None:
    """Refuse exponents outside the theorems: 1/2 < alpha < 1 and 0 < beta < alpha - 1/2."""
    paper = "(Godichon-Baggioni et al. 2024, theorem 5.1)"
    if not 0.5 < alpha < 1.0:
        raise ValueError(
            f"Steps c / (c' + k)^alpha converge for 1/2 < alpha < 1 {paper}, and alpha = {alpha:g}."
        )
    if beta is not None and not 0.0 < beta < alpha - 0.5:
        raise ValueError(
            f"The regularisation c_beta k^-beta needs 0 < beta < alpha - 1/2 = {alpha - 0.5:g} "
            f"{paper}, and beta = {beta:g}. Lower beta, raise alpha, or set c_beta=0."
        )


class _StoredBlock(GuideBlock):
    def _find_frames(self) -> dict[str, Any]:
        return {}


class StoredIFVB(IFVB):
    """IFVB in the coordinates in which parameters are stored, without frames."""

    def __init__(self, guide: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(guide, *args, **kwargs)
        if self._rest is not None:
            self._rest = _StoredBlock(guide, self._steady)

    def make_rule(self, family: Any) -> IFVBRule:
        ours = not isinstance(family, Coordinates)
        return super().make_rule(
            Coordinates(family.names, family.nearly_singular) if ours else family
        )


class StoredAIFVB(StoredIFVB, AIFVB):
    """AIFVB in those coordinates."""


def algorithm_1(
    guide: Any,
    *,
    c_a: float,
    c_a_prime: float = 1.0,
    alpha: float,
    eps: float = 1.0,
    c_beta: float = 1.0,
    beta: float = 0.1,
    window: int | None = None,
    num_scores: int = 1,
    momentum: float = 0.0,
    check: bool = True,
    optimizer: type[IFVB] = StoredIFVB,
    **further: Any,
) -> IFVB:
    """Algorithm 1; ``further`` arguments are those of ``optimizer``.

    ``momentum``, a move of m <- momentum m + (1 - momentum) b_k G with the step b_k of its time, and
    ``clip_norm`` are in the authors' scripts only.
    """
    if check:
        check_convergence(alpha, beta if c_beta else None)
    scale = c_a / c_a_prime**alpha * (1.0 - momentum)
    dense = PaperDense(eps, c_beta, beta)
    return optimizer(
        guide,
        schedule=lambda k: scale * (1.0 + k / c_a_prime) ** -alpha,
        fisher=dense if window is None else PaperWindow(window, eps, c_beta, beta),
        num_scores=num_scores,
        trust_radius=None,
        momentum=momentum,
        **further,
    )


def algorithm_2(guide: Any, *, averaging: Any = 2.0, **arguments: Any) -> IFVB:
    """Algorithm 2; ``arguments`` are those of :func:`algorithm_1`."""
    return algorithm_1(guide, optimizer=StoredAIFVB, averaging=averaging, **arguments)
