r"""Products with the Fisher matrix of a guide, and how far it has moved: no matrix, no scores.

With q_0 the guide at its present parameters and p the distributions of its sites,

    D(lambda) = KL(q_0 || q_lambda) = sum_sites E_0[ KL(p_0(. | parents) || p_lambda(. | parents)) ].

D has its minimum at q_0, and its Hessian there is the Fisher matrix F = sum_sites E_0[J' F_site J],
J the derivative of a site's parameters in lambda.  So a product F v is the derivative of grad D along v
(Pearlmutter 1994), as dear as a few evaluations of D, and exact: where the parameters of no site depend
on draws of others at once, else for the mean over :data:`RUNS` runs of the guide.

For distributions without a smooth KL in closed form (mixtures, flows, Laplace's) there are products
with the mean Phi'Phi / K of K scores, and D is estimated from draws z ~ q_0 by the mean of
r - 1 - log r with r = q_lambda(z) / q_0(z), whose terms are all positive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import copy
from functools import partial
from typing import Any

import pyro
import torch
import torch.distributions as td
from pyro import poutine
from pyro.distributions import MaskedDistribution
from pyro.distributions.util import detach, scale_and_mask, sum_rightmost
from torch import Tensor

from ..distributions.steady import GAUSSIAN, is_fixed
from ..runtime.density import Sites, innermost, is_latent, layers_of, minibatch_scale
from ..runtime.run import Minibatches
from .conjugate import Product
from .inverse import finite_rows
from .moved_draws import FreeDraws, depends, reached
from .scores import GuideScores, drawing

#: runs of a guide over which D is averaged where its sites depend on each other's draws
RUNS = 8
#: draws from which D is estimated
DRAWS = 64
#: distributions whose KL in closed form is differentiable twice where both are equal
SMOOTH = (
    *GAUSSIAN,
    td.Gamma,
    td.Beta,
    td.Dirichlet,
    td.Exponential,
    td.Poisson,
    td.Bernoulli,
    td.Categorical,
    td.OneHotCategorical,
    td.Geometric,
)


def from_scores(scores: Tensor) -> Product:
    """Products with the mean of the outer products of ``scores`` (K, D)."""
    rows, count = finite_rows(scores)
    return lambda v: rows.mT @ (rows @ v) / count.clamp_min(1.0)


def from_divergence(divergence: Tensor, leaves: list[Tensor]) -> Product:
    """Products with the Hessian of ``divergence`` in ``leaves``, flattened and joined."""
    sizes = [p.numel() for p in leaves]
    how: Any = {"materialize_grads": True}
    gradient = torch.autograd.grad(divergence, leaves, create_graph=True, **how)

    def product(v: Tensor) -> Tensor:
        parts = [part.view_as(p) for part, p in zip(v.split(sizes), leaves, strict=True)]
        found = torch.autograd.grad(gradient, leaves, parts, retain_graph=True, **how)
        return torch.cat([f.reshape(-1) for f in found])

    return product


def itself(fn: Any) -> Tensor | None:
    """KL of ``fn`` from its own values held fixed, zero with a graph; ``None``: no closed form."""
    return between(detach(fn), fn) if _is_smooth(fn) else None


def between(p: Any, q: Any) -> Any:
    """KL(p || q) (batch shape) of distributions of the same kind."""
    *outer, base = layers_of(q)
    inner = layers_of(p)[-1]
    if isinstance(base, td.TransformedDistribution):
        divergence = between(inner.base_dist, base.base_dist)
        more = len(base.event_shape) - len(base.base_dist.event_shape)
        divergence = sum_rightmost(divergence, max(more, 0))
    else:
        divergence = td.kl_divergence(inner, base)
    for layer in reversed(outer):
        if isinstance(layer, MaskedDistribution):
            divergence = scale_and_mask(divergence, mask=layer._mask)
        else:
            divergence = sum_rightmost(divergence, layer.reinterpreted_batch_ndims)
    return divergence


def _is_smooth(fn: Any) -> bool:
    base = innermost(fn)
    if isinstance(base, td.TransformedDistribution):
        return all(map(is_fixed, base.transforms)) and _is_smooth(base.base_dist)
    return isinstance(base, SMOOTH)


def of_sites(sites: Sites, then: dict[str, Any] | None = None) -> Tensor | None:
    """D of one run of a guide; ``then``: its distributions at q_0, by default its own, held fixed."""
    total: Any = None
    for name, site in drawing(sites).items():
        divergence = itself(site["fn"]) if then is None else between(then[name], site["fn"])
        if divergence is None:
            return None
        divergence = scale_and_mask(divergence, minibatch_scale(site), site["mask"]).sum()
        total = divergence if total is None else total + divergence
    return total


def from_ratios(now: Tensor, then: Tensor) -> Tensor:
    """D estimated from log q (n,) ``now`` and ``then`` at draws of then; infinite where it is NaN."""
    log_ratio = now - then
    return (torch.special.expm1(log_ratio) - log_ratio).mean().nan_to_num(nan=torch.inf)


class SelfDivergence:
    """D of a guide, which its ``scores`` know how to run."""

    def __init__(self, scores: GuideScores) -> None:
        self.scores = scores
        self._runs: int | None = None

    def product(self, names: list[str]) -> Product | None:
        """Products with F of the parameters of those names; ``None``: D is not known in closed form."""
        if self.scores.moves_draws:  # D is not that of the noise
            return None
        with torch.enable_grad(), poutine.block(), pyro.validation_enabled(False):
            if self._runs is None:
                self._runs = RUNS if self._depends_on_draws() else 1
            divergence, leaves = self.scores.capture(self._now)
            if divergence is None:
                return None
            return from_divergence(divergence, [leaves[name] for name in names])

    def _now(self) -> Tensor | None:
        if self.scores.is_joint:
            return itself(self.scores.posterior())
        found = [of_sites(self.scores.run()) for _ in range(self._runs or 1)]
        return None if found[0] is None else sum(found) / len(found)  # pyright: ignore

    def _depends_on_draws(self) -> bool:
        if self.scores.is_joint:
            return False
        with FreeDraws() as free:
            divergence = of_sites(self.scores.run(fixed=False))
        return divergence is not None and depends([divergence], free.draws.values())

    def reference(self) -> Callable[[], Tensor]:
        """The guide as it is now; calls give D, 0-dim, of the guide as it is then."""
        scores = self.scores
        with torch.no_grad(), poutine.block(), pyro.validation_enabled(False):
            if scores.is_joint:
                now = scores.posterior()
                if _is_smooth(now):
                    then = _copied(now)
                    return lambda: between(then, scores.posterior())
            elif self._runs == 1 and not scores.moves_draws:
                minibatches = Minibatches()
                sites = drawing(scores.run(minibatches=minibatches))
                if all(_is_smooth(site["fn"]) for site in sites.values()):
                    fns = {name: _copied(site["fn"]) for name, site in sites.items()}
                    # D does not depend on the draws, and later runs take no random numbers
                    values = {name: site["value"] for name, site in sites.items()}
                    run = partial(scores.run, values, minibatches)
                    return lambda: torch.as_tensor(of_sites(run(), fns))
            log_q = scores.held(DRAWS)
            before = log_q()
        return lambda: from_ratios(log_q(), before)

    def locations(self, names: list[str]) -> list[str]:
        """Those parameters that only place Gaussian sites: F has no entries between them and others.

        Not those that place a site together with a parameter that does more.
        """
        with torch.enable_grad(), poutine.block(), pyro.validation_enabled(False):
            fns, leaves = self.scores.capture(self._distributions)
        places, others = list[Tensor](), list[Tensor]()
        for fn in fns:
            for name, value in vars(fn).items():
                if isinstance(value, Tensor) and value.requires_grad:
                    place = isinstance(fn, GAUSSIAN) and name == "loc"
                    (places if place else others).append(value)
        wanted = [leaves[name] for name in names]
        more = {name for name, found in zip(names, reached(others, wanted), strict=True) if found}
        together = [
            {name for name, found in zip(names, reached([place], wanted), strict=True) if found}
            for place in places
        ]
        while mixed := [group for group in together if group & more and not group <= more]:
            more.update(*mixed)
        placing = set[str]().union(*together)
        return [name for name in names if name in placing - more]

    def gaussians(self, names: list[str]) -> Iterator[tuple[str, str, bool]]:
        """Two parameters that make a ``MultivariateNormal`` of their shapes: what places it, and the
        matrix behind its scales; and whether that is the precision's.
        """
        with torch.enable_grad(), poutine.block(), pyro.validation_enabled(False):
            fns, leaves = self.scores.capture(self._distributions)
        wanted = [leaves[name] for name in names]
        for fn in fns:
            if not isinstance(fn, td.MultivariateNormal):
                continue
            loc, factor = fn.loc, fn.scale_tril
            if not (loc.requires_grad and factor.requires_grad):
                continue
            both = [reached([v], wanted) for v in (loc, factor)]
            place, scale = ([n for n, on in zip(names, r, strict=True) if on] for r in both)
            if [leaves[n].shape for n in place + scale] == [loc.shape, factor.shape]:
                yield place[0], scale[0], "precision_matrix" in vars(fn)

    def _distributions(self) -> list[Any]:
        if self.scores.is_joint:
            return [innermost(self.scores.posterior())]
        return [innermost(site["fn"]) for site in self.scores.run().values() if is_latent(site)]


def _copied(fn: Any) -> Any:
    """``fn`` with tensors of its own: the parameters may be written to in place."""
    new = copy(fn)
    for name, value in vars(fn).items():
        if isinstance(value, Tensor):
            vars(new)[name] = value.detach().clone()
        elif isinstance(value, td.Distribution):
            vars(new)[name] = _copied(value)
    return new
