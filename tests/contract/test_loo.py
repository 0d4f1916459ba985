"""Leave-one-out in pieces is ArviZ's of all at once."""

from __future__ import annotations

import sys
from typing import Any

import arviz as az
import numpy as np
import pyro
import pytest
import torch
from torch import Tensor

from pyro_ngvi.diagnostics import khat, loo, to_arviz
from tests.contract.export_examples import dist


def numbers(found: Any) -> tuple[float, float, float]:
    old = az.__version__.startswith("0.")
    return (found.elpd_loo, found.se, found.p_loo) if old else (found.elpd, found.se, found.p)


def pointwise(found: Any) -> Any:
    return found.loo_i if az.__version__.startswith("0.") else found.elpd_i


def assert_same(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(numbers(found), numbers(expected), rtol=1e-5)
    np.testing.assert_allclose(pointwise(found), pointwise(expected), rtol=1e-5)
    np.testing.assert_allclose(found.pareto_k, expected.pareto_k, atol=1e-4)
    assert pointwise(found).dims == pointwise(expected).dims
    assert found.n_data_points == expected.n_data_points


def crossed(data: Tensor) -> None:
    m = pyro.sample("m", dist.Normal(0.0, 10.0))
    pyro.deterministic("all", m + torch.zeros_like(data))
    with pyro.plate("rows", 3, dim=-2), pyro.plate("columns", 4, dim=-1):
        pyro.sample("t", dist.Normal(m, 1.0), obs=data)


def near(data: Tensor) -> None:  # the posterior's sd is 0.29
    pyro.sample("m", dist.Normal(data.mean() + 0.01, 0.29))


def off(data: Tensor) -> None:
    pyro.sample("m", dist.Normal(data.mean() + 0.1, 0.45))


@pytest.mark.parametrize("pieces", [False, True])
@pytest.mark.parametrize(("guide", "resample"), [(near, None), (off, "psis")])
def test_it_is_arvizs_of_all_at_once(
    guide: Any, resample: str | None, pieces: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    args: Any = (crossed, guide, torch.linspace(-1.5, 1.5, 12).reshape(3, 4))
    how: dict[str, Any] = {"num_samples": 300, "seed": 0}
    assert khat(*args, **how).decision == ("resample" if resample else "intervals")
    drawn = to_arviz(*args, resample=resample, **how)
    if pieces:
        here = sys.modules["pyro_ngvi.diagnostics.loo"]
        monkeypatch.setattr(here, "HELD", 5 * 300)  # data 0 to 4, 5 to 9, 10 to 11
        monkeypatch.setattr(here, "SEEN", 2 * 300)
    found = loo(*args, **how)
    assert pointwise(found).dims == ("rows", "columns")
    assert_same(found, az.loo(drawn, pointwise=True, reff=1.0))


@pytest.mark.parametrize("how", ["poutine.mask", ".mask", ".mask in an event"])
def test_masked_data_are_no_data(how: str) -> None:
    seen: Any = torch.tensor([True] * 9 + [False] * 5)

    def masked(data: Tensor) -> None:
        m = pyro.sample("m", dist.Normal(0.0, 10.0))
        own = seen[: len(data)]
        fn: Any = dist.Normal(m, 1.0)
        if how == ".mask":
            fn = fn.expand([len(data)]).mask(own)
        if how == ".mask in an event":  # of two numbers, the second of which is never seen
            fn = fn.expand([len(data), 2]).mask(torch.stack([own, own & False], -1)).to_event(1)
            data = torch.stack([data, data], -1)
        with pyro.plate("data", len(data)):
            with pyro.poutine.mask(mask=own if how == "poutine.mask" else True):
                pyro.sample("y", fn, obs=data)

    def guide(data: Tensor) -> None:
        pyro.sample("m", dist.Normal(0.0, 0.333))

    data = torch.cat([torch.linspace(-2.0, 2.0, 9), torch.full((5,), 50.0)])
    found, alone = loo(masked, guide, data, seed=0), loo(masked, guide, data[:9], seed=0)
    np.testing.assert_allclose(numbers(found), numbers(alone), rtol=1e-12)
    assert pointwise(found).dims == ("y_seen",) and found.n_data_points == 9


def test_an_unusable_guide_is_told_of() -> None:
    def narrow(data: Tensor) -> None:
        pyro.sample("m", dist.Normal(3.0, 0.05))

    with pytest.warns(RuntimeWarning, match="loo cannot be relied on here. Not usable"):
        loo(crossed, narrow, torch.linspace(-1.5, 1.5, 12).reshape(3, 4), seed=0)


def test_one_of_several_sites() -> None:
    def two(a: Tensor, b: Tensor) -> None:
        m = pyro.sample("m", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(a)):
            pyro.sample("a", dist.Normal(m, 1.0), obs=a)
            pyro.sample("b", dist.Normal(m, 2.0), obs=b)

    def guide(a: Tensor, b: Tensor) -> None:
        pyro.sample("m", dist.Normal(0.18, 0.29))  # the posterior, in two figures

    args = two, guide, torch.linspace(-1.0, 1.0, 9), torch.linspace(0.0, 2.0, 9)
    with pytest.raises(ValueError, match=r"choose one of \['a', 'b'\] by var_name"):
        loo(*args)
    with pytest.raises(ValueError, match="var_name is 'm'; the sites with a likelihood are"):
        loo(*args, var_name="m")
    drawn = to_arviz(*args, seed=0)
    found = loo(*args, var_name="b", seed=0)
    assert_same(found, az.loo(drawn, var_name="b", pointwise=True, reff=1.0))


def test_a_model_without_data_in_a_plate() -> None:
    def factor(data: Tensor) -> None:
        m = pyro.sample("m", dist.Normal(0.0, 1.0))
        pyro.factor("fit", -((data - m) ** 2).sum())

    def guide(data: Tensor) -> None:
        pyro.sample("m", dist.Normal(0.0, 0.3))

    with pytest.raises(ValueError, match="loo needs data in a plate"):
        loo(factor, guide, torch.zeros(4))


def test_the_random_state_is_left_alone() -> None:
    before = torch.get_rng_state()
    loo(crossed, near, torch.linspace(-1.5, 1.5, 12).reshape(3, 4), num_samples=200, seed=1)
    assert torch.equal(before, torch.get_rng_state())
