"""No step waits for the device: every rule and family runs on tensors that hold no values.

Reading a value of a ``meta`` tensor (``.item()``, ``if``, ``float``) raises, so what runs there cannot
synchronise a GPU with its host.
"""

import math
from collections.abc import Iterator
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import SVI
from torch import Tensor

from benchmarks.baselines import PaperDense, PaperWindow
from pyro_ngvi import NGVB, BatchedELBO
from pyro_ngvi.families import (
    Family,
)
from pyro_ngvi.fisher import Dense, InverseFisher, LowRank, Window
from pyro_ngvi.fisher.scores import GuideScores, family_scores
from pyro_ngvi.nn import RandomFourierFeatures
from pyro_ngvi.optim import Constant, LogPower, NoiseClock, RobbinsMonro, Tail
from pyro_ngvi.optim.natural_gradient import NaturalGradientRule
from pyro_ngvi.optim.schedules import as_schedule
from pyro_ngvi.optim.state import flat
from pyro_ngvi.sites.design import explore, find_mode
from tests import registry
from tests.contract.registry import GUIDES, D, N, data, regression
from tests.covering import covering
from tests.registry import some

GAUSSIAN = some(registry.FAMILIES, "mean field", "full rank", "factor", "factor precision")
FAMILIES = {name: family for name, (family, _) in GAUSSIAN.items()}
SCHEDULES = {
    "noise": NoiseClock(),
    "Robbins-Monro": RobbinsMonro(),
    "constant": Constant(0.5),
    "function": as_schedule(lambda k: 1.0 / (1.0 + k)),
}
AVERAGING = {"none": None, "tail": Tail(), "log": LogPower()}
CASES = {
    f"{name}, {coordinates}": (family, coordinates)
    for name, family in FAMILIES.items()
    for coordinates in family.coordinates
}


def on_meta(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.to("meta") for name, tensor in tensors.items()}


def same_layout(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    assert one.keys() == other.keys()
    assert all(tensor.device.type == "meta" for tensor in other.values())
    return all(
        one[name].shape == other[name].shape and one[name].dtype == other[name].dtype
        for name in one
    )


@pytest.mark.parametrize(
    ("case", "schedule", "momentum", "averaging"),
    covering(CASES, SCHEDULES, [0.0, 0.9], AVERAGING),
)
def test_update(case: str, schedule: str, momentum: float, averaging: str) -> None:
    """The same shapes and dtypes as on the CPU, for parameters, state and report.

    float32 beside a default of float64 shows what would be promoted.
    """
    family, coordinates = CASES[case]
    rule = NaturalGradientRule(
        family,
        schedule=SCHEDULES[schedule],
        momentum=momentum,
        averaging=AVERAGING[averaging],
        coordinates=coordinates,
    )
    params = family.init(torch.zeros(5, dtype=torch.float32), 0.5)
    grads = {name: torch.randn_like(p) for name, p in params.items()}
    state = rule.init(params)
    meta_params, meta_state = on_meta(params), rule.init(on_meta(params))
    assert same_layout(flat(state), flat(meta_state))
    assert {p.dtype for p in params.values()} == {torch.float32}
    for _ in range(2):
        params, state, report = rule.update(params, grads, state)
        meta_params, meta_state, meta_report = rule.update(meta_params, on_meta(grads), meta_state)
        assert same_layout(params, meta_params)
        assert same_layout(flat(state), flat(meta_state))
        assert same_layout(vars(report), vars(meta_report))


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_functions_of_a_family(family: Family) -> None:
    params = family.init(torch.zeros(5), 0.5)
    meta = on_meta(params)
    noise = torch.randn(4, family.noise_dim(params))
    z = family.rsample(params, noise)
    assert family.rsample(meta, noise.to("meta")).shape == z.shape
    assert family.log_prob(meta, z.to("meta")).shape == (4,)
    assert same_layout(family.score(params, z), family.score(meta, z.to("meta")))
    for value in (family.entropy(meta), family.kl(meta, meta), family.fisher_norm(meta, meta)):
        assert value.shape == () and value.device.type == "meta"
    assert family.covariance(meta).shape == (5, 5)
    assert family.stddev(meta).shape == (5,)


@pytest.mark.parametrize(
    "estimate",
    [
        Dense(),
        Dense(growth=2.0),
        PaperDense(c_beta=0.5),
        PaperWindow(4, c_beta=0.5),
        LowRank(3, 2.0),
        Window(7),
    ],
    ids=repr,
)
def test_inverse_fisher(estimate: InverseFisher) -> None:
    """Counters that say when to merge and where to write stay with the host."""
    scores, g = torch.randn(20, 6, dtype=torch.float32), torch.randn(6, dtype=torch.float32)
    here = estimate.init(torch.ones_like(g), 1.0)
    there = estimate.init(torch.ones_like(g).to("meta"), 1.0)
    for rows in scores.split(3):  # the low-rank estimate merges twice
        here, there = estimate.update(here, rows), estimate.update(there, rows.to("meta"))
        state, meta = flat(here), flat(there)
        host = {name for name, value in meta.items() if value.device.type == "cpu"}
        assert len(host) == {LowRank: 3, Window: 1}.get(type(estimate), 0)
        assert all(torch.equal(state[name], meta[name]) for name in host)
        assert same_layout(
            {name: value for name, value in state.items() if name not in host},
            {name: value for name, value in meta.items() if name not in host},
        )
    product = estimate.product(there, g.to("meta"))
    assert product.device.type == "meta" and product.shape == (6,)
    assert product.dtype == torch.float32


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
@pytest.mark.parametrize("n", [1, 4])
def test_scores_of_a_family(family: Family, n: int) -> None:
    params = family.init(torch.zeros(5), 0.5)
    scores = family_scores(family, on_meta(params), n)
    assert scores.shape == family_scores(family, params, n).shape
    assert scores.device.type == "meta"


@pytest.mark.parametrize("n", [1, 4])
def test_scores_of_a_guide(n: int) -> None:
    start = torch.zeros(3, device="meta")

    def guide() -> None:
        scale = pyro.param("log_scale", start.clone()).exp()
        pyro.sample("z", dist.Normal(pyro.param("loc", start.clone()), scale).to_event(1))

    with pyro.validation_enabled(False):
        scores = GuideScores(guide).draw(n)
    assert scores.shape == (n, 6) and scores.device.type == "meta"


@pytest.mark.parametrize("kind", GUIDES)
@pytest.mark.parametrize("averaging", [False, True])
def test_step_of_svi(kind: str, averaging: bool) -> None:
    """What ``SVI.step`` does up to the number that it returns: loss, gradients, optimizer."""

    def model(X: Tensor, y: Tensor) -> None:
        w = pyro.sample("w", dist.Normal(X.new_zeros(D), X.new_ones(D)).to_event(1))
        with pyro.plate("data", N):
            pyro.sample("y", dist.Normal(X @ w, X.new_ones(())), obs=y)

    guide = GUIDES[kind](model)
    guide(*data())  # the prototype is made where values are
    pyro.clear_param_store()
    guide.to("meta")
    optim, elbo = NGVB(guide, averaging=averaging), BatchedELBO(4)
    args: list[Any] = [x.to("meta") for x in data()]
    for _ in range(2):
        with pyro.validation_enabled(False), poutine.trace(param_only=True) as capture:
            loss = elbo.loss_and_grads(model, guide, *args)
        nodes: Any = capture.trace.nodes
        optim({site["value"].unconstrained() for site in nodes.values()})
    assert loss.device.type == "meta"
    assert all(p.device.type == "meta" for p in guide.natural_params().values())
    assert guide.sampling_posterior().mean.device.type == "meta"


@pytest.mark.parametrize("kind", ["mean field", "full rank"])
def test_a_state_from_the_cpu_goes_to_the_device_of_the_guide(kind: str) -> None:
    """As a checkpoint that goes on a GPU: all of it, the offset of an average too."""
    guide = GUIDES[kind](regression)
    optim, elbo = NGVB(guide, averaging=True), BatchedELBO(4)
    svi = SVI(regression, guide, optim, elbo)
    for _ in range(3):
        svi.step(*data())
    state = optim.get_state()
    assert state["natural"][""]["lag"]
    guide.to("meta")
    optim = NGVB(guide, averaging=True)
    optim.set_state(state)
    args: list[Any] = [x.to("meta") for x in data()]
    with pyro.validation_enabled(False):
        assert guide.sampling_posterior().mean.device.type == "meta"
        elbo.loss_and_grads(regression, guide, *args)
        optim(set(guide.natural_params().values()))
    now = flat(optim.get_state()["natural"])
    assert all(v.device.type == "meta" for v in now.values() if v.is_floating_point())


@pytest.fixture
def meta_by_default() -> Iterator[None]:
    """As a user sets who has a GPU: what is made without a device is there."""
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


@pytest.mark.parametrize("dim", [1, 2, 4])
def test_the_host_integrates_on_the_host(dim: int, meta_by_default: None) -> None:
    """A design over hyperparameters, whose numbers the host looks at."""
    zero = torch.zeros(dim, device="cpu")

    def gradient_at(u: Tensor) -> tuple[float, Tensor]:
        return float(-0.5 * (u - 1.0) @ (u - 1.0)), 1.0 - u

    mode, root, found = find_mode(gradient_at, zero)
    assert found and torch.allclose(mode, zero + 1.0, atol=1e-2)
    design = explore(lambda u: gradient_at(u)[0], mode, root)
    assert float(design.fine[1].logsumexp(0)) == pytest.approx(
        0.5 * dim * math.log(2.0 * math.pi), abs=0.02
    )


def test_random_features_are_where_tensors_are_made(meta_by_default: None) -> None:
    features = RandomFourierFeatures(3, 4, seed=0)
    assert features.omega.device.type == "meta"


def test_a_value_of_a_meta_tensor_can_not_be_read() -> None:
    """What the tests above rely on."""
    x = torch.zeros((), device="meta")
    for read in (bool, float, Tensor.item):
        with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
            read(x)
