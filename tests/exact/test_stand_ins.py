"""Distributions that vmap cannot run as Pyro and torch write them: the same densities, right draws."""

from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

import pyro_ngvi as ngvi
from pyro_ngvi.runtime.model_density import batched_trace, map_draws
from pyro_ngvi.runtime.run import CannotBatch
from pyro_ngvi.runtime.stand_ins import STAND_INS, stand_ins

S, LEVELS = 4000, torch.tensor([0, 1, 2, 3, 1])
CONCENTRATION = torch.tensor([0.3, 1.0, 4.0], dtype=torch.float64)


def ordinal(X: Tensor) -> None:
    w = pyro.sample("w", dist.Normal(X.new_zeros(2), 1.0).to_event(1))
    cuts = pyro.sample("cuts", dist.Normal(X.new_zeros(3), 1.0).to_event(1))
    with pyro.plate("data", len(X)):
        pyro.sample("y", dist.OrderedLogistic(X @ w, cuts.exp().cumsum(0)), obs=LEVELS)


def test_ordered_logistic_has_pyros_density_and_slope() -> None:
    X = torch.randn(5, 2, dtype=torch.float64)
    values = {"w": torch.randn(6, 2).double(), "cuts": torch.randn(6, 3).double()}
    for x in values.values():
        x.requires_grad_()
    batched = batched_trace(ordinal, values, (X,)).log_joint()
    slopes = torch.autograd.grad(batched.sum(), list(values.values()))
    each = []
    for s in range(6):
        fixed = pyro.condition(ordinal, data={name: x[s] for name, x in values.items()})
        each.append(pyro.poutine.trace(fixed).get_trace(X).log_prob_sum())
    plain = torch.stack(each)
    torch.testing.assert_close(batched, plain)
    torch.testing.assert_close(slopes, torch.autograd.grad(plain.sum(), list(values.values())))


def looped(model: Callable[[], Any]) -> Callable[[], Any]:
    """The model, which counts its runs."""

    def counted() -> Any:
        counted.runs += 1  # pyright: ignore[reportFunctionMemberAccess]
        return model()

    counted.runs = 0  # pyright: ignore[reportFunctionMemberAccess]
    return counted


@pytest.mark.parametrize("name", ["Beta", "Dirichlet", "LKJ", "Multinomial", "compound"])
def test_draws_of_a_prior_in_one_run(name: str) -> None:
    """4,000 draws, means and second moments within 4.5 standard errors of their closed forms."""
    a, total = CONCENTRATION, CONCENTRATION.sum()
    alpha, beta = a[0], a[2]
    mean, eta, n = a / total, 1.5, 5
    multinomial = dist.Multinomial(n, probs=mean.expand(4, 3))
    compound = dist.DirichletMultinomial(a, n)
    # the entry of a 2 x 2 LKJ matrix is 2 Beta(eta, eta) - 1
    fn, first, second = {
        "Beta": (
            dist.Beta(alpha, beta),
            alpha / (alpha + beta),
            alpha * (alpha + 1) / ((alpha + beta) * (alpha + beta + 1)),
        ),
        "Dirichlet": (dist.Dirichlet(a), mean, a * (a + 1) / (total * (total + 1))),
        "LKJ": (dist.LKJCholesky(2, a.new_tensor(eta)), 0.0, 1.0 / (2.0 * eta + 1.0)),
        "Multinomial": (multinomial, n * mean, n * mean * (1.0 - mean) + (n * mean) ** 2),
        "compound": (compound, compound.mean, compound.variance + compound.mean**2),
    }[name]
    model = looped(lambda: pyro.sample("x", fn))
    pyro.set_rng_seed(0)
    drawn = map_draws(model, lambda sites: {"x": {"value": sites["x"]["value"]}}, {}, S)
    assert model.runs < 10  # pyright: ignore[reportFunctionMemberAccess]
    x = drawn["x"]["value"]
    if name == "LKJ":
        x = (x @ x.mT)[:, 0, 1]
    for power, wanted in ((1, first), (2, second)):
        moment = x**power
        error = moment.std(0) / S**0.5
        assert ((moment.mean(0) - wanted).abs() < 4.5 * error).all()


def test_no_draw_without_its_derivative() -> None:
    def model() -> None:
        a = pyro.sample("a", dist.Exponential(1.0))
        pyro.sample("p", dist.Beta(a, 1.0))

    with pytest.raises(CannotBatch, match="'a'"):
        batched_trace(model, {"a": torch.ones(2, requires_grad=True)})


def test_all_is_put_back() -> None:
    X = torch.randn(5, 2)
    batched_trace(ordinal, {"w": torch.randn(2, 2), "cuts": torch.randn(2, 3)}, (X,))
    with pytest.raises(CannotBatch):
        batched_trace(lambda: pyro.sample("x", dist.VonMises(0.0, 1.0)), {}, num_particles=2)
    for place, attribute, given, _ in STAND_INS:
        assert getattr(place, attribute) is given, f"{place}.{attribute}"


def test_a_run_within_a_run_leaves_them_in_place() -> None:
    with stand_ins():
        with stand_ins():
            pass
        assert all(getattr(place, name) is other for place, name, _, other in STAND_INS)


def test_units_are_integrated_out_at_one_chunk_of_particles_after_the_other() -> None:
    def model() -> None:
        s = pyro.sample("s", dist.HalfNormal(1.0))
        with pyro.plate("raters", 5):
            u = pyro.sample("u", dist.Normal(0.0, s))
            cuts = torch.tensor([-1.0, 0.0, 1.0]).expand(*u.shape, 3)
            pyro.sample("y", dist.OrderedLogistic(u, cuts), obs=LEVELS)

    guide = ngvi.AutoHierarchical(model)
    guide()
    values = {"s": torch.rand(6) + 0.2}
    globals = ngvi.collapse(guide)
    whole, chunked = (batched_trace(globals, values, chunk_size=n) for n in (None, 2))
    assert torch.allclose(whole.log_joint(), chunked.log_joint())
