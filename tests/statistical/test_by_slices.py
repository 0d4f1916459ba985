"""Corrected draws of models of few latent variables, against closed forms."""

import math
from dataclasses import replace
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

import pyro_ngvi as ngvi
from pyro_ngvi.diagnostics import Corrected, Diagnosis
from pyro_ngvi.diagnostics.by_weights import by_weights
from pyro_ngvi.diagnostics.draws import Fitted
from pyro_ngvi.hierarchy import ExactUnits
from pyro_ngvi.hierarchy.whole import Whole
from pyro_ngvi.runtime.model_density import map_draws

HOW: Any = {"seed": 0, "progress": False}
GAUSSIAN: Any = HOW | {"guide": "AutoFullRankNormal"}  # by itself fit takes the Beta or Gamma
Y = torch.zeros(20, dtype=torch.float64)


def never_seen(y: Tensor) -> None:
    """0 of 20: p(a | y) = Beta(1, 21), whose density is largest at its end, 0."""
    a = pyro.sample("a", dist.Beta(y.new_ones(()), 1.0))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Bernoulli(a), obs=y)


def rates(y: Tensor, d: int) -> None:
    """d rates of which hardly anything was seen, each Gamma(1, 2) a posteriori."""
    with pyro.plate("data", d):
        m: Any = pyro.sample("m", dist.Gamma(y.new_ones(()), 1.0))
        pyro.sample("y", dist.Poisson(m), obs=y[:d])


def test_ends_and_moments_are_those_of_the_closed_form() -> None:
    fit = ngvi.fit(never_seen, Y, **GAUSSIAN)
    found: Any = fit.verdict
    assert isinstance(found, Corrected) and found.decision == "intervals"
    assert "k-hat" in repr(fit) and "globals" not in repr(fit)
    n = 4000
    a = fit.sample(n, seed=0)["a"]
    worth = n * min(1.0, found.khat.ess / len(found.khat.log_weights))
    exact = torch.distributions.Beta(1.0, 21.0)
    assert abs(float(a.mean()) - float(exact.mean)) < 4.0 * float(exact.stddev) / worth**0.5
    for p in 0.025, 0.975:
        at = 1.0 - (1.0 - p) ** (1.0 / 21.0)  # the quantile
        below = float((a <= at).double().mean())
        assert abs(below - p) < 4.0 * (p * (1.0 - p) / worth) ** 0.5
    # the guide's own draws have hardly any near 0
    own = fit.to_arviz(corrected=False, num_samples=n, seed=0)["posterior"]["a"].values
    assert (own <= 1.0 - 0.975 ** (1.0 / 21.0)).mean() < 0.01


@pytest.mark.parametrize("prior", [1.0, 40.0])
def test_the_guide_is_compared_with_them_and_no_chain_runs(
    prior: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """p(m | y) = Gamma(prior + 3, 2), of which the best log-normal is known by its own draws."""

    def model() -> None:
        m = pyro.sample("m", dist.Gamma(Y.new_tensor(prior), 1.0))
        pyro.sample("y", dist.Poisson(m), obs=Y.new_tensor(3.0))

    def runs(*how: Any) -> None:
        raise AssertionError("chains")

    monkeypatch.setattr("pyro_ngvi.diagnostics.by_chains.run_chains", runs)
    fit = ngvi.fit(model, **GAUSSIAN)
    found = fit.diagnosis
    assert found.ok and found.integrated and found.accepted != found.accepted  # NaN
    assert " by weights (" in found.verdict
    assert isinstance(fit.verdict, Corrected) is found.may_be_off is (prior < 2.0)
    exact = torch.distributions.Gamma(prior + 3.0, Y.new_tensor(2.0))
    best = fit.guide.get_posterior()
    own = torch.distributions.LogNormal(best.mean.detach()[0], best.stddev.detach()[0])
    moved = found.sites["m"]
    mean = (exact.mean - own.mean) / exact.stddev
    assert abs(float(moved.mean - mean)) < 4.0 * float(moved.mean_error) < 0.2
    log_sd = (exact.stddev / own.stddev).log()
    assert abs(float(moved.log_sd - log_sd)) < 4.0 * float(moved.log_sd_error) < 0.2


@pytest.mark.parametrize(
    "data",
    [(1.17, 1.11, 1.19), (1.22, 1.09, 0.99, 1.25), (1.1, 1.2, 1.15, 1.3), (1.1, 1.3, 0.9, 1.2)],
)
def test_a_mean_of_few_data_has_both_far_ends(data: tuple[float, ...]) -> None:
    """p(m | y, s) is the wider the larger s: a proposal of one correlation had the upper end of 4 data
    .65 sd short, under weights that looked well."""

    def model(y: Tensor) -> None:
        m = pyro.sample("m", dist.Normal(y.new_zeros(()), 10.0))
        s = pyro.sample("s", dist.HalfCauchy(y.new_tensor(5.0)))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(m, s), obs=y)

    y, n = Y.new_tensor(data), len(data)
    log_s = torch.linspace(-9.0, 9.0, 20_001, dtype=torch.float64)
    scale = (2.0 * log_s).exp()
    precision = n / scale + 0.01
    at = n * y.mean() / scale / precision
    square = (y - y.mean()).square().sum() / scale + n * y.mean().square() / scale
    log_p = -n * log_s - 0.5 * (square - precision * at.square() + precision.log())
    log_p += dist.HalfCauchy(5.0).log_prob(log_s.exp()) + log_s
    p = (log_p - log_p.logsumexp(0)).exp()
    for seed in range(3):
        fit = ngvi.fit(model, y, seed=seed, progress=False)
        if not fit.verdict.ok:
            continue
        draws = fit.sample(4000, seed=0)
        ends = draws["m"].quantile(Y.new_tensor([0.025, 0.975]))
        below = [float(p @ torch.special.ndtr((end - at) * precision.sqrt())) for end in ends]
        # 4,000 draws worth 2,000: .0035 is a standard error
        assert below == pytest.approx([0.025, 0.975], abs=0.014)
        upper = log_s[min(int((p.cumsum(0) < 0.975).sum()), 20_000)].exp()
        assert float((draws["s"] > upper).double().mean()) == pytest.approx(0.025, abs=0.014)


def test_many_data_are_no_hindrance() -> None:
    """Where chains would not be asked: a rate of 11,000 data, nothing seen."""
    y = Y.new_zeros(11_000)

    def model(y: Tensor) -> None:
        a = pyro.sample("a", dist.Beta(y.new_ones(()), 1.0))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Bernoulli(a), obs=y)

    a = ngvi.fit(model, y, **GAUSSIAN).sample(4000, seed=0)["a"]
    for p in 0.025, 0.975:
        at = 1.0 - (1.0 - p) ** (1.0 / (len(y) + 1.0))
        below = float((a <= at).double().mean())
        assert abs(below - p) < 5.0 * (p * (1.0 - p) / 2000.0) ** 0.5


def test_leaving_one_out_is_that_of_the_closed_form() -> None:
    """p(y_i = 0 | the other 19) = 20 / 21; the se of 4,000 draws is below .01 of 20 terms."""
    fit = ngvi.fit(never_seen, Y, **GAUSSIAN)
    found = fit.loo()
    elpd = float(getattr(found, "elpd_loo", None) or found.elpd)
    assert elpd == pytest.approx(20.0 * torch.tensor(20.0 / 21.0).log().item(), abs=0.01)


def test_what_is_read_is_corrected_and_can_be_told_from_the_guide() -> None:
    fit = ngvi.fit(never_seen, Y, **GAUSSIAN)
    idata, own = fit.to_arviz(num_samples=500, seed=0), fit.to_arviz(corrected=False, seed=0)
    assert idata.attrs["resample"] == "corrected" and "resample" not in own.attrs
    assert idata["posterior"].sizes["draw"] == 500 and idata.attrs["guide"] == "AutoFullRankNormal"
    assert "corrected" in str(fit.summary())
    new = fit.predict(Y.new_zeros(3), num_samples=50)
    assert new["y"].shape == (50, 3)


@pytest.mark.parametrize("d", [3, 21])
def test_only_few_latent_variables_are_tried(d: int) -> None:
    y = Y.new_zeros(21)
    fit = ngvi.fit(rates, y, d, **GAUSSIAN)
    assert isinstance(fit.diagnosis, Diagnosis) and fit.diagnosis.may_be_off
    how = rates, fit.guide, (y, d), {}
    assert (by_weights(*how, fit.khat) is None) is (d == 21)


def test_other_guides_and_modes_are_left_alone() -> None:
    def turned() -> None:
        a, b = (pyro.sample(name, dist.Normal(Y.new_zeros(()), 1.0)) for name in "ab")
        pyro.sample("y", dist.Normal(a * b, 0.3), obs=Y.new_tensor(1.0))

    fit = ngvi.fit(turned, **GAUSSIAN)
    assert not isinstance(fit.verdict, Corrected) and not fit.verdict.ok
    fit = ngvi.fit(never_seen, Y, guide="AutoMeanFieldNormal", **HOW)
    assert not isinstance(fit.verdict, Corrected)


def test_a_ratio_without_moments_does_not_stand_in_the_way() -> None:
    """a and b of a dose-response curve from 20 animals, against a grid; -a / b has no sd."""
    x, n, y = (
        Y.new_tensor([-0.86, -0.3, -0.05, 0.73]),
        Y.new_tensor(5.0),
        Y.new_tensor([0, 1, 3, 5.0]),
    )

    def curve() -> None:
        a = pyro.sample("a", dist.Normal(Y.new_zeros(()), 5.0))
        b = pyro.sample("b", dist.Normal(Y.new_zeros(()), 10.0))
        pyro.deterministic("ld50", -a / b)
        with pyro.plate("doses", 4):
            pyro.sample("y", dist.Binomial(n, logits=a + b * x), obs=y)

    fit = ngvi.fit(curve, **HOW)
    assert isinstance(fit.verdict, Corrected) and fit.verdict.ok
    assert "Tails of 'ld50' are too long for a mean or an sd: read quantiles." in str(fit)
    assert fit.diagnosis.heavy == ("ld50",) and "ld50" not in fit.diagnosis.sites
    a, b = torch.linspace(-8.0, 12.0, 801).double(), torch.linspace(-20.0, 60.0, 1601).double()
    log_p = dist.Binomial(n, logits=a[:, None, None] + b[:, None] * x).log_prob(y).sum(-1)
    log_p = log_p - a.square()[:, None] / 50.0 - b.square() / 200.0
    p = (log_p - log_p.flatten().logsumexp(0)).exp()
    draws = fit.sample(4000, seed=0)
    ld50 = fit.to_arviz(num_samples=4000, seed=0)["posterior"]["ld50"].values
    for at in 0.05, 0.95:  # 4,000 draws worth 3,300 have an error of .004
        for name, grid, marginal in ("a", a, p.sum(1)), ("b", b, p.sum(0)):
            end = grid[min(int((marginal.cumsum(0) < at).sum()), len(grid) - 1)]
            assert float((draws[name] <= end).double().mean()) == pytest.approx(at, abs=0.016)
        end = float(torch.as_tensor(ld50).flatten().double().quantile(at))
        assert float(p[-a[:, None] / b <= end].sum()) == pytest.approx(at, abs=0.016)


@pytest.mark.parametrize("smooth", [False, True])
def test_a_huge_weight_is_noise_where_log_p_is_another_beside_it(smooth: bool) -> None:
    """Log gammas of numbers near 10^16 have such noise; another mode has not."""

    def model(y: Tensor) -> None:
        x = pyro.sample("x", dist.Normal(y.new_zeros(()), 1.0))
        far = 1000.0 * torch.frac(3.3e6 * x).abs() + 500.0
        far = 600.0 - 0.5 * (x + 30.0).square() if smooth else far
        pyro.factor("noise", torch.where(x < -20.0, far, 0.0))

    guide = ngvi.AutoFullRankNormal(model, init=None)
    guide(Y)
    fitted = Fitted(model, guide, (Y,), {})
    exact = ExactUnits(Whole(model, guide, (Y,), {}, fitted.joint, 100.0))
    fitted = Fitted(model, exact, (Y,), {})
    drawn: Any = fitted.draw(600, None)
    x = drawn.values["x"].clone()
    x[7] = -30.0123
    log_joint = drawn.log_joint.clone()
    log_joint[7] = float(map_draws(fitted.joint, log_p, {"x": x[7:8]}, 1))
    found = fitted._without_noise(replace(drawn, values={"x": x}, log_joint=log_joint), None)
    assert bool(found.log_joint[7].isinf()) is not smooth
    assert torch.equal(found.log_joint[8:], log_joint[8:]) and found.log_joint[:7].isfinite().all()


def log_p(sites: Any) -> Tensor:
    return sum(site["fn"].log_prob(site["value"]).sum() for site in sites.values())  # type: ignore[return-value]


def test_what_a_hierarchy_misses_is_not_forgotten() -> None:
    """Weights of its globals are not where draws of the prior saw more; those of few variables are."""

    def groups(y: Tensor) -> None:
        m = pyro.sample("m", dist.Normal(y.new_zeros(()), 5.0))
        with pyro.plate("groups", len(y)):
            t = pyro.sample("t", dist.Normal(m, 1.0))
            pyro.sample("y", dist.Normal(t, 1.0), obs=y)

    y = torch.linspace(-2.0, 2.0, 8).double()
    fit = ngvi.fit(groups, y, guide="AutoHierarchical", **HOW)
    found = by_weights(groups, fit.guide, (y,), {}, replace(fit.khat, missed=0.5))
    assert found is not None and found.khat.missed == 0.5 and found.decision == "unusable"


@pytest.mark.parametrize("noise", [None, 0.1])
def test_an_end_of_the_search_that_holds_little(noise: float | None) -> None:
    """Absorption and elimination of a drug exchanged, 13 and 5 % of the mass, joined by a bend: the
    guide holds nothing of it, draws of a proposal around the guide hardly more."""
    generator = torch.Generator().manual_seed(7)
    times = torch.tensor([0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0]).double()

    def curve(ka: Tensor, ke: Tensor) -> Tensor:
        d = ka - ke
        d = torch.where(d.abs() < 1e-6, 1e-6, d)
        return 10.0 * ka / d * ((-ke * times).exp() - (-ka * times).exp())

    error = 0.12 * torch.randn(9, generator=generator).double()
    y = (curve(torch.tensor(1.3), torch.tensor(0.45)) / 3.0).log() + error

    def model() -> None:
        ka: Any = pyro.sample("ka", dist.LogNormal(y.new_tensor(0.3), 0.7))
        ke: Any = pyro.sample("ke", dist.LogNormal(y.new_tensor(-1.0), 0.7))
        v: Any = pyro.sample("v", dist.LogNormal(y.new_tensor(1.0), 1.0))
        s = noise if noise else pyro.sample("s", dist.HalfNormal(y.new_tensor(0.3)))
        with pyro.plate("times", 9):
            pyro.sample("y", dist.Normal((curve(ka, ke) / v).log(), s), obs=y)

    # ka and ke on a grid, log v given them and s is Gaussian
    rates = torch.linspace(math.log(0.05), math.log(8.0), 400).double()
    a, e = (x.reshape(-1) for x in torch.meshgrid(rates, rates, indexing="ij"))
    r = y - curve(a.exp()[:, None], e.exp()[:, None]).clamp_min(1e-300).log()
    prior = dist.Normal(0.3, 0.7).log_prob(a) + dist.Normal(-1.0, 0.7).log_prob(e)
    scales = torch.tensor([noise]) if noise else torch.linspace(0.03, 1.5, 148)
    log_w = []
    for s in scales.double():  # r = -log v + noise, log v ~ N(1, 1)
        q = s.square()
        rest = (r + 1.0).square().sum(1) / q - ((r + 1.0).sum(1) / q).square() / (1.0 + 9.0 / q)
        size = 0.0 if noise else dist.HalfNormal(0.3).log_prob(s)
        log_w.append(
            prior - 0.5 * rest - 4.5 * q.log() - 0.5 * (9.0 + q).log() + 0.5 * q.log() + size
        )
    w = torch.stack(log_w).flatten().softmax(0).view(len(scales), -1).sum(0)
    share = float(w[a < e].sum())
    assert 0.03 < share < 0.2
    mean = float(w @ e)
    sd = float((w @ (e - mean).square()).sqrt())
    fit = ngvi.fit(model, seed=0, progress=False)
    assert fit.verdict.decision == "intervals"
    drawn = fit.sample(8000, seed=1)
    # errors of draws worth 2,000
    assert float((drawn["ka"] < drawn["ke"]).double().mean()) == pytest.approx(share, abs=0.02)
    assert float(drawn["ke"].log().mean()) == pytest.approx(mean, abs=0.08 * sd)
    assert float(drawn["ke"].log().std()) == pytest.approx(sd, rel=0.08)
