r"""Curvature of the layers of a network, from the loss's own backward pass.

The first step takes the general route, finds the layers, and checks that taps behind them
(:mod:`pyro_ngvi.curvature.taps.taps`) give the right gradients.  From then on the diagonal products
of single data cost about one more matrix product a layer, and a prior whose Hessian H is diagonal has
it from H 1, a second backward pass through the prior alone.  Latent sites that no layer covers, such as
a noise scale, take the general route on their own entries.

"kronecker" has, by site W (n, m), the weight of a linear layer,

    "kron_rows.W" (n, n), "kron_columns.W" (m, m)     the Gauss-Newton matrix of vec W is about their
                                                      Kronecker product (see taps/kronecker.py)
    "prior" (d,)                                      the diagonal of the Hessian of -rest

Other sites, such as biases and scales, need nothing: their gradients are enough.  Not for networks
whose matrices are shared between places or layers: such a site is refused by name.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..runtime.run import run_particles
from .derivatives import at_a_time
from .drawn import Drawn
from .per_example import BUDGET, squared_sum
from .taps.kronecker import KroneckerTaps
from .taps.taps import LayerTaps

__all__ = ["kronecker", "tapped_squares"]


def tapped_squares(drawn: Drawn) -> Tensor | None:
    """The average over draws of sum_i s_i g_i^2 (d,), or ``None`` where taps do not have it."""
    taps = drawn.pair.taps
    squares = {} if taps is None else taps.squared_gradients(len(drawn.draws))
    if not drawn.pair.searched and _has_several_data(drawn):
        _search(drawn)
    return _assembled(drawn, squares) if squares else None


def _has_several_data(drawn: Drawn) -> bool:
    """Whether more than one datum counts: of a single one it is not seen whether data mix."""
    _, weights = drawn.data(drawn.draws[0])
    return int((weights != 0).sum()) > 1


def _search(drawn: Drawn) -> None:
    """After the first step: look for layers, and check that they give the right squares."""
    pair, theta = drawn.pair, drawn.draws
    pair.searched = True
    values = pair.layout.unpack(theta)
    if not drawn.rest_is_diagonal():
        pair.reasons = dict.fromkeys(values, "The Hessian of the log prior is not diagonal.")
        return
    free = {name: values[name] for name in _free(drawn)}
    shared = {name: value[0] for name, value in values.items() if name not in free}
    how: Any = {"minibatches": drawn.minibatches, "shared": shared}
    with torch.enable_grad():
        taps = LayerTaps.discover(drawn.model, free, drawn.args, drawn.kwargs, **how)
    pair.reasons = dict.fromkeys(shared, "Its support is constrained.") | taps.reasons
    pair.searched = not taps.undecided  # or the next step tries again
    if taps.sites and not taps.undecided:
        pair.taps = taps


def _free(drawn: Drawn) -> list[str]:
    """The sites whose values are the entries of theta themselves."""
    parts = drawn.pair.layout.unconstrained(drawn.draws)
    return [name for name, transform, x in parts if transform(x) is x]


def _assembled(drawn: Drawn, squares: dict[str, Tensor]) -> Tensor:
    """The squares of all sites (d,): those of the taps, and by the general route the others."""
    theta, pieces, uncovered, start = drawn.draws, [], [], 0
    for name, shape in drawn.pair.layout.unconstrained_shapes.items():
        end = start + shape.numel()
        if name in squares:
            pieces.append(squares[name].reshape(-1))
        else:
            pieces.append(theta.new_zeros(end - start))
            uncovered.append(torch.arange(start, end, device=theta.device))
        start = end
    diagonal = torch.cat(pieces)
    if not uncovered:
        return diagonal
    entries = torch.cat(uncovered)
    return diagonal.index_copy(0, entries, _squares_of(drawn, entries))


def _squares_of(drawn: Drawn, entries: Tensor) -> Tensor:
    """The average over draws of sum_i s_i g_i^2, of some ``entries`` (k,) of theta only."""
    _, weights = drawn.data(drawn.draws[0])
    budget = BUDGET // at_a_time(drawn.draws, len(entries))

    def squares(t: Tensor) -> Tensor:
        def some(part: Tensor) -> Tensor:
            return drawn.data(t.index_copy(0, entries, part))[0]

        return squared_sum(some, t[entries], weights, budget=budget)

    return drawn.average(squares, columns=len(entries))


def kronecker(drawn: Drawn) -> dict[str, Tensor]:
    """The factors of every matrix of the guide, and the diagonal of the rest's Hessian.

    The first step finds the layers, checks them, and is then run again with taps.
    """
    pair = drawn.pair
    drawn.warn_of_kinks()
    diagonal, decided = drawn.rest_is_diagonal(), True
    if pair.taps is None:
        decided = _has_several_data(drawn)  # which refuses data without a plate
        pair.taps = _layers_of_matrices(drawn)
        decided = decided and not pair.taps.undecided
        _run_again(drawn, pair.taps)
    taps = pair.taps
    assert isinstance(taps, KroneckerTaps)
    factors = taps.factors(len(drawn.draws))
    if taps.failure is not None:
        raise ValueError(f'BatchedELBO(curvature="kronecker"): {taps.failure}')
    parts = {"prior": pair.rest_curvature if diagonal else drawn.rest_curvature()}
    for name, (rows, columns) in factors.items():
        parts |= {f"kron_rows.{name}": rows, f"kron_columns.{name}": columns}
    if not decided:
        pair.taps = None  # it could not be seen whether data mix: the next step tries again
    return parts


def _layers_of_matrices(drawn: Drawn) -> KroneckerTaps:
    """Taps behind the layers of all matrices; a site that has no such layer is refused."""
    values, free = drawn.pair.layout.unpack(drawn.draws), _free(drawn)
    matrices = {name: values[name] for name in drawn.guide.matrices if name in free}
    shared = {name: value[0] for name, value in values.items() if name not in matrices}
    how: Any = {"minibatches": drawn.minibatches, "shared": shared}
    with torch.enable_grad():
        taps = KroneckerTaps.discover(drawn.model, matrices, drawn.args, drawn.kwargs, **how)
    assert isinstance(taps, KroneckerTaps)
    taps.check_weights()
    constrained = [name for name in drawn.guide.matrices if name not in free]
    reasons = {name: f"The support of {name!r} is constrained." for name in constrained}
    reasons |= taps.reasons
    if reasons:
        raise ValueError(
            f'BatchedELBO(curvature="kronecker") needs each matrix of the guide to be the weight '
            f"of one linear layer over the data. {' '.join(reasons.values())} Take "
            f"pyro_ngvi.NGVB on the same guide, which needs no curvature."
        )
    return taps


def _run_again(drawn: Drawn, taps: LayerTaps) -> None:
    """The step of the loss once more, so that its first step has factors too."""
    pair, S = drawn.pair, len(drawn.draws)
    how: Any = {"minibatches": drawn.minibatches}
    with torch.enable_grad():
        theta = drawn.draws.detach().requires_grad_()
        values, log_det = pair.layout.unpack_with_log_det(theta)
        pair.start(theta, log_det)
        terms = run_particles(taps, pair.terms, values, S, drawn.args, drawn.kwargs, **how)
        log_p = pair.log_joint(terms)
        pair.before_backward()
        torch.autograd.grad(-log_p.sum() / S, theta)
