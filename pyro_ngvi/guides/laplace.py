r"""A Gaussian to start from: damped Newton steps on -log p, and the best of the Gaussians on the way.

From each of a few points theta_0, with f = -log p(y, theta) in nats and its Hessian H = Q diag(h) Q',

    theta <- theta - Q diag(1 / (|h| + mu)) Q' grad f,

mu raised fourfold where f would not fall and lowered where it does (Levenberg 1944).  Absolute values
(Dauphin et al. 2014) make it leave saddles.  Every iterate has its own N(theta, |H|^-1), Laplace's
approximation where the iterate is the mode, and the one with the largest ELBO wins: on a hierarchical
posterior, whose mode may be degenerate, an early one.

A Hessian costs about as much as d gradients, and there are some five to ten for each point: for d up
to a few hundred.  Above ``MANY`` the search starts from one point.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.func import vjp, vmap

from ..families.base import centred, log_normal
from ..linalg.cholesky import inverse_cholesky
from ..linalg.host import own_random_state

LogDensity = Callable[[Tensor], Tensor]  # theta (S, d) to (S,)
Gaussian = tuple[Tensor, Tensor]  # mean (d,) and precision (d, d)

#: points to start from, the d above which there is one, the largest d
STARTS, MANY, LARGEST = 4, 64, 500
#: Newton steps from a point at most
STEPS = 40
#: draws that compare all Gaussians, those that compare the finalists, and their number
DRAWS, MORE, FINALISTS = 64, 512, 5
#: rows of a Hessian at once: larger batches fall out of the cache
ROWS = 16
#: decrease that a step promises, in nats, below which it has converged
TOLERANCE = 1e-3


@dataclass(frozen=True)
class Found:
    """N(loc, precision^-1) with loc (d,) and precision (d, d).

    ``elbos``: nats, the largest ELBO from each point, and at the end that of the Gaussian given; -inf
    where there is none.  ``better``: whether it is another one than that.
    """

    loc: Tensor
    precision: Tensor
    elbos: tuple[float, ...]
    better: bool


def gradient_and_hessian(f: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    """Of a function of one point x (d,): reverse over reverse, which every density allows."""

    def gradient(point: Tensor) -> Tensor:
        made: Any = vjp(f, point)
        value, pull = made
        return pull(torch.ones_like(value))[0]

    made: Any = vjp(gradient, x)
    g, pull = made
    eye = torch.eye(len(x), dtype=x.dtype, device=x.device)
    H = vmap(lambda v: pull(v)[0], chunk_size=ROWS)(eye)
    return g, 0.5 * (H + H.mT)


def newton(density: LogDensity, theta: Tensor) -> Iterator[Gaussian]:
    """Iterates (d,) of damped Newton steps, each with |H| (d, d), until one has converged."""

    def f(x: Tensor) -> Tensor:
        return -density(x.unsqueeze(0))[0]

    value, damping = f(theta), 0.0
    for _ in range(STEPS):
        g, H = gradient_and_hessian(f, theta)
        if not bool(torch.isfinite(g.sum() + H.sum() + value)):
            return
        h, Q = torch.linalg.eigh(H)
        h = h.abs()
        h = h.maximum(torch.finfo(h.dtype).eps * h.max().clamp_min(1.0))
        yield theta, (Q * h) @ Q.mT
        along = Q.mT @ g
        while True:
            step = along / (h + damping)
            promise = float(0.5 * (along * step).sum())
            if promise < TOLERANCE:
                return
            new = theta - Q @ step
            after = f(new)
            if bool(after < value):
                theta, value, damping = new, after, damping / 4.0 if damping > 1e-3 else 0.0
                break
            damping = max(4.0 * damping, 0.1 * float(h.median()), 1e-3 * float(along.abs().max()))


def best_gaussian(density: LogDensity, center: Tensor, scale: float) -> Found:
    """The Gaussian of the largest ELBO, N(center, scale^2 I) among them.

    All are compared on a few common draws, the best of them again on more, by mean less two standard
    errors: few draws may miss the tail in which a Gaussian is wrong.  The random state is left as it
    was, and the same density has the same answer.
    """
    d = len(center)
    with own_random_state(0):
        noise = torch.randn(MORE, d, dtype=center.dtype, device=center.device)
        points = center + 4.0 * torch.rand_like(noise[:STARTS]) - 2.0
    points[0], few = center, centred(noise[:DRAWS])

    def elbo(q: Gaussian, noise: Tensor, errors: float = 0.0) -> float:
        loc, precision = q
        L = inverse_cholesky(precision)
        log_det = L.diagonal().log().sum()
        # the draws' own log q, whose tails are those of log p near a Gaussian posterior
        ratio = density(loc + noise @ L.mT) - log_normal(noise) + log_det
        value = float(ratio.mean() - errors * ratio.std() / len(ratio) ** 0.5)
        return value if value == value else -torch.inf

    given = center, torch.diag(torch.full_like(center, scale**-2.0))
    seen = [(elbo(given, few), given)]
    elbos = []
    for point in points if d <= MANY else points[:1]:
        first = len(seen)
        try:
            for q in newton(density, point):
                seen.append((elbo(q, few), q))
        except (RuntimeError, ValueError):
            pass  # a Cholesky at a far point, a value out of its support: one point less
        elbos.append(max((value for value, _ in seen[first:]), default=-torch.inf))
    elbos.append(seen[0][0])
    finalists = sorted(seen, key=lambda pair: -pair[0])[:FINALISTS]
    _, best = max((elbo(q, noise, 2.0), k) for k, (_, q) in enumerate(finalists))
    q = finalists[best][1]
    return Found(*q, tuple(elbos), q is not given)
