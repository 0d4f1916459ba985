"""NGVB's guides, settings, losses, particles, minibatches and dtypes: steps are taken.

One registry (``registry.py``) generates the cases.  Settings and losses are crossed with the guides
separately, since neither knows of the other, and any two values of different axes meet once.
"""

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Predictive, Trace_ELBO
from pyro.nn import PyroModule
from pyro.optim import Adam  # pyright: ignore[reportAttributeAccessIssue]
from pyro.poutine.messenger import Messenger
from torch import Tensor
from torch.distributions import constraints

from pyro_ngvi import NGVB, BatchedELBO
from pyro_ngvi.optim import LogPower, RobbinsMonro, Tail
from pyro_ngvi.optim.rule import StepReport
from tests.contract.registry import GUIDES, LOSSES, D, data, regression
from tests.covering import covering

guides = pytest.mark.parametrize("kind", GUIDES)

SCHEDULES: dict[str, Any] = {
    "default": None,
    "noise": "noise",
    "Robbins-Monro": RobbinsMonro(0.3, 10.0, 0.75),
    "constant": "constant",
    "function": lambda k: 0.5 / (1.0 + k),
}
MOMENTUM = [None, 0.5]
AVERAGING: dict[str, Any] = {"default": None, "off": False, "tail": True, "log": 2.0}
DTYPES = [torch.float32, torch.float64]
FACTORS = [kind for kind in GUIDES if kind.startswith("factor")]  # they have no natural coordinates
NATURAL = [kind for kind in GUIDES if kind not in FACTORS]


def assert_steps(guide: Any, optim: NGVB, step: Callable[[], Any], dtype: torch.dtype) -> None:
    """Two steps: finite, of the same dtype, every tensor moved, and a report that can be read."""
    for count in range(2):
        before = {name: p.detach().clone() for name, p in guide.natural_params().items()}
        assert torch.isfinite(torch.tensor(step()))
        for name, p in guide.natural_params().items():
            assert p.dtype == dtype and torch.isfinite(p).all()
            if count:  # the guide makes its parameters in the first step
                assert not torch.equal(p, before[name]), name
        report = optim.report()
        assert report.outcome in ("accepted", "damped")
        # the radius may have grown once, by 1.4
        assert 0 < report.step_norm <= 1.000001 * report.radius <= 1.000002 * 1.4**count
        assert 0 < report.gain <= 1 and report.skipped == 0 and report.skipped_sites == ()
        assert {field.name for field in fields(StepReport)} == set(vars(report))


@pytest.mark.parametrize(
    ("kind", "loss", "particles", "minibatch", "dtype"),
    covering(GUIDES, LOSSES, [1, 8], [None, 2], DTYPES),
)
def test_losses(
    kind: str, loss: str, particles: int, minibatch: int | None, dtype: torch.dtype
) -> None:
    guide = GUIDES[kind](regression, init=None)
    optim = NGVB(guide)
    svi = SVI(regression, guide, optim, LOSSES[loss](particles))
    assert_steps(guide, optim, lambda: svi.step(*data(dtype), minibatch), dtype)


@pytest.mark.parametrize(
    ("coordinates", "kind", "schedule", "momentum", "averaging", "dtype"),
    [
        *covering(["local"], GUIDES, SCHEDULES, MOMENTUM, AVERAGING, DTYPES),
        *covering(["natural"], NATURAL, SCHEDULES, MOMENTUM, AVERAGING, DTYPES),
    ],
)
def test_settings(
    coordinates: str,
    kind: str,
    schedule: str,
    momentum: float | None,
    averaging: str,
    dtype: torch.dtype,
) -> None:
    guide = GUIDES[kind](regression, init=None)
    optim = NGVB(
        guide,
        schedule=SCHEDULES[schedule],
        momentum=momentum,
        averaging=AVERAGING[averaging],
        coordinates=coordinates,
    )
    svi = SVI(regression, guide, optim, BatchedELBO(2))
    assert_steps(guide, optim, lambda: svi.step(*data(dtype)), dtype)


@pytest.mark.parametrize("kind", FACTORS)
def test_natural_coordinates_that_a_family_does_not_have(kind: str) -> None:
    with pytest.raises(ValueError, match=r"'natural' is not available for Factor\w*Normal"):
        NGVB(GUIDES[kind](regression, init=None), coordinates="natural")


class Network(PyroModule):
    """A likelihood with a network and a ``pyro.param`` inside; the prior is on the last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = torch.nn.Linear(D, D)

    def forward(self, X: Tensor, y: Tensor) -> None:
        noise = pyro.param("noise", torch.tensor(0.7), constraint=constraints.positive)
        w = pyro.sample("w", dist.Normal(torch.zeros(D), 1.0).to_event(1))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal((self.hidden(X) * w).sum(-1), noise), obs=y)


@guides
@pytest.mark.parametrize("loss", LOSSES)
def test_other_parameters_in_the_same_backward(kind: str, loss: str) -> None:
    """Adam's first step has the length of its learning rate in every entry."""
    model = Network()
    guide = GUIDES[kind](model, init=None)
    optim = NGVB(guide, others=Adam({"lr": 1e-3}))
    svi = SVI(model, guide, optim, LOSSES[loss](2))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    svi.step(*data())
    for name, p in model.named_parameters():
        moved = (p.detach() - before[name]).abs()
        torch.testing.assert_close(moved, torch.full_like(moved, 1e-3), rtol=1e-3, atol=0)
    log_noise = pyro.get_param_store()["noise"].log()
    assert abs(log_noise.item() - torch.tensor(0.7).log().item()) == pytest.approx(1e-3, rel=1e-3)
    assert optim.report().step_norm > 0


@guides
def test_other_parameters_without_an_optimizer(kind: str) -> None:
    model = Network()
    guide = GUIDES[kind](model, init=None)
    svi = SVI(model, guide, NGVB(guide, others=None), Trace_ELBO())
    with pytest.raises(ValueError, match=r"others: hidden.*, noise.*others=pyro.optim.Adam"):
        svi.step(*data())


@guides
@pytest.mark.parametrize("averaging", [True, 2.0])
def test_average_is_the_answer_and_the_iterate_takes_the_gradients(
    kind: str, averaging: float | bool
) -> None:
    guide = GUIDES[kind](regression, init=None)
    optim = NGVB(guide, schedule=RobbinsMonro(0.2), averaging=averaging)
    svi = SVI(regression, guide, optim, BatchedELBO(2))
    rule: Any = Tail() if averaging is True else LogPower(2.0)
    guide(*data())
    average = {name: p.detach().clone() for name, p in guide.natural_params().items()}
    total = torch.zeros(())
    for k in range(1, 6):
        svi.step(*data())
        iterate = guide.sampling_posterior().params
        rate, total = rule.rate(torch.tensor(float(k)), total)
        average = {n: a + rate * (iterate[n] - a).detach() for n, a in average.items()}
    for name, p in guide.natural_params().items():
        torch.testing.assert_close(p.detach(), average[name])
        assert not torch.equal(p, iterate[name])
    answer = guide.get_posterior()
    assert torch.equal(guide.median()["w"], answer.mean)
    assert all(torch.equal(p, answer.params[n]) for n, p in guide.natural_params().items())
    with torch.no_grad():
        assert torch.equal(guide.sampling_posterior().mean, answer.mean)


@guides
def test_losses_and_predictions_see_the_average_and_steps_the_iterate(kind: str) -> None:
    """The mean that a trace was drawn from, read off its latent site."""
    guide = GUIDES[kind](regression, init=None)
    svi = SVI(regression, guide, NGVB(guide, averaging=True), Trace_ELBO())
    for _ in range(5):
        svi.step(*data())
    average = guide.get_posterior().mean.detach().clone()
    iterate = guide.sampling_posterior().mean.detach()
    assert not torch.equal(average, iterate)
    means: list[Tensor] = []

    class Spy(Messenger):
        def _pyro_post_sample(self, msg: Any) -> None:
            if msg["name"].endswith("_latent"):
                means.append(msg["fn"].mean.detach().clone())

    with Spy():
        svi.evaluate_loss(*data())
        Predictive(regression, guide=guide, num_samples=1)(*data())
        svi.step(*data())
    assert all(torch.equal(mean, average) for mean in means[:-1]) and len(means) >= 3
    assert torch.equal(means[-1], iterate)
