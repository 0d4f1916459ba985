"""The matrix normal against the dense Gaussian of its Kronecker product: density and geometry."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributions import kl_divergence
from torch.func import jacrev, vmap

from pyro_ngvi.families import Family, FullRankNormal, MatrixNormal
from pyro_ngvi.linalg import gauss_hermite
from tests.cubature import sphere_points
from tests.exact.matrix_members import (
    PRODUCT,
    SHAPES,
    Params,
    dense,
    member,
    random_like,
    random_member,
    shapes,
)


def test_covariance_is_that_of_the_rows_of_the_matrix() -> None:
    """Cov(W_ij, W_kl) = (A A')_ik (B B')_jl, written out."""
    family, p = member((2, 3))
    rows, columns = (p[k] @ p[k].mT for k in ("row_tril", "column_tril"))
    expected = torch.einsum("ik,jl->ijkl", rows, columns).reshape(6, 6)
    torch.testing.assert_close(family.covariance(p), expected)
    L = family.scale_tril(p)
    torch.testing.assert_close(L @ L.mT, expected)
    assert torch.equal(L, L.tril())


@shapes
def test_density_entropy_and_kl_against_torch(shape: tuple[int, int]) -> None:
    family, p = member(shape, 1)
    q = member(shape, 2)[1]
    z = torch.randn(7, 3, math.prod(shape))
    torch.testing.assert_close(family.log_prob(p, z), dense(family, p).log_prob(z))
    torch.testing.assert_close(family.log_prob(p, z[0, 0]), dense(family, p).log_prob(z[0, 0]))
    torch.testing.assert_close(family.entropy(p), dense(family, p).entropy())
    torch.testing.assert_close(family.kl(p, q), kl_divergence(dense(family, p), dense(family, q)))
    torch.testing.assert_close(family.stddev(p), family.covariance(p).diagonal().sqrt())


@shapes
def test_init_has_the_asked_scale(shape: tuple[int, int]) -> None:
    d = math.prod(shape)
    family = MatrixNormal(*shape)
    params = family.init(torch.arange(d) * 1.0, 0.3)
    torch.testing.assert_close(family.covariance(params), 0.09 * torch.eye(d))
    assert params["loc"].tolist() == list(range(d))


@shapes
def test_score_against_autograd_and_differences(shape: tuple[int, int]) -> None:
    family, p = member(shape)
    z = torch.randn(6, math.prod(shape))
    score = family.score(p, z)
    expected = vmap(jacrev(family.log_prob), in_dims=(None, 0))(p, z)
    u, h = random_like(p, 3), 1e-5
    forth, back = ({k: v + s * h * u[k] for k, v in p.items()} for s in (1, -1))
    slope = (family.log_prob(forth, z) - family.log_prob(back, z)) / (2 * h)
    along = torch.zeros(6)
    for key, value in score.items():
        torch.testing.assert_close(value, expected[key], rtol=1e-10, atol=1e-10)
        along = along + (value * u[key]).reshape(6, -1).sum(-1)
    torch.testing.assert_close(along, slope, rtol=1e-7, atol=1e-7)


@shapes
def test_score_integrates_to_zero(shape: tuple[int, int]) -> None:
    # scores are quadratic in z, so degree-3 points integrate them exactly
    family, p = member(shape)
    z = family.rsample(p, sphere_points(family.noise_dim(p)))
    for value in family.score(p, z).values():
        torch.testing.assert_close(value.mean(0), torch.zeros_like(value[0]), atol=1e-12, rtol=0)


def fisher_matrix(family: Family, params: Params) -> Tensor:
    """F in the local frame: the Hessian of KL(p || .) along packed tangents, at p."""
    D = len(family.pack(params))

    def moved(x: Tensor) -> Tensor:
        # push at fixed params is linear, which suffices: the gradient of KL at p is zero
        velocity = family.push(params, family.unpack(x, params))
        return family.kl(params, {k: params[k] + velocity[k] for k in params})

    return jacrev(jacrev(moved))(torch.zeros(D))


def fisher_columns(family: Family, params: Params) -> Tensor:
    """What ``fisher_product`` says F is."""
    basis = torch.eye(len(family.pack(params)))
    columns = [family.pack(family.fisher_product(params, family.unpack(e, params))) for e in basis]
    return torch.stack(columns, -1)


@shapes
def test_fisher_product_is_the_hessian_of_kl(shape: tuple[int, int]) -> None:
    family, p = member(shape)
    F = fisher_matrix(family, p)
    torch.testing.assert_close(fisher_columns(family, p), F, rtol=1e-9, atol=1e-9)
    # one direction leaves q as it is
    assert int((torch.linalg.eigvalsh(F) < 1e-9).sum()) == 1


@pytest.mark.parametrize("shape", [(2, 2), (2, 3), (1, 3), (3, 1)])
def test_fisher_matrix_is_the_outer_product_of_scores(shape: tuple[int, int]) -> None:
    # scores are quadratic, their products quartic: 3 Gauss-Hermite nodes are exact up to degree 5
    family, p = member(shape)
    d = math.prod(shape)
    x, w = gauss_hermite(3)
    nodes, weights = torch.cartesian_prod(*[x] * d), torch.cartesian_prod(*[w] * d).prod(-1)
    score = family.score(p, p["loc"] + nodes @ torch.linalg.cholesky(family.covariance(p)).mT)
    flat = vmap(lambda s: family.pack(family.pull(p, s)))(score)
    expected = fisher_columns(family, p)
    torch.testing.assert_close((flat.mT * weights) @ flat, expected, rtol=1e-9, atol=1e-9)


@shapes
def test_natural_gradient_is_the_shortest_solution(shape: tuple[int, int]) -> None:
    """The pseudo-inverse of the Fisher matrix, for gradients of functions of q and for any other."""
    family, p = member(shape)
    inverse = torch.linalg.pinv(fisher_matrix(family, p), hermitian=True, atol=1e-8)
    target = member(shape, 7)[1]
    gradients = {
        "of KL to another member": jacrev(lambda x: family.kl(x, target))(p),
        "noise": random_like(p, 8),
    }
    for name, gradient in gradients.items():
        g = family.pull(p, gradient)
        tangent = family.natural_gradient(p, g)
        expected = inverse @ family.pack(g)
        torch.testing.assert_close(
            family.pack(tangent), expected, rtol=1e-8, atol=1e-8, msg=lambda m, n=name: f"{n}: {m}"
        )
        torch.testing.assert_close(
            tangent["row_tril"].trace(), tangent["column_tril"].trace(), rtol=1e-9, atol=1e-9
        )
        if name != "noise":
            back = family.fisher_product(p, tangent)
            for key in p:
                torch.testing.assert_close(back[key], g[key], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("shape", [(1, 3), (3, 1), (1, 1)])
def test_one_row_or_column_is_the_full_rank_gaussian(shape: tuple[int, int]) -> None:
    """Its natural gradient is that of the dense family: the same change of the covariance."""
    family, p = member(shape)
    full = FullRankNormal()
    q = {"loc": p["loc"], "scale_tril": family.scale_tril(p)}
    d = math.prod(shape)
    root, m = torch.randn(d, d), torch.randn(d)
    target = {"loc": m, "scale_tril": torch.linalg.cholesky(root @ root.mT + torch.eye(d))}
    dense_gradient = full.pull(q, jacrev(lambda x: full.kl(x, target))(q))
    dense_tangent = full.natural_gradient(q, dense_gradient)

    def loss(x: Params) -> Tensor:
        return full.kl({"loc": x["loc"], "scale_tril": family.scale_tril(x)}, target)

    tangent = family.natural_gradient(p, family.pull(p, jacrev(loss)(p)))
    ones = torch.eye(shape[0]), torch.eye(shape[1])
    M = torch.kron(tangent["row_tril"], ones[1]) + torch.kron(ones[0], tangent["column_tril"])
    torch.testing.assert_close(tangent["loc"], dense_tangent["loc"])
    torch.testing.assert_close(M, dense_tangent["scale_tril"])


@shapes
def test_natural_gradient_points_at_the_projection_of_the_dense_one(
    shape: tuple[int, int],
) -> None:
    """The velocity of the factor is the Fisher-nearest one of the family to the full-rank velocity."""
    family, p = member(shape)
    full = FullRankNormal()
    q = {"loc": p["loc"], "scale_tril": family.scale_tril(p)}
    d = math.prod(shape)
    root = torch.randn(d, d)
    target = {"loc": torch.randn(d), "scale_tril": torch.linalg.cholesky(root @ root.mT + 1.0)}
    G = full.natural_gradient(q, full.pull(q, jacrev(lambda x: full.kl(x, target))(q)))

    def loss(x: Params) -> Tensor:
        return full.kl({"loc": x["loc"], "scale_tril": family.scale_tril(x)}, target)

    tangent = family.natural_gradient(p, family.pull(p, jacrev(loss)(p)))
    I_n, I_m = torch.eye(shape[0]), torch.eye(shape[1])

    def lifted(u: Params) -> Params:
        M = torch.kron(u["row_tril"], I_m) + torch.kron(I_n, u["column_tril"])
        return {"loc": u["loc"], "scale_tril": M}

    ours = lifted(tangent)
    rest = {k: G[k] - ours[k] for k in G}
    for seed in range(5):
        any_direction = lifted(random_like(p, seed))
        size = full.fisher_norm(q, any_direction) * full.fisher_norm(q, G)
        assert full.inner(q, rest, any_direction).abs() < 1e-10 * size


@shapes
def test_pull_is_the_transpose_of_push(shape: tuple[int, int]) -> None:
    family, p = member(shape)
    g, u = random_like(p, 1), random_like(p, 2)
    g = {k: v + torch.randn_like(v).triu(1) if v.dim() == 2 else v for k, v in g.items()}
    left = sum((a * u[k]).sum() for k, a in family.pull(p, g).items())
    right = sum((g[k] * v).sum() for k, v in family.push(p, u).items())
    torch.testing.assert_close(left, right)


@pytest.mark.parametrize("name", ["matrix", "product"])
def test_pack_and_unpack(name: str) -> None:
    family, d = (MatrixNormal(2, 3), 6) if name == "matrix" else (PRODUCT, 10)
    p = random_member(family, d)
    u = random_like(p, 1)
    vector = family.pack(u)
    assert len(vector) == sum(int((v != 0).sum()) for v in u.values())
    assert all(torch.equal(v, u[k]) for k, v in family.unpack(vector, p).items())


def balance(p: Params) -> Tensor:
    return p["row_tril"].diagonal().log().sum() - p["column_tril"].diagonal().log().sum()


@shapes
def test_retraction_starts_along_the_tangent(shape: tuple[int, int]) -> None:
    family, p = member(shape)
    u = random_like(p, 2)
    velocity, h = family.push(p, u), 1e-6
    ahead, behind = (family.retract(p, u, s * h) for s in (1, -1))
    moved = [{k: v + s * h * velocity[k] for k, v in p.items()} for s in (1, -1)]
    slope, along = (
        (family.covariance(a) - family.covariance(b)) / (2 * h)
        for a, b in ((ahead, behind), (moved[0], moved[1]))
    )
    torch.testing.assert_close(slope, along, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close((ahead["loc"] - behind["loc"]) / (2 * h), velocity["loc"])
    # a natural gradient moves the parameters themselves as pushed
    u = family.natural_gradient(p, u)
    velocity = family.push(p, u)
    ahead, behind = (family.retract(p, u, s * h) for s in (1, -1))
    for key in p:
        slope = (ahead[key] - behind[key]) / (2 * h)
        torch.testing.assert_close(slope, velocity[key], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["2x3", "row", "scalar", "product"])
@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 2**20), log_step=st.floats(-6.0, 2.5))
def test_no_step_leaves_the_domain(name: str, seed: int, log_step: float) -> None:
    if name == "product":
        family, p = PRODUCT, random_member(PRODUCT, 10, seed % 17)
    else:
        family, p = member(SHAPES[name], seed % 17)
    new = family.retract(p, random_like(p, seed), 10.0**log_step)
    assert all(v.isfinite().all() for v in new.values())
    assert (family.stddev(new) > 0).all()
    for key, value in new.items():
        if key.endswith("tril"):
            assert (value.diagonal() > 0).all()
            assert torch.equal(value, value.tril())
    if name != "product":  # the balance of the factors stays, to rounding of sums of logarithms
        size = 1.0 + sum(v.diagonal().log().abs().sum() for k, v in new.items() if k != "loc")
        assert (balance(new) - balance(p)).abs() < 1e-13 * size


def test_no_step_is_no_change() -> None:
    family, p = member((2, 3))
    for key, value in family.retract(p, random_like(p, 0), 0.0).items():
        torch.testing.assert_close(value, p[key], rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("name", ["matrix", "product"])
def test_dtype_and_device_are_kept(name: str, dtype: torch.dtype, device: str) -> None:
    family, d = (MatrixNormal(2, 3), 6) if name == "matrix" else (PRODUCT, 10)
    params = family.init(torch.zeros(d, dtype=dtype, device=device), 0.5)
    noise = torch.zeros(3, family.noise_dim(params), dtype=dtype, device=device)
    leaves = {k: v.requires_grad_() for k, v in params.items()}
    z = family.rsample(leaves, noise)
    (family.log_prob(leaves, z).sum() + z.sum()).backward()
    grads = {k: v.grad for k, v in leaves.items() if v.grad is not None}
    assert set(grads) == set(params)
    params = {k: v.detach() for k, v in params.items()}
    gradient = family.pull(params, grads)
    tangent = family.natural_gradient(params, gradient)
    everything = [z, family.entropy(params), family.kl(params, params), family.stddev(params)]
    everything += [family.covariance(params), family.scale_tril(params)]
    everything += [*family.score(params, z.detach()).values(), *tangent.values()]
    everything += family.unpack(family.pack(tangent), tangent).values()
    everything += family.retract(params, tangent, 0.1).values()
    assert all(x.dtype == dtype and x.device.type == device for x in everything)


def test_float32_agrees_with_float64() -> None:
    family, p = member((4, 2))
    z = torch.randn(3, 8)
    single = {k: v.float() for k, v in p.items()}
    torch.testing.assert_close(
        family.log_prob(single, z.float()).double(), family.log_prob(p, z), rtol=1e-4, atol=1e-4
    )
    g = random_like(p, 1)
    tangent = family.natural_gradient(p, family.pull(p, g))
    rough = family.natural_gradient(
        single, family.pull(single, {k: v.float() for k, v in g.items()})
    )
    for key in p:
        torch.testing.assert_close(rough[key].double(), tangent[key], rtol=1e-4, atol=1e-5)


def test_wrong_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"shape \(6,\).*got \(5,\)"):
        MatrixNormal(2, 3).init(torch.zeros(5), 0.1)
