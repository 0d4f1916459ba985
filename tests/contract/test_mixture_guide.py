"""AutoMixtureNormal as a guide: starts, saving, minibatches, what is refused, and modes that stay."""

from __future__ import annotations

import copy
import math
from functools import partial
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI

import pyro_ngvi as ngvi
from pyro_ngvi.diagnostics import by_weights
from pyro_ngvi.guides.laplace import Search
from pyro_ngvi.guides.marginals import SiteValue
from pyro_ngvi.guides.scouts import led
from tests.contract.registry import data, regression


def two_moons() -> None:
    """Two bent modes of the same mass (Rezende & Mohamed 2015)."""
    prior: Any = dist.Normal(torch.zeros(2), 3.0).to_event(1)
    z = pyro.sample("z", prior)
    ring = ((z.norm() - 2.0) / 0.4).square()
    sides = torch.stack([z[0] - 2.0, z[0] + 2.0]).div(0.6).square()
    pyro.factor("moons", (-0.5 * sides).logsumexp(0) - 0.5 * ring - prior.log_prob(z))


def trained(model: Any, steps: int, *args: Any, **how: Any) -> tuple[Any, Any]:
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    guide = ngvi.AutoMixtureNormal(model, **how)
    svi: Any = SVI(model, guide, ngvi.NGVB(guide), ngvi.BatchedELBO(4))
    for _ in range(steps):
        svi.step(*args)
    return guide, svi


@pytest.mark.parametrize(
    ("covariance", "search", "steps"),
    [pytest.param("full", True, 1000, marks=pytest.mark.slow), ("diagonal", False, 150)],
)
def test_both_modes_stay_alive(
    covariance: str, search: bool, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The share of one of two equal modes, by 4,000 draws, has a standard error of 0.008.

    Without a search all eight components start in a cloud around the centre, between the modes.
    """
    how: dict[str, Any] = {} if search else {"init": None, "init_scale": 2.0}
    # components that are in use already may move nine times, in either number of steps
    monkeypatch.setattr("pyro_ngvi.optim.mixture.WAIT", steps / 10)
    guide, _ = trained(two_moons, steps, num_components=8, covariance=covariance, **how)
    z = guide.get_posterior().sample((4000,))
    assert 0.4 < (z[:, 0] > 0).double().mean() < 0.6
    assert (guide.weights > 1e-3).sum() >= 6
    grid = torch.linspace(-5.0, 5.0, 101)
    density = ngvi.diagnostics.ModelDensity(two_moons)
    points = torch.cartesian_prod(grid, grid)
    evidence = density(points).logsumexp(0) + 2.0 * math.log(10.0 / 100)
    ratio = density(z) - guide.get_posterior().log_prob(z)
    # one Gaussian lacks 0.93 nats, one in each mode 0.18
    assert evidence - ratio.mean() < 0.04 + 4.0 * ratio.std() / 4000**0.5


@pytest.mark.parametrize("seed", [0, 3])
def test_a_path_that_ends_on_a_slope_is_no_mode(seed: int) -> None:
    """Newton steps from the centre end at the saddle between two labels."""
    g = torch.Generator().manual_seed(seed)
    y = torch.cat([torch.randn(30, generator=g) - 2.0, torch.randn(15, generator=g) + 2.0])

    def model() -> None:
        loc = pyro.sample("loc", dist.Normal(torch.zeros(2), 5.0).to_event(1))
        terms = dist.Normal(loc, 1.0).log_prob(y.unsqueeze(-1)) - math.log(2.0)
        pyro.factor("y", terms.logsumexp(-1).sum())

    guide, _ = trained(model, 40, num_components=2)
    torch.testing.assert_close(guide.weights, torch.full((2,), 0.5), rtol=0.0, atol=0.02)
    grid = torch.linspace(-6.0, 6.0, 151)  # deviations of 0.2
    density = ngvi.diagnostics.ModelDensity(model)
    evidence = density(torch.cartesian_prod(grid, grid)).logsumexp(0) + 2.0 * math.log(0.08)
    found = ngvi.khat(model, guide, seed=0, num_samples=2000)
    assert abs(found.elbo - float(evidence)) < 0.05 + 4.0 * found.elbo_error


def test_a_run_goes_on_where_it_was_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit, from parameters, state and random state."""
    monkeypatch.setattr("pyro_ngvi.optim.mixture.WAIT", 8.0)  # components may have moved
    steps = 16
    whole, _ = trained(two_moons, 2 * steps, num_components=3, init=None)
    _, svi = trained(two_moons, steps, num_components=3, init=None)
    saved = svi.guide.state_dict(), svi.optim.get_state(), torch.get_rng_state()
    pyro.clear_param_store()
    guide = ngvi.AutoMixtureNormal(two_moons, 3, init=None)
    optim = ngvi.NGVB(guide)
    again: Any = SVI(two_moons, guide, optim, ngvi.BatchedELBO(4))
    guide()
    guide.load_state_dict(saved[0])
    optim.set_state(saved[1])
    again.loss(two_moons, guide)  # the checks of the first call draw in a state of their own
    torch.set_rng_state(saved[2])
    for _ in range(steps):
        again.step()
    for name, p in whole.natural_params().items():
        assert torch.equal(p, guide.natural_params()[name]), name


def test_copies_draw_as_the_original() -> None:
    guide, _ = trained(two_moons, 20, num_components=3)
    other = copy.deepcopy(guide)
    draws = []
    for g in (guide, other):
        torch.manual_seed(1)
        draws.append(g()["z"])
    assert torch.equal(*draws)
    assert torch.equal(guide.weights, other.weights)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_minibatches_start_at_points_apart_and_learn(dtype: torch.dtype) -> None:
    """The posterior is one Gaussian; without a search, components come from the prior."""
    X, y = data(dtype)
    guide, svi = trained(regression, 80, X, y, 3, num_components=2)
    assert guide.start_report is None
    precision = torch.eye(3, dtype=dtype) + X.mT @ X
    exact = torch.linalg.solve(precision, X.mT @ y)
    sd = torch.linalg.inv(precision).diagonal().sqrt()
    assert ((guide.get_posterior().mean - exact).abs() < sd).all()
    assert guide.loc.dtype == dtype and svi.optim.report().skipped == 0


def test_the_answer_goes_where_those_of_other_guides_go() -> None:
    guide, svi = trained(two_moons, 30, num_components=4)
    stop = ngvi.StopRule(svi, max_steps=10)
    while not stop(svi.step()):
        pass
    assert ngvi.khat(two_moons, guide).khat < 0.7
    idata = ngvi.to_arviz(two_moons, guide, num_samples=500)
    assert idata.posterior["z"].shape == (1, 500, 2)
    low, middle, high = guide.quantiles([0.05, 0.5, 0.95])["z"][:, 0]
    assert low < -1.5 < middle < 1.5 < high
    with pytest.raises(NotImplementedError, match="AutoMixtureNormal does not map"):
        ngvi.neutra(two_moons, guide)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"num_components": 0}, "num_components must be a whole number from 1, got 0"),
        ({"num_components": 2.5}, "num_components must be a whole number from 1, got 2.5"),
        ({"num_components": 2, "covariance": "low"}, "covariance must be 'full' or 'diagonal'"),
    ],
)
def test_arguments_out_of_range(how: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ngvi.AutoMixtureNormal(two_moons, **how)


def test_natural_coordinates_are_refused() -> None:
    with pytest.raises(ValueError, match="coordinates='natural' is not available"):
        ngvi.NGVB(ngvi.AutoMixtureNormal(two_moons, 2), coordinates="natural")


def two_shares(share: float = 0.85) -> None:
    """Two Gaussians far apart, of these shares of the mass."""
    z: Any = pyro.sample("z", dist.Normal(0.0, 8.0))
    shares, places = torch.tensor([share, 1.0 - share]), torch.tensor([-4.0, 6.0])
    parts = shares.log() + dist.Normal(places, torch.tensor([0.5, 2.0])).log_prob(z[..., None])
    pyro.factor("f", parts.logsumexp(-1) - dist.Normal(0.0, 8.0).log_prob(z))


def test_chains_of_each_mode_judge_an_exact_mixture() -> None:
    guide, _ = trained(two_shares, 5, num_components=2)
    assert guide.modes.tolist() == [0, 1] and not guide.lost
    found = ngvi.diagnose(two_shares, guide)
    assert found.modes == 2 and found.ok and "in each of 2 modes" in found.verdict
    assert found.sites["z"].mean.shape == (2,)

    class Narrow(torch.nn.Module):  # in one mode, where weights have no tail to tell of it
        modes_at = staticmethod(guide.modes_at)

        def forward(self) -> Any:
            q = guide.get_posterior().sample(())
            own = torch.where(q < 0.0, -4.0 + 0.5 * (q + 4.0), q)
            log_q = guide.get_posterior().log_prob(q) + torch.where(q < 0.0, 2.0, 1.0).log().sum(-1)
            return pyro.sample("z", SiteValue(own[0], log_q, 0))

    assert ngvi.diagnose(two_shares, Narrow()).decision == "unusable"


def test_weights_judge_the_shares_of_modes() -> None:
    guide, _ = trained(two_shares, 5, num_components=2)
    wrong = ngvi.diagnose(two_shares, guide, 0.5)
    assert wrong.modes == 2 and not wrong.ok
    assert all(m.is_good for m in wrong.sites.values())


def test_components_that_overlap_are_of_one_mode() -> None:
    guide, _ = trained(two_moons, 30, num_components=6)
    in_use = [m for m in guide.modes.tolist() if m >= 0]
    assert len(set(in_use)) == 2
    z = torch.tensor([[-2.0, 0.0], [2.0, 0.0], [-1.9, 0.3]])
    left, right, also_left = guide.modes_at(z).tolist()
    assert left == also_left != right


def far_data(y: Any) -> None:
    x = pyro.sample("x", dist.Normal(0.5, 3.0))
    with pyro.plate("data", 3, subsample_size=len(y)):
        pyro.sample("y", dist.Normal(x.abs(), 0.5), obs=y)


def test_a_mode_that_minibatches_have_lost_is_told_of() -> None:
    y = torch.tensor([1.9, 2.1, 2.0])
    how: Any = {"init_loc_fn": lambda site: torch.tensor(2.0), "init_scale": 0.1, "init": None}
    one = ngvi.fit(
        far_data,
        data=list(y[:, None]),
        guide=partial(ngvi.AutoMixtureNormal, **how),
        seed=0,
        progress=False,
        max_steps=60,
    )
    assert (one.sample(100)["x"] > 0.0).all()
    # by draws of the prior; the mode has .445 of the mass, log(1 / .555) = .59 nats, seen to 4 errors
    assert one.verdict.decision == "unusable" and 0.0 < (one.khat.missed or 0.0) < 0.59 + 0.1


def test_a_component_that_died_is_told_of() -> None:
    guide, _ = trained(two_shares, 5, num_components=2)
    state = {name: x.clone() for name, x in guide.state_dict().items()}
    logits = next(name for name in state if name.endswith("logits"))
    guide.load_state_dict(state | {logits: torch.tensor([0.0, -13.8])})
    assert guide.modes.tolist() == [0, -1]
    found = ngvi.khat(two_shares, guide, seed=0)
    assert (found.modes, found.modes_held) == (2, 1) and not found.ok
    assert found.verdict.startswith("The search for a start found 2 modes of comparable mass")
    guide.start_report = None
    assert guide.lost.startswith("1 of 2 components lost their weight, and no search")


def corners() -> None:
    """Four Gaussians, of which two opposite ones have another half way between them and beside."""
    x: Any = pyro.sample("x", dist.Normal(torch.zeros(2), 20.0).to_event(1))
    loc = torch.tensor([[5.0, 5.0], [-5.0, 5.0], [5.0, -5.0], [-5.0, -5.0]])
    parts = dist.Normal(loc, 1.0).log_prob(x.unsqueeze(-2)).sum(-1)
    shares = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    pyro.factor("f", (shares + parts).logsumexp(-1) - dist.Normal(0.0, 20.0).log_prob(x).sum(-1))


def test_modes_are_counted_beyond_the_components() -> None:
    guide = ngvi.AutoMixtureNormal(corners, 2)
    guide()
    assert guide.start_report is not None and guide.start_report.modes == 4
    assert guide.loc[:, 0].sort().values.tolist() == pytest.approx([-5.0, 5.0], abs=0.1)
    found = ngvi.khat(corners, guide, seed=0)
    assert found.decision == "unclear" and found.of_modes_held.ok
    assert "found 4 modes of comparable mass, and draws of the guide are in 2" in found.verdict
    assert len(found.other_modes) <= 240


def test_a_mode_half_way_does_not_join_two_others() -> None:
    search = Search(ngvi.diagnostics.ModelDensity(corners), torch.zeros(2))
    places = torch.tensor([[5.0, 5.0], [-5.0, 5.0], [5.0, -5.0]])
    assert len(search.apart([search.gaussian(loc, torch.eye(2)) for loc in places])) == 3


@pytest.mark.parametrize("scouts", [True, False])
def test_the_ladder_has_a_component_for_each_mode(
    scouts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not scouts:  # the first search sees three, that of a mixture the fourth
        monkeypatch.setattr(Search, "scouted", lambda self, points: [])
    fit = ngvi.fit(corners, guide="auto", seed=0, progress=False, max_steps=5)
    assert [rung.guide for rung in fit.rungs[1:]] == ["AutoMixtureNormal"] * (1 + (not scouts))
    assert fit.guide.weights.tolist() == pytest.approx([0.4, 0.3, 0.2, 0.1], abs=0.01)
    assert not fit.guide.lost and abs(fit.elbo[0]) < 0.01  # the evidence is 1


def square(prior: float) -> Any:
    """Data see b^2: of the prior a third or a fourth leads to the mode with the smaller mass."""
    generator = torch.Generator().manual_seed(3)
    x = torch.rand(30, generator=generator)
    y = 1.5 * x + 0.4 * torch.randn(30, generator=generator)

    def model() -> None:
        b: Any = pyro.sample("b", dist.Normal(y.new_full((), prior), 0.8))
        s: Any = pyro.sample("s", dist.HalfNormal(y.new_ones(())))
        with pyro.plate("data", 30):
            pyro.sample("y", dist.Normal(b.square() * x, s), obs=y)

    return model


@pytest.mark.parametrize("prior", [0.3, 0.6])
def test_a_mode_that_no_path_leads_to_is_seen_from_many_points(
    prior: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By symmetry the other mode has the share 1 / (1 + exp(2 prior |b| / .64)) of the mass: draws of
    both have it (three standard errors), and components of a mixture, with no draws corrected."""
    few = by_weights.has_few
    for guide, is_few in ((None, few), ("auto", lambda guide: False)):
        monkeypatch.setattr("pyro_ngvi.diagnostics.by_weights.has_few", is_few)
        fit = ngvi.fit(square(prior), seed=0, progress=False, guide=guide)
        assert fit.verdict.decision == "intervals" and (guide or fit.khat.modes == 2)
        b = fit.sample(4000, seed=0)["b"]
        share = 1.0 / (1.0 + (2.0 * prior * b.abs() / 0.64).exp()).mean()
        assert float((b < 0.0).double().mean()) == pytest.approx(float(share), abs=0.03)
    fit = ngvi.fit(square(prior), seed=0, progress=False)
    assert fit.khat.modes == 2 and fit.verdict.decision in ("unclear", "unusable")
    monkeypatch.setattr(Search, "scouted", lambda self, points: [])
    guide = ngvi.AutoFullRankNormal(square(prior))
    guide()
    assert guide.start_report is not None
    assert guide.start_report.modes == 1 or prior == 0.3


def test_a_batch_of_points_is_led_to_the_modes_near_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyro_ngvi.guides.scouts.ENOUGH", 1.0)  # the last of five is waited for
    centres = torch.tensor([[-4.0, 1.0], [5.0, 0.0]]).double()
    scale = torch.tensor([[1.0, 0.1], [0.5, 3.0]]).double()

    def f(x: torch.Tensor) -> torch.Tensor:
        parts = dist.Normal(centres, scale).log_prob(x.unsqueeze(-2)).sum(-1)
        return -parts.logsumexp(-1).where(x[:, 0] < 50.0, torch.nan)

    points = torch.tensor([[-6.0, 0.0], [-3.0, 2.0], [6.0, 2.0], [4.0, -1.0], [60.0, 0.0]]).double()
    theta, value, log_det = led(f, points, torch.eye(2).double(), lambda x: x[:, 1] > 1e3)
    ends = centres[[0, 0, 1, 1]]  # and none from where there is no density
    assert torch.allclose(
        (theta - ends) / scale[[0, 0, 1, 1]], torch.zeros(4, 2).double(), atol=0.5
    )
    assert torch.allclose(value, f(theta)) and log_det.isfinite().all()
    # and not to what is known
    theta, *_ = led(f, points, torch.eye(2).double(), lambda x: x[:, 0] > 0.0)
    assert len(theta) == 2 and (theta[:, 0] < 0.0).all()


@pytest.mark.filterwarnings("ignore:AutoCouplingFlow")
def test_the_ladder_keeps_a_mode_that_the_first_guide_was_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A flow that goes to the other mode, with .87 of the mass, would be called good: .14 nats."""
    torch.set_default_dtype(torch.float32)  # the paths for the first guide find one of two modes
    monkeypatch.setattr(Search, "scouted", lambda self, points: [])
    monkeypatch.setattr("pyro_ngvi.diagnostics.verdict.mirrored", lambda *args: "")
    monkeypatch.setattr("pyro_ngvi.diagnostics.verdict.mass_elsewhere", lambda *args: 0.0)

    def in_the_other(guide: Any, family: Any, params: Any, *args: Any) -> Any:
        return family.init(torch.full_like(params["loc"], -3.0), 0.3)

    monkeypatch.setattr("pyro_ngvi.guides.flow.find_gaussian", in_the_other)
    torch.manual_seed(158)
    y = torch.cat([0.6 * torch.randn(9) - 3.0, 0.6 * torch.randn(8) + 3.0, torch.randn(3)])

    def model(y: torch.Tensor) -> None:
        m = pyro.sample("m", dist.Normal(0.0, 5.0))
        with pyro.plate("data", 20):
            pyro.sample("y", dist.StudentT(1.0, m, 0.4), obs=y)

    m = torch.linspace(-9.0, 9.0, 2001)
    data = dist.StudentT(1.0, m, 0.4).log_prob(y[:, None]).sum(0)
    log_p = dist.Normal(0.0, 5.0).log_prob(m) + data
    left = float(torch.softmax(log_p, 0)[m < 0.0].sum())
    fit = ngvi.fit(model, y, guide="auto", seed=0, progress=False)
    names = ["AutoFullRankNormal", "AutoCouplingFlow", "AutoMixtureNormal"]
    assert [rung.guide for rung in fit.rungs] == names
    assert [rung.decision for rung in fit.rungs[:2]] == ["unusable", "intervals"]
    share = float((fit.sample(4000, seed=0)["m"] < 0.0).double().mean())
    assert abs(share - left) < 4.0 * (left * (1.0 - left) / 4000) ** 0.5 + 0.02


def test_by_name_it_has_two_components() -> None:
    fit = ngvi.fit(two_shares, guide="AutoMixtureNormal", seed=0, progress=False, max_steps=3)
    assert fit.guide.weights.sort().values.tolist() == pytest.approx([0.15, 0.85], abs=0.02)
