"""Every family against autograd, closed forms, the outer product of scores and the Hessian of KL."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.func import jacrev, vmap

from benchmarks.baselines.nagvac import tangent_of
from pyro_ngvi.families import FactorNormal, FactorPrecisionNormal, FullRankNormal, MeanFieldNormal
from pyro_ngvi.linalg import spectral

D = 5
FAMILIES = {
    "mean_field": MeanFieldNormal(),
    "full_rank": FullRankNormal(),
    "factor_1": FactorNormal(1, cg_iterations=40),
    "factor_3": FactorNormal(3, cg_iterations=40),
    "factor_4": FactorNormal(4, cg_iterations=40),
    "factor_precision_1": FactorPrecisionNormal(1, cg_iterations=40),
    "factor_precision_3": FactorPrecisionNormal(3, cg_iterations=40),
    "factor_precision_4": FactorPrecisionNormal(4, cg_iterations=40),
}
family_cases = pytest.mark.parametrize("name", list(FAMILIES))


def random_member(family, seed=0, d=D):
    g = torch.Generator().manual_seed(seed)
    params = family.init(torch.randn(d, generator=g), 0.7)
    params = {k: v + 0.3 * torch.randn(v.shape, generator=g) for k, v in params.items()}
    if "scale_tril" in params:
        params["scale_tril"] = params["scale_tril"].tril()
    return params


def dense(family, params):
    return torch.distributions.MultivariateNormal(params["loc"], family.covariance(params))


def flatten(params):
    """Maps between params and a flat vector of their free entries."""
    keys = list(params)
    rows, cols = torch.tril_indices(D, D)

    def pack(p):
        parts = [p[k][rows, cols] if k == "scale_tril" else p[k].reshape(-1) for k in keys]
        return torch.cat(parts)

    def unpack(x):
        sizes = [len(rows) if k == "scale_tril" else params[k].numel() for k in keys]
        parts = dict(zip(keys, torch.split(x, sizes), strict=True))
        for k in keys:
            if k == "scale_tril":
                parts[k] = torch.zeros(D, D).index_put((rows, cols), parts[k])
            else:
                parts[k] = parts[k].reshape(params[k].shape)
        return parts

    return pack, unpack


@family_cases
def test_density_entropy_and_kl_against_torch(name):
    family = FAMILIES[name]
    p, q = random_member(family, 1), random_member(family, 2)
    z = torch.randn(7, 3, D)
    torch.testing.assert_close(family.log_prob(p, z), dense(family, p).log_prob(z))
    torch.testing.assert_close(family.entropy(p), dense(family, p).entropy())
    expected = torch.distributions.kl_divergence(dense(family, p), dense(family, q))
    torch.testing.assert_close(family.kl(p, q), expected)
    torch.testing.assert_close(family.stddev(p), family.covariance(p).diagonal().sqrt())


@family_cases
def test_init_has_the_asked_scale(name):
    params = FAMILIES[name].init(torch.arange(D) * 1.0, 0.3)
    torch.testing.assert_close(FAMILIES[name].stddev(params), torch.full((D,), 0.3))
    assert params["loc"].tolist() == [0, 1, 2, 3, 4]


@family_cases
def test_samples_have_the_moments_of_q(name):
    # the noise enters linearly, so the sphere points carry mean and covariance exactly
    from tests.cubature import sphere_points

    family = FAMILIES[name]
    params = random_member(family)
    z = family.rsample(params, sphere_points(family.noise_dim(params)))
    torch.testing.assert_close(z.mean(0), params["loc"])
    centred = z - z.mean(0)
    torch.testing.assert_close(centred.T @ centred / len(z), family.covariance(params))


@family_cases
def test_score_against_autograd(name):
    family = FAMILIES[name]
    params = random_member(family)
    z = torch.randn(6, D)
    expected = vmap(jacrev(family.log_prob), in_dims=(None, 0))(params, z)
    score = family.score(params, z)
    for key, value in score.items():
        want = expected[key].tril() if key == "scale_tril" else expected[key]
        torch.testing.assert_close(value, want, rtol=1e-10, atol=1e-10)


@family_cases
def test_score_integrates_to_zero(name):
    # scores are quadratic in z, so degree-3 points integrate them exactly
    from tests.cubature import sphere_points

    family = FAMILIES[name]
    params = random_member(family)
    z = family.rsample(params, sphere_points(family.noise_dim(params)))
    for value in family.score(params, z).values():
        torch.testing.assert_close(value.mean(0), torch.zeros_like(value[0]), atol=1e-12, rtol=0)


def fisher_matrix(family, params):
    """Fisher matrix in the flat coordinates of ``params``: the Hessian of KL(p || .) at p."""
    pack, unpack = flatten(params)
    return pack, unpack, jacrev(jacrev(lambda x: family.kl(params, unpack(x))))(pack(params))


@family_cases
def test_fisher_product_is_the_hessian_of_kl(name):
    family = FAMILIES[name]
    params = random_member(family)
    pack, unpack, F = fisher_matrix(family, params)
    u = {k: torch.randn_like(v) for k, v in params.items()}
    if "scale_tril" in u:
        u["scale_tril"] = u["scale_tril"].tril()
    expected = family.pull(params, unpack(F @ pack(family.push(params, u))))
    actual = family.fisher_product(params, u)
    for key in params:
        torch.testing.assert_close(actual[key], expected[key], rtol=1e-9, atol=1e-9)


@family_cases
def test_fisher_matrix_is_the_outer_product_of_scores(name):
    # scores are quadratic, their products quartic: a product Gauss-Hermite rule of 3 nodes in each
    # of the D whitened directions is exact up to degree 5
    from pyro_ngvi.linalg import gauss_hermite

    family = FAMILIES[name]
    params = random_member(family)
    pack, _, F = fisher_matrix(family, params)
    x, w = gauss_hermite(3)
    nodes = torch.cartesian_prod(*[x] * D)
    weights = torch.cartesian_prod(*[w] * D).prod(-1)
    root = torch.linalg.cholesky(family.covariance(params))
    score = family.score(params, params["loc"] + nodes @ root.T)
    flat = torch.stack([pack({k: v[i] for k, v in score.items()}) for i in range(len(nodes))])
    torch.testing.assert_close((flat.T * weights) @ flat, F, rtol=1e-9, atol=1e-9)


@family_cases
def test_pull_is_the_transpose_of_push(name):
    family = FAMILIES[name]
    params = random_member(family)
    g = {k: torch.randn_like(v) for k, v in params.items()}
    u = {k: torch.randn_like(v) for k, v in params.items()}
    if "scale_tril" in u:
        u["scale_tril"] = u["scale_tril"].tril()
    left = sum((a * u[k]).sum() for k, a in family.pull(params, g).items())
    right = sum((g[k] * v).sum() for k, v in family.push(params, u).items())
    torch.testing.assert_close(left, right)


def test_tangent_of_a_velocity_is_the_inverse_of_push():
    for name in ("factor_1", "factor_3"):
        family = FAMILIES[name]
        params, u = random_member(family), random_member(family, 3)
        found = tangent_of(params, family.push(params, u))
        for key, value in u.items():
            torch.testing.assert_close(found[key], value)


@family_cases
def test_natural_gradient_solves_with_the_fisher_matrix(name):
    family = FAMILIES[name]
    params = random_member(family)
    # the gradient of a function of q: any function of loc and covariance
    target = random_member(FAMILIES["full_rank"], 9)
    p = torch.distributions.MultivariateNormal(target["loc"], scale_tril=target["scale_tril"].abs())
    leaves = {k: v.clone().requires_grad_() for k, v in params.items()}
    torch.distributions.kl_divergence(dense(family, leaves), p).backward()
    gradient = family.pull(params, {k: v.grad for k, v in leaves.items()})
    tangent = family.natural_gradient(params, gradient)
    back = family.fisher_product(params, tangent)
    for key in params:
        torch.testing.assert_close(back[key], gradient[key], rtol=1e-6, atol=1e-6)
    assert family.inner(params, tangent, tangent) > 0
    torch.testing.assert_close(
        family.fisher_norm(params, tangent) ** 2, family.inner(params, tangent, tangent)
    )


def test_factor_fisher_has_the_cross_block():
    """F_bc[i, j] = 2 (Sigma^-1)_ij c_j (Sigma^-1 b)_j for rank one, in the coordinates (b, c)."""
    family = FAMILIES["factor_1"]
    params = random_member(family)
    _, _, F = fisher_matrix(family, params)
    cross = F[D : 2 * D, 2 * D :]
    precision = torch.linalg.inv(family.covariance(params))
    c = params["log_scale"].exp()
    expected = 2 * precision * (c * (precision @ params["factor"][:, 0]))
    torch.testing.assert_close(cross, expected * c)  # d/d log c = c d/dc


@pytest.mark.parametrize("rank, d, limit", [(1, 30, 1e-7), (5, 60, 1e-7), (10, 200, 1e-7)])
def test_default_cg_iterations_reach_the_stated_residual(rank, d, limit, monkeypatch):
    monkeypatch.setattr(spectral, "DENSE", 0)  # iterations for small d too
    family = FactorNormal(rank)
    params = random_member(family, d=d)
    root = torch.randn(d, d)
    gamma = root @ root.T / d
    g = {
        "loc": torch.randn(d),
        "factor": 2 * gamma @ params["factor"],
        "log_scale": 2 * gamma.diagonal() * (2 * params["log_scale"]).exp(),
    }
    gradient = family.pull(params, g)
    back = family.fisher_product(params, family.natural_gradient(params, gradient))
    for key in params:
        error = (back[key] - gradient[key]).norm() / gradient[key].norm()
        assert error < limit, f"{key}: relative residual {error:.1e}"


def test_factor_gradient_noise_along_rotations_is_removed():
    family = FAMILIES["factor_3"]
    params = random_member(family)
    A = torch.randn(3, 3)
    c = params["log_scale"].exp().unsqueeze(-1)
    noise = {
        "loc": torch.zeros(D),
        # dual to the rotations: B~' G = A - A' and nothing else
        "factor": torch.linalg.pinv(params["factor"] / c).T @ (A - A.T) / c,
        "log_scale": torch.zeros(D),
    }
    tangent = family.natural_gradient(params, family.pull(params, noise))
    assert family.inner(params, tangent, tangent) < 1e-18


@family_cases
def test_pathwise_gradient_is_exact_on_quadratics(name):
    """Sphere points integrate a quadratic loss, so the sampled gradient equals that of E[loss]."""
    from tests.cubature import sphere_points

    family = FAMILIES[name]
    params = random_member(family)
    root = torch.randn(D, D)
    P, m = root @ root.T, torch.randn(D)

    def expected(p):
        x = p["loc"] - m
        return 0.5 * (x @ P @ x + (P * family.covariance(p)).sum())

    want = jacrev(expected)(params)
    leaves = {k: v.clone().requires_grad_() for k, v in params.items()}
    x = family.rsample(leaves, sphere_points(family.noise_dim(params))) - m
    (0.5 * (x @ P * x).sum(-1)).mean().backward()
    for key, value in leaves.items():
        reference = want[key].tril() if key == "scale_tril" else want[key]
        torch.testing.assert_close(value.grad, reference, rtol=1e-10, atol=1e-10)


def plain_sample(family, params, noise):
    """The reparameterised draw with nothing but autograd behind it."""
    if isinstance(family, FullRankNormal):
        return params["loc"] + noise @ params["scale_tril"].tril().mT
    r = family.rank
    scaled = params["log_scale"].exp() * noise[..., r:]
    return params["loc"] + noise[..., :r] @ params["factor"].mT + scaled


def sampled_gradients(sample, params, noise):
    """Gradients of a non-quadratic loss, one per row of ``noise``."""
    w = torch.linspace(-1.0, 1.5, D)

    def loss(p, e):
        z = sample(p, e)
        return torch.logaddexp(z @ w, -z @ w) + (z[0] * z[1]).sin()

    return vmap(jacrev(loss), in_dims=(None, 0))(params, noise)


def noise_energy(family, params, gradients):
    """Trace of the covariance of the gradient in the Fisher metric (nats)."""

    def energy(g):
        pulled = family.pull(params, g)
        tangent = family.natural_gradient(params, pulled)
        return torch.stack([(pulled[k] * tangent[k]).sum() for k in pulled]).sum()

    return vmap(energy)({k: v - v.mean(0) for k, v in gradients.items()}).mean()


@pytest.mark.parametrize("name", ["full_rank", "factor_3"])
def test_pathwise_gradient_is_unbiased(name):
    family = FAMILIES[name]
    params = random_member(family)
    n = 20000
    noise = torch.randn(n, family.noise_dim(params), generator=torch.Generator().manual_seed(3))
    ours = sampled_gradients(family.rsample, params, noise)
    plain = sampled_gradients(lambda p, e: plain_sample(family, p, e), params, noise)
    for key in params:
        difference = (ours[key] - plain[key]).reshape(n, -1)
        standard_error = difference.std(0) / math.sqrt(n)
        # 25 entries at most: a z-score above 4.5 comes once in 5,000 runs
        assert (difference.mean(0).abs() <= 4.5 * standard_error + 1e-12).all()


@pytest.mark.parametrize("name", ["full_rank", "factor_3"])
def test_pathwise_gradient_is_less_noisy_than_the_plain_one(name):
    # For one order of the coordinates a lower triangle can be luckier than the symmetric part; the
    # average over orders cannot.  So average over members.
    family = FAMILIES[name]
    total = torch.zeros(2)
    for seed in range(8):
        params = random_member(family, seed)
        noise = torch.randn(2000, family.noise_dim(params))
        ours = sampled_gradients(family.rsample, params, noise)
        plain = sampled_gradients(lambda p, e: plain_sample(family, p, e), params, noise)
        total += torch.stack([noise_energy(family, params, g) for g in (ours, plain)])
    assert total[0] < 0.9 * total[1]


@pytest.mark.parametrize(
    "name, coordinates",
    [(n, c) for n, f in FAMILIES.items() for c in f.coordinates],
)
@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 2**20), log_step=st.floats(-6.0, 2.5))
def test_no_step_leaves_the_domain(name, coordinates, seed, log_step):
    family = FAMILIES[name]
    params = random_member(family, seed % 17)
    g = torch.Generator().manual_seed(seed)
    tangent = {k: torch.randn(v.shape, generator=g) for k, v in params.items()}
    if "scale_tril" in params:
        params["scale_tril"] = params["scale_tril"].tril(-1) + torch.diag(
            params["scale_tril"].diagonal().abs()
        )
        tangent["scale_tril"] = tangent["scale_tril"].tril()
    new = family.retract(params, tangent, 10.0**log_step, coordinates)
    assert all(v.isfinite().all() for v in new.values())
    assert (family.stddev(new) > 0).all()
    if "scale_tril" in new:
        assert (new["scale_tril"].diagonal() > 0).all()
        assert torch.equal(new["scale_tril"], new["scale_tril"].tril())


@family_cases
def test_retraction_starts_along_the_tangent(name):
    family = FAMILIES[name]
    params = random_member(family)
    if "scale_tril" in params:
        params["scale_tril"] = params["scale_tril"].tril(-1) + torch.diag(
            params["scale_tril"].diagonal().abs()
        )
    tangent = {k: torch.randn_like(v) for k, v in params.items()}
    if "scale_tril" in tangent:
        tangent["scale_tril"] = tangent["scale_tril"].tril()
    velocity = family.push(params, tangent)

    # in natural coordinates the curve bends elsewhere but starts in the same direction of q
    for coordinates in family.coordinates:
        h = 1e-6
        ahead = family.retract(params, tangent, h, coordinates)
        behind = family.retract(params, tangent, -h, coordinates)
        slope = (family.covariance(ahead) - family.covariance(behind)) / (2 * h)
        along = (
            family.covariance({k: params[k] + h * velocity[k] for k in params})
            - family.covariance({k: params[k] - h * velocity[k] for k in params})
        ) / (2 * h)
        torch.testing.assert_close(slope, along, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(
            (ahead["loc"] - behind["loc"]) / (2 * h), velocity["loc"], rtol=1e-6, atol=1e-6
        )


def test_factor_density_at_detached_parameters():
    """Its own backward, first and second derivatives, and under vmap."""
    family = FAMILIES["factor_3"]
    params = random_member(family, 1)
    z = torch.randn(3, D, requires_grad=True)
    exact = dense(family, params)
    torch.testing.assert_close(family.log_prob(params, z), exact.log_prob(z))
    assert torch.autograd.gradcheck(lambda z: family.log_prob(params, z), z)
    assert torch.autograd.gradgradcheck(lambda z: family.log_prob(params, z), z)
    one_by_one = vmap(lambda z: family.log_prob(params, z))
    (slope,) = torch.autograd.grad(one_by_one(z).sum(), z)
    torch.testing.assert_close(slope, (params["loc"] - z) @ exact.precision_matrix)


@family_cases
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_dtype_and_device_are_kept(name, dtype, device):
    family = FAMILIES[name]
    params = family.init(torch.zeros(D, dtype=dtype, device=device), 0.5)
    noise = torch.zeros(3, family.noise_dim(params), dtype=dtype, device=device)
    leaves = {k: v.requires_grad_() for k, v in params.items()}
    z = family.rsample(leaves, noise)
    (family.log_prob(leaves, z).sum() + z.sum()).backward()
    grads = {k: v.grad for k, v in leaves.items()}
    params = {k: v.detach() for k, v in params.items()}
    gradient = family.pull(params, grads)
    tangent = family.natural_gradient(params, gradient)
    everything = [z, family.entropy(params), family.kl(params, params), family.stddev(params)]
    everything += [*family.score(params, z.detach()).values(), *tangent.values()]
    for coordinates in family.coordinates:
        everything += family.retract(params, tangent, 0.1, coordinates).values()
    assert all(x.dtype == dtype and x.device.type == device for x in everything)


def test_rank_out_of_range_is_refused():
    with pytest.raises(ValueError, match="rank=0"):
        FactorNormal(0)
    with pytest.raises(ValueError, match=r"rank=5.*only 5 dimensions"):
        FactorNormal(5).init(torch.zeros(5), 0.1)
