"""StopRule on Pyro's own guides, by a member of a family of ours in their place."""

from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import SVI, RenyiELBO, Trace_ELBO, TraceMeanField_ELBO
from pyro.infer.autoguide import (
    AutoDiagonalNormal,
    AutoLowRankMultivariateNormal,
    AutoMultivariateNormal,
    AutoNormal,
)
from pyro.optim import PyroOptim

import pyro_ngvi as ngvi

SD = torch.tensor([0.5, 2.0, 1.0, 0.1, 4.0], dtype=torch.float64)
LOC = torch.tensor([0.3, -1.0, 2.0, 0.0, 1.0], dtype=torch.float64)
SHIFT = torch.tensor([0.05, -0.5, 0.2, 0.04, 1.0], dtype=torch.float64)
FACTOR = torch.tensor([1.0, -0.5, 0.0, 2.0, 1.0], dtype=torch.float64)[:, None]


def independent() -> None:
    """Normal in the unconstrained space, with sds that differ: sites in another order are seen."""
    pyro.sample("a", dist.LogNormal(LOC[0], SD[0]))
    pyro.sample("b", dist.Normal(LOC[1:].reshape(2, 2), SD[1:].reshape(2, 2)).to_event(2))


def correlated() -> None:
    factor = SD[:, None] * FACTOR
    pyro.sample("z", dist.LowRankMultivariateNormal(LOC, factor, SD.square()))


def logistic(X, y) -> None:
    w = pyro.sample("w", dist.Normal(torch.zeros(3, dtype=X.dtype), 1.0).to_event(1))
    with pyro.plate("data", 60, subsample_size=len(X)):
        pyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)


X = torch.randn(60, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = (X.sum(-1) > 0).double()


def adam(rate: float) -> PyroOptim:
    return PyroOptim(torch.optim.Adam, {"lr": rate})


def at_optimum(kind: Any, model: Any) -> Any:
    guide = kind(model, **({"rank": 1} if kind is AutoLowRankMultivariateNormal else {}))
    guide()
    if kind is AutoNormal:
        guide.locs.a, guide.locs.b = LOC[0], LOC[1:].reshape(2, 2)
        guide.scales.a, guide.scales.b = SD[0], SD[1:].reshape(2, 2)
        return guide
    guide.scale = SD.clone()
    if kind is AutoLowRankMultivariateNormal:
        guide.cov_factor.data.copy_(FACTOR)
    if kind is AutoMultivariateNormal and model is correlated:
        scale_tril = torch.linalg.cholesky(FACTOR @ FACTOR.T + torch.eye(5))
        guide.scale = SD * scale_tril.diagonal()
        guide.scale_tril = scale_tril / scale_tril.diagonal()[:, None]
    return guide


@pytest.mark.parametrize("loss", [Trace_ELBO(4), ngvi.BatchedELBO(4)])
@pytest.mark.parametrize(
    ("kind", "model"),
    [
        (AutoNormal, independent),
        (AutoDiagonalNormal, independent),
        (AutoMultivariateNormal, independent),
        (AutoMultivariateNormal, correlated),
        (AutoLowRankMultivariateNormal, correlated),
    ],
)
def test_a_shift_of_the_mean_costs_what_the_closed_form_says(kind, model, loss) -> None:
    """Half its squared length in the posterior's precision; 0 at the optimum."""
    pyro.set_rng_seed(0)
    guide = at_optimum(kind, model)
    covariance = SD.diag().square()
    if model is correlated:
        covariance = SD.diag() @ (FACTOR @ FACTOR.T + torch.eye(5)) @ SD.diag()
    for shift in (torch.zeros_like(LOC), SHIFT):
        if kind is AutoNormal:
            guide.locs.a, guide.locs.b = (LOC + shift)[0], (LOC + shift)[1:].reshape(2, 2)
        else:
            guide.loc.data.copy_(LOC + shift)
        stop: Any = ngvi.StopRule(SVI(model, guide, adam(0.1), loss), tol=10.0)
        ended = [stop(1.0) for _ in range(5)]
        true = float(0.5 * shift @ torch.linalg.solve(covariance, shift))
        # five standard errors, and what is not quadratic
        assert abs(stop.gap.nats - true) <= 5.0 * stop.gap.error + 0.02 * true + 1e-6
        assert stop.gap.error < 0.05 + 0.1 * true
        assert ended[-1] and stop.reason == "converged"


def run(steps: int, rule: bool) -> tuple[list[float], Any, list[str]]:
    pyro.clear_param_store()
    pyro.set_rng_seed(1)
    svi = SVI(logistic, AutoNormal(logistic), adam(0.05), Trace_ELBO())
    stop: Any = ngvi.StopRule(svi, tol=1e-9)
    losses: list[float] = []
    for _ in range(steps):
        loss: Any = svi.step(X, Y)
        losses.append(float(loss))
        if rule:
            stop(losses[-1], X, Y)
    return losses, stop, [*pyro.get_param_store().keys()]


def test_looking_changes_nothing_of_the_run() -> None:
    losses, stop, names = run(60, rule=True)
    plain, _, same = run(60, rule=False)
    assert losses == plain and names == same and len(stop.looks) > 0


def test_adam_converges_with_a_falling_rate_and_in_minibatches() -> None:
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    guide = AutoMultivariateNormal(logistic)
    optim = PyroOptim(torch.optim.Adam, {"lr": 0.05, "betas": (0.9, 0.99)})
    svi = SVI(logistic, guide, optim, ngvi.BatchedELBO(8))
    batches = [(X[:30], Y[:30]), (X[30:], Y[30:])]
    stop: Any = ngvi.StopRule(svi, tol=0.1, batches=batches, max_steps=2000)
    while not stop(svi.step(*batches[stop.steps % 2]), *batches[stop.steps % 2]):
        for state in optim.optim_objs.values():
            state.param_groups[0]["lr"] = 0.05 / (1.0 + stop.steps / 50.0)
    assert stop.reason == "converged"
    best = ngvi.fit(logistic, X, Y, guide="AutoFullRankNormal", seed=0, tol=0.01, progress=False)
    with torch.no_grad():
        q, p = (
            torch.distributions.MultivariateNormal(x.mean, scale_tril=x.scale_tril)
            for x in (guide.get_posterior(), best.guide.get_posterior())
        )
        kl = torch.as_tensor(torch.distributions.kl_divergence(q, p))
        assert kl < 0.2


def test_where_the_loss_or_the_model_does_not_allow_it_it_can_only_settle() -> None:
    def learnt(X, y) -> None:
        scale = pyro.param("prior", torch.tensor(1.0, dtype=X.dtype))
        w = pyro.sample("w", dist.Normal(torch.zeros(3, dtype=X.dtype), scale).to_event(1))
        with pyro.plate("data", 60):
            pyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)

    def branching(X, y) -> None:
        w = pyro.sample("w", dist.Normal(torch.zeros(3, dtype=X.dtype), 1.0).to_event(1))
        with pyro.plate("data", 60):
            pyro.sample("y", dist.Bernoulli(logits=(X if w[0] > 0 else 2.0 * X) @ w), obs=y)

    class Part(AutoNormal):
        pass

    def frozen(X, y) -> None:
        logistic(X, y)

    for model, kind, loss in (
        (logistic, AutoNormal, RenyiELBO(num_particles=2)),
        (logistic, AutoNormal, TraceMeanField_ELBO()),
        (frozen, AutoNormal, Trace_ELBO()),
        (learnt, AutoNormal, Trace_ELBO()),
        (branching, AutoNormal, Trace_ELBO()),
        (poutine.scale(logistic, 1.0), Part, Trace_ELBO()),
    ):
        pyro.clear_param_store()
        svi = SVI(model, kind(model), adam(0.05), loss)
        if model is frozen:
            svi.guide(X, Y)
            svi.guide.scales.requires_grad_(False)
        stop: Any = ngvi.StopRule(svi, tol=1e9)
        for _ in range(6):
            stop(svi.step(X, Y), X, Y)
        assert stop.gap is None
