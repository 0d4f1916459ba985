"""Models with enumerated sites against the same models with these summed out by hand."""

from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import MCMC, NUTS, SVI
from pyro.infer.mcmc.util import initialize_model

import pyro_ngvi as ngvi

DISCRETE: Any = {"enumerate": "parallel"}
POINTS = torch.tensor([-2.3, -1.9, -3.1, -2.2, 2.5, 1.4, 2.2])
COUNTS = torch.tensor([0.0, 0, 0, 3, 1, 0, 2, 5, 0])
SERIES = torch.tensor([-0.4, 1.2, 0.3, -1.1, -0.7, 0.9])
SEEN = torch.tensor([[1.0, 0, 1, 0], [1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 1, 1]])


@pytest.fixture(autouse=True)
def _double(monkeypatch):
    torch.set_default_dtype(torch.float64)
    for name in ("POINTS", "COUNTS", "SERIES", "SEEN"):
        monkeypatch.setitem(globals(), name, globals()[name].double())
    pyro.clear_param_store()
    pyro.set_rng_seed(0)


def _mixture_latents():
    weights = pyro.sample("weights", dist.Dirichlet(torch.ones(2)))
    with pyro.plate("component", 2):
        loc = pyro.sample("loc", dist.Normal(torch.tensor([-1.0, 1.0]), 5.0))
    return weights, loc, pyro.sample("scale", dist.LogNormal(0.0, 1.0))


def mixture():
    weights, loc, scale = _mixture_latents()
    with pyro.plate("data", len(POINTS)):
        z = pyro.sample("z", dist.Categorical(weights), infer=DISCRETE)
        pyro.deterministic("mean", loc[z], event_dim=0)
        pyro.sample("y", dist.Normal(loc[z], scale), obs=POINTS)


def mixture_by_hand():
    weights, loc, scale = _mixture_latents()
    with pyro.plate("data", len(POINTS)):
        each = dist.Normal(loc, scale)
        pyro.sample("y", dist.MixtureSameFamily(dist.Categorical(weights), each), obs=POINTS)


def zero_inflated():
    gate = pyro.sample("gate", dist.Beta(2.0, 2.0))
    rate = pyro.sample("rate", dist.Gamma(2.0, 1.0))
    with pyro.plate("data", len(COUNTS)):
        z = pyro.sample("z", dist.Bernoulli(gate), infer=DISCRETE)
        pyro.sample("y", dist.Poisson(torch.where(z == 1, 1e-300, rate)), obs=COUNTS)


def zero_inflated_by_hand():
    gate = pyro.sample("gate", dist.Beta(2.0, 2.0))
    rate = pyro.sample("rate", dist.Gamma(2.0, 1.0))
    with pyro.plate("data", len(COUNTS)):
        pyro.sample("y", dist.ZeroInflatedPoisson(rate, gate=gate), obs=COUNTS)


def _chain_latents():
    transition = pyro.sample("transition", dist.Dirichlet(torch.ones(2, 2)).to_event(1))
    loc = pyro.sample("loc", dist.Normal(torch.tensor([-1.0, 1.0]), 1.0).to_event(1))
    return transition, loc


def chain():
    transition, loc = _chain_latents()
    x = 0
    for t in pyro.markov(range(len(SERIES))):
        x = pyro.sample(f"x_{t}", dist.Categorical(transition[x]), infer=DISCRETE)
        pyro.sample(f"y_{t}", dist.Normal(loc[x], 1.0), obs=SERIES[t])


def chain_by_hand():
    transition, loc = _chain_latents()
    forward = transition[0].log()
    for t, y in enumerate(SERIES):
        if t > 0:
            forward = (forward[:, None] + transition.log()).logsumexp(0)
        forward = forward + dist.Normal(loc, 1.0).log_prob(y)
    pyro.factor("y", forward.logsumexp(0))


def _survival():
    return pyro.sample("stay", dist.Uniform(0.0, 1.0)), pyro.sample("see", dist.Uniform(0.0, 1.0))


def capture_recapture():
    stay, see = _survival()
    with pyro.plate("animal", len(SEEN), dim=-1):
        z = torch.ones(len(SEEN))
        for t in pyro.markov(range(1, SEEN.shape[1])):
            z = pyro.sample(f"z_{t}", dist.Bernoulli(stay * z), infer=DISCRETE)
            pyro.sample(f"y_{t}", dist.Bernoulli(see * z), obs=SEEN[:, t])


def capture_recapture_by_hand():
    stay, see = _survival()
    alive, dead = torch.ones(len(SEEN)), torch.zeros(len(SEEN))
    for t in range(1, SEEN.shape[1]):
        y = SEEN[:, t]
        dead = (dead + alive * (1 - stay)) * (1 - y)
        alive = alive * stay * torch.where(y == 1, see, 1 - see)
    with pyro.plate("animal", len(SEEN)):
        pyro.factor("y", (alive + dead).log())


PAIRS = {
    "mixture": (mixture, mixture_by_hand),
    "zero_inflated": (zero_inflated, zero_inflated_by_hand),
    "chain": (chain, chain_by_hand),
    "capture_recapture": (capture_recapture, capture_recapture_by_hand),
}
pytestmark = pytest.mark.filterwarnings(  # torch's own, in derivatives under vmap
    "ignore:An output with one or more elements was resized:UserWarning"
)
pairs = pytest.mark.parametrize(("model", "by_hand"), PAIRS.values(), ids=PAIRS)


@pairs
def test_density_gradient_and_hessian(model, by_hand):
    ours, theirs = ngvi.diagnostics.ModelDensity(model), ngvi.diagnostics.ModelDensity(by_hand)
    theta = torch.randn(3, ours.dim)
    torch.testing.assert_close(ours(theta), theirs(theta), rtol=0, atol=1e-10)
    for derivative in (torch.func.grad, lambda f: torch.func.jacrev(torch.func.grad(f))):
        a, b = (derivative(lambda t, d=d: d(t[None])[0])(theta[0]) for d in (ours, theirs))
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pairs
def test_density_is_that_of_nuts(model, by_hand):
    density = ngvi.diagnostics.ModelDensity(model)
    theta = torch.randn(1, density.dim)
    _, potential, transforms, _ = initialize_model(model)
    values = density.unpack(theta)
    theirs = -potential({name: transforms[name](x[0]) for name, x in values.items()})
    torch.testing.assert_close(density(theta)[0], theirs, rtol=0, atol=1e-10)


@pairs
def test_guides_start_at_the_same_gaussian(model, by_hand):
    summed, written = (ngvi.AutoFullRankNormal(program) for program in (model, by_hand))
    summed()
    written()
    assert summed.start_report is not None
    torch.testing.assert_close(summed.loc, written.loc, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(summed.scale_tril, written.scale_tril, rtol=1e-4, atol=1e-4)


@pairs
@pytest.mark.parametrize("curvature", [None, "hessian"])
def test_loss_and_gradients(model, by_hand, curvature):
    results = []
    for program in (model, by_hand):
        guide = ngvi.AutoFullRankNormal(program, init=None)
        guide()
        pyro.set_rng_seed(1)
        loss = ngvi.BatchedELBO(4, curvature=curvature)
        value = loss.loss_and_grads(program, guide)
        left: Any = guide.take_curvature()
        parts = left.parts if curvature else {}
        grads = [p.grad for p in guide.natural_params().values()]
        results.append([value, *grads, *parts.values()])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pairs
def test_khat(model, by_hand):
    guide = ngvi.AutoFullRankNormal(model)
    guide()
    ours, theirs = (ngvi.khat(m, guide, num_samples=100, seed=0) for m in (model, by_hand))
    assert abs(ours.khat - theirs.khat) < 1e-8
    torch.testing.assert_close(*map(torch.tensor, (ours.log_weights, theirs.log_weights)))


@pytest.mark.parametrize("discrete", [False, True])
def test_arviz_of_a_mixture(discrete):
    guide = ngvi.AutoFullRankNormal(mixture)
    guide()
    how: Any = {"num_samples": 30, "seed": 0}
    ours = ngvi.to_arviz(mixture, guide, discrete=discrete, **how)
    theirs = ngvi.to_arviz(mixture_by_hand, guide, **how)
    a, b = (torch.tensor(x["log_likelihood"]["y"].values) for x in (ours, theirs))
    torch.testing.assert_close(a, b, rtol=0, atol=1e-10)
    posterior = ours["posterior"]
    assert {"z", "mean"} <= set(posterior) if discrete else not {"z", "mean"} & set(posterior)
    if discrete:
        assert posterior["z"].dims == ("chain", "draw", "data")
        z, loc = (torch.tensor(posterior[name].values[0]) for name in ("z", "loc"))
        mean = torch.tensor(posterior["mean"].values[0])
        torch.testing.assert_close(mean, loc.gather(1, z.long()))


def test_predictions_know_discrete_draws_that_data_have_in_common():
    x = torch.linspace(-2.0, 2.0, 30)

    def model(x, y=None):
        a = pyro.sample("a", dist.Normal(0.0, 3.0))
        up = pyro.sample("up", dist.Bernoulli(0.5), infer=DISCRETE)
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(a + (4 * up - 2) * x, 0.5), obs=y)

    fit = ngvi.fit(model, x, 1 + 2 * x, seed=0, progress=False)  # P(up = 1 | y) is 1 but for e^-900
    new = torch.tensor([-1.0, 0.0, 1.0])
    with pytest.warns(UserWarning, match="share an enumerated variable"):
        kept = fit.to_arviz(discrete=True, num_samples=200, seed=0, predictions=(new,))
    draws = {n: torch.from_numpy(kept["posterior"][n].values[0]) for n in ("a", "up")}
    known = [ngvi.predict(model, k, new, seed=1)["y"] for k in (kept, draws)]
    known.append(torch.from_numpy(kept["predictions"]["y"].values[0]))
    for y in known:
        # the mean of 200 has a standard error of .036
        torch.testing.assert_close(y.mean(0), 1 + 2 * new, rtol=0, atol=0.15)
    anew = ngvi.predict(model, kept, new, seed=1, from_prior=["up"])["y"]
    assert anew.std(0)[0] > 1.5
    with pytest.warns(UserWarning, match="'up': summed out, and drawn from the prior here"):
        fit.predict(new, num_samples=20)
    with pytest.warns(UserWarning, match="posterior_predictive draws 'up'"):
        fit.to_arviz(num_samples=50, log_likelihood=False)


def test_discrete_draws_have_the_exact_probabilities():
    def model():
        x = pyro.sample("x", dist.Normal(0.0, 1e-9))
        with pyro.plate("data", 3):
            z = pyro.sample("z", dist.Bernoulli(0.3), infer=DISCRETE)
            pyro.sample("y", dist.Normal(z + x, 1.0), obs=torch.tensor([-1.0, 0.5, 1.5]))

    guide = ngvi.AutoMeanFieldNormal(model, init_scale=1e-9)
    guide()
    drawn = ngvi.to_arviz(model, guide, num_samples=300, seed=0, discrete=True)["posterior"]["z"]
    odds = 0.3 / 0.7 * torch.tensor([-1.5, 0.0, 1.0]).exp()
    exact = odds / (1 + odds)
    error = (exact * (1 - exact) / 300).sqrt()
    assert ((torch.tensor(drawn.values[0]).mean(0) - exact).abs() < 4 * error).all()


def test_arviz_of_series():
    guide = ngvi.AutoFullRankNormal(capture_recapture)
    guide()
    data = ngvi.to_arviz(capture_recapture, guide, num_samples=30, seed=0)
    each = data["log_likelihood"]["y_1..y_3_by_animal"]
    assert each.dims == ("chain", "draw", "animal")
    density = ngvi.diagnostics.ModelDensity(capture_recapture_by_hand)
    at = {name: torch.tensor(data["posterior"][name].values[0]) for name in ("stay", "see")}
    theirs = density.trace(density.pack(at)).sites["y"].log_prob
    torch.testing.assert_close(torch.tensor(each.values[0]), theirs, rtol=0, atol=1e-10)

    guide = ngvi.AutoFullRankNormal(chain)
    guide()
    with pytest.warns(UserWarning, match="no likelihood by example"):
        data = ngvi.to_arviz(chain, guide, num_samples=30, seed=0)
    groups: Any = data.groups() if callable(data.groups) else data.groups
    assert "log_likelihood" not in groups


def test_latents_whose_prior_depends_on_enumerated_sites():
    sds = torch.tensor([0.1, 3.0])

    def spike_and_slab(by_hand=False):
        share = pyro.sample("share", dist.Beta(2.0, 2.0))
        with pyro.plate("data", 3):
            if by_hand:
                b = pyro.sample("b", dist.Normal(0.0, 1.0).mask(False))
                each = dist.Categorical(torch.stack([1 - share, share]))
                mixed = dist.MixtureSameFamily(each, dist.Normal(0.0, sds))
                pyro.factor("prior", mixed.log_prob(b))
            else:
                z = pyro.sample("z", dist.Bernoulli(share), infer=DISCRETE)
                b = pyro.sample("b", dist.Normal(0.0, sds[z.long()]))
            pyro.sample("y", dist.Normal(b, 1.0), obs=torch.tensor([0.1, 2.0, -3.0]))

    ours = ngvi.diagnostics.ModelDensity(spike_and_slab)
    theirs = ngvi.diagnostics.ModelDensity(spike_and_slab, kwargs={"by_hand": True})
    theta = torch.randn(4, ours.dim)
    torch.testing.assert_close(ours(theta), theirs(theta), rtol=0, atol=1e-10)


def test_minibatches_scale_the_logarithm_of_the_sum():
    def model():
        loc = pyro.sample("loc", dist.Normal(0.0, 1.0))
        with pyro.plate("data", 6, subsample=torch.tensor([1, 4])):
            z = pyro.sample("z", dist.Bernoulli(0.3), infer=DISCRETE)
            pyro.sample("y", dist.Normal(loc + z, 1.0), obs=torch.tensor([0.2, 1.0]))

    density = ngvi.diagnostics.ModelDensity(model)
    loc = torch.tensor([0.4])
    each = torch.stack(
        [dist.Normal(0.4 + z, 1.0).log_prob(torch.tensor([0.2, 1.0])) for z in (0, 1)]
    )
    sums = (each + torch.tensor([[0.7], [0.3]]).log()).logsumexp(0).sum()
    exact = dist.Normal(0.0, 1.0).log_prob(loc)[0] + 3.0 * sums
    torch.testing.assert_close(density(loc[None])[0], exact)


def test_scales_that_differ_are_refused():
    def model():
        loc = pyro.sample("loc", dist.Normal(0.0, 1.0))
        z = pyro.sample("z", dist.Bernoulli(0.3), infer=DISCRETE)
        with pyro.poutine.scale(scale=2.0):
            pyro.sample("y", dist.Normal(loc + z, 1.0), obs=torch.tensor(0.2))

    with pytest.raises(ValueError, match="not their scale"):
        ngvi.diagnostics.ModelDensity(model)(torch.zeros(1, 1))


def test_neutra_runs_under_nuts():
    guide = ngvi.AutoFullRankNormal(mixture)
    svi = SVI(mixture, guide, ngvi.NGVB(guide), ngvi.BatchedELBO(4))
    for _ in range(5):
        svi.step()
    reparameterised = ngvi.neutra(mixture, guide)
    kernel = NUTS(reparameterised, max_tree_depth=3)
    chain = MCMC(kernel, 5, warmup_steps=5, disable_progbar=True)
    chain.run()
    draws = reparameterised.transform_sample(chain.get_samples())
    assert draws["loc"].shape == (5, 2)
    noise = torch.randn(2, 4)
    _, potential, _, _ = initialize_model(reparameterised)
    density = ngvi.diagnostics.ModelDensity(mixture_by_hand)
    z = reparameterised.transform(noise)
    theirs = density(z.detach()) + reparameterised.transform.log_abs_det_jacobian(noise, z)
    ours = torch.stack([-potential({reparameterised.name: x}) for x in noise])
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)
