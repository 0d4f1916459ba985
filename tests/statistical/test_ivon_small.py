"""IVON's defaults: they learn variances from a start 30 times too wide, and keep a latent noise sd."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import init_to_value

import pyro_ngvi as ngvi

N, D, SEEDS = 50, 3, 6


@pytest.mark.slow
@pytest.mark.parametrize("init_scale", [0.01, 3.0])
def test_fifty_points(init_scale):
    """Mean over seeds against the mean-field optimum, precision diag(X'X / s^2 + 1), exactly."""
    g = torch.Generator().manual_seed(0)
    X = torch.randn(N, D, generator=g)
    X[:, 2] += 0.5 * X[:, 1]
    y = X @ torch.tensor([1.0, -0.5, 0.3]) + 0.5 * torch.randn(N, generator=g)
    H = X.T @ X / 0.25 + torch.eye(D)
    mean, sd = torch.linalg.solve(H, X.T @ y / 0.25), H.diagonal().rsqrt()

    def model():
        w = pyro.sample("w", dist.Normal(torch.zeros(D), 1.0).to_event(1))
        with pyro.plate("data", N):
            pyro.sample("y", dist.Normal((X * w.unsqueeze(-2)).sum(-1), 0.5), obs=y)

    log_ratios, errors = [], []
    for seed in range(SEEDS):
        torch.manual_seed(seed)
        guide = ngvi.AutoMeanFieldNormal(model, init_scale=init_scale)
        svi = SVI(model, guide, ngvi.optim.IVON(guide), Trace_ELBO())
        for _ in range(1_000):
            svi.step()
        q = guide.get_posterior()
        log_ratios.append((q.variance.sqrt() / sd).log().detach())
        errors.append(((q.mean - mean) / sd).detach())
    for values in (torch.stack(log_ratios), torch.stack(errors)):
        # single runs stay within 30 %, and their average has no bias beyond its standard error
        assert values.abs().max() < 0.3
        error = values.std(0) / SEEDS**0.5
        assert (values.mean(0).abs() < 0.02 + 4.0 * error).all()


@pytest.mark.parametrize("seed", [3, 6, 7])
def test_a_stiff_entry_among_many_is_not_thrown_away(seed):
    """A latent noise sd, start 1, truth 0.1, beside 400 weights, minibatches of 100 of 5,000 rows.

    The curvature in its log is 2 N = 10,000 and the start has 100.  In these steps the largest log sd
    over seeds 0 to 9 is 0.36; with a bound on the whole step these seeds have 204, 77 and 19.
    """
    rows, batch, weights = 5_000, 100, 400
    g = torch.Generator().manual_seed(seed)
    X = torch.randn(rows, weights, generator=g) / weights**0.5
    y = X[:, 0] + 0.1 * torch.randn(rows, generator=g)

    def model(X, y):
        sd = pyro.sample("sd", dist.HalfCauchy(1.0))
        w = pyro.sample("w", dist.Normal(torch.zeros(weights), 1.0).to_event(1))
        with pyro.plate("data", rows, subsample=torch.arange(len(y))):
            pyro.sample("y", dist.Normal(X @ w, sd), obs=y)

    torch.manual_seed(seed)
    start = init_to_value(values={"sd": torch.ones(()), "w": torch.zeros(weights)})
    guide = ngvi.AutoMeanFieldNormal(model, init_scale=0.1, init_loc_fn=start)
    svi = SVI(model, guide, ngvi.optim.IVON(guide), Trace_ELBO())
    for _ in range(100):
        index = torch.randint(rows, (batch,))
        svi.step(X[index], y[index])
        assert guide.median()["sd"].log() < 1.5
