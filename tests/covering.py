"""Tables of cases that meet every pair of values, where all combinations would be too many."""

from collections import Counter
from collections.abc import Iterable
from itertools import combinations, product
from typing import Any


def covering(*axes: Iterable[Any], strength: int = 2) -> list[tuple[Any, ...]]:
    """Rows in which any values of ``strength`` axes meet at least once: a covering array.

    Greedy: next comes the row with most new combinations, of these the one whose values came least.
    With ``strength=1`` each value comes up, for what one axis alone decides.
    """
    values = [list(axis) for axis in axes]
    met = {
        row: {
            tuple((i, row[i]) for i in chosen) for chosen in combinations(range(len(row)), strength)
        }
        for row in product(*(range(len(axis)) for axis in values))
    }
    left, found = set().union(*met.values()), []
    uses: Counter[tuple[int, int]] = Counter()

    def worth(row: tuple[int, ...]) -> tuple[int, int]:
        return len(met[row] & left), -sum(uses[pair] for pair in enumerate(row))

    while left:
        best = max(met, key=worth)
        left -= met[best]
        uses.update(enumerate(best))
        found.append(tuple(axis[i] for axis, i in zip(values, best, strict=True)))
    return found
