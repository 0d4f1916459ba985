"""BatchedELBO with subsampled plates: one minibatch for model, guide and particles."""

from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import (
    AutoDiagonalNormal,
    AutoNormal,
)
from pyro.optim import Adam  # pyright: ignore[reportAttributeAccessIssue]
from torch import Tensor

from pyro_ngvi.elbo import BatchedELBO
from tests.contract.same_noise import Local, N, assert_same_as_trace_elbo, data


@pytest.mark.parametrize("num_particles", [1, 3])
def test_subsampled_plate_shares_one_minibatch(num_particles: int) -> None:
    model = Local()
    guide = AutoNormal(model, init_scale=0.3)

    def reference() -> tuple[Local, AutoNormal]:
        # The same parameters (by name) with the minibatch that the seed gives.
        index = torch.randperm(N)[:3].clone()
        assert torch.equal(model.seen[-1], index)
        fixed = Local(subsample=index)
        other = AutoNormal(fixed, init_scale=0.3, create_plates=fixed.plate)
        with torch.random.fork_rng():
            other(*data(torch.float64))
        return fixed, other

    assert_same_as_trace_elbo(model, guide, data(torch.float64), num_particles, reference)


@pytest.mark.parametrize("in_model", [{"subsample_size": 3}, {}])
def test_guide_that_passes_its_minibatch(in_model: dict[str, Any]) -> None:
    """The plate of the model takes the minibatch of the guide, whatever its own size."""
    index = torch.tensor([5, 0, 2])

    def model(X: Tensor, y: Tensor) -> None:
        with pyro.plate("data", N, **in_model) as index:
            z = pyro.sample("z", dist.Normal(0.0, 1.0))
            pyro.sample("y", dist.Normal(z, 1.0), obs=y[index])

    def plate(X: Tensor, y: Tensor) -> Any:
        return pyro.plate("data", N, subsample=index)

    guide = AutoNormal(model, create_plates=plate)
    assert_same_as_trace_elbo(model, guide, data(torch.float64), 3)


def test_guide_that_draws_a_minibatch_for_a_whole_plate() -> None:
    def model(X: Tensor, y: Tensor) -> None:
        index: Any
        with pyro.plate("data", N) as index:
            z = pyro.sample("z", dist.Normal(0.0, 1.0).expand([len(index)]))
            pyro.sample("y", dist.Normal(z, 1.0), obs=y[index] * 0)

    def plate(X: Tensor, y: Tensor) -> Any:
        return pyro.plate("data", N, subsample_size=3)

    guide = AutoNormal(model, create_plates=plate)

    guide(*data(torch.float64))
    torch.manual_seed(4)
    mine = BatchedELBO().loss(model, guide, *data(torch.float64))
    torch.manual_seed(4)
    assert mine == pytest.approx(Trace_ELBO().loss(model, guide, *data(torch.float64)), abs=1e-10)


def test_minibatch_is_drawn_anew_and_may_change_its_size() -> None:
    seen: list[Tensor] = []  # the model's minibatches

    def model(size: int) -> None:
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        index: Any
        with pyro.plate("data", 100, subsample_size=size) as index:
            seen.append(index)
            pyro.sample("y", dist.Normal(w, 1.0), obs=index.to(torch.float64))

    svi = SVI(model, AutoDiagonalNormal(model), Adam({"lr": 0.01}), BatchedELBO(2))
    for size in (5, 5, 8, 8):
        svi.step(size)
    steps = seen[-4:]
    assert [len(index) for index in steps] == [5, 5, 8, 8]
    assert not torch.equal(steps[0].sort()[0], steps[1].sort()[0])
    assert not torch.equal(steps[2].sort()[0], steps[3].sort()[0])
