"""Members of the matrix-normal family, of a product with others, and random directions."""

import math

import pytest
import torch
from torch import Tensor
from torch.distributions import MultivariateNormal

from pyro_ngvi.families import Family, FullRankNormal, MatrixNormal, MeanFieldNormal, ProductFamily

Params = dict[str, Tensor]

SHAPES = {"2x3": (2, 3), "4x2": (4, 2), "row": (1, 3), "column": (3, 1), "scalar": (1, 1)}
shapes = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)

PRODUCT = ProductFamily(
    {"matrix": MatrixNormal(2, 2), "rest": MeanFieldNormal(), "full": FullRankNormal()},
    [("rest", 1), ("matrix", 4), ("full", 2), ("rest", 2), ("full", 1)],
    linear=False,
)


def random_like(params: Params, seed: int) -> Params:
    """A tangent, or a gradient: lower triangles where the parameter is one."""
    g = torch.Generator().manual_seed(seed)
    result = {k: torch.randn(v.shape, generator=g) for k, v in params.items()}
    return {k: v.tril() if k.endswith("tril") else v for k, v in result.items()}


def random_member(family: Family, d: int, seed: int = 0) -> Params:
    """A member whose triangles have positive diagonals."""
    g = torch.Generator().manual_seed(seed)
    params = family.init(torch.randn(d, generator=g), 0.7)
    for name, value in params.items():
        noise = 0.4 * torch.randn(value.shape, generator=g)
        if name.endswith("tril"):
            L = (value + noise).tril()
            params[name] = L.tril(-1) + torch.diag(L.diagonal().abs() + 0.1)
        else:
            params[name] = value + noise
    return params


def member(shape: tuple[int, int], seed: int = 0) -> tuple[MatrixNormal, Params]:
    family = MatrixNormal(*shape)
    return family, random_member(family, math.prod(shape), seed)


def dense(family: Family, params: Params) -> MultivariateNormal:
    return MultivariateNormal(family.mean(params), family.covariance(params))
