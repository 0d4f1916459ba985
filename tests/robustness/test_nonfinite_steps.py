"""Gradients that are not finite: the step is skipped, counted and announced, and the run goes on."""

import math
import re
import warnings
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoGuideList
from pyro.optim import Adam  # pyright: ignore[reportAttributeAccessIssue]
from torch import Tensor

from pyro_ngvi import NGVB, AutoFullRankNormal, AutoMeanFieldNormal, BatchedELBO
from pyro_ngvi.optim import Constant
from pyro_ngvi.optim.state import flat
from tests.contract.registry import GUIDES, LOSSES
from tests.registry import BASELINES

guides = pytest.mark.parametrize("kind", GUIDES)
averages = pytest.mark.parametrize("averaging", [False, True])


def model(bad: bool = False) -> None:
    """Its loss is finite; where ``bad``, its gradient in the site ``poor`` is not."""
    good = pyro.sample("good", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    x = pyro.sample("poor", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    # else the start is the mode, which draws of mean zero do not move
    pyro.factor("tilt", (good + x).sum(-1))
    if bad:
        pyro.factor("nan", (x - x.detach()).square().sum(-1).sqrt() * 0.0)


def snapshot(guide: Any) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in guide.natural_params().items()}


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    for name in one:
        assert torch.equal(one[name], other[name]), name


@guides
@pytest.mark.parametrize("loss", LOSSES)
@averages
def test_a_step_in_the_middle(kind: str, loss: str, averaging: bool) -> None:
    guide = GUIDES[kind](model, init=None)
    optim = NGVB(guide, averaging=averaging)
    svi = SVI(model, guide, optim, LOSSES[loss](2))
    for _ in range(3):
        svi.step()
    before, iterate = snapshot(guide), guide.sampling_posterior().mean
    message = r"NGVB skipped a step: the gradient is not finite at 'poor' \(1 skipped so far"
    with pytest.warns(RuntimeWarning, match=message) as caught:
        svi.step(bad=True)
    assert len(caught) == 1
    assert_same(snapshot(guide), before)
    assert torch.equal(guide.sampling_posterior().mean, iterate)
    report = optim.report()
    assert (report.outcome, report.skipped, report.step_norm) == ("skipped", 1, 0.0)
    assert report.skipped_sites == ("poor",)
    svi.step()
    report = optim.report()
    assert report.outcome in ("accepted", "damped") and report.skipped == 1
    after = snapshot(guide)
    assert all(torch.isfinite(p).all() for p in after.values())
    assert not any(torch.equal(after[name], before[name]) for name in after)


@guides
@averages
def test_a_skipped_step_changes_nothing_that_follows(kind: str, averaging: bool) -> None:
    """Parameters and state go on as if the bad step had not been, but for the count."""
    results = []
    for bad_at in (None, 2):
        guide = GUIDES[kind](model, init=None)
        guide()
        optim = NGVB(guide, averaging=averaging)
        svi = SVI(model, guide, optim, Trace_ELBO())
        for k in range(5):
            if k == bad_at:
                with pytest.warns(RuntimeWarning, match="skipped a step"):
                    svi.step(bad=True)
            torch.manual_seed(k)
            svi.step()
        state = flat(optim.get_state()["natural"][""])
        assert int(state.pop("skipped")) == (bad_at is not None)
        del state["bad_entries"]
        results.append((snapshot(guide), state))
    for one, other in zip(*results, strict=True):
        assert_same(one, other)


@guides
def test_at_the_first_step(kind: str) -> None:
    guide = GUIDES[kind](model, init=None)
    guide()
    before = snapshot(guide)
    svi = SVI(model, guide, NGVB(guide), BatchedELBO(2))
    with pytest.warns(RuntimeWarning, match="'poor'"):
        svi.step(bad=True)
    assert_same(snapshot(guide), before)
    svi.step()
    assert not any(torch.equal(p, before[n]) for n, p in guide.natural_params().items())


@guides
def test_a_run_of_skips_shrinks_the_radius_which_recovers(kind: str) -> None:
    guide = GUIDES[kind](model, init=None)
    optim = NGVB(guide, trust_radius=0.01, schedule=Constant(1.0))
    svi = SVI(model, guide, optim, BatchedELBO(2))
    svi.step()
    radii = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        for _ in range(6):
            svi.step(bad=True)
            radii.append(optim.report().radius)
    assert radii == pytest.approx([0.01] * 4 + [0.005, 0.0025])
    for radius in (0.00125, 0.01):
        svi.step()
        reach = optim.get_state()["natural"][""]["reach"]  # which gradients that agree let grow
        radius = pytest.approx(radius * float(reach.square().mean().sqrt()))
        assert optim.report().radius == radius and optim.report().step_norm == radius


def test_the_warning_points_at_the_line_of_the_user() -> None:
    guide = AutoFullRankNormal(model, init=None)
    svi = SVI(model, guide, NGVB(guide), BatchedELBO(2))
    with pytest.warns(RuntimeWarning, match="skipped a step") as caught:
        svi.step(bad=True)
    assert caught[0].filename == __file__


@guides
def test_printed_frames_name_no_site(kind: str) -> None:
    """Their entries are those of the parameters, of which there are more than latent variables."""
    guide = GUIDES[kind](model, init=None)
    svi = SVI(model, guide, BASELINES["IFVB, printed"](guide), BatchedELBO(2))
    with pytest.warns(RuntimeWarning, match="not finite at the whole latent vector"):
        svi.step(bad=True)
    assert svi.optim.report().skipped_sites == ()


def test_warnings_become_rare() -> None:
    guide = AutoFullRankNormal(model, init=None)
    svi = SVI(model, guide, NGVB(guide), BatchedELBO(2))
    with pytest.warns(RuntimeWarning) as caught:
        for _ in range(20):
            svi.step(bad=True)
    found = [re.search(r"\((\d+) skipped", str(warning.message)) for warning in caught]
    assert [int(match[1]) for match in found if match] == [1, 2, 4, 8, 16]


def test_a_part_of_a_list_is_skipped_alone() -> None:
    def two(bad: bool = False) -> None:
        model(bad)

    guide = AutoGuideList(two)
    good = AutoFullRankNormal(poutine.block(two, expose=["good"]), init=None)
    poor = AutoMeanFieldNormal(poutine.block(two, hide=["good"]), init=None)
    guide.append(good)
    guide.append(poor)
    optim = NGVB(guide)
    svi = SVI(two, guide, optim, Trace_ELBO())
    svi.step()
    before = snapshot(good), snapshot(poor)
    with pytest.warns(RuntimeWarning, match="'poor'"):
        svi.step(bad=True)
    assert not torch.equal(good.loc, before[0]["loc"])
    assert_same(snapshot(poor), before[1])
    assert optim.report("0").skipped == 0 and optim.report("1").skipped == 1


@guides
def test_other_parameters_stay_finite(kind: str) -> None:
    """A NaN in Adam's moments would never leave them."""

    def with_bias(bad: bool = False) -> None:
        bias = pyro.param("bias", torch.tensor(0.5))
        x = pyro.sample("x", dist.Normal(torch.zeros(3), 1.0).to_event(1)).sum(-1) + bias
        pyro.sample("y", dist.Normal(x, 1.0), obs=torch.tensor(1.0))
        if bad:
            pyro.factor("nan", (x - x.detach()).square().sqrt() * 0.0)

    guide = GUIDES[kind](with_bias, init=None)
    optim = NGVB(guide, others=Adam({"lr": 0.01}))
    svi = SVI(with_bias, guide, optim, Trace_ELBO())
    svi.step()
    of_bias = pytest.warns(RuntimeWarning, match="gradient of bias is not finite")
    with of_bias as told, pytest.warns(RuntimeWarning, match="skipped a step"):
        svi.step(bad=True)
    assert all(warning.filename == __file__ for warning in told)
    assert torch.isfinite(pyro.param("bias"))
    before = pyro.param("bias").item()
    svi.step()
    assert torch.isfinite(pyro.param("bias")) and pyro.param("bias").item() != before
    assert optim.report().outcome in ("accepted", "damped")


@guides
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_gradient_too_large_for_its_dtype(kind: str, dtype: torch.dtype) -> None:
    """Finite entries near the largest number: squares overflow, the step does not."""
    guide = GUIDES[kind](model, init=None)
    guide().values()
    guide.to(dtype)
    pyro.clear_param_store()
    guide.sampling_posterior()
    optim = NGVB(guide)
    huge = torch.finfo(dtype).max / 64
    for p in guide.natural_params().values():
        p.grad = torch.full_like(p, huge).tril() if p.dim() == 2 else torch.full_like(p, huge)
    optim(set(guide.natural_params().values()))
    assert all(torch.isfinite(p).all() for p in guide.natural_params().values())
    assert optim.report().outcome == "damped"


@guides
@pytest.mark.parametrize("loss", LOSSES)
def test_impossible_data_at_the_start(kind: str, loss: str) -> None:
    """A likelihood of zero: the loss is inf, its gradient that of the rest; nothing breaks."""

    def impossible() -> None:
        x = pyro.sample("x", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        pyro.factor("likelihood", torch.where(x.sum(-1) > 50.0, 0.0, -math.inf))

    guide = GUIDES[kind](impossible, init=None)
    svi = SVI(impossible, guide, NGVB(guide), LOSSES[loss](2))
    for _ in range(3):
        assert svi.step() == math.inf
    assert all(torch.isfinite(p).all() for p in guide.natural_params().values())


@guides
@pytest.mark.filterwarnings("ignore:Encountered NaN")
def test_likelihood_with_a_gradient_of_nan_at_the_start(kind: str) -> None:
    def overflow(y: Tensor) -> None:
        rate = pyro.sample("rate", dist.Normal(torch.full((3,), 800.0), 0.01).to_event(1))
        pyro.sample("y", dist.Poisson(rate.exp()).to_event(1), obs=y)

    guide = GUIDES[kind](overflow, init=None)
    guide(torch.ones(3))
    before = snapshot(guide)
    optim = NGVB(guide)
    svi = SVI(overflow, guide, optim, Trace_ELBO())
    with pyro.validation_enabled(False), pytest.warns(RuntimeWarning, match="'rate'.*init_scale"):
        for _ in range(3):
            svi.step(torch.ones(3))
    assert_same(snapshot(guide), before)
    assert optim.report().skipped == 3
