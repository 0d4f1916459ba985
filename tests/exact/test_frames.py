"""Frames: tangents of constrained matrices, F in them, and inverse estimates that are carried along.

A set of draws of the noise stands for its law, so that F is a mean of finitely many outer products of
scores, and what the recursion of rank-one updates comes to is known to rounding.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.distributions import constraints
from pyro.infer import SVI, Trace_ELBO
from torch import Tensor
from torch.distributions import transform_to, transforms

import pyro_ngvi as ngvi
from benchmarks.any_guide.frames import BuresWasserstein
from benchmarks.baselines import PaperDense
from pyro_ngvi.curvature.derivatives import jvp
from pyro_ngvi.families import FullRankNormal, OrthogonalFlow
from pyro_ngvi.families.base import Tensors
from pyro_ngvi.families.orthogonal_flow import is_rotation
from pyro_ngvi.fisher import ConjugateGradients
from pyro_ngvi.fisher.scores import packed_scores
from pyro_ngvi.linalg import stiefel
from pyro_ngvi.optim.blocks import GuideBlock
from pyro_ngvi.optim.frames import STRAIGHT, Location, Straight, Triangles, frame_under
from tests.contract.registry import data, regression
from tests.exact.orthogonal_members import member, noise, some_tangent
from tests.registry import FAMILIES

D = 4
EXP: Any = frame_under(constraints.lower_cholesky)
SOFTPLUS: Any = frame_under(constraints.softplus_lower_cholesky)


def some(*shape: int, seed: int = 0, size: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return size * torch.randn(*shape, generator=generator, dtype=torch.float64)


CASES: dict[str, tuple[Any, Tensor, str]] = {
    "exp": (EXP, some(D, D), "x"),
    "softplus": (SOFTPLUS, some(D, D), "x"),
    "batch": (EXP, some(2, 3, D, D), "x"),
    "one": (EXP, some(1, 1), "x"),
    "Bures-Wasserstein": (BuresWasserstein(transforms.ExpTransform()), some(D, D), "x"),
    "location": (Location("x", EXP, False), some(3, D, D), "m"),
    "location, precision": (Location("x", SOFTPLUS, True), some(D, D), "m"),
}
every = pytest.mark.parametrize("case", CASES)


def parts(case: str) -> tuple[Straight, Tensors, str]:
    frame, x, name = CASES[case]
    return frame, {"x": x, "m": some(*x.shape[:-1], seed=5)}, name


def some_frame_tangent(frame: Straight, like: Tensor, seed: int = 1) -> Tensor:
    return frame.unpack(some(frame.size(like.shape), seed=seed), like)


@every
def test_pull_is_the_transpose_of_push(case: str) -> None:
    frame, params, name = parts(case)
    like = params[name]
    u, g = some_frame_tangent(frame, like), some(*like.shape, seed=2)
    pulled = frame.pull(params, name, g)
    along = (g * frame.push(params, name, u)).sum()
    torch.testing.assert_close(torch.dot(frame.pack(pulled), frame.pack(u)), along)
    assert torch.equal(frame.unpack(frame.pack(u), like), u)
    assert frame.pack(u).shape == (frame.size(like.shape),)


@every
def test_retraction_starts_along_the_push(case: str) -> None:
    frame, params, name = parts(case)
    u = some_frame_tangent(frame, params[name])
    zero, one = torch.zeros(()), torch.ones(())
    move = jvp(lambda t: frame.retract(params, name, t * u), (zero,), (one,))[1]
    torch.testing.assert_close(move, frame.push(params, name, u))


@pytest.mark.parametrize("kind", ["lower_cholesky", "softplus_lower_cholesky"])
def test_triangles_are_translated_from_the_left(kind: str) -> None:
    """The factor in Pyro's own words: dL = L M, and L (I + M + M^2 / 2) after any step."""
    constraint = getattr(constraints, kind)
    frame, x = frame_under(constraint), some(2, D, D)
    factor: Any = transform_to(constraint)
    L, M = factor(x), some(2, D, D, seed=1).tril()
    velocity = frame.push({"x": x}, "x", M)
    torch.testing.assert_close(jvp(factor, (x,), (velocity,))[1], L @ M)
    for size in (1e-3, 1.0, 100.0):
        A = size * M
        new = factor(frame.retract({"x": x}, "x", A))
        torch.testing.assert_close(new, L + L @ A + 0.5 * L @ A @ A)
        assert (new.diagonal(dim1=-2, dim2=-1) > 0.0).all()


def test_bures_wasserstein_by_its_definition() -> None:
    """dSigma = S Sigma + Sigma S, and (I + S) Sigma (I + S)."""
    frame, params, _ = parts("Bures-Wasserstein")
    x, value = params["x"], transform_to(constraints.positive_definite)
    covariance: Any = value(x)
    S = some(D, D, seed=3, size=0.1)
    S = S + S.mT
    T = torch.diagonal_scatter(2.0**0.5 * S.tril(), S.diagonal())
    velocity: Any = jvp(value, (x,), (frame.push(params, "x", T),))[1]
    torch.testing.assert_close(velocity, S @ covariance + covariance @ S)
    moved = torch.eye(D) + S
    torch.testing.assert_close(
        value(frame.retract(params, "x", T)), moved @ covariance @ moved, rtol=1e-9, atol=1e-9
    )


@pytest.mark.parametrize(
    ("constraint", "diagonal"),
    [
        (constraints.lower_cholesky, transforms.ExpTransform()),
        (constraints.positive_definite, transforms.ExpTransform()),
        (constraints.independent(constraints.positive_definite, 1), transforms.ExpTransform()),
        (constraints.softplus_lower_cholesky, SOFTPLUS.diagonal),
        (constraints.unit_lower_cholesky, None),
        (constraints.corr_cholesky, None),
        (constraints.real, None),
        (constraints.positive, None),
        (constraints.interval(0.0, 2.0), None),
        (None, None),
    ],
)
def test_frames_by_constraint(constraint: Any, diagonal: Any) -> None:
    found = frame_under(constraint)
    assert found is STRAIGHT if diagonal is None else found == Triangles(diagonal)


def test_plain_average_is_the_log_cholesky_mean() -> None:
    """It minimises the sum of squared distances |tril(L - L_k, -1)|^2 + |log diag(L) - log diag(L_k)|^2
    (Lin 2019): entries below the diagonal by their mean, diagonals by their geometric one."""
    rows = some(7, D, D)
    L: Any = transform_to(constraints.lower_cholesky)(rows)
    below, diagonal = L.tril(-1).mean(0), L.diagonal(dim1=-2, dim2=-1).log().mean(0).exp()
    mean: Any = transform_to(constraints.positive_definite)(rows.mean(0))
    wanted = below + torch.diag(diagonal)
    torch.testing.assert_close(mean, wanted @ wanted.mT)


# --- guides -------------------------------------------------------------------------------------------

KINDS: dict[str, tuple[Any, str]] = {
    "covariance": (constraints.positive_definite, "covariance_matrix"),
    "factor": (constraints.lower_cholesky, "scale_tril"),
    "softplus factor": (constraints.softplus_lower_cholesky, "scale_tril"),
    "precision": (constraints.positive_definite, "precision_matrix"),
}


def guide_of(kind: str, d: int = D) -> Any:
    constraint, argument = KINDS[kind]

    def guide(*args: Any) -> None:
        m = pyro.param("m", lambda: torch.zeros(d))
        x = pyro.param("x", lambda: torch.eye(d), constraint=constraint)
        how: dict[str, Any] = {argument: x}
        pyro.sample("w", dist.MultivariateNormal(m, **how))

    return ngvi.optim.remember_arguments(guide)


def block_of(kind: str) -> GuideBlock:
    """At a q in general position."""
    guide = guide_of(kind)
    guide()
    block = GuideBlock(guide, steady=False)
    block.find(set())
    with torch.no_grad():
        for name, p in block.natural_params().items():
            p.copy_(some(*p.shape, seed=len(name) + p.dim()))
    return block


def fisher_of(block: GuideBlock) -> Tensor:
    product: Any = block.product()
    return torch.stack(
        [product(e) for e in torch.eye(sum(block.family.block_sizes(values(block))))]
    )


def values(block: GuideBlock) -> Tensors:
    return {name: p.detach() for name, p in block.natural_params().items()}


@pytest.mark.parametrize("kind", KINDS)
def test_the_fisher_matrix_of_a_gaussian_is_the_same_at_every_q(kind: str) -> None:
    """Ones for t and below the diagonal of M, twos on it; no entries between, whatever q is."""
    i, j = torch.tril_indices(D, D)
    wanted = torch.diag(torch.cat([torch.ones(D), 1.0 + (i == j).double()]))
    torch.testing.assert_close(fisher_of(block_of(kind)), wanted, rtol=1e-8, atol=1e-8)
    # in the stored coordinates it is far from that
    stored = block_of(kind)
    stored.family = replace(stored.family, frames={})
    assert not stored.family.frames and stored.family.pack(values(stored)).shape == (D + D * D,)
    F = fisher_of(stored)
    seen = F.diagonal() > 0.0
    assert torch.linalg.cond(F[seen][:, seen]) > 20.0


def test_the_fisher_matrix_in_the_frame_of_bures_and_wasserstein_moves() -> None:
    """tr(S^2) + tr(S Sigma S Sigma^-1)."""
    block = block_of("covariance")
    frames = {"x": BuresWasserstein(transforms.ExpTransform())}
    block.family = replace(block.family, frames=frames)
    F = fisher_of(block)[D:, D:]
    covariance: Any = transform_to(constraints.positive_definite)(values(block)["x"])
    S = some(D, D, seed=3)
    S = S + S.mT
    T = torch.diagonal_scatter(2.0**0.5 * S.tril(), S.diagonal())
    v = BuresWasserstein(transforms.ExpTransform()).pack(T)
    wanted = (S @ S).trace() + (S @ covariance @ S @ torch.linalg.inv(covariance)).trace()
    torch.testing.assert_close(v @ F @ v, wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_scores_of_a_guide_are_those_of_the_family_in_its_frame(kind: str) -> None:
    block = block_of(kind)
    pyro.set_rng_seed(0)
    framed = block.draw_scores(6)
    pyro.set_rng_seed(0)
    stored = block.stored_scores(6)
    q, family = values(block), block.family
    assert framed.shape == (6, D + D * (D + 1) // 2)
    u = family.unpack(some(framed.shape[1], seed=9), q)
    along = torch.cat([v.reshape(-1) for v in family.push(q, u).values()])
    torch.testing.assert_close(framed @ family.pack(u), stored @ along)


def test_locations_that_have_no_matrix_of_their_own_move_straight() -> None:
    def guide() -> None:
        m = pyro.param("m", torch.zeros(D))
        n = pyro.param("n", torch.zeros(D))
        both: Any = pyro.param("both", torch.eye(D), constraint=constraints.lower_cholesky)
        alone: Any = pyro.param("alone", torch.eye(D), constraint=constraints.lower_cholesky)
        scale: Any = pyro.param("scale", torch.ones(()), constraint=constraints.positive)
        pyro.sample("a", dist.MultivariateNormal(m + n, scale_tril=both))
        pyro.sample("b", dist.MultivariateNormal(torch.zeros(D), scale_tril=scale * alone))

    guide()
    block = GuideBlock(guide, steady=False)
    block.find(set())
    assert block.family.frames == {"both": EXP, "alone": EXP}


def guide_x() -> Any:
    return pyro.param("x")


@pytest.mark.parametrize("kind", KINDS)
def test_a_guide_by_hand_takes_the_steps_of_the_family(kind: str) -> None:
    """The same gradient, F and retraction: up to the third order of a step, one of N(m, L L')."""
    X, y = data()
    d = X.shape[1]
    exact = {"schedule": "constant", "trust_radius": None, "momentum": 0.0, "averaging": False}
    found: list[tuple[Tensor, Tensor]] = []
    for ours in (False, True):
        pyro.clear_param_store()
        guide = guide_of(kind, d)
        if ours:
            guide = ngvi.AutoFullRankNormal(regression, init=None, init_scale=1.0)
        guide(X, y)
        if ours:
            with torch.no_grad():
                guide.loc.zero_()
        solver = ConjugateGradients(iterations=50)
        optim = ngvi.IFVB(guide, lr=0.01, fisher=solver, num_scores=20_000, **exact)
        pyro.set_rng_seed(1)
        svi = SVI(regression, guide, optim, Trace_ELBO(20_000, vectorize_particles=True))
        svi.step(X, y)
        if ours:
            found.append((guide.loc.detach(), guide.scale_tril.detach()))
        else:
            L: Any = transform_to(KINDS[kind][0])(guide_x().unconstrained())
            if KINDS[kind][1] == "precision_matrix":
                L = torch.linalg.cholesky(torch.linalg.inv(L))
            elif kind == "covariance":
                L = torch.linalg.cholesky(L)
            found.append((pyro.param("m").detach(), L.detach()))
    (m, L), (loc, scale_tril) = found
    # 20,000 draws and as many scores: an error of 1 % of a step, which is itself about .05
    torch.testing.assert_close(m, loc, rtol=0.0, atol=4e-3)
    torch.testing.assert_close(L, scale_tril, rtol=0.0, atol=4e-3)


def test_frames_and_blocks_of_a_guide_that_is_not_ours() -> None:
    X, y = data()
    guide = guide_of("covariance", X.shape[1])
    optim = ngvi.IFVB(guide)
    SVI(regression, guide, optim, Trace_ELBO(2)).step(X, y)
    (rule,) = optim._rules.values()
    assert set(rule.family.frames) == {"m", "x"}
    assert rule.family.exact and rule.family.locations == ("m",)


@pytest.mark.parametrize("kind", FAMILIES)
def test_sizes_are_those_of_the_packed_parts(kind: str) -> None:
    family, d = FAMILIES[kind]
    q = family.init(torch.zeros(d), 1.0)
    assert sum(family.sizes(q).values()) == len(family.pack(q))


def test_conjugate_gradients_on_a_guide_of_ours_whose_tangents_are_triangles() -> None:
    X, y = data()
    guide = ngvi.AutoFullRankNormal(regression, init=None)
    optim = ngvi.IFVB(guide, fisher=ConjugateGradients())
    svi = SVI(regression, guide, optim, ngvi.BatchedELBO(8))
    losses: list[Any] = [svi.step(X, y) for _ in range(60)]
    assert losses[-1] < losses[0] - 1.0


# --- estimates that are carried along -------------------------------------------------------------


def carried(rows: Tensor) -> Tensor:
    """The estimate of F^-1 as a matrix, after one score at a time from H_0 = I (4.6)."""
    estimate = PaperDense(1.0)
    state = estimate.init(torch.ones(rows.shape[1]), 1.0)
    for row in rows:
        state = estimate.update(state, row[None])
    return torch.stack([estimate.product(state, e) for e in torch.eye(rows.shape[1])])


def error(inverse: Tensor, F: Tensor) -> float:
    """Largest |log| of an eigenvalue of (inverse x F)."""
    L = torch.linalg.cholesky(F)
    return float(torch.linalg.eigvalsh(L.mT @ inverse @ L).log().abs().max())


def path(family: Any, q: Tensors, moves: Any, count: int) -> list[Tensors]:
    """Members along a random walk in those parts of the tangents that ``moves`` names."""
    found = []
    for k in range(count):
        u = some_tangent(family, q, 0.3, seed=100 + k)
        q = family.retract(q, {n: v if moves(n) else 0.0 * v for n, v in u.items()}, 1.0)
        found.append(q)
    return found


def framed_and_stored(
    family: Any, members: list[Tensors], eps: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Row k of both at member k: packed in the frame, and the ambient scores; and F at the last
    member, with the share of H_0."""
    at_each: list[Tensors] = []
    for q, e in zip(members, eps, strict=True):
        at_each.append(family.score(q, family.rsample(q, e[None])))
    framed = torch.cat(
        [packed_scores(family, *both) for both in zip(members, at_each, strict=True)]
    )
    stored = torch.stack([torch.cat([v.reshape(-1) for v in s.values()]) for s in at_each])
    last = members[-1]
    rows = packed_scores(family, last, family.score(last, family.rsample(last, eps)))
    return framed, stored, (rows.mT @ rows + torch.eye(rows.shape[1])) / len(eps)


def ambient_fisher(family: Any, q: Tensors, H: Tensor) -> Tensor:
    """A matrix in the stored coordinates as a form on the tangents at q."""
    units = torch.eye(len(family.pack(q)))
    pushed = [family.push(q, family.unpack(e, q)) for e in units]
    J = torch.stack([torch.cat([v.reshape(-1) for v in u.values()]) for u in pushed])
    return J @ H @ J.mT


@pytest.mark.parametrize("layers", [1, 2])
def test_inverse_carried_along_with_a_rotation_is_that_of_the_present_point(layers: int) -> None:
    """Scores in the frame do not depend on the last rotation at all, so transport is free of errors;
    in ambient coordinates the same updates give another matrix."""
    family, d, n = OrthogonalFlow(layers), 3, 400
    members = path(family, member(family, d), lambda name: name == f"weight_{layers}", n)
    turned = members[0][f"weight_{layers}"].mT @ members[-1][f"weight_{layers}"]
    assert float(turned.trace()) < 2.0  # by more than 60 degrees
    framed, stored, F = framed_and_stored(family, members, noise(n, d))
    assert error(carried(framed), F) < 1e-7
    ambient = ambient_fisher(family, members[-1], stored.mT @ stored / n) + torch.eye(len(F)) / n
    assert error(torch.linalg.inv(ambient), F) > 0.5


def test_inverse_carried_along_with_a_gaussian_is_that_of_the_present_point() -> None:
    family, n = FullRankNormal(), 400
    members = path(family, family.init(torch.zeros(3), 1.0), lambda name: True, n)
    framed, stored, F = framed_and_stored(family, members, noise(n, 3))
    assert error(carried(framed), F) < 1e-7
    ambient = ambient_fisher(family, members[-1], stored.mT @ stored / n) + torch.eye(len(F)) / n
    assert error(torch.linalg.inv(ambient), F) > 0.5


def test_averages_of_flows_are_riemannian_means_to_second_order() -> None:
    """The mean m of Karcher, sum_k log(m'W_k) = 0, of 20 members around one, up to the third order
    of their spread t; a chord leaves the manifold by the second."""
    family = OrthogonalFlow(1)
    base = member(family, 4)
    tangents = [some_tangent(family, base, 1.0, seed=k) for k in range(20)]

    def gap(t: float) -> float:
        average: Any = None
        iterates = [family.retract(base, u, t) for u in tangents]
        for k, q in enumerate(iterates, 1):
            average = q if average is None else family.average(average, q, torch.tensor(1.0 / k))
        rotations = [q["weight_1"] for q in iterates]
        mean = rotations[0]
        for _ in range(50):
            step = torch.stack([log_rotation(mean.mT @ W) for W in rotations]).mean(0)
            mean = mean @ torch.linalg.matrix_exp(step)
        assert float(step.abs().max()) < 1e-12
        for name in q:
            if not is_rotation(name):
                plain = torch.stack([q[name] for q in iterates]).mean(0)
                torch.testing.assert_close(average[name], plain)
        return float((average["weight_1"] - mean).norm())

    assert 6.0 < gap(0.04) / gap(0.02) < 10.0
    assert gap(0.02) < 20 * 0.02**3


def log_rotation(Q: Tensor) -> Tensor:
    """The skew logarithm, by that of the eigenvalues."""
    values, vectors = torch.linalg.eig(Q)
    found = (vectors * values.log()) @ torch.linalg.inv(vectors)
    return 0.5 * (found - found.mH).real


def test_stiefel_frame_is_left_translation() -> None:
    """The numbers of a velocity W A are those of (Q W) A at Q W."""
    W = torch.linalg.qr(some(D, D)).Q
    Q = torch.linalg.qr(some(D, D, seed=1)).Q
    a = some(D, D, seed=2).tril(-1)
    torch.testing.assert_close(stiefel.push(Q @ W, a), Q @ stiefel.push(W, a))
    G = some(D, D, seed=3)
    torch.testing.assert_close(stiefel.pull(Q @ W, Q @ G), stiefel.pull(W, G))
