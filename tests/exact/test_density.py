"""A model as a batched function: closed forms, Pyro's own traces, and Pyro's own layout."""

from itertools import combinations
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer.autoguide import AutoDiagonalNormal
from torch import Tensor
from torch.distributions import biject_to, constraints
from torch.func import grad, jacrev, vmap

from pyro_ngvi.runtime.density import to_unconstrained
from pyro_ngvi.runtime.model_density import ModelDensity, batched_trace

S, N, D = 4, 6, 3


def regression(X: Tensor, y: Tensor) -> None:
    w = pyro.sample("w", dist.Normal(X.new_zeros(D), 2.0).to_event(1))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(X @ w, 0.5), obs=y)


def data(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    return torch.randn(N, D, dtype=dtype), torch.randn(N, dtype=dtype)


def constrained(x: Tensor) -> None:
    """Every kind of site, in an order that is not that of their names."""
    rate = pyro.sample("rate", dist.Gamma(2.0, 1.0))
    p = pyro.sample("p", dist.Dirichlet(torch.ones(D)))
    L = pyro.sample("L", dist.LKJCholesky(D, 2.0))
    A = pyro.sample("A", dist.Normal(torch.zeros(2, D), 1.0).to_event(2))
    with pyro.plate("groups", 2):
        group = pyro.sample("group", dist.LogNormal(0.0, 1.0))
    pyro.deterministic("twice", 2 * p)
    pyro.factor("penalty", -rate * (A**2).sum())
    with pyro.plate("data", N):
        kept: Any = torch.arange(N) % 2 == 0
        with poutine.mask(mask=kept), poutine.scale(scale=3.0):
            pyro.sample("x", dist.MultivariateNormal(p * group.sum(), scale_tril=rate * L), obs=x)


def plain_log_joint(model: Any, values: dict[str, Tensor], *args: Any) -> Tensor:
    """One particle through Pyro's own handlers."""
    trace = poutine.trace(poutine.condition(model, data=values)).get_trace(*args)
    return torch.as_tensor(trace.log_prob_sum())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_value_gradient_and_hessian_of_a_linear_regression(dtype: torch.dtype) -> None:
    torch.set_default_dtype(dtype)
    X, y = data(dtype)
    density = ModelDensity(regression, (X, y))
    theta = torch.randn(S, D, dtype=dtype)

    def one(t: Tensor) -> Tensor:
        return density(t[None])[0]

    tolerance: Any = {"rtol": 1e-11, "atol": 1e-11}
    if dtype == torch.float32:
        tolerance = {"rtol": 1e-5, "atol": 1e-4}
    residual = y - theta @ X.T
    half_log = torch.tensor(2 * torch.pi, dtype=dtype).log() / 2
    value = -(residual**2).sum(1) * 2 - (theta**2).sum(1) / 8
    value = value - (N + D) * half_log + (N - D) * torch.tensor(2.0, dtype=dtype).log()
    torch.testing.assert_close(density(theta), value, **tolerance)
    gradient = 4 * residual @ X - theta / 4
    torch.testing.assert_close(vmap(grad(one))(theta), gradient, **tolerance)
    hessian = (-4 * X.T @ X - torch.eye(D, dtype=dtype) / 4).expand(S, D, D)
    torch.testing.assert_close(vmap(jacrev(grad(one)))(theta), hessian, **tolerance)
    torch.testing.assert_close(
        jacrev(density)(theta).diagonal(dim1=0, dim2=1).T, gradient, **tolerance
    )


def test_same_log_joint_as_pyro_with_every_kind_of_site() -> None:
    x = torch.randn(N, D)
    density = ModelDensity(constrained, (x,))
    theta = torch.randn(S, density.dim)
    trace = density.trace(theta)
    for s, row in enumerate(theta):
        values = {name: value[s] for name, value in density.unpack(theta).items()}
        log_joint = plain_log_joint(constrained, values, x)
        torch.testing.assert_close(trace.log_joint()[s], log_joint, rtol=1e-12, atol=1e-12)
        conditioned = poutine.condition(constrained, data=values)
        nodes: dict[str, Any] = dict(poutine.trace(conditioned).get_trace(x).nodes)
        log_det = torch.zeros(())
        for name, part in _parts(density, row).items():
            transform = biject_to(nodes[name]["fn"].support)
            log_det = log_det + transform.log_abs_det_jacobian(part, transform(part)).sum()
        torch.testing.assert_close(density(theta)[s], log_joint + log_det, rtol=1e-12, atol=1e-12)


def _parts(density: ModelDensity, row: Tensor) -> dict[str, Tensor]:
    shapes = density.layout.unconstrained_shapes
    parts = row.split([shape.numel() for shape in shapes.values()])
    return {name: part.reshape(shapes[name]) for name, part in zip(shapes, parts, strict=True)}


def test_sites_carry_what_a_pyro_trace_carries() -> None:
    x = torch.randn(N, D)
    density = ModelDensity(constrained, (x,))
    theta = torch.randn(S, density.dim)
    sites = density.trace(theta).sites
    kinds = {name: site.kind for name, site in sites.items()}
    assert kinds == {
        "rate": "latent",
        "p": "latent",
        "L": "latent",
        "A": "latent",
        "group": "latent",
        "twice": "deterministic",
        "penalty": "factor",
        "x": "observed",
    }
    values = density.unpack(theta)
    torch.testing.assert_close(sites["twice"].value, 2 * values["p"])
    torch.testing.assert_close(sites["x"].value, x.expand(S, N, D))
    observed = sites["x"]
    assert isinstance(observed.mask, Tensor)
    assert observed.scale == 3.0 and observed.event_dim == 1
    assert [frame.name for frame in observed.plates] == ["data"]
    assert observed.mask.shape == observed.log_prob.shape == (S, N)
    weight = 3.0 * (torch.arange(N) % 2 == 0)
    torch.testing.assert_close(observed.log_prob, weight * observed.unscaled_log_prob)
    assert (observed.unscaled_log_prob[:, 1] != 0).all()
    assert sites["group"].log_prob.shape == (S, 2)
    terms = [site.log_prob for site in sites.values() if site.kind != "deterministic"]
    total = sum(term.reshape(S, -1).sum(1) for term in terms)
    torch.testing.assert_close(density.trace(theta).log_joint(), total)


def test_layout_is_that_of_auto_continuous() -> None:
    x = torch.randn(N, D)
    guide = AutoDiagonalNormal(constrained)
    guide(x)
    density = ModelDensity(constrained, (x,))
    assert density.dim == guide.latent_dim
    theta = torch.randn(density.dim)
    sites: Any = guide._unpack_latent(theta)
    expected = {site["name"]: part for site, part in sites}
    parts = _parts(density, theta)
    assert list(parts) == list(expected)
    for name, part in parts.items():
        assert torch.equal(part, expected[name])


def test_pack_inverts_unpack_and_the_prototype_is_inside() -> None:
    density = ModelDensity(constrained, (torch.randn(N, D),))
    theta = torch.randn(S, density.dim)
    torch.testing.assert_close(density.pack(density.unpack(theta)), theta, rtol=1e-9, atol=1e-9)
    values = density.unpack(theta)
    assert {k: v.shape[1:] for k, v in values.items()} == density.layout.constrained_shapes
    assert density.initial.shape == (density.dim,) and density(density.initial[None]).isfinite()


def test_small_shares_of_a_simplex_keep_their_ratios() -> None:
    """PyTorch's own inverse takes the rest of the stick from 1: 700 for the last of these."""
    p = torch.tensor([[1.0, 1e-12, 1e-20, 1e-25]])
    rest = torch.tensor([[1e-12, 1e-20 + 1e-25, 1e-25]])
    to_simplex = biject_to(constraints.simplex)
    expected = p[:, :3].log() - rest.log() + torch.tensor([3.0, 2.0, 1.0]).log()
    torch.testing.assert_close(to_unconstrained(to_simplex, p), expected)
    even = torch.rand(5, 4).softmax(1)
    torch.testing.assert_close(to_unconstrained(to_simplex, even), to_simplex.inv(even))


def test_improper_flat_prior() -> None:
    """sigma > 0 flat: log p = sum log N(y; 0, sigma) + log sigma at theta = log sigma."""
    y = torch.tensor([0.5, -2.0])

    def model() -> None:
        flat = dist.ImproperUniform(constraints.positive, (), ())
        sigma = pyro.sample("sigma", flat)
        with pyro.plate("data", 2):
            pyro.sample("y", dist.Normal(0.0, sigma), obs=y)

    theta = torch.randn(S, 1)
    sigma = theta.exp()
    expected = dist.Normal(0.0, sigma).log_prob(y).sum(1) + theta[:, 0]
    torch.testing.assert_close(ModelDensity(model)(theta), expected, rtol=1e-12, atol=1e-12)


def test_a_model_may_be_nan_in_the_middle_of_its_supports() -> None:
    """(x^l - 1) / l at l = 0, which validation of its own refuses."""
    y = torch.tensor([0.5, 2.0])

    def model() -> None:
        power = pyro.sample("power", dist.Normal(1.0, 1.0))
        z = torch.expm1(power * y.log()) / power
        pyro.factor("y", dist.Normal(0.0, 1.0).log_prob(z).sum())

    with pyro.validation_enabled():
        density = ModelDensity(model)
    at = torch.tensor([[2.0]])
    z = (y.square() - 1.0) / 2.0
    expected = dist.Normal(0.0, 1.0).log_prob(z).sum() + dist.Normal(1.0, 1.0).log_prob(at[0, 0])
    torch.testing.assert_close(density(at)[0], expected)


def test_average_over_all_minibatches_is_the_density_of_all_data() -> None:
    X, y = data()

    def model(size: int | None) -> None:
        w = pyro.sample("w", dist.Normal(torch.zeros(D), 1.0).to_event(1))
        with pyro.plate("data", N, subsample_size=size) as index:
            pyro.sample("y", dist.Normal(X[index] @ w, 1.0), obs=y[index])

    theta = torch.randn(S, D)
    batches = [torch.tensor(index) for index in combinations(range(N), 2)]
    densities = [ModelDensity(model, (2,), indices={"data": index}) for index in batches]
    mean = torch.stack([density(theta) for density in densities]).mean(0)
    torch.testing.assert_close(mean, ModelDensity(model, (None,))(theta), rtol=1e-12, atol=1e-12)
    per_example = densities[0].trace(theta).sites["y"].log_prob
    expected = dist.Normal(theta @ X[:2].T, 1.0).log_prob(y[:2]) * N / 2
    torch.testing.assert_close(per_example, expected, rtol=1e-12, atol=1e-12)


def test_a_minibatch_is_drawn_once_for_all_particles() -> None:
    def model() -> None:
        pyro.sample("w", dist.Normal(0.0, 1.0))
        index: Any
        with pyro.plate("data", 1000, subsample_size=5) as index:
            pyro.sample("y", dist.Normal(index.to(torch.float64), 1.0), obs=torch.zeros(5))

    trace = batched_trace(model, {"w": torch.zeros(S)})
    assert trace.indices["data"].shape == (5,)
    log_prob = trace.sites["y"].log_prob
    assert torch.equal(log_prob, log_prob[:1].expand(S, 5))
    expected = 200 * dist.Normal(trace.indices["data"].to(torch.float64), 1.0).log_prob(
        torch.zeros(5)
    )
    torch.testing.assert_close(log_prob[0], expected)
    again = batched_trace(model, {"w": torch.zeros(S)}, indices=trace.indices)
    assert torch.equal(again.sites["y"].log_prob, log_prob)


def test_chunks_change_nothing() -> None:
    args, theta = data(), torch.randn(5, D)
    whole = ModelDensity(regression, args)(theta)
    parts = ModelDensity(regression, args, chunk_size=2)(theta)
    torch.testing.assert_close(whole, parts, rtol=1e-14, atol=1e-14)


def test_parameters_made_by_the_model() -> None:
    def model() -> None:
        scale = pyro.param("scale", torch.tensor(2.0), constraint=constraints.positive)
        w = pyro.sample("w", dist.Normal(0.0, scale))
        pyro.sample("y", dist.Normal(w, scale), obs=torch.tensor(1.0))

    theta = torch.tensor([[0.5], [-1.0]])
    trace = batched_trace(model, {"w": theta[:, 0]})  # creates the parameter
    assert list(pyro.get_param_store().keys()) == ["scale"]
    with poutine.trace(param_only=True) as capture:
        total = ModelDensity(model)(theta).sum()
    torch.testing.assert_close(total, trace.log_joint().sum())
    nodes: dict[str, Any] = dict(capture.trace.nodes)
    param = nodes["scale"]["value"].unconstrained()
    (gradient,) = torch.autograd.grad(total, param)
    # d/d(log s) of -2 log s - (w^2 + (1 - w)^2) / (2 s^2), summed over two particles, at s = 2
    expected = sum(-2 + (w**2 + (1 - w) ** 2) / 4 for w in (0.5, -1.0))
    assert gradient.item() == pytest.approx(expected, abs=1e-12)


def test_errors() -> None:
    with pytest.raises(ValueError, match="Give num_particles, because `values` fixes no site"):
        batched_trace(regression, {}, data())
    density = ModelDensity(regression, data())
    with pytest.raises(ValueError, match=r"theta has shape \(3,\); it must be \(S, 3\)"):
        density(torch.zeros(3))
    with pytest.raises(ValueError, match=r"theta has shape \(2, 4\)"):
        density(torch.zeros(2, 4))
    with pytest.raises(ValueError, match=r"latent site 'k' is discrete"):
        ModelDensity(lambda: pyro.sample("k", dist.Poisson(1.0)))
    with pytest.raises(ValueError, match="no latent site: every sample site is observed"):
        ModelDensity(lambda: pyro.sample("y", dist.Normal(0.0, 1.0), obs=torch.tensor(0.0)))
    with pytest.raises(RuntimeError, match=r"torch.func.vmap \(the last site it reached is 'w'\)"):
        batched_trace(lambda: pyro.sample("w", dist.Normal(0.0, 1.0)).item(), {"w": torch.zeros(2)})
