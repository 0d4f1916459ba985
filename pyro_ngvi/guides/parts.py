"""Parts of a guide's vector: their Gaussian families, their names, the factor of q over a site."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from ..families import FullRankNormal, MeanFieldNormal, ProductFamily
from ..families.base import Family, Tensors

__all__ = ["NORMAL", "check_normal", "factor", "part_name", "place"]

NORMAL: dict[str, type[Family]] = {"mean_field": MeanFieldNormal, "full_rank": FullRankNormal}


def check_normal(argument: str, value: str) -> None:
    """Refuse the name of a family that is not in ``NORMAL``."""
    if value not in NORMAL:
        names = " or ".join(map(repr, NORMAL))
        raise ValueError(f"{argument} must be {names}, got {value!r}.")


def part_name(prefix: str, site: str, taken: Collection[str]) -> str:
    """A name that a parameter of a module may have, different for every site."""
    name = f"{prefix}_{site.replace('.', '_')}"
    while name in taken:
        name += "_"
    return name


def place(shapes: Mapping[str, torch.Size], name: str) -> slice:
    """Where a site lies in the flat vector of sites of these unconstrained shapes."""
    start = 0
    for other, shape in shapes.items():
        if other == name:
            return slice(start, start + shape.numel())
        start += shape.numel()
    raise KeyError(name)


def factor(
    family: Family, params: Tensors, own: slice, alone: bool = False
) -> tuple[Family, Tensors] | None:
    """The factor of q over the entries ``own`` of its vector; None where there is none.

    ``alone`` says that there are no other entries.
    """
    if isinstance(family, MeanFieldNormal):
        return family, {name: value[own] for name, value in params.items()}
    if not isinstance(family, ProductFamily):
        return (family, params) if alone else None
    start = 0
    for index, (part, length) in enumerate(family.segments):
        if slice(start, start + length) == own:
            if sum(owner == part for owner, _ in family.segments) == 1:
                return family.parts[part], family.own(part, params)
            if isinstance(family.parts[part], MeanFieldNormal):
                return family.parts[part], family.segment(params, index)
        start += length
    return None
