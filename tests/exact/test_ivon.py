"""IVON's trust region, entry by entry."""

import math
from functools import partial

import pytest
import torch

from pyro_ngvi.families import MeanFieldNormal
from pyro_ngvi.optim.natural_gradient import OUTLIER
from pyro_ngvi.optim.vogn import IVONRule

D = 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("large", [1e6, 1e30])  # the square of the second overflows in float32
def test_ivon_bounds_each_entry_of_a_step(large, dtype):
    """One stiff entry moves by r sds, is soon forgotten, and changes nothing for the others."""
    family, a, beta, r, scale, d = MeanFieldNormal(), 0.1, 0.9, 0.7, 0.2, 400
    rule = IVONRule(family, a, 0.05, momentum=beta, trust_radius=r)
    params = family.init(torch.zeros(d, dtype=dtype), scale)
    state = rule.init(params)
    at_rest = torch.zeros(d, dtype=dtype)
    # all numbers here are of size 1; float32 rounds each step at 6e-8
    close = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-6)
    for k in range(6):
        gradient = torch.ones(d, dtype=dtype)
        gradient[0] = -large if k == 0 else 0.0
        new, state, report = rule.update(params, {"loc": gradient, "log_scale": at_rest}, state)
        move = (new["loc"] - params["loc"]) / scale
        close(move[1:], torch.full_like(move[1:], -a * scale))
        share = beta**k * (1.0 - beta) / (1.0 - beta ** (k + 1))
        expected = torch.tensor(min(r, OUTLIER * r * share), dtype=dtype)
        close(move[0], expected)
        assert bool(report.finite) and bool(report.damped) == (OUTLIER * share > 1.0)
        close(report.step_norm, torch.linalg.vector_norm(move))
        params = new


def test_ivon_refuses_what_is_not_finite():
    """The bound on a gradient must not turn an infinite one into a step."""
    family = MeanFieldNormal()
    rule = IVONRule(family, 0.1, 0.1)
    params = family.init(torch.zeros(D), 0.5)
    for bad in (math.inf, -math.inf, math.nan):
        grads = {"loc": torch.ones(D), "log_scale": torch.zeros(D)}
        grads["loc"][2] = bad
        new, state, report = rule.update(params, grads, rule.init(params))
        assert not bool(report.finite) and state["skipped"] == 1
        assert report.bad_entries.tolist() == [False, False, True, False]
        assert all(torch.equal(new[k], params[k]) for k in params)
