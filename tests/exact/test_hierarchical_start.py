"""Where the globals of a hierarchy start, where the centres of their priors are far from the data."""

from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import SVI
from torch import Tensor
from torch.autograd.functional import hessian, jacobian

import pyro_ngvi as ngvi
from pyro_ngvi.hierarchy.runs import Call
from pyro_ngvi.hierarchy.start import Marginal
from pyro_ngvi.linalg.hessian import differences
from pyro_ngvi.runtime.run import Minibatches


def data(n: int = 40) -> tuple[Tensor, Tensor]:
    """Two measurements of each x, of mean 50 and sd 12 with errors of sd 6, and y = 3 + .02 x + e."""
    noise = torch.Generator().manual_seed(14)
    x = 50.0 + 12.0 * torch.randn(n, generator=noise)
    w = x.unsqueeze(-1) + 6.0 * torch.randn(n, 2, generator=noise)
    return w, 3.0 + 0.02 * x + 0.1 * torch.randn(n, generator=noise)


def priors() -> tuple[Tensor, ...]:
    mean = pyro.sample("mean", dist.Normal(50.0, 50.0))
    sd = pyro.sample("sd", dist.HalfNormal(30.0))
    error = pyro.sample("error", dist.HalfNormal(20.0))
    a = pyro.sample("a", dist.Normal(0.0, 5.0))
    b = pyro.sample("b", dist.Normal(0.0, 0.1))
    return mean, sd, error, a, b, pyro.sample("noise", dist.HalfNormal(0.5))


def measured_twice(w: Tensor, y: Tensor) -> None:
    mean, sd, error, a, b, noise = priors()
    with pyro.plate("people", len(y)):
        x = pyro.sample("x", dist.Normal(mean, sd))
        pyro.sample("w", dist.Normal(x.unsqueeze(-1).expand(w.shape), error).to_event(1), obs=w)
        pyro.sample("y", dist.Normal(a + b * x, noise), obs=y)


def closed_form(w: Tensor, y: Tensor) -> None:
    """``measured_twice`` with x integrated out."""
    mean, sd, error, a, b, noise = priors()
    along = torch.stack([torch.ones(()), torch.ones(()), b])
    cov = sd**2 * torch.outer(along, along) + torch.stack([error, error, noise]).square().diag()
    with pyro.plate("people", len(y)):
        both = dist.MultivariateNormal(torch.stack([mean, mean, a + b * mean]), cov)
        pyro.sample("both", both, obs=torch.cat([w, y.unsqueeze(-1)], 1))


def log_joint(v: Tensor, w: Tensor, y: Tensor) -> Tensor:
    """log p(w, y, v), x integrated out, at unconstrained v."""
    scales: dict[str, Any] = dict(zip(("sd", "error", "noise"), v[[1, 2, 5]].exp(), strict=True))
    values: Any = scales | dict(zip(("mean", "a", "b"), v[[0, 3, 4]], strict=True))
    trace: Any = poutine.trace(poutine.condition(closed_form, data=values)).get_trace(w, y)
    return trace.log_prob_sum() + v[[1, 2, 5]].sum()


def points() -> Tensor:
    """Near the mode, and on two ways to it."""
    near = [49.7, 2.6, 1.7, 3.04, 0.02, -2.1]
    return torch.tensor(
        [near, [50.0, 1.8, 2.3, 1.7, 0.047, -3.5], [50.0, 3.0, 2.6, 0.0, 0.2, -1.1]]
    )


def marginal(w: Tensor, y: Tensor) -> Marginal:
    guide = ngvi.AutoHierarchical(measured_twice)
    guide(w, y)
    return Marginal(guide.units, Call(measured_twice, (w, y), {}, Minibatches()), guide.globals)


def test_what_is_left_of_the_joint_is_exact_where_units_are_gaussian() -> None:
    """Its value to the square of how far units have settled, .01 sd; its gradient to that share."""
    w, y = data()
    f, v = marginal(w, y), points().requires_grad_()
    exact = torch.stack([log_joint(x, w, y) for x in points()])
    values = f(v)
    assert torch.allclose(values, exact, atol=1e-3)
    (g,) = torch.autograd.grad(values.sum(), v)
    for found, x in zip(g, points(), strict=True):
        wanted: Any = jacobian(lambda t: log_joint(t, w, y), x)
        H: Any = hessian(lambda t: log_joint(t, w, y), x)
        sd = H.diagonal().abs().rsqrt()
        assert torch.allclose(found * sd, wanted * sd, rtol=0.01, atol=0.05)


def test_points_do_not_see_each_other() -> None:
    w, y = data()
    f = marginal(w, y)
    each = torch.cat([f(x.unsqueeze(0)) for x in points()])
    assert torch.allclose(f(points()), each, atol=1e-3)


@pytest.mark.parametrize("name", ["mean", "full"])
def test_the_start_is_the_gaussian_of_the_mode(name: str) -> None:
    """In this model steps from the priors' centres end at an optimum that is 30 nats too low."""
    w, y = data()
    globals = ngvi.AutoFullRankNormal if name == "full" else ngvi.AutoMeanFieldNormal
    guide = ngvi.AutoHierarchical(measured_twice, globals)
    guide(w, y)
    loc = guide.globals.loc.detach()
    g: Any = jacobian(lambda t: log_joint(t, w, y), loc)
    H: Any = hessian(lambda t: -log_joint(t, w, y), loc)
    # as near as a promised rise of .05 nats, and the steps of a mean field on its own expectations
    assert 0.5 * g @ torch.linalg.solve(H, g) < (0.1 if name == "full" else 2.0)
    if name == "full":
        found = guide.globals.scale_tril.detach()
        assert torch.allclose(found.mT @ H @ found, torch.eye(6), atol=0.05)


def test_a_fit_from_there_is_right() -> None:
    """The best Gaussian of the globals, by the closed form, has its means within .3 sd."""
    w, y = data()
    guide = ngvi.AutoHierarchical(measured_twice)
    svi = SVI(measured_twice, guide, ngvi.NGVB(guide), ngvi.BatchedELBO(16))
    losses: list[Any] = [svi.step(w, y) for _ in range(60)]
    assert max(losses) < 350.0
    exact = ngvi.AutoFullRankNormal(closed_form)
    svi = SVI(closed_form, exact, ngvi.NGVB(exact), ngvi.BatchedELBO(16))
    for _ in range(60):
        svi.step(w, y)
    cov = exact.scale_tril @ exact.scale_tril.mT
    assert ((guide.globals.loc - exact.loc) / cov.diagonal().sqrt()).abs().max() < 0.3


@pytest.mark.parametrize("scale", [1.0, 1e-4, 1e4])
def test_differences_find_lengths_of_their_own(scale: float) -> None:
    """-log p of sds around ``scale``: a mean over points around x, with its Hessian."""

    def f(x: Tensor) -> Tensor:
        z = x / (scale * torch.tensor([1.0, 3.0, 0.1]))
        return 0.5 * z.square().sum(-1) + z[..., 0] * z[..., 1].sin() + 0.1 * z.pow(4).sum(-1)

    x, away = (
        scale * torch.tensor([0.3, -1.0, 0.05]),
        scale * torch.tensor([[0.1], [-0.2]]).expand(2, 3),
    )
    found = differences(f, x, away)
    wanted: Any = hessian(lambda t: f(t + away).mean(), x)
    root = wanted.diagonal().abs().sqrt()
    assert torch.allclose(
        found.hessian / root / root[:, None], wanted / root / root[:, None], atol=1e-2
    )
    gradient: Any = jacobian(lambda t: f(t + away).mean(), x)
    assert torch.allclose(found.gradient, gradient) and torch.allclose(
        found.value, f(x + away).mean()
    )
    assert (found.lengths * root <= 0.06).all()
