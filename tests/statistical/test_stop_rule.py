"""StopRule and the nats still to gain that it estimates."""

import math
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoNormal
from pyro.optim import PyroOptim

import pyro_ngvi as ngvi
from pyro_ngvi.fitting.falls import PairedFall, has_stalled, still_to_fall
from pyro_ngvi.fitting.gap import Gap, GapMeter

PRECISION = torch.tensor([[4.0, 1.5, 0.0], [1.5, 2.0, -0.6], [0.0, -0.6, 1.0]], dtype=torch.float64)
MEAN = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)
X = torch.randn(60, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = (X @ torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64) > 0).double()


def gaussian() -> None:
    pyro.sample("z", dist.MultivariateNormal(MEAN, precision_matrix=PRECISION))


def logistic(X, y) -> None:
    w = pyro.sample("w", dist.Normal(torch.zeros(3, dtype=X.dtype), 1.0).to_event(1))
    with pyro.plate("data", 60, subsample_size=len(X)):
        pyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)


@pytest.mark.parametrize("shift", [0.0, 0.3])
@pytest.mark.parametrize("make", [ngvi.AutoMeanFieldNormal, ngvi.AutoFullRankNormal])
def test_gap_of_a_shifted_mean_is_that_of_the_closed_form(make, shift):
    """A shift s of the mean of the best q costs s' P s / 2 nats, in the metric of the posterior's P."""
    pyro.set_rng_seed(0)
    guide: Any = make(gaussian, init=None)
    guide()
    delta = shift * torch.tensor([1.0, -1.5, 0.7], dtype=torch.float64)
    best = guide.family.matched(MEAN, PRECISION)
    for name, p in guide.natural_params().items():
        p.data.copy_(best[name])
    guide.loc.data.add_(delta)
    loss: Any = ngvi.BatchedELBO(32)

    def gradient(s):
        with torch.random.fork_rng():
            torch.manual_seed(s)
            loss.loss_and_grads(gaussian, guide)

    before = {k: v.clone() for k, v in guide.state_dict().items()}
    gap = GapMeter([guide], gradient, fewest=16)(tol=10.0, most=200)
    true = 0.5 * float(delta @ PRECISION @ delta)
    # the noise of the scales is unrelated to the shift; five standard errors
    assert abs(gap.nats - true) <= 5.0 * gap.error + 0.01 * true + 1e-9
    assert gap.error < 0.05 + 0.1 * true and gap.curved
    assert all(torch.equal(v, before[k]) for k, v in guide.state_dict().items())
    assert all(p.grad is None for p in guide.parameters())


def to_the_end(svi: SVI, *args: Any, **how: Any) -> Any:
    """The rule, after a loop that it has ended."""
    stop: Any = ngvi.StopRule(svi, **how)
    while not stop(svi.step(*args), *args):
        pass
    return stop


def run(seed: int, rule: bool = False, steps: int = 200, **how: Any) -> tuple[list[Any], Any]:
    pyro.clear_param_store()
    pyro.set_rng_seed(seed)
    guide = ngvi.AutoMeanFieldNormal(logistic)
    svi = SVI(logistic, guide, ngvi.NGVB(guide), ngvi.BatchedELBO(4))
    stop: Any = ngvi.StopRule(svi, **how) if rule else None
    losses = []
    for _ in range(steps):
        losses.append(svi.step(X, Y))
        if stop is not None and stop(losses[-1], X, Y):
            break
    return losses, stop


def test_looking_changes_nothing_of_the_run():
    losses, stop = run(1, rule=True, tol=1e-6, steps=40)
    assert losses == run(1, steps=40)[0] and len(stop.looks) > 0 and stop.reason is None


def test_converged_means_that_hardly_anything_is_left():
    for seed in range(3):
        _, stop = run(seed, rule=True)
        assert stop.reason == "converged" and stop.steps < 200
        assert stop.gap.nats + stop.gap.error <= 0.05 and stop.gap.error <= 0.025


def test_a_guide_without_known_fisher_settles_by_its_losses():
    pyro.clear_param_store()
    pyro.set_rng_seed(0)

    def guide(X, y) -> None:
        loc = pyro.param("loc", torch.zeros(3, dtype=X.dtype))
        pyro.sample("w", dist.Normal(loc, 0.3).to_event(1))

    svi = SVI(logistic, guide, PyroOptim(torch.optim.Adam, {"lr": 0.05}), Trace_ELBO())
    stop: Any = ngvi.StopRule(svi, tol=1.0)
    while not stop(svi.step(X, Y), X, Y):
        assert stop.steps < 3000
    assert stop.reason == "settled" and stop.gap is None and stop.steps > 20


def test_sites_whose_losses_are_the_same_have_settled():
    """Losses without noise are flat early: a run that has arrived is not a stalled one."""
    guide = ngvi.AutoSites(logistic)
    svi = SVI(logistic, guide, ngvi.CVI(guide), ngvi.SitesELBO())
    stop = ngvi.StopRule(svi)
    for loss in (4000.0, 202.5, 202.25, 202.125):
        assert not stop(loss, X, Y)
    while not stop(202.0, X, Y):
        assert stop.steps < 10
    assert stop.reason == "settled"


def test_what_falls_by_a_factor_has_left_what_the_series_says():
    """1 + q + q^2 + ... of them; the larger factor where they slow down."""
    for q in (0.1, 0.9, -0.5):
        losses: list[Any] = [3.0 + q**k for k in range(7)]
        left = max(still_to_fall(losses), 0.0)
        # with a sign that changes the next loss is on the other side
        assert left >= abs(losses[-1] - 3.0) - 1e-12
        assert q < 0.0 or left == pytest.approx(losses[-1] - 3.0)
    assert still_to_fall([9.0, 1.0, 0.9, 0.8]) == math.inf
    assert still_to_fall([9.0, 1.0, 0.9, 0.85]) == pytest.approx(0.05)
    assert still_to_fall([9.0, 1.0, 1.0, 1.0]) == 0.0
    # a fall of 0.01 between falls of 0.3 and 0.2 promises nothing
    assert still_to_fall([9.0, 1.0, 0.5, 0.2, 0.19]) > 0.4
    assert still_to_fall([1.0, 0.5, 0.2, 0.19, 0.01]) == math.inf


def test_a_fall_by_common_noise_is_that_of_the_closed_form():
    """From a mean that is a shift s off to the best q: s' P s / 2 nats, with what is left of the noise;
    at the same q nothing at all."""
    pyro.set_rng_seed(0)
    guide: Any = ngvi.AutoFullRankNormal(gaussian, init=None)
    guide()
    svi = SVI(gaussian, guide, ngvi.NGVB(guide), ngvi.BatchedELBO(2))
    svi.step()
    for name, p in guide.natural_params().items():
        p.data.copy_(guide.family.matched(MEAN, PRECISION)[name])
    best = {k: v.clone() for k, v in guide.state_dict().items()}
    shift = torch.tensor([0.3, -0.4, 0.2])
    guide.loc.data.add_(shift)
    paired, how = PairedFall(), (svi, ngvi.BatchedELBO(2), (), {})
    assert paired(*how, 20, 0.05) is None and paired(*how, 21, 0.05) is None
    assert len(paired.looks) == 1
    guide.load_state_dict(best)
    fall, error = paired(*how, 40, 0.05) or (0.0, 0.0)
    true = 0.5 * float(shift @ PRECISION @ shift)
    # 512 draws of (z - m)' P s, of sd |P^(1/2) s|
    assert abs(fall - true) < 5.0 * (2.0 * true / 512) ** 0.5 and 0.0 < error < 0.05
    assert paired(*how, 80, 0.05) == (0.0, 0.0) and len(paired.looks[-1][1]) == 8
    guide.loc.data.add_(0.01 * shift)  # which the noise of so many draws may hide
    paired(*how, 160, 1e-4)
    assert paired(*how, 320, 1e-4) == (0.0, 0.0) and len(paired.looks[-1][1]) == 32
    adam: Any = PyroOptim(torch.optim.Adam, {"lr": 0.1})
    assert PairedFall()(SVI(gaussian, guide, adam, how[1]), *how[1:], 40, 0.05) is None


def test_noise_of_losses_does_not_keep_a_run_from_settling():
    """By their own noise, of 1 / 3 nat, losses would need 1,000 steps to be told from falling ones."""

    def funnel() -> None:
        s = pyro.sample("s", dist.HalfNormal(2.0))
        with pyro.plate("data", 12):
            u = pyro.sample("u", dist.Normal(0.0, s))
            pyro.sample("y", dist.StudentT(3.0, u, 1.0), obs=torch.linspace(-3.0, 3.0, 12))

    pyro.set_rng_seed(0)
    guide: Any = ngvi.AutoHierarchical(funnel)
    svi = SVI(funnel, guide, ngvi.NGVB(guide), ngvi.BatchedELBO(8))
    stop = to_the_end(svi)
    losses = torch.tensor(stop.losses[-len(stop.losses) // 2 :])
    assert stop.reason == "settled" and 10 <= stop.steps < 100
    # what the rule wants of their means is out of reach
    assert float(losses.std()) * (8.0 / stop.steps) ** 0.5 > 0.025
    wide = ngvi.BatchedELBO(2000)
    at_end = wide.loss(funnel, guide)
    for _ in range(75):
        svi.step()
    assert at_end - wide.loss(funnel, guide) < 0.1  # tol, and the noise of both


def test_sweeps_settle_once_nothing_is_left():
    """Not after the 40 losses that noise would want; nor before they are there."""
    for tol in (0.05, 1e-6):
        guide = ngvi.AutoSites(logistic)
        svi = SVI(logistic, guide, ngvi.CVI(guide), ngvi.SitesELBO())
        stop = to_the_end(svi, X, Y, tol=tol)
        losses: list[Any] = [svi.step(X, Y) for _ in range(20)]
        assert stop.reason == "settled" and 5 <= stop.steps < 15
        assert float(losses[0] - losses[-1]) <= tol


def test_steps_with_other_arguments_than_minibatches_are_refused():
    """Those that the loader does not give, the size of all data say, would be those of the default."""

    def sized(X, y, size=None) -> None:
        w = pyro.sample("w", dist.Normal(torch.zeros(3, dtype=X.dtype), 1.0).to_event(1))
        with pyro.plate("data", size or len(X), subsample_size=len(X)):
            pyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)

    guide: Any = ngvi.AutoFullRankNormal(sized)
    svi = SVI(sized, guide, ngvi.NGVB(guide), ngvi.BatchedELBO(4))
    svi.step(X[:20], Y[:20], 60)
    loader = [(X[:20], Y[:20]), (X[20:40], Y[20:40]), (X[40:], Y[40:])]
    with pytest.raises(ValueError, match="3 arguments and a minibatch of batches= has 2"):
        ngvi.StopRule(svi, batches=loader).polish(X[:20], Y[:20], 60)
    ngvi.StopRule(svi, batches=loader).polish(X[:20], Y[:20], size=60)  # that goes with all of them


@pytest.mark.parametrize("kind", ["list", "loader", "loader with a generator"])
def test_gap_from_minibatches_is_without_bias(kind):
    """Nothing is left to gain at the posterior; four standard errors of eight looks.  Halves of one
    epoch are correlated: five standard errors below zero for a loader, and far more for other data."""

    def model(X, y) -> None:
        w = pyro.sample("w", dist.Normal(torch.zeros(3, dtype=X.dtype), 1.0).to_event(1))
        with pyro.plate("data", 60, subsample_size=len(X)):
            pyro.sample("y", dist.Normal(X @ w, 1.0), obs=y)

    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    guide: Any = ngvi.AutoFullRankNormal(model, init=None)
    svi: Any = SVI(model, guide, ngvi.NGVB(guide), ngvi.BatchedELBO(4))
    svi.step(X, Y)
    covariance = torch.linalg.inv(torch.eye(3, dtype=X.dtype) + X.T @ X)
    guide.loc.data.copy_(covariance @ X.T @ Y)
    guide.scale_tril.data.copy_(torch.linalg.cholesky(covariance))
    data = torch.utils.data.TensorDataset(X, Y)
    own = torch.Generator().manual_seed(0) if kind.endswith("generator") else None
    loader: Any = torch.utils.data.DataLoader(data, batch_size=6, shuffle=True, generator=own)
    batches = [(X[i::10], Y[i::10]) for i in range(10)] if kind == "list" else loader
    gaps = []
    for k in range(8):
        stop = ngvi.StopRule(svi, batches=batches)
        stop.losses = [0.0] * k  # looks after other numbers of steps have other noise
        meter: Any = stop._meter((X[:6], Y[:6]), {})
        gaps.append(meter(tol=1e3, most=600).nats)
    found = torch.tensor(gaps)
    assert abs(found.mean()) <= 4 * found.std() / len(found) ** 0.5
    assert found.std() < 1.5


def test_minibatches_come_from_the_loader_and_are_gone_through_again():
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    guide = ngvi.AutoFullRankNormal(logistic)
    data = torch.utils.data.TensorDataset(X, Y)
    loader = torch.utils.data.DataLoader(data, batch_size=20, shuffle=True)
    svi = SVI(logistic, guide, ngvi.NGVB(guide), ngvi.BatchedELBO(8))
    stop: Any = ngvi.StopRule(svi, tol=0.5, batches=loader, max_steps=600)
    while stop.reason is None:
        for batch in loader:
            if stop(svi.step(*batch), *batch):
                break
    assert stop.reason == "converged"
    none: Any = ngvi.StopRule(svi, batches=[])
    with pytest.raises(ValueError, match="minibatches is empty"):
        for _ in range(6):
            none(1.0)


def test_other_reasons():
    _, stop = run(0, rule=True, tol=1e-9, max_steps=7)
    assert stop.reason == "max_steps" and stop.steps == 7
    _, stop = run(0, rule=True, tol=1e-9, max_time=1e-6)
    assert stop.reason == "max_time"
    stop = ngvi.StopRule(stop.svi)
    assert [stop(math.nan, X, Y) for _ in range(20)] == [False] * 19 + [True]
    assert stop.reason == "diverged"


@pytest.mark.parametrize(
    "how", [{"tol": -1.0}, {"tol": math.nan}, {"max_steps": 0}, {"max_time": -1.0}]
)
def test_arguments_out_of_range_are_refused(how):
    _, stop = run(0, rule=True, steps=1)
    with pytest.raises(ValueError, match=next(iter(how))):
        ngvi.StopRule(stop.svi, **how)
    with pytest.raises(ValueError, match=r"pyro\.infer\.SVI"):
        ngvi.StopRule(stop)


def matrix_logistic(X, y) -> None:
    zeros = torch.zeros(2, 2, dtype=X.dtype)
    w = pyro.sample("w", dist.Normal(zeros, 1.0).to_event(2)).reshape(-1)[:3]
    with pyro.plate("data", len(X)):
        pyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)


@pytest.mark.parametrize(
    "make",
    [
        lambda model: ngvi.AutoFactorNormal(model, rank=1),
        lambda model: ngvi.AutoFactorPrecision(model, rank=1),
        ngvi.AutoExponentialFamily,
        ngvi.AutoMatrixNormal,
    ],
)
def test_other_families_with_a_known_fisher_matrix_converge(make):
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    guide = make(matrix_logistic)
    svi = SVI(matrix_logistic, guide, ngvi.NGVB(guide), ngvi.BatchedELBO(8))
    stop = to_the_end(svi, X, Y, max_steps=600)
    assert stop.reason == "converged" and stop.gap.curved


@pytest.mark.parametrize("rule, curvature", [("VOGN", "gauss_newton"), ("IVON", "price")])
def test_other_rules_and_curvatures(rule, curvature):
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    guide = ngvi.AutoMeanFieldNormal(matrix_logistic)
    optim = getattr(ngvi.optim, rule)(guide)
    svi = SVI(matrix_logistic, guide, optim, ngvi.BatchedELBO(8, curvature=curvature))
    stop = to_the_end(svi, X, Y, max_steps=600)
    assert stop.reason == "converged"


def away_from_correlated(r: float) -> tuple[torch.Tensor, SVI]:
    """Five Gaussian variables of correlation r around 0, and a mean field with its mean at 1."""
    correlation = torch.full((5, 5), r, dtype=torch.float64).fill_diagonal_(1.0)
    precision = torch.linalg.inv(correlation)

    def correlated() -> None:
        pyro.sample(
            "z", dist.MultivariateNormal(correlation.new_zeros(5), precision_matrix=precision)
        )

    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    guide: Any = ngvi.AutoMeanFieldNormal(correlated, init=None)
    guide()
    for name, x in guide.family.matched(correlation.new_ones(5), precision).items():
        guide.natural_params()[name].data.copy_(x)
    return precision, SVI(correlated, guide, ngvi.NGVB(guide), ngvi.BatchedELBO(8))


def test_newton_steps_go_where_natural_gradients_creep():
    """Along the longest axis of a correlated Gaussian H is a five-hundredth of F of the mean field."""
    precision, svi = away_from_correlated(0.998)
    guide: Any = svi.guide
    stop: Any = ngvi.StopRule(svi)
    stop.losses = [1.0] * 500  # so many gradients may be taken
    before = 0.5 * float(precision.sum())  # of the mean (1, ..., 1)
    assert before > 0.4 and stop.polish() and stop.reason == "converged"
    loc, variance = guide.loc.detach(), (2.0 * guide.log_scale.detach()).exp()
    left = 0.5 * float(loc @ precision @ loc + (variance * precision.diagonal()).sum() - 5.0)
    left -= 0.5 * float((variance * precision.diagonal()).log().sum())
    assert abs(left) < 1e-9  # white noise: the step is exact for a normal posterior
    _, svi = away_from_correlated(0.998)
    stop = ngvi.StopRule(svi, max_time=1e-6, tol=1e-12)
    stop.losses = [1.0] * 500
    assert not stop.polish() and len(stop.looks) == 1  # and no more once the time is up
    other = AutoNormal(svi.model)
    stop = ngvi.StopRule(
        SVI(svi.model, other, PyroOptim(torch.optim.Adam, {"lr": 0.01}), Trace_ELBO())
    )
    other()
    held = {name: p.clone() for name, p in other.named_parameters()}
    assert not stop.polish() and all(torch.equal(p, held[n]) for n, p in other.named_parameters())


def test_factors_that_may_turn_freely_converge():
    """At full rank B B' + diag(c^2) is the same along whole curves: the Fisher matrix is singular."""
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    guide = ngvi.AutoFactorNormal(logistic, rank=2)
    svi = SVI(logistic, guide, ngvi.NGVB(guide), ngvi.BatchedELBO(8))
    assert to_the_end(svi, X, Y, max_steps=500).reason == "converged"


def test_losses_of_much_noise_that_fall_no_more_stall_and_those_that_fall_do_not():
    adam = PyroOptim(torch.optim.Adam, {"lr": 0.05})
    stop: Any = ngvi.StopRule(SVI(logistic, lambda X, y: None, adam, Trace_ELBO()))
    noise = torch.randn(9000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    noise = 1e3 * noise
    ended = next(k for k, x in enumerate(noise.tolist()) if stop(3e5 + x, X, Y))
    assert ended >= 2000 and stop.reason == "stalled"
    stop = ngvi.StopRule(SVI(logistic, lambda X, y: None, adam, Trace_ELBO()))
    falling = [stop(3e5 + x - 3.0 * k, X, Y) for k, x in enumerate(noise.tolist())]
    assert not any(falling)


class Blind:
    """A meter for which every direction is curved downwards."""

    count, sees_all = 64, True

    def __call__(self, *_: Any, **__: Any) -> Gap:
        return Gap(0.2, 0.5, 64, curved=False)


def test_where_noise_hides_the_gap_losses_end_a_run_of_natural_gradients():
    """As of heavy tails: Hessian products of either sign, for thousands of steps."""
    guide = ngvi.AutoFullRankNormal(logistic)
    stop: Any = ngvi.StopRule(SVI(logistic, guide, ngvi.NGVB(guide), ngvi.BatchedELBO(8)))
    stop._meter = lambda *_: Blind()
    noise = torch.randn(9000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ended = next(k for k, x in enumerate(noise.tolist()) if stop(200.0 + x, X, Y))
    assert ended >= 2000 and stop.reason == "stalled"


def groups(y) -> None:
    mu = pyro.sample("mu", dist.Normal(torch.zeros((), dtype=y.dtype), 1.0))
    with pyro.plate("groups", len(y)):
        u = pyro.sample("u", dist.Normal(mu, 1.0))
        pyro.sample("y", dist.Normal(u, 1.0), obs=y)


def learnt_scale(X, y) -> None:
    scale = pyro.param("scale", torch.ones((), dtype=X.dtype))
    w = pyro.sample("w", dist.Normal(torch.zeros(3, dtype=X.dtype), scale.exp()).to_event(1))
    with pyro.plate("data", len(X)):
        pyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)


def test_where_not_all_that_is_trained_is_natural_it_can_only_settle():
    """Sites of units, and parameters of the model, have steps of their own: no gap is claimed."""
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    hierarchy = ngvi.AutoHierarchical(groups)
    svi = SVI(groups, hierarchy, ngvi.NGVB(hierarchy), ngvi.BatchedELBO(16))
    stop = to_the_end(svi, Y, max_steps=60)
    assert stop.reason in ("settled", "max_steps") and stop.gap is None
    guide = ngvi.AutoFullRankNormal(learnt_scale)
    optim = ngvi.NGVB(guide, others=PyroOptim(torch.optim.Adam, {"lr": 0.01}))
    svi = SVI(learnt_scale, guide, optim, ngvi.BatchedELBO(8))
    stop = to_the_end(svi, X, Y, max_steps=30)
    assert stop.reason in ("settled", "max_steps") and stop.gap is None


def test_a_gap_below_tol_is_taken_twice_where_its_solution_overfits(monkeypatch):
    guide: Any = ngvi.AutoMeanFieldNormal(gaussian)
    guide()
    loss, seen = ngvi.BatchedELBO(8), list[int]()
    meter = GapMeter([guide], lambda _: loss.loss_and_grads(gaussian, guide), pieces=1)

    def solved(energy):
        def solve(a, others, tol):
            seen.append(len(others))
            size = sum(float(v.square().sum()) for v in a[0].values())
            return Gap(0.01, 0.001, 3), [{k: energy / size * v for k, v in a[0].items()}]

        return solve

    monkeypatch.setattr(meter, "_solve", solved(0.04))  # x'a / 2 is 0.02, the gap 0.01
    assert meter(0.05, 80).is_below(0.05) and seen == [8]
    monkeypatch.setattr(meter, "_solve", solved(0.4))
    assert meter(0.05, 80).is_below(0.05) and seen == [8, 8, 16]


def test_a_newton_step_takes_no_loss_that_is_known_and_none_where_nothing_is_to_gain():
    pyro.set_rng_seed(0)
    guide: Any = ngvi.AutoFullRankNormal(gaussian, init=None)
    guide()
    loss, seen = ngvi.BatchedELBO(32), list[int]()

    def gradient(s):
        seen.append(s)
        with torch.random.fork_rng():
            torch.manual_seed(s)
            return loss.loss_and_grads(gaussian, guide)

    meter = GapMeter([guide], gradient)
    gap = meter(0.05, 80, whole=True)
    seen.clear()
    assert not meter.newton_step(1e5 * gap.nats) and not seen
    assert meter.newton_step(0.05) and len(seen) == meter.fewest


def test_looks_may_go_where_natural_gradients_creep():
    """A five-hundredth of F along the longest axis: a step of Newton's is exact for a Gaussian."""
    correlation = torch.full((5, 5), 0.998, dtype=torch.float64).fill_diagonal_(1.0)

    def correlated() -> None:
        pyro.sample("z", dist.MultivariateNormal(correlation.new_ones(5), correlation))

    steps = []
    for newton in (False, True):
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        guide: Any = ngvi.AutoMeanFieldNormal(correlated, init=None)
        svi = SVI(correlated, guide, ngvi.NGVB(guide), ngvi.BatchedELBO(8))
        stop = to_the_end(svi, max_steps=300, newton=newton)
        steps.append(stop.steps)
        often = len(stop.looks) > len({k for k, _ in stop.looks})
        assert often is newton  # before a step, and after it
    away = guide.loc.detach() - 1.0
    assert stop.reason == "converged" and steps[1] < steps[0]
    assert 0.5 * float(away @ torch.linalg.solve(correlation, away)) < 1e-9


def test_the_look_that_ends_a_run_moves_the_guide_too():
    """Nats that may be left are taken where the way to them is known; ``gap`` is that of before."""
    for newton in (False, True):
        precision, svi = away_from_correlated(0.9)
        before = 0.5 * float(precision.sum())  # of the mean (1, ..., 1)
        guide: Any = svi.guide
        stop: Any = ngvi.StopRule(svi, tol=2.0 * before, newton=newton)
        stop.losses = [1.0] * 5
        assert stop(1.0) and stop.reason == "converged" and stop.steps == 6
        assert abs(stop.gap.nats - before) < 1e-9
        away = guide.loc.detach()
        left = 0.0 if newton else before
        assert abs(0.5 * float(away @ precision @ away) - left) < 1e-9


def test_steps_with_minibatches_are_left_alone():
    """Newton's steps solve for the data of one minibatch; a look at all data may take them."""
    loader = [(X[:30], Y[:30]), (X[30:], Y[30:])]
    cases: Any = (({}, True), ({"batches": loader}, False))
    for how, sees_all in cases:
        pyro.clear_param_store()
        guide = ngvi.AutoMeanFieldNormal(logistic)
        svi = SVI(logistic, guide, ngvi.NGVB(guide), ngvi.BatchedELBO(8))
        svi.step(X[:30], Y[:30]) if how else svi.step(X, Y)
        stop: Any = ngvi.StopRule(svi, newton=True, **how)
        assert stop._meter((X[:30], Y[:30]) if how else (X, Y), {}).sees_all is sees_all

    def subsampled(X, y) -> None:
        w = pyro.sample("w", dist.Normal(torch.zeros(3, dtype=X.dtype), 1.0).to_event(1))
        with pyro.plate("data", 60, subsample_size=20) as i:
            pyro.sample("y", dist.Bernoulli(logits=X[i] @ w), obs=y[i])

    for make in (ngvi.AutoMeanFieldNormal, AutoNormal):
        pyro.clear_param_store()
        guide = make(subsampled)
        rule = (
            ngvi.NGVB(guide)
            if make is not AutoNormal
            else PyroOptim(torch.optim.Adam, {"lr": 0.01})
        )
        svi = SVI(subsampled, guide, rule, ngvi.BatchedELBO(8))
        svi.step(X, Y)
        stop = ngvi.StopRule(svi)
        assert stop._meter((X, Y), {}).sees_all is False


def test_where_float32_does_not_resolve_a_shift_losses_end_the_run():
    """Numbers near 10^5 are .0078 apart, a shift of .05 sds is .003: differences of gradients are those
    of rounding."""
    torch.set_default_dtype(torch.float32)
    pyro.set_rng_seed(0)
    y = 1e5 + torch.randn(100)

    def model() -> None:
        m = pyro.sample("m", dist.Normal(1e5, 1e3))
        with pyro.plate("data", 100):
            pyro.sample("y", dist.Normal(m, 1.0), obs=y)

    guide: Any = ngvi.AutoMeanFieldNormal(model)
    svi = SVI(model, guide, ngvi.NGVB(guide), ngvi.BatchedELBO(8))
    stop = ngvi.StopRule(svi, max_steps=300)
    while not stop(svi.step()):
        pass
    assert stop.reason == "settled" and not stop.looks
    held = {k: p.detach() for k, p in guide.natural_params().items()}
    assert float(guide.family.stddev(held)) == pytest.approx(0.1, rel=0.02)


def test_a_run_that_skips_most_of_its_steps_has_diverged():
    """Its losses are finite, gradients are not at three steps of four: two are left of each four."""
    pyro.set_rng_seed(0)
    steps = 0

    def model() -> None:
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        if steps % 4:  # whose gradient is infinite
            pyro.factor("f", (0.0 * x).square().sqrt())

    guide: Any = ngvi.AutoMeanFieldNormal(model, init=None)
    svi = SVI(model, guide, ngvi.NGVB(guide), ngvi.BatchedELBO(2))
    stop = ngvi.StopRule(svi, max_steps=100)
    with pytest.warns(RuntimeWarning, match="skipped a step"):
        while not stop(svi.step()):
            steps += 1
    assert all(map(math.isfinite, stop.losses))
    assert stop.reason == "diverged" and 38 <= stop.steps <= 42


def looked_at(at: float) -> tuple[Any, Any]:
    """Guide and rule after a look; ``at`` sds from there the guide stands at the next."""
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    guide: Any = ngvi.AutoFullRankNormal(logistic)
    svi = SVI(logistic, guide, ngvi.NGVB(guide), ngvi.BatchedELBO(8))
    stop = ngvi.StopRule(svi, tol=1e-9)
    stop.losses = [1.0] * 5
    assert not stop(svi.step(X, Y), X, Y) and len(stop.looks) == 1
    held = {name: p.detach().clone() for name, p in guide.natural_params().items()}
    with torch.no_grad():
        guide.loc.add_(at * guide.scale_tril[:, 0])
    stop.losses = [1.0] * 100
    return held, stop


def test_a_run_whose_loss_has_risen_far_holds_what_was_best() -> None:
    """By 3 nats, for 3 latent variables: t sds of them raise the loss by about t^2 / 2."""
    for at, back in ((1.0, False), (2.0, False), (4.0, True), (1e4, True)):
        held, stop = looked_at(at)
        other = ngvi.StopRule(stop.svi, tol=1e-9)
        other.load_state_dict(stop.state_dict())  # as from a checkpoint
        other.losses = stop.losses
        params = stop.svi.guide.natural_params()
        away = {name: p.detach().clone() for name, p in params.items()}
        for rule in (stop, other):
            for name, p in params.items():
                p.data.copy_(away[name])
            rule(1.0, X, Y)
            assert (rule.reason == "stalled") is back
            there = held if back else away
            assert all(torch.equal(p, there[name]) for name, p in params.items())
        assert len(stop.looks) == 2 + back  # the last is of what it holds
        assert stop.gap.nats < 0.05 or not back


def test_the_best_look_is_of_the_data_at_hand() -> None:
    def model(y: torch.Tensor) -> None:
        m = pyro.sample("m", dist.Normal(0.0, 5.0))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.StudentT(3.0, m, 1.0), obs=y)

    y = torch.linspace(-1.0, 2.0, 20)
    fit = ngvi.fit(model, y, guide="AutoMeanFieldNormal", seed=0, progress=False)
    assert fit.stop.best.best is not None
    fit.resume(max_steps=1, progress=False)
    assert fit.stop.best.best is not None
    fit.resume(y + 9.0, max_steps=1, progress=False)
    assert fit.stop.best.best is None


def test_heavy_tails_do_not_lead_a_run_away() -> None:
    """Separated data, Cauchy priors: the loss rose to 1e5 nats and above."""
    x = torch.linspace(-2.0, 2.0, 20)

    def separated(y) -> None:
        a = pyro.sample("a", dist.Cauchy(0.0, 10.0))
        b = pyro.sample("b", dist.Cauchy(0.0, 2.5))
        with pyro.plate("data", 20):
            pyro.sample("y", dist.Bernoulli(logits=a + b * x), obs=y)

    y = 1.0 * (x > 0.1)
    pyro.set_rng_seed(1)
    guide: Any = ngvi.AutoFullRankNormal(separated)
    svi = SVI(separated, guide, ngvi.NGVB(guide), ngvi.BatchedELBO(8))
    stop = to_the_end(svi, y, max_steps=1000, newton=True)
    assert stop.reason in ("stalled", "converged")
    assert guide.loc[1] < 30.0 and stop.gap.nats < 0.5


def test_a_gap_beyond_the_dtype_is_not_taken_for_none() -> None:
    """H is 1e15 here, the gradient too, and their product in float32 infinite."""

    def narrow() -> None:
        pyro.sample("z", dist.Normal(torch.zeros(2, dtype=torch.float32), 3e-8).to_event(1))

    guide: Any = ngvi.AutoFullRankNormal(narrow, init=None, init_scale=1.0)
    guide()
    loss = ngvi.BatchedELBO(8)

    def gradient(s: int) -> float:
        with torch.random.fork_rng():
            torch.manual_seed(s)
            return float(loss.loss_and_grads(narrow, guide))

    gap = GapMeter([guide], gradient)(tol=0.05, most=80)
    assert gap.nats > 1e6 and not gap.is_below(0.05)


def test_a_gap_that_falls_for_sure_is_no_stall_in_minibatches() -> None:
    looks = [(40, Gap(10.0, 0.5, 64)), (60, Gap(9.0, 0.5, 64)), (80, Gap(8.5, 0.5, 64))]
    for last, stalls in ((7.0, False), (9.0, True)):
        found = [*looks, (100, Gap(last, 0.5, 64))]
        assert has_stalled(found, 100, 0.05)
        assert has_stalled(found, 100, 0.05, sees_all=False) is stalls


def test_rates_too_small_for_minibatches_are_no_stall() -> None:
    """A mean field of correlated columns: after 120 steps it is 29 nats off, and gains on."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(600, 4, generator=generator)
    x = x + 0.6 * x.roll(1, 1)
    z = x @ torch.linspace(-1.0, 1.5, 4) + 0.7 * torch.randn(600, generator=generator)

    def linear(x, z) -> None:
        w = pyro.sample("w", dist.Normal(x.new_zeros(4), 2.0).to_event(1))
        with pyro.plate("data", 600, subsample_size=len(x)):
            pyro.sample("z", dist.Normal(x @ w, 0.7), obs=z)

    loader = [(x[i : i + 50], z[i : i + 50]) for i in range(0, 600, 50)]
    pyro.clear_param_store()
    pyro.set_rng_seed(1)
    guide = ngvi.AutoMeanFieldNormal(linear)
    svi = SVI(linear, guide, ngvi.optim.IVON(guide), ngvi.BatchedELBO(4))
    stop = ngvi.StopRule(svi, tol=0.5, batches=loader)
    batches = ngvi.fitting.Batches(loader)
    assert not any(
        stop(svi.step(*batch), *batch) for batch, _ in zip(batches, range(250), strict=False)
    )
    assert len(stop.looks) >= 4
