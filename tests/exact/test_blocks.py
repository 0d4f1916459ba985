"""One Gaussian block given the globals: series, fields, crossed effects, against dense algebra."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import SVI
from torch import Tensor

import pyro_ngvi as ngvi
from pyro_ngvi.diagnostics import loo_units
from pyro_ngvi.distributions import GaussianProcess, local_level
from pyro_ngvi.fitting.falls import PairedFall
from pyro_ngvi.hierarchy.conditional import Conditionals
from pyro_ngvi.hierarchy.slopes import slopes
from pyro_ngvi.runtime.model_density import batched_trace

pytestmark = pytest.mark.usefixtures("smooth_once")
T = 7
ZERO = torch.zeros(()).double()
Y = torch.tensor([0.3, 1.1, 0.8, 2.0, 2.4, 1.9, 3.0]).double()
LOWER = torch.ones(T, T).double().tril()
NOISE = 0.4


def observe(f: Any, noise: Any = NOISE) -> None:
    with pyro.plate("data", T):
        pyro.sample("y", dist.Normal(f, noise), obs=Y)


def step_scale() -> Any:
    return pyro.sample("s", dist.HalfNormal(ZERO + 1.0))


def walk_covariance(s: Tensor) -> Tensor:
    """Of a random walk that starts at N(0, 2^2)."""
    rest = s.square() * torch.cat([0.0 * LOWER[:, :1], LOWER[:, 1:]], 1) @ LOWER.mT
    return rest + 4.0


def named() -> None:
    s, start = step_scale(), pyro.sample("start", dist.Normal(ZERO, 2.0))
    with pyro.plate("steps", T):
        z: Any = pyro.sample("z", dist.Normal(ZERO, 1.0))
    moves = torch.cat([0.0 * z[..., :1], z[..., 1:]], -1)
    observe(pyro.deterministic("level", start + s * moves.cumsum(-1) + 0.0 * z))


def increments() -> None:
    """Data see sums of what is sampled."""
    s = step_scale()
    scales = torch.where(torch.arange(T) == 0, 2.0, s)
    with pyro.plate("steps", T):
        z: Any = pyro.sample("z", dist.Normal(ZERO, scales))
    observe(z.cumsum(-1))


def loop() -> None:
    s = step_scale()
    x: Any = pyro.sample("x_0", dist.Normal(ZERO, 2.0))
    states = [x]
    for t in range(1, T):
        x = pyro.sample(f"x_{t}", dist.Normal(x, s))
        states.append(x)
    observe(torch.stack(states, -1))


def chain() -> None:
    s = step_scale()
    x: Any = pyro.sample("x", local_level(T, initial_scale=ZERO + 2.0, step_scale=s))
    observe(x[..., 0])


def covariance() -> None:
    s = step_scale()
    observe(pyro.sample("f", dist.MultivariateNormal(torch.zeros(T).double(), walk_covariance(s))))


def precision() -> None:
    s = step_scale()
    P = torch.linalg.inv(walk_covariance(s))
    fn = dist.MultivariateNormal(torch.zeros(T).double(), precision_matrix=P)
    observe(pyro.sample("f", fn))


def process() -> None:
    s = step_scale()

    class Walk:
        def __call__(self, X: Tensor, Z: Any = None, diag: bool = False) -> Tensor:
            K = walk_covariance(s)
            return K.diagonal(dim1=-2, dim2=-1) if diag else K

    x = torch.arange(T).double()[:, None]
    observe(pyro.sample("f", GaussianProcess(Walk(), x, jitter=0.0)))


def whitened() -> None:
    s = step_scale()
    z: Any = pyro.sample("z", dist.Normal(torch.zeros(T).double(), 1.0).to_event(1))
    root = torch.linalg.cholesky(walk_covariance(s))
    observe(pyro.deterministic("f", (root @ z.unsqueeze(-1)).squeeze(-1)))


FORMS: list[Callable[[], None]] = [
    named,
    increments,
    loop,
    chain,
    covariance,
    precision,
    process,
    whitened,
]


def fitted(model: Callable[..., Any], steps: int = 15, **how: Any) -> tuple[Any, float]:
    pyro.set_rng_seed(0)
    guide = ngvi.AutoHierarchical(model, **how)
    svi = SVI(model, guide, ngvi.NGVB(guide), ngvi.BatchedELBO(8))
    losses: Any = [svi.step() for _ in range(steps)]
    return guide, float(losses[-1])


@cache
def fitted_form(model: Callable[..., Any], steps: int = 12) -> Any:
    return fitted(model, steps)[0]


def left_of_elbo(model: Callable[..., Any], guide: Any) -> tuple[dict[str, Tensor], Tensor]:
    """Globals, and the ELBO at one draw without log q of these."""
    trace = poutine.trace(guide).get_trace()
    seen = poutine.trace(poutine.replay(model, trace)).get_trace()
    of_globals = sum(
        site["fn"].log_prob(site["value"]).sum()
        for n, site in trace.nodes.items()
        if n in guide.units.globals or n.endswith("_latent")
    )
    values = {n: trace.nodes[n]["value"] for n in guide.units.globals}
    return values, seen.log_prob_sum() - (trace.log_prob_sum() - of_globals)


@pytest.mark.parametrize("model", FORMS, ids=[m.__name__ for m in FORMS])
def test_a_gaussian_block_is_exact_given_the_globals(model: Callable[[], None]) -> None:
    guide = fitted_form(model)
    assert guide.units.plate is None and guide.units.globals == ("s",)
    with torch.no_grad():
        for _ in range(3):
            values, left = left_of_elbo(model, guide)
            s = values["s"]
            K = walk_covariance(s) + NOISE**2 * torch.eye(T).double()
            evidence = dist.MultivariateNormal(torch.zeros(T).double(), K).log_prob(Y)
            wanted = evidence + dist.HalfNormal(ZERO + 1.0).log_prob(s)
            assert torch.allclose(left, wanted, rtol=0.0, atol=1e-8)


def flat() -> None:
    """A prior that draws nothing, of a level beside the walk, and of its scale."""
    real, positive = dist.constraints.real, dist.constraints.positive
    level: Any = pyro.sample("level", dist.ImproperUniform(real, torch.Size(), torch.Size()))
    s: Any = pyro.sample("s", dist.ImproperUniform(positive, torch.Size(), torch.Size()))
    pyro.factor("prior", dist.HalfNormal(ZERO + 1.0).log_prob(s))
    with pyro.plate("steps", T):
        z: Any = pyro.sample("z", dist.Normal(ZERO, 1.0))
    observe(level + pyro.deterministic("walk", s * z.cumsum(-1)))


def test_globals_may_have_flat_priors() -> None:
    guide = fitted_form(flat)
    assert guide.units.names == ("z",) and guide.units.pooled
    with torch.no_grad():
        values, left = left_of_elbo(flat, guide)
    s, level = values["s"], values["level"]
    K = s.square() * LOWER @ LOWER.mT + NOISE**2 * torch.eye(T).double()
    wanted = dist.MultivariateNormal(level.expand(T), K).log_prob(Y)
    wanted = wanted + dist.HalfNormal(ZERO + 1.0).log_prob(s)
    assert torch.allclose(left, wanted, rtol=0.0, atol=1e-8)


def test_a_long_series_whose_data_see_all_of_it_is_a_block() -> None:
    n, g = 90, torch.Generator().manual_seed(0)
    y = 0.5 * torch.randn(n, generator=g).double().cumsum(0)

    def walk() -> None:
        s, start = step_scale(), pyro.sample("start", dist.Normal(ZERO, 2.0))
        with pyro.plate("steps", n - 1):
            u: Any = pyro.sample("u", dist.Normal(ZERO, s))
        start = start.reshape(-1, 1) if start.dim() else start[None]
        level = torch.cat([start, start + u.cumsum(-1)], -1)
        with pyro.plate("data", n):
            pyro.sample("y", dist.Normal(level, NOISE), obs=y)

    assert ngvi.advise(walk).guide is ngvi.AutoHierarchical
    guide = fitted(walk, 30)[0]
    assert guide.units.width == n and guide.units.globals == ("s",)
    ones = torch.ones(n, n).double().tril()
    with torch.no_grad():
        values, left = left_of_elbo(walk, guide)
        s = values["s"]
        moves = torch.cat([ones[:, :1], s * ones[:, 1:]], 1) * torch.tensor([2.0] + [1.0] * (n - 1))
        K = moves @ moves.mT + NOISE**2 * torch.eye(n).double()
        evidence = dist.MultivariateNormal(torch.zeros(n).double(), K).log_prob(y)
        wanted = evidence + dist.HalfNormal(ZERO + 1.0).log_prob(s)
        assert torch.allclose(left, wanted, rtol=0.0, atol=1e-7)


def test_all_forms_take_the_same_steps() -> None:
    """With sites on the level, or on what is one to one with it, q(s) is the same."""
    locs = torch.stack([fitted_form(model).globals.loc.detach() for model in FORMS])
    # all but those with an entry more, and so another noise
    same = [i for i, model in enumerate(FORMS) if model is not named]
    assert torch.allclose(locs[same], locs[same[:1]].expand_as(locs[same]), atol=2e-2)


SUBJECT, ITEM = (
    x.reshape(-1) for x in torch.meshgrid(torch.arange(5), torch.arange(3), indexing="ij")
)
ANSWER = torch.randn(15, generator=torch.Generator().manual_seed(3)).double()


def crossed(pooled: bool = True) -> None:
    a_scale: Any = pyro.sample("a_scale", dist.HalfNormal(ZERO + 1.0))
    b_scale: Any = pyro.sample("b_scale", dist.HalfNormal(ZERO + 1.0)) if pooled else 1.0
    with pyro.plate("subjects", 5):
        a: Any = pyro.sample("a", dist.Normal(ZERO, a_scale))
    with pyro.plate("items", 3):
        b: Any = pyro.sample("b", dist.Normal(ZERO, b_scale))
    with pyro.plate("data", 15):
        pyro.sample("y", dist.Normal(a[..., SUBJECT] + b[..., ITEM], 0.5), obs=ANSWER)


def test_crossed_effects_are_exact_given_their_scales() -> None:
    guide, _ = fitted(crossed)
    assert guide.units.names == ("a", "b") and guide.units.coloring.count == 4
    A = torch.nn.functional.one_hot(SUBJECT).double()
    B = torch.nn.functional.one_hot(ITEM).double()
    with torch.no_grad():
        values, left = left_of_elbo(crossed, guide)
        s, t = values["a_scale"], values["b_scale"]
        K = s**2 * A @ A.mT + t**2 * B @ B.mT + 0.25 * torch.eye(15).double()
        prior = dist.HalfNormal(ZERO + 1.0)
        evidence = dist.MultivariateNormal(torch.zeros(15).double(), K).log_prob(ANSWER)
        wanted = evidence + prior.log_prob(s) + prior.log_prob(t)
    assert torch.allclose(left, wanted, rtol=0.0, atol=1e-8)


def test_minibatches_of_data_tie_what_others_have_not() -> None:
    """The first batch has one item: of it alone all effects of subjects look free of each other."""

    def model(rows: Tensor) -> None:
        a_scale: Any = pyro.sample("a_scale", dist.HalfNormal(ZERO + 1.0))
        b_scale: Any = pyro.sample("b_scale", dist.HalfNormal(ZERO + 1.0))
        with pyro.plate("subjects", 5):
            a: Any = pyro.sample("a", dist.Normal(ZERO, a_scale))
        with pyro.plate("items", 3):
            b: Any = pyro.sample("b", dist.Normal(ZERO, b_scale))
        with pyro.plate("data", len(rows)):
            at = a[..., SUBJECT[rows]] + b[..., ITEM[rows]]
            pyro.sample("y", dist.Normal(at, 0.5), obs=ANSWER[rows])

    guide: Any = ngvi.AutoHierarchical(model, locals=["a", "b"])
    first, every = torch.tensor([0]), torch.arange(15)
    guide(first)
    assert guide.units.coloring.count == 2
    svi = SVI(model, guide, ngvi.NGVB(guide), ngvi.BatchedELBO(8))
    for _ in range(30):
        svi.step(every)
    A = torch.nn.functional.one_hot(SUBJECT).double()
    B = torch.nn.functional.one_hot(ITEM).double()
    X = torch.cat([A, B], 1)
    assert torch.allclose(guide.sites.precision[0], X.mT @ X / 0.25, atol=1e-6)


def test_units_stay_units_where_other_effects_have_no_scale_of_their_own() -> None:
    guide = ngvi.AutoHierarchical(lambda: crossed(pooled=False))
    guide()
    assert guide.units.plate == "subjects" and "b" in guide.units.globals


def hyperparameters(form: str) -> None:
    """Gaussian ones, which are no part of the block that they rule."""
    log_s: Any = pyro.sample("log_s", dist.Normal(ZERO, 0.5))
    length: Any = pyro.sample("length", dist.LogNormal(ZERO, 0.3))
    b: Any = pyro.sample("b", dist.Normal(torch.zeros(2).double(), 1.0).to_event(1))
    t = torch.arange(T).double()
    K = torch.exp(-0.5 * ((t[:, None] - t) / length) ** 2) + 1e-6 * torch.eye(T).double()
    if form == "centred":
        fn = dist.MultivariateNormal(torch.zeros(T).double(), log_s.exp() ** 2 * K)
        f: Any = pyro.sample("f", fn)
    else:
        z: Any = pyro.sample("f", dist.Normal(torch.zeros(T).double(), 1.0).to_event(1))
        root = log_s.exp() * torch.linalg.cholesky(K)
        f = pyro.deterministic("field", (root @ z.unsqueeze(-1)).squeeze(-1))
    observe(f + b[..., :1] + b[..., 1:] * t, 0.3)


@pytest.mark.parametrize("form", ["centred", "whitened"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_rules_the_block_is_left_out_of_it(form: str, dtype: torch.dtype) -> None:
    def model() -> None:
        hyperparameters(form)

    def in_single() -> None:
        with SINGLE:
            hyperparameters(form)

    guide = ngvi.AutoHierarchical(model if dtype == torch.float64 else in_single)
    guide()
    assert guide.units.names == ("b", "f") and guide.units.globals == ("log_s", "length")
    assert guide.units.direct == (form == "whitened")


class _Single(torch.overrides.TorchFunctionMode):
    """Doubles of the model above are singles."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        return found.float() if func is torch.Tensor.double else found


SINGLE = _Single()


def smooth_field(dtype: torch.dtype, form: str) -> None:
    """A Gaussian process whose covariance is nearly singular."""
    zero = torch.zeros((), dtype=dtype)
    v: Any = pyro.sample("v", dist.HalfNormal(zero + 1.0))
    x = torch.linspace(-1.0, 1.0, 30, dtype=dtype)
    K = v.square() * torch.exp(-0.5 * ((x[:, None] - x) / 0.7) ** 2)
    K = K + 1e-4 * torch.eye(30, dtype=dtype)
    if form == "centred":
        f: Any = pyro.sample("f", dist.MultivariateNormal(zero.expand(30), K))
    else:
        z: Any = pyro.sample("z", dist.Normal(zero.expand(30), 1.0).to_event(1))
        f = pyro.deterministic("f", (torch.linalg.cholesky(K) @ z.unsqueeze(-1)).squeeze(-1))
    y = (2.0 * torch.sin(3.0 * x) > 0.0).to(dtype)
    with pyro.plate("data", 30):
        pyro.sample("y", dist.Bernoulli(logits=3.0 * f), obs=y)


@pytest.mark.parametrize("form", ["centred", "whitened"])
def test_float32_is_enough_for_a_nearly_singular_prior(form: str) -> None:
    pyro.set_rng_seed(0)
    guide = ngvi.AutoHierarchical(lambda: smooth_field(torch.float64, form))
    guide()
    call, v = guide._call((), {}), torch.tensor([0.3, 1.0, 3.0]).double()
    single_call = replace(call, model=lambda: smooth_field(torch.float32, form))
    with torch.no_grad():
        double = guide.units.given(call, {"v": v})
        single = guide.units.given(single_call, {"v": v.float()})
        x = double.priors.at(
            torch.randn(3, 1, 30, generator=torch.Generator().manual_seed(0)).double()
        )
    at, there = slopes(guide.units, double, x), slopes(guide.units, single, x.float())
    assert at is not None and there is not None and at.H is not None and there.H is not None
    assert torch.equal(at.H, at.H.diagonal(dim1=-2, dim2=-1).diag_embed())
    assert torch.allclose(there.g.double(), at.g, rtol=1e-4, atol=1e-4)
    assert torch.allclose(there.H.double(), at.H, rtol=1e-4, atol=1e-4)
    nu, Lambda = (at.g + (at.H @ x[..., None])[..., 0]).mean(0), at.H.mean(0)
    wanted = Conditionals.of(double.priors, nu, Lambda)
    found = Conditionals.of(single.priors, nu.float(), Lambda.float())
    # the condition number of K is 2e5 at v = 1
    assert ((found.mean.double() - wanted.mean).abs() < 1e-2 * wanted.sd()).all()
    assert torch.allclose(found.sd().double(), wanted.sd(), rtol=1e-3)
    assert torch.allclose(found.log_det.double(), wanted.log_det, atol=1e-3)
    loss = fitted(lambda: smooth_field(torch.float32, form), 15)[1]
    # other random numbers: the sd of a loss is .1 nats here
    assert loss == pytest.approx(fitted(lambda: smooth_field(torch.float64, form), 15)[1], abs=0.5)


def test_a_block_of_counts_is_what_quadrature_finds() -> None:
    """Two counts of a random walk, and its scale: beside a grid over all three."""
    y = torch.tensor([3.0, 9.0]).double()

    def model() -> None:
        s = step_scale()
        f: Any = pyro.sample("f", local_level(2, initial_scale=ZERO + 1.0, step_scale=s))
        with pyro.plate("data", 2):
            pyro.sample("y", dist.Poisson(f[..., 0].exp()), obs=y)

    guide, _ = fitted(model, 60)
    x = torch.linspace(-1.0, 4.0, 201).double()
    pairs = torch.cartesian_prod(x, x)
    log_s = torch.linspace(-2.0, 1.0, 49)[1:-1].double()
    log_p = []
    for s in log_s.exp():
        prior = dist.Normal(0.0, 1.0).log_prob(pairs[:, 0])
        prior = prior + dist.Normal(pairs[:, 0], s).log_prob(pairs[:, 1])
        likelihood = dist.Poisson(pairs.exp()).log_prob(y).sum(-1)
        log_p.append(torch.logsumexp(prior + likelihood, 0))
    log_l = torch.stack(log_p)
    values = {"s": log_s.exp()}
    call = guide._call((), {})
    with torch.no_grad():
        given = guide.units.given(call, values)
        q = guide._conditionals(given)
        e = torch.randn(4000, 1, 1, 2, generator=torch.Generator().manual_seed(0)).double()
        w = q.drawn(e.expand(-1, len(log_s), 1, 2))
        u = given.latent.at(w)
        terms = dist.Poisson(u.exp()).log_prob(y).sum((-2, -1)) + given.latent.log_prob(w)[..., 0]
        terms = terms - q.log_q(e.expand_as(w))[..., 0]
    found = torch.logsumexp(terms, 0)
    off = (found - found.mean()) - (log_l - log_l.mean())
    # the weights of q(f | s) vary little, so that it is near p(f | s, y) at each s: se below .01
    assert off.abs().max() < 0.05
    assert (terms - found).exp().mul(4000.0).var(0).max() < 0.5


def test_a_block_that_drifts_goes_back_to_the_best_look() -> None:
    pyro.set_rng_seed(0)
    guide = ngvi.AutoHierarchical(noisy)
    svi = SVI(noisy, guide, ngvi.NGVB(guide), ngvi.BatchedELBO(8))
    for _ in range(15):
        svi.step()
    best = {name: x.clone() for name, x in guide.state_dict().items()}
    paired, how = PairedFall(), (svi, ngvi.BatchedELBO(8), (), {})
    assert paired(*how, 20, 0.05) is None
    guide.sites.linear.add_(3.0)  # as if its steps had led there
    fall, error = paired(*how, 40, 0.05) or (0.0, 0.0)
    assert fall < -1.0 and fall < -4.0 * error
    assert not paired.go_back(svi, -0.9, 0.01) and not paired.go_back(svi, fall, -0.3 * fall)
    svi.optim._has_others = True  # parameters of the model, which may be what moved
    assert not paired.go_back(svi, fall, error)
    svi.optim._has_others = False
    assert not paired.go_back(svi, -math.inf, math.nan)
    assert paired.go_back(svi, fall, error)
    assert all(torch.equal(x, best[name]) for name, x in guide.state_dict().items())


def test_a_block_does_not_go_back_to_other_data() -> None:
    def model(y: Tensor) -> None:
        s = step_scale()
        with pyro.plate("steps", T):
            z: Any = pyro.sample("z", dist.Normal(ZERO, 1.0))
        level = pyro.deterministic("level", s * z.cumsum(-1))
        with pyro.plate("data", T):
            pyro.sample("y", dist.Normal(level, 0.5), obs=y)

    fit = ngvi.fit(model, 0.1 * Y, seed=0, progress=False)
    assert type(fit.guide) is ngvi.AutoHierarchical
    other = 3.0 * Y
    fit.resume(other, progress=False)
    assert fit.why_stopped == "settled"
    pyro.clear_param_store()
    fresh = ngvi.fit(model, other, seed=0, progress=False)
    assert fit.elbo[0] == pytest.approx(fresh.elbo[0], abs=0.3)


# --- refusals, and what a block cannot do


def kinked() -> None:
    s = step_scale()
    x: Any = pyro.sample("x", local_level(T, initial_scale=ZERO + 2.0, step_scale=s))
    with pyro.plate("data", T):
        pyro.sample("y", dist.Laplace(x[..., 0], 1.0), obs=Y)


def many_seen() -> None:
    s = step_scale()
    z: Any = pyro.sample("z", dist.Normal(torch.zeros(70).double(), s).to_event(1))
    with pyro.plate("months", 60, dim=-2), pyro.plate("data", 70):
        rates = z.cumsum(-1).exp().unsqueeze(-2)
        pyro.sample("y", dist.Poisson(rates), obs=torch.ones(60, 70).double())


def large() -> None:
    s = step_scale()
    z: Any = pyro.sample("z", dist.Normal(torch.zeros(600).double(), s).to_event(1))
    with pyro.plate("data", 600):
        pyro.sample("y", dist.Normal(z, 1.0), obs=torch.ones(600).double())


@pytest.mark.parametrize(
    ("model", "part"),
    [
        (kinked, "a block needs a likelihood without kinks"),
        (many_seen, "4,200 data see 70 latent variables of a block at once"),
        (large, "600 Gaussian latent variables and 1 other"),
    ],
)
def test_models_that_are_no_block(model: Callable[[], None], part: str) -> None:
    with pytest.raises(ValueError, match="no plate of units was found") as error:
        ngvi.AutoHierarchical(model)()
    assert part in str(error.value.__cause__) and len(str(error.value.__cause__)) <= 240


def test_a_block_prints_and_advises() -> None:
    advice = ngvi.advise(loop)
    assert str(advice).startswith(
        "AutoHierarchical, for a block of 7 latent variables (x_0, x_1, x_2, x_3, ...), given s;"
    )


def test_leaving_out_the_only_unit_is_refused() -> None:
    guide = fitted_form(chain)
    with pytest.raises(ValueError, match="all is one block here: a block of 7 latent variables"):
        loo_units(guide)


def test_what_is_read_from_a_fit_of_a_block() -> None:
    fit = ngvi.fit(chain, max_steps=15, seed=0, progress=False)
    draws = fit.to_arviz(num_samples=50)["posterior"]
    assert draws["x"].shape == (1, 50, T, 1) and draws["s"].shape == (1, 50)
    low, high = fit.guide.quantiles([0.05, 0.95])["x"]
    assert low.shape == (T, 1) and (low < high).all()


# --- without the block


def noisy() -> None:
    """The scale of the noise is unknown, so that what data say of the block depends on it."""
    s = step_scale()
    with pyro.plate("steps", T):
        z: Any = pyro.sample("z", dist.Normal(ZERO, 1.0))
    level = pyro.deterministic("level", s * z.cumsum(-1))
    observe(level, pyro.sample("noise", dist.HalfNormal(ZERO + 1.0)))


def test_a_gaussian_block_is_integrated_out_exactly() -> None:
    collapsed = ngvi.collapse(fitted_form(noisy))
    assert collapsed.error < 1e-8 and not collapsed.missed
    values = {
        "s": torch.tensor([0.1, 0.5, 2.0]).double(),
        "noise": torch.tensor([1.5, 0.05, 0.4]).double(),
    }
    wanted = torch.stack(
        [
            dist.MultivariateNormal(
                torch.zeros(T).double(),
                s.square() * LOWER @ LOWER.mT + noise.square() * torch.eye(T).double(),
            ).log_prob(Y)
            for s, noise in zip(values["s"], values["noise"], strict=True)
        ]
    )
    found = collapsed.log_marginals(values)
    assert torch.allclose(found[:, 0], wanted, rtol=0.0, atol=1e-8)
    # under vmap and as a model too
    with torch.no_grad():
        trace = batched_trace(collapsed, values).log_joint()
    prior = dist.HalfNormal(ZERO + 1.0)
    of_globals = prior.log_prob(values["s"]) + prior.log_prob(values["noise"])
    assert torch.allclose(trace, wanted + of_globals, rtol=0.0, atol=1e-8)


X = torch.linspace(0.0, 6.0, T).double()


def regressed(positive: bool, y: Tensor, x: Tensor = X) -> None:
    """A Gaussian process whose noise is log-normal, or the exponential of a Gaussian site."""
    length: Any = pyro.sample("length", dist.LogNormal(ZERO, 1.0))
    if positive:
        noise: Any = pyro.sample("noise", dist.LogNormal(ZERO - 1.0, 1.0))
    else:
        noise = pyro.sample("log_noise", dist.Normal(ZERO - 1.0, 1.0)).exp()
    squares = (x - x[:, None]).square()
    cov = (-0.5 * squares / length[..., None, None].square()).exp() + 1e-6 * torch.eye(len(y))
    f: Any = pyro.sample("f", dist.MultivariateNormal(torch.zeros(len(y)).double(), cov))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(f, noise[..., None] if noise.dim() else noise), obs=y)


def test_a_log_normal_number_is_a_global_and_the_evidence_exact() -> None:
    guide, _ = fitted(partial(regressed, True, Y), steps=10)
    assert guide.units.globals == ("length", "noise")
    at = {
        "length": torch.tensor([0.1, 0.5, 3.0]).double(),
        "noise": ZERO + torch.tensor([1.0, 0.3, 2.0]),
    }
    cov = (-0.5 * (X - X[:, None]).square() / at["length"][:, None, None].square()).exp()
    cov = cov + (1e-6 + at["noise"].square())[:, None, None] * torch.eye(T)
    exact = dist.MultivariateNormal(torch.zeros(T).double(), cov).log_prob(Y)
    found = ngvi.collapse(guide).log_marginals(at).sum(-1)
    assert torch.allclose(found, exact, atol=1e-9)


def test_weights_alone_do_not_vouch_for_a_block_that_cannot_be_integrated_out() -> None:
    """By a grid the sd of the log length is .51, and the guide's .35, of all draws."""
    torch.manual_seed(7)
    x = torch.sort(6.0 * torch.rand(24).double()).values
    y = (3.0 * x).sin() + 0.6 * torch.randn(24).double()
    fit = ngvi.fit(partial(regressed, False, y, x), seed=0, progress=False)
    assert fit.guide.units.names == ("log_noise", "f")
    assert fit.khat.decision == "intervals" and fit.verdict.decision == "unclear"
    assert "Not clear (k-hat" in repr(fit) and "Take ngvi.integrate(model, *args) or NUTS." in repr(
        fit
    )


def test_draws_given_the_globals_are_those_of_the_posterior() -> None:
    guide = fitted_form(noisy)
    s, noise = torch.tensor(0.7).double(), torch.tensor(0.3).double()
    many = {"s": s.expand(4000), "noise": noise.expand(4000)}
    pyro.set_rng_seed(1)
    level = s * ngvi.collapse(guide).draw_units(many)["z"].cumsum(-1)
    K = s.square() * LOWER @ LOWER.mT
    gain = K @ torch.linalg.inv(K + noise.square() * torch.eye(T).double())
    mean, covariance = gain @ Y, K - gain @ K
    sd = covariance.diagonal().sqrt()
    # standard errors of 4,000 draws: .016 sd of a mean, 1.1 % of an sd; five of them
    assert ((level.mean(0) - mean).abs() < 0.08 * sd).all()
    assert ((level.std(0) / sd - 1.0).abs() < 0.06).all()


def test_corrected_draws_have_the_scales_of_the_exact_posterior() -> None:
    """Beside a grid over both scales, whose posterior is far from Gaussian in their logarithms."""
    fit = ngvi.fit(noisy, max_steps=40, seed=0, progress=False)
    draws = fit.to_arviz(corrected=True, num_samples=2000, seed=0)["posterior"]
    grid = torch.cartesian_prod(*[torch.linspace(-7.0, 1.5, 120).double()] * 2)
    s, noise = grid.exp().unbind(1)
    prior = dist.HalfNormal(ZERO + 1.0)
    K = s[:, None, None] ** 2 * LOWER @ LOWER.mT
    K = K + noise[:, None, None] ** 2 * torch.eye(T).double()
    log_p = dist.MultivariateNormal(torch.zeros(T).double(), K).log_prob(Y)
    log_p = log_p + prior.log_prob(s) + prior.log_prob(noise) + grid.sum(1)
    w = torch.softmax(log_p, 0)
    for name, x in {"s": s, "noise": noise}.items():
        mean = float(w @ x)
        sd = float(w @ (x - mean).square()) ** 0.5
        found = draws[name].values
        # 2,000 resampled draws worth some hundreds: a standard error of .05 sd
        assert abs(found.mean() - mean) < 0.2 * sd
        assert abs(found.std() / sd - 1.0) < 0.2


# --- what couples only away from the centre of the priors


def autoregression() -> None:
    rho: Any = pyro.sample("rho", dist.Uniform(ZERO - 1.0, 1.0))
    s = step_scale()
    x: Any = pyro.sample("x_0", dist.Normal(ZERO, s))
    states = [x]
    for t in range(1, T):
        x = pyro.sample(f"x_{t}", dist.Normal(rho * x, s))
        states.append(x)
    observe(torch.stack(states, -1))


def test_a_coefficient_whose_prior_is_centred_at_zero_is_seen() -> None:
    guide, _ = fitted(autoregression)
    assert guide.units.dependent
    rho, s = torch.tensor([-0.5, 0.0, 0.9]).double(), torch.tensor([0.5, 0.5, 0.7]).double()
    wanted = []
    for r, scale in zip(rho, s, strict=True):
        A = torch.eye(T).double() - r * torch.diag_embed(torch.ones(T - 1).double(), -1)
        root = scale * torch.linalg.inv(A)
        K = root @ root.mT + NOISE**2 * torch.eye(T).double()
        wanted.append(dist.MultivariateNormal(torch.zeros(T).double(), K).log_prob(Y))
    found = ngvi.collapse(guide).log_marginals({"rho": rho, "s": s})[:, 0]
    assert torch.allclose(found, torch.stack(wanted), rtol=0.0, atol=1e-8)


def change_point() -> None:
    """The year at which the mean of a field bends is far from 0, where it bends nothing."""
    s = step_scale()
    year: Any = pyro.sample("year", dist.Normal(ZERO + 1975.0, 5.0))
    at = 2.0 * torch.sigmoid(1972.0 + torch.arange(T) - year[..., None])
    root = s[..., None, None] * torch.eye(T).double()
    observe(pyro.sample("f", dist.MultivariateNormal(at, scale_tril=root)))


def volatility() -> None:
    """In float32, and returns are small."""
    s: Any = pyro.sample("s", dist.HalfNormal(torch.ones(())))
    h: Any = pyro.sample("h", dist.Normal(torch.zeros(9), s).to_event(1))
    x: Any = pyro.sample("x", dist.Normal(torch.zeros(9), 1e-4 * h.exp()).to_event(1))
    pyro.sample("y", dist.Normal(x, 1e-4).to_event(1), obs=1e-4 * torch.linspace(-1.0, 1.0, 9))


@pytest.mark.parametrize(("model", "left"), [(change_point, "year"), (volatility, "h")])
def test_what_bends_means_or_scales_where_its_prior_lies_is_left_out(model: Any, left: str) -> None:
    guide = ngvi.AutoHierarchical(model)
    guide()
    assert left in guide.units.globals


def tied_noise() -> None:
    """A factor sees differences of z, beside what is named."""
    s = step_scale()
    with pyro.plate("regions", T):
        z: Any = pyro.sample("z", dist.Normal(ZERO, 3.0))
    f = pyro.deterministic("f", s * z)
    pyro.factor("tied", -5.0 * (z[..., 1:] - z[..., :-1]).square().sum(-1))
    observe(f)


def test_data_that_see_contrasts_of_what_is_renamed_are_seen() -> None:
    with pytest.raises(ValueError, match="data see several units of 'regions' at once"):
        ngvi.AutoHierarchical(tied_noise)()
    assert ngvi.advise(tied_noise).guide is ngvi.AutoFullRankNormal


def test_a_prior_without_data_is_no_block() -> None:
    def funnel() -> None:
        v: Any = pyro.sample("v", dist.Normal(ZERO, 3.0))
        pyro.sample("x", dist.Normal(torch.zeros(9).double(), (v / 2.0).exp()).to_event(1))

    assert ngvi.advise(funnel).guide is ngvi.AutoFullRankNormal


def test_units_do_not_come_to_a_block() -> None:
    guide = fitted_form(chain)
    for change in (lambda: guide.add(1), lambda: guide.remove([0])):
        with pytest.raises(ValueError, match="a block has no units that come or go"):
            change()


def test_the_collapsed_gradient_is_that_of_the_evidence() -> None:
    collapsed = ngvi.collapse(fitted_form(noisy))
    values = {n: torch.tensor([0.6]).double().requires_grad_() for n in ("s", "noise")}
    found = torch.autograd.grad(collapsed.log_marginals(values).sum(), [*values.values()])
    K = values["s"].square() * LOWER @ LOWER.mT
    K = K + values["noise"].square() * torch.eye(T).double()
    exact = dist.MultivariateNormal(torch.zeros(T).double(), K).log_prob(Y)
    wanted = torch.autograd.grad(exact, [*values.values()])
    assert torch.allclose(torch.cat(found), torch.cat(wanted), rtol=1e-6)
