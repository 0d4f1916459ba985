"""NeuTra: the density and its gradient by hand, the way back, a chain, and what is refused."""

from __future__ import annotations

import copy
import io
import warnings
from typing import Any

import pyro
import pyro.distributions
import pytest
import torch
from pyro import poutine
from pyro.infer import MCMC, NUTS
from pyro.infer.autoguide import AutoDiagonalNormal
from pyro.infer.reparam import NeuTraReparam
from pyro.ops.stats import effective_sample_size
from torch import Tensor
from torch.distributions import biject_to

import pyro_ngvi as ngvi
from benchmarks.flows.orthogonal_forms import AutoOrthogonalForm

dist: Any = pyro.distributions  # its annotations do not know what its distributions can do

pytestmark = pytest.mark.usefixtures("plain_start")  # parameters are moved anyway

COUPLING = dist.transforms.affine_coupling
Y = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)


def model(y: Tensor) -> None:
    """A first site in a plate, a matrix, a positive site and a simplex: 3 + 4 + 1 + 2 numbers."""
    with pyro.plate("unit", 3):
        a = pyro.sample("a", dist.Normal(0.0, 1.0))
    W = pyro.sample("W", dist.Normal(torch.zeros(2, 2), 1.0).to_event(2))
    s = pyro.sample("s", dist.LogNormal(0.0, 0.5))
    p = pyro.sample("p", dist.Dirichlet(torch.ones(3)))
    pyro.deterministic("total", a.sum(-1))
    with pyro.plate("data", 3):
        pyro.sample("y", dist.Normal(a + W.sum((-1, -2)) * p, s), obs=y)


GUIDES: dict[str, Any] = {
    "mean field": ngvi.AutoMeanFieldNormal,
    "full rank": ngvi.AutoFullRankNormal,
    "matrix": ngvi.AutoMatrixNormal,
    "orthogonal": lambda m: ngvi.AutoOrthogonalFlow(m, layers=2),
    "Pyro coupling": lambda m: ngvi.AutoFlow(m, lambda d: [COUPLING(d, [8]), COUPLING(d, [8])]),
    "affine coupling": lambda m: ngvi.AutoCouplingFlow(m, layers=2, hidden=(8,)),
    "spline coupling": lambda m: ngvi.AutoCouplingFlow(m, kind="spline", layers=2, hidden=(8,)),
    "autoregressive": lambda m: ngvi.AutoCouplingFlow(
        m, kind="autoregressive", layers=1, hidden=(8,)
    ),
}
BENT = ("orthogonal", "Pyro coupling", "affine coupling", "spline coupling", "autoregressive")


def called(kind: str, model: Any = model, args: Any = (Y,)) -> Any:
    """A guide with a draw of its parameters; rotations stay as they are."""
    torch.manual_seed(5)
    guide = GUIDES[kind](model)
    guide(*args)
    with torch.no_grad():
        for name, p in guide.natural_params().items():
            if not name.startswith("weight_"):
                p.add_(0.2 * torch.randn_like(p))
    return guide


def log_joint(guide: Any, z: Tensor, model: Any = model, args: Any = (Y,)) -> Tensor:
    """log p(y, z) over the unconstrained z (d,)."""
    values: dict[str, Tensor] = {}
    total: Any = torch.zeros(())
    for site, u in guide._unpack_latent(z):
        transform: Any = biject_to(site["fn"].support)
        values[site["name"]] = transform(u)
        total = total + transform.log_abs_det_jacobian(u, values[site["name"]]).sum()
    trace = poutine.trace(poutine.condition(model, data=values)).get_trace(*args)
    return total + torch.as_tensor(trace.log_prob_sum())


def by_hand(guide: Any, noise: Tensor) -> Tensor:
    """log p(y, z) + log N(noise) - log q(z): with the guide's own draw and density, no Jacobian."""
    q = guide.get_posterior()
    z = q.family.rsample(q.params, noise)
    base = dist.Normal(0.0, 1.0).log_prob(noise).sum()
    return log_joint(guide, z) + base - q.log_prob(z)


def reparameterised(program: Any, noise: Tensor, args: Any = (Y,)) -> Any:
    fixed = poutine.condition(program, data={"a_shared_latent": noise})
    return poutine.trace(fixed).get_trace(*args).log_prob_sum()


@pytest.mark.parametrize("kind", GUIDES)
def test_density_is_the_models_times_the_jacobian(kind: str) -> None:
    guide = called(kind)
    noise = 0.7 * torch.randn(guide.latent_dim)
    found = reparameterised(ngvi.neutra(model, guide), noise)
    torch.testing.assert_close(found, by_hand(guide, noise), rtol=1e-10, atol=1e-10)
    transform = guide.get_transform()
    J = torch.func.jacrev(transform)(noise)
    log_det = transform.log_abs_det_jacobian(noise, transform(noise))
    torch.testing.assert_close(log_det, torch.linalg.slogdet(J)[1], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", GUIDES)
def test_gradient_in_the_noise(kind: str) -> None:
    guide = called(kind)
    noise = (0.7 * torch.randn(guide.latent_dim)).requires_grad_()
    (found,) = torch.autograd.grad(reparameterised(ngvi.neutra(model, guide), noise), noise)
    h = 1e-5
    with torch.no_grad():  # rsample of some families has no gradient in the noise: differences
        steps = h * torch.eye(len(noise))
        wanted = [(by_hand(guide, noise + e) - by_hand(guide, noise - e)) / (2 * h) for e in steps]
    assert torch.isfinite(found).all()
    # curvature h^2 and rounding 1e-16 * 100 / h both stay under 1e-8 times a few hundred
    torch.testing.assert_close(found, torch.stack(wanted), rtol=1e-6, atol=1e-6)
    assert all(p.grad is None for p in guide.parameters())


@pytest.mark.parametrize("kind", GUIDES)
def test_both_directions_and_batches(kind: str) -> None:
    guide = called(kind)
    transform = guide.get_transform()
    noise = torch.randn(4, 2, guide.latent_dim)
    z = transform(noise)
    torch.testing.assert_close(transform.inv(z), noise, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(transform(noise[1, 1]), z[1, 1])
    log_det = transform.log_abs_det_jacobian(noise, z)
    assert log_det.shape == (4, 2)
    again = pyro.distributions.TransformedDistribution(guide.get_base_dist(), [transform])
    torch.testing.assert_close(again.log_prob(z), guide.get_posterior().log_prob(z))
    other = torch.randn(guide.latent_dim)  # not the last one that was called
    torch.testing.assert_close(
        transform.log_abs_det_jacobian(noise, z), log_det, msg="the log-determinant of another call"
    )
    transform(other)
    torch.testing.assert_close(transform.log_abs_det_jacobian(noise, z), log_det)


@pytest.mark.parametrize("kind", ["full rank", "spline coupling"])
def test_samples_go_back_to_the_sites(kind: str) -> None:
    guide = called(kind)
    program = ngvi.neutra(model, guide)
    noise = torch.randn(2, 5, guide.latent_dim)
    values = program.transform_sample({"a_shared_latent": noise})
    assert {name: tuple(v.shape) for name, v in values.items()} == {
        "a": (2, 5, 3),
        "W": (2, 5, 2, 2),
        "s": (2, 5),
        "p": (2, 5, 3),
    }
    fixed = poutine.condition(program, data={program.name: noise[1, 3]})
    nodes: Any = poutine.trace(fixed).get_trace(Y).nodes
    for name, value in program.transform_sample(noise).items():
        torch.testing.assert_close(value, values[name])
        torch.testing.assert_close(value[1, 3], nodes[name]["value"])
    torch.testing.assert_close(nodes["total"]["value"], values["a"][1, 3].sum())


def scalar_first(y: Tensor) -> None:
    s = pyro.sample("s", dist.LogNormal(0.0, 0.5))
    with pyro.plate("unit", 3):
        a = pyro.sample("a", dist.Normal(0.0, s))
        pyro.sample("y", dist.Normal(a, 1.0), obs=y)


@pytest.mark.parametrize("kind", ["mean field", "full rank", *BENT])
def test_pyros_own_reparameterisation_takes_our_guides(kind: str) -> None:
    guide = called(kind, scalar_first)
    neutra = NeuTraReparam(guide)
    noise = torch.randn(4)
    found = []
    for program in (neutra.reparam(scalar_first), ngvi.neutra(scalar_first, guide)):
        fixed = poutine.condition(program, data={"s_shared_latent": noise})
        found.append(poutine.trace(fixed).get_trace(Y).log_prob_sum())
    torch.testing.assert_close(found[0], found[1])
    values = neutra.transform_sample(noise)
    torch.testing.assert_close(values, ngvi.neutra(scalar_first, guide).transform_sample(noise))


def test_takes_the_guides_of_pyro() -> None:
    guide: Any = AutoDiagonalNormal(model, init_scale=0.3)
    guide(Y)
    noise = torch.randn(guide.latent_dim)
    found = reparameterised(ngvi.neutra(model, guide), noise)
    expected = log_joint(guide, guide.loc + guide.scale * noise) + guide.scale.log().sum()
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("kind", ["mean field", "affine coupling"])
def test_is_the_average_as_it_was(kind: str) -> None:
    guide = called(kind)
    noise = torch.randn(guide.latent_dim)
    q = guide.get_posterior()
    z = q.family.rsample(q.params, noise).detach()
    lag = {name: torch.ones_like(p) for name, p in guide.natural_params().items()}
    guide.set_iterate_offset(
        lag, {name: p.detach().clone() for name, p in guide.natural_params().items()}
    )
    program = ngvi.neutra(model, guide)
    with torch.no_grad():
        for p in guide.natural_params().values():
            p.add_(1.0)
    torch.testing.assert_close(program.transform(noise), z)
    assert not torch.allclose(guide.get_transform()(noise), z)


def test_copies() -> None:
    guide = called("spline coupling")
    program = ngvi.neutra(model, guide)
    noise = torch.randn(guide.latent_dim)
    expected = reparameterised(program, noise)
    torch.testing.assert_close(
        reparameterised(ngvi.neutra(model, copy.deepcopy(guide)), noise), expected
    )
    program.transform(noise.clone().requires_grad_())  # leaves a graph behind
    stored = io.BytesIO()
    torch.save(program.transform, stored)
    stored.seek(0)
    loaded = torch.load(stored, weights_only=False)
    torch.testing.assert_close(loaded(noise), program.transform(noise))


def correlated() -> None:
    """x ~ N(0, I) in a plate, x_0 + x_1 seen as 1 with sd 0.3."""
    with pyro.plate("unit", 2):
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
    pyro.sample("y", dist.Normal(x.sum(-1), 0.3), obs=torch.tensor(1.0))


@pytest.mark.slow
def test_a_chain_finds_the_posterior_however_bad_the_guide() -> None:
    flow = [COUPLING(2, [4])]
    guide: Any = ngvi.AutoFlow(correlated, flow)
    guide()
    torch.manual_seed(5)
    with torch.no_grad():
        for name, p in guide.natural_params().items():
            if name == "scale_tril":
                p.copy_(torch.tensor([[1.0, 0.0], [-0.5, 0.8]]))
            elif name.startswith("flow."):  # bent where it matters
                p.add_(0.3 * torch.randn_like(p))
    pyro.set_rng_seed(2)
    program = ngvi.neutra(correlated, guide)
    chain = MCMC(NUTS(program), 400, warmup_steps=60, disable_progbar=True)
    with warnings.catch_warnings():
        chain.run()
    x = program.transform_sample(chain.get_samples())["x"]
    covariance = torch.linalg.inv(torch.eye(2) + torch.ones(2, 2) / 0.09)
    mean = covariance.sum(1) / 0.09
    for power in (1, 2):  # of x - mean; the second is the variance
        error = (x - mean) ** power
        wanted = covariance.diagonal() * (power - 1)
        ess = effective_sample_size(error.unsqueeze(0))
        assert ess.min() > 50
        assert ((error.mean(0) - wanted).abs() < 5 * error.std(0) / ess.sqrt()).all()


def matrix_model() -> None:
    pyro.sample("W", dist.Normal(torch.zeros(4, 4), 1.0).to_event(2))


@pytest.mark.parametrize(
    "make",
    [
        lambda: ngvi.AutoFactorNormal(matrix_model, rank=2),
        lambda: ngvi.AutoFactorPrecision(matrix_model, rank=2),
        lambda: ngvi.AutoExponentialFamily(matrix_gamma),
        lambda: ngvi.AutoWalshHadamard(matrix_model),
        lambda: ngvi.AutoProperWalshHadamard(matrix_model),
        lambda: AutoOrthogonalForm(matrix_model, form="paper"),
    ],
    ids=["factor", "factor precision", "exponential", "Walsh-Hadamard", "proper", "bounded"],
)
def test_refused_guides(make: Any) -> None:
    guide = make()
    guide()
    with pytest.raises(NotImplementedError, match=f"{type(guide).__name__} does not map .* needs"):
        ngvi.neutra(matrix_model, guide)
    with pytest.raises(NotImplementedError, match="AutoCouplingFlow"):
        guide.get_transform()


def matrix_gamma() -> None:
    pyro.sample("W", dist.Gamma(torch.ones(4, 4), 1.0).to_event(2))


def test_refused_uses() -> None:
    with pytest.raises(RuntimeError, match="call it once"):
        ngvi.neutra(model, ngvi.AutoMeanFieldNormal(model))
    guide = called("full rank")
    with pytest.raises(ValueError, match="does not have the latent sites"):
        ngvi.neutra(matrix_gamma_named_b, guide)()
    with pytest.raises(ValueError, match=r"'s' is latent .* scaled"):
        ngvi.neutra(scaled, called("full rank", scaled, ()))()
    with pytest.raises(ValueError, match=r"'s' is latent .* observed"):
        ngvi.neutra(poutine.condition(model, data={"s": torch.tensor(1.0)}), guide)(Y)


def matrix_gamma_named_b() -> None:
    pyro.sample("b", dist.Gamma(1.0, 1.0))


def scaled() -> None:
    with poutine.scale(scale=0.5):
        pyro.sample("s", dist.Normal(torch.zeros(2), 1.0).to_event(1))
