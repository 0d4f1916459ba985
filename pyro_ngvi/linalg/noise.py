"""Standard normal noise whose moments over its rows are those of its distribution."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import count

import torch
from torch import Tensor

from .host import setting

#: columns for each row from which rows are at right angles by themselves, and too long to be kept
WIDE = 16


def centred(noise: Tensor) -> Tensor:
    r"""Standard normal noise (..., m) moved to mean zero over its S rows, and widened to variance 1.

    Each row of e_s' = sqrt(S / (S - 1)) (e_s - mean(e)) is N(0, I) again, so averages stay unbiased;
    the gradient of the scales has no part of mean(g).  Two rows are antithetic, one stays.
    """
    if (rows := noise[..., 0].numel()) < 2:
        return noise
    mean = noise.mean(tuple(range(noise.dim() - 1)), keepdim=True)
    return (rows / (rows - 1)) ** 0.5 * (noise - mean)


def whitened(noise: Tensor) -> Tensor:
    """Noise (S, m) moved to mean zero, and made equally wide in all directions that S rows can have.

    With the singular value decomposition U D V' of the centred noise it is U V' sqrt(S m / r), r the
    rank: from m + 1 rows on their covariance is I.  A row is no longer normal, but as good as that.
    """
    S, m = noise.shape
    U, _, Vh = torch.linalg.svd(noise - noise.mean(0), full_matrices=False)
    rank = min(S - 1, m)
    return (S * m / rank) ** 0.5 * (U[:, :rank] @ Vh[:rank])


_EVEN: ContextVar[Callable[[Tensor], Tensor]] = ContextVar("even", default=centred)


def even(noise: Tensor) -> Tensor:
    """:func:`centred`, but for calls within a :meth:`SharedNoise.piece`."""
    return _EVEN.get()(noise)


class SharedNoise:
    """Makes the noise of several calls :func:`whitened` over the rows of all, the same each time."""

    def __init__(self, pieces: int) -> None:
        self.pieces = pieces
        self._made: list[tuple[Tensor, ...]] = []

    @contextmanager
    def piece(self, s: int) -> Iterator[None]:
        """Around call number ``s``; the first time number 0, whose random state is that of all."""
        seen = count()

        def part(noise: Tensor) -> Tensor:
            if noise.dim() != 2 or self.pieces * len(noise) <= max(1, noise.shape[1] // WIDE):
                return centred(noise)
            if (k := next(seen)) == len(self._made):
                others = [torch.randn_like(noise) for _ in range(self.pieces - 1)]
                whole = whitened(torch.cat([noise, *others]))
                self._made.append(whole.split(len(noise)))
            return self._made[k][s]

        with setting(_EVEN, part):
            yield
