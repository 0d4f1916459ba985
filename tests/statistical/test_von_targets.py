"""VON with the exact Hessian reaches the known optima of full-rank Gaussians to 0.01 nat in all."""

import pytest
import torch
from pyro.infer import SVI

import pyro_ngvi as ngvi
from benchmarks.problems import DataNotFound, load


@pytest.mark.slow
@pytest.mark.parametrize("name", ["australian_presplit", "breast_cancer_presplit"])
def test_full_rank_optimum(name):
    try:
        problem = load(name)
    except DataNotFound as error:
        pytest.skip(str(error))
    torch.manual_seed(0)
    guide = ngvi.AutoFullRankNormal(problem.model)
    loss = ngvi.BatchedELBO(4, curvature="hessian")
    svi = SVI(problem.model, guide, ngvi.optim.VON(guide), loss)
    for _ in range(300):
        svi.step(*problem.args)
    q = guide.get_posterior()
    assert problem.exact_elbo is not None
    gap = problem.optimum["full_rank"].elbo - float(problem.exact_elbo(q.mean, q.scale_tril))
    assert -1e-4 < gap < 0.01
