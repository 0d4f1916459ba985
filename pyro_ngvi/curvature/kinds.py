r"""Expected curvature of -log p(y, z) at the draws of a guide, for rules that build on it.

With z = z(theta), theta (d,) unconstrained, and one term per datum,

    -log p~(theta) = - sum_i s_i log p(y_i | theta) - rest(theta),

s_i the scale (and mask) of datum i, rest the prior, the log-Jacobian, factors and what is observed
outside a plate.  Averages over the draws theta ~ q of

    "hessian"            grad^2 (-log p~), by forward over reverse mode
    "gauss_newton"       sum_i s_i g_i g_i' + grad^2 (-rest),   g_i = grad log p(y_i | theta)
    "squared_gradient"   diag(G o G / N) + grad^2 (-rest),      G = sum_i s_i g_i,  N = sum_i s_i
    "price"              nothing: the gradients of the scales carry it (Price's theorem)
    "kronecker"          two factors for each matrix of a matrix-normal guide, and diag grad^2 (-rest)
    "scores"             no curvature: the draws, and log q - log p at each

The outer products g_i g_i' stand for the Hessian as in VOGN and SLANG (Khan et al. 2018, Mishkin et al.
2018): positive semi-definite, right in expectation at parameters that fit the data, too small or too
large elsewhere. Their scale enters once: a minibatch of M of N data estimates the whole sum.
Squares of the sum over a minibatch, as Adam and Vadam have them, are M times smaller for M
independent terms.

A guide asks for a form: "dense" (d, d); "diagonal" (d,); "low_rank", rows (n, d) beside a diagonal.
The diagonal forms keep the diagonal of the rest's curvature.

Averages of second derivatives are the curvature of E_q[-log p] only where gradients are continuous:
those of Laplace distributions and of networks with ReLU jump, and the jumps are left out.  The first
step looks for them and warns (:mod:`pyro_ngvi.probing.kinks`).

Cost, for S draws: "hessian" d gradients, "gauss_newton" min(d, number of data) directional derivatives;
in a network its diagonal comes from the loss's own backward pass (:mod:`pyro_ngvi.curvature.tapped`).
Not for d above some thousands with "hessian", nor with many data and many parameters at once
with "gauss_newton".
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.func import grad, vmap

from .derivatives import at_a_time
from .drawn import Drawn
from .per_example import BUDGET, outer_sum, squared_sum, weighted_rows
from .tapped import kronecker, tapped_squares

__all__ = ["ESTIMATORS", "KINDS", "READ_OFF"]

Parts = dict[str, Tensor]


def price(drawn: Drawn) -> Parts:
    """Nothing beside the gradients."""
    return {}


def scores(drawn: Drawn) -> Parts:
    """The draws and the residuals log q - log p, for :class:`pyro_ngvi.optim.SPRING`.

    Scores of q at the draws give the Fisher matrix, and their regression on the residuals the natural
    gradient, so the model is evaluated and not differentiated, but for its own parameters.
    """
    return {"draws": drawn.draws, "residuals": drawn.losses}


def hessian(drawn: Drawn) -> Parts:
    """The Hessian, or its diagonal."""
    return {drawn.form: drawn.curvature()}


def gauss_newton(drawn: Drawn) -> Parts:
    """Products of the gradients of single data, and the Hessian of the rest."""
    if drawn.form == "diagonal":
        squares = tapped_squares(drawn)
        if squares is not None:
            return {"diagonal": squares + drawn.pair.rest_curvature}
    rest, data = drawn.rest_curvature(), _products(drawn)
    if drawn.form == "low_rank":
        return {"rows": data, "diagonal": rest}
    return {drawn.form: data + rest}


def _products(drawn: Drawn) -> Tensor:
    """The average over draws of sum_i s_i g_i g_i', or its rows, in the form asked for."""
    theta, form = drawn.draws, drawn.form
    _, weights = drawn.data(theta[0])  # the same for all draws, as the minibatch is

    def reduced(t: Tensor) -> Tensor:
        reduce = {"diagonal": squared_sum, "dense": outer_sum, "low_rank": weighted_rows}[form]
        return reduce(lambda t: drawn.data(t)[0], t, weights, budget=BUDGET // at_a_time(theta))

    if form == "low_rank":
        rows = vmap(reduced, chunk_size=at_a_time(theta), randomness="same")(theta)
        return rows.flatten(0, 1) / len(theta) ** 0.5
    return drawn.average(reduced)


def squared_gradient(drawn: Drawn) -> Parts:
    """Squares of the gradient of the minibatch; also the Hessian of the rest alone, and N."""
    rest = drawn.rest_curvature()
    _, weights = drawn.data(drawn.draws[0])
    count = weights.sum()

    def weighted(t: Tensor) -> Tensor:
        log_prob, weight = drawn.data(t)
        return (log_prob * weight).sum()

    squares = drawn.average(lambda t: grad(weighted)(t).square(), columns=1)
    return {"diagonal": squares / count + rest, "prior": rest, "count": count}


ESTIMATORS: dict[str, Callable[[Drawn], Parts]] = {
    "price": price,
    "hessian": hessian,
    "gauss_newton": gauss_newton,
    "squared_gradient": squared_gradient,
    "kronecker": kronecker,
    "scores": scores,
}
"""What ``BatchedELBO(curvature=...)`` may be: functions of :class:`Drawn` to parts by name.

Register one of your own by its name.  Its parts estimate the expected Hessian of -log p(y, z), as
"dense" (d, d), as "diagonal" (d,), or as "rows" (n, d), which stand for their products, beside a
"diagonal"; rules take it where they take "hessian".
"""

#: those of this package, which rules know by name; any other counts as "hessian"
KINDS = tuple(ESTIMATORS)

#: estimators that run the model no second time, so that it may run once for each particle
READ_OFF = ("price", "scores")
