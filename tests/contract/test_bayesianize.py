"""A module as a Pyro model: its sites, its log joint by hand, training, copies, predictions."""

from __future__ import annotations

import copy
import io
import math
import pickle
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
import torch.nn.functional as F
from pyro import poutine
from pyro.infer import SVI, Predictive, Trace_ELBO
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import pyro_ngvi as ngvi
from pyro_ngvi.nn import bayesianize, predict
from tests.contract.same_noise import GUIDES, assert_same_as_trace_elbo

N = 40


def mlp(out: int = 3) -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, out))


def classes() -> tuple[Tensor, Tensor]:
    x = torch.randn(N, 2)
    return x, (x.sum(-1) > 0).long() + (x[:, 0] > 1).long()


def trained(model: Any, *args: Any, steps: int = 20) -> Any:
    guide = ngvi.AutoMeanFieldNormal(model, init_loc_fn=model.init_to_module)
    svi = SVI(model, guide, ngvi.NGVB(guide), loss=ngvi.BatchedELBO(2))
    for _ in range(steps):
        svi.step(*args)
    return guide


def log_normal(x: Tensor, sd: float) -> Tensor:
    return (-0.5 * (x / sd).square() - math.log(sd) - 0.5 * math.log(2 * math.pi)).sum()


def draw_weights(net: nn.Module) -> dict[str, Tensor]:
    return {name: torch.randn_like(p) for name, p in net.named_parameters()}


def output_by_hand(w: dict[str, Tensor], x: Tensor) -> Tensor:
    """That of :func:`mlp`."""
    hidden = torch.tanh(x @ w["0.weight"].mT + w["0.bias"])
    return hidden @ w["2.weight"].mT + w["2.bias"]


def log_likelihood(kind: str, f: Tensor, y: Tensor) -> Tensor:
    if kind == "categorical":
        return f.log_softmax(-1)[torch.arange(len(y)), y].sum()
    if kind == "bernoulli":
        return -F.binary_cross_entropy_with_logits(f[:, 0], y.to(f), reduction="sum")
    return log_normal(y - f[:, 0], 0.5)


@pytest.mark.parametrize("kind", ["categorical", "bernoulli", "normal"])
@pytest.mark.parametrize("num", [8, 5])
def test_log_joint_is_the_sum_by_hand(kind: str, num: int) -> None:
    net = mlp(3 if kind == "categorical" else 1)
    x, y = torch.randn(num, 2), torch.randint(2, (num,))
    prior: Any = {"*.bias": 3.0, "2.*": lambda name, p: dist.Laplace(0.0, 0.7), "*": 2}
    noise = {"noise": 0.5} if kind == "normal" else {}
    model = bayesianize(net, kind, num_data=N, prior=prior, **noise)
    w = draw_weights(net)
    trace: Any = poutine.trace(poutine.condition(model, w)).get_trace(x, y)
    laplace = (-w["2.weight"].abs() / 0.7 - math.log(2 * 0.7)).sum()
    expected = (
        log_normal(w["0.weight"], 2.0)
        + log_normal(w["0.bias"], 3.0)
        + laplace
        + log_normal(w["2.bias"], 3.0)
        + N / num * log_likelihood(kind, output_by_hand(w, x), y)
    )
    torch.testing.assert_close(torch.as_tensor(trace.log_prob_sum()), expected)
    returned = trace.nodes["_RETURN"]["value"]
    torch.testing.assert_close(returned, output_by_hand(w, x))


def test_latent_noise() -> None:
    model = bayesianize(mlp(1), "normal", num_data=N)
    x, y = torch.randn(N, 2), torch.randn(N, 1)
    trace: Any = poutine.trace(model).get_trace(x, y)
    noise = trace.nodes["noise"]["value"]
    density = ngvi.diagnostics.ModelDensity(model, (x, y))
    values = {name: trace.nodes[name]["value"][None] for name in [*model.sites, "noise"]}
    theta = density.pack(values)
    w = {name: value[0] for name, value in values.items()}
    expected = (
        sum(log_normal(w[name], 1.0) for name in model.sites)
        + (2 / math.pi / (1 + noise**2)).log()  # half-Cauchy
        + dist.Normal(output_by_hand(w, x), noise).log_prob(y).sum()
        + noise.log()  # Jacobian of noise = exp(theta)
    )
    torch.testing.assert_close(density(theta)[0], expected)


def test_sites_have_dotted_names_and_the_shapes_of_the_parameters() -> None:
    net = mlp()
    model = bayesianize(net, "categorical", num_data=N)
    assert model.sites == {name: p.shape for name, p in net.named_parameters()}
    trace: Any = poutine.trace(model).get_trace(*classes())
    latent = {n: s for n, s in trace.iter_stochastic_nodes() if n != "data"}
    assert list(latent) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    for name, site in latent.items():
        assert site["fn"].event_shape == model.sites[name] and site["fn"].batch_shape == ()
    frame = trace.nodes["y"]["cond_indep_stack"][0]
    assert (frame.name, frame.size, frame.full_size) == ("data", N, N)


def test_frozen_parameters_and_buffers_keep_their_values() -> None:
    net = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).eval()
    nn.init.normal_(net[1].running_mean)  # pyright: ignore
    net[0].requires_grad_(False)
    model = bayesianize(net, "categorical", num_data=N)
    assert list(model.sites) == ["1.weight", "1.bias", "2.weight", "2.bias"]
    x, _ = classes()
    values = {name: net.get_parameter(name).detach() for name in model.sites}
    torch.testing.assert_close(poutine.condition(model, values)(x), net(x))


def test_tied_parameters_are_one_site() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))
    net[2].weight = net[0].weight
    model = bayesianize(net, "categorical", num_data=N)
    assert list(model.sites) == ["0.weight", "0.bias", "2.bias"]
    w = {name: torch.randn(shape) for name, shape in model.sites.items()}
    x, _ = classes()
    expected = output_by_hand({**w, "2.weight": w["0.weight"]}, x)
    torch.testing.assert_close(poutine.condition(model, w)(x), expected)


class CalledTwice(nn.Module):
    """One layer that stands in one place, and is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.out = nn.Linear(2, 2), nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.a(torch.tanh(self.a(x)))))


@pytest.mark.parametrize("curvature", [None, "gauss_newton"])
def test_a_layer_in_two_places_trains_as_one_that_is_called_twice(curvature: Any) -> None:
    x, y = classes()
    once = CalledTwice()
    twice = nn.Sequential(once.a, nn.Tanh(), once.a, nn.Tanh(), once.out)
    found = []
    for module in (once, twice):
        model = bayesianize(module, "categorical", num_data=N)
        assert len(model.sites) == 4
        guide: Any = ngvi.AutoMeanFieldNormal(
            model, init_loc_fn=model.init_to_module, init_scale=0.1
        )
        rule = ngvi.NGVB if curvature is None else ngvi.optim.VOGN
        svi = SVI(model, guide, rule(guide), ngvi.BatchedELBO(2, curvature=curvature))
        pyro.set_rng_seed(0)
        losses = [svi.step(x, y) for _ in range(3)]
        q = guide.get_posterior()
        found.append((torch.tensor(losses), q.mean, q.variance))
        model.module(x)  # its own weights are back
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_the_users_module_stays_as_it_is() -> None:
    net = mlp()
    before = copy.deepcopy(net.state_dict())
    model = bayesianize(net, "categorical", num_data=N)
    trained(model, *classes())
    model.float()
    assert type(net) is nn.Sequential and type(net[0]) is nn.Linear
    assert all(torch.equal(net.state_dict()[name], value) for name, value in before.items())
    assert all(p.requires_grad and p.grad is None for p in net.parameters())
    assert not any(name in pyro.get_param_store() for name in before)


@pytest.mark.parametrize("how", ["pickle", "deepcopy", "torch.save"])
def test_copies_have_the_same_log_joint(how: str) -> None:
    model = bayesianize(mlp(), "categorical", num_data=N, prior={"*.bias": 2.0, "*": 1.0})
    x, y = classes()
    w = draw_weights(model.module)
    log_joint = poutine.trace(poutine.condition(model, w)).get_trace(x, y).log_prob_sum()
    if how == "pickle":
        other = pickle.loads(pickle.dumps(model))
    elif how == "deepcopy":
        other = copy.deepcopy(model)
    else:
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        other = torch.load(buffer, weights_only=False)
    assert other.module[0].weight is not model.module[0].weight  # pyright: ignore
    again = poutine.trace(poutine.condition(other, w)).get_trace(x, y).log_prob_sum()
    assert again == log_joint


def test_float32() -> None:
    x, y = classes()
    net = mlp().float()
    guide = trained(bayesianize(net, "categorical", num_data=N), x.float(), y)
    assert guide.loc.dtype == torch.float32
    model = bayesianize(mlp(1), "normal", num_data=N).float()
    guide = trained(model, x.float(), x[:, :1])  # y in float64
    assert guide.loc.dtype == torch.float32 and torch.isfinite(guide.loc).all()
    assert predict(model, guide, x.float(), x[:, 0], num_samples=5).mean.dtype == torch.float32


def test_first_run_in_inference_mode_leaves_nothing_behind() -> None:
    model = bayesianize(mlp(), "categorical", num_data=N)
    x, y = classes()
    with torch.inference_mode():
        model(x)
    assert torch.isfinite(trained(model, x, y, steps=2).loc).all()


@pytest.mark.parametrize("lead", [(), (3, 1)], ids=["one draw", "vectorised"])
def test_runs_on_meta_tensors(lead: tuple[int, ...]) -> None:
    model = bayesianize(mlp(), "categorical", num_data=N).to("meta")
    x, y = torch.empty(8, 2, device="meta"), torch.empty(8, device="meta", dtype=torch.long)
    w = {name: torch.empty(*lead, *shape, device="meta") for name, shape in model.sites.items()}
    handler: Any = poutine.condition(model, w)
    with pyro.validation_enabled(False):
        trace: Any = poutine.trace(handler).get_trace(x, y)
        trace.compute_log_prob()
    assert trace.nodes["y"]["log_prob"].shape == (*lead[:1], 8)
    assert trace.nodes["y"]["log_prob"].device.type == "meta"


def test_guide_starts_at_the_weights_of_the_module() -> None:
    net = mlp(1)
    model = bayesianize(net, "normal", num_data=N)
    guide = ngvi.AutoMeanFieldNormal(model, init_loc_fn=model.init_to_module)
    guide(torch.randn(N, 2), torch.randn(N))
    median = guide.median()
    for name, p in net.named_parameters():
        torch.testing.assert_close(median[name], p.detach())
    torch.testing.assert_close(median["noise"], torch.tensor(1.0))  # the median of its prior


@pytest.mark.parametrize("guide", ["full rank", "site by site"])
@pytest.mark.parametrize("kind", ["normal", "categorical"])
def test_batched_elbo_is_trace_elbo(kind: str, guide: str) -> None:
    """Loss and gradients at the same noise, on a minibatch."""
    model = bayesianize(mlp(3 if kind == "categorical" else 1), kind, num_data=N)
    x, y = torch.randn(8, 2), torch.randint(2, (8,))
    assert_same_as_trace_elbo(model, GUIDES[guide](model), (x, y), 3)


def test_vectorised_particles_are_the_particles_one_by_one() -> None:
    """``check_vectorized`` compares the log_prob of every site, and of the examples of ``y``."""
    x = torch.randn(6, 5, 2)  # an event of 5 for each example
    net = nn.Sequential(nn.Linear(2, 4), nn.LayerNorm(4), nn.Linear(4, 1))
    for kind, y in (("normal", torch.randn(6, 5)), ("bernoulli", torch.ones(6, 5))):
        model = bayesianize(net, kind, num_data=N)
        guide = ngvi.AutoMeanFieldNormal(model)
        guide(x, y)
        ngvi.diagnostics.check_vectorized(model, guide, x, y)
        out = Predictive(model, guide=guide, num_samples=7, parallel=True)(x)
        assert out["y"].shape == (7, 6, 5)


def test_predictive_in_parallel_is_predictive_in_a_loop() -> None:
    model = bayesianize(mlp(), "categorical", num_data=N)
    x, y = classes()
    guide = trained(model, x, y)
    w = {name: torch.randn(5, *shape) for name, shape in model.sites.items()}
    both = [
        Predictive(model, w, return_sites=["_RETURN"], parallel=parallel)(x)["_RETURN"]
        for parallel in (False, True)
    ]
    assert both[0].shape == (5, N, 3)
    torch.testing.assert_close(both[1], both[0])
    more = torch.randn(N + 10, 2)  # more examples than there are training data
    drawn = Predictive(model, guide=guide, num_samples=7, parallel=True)(more)
    assert drawn["y"].shape == (7, N + 10)


def test_dataloader_loop_trains() -> None:
    """Batches of 16 of 40: the last one of an epoch has 8."""
    x, y = classes()
    model = bayesianize(mlp(), "categorical", num_data=N)
    guide = ngvi.AutoMeanFieldNormal(model, init_loc_fn=model.init_to_module)
    svi = SVI(model, guide, ngvi.NGVB(guide), loss=ngvi.BatchedELBO(4))
    guide(x, y)
    before = predict(model, guide, x, y, seed=0).log_density
    sizes: list[int] = []
    loader: Any = DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True)
    for _ in range(30):
        for batch in loader:
            svi.step(*batch)
            sizes.append(len(batch[0]))
    assert sizes[:3] == [16, 16, 8]
    with pytest.warns(UserWarning, match="Averages over all rows are right"):
        after = predict(model, guide, loader, seed=0).log_density
    assert before is not None and after is not None
    assert after.mean() > before.mean() + 0.3  # nats an example


def test_arviz_of_all_data_and_its_refusal_of_a_minibatch() -> None:
    x, y = classes()
    model = bayesianize(mlp(), "categorical", num_data=N)
    guide = trained(model, x, y)
    data: Any = ngvi.to_arviz(model, guide, x, y, num_samples=30, seed=0)
    assert data["log_likelihood"]["y"].shape == (1, 30, N)
    assert data["posterior"]["2.weight"].shape == (1, 30, 3, 4)
    with pytest.raises(ValueError, match="'data' takes 10 of 40 examples"):
        ngvi.to_arviz(model, guide, x[:10], y[:10], num_samples=30)


def test_convolutions_on_digits() -> None:
    """From the weights of torch's initialisation to better than chance in 80 minibatches."""
    sklearn = pytest.importorskip("sklearn.datasets")
    digits = sklearn.load_digits()
    x = torch.as_tensor(digits.images, dtype=torch.float32)[:600, None] / 16.0
    y = torch.as_tensor(digits.target)[:600]
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 6, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(54, 10)
    ).float()
    model = bayesianize(net, "categorical", num_data=len(x))
    guide = ngvi.AutoMeanFieldNormal(model, init_loc_fn=model.init_to_module)
    svi = SVI(model, guide, ngvi.NGVB(guide), loss=ngvi.BatchedELBO(2))
    for index in torch.randint(len(x), (80, 100)):
        svi.step(x[index], y[index])
    prediction = predict(model, guide, x, y, num_samples=10, batch_size=250, seed=0)
    assert prediction.log_density is not None
    assert prediction.log_density.mean() > math.log(0.1) + 0.5  # chance gives log 1/10
    accuracy = (prediction.mean.argmax(-1) == y).double().mean()
    assert accuracy > 0.5


def test_predict_is_the_average_by_hand() -> None:
    x, y = classes()
    model = bayesianize(mlp(), "categorical", num_data=N)
    guide = trained(model, x, y)
    p = predict(model, guide, x, y, num_samples=6, batch_size=16, keep_draws=True, seed=3)
    assert p.draws is not None and p.log_density is not None
    assert p.draws.shape == (6, N, 3)
    torch.testing.assert_close(p.mean, p.draws.mean(0))
    torch.testing.assert_close(p.sd, (p.mean * (1 - p.mean)).sqrt())
    torch.testing.assert_close(p.log_density, p.mean[torch.arange(N), y].log())
    again = predict(model, guide, x, y, num_samples=6, chunk_size=2, keep_draws=True, seed=3)
    torch.testing.assert_close(again.draws, p.draws)
    loader: Any = DataLoader(TensorDataset(x, y), batch_size=16)
    by_loader = predict(model, guide, loader, num_samples=6, seed=3)
    torch.testing.assert_close(by_loader.log_density, p.log_density)
    only_x: Any = DataLoader(TensorDataset(x), batch_size=16)
    assert predict(model, guide, only_x, num_samples=6, seed=3).log_density is None


def test_predictions_of_a_regression_are_its_closed_form() -> None:
    """One weight with a known q: y | x ~ N(m x, (s x)^2 + noise^2) in the limit of many draws.

    The standard error of the mean over S draws is s |x| / sqrt(S); that of the variance is
    (s x)^2 sqrt(2 / S), and that of the log density is bounded through the sd of the density.
    """
    S, noise = 4000, 0.5
    model = bayesianize(nn.Linear(1, 1, bias=False), "normal", num_data=10, noise=noise)
    x, y = torch.tensor([[0.5], [2.0]]), torch.tensor([0.7, 1.0])
    guide = ngvi.AutoMeanFieldNormal(model)
    guide(x, y)
    m, s = 0.8, 0.3
    with torch.no_grad():
        guide.loc.fill_(m)
        guide.log_scale.fill_(math.log(s))
    p = predict(model, guide, x, y, num_samples=S, keep_draws=True, seed=0)
    mean, variance = m * x[:, 0], (s * x[:, 0]).square()
    assert ((p.mean - mean).abs() < 4 * (variance / S).sqrt()).all()
    error = p.sd.square() - variance - noise**2
    assert (error.abs() < 4 * variance * math.sqrt(2 / S)).all()
    assert p.draws is not None and p.log_density is not None
    densities = dist.Normal(p.draws, noise).log_prob(y).exp()
    relative_error = densities.std(0) / densities.mean(0) / math.sqrt(S)
    exact = dist.Normal(mean, (variance + noise**2).sqrt()).log_prob(y)
    assert ((p.log_density - exact).abs() < 4 * relative_error).all()


def test_predict_a_recurrent_network_draw_by_draw() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.GRU(2, 3, batch_first=True)
            self.head = nn.Linear(3, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.rnn(x)[0][:, -1])

    x, y = torch.randn(8, 5, 2), torch.ones(8)
    model = bayesianize(Recurrent(), "bernoulli", num_data=N)
    guide = ngvi.AutoMeanFieldNormal(model)
    svi = SVI(model, guide, ngvi.NGVB(guide), loss=Trace_ELBO(2))
    svi.step(x, y)
    p = predict(model, guide, x, y, num_samples=4, keep_draws=True)
    assert p.draws is not None and p.draws.shape == (4, 8)
    assert len(p.draws.unique(dim=0)) == 4


def test_several_inputs_and_a_likelihood_with_latents_of_its_own() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(2))

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return a * self.w[0] + b * self.w[1]

    def student(f: Tensor) -> Any:
        scale = pyro.sample("scale", dist.HalfNormal(1.0))
        return dist.StudentT(4.0, f, scale)

    a, b, y = torch.randn(3, 8)
    model = bayesianize(Two(), student, num_data=N)
    w = {"w": torch.tensor([0.5, -1.0]), "scale": torch.tensor(0.8)}
    trace: Any = poutine.trace(poutine.condition(model, w)).get_trace((a, b), y)
    trace.compute_log_prob()
    expected = N / 8 * dist.StudentT(4.0, 0.5 * a - b, 0.8).log_prob(y)
    torch.testing.assert_close(trace.nodes["y"]["log_prob"], expected)
    guide = trained(model, (a, b), y, steps=2)
    assert predict(model, guide, (a, b), y, num_samples=5, batch_size=3).mean.shape == (8,)


def test_prior_function_may_sample_hyperparameters() -> None:
    def hierarchical(name: str, p: Tensor) -> Any:
        return dist.Normal(0.0, pyro.sample(f"{name}.sd", dist.HalfNormal(1.0)))

    x, y = classes()
    model = bayesianize(mlp(), "categorical", num_data=N, prior=hierarchical)
    guide = trained(model, x, y, steps=2)
    assert guide.median()["0.weight.sd"].shape == ()
    assert guide.median()["0.weight"].shape == (4, 2)


def test_parameters_share_a_hyperparameter_of_one_name() -> None:
    x, y = classes()

    def prior(name: str, p: Tensor) -> Any:
        return dist.Normal(0.0, pyro.sample("sd", dist.HalfNormal(1.0)))

    model = bayesianize(mlp(), "categorical", num_data=N, prior=prior)
    guide = trained(model, x, y, steps=2)
    assert [name for name in guide.median() if "sd" in name] == ["sd"]
    at = {name: torch.randn(shape) for name, shape in model.sites.items()}
    sd = torch.tensor(0.5)
    trace: Any = poutine.trace(poutine.condition(model, {"sd": sd, **at})).get_trace(x, y)
    trace.compute_log_prob()
    for name, w in at.items():
        expected = dist.Normal(0.0, sd).log_prob(w).sum()
        torch.testing.assert_close(trace.nodes[name]["log_prob"], expected)


def horseshoe(name: str, p: Tensor) -> Any:
    scale = pyro.sample(f"{name}.scale", dist.HalfCauchy(1.0))
    local = pyro.sample(f"{name}.local", dist.HalfCauchy(p.new_ones(p.shape[-1])).to_event(1))
    return dist.Normal(0.0, scale * local)


def one_sd(name: str, p: Tensor) -> Any:
    return dist.Normal(0.0, pyro.sample(f"{name}.sd", dist.HalfNormal(1.0)))


@pytest.mark.parametrize("prior", [one_sd, horseshoe])
def test_hyperparameters_run_one_particle_at_a_time(prior: Any) -> None:
    x, y = classes()
    model = bayesianize(mlp(), "categorical", num_data=N, prior=prior)
    guide = trained(model, x, y, steps=2)
    drawn = Predictive(model, guide=guide, num_samples=7)(x)
    assert drawn["y"].shape == (7, len(x))
    vectorised = Trace_ELBO(2, vectorize_particles=True, max_plate_nesting=1)
    for run in (
        lambda: Predictive(model, guide=guide, num_samples=7, parallel=True)(x),
        lambda: vectorised.loss(model, guide, x, y),
    ):
        with pytest.raises(ValueError, match=r"'0\.weight' samples '0\.weight\.s.*BatchedELBO"):
            run()


@pytest.mark.parametrize("S", [3, 6, 7])
def test_predictive_in_parallel_with_the_noise_of_each_output(S: int) -> None:
    """S = 6 draws for 6 examples of 3 outputs: nothing meets by its size."""
    x = torch.randn(6, 2, dtype=torch.float64)
    for event in ((3,), (1,), ()):
        noise = dist.LogNormal(x.new_zeros(event), 1.0).to_event(len(event))
        net = nn.Linear(2, 3).double()
        model = bayesianize(net, "normal", num_data=6, noise=lambda noise=noise: noise)
        sds = (
            torch.logspace(-9, 9, S, dtype=x.dtype).reshape(S, *[1] * len(event)).expand(S, *event)
        )
        latents = {"weight": x.new_zeros(S, 3, 2), "bias": x.new_zeros(S, 3), "noise": sds}
        both = [
            Predictive(model, latents, return_sites=["y"], parallel=parallel)(x)["y"]
            for parallel in (False, True)
        ]
        for y in both:  # of 18 numbers: within a factor 10 of their sd but for one in 1e9
            size = y.reshape(S, -1).square().mean(1).sqrt() / sds.reshape(S, -1)[:, 0]
            assert y.shape == (S, 6, 3) and bool(((size > 0.1) & (size < 10.0)).all())


def test_noise_of_each_output() -> None:
    """Also where a minibatch has as many examples as an example has outputs."""
    sds = torch.tensor([0.1, 1.0, 3.0])
    x, y = torch.randn(3, 2), torch.randn(3, 3)
    one_each = dist.HalfCauchy(torch.ones(3, dtype=x.dtype)).to_event(1)
    model = bayesianize(nn.Linear(2, 3).double(), "normal", num_data=3, noise=lambda: one_each)
    weights = {"weight": torch.randn(3, 2), "bias": torch.randn(3)}
    conditioned = poutine.condition(model, data={"noise": sds, **weights})
    trace: Any = poutine.trace(conditioned).get_trace(x, y)
    trace.compute_log_prob()
    mean = x @ weights["weight"].T + weights["bias"]
    expected = dist.Normal(mean, sds).log_prob(y).sum(-1)
    torch.testing.assert_close(trace.nodes["y"]["log_prob"], expected)

    def particles() -> None:
        with pyro.plate("particles", 4, dim=-2):
            model(x, y)

    values = {"noise": sds.expand(4, 1, 3)} | {
        k: w.expand(4, 1, *w.shape) for k, w in weights.items()
    }
    trace = poutine.trace(poutine.condition(particles, data=values)).get_trace()
    trace.compute_log_prob()
    torch.testing.assert_close(trace.nodes["y"]["log_prob"], expected.expand(4, 3))


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, dtype=torch.float64)
        self.encoder = nn.TransformerEncoder(layer, 1)
        self.out = nn.Linear(4, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.encoder(x).mean(1))


@pytest.mark.filterwarnings("ignore:BatchedELBO.*jumps")  # of its ReLU
@pytest.mark.parametrize("curvature", [None, "hessian"])
def test_attention_in_eval_mode_has_gradients(curvature: str | None) -> None:
    """torch's fast kernels for it have none, and fused ones no second ones."""
    x, y = torch.randn(6, 5, 4), torch.arange(6) % 3
    model = bayesianize(Encoder().eval(), "categorical", num_data=6)
    guide = ngvi.AutoMeanFieldNormal(model, init_loc_fn=model.init_to_module)
    svi = SVI(model, guide, ngvi.NGVB(guide), ngvi.BatchedELBO(2, curvature=curvature))
    fast = torch.backends.mha.get_fastpath_enabled()
    assert all(math.isfinite(float(svi.step(x, y))) for _ in range(3))  # type: ignore[arg-type]
    assert torch.backends.mha.get_fastpath_enabled() == fast
    vectorized = SVI(model, guide, ngvi.NGVB(guide), Trace_ELBO(2, vectorize_particles=True))
    assert math.isfinite(float(vectorized.step(x, y)))  # type: ignore[arg-type]


class Sum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(2, 1).double(), nn.Linear(3, 1).double()

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.a(a) + self.b(b)


def test_inputs_from_a_data_loader() -> None:
    """It makes a list of the tuple of a dataset."""
    a, b, y = torch.randn(8, 2), torch.randn(8, 3), torch.randn(8)
    model = bayesianize(Sum(), "normal", num_data=8)
    data = [((a[i], b[i]), y[i]) for i in range(8)]
    loader = torch.utils.data.DataLoader(data, batch_size=4)  # type: ignore[arg-type]
    guide = ngvi.AutoMeanFieldNormal(model)
    svi = SVI(model, guide, ngvi.NGVB(guide), ngvi.BatchedELBO(2))
    for x, target in loader:
        svi.step(x, target)
    assert predict(model, guide, loader, num_samples=5).mean.shape == (8,)


class Several(nn.Module):
    """Takes a second input, or any number."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1)


class Optional(Several):
    def forward(self, a: Tensor, b: Tensor | None = None) -> Tensor:
        return self.linear(a if b is None else a + b)


class Star(Several):
    def forward(self, *inputs: Tensor) -> Tensor:
        return self.linear(torch.stack(inputs).sum(0))


@pytest.mark.parametrize("module", [Optional, Star])
def test_lists_for_modules_of_optional_inputs(module: type[Several]) -> None:
    model = bayesianize(module(), "normal", num_data=6, noise=1.0)
    a, b, y = torch.randn(6, 2), torch.randn(6, 2), torch.randn(6)
    values = {"linear.weight": torch.randn(1, 2), "linear.bias": torch.randn(1)}
    weights = poutine.condition(model, data=values)
    assert torch.equal(weights([a, b], y), weights((a, b), y))
    assert torch.equal(weights([a], y), weights(a, y))
    assert torch.equal(weights([a, b], y), weights(a + b, y))


def test_seeds_of_predict_are_those_of_a_copy_too() -> None:
    """The first run of a copied guide makes its parameters, and draws for nobody."""
    num_data: Any = np.int64(N)
    model = bayesianize(mlp(), "categorical", num_data=num_data)
    x, y = classes()
    guide = trained(model, x, y, steps=2)
    first = predict(model, guide, x, num_samples=5, seed=0).mean
    again = copy.deepcopy(guide)
    for _ in range(2):
        assert torch.equal(predict(model, again, x, num_samples=5, seed=0).mean, first)
    pyro.clear_param_store()
    assert torch.equal(predict(model, guide, x, num_samples=5, seed=0).mean, first)
