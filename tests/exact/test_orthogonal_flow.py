"""Orthogonal flows: inverse, density, scores and moments against autograd and definitions."""

import pytest
import torch

from benchmarks.flows.orthogonal_forms import OrthogonalForm
from pyro_ngvi.families import OrthogonalFlow
from pyro_ngvi.families.base import dot
from pyro_ngvi.fisher.scores import family_scores
from tests.exact.orthogonal_members import (
    ACTIVATIONS,
    FAMILIES,
    D,
    every,
    member,
    noise,
    some_tangent,
)


def form_of(family: OrthogonalFlow) -> str:
    return family.form if isinstance(family, OrthogonalForm) else "scaled"


@every
def test_starts_where_it_is_told(family: OrthogonalFlow) -> None:
    loc = torch.linspace(-1.0, 1.0, D)
    q = family.init(loc, 0.25)
    assert tuple(q) == family.names
    z = family.rsample(q, noise(200_000))
    # the printed form has no scales
    sd = z.std(0).mean() if form_of(family) == "paper" else torch.tensor(0.25)
    error = sd / 200_000**0.5
    assert ((z.mean(0) - loc).abs() < 4.5 * error).all()
    # kurtosis of the activations stays below 20: the sd of a variance is below sqrt(19 / n)
    assert ((z.var(0) / sd**2 - 1.0).abs() < 4.5 * (19.0 / 200_000) ** 0.5).all()
    for name, W in q.items():
        if name.startswith("weight_"):
            assert torch.equal(W, torch.eye(D))


@every
def test_inverse_of_forward(family: OrthogonalFlow) -> None:
    q, eps = member(family), noise(200)
    back = family.noise_of(q, family.rsample(q, eps))
    torch.testing.assert_close(back, eps, rtol=1e-8, atol=1e-8)


@every
def test_log_prob_against_the_jacobian(family: OrthogonalFlow) -> None:
    q, eps = member(family), noise(20)
    J = torch.func.vmap(torch.func.jacrev(lambda e: family.rsample(q, e)))(eps)
    base = torch.distributions.Normal(0.0, 1.0).log_prob(eps).sum(-1)
    wanted = base - torch.linalg.slogdet(J).logabsdet
    got = family.log_prob(q, family.rsample(q, eps))
    torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-9)


@every
def test_score_against_autograd(family: OrthogonalFlow) -> None:
    q = member(family)
    z = family.rsample(q, noise(7))
    wanted = torch.func.vmap(torch.func.grad(family.log_prob), in_dims=(None, 0))(q, z)
    got = family.score(q, z)
    assert tuple(got) == family.names
    for name in q:
        scale = wanted[name].abs().max().clamp_min(1.0)
        torch.testing.assert_close(got[name] / scale, wanted[name] / scale, rtol=0, atol=1e-10)


@every
def test_tangent_score_against_differences(family: OrthogonalFlow) -> None:
    """Along the manifold, where the density is what it is whatever its extension to other matrices."""
    q = member(family)
    z = family.rsample(q, noise(5))
    u = some_tangent(family, q, 1.0, seed=9)
    h = 1e-6
    up = family.log_prob(family.retract(q, u, h), z)
    down = family.log_prob(family.retract(q, u, -h), z)
    score = family.score(q, z)
    for s in range(5):
        along = dot(family.pull(q, {k: v[s] for k, v in score.items()}), u)
        torch.testing.assert_close((up - down)[s] / (2 * h), along, rtol=1e-6, atol=1e-6)


@every
def test_scores_of_draws_are_those_at_the_draws(family: OrthogonalFlow) -> None:
    q = member(family)
    torch.manual_seed(5)
    got = family.draw_scores(q, 6)
    torch.manual_seed(5)
    wanted = family.score(q, family.draw(q, torch.Size((6,))))
    for name in q:
        torch.testing.assert_close(got[name], wanted[name], rtol=1e-7, atol=1e-7)


@every
def test_score_integrates_to_zero(family: OrthogonalFlow) -> None:
    q = member(family)
    torch.manual_seed(0)
    n = 40_000
    rows = family_scores(family, q, n)
    error = rows.std(0) / n**0.5
    assert (rows.mean(0).abs() <= 5.0 * error + 1e-12).all()


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("psi", ACTIVATIONS)
def test_printed_form_does_not_identify_its_first_rotation(psi: str, layers: int) -> None:
    """The tangent score of W_0 is 0 at every z, though its Euclidean score is not."""
    family = OrthogonalForm(layers, psi, "paper")
    q = member(family)
    z = family.rsample(q, noise(50))
    score = family.score(q, z)
    for s in range(50):
        pulled = family.pull(q, {k: v[s] for k, v in score.items()})
        assert float(pulled["weight_0"].abs().max()) < 1e-8
        assert float(score["weight_0"][s].abs().max()) > 1e-2
        assert float(pulled["weight_1"].abs().max()) > 1e-6
    turned = q | {"weight_0": member(family, seed=8)["weight_0"]}
    torch.testing.assert_close(family.log_prob(turned, z), family.log_prob(q, z))


@every
def test_rotation_of_the_latent_space(family: OrthogonalFlow) -> None:
    """q with the last rotation turned by Q has at Q z the density that it had at z."""
    q, z = member(family), family.rsample(member(family), noise(30))
    Q = torch.linalg.qr(noise(D, D, 11)).Q
    last = f"weight_{family.layers}"
    if form_of(family) == "whitened":
        # Q C W = C' W' with C' from the LQ factorisation of Q C W, its rotation again last
        A = Q @ q["scale_tril"] @ q[last]
        upper, R = torch.linalg.qr(A.mT)
        sign = R.diagonal().sign()
        moved = {"scale_tril": (sign[:, None] * R).mT, last: (upper * sign).mT}
    else:
        moved = {last: Q @ q[last]}
    turned = q | moved | {"loc": Q @ q["loc"]}
    torch.testing.assert_close(family.log_prob(turned, z @ Q.mT), family.log_prob(q, z))


@pytest.mark.parametrize("family", [f for f in FAMILIES.values() if form_of(f) != "whitened"])
def test_permutation_of_the_coordinates(family: OrthogonalFlow) -> None:
    q, z = member(family), family.rsample(member(family), noise(30))
    order = torch.tensor([2, 0, 3, 1])
    last = f"weight_{family.layers}"
    turned = q | {last: q[last][order], "loc": q["loc"][order]}
    torch.testing.assert_close(family.log_prob(turned, z[:, order]), family.log_prob(q, z))


def test_bounded_flow_has_no_density_outside_its_box() -> None:
    family = OrthogonalForm(1, "sigmoid", "paper")
    q = family.init(torch.zeros(2), 1.0)  # (-1/2, 1/2)^2
    z = torch.tensor([[0.0, 0.0], [0.6, 0.0], [0.0, -50.0]])
    assert family.log_prob(q, z).isfinite().tolist() == [True, False, False]
    assert (family.log_prob(q, z)[1:] == -torch.inf).all()


def test_far_points_have_finite_scores_in_float32() -> None:
    for psi in ("sinh-arcsinh", "arcsinh", "leaky"):
        family = OrthogonalForm(1, psi)
        q = {k: v.float() for k, v in family.init(torch.zeros(2), 1.0).items()}
        z = torch.tensor([[30.0, -30.0], [1e4, 1e4]], dtype=torch.float32)
        assert torch.isfinite(family.log_prob(q, z[:1])).all()
        assert not torch.isnan(family.log_prob(q, z)).any()


@pytest.mark.parametrize("form", ["paper", "scaled", "whitened"])
def test_one_dimension(form: str) -> None:
    """O(1) has no tangent: the rotations stay, everything else works."""
    family = OrthogonalForm(2, form=form)
    q = member(family, d=1)
    assert float(q["weight_1"].abs()) == 1.0
    z = family.rsample(q, noise(10, 1))
    torch.testing.assert_close(family.noise_of(q, z), noise(10, 1), rtol=1e-9, atol=1e-9)
    assert family_scores(family, q, 5).shape == (5, len(family.pack(q)))
    assert family.covariance(q).shape == (1, 1)


def test_moments_and_quantiles() -> None:
    """Against 400,000 draws; the family's own 4,096 give 4.5 / 64 of an sd."""
    family = OrthogonalFlow(1)
    q = member(family)
    z = family.rsample(q, noise(400_000))
    tolerance = 4.5 / 64
    assert ((family.mean(q) - z.mean(0)).abs() < tolerance * z.std(0)).all()
    level = torch.tensor([0.25, 0.5])
    below = (z.unsqueeze(1) <= family.icdf(q, level)).double().mean(0)
    assert ((below - level.unsqueeze(-1)).abs() < tolerance * 0.5).all()
    log_q = family.log_prob(q, z)
    assert abs(family.entropy(q) + log_q.mean()) < 4.5 * log_q.std() / 64
    assert family.kl(q, q).abs() < 1e-12
    assert family.kl(q, member(family, seed=7)) > 0.0
