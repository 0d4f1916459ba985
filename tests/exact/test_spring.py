"""SPRING against the normal equations, and against exact natural gradients of Gaussians."""

from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoNormal
from pyro.optim import Adam  # pyright: ignore[reportAttributeAccessIssue]
from torch import Tensor

import pyro_ngvi as ngvi
from pyro_ngvi.families import FlowFamily, FullRankNormal, MeanFieldNormal
from pyro_ngvi.fisher.scores import packed_scores
from pyro_ngvi.flows.transforms import coupling_flow
from pyro_ngvi.optim.rule import Tail
from pyro_ngvi.optim.spring import SpringRule
from pyro_ngvi.optim.state import flat
from tests.exact.rule_cases import update

FAMILIES: dict[str, Any] = {"mean field": MeanFieldNormal(), "full rank": FullRankNormal()}
families = pytest.mark.parametrize("kind", FAMILIES)


def setting(kind: str, draws: int) -> tuple[Any, dict[str, Tensor], Tensor]:
    torch.manual_seed(1)
    family = FAMILIES[kind]
    params = family.init(torch.randn(3), 0.8)
    return family, params, family.rsample(params, torch.randn(draws, 3))


def updated(rule: SpringRule, params: Any, z: Tensor, residuals: Tensor, state: Any = None) -> Any:
    grads = {"curvature.draws": z, "curvature.residuals": residuals}
    return update(rule, params, grads, rule.init(params) if state is None else state)


def centred_scores(family: Any, params: Any, z: Tensor) -> Tensor:
    phi = packed_scores(family, params, family.score(params, z))
    return (phi - phi.mean(0)) / len(z) ** 0.5


@families
@pytest.mark.parametrize("draws", [4, 60])  # fewer and more draws than parameters
def test_step_solves_the_regularised_normal_equations(kind: str, draws: int) -> None:
    family, params, z = setting(kind, draws)
    rule = SpringRule(family, 0.1, momentum=0.8, damping=0.05, trust_radius=1e9)
    residuals = torch.randn(draws)
    state = rule.init(params)
    past = state["increment"] = torch.randn_like(state["increment"])
    phi = centred_scores(family, params, z)
    r = (residuals - residuals.mean()) / draws**0.5
    ridge = 0.05 * (phi @ phi.mT).diagonal().mean()
    # minimises |Phi G - r|^2 + ridge |G - m past|^2
    left = phi.mT @ phi + ridge * torch.eye(phi.shape[1])
    wanted = torch.linalg.solve(left, phi.mT @ r + ridge * 0.8 * past)
    new, state, report = updated(rule, params, z, residuals, state)
    torch.testing.assert_close(state["increment"], wanted)
    torch.testing.assert_close(report.step_norm, 0.1 * torch.linalg.vector_norm(phi @ wanted))
    moved = family.retract(params, family.unpack(wanted, params), -0.1)
    for name, value in moved.items():
        torch.testing.assert_close(new[name], value)


def test_exact_natural_gradient_of_a_gaussian_posterior() -> None:
    """log q - log p is linear in the scores of a full-rank Gaussian, so any draws give all of it."""
    family, params, z = setting("full rank", 40)
    A = torch.randn(3, 3)
    posterior = torch.distributions.MultivariateNormal(torch.randn(3), A @ A.mT + torch.eye(3))
    residuals = family.log_prob(params, z) - posterior.log_prob(z) - 123.0  # log Z plays no part
    leaves = {k: v.clone().requires_grad_() for k, v in params.items()}
    other = {"loc": posterior.mean, "scale_tril": posterior.scale_tril}
    kl = family.kl(leaves, other)
    grads = dict(zip(leaves, torch.autograd.grad(kl, list(leaves.values())), strict=True))
    grads["scale_tril"] = grads["scale_tril"].tril()
    wanted = family.natural_gradient(params, family.pull(params, grads))
    rule = SpringRule(family, 1.0, momentum=0.0, damping=1e-13, trust_radius=1e9)
    _, state, _ = updated(rule, params, z, residuals)
    torch.testing.assert_close(state["increment"], family.pack(wanted), atol=1e-6, rtol=1e-6)


@families
def test_no_move_at_the_posterior(kind: str) -> None:
    family, params, z = setting(kind, 6)
    new, state, _ = updated(SpringRule(family, 0.5), params, z, torch.full((6,), -7.0))
    for name, value in params.items():
        torch.testing.assert_close(new[name], value)
    assert float(state["increment"].abs().max()) < 1e-12


def test_radius_bounds_the_step() -> None:
    family, params, z = setting("full rank", 200)
    rule = SpringRule(family, 0.3, trust_radius=0.05)
    new, _, report = updated(rule, params, z, 1e6 * torch.randn(200))
    torch.testing.assert_close(report.step_norm, torch.tensor(0.05))
    assert bool(report.damped)
    # 200 draws see all nine directions, so the length is right to a fifth and KL to two fifths
    assert 0.5 < float(family.kl(new, params)) / (0.5 * 0.05**2) < 1.5


@families
@pytest.mark.parametrize(("nats", "begins_anew"), [(0.5, False), (2.0, True), (float("nan"), True)])
def test_an_average_far_from_the_iterate_begins_anew(
    kind: str, nats: float, begins_anew: bool
) -> None:
    family, params, z = setting(kind, 2000)
    rule = SpringRule(family, 0.3, averaging=Tail())
    state = rule.init(params)
    # KL = |shift|^2 / (2 sd^2), whose estimate from 2,000 draws has a standard error below 0.05
    state["average"]["loc"] = params["loc"] + 0.8 * torch.tensor([(2 * nats) ** 0.5, 0.0, 0.0])
    state["count"] = torch.tensor(12.0)
    new, after, _ = updated(rule, params, z, torch.randn(2000), state)
    assert after["count"] == (1.0 if begins_anew else 13.0)
    assert torch.equal(after["average"]["loc"], new["loc"]) == begins_anew


def funnel() -> None:
    v = pyro.sample("v", dist.Normal(0.0, 2.0))
    pyro.sample("x", dist.Normal(torch.zeros(2), (v / 2).exp()).to_event(1))


def run(optim: Any, guide: Any, steps: int, draws: int = 32, model: Any = funnel) -> Any:
    svi = SVI(model, guide, optim, ngvi.BatchedELBO(draws, curvature="scores"))
    return [svi.step() for _ in range(steps)]


def test_resume_bit_for_bit(tmp_path: Any) -> None:
    def start() -> tuple[Any, Any]:
        pyro.set_rng_seed(0)
        guide = ngvi.AutoCouplingFlow(funnel, layers=2, hidden=(8,))
        return guide, ngvi.optim.SPRING(guide)

    guide, optim = start()
    run(optim, guide, 5)
    torch.save((guide.state_dict(), optim.get_state(), torch.get_rng_state()), tmp_path / "saved")
    run(optim, guide, 5)
    wanted = {k: p.detach().clone() for k, p in guide.natural_params().items()}

    guide, optim = start()
    guide()
    params, state, rng = torch.load(tmp_path / "saved")
    guide.load_state_dict(params)
    optim.set_state(state)
    torch.set_rng_state(rng)
    run(optim, guide, 5)
    for name, value in guide.natural_params().items():
        assert torch.equal(value, wanted[name]), name


def test_model_parameters_get_gradients() -> None:
    def model() -> None:
        m = pyro.param("m", torch.tensor(0.0))
        x = pyro.sample("x", dist.Normal(m, 1.0))
        pyro.sample("y", dist.Normal(x, 1.0), obs=torch.tensor(3.0))

    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    guide = ngvi.AutoFullRankNormal(model)
    optim = ngvi.optim.SPRING(guide, others=Adam({"lr": 0.05}))
    run(optim, guide, 200, model=model)
    # q follows the posterior for each m, and m maximises the evidence N(3; m, 2)
    assert abs(float(pyro.param("m").detach()) - 3.0) < 0.2
    assert abs(float(guide.loc.detach()) - 3.0) < 0.2
    assert abs(float(guide.get_posterior().variance.detach()) - 0.5) < 0.05


def test_step_that_is_not_finite_is_skipped() -> None:
    broken = [0.0]

    def model() -> None:
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        pyro.factor("f", -x.square() + broken[0])

    guide = ngvi.AutoFullRankNormal(model)
    optim = ngvi.optim.SPRING(guide, averaging=False)
    run(optim, guide, 1, model=model)
    before = {k: p.detach().clone() for k, p in guide.natural_params().items()}
    broken[0] = torch.nan
    with pytest.warns(RuntimeWarning, match="skipped a step"), pyro.validation_enabled(False):
        run(optim, guide, 1, model=model)
    assert optim.report().outcome == "skipped" and optim.report().skipped == 1
    for name, value in guide.natural_params().items():
        assert torch.equal(value, before[name])
    broken[0] = 0.0
    run(optim, guide, 1, model=model)
    assert optim.report().outcome != "skipped"


@families
@pytest.mark.parametrize("value", [torch.inf, torch.nan])  # of -log p at a support's edge
def test_one_draw_that_is_not_finite_leaves_no_trace(kind: str, value: float) -> None:
    """The whole step is skipped and counted; what follows is as if it had not been."""
    family, params, z = setting(kind, 20)
    rule = SpringRule(family, 0.1, averaging=Tail())
    residuals = torch.randn(20)
    params, state, _ = updated(rule, params, z, residuals)
    broken = residuals.clone()
    broken[3] = value
    same, skipped, report = updated(rule, params, z, broken, state)
    assert not report.finite and report.skipped == 1.0 and report.step_norm == 0.0
    assert all(torch.equal(same[name], params[name]) for name in params)
    counts = ("skipped", "bad_entries")
    assert all(torch.equal(flat(skipped)[k], v) for k, v in flat(state).items() if k not in counts)
    after, *_ = updated(rule, params, z, residuals, state)
    again, *_ = updated(rule, same, z, residuals, skipped)
    assert all(torch.equal(after[name], again[name]) for name in params)


def test_refusals() -> None:
    guide = ngvi.AutoFullRankNormal(funnel)
    with pytest.raises(RuntimeError, match='curvature="scores"'):
        SVI(funnel, guide, ngvi.optim.SPRING(guide), ngvi.BatchedELBO(4)).step()
    with pytest.raises(RuntimeError, match="SPRING"):
        SVI(funnel, guide, ngvi.NGVB(guide), ngvi.BatchedELBO(4, curvature="scores")).step()
    with pytest.raises(ValueError, match="IFVB"):
        ngvi.optim.SPRING(AutoNormal(funnel))
    with pytest.raises(ValueError, match=r"AutoNormal has no use for .*Take AutoMeanFieldNormal"):
        other = AutoNormal(funnel)
        loss = ngvi.BatchedELBO(4, curvature="scores")
        SVI(funnel, other, Adam({"lr": 0.1}), loss).step()
    wrong: dict[str, Any]
    for wrong in ({"lr": 0.0}, {"momentum": 1.0}, {"damping": 0.0}, {"trust_radius": -1.0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            ngvi.optim.SPRING(guide, **wrong)
    with pytest.raises(ValueError, match="closed form"):
        ngvi.NGVB(ngvi.AutoCouplingFlow(funnel))


def test_evaluation_leaves_no_residuals() -> None:
    guide = ngvi.AutoFullRankNormal(funnel)
    loss = ngvi.BatchedELBO(4, curvature="scores")
    svi = SVI(funnel, guide, ngvi.optim.SPRING(guide), loss)
    svi.step()
    svi.evaluate_loss()
    assert guide.curvature is None
    plain = SVI(funnel, guide, ngvi.NGVB(guide), Trace_ELBO())
    plain.step()


@pytest.mark.parametrize("kind", [*FAMILIES, "flow"])
def test_meta_device(kind: str) -> None:
    family = FAMILIES.get(kind)
    if family is None:
        family = FlowFamily("full")
        family.define(coupling_flow(3, "affine", 2, (4,), 4).to("meta"))
    rule = SpringRule(family, 0.3, averaging=Tail())
    params = family.init(torch.zeros(3, device="meta"), 0.1)
    z, r = torch.empty(5, 3, device="meta"), torch.empty(5, device="meta")
    new, state, _ = updated(rule, params, z, r)
    new, _, _ = updated(rule, new, z, r, state)
    assert new["loc"].shape == (3,)
