"""VON, VOGN, IVON and Vadam: exact steps, agreement with each other and with the printed updates."""

import math
import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pyro import poutine
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoGuideList, init_to_value

import pyro_ngvi as ngvi
from pyro_ngvi.families import FullRankNormal, MeanFieldNormal
from pyro_ngvi.optim.rule import rate_at
from pyro_ngvi.optim.state import flat
from pyro_ngvi.optim.vogn import IVONRule, VadamRule
from pyro_ngvi.optim.von import VONRule
from tests.cubature import sphere_points
from tests.exact.rule_cases import update

pytestmark = pytest.mark.usefixtures("plain_start")

D = 4
FAMILIES = {"mean_field": MeanFieldNormal(), "full_rank": FullRankNormal()}
families = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)


def target():
    g = torch.Generator().manual_seed(0)
    root = torch.randn(D, D, generator=g)
    return root @ root.T + torch.eye(D), torch.randn(D, generator=g)


def gradients(family, params, P, m, curvature=None):
    """Exact gradients of the negative ELBO for a Gaussian posterior, by sphere points."""
    leaves = {k: v.clone().requires_grad_() for k, v in params.items()}
    z = family.rsample(leaves, sphere_points(family.noise_dim(params)))
    log_p = -0.5 * ((z - m) @ P * (z - m)).sum(-1)
    (family.log_prob(params, z) - log_p).mean().backward()
    grads = {k: v.grad for k, v in leaves.items() if v.grad is not None}
    return grads | ({} if curvature is None else {"curvature." + curvature[0]: curvature[1]})


def precision(family, params):
    return torch.linalg.inv(family.covariance(params))


@families
@pytest.mark.parametrize("safe", [False, True])
@pytest.mark.parametrize("price", [False, True])
def test_update_is_the_printed_one(family, safe, price):
    """P + b S (+ b^2 / 2 S P^-1 S), then the mean by the new P; momentum corrected for its start."""
    H, m = target()
    a, b, beta = 0.3, 0.2, 0.8
    rule = VONRule(family, a, b, momentum=beta, safe=safe)
    params = family.init(torch.ones(D), 0.4)
    state, average = rule.init(params), torch.zeros(D)
    diagonal = isinstance(family, MeanFieldNormal)
    for k in range(3):
        grads = gradients(family, params, H, m, None if price else ("dense", H))
        new, state, report = update(rule, params, grads, state)
        P = precision(family, params)
        S = (torch.diag(H.diagonal()) if diagonal else H) - P
        expected = P + b * S + (0.5 * b**2 * S @ torch.linalg.solve(P, S) if safe else 0.0)
        torch.testing.assert_close(precision(family, new), expected, rtol=1e-10, atol=1e-10)
        average = beta * average + (1 - beta) * H @ (params["loc"] - m)
        step = a * torch.linalg.solve(expected, average / (1 - beta ** (k + 1)))
        torch.testing.assert_close(new["loc"], params["loc"] - step, rtol=1e-10, atol=1e-10)
        length = (step @ expected @ step).sqrt()
        torch.testing.assert_close(report.step_norm, length, rtol=1e-9, atol=1e-9)
        params = new


def test_one_step_is_exact_on_linear_regression():
    """Full rank, curvature "hessian" of a Pyro model, rates 1: the posterior, from a wide start."""
    g = torch.Generator().manual_seed(1)
    X = torch.randn(20, D, generator=g) * torch.logspace(-1, 1, D)
    y = X @ torch.ones(D) + torch.randn(20, generator=g)

    def model():
        w = pyro.sample("w", dist.Normal(torch.zeros(D), 2.0).to_event(1))
        with pyro.plate("data", 20):
            pyro.sample("y", dist.Normal(X @ w, 0.5), obs=y)

    torch.manual_seed(0)
    start = init_to_value(values={"w": torch.full((D,), 3.0)})
    guide = ngvi.AutoFullRankNormal(model, init_scale=10.0, init_loc_fn=start)
    P = 4.0 * X.T @ X + 0.25 * torch.eye(D)
    mean = torch.linalg.solve(P, 4.0 * X.T @ y)
    loss = ngvi.BatchedELBO(1, curvature="hessian")
    optim = ngvi.optim.VON(guide, lr=1.0, curvature_lr=1.0, safe=False, trust_radius=None)
    loss.loss_and_grads(model, guide)
    guide.loc.grad.copy_(P @ (guide.loc.detach() - mean))  # the expectation over draws
    optim([guide.loc, guide.scale_tril])
    q = guide.get_posterior()
    torch.testing.assert_close(torch.linalg.inv(q.covariance_matrix), P, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(q.mean, mean, rtol=1e-9, atol=1e-9)


def test_damping_acts_on_the_mean_alone():
    H, m = target()
    for family in FAMILIES.values():
        params = family.init(torch.ones(D), 0.4)
        grads = gradients(family, params, H, m, ("dense", H))
        new = [
            update(
                VONRule(family, 0.5, 0.5, damping=damping),
                params,
                grads,
                VONRule(family, 0.5, 0.5).init(params),
            )[0]
            for damping in (0.0, 2.0)
        ]
        P = precision(family, new[0])
        torch.testing.assert_close(precision(family, new[1]), P)
        step = 0.5 * torch.linalg.solve(P + 2.0 * torch.eye(D), grads["loc"])
        torch.testing.assert_close(new[1]["loc"], params["loc"] - step)


def test_ivon_equals_von_with_the_hessian_on_a_diagonal_quadratic():
    """With noise that integrates quadratics exactly Price's curvature is the Hessian."""
    family = MeanFieldNormal()
    H, m = torch.diag(torch.logspace(-1, 1, D)), torch.arange(D) * 1.0
    ivon = IVONRule(family, 0.1, 0.05, momentum=0.9)
    one = other = family.init(torch.zeros(D), 0.5)
    state_one, state_other = ivon.init(one), ivon.init(other)
    for _ in range(20):
        one, state_one, _ = update(ivon, one, gradients(family, one, H, m), state_one)
        grads = gradients(family, other, H, m, ("diagonal", H.diagonal()))
        other, state_other, _ = update(ivon, other, grads, state_other)
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=1e-12, atol=1e-12)


def test_vadam_is_the_published_update():
    """In the symbols of the paper: s, m, delta, N (Khan et al. 2018, and their code)."""
    family, N, delta = MeanFieldNormal(), 50.0, torch.linspace(0.5, 2.0, D)
    lr, beta1, beta2 = 0.02, 0.9, 0.99
    rule = VadamRule(family, lr, 1 - beta2, momentum=beta1, safe=False)
    params = family.init(torch.ones(D), 0.1)
    s = ((-2 * params["log_scale"]).exp() - delta) / N
    mean, average, state = params["loc"], torch.zeros(D), rule.init(params)
    g = torch.Generator().manual_seed(3)
    for t in range(1, 6):
        batch = torch.randn(D, generator=g)  # the minibatch mean of the gradients
        total = N * batch + delta * mean
        square = N * batch.square()
        grads = {"loc": total, "log_scale": torch.zeros(D), "curvature.prior": delta}
        grads |= {"curvature.diagonal": square + delta, "curvature.count": torch.tensor(N)}
        params, state, _ = update(rule, params, grads, state)
        average = beta1 * average + (1 - beta1) * (batch + delta * mean / N)
        s = beta2 * s + (1 - beta2) * batch.square()
        corrected = (s / (1 - beta2**t)).sqrt()
        mean = mean - lr * average / (1 - beta1**t) / (corrected + delta / N)
        torch.testing.assert_close(params["loc"], mean, rtol=1e-10, atol=1e-12)
        P = (-2 * params["log_scale"]).exp()
        torch.testing.assert_close(P, N * s + delta, rtol=1e-10, atol=1e-12)


@families
@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    log_size=st.floats(-3, 30),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_adversarial_curvature_never_leaves_the_domain(family, seed, log_size, dtype):
    g = torch.Generator().manual_seed(seed)
    params = family.init(torch.randn(D, generator=g).to(dtype), 0.7)
    rule = VONRule(family, 0.5, 0.9)
    state = rule.init(params)
    for _ in range(3):
        H = torch.randn(D, D, generator=g).to(dtype) * 10.0**log_size
        grads = {k: torch.randn(v.shape, generator=g).to(dtype) for k, v in params.items()}
        params, state, _ = update(rule, params, grads | {"curvature.dense": H + H.T}, state)
        assert all(torch.isfinite(v).all() for v in params.values())
        sd = family.stddev(params)
        assert torch.isfinite(sd).all() and (sd > 0).all()
        if "scale_tril" in params:
            assert (params["scale_tril"].diagonal() > 0).all()


@families
@pytest.mark.parametrize("averaging", [None, ngvi.optim.Tail()], ids=["iterate", "average"])
def test_non_finite_steps_are_refused(family, averaging):
    H, m = target()
    rule = VONRule(family, 0.5, 0.5, momentum=0.5, averaging=averaging)
    params = family.init(torch.ones(D), 0.4)
    params, state, _ = update(
        rule, params, gradients(family, params, H, m, ("dense", H)), rule.init(params)
    )
    for bad, value in (
        ("loc", math.nan),
        ("curvature.dense", math.nan),
        ("curvature.dense", math.inf),
    ):
        grads = gradients(family, params, H, m, ("dense", H.clone()))
        grads[bad].view(-1)[-1] = value
        new, new_state, report = update(rule, params, grads, state)
        assert not bool(report.finite) and report.bad_entries.tolist() == [False] * 3 + [True]
        assert all(torch.equal(new[k], params[k]) for k in params)
        before, after = flat(state), flat(new_state)
        assert all(torch.equal(after[k], before[k]) for k in {*before} - {"skipped", "bad_entries"})
        assert new_state["skipped"] == state["skipped"] + 1


@families
def test_meta_device_and_vmap(family):
    params = {k: v.to("meta") for k, v in family.init(torch.zeros(D), 0.5).items()}
    rule = VONRule(
        family, ngvi.optim.PowerDecay(0.1), 0.1, 0.9, damping=0.1, averaging=ngvi.optim.Tail()
    )
    state = rule.init(params)
    grads = {k: torch.zeros_like(v) for k, v in params.items()}
    grads["curvature.diagonal"] = torch.zeros(D, device="meta")
    new, _, report = update(rule, params, grads, state)
    assert all(v.device.type == "meta" for v in [*new.values(), report.finite])


def network(X, y):
    w1 = pyro.sample("w1", dist.Normal(torch.zeros(3, 5).to(X), 1.0).to_event(2))
    w2 = pyro.sample("w2", dist.Normal(torch.zeros(5).to(X), 1.0).to_event(1))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal((X @ w1).tanh() @ w2, 0.1), obs=y)


RULES = {
    "von": (lambda g: ngvi.optim.VON(g, averaging=True), ngvi.AutoFullRankNormal, "hessian"),
    "vogn": (ngvi.optim.VOGN, ngvi.AutoMeanFieldNormal, "gauss_newton"),
    "ivon": (ngvi.optim.IVON, ngvi.AutoMeanFieldNormal, None),
    "vadam": (ngvi.optim.Vadam, ngvi.AutoMeanFieldNormal, "squared_gradient"),
}
rules = pytest.mark.parametrize("make, guide_class, kind", RULES.values(), ids=RULES)


def loss_of(kind, particles=1):
    return Trace_ELBO(particles) if kind is None else ngvi.BatchedELBO(particles, curvature=kind)


@rules
def test_resumes_bit_for_bit(make, guide_class, kind, tmp_path):
    g = torch.Generator().manual_seed(0)
    X = torch.randn(9, 3, generator=g)
    y = X[:, 0].tanh()

    def run(breaks):
        torch.manual_seed(0)
        guide = guide_class(network)
        guide(X, y)
        optim = make(guide)
        svi = SVI(network, guide, optim, loss_of(kind))
        for k in range(8):
            if k == 4 and breaks:
                torch.save(
                    (guide.state_dict(), optim.get_state(), torch.get_rng_state()), tmp_path / "s"
                )
                guide = guide_class(network)
                guide(X, y)
                optim = make(guide)
                svi = SVI(network, guide, optim, loss_of(kind))
                guide_state, optim_state, rng = torch.load(tmp_path / "s", weights_only=False)
                guide.load_state_dict(guide_state)
                optim.set_state(optim_state)
                svi.loss_and_grads(network, guide, X, y)  # the first call of a loss prepares it
                for p in guide.parameters():
                    p.grad = None
                guide.take_curvature()
                torch.set_rng_state(rng)
            svi.step(X, y)
        return {k: v.detach().clone() for k, v in guide.state_dict().items()}

    whole, resumed = run(False), run(True)
    assert all(torch.equal(whole[k], resumed[k]) for k in whole)


@rules
@pytest.mark.parametrize("steps", [60, pytest.param(1_000, marks=pytest.mark.slow)])
def test_exploding_gradients_in_float32(make, guide_class, kind, steps):
    """Steps with data that explode now and then: parameters stay finite."""
    g = torch.Generator().manual_seed(0)
    X = torch.randn(8, 3, generator=g).float()
    torch.manual_seed(0)
    guide = guide_class(network)
    optim = make(guide)
    svi = SVI(network, guide, optim, loss_of(kind))
    svi.step(X, X[:, 0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of skipped steps, and of infinite losses
        warnings.simplefilter("ignore", UserWarning)
        for k in range(steps):
            svi.step(X, {0: 1e30, 1: 1e15, 2: 1e4}.get(k % 20, 1.0) * X[:, 0])
            assert all(torch.isfinite(p).all() for p in guide.parameters())
    assert all(p.dtype == torch.float32 for p in guide.parameters())
    assert optim.report().skipped < steps


def test_somebody_elses_write_restarts_the_average_and_not_the_rates():
    """The step after it is the one that would have been taken without averaging."""
    g = torch.Generator().manual_seed(0)
    X = torch.randn(9, 3, generator=g)
    steps = []
    for averaging in (False, True):
        torch.manual_seed(0)
        guide = ngvi.AutoMeanFieldNormal(network)
        optim = ngvi.optim.IVON(guide, averaging=averaging)
        svi = SVI(network, guide, optim, Trace_ELBO())
        for _ in range(8):
            svi.step(X, X[:, 0])
        with torch.no_grad():
            guide.loc.zero_()
            guide.log_scale.fill_(-2.0)
        svi.step(X, X[:, 0])
        steps.append(optim.report().step_norm)
    assert steps[0] == pytest.approx(steps[1], rel=1e-9)


def test_lists_of_guides_are_refused_where_curvature_is_needed():
    guide = AutoGuideList(network)
    guide.append(ngvi.AutoMeanFieldNormal(poutine.block(network, expose=["w1"])))
    guide.append(ngvi.AutoMeanFieldNormal(poutine.block(network, expose=["w2"])))
    with pytest.raises(ValueError, match="one guide over all latent sites only"):
        ngvi.optim.VOGN(guide)
    ngvi.optim.IVON(guide)


@rules
def test_a_loss_without_the_curvature_is_refused(make, guide_class, kind):
    X = torch.randn(5, 3)
    torch.manual_seed(0)
    guide = guide_class(network)
    if kind is None:
        return  # IVON reads what the gradient holds
    svi = SVI(network, guide, make(guide), Trace_ELBO())
    with pytest.raises(RuntimeError, match=f'the loss left none.*curvature="{kind}"'):
        svi.step(X, X[:, 0])


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda g: ngvi.optim.VON(g, lr=0.0), "lr must be in"),
        (lambda g: ngvi.optim.VON(g, curvature_lr=1.5), "curvature_lr"),
        (lambda g: ngvi.optim.VOGN(g, momentum=1.0), "momentum"),
        (lambda g: ngvi.optim.VOGN(g, damping=-1.0), "damping"),
        (lambda g: ngvi.optim.IVON(g, trust_radius=0.0), "trust_radius"),
        (lambda g: ngvi.optim.IVON(g, damping=0.1), "damping must be 0.0 for IVON, got 0.1"),
        (lambda g: ngvi.optim.Vadam(g, damping=0.1), "damping must be 0.0 for Vadam"),
        (
            lambda g: ngvi.optim.SLANG(ngvi.AutoFactorPrecision(network, 1), 0.1, safe=False),
            "safe must be True for SLANG",
        ),
        (lambda g: ngvi.optim.VON(ngvi.AutoFactorNormal(network, 1)), "AutoMeanFieldNormal"),
        (
            lambda g: ngvi.optim.IVON(ngvi.AutoFullRankNormal(network)),
            "IVON cannot step AutoFullRankNormal: its precision must be diagonal",
        ),
        (lambda g: ngvi.optim.Vadam(ngvi.AutoFullRankNormal(network)), "Vadam .*diagonal"),
        (
            lambda g: ngvi.optim.VOGN(network),
            "VOGN steps .* found none in network",
        ),
    ],
)
def test_bad_arguments(make, message):
    with pytest.raises(ValueError, match=message):
        make(ngvi.AutoMeanFieldNormal(network))


def test_rates():
    k = torch.tensor([0.0, 3.0])
    torch.testing.assert_close(
        rate_at(ngvi.optim.PowerDecay(0.5, 1.0), k), 0.5 / (1.0 + torch.tensor([0.0, 3.0]))
    )
    with pytest.raises(ValueError, match="power"):
        ngvi.optim.PowerDecay(0.5, 2.0)
