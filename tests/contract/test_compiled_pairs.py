"""Every guide x rule x curvature that trains: by graphs, with the results of eager steps."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

import pyro_ngvi as ngvi
from tests import registry
from tests.contract.test_compiled import compiled, data, everything, make, matrices, same

#: on guides that are neither Pyro's nor flows they decide on the host when to merge scores
ON_THE_HOST = ("IFVB", "AIFVB")
#: guides of Pyro, and one written by hand
PYROS = ("AutoNormal", "AutoMultivariateNormal", "covariance")
#: its transform of torch holds tensors of its own
OF_ITS_OWN = ("proper Walsh-Hadamard",)
CURVATURES = {
    "VON": ("hessian", "gauss_newton", "price"),
    "VOGN": ("gauss_newton",),
    "IVON": ("price",),
    "SLANG": ("gauss_newton",),
    "Vadam": ("squared_gradient",),
    "NoisyKFAC": ("kronecker",),
    "SPRING": ("scores",),
}
GUIDES = registry.GUIDES | registry.FOREIGN


@pytest.mark.slow
@pytest.mark.parametrize("rule", [name for name in registry.RULES if name != "CVI"])
@pytest.mark.parametrize("guide", GUIDES)
@pytest.mark.filterwarnings("ignore:pyro_ngvi.compile", "ignore:.*leaves what is not natural")
def test_pairs(guide: str, rule: str) -> None:
    X, y = data()
    for curvature in CURVATURES.get(rule, (None,)):
        results: list[tuple[list[Any], list[Tensor]]] = []
        tier = ""
        for build in (make, compiled):
            try:
                loss = ngvi.BatchedELBO(2, curvature=curvature)
                svi = build(matrices, GUIDES[guide], registry.RULES[rule], loss)
                losses = [svi.step(X, y) for _ in range(7)]
            except ValueError:
                assert build is make  # which refuses the pair
                break
            results.append((losses, everything(svi)))
            tier = getattr(svi, "tier", "")
        if results:
            assert results[0][0] == results[1][0]
            assert same(results[0][1], results[1][1])
            free = "flow" in guide or "coupling" in guide or guide in PYROS
            eager = (rule in ON_THE_HOST and not free) or guide in OF_ITS_OWN
            assert tier == ("eager" if eager else "replay")
