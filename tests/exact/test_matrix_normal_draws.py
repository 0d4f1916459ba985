"""Draws of the matrix normal and the gradients through them; products of it with other families."""

import math

import torch
from torch import Tensor
from torch.distributions import kl_divergence
from torch.func import jacrev, vmap

from pyro_ngvi.families import Family
from tests.cubature import sphere_points
from tests.exact.matrix_members import (
    PRODUCT,
    Params,
    dense,
    member,
    random_like,
    random_member,
    shapes,
)


@shapes
def test_draws_have_the_moments_of_q(shape: tuple[int, int]) -> None:
    # the noise enters linearly, so the sphere points carry mean and covariance exactly
    family, p = member(shape)
    z = family.rsample(p, sphere_points(family.noise_dim(p)))
    torch.testing.assert_close(z.mean(0), p["loc"])
    centred = z - z.mean(0)
    torch.testing.assert_close(centred.T @ centred / len(z), family.covariance(p))


def test_draws_come_in_any_batch() -> None:
    family, p = member((2, 3))
    noise = torch.randn(5, 4, 6)
    z = family.rsample(p, noise)
    assert z.shape == (5, 4, 6)
    torch.testing.assert_close(family.rsample(p, noise[1, 2]), z[1, 2])
    assert family.draw(p, torch.Size((5, 4))).shape == (5, 4, 6)


@shapes
def test_pathwise_gradient_is_exact_on_quadratics(shape: tuple[int, int]) -> None:
    """Sphere points integrate a quadratic loss, so the sampled gradient equals that of E[loss]."""
    family, p = member(shape)
    d = math.prod(shape)
    root = torch.randn(d, d)
    P, m = root @ root.T, torch.randn(d)

    def expected(x: Params) -> Tensor:
        r = x["loc"] - m
        return 0.5 * (r @ P @ r + (P * family.covariance(x)).sum())

    want = jacrev(expected)(p)
    leaves = {k: v.clone().requires_grad_() for k, v in p.items()}
    x = family.rsample(leaves, sphere_points(family.noise_dim(p))) - m
    (0.5 * (x @ P * x).sum(-1)).mean().backward()
    for key, value in leaves.items():
        reference = want[key].tril() if key.endswith("tril") else want[key]
        torch.testing.assert_close(value.grad, reference, rtol=1e-10, atol=1e-10)


def plain_sample(params: Params, noise: Tensor) -> Tensor:
    """The reparameterised draw with nothing but autograd behind it."""
    A, B = params["row_tril"].tril(), params["column_tril"].tril()
    E = noise.reshape(len(A), len(B))
    return params["loc"] + (A @ E @ B.mT).reshape(-1)


def sampled_gradients(sample, params: Params, noise: Tensor) -> Params:
    """Gradients of a non-quadratic loss, one per row of ``noise``."""
    w = torch.linspace(-1.0, 1.5, noise.shape[-1])

    def loss(p, e):
        z = sample(p, e)
        return torch.logaddexp(z @ w, -z @ w) + (z[0] * z[1]).sin()

    return vmap(jacrev(loss), in_dims=(None, 0))(params, noise)


def test_pathwise_gradient_is_unbiased() -> None:
    family, p = member((2, 3))
    n = 20000
    noise = torch.randn(n, 6, generator=torch.Generator().manual_seed(3))
    ours = sampled_gradients(family.rsample, p, noise)
    plain = sampled_gradients(plain_sample, p, noise)
    for key in p:
        difference = (ours[key] - plain[key]).reshape(n, -1)
        standard_error = difference.std(0) / math.sqrt(n)
        # 15 entries: a z-score above 4.5 comes once in 10,000 runs
        assert (difference.mean(0).abs() <= 4.5 * standard_error + 1e-12).all()


def noise_energy(family: Family, params: Params, gradients: Params) -> Tensor:
    """Trace of the covariance of the gradient in the Fisher metric (nats)."""

    def energy(g):
        pulled = family.pull(params, g)
        tangent = family.natural_gradient(params, pulled)
        return torch.stack([(pulled[k] * tangent[k]).sum() for k in pulled]).sum()

    return vmap(energy)({k: v - v.mean(0) for k, v in gradients.items()}).mean()


def test_pathwise_gradient_is_less_noisy_than_the_plain_one() -> None:
    # which triangle is luckier depends on the order of the coordinates; so average over members
    total = torch.zeros(2)
    for seed in range(8):
        family, p = member((3, 4), seed)
        noise = torch.randn(2000, 12)
        ours = sampled_gradients(family.rsample, p, noise)
        plain = sampled_gradients(plain_sample, p, noise)
        total += torch.stack([noise_energy(family, p, g) for g in (ours, plain)])
    assert total[0] < 0.9 * total[1]


def test_a_product_of_gaussians_is_a_gaussian() -> None:
    p, q = random_member(PRODUCT, 10, 1), random_member(PRODUCT, 10, 2)
    z = torch.randn(4, 10)
    exact = dense(PRODUCT, p)
    torch.testing.assert_close(PRODUCT.log_prob(p, z), exact.log_prob(z))
    torch.testing.assert_close(PRODUCT.entropy(p), exact.entropy())
    torch.testing.assert_close(PRODUCT.kl(p, q), kl_divergence(exact, dense(PRODUCT, q)))
    torch.testing.assert_close(PRODUCT.stddev(p), PRODUCT.covariance(p).diagonal().sqrt())
    L = PRODUCT.scale_tril(p)
    torch.testing.assert_close(L, torch.linalg.cholesky(PRODUCT.covariance(p)))
    points = PRODUCT.rsample(p, sphere_points(PRODUCT.noise_dim(p)))
    centred = points - points.mean(0)
    torch.testing.assert_close(centred.mT @ centred / len(points), PRODUCT.covariance(p))
    score = PRODUCT.score(p, z)
    expected = vmap(jacrev(PRODUCT.log_prob), in_dims=(None, 0))(p, z)
    for key, value in score.items():
        torch.testing.assert_close(value, expected[key], rtol=1e-10, atol=1e-10)
    assert PRODUCT.coordinates == ("local",)
    assert PRODUCT.location == ("matrix_loc", "rest_loc", "full_loc")


def test_a_product_moves_each_part_in_its_local_frame() -> None:
    p = random_member(PRODUCT, 10)
    u = random_like(p, 3)
    new = PRODUCT.retract(p, u, 0.3)
    for part, family in PRODUCT.parts.items():
        own = family.retract(PRODUCT.own(part, p), PRODUCT.own(part, u), 0.3, "local")
        for name, value in PRODUCT.own(part, new).items():
            torch.testing.assert_close(value, own[name], rtol=0, atol=0)
