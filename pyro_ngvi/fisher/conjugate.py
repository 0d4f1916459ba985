r"""Natural gradients by conjugate gradients on products with the Fisher matrix.

    (F + c) x = g                                                                           (1)

by a few steps of conjugate gradients from zero.  x is the best solution in the Krylov space of g, so
x'(F + c) x = g'x after any of them, and an early end damps the directions of which g says least, as c
does.

**Units.**  c is ``damping`` times a unit of each parameter of the guide, the root of the mean square of
F v over its entries for random signs v, averaged over the last ten or so steps; 1 / units precondition.
So means, log scales and networks are damped alike.

**Damping** follows Levenberg (1944) and Marquardt (1963): it rises after a step that took q further
than F says (:mod:`pyro_ngvi.optim.divergence`), and falls after the others.  Along parameters that are
all but redundant F is nearly singular, and hardly says how far a step may go.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..families.base import Tensors
from ..linalg.positive import conjugate_gradients

#: bounds of the damping, where it begins, and the factors by which it rises and falls
LOW, HIGH, START, RISE, FALL = 1e-3, 1e3, 1e-2, 3.0, 0.8
#: share of the gradient, in the preconditioned norm, that may be left of it
ENOUGH = 0.1
#: steps in the memory of the units
MEMORY = 10.0

Product = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class ConjugateGradients:
    """x of (F + c) x = g by conjugate gradients; the default of IFVB for guides that are not ours.

    The products are exact for guides whose sites have a KL in closed form
    (:mod:`pyro_ngvi.fisher.products`), else those of fresh scores.

    Not for: flows and networks without exact products, of which 64 scores say too little
    (:class:`Window`).

    Args:
        iterations: most products with F in a step.

    Raises:
        ValueError: for less than one.

    Example:
        >>> import torch
        >>> F = torch.tensor([[1.0, 0.0], [0.0, 9.0]])
        >>> solver = ConjugateGradients(iterations=2)
        >>> state = solver.update(solver.init(torch.zeros(2)), F.matmul, [2])
        >>> state["damping"] = torch.tensor(0.0)
        >>> solver.solve(state, F.matmul, torch.tensor([3.0, 9.0]), [2]).round(decimals=4)
        tensor([3., 1.])
    """

    #: scores that IFVB draws for it at a step where there are no exact products
    scores_a_step: ClassVar[int] = 64
    #: whether a first guess of the diagonal is heeded
    starts_from_guess: ClassVar[bool] = False

    iterations: int = 6

    def __post_init__(self) -> None:
        if not (isinstance(self.iterations, int) and self.iterations >= 1):
            raise ValueError(f"{self} needs a whole number of iterations of at least 1.")

    def init(self, like: Tensor) -> Tensors:
        """The state before the first step, for a packed gradient like ``like`` (D,)."""
        zero = like.new_zeros(())
        return {"damping": zero + START, "square": torch.zeros_like(like), "updates": zero}

    def update(self, state: Tensors, product: Product, sizes: list[int]) -> Tensors:
        """The units of parameters of those ``sizes`` from one more product."""
        signs = torch.randint_like(state["square"], 2) * 2.0 - 1.0
        squares = product(signs).square().split(sizes)
        square = torch.cat([part.mean().expand_as(part) for part in squares])
        updates = state["updates"] + 1.0
        rate = (1.0 / updates).clamp_min(1.0 / MEMORY)
        square = torch.lerp(state["square"], square, rate)
        return state | {"square": square, "updates": updates}

    def adapted(self, state: Tensors, shortened: Tensor) -> Tensors:
        """The damping of the next step, by whether this one had to be ``shortened``, 0-dim."""
        damping = torch.where(shortened, RISE, FALL) * state["damping"]
        return state | {"damping": damping.clamp(LOW, HIGH)}

    def solve(self, state: Tensors, product: Product, g: Tensor, blocks: list[int]) -> Tensor:
        """x (D,) for g (D,), each of the consecutive ``blocks``, of so many entries, by itself."""
        unit = state["square"].sqrt().clamp_min(torch.finfo(g.dtype).tiny ** 0.5)
        ridge = state["damping"] * unit

        def dot(a: Tensor, b: Tensor) -> Tensor:
            return torch.cat([part.sum().expand_as(part) for part in (a * b).split(blocks)])

        def damped(v: Tensor) -> Tensor:
            return product(v) + ridge * v

        return conjugate_gradients(damped, g, lambda r: r / unit, self.iterations, ENOUGH**2, dot)
