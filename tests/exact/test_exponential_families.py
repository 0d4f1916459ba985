"""Gamma, Beta, Dirichlet and products of them: densities, geometry, draws and their gradients."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import polygamma
from torch import Tensor
from torch.distributions import Beta, Dirichlet, Gamma, biject_to, constraints
from torch.func import jacrev, vmap

from pyro_ngvi.families import Family, MeanFieldDirichlet, MeanFieldGamma, MeanFieldNormal
from pyro_ngvi.families import ProductFamily as Product
from pyro_ngvi.families.log_gamma import (
    digamma_gap,
    inverse_trigamma,
    log_gamma_draw,
    stirling,
    trigamma_excess,
)

Params = dict[str, Tensor]
FAMILIES: dict[str, tuple[Family, int]] = {
    "gamma": (MeanFieldGamma(), 4),
    "beta": (MeanFieldDirichlet(2), 3),
    "dirichlet": (MeanFieldDirichlet(4), 6),
    "product": (
        Product(
            {
                "dirichlet3": MeanFieldDirichlet(3),
                "normal": MeanFieldNormal(),
                "gamma": MeanFieldGamma(),
            },
            [("gamma", 2), ("dirichlet3", 2), ("normal", 1), ("gamma", 1), ("dirichlet3", 4)],
        ),
        10,
    ),
}
cases = pytest.mark.parametrize("name", list(FAMILIES))


def member(name: str, seed: int = 0, spread: float = 1.0) -> tuple[Family, Params]:
    """A member with concentrations from about 0.1 to 100."""
    family, d = FAMILIES[name]
    g = torch.Generator().manual_seed(seed)
    params = family.init(0.5 * torch.randn(d, generator=g), 0.7)
    return family, {k: v + spread * torch.randn(v.shape, generator=g) for k, v in params.items()}


def pack(params: Params) -> Tensor:
    return torch.cat([v.reshape(-1) for v in params.values()])


def unpack(x: Tensor, like: Params) -> Params:
    parts = x.split([v.numel() for v in like.values()])
    return {k: part.reshape(v.shape) for (k, v), part in zip(like.items(), parts, strict=True)}


def random_like(params: Params, seed: int) -> Params:
    g = torch.Generator().manual_seed(seed)
    return {k: torch.randn(v.shape, generator=g) for k, v in params.items()}


# the functions around log-gamma


def test_special_functions_keep_their_digits_where_they_change_their_formula() -> None:
    a = torch.tensor([15.9, 15.999999, 16.000001, 16.1, 40.0])
    torch.testing.assert_close(
        stirling(a),
        torch.lgamma(a) - (a - 0.5) * a.log() + a - 0.5 * math.log(2 * math.pi),
        rtol=1e-11,
        atol=0,
    )
    torch.testing.assert_close(digamma_gap(a), a.log() - a.digamma(), rtol=1e-12, atol=0)
    # PyTorch's trigamma, below 16, is accurate to 1e-12, and 16 + 1/2 - 16 costs 1.5 digits
    exact = a.square() * torch.as_tensor(polygamma(1, a.numpy())) - a
    torch.testing.assert_close(trigamma_excess(a), exact, rtol=3e-11, atol=0)
    torch.testing.assert_close(trigamma_excess(a[2:]), exact[2:], rtol=3e-13, atol=0)


def test_special_functions_at_the_ends() -> None:
    far = torch.tensor([1e-12, 1e-3, 1e12])
    # a^2 trigamma(a) - a = 1 - a + a^2 pi^2 / 6 + ... and 1/2 + 1 / (6 a)
    expected = torch.tensor([1.0, 1 - 1e-3 + 1e-6 * math.pi**2 / 6, 0.5])
    torch.testing.assert_close(trigamma_excess(far), expected, rtol=1e-8, atol=0)
    torch.testing.assert_close(stirling(far[2:]), 1 / (12 * far[2:]), rtol=1e-12, atol=0)
    torch.testing.assert_close(digamma_gap(far[2:]), 1 / (2 * far[2:]), rtol=1e-10, atol=0)
    for function in (stirling, digamma_gap, trigamma_excess):
        for dtype in (torch.float32, torch.float64):
            a = torch.logspace(-6, 12, 50, dtype=dtype, requires_grad=True)
            value = function(a)
            value.sum().backward()
            assert value.isfinite().all()
            assert a.grad is not None and a.grad.isfinite().all()


def test_inverse_trigamma() -> None:
    a = torch.logspace(-4, 6, 60)
    torch.testing.assert_close(inverse_trigamma(torch.polygamma(1, a)), a, rtol=1e-9, atol=0)


# densities


@pytest.mark.parametrize("seed", range(3))
def test_gamma_density_against_torch(seed: int) -> None:
    family, p = member("gamma", seed)
    a = p["log_concentration"].exp()
    reference = Gamma(a, a / p["log_mean"].exp())
    z = family.draw(p, torch.Size((7, 3)))
    torch.testing.assert_close(
        family.log_prob(p, z), (reference.log_prob(z.exp()) + z).sum(-1), rtol=1e-10, atol=1e-10
    )
    # the entropy of log x is that of x less E[log x]
    log_x = a.digamma() - reference.rate.log()
    torch.testing.assert_close(family.entropy(p), (reference.entropy() - log_x).sum())
    torch.testing.assert_close(family.mean(p), log_x)
    torch.testing.assert_close(family.stddev(p), torch.polygamma(1, a).sqrt())


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("size", [2, 3, 6])
def test_dirichlet_density_against_torch(size: int, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    family = MeanFieldDirichlet(size)
    p = {"log_concentration": torch.randn(2, size, generator=g)}
    z = 2.0 * torch.randn(5, 2 * (size - 1), generator=g)
    transform = biject_to(constraints.simplex)
    theta = z.unflatten(-1, (2, size - 1))
    x = transform(theta)
    reference = Dirichlet(p["log_concentration"].exp())
    expected = (reference.log_prob(x) + transform.log_abs_det_jacobian(theta, x)).sum(-1)
    torch.testing.assert_close(family.log_prob(p, z), expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(family._log_x(z), x.log(), rtol=1e-10, atol=1e-10)  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("name", ["beta", "dirichlet"])
def test_dirichlet_entropy_against_torch(name: str) -> None:
    """That of x = x(z) less E log |det dx/dz| = E sum log x, over all entries of the simplex."""
    for seed in range(3):
        family, p = member(name, seed)
        alpha = p["log_concentration"].exp()
        log_x = alpha.digamma() - alpha.sum(-1, keepdim=True).digamma()
        expected = (Dirichlet(alpha).entropy() - log_x.sum(-1)).sum()
        torch.testing.assert_close(family.entropy(p), expected)


def test_beta_density_against_torch() -> None:
    family, p = member("beta")
    a, b = p["log_concentration"].exp().unbind(-1)
    z = torch.linspace(-6.0, 6.0, 21)[:, None].expand(21, 3)
    x = z.sigmoid()
    expected = (Beta(a, b).log_prob(x) + (x * (1 - x)).log()).sum(-1)
    torch.testing.assert_close(family.log_prob(p, z), expected, rtol=1e-10, atol=1e-10)


def test_one_dimensional_densities_integrate_to_one() -> None:
    for family, p in (
        (MeanFieldGamma(), {"log_mean": [0.3], "log_concentration": [-0.5]}),
        (MeanFieldGamma(), {"log_mean": [-2.0], "log_concentration": [5.0]}),
        (MeanFieldDirichlet(2), {"log_concentration": [[-0.2, 1.5]]}),
    ):
        params = {k: torch.tensor(v) for k, v in p.items()}
        z = torch.linspace(-80.0, 80.0, 400_001)[:, None]
        # the trapezoidal rule on a smooth density over the line
        mass = torch.trapezoid(family.log_prob(params, z).exp(), z[:, 0])
        torch.testing.assert_close(mass, torch.ones(()), rtol=1e-9, atol=0)


def test_simplex_density_integrates_to_one() -> None:
    params = {"log_concentration": torch.tensor([[1.0, 0.2, -0.1]])}
    x = torch.linspace(-45.0, 45.0, 901)
    grid = torch.cartesian_prod(x, x)
    mass = MeanFieldDirichlet(3).log_prob(params, grid).exp().sum() * (x[1] - x[0]) ** 2
    torch.testing.assert_close(mass, torch.ones(()), rtol=1e-9, atol=0)


@cases
def test_kl_against_torch(name: str) -> None:
    family, p = member(name, 1)
    _, q = member(name, 2)

    def parts(params: Params) -> list[torch.distributions.Distribution]:
        found: list[torch.distributions.Distribution] = []
        for key, value in params.items():
            prefix = key.removesuffix("log_concentration")
            if prefix + "log_mean" in params and prefix != key:
                a = value.exp()
                found.append(Gamma(a, a * (-params[prefix + "log_mean"]).exp()))
            elif prefix != key:
                found.append(Dirichlet(value.exp()))
            elif key.endswith("loc"):
                scale = params[key.removesuffix("loc") + "log_scale"].exp()
                found.append(torch.distributions.Normal(value, scale))
        return found

    pairs = zip(parts(p), parts(q), strict=True)
    expected = sum(torch.distributions.kl_divergence(a, b).sum() for a, b in pairs)
    torch.testing.assert_close(family.kl(p, q), expected)
    torch.testing.assert_close(family.kl(p, p), torch.zeros(()), atol=1e-10, rtol=0)


def test_large_concentrations_in_float32() -> None:
    """A million counts: the formulas of the textbook would be off by nats."""
    for family, p in (
        (MeanFieldGamma(), {"log_mean": [0.3], "log_concentration": [14.0]}),
        (MeanFieldDirichlet(3), {"log_concentration": [[14.0, 13.0, 12.5]]}),
    ):
        exact = {k: torch.tensor(v) for k, v in p.items()}
        coarse = {k: v.float() for k, v in exact.items()}
        z = family.draw(coarse, torch.Size((100,)))
        # the logarithms, rounded to eps, lie about 1/1000 sd from where they should: score times eps
        error = family.log_prob(coarse, z) - family.log_prob(exact, z.double())
        assert error.abs().max() < 20 * 1000 * torch.finfo(torch.float32).eps
        push = family.push(coarse, {k: torch.ones_like(v) for k, v in coarse.items()})
        wanted = family.push(exact, {k: torch.ones_like(v) for k, v in exact.items()})
        for key, value in push.items():
            torch.testing.assert_close(value.double(), wanted[key], rtol=1e-3, atol=0)


# geometry


@cases
def test_score_against_autograd(name: str) -> None:
    family, params = member(name)
    z = family.draw(params, torch.Size((6,)))
    expected = vmap(jacrev(family.log_prob), in_dims=(None, 0))(params, z)
    for key, value in family.score(params, z).items():
        torch.testing.assert_close(value, expected[key], rtol=1e-10, atol=1e-10)


@cases
def test_fisher_product_is_the_hessian_of_kl(name: str) -> None:
    family, params = member(name)
    F = jacrev(jacrev(lambda x: family.kl(params, unpack(x, params))))(pack(params))
    u = random_like(params, 3)
    expected = family.pull(params, unpack(F @ pack(family.push(params, u)), params))
    for key, value in family.fisher_product(params, u).items():
        torch.testing.assert_close(value, expected[key], rtol=1e-9, atol=1e-9)


def test_fisher_matrix_is_the_hessian_of_the_log_normaliser() -> None:
    """In natural parameters: <u, F u> of a velocity in eta is d2A(eta)[u, u]."""
    gamma, p = member("gamma")
    u = random_like(p, 4)
    velocity = gamma.push(p, u)
    a = p["log_concentration"].exp()
    b = a / p["log_mean"].exp()
    da = a * velocity["log_concentration"]
    db = b * (velocity["log_concentration"] - velocity["log_mean"])

    def gamma_normaliser(t: Tensor) -> Tensor:  # of (a, -b)
        return (torch.lgamma(a + t * da) - (a + t * da) * (b + t * db).log()).sum()

    curvature = jacrev(jacrev(gamma_normaliser))(torch.zeros(()))
    torch.testing.assert_close(gamma.inner(p, u, u), curvature, rtol=1e-9, atol=1e-9)

    dirichlet, p = member("dirichlet")
    u = random_like(p, 5)
    alpha = p["log_concentration"].exp()
    step = alpha * dirichlet.push(p, u)["log_concentration"]

    def dirichlet_normaliser(t: Tensor) -> Tensor:
        x = alpha + t * step
        return (torch.lgamma(x).sum(-1) - torch.lgamma(x.sum(-1))).sum()

    curvature = jacrev(jacrev(dirichlet_normaliser))(torch.zeros(()))
    torch.testing.assert_close(dirichlet.inner(p, u, u), curvature, rtol=1e-9, atol=1e-9)


@cases
def test_fisher_matrix_is_the_average_outer_product_of_scores(name: str) -> None:
    family, params = member(name, spread=0.3)
    n = 40_000
    torch.manual_seed(0)
    z = family.draw(params, torch.Size((n,)))
    score = vmap(family.pull, in_dims=(None, 0))(params, family.score(params, z))
    flat = torch.cat([v.reshape(n, -1) for v in score.values()], -1)
    products = flat[:, :, None] * flat[:, None, :]
    standard_error = products.std(0) / math.sqrt(n)
    basis = torch.eye(flat.shape[1])
    F = torch.stack([pack(family.fisher_product(params, unpack(u, params))) for u in basis])
    # at most 170 entries: a z-score above 5 comes once in 10,000 runs
    assert ((products.mean(0) - F).abs() < 5 * standard_error).all()


@cases
def test_pull_is_the_transpose_of_push(name: str) -> None:
    family, params = member(name)
    g, u = random_like(params, 1), random_like(params, 2)
    left = (pack(family.pull(params, g)) * pack(u)).sum()
    torch.testing.assert_close(left, (pack(g) * pack(family.push(params, u))).sum())


@cases
def test_natural_gradient_solves_with_the_fisher_matrix(name: str) -> None:
    family, params = member(name)
    gradient = random_like(params, 6)
    tangent = family.natural_gradient(params, gradient)
    back = family.fisher_product(params, tangent)
    for key in params:
        torch.testing.assert_close(back[key], gradient[key])
    torch.testing.assert_close(
        family.fisher_norm(params, tangent) ** 2, family.inner(params, tangent, tangent)
    )


@cases
def test_retraction_has_the_pushed_velocity(name: str) -> None:
    family, params = member(name)
    u, h = random_like(params, 7), 1e-5
    forth, back = (family.retract(params, u, sign * h) for sign in (1, -1))
    for key, velocity in family.push(params, u).items():
        slope = (forth[key] - back[key]) / (2 * h)
        torch.testing.assert_close(slope, velocity, rtol=1e-7, atol=1e-7)


def test_retraction_is_linear_in_the_natural_parameters() -> None:
    family, p = member("gamma")
    u = {k: 0.1 * v for k, v in random_like(p, 8).items()}

    def natural(params: Params) -> Tensor:
        a = params["log_concentration"].exp()
        return torch.stack([a, a * (-params["log_mean"]).exp()])

    start, half, whole = natural(p), *(natural(family.retract(p, u, s)) for s in (0.5, 1.0))
    torch.testing.assert_close(half - start, whole - half, rtol=1e-10, atol=1e-12)


@cases
@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 2**20), log_step=st.floats(-6.0, 8.0))
def test_no_step_leaves_the_domain(name: str, seed: int, log_step: float) -> None:
    family, params = member(name, seed % 17, spread=2.0)
    new = family.retract(params, random_like(params, seed), 10.0**log_step)
    assert all(v.isfinite().all() for v in new.values())
    assert (family.stddev(new) > 0).all()


@pytest.mark.parametrize("name", ["gamma", "beta", "dirichlet"])
def test_a_long_step_keeps_a_quarter_and_leaves_other_elements_alone(name: str) -> None:
    family, params = member(name, spread=0.3)
    u = random_like(params, 9)
    u = {k: v * torch.eye(len(v))[0].reshape(-1, *[1] * (v.dim() - 1)) for k, v in u.items()}
    small = {k: v + 0.01 for k, v in u.items()}
    large = {k: v + 99.0 * u[k] for k, v in small.items()}  # only the first element goes far
    near, far = (family.retract(params, t, 1.0) for t in (small, large))
    for key in params:
        torch.testing.assert_close(far[key][1:], near[key][1:])

    def positive(p: Params) -> Tensor:
        a = p["log_concentration"].exp()
        return torch.stack([a, a * (-p["log_mean"]).exp()]) if "log_mean" in p else a

    ratio = positive(far) / positive(params)
    assert ratio.min() >= 0.25 * (1 - 1e-12)
    other = positive(family.retract(params, large, -1.0)) / positive(params)
    assert min(ratio.min().item(), other.min().item()) == pytest.approx(0.25)


# draws


@cases
def test_draws_have_the_moments_of_q(name: str) -> None:
    family, params = member(name)
    n = 200_000
    torch.manual_seed(1)
    z = family.draw(params, torch.Size((n,)))
    assert z.shape == (n, family.dim(params))
    sd = family.stddev(params)
    assert ((z.mean(0) - family.mean(params)).abs() < 4.5 * sd / math.sqrt(n)).all()
    square = (z - family.mean(params)).square()
    assert ((square.mean(0) - sd**2).abs() < 4.5 * square.std(0) / math.sqrt(n)).all()
    centred = (z - z.mean(0)) / sd
    correlation = centred.T @ centred / n
    # independent coordinates: products have a sd of about 1, more for heavy tails
    assert (correlation - torch.diag(correlation.diagonal())).abs().max() < 6 / math.sqrt(n)


@cases
def test_quantiles_are_those_of_the_draws(name: str) -> None:
    family, params = member(name)
    n, levels = 100_000, torch.tensor([0.001, 0.1, 0.5, 0.9, 0.999])
    torch.manual_seed(2)
    z = family.draw(params, torch.Size((n,)))
    quantiles = family.icdf(params, levels)
    assert quantiles.shape == (5, family.dim(params))
    for level, quantile in zip(levels, quantiles, strict=True):
        below = (z < quantile).double().mean(0)
        assert ((below - level).abs() < 4.5 * (level * (1 - level) / n).sqrt()).all()


def expected_log_x(name: str, params: Params) -> Tensor:
    """A closed form whose gradient involves every parameter: sum w E[log x] or w E[x]."""
    a = params["log_concentration"].exp()
    w = torch.linspace(-1.0, 2.0, a.numel()).reshape(a.shape)
    if name == "gamma":
        return (w * params["log_mean"].exp()).sum()
    return (w * a / a.sum(-1, keepdim=True)).sum()


def sampled_log_x(name: str, params: Params, z: Tensor) -> Tensor:
    shape = params["log_concentration"].shape
    w = torch.linspace(-1.0, 2.0, shape.numel()).reshape(shape)
    if name == "gamma":
        return (w * z.exp()).sum(-1)
    x = biject_to(constraints.simplex)(z.unflatten(-1, (shape[0], -1)))
    return (w * x).sum((-1, -2))


@pytest.mark.parametrize("low", [False, True], ids=["above one", "below one"])
@pytest.mark.parametrize("name", ["gamma", "beta", "dirichlet"])
def test_gradient_through_draws_is_that_of_the_expectation(name: str, low: bool) -> None:
    """E[x] is known in closed form; concentrations below 1 take the other path of the draws."""
    family, params = member(name)
    shift = -2.0 if low else 2.0
    params["log_concentration"] = 0.2 * params["log_concentration"] + shift
    want = jacrev(lambda p: expected_log_x(name, p))(params)
    n = 100_000
    torch.manual_seed(3)
    repeated = {k: v.expand(n, *v.shape).clone().requires_grad_() for k, v in params.items()}
    if name == "gamma":
        a = repeated["log_concentration"].exp()
        z = repeated["log_mean"] + log_gamma_draw(a, a.shape)
    else:
        z = family.draw(repeated, torch.Size())
    sampled_log_x(name, params, z).sum().backward()
    for key, leaf in repeated.items():
        assert leaf.grad is not None
        standard_error = leaf.grad.std(0) / math.sqrt(n)
        assert ((leaf.grad.mean(0) - want[key]).abs() <= 4.5 * standard_error + 1e-12).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["gamma", "beta", "dirichlet"])
@pytest.mark.parametrize("concentration", [1e-3, 1e6])
def test_extreme_concentrations_stay_finite(
    name: str, dtype: torch.dtype, concentration: float
) -> None:
    family, _ = FAMILIES[name]
    size = {"gamma": (3,), "beta": (3, 2), "dirichlet": (2, 4)}[name]
    params = {key: torch.zeros(size, dtype=dtype) for key in family.names}
    params["log_concentration"] += math.log(concentration)
    leaves = {k: v.clone().requires_grad_() for k, v in params.items()}
    torch.manual_seed(4)
    z = family.draw(leaves, torch.Size((2000,)))
    log_prob = family.log_prob(params, z)
    (log_prob.sum() + z.sum()).backward()
    assert z.isfinite().all() and log_prob.isfinite().all()
    for leaf in leaves.values():
        assert leaf.grad is not None and leaf.grad.isfinite().all()
    gradient = family.pull(params, {k: torch.ones_like(v) for k, v in params.items()})
    new = family.retract(params, family.natural_gradient(params, gradient), 0.1)
    for value in (*family.score(params, z.detach()).values(), *gradient.values(), *new.values()):
        assert value.isfinite().all()


@pytest.mark.parametrize("name", ["beta", "dirichlet"])
def test_mean_of_tiny_concentrations_is_that_of_the_draws(name: str) -> None:
    """1e-3: half of a vector's draws have entries below 1e-300, and no logarithm is lost."""
    family, _ = FAMILIES[name]
    size = {"beta": (3, 2), "dirichlet": (2, 4)}[name]
    params = {"log_concentration": torch.full(size, math.log(1e-3))}
    n = 50_000
    torch.manual_seed(5)
    z = family.draw(params, torch.Size((n,)))
    error = (z.mean(0) - family.mean(params)).abs()
    assert (error < 4.5 * family.stddev(params) / math.sqrt(n)).all()


# starts


def test_init_of_gamma_has_the_asked_moments() -> None:
    loc = torch.tensor([-2.0, 0.0, 3.0])
    for scale in (0.01, 0.1, 1.0, 5.0):
        params = MeanFieldGamma().init(loc, scale)
        torch.testing.assert_close(MeanFieldGamma().mean(params), loc)
        torch.testing.assert_close(MeanFieldGamma().stddev(params), torch.full((3,), scale))


@pytest.mark.parametrize("size", [2, 5])
@pytest.mark.parametrize("scale", [0.01, 0.1, 1.0])
def test_init_of_dirichlet_has_the_asked_mean_and_average_variance(size: int, scale: float) -> None:
    family = MeanFieldDirichlet(size)
    loc = torch.linspace(-1.0, 1.0, 2 * (size - 1))
    params = family.init(loc, scale)
    alpha = params["log_concentration"].exp()
    x = biject_to(constraints.simplex)(loc.unflatten(-1, (2, -1)))
    torch.testing.assert_close(alpha / alpha.sum(-1, keepdim=True), x)
    variance = family.stddev(params).square().reshape(2, -1).mean(-1)
    torch.testing.assert_close(variance, torch.full((2,), scale**2))


def test_noise_that_is_not_normal_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="use draw"):
        MeanFieldGamma().rsample({}, torch.zeros(3))


# products


def test_product_splits_and_joins() -> None:
    family, d = FAMILIES["product"]
    assert isinstance(family, Product)
    z = torch.arange(2.0 * d).reshape(2, d)
    parts = family.split(z)
    assert parts["gamma"].tolist()[0] == [0, 1, 5]
    assert parts["dirichlet3"].tolist()[0] == [2, 3, 6, 7, 8, 9]
    assert torch.equal(family.join(parts), z)


def test_product_is_the_sum_of_its_parts() -> None:
    family, params = member("product")
    assert isinstance(family, Product)
    z = family.draw(params, torch.Size((3,)))
    parts = family.split(z)
    total = torch.zeros(3)
    for name, part in family.parts.items():
        total = total + part.log_prob(family.own(name, params), parts[name])
    torch.testing.assert_close(family.log_prob(params, z), total)


def test_segments_of_a_product_have_the_parameters_of_their_entries() -> None:
    family, params = member("product")
    assert isinstance(family, Product)
    mean, start = family.mean(params), 0
    for index, (part, length) in enumerate(family.segments):
        own = family.segment(params, index)
        expected = mean[start : start + length]
        torch.testing.assert_close(family.parts[part].mean(own), expected)
        start += length
