r"""Whether taps behind the layers of a model give the gradients of its single data: checked once.

With t_i = log p(y_i | z), i an entry of the log_prob of the one observed site that lies in a plate, and
G(v) the output gradients of a layer for sum_i v_i t_i at a generic v,

1. G(v)_i = v_i G(1)_i, which fails where data mix (attention over the batch, rows in another order);
2. the layers' gradients of sum_i v_i t_i in a latent value add up to autograd's, which fails where a
   use is not seen (W**2);
3. the other terms of the log joint have no gradient in any of these outputs.

1 and 2 at a generic point hold, for models that are not made to deceive, at every point.  Differences
are relative to the datum's own largest gradient in 1, where a mean over N data moves each by 1 / N, and
to the entry's own sum of absolute terms in 2.  Where nothing has a gradient, nothing was checked.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import pyro
import torch
from pyro import poutine
from torch import Tensor

from ...linalg.host import own_random_state
from ...runtime.density import site_log_prob, with_density
from ...runtime.vmap import Minibatches, Sites, run_plainly
from ..per_datum import is_datum
from .taps import LayerTaps, Run

if TYPE_CHECKING:
    from ..estimators import Drawn

UNCOVERED = (
    "The layers that are seen do not explain its gradients of single data: its support is "
    "constrained, it acts in other ways too, data mix after a layer, or the data are not one observed "
    "site in a plate, with one scale."
)

Taps = TypeVar("Taps", bound=LayerTaps)


def search(drawn: Drawn) -> None:
    """After the first step of "gauss_newton": taps for later ones, and why a site has none."""
    names = list(drawn.layout.unconstrained_shapes)
    drawn.searched = True
    if not drawn.rest_is_diagonal():
        drawn.reasons = dict.fromkeys(names, "The Hessian of the log prior is not diagonal.")
        return
    taps = taps_behind(drawn, LayerTaps, names)
    drawn.reasons = {name: UNCOVERED for name in names if name not in taps.sites}
    drawn.searched = not taps.undecided  # or the next step tries again
    if taps.sites and not taps.undecided:
        drawn.taps = taps


def taps_behind(drawn: Drawn, make: type[Taps], names: Iterable[str]) -> Taps:
    """Checked taps behind the layers of those sites whose values are entries of theta themselves."""
    parts = drawn.layout.unconstrained(drawn.draws)
    free = [name for name, transform, x in parts if transform(x) is x and name in names]
    values = drawn.layout.unpack(drawn.draws)
    shared = {name: value[0] for name, value in values.items() if name not in free}
    taps = make(drawn.model, {name: values[name] for name in free})
    check_taps(taps, values, shared, drawn.args, drawn.kwargs, drawn.minibatches)
    return taps


def check_taps(
    taps: LayerTaps,
    values: Mapping[str, Tensor],
    shared: Mapping[str, Tensor] | None = None,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    minibatches: Minibatches | None = None,
) -> None:
    """Run the model of ``taps`` once, at the first of ``values`` (S, ...), and fill in what it covers.

    It waits for the device, and leaves the random state alone.  On the meta device, without numbers,
    only shapes are checked.
    """
    leaves = {name: values[name][0].detach() for name in taps.twins}
    leaves = {k: x.requires_grad_(x.is_floating_point()) for k, x in leaves.items()}
    run = Run(taps, check=True)
    batches = Minibatches() if minibatches is None else minibatches
    with torch.enable_grad(), own_random_state(), poutine.block(), pyro.validation_enabled(False):
        with run.watching():
            sites = run_plainly(
                taps.model, {**leaves, **(shared or {})}, args, kwargs or {}, batches
            )
        taps.sites = _covered(taps, run, sites, leaves)
    taps.twins = {name: taps.twins[name] for name in taps.sites}
    taps.uses = [use for use in run.uses if use.site in taps.sites]
    taps.observed_sites = tuple(run.scales)
    taps.clear()
    taps.groups = [set() for _ in taps.uses]
    for name in taps.sites:
        own = {k for k, use in enumerate(taps.uses) if use.site == name}
        times = torch.zeros(taps.twins[name].numel(), device="cpu")
        for k in own:
            taps.uses[k].view.of(times).add_(1.0)
        for k in own:  # all together where some share an entry of the value
            taps.groups[k] = own if bool((times > 1.0).any()) else {k}


def _covered(
    taps: LayerTaps, run: Run, sites: Sites, leaves: Mapping[str, Tensor]
) -> tuple[str, ...]:
    """The latents whose layers pass the three checks."""
    observed = [name for name, site in sites.items() if is_datum(site)]
    if len(observed) != 1:
        return ()
    taps.observed, taps.last, run.as_checked = observed[0], run, True
    if taps.factor(1) is None:  # no scale that all data share
        return ()
    terms = {name: site_log_prob(site)[1] for name, site in with_density(sites).items()}
    term = terms.pop(observed[0])
    shape = term.shape
    while len(shape) > 1 and shape[-1] == 1:
        shape = shape[:-1]
    dims = taps.data_dims = len(shape)
    numbers = torch.arange(shape.numel(), device=term.device)
    # the golden ratio's multiples, modulo 1, are all different and evenly spread
    v = (1 + (0.618033988749895 * numbers) % 1).to(term.dtype).view(shape)

    def weigh(x: Tensor) -> Tensor:
        return x * v.view(*shape, *(1,) * (x.dim() - dims))

    points = {f"site {name}": x for name, x in leaves.items() if x.requires_grad}
    points |= {f"use {k}": out for k, (_, out) in enumerate(run.seen)}

    def gradients(total: Any) -> dict[str, Tensor | None]:
        if not isinstance(total, Tensor) or not total.requires_grad:
            return dict.fromkeys(points)
        found = torch.autograd.grad(
            total, list(points.values()), retain_graph=True, allow_unused=True
        )
        return dict(zip(points, found, strict=True))

    plain, weighted = gradients(term.sum()), gradients(weigh(term).sum())
    others = gradients(sum(x.sum() for x in terms.values()))

    def is_covered(name: str) -> bool:
        leaf, uses = leaves[name], [k for k, use in enumerate(run.uses) if use.site == name]
        total, size = leaf.new_zeros(leaf.numel()), leaf.new_zeros(leaf.numel())
        used = False
        for k in uses:
            use, (x, out) = run.uses[k], run.seen[k]
            if out.dim() - use.layer.tail < dims:
                return False
            g, expected = weighted[f"use {k}"], plain[f"use {k}"]
            if g is None or expected is None:
                continue
            used = True
            if out.shape[:dims] != shape:
                return False
            if leaf.is_meta:
                continue
            expected = weigh(expected)
            largest = expected.abs().unsqueeze(-1).flatten(dims).amax(-1)
            largest = 1e4 * largest.view(*shape, *(1,) * (g.dim() - dims))
            other = others[f"use {k}"]
            if not _close(g, expected, largest) or (other is not None and bool(other.any())):
                return False
            x, g = taps.rows(use, None if x is None else x.detach()[None], g[None])
            for rows in use.layer.blocks(x, g, taps.budget):
                use.view.of(total).add_(rows.sum(0))
            x = x.abs() if x is not None and x.is_floating_point() else x
            for rows in use.layer.blocks(x, g.abs(), taps.budget):
                use.view.of(size).add_(rows.sum(0))  # without cancellation
        if leaf.is_meta or not uses:
            return bool(uses)
        gradient = weighted.get(f"site {name}")
        gradient = torch.zeros_like(total) if gradient is None else gradient.flatten()
        if used and not (size.any() or gradient.any()):
            taps.undecided = True
        return _close(total, gradient, 1e3 * size)

    return tuple(name for name in leaves if is_covered(name))


def _close(x: Tensor, y: Tensor, size: Tensor) -> bool:
    """Whether x is y up to roundings of ``size``; no where anything is not finite."""
    return bool(((x - y).abs() <= torch.finfo(y.dtype).eps * size).all())
