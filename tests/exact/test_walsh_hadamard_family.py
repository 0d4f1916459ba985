"""Gaussians around a Walsh-Hadamard matrix: against torch, autograd, and the Hessian of KL."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributions import MultivariateNormal, kl_divergence
from torch.func import jacrev, vmap

from pyro_ngvi.families import FullRankNormal, MeanFieldNormal, ProductFamily, WalshHadamardNormal
from pyro_ngvi.linalg.walsh_hadamard_matrix import WalshHadamardMatrix
from pyro_ngvi.optim.natural_gradient import NaturalGradientRule
from pyro_ngvi.optim.schedules import Constant
from tests.cubature import sphere_points

Params = dict[str, Tensor]

#: rows, columns, entries: classes of a block all as many, or not, or some of none; no space
#: outside; a last row that is cut
SHAPES: dict[str, tuple[int, int, int]] = {
    "8x4": (8, 4, 32),
    "6x3": (6, 3, 18),
    "9x5, classes dropped": (9, 5, 45),
    "5x13": (5, 13, 65),
    "1x8, nothing outside": (1, 8, 8),
    "5x1, nothing outside": (5, 1, 5),
    "3x4 cut at 9": (3, 4, 9),
}
BASES = {"mean_field": MeanFieldNormal(), "full_rank": FullRankNormal()}


def make(shape: str, base: str) -> WalshHadamardNormal:
    rows, columns, entries = SHAPES[shape]
    matrix = WalshHadamardMatrix(rows, columns, (entries,))
    signs = matrix.signs(0, torch.zeros((), dtype=torch.float64))
    return WalshHadamardNormal(matrix, lambda: signs, BASES[base])


FAMILIES = {f"{s}, {b}": make(s, b) for s in SHAPES for b in BASES}
cases = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
NAMES = [name for name in FAMILIES if name.startswith(("8x4,", "9x5", "1x8"))]
few = pytest.mark.parametrize("family", [FAMILIES[n] for n in NAMES], ids=NAMES)


def member(family: WalshHadamardNormal, seed: int = 0) -> Params:
    g = torch.Generator().manual_seed(seed)
    params = family.init(torch.randn(family.entries, generator=g), 0.7)
    for k, v in params.items():
        noise = torch.randn(v.shape, generator=g)
        if k == "scale_tril":
            params[k] = v + 0.3 / math.sqrt(family.rank) * noise.tril()
        else:
            params[k] = v + 0.3 * noise
    return params


def random_tangent(params: Params) -> Params:
    u = {k: torch.randn_like(v) for k, v in params.items()}
    return {k: v.tril() if k == "scale_tril" else v for k, v in u.items()}


def dense(family: WalshHadamardNormal, params: Params) -> MultivariateNormal:
    return MultivariateNormal(family.mean(params), family.covariance(params))


def basis(family: WalshHadamardNormal) -> Tensor:
    """Q (d, K)."""
    return family.embed(torch.eye(family.rank)).mT


def linear_map(family: WalshHadamardNormal) -> Tensor:
    """A (d, num_g): vec(U) = A g, by the matrices of unit vectors."""
    matrix = family.matrix
    made = matrix.dense(torch.eye(matrix.num_g), *family.diagonals())
    return made.flatten(1)[:, : family.entries].mT


@cases
def test_coordinates_are_an_orthonormal_basis_of_the_matrices(family: WalshHadamardNormal) -> None:
    Q, A = basis(family), linear_map(family)
    torch.testing.assert_close(Q.mT @ Q, torch.eye(family.rank))
    assert family.rank == torch.linalg.matrix_rank(A)
    torch.testing.assert_close(Q @ (Q.mT @ A), A)
    u = torch.randn(3, family.entries)
    torch.testing.assert_close(family.coordinates_of(u), u @ Q)


def coordinates_of(
    family: WalshHadamardNormal, m: Tensor, S: Tensor, sigma: Tensor
) -> dict[str, Tensor]:
    """Parameters of the member that is A g + sigma E, g ~ N(m, S)."""
    QA = basis(family).mT @ linear_map(family)
    inside = QA @ S @ QA.mT + sigma.square() * torch.eye(family.rank)
    params = {"loc": QA @ m}
    if isinstance(family.gaussian, FullRankNormal):
        params["scale_tril"] = torch.linalg.cholesky(inside)
    else:
        params["log_scale"] = 0.5 * inside.diagonal().log()
        torch.testing.assert_close(inside, inside.diagonal().diag())
    return params | ({"log_noise": sigma.log()} if family.rest else {})


@pytest.mark.parametrize("shape", SHAPES)
def test_holds_noise_around_any_gaussian_g(shape: str) -> None:
    family = make(shape, "full_rank")
    K, d = family.matrix.num_g, family.entries
    A, root, sigma = linear_map(family), torch.randn(K, K) / math.sqrt(K), torch.tensor(0.3)
    S, m = root @ root.mT + 0.01 * torch.eye(K), torch.randn(K)
    params = coordinates_of(family, m, S, sigma)
    q = MultivariateNormal(A @ m, A @ S @ A.mT + 0.09 * torch.eye(d))
    u = 2.0 * torch.randn(4, d)
    torch.testing.assert_close(family.log_prob(params, u), q.log_prob(u))
    torch.testing.assert_close(family.entropy(params), q.entropy())
    # determinant lemma in the dimension of g: sigma^2d det(S^-1 + A'A / sigma^2) / det(S^-1)
    P = torch.linalg.inv(S)
    lemma = 2 * d * sigma.log() + torch.logdet(P + A.mT @ A / 0.09) - torch.logdet(P)
    torch.testing.assert_close(torch.logdet(family.covariance(params)), lemma)


@pytest.mark.parametrize("shape", ["8x4", "1x8, nothing outside", "5x1, nothing outside"])
def test_holds_noise_around_independent_g(shape: str) -> None:
    """Where classes have equally many entries, the mean-field coordinates are those of g."""
    family = make(shape, "mean_field")
    K, A = family.matrix.num_g, linear_map(family)
    m, s = torch.randn(K), 0.1 + torch.rand(K)
    params = coordinates_of(family, m, torch.diag(s), torch.tensor(0.3))
    q = MultivariateNormal(A @ m, (A * s) @ A.mT + 0.09 * torch.eye(family.entries))
    u = torch.randn(4, family.entries)
    torch.testing.assert_close(family.log_prob(params, u), q.log_prob(u))


@cases
def test_density_entropy_and_kl_against_torch(family: WalshHadamardNormal) -> None:
    p, q = member(family, 1), member(family, 2)
    z = torch.randn(7, 3, family.entries)
    torch.testing.assert_close(family.log_prob(p, z), dense(family, p).log_prob(z))
    torch.testing.assert_close(family.entropy(p), dense(family, p).entropy())
    expected = kl_divergence(dense(family, p), dense(family, q))
    torch.testing.assert_close(family.kl(p, q), expected)
    torch.testing.assert_close(family.stddev(p), family.covariance(p).diagonal().sqrt())
    L = family.scale_tril(p)
    torch.testing.assert_close(L @ L.mT, family.covariance(p))


@cases
def test_init(family: WalshHadamardNormal) -> None:
    """A mean in the space stays; another goes to the nearest point and keeps its length."""
    Q, loc = basis(family), torch.randn(family.entries)
    params = family.init(Q @ (Q.mT @ loc), 0.3)
    torch.testing.assert_close(family.mean(params), Q @ (Q.mT @ loc))
    torch.testing.assert_close(family.covariance(params), 0.09 * torch.eye(family.entries))
    mean = family.mean(family.init(loc, 0.3))
    torch.testing.assert_close(mean / mean.norm() * loc.norm(), mean)
    torch.testing.assert_close(torch.linalg.vector_norm(mean), torch.linalg.vector_norm(loc))
    near = Q @ (Q.mT @ loc)
    torch.testing.assert_close(mean / mean.norm(), near / near.norm())
    zero = family.init(torch.zeros(family.entries), 0.3)
    assert torch.equal(zero["loc"], torch.zeros(family.rank))


@cases
def test_samples_have_the_moments_of_q(family: WalshHadamardNormal) -> None:
    params = member(family)
    z = family.rsample(params, sphere_points(family.noise_dim(params)))
    torch.testing.assert_close(z.mean(0), family.mean(params))
    centred = z - z.mean(0)
    torch.testing.assert_close(centred.mT @ centred / len(z), family.covariance(params))


@cases
def test_score_against_autograd(family: WalshHadamardNormal) -> None:
    params, z = member(family), torch.randn(6, family.entries)
    expected = vmap(jacrev(family.log_prob), in_dims=(None, 0))(params, z)
    score = family.score(params, z)
    assert score.keys() == params.keys()
    for key, value in score.items():
        want = expected[key].tril() if key == "scale_tril" else expected[key]
        torch.testing.assert_close(value, want, rtol=1e-10, atol=1e-10)
    # quadratic in z, so sphere points integrate them exactly: to zero
    z = family.rsample(params, sphere_points(family.noise_dim(params)))
    for value in family.score(params, z).values():
        torch.testing.assert_close(value.mean(0), torch.zeros_like(value[0]), atol=1e-12, rtol=0)


def flat_of(family: WalshHadamardNormal, params: Params) -> Any:
    """The maps between params and a vector of their free entries, by the family's own packing."""
    return family.pack, lambda x: family.unpack(x, params)


@few
def test_fisher_matrix(family: WalshHadamardNormal) -> None:
    """Hessian of KL, covariance of scores, and the product in the local frame."""
    params = member(family)
    pack, unpack = flat_of(family, params)
    x = pack(params)
    back = unpack(x)
    assert back.keys() == params.keys() and all(torch.equal(back[k], params[k]) for k in params)
    F = jacrev(jacrev(lambda x: family.kl(params, unpack(x))))(x)
    u = random_tangent(params)
    expected = family.pull(params, unpack(F @ pack(family.push(params, u))))
    actual = family.fisher_product(params, u)
    for key in params:
        torch.testing.assert_close(actual[key], expected[key], rtol=1e-9, atol=1e-9)
    # E[s s'] = -E[d s / d params]; the derivative is quadratic in z, so sphere points make it exact
    z = family.rsample(params, sphere_points(family.noise_dim(params)))

    def mean_score(x: Tensor) -> Tensor:
        score = family.score(unpack(x), z)
        return pack({k: v.mean(0) for k, v in score.items()})

    torch.testing.assert_close(-jacrev(mean_score)(x), F, rtol=1e-9, atol=1e-9)


@cases
def test_frame(family: WalshHadamardNormal) -> None:
    params = member(family)
    g, u = {k: torch.randn_like(v) for k, v in params.items()}, random_tangent(params)
    left = sum((a * u[k]).sum() for k, a in family.pull(params, g).items())
    right = sum((g[k] * v).sum() for k, v in family.push(params, u).items())
    torch.testing.assert_close(left, right)
    back = family.natural_gradient(params, family.fisher_product(params, u))
    for key in params:
        torch.testing.assert_close(back[key], u[key])
    assert family.names == tuple(params)


@cases
def test_retraction(family: WalshHadamardNormal) -> None:
    params = member(family)
    tangent = random_tangent(params)
    velocity, h = family.push(params, tangent), 1e-6
    ahead, behind = (family.retract(params, tangent, s) for s in (h, -h))
    for key in params:
        slope = (ahead[key] - behind[key]) / (2 * h)
        torch.testing.assert_close(slope, velocity[key], rtol=1e-6, atol=1e-6)
    for step in (1e-3, 1.0, 300.0, -300.0):
        new = family.retract(params, tangent, step)
        assert all(v.isfinite().all() for v in new.values())
        assert (family.stddev(new) > 0).all()


@cases
def test_pathwise_gradient_is_exact_on_quadratics(family: WalshHadamardNormal) -> None:
    params, d = member(family), family.entries
    root = torch.randn(d, d) / math.sqrt(d)
    P, m = root @ root.mT, torch.randn(d)

    def expected(p: Params) -> Tensor:
        x = family.mean(p) - m
        return 0.5 * (x @ P @ x + (P * family.covariance(p)).sum())

    want = jacrev(expected)(params)
    leaves = {k: v.clone().requires_grad_() for k, v in params.items()}
    x = family.rsample(leaves, sphere_points(family.noise_dim(params))) - m
    (0.5 * (x @ P * x).sum(-1)).mean().backward()
    for key, value in leaves.items():
        reference = want[key].tril() if key == "scale_tril" else want[key]
        torch.testing.assert_close(value.grad, reference, rtol=1e-9, atol=1e-9)


@few
def test_exact_gradients_lead_to_a_posterior_of_the_family(family: WalshHadamardNormal) -> None:
    """The posterior is a member; every entry, within the space and without, has to be found."""
    target, params = member(family, 3), family.init(torch.zeros(family.entries), 1.0)
    P = torch.linalg.inv(family.covariance(target))
    rule = NaturalGradientRule(
        family, trust_radius=1.0, noise_radius=math.inf, schedule=Constant(0.4)
    )
    state = rule.init(params)
    points = sphere_points(family.entries)
    for _ in range(100):
        leaves = {k: v.clone().requires_grad_() for k, v in params.items()}
        x = family.rsample(leaves, points) - family.mean(target)
        (0.5 * (x @ P * x).sum(-1).mean() - family.entropy(leaves)).backward()
        grads = {k: v.grad for k, v in leaves.items() if v.grad is not None}
        params, state, _ = rule.update(params, grads, state)
    assert family.kl(params, target) < 1e-12
    torch.testing.assert_close(family.covariance(params), family.covariance(target))


def test_noise_steps_to_its_optimum_in_one_natural_step() -> None:
    """sigma^2 alone is off: its own natural coordinates would land; the local step is Newton's."""
    family = FAMILIES["8x4, mean_field"]
    target = member(family, 3)
    params = target | {"log_noise": target["log_noise"] + 1e-3}
    gradient = jacrev(lambda p: family.kl(p, target))(params)
    pulled = family.pull(params, gradient)
    new = family.retract(params, family.natural_gradient(params, pulled), -1.0)
    error = (new["log_noise"] - target["log_noise"]).abs()
    assert error < 1e-5 and family.rest == 32 - 8  # quadratic: about (1e-3)^2


def test_part_of_a_product() -> None:
    family = FAMILIES["9x5, classes dropped, full_rank"]
    parts = {"walsh": family, "rest": MeanFieldNormal()}
    product = ProductFamily(parts, [("rest", 2), ("walsh", 45), ("rest", 1)], linear=False)
    params = product.init(torch.randn(48), 0.4)
    params["walsh_scale_tril"] += 0.02 * torch.randn(family.rank, family.rank).tril()
    z = torch.randn(3, 48)
    q = MultivariateNormal(product.mean(params), product.covariance(params))
    torch.testing.assert_close(product.log_prob(params, z), q.log_prob(z))
    back = product.unpack(product.pack(params), params)
    assert all(torch.equal(back[k], params[k]) for k in params)
    bad = product.not_finite(params | {"walsh_log_noise": torch.tensor(math.nan)})
    assert bad.tolist() == [False] * 2 + [True] * 45 + [False]


@few
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_dtype_and_device_are_kept(
    family: WalshHadamardNormal, dtype: torch.dtype, device: str
) -> None:
    matrix, d = family.matrix, family.entries
    signs = matrix.signs(0, torch.zeros((), dtype=dtype, device=device))
    family = WalshHadamardNormal(matrix, lambda: signs, family.gaussian)
    params = family.init(torch.zeros(d, dtype=dtype, device=device), 0.5)
    noise = torch.zeros(3, d, dtype=dtype, device=device)
    leaves = {k: v.requires_grad_() for k, v in params.items()}
    z = family.rsample(leaves, noise)
    (family.log_prob(leaves, z).sum() + z.sum()).backward()
    params = {k: v.detach() for k, v in leaves.items()}
    gradient = family.pull(params, {k: v.grad for k, v in leaves.items() if v.grad is not None})
    tangent = family.natural_gradient(params, gradient)
    everything = [z, family.entropy(params), family.kl(params, params), family.stddev(params)]
    everything += [*family.score(params, z.detach()).values(), *tangent.values()]
    everything += [*family.retract(params, tangent, 0.1).values(), family.covariance(params)]
    assert all(x.dtype == dtype and x.device.type == device for x in everything)
