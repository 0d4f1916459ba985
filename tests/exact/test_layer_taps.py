"""Squared per-example gradients by layer taps, against the Jacobian of the log probabilities."""

from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
import torch.nn.functional as F
from pyro.nn import PyroModule, PyroSample
from torch import Tensor, nn

from pyro_ngvi.runtime.density import site_log_prob
from pyro_ngvi.runtime.run import Minibatches, run_particles
from tests.exact.layer_models import (
    CASES,
    N,
    assert_same,
    by_taps,
    draw,
    expected,
    inputs,
    latent,
    observe,
    taps_of,
)


@pytest.mark.parametrize("budget", [1, 2**26], ids=["one_at_a_time", "together"])
@pytest.mark.parametrize("S", [1, 3])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_squares_equal_those_of_the_jacobian(case: Any, S: int, budget: int) -> None:
    values = draw(case, S)
    taps = taps_of(case, values, budget=budget)
    assert set(taps.sites) == set(values)
    want = expected(case, values)
    for chunk_size in (None, 2):
        assert_same(by_taps(taps, values, chunk_size=chunk_size), want, *CASES[case])


def data(n: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(n, 3, generator=generator), torch.randn(n, 2, generator=generator)


def minibatch(x: Tensor, y: Tensor, keep: Any = True, weight: Any = 1.0) -> None:
    """An MLP with a minibatch, a mask, a scale, and a latent noise that no layer has."""
    w, v, b = latent("w", 4, 3), latent("v", 2, 4), latent("b", 4)
    noise = pyro.sample("noise", dist.LogNormal(0.0, 0.1))
    with pyro.plate("data", len(x), subsample_size=4) as i:
        mean = F.linear(F.relu(F.linear(x[i], w, b)), v)
        mask = keep if isinstance(keep, bool) else keep[i]
        with pyro.poutine.mask(mask=mask), pyro.poutine.scale(scale=weight):
            pyro.sample("y", dist.Normal(mean, noise).to_event(1), obs=y[i])


@pytest.mark.parametrize("S", [1, 3])
def test_scale_and_mask_count_once(S: int) -> None:
    x, y = data(9)
    keep = torch.arange(9) % 7 != 1
    args = (x, y, keep, 0.3)
    values = draw(minibatch, S, *args)
    values["noise"] = values["noise"].sigmoid()
    minibatches = Minibatches({"data": torch.tensor([0, 1, 5, 7])})
    taps = taps_of(minibatch, values, args, minibatches=minibatches)
    want = expected(minibatch, values, args, dict(minibatches))
    got = by_taps(taps, values, args, minibatches)
    assert_same(got, want, "w", "v", "b")
    assert "noise" not in taps.sites
    whole = expected(minibatch, values, (x, y, True, 1.0), dict(minibatches))
    assert not torch.allclose(whole["w"], got["w"], rtol=0.1)


def test_modules_with_sampled_weights() -> None:
    pyro_module: Any = PyroModule
    conv, dense = pyro_module[nn.Conv2d](1, 2, 3, padding=1), pyro_module[nn.Linear](18, 2)
    net = pyro_module[nn.Sequential](conv, nn.ReLU(), nn.Flatten(), dense)
    for layer in (conv, dense):
        for name, p in list(layer.named_parameters()):
            prior = dist.Normal(torch.zeros(p.shape), 1.0).to_event(p.dim())
            setattr(layer, name, PyroSample(prior))

    def model() -> None:
        observe(net(inputs(N, 1, 3, 3)).tanh())

    values = draw(model, 2)
    got = by_taps(taps_of(model, values), values)
    assert_same(got, expected(model, values), "0.weight", "0.bias", "3.weight", "3.bias")


def test_other_minibatches_and_sizes_need_no_new_check() -> None:
    def model(x: Tensor, y: Tensor) -> None:
        mean = x @ latent("w", 3, 2)
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(mean, 1.0).to_event(1), obs=y)

    values = draw(model, 2, *data(5))
    taps = taps_of(model, values, data(5))
    for n in (5, 8, 3):
        assert_same(by_taps(taps, values, data(n)), expected(model, values, data(n)), "w")


def test_data_are_the_entries_of_the_log_prob() -> None:
    x = inputs(N, 4, 3)

    def model() -> None:
        w = latent("w", 3)
        with pyro.plate("data", N, dim=-2), pyro.plate("time", 4, dim=-1):
            pyro.sample("y", dist.Normal(x @ w, 1.0), obs=torch.ones(N, 4))

    values = draw(model, 2)
    got = by_taps(taps_of(model, values), values)
    assert_same(got, expected(model, values), "w")


def test_a_use_that_the_loss_does_not_need_is_no_use() -> None:
    x = inputs(N, 3)

    def model() -> None:
        w, unused = latent("w", 3, 3), latent("unused", 3)
        F.linear(x, w, unused)
        observe(F.linear(x, w))

    values = draw(model, 2)
    taps = taps_of(model, values)
    got, want = by_taps(taps, values), expected(model, values)
    assert_same({"w": got["w"]}, want, "w")
    assert torch.equal(got["unused"], torch.zeros(3))


def test_the_check_leaves_the_random_state_and_the_gradients_alone() -> None:
    def model() -> None:
        observe(F.dropout(F.linear(torch.ones(N, 3), latent("w", 2, 3)), 0.5, training=True))

    values = {name: value.requires_grad_() for name, value in draw(model, 1).items()}
    before = torch.get_rng_state()
    taps = taps_of(model, values)
    assert torch.equal(before, torch.get_rng_state()) and values["w"].grad is None
    assert taps.sites == ("w",)


def test_taps_leave_the_loss_and_its_gradient_as_they_are() -> None:
    x, y = data(6)
    values = draw(minibatch, 2, x, y)
    values["noise"] = values["noise"].sigmoid()
    minibatches = Minibatches({"data": torch.arange(4)})
    taps = taps_of(minibatch, values, (x, y), minibatches=minibatches)

    def log_lik(sites: Any) -> Tensor:
        return site_log_prob(sites["y"])[1].sum()

    results = []
    for program in (minibatch, taps):
        leaves = {name: value.detach().requires_grad_() for name, value in values.items()}
        how: Any = {"minibatches": minibatches}
        loss = -run_particles(program, log_lik, leaves, 2, (x, y), {}, **how)
        loss.sum().backward()
        results.append([loss.detach(), *(leaf.grad for leaf in leaves.values())])
    for plain, tapped in zip(*results, strict=True):
        assert plain is not None and tapped is not None and torch.equal(plain, tapped)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_step_runs_on_the_meta_device(case: Any) -> None:
    def model() -> None:
        with torch.device("meta"):
            case()

    values = {name: value.to("meta") for name, value in draw(case, 2).items()}
    taps = taps_of(model, values)
    got = by_taps(taps, values)
    assert {name: h.shape for name, h in got.items()} == {k: v.shape[1:] for k, v in values.items()}
    assert all(h.is_meta for h in got.values())
