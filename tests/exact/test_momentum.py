"""The trust region under momentum: the cheap length of a move against the Fisher norm itself."""

import pytest
import torch

from pyro_ngvi.families import FactorNormal, MeanFieldNormal
from pyro_ngvi.optim.rule import NaturalGradientRule
from pyro_ngvi.optim.schedules import Constant


@pytest.mark.parametrize("family", [MeanFieldNormal(), FactorNormal(2)], ids=["mean", "factor"])
@pytest.mark.parametrize("radius", [0.05, 10.0])
def test_reported_length_is_the_fisher_norm_of_the_move(family, radius):
    d = 12
    params = family.init(torch.zeros(d), 1.0)
    rule = NaturalGradientRule(
        family, trust_radius=radius, noise_radius=1e9, schedule=Constant(0.05), momentum=0.9
    )
    state = rule.init(params)
    g = torch.Generator().manual_seed(0)
    for _ in range(15):
        # gradients of the location alone leave the shape, hence the frame, as it is
        grads = {k: torch.zeros_like(v) for k, v in params.items()}
        grads["loc"] = torch.randn(d, generator=g)
        _, state, report = rule.update(params, grads, state)
        move = {k: torch.zeros_like(v) for k, v in params.items()} | {"loc": state["move.loc"]}
        norm = family.fisher_norm(params, move)
        torch.testing.assert_close(report.step_norm, norm, rtol=1e-6, atol=1e-9)
        assert float(norm) <= radius * (1 + 1e-6)
