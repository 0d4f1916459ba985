"""BatchedELBO inside SVI: handlers, chunks, the random stream, parameters, devices."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import SVI
from pyro.infer.autoguide import (
    AutoDelta,
    AutoMultivariateNormal,
    AutoNormal,
)
from pyro.optim import SGD, Adam  # pyright: ignore[reportAttributeAccessIssue]
from torch import Tensor

from pyro_ngvi.losses import BatchedELBO
from tests.contract.same_noise import (
    GUIDES,
    D,
    Local,
    N,
    data,
    gradients,
    hand_written_guide,
    logistic,
    param_model,
)


@pytest.mark.parametrize("guide", ["full rank", "site by site"])
def test_handlers_around_the_step_act_on_model_and_guide(guide: str) -> None:
    args, auto = data(torch.float64), GUIDES[guide](logistic)
    auto(*args)
    torch.manual_seed(5)
    loss, grads = gradients(BatchedELBO(2), logistic, auto, args)
    torch.manual_seed(5)
    with poutine.scale(scale=0.1):
        scaled_loss, scaled_grads = gradients(BatchedELBO(2), logistic, auto, args)
    torch.testing.assert_close(scaled_loss, 0.1 * loss)
    for name in grads:
        torch.testing.assert_close(scaled_grads[name], 0.1 * grads[name])


def test_chunks_give_the_same_loss() -> None:
    guide = AutoMultivariateNormal(logistic)
    losses = []
    for chunk_size in (None, 2):
        torch.manual_seed(6)
        elbo = BatchedELBO(5, chunk_size=chunk_size)
        losses.append(elbo.differentiable_loss(logistic, guide, *data(torch.float64)))
    torch.testing.assert_close(losses[0], losses[1])


def test_a_fresh_loss_does_not_disturb_the_random_stream() -> None:
    """A run resumed with a new BatchedELBO draws what the unbroken run draws."""
    model = Local()
    guide = AutoNormal(model)
    args = data(torch.float64)
    guide(*args)
    one = BatchedELBO(2)
    torch.manual_seed(7)
    unbroken = [one.loss(model, guide, *args) for _ in range(3)]
    torch.manual_seed(7)
    resumed = [BatchedELBO(2).loss(model, guide, *args) for _ in range(3)]
    assert unbroken == resumed


def test_parameters_made_after_the_first_step() -> None:
    """Clearing the store in mid-run makes every parameter anew, outside vmap."""
    svi = SVI(param_model, hand_written_guide, Adam({"lr": 0.01}), BatchedELBO(2))
    svi.step(*data(torch.float64))
    pyro.clear_param_store()
    svi.step(*data(torch.float64))
    names = {"bias", "noise", "loc", "scale"}
    assert set(pyro.get_param_store().keys()) == names


def test_svi_fits_a_conjugate_model() -> None:
    y = torch.tensor([1.0, 2.0, 4.0])

    def model() -> None:
        mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
        with pyro.plate("data", 3):
            pyro.sample("y", dist.Normal(mu, 1.0), obs=y)

    guide = AutoDelta(model)  # no noise: the optimum is the posterior mode, 7 / 4
    svi = SVI(model, guide, SGD({"lr": 0.2}), BatchedELBO(2))  # the error falls to a fifth a step
    for _ in range(12):
        svi.step()
    assert guide.median()["mu"].item() == pytest.approx(7 / 4, abs=1e-6)
    assert svi.evaluate_loss() == pytest.approx(BatchedELBO().loss(model, guide), abs=1e-12)


def test_maximum_likelihood_with_an_empty_guide() -> None:
    def model(y: Tensor) -> None:
        mu = pyro.param("mu", torch.tensor(0.0))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(mu, 1.0), obs=y)

    args = (torch.tensor([1.0, 3.0]),)
    _, grads = gradients(BatchedELBO(2), model, lambda y: None, args)
    assert grads["mu"].item() == -4.0


def test_step_on_the_meta_device() -> None:
    """No value is read in a step: it runs on tensors that have none."""

    def model(X: Tensor, y: Tensor) -> None:
        w = pyro.sample("w", dist.Normal(X.new_zeros(D), X.new_ones(D)).to_event(1))
        with pyro.plate("data", N):
            pyro.sample("y", dist.Normal(X @ w, X.new_ones(())), obs=y)

    guide = AutoMultivariateNormal(model)
    guide(*data(torch.float64))
    pyro.clear_param_store()
    guide.to("meta")
    with pyro.validation_enabled(False):
        args = tuple(x.to("meta") for x in data(torch.float64))
        loss, grads = gradients(BatchedELBO(4), model, guide, args)
    assert loss.device.type == "meta" and all(g.device.type == "meta" for g in grads.values())
