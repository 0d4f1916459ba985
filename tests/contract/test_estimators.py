"""A new estimator of curvature is one function and one entry of ``ESTIMATORS``.

Here the empirical Fisher matrix sum_i s_i g_i g_i' over the data, beside the Hessian of the prior, in
each form that a family takes; the reference takes one autograd call for each draw and datum.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI
from torch import Tensor
from torch.func import jacrev, vmap

import pyro_ngvi as ngvi
from pyro_ngvi.curvature import ESTIMATORS, Drawn
from tests.registry import CURVATURES

pytestmark = pytest.mark.usefixtures("plain_start")

N, M, D, TAU = 9, 4, 3, 0.25
X = torch.linspace(-1.0, 2.0, N * D, dtype=torch.float64).view(N, D).sin()
Y = torch.linspace(0.0, 3.0, N, dtype=torch.float64).round()
INDEX = torch.tensor([0, 3, 4, 8])


def model(index: Tensor) -> None:
    w = pyro.sample("w", dist.Normal(X.new_zeros(D), TAU**-0.5).to_event(1))
    with pyro.plate("data", N, subsample=index) as i:
        pyro.sample("y", dist.Poisson((X[i] @ w).exp()), obs=Y[i])


def empirical_fisher(drawn: Drawn) -> dict[str, Tensor]:
    def rows(t: Tensor) -> Tensor:
        J: Any = jacrev(lambda t: drawn.data(t)[0])(t)
        return drawn.data(t)[1].sqrt().unsqueeze(-1) * J

    rest = drawn.rest_curvature()
    if drawn.form == "low_rank":
        every = vmap(rows)(drawn.draws) / len(drawn.draws) ** 0.5
        return {"rows": every.flatten(0, 1), "diagonal": rest}
    if drawn.form == "dense":
        return {"dense": drawn.average(lambda t: rows(t).mT @ rows(t)) + rest}
    return {"diagonal": drawn.average(lambda t: rows(t).square().sum(0)) + rest}


def by_loops(drawn: Drawn) -> dict[str, Tensor]:
    """The same for ``model``, whose log probabilities are written out."""
    total = torch.zeros(D, D)
    with torch.enable_grad():
        for theta in drawn.draws:
            w = theta.clone().requires_grad_()
            for i in INDEX:
                (g,) = torch.autograd.grad(dist.Poisson((X[i] @ w).exp()).log_prob(Y[i]), w)
                total += N / M * g.outer(g) / len(drawn.draws)
    total += TAU * torch.eye(D)
    return {"dense": total} if drawn.form == "dense" else {"diagonal": total.diagonal()}


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    own = {"empirical_fisher": empirical_fisher, "loops": by_loops}
    ESTIMATORS.update(own)
    yield
    for name in own:
        del ESTIMATORS[name]


def left_by(kind: str, make: Any) -> dict[str, Tensor]:
    pyro.clear_param_store()
    torch.manual_seed(1)
    guide = make(model)
    ngvi.BatchedELBO(3, curvature=kind).loss_and_grads(model, guide, INDEX)
    return guide.take_curvature().parts


@pytest.mark.parametrize("make", [ngvi.AutoMeanFieldNormal, ngvi.AutoFullRankNormal])
def test_a_registered_estimator_leaves_its_parts(make: Any) -> None:
    got, want = left_by("empirical_fisher", make), left_by("loops", make)
    assert got.keys() == want.keys()
    for name in want:
        torch.testing.assert_close(got[name], want[name], rtol=1e-12, atol=1e-12)


def test_rows_stand_for_their_products() -> None:
    got = left_by("empirical_fisher", partial(ngvi.AutoFactorPrecision, rank=1))
    want = left_by("gauss_newton", partial(ngvi.AutoFactorPrecision, rank=1))
    torch.testing.assert_close(got["rows"].mT @ got["rows"], want["rows"].mT @ want["rows"])
    torch.testing.assert_close(got["diagonal"], want["diagonal"])


def trained(kind: str, rule: Any, make: Any) -> list[Tensor]:
    pyro.clear_param_store()
    torch.manual_seed(2)
    guide = make(model)
    svi = SVI(model, guide, rule(guide), ngvi.BatchedELBO(3, curvature=kind))
    losses = [torch.as_tensor(svi.step(INDEX)) for _ in range(10)]
    return [torch.stack(losses), *(p.detach().clone() for p in guide.natural_params().values())]


@pytest.mark.parametrize("rule", [ngvi.optim.VON, ngvi.NGVB])
@pytest.mark.parametrize("make", [ngvi.AutoMeanFieldNormal, ngvi.AutoFullRankNormal])
def test_rules_take_it(rule: Any, make: Any) -> None:
    fast, slow, hessian = (
        trained(kind, rule, make) for kind in ("empirical_fisher", "loops", "hessian")
    )
    for a, b in zip(fast, slow, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
    assert not torch.allclose(fast[-1], hessian[-1], rtol=1e-3)  # it was used


def test_rules_that_need_products_of_single_data_refuse_it() -> None:
    with pytest.raises(RuntimeError, match='curvature="gauss_newton"'):
        trained("empirical_fisher", ngvi.optim.VOGN, ngvi.AutoMeanFieldNormal)


def test_gradients_and_losses_at_the_draws() -> None:
    def checked(drawn: Drawn) -> dict[str, Tensor]:
        def potential(w: Tensor) -> Tensor:
            log_prior = dist.Normal(0.0, TAU**-0.5).log_prob(w).sum()
            log_lik = dist.Poisson((X[INDEX] @ w).exp()).log_prob(Y[INDEX]).sum()
            return -log_prior - N / M * log_lik

        q = drawn.guide.get_posterior()
        with torch.enable_grad():
            for w, g, loss in zip(drawn.draws, drawn.gradients(), drawn.losses, strict=True):
                torch.testing.assert_close(g, torch.func.grad(potential)(w))
                torch.testing.assert_close(loss, (q.log_prob(w) + potential(w)).detach())
        return {"diagonal": drawn.curvature()}

    ESTIMATORS["loops"] = checked
    got, want = (left_by(kind, ngvi.AutoMeanFieldNormal) for kind in ("loops", "hessian"))
    assert torch.equal(got["diagonal"], want["diagonal"])


def test_names_that_are_not_registered_are_refused_with_those_that_are() -> None:
    with pytest.raises(ValueError, match="'scores', 'empirical_fisher', 'loops'"):
        ngvi.BatchedELBO(1, curvature="fisher")


def test_the_registry_of_tests_has_those_of_the_package() -> None:
    assert tuple(ESTIMATORS)[: len(CURVATURES)] == CURVATURES
