"""AutoSites on a state-space prior: the same posterior as the dense algebra on the same Gaussian."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO
from pyro.optim import SGD  # pyright: ignore[reportAttributeAccessIssue]

import pyro_ngvi as ngvi
from pyro_ngvi.distributions import GaussianStateSpace, local_level, matern_state_space
from tests.covering import covering

T = 40


def series(seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 0.3 * torch.randn(T, generator=generator).cumsum(0)


def times() -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.rand(T, generator=generator).cumsum(0)


def likelihood(kind: str, f: torch.Tensor, y: torch.Tensor) -> None:
    families = {
        "normal": lambda: dist.Normal(f, 0.5),
        "poisson": lambda: dist.Poisson(torch.exp(f)),
        "student": lambda: dist.StudentT(4.0, f, 0.5),
    }
    with pyro.plate("time", len(y)):
        pyro.sample("y", families[kind](), obs=y)


def observations(kind: str) -> torch.Tensor:
    f = series()
    return torch.poisson(torch.exp(f)) if kind == "poisson" else f


def fitted(model, *args, sweeps: int = 30, others=None):
    guide = ngvi.AutoSites(model)
    svi = SVI(model, guide, ngvi.CVI(guide, others=others), ngvi.SitesELBO())
    losses = [svi.step(*args) for _ in range(sweeps)]
    return guide, losses


def test_gaussian_data_are_exact_after_one_sweep():
    def model(y):
        s = pyro.sample("s", local_level(len(y), initial_scale=2.0, step_scale=0.3))
        likelihood("normal", s[..., 0], y)

    y = series()
    guide, losses = fitted(model, y, sweeps=2)
    t = torch.arange(T, dtype=y.dtype)
    prior = 4.0 + 0.09 * torch.minimum(t[:, None], t)
    evidence = prior + 0.25 * torch.eye(T)
    exact = dist.MultivariateNormal(torch.zeros(T), evidence).log_prob(y)
    assert abs(losses[1] + exact.item()) < 1e-10
    mean = prior @ torch.linalg.solve(evidence, y)
    variance = (prior - prior @ torch.linalg.solve(evidence, prior)).diagonal()
    q = guide.get_posterior()
    assert torch.allclose(q.mean[:, 0], mean, atol=1e-10, rtol=0)
    assert torch.allclose(q.variance[:, 0], variance, atol=1e-10, rtol=0)
    # a draw of an exact posterior has the evidence as its weight, whatever it is
    assert abs(Trace_ELBO().loss(model, guide, y) + exact.item()) < 1e-9


@pytest.mark.parametrize(
    ("nu", "kind"), covering([0.5, 1.5, 2.5], ["poisson", "student"], strength=1)
)
def test_the_dense_algebra_finds_the_same(kind, nu):
    chain = matern_state_space(times(), torch.tensor(2.0), torch.tensor(1.3), nu=nu)
    size = chain.event_shape.numel()
    noise = torch.eye(size, dtype=torch.get_default_dtype()).reshape(size, *chain.event_shape)
    root = chain.from_noise(noise).reshape(size, size).mT

    def markov(y):
        s = pyro.sample("s", chain)
        likelihood(kind, s[..., 0] + 0.2, y)

    def dense(y):
        s = pyro.sample("s", dist.MultivariateNormal(torch.zeros(size), scale_tril=root))
        likelihood(kind, s.reshape(chain.event_shape)[:, 0] + 0.2, y)

    y = observations(kind)
    guide, losses = fitted(markov, y)
    other, dense_losses = fitted(dense, y)
    assert type(guide.algebra).__name__ == "ChainAlgebra"
    assert losses == pytest.approx(dense_losses, abs=1e-7)
    posterior = other.get_posterior()
    assert torch.allclose(guide.median()["s"].reshape(-1), posterior.mean, atol=1e-6)
    sd = guide.quantiles([0.5, 0.84134474606854])["s"].diff(dim=0)[0].reshape(-1)
    assert torch.allclose(sd, posterior.variance.sqrt(), atol=1e-6)


def test_times_without_data_are_nan():
    def model(y):
        s = pyro.sample("s", local_level(len(y), initial_scale=2.0, step_scale=0.3))
        likelihood("normal", s[..., 0], y)

    y = series()
    longer = torch.cat([y, torch.full((5,), torch.nan)])
    guide, losses = fitted(model, y, sweeps=2)
    ahead, more = fitted(model, longer, sweeps=2)
    assert more[1] == pytest.approx(losses[1], abs=1e-10)
    assert torch.allclose(ahead.get_posterior().mean[:T], guide.get_posterior().mean, atol=1e-10)
    forecast = guide.get_posterior().variance[-1, 0] + 0.09 * torch.arange(1, 6)
    assert torch.allclose(ahead.get_posterior().variance[T:, 0], forecast, atol=1e-10)


def test_hyperparameters_follow_the_evidence():
    """With Gaussian data the ELBO after a sweep is the evidence, and so is its gradient."""
    pyro.clear_param_store()
    when, y = times(), series()

    def model(y):
        length = pyro.param("length", torch.tensor(1.0), constraint=dist.constraints.positive)
        s = pyro.sample("s", matern_state_space(when, length, torch.tensor(1.3), nu=1.5))
        likelihood("normal", s[..., 0], y)

    guide, _ = fitted(model, y, sweeps=1, others=SGD({"lr": 0.0}))
    leaf = dict(pyro.get_param_store().named_parameters())["length"]
    leaf.grad = None
    ngvi.SitesELBO().loss_and_grads(model, guide, y)
    log_length = torch.zeros((), requires_grad=True)
    scaled = 3**0.5 * (when[:, None] - when).abs() / log_length.exp()
    kernel = 1.3 * (1.0 + scaled) * torch.exp(-scaled) + 0.25 * torch.eye(T)
    loss = -dist.MultivariateNormal(torch.zeros(T), kernel).log_prob(y)
    loss.backward()
    assert leaf.grad is not None and log_length.grad is not None
    assert leaf.grad.item() == pytest.approx(log_length.grad.item(), abs=1e-8)


def test_a_predictor_of_two_states_is_refused():
    def model(y):
        s = pyro.sample("s", local_level(len(y), initial_scale=2.0, step_scale=0.3))
        likelihood("normal", s[..., 0].cumsum(0), y)

    with pytest.raises(ValueError, match="depends on other states than that of time t"):
        ngvi.AutoSites(model)(series())


def test_another_number_of_data_than_states_is_refused():
    def model(y):
        s = pyro.sample("s", local_level(T + 1, initial_scale=2.0, step_scale=0.3))
        likelihood("normal", s[1:, 0], y)

    with pytest.raises(ValueError, match=r"has 41 states.*NaN"):
        ngvi.AutoSites(model)(series())


def test_a_minibatch_is_refused():
    def model(y, index):
        s = pyro.sample("s", local_level(T, initial_scale=2.0, step_scale=0.3))
        with pyro.plate("time", T, subsample=index):
            pyro.sample("y", dist.Normal(s[index, 0], 0.5), obs=y[index])

    guide = ngvi.AutoSites(model)
    svi = SVI(model, guide, ngvi.CVI(guide), ngvi.SitesELBO())
    with pytest.raises(ValueError, match="not a minibatch"):
        svi.step(series(), torch.arange(5))


def test_several_chains_are_refused():
    def model(y):
        with pyro.plate("series", 2):
            s = pyro.sample("s", local_level(T, initial_scale=2.0, step_scale=0.3))
        with pyro.plate("rows", 2, dim=-2), pyro.plate("time", T, dim=-1):
            pyro.sample("y", dist.Normal(s[..., 0], 0.5), obs=y)

    with pytest.raises(ValueError, match=r"'s' has shape \(2, \d+, 1\), several chains"):
        ngvi.AutoSites(model)(series().expand(2, -1))


def test_a_chain_beside_another_site_takes_the_dense_algebra():
    def model(y):
        level = pyro.sample("level", dist.Normal(0.0, 2.0))
        s = pyro.sample(
            "s",
            GaussianStateSpace(
                torch.zeros(1), torch.eye(1), torch.eye(1), torch.eye(1), num_steps=T
            ),
        )
        likelihood("normal", level + s[..., 0], y)

    guide, losses = fitted(model, series(), sweeps=3)
    assert type(guide.algebra).__name__ == "DenseAlgebra"
    assert losses[2] == pytest.approx(losses[1], abs=1e-9)
