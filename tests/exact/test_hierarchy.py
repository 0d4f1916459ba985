"""Units given globals against closed forms, dense algebra, autograd and quadrature."""

import copy
import math
from dataclasses import replace
from functools import cache, partial
from typing import Any, cast

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import SVI
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import pyro_ngvi as ngvi
from pyro_ngvi.diagnostics import loo_units
from pyro_ngvi.diagnostics.draws import guide_draws
from pyro_ngvi.distributions import local_level
from pyro_ngvi.guides.deadline import ending_by
from pyro_ngvi.hierarchy.conditional import (
    Conditionals,
    UnitPriors,
    antithetic,
    mixture_quantiles,
)
from pyro_ngvi.hierarchy.marginal import integrated
from pyro_ngvi.hierarchy.runs import Place
from pyro_ngvi.hierarchy.slopes import Moving, Slopes, Swapped, moving, slopes
from pyro_ngvi.hierarchy.unit_sites import Sites
from pyro_ngvi.linalg.cholesky import cholesky, solve, solve_transposed

pytestmark = pytest.mark.usefixtures("smooth_once")


def natural(linear: Tensor, precision: Tensor) -> UnitPriors:
    """The prior of these natural parameters."""
    root = torch.linalg.cholesky(torch.linalg.inv(precision))
    mean = torch.linalg.solve(precision, linear.unsqueeze(-1)).squeeze(-1)
    return UnitPriors(mean, root, root)


def precision_of(prior: UnitPriors) -> Tensor:
    return torch.linalg.inv(prior.root @ prior.root.mT)


def linear_of(prior: UnitPriors) -> Tensor:
    return (precision_of(prior) @ prior.offset.unsqueeze(-1)).squeeze(-1)


def positive(*shape: int, seed: int = 0) -> Tensor:
    A = torch.randn(*shape, shape[-1], generator=torch.Generator().manual_seed(seed)).double()
    return A @ A.mT + 0.5 * torch.eye(shape[-1])


def normal(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).double()


@pytest.mark.parametrize("k", [1, 2, 3, 4, 5, 7])
def test_small_triangles_are_those_of_lapack(k: int) -> None:
    A, b = positive(3, 4, k), normal(3, 4, k)
    R = torch.linalg.cholesky(A)
    assert torch.allclose(cholesky(A), R, rtol=1e-12, atol=1e-12)
    assert torch.allclose(R @ solve(R, b)[..., None], b[..., None], rtol=1e-10, atol=1e-10)
    assert torch.allclose(
        R.mT @ solve_transposed(R, b)[..., None], b[..., None], rtol=1e-10, atol=1e-10
    )


@pytest.mark.parametrize("k", [1, 2, 5])
def test_a_matrix_that_is_not_positive_definite_has_no_root(k: int) -> None:
    A = positive(2, k)
    A[1] = -A[1]
    R = cholesky(A)
    assert R[0].isfinite().all() and not R[1].diagonal(dim1=-2, dim2=-1).isfinite().all()


@pytest.mark.parametrize("placed", [False, True], ids=["as they are", "placed"])
@pytest.mark.parametrize("k", [1, 2, 5])
def test_a_conditional_is_prior_times_site(k: int, placed: bool) -> None:
    S, B = 3, 4
    prior = natural(normal(S, B, k), positive(S, B, k))
    log_turn = torch.zeros(S, B).double()
    if placed:  # u = P z + p
        P = positive(S, B, k, seed=5) + normal(S, B, k, k)
        prior, log_turn = (
            Place(P, normal(S, B, k, seed=6), torch.linalg.inv(P)).moved(prior),
            P.det().abs().log(),
        )
    nu, Lambda = normal(B, k, seed=2), positive(B, k, seed=3)
    q = Conditionals.of(prior, nu, Lambda)
    precision = precision_of(prior) + Lambda
    mean = torch.linalg.solve(precision, linear_of(prior) + nu)
    dense = dist.MultivariateNormal(mean, precision_matrix=precision)
    before = dist.MultivariateNormal(prior.offset, prior.root @ prior.root.mT)
    e = normal(S, B, k, seed=4)
    u, w = q.draw(e), q.drawn(e)
    assert torch.allclose(prior.at(w), u)
    assert torch.allclose(q.mean, mean)
    # densities are those of z
    assert torch.allclose(q.log_prob(w), dense.log_prob(u) + log_turn)
    assert torch.allclose(q.log_q(e), q.log_prob(w))
    assert torch.allclose(prior.log_prob(w), before.log_prob(u) + log_turn)
    assert torch.allclose(q.sd(), dense.stddev) and torch.allclose(prior.sd(), before.stddev)
    wanted = (precision_of(prior) @ u[..., None])[..., 0]
    assert torch.allclose(prior.precise(u), wanted)
    # draws have that covariance: their map from noise is a root of it
    root = torch.func.jacrev(lambda e: q.draw(e.expand(S, B, k))[1, 2])(torch.zeros(k).double())
    assert torch.allclose(root @ root.mT, dense.covariance_matrix[1, 2])


def test_a_prior_with_means_that_are_sites_is_the_dense_one() -> None:
    k, noise, offset = 3, positive(2, 3), normal(2, 3)
    B = torch.tril(normal(2, k, k, seed=3), -1)
    prior = UnitPriors.of(offset, B, torch.linalg.cholesky(noise))
    inverse = torch.linalg.inv(torch.eye(k) - B)
    covariance = inverse @ noise @ inverse.mT
    assert torch.allclose(prior.root @ prior.root.mT, covariance)
    assert torch.allclose(prior.offset, (inverse @ offset[..., None])[..., 0])
    assert torch.allclose(prior.log_det, 0.5 * covariance.logdet())


# --- the step of a site: natural gradient of the ELBO of its unit


NO_PHI = torch.zeros(1, 0).double()


def site(nu: Tensor, Lambda: Tensor) -> Sites:
    """Fresh, and free of the globals."""
    none = nu.new_zeros(*nu.shape, 0)
    return Sites(nu, Lambda, none, none[:, 0], nu.new_zeros(len(nu)))


def poisson_case(k: int) -> tuple[UnitPriors, Sites, Tensor]:
    """One unit at one draw of the globals: log p(y | u) = sum_j y_j u_j - exp(u_j)."""
    prior = natural(normal(1, 1, k), positive(1, 1, k) + torch.eye(k))
    sites = site(0.3 * normal(1, k, seed=5), 0.5 * positive(1, k, seed=6))
    return prior, sites, torch.tensor([3.0, 1.0, 0.0][:k]).double()


def moments(prior: UnitPriors, nu: Tensor, Lambda: Tensor) -> tuple[Tensor, Tensor]:
    Q = (precision_of(prior) + Lambda)[0, 0]
    return torch.linalg.solve(Q, (linear_of(prior) + nu)[0, 0]), torch.linalg.inv(Q)


def elbo(prior: UnitPriors, nu: Tensor, Lambda: Tensor, y: Tensor) -> Tensor:
    """E log p(y | u) - KL(q || p), in closed form."""
    m, V = moments(prior, nu, Lambda)
    P, centre = precision_of(prior)[0, 0], prior.offset[0, 0]
    q = torch.distributions.MultivariateNormal(m, V)
    p = torch.distributions.MultivariateNormal(centre, precision_matrix=P)
    expected = (y * m - (m + 0.5 * V.diagonal()).exp()).sum()
    return expected - torch.distributions.kl_divergence(q, p)


def expected(prior: UnitPriors, sites: Sites, y: Tensor) -> tuple[Any, ...]:
    """No globals that are followed, the mean of q, and of draws, E g and E H of the Poisson unit."""
    m, V = moments(prior, sites.linear, sites.precision)
    rate = (m + 0.5 * V.diagonal()).exp()
    there = Slopes((y - rate)[None, None], rate.diag_embed()[None, None])
    return NO_PHI, m[None, None], m[None, None], there


@pytest.mark.parametrize("k", [1, 2, 3])
def test_a_step_goes_along_the_natural_gradient(k: int) -> None:
    prior, sites, y = poisson_case(k)
    moved = sites.moved(prior, *expected(prior, sites, y))
    rows, columns = torch.triu_indices(k, k)

    def unpacked(theta: Tensor) -> tuple[Tensor, Tensor]:
        half = torch.zeros(k, k).double()
        half = half.index_put((rows, columns), theta[k:])
        return theta[:k][None], ((half + half.mT) / 2)[None]

    def packed(nu: Tensor, Lambda: Tensor) -> Tensor:
        L = Lambda[0] * (2.0 - torch.eye(k))
        return torch.cat([nu[0], L[rows, columns]])

    def log_partition(theta: Tensor) -> Tensor:
        nu, Lambda = unpacked(theta)
        Q, h = (precision_of(prior) + Lambda)[0, 0], (linear_of(prior) + nu)[0, 0]
        return 0.5 * h @ torch.linalg.solve(Q, h) - 0.5 * torch.logdet(Q)

    theta = packed(sites.linear, sites.precision)
    assert torch.allclose(unpacked(theta)[1], sites.precision)
    fisher = torch.func.jacrev(torch.func.grad(log_partition))(theta)
    gradient = torch.func.grad(lambda t: elbo(prior, *unpacked(t), y))(theta)
    natural = torch.linalg.solve(fisher, gradient)
    change = packed(moved.linear, moved.precision) - theta
    assert torch.allclose(change, 0.8 * natural, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_where_steps_end_the_elbo_of_the_unit_is_stationary(k: int) -> None:
    prior, sites, y = poisson_case(k)
    for _ in range(60):
        sites = sites.moved(prior, *expected(prior, sites, y))
        sites = site(sites.linear, sites.precision)
    nu, Lambda = (x.clone().requires_grad_() for x in (sites.linear, sites.precision))
    grads = torch.autograd.grad(elbo(prior, nu, Lambda, y), [nu, Lambda])
    assert all(g.abs().max() < 1e-9 for g in grads)


def test_steps_are_bounded_and_units_that_are_not_finite_keep_their_site() -> None:
    prior = natural(torch.zeros(1, 3, 1).double(), torch.full((1, 3, 1, 1), 1e-2).double())
    zero = site(torch.zeros(3, 1).double(), torch.zeros(3, 1, 1).double())
    g = torch.tensor([1e6, 1.0, math.nan]).double().reshape(1, 3, 1)
    H = torch.tensor([1e-3, 1e8, 1.0]).double().reshape(1, 3, 1, 1)
    zeros = torch.zeros(1, 3, 1).double()
    moved = zero.moved(prior, NO_PHI, zeros, zeros, Slopes(g, H))
    Q = 1e-2 + moved.precision[:, 0, 0]
    mean = moved.linear[:, 0] / Q
    assert torch.allclose(mean[0], 3.0 / Q[0].sqrt())  # three of the sds to which it goes
    assert torch.allclose(Q[1], torch.tensor(0.16).double())  # 16 times the prior's
    assert moved.linear[2] == 0.0 and moved.precision[2] == 0.0
    assert moved.visits.tolist() == [1.0, 1.0, 0.0]


@pytest.mark.parametrize("width", [1, 3, 40])
@pytest.mark.parametrize("entries", ["one", "all"])
def test_no_entry_of_a_unit_moves_by_more_than_three_of_its_sds(width: int, entries: str) -> None:
    """Alone it would have the room of all: two-parameter item responses ran away so."""
    prior = natural(torch.zeros(1, 1, width).double(), torch.eye(width).double()[None, None])
    zero = site(torch.zeros(1, width).double(), torch.zeros(1, width, width).double())
    zeros = torch.zeros(1, 1, width).double()
    g = zeros + 1e6
    if entries == "one":
        g[..., 1:] = 0.0
    moved = zero.moved(prior, NO_PHI, zeros, zeros, Slopes(g, torch.zeros_like(prior.root)))
    q = Conditionals.of(prior, moved.linear, moved.precision)
    wanted = torch.where(g > 0.0, 3.0, 0.0).double()
    assert torch.allclose(q.mean, wanted, atol=1e-9)


def test_a_precision_stays_positive_semidefinite() -> None:
    prior, sites, _ = poisson_case(2)
    H = torch.tensor([[-5.0, 2.0], [2.0, 1.0]]).double()[None, None]
    zero = torch.zeros(1, 1, 2).double()
    for _ in range(20):
        sites = sites.moved(prior, NO_PHI, zero, zero, Slopes(zero + 1.0, H))
        assert torch.linalg.eigvalsh(sites.precision).min() > -1e-12


@pytest.mark.parametrize("curved", [True, False], ids=["with H", "without"])
def test_the_mean_is_right_where_the_likelihood_is_not_concave(curved: bool) -> None:
    """log p(y | u) = a'u + u'Cu / 2: Lambda stays 0, and the mean solves a + C m + h - P m = 0."""
    prior, sites, _ = poisson_case(2)
    sites = site(sites.linear, 0.0 * sites.precision)
    a, C = normal(2, seed=8), 0.4 * torch.eye(2).double()
    P, h = precision_of(prior)[0, 0], linear_of(prior)[0, 0]
    assert torch.linalg.eigvalsh(P - C).min() > 0.1
    e = normal(2000, 1, 2, seed=9)
    e = torch.cat([e, -e])
    for _ in range(40):
        q = Conditionals.of(prior, sites.linear, sites.precision)
        u, mean = q.draw(e), q.mean.expand(len(e), 1, 2)
        H = (-C).expand(len(e), 1, 2, 2) if curved else None
        there = Slopes(a + u @ C, H)
        sites = sites.moved(prior, NO_PHI, mean, u, there)
    found = Conditionals.of(prior, sites.linear, sites.precision).mean[0, 0]
    assert torch.allclose(found, torch.linalg.solve(P - C, a + h), atol=1e-6)


def test_quantiles_of_a_mixture_invert_its_distribution_function() -> None:
    mean, sd = 3.0 * normal(5, 2, 3), normal(5, 2, 3, seed=7).exp()
    levels = torch.tensor([0.01, 0.3, 0.5, 0.95]).double()
    q = mixture_quantiles(mean, sd, levels)
    cdf = torch.special.ndtr((q[:, None] - mean) / sd).mean(1)
    assert torch.allclose(cdf, levels[:, None, None].expand_as(cdf), rtol=0.0, atol=1e-12)


def test_noise_comes_in_pairs() -> None:
    even, odd = antithetic(torch.zeros(4, 2, 1)), antithetic(torch.zeros(5, 2, 1))
    assert torch.equal(even[:2], -even[2:]) and torch.equal(odd[:2], -odd[3:])
    assert len(odd.unique()) == 10


# --- whole models

DESIGN, RESPONSE = normal(6, 3, 2, seed=8), normal(6, 3, seed=9)


def schools(y: Tensor, index: Any = None, form: str = "centred", size: int | None = None) -> None:
    m: Any = pyro.sample("m", dist.Normal(y.new_zeros(()), 3.0))
    s: Any = pyro.sample("s", dist.LogNormal(y.new_zeros(()), 1.0))
    with pyro.plate("schools", len(y) if size is None else size, subsample=index) as i:
        if form == "centred":
            u: Any = pyro.sample("u", dist.Normal(m, s))
        else:
            u = pyro.deterministic("u", m + s * pyro.sample("z", dist.Normal(0.0 * m, 1.0)))
        pyro.sample("y", dist.Normal(u, 0.7), obs=y if index is None else y[i])


Y = torch.tensor([2.0, -0.5, 1.2, 0.3, 3.1]).double()


def fitted(steps: int, **how: Any) -> tuple[Any, Any]:
    pyro.set_rng_seed(0)
    guide = ngvi.AutoHierarchical(schools)
    svi = SVI(schools, guide, ngvi.NGVB(guide), ngvi.BatchedELBO(8))
    for _ in range(steps):
        svi.step(Y, **how)
    return guide, svi


@cache
def trained(form: str) -> Any:
    """After 25 steps: of what the sites of Gaussian units have to go, 0.2^25 is left."""
    return fitted(25, form=form)[0]


def log_evidence(m: Tensor, s: Tensor, y: Tensor = Y) -> Tensor:
    """log p(y, m, s), the effects integrated out."""
    sd = (s.square() + 0.49).sqrt()
    of_globals = dist.Normal(0.0, 3.0).log_prob(m) + dist.LogNormal(0.0, 1.0).log_prob(s)
    return dist.Normal(m, sd).log_prob(y).sum() + of_globals


@pytest.mark.parametrize("form", ["centred", "not"])
def test_gaussian_units_are_exact_given_the_globals(form: str) -> None:
    guide = trained(form)
    for _ in range(3):
        with torch.no_grad():
            trace = poutine.trace(guide).get_trace(Y, form=form)
            model = poutine.trace(poutine.replay(schools, trace)).get_trace(Y, form=form)
            m, s = (trace.nodes[n]["value"] for n in ("m", "s"))
            of_globals = sum(
                site["fn"].log_prob(site["value"]).sum()
                for n, site in trace.nodes.items()
                if n in ("m", "s") or n.endswith("_latent")
            )
            # log q of the globals drops out: what is left of the ELBO is the collapsed one, at any draw
            left = model.log_prob_sum() - (trace.log_prob_sum() - of_globals)
            assert torch.allclose(left, log_evidence(m, s), rtol=1e-10, atol=1e-10)


def test_an_effect_that_is_named_is_taken_as_the_centred_model_takes_it() -> None:
    centred, other = trained("centred"), trained("not")
    assert other.units.effects and not centred.units.effects
    for name in ("loc", "scale_tril"):
        assert torch.allclose(
            getattr(centred.globals, name), getattr(other.globals, name), rtol=1e-8
        )
    assert torch.allclose(centred.sites.precision, other.sites.precision)
    assert torch.allclose(centred.sites.linear, other.sites.linear)


def two_effects(form: str) -> None:
    """Correlated effects of two sites; the decoys are maps of them that the data do not see."""
    zero = torch.zeros(()).double()
    m: Any = pyro.sample("m", dist.Normal(zero, 3.0))
    s: Any = pyro.sample("s", dist.LogNormal(zero, 1.0))
    with pyro.plate("units", 6):
        if form == "centred":
            a: Any = pyro.sample("a", dist.Normal(m, s))
            b: Any = pyro.sample("b", dist.Normal(0.5 * (a - m), s))
        else:
            z: Any = pyro.sample("z", dist.Normal(zero, 1.0))
            w: Any = pyro.sample("w", dist.Normal(zero, 1.0))
            pyro.deterministic("scaled", s * z)
            a = pyro.deterministic("a", m + s * z)
            pyro.deterministic("twice", 2.0 * z)
            b = pyro.deterministic("b", 0.5 * s * z + s * w)
        at = a[:, None] + DESIGN[..., 0] * b[:, None]
        pyro.sample("y", dist.Normal(at, 0.5).to_event(1), obs=RESPONSE)


def test_effects_of_two_sites_are_found_among_decoys() -> None:
    fits = {}
    for form in ("centred", "not"):
        pyro.set_rng_seed(0)
        fits[form] = guide = ngvi.AutoHierarchical(two_effects)
        svi = SVI(two_effects, guide, ngvi.NGVB(guide), ngvi.BatchedELBO(8))
        for _ in range(8):
            svi.step(form)
    centred, other = fits["centred"], fits["not"]
    assert {n: e.name for n, e in other.units.effects.items()} == {"z": "a", "w": "b"}
    assert not centred.units.followed and not other.units.followed
    assert torch.allclose(centred.globals.loc, other.globals.loc, rtol=1e-8)
    assert torch.allclose(centred.sites.precision, other.sites.precision)


def test_quantiles_of_units_are_those_of_draws() -> None:
    guide = trained("not")
    draws = guide_draws(partial(guide, Y, form="not"), 2000)[0]["z"]
    levels = torch.tensor([0.1, 0.5, 0.9]).double()
    wanted = draws.quantile(levels, 0)
    # standard errors: 0.04 sd of a quantile of 2,000 draws, 0.03 sd of 64 draws of the globals
    error = 0.05 * draws.std(0)
    found = guide.quantiles(levels, Y, form="not")["z"]
    assert ((found - wanted).abs() < 3.2 * error).all()


def test_the_globals_are_those_of_the_exact_posterior() -> None:
    """Beside quadrature over (m, log s); the guide is Gaussian, so skewness of log s is left out."""
    y = 1.0 + (0.8**2 + 0.7**2) ** 0.5 * normal(60, seed=3)
    pyro.set_rng_seed(0)
    guide = ngvi.AutoHierarchical(schools)
    svi = SVI(schools, guide, ngvi.NGVB(guide), ngvi.BatchedELBO(8))
    for _ in range(60):
        svi.step(y)
    grid = torch.cartesian_prod(
        torch.linspace(0, 2, 21).double(), torch.linspace(-2, 1, 31).double()
    )
    log_p = torch.vmap(lambda v: log_evidence(v[0], v[1].exp(), y) + v[1])(grid)
    w = torch.softmax(log_p, 0)
    mean = w @ grid
    sd = (w @ (grid - mean).square()).sqrt()
    loc = guide.globals.loc.detach()
    found = guide.globals.get_posterior().variance.sqrt().detach()
    assert ((loc - mean) / sd).abs().max() < 0.1
    assert ((found / sd) - 1.0).abs().max() < 0.1


def test_minibatches_of_units_are_unbiased(monkeypatch: pytest.MonkeyPatch) -> None:
    guide = copy.deepcopy(trained("centred"))
    monkeypatch.setattr(
        "pyro_ngvi.hierarchy.guide.antithetic", lambda like, apart: torch.zeros_like(like)
    )
    values = {"m": torch.tensor([0.3, 1.0]).double(), "s": torch.tensor([0.8, 1.5]).double()}
    y = torch.cat([Y, Y[:1]])
    guide.add(1)

    def total(index: Any) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            given = guide.draw_units(values, (y, index), {}, ngvi_minibatches())
        return given.total, given.values["u"]

    whole, u = total(None)
    parts = [total(torch.tensor(index)) for index in ([5, 0], [2, 4], [3, 1])]
    assert torch.allclose(torch.stack([t for t, _ in parts]).mean(0), whole)
    assert torch.allclose(torch.cat([x for _, x in parts], 1), u[:, [5, 0, 2, 4, 3, 1]])


def ngvi_minibatches() -> Any:
    from pyro_ngvi.runtime.run import Minibatches

    return Minibatches()


def test_in_a_minibatch_only_units_that_are_seen_move() -> None:
    guide, svi = fitted(3)
    before = {n: b.clone() for n, b in guide.sites.named_buffers()}
    svi.step(Y, torch.tensor([3, 1]))
    for name in ("linear", "precision", "visits"):
        now = getattr(guide.sites, name)
        same = (now == before[name]).reshape(5, -1).all(1)
        assert same.tolist() == [True, False, True, False, True]


@pytest.mark.parametrize("index", [None, [1, 3, 4]])
def test_a_step_of_gaussian_units_takes_all_of_what_the_data_say(index: Any) -> None:
    """Slopes of minibatches are those of the unit's own data, without the scale."""
    guide, svi = fitted(1)
    chosen = None if index is None else torch.tensor(index)
    for _ in range(20):
        svi.step(Y, chosen)
    rows = slice(None) if index is None else index
    wanted = torch.full((len(Y[rows]), 1), 1 / 0.49).double()
    assert torch.allclose(guide.sites.precision[rows][..., 0], wanted)
    assert torch.allclose(guide.sites.linear[rows], wanted * Y[rows, None])


def test_log_normal_units_count_their_jacobian() -> None:
    def model() -> None:
        a: Any = pyro.sample("a", dist.Normal(torch.zeros(()).double(), 1.0))
        with pyro.plate("units", 3):
            r: Any = pyro.sample("r", dist.LogNormal(a, 0.5))
            pyro.sample("y", dist.Poisson(r), obs=torch.tensor([2.0, 0.0, 5.0]).double())

    guide = ngvi.AutoHierarchical(model)
    with torch.no_grad():
        trace: Any = poutine.trace(guide).get_trace()
    a, r = trace.nodes["a"]["value"], trace.nodes["r"]["value"]
    at_prior = dist.LogNormal(a, 0.5).log_prob(r)  # the sites have not moved
    site = trace.nodes["r"]
    assert torch.allclose(site["fn"].log_prob(site["value"]), at_prior)
    with pytest.warns(UserWarning, match="no unit has taken a step yet"):
        draws = guide.quantiles([0.25])["r"]
    # the prior of log r is N(a, 1/4), and a of q has its start's sd
    scale = (guide.globals.get_posterior().variance + 0.25).sqrt()
    wanted = (guide.globals.loc + scale * torch.special.ndtri(torch.tensor(0.25).double())).exp()
    assert torch.allclose(draws, wanted.expand_as(draws), rtol=0.02)


# --- globals that enter the likelihood beside the units


def regression(form: str = "centred") -> None:
    """y = b'x + u + noise in groups of three, all Gaussian."""
    b: Any = pyro.sample("b", dist.Normal(torch.zeros(2).double(), 1.0).to_event(1))
    with pyro.plate("units", 6):
        if form == "centred":
            u: Any = pyro.sample("u", dist.Normal(0.5 * b[0], 1.5))
        else:
            z: Any = pyro.sample("z", dist.Normal(torch.zeros(()).double(), 1.0))
            u = pyro.deterministic("u", 0.5 * b[0] + 1.5 * z)
        at = DESIGN @ b + u[..., None]
        pyro.sample("y", dist.Normal(at, 0.5).to_event(1), obs=RESPONSE)


@pytest.mark.parametrize(("form", "particles"), [("centred", 8), ("not", 1)])
def test_units_follow_what_enters_the_likelihood_beside_them(form: str, particles: int) -> None:
    """Everything is Gaussian, so the loss is minus the log evidence, without noise."""
    of_units = torch.eye(6).double().repeat_interleave(3, 0)
    design = torch.cat([DESIGN.reshape(-1, 2), 1.5 * of_units], 1)
    design[:, 0] += 0.5
    covariance = design @ design.T + 0.25 * torch.eye(18).double()
    evidence = dist.MultivariateNormal(torch.zeros(18).double(), covariance).log_prob(
        RESPONSE.reshape(-1)
    )
    pyro.set_rng_seed(0)
    guide = ngvi.AutoHierarchical(regression)
    svi = SVI(regression, guide, ngvi.NGVB(guide), ngvi.BatchedELBO(particles))
    for _ in range(45 if particles > 1 else 90):
        loss: Any = svi.step(form)
    assert guide.units.followed == ("b",)
    assert loss == pytest.approx(-float(evidence), rel=1e-8)


def counts_beside(y: Tensor) -> None:
    b: Any = pyro.sample("b", dist.Normal(y.new_zeros(()), 1.0))
    a: Any = pyro.sample("a", dist.LogNormal(y.new_zeros(()), 0.5))
    with pyro.plate("units", len(y)):
        u: Any = pyro.sample("u", dist.Normal(y.new_zeros(2), 1.0).to_event(1))
        rate = (b + a * u[..., 0] + 0.5 * u[..., 1]).exp()
        pyro.sample("y", dist.Poisson(rate), obs=y)


def test_what_is_followed_is_minus_the_mean_mixed_derivative() -> None:
    y = torch.tensor([2.0, 0.0, 5.0]).double()
    guide = ngvi.AutoHierarchical(counts_beside)
    with torch.no_grad():
        guide(y)
    S = 2
    a, b = normal(S, seed=2).exp(), 0.3 * normal(S)
    given = guide.units.given(guide._call((y,), {}), {"b": b, "a": a})
    noise, q = normal(S, 3, 2, seed=3), guide._conditionals(given)
    x = q.draw(noise)
    found: Any = slopes(guide.units, given, x)
    moves: Any = moving(guide.units, given, x, guide._conditionals, noise)

    def log_p(u: Tensor, b: Tensor, a: Tensor, y: Tensor) -> Tensor:
        return dist.Poisson((b + a * u[0] + 0.5 * u[1]).exp()).log_prob(y)

    gradient = torch.func.grad(log_p)
    for i in range(3):
        each = [(x[s, i], b[s], a[s], y[i]) for s in range(S)]
        for s, at in enumerate(each):
            assert torch.allclose(found.g[s, i], gradient(*at))
            assert torch.allclose(found.H[s, i], -torch.func.jacrev(gradient)(*at))
        wanted = [torch.stack(torch.func.jacrev(gradient, (1, 2))(*at), -1) for at in each]
        assert torch.allclose(moves.cross[i], -torch.stack(wanted).mean(0))
        assert torch.allclose(moves.g[i], found.g[:, i].mean(0))


def grown(sites: Sites, phi: Tensor, H_of: Any, turn: int) -> Tensor:
    """What a unit's growth becomes, with prior N(0, I), where H is ``H_of`` phi."""
    H, every, D = H_of(phi), torch.arange(4), phi.shape[1]
    prior = UnitPriors.of(torch.zeros_like(H[..., 0]), None, torch.eye(2).expand_as(H).double())
    zero, cross, moved = torch.zeros_like(H[..., 0]), torch.zeros(1, 2, D).double(), phi[:4].clone()
    entry = (every + turn) % D
    moved[every, entry] = phi[1:5][every, entry]
    moves = Moving(cross, zero[0], every, Swapped(H_of(moved), every, entry, moved))
    return sites.moved(prior, phi, zero, zero, Slopes(zero, H), moves).growth


@pytest.mark.parametrize("D", [1, 3])
def test_a_precision_that_grows_as_it_should_stays_and_another_comes_to(D: int) -> None:
    """H = exp(a' phi) H_0 at S draws of phi, and any H_0 (2, 2)."""
    a, H_0, phi = normal(1, D, seed=4), positive(2, seed=6), 0.4 * normal(16, D, seed=5)
    cross, zero = torch.zeros(1, 2, D).double(), torch.zeros(1).double()

    def H(phi: Tensor) -> Tensor:
        return ((phi @ a[0]).exp()[:, None, None] * H_0)[:, None]

    right = Sites(cross[..., 0], H_0[None], cross, a, zero)
    assert torch.allclose(grown(right, phi, H, 0), a, rtol=1e-12)
    sites = replace(right, precision=0.0 * H_0[None], growth=0.0 * a)
    for step in range(200):
        phi = phi.roll(1, 0)
        sites = replace(sites, growth=grown(sites, phi, H, step))
    assert torch.allclose(sites.growth, a, atol=1e-6)


def test_sites_around_another_middle_are_the_same() -> None:
    k, D = 2, 3
    sites = Sites(
        normal(4, k), positive(4, k), normal(4, k, D, seed=2), normal(4, D, seed=3), normal(4)
    )
    phi, middle = normal(5, D, seed=6), normal(D, seed=7)
    found, wanted = sites.around(middle).at(phi - middle), sites.at(phi)
    assert all(torch.allclose(x, y) for x, y in zip(found, wanted, strict=True))
    back = sites.around(middle).around(-middle)
    assert all(
        torch.allclose(x, y) for x, y in zip(vars(back).values(), vars(sites).values(), strict=True)
    )


def noisy(y: Tensor) -> None:
    """Three data a unit, with a slope and a scale that are globals."""
    m: Any = pyro.sample("m", dist.Normal(y.new_zeros(()), 3.0))
    t: Any = pyro.sample("t", dist.LogNormal(y.new_zeros(()), 0.7))
    b: Any = pyro.sample("b", dist.Normal(y.new_zeros(()), 1.0))
    s: Any = pyro.sample("s", dist.Gamma(y.new_tensor(2.0), 2.0))
    with pyro.plate("units", len(y)):
        u: Any = pyro.sample("u", dist.Normal(m, t))
        pyro.sample("y", dist.Normal(u[..., None] + b * DOSE, s).to_event(1), obs=y)


DOSE = normal(7, 3, seed=5)


def test_gaussian_units_are_exact_given_the_scale_of_their_data() -> None:
    """The ELBO less that of the globals is log p(y, v) at any v: Lambda = 3 / s^2."""
    y = 2.0 * normal(7, 1, seed=3) + normal(7, 3, seed=4)
    pyro.set_rng_seed(0)
    guide = ngvi.AutoHierarchical(noisy)
    svi = SVI(noisy, guide, ngvi.NGVB(guide), ngvi.BatchedELBO(8))
    for _ in range(80):
        svi.step(y)
    sites, wanted = guide.sites, torch.tensor([0.0, -2.0]).double().expand(7, 2)
    assert guide.units.followed == ("b", "s")
    assert torch.allclose(sites.growth, wanted, atol=1e-7)
    assert torch.allclose(sites.precision, torch.full((7, 1, 1), 3.0).double(), atol=1e-6)
    assert torch.allclose(sites.linear[:, 0], y.sum(1), atol=1e-5)
    cross = torch.stack([DOSE.sum(1), 0.0 * DOSE[:, 0]], 1)
    assert torch.allclose(sites.cross[:, 0], cross, atol=1e-5)
    at = [[0.3, 1.0, 0.2, 0.6], [-1.0, 3.0, -0.9, 1.5], [1.0, 0.2, 2.0, 4.0]]
    for m, t, b, s in torch.tensor(at).double():
        values = {"m": m[None], "t": t[None], "b": b[None], "s": s[None]}
        q = guide._conditionals(guide.units.given(guide._call((y,), {}), values))
        noise = normal(1, 7, 1, seed=8)
        u = q.draw(noise)[0, :, 0]
        left = dist.Normal(m, t).log_prob(u) - q.log_q(noise)[0]
        left = left + dist.Normal(u[:, None] + b * DOSE, s).log_prob(y).sum(1)
        covariance = s.square() * torch.eye(3).double() + t.square()
        wanted = dist.MultivariateNormal(m + b * DOSE, covariance).log_prob(y)
        assert torch.allclose(left, wanted, atol=1e-5)


def test_slopes_where_a_scale_is_another_have_the_noise_of_their_draws() -> None:
    y = normal(7, 3, seed=4)
    guide = ngvi.AutoHierarchical(noisy)
    with torch.no_grad():
        guide(y)
    assert guide.units.growing == ("s",)
    names, n = ("m", "t", "b", "s"), 8
    at = {name: normal(n, seed=i) for i, name in enumerate(names)}
    at |= {"t": at["t"].exp(), "s": at["s"].exp()}
    given, noise = guide.units.given(guide._call((y,), {}), at), normal(n, 7, 1, seed=9)
    x = guide._conditionals(given).draw(noise)
    found: Any = moving(guide.units, given, x, guide._conditionals, noise)
    swapped = found.swapped
    assert swapped.draws.tolist() == [0, 1, 2, 3] and swapped.entry.tolist() == [1] * 4
    for i, h in enumerate(swapped.H):
        v = {name: x[i : i + 1] for name, x in at.items()} | {"s": at["s"][i - 1 if i else 3][None]}
        assert torch.allclose(swapped.phi[i], torch.stack([v["b"][0], v["s"][0].log()]))
        assert torch.allclose(h, (3.0 / v["s"].square()).expand_as(h))


def scaled_effects(y: Tensor) -> None:
    t: Any = pyro.sample("t", dist.LogNormal(y.new_zeros(()), 0.7))
    with pyro.plate("units", len(y)):
        u: Any = pyro.sample("u", dist.Normal(y.new_zeros(()), 1.0))
        pyro.sample("y", dist.Normal(t * u, 1.0), obs=y)


def dispersed(y: Tensor) -> None:
    r: Any = pyro.sample("r", dist.Gamma(y.new_tensor(2.0), 1.0))
    with pyro.plate("units", len(y)):
        u: Any = pyro.sample("u", dist.Normal(y.new_zeros(()), 1.0))
        pyro.sample("y", dist.NegativeBinomial(r, logits=u), obs=y)


@pytest.mark.parametrize(("model", "name"), [(scaled_effects, "t"), (dispersed, "r")])
def test_what_is_no_scale_of_the_data_moves_nu_alone(model: Any, name: str) -> None:
    guide = ngvi.AutoHierarchical(model)
    svi = SVI(model, guide, ngvi.NGVB(guide), ngvi.BatchedELBO(8))
    for _ in range(3):
        svi.step(torch.tensor([1.0, 0.0, 4.0]).double())
    assert guide.units.followed == (name,) and not guide.units.growing
    assert not guide.sites.growth.any() and guide.sites.cross.all()


def test_what_scales_hardly_any_unit_is_no_scale_in_float32() -> None:
    """Of sites that were seen occupied data say the same whatever b is, so that it has a factor of 1
    there; of the others it changes the slopes little, and not by one factor."""
    x, number = normal(20, seed=3).float(), torch.arange(20)
    y = (number % 5 + 1) * (number % 15 > 0).float()

    def occupancy() -> None:
        b: Any = pyro.sample("b", dist.Normal(x.new_zeros(()), 1.5))
        with pyro.plate("sites", 20):
            u: Any = pyro.sample("u", dist.Normal(x.new_zeros(()), 1.0))
            psi = torch.sigmoid(b * x)
            seen: Any = psi.log() + dist.Binomial(5, logits=u).log_prob(y)
            none = torch.where(y == 0.0, (1.0 - psi).log(), x.new_tensor(-torch.inf))
            pyro.factor("obs", torch.logaddexp(seen, none))

    guide = ngvi.AutoHierarchical(occupancy)
    guide()
    assert guide.units.followed == ("b",) and not guide.units.growing


# --- leaving units out


def known_scale(y: Tensor, index: Any = None) -> None:
    m: Any = pyro.sample("m", dist.Normal(y.new_zeros(()), 3.0))
    with pyro.plate("units", len(y), subsample=index) as i:
        u: Any = pyro.sample("u", dist.Normal(m, 1.5))
        rows = y if index is None else y[i]
        pyro.sample("y", dist.Normal(u[..., None], 0.7).to_event(1), obs=rows)


def test_units_left_out_of_a_gaussian_model() -> None:
    y = 2.0 * normal(6, 3, seed=8)
    one = torch.ones(3, 3).double()
    # the data of all units are jointly normal: cov = 9 everywhere, 2.25 in a unit, 0.49 of a datum
    covariance = 9.0 * torch.ones(18, 18).double() + 0.49 * torch.eye(18).double()
    covariance += 2.25 * torch.block_diag(*[one] * 6)
    flat = y.reshape(-1)
    whole = dist.MultivariateNormal(torch.zeros(18).double(), covariance).log_prob(flat)
    wanted = []
    for i in range(6):
        rest = [j for j in range(18) if j // 3 != i]
        part = dist.MultivariateNormal(torch.zeros(15).double(), covariance[rest][:, rest])
        wanted.append(whole - part.log_prob(flat[rest]))
    pyro.set_rng_seed(0)
    guide = ngvi.AutoHierarchical(known_scale)
    svi = SVI(known_scale, guide, ngvi.NGVB(guide), ngvi.BatchedELBO(8))
    for _ in range(40):
        svi.step(y)
    # q(u | v) is the posterior: its weights do not vary, at any number of points
    log_l = guide.log_marginals(y, num_draws=5, points=3)
    few = guide.log_marginals(y, torch.tensor([4, 1]), num_draws=5, points=3)
    assert log_l.shape == (5, 6) and few.shape == (5, 2)
    found = loo_units(guide, y, num_draws=4000, points=2)
    # 4,000 draws of m: the standard error of the mean of 1 / L is about .01 in its log
    assert torch.allclose(found.pointwise, torch.stack(wanted), atol=0.05)
    assert found.elpd == pytest.approx(float(sum(wanted)), abs=0.1)
    assert (found.khat < 0.7).all()
    assert str(found).startswith(f"elpd_loo {found.elpd:.2f} nats")


def test_units_left_out_of_eight_schools_and_what_they_move() -> None:
    """Where q of the scale is too narrow, against sums over a grid of both globals."""
    y = torch.tensor([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0]).double()
    sd = torch.tensor([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0]).double()

    def model() -> None:
        m: Any = pyro.sample("m", dist.Normal(y.new_zeros(()), 5.0))
        s: Any = pyro.sample("s", dist.HalfCauchy(y.new_full((), 5.0)))
        with pyro.plate("schools", 8):
            u: Any = pyro.sample("u", dist.Normal(m, s))
            pyro.sample("y", dist.Normal(u, sd), obs=y)

    m, log_s = torch.meshgrid(
        torch.linspace(-25.0, 30.0, 221).double(),
        torch.linspace(-10.0, 7.0, 681).double(),
        indexing="ij",
    )
    log_l = dist.Normal(m[..., None], (log_s.exp()[..., None].square() + sd.square()).sqrt())
    log_l = cast(Any, log_l).log_prob(y).flatten(0, 1)
    prior = dist.Normal(0.0, 5.0).log_prob(m) + dist.HalfCauchy(5.0).log_prob(log_s.exp()) + log_s
    log_p = prior.flatten() + log_l.sum(1)
    v = torch.stack([m.flatten(), log_s.exp().flatten()])
    w, left = torch.softmax(log_p, 0), torch.softmax(log_p[:, None] - log_l, 0)
    scale = (v.square() @ w - (v @ w).square()).sqrt()
    moves = ((v @ w)[:, None] - v @ left) / scale[:, None]

    fit = ngvi.fit(model, guide="AutoHierarchical", seed=0, max_steps=30, progress=False)
    pyro.set_rng_seed(0)
    found = loo_units(fit.guide, num_draws=4000)
    # 4,000 draws with weights that are nearly equal: standard errors of .003 nats and .01 sds
    assert torch.allclose(found.pointwise, (left * log_l.exp()).sum(0).log(), atol=0.01)
    assert torch.allclose(found.influence["m"], moves[0], atol=0.04)
    assert torch.allclose(found.influence["s"], moves[1], atol=0.04)
    assert found.most(2).tolist() == [6, 0] and "unit 6 moves m most, by 0.4" in str(found)


def test_without_draws_near_the_posterior_q_stands_for_it(monkeypatch: Any) -> None:
    for name in ("is_light", "can_weigh"):
        monkeypatch.setattr(f"pyro_ngvi.diagnostics.unit_loo.{name}", lambda weights: False)
    y = 2.0 * normal(6, 3, seed=8)
    fit = ngvi.fit(known_scale, y, guide="AutoHierarchical", max_steps=20, progress=False, seed=0)
    with pytest.warns(RuntimeWarning, match="q stands for it. Check by NUTS"):
        found = loo_units(fit.guide, y, num_draws=200)
    monkeypatch.undo()
    # q is the posterior here
    assert torch.allclose(found.pointwise, loo_units(fit.guide, y).pointwise, atol=0.3)


def test_units_without_data_are_no_terms_of_those_left_out() -> None:
    """One that is masked, and one that no datum names."""
    unit = torch.tensor([0, 0, 1, 2, 2, 4, 4, 4])
    y, seen = normal(8, seed=9), cast(Any, unit != 2)

    def model() -> None:
        m: Any = pyro.sample("m", dist.Normal(y.new_zeros(()), 1.0))
        with pyro.plate("units", 5):
            u: Any = pyro.sample("u", dist.Normal(m, 1.0))
        with pyro.plate("data", 8), poutine.mask(mask=seen):
            pyro.sample("y", dist.Normal(u[..., unit], 0.5), obs=y)

    fit = ngvi.fit(model, guide="AutoHierarchical", seed=0, max_steps=20, progress=False)
    found = loo_units(fit.guide, num_draws=200)
    terms = found.pointwise[[0, 1, 4]]
    assert found.absent == 2 and found.pointwise.isnan().tolist() == [
        False,
        False,
        True,
        True,
        False,
    ]
    assert found.elpd == pytest.approx(float(terms.sum()), rel=1e-12)
    assert found.se == pytest.approx(float((3.0 * terms.var(correction=0)).sqrt()), rel=1e-12)
    assert "(of 3 units; 2 without data" in str(found)


def test_integrated_likelihoods_are_those_of_quadrature() -> None:
    y = torch.tensor([[2.0, 3.0], [0.0, 0.0], [7.0, 5.0]]).double()

    def model() -> None:
        m: Any = pyro.sample("m", dist.Normal(y.new_zeros(()), 1.0))
        with pyro.plate("units", 3):
            z: Any = pyro.sample("z", dist.Normal(y.new_zeros(()), 1.0))
            u = pyro.deterministic("u", m + 0.8 * z)
            pyro.sample("y", dist.Poisson(u[..., None].exp()).to_event(1), obs=y)

    pyro.set_rng_seed(0)
    guide = ngvi.AutoHierarchical(model)
    svi = SVI(model, guide, ngvi.NGVB(guide), ngvi.BatchedELBO(8))
    for _ in range(40):
        svi.step()
    call = guide._call((), {})
    m = torch.tensor([-0.5, 0.3, 1.1]).double()
    given = guide.units.given(call, {"m": m})
    found = integrated(guide.units, given, guide._conditionals(given)).log_marginals
    u = torch.linspace(-8.0, 8.0, 4001).double()
    log_p = dist.Poisson(u.exp()[:, None, None]).log_prob(y).sum(-1)
    prior = dist.Normal(m[:, None, None], 0.8).log_prob(u[:, None])
    wanted = torch.logsumexp(log_p + prior, 1) + math.log(16.0 / 4000.0)
    assert torch.allclose(found, wanted, rtol=0.0, atol=1e-7)


@pytest.mark.parametrize("pair", [False, True])
def test_units_that_are_chains_have_the_likelihoods_of_their_gaussians(pair: bool) -> None:
    """3 units of a random walk of 4 steps, or of two of them, whose scale is a global."""
    y = normal(3, *[2] * pair, 4, seed=12)

    def walks() -> None:
        s: Any = pyro.sample("s", dist.HalfNormal(y.new_ones(())))
        prior: Any = local_level(4, initial_scale=2.0, step_scale=s)
        with pyro.plate("units", 3):
            u: Any = pyro.sample("u", prior.expand([3, 2]).to_event(1) if pair else prior)
            pyro.sample("y", dist.Normal(u[..., 0], 0.3).to_event(1 + pair), obs=y)

    fit = ngvi.fit(walks, seed=0, max_steps=5, progress=False)
    guide: Any = fit.guide
    assert isinstance(guide, ngvi.AutoHierarchical)
    scales = torch.tensor([0.2, 0.9]).double()
    given = guide.units.given(guide._call((), {}), {"s": scales})
    found = integrated(guide.units, given, guide._conditionals(given), 2).log_marginals
    t = torch.arange(4).double()
    for s, each in zip(scales, found, strict=True):
        C = 4.0 + s**2 * torch.minimum(t[:, None], t) + 0.09 * torch.eye(4)
        wanted = dist.MultivariateNormal(torch.zeros(4), C).log_prob(y)
        assert torch.allclose(each, wanted.reshape(3, -1).sum(1), rtol=0.0, atol=1e-10)


class Counted(TorchDispatchMode):
    """How many operations of tensors run."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **kwargs or {})


def test_a_step_takes_as_many_operations_for_many_units_as_for_few() -> None:
    def model(y: Tensor) -> None:
        m = pyro.sample("m", dist.Normal(torch.zeros(3).double(), 2.0).to_event(1))
        s = pyro.sample("s", dist.HalfNormal(torch.tensor(2.0).double()))
        with pyro.plate("units", len(y)):
            u = pyro.sample("u", dist.Normal(m[0], s))
            scale = s * torch.tensor([[1.0, 0.0], [0.4, 0.6]]).double()
            v = pyro.sample("v", dist.MultivariateNormal(m[1:], scale_tril=scale))
            mean = u[..., None] + v
            pyro.sample("y", dist.Normal(mean, 1.0).to_event(1), obs=y)

    def operations(B: int) -> int:
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        y = torch.randn(B, 2).double()
        guide = ngvi.AutoHierarchical(model)
        svi = SVI(model, guide, ngvi.NGVB(guide), ngvi.BatchedELBO(4))
        svi.step(y)
        with Counted() as counted:
            svi.step(y)
        return counted.count

    few, many = operations(6), operations(90)
    assert many < 1.1 * few  # it was 3 times as many where roots were joined unit by unit


def answers(width: float, y: Tensor) -> None:
    """Students of one ability each; ``width`` is that of the prior of the items' common slope."""
    slope = pyro.sample("slope", dist.HalfNormal(width))
    with pyro.plate("students", len(y)):
        ability = pyro.sample("ability", dist.Normal(0.0, 1.0))
        items = dist.Bernoulli(logits=slope * ability[..., None].expand(*ability.shape, 5))
        pyro.sample("y", items.to_event(1), obs=y)


def test_globals_start_at_their_mode_where_their_prior_is_far_from_it() -> None:
    y = (normal(100, 1) + normal(100, 5, seed=2) > 0.0).double()

    def start(width: float, globals: Any = ngvi.AutoFullRankNormal) -> tuple[float, Tensor]:
        pyro.set_rng_seed(0)
        guide = ngvi.AutoHierarchical(partial(answers, width), globals)
        guide(y)
        return guide.globals.median()["slope"].item(), torch.get_rng_state()

    own = partial(ngvi.AutoFullRankNormal, init=None)
    (found, after), (center, wanted) = start(100.0), start(100.0, own)
    assert center > 60.0 and 1.0 < found < 2.5
    assert torch.equal(after, wanted)  # nothing of the run's own noise is used
    assert start(2.0)[0] == start(2.0, own)[0]


@pytest.mark.parametrize("batch", [None, 300])
def test_the_start_is_the_mode_of_the_marginal_density_where_data_are_gaussian(
    batch: int | None,
) -> None:
    n, m, s, e = 1000, 3.0, 0.5, 1.0
    y = m + s * normal(n, 1) + e * normal(n, 5, seed=2)

    def model() -> None:
        mean = pyro.sample("mean", dist.Normal(0.0, 100.0))
        spread = pyro.sample("spread", dist.HalfNormal(100.0))
        error = pyro.sample("error", dist.HalfNormal(100.0))
        with pyro.plate("units", n, subsample_size=batch, dim=-2) as i:
            u = pyro.sample("u", dist.Normal(mean, spread))
            with pyro.plate("data", 5, dim=-1):
                pyro.sample("y", dist.Normal(u, error), obs=y[i])

    pyro.set_rng_seed(0)
    guide = ngvi.AutoHierarchical(model)
    guide()
    found = guide.globals.median()
    # the modes of log spread and log error are at the maxima of likelihood, with such wide priors
    within = y.var(1).mean()
    between = y.mean(1).var(correction=0) - within / 5.0
    wanted = {"mean": y.mean(), "spread": between.sqrt(), "error": within.sqrt()}
    error = 0.02 if batch is None else 0.15  # 2.5 of the largest standard errors with 300 units
    for name, value in wanted.items():
        assert found[name].item() == pytest.approx(value.item(), rel=error), name


def test_the_start_ends_when_the_search_for_one_is_to_end() -> None:
    y = (normal(100, 1) + normal(100, 5, seed=2) > 0.0).double()
    guide = ngvi.AutoHierarchical(partial(answers, 100.0))
    with ending_by(0.0):
        guide(y)
    assert guide.globals.median()["slope"] > 60.0
