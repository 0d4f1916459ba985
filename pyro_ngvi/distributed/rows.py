"""The part of the data that belongs to this process."""

from __future__ import annotations

from typing import Any

from .processes import rank, world_size


def shard(*arrays: Any) -> Any:
    """The rows of this rank: contiguous, the first ranks one more where they do not divide evenly.

    Args:
        arrays: tensors or NumPy arrays (memory maps too: only the rank's rows are read later), all with
            the same first dimension N.

    Returns:
        Views of rows r N // R to (r + 1) N // R, about; one array alone, several as a tuple.

    Raises:
        ValueError: for arrays of different lengths, or fewer rows than ranks.

    Example (one process has all rows):
        >>> import torch, pyro_ngvi as ngvi
        >>> X, y = ngvi.distributed.shard(torch.zeros(5, 3), torch.zeros(5))
        >>> X.shape
        torch.Size([5, 3])
    """
    lengths, r, R = {len(a) for a in arrays}, rank(), world_size()
    if len(lengths) != 1:
        raise ValueError(f"shard: the arrays have {sorted(lengths)} rows; give them equally many.")
    n = lengths.pop()
    if n < R:
        raise ValueError(f"shard: {n} rows are too few for {R} ranks; start fewer processes.")
    size, more = divmod(n, R)
    start = r * size + min(r, more)
    rows = slice(start, start + size + (r < more))
    return arrays[0][rows] if len(arrays) == 1 else tuple(a[rows] for a in arrays)
