"""Slopes of what is observed in the latent variables of units, and how they move with globals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..linalg.hessian import gradient, products
from ..linalg.host import fixed_normal
from ..linalg.products import matvec
from .conditional import Conditionals
from .runs import Given
from .units import Units

#: at how many draws mixed derivatives are taken, a pass for each of the globals followed, and at how
#: many one of these is that of another draw: units average them over their steps
FEW_DRAWS, SWAPPED = 2, 4


class Slopes(NamedTuple):
    """Of log p(y_i | u_i, v) at S draws: g (S, B, k), and H (S, B, k, k), ``None`` where g jumps."""

    g: Tensor
    H: Tensor | None


class Moving(NamedTuple):
    """How slopes move with phi.

    At the draws ``few``, in the mean: minus the derivatives of g in phi, ``cross`` (B, k, D), and ``g``
    (B, k).  And where one entry of phi is another, if any is a scale of the data.
    """

    cross: Tensor
    g: Tensor
    few: Tensor
    swapped: Swapped | None


class Swapped(NamedTuple):
    """``H`` (P, B, k, k) at the draws of numbers ``draws`` (P,), with their noise in u, where the entry
    ``entry`` (P,) of phi alone is another, as in ``phi`` (P, D)."""

    H: Tensor
    draws: Tensor
    entry: Tensor
    phi: Tensor


@torch.enable_grad()
def slopes(units: Units, given: Given, x: Tensor, weight: float = 1.0) -> Slopes | None:
    """At x (S, B, k), for one unit where it stands for others; None where nothing depends on x.

    ``weight`` is that of what is observed.
    """
    x = x.detach().requires_grad_()
    log_p = units.log_likelihood(given, x, weight) / given.seen.scale
    if not log_p.requires_grad:
        return None
    g = gradient(log_p, x, create_graph=units.smooth)
    if not units.smooth:
        return Slopes(g, None)
    H = -_hessian(units, g, x)
    return Slopes(g.detach(), 0.5 * (H + H.mT))


def moving(
    units: Units,
    given: Given,
    x: Tensor,
    q_of: Callable[[Given], Conditionals],
    noise: Tensor,
    weight: float = 1.0,
) -> Moving | None:
    """At draws x (S, B, k) of q, ``q_of`` what is given, with white ``noise`` (S, B, k); None where no
    globals are followed."""
    if not units.coordinates:
        return None
    few = _evenly(len(x), FEW_DRAWS, x.device)
    cross, g = _cross(units, given.chosen(few), x[few], weight)
    swapped = _swapped(units, given, q_of, noise, weight) if units.growing else None
    return Moving(cross, g, few, swapped)


def _swapped(
    units: Units,
    given: Given,
    q_of: Callable[[Given], Conditionals],
    noise: Tensor,
    weight: float,
) -> Swapped:
    phi, device = units.phi(given), noise.device
    draws, every = _evenly(len(noise) // 2, SWAPPED, device), torch.arange(SWAPPED, device=device)
    names = [
        n for n, shape in units.phi_shapes(given.values).items() for _ in range(shape[1:].numel())
    ]
    entries = torch.tensor([i for i, n in enumerate(names) if n in units.growing], device=device)
    entry = entries[torch.randperm(len(entries), device=device)[every % len(entries)]]
    moved, now = phi[draws], given.chosen(draws)
    moved[every, entry] = phi[draws.roll(1), entry]
    values = {**now.values, **units.at_phi(moved, now.values)}
    there = units.given(given.call, values)
    found: Any = slopes(units, there, q_of(there).draw(noise[draws]), weight)
    return Swapped(found.H, draws, entry, moved)


def _evenly(count: int, most: int, device: torch.device) -> Tensor:
    """Numbers of as many draws, of so many, evenly spaced: noise comes in pairs half of them apart."""
    return torch.arange(most, device=device) * count // most


def _hessian(units: Units, g: Tensor, x: Tensor) -> Tensor:
    """Derivatives (S, B, k, k) of the gradient g in x, at the same draw and in the same unit."""
    if units.coloring is None:
        return torch.stack(_columns(g, x), -1)
    # and one more, since a minibatch may tie what no other has tied before
    check = fixed_normal(1, units.width, seed=units.width).to(g)
    vectors = torch.cat([units.coloring.vectors(g), check])[:, None, None].expand(-1, *g.shape)
    found = products(g, x, vectors)
    H, wanted = units.coloring.matrix(found[:-1]), found[-1]
    off = (matvec(H, check) - wanted).abs().amax()
    if bool(off > torch.finfo(g.dtype).eps ** 0.5 * wanted.abs().amax()):
        H = torch.stack(_columns(g, x), -1)
        units.coloring.add((H != 0.0).flatten(0, 1).any(0))
    return H


@torch.enable_grad()
def _cross(units: Units, given: Given, x: Tensor, weight: float) -> tuple[Tensor, Tensor]:
    """Minus the mean of the mixed derivatives in x and phi, (B, k, D), and the mean gradient (B, k)."""
    x = x.detach().requires_grad_()
    phi = [each.detach().requires_grad_() for each in units.phi_parts(given.values)]
    moved = zip(units.coordinates.items(), phi, strict=True)
    values: dict[str, Any] = {name: to(each) for (name, to), each in moved}
    given = replace(given, values={**given.values, **values})
    if units.effects and not units.direct:  # what data say of x is through the place too
        given = replace(given, place=units.given(given.call, given.values).place)
    log_p = units.log_likelihood(given, x, weight) / given.seen.scale
    g = gradient(log_p, x, create_graph=True)
    # d (g' w) / d phi is linear in w: its gradients in w are columns of d g / d phi
    w = torch.zeros_like(g, requires_grad=True)
    keep: Any = {"create_graph": True, "materialize_grads": True}
    rows = torch.autograd.grad((g * w).sum(), phi, **keep)
    each = torch.cat([row.reshape(len(x), -1) for row in rows], 1)
    return -torch.stack([c.mean(0) for c in _columns(each, w)], -1), g.detach().mean(0)


def _columns(y: Tensor, x: Tensor) -> list[Tensor]:
    """Gradients in x of each entry of y's last axis, summed over the others."""
    return [gradient(each, x, retain_graph=True) for each in y.unbind(-1)]
