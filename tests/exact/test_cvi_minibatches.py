"""CVI by minibatches, and with more latent variables than data: the same fixed point."""

from functools import cache
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI
from torch import Tensor

import pyro_ngvi as ngvi
from tests.covering import covering
from tests.exact.site_cases import Fit, Linear, N, covariates, fit, normal_weights, seeded

D, B = 3, 10


def data() -> tuple[Tensor, Tensor]:
    X = covariates()
    return X, (X.sum(-1) + torch.randn(N, generator=seeded(8)) > 0).to(X)


def full(X: Tensor, y: Tensor) -> None:
    w = normal_weights(X.shape[1])
    with pyro.plate("data", len(X)):
        pyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)


def drawn(X: Tensor, y: Tensor, size: int = B) -> None:
    """The plate draws its own minibatch."""
    w = normal_weights(X.shape[1])
    with pyro.plate("data", len(X), subsample_size=size) as i:
        pyro.sample("y", dist.Bernoulli(logits=X[i] @ w), obs=y[i])


def given(X: Tensor, y: Tensor, i: Tensor) -> None:
    """A loader hands over the rows and their numbers."""
    w = normal_weights(X.shape[1])
    with pyro.plate("data", N, subsample=i):
        pyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)


def made(model: Any, lr: float = 1.0) -> tuple[Any, Any]:
    guide = ngvi.AutoSites(model)
    return guide, SVI(model, guide, ngvi.CVI(guide, lr=lr), ngvi.SitesELBO())


def assert_same(guide: Any, reference: Fit, *args: Any, tolerance: float = 1e-8) -> None:
    ours, theirs = guide.get_posterior(*args), reference.guide.get_posterior()
    assert (ours.mean - theirs.mean).abs().max() < tolerance
    assert (ours.covariance_matrix - theirs.covariance_matrix).abs().max() < tolerance
    sites, others = guide.sites()["y"], reference.guide.sites()["y"]
    assert (sites.precision - others.precision).abs().max() < tolerance
    assert (sites.linear - others.linear).abs().max() < tolerance


@cache
def sweeps_of_all_data() -> Fit:
    return fit(full, *data(), sweeps=20)


@pytest.fixture
def reference() -> Fit:
    return sweeps_of_all_data()


def test_the_plate_draws(reference: Fit) -> None:
    torch.manual_seed(0)
    guide, svi = made(drawn)
    for _ in range(100):
        svi.step(*data())
    assert_same(guide, reference, *data())
    # the average over minibatches of the unbiased estimate is the bound of all data
    losses = torch.tensor([svi.evaluate_loss(*data()) for _ in range(80)])
    error = losses.std() / len(losses) ** 0.5
    assert abs(losses.mean() - reference.losses[-1]) < 4.0 * error


@pytest.mark.parametrize(
    ("order", "twice"),
    covering(["in order", "shuffled", "reversed"], [False, True], strength=1),
)
def test_numbers_are_given(reference: Fit, order: str, twice: bool) -> None:
    X, y = data()
    generator = seeded(1)
    guide, svi = made(given)
    for _ in range(16):
        numbers = {
            "in order": torch.arange(N),
            "shuffled": torch.randperm(N, generator=generator),
            "reversed": torch.arange(N).flip(0),
        }[order]
        for i in numbers.split(16):  # the last one is shorter
            i = torch.cat([i, i[:3]]) if twice else i
            svi.step(X[i], y[i], i)
    assert_same(guide, reference, X, y, torch.arange(N))


def subsampled(X: Tensor, y: Tensor) -> None:
    w = normal_weights(X.shape[1])
    with pyro.plate("data", len(X), subsample_size=B):
        X, y = pyro.subsample(X, event_dim=1), pyro.subsample(y, event_dim=0)
        pyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)


def listed(X: Tensor, y: Tensor) -> None:
    w = normal_weights(X.shape[1])
    with pyro.plate("data", len(X), subsample_size=B) as i:
        rows: Any = list(map(int, i))  # pyright: ignore[reportArgumentType]
        pyro.sample("y", dist.Bernoulli(logits=X[rows] @ w), obs=y[rows])


def test_a_single_datum_whose_number_goes_into_python() -> None:
    X, y = (x[:10] for x in data())

    def one(X: Tensor, y: Tensor) -> None:
        w = normal_weights(X.shape[1])
        with pyro.plate("data", len(X), subsample_size=1) as i:
            k = int(i)  # pyright: ignore[reportArgumentType]
            pyro.sample("y", dist.Normal(X[k : k + 1] @ w, 1.0), obs=y[k : k + 1])

    guide, svi = made(one)
    for _ in range(100):  # which leave none of ten unseen but for 3e-4
        svi.step(X, y)
    precision = torch.eye(X.shape[1]).to(X) + X.T @ X
    exact = torch.linalg.solve(precision, X.T @ y)
    torch.testing.assert_close(guide.get_posterior(X, y).mean, exact, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("model", [subsampled, listed])
def test_models_look_at_the_numbers_in_several_ways(model: Any) -> None:
    """With the same minibatches each has the steps of the model above."""
    found = []
    for each in (drawn, model):
        pyro.set_rng_seed(0)
        guide, svi = made(each)
        losses = [svi.step(*data()) for _ in range(15)]
        q = guide.get_posterior(*data())
        found.append((torch.tensor(losses), q.mean, q.covariance_matrix))
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-10)


def test_numbers_go_through_bayesianize(reference: Fit) -> None:
    X, y = data()
    linear = torch.nn.Linear(X.shape[1], 1, bias=False)
    generator = seeded(1)
    guide, svi = made(ngvi.nn.bayesianize(linear, "bernoulli", num_data=N))
    for _ in range(25):
        for i in torch.randperm(N, generator=generator).split(16):
            svi.step(X[i], y[i], i)
    assert_same(guide, reference, X, y)


def test_all_data_in_another_order_each_time(reference: Fit) -> None:
    """A loader whose batch holds all data shuffles them too."""
    X, y = data()
    guide, svi = made(given)
    for _ in range(20):
        i = torch.randperm(N, generator=seeded(2))
        svi.step(X[i], y[i], i)
    assert_same(guide, reference, X, y, torch.arange(N))


@pytest.mark.parametrize("lr", [1.0, 0.3])
def test_one_round_is_exact_where_the_model_is_conjugate(lr: float) -> None:
    X, _ = data()
    y = X.sum(-1)

    def model(X: Tensor, y: Tensor, i: Tensor) -> None:
        w = normal_weights(D)
        with pyro.plate("data", N, subsample=i):
            pyro.sample("y", dist.Normal(X @ w, 0.5), obs=y)

    guide, svi = made(model, lr)
    for i in torch.randperm(N, generator=seeded(3)).split(7):
        svi.step(X[i], y[i], i)
    every = torch.arange(N)
    linear = Linear(torch.zeros(D), torch.eye(D), X, torch.zeros(N))
    mean, covariance = linear.posterior(4.0 * y, torch.full((N,), 4.0))
    q = guide.get_posterior(X, y, every)
    assert (q.mean - mean).abs().max() < 1e-10
    assert (q.covariance_matrix - covariance).abs().max() < 1e-10
    assert abs(svi.evaluate_loss(X, y, every) + linear.evidence(y, 0.5)) < 1e-9


def test_both_plates_of_a_table() -> None:
    """Rows and columns are drawn; a site a cell."""
    Y = torch.randn(6, 5, generator=seeded(4)) + 1.0

    def model(Y: Tensor, rows: int, columns: int) -> None:
        m: Any = pyro.sample("m", dist.Normal(0.0, 1.0))
        a = pyro.plate("rows", 6, subsample_size=rows, dim=-2)
        b = pyro.plate("columns", 5, subsample_size=columns, dim=-1)
        with a as i, b as j:
            pyro.sample("y", dist.Normal(m, 0.7), obs=Y[i][:, j])

    torch.manual_seed(0)
    guide, svi = made(model)
    for _ in range(60):
        svi.step(Y, 4, 3)
    precision = 1.0 + 30 / 0.49
    q = guide.get_posterior(Y, 4, 3)
    assert abs(q.variance - 1.0 / precision).max() < 1e-12
    assert abs(q.mean - Y.sum() / 0.49 / precision).max() < 1e-12


@pytest.mark.parametrize("first", [N, B], ids=["all first", "few first"])
def test_minibatches_and_all_data_in_turn(reference: Fit, first: int) -> None:
    """The size is an argument of the model; the structure found at one holds at the other."""
    torch.manual_seed(0)
    guide, svi = made(drawn)
    for size in (first, *([B] * 60), *([N] * 12)):
        loss = svi.step(*data(), size)
    assert abs(loss - reference.losses[-1]) < 1e-8
    assert_same(guide, reference, *data(), N)
    guide.refresh(*data(), N)
    assert_same(guide, reference, *data(), N)


def test_covariates_on_another_scale_in_float32() -> None:
    """A large column does not hide that a minibatch has other rows."""
    X, _ = data()
    y = X[:, 1:].sum(-1)
    torch.set_default_dtype(torch.float32)
    Z = torch.cat([1000.0 + X[:, :1], X[:, 1:]], -1).float()

    def model(Z: Tensor, y: Tensor, i: Tensor) -> None:
        w = normal_weights(D)
        with pyro.plate("data", N, subsample=i):
            pyro.sample("y", dist.Normal(Z @ w, 0.5), obs=y)

    guide, svi = made(model)
    for _ in range(2):
        for i in torch.arange(N).split(B):
            svi.step(Z[i], y[i].float(), i)
    linear = Linear(
        torch.zeros(D).double(), torch.eye(D).double(), Z.double(), torch.zeros(N).double()
    )
    mean, _ = linear.posterior(4.0 * y, torch.full((N,), 4.0, dtype=torch.float64))
    assert (guide.get_posterior(Z[i], y[i].float(), i).mean - mean)[1:].abs().max() < 0.02


# --- more latent variables than data


def wide() -> tuple[Tensor, Tensor]:
    X = torch.randn(12, 30, generator=seeded(5)) / 3.0
    return X, (X[:, 0] > 0).to(X)


def test_only_directions_that_data_see_are_kept() -> None:
    X, y = wide()
    run = fit(full, X, y, sweeps=12)
    assert run.guide.algebra.precision.shape == (12, 12)
    sites = run.guide.sites()["y"]
    linear = Linear(torch.zeros(30), torch.eye(30), X, torch.zeros(12))
    mean, covariance = linear.posterior(sites.linear[:, 0], sites.precision[:, 0, 0])
    q = run.guide.get_posterior()
    assert (q.mean - mean).abs().max() < 1e-12
    assert (q.covariance_matrix - covariance).abs().max() < 1e-12


def test_the_guide_that_keeps_all_directions_agrees() -> None:
    X, y = wide()
    run = fit(full, X, y, sweeps=12)

    def model(X: Tensor, y: Tensor, i: Tensor) -> None:
        w = normal_weights(30)
        with pyro.plate("data", 12, subsample=i):
            pyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)

    guide, svi = made(model)
    for _ in range(12):
        for i in torch.arange(12).split(6):
            svi.step(X[i], y[i], i)
    assert guide.algebra.basis is None
    assert_same(guide, run, X, y, torch.arange(12))
    loss = svi.evaluate_loss(X, y, torch.arange(12))
    assert abs(loss - run.losses[-1]) < 1e-9


def test_draws_in_the_reduced_directions() -> None:
    """Moments of draws within four standard errors, and log q of draws by the dense Gaussian."""
    X, y = wide()
    run = fit(full, X, y, sweeps=12)
    q = run.guide.get_posterior()
    torch.manual_seed(0)
    draws, weights = [], []
    for _ in range(400):
        trace = pyro.poutine.trace(run.guide).get_trace(X, y)
        z = trace.nodes["w"]["value"].detach()
        draws.append(z)
        weights.append(trace.log_prob_sum() - q.log_prob(z))
    assert torch.stack(weights).abs().max() < 1e-9
    z = torch.stack(draws)
    error = (q.variance / len(z)).sqrt()
    assert ((z.mean(0) - q.mean) / error).abs().max() < 4.5
    assert ((z.var(0) / q.variance - 1.0) / (2.0 / len(z)) ** 0.5).abs().max() < 4.5
