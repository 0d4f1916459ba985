"""BatchedELBO with subsampled plates: one minibatch for model, guide and particles."""

from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import (
    AutoDiagonalNormal,
    AutoNormal,
)
from pyro.optim import Adam  # pyright: ignore[reportAttributeAccessIssue]
from torch import Tensor

from pyro_ngvi import NGVB, AutoFullRankNormal
from pyro_ngvi.losses import BatchedELBO
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


def coins(y: Tensor, mask: Any = True) -> None:
    p = pyro.sample("p", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(y)), poutine.mask(mask=mask):
        pyro.sample("y", dist.Bernoulli(logits=p.expand(len(y))), obs=y)


@pytest.mark.parametrize("kind", ["new tensor", "written in place"])
def test_later_data_outside_the_support(kind: str) -> None:
    elbo, guide, y = BatchedELBO(2), AutoDiagonalNormal(coins), torch.tensor([0.0, 1.0])
    for _ in range(2):
        elbo.loss_and_grads(coins, guide, y)
    bad = torch.tensor([1.0, 2.0]) if kind == "new tensor" else y.add_(1.0)
    with pytest.raises(ValueError, match=r"'y' cannot be evaluated.*not within the support"):
        elbo.loss_and_grads(coins, guide, bad)
    with pytest.raises(ValueError, match=r"'y' cannot be evaluated.*not within the support"):
        elbo.loss_and_grads(coins, guide, bad)  # and once more
    elbo.loss_and_grads(coins, guide, bad, bad == 1.0)
    with pyro.validation_enabled(False):
        elbo.loss_and_grads(coins, guide, bad)


def test_later_data_that_are_not_numbers_skip_the_step() -> None:
    guide = AutoFullRankNormal(coins)
    svi = SVI(coins, guide, NGVB(guide), BatchedELBO(2))
    svi.step(torch.tensor([0.0, 1.0]))
    before = guide.loc.detach().clone()
    with pytest.warns(RuntimeWarning, match="NGVB skipped a step"):
        svi.step(torch.tensor([torch.nan, 1.0]))
    assert torch.equal(guide.loc, before)


def test_support_that_depends_on_a_latent_site_is_not_asked_later() -> None:
    def model(y: Tensor) -> None:
        z = pyro.sample("z", dist.Normal(0.0, 1.0)).exp()
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Uniform(0.0, 10.0 + z), obs=y)

    elbo, guide = BatchedELBO(2), AutoDiagonalNormal(model)
    elbo.loss(model, guide, torch.tensor([1.0, 2.0]))
    assert elbo.loss(model, guide, torch.tensor([1.0, 99.0])) == float("inf")


def test_support_that_moves_with_a_parameter_is_not_the_data_s_fault() -> None:
    def model(y: Tensor) -> None:
        pyro.sample("z", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Uniform(0.0, pyro.param("end", torch.tensor(2.0))), obs=y)

    elbo, guide = BatchedELBO(2), AutoDiagonalNormal(model)
    elbo.loss(model, guide, torch.tensor([0.5, 1.0]))
    pyro.param("end").data.fill_(0.7)
    assert elbo.loss(model, guide, torch.tensor([0.5, 1.0])) == float("inf")


def test_support_whose_check_branches_is_not_asked_under_vmap() -> None:
    def model() -> None:
        z = pyro.sample("z", dist.HalfNormal(1.0).expand([2]).to_event(1))
        prior = dist.Wishart(torch.tensor(5.0), torch.eye(2))  # pyright: ignore
        pyro.sample("S", prior, obs=torch.diag_embed(z) + 0.1)

    elbo, guide = BatchedELBO(2), AutoDiagonalNormal(model)
    assert all(elbo.loss(model, guide) < 1e3 for _ in range(2))
