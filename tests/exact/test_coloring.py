"""Sparse symmetric matrices from their products with zeros and ones."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from pyro_ngvi.linalg.coloring import Coloring


def random(k: int, share: float, seed: int) -> Tensor:
    half = torch.rand(k, k, generator=torch.Generator().manual_seed(seed)) < share
    return half | half.mT | torch.eye(k).bool()


def band(k: int, width: int) -> Tensor:
    i = torch.arange(k)
    return (i[:, None] - i).abs() <= width


def crossed(many: int, few: int) -> Tensor:
    kind = torch.arange(many + few) < many
    return (kind[:, None] != kind) | torch.eye(many + few).bool()


CASES: list[tuple[Callable[[], Tensor], int]] = [
    (lambda: torch.eye(7).bool(), 1),
    (lambda: band(20, 1), 3),
    (lambda: band(20, 2), 5),
    (lambda: crossed(30, 4), 5),
    (lambda: torch.ones(6, 6).bool(), 6),
    (lambda: random(25, 0.05, 0), 25),
    (lambda: random(25, 0.3, 1), 25),
    (lambda: torch.zeros(4, 4).bool(), 1),
]


@pytest.mark.parametrize(("pattern", "most"), CASES)
def test_every_entry_is_found(pattern: Callable[[], Tensor], most: int) -> None:
    where = pattern()
    k = len(where)
    H = torch.randn(2, 3, k, k, generator=torch.Generator().manual_seed(2)).double()
    H = (H + H.mT) * where
    coloring = Coloring(where)
    vectors = coloring.vectors(H)
    assert torch.equal(vectors.sum(0), torch.ones(k).double())
    assert len(vectors) == coloring.count <= most
    products = torch.stack([(H @ v.unsqueeze(-1)).squeeze(-1) for v in vectors])
    assert torch.equal(coloring.matrix(products), H)


def test_one_side_of_the_pattern_is_enough() -> None:
    assert torch.equal(Coloring(torch.ones(3, 3).tril().bool()).empty, torch.zeros(3, 3).bool())


def test_entries_that_come_later_are_found_too() -> None:
    coloring = Coloring(torch.eye(5).bool())
    coloring.add(band(5, 1))
    H = torch.randn(5, 5, generator=torch.Generator().manual_seed(1))
    H = (H + H.mT) * band(5, 1)
    assert torch.equal(coloring.matrix(torch.stack([H @ v for v in coloring.vectors(H)])), H)
