"""What a step is made of: draws of mean zero, a share of the path, blocks, and a radius that learns."""

from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI
from torch import Tensor

import pyro_ngvi as ngvi
from pyro_ngvi.families import FullRankNormal, MeanFieldNormal, NormalFamily, ProductFamily
from pyro_ngvi.families.base import Family, Tensors
from pyro_ngvi.guides.base import FamilyDistribution
from pyro_ngvi.linalg.noise import centred
from pyro_ngvi.optim import Constant
from pyro_ngvi.optim.blocks import Coordinates, EstimatedGeometry
from pyro_ngvi.optim.natural_gradient import NaturalGradientRule
from tests.cubature import sphere_points
from tests.registry import FAMILIES

FLAT: Any = EstimatedGeometry(Coordinates(("x",)), lambda g: g)


@pytest.mark.parametrize("S", [2, 3, 8])
def test_each_centred_draw_is_standard_normal_and_their_mean_is_zero(S: int) -> None:
    """A linear map C of iid rows: unit rows keep N(0, I), columns that sum to 0 centre."""
    C = centred(torch.eye(S).reshape(S, 1, S))[:, 0]  # rows are draws, columns are iid rows
    torch.testing.assert_close(C.square().sum(1), torch.ones(S))
    torch.testing.assert_close(C.sum(0), torch.zeros(S))


def test_one_draw_stays_and_a_pair_is_antithetic() -> None:
    e = torch.randn(1, 5)
    assert centred(e) is e
    a, b = centred(torch.randn(2, 5))
    torch.testing.assert_close(a, -b)


def test_draws_are_centred_while_gradients_are_recorded_only() -> None:
    guide = ngvi.AutoFullRankNormal(
        lambda: pyro.sample("x", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    )
    guide()
    centre = guide.loc.detach()
    torch.testing.assert_close(guide.sampling_posterior().rsample((4,)).mean(0), centre)
    # a plate of particles to the left of the model's own
    expanded = guide.sampling_posterior().expand((6, 1))
    torch.testing.assert_close(expanded.rsample().mean((0, 1)), centre)
    with torch.no_grad():
        free = guide.sampling_posterior().rsample((4,))
    for draws in (free, guide.get_posterior().rsample((4,))):
        assert not torch.allclose(draws.mean(0), centre, atol=1e-4)


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_dilation_widens_every_sd_alike(kind: str) -> None:
    """d log sd / dt = 1 and d entropy / dt = d, by central differences."""
    family, d = FAMILIES[kind]
    params = family.init(torch.linspace(-1.0, 1.0, d).double(), 0.7)
    velocity, h = family.dilation(params), 1e-5
    if not velocity:  # not known, as for Gamma distributions
        assert any(not isinstance(f, NormalFamily) for f in parts_of(family))
        return
    wider, narrower = (
        params | {k: params[k] + sign * h * v for k, v in velocity.items()} for sign in (1.0, -1.0)
    )
    growth = (family.stddev(wider) - family.stddev(narrower)) / (2.0 * h)
    torch.testing.assert_close(growth, family.stddev(params), rtol=1e-8, atol=1e-8)
    growth = (family.entropy(wider) - family.entropy(narrower)) / (2.0 * h)
    assert float(growth) == pytest.approx(d, rel=1e-8)


def parts_of(family: Family) -> list[Family]:
    return list(family.parts.values()) if isinstance(family, ProductFamily) else [family]


def quadratic(family: Family, params: Tensors, share: float, H: Tensor, m: Tensor) -> Any:
    """Loss and gradients of E[log q + (z - m)' H (z - m) / 2] by draws with exact moments."""
    leaves = {k: v.detach().requires_grad_() for k, v in params.items()}
    q = FamilyDistribution(
        family, leaves, sticking_the_landing=True, path_share=torch.tensor(share)
    )
    z = family.rsample(leaves, sphere_points(family.noise_dim(params)))
    loss = (q.log_prob(z) + 0.5 * ((z - m) @ H * (z - m)).sum(-1)).mean()
    return loss.detach(), dict(
        zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True)
    )


@pytest.mark.parametrize("kind", ["mean field", "full rank", "factor", "factor precision"])
def test_any_share_of_the_path_has_the_same_expected_gradient(kind: str) -> None:
    family, d = FAMILIES[kind]
    params = family.init(torch.linspace(-1.0, 1.0, d), 0.7)
    root = torch.randn(d, d, generator=torch.Generator().manual_seed(1))
    H, m = root @ root.mT + torch.eye(d), torch.ones(d)
    whole_loss, whole = quadratic(family, params, 1.0, H, m)
    for share in (0.0, 0.3):
        loss, found = quadratic(family, params, share, H, m)
        torch.testing.assert_close(loss, whole_loss)
        for name in found:
            torch.testing.assert_close(found[name], whole[name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("sd", "cut"), [(0.1, False), (0.5, False), (0.85, True), (3.0, True)])
def test_the_share_asked_for_is_the_mean_curvature_in_units_of_q(sd: float, cut: bool) -> None:
    d = 3
    family, H = FullRankNormal(), torch.diag(torch.tensor([0.5, 1.0, 2.0]))
    params = family.init(torch.zeros(d), sd)
    rule = NaturalGradientRule(family)
    _, grads = quadratic(family, params, 1.0, H, torch.ones(d))
    _, state, _ = rule.update(params, grads, rule.init(params))
    wanted = sd**2 * float(H.diagonal().mean())
    assert float(state["path_share"]) == pytest.approx(1.0 if cut else wanted, rel=1e-4)
    assert (wanted > 0.8) == cut


def steps(rule: NaturalGradientRule, gradients: list[Tensor]) -> list[float]:
    params = {"x": torch.zeros_like(gradients[0])}
    state, lengths = rule.init(params), []
    for g in gradients:
        params, state, report = rule.update(params, {"x": g}, state)
        lengths.append(float(report.step_norm))
    return lengths


def test_the_reach_grows_while_shortened_moves_agree_up_to_the_root_of_the_entries() -> None:
    rule = NaturalGradientRule(FLAT, trust_radius=1.0, noise_radius=9.0, schedule=Constant(1.0))
    same = torch.full((9,), 100.0)
    found = steps(rule, [same] * 9)
    assert found == pytest.approx([1.0, 1.0, *(min(1.4**k, 3.0) for k in range(1, 8))])
    # a gradient that turns round, and two that agree with it
    found = steps(rule, [same] * 5 + [-same] * 3)
    top = 1.4**3
    assert found[4:] == pytest.approx([top, 0.6 * top, 0.6 * top, 0.6 * 1.4 * top])
    # a cosine of 0.4 says neither
    other = 100.0 * torch.tensor([0.4 * 3.0, 3.0 * 0.84**0.5] + [0.0] * 7)
    one = 100.0 * torch.tensor([3.0] + [0.0] * 8)
    assert steps(rule, [one, one, one, other]) == pytest.approx([1.0, 1.0, 1.4, 1.4])


def test_the_reach_stays_where_no_move_was_shortened() -> None:
    rule = NaturalGradientRule(FLAT, trust_radius=1.0, noise_radius=9.0, schedule=Constant(0.5))
    short = torch.tensor([1.0, 0.0])
    assert steps(rule, [short] * 4 + [100.0 * short]) == pytest.approx([0.5] * 4 + [1.0])


def test_a_far_location_does_not_hold_the_scales_back() -> None:
    """Each block within trust_radius / sqrt(2), whatever the other wants."""
    family, radius = MeanFieldNormal(), 1.0
    params = family.init(torch.zeros(2), 1.0)
    rule = NaturalGradientRule(
        family, trust_radius=radius, noise_radius=9.0, schedule=Constant(0.25)
    )
    grads = {"loc": torch.tensor([1e6, 0.0]), "log_scale": torch.tensor([0.8, 0.0])}
    new, _, report = rule.update(params, grads, rule.init(params))
    # F is 1 for the location and 2 for the scales
    torch.testing.assert_close(new["loc"], torch.tensor([-radius / 2**0.5, 0.0]))
    torch.testing.assert_close(new["log_scale"], torch.tensor([-0.25 * 0.4, 0.0]))
    assert float(report.radius) == pytest.approx(radius) and bool(report.damped)


def test_the_reach_of_a_location_goes_up_to_d_and_that_of_scales_to_its_root() -> None:
    family = MeanFieldNormal()
    params = family.init(torch.zeros(4), 1.0)
    rule = NaturalGradientRule(family, schedule=Constant(1.0))
    state, found = rule.init(params), []
    for _ in range(8):
        grads = {"loc": torch.full((4,), 1e9), "log_scale": torch.full((4,), 1e9)}
        params, state, _ = rule.update(params, grads, state)
        found.append(state["reach"])
    torch.testing.assert_close(found[3], torch.full((2,), 1.4**2))
    torch.testing.assert_close(found[-1], torch.tensor([4.0, 2.0]))


@pytest.mark.parametrize(
    ("family", "grows", "stays", "falls"),
    [(MeanFieldNormal(), 0.75, 0.65, 0.25), (FullRankNormal(), 0.97, 0.8, 0.5)],
)
def test_scales_are_asked_for_more_agreement_than_a_location(
    family: NormalFamily, grows: float, stays: float, falls: float
) -> None:
    """Of d independent ones 0.7 and 0.3, of d^2 0.95 and 0.55; of the location 0.6 and 0.2."""
    params = family.init(torch.zeros(4), 1.0)
    rule = NaturalGradientRule(family, schedule=Constant(1.0))
    scales = family.names[1]

    def reach_after(cosines: list[float]) -> Tensor:
        state, angle = rule.init(params), torch.zeros(())
        for c in [1.0, *cosines]:
            angle = angle + torch.tensor(c).acos()
            g = 1e9 * torch.stack([angle.cos(), angle.sin(), 0 * angle, 0 * angle])
            # at one q: with sds of 1 and a metric of 1 and 2 both blocks keep these angles
            of_scales = g if params[scales].dim() == 1 else torch.diag(g)
            _, state, _ = rule.update(params, {"loc": g, scales: of_scales}, state)
        return state["reach"]

    torch.testing.assert_close(reach_after([grows, grows]), torch.tensor([1.4, 1.4]))
    torch.testing.assert_close(reach_after([stays, stays]), torch.tensor([1.4, 1.0]))
    torch.testing.assert_close(reach_after([1.0, 1.0, 1.0]), torch.tensor([1.4**2, 1.4**2]))
    torch.testing.assert_close(
        reach_after([1.0, 1.0, 1.0, falls]), torch.tensor([1.4**2, 0.6 * 1.4**2])
    )


def test_a_run_resumes_with_its_share_of_the_path() -> None:
    """Bit for bit, into a new guide, from a state taken where the share is below 1."""

    def model() -> None:
        pyro.sample("x", dist.Normal(5.0 * torch.ones(3), 1.0).to_event(1))

    def start() -> tuple[Any, Any, Any]:
        guide = ngvi.AutoFullRankNormal(model, init=None)
        optim = ngvi.NGVB(guide)
        return guide, optim, SVI(model, guide, optim, ngvi.BatchedELBO(4))

    guide, optim, svi = start()
    for _ in range(2):
        svi.step()
    saved = guide.state_dict(), optim.get_state(), torch.get_rng_state()
    saved = ({k: v.clone() for k, v in saved[0].items()}, *saved[1:])
    assert float(saved[1]["natural"][""]["path_share"]) < 0.5
    for _ in range(3):
        svi.step()
    other, resumed, svi = start()
    other.load_state_dict(saved[0])
    resumed.set_state(saved[1])
    other()
    torch.set_rng_state(saved[2])
    for _ in range(3):
        svi.step()
    for name, p in guide.natural_params().items():
        assert torch.equal(p, other.natural_params()[name]), name
