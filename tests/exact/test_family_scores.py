"""Scores of our families in their local frame: autograd, Fisher matrix, packing."""

from typing import Any

import pyro
import pytest
import torch
from torch import Tensor

from pyro_ngvi.families import FactorNormal, FactorPrecisionNormal, FullRankNormal, MeanFieldNormal
from pyro_ngvi.fisher.scores import family_scores

FAMILIES = {
    "mean field": MeanFieldNormal(),
    "full": FullRankNormal(),
    "factor": FactorNormal(2),
    "precision": FactorPrecisionNormal(2),
}


def member(name: str, d: int = 4) -> dict[str, Tensor]:
    params = FAMILIES[name].init(torch.randn(d), 0.6)
    params = {k: v + 0.2 * torch.randn_like(v) for k, v in params.items()}
    if "scale_tril" in params:
        params["scale_tril"] = params["scale_tril"].tril()
    return params


@pytest.mark.parametrize("n", [1, 5])
@pytest.mark.parametrize("name", FAMILIES)
def test_family_scores_against_autograd(name: str, n: int) -> None:
    family, params = FAMILIES[name], member(name)
    pyro.set_rng_seed(1)
    got = family_scores(family, params, n)
    pyro.set_rng_seed(1)
    for row, z in zip(got, family.draw(params, torch.Size((n,))), strict=True):
        leaves = {k: v.clone().requires_grad_() for k, v in params.items()}
        family.log_prob(leaves, z.detach()).backward()
        grads: Any = {k: v.grad for k, v in leaves.items()}
        wanted = family.pack(family.pull(params, grads))
        torch.testing.assert_close(row, wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", FAMILIES)
def test_second_moment_of_family_scores_is_the_fisher_matrix(name: str) -> None:
    family, params = FAMILIES[name], member(name, 3)
    rows = family_scores(family, params, 20_000)
    unit = torch.eye(rows.shape[1])
    fisher = torch.stack(
        [family.pack(family.fisher_product(params, family.unpack(e, params))) for e in unit]
    )
    products = rows[:, :, None] * rows[:, None, :]
    error = products.std(0) / len(rows) ** 0.5
    # up to 144 entries
    assert ((products.mean(0) - fisher).abs() <= 4.5 * error).all()


def test_full_rank_packs_its_triangle() -> None:
    family, params = FAMILIES["full"], member("full", 5)
    packed = family.pack(params)
    assert packed.shape == (5 + 15,)
    back = family.unpack(packed, params)
    assert all(torch.equal(back[k], params[k]) for k in params)
    assert torch.equal(family.pack(back), packed)
