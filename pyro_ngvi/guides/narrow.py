"""A start from independent Gaussians, for a guide with more scales.

Far from the posterior the gradient of the d^2 or d r scales of a family is noise, in which that of d
sds drowns.  A mean field goes there first; the member of the family with its means and sds is the
start, or, in a full family, what steps on expectations (:mod:`.expectations`) make of that, if there is
time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from ..families.base import Tensors
from ..families.full_rank import FullRankNormal
from ..families.mean_field import MeanFieldNormal
from ..linalg.hessian import ROWS, values_and_gradients
from ..linalg.host import apart, own_random_state
from .ascent import steps_of
from .deadline import seconds_left
from .expectations import DRAWS, LEAST, smoothed
from .found import Found
from .laplace import Search

#: steps whose gain is looked at, the most, and nats for each of d below which a gain is little
WINDOW, MOST, LITTLE = 20, 1_000, 0.01
MEAN_FIELD = MeanFieldNormal()


def narrow(search: Search, family: Any, given: Tensors) -> Tensors | None:
    """A member of ``family`` near where a mean field comes from ``given`` until it gains little."""
    elbos = list[Tensor]()
    q = MEAN_FIELD.init(given["loc"], family.stddev(given))
    for now, elbo in steps_of(lambda z: -search.f(z), MEAN_FIELD, q, MOST):
        q = now
        elbos.append(elbo.mean())
        if len(elbos) % WINDOW == 0 and len(elbos) > WINDOW:
            past, last = torch.stack(elbos[-2 * WINDOW :]).reshape(2, WINDOW)
            error = (past.var() + last.var()).div(WINDOW).sqrt()
            if not bool(last.mean() - past.mean() > (2.0 * error).clamp_min(LITTLE * search.d)):
                break
    if not elbos or not bool(torch.stack(elbos[-WINDOW:]).mean() > elbos[0]):
        return None
    sd = MEAN_FIELD.stddev(q)
    params = family.init(q["loc"], sd)
    if not isinstance(family, FullRankNormal):
        return params
    with suppress(RuntimeError, ValueError):  # as in a path
        begun = time.monotonic()
        values_and_gradients(search.f, search.draws(family, params, ROWS))
        # a row of a Hessian is a product with it, of two or three gradients
        batches = LEAST * (3 * DRAWS + 1) * search.d / ROWS
        if (time.monotonic() - begun) * batches < seconds_left():
            start = search.gaussian(q["loc"], torch.diag(sd**-2.0))
            params = family.matched(*smoothed(search, start, family))
    return params


def by_mean_field(density: Callable[[Tensor], Tensor], family: Any, given: Tensors) -> Found:
    """A search that is :func:`narrow` alone."""
    with own_random_state(apart(0)), torch.no_grad():
        search = Search(density, given["loc"])
        params, before = narrow(search, family, given), search.elbo(family, given)
        reached = () if params is None else (search.elbo(family, params),)
        return Found(params, reached, before, search.evaluations)
