"""A log_prob that was broadcast to a wrong shape is refused, with the site and the shapes."""

from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from torch import Tensor

from pyro_ngvi.losses import BatchedELBO

N = 5
Y = torch.arange(float(N), dtype=torch.float64)


def normal_guide(*args: Any) -> None:
    pyro.sample("w", dist.Normal(pyro.param("loc", torch.tensor(0.0)), 1.0))


def loss(model: Any, guide: Any) -> Tensor:
    return BatchedELBO(num_particles=2).differentiable_loss(model, guide)


def column_mean(in_plate: bool) -> Callable[[], None]:
    def model() -> None:
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        mean = w * Y[:, None]
        if in_plate:
            with pyro.plate("data", N):
                pyro.sample("y", dist.Normal(mean, 1.0), obs=Y)
        else:
            pyro.sample("y", dist.Normal(mean, 1.0), obs=Y)

    return model


@pytest.mark.parametrize("validate", [True, False])
@pytest.mark.parametrize("in_plate", [True, False])
def test_mean_of_shape_n_1(in_plate: bool, validate: bool) -> None:
    with pyro.validation_enabled(validate):
        with pytest.raises(ValueError, match=r"'y' has a log_prob of shape \(5, 5\).*\(5,\)"):
            loss(column_mean(in_plate), normal_guide)


def test_observation_of_shape_n_1_in_a_plate() -> None:
    def model() -> None:
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        with pyro.plate("data", N):
            pyro.sample("y", dist.Normal(w * Y, 1.0), obs=Y[:, None])

    with pytest.raises(ValueError, match=r"'y' has a log_prob of shape \(5, 5\).*'data' \(5 "):
        loss(model, normal_guide)


def test_mask_of_shape_n_1() -> None:
    def model() -> None:
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        column: Any = Y[:, None] > 1
        with pyro.plate("data", N), poutine.mask(mask=column):
            pyro.sample("y", dist.Normal(w * Y, 1.0), obs=Y)

    with pytest.raises(ValueError, match=r"'y' has a log_prob of shape \(5, 5\).*mask"):
        loss(model, normal_guide)


def test_shape_that_becomes_wrong_after_the_first_step() -> None:
    def model(mean: Tensor) -> None:
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        with pyro.plate("data", N):
            pyro.sample("y", dist.Normal(w * mean, 1.0), obs=Y)

    elbo = BatchedELBO(2)
    elbo.loss(model, normal_guide, Y)
    with pytest.raises(ValueError, match=r"'y' has a log_prob of shape \(5, 5\)"):
        elbo.loss(model, normal_guide, Y[:, None])


def test_shapes_that_are_right_are_let_through() -> None:
    """A batch without a plate, one value for a batch, and a plate of one example."""

    def model() -> None:
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        pyro.sample("a", dist.Normal(w * Y, 1.0), obs=Y)
        pyro.sample("b", dist.Normal(w * Y, 1.0), obs=torch.tensor(0.0))
        with pyro.plate("one", 1):
            pyro.sample("c", dist.Normal(w, 1.0), obs=Y[:1])
        with pyro.plate("rows", N, dim=-2):
            pyro.sample("d", dist.Normal(w, 1.0), obs=Y[:, None])

    def guide() -> None:
        pyro.sample("w", dist.Delta(torch.tensor(2.0)))

    expected = [dist.Normal(0.0, 1.0).log_prob(torch.tensor(2.0))]
    expected += [dist.Normal(2 * Y, 1.0).log_prob(Y).sum(), dist.Normal(2 * Y, 1.0).log_prob(0 * Y)]
    expected += [dist.Normal(2.0, 1.0).log_prob(Y[:1]), dist.Normal(2.0, 1.0).log_prob(Y)]
    total = sum(term.sum() for term in expected)
    torch.testing.assert_close(-loss(model, guide), total, rtol=1e-12, atol=1e-12)
