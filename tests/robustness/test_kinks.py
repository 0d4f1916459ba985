"""Jumps of gradients, which averages of second derivatives miss, are found; smooth models have none."""

from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
import torch.nn.functional as F
from pyro.infer import SVI
from torch import Tensor, nn

import pyro_ngvi as ngvi
from pyro_ngvi.probing.kinks import kinked_sites
from pyro_ngvi.runtime.density import LatentLayout
from pyro_ngvi.runtime.run import Minibatches, run_particles

pytestmark = pytest.mark.usefixtures("plain_start")


def with_prior(prior: Callable[[], Any]) -> Callable[[], None]:
    def model() -> None:
        w = pyro.sample("w", prior())
        with pyro.plate("data", 50):
            pyro.sample("y", dist.Normal(w.sum(), 1.0), obs=torch.linspace(-1, 1, 50))

    return model


def with_likelihood(
    given: Callable[[Tensor], Any], rows: int = 50, columns: int = 2
) -> Callable[[], None]:
    def model() -> None:
        X = torch.arange(rows * columns).sqrt().mul(5.0).sin().view(rows, columns)
        w = pyro.sample("w", dist.Normal(torch.zeros(columns), 10.0).to_event(1))
        with pyro.plate("data", rows):
            pyro.sample("y", given(X @ w), obs=X.sum(1) + torch.arange(rows).cos())

    return model


def network(activation: type[nn.Module]) -> Callable[[], None]:
    layers = nn.Linear(5, 30), activation(), nn.Linear(30, 30), activation(), nn.Linear(30, 1)
    model = ngvi.nn.bayesianize(nn.Sequential(*layers), "normal", num_data=200, noise=0.1)
    X = torch.randn(200, 5)
    return lambda: model(X, X[:, 0])


def kinks(model: Callable[[], Any]) -> list[str]:
    guide = ngvi.AutoMeanFieldNormal(model)
    guide()
    layout = LatentLayout(guide.prototype_trace)

    def run(theta: Tensor, reduce: Any) -> Any:
        values, log_det = layout.unpack_with_log_det(theta[None])
        how: Any = {"minibatches": Minibatches()}
        return run_particles(model, reduce, values, 1, (), {}, **how), log_det[0]

    d = sum(shape.numel() for shape in layout.unconstrained_shapes.values())
    return kinked_sites(run, 0.3 * torch.randn(d), layout, lambda site: True)


def zeros() -> Tensor:
    return torch.zeros(3)


def many() -> Any:
    return dist.Laplace(torch.zeros(20_000), 1.0).to_event(1)


KINKED: dict[str, tuple[Callable[[], Callable[[], None]], str]] = {
    "Laplace": (lambda: with_prior(lambda: dist.Laplace(zeros(), 1.0).to_event(1)), "w"),
    "narrow": (lambda: with_prior(lambda: dist.Laplace(zeros(), 0.01).to_event(1)), "w"),
    "wide": (lambda: with_prior(lambda: dist.Laplace(zeros(), 100.0).to_event(1)), "w"),
    "many": (lambda: with_prior(many), "w"),
    "Laplace data": (lambda: with_likelihood(lambda f: dist.Laplace(f, 0.5)), "y"),
    "many data": (lambda: with_likelihood(lambda f: dist.Laplace(f, 0.5), 5_000), "y"),
    "ReLU": (lambda: with_likelihood(lambda f: dist.Normal(f.relu(), 0.5)), "y"),
    "abs": (lambda: with_likelihood(lambda f: dist.Normal(f.abs(), 0.5), 3_000, 30), "y"),
    "ReLU network": (lambda: network(nn.ReLU), "y"),
}
SMOOTH: dict[str, Callable[[], Callable[[], None]]] = {
    "Normal": lambda: with_prior(lambda: dist.Normal(zeros(), 1.0).to_event(1)),
    "sharp Cauchy": lambda: with_prior(lambda: dist.Cauchy(zeros(), 1e-3).to_event(1)),
    "sharper StudentT": lambda: with_prior(lambda: dist.StudentT(3.0, zeros(), 1e-8).to_event(1)),
    "SoftLaplace": lambda: with_prior(lambda: dist.SoftLaplace(zeros(), 0.1).to_event(1)),
    "HalfCauchy": lambda: with_prior(lambda: dist.HalfCauchy(torch.ones(3)).to_event(1)),
    "Beta": lambda: with_prior(lambda: dist.Beta(0.1 * torch.ones(3), 0.1).to_event(1)),
    "Dirichlet": lambda: with_prior(lambda: dist.Dirichlet(torch.ones(3))),
    "LKJ": lambda: with_prior(lambda: dist.LKJCholesky(3, 1.0)),
    "StudentT data": lambda: with_likelihood(lambda f: dist.StudentT(3.0, f, 0.01)),
    # their second derivatives jump
    "ELU": lambda: with_likelihood(lambda f: dist.Normal(F.elu(f), 0.5)),
    "square of ReLU": lambda: with_likelihood(lambda f: dist.Normal(f.relu().square(), 0.5)),
    "SiLU": lambda: with_likelihood(lambda f: dist.Normal(F.silu(f), 1e-3), 5_000, 20),
    "tanh network": lambda: network(nn.Tanh),
    "ELU network": lambda: network(nn.ELU),
}
#: in single precision all, where rounding is near; in double a prior, data, a network, and extremes
DOUBLE = "Laplace", "wide", "many data", "ReLU network", "sharper StudentT", "HalfCauchy", "SiLU"
DOUBLE += "square of ReLU", "tanh network"


def cases(table: Any) -> Any:
    rows = [
        pytest.param(case, dtype, id=f"{case}-{dtype}".replace("torch.", ""))
        for case in table
        for dtype in (torch.float32, torch.float64)
        if dtype == torch.float32 or case in DOUBLE
    ]
    return pytest.mark.parametrize(("case", "dtype"), rows)


@cases(KINKED)
def test_jumps_are_found_with_the_name_of_their_site(case: str, dtype: torch.dtype) -> None:
    torch.set_default_dtype(dtype)
    make, name = KINKED[case]
    assert kinks(make()) == [name]


@cases(SMOOTH)
def test_smooth_models_have_none(case: str, dtype: torch.dtype) -> None:
    torch.set_default_dtype(dtype)
    assert kinks(SMOOTH[case]()) == []


def step(model: Any, guide: Any, rule: Any, curvature: str, times: int = 1) -> None:
    svi = SVI(model, guide, rule(guide), ngvi.BatchedELBO(2, curvature=curvature))
    for _ in range(times):
        svi.step()


@pytest.mark.parametrize(
    ("rule", "curvature", "prior", "likelihood"),
    [
        (ngvi.NGVB, "hessian", True, True),
        (ngvi.optim.VON, "hessian", True, True),
        (ngvi.optim.VON, "gauss_newton", True, False),
        (ngvi.optim.VOGN, "gauss_newton", True, False),
        (ngvi.optim.Vadam, "squared_gradient", True, False),
        (ngvi.optim.VON, "price", False, False),
    ],
)
def test_a_warning_where_they_matter_and_once(
    rule: Any, curvature: str, prior: bool, likelihood: bool
) -> None:
    """Products of gradients need no second derivatives of the data, and Price's theorem none."""
    for case, warns in (("Laplace", prior), ("Laplace data", likelihood)):
        model = KINKED[case][0]()
        guide = ngvi.AutoMeanFieldNormal(model)
        state = torch.get_rng_state()
        guide()
        if warns:
            name = KINKED[case][1]
            message = f"curvature={curvature!r}.*log probability of {name!r} jumps"
            with pytest.warns(RuntimeWarning, match=message) as seen:
                step(model, guide, rule, curvature, times=2)
            assert sum("jumps" in str(warning.message) for warning in seen) == 1
        else:
            step(model, guide, rule, curvature)  # where warnings are errors
        assert not torch.equal(state, torch.get_rng_state())


def test_the_search_leaves_the_random_state_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    states = []
    for search in (True, False):
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        model = SMOOTH["tanh network"]()
        guide = ngvi.AutoMeanFieldNormal(model)
        if not search:
            monkeypatch.setattr("pyro_ngvi.curvature.estimators.kinked_sites", lambda *args: [])
        step(model, guide, ngvi.optim.VOGN, "gauss_newton", times=2)
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


def test_kronecker_factors_beside_a_laplace_prior() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))

    def prior(name: str, p: Tensor) -> Any:
        return dist.Laplace(p.new_tensor(0.0), p.new_tensor(1.0))

    model = ngvi.nn.bayesianize(
        net, "normal", num_data=20, noise=0.5, prior={"2.*": prior, "*": 1.0}
    )
    guide = ngvi.AutoMatrixNormal(model)
    svi = SVI(model, guide, ngvi.optim.NoisyKFAC(guide), ngvi.BatchedELBO(2, curvature="kronecker"))
    with pytest.warns(RuntimeWarning, match="of '2.(weight|bias)' jumps"):
        svi.step(torch.randn(20, 3), torch.randn(20))
