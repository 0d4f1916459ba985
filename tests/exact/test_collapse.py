"""Hierarchies without their units, and draws put right, against closed forms and grids."""

import math
import sys
import warnings
from functools import cache, partial
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoNormal
from torch import Tensor

import pyro_ngvi as ngvi
from pyro_ngvi.diagnostics import Corrected, ModelDensity, corrected, correction
from pyro_ngvi.diagnostics.draws import Fitted, guide_draws, random_state
from pyro_ngvi.diagnostics.moved import Moved
from pyro_ngvi.diagnostics.proposal import log_density
from pyro_ngvi.hierarchy.collapsed import Collapsed
from pyro_ngvi.hierarchy.marginal import found_beyond, integrated, point_count
from pyro_ngvi.hierarchy.runs import LocalSite
from pyro_ngvi.hierarchy.units import Units
from tests.covering import covering

pytestmark = pytest.mark.usefixtures("smooth_once")
Y = torch.tensor([2.0, -0.5, 1.2, 0.3, 3.1]).double()


def fitted(model: Any, *args: Any, steps: int = 20) -> Any:
    pyro.set_rng_seed(0)
    guide = ngvi.AutoHierarchical(model, locals=["u"] if model is counts else None)
    svi = SVI(model, guide, ngvi.NGVB(guide), ngvi.BatchedELBO(8))
    for _ in range(steps):
        svi.step(*args)
    return guide


def schools(y: Tensor, form: str = "centred") -> None:
    m: Any = pyro.sample("m", dist.Normal(y.new_zeros(()), 3.0))
    s: Any = pyro.sample("s", dist.LogNormal(y.new_zeros(()), 1.0))
    with pyro.plate("schools", len(y)):
        if form == "centred":
            u: Any = pyro.sample("u", dist.Normal(m, s))
        else:
            u = pyro.deterministic("u", m + s * pyro.sample("z", dist.Normal(0.0 * m, 1.0)))
        pyro.sample("y", dist.Normal(u, 0.7), obs=y)


def schools_without_units(theta: Tensor, y: Tensor = Y) -> Tensor:
    """log p(y, m, log s) in closed form, (S,)."""
    m, log_s = theta.unbind(-1)
    sd = ((2.0 * log_s).exp() + 0.49).sqrt()
    prior = dist.Normal(0.0, 3.0).log_prob(m) + dist.Normal(0.0, 1.0).log_prob(log_s)
    return dist.Normal(m[..., None], sd[..., None]).log_prob(y).sum(-1) + prior


@pytest.mark.parametrize("form", ["centred", "not"])
def test_gaussian_units_are_integrated_out_exactly(form: str) -> None:
    model = ngvi.collapse(fitted(schools, Y, form), Y, form=form)
    assert model.error < 1e-10
    theta = torch.tensor([[0.3, -2.0], [1.5, 0.4], [-4.0, 1.9]]).double().requires_grad_()
    found, wanted = ModelDensity(model)(theta), schools_without_units(theta)
    assert torch.allclose(found, wanted, rtol=0.0, atol=1e-10)
    slopes = [torch.autograd.grad(x.sum(), theta)[0] for x in (found, wanted)]
    assert torch.allclose(*slopes, rtol=0.0, atol=1e-9)


RATES = torch.tensor([[2.0, 3.0], [0.0, 0.0], [7.0, 5.0]]).double()


def counts(y: Tensor = RATES) -> None:
    """Globals in plates of their own and of the units, and data beside the units."""
    s: Any = pyro.sample("s", dist.HalfNormal(y.new_ones(())))
    with pyro.plate("items", 2):
        b: Any = pyro.sample("b", dist.Normal(y.new_zeros(()), 1.0))
        pyro.sample("seen", dist.Normal(b, s), obs=y.new_ones(2))
    with pyro.plate("units", len(y)):
        u: Any = pyro.sample("u", dist.Normal(y.new_zeros(()), s))
        c: Any = pyro.sample("c", dist.Exponential(y.new_ones(())))
        pyro.sample("y", dist.Poisson(c[..., None] * (u[..., None] + b).exp()).to_event(1), obs=y)


def counts_without_units(s: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """The log joint of one draw, by the trapezoidal rule."""
    prior = dist.HalfNormal(1.0).log_prob(s) + dist.Normal(0.0, 1.0).log_prob(b).sum()
    beside = (
        dist.Normal(b, s).log_prob(torch.ones(2)).sum() + dist.Exponential(1.0).log_prob(c).sum()
    )
    u = torch.linspace(-12.0, 12.0, 6001).double()[:, None, None]
    log_p = dist.Poisson(c[:, None] * (u + b).exp()).log_prob(RATES).sum(-1)
    of_units = torch.logsumexp(log_p + dist.Normal(0.0, s).log_prob(u[..., 0]), 0)
    return prior + beside + (of_units + math.log(24.0 / 6000.0)).sum()


@cache
def fitted_counts() -> Any:
    return fitted(counts)


def draws_of_counts() -> dict[str, Tensor]:
    b = torch.tensor([[0.3, -0.2], [0.9, 1.4]]).double()
    c = torch.tensor([[1.0, 0.3, 2.0], [0.2, 0.9, 4.0]]).double()
    return {"s": torch.tensor([0.6, 1.1]).double(), "b": b, "c": c}


def test_the_rest_is_what_a_fine_grid_gives() -> None:
    model, values = ngvi.collapse(fitted_counts()), draws_of_counts()
    for i in range(2):
        at = {name: x[i] for name, x in values.items()}
        found = poutine.trace(poutine.condition(model, at)).get_trace().log_prob_sum()
        assert float(found) == pytest.approx(float(counts_without_units(**at)), abs=2e-5)


SCHOOL_OF = torch.tensor([3, 0, 1, 1, 4, 0, 2, 3, 1])
SCORES = torch.tensor([1.0, 2.0, -0.5, 0.7, 3.1, 2.2, 0.3, 0.1, -1.0]).double()


def test_data_in_a_plate_of_their_own_are_those_of_their_units() -> None:
    """School 5 has no data; those of "level", and of one entry of "y" besides, are of no school."""

    def by_index(y: Tensor = SCORES) -> None:
        m: Any = pyro.sample("m", dist.Normal(y.new_zeros(()), 3.0))
        s: Any = pyro.sample("s", dist.LogNormal(y.new_zeros(()), 1.0))
        with pyro.plate("schools", 6):
            u: Any = pyro.sample("u", dist.Normal(m, s))
        means = torch.cat([u[..., SCHOOL_OF], m.expand(u.shape[:-1])[..., None]], -1)
        with pyro.plate("data", len(y) + 1), poutine.scale(scale=2.0):
            pyro.sample("y", dist.Normal(means, 0.7), obs=torch.cat([y, y.new_tensor([1.5])]))
        pyro.sample("level", dist.Normal(m, 2.0), obs=y.new_tensor(0.4))

    model = ngvi.collapse(fitted(by_index))
    theta = torch.tensor([[0.3, -2.0], [1.5, 0.4], [-4.0, 1.9]]).double().requires_grad_()
    m, log_s = theta.unbind(-1)
    beside = dist.Normal(0.0, 3.0).log_prob(m) + dist.Normal(0.0, 1.0).log_prob(log_s)
    beside = beside + dist.Normal(m, 2.0).log_prob(torch.tensor(0.4))
    beside = beside + 2.0 * dist.Normal(m, 0.7).log_prob(torch.tensor(1.5))
    u = torch.linspace(-80.0, 80.0, 80_001).double()[:, None]  # the trapezoidal rule
    log_p = dist.Normal(u, 0.7).log_prob(SCORES)
    each = torch.zeros(len(u), 6).double().index_add(1, SCHOOL_OF, 2.0 * log_p)
    prior = dist.Normal(m, log_s.exp()).log_prob(u)[..., None]
    of_units = torch.logsumexp(each[:, None] + prior, 0) + math.log(160.0 / 80_000.0)
    wanted, found = beside + of_units.sum(-1), ModelDensity(model)(theta)
    assert torch.allclose(found, wanted, rtol=0.0, atol=1e-8)
    slopes = [torch.autograd.grad(x.sum(), theta)[0] for x in (found, wanted)]
    assert torch.allclose(*slopes, rtol=0.0, atol=1e-7)


ONE = torch.ones(()).double()
#: log densities of data that are flat at effects of 9 and 12, by NaN and by numbers as it may be
CEILING: dict[str, Any] = {
    "clamp": lambda u, b: dist.Normal(b * u.clamp_max(1.0), 0.5).log_prob(SCORES[:6]),
    "where": lambda u, b: dist.Normal(b * torch.where(u < 1.0, u, 1.0), 0.5).log_prob(SCORES[:6]),
    "probit": lambda u, b: torch.special.ndtr(u + b).log(),
    "censored": lambda u, b: (
        dist.Bernoulli(logits=20.0 * (5.0 - u)).log_prob(ONE).clamp_min(-30.0) - b.abs()
    ),
}
MEASURED, UNIT_OF = torch.tensor([0.0, 9.0, 12.0]).double(), torch.tensor([1, 0, 2, 2, 1, 0])


def on_a_ceiling(form: str, design: Tensor | None = None) -> None:
    b: Any = pyro.sample("b", dist.Normal(Y.new_zeros(()), 1.0))
    with pyro.plate("units", 3):
        u: Any = pyro.sample("u", dist.Normal(3.0 + 0.0 * b, 8.0))
        pyro.sample("z", dist.Normal(u, 0.1), obs=MEASURED)
    with pyro.plate("data", 6):
        pyro.factor("y", CEILING[form](u[..., UNIT_OF] if design is None else u @ design, b))


@pytest.mark.parametrize(("form", "by"), covering(CEILING, ["index", "matrix"], strength=1))
def test_data_that_do_not_respond_where_their_units_are_are_theirs(form: str, by: str) -> None:
    design = torch.nn.functional.one_hot(UNIT_OF).double().mT if by == "matrix" else None
    model = ngvi.collapse(fitted(on_a_ceiling, form, design), form, design)
    assert torch.equal(model.call.owners["y"], UNIT_OF)
    u = torch.linspace(-2.0, 14.0, 32_001).double()[:, None]  # the trapezoidal rule
    for b in torch.tensor([-0.7, 0.4, 2.0]).double():
        log_p = CEILING[form](u.expand(-1, 6), b)
        of_units = torch.zeros(len(u), 3).double().index_add(1, UNIT_OF, log_p)
        of_units += dist.Normal(u, 0.1).log_prob(MEASURED) + dist.Normal(3.0, 8.0).log_prob(u)
        wanted = (
            of_units.logsumexp(0).sum() + 3.0 * math.log(5e-4) + dist.Normal(0.0, 1.0).log_prob(b)
        )
        found = poutine.trace(poutine.condition(model, {"b": b})).get_trace().log_prob_sum()
        assert float(found) == pytest.approx(float(wanted), abs=1e-5)


#: where unit 1 is by two of its three data, hardly any other is
OUTLIERS = [
    [0.0, 0.3, -0.2],
    [10.0, 0.1, 9.5],
    [12.0, 0.0, 0.1],
    [1.0, 2.0, 3.0],
    [-3.0, -2.5, 5.0],
]
OUTLIERS += [[4.0, 4.2, 4.1], [2.0, -6.0, 2.1], [0.5, 1.0, 7.0]]


def heavy(y: Tensor) -> None:
    m: Any = pyro.sample("m", dist.Normal(y.new_zeros(()), 3.0))
    s: Any = pyro.sample("s", dist.HalfNormal(y.new_tensor(5.0)))
    with pyro.plate("units", len(y)):
        u: Any = pyro.sample("u", dist.Normal(m, s))
        pyro.sample("y", dist.StudentT(2.0, u[..., None], 0.3).to_event(1), obs=y)


def test_a_mode_that_the_quadrature_misses_is_found() -> None:
    y = torch.tensor(OUTLIERS).double()
    guide = fitted(heavy, y)
    with pytest.warns(RuntimeWarning, match="Quadrature misses part of 1 of the 8 .* of unit 1,"):
        model = ngvi.collapse(guide, y)
    assert list(model.missed) == [1]
    with pytest.warns(RuntimeWarning, match="misses part of"):
        found = ngvi.to_arviz(heavy, guide, y, corrected=True, seed=0).attrs
    assert found["decision"] == "unusable" and "unit 1, " in found["verdict"]
    # at one draw of v against the trapezoidal rule
    m, s = torch.tensor([1.0]).double(), torch.tensor([3.0]).double()
    given = guide.units.given(model.call, {"m": m, "s": s})
    q = guide._conditionals(given)
    with torch.no_grad():
        torch.manual_seed(0)
        log_l = integrated(guide.units, given, q, 40).log_marginals
        beyond, error = found_beyond(guide.units, given, q, log_l)
        log_l = log_l[0]
    u = torch.linspace(-40.0, 42.0, 82_001).double()[:, None]
    log_p = dist.StudentT(2.0, u[..., None], 0.3).log_prob(y).sum(-1) + dist.Normal(m, s).log_prob(
        u
    )
    wanted = (log_p.logsumexp(0) + math.log(1e-3) - log_l).expm1()
    assert wanted[1] > 1.0
    assert ((beyond - wanted).abs() < 4.0 * error + 1e-3).all()  # 4 standard errors


def covariates(y: Tensor, k: int) -> None:
    """Missing ones, k a row."""
    b: Any = pyro.sample("b", dist.Normal(y.new_zeros(()), 2.5))
    with pyro.plate("rows", len(y)):
        x: Any = pyro.sample("u", dist.Normal(y.new_zeros(k), 1.0).to_event(1))
        pyro.sample("y", dist.Bernoulli(logits=0.4 + b * x.sum(-1)), obs=y)


def test_a_coefficient_that_is_0_at_first_is_no_scale_of_the_data() -> None:
    """All slopes vanish there, which says nothing of factors; sds of data are scales."""
    y = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 1.0]).double()
    assert fitted(lambda: covariates(y, 1), steps=1).units.growing == ()

    def noisy() -> None:
        b: Any = pyro.sample("b", dist.Normal(y.new_zeros(()), 2.5))
        s: Any = pyro.sample("s", dist.LogNormal(y.new_zeros(()), 1.0))
        with pyro.plate("rows", len(y)):
            x: Any = pyro.sample("u", dist.Normal(y.new_zeros(()), 1.0))
            pyro.sample("y", dist.Normal(b * x, s), obs=y)

    assert fitted(noisy, steps=1).units.growing == ("s",)


@pytest.mark.parametrize("k", [1, 2])
def test_sites_that_lead_astray_far_from_the_guide_are_led_back(k: int) -> None:
    """Near b = 0 what data say of x grows by another factor with b than elsewhere: at b = 1 the sites
    of a fit that had stuck there lay hundreds of sds away, and weights saw nothing of b > 0.8."""
    y = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 1.0]).double()
    guide = fitted(lambda: covariates(y, k))
    b = torch.tensor([0.1, 0.5, 1.0, 2.0]).double()
    x, w = (torch.as_tensor(a) for a in np.polynomial.hermite_e.hermegauss(100))
    logits = 0.4 + b[:, None] * k**0.5 * x  # the sum of x is N(0, k)
    log_p = dist.Bernoulli(logits=logits[:, None]).log_prob(y[:, None])
    exact = (log_p + (w / w.sum()).log()).logsumexp(-1)
    sites = guide.sites
    sites.growth.fill_(9.0)
    sites.linear.mul_(30.0)
    astray = Collapsed(guide, (), {}, None)
    assert astray._leads_back
    found = astray.log_marginals({"b": b})
    # by 20 points, and by 7 x 7
    torch.testing.assert_close(found, exact, rtol=0.0, atol=1e-4 if k == 1 else 5e-3)
    astray._leads_back = False
    assert float((astray.log_marginals({"b": b}) - exact).abs().max()) > 10.0


@pytest.mark.parametrize("seed", range(2))
def test_heavy_tails_that_fit_their_data_are_not_doubted(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    u = torch.randn(12, 1, generator=generator).double()
    noise = torch.randn(12, 5, generator=generator).double()
    chi = torch.randn(12, 5, 2, generator=generator).double().square().mean(-1)
    assert not ngvi.collapse(fitted(heavy, y := u + 0.3 * noise / chi.sqrt()), y).missed


def test_two_latent_variables_of_a_unit() -> None:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0)).double()
    y = (x > 0.4).double()

    def slopes() -> None:
        s: Any = pyro.sample("s", dist.HalfNormal(x.new_ones(())))
        with pyro.plate("units", 4):
            u: Any = pyro.sample("u", dist.Normal(x.new_zeros(2), s).to_event(1))
            logits = u[..., :1] + u[..., 1:] * x
            pyro.sample("y", dist.Bernoulli(logits=logits).to_event(1), obs=y)

    model, s = ngvi.collapse(fitted(slopes), points=12), torch.tensor(0.8).double()
    line = torch.linspace(-8.0, 8.0, 401).double()
    u = torch.cartesian_prod(line, line)[:, None]
    log_p = dist.Bernoulli(logits=u[..., :1] + u[..., 1:] * x).log_prob(y)
    log_p = log_p.sum(-1) + dist.Normal(0.0, s).log_prob(u).sum(-1)
    wanted = torch.logsumexp(log_p, 0) + 2.0 * math.log(16.0 / 400.0)
    assert torch.allclose(model.log_marginals({"s": s[None]})[0], wanted, rtol=0.0, atol=1e-6)


def test_particles_of_pyro_and_of_ours_are_those_one_by_one() -> None:
    model = ngvi.collapse(fitted_counts())
    guide, width = AutoNormal(model), 2  # of the dimensions that the model takes for plates
    guide()
    values = draws_of_counts()
    one = [counts_without_units(**{n: x[i] for n, x in values.items()}) for i in range(2)]
    shaped = {
        n: x.reshape(2, *[1] * (width + 1 - x.dim()), *x.shape[1:]) for n, x in values.items()
    }
    with pyro.plate("particles", 2, dim=-width - 1):
        trace = poutine.trace(poutine.condition(model, shaped)).get_trace()
    trace.compute_log_prob()
    found = sum(
        x["log_prob"].expand(2, *x["log_prob"].shape[1:]).reshape(2, -1).sum(-1)
        for name, x in trace.nodes.items()
        if name != "particles" and "log_prob" in x
    )
    assert torch.allclose(torch.as_tensor(found), torch.stack(one), rtol=0.0, atol=2e-5)
    adam = pyro.optim.Adam({"lr": 0.01})  # pyright: ignore[reportAttributeAccessIssue]
    losses = []
    for loss in (Trace_ELBO(300, vectorize_particles=True), ngvi.BatchedELBO(300)):
        pyro.set_rng_seed(1)
        losses.append(SVI(model, guide, adam, loss).evaluate_loss())
    # the guide is narrow: the loss has a standard error of some .05
    assert losses[0] == pytest.approx(losses[1], abs=0.3)


def test_units_are_drawn_from_their_posterior_given_the_globals() -> None:
    model, values = ngvi.collapse(fitted_counts()), draws_of_counts()
    n = 4000
    many = {name: x[1].expand(n, *x[1].shape) for name, x in values.items()}
    pyro.set_rng_seed(0)
    drawn = model.draw_units(many)["u"]
    u = torch.linspace(-12.0, 12.0, 24001).double()
    rate = values["c"][1][:, None] * (u[:, None, None] + values["b"][1]).exp()
    log_p = dist.Poisson(rate).log_prob(RATES).sum(-1)
    cdf = torch.softmax(log_p + dist.Normal(0.0, values["s"][1]).log_prob(u)[:, None], 0).cumsum(0)
    for i in range(3):
        at = cdf[torch.searchsorted(u, drawn[:, i].contiguous()), i].sort().values
        # Kolmogorov's statistic exceeds 1.95 with probability 1e-3
        away = (at - (torch.arange(n) + 0.5) / n).abs().max()
        assert away * n**0.5 < 1.95


def test_corrected_draws_of_schools_are_those_of_the_grid() -> None:
    guide = fitted(schools, Y, steps=60)
    theta = torch.cartesian_prod(*(torch.linspace(-15.0, 15.0, 601).double(),) * 2)
    log_p = schools_without_units(theta)
    w = torch.softmax(log_p, 0)
    evidence = torch.logsumexp(log_p, 0) + 2.0 * math.log(0.05)
    # given m and s an effect is normal
    precision = (-2.0 * theta[:, 1]).exp() + 1.0 / 0.49
    mean = (theta[:, :1] * (-2.0 * theta[:, 1:]).exp() + Y / 0.49) / precision[:, None]
    moments = [torch.stack([theta[:, 0], theta[:, 1]], -1), theta.square(), mean]
    moments.append(mean.square() + 1.0 / precision[:, None])
    wanted = torch.cat([w @ x for x in moments])
    n = 4000
    data = ngvi.to_arviz(schools, guide, Y, num_samples=n, seed=0, corrected=True)
    m, s, u = (torch.from_numpy(data["posterior"][x].values[0]).reshape(n, -1) for x in "msu")
    v = torch.cat([m, s.log()], -1)
    draws = torch.cat([v, v.square(), u, u.square()], -1)
    ess = float(data.attrs["resample_ess"])
    assert data.attrs["khat"] < 0.6 and ess > 0.6 * n
    assert data.attrs["decision"] == "intervals" and data.attrs["guide"] == "AutoHierarchical"
    z = (draws.mean(0) - wanted) / draws.std(0) * ess**0.5
    assert z.abs().max() < 3.5
    # log p(v, y) - log r(v) are the weights, whatever the units are: their mean is the evidence
    weights = data["sample_stats"]
    log_ratio = torch.from_numpy((weights["lp"] - weights["log_q"]).values[0])
    found = torch.logsumexp(log_ratio, 0) - math.log(n)
    assert float(found - evidence) == pytest.approx(0.0, abs=4.0 * (1.0 / ess - 1.0 / n) ** 0.5)
    raw = ngvi.to_arviz(schools, guide, Y, num_samples=n, seed=0)["posterior"]["s"].values
    short = torch.from_numpy(raw).log().std() / v[:, 1].std()
    assert short < 0.9  # without the correction


def test_weights_do_not_decay_with_the_number_of_units() -> None:
    y = 2.0 + torch.randn(200, generator=torch.Generator().manual_seed(1)).double()

    def model(y: Tensor) -> None:
        m: Any = pyro.sample("m", dist.Normal(y.new_zeros(()), 3.0))
        with pyro.plate("units", len(y)):
            u: Any = pyro.sample("u", dist.Normal(m, 0.8))
            pyro.sample("y", dist.StudentT(4.0, u, 0.5), obs=y)

    guide = fitted(model, y, steps=25)
    joint = ngvi.khat(model, guide, y, num_samples=200, seed=1)
    found = ngvi.khat(model, corrected(guide, y), y, num_samples=200, seed=1)
    assert joint.ess < 30 and found.ess > 120


@pytest.mark.parametrize("copies", [10.0, 1.0])
def test_no_draw_stands_for_many_where_more_can_be_had(
    copies: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that comes 36 times among 1,000 moves the ends of intervals."""
    monkeypatch.setattr("pyro_ngvi.diagnostics.correction.COPIES", copies)
    monkeypatch.setattr("pyro_ngvi.diagnostics.correction.SHARE", 0.0)
    pyro.set_rng_seed(0)
    guide = fitted(schools, Y, steps=60)
    data = ngvi.to_arviz(schools, guide, Y, num_samples=500, seed=0, corrected=True)
    stats = {name: x.values[0] for name, x in data["sample_stats"].items()}
    many = copies == 1.0
    assert data.attrs["khat_samples"] >= (2000 if many else 500)
    assert len(stats["lp"]) == len(data["posterior"]["s"].values[0]) == 500
    chosen = stats["resampled_from"]
    assert (chosen.max() >= 500) == many and np.unique(chosen).size > (450 if many else 300)
    if many:  # of the draws that were taken
        values = {n: torch.as_tensor(data["posterior"][n].values[0, 7]) for n in "msu"}
        trace = pyro.poutine.trace(pyro.condition(schools, data=values)).get_trace(Y)
        assert stats["lp"][7] == pytest.approx(float(trace.log_prob_sum()))
    draws = correction.resampled(corrected(guide, Y), 500)
    assert {name: len(x) for name, x in draws.items()} == dict.fromkeys("msu", 500)


def test_the_verdict_on_a_hierarchy_and_its_table_tell_of_the_correction(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = sys.modules["pyro_ngvi.diagnostics.moved"]
    monkeypatch.setattr(module, "COARSE_SD", 0.05)  # the sd of s is off by more
    pyro.set_rng_seed(0)
    fit = ngvi.fit(schools, Y, guide="AutoHierarchical", seed=0, max_steps=30, progress=False)
    assert isinstance(
        fit.verdict, Corrected
    ) and "All that is read of this fit is corrected" in str(fit)
    assert "to_arviz(corrected=True)" not in str(fit)
    # at another seed too, and by fewer draws than the verdict is from
    table = str(ngvi.summary(fit.to_arviz(num_samples=300, seed=1)))
    assert "Take the corrected intervals" in table and "Of the raw draws" not in table


def test_scales_that_are_rounded_to_zero_weigh_nothing() -> None:
    """Of a few thousand draws of two studies' heterogeneity, in float32: no correction was found."""
    y, sd = torch.tensor([[0.2, 0.4], [0.1, 0.3]]).float()

    def studies(y: Tensor, sd: Tensor) -> None:
        mu: Any = pyro.sample("mu", dist.Normal(y.new_zeros(()), 1.0))
        tau: Any = pyro.sample("tau", dist.HalfNormal(y.new_tensor(0.5)))
        with pyro.plate("studies", len(y)):
            theta = pyro.sample("theta", dist.Normal(mu, tau))
            pyro.sample("y", dist.Normal(theta, sd), obs=y)

    fit = ngvi.fit(studies, y, sd, seed=1, progress=False)
    assert isinstance(fit.verdict, Corrected)
    # mu integrated out, on a grid of log tau
    x = torch.linspace(-12.0, 2.0, 4000)
    v = (2.0 * x).exp().unsqueeze(-1) + sd.double() ** 2
    precision, at = 1.0 + (1.0 / v).sum(-1), (y.double() / v).sum(-1)
    log_p = at**2 / precision - (y.double() ** 2 / v + v.log()).sum(-1) - precision.log()
    p = torch.softmax(0.5 * log_p - 2.0 * (2.0 * x).exp() + x, 0)
    mean = p @ x
    log_tau = fit.sample(4000, seed=0)["tau"].double().log()
    assert abs(float(log_tau.mean() - mean)) < 0.1
    assert abs(float(log_tau.std() / (p @ (x - mean) ** 2).sqrt()) - 1.0) < 0.1


def few_successes(y: Tensor) -> None:
    mu: Any = pyro.sample("mu", dist.Normal(y.new_zeros(()), 5.0))
    sd: Any = pyro.sample("sd", dist.HalfCauchy(y.new_ones(())))
    with pyro.plate("groups", len(y)):
        t: Any = pyro.sample("t", dist.Normal(mu, sd))
        pyro.sample("y", dist.Binomial(12, logits=t), obs=y)


def test_corrected_draws_take_the_points_that_a_long_tail_needs() -> None:
    """Far out in sd the points around q(t | v) are too few: .16 nats too low at sd = 6, .9 at 10."""
    y = torch.tensor([0.0, 1.0, 0.0, 0.0, 2.0, 0.0]).double()
    guide = fitted(few_successes, y)
    exact = corrected(guide, y)
    assert exact.collapsed.point_count >= 40 and ngvi.collapse(guide, y).point_count == 20

    z = torch.linspace(-9.0, 9.0, 4_001).double()[:, None]  # the trapezoidal rule
    for mu, sd, error in ((-4.0, 4.0, 0.01), (-5.0, 6.0, 0.03)):
        t = mu + sd * z
        of_groups = dist.Binomial(12, logits=t).log_prob(y) + dist.Normal(0.0, 1.0).log_prob(z)
        wanted = of_groups.logsumexp(0) + math.log(float(z[1] - z[0]))
        v = {"mu": torch.tensor([mu]).double(), "sd": torch.tensor([sd]).double()}
        found = exact.collapsed.log_marginals(v)[0]
        assert abs(float((found - wanted).sum())) < error


SUCCESSES = torch.tensor([0.0, 1.0, 0.0, 0.0, 2.0, 0.0]).double()


def test_corrected_draws_have_the_weights_of_their_globals_in_large_pieces(monkeypatch) -> None:
    exact, pieces = corrected(fitted(few_successes, SUCCESSES), SUCCESSES), []
    model, drawn = exact.collapsed, Collapsed.drawn
    of_both = Fitted(few_successes, exact, (SUCCESSES,), {})
    model.room = 3.0

    def counted(self: Any, values: Any) -> Any:
        pieces.append(len(values["sd"]))
        return drawn(self, values)

    monkeypatch.setattr(Collapsed, "drawn", counted)
    with random_state(1):
        draws = of_both.draw(100, None)
    assert pieces == [48, 48, 4]
    with random_state(1):
        values, (log_r, _) = guide_draws(partial(exact.globals), 100)
    assert all(torch.equal(x, draws.values[name]) for name, x in values.items())
    log_p = log_density(model, model.layout, model.layout.pack(values))
    wanted = log_p - log_r
    assert torch.allclose(draws.log_joint - draws.log_q, wanted, rtol=0.0, atol=1e-9)


def test_more_draws_are_of_the_same_proposal(monkeypatch: pytest.MonkeyPatch) -> None:
    guide, refined, seen = fitted(few_successes, SUCCESSES), correction.refined, []
    monkeypatch.setattr(Moved, "is_good", False)
    monkeypatch.setattr(Moved, "is_off", False)
    monkeypatch.setattr(correction, "PATIENCE", float("inf"))

    def counted(*how: Any) -> Any:
        seen.append(refined(*how))
        return seen[-1]

    monkeypatch.setattr(correction, "refined", counted)
    with random_state(0):
        found = correction.moved_by_weights(few_successes, guide, (SUCCESSES,), {}, 400)
    assert found is not None and [found[2][0]] == seen
    assert len(found[2][1].log_weights) == correction.MORE
    # where more draws refuse, what is read later has the weights of the verdict, not theirs
    monkeypatch.setattr(correction, "can_weigh", lambda weights: len(weights.log_weights) == 400)
    with random_state(0):
        found = correction.moved_by_weights(few_successes, guide, (SUCCESSES,), {}, 400)
    assert found is not None and found[2][0].judged is found[2][1]
    assert len(found[2][1].log_weights) == 400


def test_moments_where_the_outer_points_have_no_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of 100 points underflow in float32; N(u; 0, 1) N(1; u, .5^2) has mean .8."""
    monkeypatch.setattr("pyro_ngvi.hierarchy.marginal.AT_ONCE", 1)  # a point after the other
    y = torch.ones(2, dtype=torch.float32)

    def model() -> None:
        pyro.sample("m", dist.Normal(y.new_zeros(()), 1.0))
        with pyro.plate("units", 2):
            u: Any = pyro.sample("u", dist.Normal(y.new_zeros(()), 1.0))
            pyro.sample("y", dist.Normal(u, 0.5), obs=y)

    guide = ngvi.AutoHierarchical(model)
    guide()
    given = guide.units.given(guide._call((), {}), {"m": y.new_zeros(3)})
    q = guide._conditionals(given)
    found = integrated(guide.units, given, q, 100)
    assert found.mean.isfinite().all()
    white = q.drawn(found.mean[None])[0]  # u, whose prior is white; its mean is linear in the noise
    torch.testing.assert_close(white, torch.full_like(white, 0.8), rtol=0.0, atol=1e-4)


def test_points_of_a_small_block_lean_little_with_the_scale_of_its_effects() -> None:
    """Crossed effects 6 x 5, binary: errors at scales from .3 to 2.5 differ by a third of what they did
    with 16 points, by the root of the mean square over six sets of either, against 8,192 points."""
    y = torch.ones(6, 5).double()
    y[:, 0], y[::2, 4] = 0.0, 0.0  # of a column data say that its effect is small, and no more

    def crossed(y: Tensor) -> None:
        m: Any = pyro.sample("m", dist.Normal(y.new_zeros(()), 2.0))
        sa: Any = pyro.sample("sa", dist.HalfNormal(y.new_ones(())))
        sb: Any = pyro.sample("sb", dist.HalfNormal(y.new_ones(())))
        with pyro.plate("A", 6, dim=-2):
            a = pyro.sample("a", dist.Normal(0.0, sa))
        with pyro.plate("B", 5, dim=-1):
            b = pyro.sample("b", dist.Normal(0.0, sb))
        with pyro.plate("rows", 6, dim=-2), pyro.plate("columns", 5, dim=-1):
            pyro.sample("y", dist.Bernoulli(logits=m + a + b), obs=y)

    guide = fitted(crossed, y)
    assert guide.units.width == 12 and point_count(guide.units, None) == (128, 128)
    sb = torch.tensor([0.3, 0.8, 1.5, 2.5]).double()
    at = {"sa": torch.full_like(sb, 0.8), "sb": sb}

    def errors(*counts: int) -> Tensor:
        found = [ngvi.collapse(guide, y, points=n).log_marginals(at)[:, 0] for n in counts]
        return torch.stack(found)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # so few are rough
        exact = errors(8192)
        few, many = (errors(*range(n - 6, n + 6, 2)) - exact for n in (16, 128))
    few, many = ((x - x.mean(1, keepdim=True)).square().mean() ** 0.5 for x in (few, many))
    assert float(many) < 0.1 and float(many) < 0.6 * float(few)


@pytest.mark.parametrize(("width", "count"), [(4, 128), (22, 128), (32, 64), (64, 16), (500, 16)])
def test_large_blocks_have_fewer_points(width: int, count: int) -> None:
    site = LocalSite("u", torch.Size([width]), None)
    units = Units(None, None, 1, (site,), ("s",))
    assert units.is_block and point_count(units, None) == (count, count)
