r"""Whether taps behind the layers of a model give the gradients of its single data: checked once.

With t_i = log p(y_i | z), i an entry of the log_prob of the one observed site that lies in a plate, and
G(v) the output gradients of a layer for sum_i v_i t_i at a generic v,

1. G(v)_i = v_i G(1)_i, which fails where data mix (attention over the batch, rows in another order);
2. the layers' gradients of sum_i v_i t_i in a latent value add up to autograd's, which fails where a
   use is not seen (W**2);
3. the other terms of the log joint have no gradient in any of these outputs.

Differences are relative to the datum's own largest gradient in 1, and to the entry's own sum of
absolute terms in 2.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import pyro
import torch
from pyro import poutine
from torch import Tensor

from ...linalg.host import own_random_state
from ...runtime.density import Sites, site_log_prob, with_density
from ...runtime.run import Minibatches, run_plainly
from ..derivatives import is_datum
from .taps import LayerTaps, Run, part

if TYPE_CHECKING:
    from ..estimators import Drawn

UNCOVERED = (
    "Its gradients of single data do not follow from the layers that are seen: it is constrained or "
    "acts in other ways, data mix, or they are not one observed site in a plate, with one scale."
)


def search(drawn: Drawn) -> None:
    """After the first step of "gauss_newton": taps for later ones, and why a site has none."""
    names = list(drawn.layout.unconstrained_shapes)
    if not drawn.rest_is_diagonal():
        drawn.reasons = dict.fromkeys(names, "The Hessian of the log prior is not diagonal.")
        drawn.searched = True
        return
    taps = taps_behind(drawn, LayerTaps, names)
    drawn.reasons = {name: UNCOVERED for name in names if name not in taps.sites}
    drawn.searched = not taps.undecided  # or the next step tries again
    drawn.taps = taps if taps.sites and drawn.searched else None


def taps_behind(drawn: Drawn, make: Any, names: Iterable[str]) -> Any:
    """Checked taps behind the layers of those sites whose values are entries of theta themselves."""
    parts = drawn.layout.unconstrained(drawn.draws)
    free = [name for name, transform, x in parts if transform(x) is x and name in names]
    values = drawn.layout.unpack(drawn.draws)
    shared = {name: value[0] for name, value in values.items() if name not in free}
    taps = make(drawn.model, {name: values[name] for name in free})
    check_taps(taps, values, shared, drawn.args, drawn.kwargs, drawn.minibatches)
    return taps


def check_taps(
    taps: LayerTaps, values: Any, shared: Any, args: Any, kwargs: Any, minibatches: Minibatches
) -> None:
    """Run the model of ``taps`` once, at the first of ``values``, and fill in what it covers."""
    at = {name: values[name][0].detach() for name in taps.twins}
    at = {name: x.requires_grad_(x.is_floating_point()) for name, x in at.items()}
    run = Run(taps, check=True)
    with torch.enable_grad(), own_random_state(), poutine.block(), pyro.validation_enabled(False):
        sites = run.of(run_plainly, taps.model, at | shared, args, kwargs, minibatches)
        check = _Check(taps, run, sites, at)
        taps.sites = tuple(filter(check.is_covered, at if check.examples is not None else ()))
    taps.twins = {name: taps.twins[name] for name in taps.sites}
    taps.expected = [use for use in run.uses if use.site in taps.sites], list(run.observed)
    for name in taps.sites:
        places = [use.place for use in run.uses if use.site == name]
        times = torch.zeros(taps.twins[name].numel(), device="cpu")
        for where in places:
            part(times, where).add_(1.0)
        if bool((times > 1.0).any()):
            taps.tied[name] = len(places)
    taps.clear()


class _Check:
    """The gradients of a run, and the three checks on them."""

    def __init__(self, taps: LayerTaps, run: Run, sites: Sites, at: Mapping[str, Tensor]) -> None:
        self.taps, self.run, self.at = taps, run, at
        self.examples: torch.Size | None = None  # the shape of the data, if there is one
        observed = [name for name, site in sites.items() if is_datum(site)]
        if len(observed) != 1:
            return
        taps.observed, taps.runs, run.as_checked = observed[0], [run], True
        if not taps.factor(1):
            return
        terms = {name: site_log_prob(site)[1] for name, site in with_density(sites).items()}
        term = terms.pop(taps.observed)
        shape = term.shape
        while len(shape) > 1 and shape[-1] == 1:
            shape = shape[:-1]
        self.examples, taps.data_dims = shape, len(shape)
        # the golden ratio's multiples, modulo 1, are all different and evenly spread
        v = 1 + (0.618033988749895 * torch.arange(shape.numel(), device=term.device)) % 1
        self.v = v.to(term.dtype).view(shape)
        self.plain, _ = self._gradients(term.sum())
        self.weighted, self.in_sites = self._gradients(self._weigh(term).sum())
        self.others, _ = self._gradients(sum(x.sum() for x in terms.values()))

    def _weigh(self, x: Tensor) -> Tensor:
        return x * self.v.view(*self.v.shape, *(1,) * (x.dim() - self.v.dim()))

    def _gradients(self, total: Any) -> tuple[list[Any], dict[str, Any]]:
        """Of ``total`` in the output of each use and in each latent; None where it has none."""
        points = [out for _, out in self.run.seen]
        leaves = {name: x for name, x in self.at.items() if x.requires_grad}
        if not isinstance(total, Tensor) or not total.requires_grad:
            return [None] * len(points), {}
        how: Any = {"retain_graph": True, "allow_unused": True}
        found = torch.autograd.grad(total, [*points, *leaves.values()], **how)
        return list(found[: len(points)]), dict(zip(leaves, found[len(points) :], strict=True))

    def is_covered(self, name: str) -> bool:
        value, dims, used = self.at[name], self.v.dim(), False
        uses = [k for k, use in enumerate(self.run.uses) if use.site == name]
        total, size = value.new_zeros(value.numel()), value.new_zeros(value.numel())
        for k in uses:
            use, (x, out), g = self.run.uses[k], self.run.seen[k], self.weighted[k]
            if use.out_dim - use.layer.tail < dims:
                return False
            if g is None:
                continue
            if out.shape[:dims] != self.examples:
                return False
            used, expected, other = True, self._weigh(self.plain[k]), self.others[k]
            largest = expected.abs().unsqueeze(-1).flatten(dims).amax(-1)
            largest = largest.view(*largest.shape, *(1,) * (g.dim() - dims))
            none = 0.0 * largest
            if not _close(g, expected, 1e4 * largest):
                return False
            if other is not None and not _close(other, none, none):
                return False
            x, g = self.taps.rows(use, None if x is None else x.detach()[None], g[None])
            part(total, use.place).add_(use.layer.sum(x, g, self.taps.budget))
            x = x.abs() if x is not None and x.is_floating_point() else x
            part(size, use.place).add_(use.layer.sum(x, g.abs(), self.taps.budget))
        gradient = self.in_sites.get(name)
        gradient = torch.zeros_like(total) if gradient is None else gradient.flatten()
        if used and not value.is_meta and not (size.any() or gradient.any()):
            self.taps.undecided = True
        return bool(uses) and _close(total, gradient, 1e3 * size)


def _close(x: Tensor, y: Tensor, size: Tensor) -> bool:
    """Whether x is y up to roundings of ``size``; no where anything is not finite."""
    return x.is_meta or bool(((x - y).abs() <= torch.finfo(y.dtype).eps * size).all())
