"""Members of the orthogonal flows that the tests of these families look at."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from benchmarks.flows.orthogonal_forms import OrthogonalForm
from pyro_ngvi.families import OrthogonalFlow
from tests.covering import covering

Tensors = dict[str, Tensor]
D = 4
FORMS = [("paper", "full"), ("scaled", "full"), ("scaled", "diagonal"), ("whitened", "full")]
ACTIVATIONS = ["sinh-arcsinh", "arcsinh", "leaky", "sigmoid"]
FAMILIES: dict[str, OrthogonalFlow] = {
    f"{form}-{base}-{psi}-{layers}": OrthogonalForm(layers, psi, form, base)
    for (form, base), psi, layers in covering(FORMS, ACTIVATIONS, [1, 2])
}
FAMILIES |= {f"scaled-full-sinh-arcsinh-{layers}": OrthogonalFlow(layers) for layers in (1, 2)}
every = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES.keys())


def some_tangent(family: OrthogonalFlow, params: Tensors, size: float, seed: int = 0) -> Tensors:
    """A random direction, triangular where tangents are."""
    generator = torch.Generator().manual_seed(seed)
    n = len(family.pack(params))
    vector = torch.randn(n, generator=generator, dtype=torch.float64)
    return family.unpack((size * vector).to(params["loc"]), params)


def member(family: OrthogonalFlow, d: int = D, size: float = 0.3, seed: int = 0) -> Tensors:
    """A member in general position, on the manifold."""
    params = family.init(torch.linspace(-1.0, 1.0, d), 0.7)
    return family.retract(params, some_tangent(family, params, size, seed), 1.0)


def noise(n: int, d: int = D, seed: int = 3) -> Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed))
