"""What ``BatchedELBO(curvature=...)`` adds to a step, by the cheapest route that is exact.

The general route (:mod:`pyro_ngvi.curvature.kinds`) runs the model again.  For the diagonal products of
single data, "gauss_newton", in a network there is another: the weights of its layers get theirs in the
loss's own backward pass (:mod:`pyro_ngvi.curvature.taps.taps`), and a prior whose Hessian H is diagonal
has it from H 1, a second backward pass through the prior alone. Latent sites that no layer covers, such
as a noise scale, take the general route on their own entries.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..linalg.autocast import outside_autocast
from ..linalg.random import own_random_state
from ..probing.kinks import kinked_sites
from ..runtime.checks import sum_log_prob
from ..runtime.layout import LatentLayout
from ..runtime.vmap import Minibatches, Sites, run_particles
from .kinds import Run, data_terms, expected_curvature, is_data, rest_is_diagonal, squares_of
from .taps.taps import LayerTaps

__all__ = ["CurvatureEstimator"]


class CurvatureEstimator:
    """The curvature of one pair of model and guide, step after step.

    ``reasons`` says, by latent site, why the fast route does not cover it.
    """

    def __init__(self, kind: str, form: str | None, layout: LatentLayout) -> None:
        assert form is not None
        self.kind, self.form, self.layout = kind, form, layout
        self.reasons: dict[str, str] = {}
        self._diagonal_rest: bool | None = None  # not asked yet
        self._searched = self._looked_for_kinks = False
        self._taps: LayerTaps | None = None
        self._draws = self._log_det = self._rest = self._prior = torch.empty(0)

    def start(self, draws: Tensor, log_det: Tensor) -> None:
        """At each step: theta (S, d) as drawn, with its graph, and the log-Jacobians (S,)."""
        self._draws, self._log_det = draws, log_det
        if self._taps is not None:
            self._taps.clear()

    def program(self, model: Callable[..., Any]) -> Callable[..., Any]:
        """What to run in place of the model."""
        return model if self._taps is None else self._taps

    def terms(self, sites: Sites) -> Any:
        """The log probability of one particle; with taps, of the data that they see and of the rest."""
        if self._taps is None:
            return sum_log_prob(sites)
        seen = self._taps.observed
        rest = {name: site for name, site in sites.items() if name != seen}
        return sum_log_prob({seen: sites[seen]}), sum_log_prob(rest)

    def log_joint(self, terms: Any) -> Tensor:
        """The log joint (S,) from the ``terms`` of all particles."""
        if self._taps is None:
            return terms
        data, rest = terms
        self._rest = -(rest + self._log_det)
        return data + rest

    def losses(self, each: Tensor) -> None:
        """log q - log p (S,) of each particle."""

    @outside_autocast
    def before_backward(self) -> None:
        """The curvature of the rest, while its graph is there: H 1, for a diagonal H."""
        if self._taps is None:
            return
        self._prior = torch.zeros_like(self._draws[0])
        how: Any = {"allow_unused": True, "materialize_grads": True, "retain_graph": True}
        if self._rest.requires_grad:
            (g,) = torch.autograd.grad(self._rest.sum(), self._draws, create_graph=True, **how)
            if g.requires_grad:
                (product,) = torch.autograd.grad(g.sum(), self._draws, **how)
                self._prior = product.mean(0).detach()

    @outside_autocast
    def after_backward(
        self, model: Callable[..., Any], minibatches: Minibatches, args: Any, kwargs: Any
    ) -> dict[str, Tensor]:
        """The parts of the curvature at the draws of this step."""

        run = self._runner(model, minibatches, args, kwargs)
        theta, squares = self._draws.detach(), {}
        self._warn_of_kinks(run, theta[0])
        if self._taps is not None:
            squares = self._taps.squared_gradients(len(theta))
        if squares:
            parts = {"diagonal": self._assembled(run, theta, squares) + self._prior}
        else:
            if self._diagonal_rest is None:
                asked = self.kind in ("gauss_newton", "squared_gradient") and self.form != "dense"
                self._diagonal_rest = asked and rest_is_diagonal(run, theta[0])
            parts = expected_curvature(run, theta, self.kind, self.form, self._diagonal_rest)
        if not self._searched and self.kind == "gauss_newton" and self.form == "diagonal":
            _, weights = data_terms(run)(theta[0])
            if int((weights != 0).sum()) > 1:  # one that counts could not show whether data mix
                self._search(model, theta, args, kwargs, minibatches)
        self._forget()
        return parts

    def _warn_of_kinks(self, run: Run, t: Tensor) -> None:
        """At the first step: where second derivatives are taken of what has none."""
        if self._looked_for_kinks or self.kind in ("price", "scores") or t.is_meta:
            return
        self._looked_for_kinks = True

        def repeatable(t: Tensor, reduce: Any) -> Any:
            with own_random_state(seed=0):
                return run(t, reduce)

        whole = self.kind == "hessian"
        names = kinked_sites(repeatable, t, self.layout, lambda site: whole or not is_data(site))
        if names:
            warnings.warn(
                f"BatchedELBO(curvature={self.kind!r}): the gradient of the log probability of "
                f"{', '.join(map(repr, names))} jumps, as that of Laplace and |x| does, which "
                "second derivatives miss: sds come out wrong. Take NGVB without curvature, IVON, "
                "or curvature='price'.",
                RuntimeWarning,
                stacklevel=2,
            )

    def _forget(self) -> None:
        self._draws = self._log_det = self._rest = torch.empty(0)  # their graph is no longer needed

    def _runner(self, model: Any, minibatches: Minibatches, args: Any, kwargs: Any) -> Run:
        def run(theta: Tensor, reduce: Any) -> Any:
            values, log_det = self.layout.unpack_with_log_det(theta[None])
            how: Any = {"minibatches": minibatches}
            return run_particles(model, reduce, values, 1, args, kwargs, **how), log_det[0]

        return run

    def _assembled(self, run: Run, theta: Tensor, squares: dict[str, Tensor]) -> Tensor:
        pieces, uncovered, start = [], [], 0
        for name, shape in self.layout.unconstrained_shapes.items():
            end = start + shape.numel()
            if name in squares:
                pieces.append(squares[name].reshape(-1))
            else:
                entries = torch.arange(start, end, device=theta.device)
                pieces.append(theta.new_zeros(end - start))
                uncovered.append(entries)
            start = end
        diagonal = torch.cat(pieces)
        if not uncovered:
            return diagonal
        entries = torch.cat(uncovered)
        return diagonal.index_copy(0, entries, squares_of(run, theta, entries))

    def _search(
        self, model: Any, theta: Tensor, args: Any, kwargs: Any, minibatches: Minibatches
    ) -> None:
        """After the first step: look for layers, and check that they give the right squares."""
        self._searched = True
        values = self.layout.unpack(theta)
        if not self._diagonal_rest:
            self.reasons = dict.fromkeys(values, "The Hessian of the log prior is not diagonal.")
            return
        free = {name: values[name] for name in self._free(theta)}
        shared = {name: value[0] for name, value in values.items() if name not in free}
        how: Any = {"minibatches": minibatches, "shared": shared}
        with torch.enable_grad():
            taps = LayerTaps.discover(model, free, args, kwargs, **how)
        self.reasons = dict.fromkeys(shared, "Its support is constrained.") | taps.reasons
        self._searched = not taps.undecided  # or the next step tries again
        if taps.sites and not taps.undecided:
            self._taps = taps

    def _free(self, theta: Tensor) -> list[str]:
        """The sites whose values are the entries of theta themselves."""
        parts = self.layout.unconstrained(theta)
        return [name for name, transform, x in parts if transform(x) is x]
