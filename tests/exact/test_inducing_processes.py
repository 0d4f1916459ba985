"""Inducing points of several processes: the dense algebra at Z = X, closed forms, minibatches, data."""

import copy
import math
import pickle
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Predictive
from pyro.optim import Adam  # pyright: ignore[reportAttributeAccessIssue]
from torch import Tensor, nn

import pyro_ngvi as ngvi
from pyro_ngvi.distributions import GaussianProcess
from pyro_ngvi.runtime.run import Minibatches
from pyro_ngvi.sites.conditioned_model import ConditionedModel
from tests.covering import covering
from tests.exact.process_cases import (
    NOISE,
    Matern,
    gradients_are_slopes,
    minibatches_agree_with_all_data,
    trained,
)

N, M, JITTER = 24, 7, 1e-4
Z = torch.linspace(0.1, 4.9, M, dtype=torch.float64)
NEW = torch.linspace(-1, 6, 9, dtype=torch.float64)


def kernel_of(c: int) -> Matern:
    return Matern(*[(1.3, 0.7), (0.6, 1.9), (2.0, 1.2)][c])


def inputs(size: int = N) -> Tensor:
    return 5 * torch.rand(size, generator=torch.Generator().manual_seed(1))


def process(c: int, X: Tensor, jitter: float, kernel: Any = None) -> Any:
    own = GaussianProcess(kernel or kernel_of(c), X, mean=0.1 * c, jitter=jitter)
    return pyro.sample("fgh"[c], own)


def likelihood(kind: str, X: Tensor, functions: list[Tensor]) -> Any:
    """Of the functions of three processes, or of two of them."""
    f, g = functions[:2]
    if kind == "softmax":
        return dist.Categorical(logits=torch.stack(functions, -1))
    if kind == "pair":
        return dist.Normal(f, (0.5 * g - 1).exp())
    if kind == "sum":
        return dist.Normal(f + g, NOISE)
    return dist.Bernoulli(logits=2 * f - X.cos() * g + X)  # "mixture"


def make(kind: str, jitter: float = JITTER, kernels: Any = (None, None, None)) -> Any:
    def model(X: Tensor, y: Tensor | None = None, batch: int | None = None) -> None:
        plate = pyro.plate("data", len(X), subsample_size=batch)
        here = X[plate.indices]
        count = 3 if kind == "softmax" else 2
        functions = [process(c, here, jitter, kernels[c]) for c in range(count)]
        with plate:
            seen = None if y is None else y[plate.indices]
            pyro.sample("y", likelihood(kind, here, functions), obs=seen)

    return model


def case(kind: str, size: int = N) -> tuple[Tensor, Tensor]:
    X = inputs(size)
    torch.manual_seed(4)
    return X, likelihood(kind, X, [(2 * X).sin(), X.cos(), 0.4 * X - 1]).sample()


KINDS = ["softmax", "pair", "sum", "mixture"]


@pytest.mark.parametrize("kind", KINDS)
def test_inducing_inputs_at_all_data_are_the_dense_algebra(kind: str) -> None:
    """Without jitter, which would differ in f(X) and in f(Z)."""
    X, y = case(kind)
    model = make(kind, 0.0)
    dense, dense_losses = trained(model, X, y, 6)
    sparse, losses = trained(model, X, y, 6, X.clone())
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(dense_losses), rtol=0, atol=1e-10)
    for at in ((), (NEW,)):
        a, b = dense.get_posterior(*at), sparse.get_posterior(*at)
        torch.testing.assert_close(a.mean, b.mean, rtol=0, atol=1e-10)
        torch.testing.assert_close(a.covariance_matrix, b.covariance_matrix, rtol=0, atol=1e-10)
    found, expected = sparse.predict(NEW), dense.predict(NEW)
    assert list(found) == list(expected) == list("fgh"[: 3 if kind == "softmax" else 2])
    for name, pair in expected.items():
        torch.testing.assert_close(found[name], pair, rtol=0, atol=1e-10)
    a, b = dense.loo(), sparse.loo()
    torch.testing.assert_close(a.pointwise["y"], b.pointwise["y"], rtol=0, atol=1e-10)
    a, b = dense.influence(), sparse.influence()
    torch.testing.assert_close(a.distance, b.distance, rtol=0, atol=1e-9)
    torch.testing.assert_close(a.shift([0, 5]), b.shift([0, 5]), rtol=0, atol=1e-10)
    sets = [[0, 3, 4], list(range(15))]
    a, b = dense.influence(groups=sets), sparse.influence(groups=sets)
    torch.testing.assert_close(a.kl, b.kl, rtol=0, atol=1e-9)
    torch.testing.assert_close(a.shift(), b.shift(), rtol=0, atol=1e-10)


def nystrom(c: int, A: Tensor, B: Tensor) -> Tensor:
    k = kernel_of(c)
    return k(A, Z) @ torch.linalg.solve(k(Z) + JITTER * torch.eye(M), k(Z, B))


def test_a_sum_reaches_the_collapsed_bound_in_one_step() -> None:
    """Titsias (2009), equations (6) and (9), with Q = Q_f + Q_g and the rests added."""
    X, y = case("sum")
    guide, losses = trained(make("sum"), X, y, 2, Z)
    Q = nystrom(0, X, X) + nystrom(1, X, X)
    S = Q + NOISE**2 * torch.eye(N)
    fit = dist.MultivariateNormal(torch.full((N,), 0.1), S)
    rest = sum(kernel_of(c)(X, diag=True) + JITTER for c in range(2)) - Q.diagonal()
    bound = fit.log_prob(y) - 0.5 * rest.sum() / NOISE**2
    assert abs(losses[1] + float(bound.detach())) < 1e-9
    for c, name in enumerate("fg"):
        to_new = nystrom(c, X, NEW)
        mean = 0.1 * c + to_new.mT @ torch.linalg.solve(S, y - 0.1)
        explained = (to_new * torch.linalg.solve(S, to_new)).sum(0)
        variance = kernel_of(c)(NEW, diag=True) + JITTER - explained
        found = guide.predict(NEW)[name]
        torch.testing.assert_close(found, (mean, variance), rtol=0, atol=1e-9)


def test_mixed_outputs_reach_the_collapsed_bound_in_one_step() -> None:
    """y_n (2,) = W' (f, g, h)_n + noise of covariance S: the rests of both are correlated too."""
    X, y = case("sum")
    Y = torch.stack([y, y.cos()], -1)
    W = torch.tensor([[1.0, 0.5], [-0.8, 0.7], [0.4, 0.9]])
    S = torch.tensor([[0.3, 0.1], [0.1, 0.2]])

    def model(X: Tensor, Y: Tensor) -> None:
        functions = torch.stack([process(c, X, JITTER) for c in range(3)], -1)
        with pyro.plate("data", len(X)):
            pyro.sample("y", dist.MultivariateNormal(functions @ W, S), obs=Y)

    guide, losses = trained(model, X, Y, 2, Z)
    mean = torch.tensor([0.0, 0.1, 0.2]) @ W
    Q = [nystrom(c, X, X) for c in range(3)]
    outputs = [torch.outer(w, w) for w in W]
    total = sum(torch.kron(q, w) for q, w in zip(Q, outputs, strict=True))
    total = total + torch.kron(torch.eye(N), S)
    fit = dist.MultivariateNormal(mean.repeat(N), total)
    rests = [(kernel_of(c)(X, diag=True) + JITTER - Q[c].diagonal()).sum() for c in range(3)]
    rest = sum(r * w for r, w in zip(rests, outputs, strict=True))
    bound = fit.log_prob(Y.flatten()) - 0.5 * torch.trace(torch.linalg.solve(S, rest))
    assert abs(losses[1] + float(bound.detach())) < 1e-9
    assert guide.sites()["y"].linear.shape == (N, 2)


def test_draws_have_the_moments_of_the_prediction() -> None:
    X, y = case("pair")
    model = make("pair")
    guide, _ = trained(model, X, y, 5, Z)
    S = 200
    torch.manual_seed(0)
    found = guide.predict(NEW)
    drawn = Predictive(model, guide=guide, num_samples=S)(NEW)
    q = guide.get_posterior(NEW)
    draws = torch.cat([drawn[name].reshape(S, -1) for name in "fg"], -1)
    sd = torch.cat([variance for _, variance in found.values()]).sqrt()
    z = (draws.mean(0) - torch.cat([mean for mean, _ in found.values()])) / (sd / S**0.5)
    assert z.abs().max() < 4  # in standard errors
    torch.testing.assert_close(q.variance, sd.square(), rtol=0, atol=1e-9)
    # the covariance of f and g at one input, by its own standard error
    covariance = q.covariance_matrix[: len(NEW), len(NEW) :].diagonal()
    off = draws - q.mean
    products = off[:, : len(NEW)] * off[:, len(NEW) :]
    assert covariance.abs().max() > 1e-3
    assert ((products.mean(0) - covariance) / (products.std(0) / S**0.5)).abs().max() < 4
    trace: Any = pyro.poutine.trace(guide).get_trace(NEW)
    values = torch.cat([trace.nodes[name]["value"] for name in "fg"])
    torch.testing.assert_close(trace.log_prob_sum(), q.log_prob(values), rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize(
    ("kind", "first"), covering(KINDS, ["all data", "a minibatch"], strength=1)
)
def test_minibatches_converge_to_where_all_data_do(kind: str, first: str) -> None:
    X, y = case(kind)
    model = make(kind)
    whole, losses = trained(model, X, y, 20, Z)
    guide = ngvi.AutoSites(model, inducing=Z)
    svi = SVI(model, guide, ngvi.CVI(guide), ngvi.SitesELBO())
    if first == "all data":
        svi.step(X, y)
    for _ in range(60):
        svi.step(X, y, batch=8)
    loss = ngvi.SitesELBO()
    assert abs(loss.loss(model, guide, X, y) - losses[-1]) < 1e-9
    # the evidence that was gathered in minibatches is that of all sites
    for name, (mean, variance) in whole.predict(NEW).items():
        torch.testing.assert_close(guide.predict(NEW)[name][0], mean, rtol=0, atol=1e-6)
        torch.testing.assert_close(guide.predict(NEW)[name][1], variance, rtol=0, atol=1e-6)
    values = torch.tensor([loss.loss(model, guide, X, y, batch=8) for _ in range(20)])
    assert abs(values.mean() - losses[-1]) < 4 * values.std() / 20**0.5


def test_two_kinds_of_data_see_the_processes_in_their_own_ways() -> None:
    """One sees f, one f and g, one their difference: the dense algebra tells what comes out."""
    X, y = case("sum")
    other, third = y + 0.1, y - 0.3

    def model(X: Tensor) -> None:
        f, g = process(0, X, 0.0), process(1, X, 0.0)
        with pyro.plate("data", len(X)):
            pyro.sample("a", dist.StudentT(4.0, f, NOISE), obs=y)
            pyro.sample("b", dist.Normal(f, g.exp()), obs=other)
            pyro.sample("c", dist.Normal(f - g, 1.0), obs=third)

    found = []
    for inducing in (None, X.clone()):
        guide: Any = ngvi.AutoSites(model, inducing=inducing)
        svi: Any = SVI(model, guide, ngvi.CVI(guide), ngvi.SitesELBO())
        losses = [svi.step(X) for _ in range(12)]
        assert {g.name: g.width for g in guide.plan.groups} == {"a": 1, "b": 2, "c": 1}
        found.append((torch.tensor(losses), guide.predict(NEW), guide.loo().pointwise))
    torch.testing.assert_close(*found, rtol=0, atol=1e-9)
    assert abs(found[0][0][-1] - found[0][0][-2]) < 1e-6


@pytest.mark.parametrize("inducing", [None, Z])
def test_groups_that_see_the_same_function_are_integrated_apart(inducing: Any) -> None:
    """``a`` sees f, ``b`` f and g, and their expectations are known in closed form."""
    X, y = case("sum")
    other = y + 0.1

    def model() -> None:
        f, g = process(0, X, JITTER), process(1, X, JITTER)
        with pyro.plate("data", N):
            pyro.sample("a", dist.Normal(f, NOISE), obs=y)
            pyro.sample("b", dist.Normal(f, (0.2 * g).exp()), obs=other)

    guide = ngvi.AutoSites(model, inducing=inducing)
    loss = ngvi.SitesELBO()
    svi = SVI(model, guide, ngvi.CVI(guide), loss)
    for _ in range(5):
        svi.step()
    with torch.no_grad():
        _, found = loss._estimate(model, guide, (), {}, False)
    m, C = (t.squeeze(-1) for t in found.marginals["a"].whole)
    log_2pi = math.log(2 * math.pi)
    expected = (
        -0.5 * ((y - m).square() + C.squeeze(-1)) / NOISE**2 - math.log(NOISE) - 0.5 * log_2pi
    )
    torch.testing.assert_close(found.expected["a"].value, expected, rtol=0, atol=1e-9)
    # under exp(-2 h), h = 0.2 g, the mean of f is less by 2 cov(f, h)
    m, C = found.marginals["b"].whole
    mean, variance, covariance = 0.2 * m[:, 1], 0.04 * C[:, 1, 1], 0.2 * C[:, 0, 1]
    square = (other - m[:, 0] + 2 * covariance).square() + C[:, 0, 0]
    expected = -0.5 * square * (2 * variance - 2 * mean).exp() - mean - 0.5 * log_2pi
    torch.testing.assert_close(found.expected["b"].value, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("outputs_first", [False, True])
def test_several_outputs_at_each_input(outputs_first: bool) -> None:
    """Data (N, 2) or (2, N): each sees its own combination at its own input."""
    X, y = case("sum")
    Y = torch.stack([y, y.flip(0)], 0 if outputs_first else -1)
    mix = torch.tensor([[1.0, 0.5], [-0.3, 1.0]])

    def model(X: Tensor, Y: Tensor, batch: int | None = None) -> None:
        plate = pyro.plate("data", len(X), subsample_size=batch)
        i = plate.indices
        functions = torch.stack([process(0, X[i], 0.0), process(1, X[i], 0.0)], -1) @ mix
        with plate:
            if outputs_first:
                with pyro.plate("outputs", 2):
                    pyro.sample("y", dist.Normal(functions.mT, NOISE), obs=Y[:, i])
            else:
                pyro.sample("y", dist.Normal(functions, NOISE).to_event(1), obs=Y[i])

    dense, (_, expected) = trained(model, X, Y, 2)
    sparse, (_, loss) = trained(model, X, Y, 2, X.clone())
    assert abs(loss - expected) < 1e-10
    for name, pair in dense.predict(NEW, Y).items():
        torch.testing.assert_close(sparse.predict(NEW, Y)[name], pair, rtol=0, atol=1e-10)
    small, _ = trained(model, X, Y, 40, X.clone(), batch=8)  # exact once every datum was seen
    assert abs(ngvi.SitesELBO().loss(model, small, X, Y) - expected) < 1e-10


def test_the_inputs_of_processes_may_differ() -> None:
    """An additive model over two columns, with the same inducing values for both."""
    X, y = case("sum")
    U = 5 - X.flip(0)

    def model(X: Tensor) -> None:
        f, g = process(0, X, JITTER), process(1, U, JITTER)
        with pyro.plate("data", N):
            pyro.sample("y", dist.Normal(f + g, NOISE), obs=y)

    guide = ngvi.AutoSites(model, inducing=Z)
    SVI(model, guide, ngvi.CVI(guide), ngvi.SitesELBO()).step(X)
    S = nystrom(0, X, X) + nystrom(1, U, U) + NOISE**2 * torch.eye(N)
    mean = nystrom(0, NEW, X) @ torch.linalg.solve(S, y - 0.1)
    call = guide.call_of((NEW,), {})
    torch.testing.assert_close(guide.algebra.mean_and_sd(call)[0][: len(NEW)], mean.detach())


def test_gradients_hold_the_sites() -> None:
    """In hyperparameters, the scale of a process in the sum, and Z, against differences."""
    X, y = case("mixture", 14)
    kernels = [Matern(1.0, 0.8, learn=True), Matern(0.5, 1.5, learn=True)]
    scale = nn.Parameter(torch.tensor(0.7))

    def model(X: Tensor, y: Tensor, batch: int | None = None) -> None:
        for c, kernel in enumerate(kernels):
            pyro.module(f"kernel{c}", kernel)
        s = pyro.param("scale", scale)
        plate = pyro.plate("data", len(X), subsample_size=batch)
        i = plate.indices
        f, g = (process(c, X[i], JITTER, kernels[c]) for c in range(2))
        with plate:
            pyro.sample("y", dist.Bernoulli(logits=f + s * g), obs=y[i])

    points = nn.Parameter(Z[::2].clone())
    before = points.detach().clone()
    guide, _ = trained(model, X, y, 3, points, Adam({"lr": 0.02}))
    assert (points - before).abs().min() > 1e-3
    scale = pyro.param("scale")  # Pyro's own leaf
    parameters = [p for k in kernels for p in k.parameters()] + [scale, points]
    loss = ngvi.SitesELBO()
    gradients_are_slopes(loss, parameters, model, guide, X, y)
    for k in kernels:
        k.requires_grad_(False).train(False)  # else Pyro warns
    points.requires_grad_(False)
    svi: Any = SVI(model, guide, ngvi.CVI(guide, others=Adam({"lr": 0.02})), loss)
    with pytest.raises(ValueError, match="the numbers by which the data of 'y' see the latent"):
        svi.step(X, y, batch=5)
    scale.requires_grad_(False)
    assert math.isfinite(svi.step(X, y, batch=5))


def test_data_come_and_go() -> None:
    X, y = case("sum")
    model = make("sum")
    kept = torch.arange(N) != 3
    guide: Any = trained(model, X, y, 1, Z)[0]
    guide.remove(3)
    without, (_, expected) = trained(model, X[kept], y[kept], 2, Z)
    assert guide.plan.dim == 2 * (N - 1)
    for name, pair in without.predict(NEW).items():
        torch.testing.assert_close(guide.predict(NEW)[name], pair, rtol=0, atol=1e-9)
    svi: Any = SVI(model, guide, ngvi.CVI(guide), ngvi.SitesELBO())
    assert abs(svi.step(X[kept], y[kept]) - expected) < 1e-9
    guide.add(1)
    X, y = (torch.cat([t[kept], t[~kept]]) for t in (X, y))
    losses = [svi.step(X, y) for _ in range(2)]
    _, (_, expected) = trained(model, X, y, 2, Z)
    assert abs(losses[1] - expected) < 1e-9


def test_copies_and_saved_guides_predict_the_same() -> None:
    X, y = case("softmax")
    guide, losses = trained(make("softmax"), X, y, 8, Z)
    expected = guide.predict(NEW)
    twin = copy.deepcopy(guide)
    stored = pickle.loads(pickle.dumps(guide))
    stored.adopt(guide.model)
    for other in (twin, stored):
        for name, pair in expected.items():
            torch.testing.assert_close(other.predict(NEW)[name], pair)
        svi: Any = SVI(guide.model, other, ngvi.CVI(other), ngvi.SitesELBO())
        assert svi.step(X, y) < losses[-1] + 1e-9


def test_the_kept_maps_follow_the_kernel_of_each_process() -> None:
    X, y = case("sum")
    kernels = [Matern(1.3, 0.7), Matern(0.6, 1.9)]
    model = make("sum", kernels=[*kernels, None])
    guide, _ = trained(model, X, y, 2, Z)
    call = guide.call_of((X, y), {})
    first = guide.algebra.view(call)
    assert all(
        a is b for a, b in zip(guide.algebra.view(call).processes, first.processes, strict=True)
    )
    before = call.fingerprint()["y"]
    kernels[1].log_lengthscale.data += 0.1
    call = guide.call_of((X, y), {})
    second = guide.algebra.view(call)
    assert second.processes[0] is first.processes[0]
    assert second.processes[1] is not first.processes[1]
    assert (call.fingerprint()["y"] != before).any(-1).all()
    guide.refresh(X, y)
    fresh, _ = trained(model, X, y, 1, Z)
    torch.testing.assert_close(guide.predict(NEW)["g"], fresh.predict(NEW)["g"])
    # two kernels that change places are another prior, though their sum is the same
    call = guide.call_of((X, y), {})
    guide.algebra.view(call)
    before = call.fingerprint()["y"]
    for one, two in zip(kernels[0].parameters(), kernels[1].parameters(), strict=True):
        one.data, two.data = two.data, one.data
    call = guide.call_of((X, y), {})
    guide.algebra.view(call)
    assert (call.fingerprint()["y"] != before).any(-1).all()


def test_noise_counts_as_zero_for_processes_at_other_inputs_only() -> None:
    X, y = case("sum")

    def model(X: Tensor, U: Tensor) -> None:
        f, g = process(0, X, JITTER), process(1, U, JITTER)
        with pyro.plate("data", N):
            pyro.sample("y", dist.Normal(f[:1] + g[:1] + torch.zeros(N), 1.0), obs=y)

    shapes = {"f": torch.Size((N,)), "g": torch.Size((3,))}
    noise = torch.arange(1.0, N + 4)
    for sizes in ((N, 3), (5, 3), (N, 2), (N + 3, 3)):
        args = X.repeat(2)[: sizes[0]], X[: sizes[1]]
        run = ConditionedModel(model, args, {}, {}, Minibatches(), shapes, True)(noise)
        for name, own, size in zip("fg", noise.split([N, 3]), sizes, strict=True):
            expected = own if len(own) == size else torch.zeros(size)
            assert torch.equal(run.sites[name]["value"], expected)


def test_minibatches_in_a_list_of_guides() -> None:
    X, y = case("sum")

    def model(X: Tensor, y: Tensor, batch: int | None = None) -> None:
        scale = pyro.sample("scale", dist.LogNormal(-1.0, 0.5))
        plate = pyro.plate("data", len(X), subsample_size=batch)
        f, g = (process(c, X[plate.indices], JITTER) for c in range(2))
        with plate:
            pyro.sample("y", dist.Normal(f + g, scale), obs=y[plate.indices])

    trace = minibatches_agree_with_all_data(model, Z, X, y, batch=8)
    assert [len(trace.nodes[name]["value"]) for name in ("data", "f", "g")] == [8, 8, 8]
