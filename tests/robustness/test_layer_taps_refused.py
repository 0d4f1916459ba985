"""Where layer taps do not apply to a latent, it is left out, and others are still covered."""

from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

from tests.exact.layer_models import (
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


def no_square() -> None:
    w = latent("w", 2, 3)
    x = inputs(N, 3)
    observe(F.linear(x, w) + F.linear(x, w**2) + latent("b", 2))


def batch_norm_in_training() -> None:
    h = F.linear(inputs(N, 3), latent("w", 2, 3)) + latent("b", 2)
    observe(F.batch_norm(h, None, None, training=True) + h)


def attention_over_the_batch() -> None:
    h = F.linear(inputs(N, 3), latent("w", 2, 3))
    observe((h @ h.T).softmax(-1) @ h + latent("b", 2))


def rows_in_another_order() -> None:
    observe(F.linear(inputs(N, 3), latent("w", 2, 3)).flip(0) + latent("b", 2))


def layer_before_the_examples() -> None:
    h = F.linear(inputs(3, 3), latent("w", 2, 3))
    observe(h[torch.tensor([0, 1, 2, 2, 1])] + latent("b", 2))


def penalty_on_an_output() -> None:
    h = F.linear(inputs(N, 3), latent("w", 2, 3))
    pyro.factor("penalty", -h.square().sum())
    observe(h + latent("b", 2))


def layer_in_a_prior() -> None:
    h = F.linear(inputs(N, 3), latent("w", 2, 3))
    z = pyro.sample("z", dist.Normal(h, 1.0).to_event(2))
    observe(h * z + latent("b", 2))


def scale_of_a_weight() -> None:
    w = latent("w", N, N)
    observe(F.linear(inputs(N, N), w * inputs(N, N)) + latent("b", N))


def scale_times_its_own_square() -> None:
    w = latent("w", 3)
    observe(inputs(N, 3) * (w * w) + latent("b", 3))


REFUSED = [
    no_square,
    attention_over_the_batch,
    rows_in_another_order,
    layer_before_the_examples,
    scale_of_a_weight,
    scale_times_its_own_square,
    penalty_on_an_output,
    layer_in_a_prior,
]


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case.__name__)
def test_a_latent_that_is_not_covered_and_others_that_are(case: Any) -> None:
    values = draw(case, 2)
    taps = taps_of(case, values)
    assert "w" not in taps.sites
    assert_same(by_taps(taps, values), expected(case, values), "b")


def test_an_unseen_use_beside_a_far_larger_entry() -> None:
    def model() -> None:
        w = pyro.sample(
            "w", dist.Normal(torch.zeros(3), torch.tensor([1e-4, 1.0, 1.0])).to_event(1)
        )
        X = inputs(N, 3) * torch.tensor([1e4, 1.0, 1.0])
        observe(X @ w + 10.0 * torch.tanh(w[1]))

    torch.set_default_dtype(torch.float32)
    assert taps_of(model, draw(model, 1)).sites == ()


def test_batch_normalisation_in_training_mixes_the_data() -> None:
    values = draw(batch_norm_in_training, 2)
    taps = taps_of(batch_norm_in_training, values)
    assert taps.sites == () and by_taps(taps, values) == {}


def no_plate() -> None:
    y = F.linear(inputs(N, 3), latent("w", 2, 3))
    pyro.sample("y", dist.Normal(y, 1.0).to_event(2), obs=torch.zeros(N, 2))


def two_observed_sites() -> None:
    h = F.linear(inputs(N, 3), latent("w", 2, 3))
    with pyro.plate("data", N):
        pyro.sample("y", dist.Normal(h[:, 0], 1.0), obs=torch.zeros(N))
        pyro.sample("x", dist.Normal(h[:, 1], 1.0), obs=torch.zeros(N))


def a_scale_for_each_example() -> None:
    with pyro.poutine.scale(scale=torch.linspace(0.5, 1, N)):
        observe(F.linear(inputs(N, 3), latent("w", 2, 3)))


@pytest.mark.parametrize("case", [no_plate, two_observed_sites, a_scale_for_each_example])
def test_models_without_one_set_of_examples_are_not_covered(case: Any) -> None:
    values = draw(case, 1)
    taps = taps_of(case, values)
    assert taps.sites == () and by_taps(taps, values) == {}


def test_a_run_unlike_the_checked_one_gives_nothing() -> None:
    def model(layers: int, scale: Any = 1.0) -> None:
        h, w = x, latent("w", 3, 3)
        for _ in range(layers):
            h = F.linear(h, w)
        with pyro.poutine.scale(scale=scale):
            observe(h)

    x = inputs(N, 3)
    values = draw(model, 1, 1)
    taps = taps_of(model, values, (1,))
    assert by_taps(taps, values, (2,)) == {}
    assert by_taps(taps, values, (1, torch.tensor(2.0))) == {}
    assert_same(by_taps(taps, values, (1,)), expected(model, values, (1,)), "w")


def test_attention_module_is_not_covered() -> None:
    """It is one torch call, inside which no layer is seen."""
    attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def model() -> None:
        weights = {name: latent(name, *p.shape) for name, p in attention.named_parameters()}
        x = inputs(N, 3, 4)
        observe(functional_call(attention, weights, (x, x, x))[0])

    assert taps_of(model, draw(model, 1)).sites == ()
