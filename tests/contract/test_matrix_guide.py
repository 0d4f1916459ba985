"""AutoMatrixNormal: which site gets what, what a user reads, where its runs end, and what is refused.

The walk over all guides (``registry.py``) has models without matrices, which this guide refuses.
"""

import copy
import pickle
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoGuideList, init_to_value
from torch import Tensor

from pyro_ngvi import AIFVB, IFVB, NGVB, AutoMatrixNormal, AutoMeanFieldNormal, BatchedELBO
from pyro_ngvi.families import MatrixNormal
from pyro_ngvi.optim import Constant
from tests import registry
from tests.contract.registry import perturbed, plates, regression
from tests.cubature import sphere_points
from tests.registry import some

N, ROWS, COLUMNS = 20, 3, 2


def many_sites() -> None:
    """Matrices by event, by plates and by a transform; and all that is none."""
    pyro.sample("scalar", dist.Normal(0.0, 1.0))
    pyro.sample("net.W", dist.Normal(torch.zeros(2, 3), 1.0).to_event(2))
    pyro.sample("net_W", dist.Gamma(2.0, torch.ones(3, 2)).to_event(2))
    with pyro.plate("rows", 4):
        pyro.sample("batch", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        pyro.sample("simplex", dist.Dirichlet(torch.ones(3)))
        pyro.sample("column", dist.Normal(torch.zeros(1), 1.0).to_event(1))
    pyro.sample("correlation", dist.LKJCholesky(3, 2.0))
    pyro.sample("vector", dist.Normal(torch.zeros(5), 1.0).to_event(1))
    pyro.sample("cube", dist.Normal(torch.zeros(2, 2, 2), 1.0).to_event(3))


def data(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """Covariates, outputs, and the sd of each: the posterior is no Kronecker product."""
    g = torch.Generator().manual_seed(4)
    how: Any = {"generator": g, "dtype": torch.float64}
    X, sd = torch.randn(N, ROWS, **how), 0.3 + torch.rand(N, COLUMNS, **how)
    Y = X @ torch.randn(ROWS, COLUMNS, **how) + sd * torch.randn(N, COLUMNS, **how)
    return X.to(dtype), Y.to(dtype), sd.to(dtype)


def weights(X: Tensor, Y: Tensor, sd: Tensor) -> None:
    W = pyro.sample("W", dist.Normal(X.new_zeros(ROWS, COLUMNS), X.new_ones(())).to_event(2))
    with pyro.plate("data", len(Y)):
        pyro.sample("Y", dist.Normal((X[:, :, None] * W).sum(-2), sd).to_event(1), obs=Y)


def exact_posterior() -> tuple[Tensor, Tensor]:
    """Mean and precision of the weights, row after row of W."""
    X, Y, sd = data()
    design = torch.einsum("ni,jk->njik", X, torch.eye(COLUMNS)).reshape(N * COLUMNS, -1)
    weight = sd.reshape(-1) ** -2
    precision = torch.eye(ROWS * COLUMNS) + (design.mT * weight) @ design
    return torch.linalg.solve(precision, design.mT @ (weight * Y.reshape(-1))), precision


def excess(mean: Tensor, covariance: Tensor) -> Tensor:
    """KL in nats from N(mean, covariance) to the exact posterior."""
    m, P = exact_posterior()
    log_dets = torch.logdet(P) + torch.logdet(covariance)
    x = mean - m
    return 0.5 * ((P * covariance).sum() - len(m) + x @ P @ x - log_dets)


def optimum() -> tuple[Tensor, Tensor]:
    """Covariance and KL of the best Kronecker product, by L-BFGS from nothing but the posterior."""
    m, _ = exact_posterior()
    a = torch.zeros(ROWS, ROWS, requires_grad=True)
    b = torch.zeros(COLUMNS, COLUMNS, requires_grad=True)

    def covariance() -> Tensor:
        A, B = (V.tril(-1) + torch.diag(V.diagonal().exp()) for V in (a, b))
        return torch.kron(A @ A.mT, B @ B.mT)

    solver = torch.optim.LBFGS(
        [a, b],
        max_iter=2000,
        tolerance_grad=1e-12,
        tolerance_change=0,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        solver.zero_grad()
        loss = excess(m, covariance())
        loss.backward()
        return loss

    solver.step(closure)  # pyright: ignore[reportArgumentType]
    return covariance().detach(), closure().detach()


def guide_of(model: Any, *args: Any, **kwargs: Any) -> AutoMatrixNormal:
    guide = AutoMatrixNormal(model, **kwargs)
    guide(*args)
    return guide


def test_family_of_each_site() -> None:
    guide = guide_of(many_sites)
    assert list(guide.matrices) == ["net.W", "net_W", "batch"]
    # also where names differ by a dot alone
    assert list(guide.matrices.values()) == ["matrix_net_W", "matrix_net_W_", "matrix_batch"]
    sizes = [guide.family.parts[part] for part in guide.matrices.values()]
    assert [(f.rows, f.columns) for f in sizes if isinstance(f, MatrixNormal)] == [
        (2, 3),
        (3, 2),
        (4, 2),
    ]
    assert len(guide.rest_log_scale) == 1 + 8 + 4 + 3 + 5 + 8
    assert guide.get_posterior().event_shape == (1 + 6 + 6 + 8 + 8 + 4 + 3 + 5 + 8,)


def test_plates_count_as_dimensions() -> None:
    guide = guide_of(plates)
    assert list(guide.matrices) == ["d"]
    M, A, B = guide.site_factors("d")
    assert M.shape == (4, 2) and A.shape == (4, 4) and B.shape == (2, 2)


def test_a_model_of_one_matrix_has_no_rest() -> None:
    guide = guide_of(weights, *data())
    assert set(guide.natural_params()) == {
        "matrix_W_loc",
        "matrix_W_row_tril",
        "matrix_W_column_tril",
    }


@pytest.mark.parametrize("rest", ["mean_field", "full_rank"])
def test_posterior_is_the_product_of_its_sites(rest: str) -> None:
    """Covariance in the order of the flat vector, correlated within a matrix and within a full rest."""
    guide = perturbed(guide_of(many_sites, rest=rest))
    q = guide.get_posterior()
    _, A, B = guide.site_factors("net.W")
    torch.testing.assert_close(q.covariance_matrix[1:7, 1:7], torch.kron(A @ A.mT, B @ B.mT))
    assert (q.covariance_matrix[1:7, 7:] == 0).all()
    assert bool((q.covariance_matrix[0, -13:] != 0).any()) is (rest == "full_rank")
    torch.manual_seed(0)
    z = q.rsample((40_000,))
    standard_error = q.variance.sqrt() / 200.0
    assert ((z.mean(0) - q.mean).abs() < 5 * standard_error).all()  # 53 entries


def test_median_and_quantiles_are_those_of_the_gaussian() -> None:
    guide = perturbed(guide_of(many_sites))
    M, A, B = guide.site_factors("net.W")
    sd = (A @ A.mT).diagonal().sqrt()[:, None] * (B @ B.mT).diagonal().sqrt()
    torch.testing.assert_close(guide.median()["net.W"], M)
    upper = guide.quantiles([0.8413447460685429])["net.W"][0]  # one sd
    torch.testing.assert_close(upper, M + sd, rtol=1e-7, atol=1e-7)
    assert (guide.median()["net_W"] > 0).all()


def test_starts_are_the_sites_and_the_scale_that_were_asked() -> None:
    start = init_to_value(values={"W": torch.arange(6.0).reshape(3, 2)})
    guide = guide_of(weights, *data(), init_loc_fn=start, init_scale=0.2)
    torch.testing.assert_close(guide.median()["W"], torch.arange(6.0).reshape(3, 2))
    torch.testing.assert_close(guide.get_posterior().covariance_matrix, 0.04 * torch.eye(6))


def test_exact_gradients_lead_to_the_best_kronecker_product() -> None:
    """Sphere points make every expectation of a Gaussian model exact, so nothing is left to chance."""
    guide = guide_of(weights, *data())
    points = sphere_points(6)

    def draw(params: dict[str, Tensor], shape: torch.Size) -> Tensor:
        noise = points if shape.numel() == len(points) else torch.zeros(*shape, 6)
        return guide.family.rsample(params, noise)

    guide.family.draw = guide.family.centred_draw = draw
    optim = NGVB(guide, schedule=Constant(0.3), momentum=0.0, averaging=False)
    svi = SVI(weights, guide, optim, BatchedELBO(12))
    for _ in range(170):
        svi.step(*data())
    covariance, least = optimum()
    q = guide.get_posterior()
    mean, _ = exact_posterior()
    assert least > 0.01  # the posterior is no Kronecker product
    torch.testing.assert_close(q.mean, mean, rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(q.covariance_matrix, covariance, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(excess(q.mean, q.covariance_matrix), least, rtol=0, atol=1e-9)
    # the factors kept their balance
    _, A, B = guide.site_factors("W")
    start = 0.5 * (ROWS - COLUMNS) * torch.tensor(0.1).log()
    balance = A.diagonal().log().sum() - B.diagonal().log().sum()
    torch.testing.assert_close(balance, start, rtol=0, atol=1e-10)


LOSSES = some(registry.LOSSES, "Batched", "Trace vectorised", "Trace")


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_step_of_every_loss(loss: str, dtype: torch.dtype) -> None:
    guide = AutoMatrixNormal(weights)
    optim = NGVB(guide)
    svi = SVI(weights, guide, optim, LOSSES[loss](2 if loss == "Trace" else 8))
    svi.step(*data(dtype))
    before = {name: p.detach().clone() for name, p in guide.natural_params().items()}
    svi.step(*data(dtype))
    assert optim.report().outcome != "skipped"
    for name, p in guide.natural_params().items():
        assert p.dtype == dtype and p.isfinite().all() and not torch.equal(p, before[name])


@pytest.mark.parametrize("optimizer", [NGVB, IFVB, AIFVB])
def test_optimizers_as_they_come(optimizer: Any) -> None:
    """Five seeds of IFVB ended 0.0005 nats (sd 0.0005) above the optimum of the family: 5 sd."""
    pyro.set_rng_seed(0)
    guide = AutoMatrixNormal(weights)
    svi = SVI(weights, guide, optimizer(guide), BatchedELBO(8))
    for _ in range(130):
        svi.step(*data())
    q = guide.get_posterior()
    over = excess(q.mean, q.covariance_matrix) - optimum()[1]
    assert -1e-9 < over < 0.003


@pytest.mark.parametrize("rest", ["mean_field", "full_rank"])
def test_step_on_meta(rest: str) -> None:
    """What ``SVI.step`` does up to the number that it returns, without one look at a value."""

    def model(X: Tensor, Y: Tensor, sd: Tensor) -> None:
        bias = pyro.sample("bias", dist.Normal(X.new_zeros(COLUMNS), X.new_ones(())).to_event(1))
        W = pyro.sample("W", dist.Normal(X.new_zeros(ROWS, COLUMNS), X.new_ones(())).to_event(2))
        with pyro.plate("data", N):
            pyro.sample("Y", dist.Normal(X @ W + bias, sd).to_event(1), obs=Y)

    guide = guide_of(model, *data(), rest=rest)
    pyro.clear_param_store()
    guide.to("meta")
    optim, elbo = NGVB(guide), BatchedELBO(4)
    args = [x.to("meta") for x in data()]
    for _ in range(2):
        with pyro.validation_enabled(False), poutine.trace(param_only=True) as capture:
            loss = elbo.loss_and_grads(model, guide, *args)
        nodes: Any = capture.trace.nodes
        optim({site["value"].unconstrained() for site in nodes.values()})
    assert loss.device.type == "meta"
    assert all(p.device.type == "meta" for p in guide.natural_params().values())


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_are_the_same_distribution(how: str) -> None:
    guide = perturbed(guide_of(many_sites))
    other = copy.deepcopy(guide) if how == "deepcopy" else pickle.loads(pickle.dumps(guide))
    for ours, theirs in zip(guide.site_factors("net.W"), other.site_factors("net.W"), strict=True):
        assert torch.equal(ours, theirs)
    fresh = guide_of(many_sites, name="fresh")
    fresh.load_state_dict(guide.state_dict())
    assert torch.equal(fresh.median()["batch"], guide.median()["batch"])


def test_a_resumed_run_goes_on_as_an_unbroken_one() -> None:
    def run(steps: int, resume: Any = None) -> Any:
        guide = AutoMatrixNormal(weights)
        optim = NGVB(guide)
        svi = SVI(weights, guide, optim, BatchedELBO(2))
        if resume is not None:
            guide(*data())
            guide.load_state_dict(resume[0])
            optim.set_state(resume[1])
        for step in range(0 if resume is None else 3, steps):
            torch.manual_seed(step)
            svi.step(*data())
        return guide.state_dict(), optim.get_state()

    whole, resumed = run(6), run(6, run(3))
    values = zip(whole[0].values(), resumed[0].values(), strict=True)
    assert all(torch.equal(a, b) for a, b in values)


def test_part_of_a_list_of_guides() -> None:
    guide = AutoGuideList(many_sites)
    names = ["net.W", "vector"]
    guide.append(AutoMatrixNormal(poutine.block(many_sites, expose=names)))
    guide.append(AutoMeanFieldNormal(poutine.block(many_sites, hide=names)))
    svi = SVI(many_sites, guide, NGVB(guide), Trace_ELBO())
    svi.step()
    draw: Any = guide()
    assert draw["net.W"].shape == (2, 3) and draw["simplex"].shape == (4, 3)


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'mean_field' or 'full_rank', got 'low_rank'"):
        AutoMatrixNormal(regression, rest="low_rank")
    with pytest.raises(ValueError, match=r"has 'a' \(\), 'b' \(1, 3\)\. Use.*AutoMeanField"):

        def none() -> None:
            pyro.sample("a", dist.Normal(0.0, 1.0))
            pyro.sample("b", dist.Normal(0.0, torch.ones(1, 3)).to_event(2))

        guide_of(none)
    with pytest.raises(RuntimeError, match="call it once"):
        AutoMatrixNormal(weights).site_factors("W")
    with pytest.raises(ValueError, match="coordinates='natural' is not available"):
        NGVB(AutoMatrixNormal(weights), coordinates="natural")
