"""The layer of Walsh-Hadamard blocks against dense algebra, and in Pyro."""

from __future__ import annotations

import copy
import io
import math
import pickle
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import SVI, Predictive, Trace_ELBO, TraceMeanField_ELBO
from pyro.infer.autoguide import AutoMultivariateNormal, AutoNormal, init_to_sample
from pyro.nn import PyroModule
from pyro.optim import Adam  # pyright: ignore[reportAttributeAccessIssue]
from torch import Tensor

import pyro_ngvi as ngvi
from pyro_ngvi.nn import WalshHadamardLinear

SHAPES = [(5, 3), (3, 20), (1, 6), (40, 7), (8, 8), (1, 1)]


class Net(PyroModule):
    """A regression through one hidden layer."""

    def __init__(self, m: int = 3, hidden: int = 12, **kwargs: Any) -> None:
        super().__init__()
        self.hidden = WalshHadamardLinear(m, hidden, **kwargs)
        self.out = WalshHadamardLinear(hidden, 1, square=True)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        mean = self.out(self.hidden(x).tanh()).squeeze(-1)
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(mean, 0.3), obs=y)
        return mean


def run(layer: Any, x: Tensor, **values: Tensor) -> Tensor:
    """The layer at given values of its sites."""
    return poutine.condition(layer, values)(x)


def turned(layer: Any) -> Any:
    """With diagonals that are no signs."""
    for name in ("left", "right"):
        diagonal = getattr(layer, name)
        diagonal.data = torch.randn_like(diagonal)
    return layer


@pytest.mark.parametrize("out, m", SHAPES)
def test_output_is_that_of_the_dense_weight(out: int, m: int) -> None:
    layer = turned(WalshHadamardLinear(m, out, weight_sd=0.7))
    g, b = torch.randn(layer.matrix.num_g), torch.randn(out)
    W = layer.weight(g)
    assert W.shape == (out, m)
    for x in (torch.randn(6, m), torch.randn(2, 4, m), torch.randn(m)):
        torch.testing.assert_close(run(layer, x, g=g, bias=b), x @ W.mT + b)


@pytest.mark.parametrize("m", [1, 2, 10, 16, 30])
def test_one_output_of_few_numbers(m: int) -> None:
    layer = turned(WalshHadamardLinear(m, 1, square=True, bias=False))
    side = layer.matrix.num_g
    assert side * side < 4 * max(m, 2)  # a power of two from sqrt(m) on
    g, x = torch.randn(side), torch.randn(5, m)
    assert layer.weight(g).shape == (1, m)
    torch.testing.assert_close(run(layer, x, g=g), x @ layer.weight(g).mT)


@pytest.mark.parametrize("square", [False, True])
def test_particles_in_front(square: bool) -> None:
    S, M, m = 3, 5, 6
    layer = turned(WalshHadamardLinear(m, 1 if square else 9, square=square))
    g, b = torch.randn(S, 1, layer.matrix.num_g), torch.randn(S, 1, layer.out_features)
    x, xs = torch.randn(M, m), torch.randn(S, M, m)
    for given in (x, xs):
        each = [
            run(layer, given[s] if given.dim() == 3 else given, g=g[s, 0], bias=b[s, 0])
            for s in range(S)
        ]
        torch.testing.assert_close(run(layer, given, g=g, bias=b), torch.stack(each))
        # as Predictive(parallel=True) gives them in a model without plates
        torch.testing.assert_close(run(layer, given, g=g[:, 0], bias=b[:, 0]), torch.stack(each))


@pytest.mark.parametrize("out, m", SHAPES)
def test_entries_of_one_row_are_independent_a_priori(out: int, m: int) -> None:
    layer: Any = WalshHadamardLinear(m, out, g_scale=2.0, weight_sd=0.5, train_diagonals=False)
    identity = 2.0 * torch.eye(layer.matrix.num_g)
    columns = 0.5 * layer.matrix.dense(identity, layer.left, layer.right).flatten(1)
    covariance = columns.mT @ columns
    rows = covariance.reshape(out, m, out, m).diagonal(dim1=0, dim2=2)
    torch.testing.assert_close(rows, torch.eye(m).unsqueeze(-1).expand(m, m, out).clone())


def test_sites_and_their_priors() -> None:
    layer = WalshHadamardLinear(3, 9, g_scale=0.5)
    trace: Any = poutine.trace(layer).get_trace(torch.randn(4, 3))
    assert [n for n, s in trace.nodes.items() if s["type"] == "sample"] == ["g", "bias"]
    assert {n for n, s in trace.nodes.items() if s["type"] == "param"} == {"left", "right"}
    for name, sd, shape in (("g", 0.5, (12,)), ("bias", 1.0, (9,))):
        site = trace.nodes[name]
        value = site["value"]
        assert value.shape == shape and site["fn"].event_shape == shape
        expected = torch.distributions.Normal(0.0, sd).log_prob(value).sum()
        torch.testing.assert_close(site["fn"].log_prob(value), expected)
    fixed: Any = WalshHadamardLinear(3, 9, bias=False, train_diagonals=False)
    trace = poutine.trace(fixed).get_trace(torch.randn(4, 3))
    assert [n for n, s in trace.nodes.items() if s["type"] in ("sample", "param")] == ["g"]
    assert set(dict(fixed.named_buffers())) == {"left", "right"}
    assert bool((fixed.left.abs() == 1.0).all() and (fixed.right.abs() == 1.0).all())


def test_looking_at_a_layer_draws_nothing() -> None:
    layer, before = WalshHadamardLinear(3, 9), torch.get_rng_state()
    assert "WalshHadamardLinear" in repr(layer)
    assert torch.equal(before, torch.get_rng_state())


def test_copies_devices_and_dtypes() -> None:
    layer = WalshHadamardLinear(3, 9)
    g, b, x = torch.randn(12), torch.randn(9), torch.randn(4, 3)
    expected = run(layer, x, g=g, bias=b)
    stream = io.BytesIO()
    torch.save(layer, stream)
    stream.seek(0)
    copies = [
        copy.deepcopy(layer),
        pickle.loads(pickle.dumps(layer)),
        torch.load(stream, weights_only=False),
    ]
    for other in copies:
        pyro.clear_param_store()
        torch.testing.assert_close(run(other, x, g=g, bias=b), expected)
    pyro.clear_param_store()
    half = layer.float()
    assert half(x.float()).dtype == torch.float32
    pyro.clear_param_store()
    meta = WalshHadamardLinear(3, 9, device="meta", dtype=torch.float32, train_diagonals=False)
    assert meta(torch.empty(4, 3, device="meta")).shape == (4, 9)


def test_closed_form_kl_needs_a_guide_of_normal_sites() -> None:
    """TraceMeanField_ELBO has it for guides that sample g from a normal; AutoNormal samples a Delta."""
    layer, x = WalshHadamardLinear(4, 6, bias=False), torch.randn(3, 4)

    def model() -> None:
        layer(x)

    auto: Any = AutoNormal(model, init_loc_fn=init_to_sample, init_scale=0.5)
    auto()
    loc, scale = auto.locs.g, auto.scales.g
    kl = (0.5 * (scale.square() + loc.square() - 1.0) - scale.log()).sum()

    def guide() -> None:
        pyro.sample("g", dist.Normal(loc, scale).to_event(1))

    exact = [TraceMeanField_ELBO().loss(model, guide) for _ in range(3)]
    torch.testing.assert_close(torch.tensor(exact), kl.detach().expand(3))
    with torch.no_grad():
        draws = torch.tensor([TraceMeanField_ELBO().loss(model, auto) for _ in range(500)])
    standard_error = draws.std() / math.sqrt(len(draws))
    assert abs(draws.mean() - kl) < 4.0 * standard_error


@pytest.mark.parametrize("kind", [AutoNormal, AutoMultivariateNormal, ngvi.AutoFullRankNormal])
@pytest.mark.parametrize(
    "loss",
    [Trace_ELBO(2), Trace_ELBO(2, max_plate_nesting=1, vectorize_particles=True),
     ngvi.BatchedELBO(2), TraceMeanField_ELBO(2)],
    ids=["Trace", "vectorized", "Batched", "mean field"],
)  # fmt: skip
def test_any_guide_and_loss(kind: Any, loss: Any) -> None:
    model, x, y = Net(), torch.randn(7, 3), torch.randn(7)
    guide = kind(model, init_loc_fn=init_to_sample)
    ngvi.diagnostics.check_vectorized(model, guide, x, y)
    adam = Adam({"lr": 0.01})
    ours = isinstance(guide, ngvi.AutoFullRankNormal)
    optim = ngvi.NGVB(guide, others=adam) if ours else adam
    before = model.hidden.left.detach().clone()
    loss_value: Any = SVI(model, guide, optim, loss).step(x, y)
    assert math.isfinite(float(loss_value))
    assert not torch.equal(before, model.hidden.left)  # the diagonals are trained too


@pytest.mark.parametrize("parallel", [False, True])
def test_predictive(parallel: bool) -> None:
    model, x = Net(), torch.randn(7, 3)
    guide = AutoNormal(model, init_loc_fn=init_to_sample)
    guide(x)
    draws = Predictive(model, guide=guide, num_samples=5, parallel=parallel)(x)
    assert draws["y"].reshape(5, -1).shape == (5, 7)
