r"""AIFVB: IFVB whose iterates are averaged; and the Monte-Carlo uncertainty that is left.

    lambda_bar = sum_k w_k lambda_k,   sum_k w_k = 1,   phi ~ scores at lambda_bar.

The paper has w_k ~ (log k)^2, which weighs the way to the optimum almost like the stay there; the
default is the average over about the last two fifths.  With slowly decaying steps (Polyak & Juditsky
1992), whatever matrix preconditions the steps,

    lambda_bar - lambda*  ~  N(0, C),   C = H^-1 Sigma H^-1 sum_k w_k^2,

with H the Hessian of the expected loss at the optimum lambda* and Sigma the covariance of one step's
gradient.

Both are measured at lambda_bar with the user's own loss, in the stored, unconstrained coordinates:
Sigma from repeated gradients, H from central differences of gradients with common random numbers.
Directions in which the loss is flat to within ``FLAT`` of the largest curvature, in units of the Fisher
matrix (redundant parameters, as in AutoMultivariateNormal), are left out: they do not change q.

C is not for runs that have not converged (it knows nothing of bias) or are short beside the memory of
the steps, 1 / (b_k times curvature), nor for steps that decay like 1/k or faster, nor for many
parameters (2 D gradients each time).

Source: Godichon-Baggioni, Nguyen & Tran (2024, JASA), Algorithm 2, theorem 5.3, remark 5.2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import repeat
from typing import Any, ClassVar

import torch
from pyro import poutine
from torch import Tensor

from ..families.base import Tensors
from ..families.vectors import entry_name, pack, unpack
from ..fisher.scores import family_scores
from ..linalg.host import own_random_state
from ..runtime.density import is_minibatch
from ..runtime.run import Minibatches, run_both
from ..runtime.store import traced_params
from .blocks import Coordinates, GuideBlock, UsingAverage
from .ifvb import IFVB
from .rule import Averaging

#: relative curvature below which a direction counts as flat
FLAT = 1e-4
#: half width of the differences, in Fisher standard deviations
WIDTH = 1e-3


@dataclass(frozen=True)
class AsymptoticCovariance:
    """Covariance C (D, D) of the averaged parameters around the optimum.

    Attributes:
        matrix: C, in the order of ``average``, each parameter flattened.
        average: the averaged parameters by name, unconstrained.
    """

    matrix: Tensor
    average: Tensors

    @property
    def stddev(self) -> Tensors:
        """Standard errors by parameter name, in the shapes of the parameters."""
        return unpack(self.matrix.diagonal().clamp_min(0.0).sqrt(), self.average)


def measure_covariance(
    gradient: Callable[..., Tensor],
    leaves: Tensors,
    scale: Tensor,
    weight: Tensor,
    num_gradients: int,
    num_hessians: int,
    batches: Iterator[tuple[Any, ...]] | None = None,
) -> AsymptoticCovariance:
    """C at the present values of ``leaves``, in units ``scale`` (D,); ``weight`` is sum_k w_k^2.

    Each gradient, and each Hessian, is one of the next of ``batches``, the arguments of ``gradient``.
    """
    average = {name: p.detach().clone() for name, p in leaves.items()}
    batches = repeat(()) if batches is None else batches
    center = pack(average)
    gradients = torch.stack([gradient(*next(batches)) for _ in range(num_gradients)]) * scale
    noise = torch.cov(gradients.mT).reshape(len(center), len(center))
    hessian = torch.zeros_like(noise)
    for _ in range(num_hessians):
        seed, rows, batch = int(torch.randint(2**31, ())), [], next(batches)
        for i in range(len(center)):
            ends = []
            for sign in (1.0, -1.0):
                moved = center.clone()
                moved[i] += sign * WIDTH * scale[i]
                # common random numbers
                with UsingAverage([(leaves, unpack(moved, average))]), own_random_state(seed):
                    ends.append(gradient(*batch) * scale)
            rows.append((ends[0] - ends[1]) / (2.0 * WIDTH))
        hessian += torch.stack(rows) / num_hessians
    values, vectors = torch.linalg.eigh(0.5 * (hessian + hessian.mT))
    if bool(values[0] < -0.05 * values[-1]):
        worst = int(vectors[:, 0].abs().argmax())
        raise ValueError(
            f"The loss curves downwards at the average (least eigenvalue {float(values[0]):.2g}, "
            f"largest {float(values[-1]):.2g}, foremost parameter {entry_name(worst, average)!r}): "
            "the run has not converged. Take more steps, or raise num_hessians."
        )
    inverse = torch.where(values > FLAT * values[-1], 1.0 / values, 0.0)
    solved = (vectors * inverse) @ vectors.mT
    matrix = weight * (solved @ noise @ solved) * scale[:, None] * scale
    return AsymptoticCovariance(matrix, average)


@contextmanager
def _without_offset(blocks: Iterable[Any]) -> Iterator[None]:
    """Let guides that hold an average draw from it while gradients are recorded, too."""
    kept = []
    for block in blocks:
        answer = {name: p.detach().clone() for name, p in block.natural_params().items()}
        kept.append((block, block.iterate_offset() or None, answer))
        block.set_iterate_offset(None)
    try:
        yield
    finally:
        for block, offset, answer in kept:
            block.set_iterate_offset(offset, answer)


class AIFVB(IFVB):
    """IFVB with weighted averages of the iterates, and scores drawn at the average (Algorithm 2).

    Conjugate gradients, the default for guides that are not ours, take products at the iterate.

    ``averaging``: ``True`` (default, :class:`Tail`), or a number w for the weights (log(k + 1))^w; the
    paper's is 2.  Guides that are ours hold the average.  Other guides hold the iterate: read them
    inside ``with optim.use_average():``, or call ``optim.use_average()`` when the run is over.
    Other arguments, and what is refused: :class:`IFVB`; ``averaging=False`` is a ValueError.  Not where
    gradients are exact: averaging only delays there.

    Example:
        >>> import pyro, torch, pyro.distributions as dist, pyro_ngvi as ngvi
        >>> from pyro.infer import SVI, Trace_ELBO
        >>> from pyro.infer.autoguide import AutoNormal
        >>> model = lambda: pyro.sample("x", dist.Normal(3.0, 2.0))
        >>> guide = AutoNormal(model)
        >>> optim = ngvi.AIFVB(guide)
        >>> svi = SVI(model, guide, optim, Trace_ELBO(4, vectorize_particles=True))
        >>> for _ in range(150):
        ...     loss = svi.step()
        >>> with optim.use_average():
        ...     bool((guide.median()["x"] - 3.0).abs() < 0.5)
        True
        >>> optim.asymptotic_covariance(svi, num_gradients=64).matrix.shape  # location and scale
        torch.Size([2, 2])
    """

    scores_at_average: ClassVar[bool] = True

    def __init__(
        self, guide: Any, *args: Any, averaging: Averaging | float | bool = True, **kwargs: Any
    ) -> None:
        if averaging is False:
            raise ValueError("AIFVB averages; without averaging use IFVB.")
        super().__init__(guide, *args, averaging=averaging, **kwargs)

    def asymptotic_covariance(
        self,
        svi: Any,
        *args: Any,
        batches: Iterable[Any] | None = None,
        num_gradients: int = 256,
        num_hessians: int = 16,
        **kwargs: Any,
    ) -> AsymptoticCovariance:
        """C = H^-1 Sigma H^-1 sum_k w_k^2, of the average around the optimum (theorem 5.3, remark 5.2).

        Args:
            svi: the ``SVI`` object of the run; its loss and number of particles are used.
            args, kwargs: those of ``svi.step``.
            batches: in place of ``args`` for a run on minibatches, what it went over: a ``DataLoader``,
                or another iterable that can be gone through again, of tuples of arguments or of single
                ones.  Their noise counts as that of independent minibatches.  Where an epoch has each
                datum once, much of it cancels, and the errors are upper bounds; all data as ``args``
                give the noise of draws, a lower one.
            num_gradients: gradients that the covariance of the noise is estimated from.
            num_hessians: repetitions of the Hessian by differences, 2 D gradients each.

        Returns:
            An object with C as ``matrix`` (D, D), the ``average``, and the roots of C's diagonal,
            ``stddev``; these two are dicts by parameter name, unconstrained.

        Raises:
            RuntimeError: before the first step.
            ValueError: if the loss is not at a minimum, or a plate is subsampled without ``batches``.
        """
        blocks = {path: block for path, block in self._blocks() if path in self._states}
        if not blocks:
            raise RuntimeError("There is no average before the first step.")
        leaves = {
            name if len(blocks) == 1 else f"{path}.{name}": p
            for path, block in blocks.items()
            for name, p in block.natural_params().items()
        }
        weight = next(iter(self._states.values()))["average_square"]
        if batches is None:
            _refuse_one_minibatch(svi, args, kwargs)
        elif args:
            raise ValueError(
                "asymptotic_covariance takes the arguments of a step or batches=, not both. Pass by "
                "keyword what is no part of a minibatch."
            )
        given = repeat(args) if batches is None else _without_end(batches)
        with self.use_average(), _without_offset(blocks.values()):
            scores = torch.cat([_stored_scores(block, 64) for block in blocks.values()], 1)
            square = scores.square().mean(0)
            scale = torch.where(square > 0, square, torch.inf).rsqrt()
            gradient, counts = _packed_gradient(svi, leaves, kwargs), (num_gradients, num_hessians)
            return measure_covariance(gradient, leaves, scale, weight, *counts, given)


def _stored_scores(block: Any, n: int) -> Tensor:
    if isinstance(block, GuideBlock):
        return block.stored_scores(n)
    params = {name: p.detach() for name, p in block.natural_params().items()}
    return family_scores(block.family, params, n, Coordinates(block.family.names))


def _refuse_one_minibatch(svi: Any, args: Any, kwargs: Any) -> None:
    """Refuse arguments that are one minibatch, of which alone the noise would be that of the draws."""
    with torch.no_grad(), own_random_state(), poutine.block():
        _, of_model = run_both(svi.model, svi.guide, args, kwargs, Minibatches())
    for name, site in of_model.sites.items():
        if is_minibatch(site):
            raise ValueError(
                f"The plate {name!r} takes {len(site['value'])} of {site['fn'].size} examples, and the "
                f"noise of minibatches counts. Pass batches=, what the run went over, not one of them; "
                f"[(X, y)] where the model draws indices itself."
            )


def _without_end(batches: Iterable[Any]) -> Iterator[tuple[Any, ...]]:
    """Minibatches, epoch after epoch, each as a tuple of arguments."""
    taken = True
    while taken:
        taken = False
        for batch in batches:
            taken = True
            yield tuple(batch) if isinstance(batch, tuple | list) else (batch,)
    raise ValueError(
        "batches= is empty, or was gone through and cannot be again. Pass a DataLoader or a list of "
        "tuples of arguments."
    )


def _packed_gradient(svi: Any, leaves: Tensors, kwargs: Any) -> Callable[..., Tensor]:
    """One gradient of the loss of ``svi`` in ``leaves``, (D,), without a step."""

    def gradient(*args: Any) -> Tensor:
        with poutine.trace(param_only=True) as seen:
            svi.loss_and_grads(svi.model, svi.guide, *args, **kwargs)
        found = [torch.zeros_like(p) if p.grad is None else p.grad for p in leaves.values()]
        result = torch.cat([g.detach().reshape(-1) for g in found])
        for p in (*traced_params(seen), *leaves.values()):
            p.grad = None
        return result

    return gradient
