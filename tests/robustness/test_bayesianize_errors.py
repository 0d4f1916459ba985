"""What ``bayesianize`` and ``predict`` refuse, and that they say what to do."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoNormal
from pyro.nn import PyroModule
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
)

import pyro_ngvi as ngvi
from pyro_ngvi.nn import bayesianize, predict

pytestmark = pytest.mark.usefixtures("plain_start")

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(8, 2, dtype=torch.float64, generator=GENERATOR)
Y = torch.randn(8, dtype=torch.float64, generator=GENERATOR)


def linear(**more: Any) -> Any:
    return bayesianize(nn.Linear(2, 1), "normal", **{"num_data": 8, "noise": 1.0, **more})


@pytest.mark.parametrize(
    "layer, message",
    [
        (nn.BatchNorm1d(4), r"'1' \(BatchNorm1d\) is in training mode.*eval\(\).*LayerNorm"),
        (nn.BatchNorm1d(4, track_running_stats=False).eval(), "no running statistics.*GroupNorm"),
        (nn.InstanceNorm1d(4, track_running_stats=True), r"\(InstanceNorm1d\).*updates its"),
        (nn.Dropout(0.1), r"'1' \(Dropout\) is in training mode.*eval\(\)"),
        (nn.RReLU(), r"\(RReLU\).*random"),
        (nn.LSTM(4, 4, num_layers=2, dropout=0.1), r"\(LSTM\).*random"),
        (nn.MultiheadAttention(4, 2, dropout=0.1), r"\(MultiheadAttention\).*random"),
        (PyroModule(), "PyroModule already"),
        (nn.LazyLinear(3), r"'1' \(LazyLinear\) has parameters that are not made yet\. Run"),
        (nn.Embedding(5, 4, padding_idx=0), r"'1' \(Embedding\) has padding_idx, .*tokens != i"),
        (nn.Embedding(5, 4, max_norm=1.0), "has padding_idx, max_norm or scale_grad"),
        (nn.EmbeddingBag(5, 4, scale_grad_by_freq=True), "has padding_idx, max_norm or scale_grad"),
    ],
)
def test_layers_that_are_refused(layer: nn.Module, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        bayesianize(nn.Sequential(nn.Linear(2, 4), layer), "normal", num_data=8)


@pytest.mark.filterwarnings("ignore:`torch.jit.trace")
def test_a_compiled_module_is_refused() -> None:
    net: Any = torch.jit.trace(nn.Linear(2, 1).double(), X)
    with pytest.raises(ValueError, match=r"is compiled by torch\.jit.*that it was made of"):
        bayesianize(net, "normal", num_data=8)


@pytest.mark.parametrize(
    "layer", [nn.BatchNorm1d(4).eval(), nn.Dropout(0.1).eval(), nn.Dropout(0.0), nn.GroupNorm(2, 4)]
)
@pytest.mark.parametrize("loss", [Trace_ELBO(2), ngvi.BatchedELBO(2)], ids=["Trace", "Batched"])
def test_layers_that_are_fine(layer: nn.Module, loss: Any) -> None:
    net = nn.Sequential(nn.Linear(2, 4), layer, nn.Linear(4, 1)).double()
    model = bayesianize(net, "normal", num_data=8)
    guide = ngvi.AutoMeanFieldNormal(model)
    SVI(model, guide, ngvi.NGVB(guide), loss=loss).step(X, Y)
    assert torch.isfinite(guide.loc).all()


def test_training_mode_that_is_switched_on_later() -> None:
    net = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double().eval()
    model = bayesianize(net, "normal", num_data=8)
    net.train()  # the model has a copy
    for each in (model, copy.deepcopy(model)):
        each(X, Y)
        each.train()
        with pytest.raises(ValueError, match=r"BatchNorm1d.*training mode"):
            each(X, Y)


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        ({"num_data": None}, ValueError, "num_data must be .*got None"),
        ({"prior": 0.0}, ValueError, "'weight' is 0.0; give the sd as a positive number"),
        ({"prior": True}, ValueError, "'weight' is True"),
        ({"prior": dist.Normal(0.0, 1.0)}, ValueError, "give the sd .* or a function"),
        ({"prior": {"*.bias": 1.0}}, ValueError, r"'weight'; its patterns are \['\*.bias'\]"),
        ({"noise": -1.0}, ValueError, "noise is -1.0"),
        ({"noise": dist.HalfNormal(1.0)}, ValueError, "a function that returns one of"),
    ],
)
def test_arguments_that_are_refused(arguments: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        linear(**arguments)


@pytest.mark.parametrize(
    "likelihood, error, message",
    [
        ("poisson", ValueError, '"categorical", "bernoulli", "normal" or a function'),
        (3, ValueError, "likelihood is 3; .* or a function"),
    ],
)
def test_likelihoods_that_are_refused(likelihood: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        bayesianize(nn.Linear(2, 1), likelihood, num_data=8)


def test_noise_of_another_likelihood() -> None:
    with pytest.raises(ValueError, match='noise belongs to likelihood="normal"'):
        bayesianize(nn.Linear(2, 1), "bernoulli", num_data=8, noise=1.0)


def test_modules_without_parameters_to_sample() -> None:
    with pytest.raises(ValueError, match=r"Tanh has no parameter to sample"):
        bayesianize(nn.Tanh(), "normal", num_data=8)
    with pytest.raises(ValueError, match="none requires a gradient"):
        bayesianize(nn.Linear(2, 1).requires_grad_(False), "normal", num_data=8)


def test_integer_parameters_stay_as_they_are() -> None:
    net = nn.Linear(2, 1)
    net.count = nn.Parameter(torch.tensor(3), requires_grad=False)
    assert list(bayesianize(net, "normal", num_data=8).sites) == ["weight", "bias"]


@pytest.mark.parametrize("name", ["y", "data", "noise"])
def test_parameter_with_the_name_of_another_site(name: str) -> None:
    net = nn.Linear(2, 1)
    net.register_parameter(name, nn.Parameter(torch.zeros(())))
    with pytest.raises(RuntimeError, match=f"Multiple sample sites named '{name}'"):
        poutine.trace(bayesianize(net, "normal", num_data=8)).get_trace(X, Y)
    assert f"0.{name}" in bayesianize(nn.Sequential(net), "normal", num_data=8).sites


def test_minibatch_larger_than_the_data() -> None:
    with pytest.raises(ValueError, match="8 examples, but num_data is 4"):
        linear(num_data=4)(X, Y)


@pytest.mark.parametrize("shape", [(7,), (8, 2), (1, 8)])
def test_targets_of_another_shape(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"y has shape .*one of y with shape \(8,\)"):
        linear()(X, torch.zeros(shape))


def test_outputs_of_another_shape() -> None:
    class Sum(nn.Linear):
        def forward(self, input: Tensor) -> Any:
            return super().forward(input).sum()

    class Pair(nn.Linear):
        def forward(self, input: Tensor) -> Any:
            return super().forward(input), None

    with pytest.raises(ValueError, match=r"output of shape \(\) for a batch of 8 examples"):
        bayesianize(Sum(2, 1), "normal", num_data=8)(X, Y)
    with pytest.raises(ValueError, match="output of type tuple for a batch of 8"):
        bayesianize(Pair(2, 1), "normal", num_data=8)(X, Y)
    with pytest.raises(ValueError, match=r"batch shape \(\); that must be .* \(8,\)"):
        bayesianize(nn.Sequential(nn.Linear(2, 1), nn.Flatten(0)), "categorical", num_data=8)(X, Y)


@pytest.mark.parametrize(
    "prior, error, message",
    [
        (lambda name, p: dist.Normal(torch.zeros(3), 1.0), ValueError, r"shape \(3,\).*\(1, 2\)"),
        (lambda name, p: p, TypeError, "'weight' returns Parameter"),
        (lambda name, p: torch.distributions.Normal(0.0, 1.0), TypeError, "pyro.distributions"),
    ],
)
def test_functions_that_return_no_prior(prior: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        linear(prior=prior)(X, Y)


def test_prior_functions_may_return_any_shape_that_fits() -> None:
    def rows(name: str, p: Tensor) -> Any:
        if p.dim() == 1:
            return dist.Normal(0.0, 1.0)
        return dist.MultivariateNormal(torch.zeros(p.shape[-1]), torch.eye(p.shape[-1]))

    model = linear(prior=rows)
    site: Any = pyro.poutine.trace(model).get_trace(X, Y).nodes["weight"]
    assert site["fn"].event_shape == (1, 2) and site["fn"].batch_shape == ()


def test_likelihood_function_that_returns_no_distribution() -> None:
    with pytest.raises(TypeError, match="The likelihood '<lambda>' returns Tensor"):
        bayesianize(nn.Linear(2, 1), lambda f: f, num_data=8)(X, Y)


def test_recurrent_layers_run_one_particle_at_a_time() -> None:
    class Recurrent(nn.RNN):
        def forward(self, input: Tensor, hx: Any = None) -> Any:
            return super().forward(input, hx)[0][:, -1]

    x = torch.randn(8, 3, 2)
    model = bayesianize(Recurrent(2, 1, batch_first=True), "normal", num_data=8)
    guide = ngvi.AutoMeanFieldNormal(model)
    SVI(model, guide, ngvi.NGVB(guide), loss=Trace_ELBO(2)).step(x, Y)
    vectorised: Any = Trace_ELBO(2, vectorize_particles=True, max_plate_nesting=1)
    with pytest.raises(Exception, match=r"[Bb]atching rule"):
        vectorised.loss(model, guide, x, Y)
    with pytest.warns(RuntimeWarning, match=r"vmap cannot run.*each of 2 particles"):
        assert np.isfinite(ngvi.BatchedELBO(2).loss(model, guide, x, Y))


def test_weights_with_two_dimensions_of_particles() -> None:
    model = linear()
    handler: Any = pyro.poutine.condition(
        model, {"weight": torch.zeros(3, 1, 1, 2), "bias": torch.zeros(4, 1, 1)}
    )
    with pytest.raises(ValueError, match=r"same size in the mapped dimension, got sizes \[3, 4\]"):
        handler(X, Y)


def test_predict_refuses() -> None:
    model = linear()
    guide = ngvi.AutoMeanFieldNormal(model)
    with pytest.raises(ValueError, match=r"never been called. Train it first"):
        predict(model, guide, X)
    guide(X, Y)
    with pytest.raises(TypeError, match="made by bayesianize, got Linear"):
        predict(nn.Linear(2, 1), guide, X)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="num_samples is 0"):
        predict(model, guide, X, num_samples=0)
    with pytest.raises(ValueError, match="8 examples in x and 3 in y"):
        predict(model, guide, X, Y[:3])
    with pytest.raises(ValueError, match="no batch"):
        predict(model, guide, X[:0])
    with pytest.raises(ValueError, match=r"pairs \(x, y\)"):
        predict(model, guide, [X], Y)
    with pytest.raises(ValueError, match="Some batches come with y"):
        predict(model, guide, [(X, Y), X])
    with pytest.raises(TypeError, match="'float' object is not iterable"):
        predict(model, guide, 1.0)


def test_predict_warns_of_a_loader_that_shuffles() -> None:
    model, data = linear(), TensorDataset(X, Y)
    guide = ngvi.AutoMeanFieldNormal(model)
    guide(X, Y)
    again = RandomSampler(data)
    for loader in (
        DataLoader(data, 2, shuffle=True),
        DataLoader(data, batch_sampler=BatchSampler(again, 2, False)),
        DataLoader(data, sampler=SubsetRandomSampler(range(3))),
    ):
        with pytest.warns(UserWarning, match="the loader shuffles") as told:
            predict(model, guide, loader)
        assert len(told) == 1 and told[0].filename == __file__
    mean = predict(model, guide, DataLoader(data, 2), seed=0).mean
    assert torch.allclose(mean, predict(model, guide, X, seed=0).mean)


def test_predict_needs_every_latent_site() -> None:
    def guide(x: Any, y: Any = None) -> None:
        pyro.sample("weight", dist.Normal(torch.zeros(1, 2), 1.0).to_event(2))

    with pytest.raises(ValueError, match="latent site 'bias' of the model is not sampled"):
        predict(linear(), guide, X, Y)


def test_predict_needs_a_guide_of_the_same_network() -> None:
    def net(*out: int) -> nn.Sequential:
        pairs = zip((2, *out), out, strict=False)
        return nn.Sequential(*(nn.Linear(n, m) for n, m in pairs))

    def guide_of(module: nn.Module, noise: Any = None) -> Any:
        model = bayesianize(module, "normal", num_data=8, noise=noise)
        guide = ngvi.AutoMeanFieldNormal(model)
        guide(X, module(X))
        return guide

    model = bayesianize(net(4, 3), "normal", num_data=8)
    for other in (net(8, 3), net(4, 1), net(4, 4, 1)):
        with pytest.raises(ValueError, match=r"'\d.weight' has shape .* guide of another network"):
            predict(model, guide_of(other), X, Y)
    with pytest.raises(ValueError, match=r"'2.weight', which is no site of the model"):
        predict(model, guide_of(net(4, 3, 1)), X)
    noise = guide_of(net(4, 3), lambda: dist.HalfNormal(torch.ones(3)).to_event(1))
    with pytest.raises(ValueError, match=r"'noise' has shape \(\) in the model, .* shape \(3,\)"):
        predict(model, noise, X)


class Running(nn.Module):
    """Keeps a running mean of what it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1).double()
        self.register_buffer("mean", torch.zeros(2, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        self.mean += 0.1 * (x.mean(0) - self.mean)
        return self.linear(x - self.mean)


class Dropped(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(nn.functional.dropout(input))


@pytest.mark.parametrize("module", [Running(), Dropped(2, 1).double()])
def test_modules_that_do_not_repeat_their_output(module: nn.Module) -> None:
    guide = ngvi.AutoMeanFieldNormal(bayesianize(module, "normal", num_data=8))
    for _ in range(2):
        with pytest.raises(ValueError, match="returns another output when it is run again"):
            guide(X, Y)


class Cached(nn.Module):
    """Counts its runs, keeps constants in a buffer that it makes at the first one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1).double()
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("scale", torch.zeros(0))
        self.register_buffer("graph", torch.eye(2).to_sparse())

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        if len(self.scale) != x.shape[1]:
            self.scale = torch.arange(1.0, 1.0 + x.shape[1]).to(x)
        return self.linear(x * self.scale)


def test_buffers_that_do_not_change_the_output_are_fine() -> None:
    model = bayesianize(Cached(), "normal", num_data=8, noise=1.0)
    guide = ngvi.AutoMeanFieldNormal(model)
    guide(X, Y)
    weights = {"linear.weight": X[:1], "linear.bias": X[0, :1]}
    expected = (X * torch.tensor([1.0, 2.0])) @ X[0] + X[0, 0]
    output = poutine.condition(model, data=weights)(X, Y)
    torch.testing.assert_close(output.squeeze(-1), expected)


@pytest.mark.parametrize(
    "outputs, size, event_dim",
    [(3, 3, 0), (3, 2, 0), (3, 2, 1), (3, 8, 0), (3, 8, 1), (1, 8, 0), (1, 8, 1)],
)
def test_noise_of_another_shape_than_the_outputs(outputs: int, size: int, event_dim: int) -> None:
    """Eight examples: a noise of batch shape (8,) would be one for each of them."""
    model = bayesianize(
        nn.Linear(2, outputs).double(),
        "normal",
        num_data=8,
        noise=lambda: dist.HalfNormal(torch.ones(size).double()).to_event(event_dim),
    )
    with pytest.raises(ValueError, match=r"noise has batch shape .* outputs of shape"):
        ngvi.AutoMeanFieldNormal(model)(X, Y[:, None].expand(8, outputs))


@pytest.mark.parametrize("index", [[0, 1], list(range(1, 9)), [0.0] * 8, [True] * 8])
def test_numbers_of_the_examples(index: Any) -> None:
    with pytest.raises(ValueError, match=r"index is of shape .* from 0 to 7, of each of the 8"):
        linear()(X, Y, index)
    linear()(X, Y, list(range(7, -1, -1)))


@pytest.mark.parametrize(
    ("likelihood", "y"),
    [
        ("bernoulli", 2.0 * (Y > 0) - 1.0),
        ("bernoulli", torch.full((8,), torch.nan)),
        (lambda f: dist.Poisson(f.squeeze(-1).exp()), torch.full((8,), 1.5)),
        (lambda f: dist.Gamma(2.0, f.squeeze(-1).exp()), -Y.abs()),
    ],
    ids=["-1 and 1", "NaN", "half a count", "Gamma"],
)
def test_predict_refuses_targets_outside_the_support(likelihood: Any, y: Tensor) -> None:
    model = bayesianize(nn.Linear(2, 1), likelihood, num_data=8)
    guide = ngvi.AutoMeanFieldNormal(model)
    guide(X, (y > 0.0).double() + (likelihood != "bernoulli"))
    with pytest.raises(
        ValueError, match=r"The site 'y' cannot be evaluated.*(within the support|8 values are NaN)"
    ):
        predict(model, guide, X, y)


@pytest.mark.parametrize(
    "likelihood",
    [
        lambda f: dist.VonMises(f.squeeze(-1), 4.0),
        lambda f: dist.MixtureSameFamily(
            dist.Categorical(torch.ones(2)),
            dist.Categorical(logits=f.unsqueeze(-2).expand(-1, 2, -1)),
        ),
    ],
    ids=["angle", "mixture of classes"],
)
def test_predict_refuses_likelihoods_with_other_moments(likelihood: Any) -> None:
    model = bayesianize(nn.Linear(2, 1), likelihood, num_data=8)
    guide = ngvi.AutoMeanFieldNormal(model)
    guide(X, torch.zeros(8))
    with pytest.raises(ValueError, match="has no mean or variance in closed form"):
        predict(model, guide, X)


@pytest.mark.parametrize("made", [0.5, torch.tensor(0.5)])
def test_a_noise_function_that_makes_no_distribution(made: Any) -> None:
    with pytest.raises(TypeError, match=r"The function noise returns .*pyro.distributions"):
        linear(noise=lambda: made)(X, Y)


def test_chained_hyperparameters_by_batched_elbo() -> None:

    def horseshoe(name: str, p: Tensor) -> Any:
        tau = pyro.sample("tau", dist.HalfNormal(1.0))
        return dist.Normal(0.0, pyro.sample(f"{name}_scale", dist.HalfNormal(tau)))

    model = linear(prior=horseshoe)
    guide = AutoNormal(model, init_scale=0.1, init_loc_fn=model.init_to_module)
    guide(X, Y)

    def mean(loss: Any, runs: int) -> Tensor:
        return torch.tensor([loss.loss(model, guide, X, Y) for _ in range(runs)]).mean()

    # of sd 2 a draw: 500 and 250 draws leave a standard error of 0.15 of their difference
    torch.testing.assert_close(
        mean(ngvi.BatchedELBO(500), 1), mean(Trace_ELBO(), 250), rtol=0, atol=0.6
    )
