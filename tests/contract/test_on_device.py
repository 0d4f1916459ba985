"""Fits and steps on a device that the CPU plays: no tensor of theirs is elsewhere."""

from __future__ import annotations

from typing import Any

import pyro
import pytest
import torch
from pyro.infer import SVI

from pyro_ngvi.linalg.host import forbid_waiting
from tests import trajectories
from tests.contract.test_every_pair import ALL
from tests.gpu.test_fits import CASES, fitted, misread
from tests.gpu.test_steps import elsewhere
from tests.pretend import DEVICE, There
from tests.registry import LOSSES, RULES


def test_the_device_is_one_of_its_own(pretended: None) -> None:
    x = torch.arange(6.0, device=DEVICE).reshape(2, 3)
    assert isinstance(x, There) and x.tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    w = torch.nn.Parameter(torch.tensor([1.0, 2.0, 3.0], device=DEVICE))
    (x @ w).square().sum().backward()
    expected = 2.0 * x.cpu().mT @ (x.cpu() @ w.detach().cpu())
    assert w.grad is not None and w.grad.device == DEVICE and w.grad.tolist() == expected.tolist()
    y = x.clone()
    y[:, 1:].mul_(2.0)
    assert y.tolist() == [[0.0, 2.0, 4.0], [3.0, 8.0, 10.0]]
    with pytest.raises(RuntimeError, match="same device"):
        x.add(torch.ones(3))
    with pytest.raises(TypeError, match="can't convert"):
        x.numpy()
    with forbid_waiting():
        torch.func.vmap(torch.func.grad(lambda row: (row * w).sum()))(x[torch.tensor([1, 0])] * 2.0)
        for wait in (
            lambda: float(x.sum()),
            x.cpu,
            lambda: x[x > 1.0],
            lambda: torch.ones(3).to(x),
        ):
            with pytest.raises(RuntimeError, match="synchronizing"):
                wait()


@pytest.mark.filterwarnings("ignore")  # of fits that have hardly begun
@pytest.mark.parametrize("kind", ["chosen", "sites", "process", "hierarchical", "mixture"])
def test_a_fit_stays_on_its_device(kind: str) -> None:
    model, make, how = CASES[kind]
    fit = fitted((model, make, how | {"max_steps": 3}), DEVICE, 0)
    wrong = misread(fit, DEVICE, [x.to(DEVICE) for x in make()])
    assert not wrong, "; ".join(wrong)


PAIRS = [
    ("NGVB", "full rank", "Batched"),
    ("VON", "full rank", "Batched hessian"),
    ("VOGN", "mean field", "Batched gauss_newton"),
    ("IVON", "mean field", "Batched"),
    ("SPRING", "affine coupling", "Batched scores"),
    ("AIFVB", "Walsh-Hadamard", "Batched"),
    ("IFVB", "AutoMultivariateNormal", "Trace"),
    ("NGVB", "exponential", "TraceMeanField"),
]


@pytest.mark.usefixtures("plain_start")
@pytest.mark.filterwarnings("ignore:.*leaves what is not natural")
@pytest.mark.parametrize(("rule", "guide", "loss"), PAIRS)
def test_a_step_stays_on_its_device(rule: str, guide: str, loss: str) -> None:
    pyro.clear_param_store()
    X, y = (x.to(DEVICE) for x in trajectories.data())
    made = ALL[guide](trajectories.model)
    svi: Any = SVI(trajectories.model, made, RULES[rule](made), LOSSES[loss](2))
    losses = [svi.step(X, y) for _ in range(2)]
    assert all(map(torch.isfinite, map(torch.as_tensor, losses)))
    assert not (wrong := elsewhere(svi, DEVICE)), wrong
