r"""Whether taps behind the layers of a model give its per-example gradients: checked once.

With t_i = log p(y_i | z), i an entry of the log_prob of the one observed site that lies in a plate, and
G(v) the output gradients of a layer for sum_i v_i t_i,

1. rows are examples:   G(v)_i = v_i G(1)_i, for one vector v without equal entries. Where examples mix
   (attention over the batch, rows in another order), G(v)_i = sum_j v_j dt_j / dout_i is not that;
2. every use is seen:   sum_i of the tapped gradients of v_i t_i is autograd's gradient of sum_i v_i t_i
   in the whole latent value;
3. nothing else passes: the other terms of the log joint have no gradient in any tapped output.

1 and 2 at a generic point hold, for models that are not made to deceive, at every point. Differences
are relative to the example's own largest gradient in 1, where a mean over N data moves each by 1 / N,
and to the entry's own sum of absolute terms in 2. Where nothing has a gradient, nothing was checked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from pyro import poutine
from pyro.poutine.util import site_is_subsample
from torch import Tensor

from ...linalg.host import own_random_state
from ...runtime.density import Site, Sites, site_kind, site_log_prob
from ...runtime.run import Minibatches, run_particles
from ..data import is_data
from .run import Run, Use, scale_refusal
from .squares import Inputs

if TYPE_CHECKING:
    from .taps import LayerTaps

__all__ = ["check_taps"]

Arrivals = dict[Use, tuple[Inputs, Tensor]]


def check_taps(
    taps: LayerTaps,
    values: Mapping[str, Tensor],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    minibatches: Minibatches | None,
    shared: Mapping[str, Tensor],
    examples: int | None,
) -> None:
    """Run the model of ``taps`` once and fill in what it covers; see :meth:`LayerTaps.discover`."""
    leaves = {
        name: v[:1].detach().requires_grad_(v.is_floating_point()) for name, v in values.items()
    }
    observed: list[str] = []

    def log_probs(sites: Sites) -> dict[str, Tensor]:
        observed[:] = [name for name, site in sites.items() if is_data(site)]
        return {name: site_log_prob(site)[1] for name, site in sites.items() if _has_density(site)}

    with _collecting(taps), own_random_state():
        batches = Minibatches() if minibatches is None else minibatches
        how: Any = {"minibatches": batches, "shared": shared}
        terms = run_particles(taps, log_probs, leaves, 1, args, kwargs, **how)
        run = taps.last
        assert run is not None
        reason = _refusal(run, observed)
        if reason is None:
            taps.observed = observed[0]
            shape = _example_shape(terms[observed[0]], examples)
            probe = _Probe(taps, leaves, run.uses, terms, shape)
            taps.examples = len(shape)
            reasons = {name: probe.reason(name) for name in leaves}
        else:
            reasons = dict.fromkeys(leaves, reason)

    taps.reasons = {name: why for name, why in reasons.items() if why is not None}
    taps.sites = tuple(name for name in leaves if name not in taps.reasons)
    taps.twins = {name: taps.twins[name] for name in taps.sites}
    taps.last = None
    run.uses = [use for use in run.uses if use.site in taps.sites]
    taps.signature = run.signature()
    for name in taps.sites:
        views = [use for use in run.uses if use.site == name]
        taps.groups[name] = _overlaps(taps.twins[name].numel(), views)


def _has_density(site: Site) -> bool:
    return not site_is_subsample(site) and site_kind(site) != "deterministic"


@contextmanager
def _collecting(taps: LayerTaps) -> Iterator[None]:
    taps.arrivals = []
    try:
        with poutine.block(), torch.enable_grad():
            yield
    finally:
        taps.arrivals = None


def _refusal(run: Run, observed: Sequence[str]) -> str | None:
    """Why no latent can be covered, if so."""
    if run.batch_norm:
        return (
            "The model calls F.batch_norm with training=True, which mixes the examples of a batch, "
            "so there are no per-example gradients. Call .eval() on the module, or use "
            "torch.nn.GroupNorm or LayerNorm."
        )
    if len(observed) != 1:
        found = ", ".join(map(repr, observed)) or "none"
        return f"Layer taps need one observed site in a plate, which numbers the examples, not {found}."
    return scale_refusal(observed[0], run.scales[observed[0]])


def _example_shape(term: Tensor, examples: int | None) -> torch.Size:
    """The dimensions of a log_prob (1, ...) that number the examples, without ones at the end."""
    shape = term.shape[1:][:examples]
    while len(shape) > 1 and shape[-1] == 1:
        shape = shape[:-1]
    return shape


class _Probe:
    """The gradients of a run, and the three checks on them."""

    def __init__(
        self,
        taps: LayerTaps,
        leaves: Mapping[str, Tensor],
        uses: Sequence[Use],
        terms: Mapping[str, Tensor],
        shape: torch.Size,
    ) -> None:
        self.taps, self.leaves, self.uses, self.shape = taps, leaves, uses, shape
        self.dims = len(shape)
        term = terms[taps.observed]
        numbers = torch.arange(shape.numel(), device=term.device)
        # The golden ratio's multiples, modulo 1, are all different and evenly spread.
        self.v = (1 + (0.618033988749895 * numbers) % 1).to(term.dtype).view(shape)
        _, self.plain = self._backward(term.sum())
        self.gradients, self.weighted = self._backward(self._weight(term).sum())
        rest = [term.sum() for name, term in terms.items() if name != taps.observed]
        _, self.others = self._backward(sum(rest))

    def _weight(self, x: Tensor) -> Tensor:
        """Multiply the examples' rows of x (1, *examples, ...) by v."""
        return x * self.v.view(*self.shape, *(1,) * (x.dim() - 1 - self.dims))

    def _backward(self, total: Any) -> tuple[dict[str, Tensor | None], Arrivals]:
        """Gradient of ``total`` in each latent, and what came by at the taps."""
        leaves = {name: x for name, x in self.leaves.items() if x.requires_grad}
        if not isinstance(total, Tensor) or not total.requires_grad:
            return {}, {}
        self.taps.arrivals = arrivals = []
        inputs = list(leaves.values())
        grads = torch.autograd.grad(total, inputs, retain_graph=True, allow_unused=True)
        return dict(zip(leaves, grads, strict=True)), {use: (xs, g) for use, xs, g in arrivals}

    def reason(self, name: str) -> str | None:
        """Why a latent is not covered, or None."""
        uses = [use for use in self.uses if use.site == name]
        if not uses:
            return (
                f"The latent {name!r} is not seen as the weight of a layer: F.linear, F.conv1d/2d/3d, "
                f"F.embedding, F.layer_norm and its like, x @ W, h + b, h * w or W[index], with its "
                f"value or a view of it."
            )
        for use in uses:
            shape = self.plain[use][1].shape[1:] if use in self.plain else None
            rows = shape is None or shape[: self.dims] == self.shape
            if not (rows and use.layer.fits(self.dims, use.out_dim)):
                out = "" if shape is None else f", of shape {tuple(shape)},"
                return (
                    f"The output of a layer ({use.layer.name}) of the latent {name!r}{out} "
                    f"does not start with the dimensions {tuple(self.shape)} of the examples."
                )
        if self.leaves[name].is_meta:
            return None
        return self._compare(name, uses)

    def _compare(self, name: str, uses: Sequence[Use]) -> str | None:
        flat = self.leaves[name].new_zeros(self.leaves[name].numel())
        terms = torch.zeros_like(flat)  # absolute, without cancellation
        for use in uses:
            if use in self.others and self.others[use][1].any():
                return (
                    f"A layer of the latent {name!r} also enters a term that belongs to no example: "
                    f"the prior of another latent, or a factor outside the data plate."
                )
            if use not in self.plain:
                continue
            xs, g = self.weighted[use]
            expected = self._weight(self.plain[use][1])
            size = expected.abs()
            for dim in range(1 + self.dims, size.dim()):
                size = size.amax(dim, keepdim=True)
            if not _close(g, expected, 1e4 * size):
                return (
                    f"Examples mix after a layer of the latent {name!r}: the log probability of one "
                    f"depends on the layer's output for another (or is not finite)."
                )
            xs, g = tuple(x.flatten(1, self.dims) for x in xs), g.flatten(1, self.dims)
            use.view.of(flat).add_(use.layer.sum(xs, g, self.taps.budget))
            xs = tuple(x.abs() if x.is_floating_point() else x for x in xs)
            use.view.of(terms).add_(use.layer.sum(xs, g.abs(), self.taps.budget))
        gradient = self.gradients.get(name)
        gradient = torch.zeros_like(flat) if gradient is None else gradient.flatten()
        # of a single example nothing is decided by whoever asks
        several = self.shape.numel() > 1 and any(use in self.plain for use in uses)
        if several and not (terms.any() or gradient.any()):
            self.taps.undecided = True
        if _close(flat, gradient, 1e3 * terms):
            return None
        return (
            f"The latent {name!r} acts on the observed sites in other ways than through the layers "
            f"that are seen (for instance as W**2, or in a module that is one torch call)."
        )


def _close(x: Tensor, y: Tensor, size: Tensor) -> bool:
    """Whether x is y up to roundings of ``size``; no where anything is not finite."""
    return bool(((x - y).abs() <= torch.finfo(y.dtype).eps * size).all())


def _overlaps(numel: int, uses: Sequence[Use]) -> tuple[int, ...]:
    """A number for each use; uses that share an entry of the site's value have the same."""
    masks: dict[int, Tensor] = {}
    groups: list[int] = []
    for number, use in enumerate(uses):
        mask = torch.zeros(numel, dtype=torch.bool, device="cpu")
        use.view.of(mask).fill_(True)
        touched = [other for other, seen in masks.items() if bool((seen & mask).any())]
        for other in touched:
            mask |= masks.pop(other)
        groups = [number if group in touched else group for group in groups] + [number]
        masks[number] = mask
    return tuple(groups)
