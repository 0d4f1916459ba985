"""``diagnose``: errors of a guide's means and sds, found by short chains from its draws."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

import pyro_ngvi as ngvi
from pyro_ngvi.diagnostics import Diagnosis, KHat, ModelDensity
from pyro_ngvi.diagnostics.chains import run_chains
from pyro_ngvi.diagnostics.moved import Moved, by_site, moved
from pyro_ngvi.diagnostics.shifts import Shift
from pyro_ngvi.runtime.density import LatentLayout


def gaussian(mean: float, sd: float, d: int = 1, heavy: float | None = None) -> Callable[[], None]:
    """x (d,) in a plate, of this mean and sd; with ``heavy`` Student's t of so many degrees."""

    def program() -> None:
        loc = torch.full((d,), mean, dtype=torch.float64)
        with pyro.plate("entries", d):
            scale = sd if heavy is None else sd * math.sqrt((heavy - 2.0) / heavy)
            q = dist.Normal(loc, scale) if heavy is None else dist.StudentT(heavy, loc, scale)
            pyro.sample("x", q)

    return program


def test_chains_leave_a_posterior_as_it_is() -> None:
    """Correlated normals: means, sds and correlations of 4,000 chains, standard errors 1 / 63."""
    torch.manual_seed(1)
    factor = torch.tensor([[1.0, 0.0, 0.0], [0.9, 0.3, 0.0], [-0.5, 0.2, 2.0]], dtype=torch.float64)
    precision = torch.linalg.inv(factor @ factor.mT)
    start = torch.randn(4000, 3, dtype=torch.float64) @ factor.mT

    def log_prob(x: Tensor) -> Tensor:
        return -0.5 * ((x @ precision) * x).sum(-1)

    last, accepted = run_chains(log_prob, start, 12)
    assert 0.6 < accepted < 1.0 and last.shape == (4, 4000, 3)
    assert (last[1:] != last[:-1]).double().mean() > 0.6  # a state after the other
    end = last[-1]
    z = torch.linalg.solve_triangular(factor, end.mT, upper=False)
    assert z.mean(1).abs().max() < 4.0 / 63.0
    assert (torch.cov(z) - torch.eye(3)).abs().max() < 4.0 * math.sqrt(2.0) / 63.0
    rho = moved(start, end).rho
    assert rho.abs().max() < 0.3  # and they have gone elsewhere


def test_the_estimates_are_exact_for_linear_chains() -> None:
    """x_T = mu + r (x_0 - mu) + noise, of the posterior's mean and sd; standard errors about 0.01."""
    torch.manual_seed(1)
    mu, sd, r = 1.5, 2.0, 0.6
    before = 0.7 * torch.randn(40_000, 1, dtype=torch.float64)  # mean 0, sd 0.7
    noise = sd * math.sqrt(1.0 - r**2) * torch.randn_like(before)
    found = moved(before, mu + r * (before - mu) + noise)
    end = math.sqrt(r**2 * 0.7**2 + sd**2 * (1.0 - r**2))
    # the correlation is that of a chain that has not reached its sd
    rho = r * 0.7 / end
    assert abs(float(found.rho) - rho) < 0.02
    shift = mu * (1.0 - r) / end / (1.0 - rho)
    assert abs(float(found.mean) - shift) < 4.0 * float(found.mean_error)
    ratio = 1.0 + (end**2 / 0.7**2 - 1.0) / (1.0 - rho**2)
    assert abs(float(found.log_sd) - 0.5 * math.log(ratio)) < 4.0 * float(found.log_sd_error)


@pytest.mark.parametrize(
    ("mean", "sd"), [(0.0, 1.0), (0.5, 1.0), (0.0, 1.6), (0.0, 0.6), (-1.0, 2.0)]
)
def test_errors_of_a_guide_are_found(mean: float, sd: float) -> None:
    """The guide is a standard normal, the posterior another one, in 3 entries."""
    model, guide = gaussian(mean, sd, 3), gaussian(0.0, 1.0, 3)
    found = ngvi.diagnose(model, guide, seed=1)
    x = found.sites["x"]
    assert (x.mean - mean / sd).abs().max() < 4.0 * x.mean_error.max() + 0.1 * abs(mean / sd)
    assert (x.log_sd - math.log(sd)).abs().max() < 4.0 * x.log_sd_error.max() + 0.1
    right = mean == 0.0 and sd == 1.0
    assert found.ok == right == x.is_good
    assert found.decision == ("intervals" if right else "unusable" if x.is_off else "resample")


def test_standard_errors_are_those_of_the_estimates() -> None:
    """Over 25 seeds: the spread of the estimates against their mean standard error, 14 % each."""
    model, guide = gaussian(0.2, 1.2), gaussian(0.0, 1.0)
    runs = [ngvi.diagnose(model, guide, seed=s, num_chains=200).sites["x"] for s in range(25)]
    for value, error in (("mean", "mean_error"), ("log_sd", "log_sd_error")):
        spread = torch.stack([getattr(x, value) for x in runs]).std()
        said = torch.stack([getattr(x, error) for x in runs]).mean()
        assert 0.6 < float(spread / said) < 1.5


@pytest.mark.parametrize("along", [0.0, 0.8])
def test_standard_errors_know_what_states_of_a_chain_are_worth(along: float) -> None:
    """400 entries, 500 chains, the last 4 states with that correlation from each to the next, 1,500
    draws beside; sds of the estimates over entries have a standard error of 3.5 %."""
    generator = torch.Generator().manual_seed(3)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, 400, generator=generator, dtype=torch.float64)

    before, last = noise(2000), list[Tensor]()
    x = 0.4 * before[:500] + 0.84**0.5 * noise(500)
    for _ in range(4):
        last.append(x)
        x = along * x + (1.0 - along**2) ** 0.5 * noise(500)
    found = moved(before, torch.cat(last), 500)
    for value, error in ((found.mean, found.mean_error), (found.log_sd, found.log_sd_error)):
        assert float((value / error).std()) == pytest.approx(1.0, abs=0.15)
    spread = float((found.ends / found.ends_error).std())
    # of ends it is that of means, which is larger than theirs
    assert 0.85 < spread < 1.15 if along == 0.0 else 0.7 < spread < 1.1


@pytest.mark.parametrize("seed", range(3))
def test_a_narrow_mode_in_a_wide_one_is_seen(seed: int) -> None:
    """Weights call it good: few draws of a guide of the narrow part lie where they are large."""

    def model() -> None:
        x = pyro.sample("x", dist.Normal(torch.zeros((), dtype=torch.float64), 10.0))
        both = torch.logaddexp(
            math.log(0.9) + dist.Normal(0.0, 1.0).log_prob(x),
            math.log(0.1) + dist.Normal(0.0, 10.0).log_prob(x),
        )
        pyro.factor("mixture", both - dist.Normal(0.0, 10.0).log_prob(x))

    found = ngvi.diagnose(model, gaussian_named("x", 1.1), seed=seed)
    assert not found.ok
    x = found.sites["x"]  # the truth is log(3.3 / 1.1): chains go there, and are not there yet
    assert float(x.log_sd) > 3.0 * float(x.log_sd_error)


def gaussian_named(name: str, sd: float) -> Callable[[], None]:
    def guide() -> None:
        pyro.sample(name, dist.Normal(torch.zeros((), dtype=torch.float64), sd))

    return guide


@pytest.mark.parametrize("seed", range(5))
def test_nothing_is_called_off_where_the_guide_is_right(seed: int) -> None:
    def model(y: Tensor) -> None:
        s = pyro.sample("s", dist.Gamma(y.new_tensor(30.0), 10.0))
        w = pyro.sample("w", dist.Dirichlet(y.new_tensor([20.0, 30.0, 40.0])))
        pyro.deterministic("sum", s + w.sum())

    found = ngvi.diagnose(model, model_as_guide, torch.ones(1, dtype=torch.float64), seed=seed)
    assert not any(x.is_off for x in found.sites.values())
    assert found.sites.keys() == {"s", "w", "sum"}


def model_as_guide(y: Tensor) -> None:
    pyro.sample("s", dist.Gamma(y.new_tensor(30.0), 10.0))
    pyro.sample("w", dist.Dirichlet(y.new_tensor([20.0, 30.0, 40.0])))


def test_the_chains_know_a_sampler_that_is_wrong() -> None:
    """torch 2.13 draws the last row of LKJCholesky(3) with sds 20 % too large: exactly, correlations
    have sd (2 eta + 2)^-1/2 = 0.213 at eta = 10."""

    def model() -> None:
        pyro.sample("L", dist.LKJCholesky(3, torch.tensor(10.0, dtype=torch.float64)))

    torch.manual_seed(0)
    start = dist.LKJCholesky(3, torch.tensor(10.0, dtype=torch.float64)).sample((4000,))
    density = ngvi.diagnostics.ModelDensity(model)
    last, _ = run_chains(density, density.pack({"L": start}), 30)
    L = density.unpack(last[-1])["L"]
    sds = (L @ L.mT)[:, [1, 2, 2], [0, 0, 1]].std(0)
    assert (sds - 22.0**-0.5).abs().max() < 4.0 * 22.0**-0.5 / (2.0 * 4000) ** 0.5
    found = moved(start, L)
    assert found.mean[0, 2] == found.log_sd[0, 0] == 0.0  # entries that do not vary


def test_a_false_alarm_of_weights_is_none_of_chains() -> None:
    """A hundred normal data: k-hat is near 1, the mean and the scale are known to a few per cent."""

    def model(y: Tensor) -> None:
        m = pyro.sample("m", dist.Normal(y.new_zeros(()), 10.0))
        s = pyro.sample("s", dist.HalfNormal(y.new_tensor(5.0)))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(m, s), obs=y)

    for seed in range(3):
        fit = ngvi.fit(model, torch.linspace(-2.0, 6.0, 100), seed=seed)
        assert fit.diagnosis.ok and fit.verdict is fit.diagnosis


def test_a_mean_field_guide_of_a_correlated_posterior_is_off() -> None:
    def model(X: Tensor, y: Tensor) -> None:
        w = pyro.sample("w", dist.Normal(X.new_zeros(2), 10.0).to_event(1))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(X @ w, 1.0), obs=y)

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(100, 1, generator=generator, dtype=torch.float64)
    X = torch.cat([x, x + 0.5 * torch.randn(100, 1, generator=generator, dtype=torch.float64)], 1)
    y = X.sum(-1)
    guide: Any = ngvi.AutoMeanFieldNormal(model)
    fit = ngvi.fit(model, X, y, guide=guide, seed=0)
    precision = X.mT @ X + 0.01 * torch.eye(2, dtype=torch.float64)
    exact = torch.linalg.inv(precision).diagonal().sqrt()
    ratio = exact / fit.sample(20_000, seed=0)["w"].std(0)
    found = fit.diagnosis.sites["w"]
    assert found.is_off and fit.diagnosis.verdict.startswith("Not usable: 'w' has means off by")
    assert (found.log_sd - ratio.log()).abs().max() < 4.0 * found.log_sd_error.max() + 0.15


def test_the_unconstrained_scale_counts_too() -> None:
    """A log-normal with mean and sd of Gamma(2, 1), of whose log the mean is .19 higher and the sd a
    factor of 1.26 too small; with those of Gamma(0.7, 1) a factor of 1.62."""

    def model(a: float) -> None:
        pyro.sample("x", dist.Gamma(torch.tensor(a, dtype=torch.float64), 1.0))

    def guide(a: float) -> None:
        variance = math.log1p(1.0 / a)
        loc = torch.tensor(math.log(a) - 0.5 * variance, dtype=torch.float64)
        pyro.sample("x", dist.LogNormal(loc, variance**0.5))

    for a in (2.0, 0.7):
        found = ngvi.diagnose(model, guide, a, seed=0, num_chains=4000, num_steps=25)
        x, log_x = found.sites["x"], found.unconstrained["x"]
        exact = float(torch.polygamma(1, torch.tensor(a, dtype=torch.float64)))
        ratio = 0.5 * math.log(exact / math.log1p(1.0 / a))
        assert abs(float(log_x.log_sd) - ratio) < 4.0 * float(log_x.log_sd_error) + 0.05
        assert not x.is_off and float(x.mean.abs()) < 4.0 * float(x.mean_error)
    assert log_x.is_off and not log_x.is_good and not found.ok
    assert "'x, unconstrained' has means off" in found.verdict
    assert "x, unconstrained (off): means off by" in str(found)
    same = ngvi.diagnose(gaussian(0.0, 1.0), gaussian(0.0, 1.0))
    assert same.unconstrained == {}  # the coordinates of a real site are its values


def test_a_good_verdict_says_how_good_within_which_bounds() -> None:
    found = ngvi.diagnose(gaussian(0.0, 1.0), gaussian(0.05, 1.0), seed=0)
    numbers = re.fullmatch(
        r"Take the intervals as they are: means are right to (.*) sd and sds to (.*) % by short "
        r"chains and weights \(the bounds are 0.3 sd and 30 %\)\.",
        found.verdict,
    )
    assert numbers is not None
    each = (found.sites["x"].errors(2.0), found.khat.errors)
    mean, log_sd = (
        max(float(torch.as_tensor(x).max()) for x in both) for both in zip(*each, strict=True)
    )
    assert float(numbers[1]) == pytest.approx(mean, abs=0.005)
    assert float(numbers[2]) == pytest.approx(100.0 * math.expm1(log_sd), abs=0.5)


def test_it_is_repeatable_and_leaves_no_trace() -> None:
    before = torch.get_rng_state()
    one, two = (ngvi.diagnose(gaussian(0.0, 1.0), gaussian(0.1, 1.0), seed=3) for _ in range(2))
    assert torch.equal(one.sites["x"].mean, two.sites["x"].mean)
    assert torch.equal(torch.get_rng_state(), before)
    assert str(one).splitlines()[0] == one.verdict


def test_few_chains_are_refused() -> None:
    for options in ({"num_chains": 10}, {"num_steps": 3}):
        with pytest.raises(ValueError, match="at least 50 chains and 5 steps"):
            ngvi.diagnose(gaussian(0.0, 1.0), gaussian(0.0, 1.0), **options)


@pytest.mark.slow
def test_heavy_tails_are_never_called_good_where_the_sd_is_off() -> None:
    """Student's t of 3 degrees against the Gaussian of its centre, whose sd is 0.65 of the truth."""
    guide = gaussian(0.0, 0.65, 3)
    found = [ngvi.diagnose(gaussian(0.0, 1.0, 3, heavy=3.0), guide, seed=s) for s in range(40)]
    assert not any(x.ok for x in found)


def test_draws_at_which_the_density_is_zero() -> None:
    """Data outside of a support that depends on a latent variable: chains have nowhere to go."""

    def model() -> None:
        top = pyro.sample("top", dist.Uniform(0.0, 50.0))
        with pyro.plate("data", 3):
            pyro.sample("y", dist.Uniform(torch.zeros(()), top), obs=torch.tensor([3.0, 7.0, 12.0]))

    def guide() -> None:
        pyro.sample("top", dist.Uniform(1.0, 2.0))

    found = ngvi.diagnose(model, guide, num_chains=50)
    assert found.decision == found.khat.decision == "unusable"
    assert found.verdict == found.khat.verdict
    assert "Does the support of a datum depend on a latent variable" in found.verdict
    idata = ngvi.to_arviz(model, guide, num_samples=50)
    assert "Not usable" in str(ngvi.summary(idata))  # and no warning of numpy's


def test_a_doubt_says_how_large_the_errors_may_be() -> None:
    """No estimate is out of bounds, and their errors are."""
    small = torch.tensor([0.1])
    doubt = Moved(mean=small, mean_error=2.0 * small, log_sd=small, log_sd_error=small, rho=small)
    weights = KHat(0.8, 0.7, 30.0, np.zeros(1000))
    found = Diagnosis({"x": doubt}, {}, weights, 0.8)
    assert found.decision == "unclear"
    assert found.verdict == (
        "Not clear: 'x' has means off by up to 0.1 sd, sds by up to 11 %; with their errors 0.5 sd and "
        "35 %."
    )


def test_more_chains_start_where_errors_leave_a_site_undecided(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counts = []

    def counted(log_prob: Any, start: Tensor, steps: int) -> tuple[Tensor, float]:
        counts.append(len(start))
        return run_chains(log_prob, start, steps)

    monkeypatch.setattr("pyro_ngvi.diagnostics.by_chains.run_chains", counted)
    right, wrong = gaussian(1.0, 2.0), gaussian(1.0, 0.8)
    assert ngvi.diagnose(right, right, num_chains=80).decision == "intervals"
    assert counts == [80, 320]
    assert ngvi.diagnose(right, right, num_chains=400).decision == "intervals"
    assert ngvi.diagnose(right, wrong, num_chains=400).decision != "intervals"
    assert counts[2:] == [400, 400]


@pytest.mark.parametrize(
    ("outside", "even", "decision"), [(1, 300, "intervals"), (30, 90, "unusable")]
)
def test_draws_without_density_are_no_good_chains(outside: int, even: int, decision: str) -> None:
    """No chain moves from them, which is no small error."""
    small = torch.tensor([0.01])
    good = Moved(mean=small, mean_error=small, log_sd=small, log_sd_error=small, rho=small)
    log_weights = np.append(np.zeros(1000 - outside), np.full(outside, -np.inf))
    found = Diagnosis({"x": good}, {}, KHat(0.8, 0.7, float(even), log_weights), 0.8)
    assert found.decision == decision
    assert ("the model has no density at 3% of the guide's draws" in found.verdict) is (outside > 1)


def test_weights_that_are_rounding_are_no_heavy_tail() -> None:
    small = torch.tensor([0.01])
    good = Moved(mean=small, mean_error=small, log_sd=small, log_sd_error=small, rho=small)
    weights = KHat(math.nan, 0.7, 900.0, np.zeros(1000))
    found = Diagnosis({"x": good}, {}, weights, 0.8)
    assert found.decision == "unclear"
    assert found.verdict.endswith("cannot be told from rounding: evaluate the model in float64.")


@pytest.mark.parametrize(
    ("by_weights", "khat", "ess", "d", "decision"),
    [
        (0.1, 0.4, 400.0, 1, "intervals"),
        (0.35, 0.4, 400.0, 1, "resample"),  # reliable weights have seen what chains have not
        (0.1, 0.61, 765.0, 1, "unclear"),
        (0.1, 0.66, 455.0, 1, "resample"),
        (0.1, 0.9, 300.0, 1, "intervals"),
        (0.1, 0.9, 70.0, 1, "unclear"),  # 0.083 of even weights: more than Gaussian errors leave
        (0.1, 0.9, 70.0, 3, "intervals"),
        (0.1, 1.2, 300.0, 25, "unclear"),
        (0.1, 1.2, 300.0, 26, "intervals"),
        (0.1, 1.6, 300.0, 26, "unclear"),
    ],
)
def test_chains_alone_do_not_overrule_what_weights_have_seen(
    by_weights: float, khat: float, ess: float, d: int, decision: str
) -> None:
    small = torch.full((d,), 0.01)
    good = Moved(mean=10.0 * small, mean_error=small, log_sd=small, log_sd_error=small, rho=small)
    shift = Shift(*(np.full(d, x) for x in (by_weights, 0.03, 0.0, 0.03)))
    weights = KHat(khat, 0.7, ess, np.full(1000, -math.log(1000.0)), {"x": shift})
    found = Diagnosis({"x": good}, {}, weights, 0.8)
    assert found.decision == decision
    if 0.5 < khat < 0.7:  # weights that see nothing do not say why they are not believed
        why = f"may be further off where weights are so uneven (k-hat {khat}, worth {ess / 10}% of the"
        assert f" % by short chains, but {why} draws)." in found.verdict
    elif decision == "resample":
        assert found.verdict.endswith("but weights move the mean of 'x' by up to 0.41 sds.")


def test_the_word_of_weights_on_all_modes_is_a_sentence_of_its_own() -> None:
    small = torch.full((2, 1), 0.01)
    good = Moved(mean=small, mean_error=small, log_sd=small, log_sd_error=small, rho=small)
    found = Diagnosis({"x": good}, {}, KHat(0.9, 0.7, 20.0, np.zeros(1000)), 0.8, modes=2)
    assert found.decision == "unclear"
    assert "in each of 2 modes. Of all modes together: Not usable: k-hat is 0.90," in found.verdict


def test_a_spike_in_the_prior_is_not_overlooked() -> None:
    """Half of the prior is N(0, 0.05), and chains of the slab's steps stay where they are."""

    def model(y: Tensor) -> None:
        w: Any = pyro.sample("w", dist.Normal(0.0, 1.0))
        slab = dist.Normal(0.0, 1.0).log_prob(w)
        both = torch.stack([dist.Normal(0.0, 0.05).log_prob(w), slab])
        pyro.factor("spike", both.logsumexp(0) - slab)
        pyro.sample("y", dist.Normal(w, 0.3), obs=y)

    def guide(y: Tensor) -> None:  # the posterior has mean 0.355 and sd 0.346
        pyro.sample("w", dist.Normal(0.48, 0.32))

    found = ngvi.diagnose(model, guide, torch.tensor(0.6))
    assert all(m.is_good for m in found.sites.values())
    assert found.decision == "resample"


def test_a_matrix_that_fails_at_a_draw_is_named() -> None:
    """And not what vmap cannot do."""

    def model() -> None:
        r = pyro.sample("r", dist.Uniform(-2.0, 2.0))
        K = torch.eye(2) + r * torch.tensor([[0.0, 1.0], [1.0, 0.0]])
        pyro.sample("y", dist.MultivariateNormal(torch.zeros(2), K), obs=torch.ones(2))

    density = ModelDensity(model)
    with pytest.raises(
        RuntimeError, match=r"A matrix of the program cannot be factored.*float64"
    ) as error:
        density(torch.tensor([[0.0], [5.0]]))
    assert len(str(error.value)) <= 240


def test_weights_that_go_elsewhere_than_chains_are_not_advised() -> None:
    """Chains are not sure that an sd is too small, weights that nothing is wrong: 35 % against 2 %."""

    def found(by_weights: float) -> str:
        entry, small = torch.tensor([0.3]), torch.tensor([0.03])
        doubt = Moved(mean=small, mean_error=small, log_sd=entry, log_sd_error=small, rho=small)
        shift = Shift(*(np.array([x]) for x in (0.0, 0.03, by_weights, 0.03)))
        weights = KHat(0.4, 0.7, 700.0, np.full(1000, -math.log(1000.0)), {"x": shift})
        assert weights.decision == "intervals" and not doubt.is_good and not doubt.is_off
        return Diagnosis({"x": doubt}, {}, weights, 0.8).decision

    assert found(0.02) == "unclear"
    assert found(0.15) == "resample"


@pytest.mark.parametrize("offset", [0.0, 1e4])
def test_an_entry_far_from_zero_is_judged_in_float32(offset: float) -> None:
    """An sd of 0.07 is 75 roundings of 10,000, and is half of the posterior's; standard error 3 %."""
    torch.manual_seed(1)
    before = offset + 0.07 * torch.randn(2000)
    after = offset + 0.14 * torch.randn(2000)
    site = dist.Normal(torch.tensor(0.0), 1.0)
    trace = pyro.poutine.trace(lambda: pyro.sample("x", site)).get_trace()
    ours, _ = by_site(LatentLayout(trace), before[:, None], after[:, None], moved)
    torch.testing.assert_close(ours["x"].log_sd, torch.tensor(2.0).log().double(), atol=0.1, rtol=0)


def test_an_exact_guide_of_shares_next_to_zero_is_good() -> None:
    """Three of five shares are 1e-20 at some draws: less than the roundings of their neighbours."""
    counts = torch.tensor([12.0, 3.0, 0.0, 0.0, 0.0])

    def model() -> None:
        p = pyro.sample("p", dist.Dirichlet(torch.full((5,), 0.2)))
        pyro.sample("counts", dist.Multinomial(15, probs=p), obs=counts)

    def guide() -> None:
        pyro.sample("p", dist.Dirichlet(0.2 + counts))

    with pytest.warns(RuntimeWarning, match="0.4 % of the draws of 'p' are rounded"):
        found = ngvi.diagnose(model, guide, seed=2)
    assert found.decision == "intervals", found
    assert found.unconstrained["p"].log_sd.abs().max() < 0.1  # four standard errors


def test_entries_that_do_not_vary_are_not_judged() -> None:
    trace = pyro.poutine.trace(lambda: pyro.sample("L", dist.LKJCholesky(4, 1.0))).get_trace()
    torch.manual_seed(1)
    before, after = torch.randn(2, 500, 6)
    sites, _ = by_site(LatentLayout(trace), before, after, moved)
    upper = torch.ones(4, 4).triu(1).bool()
    for entry in (sites["L"].mean, sites["L"].log_sd, sites["L"].rho):
        assert entry[upper].abs().max() == entry[0].abs().max() == 0.0
        assert bool((entry[~upper][1:] != 0.0).all())


def test_deterministic_sites_are_judged_too() -> None:
    """exp(z) under an sd of .85 for 1: sqrt((e^v - 1) e^v) is off by 48 %, that of z by 18 %."""

    def program(sd: float) -> None:
        z: Any = pyro.sample("z", dist.Normal(torch.zeros(3, dtype=torch.float64), sd).to_event(1))
        pyro.deterministic("y", z.exp(), event_dim=1)
        pyro.deterministic("same", torch.ones(2))
        pyro.deterministic("nowhere", torch.where(z > 0.0, z, math.nan), event_dim=1)

    found = ngvi.diagnose(lambda: program(1.0), lambda: program(0.85), num_chains=4000)
    y = found.sites["y"]
    log_sd = [0.5 * math.log(math.expm1(v) * math.exp(v)) for v in (0.85**2, 1.0)]
    assert ((y.log_sd - (log_sd[1] - log_sd[0])).abs() < 3.0 * y.log_sd_error).all()
    assert found.sites["z"].is_good and not y.is_good
    assert found.sites["same"].is_good and found.sites["nowhere"].is_good  # nothing to judge
    exact = ngvi.diagnose(lambda: program(1.0), lambda: program(1.0), num_chains=4000)
    assert exact.sites["y"].is_good
