r"""How far the posterior moves when data are left out, from the sites of an AutoSites guide.

Leaving datum n out divides its site out of q and keeps the others (:mod:`pyro_ngvi.sites.cavity`).  By
the derivation there the mean of the white block moves by V A_n' r_n, and that of the latent variables
by the linear map from one to the other.  A set G of data is one site of its stacked predictors;
where these have more entries than the block, of the block itself:

    Lambda_G -> A_G' Lambda_G A_G,    g_G -> A_G' g_G,    C_G -> V.

For a Gaussian likelihood all of it is exact.  For others the sites of the data that stay would change a
little too: take the order for what it says and refit for the figures (``guide.remove``, a few steps).

Cook's distance of a linear model (1977, "Detection of influential observation in linear regression") is
``distance`` squared over the number of coefficients, with a flat prior and the noise known.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .bound_model import moves
from .cavity import Cavity, divide_out
from .data import Snapshot
from .dense import WhitePosterior

__all__ = ["Influence", "influence_of"]


@dataclass(frozen=True)
class Influence:
    """What q would be without each of G data, or sets of data, of a group.

    Attributes:
        group: name of the group.
        distance: (G,), how far the posterior mean of the latent block moves, in posterior standard
            deviations (its Mahalanobis length in q's precision).
        kl: (G,), KL(q without || q) in nats.
        prediction: for each the shift (k,) of the mean of its own f, with less without; (G, k) for
            single data, a list of (n, k) for sets.
        improper: how many leave no proper Gaussian; their figures are NaN.
    """

    group: str
    distance: Tensor = field(repr=False)
    kl: Tensor = field(repr=False)
    prediction: Tensor | list[Tensor] = field(repr=False)
    improper: int
    _shift: Callable[[Tensor], Tensor] = field(repr=False)

    def most(self, count: int = 10) -> Tensor:
        """Numbers (count,) of the data, or sets, of the largest distance, the largest first.

        Those without which there is no proper Gaussian come before all others.
        """
        order = self.distance.nan_to_num(torch.inf).argsort(descending=True, stable=True)
        return order[:count]

    def shift(self, indices: Any = None) -> Tensor:
        """Posterior mean of the flat latent vector with the data less that without, (n, D).

        Of the data, or sets, of these numbers; ``None`` for all, which takes G D numbers.

        Raises:
            NotImplementedError: where the guide's algebra is not dense.
        """
        every = torch.arange(len(self.distance), device=self.distance.device)
        return self._shift(
            every if indices is None else every[torch.as_tensor(indices)].reshape(-1)
        )

    def __str__(self) -> str:
        first = ", ".join(f"{n} ({float(self.distance[n]):.2f})" for n in self.most(5).tolist())
        bad = f"; {self.improper} leave no proper Gaussian" if self.improper else ""
        return (
            f"Influence of {len(self.distance)} parts of {self.group!r} on the posterior mean, in "
            f"posterior standard deviations; the most: {first}{bad}"
        )


@torch.no_grad()
def influence_of(at: Snapshot, group: str, sets: Sequence[Tensor] | None) -> Influence:
    """The influence of every datum of a group, or of each of some sets of them (numbers)."""
    if sets is not None:
        return _of_sets(at, group, sets)
    marginals = at.marginals[group]
    cavity = divide_out(marginals.mean, marginals.covariance, *at.sites[group])

    def shift(chosen: Tensor) -> Tensor:
        q = _white(at, "shift()")
        design = at.view.maps[group].design[chosen]
        return _in_latent(at, q.solve(torch.einsum("nkr,nk->nr", design, cavity.pull[chosen])))

    return _influence(group, [cavity], cavity.move, shift)


def _of_sets(at: Snapshot, group: str, sets: Sequence[Tensor]) -> Influence:
    q, view = _white(at, "groups="), at.view.maps[group]
    mean, (linear, precision) = at.marginals[group].mean, at.sites[group]
    cavities, predictions, pulls = [], [], []
    for index in sets:
        A = view.design[index].flatten(0, 1)
        stacked = torch.block_diag(*precision[index])
        g = linear[index].flatten() - stacked @ mean[index].flatten()
        if len(A) > len(q.mean):  # the same site as one of the block itself
            stacked, g, rows = A.mT @ stacked @ A, A.mT @ g, None
        else:
            rows = A
        half = q.half(torch.eye(len(q.mean)).to(q.mean) if rows is None else rows)
        # the site of mean 0 and linear term g moves as that of f_hat and nu does
        none = torch.zeros_like(g)
        cavity = divide_out(none[None], (half.mT @ half)[None], g[None], stacked[None])
        cavities.append(cavity)
        pull = cavity.pull[0] if rows is None else rows.mT @ cavity.pull[0]
        pulls.append(pull)
        predictions.append((A @ q.solve(pull)).reshape(len(index), -1))
    stack = torch.stack(pulls)

    def shift(chosen: Tensor) -> Tensor:
        return _in_latent(at, q.solve(stack[chosen]))

    return _influence(group, cavities, predictions, shift)


def _influence(
    group: str, cavities: list[Cavity], prediction: Any, shift: Callable[[Tensor], Tensor]
) -> Influence:
    names = "distance", "kl", "proper"
    distance, kl, proper = (torch.cat([getattr(c, n) for c in cavities]) for n in names)
    return Influence(group, distance, kl, prediction, int((~proper).sum()), shift)


def _white(at: Snapshot, what: str) -> WhitePosterior:
    if not isinstance(at.posterior, WhitePosterior):
        raise NotImplementedError(
            f"Influence: {what} needs the joint posterior of the whole block, and a state-space "
            f"prior keeps that of single states only. distance, kl and prediction of single data are "
            f"there."
        )
    return at.posterior


@torch.no_grad()
def _in_latent(at: Snapshot, white: Tensor) -> Tensor:
    """Shifts (n, R) of the white block as shifts (n, D) of the latent variables."""
    designs = [process.design for process in at.view.processes]
    if designs:  # inducing points: the processes' own values, at all inputs
        parts = white.split([A.shape[-1] for A in designs], -1)
        return torch.cat([part @ A.mT for part, A in zip(parts, designs, strict=True)], -1)

    noises = white if at.basis is None else white @ at.basis.mT
    return moves(at.call.flat_block, noises)
