"""What Pyro's users do with guides: lists, starts, ordinary optimizers, torch.jit, positions."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import MCMC, NUTS, SVI, JitTrace_ELBO, Predictive, Trace_ELBO
from pyro.infer.autoguide import AutoGuideList, AutoNormal, init_to_median
from pyro.infer.reparam import NeuTraReparam, ProjectedNormalReparam
from pyro.optim import Adam  # pyright: ignore[reportAttributeAccessIssue]

import pyro_ngvi as ngvi

jit = pytest.mark.filterwarnings(
    "ignore::torch.jit.TracerWarning",
    "ignore:.*torch.jit.*",
)

GUIDES: dict[str, Callable[..., Any]] = {
    "full rank": ngvi.AutoFullRankNormal,
    "factor": lambda m: ngvi.AutoFactorNormal(m, rank=2),
    "factor precision": lambda m: ngvi.AutoFactorPrecision(m, rank=2),
    "exponential": ngvi.AutoExponentialFamily,
    "orthogonal flow": ngvi.AutoOrthogonalFlow,
    "coupling flow": lambda m: ngvi.AutoCouplingFlow(m, init=None),
}


def gaussian() -> None:
    pyro.sample("x", dist.Normal(torch.zeros(3), 1.0).to_event(1))


def regression(X: torch.Tensor, y: torch.Tensor | None = None) -> Any:
    w = pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    with pyro.plate("data", len(X)):
        return pyro.sample("y", dist.Normal((X * w).sum(-1), 1.0), obs=y)


@jit
def test_a_trace_cannot_train_rotations() -> None:
    guide = ngvi.AutoOrthogonalFlow(gaussian)
    loss = JitTrace_ELBO(ignore_jit_warnings=True)
    svi = SVI(gaussian, guide, Adam({"lr": 0.1}), loss)
    with pytest.raises(RuntimeError, match=r"cannot be trained through torch\.jit"):
        svi.step()


@pytest.mark.parametrize("start", ["coupling", "map"])
def test_starts_in_a_list_beside_sites_that_vmap_cannot_draw(start: str) -> None:
    data = torch.tensor([0.0, 1.0, 1.0, 2.0])

    def model() -> None:
        p = pyro.sample("p", dist.Beta(6.0, 2.0))
        w = pyro.sample("w", dist.Dirichlet(torch.ones(3)))
        normal: Any = dist.Normal(p, 1.0)
        x = pyro.sample("x", normal.expand([2]).to_event(1))
        pyro.sample(
            "z", dist.Normal(x, torch.full((2,), 0.5)).to_event(1), obs=torch.full((2,), 2.0)
        )
        with pyro.plate("data", 4):
            pyro.sample("y", dist.Categorical(w), obs=data)

    guide: Any = AutoGuideList(model)
    own = poutine.block(model, hide=["p", "w"])
    if start == "map":
        guide.append(ngvi.AutoFullRankNormal(own, init="map"))
    else:
        guide.append(ngvi.AutoCouplingFlow(own))
    guide.append(AutoNormal(poutine.block(model, expose=["p", "w"])))
    guide()
    # given p at the centre of its prior, its mean; precisions 1 and 4
    exact = (0.75 + 4 * 2.0) / 5
    loc = guide[0].loc.detach()
    # the search for a mode is exact; natural steps end within a tenth of the sd .45
    assert (loc - exact).abs().max() < (1e-4 if start == "map" else 0.045)


def test_projected_normals_under_their_reparameteriser() -> None:
    def model() -> None:
        x = pyro.sample("x", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        pyro.sample("y", dist.ProjectedNormal(x))

    guide = ngvi.AutoFullRankNormal(poutine.reparam(model, {"y": ProjectedNormalReparam()}))
    assert set(guide()) == {"x", "y_normal"}
    with pytest.raises(ValueError, match="ProjectedNormalReparam"):
        ngvi.AutoFullRankNormal(model)()


def test_a_diagonal_that_an_optimizer_took_to_zero() -> None:
    def model() -> None:
        x = pyro.sample("x", dist.Normal(torch.zeros(4), 1.0).to_event(1))
        y = torch.tensor([1.0, -2.0, 3.0, 0.5])
        pyro.sample("y", dist.Normal(x, 0.1).to_event(1), obs=y)

    torch.manual_seed(0)
    guide = ngvi.AutoFullRankNormal(model)
    svi = SVI(model, guide, Adam({"lr": 0.1}), Trace_ELBO())
    with pytest.raises(RuntimeError, match=r"diagonal of scale_tril.*\n?.*'x'"):
        for _ in range(20):
            svi.step()
    assert torch.isfinite(guide.scale_tril).all()


@jit
@pytest.mark.parametrize("kind", GUIDES)
def test_traces_can_be_saved(kind: str) -> None:
    guide = GUIDES[kind](gaussian)
    guide()
    torch.manual_seed(3)
    expected = guide.call()
    traced = torch.jit.trace_module(guide, {"call": ()}, check_trace=False)
    file = io.BytesIO()
    torch.jit.save(traced, file)
    file.seek(0)
    torch.manual_seed(3)
    (found,) = torch.jit.load(file).call()
    torch.testing.assert_close(found, expected[0].detach())


@jit
@pytest.mark.parametrize("kind", ["full rank", "exponential"])  # all are traced above
def test_traces_of_predictive_can_be_saved(kind: str) -> None:
    guide, X = GUIDES[kind](regression), torch.randn(4, 3)
    guide(X, torch.zeros(4))
    predictive = Predictive(regression, guide=guide, num_samples=64)
    how: Any = {"check_trace": False, "strict": False}
    file = io.BytesIO()
    torch.jit.save(torch.jit.trace_module(predictive, {"forward": (X,)}, **how), file)
    file.seek(0)
    torch.manual_seed(3)
    y = torch.jit.load(file)(X)["y"]
    # four variances of 64 draws each
    covariance = guide.get_posterior().covariance_matrix.detach()
    exact = 1.0 + (X @ covariance * X).sum(-1)
    assert y.shape == (64, 4)
    assert ((y.var(0) / exact - 1.0).abs() < 4.0 * (2 / 64) ** 0.5).all()


@jit
def test_nuts_compiles_through_a_coupling_flow() -> None:
    guide = ngvi.AutoCouplingFlow(gaussian, init=None)
    guide()
    model = NeuTraReparam(guide.requires_grad_(False)).reparam(gaussian)
    nuts = NUTS(model, jit_compile=True, ignore_jit_warnings=True)
    mcmc = MCMC(nuts, num_samples=3, warmup_steps=3, disable_progbar=True)
    mcmc.run()
    assert all(torch.isfinite(v).all() for v in mcmc.get_samples().values())


@pytest.mark.parametrize("cls", [ngvi.AutoFactorNormal, ngvi.AutoFactorPrecision])
def test_rank_has_a_default(cls: Any) -> None:
    def model(d: int) -> None:
        pyro.sample("x", dist.Normal(torch.zeros(d), 1.0).to_event(1))

    for d, rank in ((2, 1), (9, 3), (30, 5)):
        guide = cls(model)
        guide(d)
        assert guide.factor.shape == (d, rank)
    with pytest.raises(ValueError, match="full-rank family"):
        cls(model)(1)


def test_init_loc_fn_by_position() -> None:
    for cls in (ngvi.AutoFullRankNormal, ngvi.AutoMeanFieldNormal, ngvi.AutoCouplingFlow):
        assert cls(gaussian, init_to_median)()["x"].shape == (3,)
