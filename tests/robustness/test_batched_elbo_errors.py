"""Every refusal of BatchedELBO: the site, the reason, the way out."""

import math
from collections.abc import Callable
from itertools import count
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import SVI, config_enumerate
from pyro.infer.autoguide import (
    AutoDiagonalNormal,
    AutoMultivariateNormal,
    AutoNormal,
    AutoNormalMessenger,
)
from torch import Tensor, nn
from torch.distributions import constraints

from pyro_ngvi import AutoFullRankNormal
from pyro_ngvi.losses import BatchedELBO
from pyro_ngvi.optim import VON
from pyro_ngvi.runtime.model_density import batched_trace

pytestmark = pytest.mark.usefixtures("plain_start")

N = 5
Y = torch.arange(float(N), dtype=torch.float64)


def normal_guide(*args: Any) -> None:
    loc = pyro.param("loc", torch.tensor(0.0))
    pyro.sample("w", dist.Normal(loc, 1.0))


def loss(model: Any, guide: Any, *args: Any) -> Tensor:
    return BatchedELBO(num_particles=2).differentiable_loss(model, guide, *args)


@pytest.mark.parametrize("num_particles", [0, -1, 2.5])
def test_number_of_particles(num_particles: Any) -> None:
    with pytest.raises(
        ValueError, match=f"num_particles is {num_particles}; it must be a whole number"
    ):
        BatchedELBO(num_particles)


def test_number_of_particles_from_numpy() -> None:
    assert BatchedELBO(np.int64(4)).num_particles == 4  # pyright: ignore[reportArgumentType]


def test_guide_that_is_not_reparameterised() -> None:
    def model() -> None:
        pyro.sample("z", dist.Bernoulli(0.5))

    def guide() -> None:
        pyro.sample("z", dist.Bernoulli(pyro.param("p", torch.tensor(0.3))))

    with pytest.raises(ValueError, match=r"'z' of the guide samples Bernoulli.*pyro.infer.Trace_"):
        loss(model, guide)


def test_enumeration_in_the_guide() -> None:
    def model() -> None:
        pyro.sample("z", dist.Bernoulli(0.5))

    with pytest.raises(ValueError, match=r"'z'.*TraceEnum_ELBO"):
        loss(model, config_enumerate(model, "parallel"))


def test_enumeration_in_the_model() -> None:
    @config_enumerate(default="sequential")
    def model() -> None:
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        pyro.sample("z", dist.Bernoulli(logits=w))

    guide = AutoDiagonalNormal(poutine.block(model, hide=["z"]))
    with pytest.raises(ValueError, match=r"'z'.*TraceEnum_ELBO"):
        loss(model, guide)


def test_latent_site_that_the_guide_does_not_sample() -> None:
    def model() -> None:
        pyro.sample("w", dist.Normal(0.0, 1.0))
        pyro.sample("v", dist.Normal(0.0, 1.0))

    with pytest.raises(ValueError, match=r"'v' of the model is not sampled by the guide"):
        loss(model, normal_guide)


def test_guide_messenger() -> None:
    def model() -> None:
        pyro.sample("w", dist.Normal(0.0, 1.0))

    with pytest.raises(ValueError, match=r"AutoNormalMessenger is an effect handler.*Trace_ELBO"):
        loss(model, AutoNormalMessenger(model))


def branch(w: Tensor) -> Tensor:
    return w if w > 0 else -w


def item(w: Tensor) -> Tensor:
    return w * w.item()


def numpy(w: Tensor) -> Tensor:
    return w + float(w.detach().numpy())


def boolean_mask(w: Tensor) -> Tensor:
    return w.expand(3)[w.expand(3) > 0].sum()


def in_place(w: Tensor) -> Tensor:
    x = torch.zeros(2)
    x[0] = w
    return x.sum()


@pytest.mark.parametrize("read", [branch, item, numpy, boolean_mask, in_place])
@pytest.mark.parametrize("guide", ["joint", "hand-written"])
def test_what_vmap_can_not_do(read: Callable[[Tensor], Tensor], guide: str) -> None:
    def model() -> None:
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Normal(read(w), 1.0), obs=torch.tensor(1.0))

    chosen = AutoMultivariateNormal(model) if guide == "joint" else normal_guide
    with pytest.warns(RuntimeWarning, match=r"vmap .*'w'.* a run of its own"):
        assert torch.isfinite(loss(model, chosen))
    with pytest.raises(RuntimeError, match=r"torch.func.vmap .*'w'.*use pyro.infer.Trace_") as info:
        batched_trace(model, {"w": torch.ones(2)})
    assert isinstance(info.value.__cause__, RuntimeError)


def test_batch_norm_in_training() -> None:
    norm = nn.BatchNorm1d(1)

    def model() -> None:
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        with pyro.plate("data", N):
            pyro.sample("y", dist.Normal(norm(w * Y[:, None]).squeeze(-1), 1.0), obs=Y)

    with pytest.warns(RuntimeWarning, match=r"last site it reached is 'data'"):
        assert torch.isfinite(loss(model, normal_guide))
    with pytest.raises(RuntimeError, match=r"last site it reached is 'data'.*Trace_ELBO"):
        batched_trace(model, {"w": torch.ones(2)})


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_log_prob_without_a_batching_rule() -> None:
    """The forward algorithm of Pyro's HMM is an autograd function that vmap would not know."""

    def model() -> None:
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        hmm = dist.DiscreteHMM(torch.zeros(2), torch.zeros(2, 2), dist.Normal(w.expand(2), 1.0))
        pyro.sample("y", hmm, obs=torch.zeros(4))

    assert torch.isfinite(loss(model, normal_guide))


def test_sampler_without_a_batching_rule() -> None:
    def model() -> None:
        pyro.sample("p", dist.Beta(1.0, 1.0))

    def guide() -> None:
        a = pyro.param("a", torch.tensor(2.0), constraint=constraints.positive)
        pyro.sample("p", dist.Beta(a, 1.0))

    with pytest.warns(RuntimeWarning, match="on the way to 'p'"):
        assert torch.isfinite(loss(model, guide))
    with pytest.raises(RuntimeError, match=r"cannot run under torch.func.vmap.*Trace_ELBO"):
        batched_trace(guide, {}, num_particles=2)


def test_a_hidden_site_that_draws_is_named_with_a_way_out() -> None:
    """A curvature cannot be run particle by particle."""
    given: dict[str, Any] = {}

    def model() -> None:
        w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        with poutine.block(hide=["junk"]), poutine.condition(data=given):
            pyro.sample("junk", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Normal(w, 1.0).to_event(1), obs=torch.ones(2))

    guide = AutoFullRankNormal(model)
    svi = SVI(model, guide, VON(guide), BatchedELBO(2, curvature="hessian"))
    with pytest.raises(
        RuntimeError, match=r"poutine.block hides.*value by poutine.condition"
    ) as error:
        svi.step()
    assert len(str(error.value)) <= 240
    given["junk"] = torch.tensor(0.5)
    found: Any = svi.step()
    assert math.isfinite(found)


def test_an_error_of_the_model_itself_is_not_blamed_on_vmap() -> None:
    def model() -> None:
        w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        pyro.sample("y", dist.Normal(torch.ones(3, 4) @ w, 1.0).to_event(1), obs=torch.ones(3))

    def guide() -> None:
        pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))

    with pytest.raises(RuntimeError, match="size mismatch") as info:
        loss(model, guide)
    assert "vmap" not in str(info.value)


def test_data_outside_the_support() -> None:
    def model(y: Tensor) -> None:
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        with pyro.plate("data", N):
            pyro.sample("y", dist.Bernoulli(logits=w.expand(N)), obs=y)

    with pytest.raises(ValueError, match=r"'y' cannot be evaluated: Expected value argument"):
        loss(model, normal_guide, Y)
    with pytest.raises(ValueError, match=r"'y' cannot be evaluated: 5 of its 5 values are NaN"):
        loss(model, normal_guide, torch.full((N,), torch.nan))


def test_joint_guide_over_subsampled_local_latents() -> None:
    def model() -> None:
        with pyro.plate("data", N, subsample_size=2):
            pyro.sample("z", dist.Normal(0.0, 1.0))

    with pytest.raises(ValueError, match=r"'z' lies in the subsampled plate 'data' \(2 of 5\)"):
        loss(model, AutoMultivariateNormal(model))


def local_guide(**how: Any) -> None:
    with pyro.plate("data", N, **how) as index:
        pyro.sample("z", dist.Normal(torch.zeros(N)[index], 1.0))


@pytest.mark.parametrize(
    ("in_model", "in_guide"),
    [
        ({"subsample_size": 3}, {"subsample_size": 2}),
        ({"subsample": torch.tensor([0, 1])}, {"subsample_size": 2}),
        ({"subsample": torch.tensor([0, 1])}, {"subsample": torch.tensor([1, 2])}),
    ],
)
def test_other_minibatch_in_the_guide(in_model: dict[str, Any], in_guide: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"(?i)'data' has another minibatch|different subsample"):
        loss(lambda: local_guide(**in_model), lambda: local_guide(**in_guide))


def test_size_of_minibatch_that_is_random() -> None:
    calls = count()

    def model() -> None:
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        size = 2 + next(calls) % 2
        with pyro.plate("data", 1000, subsample_size=size):
            pyro.sample("y", dist.Normal(w, 1.0), obs=torch.zeros(size))

    with pytest.raises(RuntimeError, match="'data' changes between two runs"):
        for _ in range(9):
            loss(model, normal_guide)


def test_two_sites_of_one_name() -> None:
    def model() -> None:
        pyro.sample("w", dist.Normal(0.0, 1.0))
        pyro.sample("w", dist.Normal(0.0, 1.0))

    with pytest.raises(ValueError, match="Two sample sites have the name 'w'"):
        loss(model, normal_guide)


def test_nan_loss_is_announced() -> None:
    def model() -> None:
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        pyro.factor("nan", w * torch.nan)

    with pytest.raises(ValueError, match="Unit"):  # on the first call, by Pyro's validation
        BatchedELBO().loss(model, normal_guide)
    with pyro.validation_enabled(False), pytest.warns(UserWarning, match="Encountered NaN: loss"):
        BatchedELBO().loss(model, normal_guide)


def test_guide_of_another_model() -> None:
    def model() -> None:
        pyro.sample("v", dist.Normal(0.0, 1.0), obs=torch.tensor(0.0))

    with pytest.raises(ValueError, match=r"guide samples 'w', which is no site of the model"):
        loss(model, normal_guide)


def test_latent_site_of_other_shape_in_the_guide() -> None:
    def model() -> None:
        pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))

    with pytest.raises(ValueError, match=r"'w' has shape \(3,\) in the model, but .* shape \(\)"):
        loss(model, normal_guide)


def test_line_that_writes_in_place() -> None:
    """The site is named that the program was on the way to, and what to take instead."""

    def model() -> None:
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        with pyro.plate("data", N):
            loc = torch.zeros(N)
            loc[1:] = w
            pyro.sample("y", dist.Normal(loc, 1.0), obs=torch.zeros(N))

    message = r"on the way to 'y'.*or use pyro.infer.Trace_ELBO"
    with pytest.warns(RuntimeWarning, match="on the way to 'y'"):
        assert torch.isfinite(loss(model, normal_guide))
    with pytest.raises(RuntimeError, match=message):
        batched_trace(model, {"w": torch.ones(2)})


@pytest.mark.parametrize("how", ["poutine", "distribution"])
def test_nan_under_a_mask(how: str) -> None:
    def model(y: Tensor) -> None:
        seen: Any = ~y.isnan()
        fn = dist.Normal(pyro.sample("w", dist.Normal(0.0, 1.0)).expand(N), 1.0)
        with pyro.plate("data", N), poutine.mask(mask=seen if how == "poutine" else True):
            pyro.sample("y", fn if how == "poutine" else fn.mask(seen), obs=y)

    y = torch.where(Y == 2, torch.nan, Y)
    with pytest.raises(ValueError, match=r"(?s)'y' cannot be evaluated.*obs=torch.nan_to_num\(y\)"):
        loss(model, normal_guide, y)


def switched(two: bool) -> None:
    a = pyro.sample("a", dist.Normal(0.0, 1.0))
    b = pyro.sample("b", dist.Normal(0.0, 1.0)) if two else 0.0
    pyro.sample("y", dist.Normal(a + b, 1.0), obs=torch.tensor(1.0))


def hand_written_pair(two: bool) -> None:
    pyro.sample("a", dist.Normal(pyro.param("at", torch.tensor(0.0)), 1.0))
    if two:
        pyro.sample("b", dist.Normal(pyro.param("bt", torch.tensor(0.0)), 1.0))


@pytest.mark.parametrize("make", [AutoFullRankNormal, AutoDiagonalNormal])
def test_latent_site_that_a_later_run_leaves_out(make: Any) -> None:
    """Without its prior, -log q alone would count, and grow without bound."""
    guide, elbo = make(switched), BatchedELBO(num_particles=2)
    elbo.loss(switched, guide, True)
    with pytest.raises(ValueError, match=r"guide samples 'b', which is no site .* this run of it"):
        elbo.loss(switched, guide, False)


@pytest.mark.parametrize("make", [AutoFullRankNormal, AutoDiagonalNormal])
def test_latent_site_that_a_later_run_adds(make: Any) -> None:
    guide, elbo = make(switched), BatchedELBO(num_particles=2)
    elbo.loss(switched, guide, False)
    with pytest.raises(
        ValueError, match="latent site 'b' of the model is not sampled by the guide"
    ):
        elbo.loss(switched, guide, True)


def test_guide_that_follows_its_model() -> None:
    elbo = BatchedELBO(num_particles=2)
    for two in (True, False, True):
        elbo.loss(switched, hand_written_pair, two)


def bounded(y: Tensor) -> None:
    x = pyro.sample("x", dist.Uniform(y.max(), 10.0))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(x, 1.0), obs=y)


@pytest.mark.parametrize("make", [AutoFullRankNormal, AutoDiagonalNormal, AutoNormal])
@pytest.mark.parametrize("shift", [-1.0, 1.0])
def test_support_that_other_data_move(make: Any, shift: float) -> None:
    """The guide maps to the support of its first call, and would go on to draw there."""
    guide, elbo = make(bounded), BatchedELBO(num_particles=2)
    elbo.loss(bounded, guide, Y)
    elbo.loss(bounded, guide, Y.flip(0))  # the same maximum
    with pytest.raises(ValueError, match="support of the latent site 'x' is another one"):
        elbo.loss(bounded, guide, Y + shift)
    with pytest.raises(ValueError, match="support of the latent site 'x' is another one"):
        BatchedELBO(num_particles=2).loss(bounded, guide, Y + shift)


def bounded_vector(high: Tensor) -> None:
    pyro.sample("x", dist.Uniform(torch.zeros(3), high).to_event(1))


def bounded_pair(high: Tensor) -> None:
    parts = [constraints.interval(0.0, h) for h in high]
    support = constraints.stack(parts, dim=-1)  # type: ignore[attr-defined]
    pyro.sample("x", dist.ImproperUniform(support, (), (3,)))


@pytest.mark.parametrize("model", [bounded_vector, bounded_pair])
def test_bounds_of_vectors(model: Any) -> None:
    """An event of several entries has whole numbers in its support beside the bounds."""
    high = torch.tensor([1.0, 2.0, 3.0])
    guide, elbo = AutoFullRankNormal(model), BatchedELBO(num_particles=2)
    elbo.loss(model, guide, high)
    elbo.loss(model, guide, high.clone())
    with pytest.raises(ValueError, match="support of the latent site 'x' is another one"):
        elbo.loss(model, guide, high + torch.tensor([0.0, 0.0, 1.0]))


def test_support_that_moves_by_rounding() -> None:
    """Of data in another order."""

    def model(y: Tensor) -> None:
        pyro.sample("x", dist.Uniform(0.0, (y - y.mean()).square().sum()))

    y = torch.rand(1001, generator=torch.Generator().manual_seed(0)) * 300.0
    orders = [torch.arange(1001), *(y.roll(k).argsort() for k in range(20))]
    assert len({float((y[i] - y[i].mean()).square().sum()) for i in orders}) > 1
    guide, elbo = AutoFullRankNormal(model), BatchedELBO(num_particles=2)
    for i in orders:
        elbo.loss(model, guide, y[i])
