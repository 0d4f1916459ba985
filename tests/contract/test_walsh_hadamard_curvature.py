"""Curvature through W = W(g): the optimizers of the Bayesian learning rule on AutoWalshHadamard."""

from typing import Any

import pytest
import torch
from pyro.infer import SVI
from pyro.optim import Adam  # pyright: ignore[reportAttributeAccessIssue]
from torch import Tensor

from pyro_ngvi import AutoWalshHadamard, BatchedELBO
from pyro_ngvi.optim import IVON, VOGN, VON
from tests.contract.walsh_hadamard_model import data, exact, weights, weights_and_bias


def linear_map(guide: Any) -> Tensor:
    """A with vec(U) = A g."""
    matrix = guide.matrices["W"]
    columns = matrix.dense(torch.eye(matrix.num_g), guide.left_g_W, guide.right_g_W)
    return columns.detach().flatten(1).mT


@pytest.mark.parametrize("kind", ["hessian", "gauss_newton"])
def test_curvature_is_that_of_the_model_of_g(kind: str) -> None:
    """A Gaussian posterior of g: its precision, whatever the draw; Gauss-Newton from residuals."""
    X, Y = data()
    guide = AutoWalshHadamard(weights, ["W"])
    guide(X, Y)
    A = linear_map(guide)
    torch.manual_seed(0)
    BatchedELBO(1, curvature=kind).loss_and_grads(weights, guide, X, Y)
    assert guide.curvature is not None
    found = guide.curvature.parts["diagonal"]
    posterior, _ = exact(A)
    if kind == "hessian":
        torch.testing.assert_close(found, posterior.precision_matrix.diagonal())
        return
    torch.manual_seed(0)
    with torch.no_grad():
        g = guide.get_posterior().rsample((1,))[0]  # the draw of the loss
    W = 0.3 + 0.8 * (A @ g).view(5, 3)
    residual = (Y - X @ W.mT) / 0.4**2  # gradient of log p(Y_n) in the mean, (N, 5)
    rows = 0.8 * torch.einsum("ni,nj,ijk->nk", residual, X, A.view(5, 3, -1))
    torch.testing.assert_close(found, 1.0 + rows.square().sum(0))


@pytest.mark.slow
def test_von_ends_at_the_best_mean_field_gaussian() -> None:
    """Precision: the diagonal of the posterior's; mean: the posterior's.  Exact curvature, no noise."""
    X, Y = data()
    guide = AutoWalshHadamard(weights, ["W"], train_diagonals=False)
    optim = VON(guide, averaging=True)
    svi = SVI(weights, guide, optim, BatchedELBO(8, curvature="hessian"))
    for _ in range(300):
        svi.step(X, Y)
    A = linear_map(guide)
    posterior, _ = exact(A)
    sd = posterior.precision_matrix.diagonal().rsqrt()
    q = guide.get_posterior()
    torch.testing.assert_close(q.variance.sqrt(), sd, rtol=1e-3, atol=0.0)
    # in W: the number of h that no entry holds makes a flat direction of g, along which VON is slow
    spread = (A @ posterior.covariance_matrix @ A.mT).diagonal().sqrt()
    assert ((A @ (q.mean - posterior.mean)).abs() / spread).max() < 0.05


@pytest.mark.parametrize(
    ("optimizer", "kind"),
    [(VON, "hessian"), (VON, "price"), (VOGN, "gauss_newton"), (IVON, None)],
)
def test_steps_with_other_sites_and_trained_diagonals(optimizer: Any, kind: str | None) -> None:
    guide = AutoWalshHadamard(weights_and_bias, ["W"])
    optim = optimizer(guide, others=Adam({"lr": 0.01}))
    svi = SVI(weights_and_bias, guide, optim, BatchedELBO(4, curvature=kind))
    args = data()
    losses = torch.tensor([svi.step(*args) for _ in range(30)])
    assert optim.report().outcome != "skipped"
    assert losses.isfinite().all()
    assert losses[-10:].sum() < losses[:10].sum()


def test_a_full_part_is_refused_by_von() -> None:
    guide = AutoWalshHadamard(weights, ["W"], g="full_rank")
    with pytest.raises(ValueError, match="VON cannot step AutoWalshHadamard"):
        VON(guide)
