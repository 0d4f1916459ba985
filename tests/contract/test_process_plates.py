"""A GaussianProcess under plates: independent draws in vectorised ones, refused in that of its data."""

from typing import Any

import pyro
import pyro.contrib.gp as gp
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Predictive
from torch import Tensor

import pyro_ngvi as ngvi
from pyro_ngvi.distributions import GaussianProcess

N, S = 12, 1000
X = torch.linspace(0.0, 1.0, N, dtype=torch.float64).unsqueeze(-1)


def process(inputs: Tensor) -> GaussianProcess:
    kernel = gp.kernels.Matern32(1, lengthscale=torch.tensor(0.3)).requires_grad_(False)
    return GaussianProcess(kernel, inputs, 0.5)


def model(X: Tensor, y: Tensor | None = None) -> None:
    f: Any = pyro.sample("f", process(X))
    with pyro.plate("data", len(X)):
        pyro.sample("y", dist.Normal(f, 0.3), obs=y)


def test_expanded_it_is_as_many_independent_draws() -> None:
    plain = process(X)
    many = plain.expand(torch.Size((3, 1)))
    dense = dist.MultivariateNormal(plain.loc, plain.covariance_matrix)
    assert many.batch_shape == (3, 1) and many.event_shape == (N,)
    draws = many.rsample(torch.Size((5,)))
    assert draws.shape == (5, 3, 1, N)
    assert not torch.equal(draws[0, 0], draws[0, 1])
    assert torch.allclose(many.log_prob(draws), dense.log_prob(draws), rtol=0.0, atol=1e-8)
    assert many.log_prob(draws[0, 0, 0]).shape == (3, 1)
    for ours, theirs in ((many.mean, dense.mean), (many.variance, dense.variance)):
        assert torch.allclose(ours, theirs.expand(3, 1, N), rtol=0.0, atol=1e-10)


@pytest.mark.parametrize("inducing", [None, X[::2]], ids=["dense", "inducing"])
@pytest.mark.parametrize(
    "new", [X, torch.tensor([[0.21], [0.77], [1.4]]).double()], ids=["old", "new"]
)
def test_predictive_in_parallel(inducing: Tensor | None, new: Tensor) -> None:
    """Moments are those of ``predict``, within five standard errors; no two draws are the same."""
    y = (6.0 * X[:, 0]).sin()
    guide = ngvi.AutoSites(model, inducing=inducing)
    svi: Any = SVI(model, guide, ngvi.CVI(guide), ngvi.SitesELBO())
    svi.step(X, y)
    mean, variance = guide.predict(new)["f"]
    drawn = Predictive(model, guide=guide, num_samples=S, parallel=True)(new)
    f = drawn["f"].reshape(S, len(new))
    assert len(f[:, 0].unique()) == S
    assert drawn["y"].shape == (S, len(new))
    assert ((f.mean(0) - mean).abs() < 5.0 * (variance / S).sqrt()).all()
    noise = (drawn["y"] - f) / 0.3  # each y is drawn at its own f
    assert (noise.mean(0).abs() < 5.0 / S**0.5).all()
    assert ((noise.square().mean(0) - 1.0).abs() < 5.0 * (2.0 / S) ** 0.5).all()


def test_in_the_plate_of_its_data_it_is_refused() -> None:
    with pytest.raises(ValueError, match="Take its site out of the plate"):
        process(X).expand(torch.Size((N,)))


def test_sites_take_no_independent_processes_of_one_site() -> None:
    def several(y: Tensor) -> None:
        with pyro.plate("classes", 3):
            f: Any = pyro.sample("f", process(X))
        with pyro.plate("data", N):
            pyro.sample("y", dist.Categorical(logits=f.mT), obs=y)

    with pytest.raises(ValueError, match="independent processes are sites of their own"):
        ngvi.AutoSites(several)(torch.arange(N) % 3)
