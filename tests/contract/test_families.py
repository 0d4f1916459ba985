"""Every family of the registry: density, scores, frame, Fisher matrix, moments and moves agree.

Exact tests are against automatic differentiation; tests by draws state their standard errors.
"""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.func import jacrev, vmap

from pyro_ngvi.families import Family
from pyro_ngvi.families.base import Tensors, dot
from tests.registry import FAMILIES

every_family = pytest.mark.parametrize("name", FAMILIES)
#: that of a mixture is of value and component: tests/exact/test_mixture.py
known_fisher = pytest.mark.parametrize("name", [name for name in FAMILIES if "mixture" not in name])

#: with 6,000 comparisons at most, 5.5 standard errors are passed by chance once in 4,000 runs
SIGMAS = 5.5
DRAWS = 20_000


def tangent_at(family: Family, params: Tensors, seed: int) -> Tensors:
    """A random tangent: in the coordinates that the family counts as free."""
    g = torch.Generator().manual_seed(seed)
    packed = family.pack(params)
    return family.unpack(torch.randn(packed.shape, generator=g, dtype=packed.dtype), params)


def member(name: str, seed: int = 0) -> tuple[Family, Tensors]:
    """A member that is no start, reached by a step, so that it lies in the domain."""
    family, d = FAMILIES[name]
    start = family.init(torch.randn(d, generator=torch.Generator().manual_seed(seed)), 0.7)
    return family, family.retract(start, tangent_at(family, start, seed + 100), 0.3)


def fisher_of(family: Family, params: Tensors) -> Tensor:
    """F, of the packed coordinates of the local frame."""
    units = torch.eye(len(family.pack(params)))
    products = [family.fisher_product(params, family.unpack(e, params)) for e in units]
    return torch.stack([family.pack(p) for p in products])


@every_family
def test_scores_are_gradients_of_the_density(name: str) -> None:
    family, params = member(name)
    z = family.draw(params, torch.Size((7,)))
    got = family.score(params, z)
    jacobian: Any = jacrev(lambda p: family.log_prob(p, z))(params)
    for key in params:
        torch.testing.assert_close(got[key], jacobian[key], rtol=1e-9, atol=1e-9)


@known_fisher
def test_fisher_matrix_is_the_second_moment_of_scores_of_mean_zero(name: str) -> None:
    family, params = member(name)
    torch.manual_seed(1)
    scores = family.draw_scores(params, DRAWS)
    rows = vmap(lambda s: family.pack(family.pull(params, s)))(scores)
    products = rows.unsqueeze(-1) * rows.unsqueeze(-2)
    for sample, wanted in ((rows, 0.0), (products, fisher_of(family, params))):
        error = sample.std(0) / DRAWS**0.5
        assert ((sample.mean(0) - wanted).abs() <= SIGMAS * error + 1e-9).all()


@known_fisher
def test_fisher_product_is_the_hessian_of_the_divergence(name: str) -> None:
    """Along params + e push(u): the gradient vanishes at 0, so second derivatives are those of F."""
    family, params = member(name)
    u, v = tangent_at(family, params, 1), tangent_at(family, params, 2)
    du, dv = family.push(params, u), family.push(params, v)

    def divergence(e: Tensor) -> Tensor:
        return family.kl(params, {k: p + e[0] * du[k] + e[1] * dv[k] for k, p in params.items()})

    h: Any = jacrev(jacrev(divergence))(torch.zeros(2))
    wanted = [[family.inner(params, a, b) for b in (u, v)] for a in (u, v)]
    torch.testing.assert_close(h, torch.tensor(wanted), rtol=1e-7, atol=1e-8)


@every_family
def test_pull_is_the_transpose_of_push(name: str) -> None:
    family, params = member(name)
    u = tangent_at(family, params, 3)
    z = family.draw(params, torch.Size((1,)))
    grads = {k: v[0] for k, v in family.score(params, z).items()}
    torch.testing.assert_close(
        dot(family.pull(params, grads), u), dot(grads, family.push(params, u))
    )


@every_family
def test_natural_gradient_solves_with_the_fisher_matrix(name: str) -> None:
    family, params = member(name)
    gradient = family.fisher_product(params, tangent_at(family, params, 4))
    back = family.fisher_product(params, family.natural_gradient(params, gradient))
    for key, wanted in gradient.items():
        torch.testing.assert_close(back[key], wanted, rtol=1e-7, atol=1e-7)


@every_family
def test_a_retraction_starts_along_the_tangent(name: str) -> None:
    """Of a natural gradient: other tangents may move what does not change q. Central differences."""
    family, params = member(name)
    gradient = family.fisher_product(params, tangent_at(family, params, 5))
    u, h = family.natural_gradient(params, gradient), 1e-6
    for coordinates in family.coordinates:
        ahead, behind = (family.retract(params, u, e, coordinates) for e in (h, -h))
        for key, wanted in family.push(params, u).items():
            slope = (ahead[key] - behind[key]) / (2 * h)
            torch.testing.assert_close(slope, wanted, rtol=1e-6, atol=1e-6)


@every_family
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**20), log_step=st.floats(-6.0, 9.0))
def test_no_step_leaves_the_domain(name: str, seed: int, log_step: float) -> None:
    family, params = member(name)
    for coordinates in family.coordinates:
        new = family.retract(params, tangent_at(family, params, seed), 10.0**log_step, coordinates)
        assert all(v.isfinite().all() for v in new.values())
        z = family.draw(new, torch.Size((3,)))
        assert not family.log_prob(new, z).isnan().any()


@every_family
def test_moments_and_quantiles_are_those_of_the_draws(name: str) -> None:
    family, params = member(name)
    torch.manual_seed(2)
    z = family.draw(params, torch.Size((DRAWS,)))
    centred = z - family.mean(params)
    assert (centred.mean(0).abs() <= SIGMAS * z.std(0) / DRAWS**0.5).all()
    products = centred.unsqueeze(-1) * centred.unsqueeze(-2)
    error = products.std(0) / DRAWS**0.5
    covariance = family.covariance(params)
    assert ((products.mean(0) - covariance).abs() <= SIGMAS * error).all()
    torch.testing.assert_close(family.stddev(params), covariance.diagonal().sqrt())
    L = family.scale_tril(params)
    torch.testing.assert_close(L @ L.mT, covariance)
    levels = torch.tensor([0.05, 0.5, 0.9])
    below = (z <= family.icdf(params, levels).unsqueeze(1)).double().mean(1)
    error = (levels * (1 - levels) / DRAWS).sqrt().unsqueeze(-1)
    assert ((below - levels.unsqueeze(-1)).abs() <= SIGMAS * error).all()


@every_family
def test_entropy_and_divergence_are_expectations_of_the_density(name: str) -> None:
    family, params = member(name)
    other = member(name, seed=7)[1]
    torch.manual_seed(3)
    z = family.draw(params, torch.Size((DRAWS,)))
    own = family.log_prob(params, z)
    for sample, wanted in (
        (-own, family.entropy(params)),
        (own - family.log_prob(other, z), family.kl(params, other)),
    ):
        assert (sample.mean() - wanted).abs() <= SIGMAS * sample.std() / DRAWS**0.5


@every_family
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dtypes_are_kept(name: str, dtype: torch.dtype) -> None:
    family, params = member(name)
    params = {k: v.to(dtype) for k, v in params.items()}
    u = tangent_at(family, params, 6)
    z = family.draw(params, torch.Size((4,)))
    results = [z, family.log_prob(params, z), family.mean(params), family.stddev(params)]
    for made in (
        family.score(params, z),
        family.natural_gradient(params, family.pull(params, u)),
        family.retract(params, u, 0.1),
    ):
        results += made.values()
    assert all(r.dtype == dtype for r in results)
