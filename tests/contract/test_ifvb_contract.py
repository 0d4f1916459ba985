"""IFVB and AIFVB with guides of every kind, losses, number types, and others' parameters."""

import copy
from functools import partial
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.distributions import constraints
from pyro.distributions.transforms import affine_coupling
from pyro.infer import SVI, Trace_ELBO, autoguide
from pyro.infer.autoguide import (
    AutoDelta,
    AutoDiagonalNormal,
    AutoGuideList,
    AutoIAFNormal,
    AutoLowRankMultivariateNormal,
    AutoMultivariateNormal,
    AutoNormal,
    AutoNormalizingFlow,
)
from pyro.optim import Adam  # pyright: ignore[reportAttributeAccessIssue]

import pyro_ngvi as ngvi
from pyro_ngvi.diagnostics.draws import guide_draws
from pyro_ngvi.fisher import ConjugateGradients, Dense, LowRank, Window
from tests.covering import covering

from .registry import GUIDES, LOSSES, D, data, exact_posterior, regression


def by_hand(model: Any) -> Any:
    """A guide function with constrained parameters; it takes the arguments of the model."""

    @ngvi.optim.remember_arguments
    def guide(X: torch.Tensor, *args: Any) -> None:
        loc = pyro.param("loc", lambda: X.new_zeros(D))
        scale = pyro.param("scale", lambda: X.new_full((D,), 0.1), constraint=constraints.positive)
        pyro.sample("w", dist.Normal(loc, scale).to_event(1))

    return guide


def mixture(model: Any) -> Any:
    @ngvi.optim.remember_arguments
    def guide(X: torch.Tensor, *args: Any) -> None:
        locs = pyro.param("locs", lambda: 0.1 * torch.ones(2, D).cumsum(0).to(X))
        scales = pyro.param(
            "scales", lambda: X.new_full((2, D), 0.1), constraint=constraints.positive
        )
        logits = pyro.param("logits", lambda: X.new_zeros(2))
        pyro.sample("w", dist.MixtureOfDiagNormals(locs, scales, logits))

    return guide


OTHERS: dict[str, Any] = {
    "AutoNormal": AutoNormal,
    "AutoDiagonalNormal": AutoDiagonalNormal,
    "AutoMultivariateNormal": AutoMultivariateNormal,
    "AutoLowRank": lambda m: AutoLowRankMultivariateNormal(m, rank=1),
    "by hand": by_hand,
    "mixture": mixture,
}
CLOSE = {"full rank", "AutoMultivariateNormal"}


@pytest.mark.parametrize("optimizer", [ngvi.IFVB, pytest.param(ngvi.AIFVB, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", [*GUIDES, *OTHERS])
def test_every_guide_learns(kind, optimizer, few_first_scores):
    pyro.set_rng_seed(0)
    X, y = data()
    # a Gaussian start would leave nothing to learn
    guide = GUIDES[kind](regression, init=None) if kind in GUIDES else OTHERS[kind](regression)
    # draws of the mixture cannot be batched and come one by one
    optim = optimizer(guide, num_scores=16 if kind == "mixture" else None)
    svi = SVI(regression, guide, optim, Trace_ELBO(8, vectorize_particles=True))
    guide(X, y)
    start: Any = svi.evaluate_loss(X, y)
    # an average forgets its start late
    for _ in range(120 if optimizer is ngvi.AIFVB else 32 if kind == "mixture" else 50):
        svi.step(X, y)
    if optimizer is ngvi.AIFVB:
        optim.use_average()
    draws = guide_draws(partial(guide, X, y), 500)[0]["w"]
    mean, precision = exact_posterior(X, y)
    sd = torch.linalg.inv(precision).diagonal().sqrt()
    assert svi.evaluate_loss(X, y) < start - 1.0
    # the mean of 500 draws has error .04 sd, an sd .03, the rest is the optimizer's
    assert ((draws.mean(0) - mean).abs() < 0.3 * sd).all()
    if kind in CLOSE:
        assert ((draws.std(0) / sd).log().abs() < 0.2).all()


def amortised(model):
    """A guide function with a network."""
    net = torch.nn.Linear(D, 2 * D)

    def guide(X, y):
        pyro.module("net", net)
        loc, log_scale = net(X.mT @ y / len(y)).chunk(2)
        pyro.sample("w", dist.Normal(loc, log_scale.exp()).to_event(1))

    return ngvi.optim.remember_arguments(guide)


FLOWS: dict[str, Any] = {
    "AutoIAFNormal": lambda m: AutoIAFNormal(m, hidden_dim=[8]),
    "AutoNormalizingFlow": lambda m: AutoNormalizingFlow(m, affine_coupling),
    "amortised": amortised,
}


@pytest.mark.parametrize("optimizer", [ngvi.IFVB, pytest.param(ngvi.AIFVB, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", FLOWS)
def test_networks_of_others(kind, optimizer, few_first_scores):
    """The low-rank estimate would take huge steps; log Z is exact, and q of the right family."""
    pyro.set_rng_seed(0)
    X, y = data()
    guide = FLOWS[kind](regression)
    optim = optimizer(guide)
    svi = SVI(regression, guide, optim, Trace_ELBO(8, vectorize_particles=True))
    for _ in range(120 if optimizer is ngvi.AIFVB else 40):
        svi.step(X, y)
    (rule,) = optim._rules.values()
    # a network that gives the parameters of a normal has exact products
    assert rule.fisher == (ConjugateGradients() if kind == "amortised" else Window(128))
    mean, precision = exact_posterior(X, y)
    q = dist.MultivariateNormal(mean, precision_matrix=precision)
    trace: Any = pyro.poutine.trace(pyro.poutine.condition(regression, data={"w": mean})).get_trace(
        X, y
    )
    log_z = trace.log_prob_sum() - q.log_prob(mean)
    loss = Trace_ELBO(100, vectorize_particles=True).loss(regression, guide, X, y)
    assert -loss > float(log_z) - 1.5


@pytest.mark.parametrize("kind", ["AutoNormal", "AutoMultivariateNormal", "AutoLowRank", "by hand"])
def test_other_guides_of_others_get_conjugate_gradients(kind):
    X, y = data()
    guide = OTHERS[kind](regression)
    optim = ngvi.IFVB(guide)
    SVI(regression, guide, optim, Trace_ELBO(2)).step(X, y)
    (rule,) = optim._rules.values()
    assert rule.fisher == ConjugateGradients()
    assert rule.family.exact and rule.family.locations == rule.family.names[:1]
    assert len(optim._states["others' guides"]["reach"]) == 2
    # an estimate from scores has entries between locations and scales
    other = ngvi.IFVB(guide, fisher=LowRank(32, growth=1.0))
    SVI(regression, guide, other, Trace_ELBO(2)).step(X, y)
    assert len(other._states["others' guides"]["reach"]) == 1


@pytest.mark.parametrize(
    ("kind", "loss", "dtype"),
    covering(
        ["full rank", "factor", "AutoNormal", "by hand"], LOSSES, [torch.float32, torch.float64]
    ),
)
def test_every_loss_and_type(kind, loss, dtype):
    pyro.set_rng_seed(0)
    torch.set_default_dtype(dtype)
    X, y = data(dtype)
    guide = (GUIDES | OTHERS)[kind](regression)
    optim = ngvi.IFVB(guide)
    svi = SVI(regression, guide, optim, LOSSES[loss](2))
    for _ in range(5):
        assert torch.isfinite(torch.as_tensor(svi.step(X, y)))
    assert optim.report().skipped == 0
    for name, value in pyro.get_param_store().items():
        assert value.dtype == dtype and torch.isfinite(value).all(), name


@pytest.mark.parametrize("fisher", [LowRank(32, growth=1.0), Dense()])
def test_list_of_ours_and_theirs(fisher):
    def model():
        a = pyro.sample("a", dist.Normal(1.0, 1.0))
        prior: Any = dist.Normal(a, 0.5 * torch.ones(3))
        pyro.sample("b", prior.to_event(1))
        shift = pyro.param("shift", torch.tensor(0.0))
        pyro.sample("x", dist.Normal(a + shift, 1.0), obs=torch.tensor(2.0))

    pyro.set_rng_seed(0)
    guide = AutoGuideList(model)
    guide.append(ngvi.AutoMeanFieldNormal(poutine.block(model, expose=["a"])))
    guide.append(AutoNormal(poutine.block(model, expose=["b"])))
    optim = ngvi.IFVB(guide, fisher=fisher, others=Adam({"lr": 0.01}))
    svi = SVI(model, guide, optim, Trace_ELBO(2))
    svi.step()
    before = {k: v.detach().clone() for k, v in pyro.get_param_store().items()}
    for _ in range(20):
        svi.step()
    # every parameter moves: ours, theirs, and the model's
    assert all((v != before[k]).any() for k, v in pyro.get_param_store().items())
    assert len(optim.get_state()["natural"]) == 2


def test_parameters_without_scores_need_somebody():
    X, y = data()
    guide = AutoGuideList(regression)
    guide.append(AutoDelta(poutine.block(regression, expose=["w"])))
    svi = SVI(regression, guide, ngvi.IFVB(guide), Trace_ELBO())
    with pytest.raises(ValueError, match="depends on no parameter"):
        svi.step(X, y)


def test_a_second_flow_of_the_same_names_is_refused_and_works_after_a_clear():
    """Pyro's AutoIAFNormal is called that each time, and would train the network of the first."""
    X, y = data()

    def second(kind: Any) -> Any:
        guide = kind(regression, hidden_dim=[4])
        optim = ngvi.IFVB(guide, others=Adam({"lr": 0.01}))
        return guide, SVI(regression, guide, optim, Trace_ELBO())

    class Renamed(AutoIAFNormal):
        pass

    for kind in (AutoIAFNormal, Renamed):
        guide, svi = second(kind)
        svi.step(X, y)
        before = [p.clone() for p in guide.transform.parameters()]
        svi.step(X, y)
        assert all(
            (p != b).any() for p, b in zip(guide.transform.parameters(), before, strict=True)
        )
    guide, svi = second(AutoIAFNormal)
    with pytest.raises(ValueError, match=r"store holds another module's.*clear_param_store\(\)"):
        svi.step(X, y)
    pyro.clear_param_store()
    svi.step(X, y)
    assert len(list(guide.parameters())) == len(list(pyro.get_param_store()))


def test_a_copy_of_a_guide_of_pyros_is_refused():
    """Its parameters go by names in the store, which holds those of the original."""
    X, y = data()
    guide = AutoMultivariateNormal(regression)
    svi = SVI(regression, guide, ngvi.IFVB(guide), Trace_ELBO())
    svi.step(X, y)
    with pytest.raises(ValueError, match="Deep copies of Pyro's guides do not work"):
        copy.deepcopy(svi).step(X, y)
    svi.step(X, y)


def test_function_with_arguments_is_refused_unless_it_remembers_them():
    def guide(X, y): ...

    with pytest.raises(ValueError, match="remember_arguments"):
        ngvi.IFVB(guide)


def test_minibatches_of_local_latents():
    """AutoNormal holds all local latents; a step sees some of them."""

    def model(y):
        scale = pyro.sample("scale", dist.LogNormal(0.0, 0.5))
        with pyro.plate("data", len(y), subsample_size=4) as index:
            z = pyro.sample("z", dist.Normal(0.0, scale))
            pyro.sample("y", dist.Normal(z, 0.5), obs=y[index])

    def plates(y):
        return pyro.plate("data", len(y), subsample_size=4)

    pyro.set_rng_seed(0)
    y = torch.linspace(-2.0, 2.0, 12)
    guide = autoguide.AutoNormal(model, create_plates=plates)
    optim = ngvi.IFVB(guide)
    svi = SVI(model, guide, optim, Trace_ELBO(4, vectorize_particles=True, max_plate_nesting=1))
    for _ in range(100):
        svi.step(y)
    # the posterior means are proportional to y to .01; a local latent is seen in a third of the steps
    assert torch.corrcoef(torch.stack([guide.locs.z.detach(), y]))[0, 1] > 0.99


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"fisher": 16}, "fisher must be an estimate"),
        ({"num_scores": 0}, "num_scores"),
        ({"clip_norm": 0.0}, "clip_norm"),
        ({"lr": 2.0}, "lr must lie"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        ngvi.IFVB(AutoNormal(regression), **arguments)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: LowRank(0), "rank must be"),
        (lambda: Window(0), "size"),
        (lambda: Window(4, damping=0.0), "damping"),
        (lambda: Window(4, damping=float("inf")), "damping"),
    ],
)
def test_bad_arguments_of_an_estimate(make, message):
    with pytest.raises(ValueError, match=message):
        make()
