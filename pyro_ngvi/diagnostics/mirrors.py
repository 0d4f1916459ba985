r"""Modes that are mirror images of a guide's: signs that data do not see, components to be exchanged.

A map R of the latent sites that keeps volumes takes draws z of q to draws of q(R^-1 .), so that

.. math:: E_q \frac{p(y, R z)}{q(z)}

is the mass of p(y, .) where R q lies, as E_q p(y, z) / q(z) is that where q lies.  Where R z are far
from all z, the first is a twentieth of the second or more, and log p falls half way between them, q
holds nothing of a mode.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from typing import Any

import torch
from pyro import poutine, validation_enabled
from torch import Tensor
from torch.distributions import constraints

from ..guides.found import BARRIER, COMPARABLE
from ..runtime.density import Sites, plain_support
from ..runtime.model_density import map_draws
from .draws import Draws, Fitted, joint_of
from .weights import evidence_of

Values = dict[str, Tensor]
#: draws that are mapped, a few of them first, nats that these may lack, and sds by which the mean of an
#: entry moves where it is far
DRAWS, FEW, HOPELESS, APART = 250, 10, 30.0, 6.0
#: draws that the mass of an image is worth at least; nats by which rounding tells it from the guide's
ALONE, SAME = 2.0, 0.1
#: sites whose signs are turned by pairs, entries that are exchanged, and maps, at most
PAIRED, ENTRIES, MOST = 4, 5, 24


def mirrored(fitted: Fitted, draws: Draws, batch_size: int | None = None) -> str:
    """The mirror image with the largest mass, in words; empty where there is none to speak of."""
    values = {name: x[:DRAWS] for name, x in draws.values.items()}
    log_q, count = draws.log_q[:DRAWS], min(DRAWS, len(draws.log_q))
    _, joint = next(fitted.joints())

    def log_p(sites: Sites) -> Tensor:
        total = joint_of(sites)
        for name in values:  # a masked prior has a density outside of its support, too
            inside = sites[name]["fn"].support.check(sites[name]["value"]).all()
            total = total.where(inside, -torch.inf)
        return total

    def log_ratio_at(at: Values, count: int) -> Tensor:
        few = {name: x[:count] for name, x in at.items()}
        try:
            with torch.no_grad(), poutine.block(), validation_enabled(False):
                found = map_draws(joint, log_p, few, count, batch_size)
        except Exception:  # whatever a model has against places where no draw was
            return torch.full_like(log_q[:count], -torch.inf)
        return (found - log_q[:count]).nan_to_num(-torch.inf)

    def mass_of(log_ratio: Tensor) -> float:
        return evidence_of(log_ratio.cpu().numpy()).log

    best, words = -torch.inf, ""
    if fitted.batches is None:
        own = evidence_of(draws.log_ratio[:DRAWS]).log
        least, most = own - COMPARABLE, torch.inf
    else:
        own = mass_of(log_ratio_at(values, count))
        least, most = own - SAME, own + SAME
    for what, at in _mirrors(values, fitted.sites):
        if mass_of(log_ratio_at(at, min(FEW, count))) < own - HOPELESS:
            continue
        log_ratio = log_ratio_at(at, count)
        if torch.softmax(log_ratio, 0).square().sum() > 1.0 / ALONE:  # of one draw, far out
            continue
        mass = mass_of(log_ratio)
        if max(best, least) < mass < most:
            half_way = log_ratio_at(_between(values, at, fitted.sites), count)
            if not bool(half_way.mean() < log_ratio.mean() - BARRIER):
                continue
            best, share = mass, 1.0 / (1.0 + torch.tensor(own - mass).exp())
            words = (
                f"There is another mode, with {what} and {share:.0%} of the mass, of which the guide "
                f"holds nothing: take a prior that rules it out, or functools.partial("
                f"pyro_ngvi.AutoMixtureNormal, num_components=2) for a guide."
            )
    return words


def _mirrors(values: Values, sites: Sites) -> Iterator[tuple[str, Values]]:
    found = 0
    for what, at in (*_signs(values, sites), *_exchanges(values, sites)):
        if found < MOST and any(_is_apart(values[name], x) for name, x in at.items()):
            found += 1
            yield what, values | at


def _between(a: Values, b: Values, sites: Sites) -> Values:
    """Draws half way: those of a shifted by half of what is between the means, where any real number is
    a value, else averages of both."""
    shifted = {name: a[name] + 0.5 * (x.mean(0) - a[name].mean(0)) for name, x in b.items()}
    return {n: shifted[n] if _is_real(sites[n]) else 0.5 * (a[n] + x) for n, x in b.items()}


def _is_real(site: Any) -> bool:
    return plain_support(site["fn"].support) is constraints.real


def _is_apart(before: Tensor, after: Tensor) -> bool:
    """Whether means are far from each other, or no draw of the one lies among those of the other."""
    sd = before.std(0).maximum(after.std(0))
    far = (before.mean(0) - after.mean(0)).abs() > APART * sd
    disjoint = (before.amin(0) > after.amax(0)) | (before.amax(0) < after.amin(0))
    return bool((far | (disjoint & (sd > 0.0))).any())


def _signs(values: Values, sites: Sites) -> Iterator[tuple[str, Values]]:
    real = [name for name in values if _is_real(sites[name])]
    groups = [*combinations(real, 1), *(combinations(real, 2) if len(real) <= PAIRED else ())]
    for names in [*groups, tuple(real)] if len(real) > 2 else groups:
        named = ", ".join(map(repr, names[:3])) + " ..." * (len(names) > 3)
        yield f"the signs of {named} turned", {name: -values[name] for name in names}


def _exchanges(values: Values, sites: Sites) -> Iterator[tuple[str, Values]]:
    one = {n: x for n, x in values.items() if x[0].numel() == 1}
    shares = {n: 1.0 - x for n, x in one.items() if _is_share(sites[n])}
    # m1 and m2 with s1 and s2, or a and b
    numbered = {n: (n[:-1], n[-1]) for n in one if n not in shares}
    for i, j in combinations(sorted({last for _, last in numbered.values()}), 2):
        first = [n for n, (stem, last) in numbered.items() if last == i and stem + j in numbered]
        both = [(n, n[:-1] + j) for n in first]
        at = {a: values[b] for pair in both for a, b in (pair, pair[::-1])}
        named = ", ".join(map(repr, at))
        if at:
            yield f"{named} exchanged", at
        if at and shares:
            yield f"{named} exchanged", at | shares
    for size in range(2, ENTRIES + 1):
        having = {n: x for n, x in values.items() if size in x.shape[1:]}
        # a matrix is no list of entries
        if any(sites[n]["fn"].support.event_dim > 1 for n in having):
            continue
        for i, j in combinations(range(size), 2) if having else ():
            order = torch.arange(size)
            order[i], order[j] = j, i
            at = {name: _ordered(x, order.to(x.device)) for name, x in having.items()}
            named = ", ".join(map(repr, having))
            yield f"entries {i} and {j} of {named} exchanged", at
            if shares and size == 2:
                yield f"entries {i} and {j} of {named} exchanged", at | shares


def _ordered(x: Tensor, order: Tensor) -> Tensor:
    for axis in range(1, x.dim()):
        if x.shape[axis] == len(order):
            x = x.index_select(axis, order)
    return x


def _is_share(site: Any) -> bool:
    support = plain_support(site["fn"].support)
    bounds = (getattr(support, name, torch.nan) for name in ("lower_bound", "upper_bound"))
    return all(
        bool((torch.as_tensor(x) == end).all()) for x, end in zip(bounds, (0, 1), strict=True)
    )
