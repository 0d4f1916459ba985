"""Every optimizer x guide x loss of the registry: a pair of steps, or a refusal in a sentence.

The table says which of them work together; all that it does not name is refused, at the latest by the
first step.
"""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pyro
import pytest
import torch
from pyro.infer import SVI
from torch import Tensor

from pyro_ngvi import IFVB
from pyro_ngvi.curvature import Drawn
from tests.registry import FOREIGN, GUIDES, LOSSES, RULES
from tests.trajectories import COLUMNS, ROWS, model

pytestmark = pytest.mark.usefixtures("plain_start", "few_first_scores")

ALL = GUIDES | FOREIGN
N = 6

PLAIN = ["Trace", "Trace vectorised", "TraceMeanField", "Batched"]
PRICE, HESSIAN, GAUSS_NEWTON = "Batched price", "Batched hessian", "Batched gauss_newton"
SQUARES, KRONECKER, SCORES = "Batched squared_gradient", "Batched kronecker", "Batched scores"

FLOWS = ["affine coupling", "spline coupling", "Pyro's flow", "Zuko's flow", "orthogonal flow"]
#: without a form of the Hessian that their Fisher matrix could take
OTHERS = ["factor", "one factor", "matrix", "exponential", "proper Walsh-Hadamard"]
#: whose weights learn from draws of every component
MIXTURES = ["mixture", "diagonal mixture"]
#: mean field and full rank, as a whole or in parts
DIAGONAL, NEWTON = (
    ["mean field", "Walsh-Hadamard"],
    ["mean field", "full rank", "Walsh-Hadamard"],
)

#: the losses that go with these guides, by optimizer
WORKS: dict[str, list[tuple[list[str], list[str]]]] = {
    "NGVB": [
        (NEWTON, [*PLAIN, PRICE, HESSIAN, GAUSS_NEWTON]),
        (["factor precision"], [*PLAIN, PRICE, GAUSS_NEWTON]),
        ([*OTHERS, "list"], PLAIN),
        (MIXTURES, ["Batched"]),
    ],
    "VON": [(NEWTON, [PRICE, HESSIAN, GAUSS_NEWTON])],
    "VOGN": [(NEWTON, [GAUSS_NEWTON])],
    "IVON": [(DIAGONAL, [*PLAIN, PRICE])],
    "SLANG": [(["factor precision"], [GAUSS_NEWTON])],
    "Vadam": [(DIAGONAL, [SQUARES])],
    "NoisyKFAC": [(["matrix"], [KRONECKER])],
    "SPRING": [
        (["mean field", "full rank", "factor precision", *OTHERS, *FLOWS, *MIXTURES], [SCORES])
    ],
    "IFVB": [
        ([*NEWTON, "factor precision"], [*PLAIN, PRICE]),
        ([*OTHERS, *FLOWS, *FOREIGN], PLAIN),
        (MIXTURES, ["Batched"]),
    ],
    "CVI": [],  # steps AutoSites alone, by SitesELBO: tests of sites
}
WORKS["AIFVB"] = WORKS["IFVB"]

#: each guide with one of these losses, which leave gradients alone, and one guide with all losses
TURNS = {(guide, PLAIN[i % len(PLAIN)]) for i, guide in enumerate(ALL)}
TURNS |= {("mean field", loss) for loss in LOSSES}


def is_met(rule: str, guide: str, loss: str) -> bool:
    """AIFVB is IFVB with an average, and takes its turns.  So does IFVB with those of our guides whose
    gradients by each of the losses NGVB has."""
    known = guide not in (*FLOWS, *FOREIGN) and loss in PLAIN
    return (rule != "AIFVB" and not (rule == "IFVB" and known)) or (guide, loss) in TURNS


def steps(rule: str, guide: str, loss: str) -> None:
    """Two steps, which move all parameters of q to finite values."""
    X = torch.linspace(-1.0, 1.0, N * COLUMNS).view(N, COLUMNS).sin()
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    made = ALL[guide](model)
    svi: Any = SVI(model, made, RULES[rule](made), LOSSES[loss](3))
    moved: dict[str, Tensor] = {}
    for _ in range(2):
        before, moved = moved, {}
        assert math.isfinite(float(svi.step(X, X[:, :ROWS].cos())))
        for name, p in pyro.get_param_store().named_parameters():
            moved[name] = p.detach().clone()
            assert moved[name].isfinite().all(), name
    assert any(not torch.equal(moved[name], value) for name, value in before.items())


@pytest.fixture(scope="module")
def sought() -> set[Any]:
    return set()


@pytest.fixture(autouse=True)
def kinks_are_sought_once(sought: set[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """For each curvature and latent vector: the search looks at the model alone, which is one, and
    takes longer than the two steps."""
    warn = Drawn.warn_of_kinks

    def once(self: Drawn, whole: bool = False) -> None:
        key = self.kind, whole, *self.layout.unconstrained_shapes.items()
        if key not in sought:
            sought.add(key)
            warn(self, whole)

    monkeypatch.setattr(Drawn, "warn_of_kinks", once)


@pytest.mark.filterwarnings(
    "ignore:Failed to verify mean field", "ignore:.*leaves what is not natural"
)
@pytest.mark.parametrize("guide", ALL)
@pytest.mark.parametrize("rule", RULES)
def test_a_pair_works_or_is_refused(rule: str, guide: str) -> None:
    works = {pair for guides, losses in WORKS[rule] for pair in product(guides, losses)}
    for loss in LOSSES:
        if not is_met(rule, guide, loss):
            continue
        if (guide, loss) in works:
            steps(rule, guide, loss)
            continue
        with pytest.raises((ValueError, RuntimeError)) as refused:
            steps(rule, guide, loss)
        assert "pyro" in str(refused.value).lower() or "Auto" in str(refused.value), refused.value


def test_the_table_has_every_optimizer() -> None:
    assert WORKS.keys() == RULES.keys()
    assert RULES["IFVB"] is IFVB
