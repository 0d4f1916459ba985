"""The factor precision: what the tests of all families (test_families.py) leave open."""

import pytest
import torch
from pyro.infer import SVI
from torch import Tensor
from torch.func import jacrev

from pyro_ngvi import IFVB, NGVB, AutoFactorPrecision, BatchedELBO
from pyro_ngvi.families import FactorNormal, FactorPrecisionNormal
from pyro_ngvi.linalg import spectral
from tests.contract.registry import data, exact_posterior, regression

D = 6
Tensors = dict[str, Tensor]


def member(family: FactorPrecisionNormal, d: int = D, seed: int = 0) -> Tensors:
    g = torch.Generator().manual_seed(seed)
    params = family.init(torch.randn(d, generator=g), 0.7)
    return {k: v + 0.4 * torch.randn(v.shape, generator=g) for k, v in params.items()}


def precision(params: Tensors) -> Tensor:
    U = params["factor"]
    return U @ U.mT + torch.diag(params["log_precision"].exp())


ranks = pytest.mark.parametrize("rank", [1, 2, 5])


@ranks
def test_covariance_is_the_inverse_of_the_precision(rank: int) -> None:
    family = FactorPrecisionNormal(rank)
    params = member(family)
    exact = torch.linalg.inv(precision(params))
    torch.testing.assert_close(family.covariance(params), exact, rtol=1e-10, atol=1e-10)
    root = family.scale_tril(params)
    assert torch.equal(root, root.tril())
    torch.testing.assert_close(family.stddev(params), exact.diagonal().sqrt())


@ranks
def test_draws_are_a_linear_map_with_the_exact_covariance(rank: int) -> None:
    """The columns of the map are the draws of unit noise: no sampling."""
    family = FactorPrecisionNormal(rank)
    params = member(family)
    assert family.noise_dim(params) == D
    map_ = family.rsample(params, torch.eye(D)) - params["loc"]
    exact = torch.linalg.inv(precision(params))
    torch.testing.assert_close(map_.T @ map_, exact, rtol=1e-10, atol=1e-10)
    noise = torch.randn(2, 3, D)
    torch.testing.assert_close(family.rsample(params, noise), params["loc"] + noise @ map_)


@ranks
@pytest.mark.parametrize("d", [6, 7, 150])
def test_every_sd_of_the_start_is_the_asked_one(rank: int, d: int) -> None:
    family = FactorPrecisionNormal(rank)
    params = family.init(torch.zeros(d), 0.3)
    exact = torch.linalg.inv(precision(params)).diagonal().sqrt()
    torch.testing.assert_close(exact, torch.full((d,), 0.3), rtol=1e-12, atol=0.0)
    again = family.init(torch.zeros(d), 0.3)
    assert all(torch.equal(params[k], again[k]) for k in params)


def test_no_factor_has_no_gradient() -> None:
    """Why the start is not U = 0: there is a saddle."""
    family = FactorPrecisionNormal(2)
    params = member(family) | {"factor": torch.zeros(D, 2)}
    leaves = {k: v.requires_grad_() for k, v in params.items()}
    (family.rsample(leaves, torch.randn(9, D)).pow(4)).sum().backward()
    gradient = leaves["factor"].grad
    assert gradient is not None and torch.equal(gradient, torch.zeros(D, 2))


@ranks
def test_same_metric_as_the_covariance_of_the_same_form(rank: int) -> None:
    """P = B B' + diag(c^2) as a precision or as a covariance: F agrees on the shape."""
    precise, spread = FactorPrecisionNormal(rank), FactorNormal(rank)
    params = member(precise)
    other = {
        "loc": params["loc"],
        "factor": params["factor"],
        "log_scale": 0.5 * params["log_precision"],
    }
    u = {k: torch.randn_like(v) for k, v in params.items()}
    ours = precise.fisher_product(params, u)
    w = {"loc": u["loc"], "factor": u["factor"], "log_scale": u["log_precision"]}
    theirs = spread.fisher_product(other, w)
    torch.testing.assert_close(ours["factor"], theirs["factor"])
    torch.testing.assert_close(ours["log_precision"], theirs["log_scale"])


def test_a_move_of_the_mean_keeps_its_length_when_the_shape_changes() -> None:
    """Momentum adds a move of the step before, made in another frame (with other B, other e)."""
    family = FactorPrecisionNormal(2)
    t = torch.randn(D)
    for seed in range(3):
        params = member(family, seed=seed)
        zero = {k: torch.zeros_like(v) for k, v in params.items()}
        moved = family.retract(params, zero | {"loc": t}, 1.0)
        change = moved["loc"] - params["loc"]
        torch.testing.assert_close(change @ precision(params) @ change, t @ t)


def pulled_loss_gradient(family: FactorPrecisionNormal, params: Tensors, H: Tensor) -> Tensors:
    """The gradient of tr(H Sigma) / 2 - entropy, pulled: dLoss/dSigma = (H - Sigma^-1) / 2."""

    def loss(p: Tensors) -> Tensor:
        Sigma = torch.linalg.inv(precision(p))
        return 0.5 * ((H * Sigma).sum() - torch.logdet(Sigma))

    return family.pull(params, jacrev(loss)(params))


@ranks
@pytest.mark.parametrize("n", [0, 1, 9])
def test_pull_curvature_against_the_dense_gradient(rank: int, n: int) -> None:
    family = FactorPrecisionNormal(rank)
    params = member(family)
    curvature = {"rows": torch.randn(n, D), "diagonal": torch.randn(D)}
    H = curvature["rows"].T @ curvature["rows"] + torch.diag(curvature["diagonal"])
    wanted = pulled_loss_gradient(family, params, H)
    gradient = {k: torch.randn_like(v) for k, v in params.items()}
    got = family.pull_curvature(params, gradient, curvature)
    assert torch.equal(got["loc"], gradient["loc"])
    for key in ("factor", "log_precision"):
        torch.testing.assert_close(got[key], wanted[key], rtol=1e-9, atol=1e-9)
    if n == 0:
        only = family.pull_curvature(params, gradient, {"diagonal": curvature["diagonal"]})
        assert all(torch.equal(only[k], got[k]) for k in got)


@ranks
def test_covariance_product(rank: int) -> None:
    family = FactorPrecisionNormal(rank)
    params, v = member(family), torch.randn(D)
    P = precision(params)
    torch.testing.assert_close(family.covariance_product(params, v), torch.linalg.solve(P, v))
    for damping in (0.3, torch.tensor(0.3)):
        wanted = torch.linalg.solve(P + 0.3 * torch.eye(D), v)
        torch.testing.assert_close(family.covariance_product(params, v, damping), wanted)


@pytest.mark.parametrize("largest_dense", [0, 128], ids=["iterated", "dense"])
@pytest.mark.parametrize(
    ("dtype", "size", "limit"), [(torch.float32, 1e2, 2e-2), (torch.float64, 3e4, 1e-6)]
)
def test_where_the_factors_dwarf_the_rest(
    dtype: torch.dtype, size: float, limit: float, largest_dense: int, monkeypatch
) -> None:
    """|B|^2 near 1e9 in float64: F F^-1 g is g, draws and densities are exact."""
    monkeypatch.setattr(spectral, "DENSE", largest_dense)
    d, rank = 40, 3
    family = FactorPrecisionNormal(rank, cg_iterations=40)
    g = torch.Generator().manual_seed(0)
    params = family.init(torch.zeros(d), 1.0)
    params["factor"] = size * (params["factor"] + 0.1 * torch.randn(d, rank, generator=g))
    P = precision(params)
    Sigma = torch.linalg.inv(P)
    root = torch.randn(d, d, generator=g)
    gamma = Sigma @ (P + root @ root.T) @ Sigma  # of the size of Sigma
    grads = {
        "loc": torch.randn(d, generator=g),
        "factor": gamma @ params["factor"],
        "log_precision": 0.5 * gamma.diagonal() * params["log_precision"].exp(),
    }
    single = {k: v.to(dtype) for k, v in params.items()}
    gradient = family.pull(single, {k: v.to(dtype) for k, v in grads.items()})
    back = family.fisher_product(single, family.natural_gradient(single, gradient))
    for key in single:
        error = (back[key] - gradient[key]).norm() / gradient[key].norm()
        assert error < limit, f"{key}: relative residual {float(error):.1e}"
    noise = torch.eye(d, dtype=dtype)
    map_ = (family.rsample(single, noise) - single["loc"]).double()
    # in the metric of q: the narrow directions are as exact as the wide ones
    whitened = map_ @ torch.linalg.cholesky(P)
    rest = whitened @ whitened.T - torch.eye(d)
    assert float(rest.abs().max()) < limit
    assert abs(float(family.kl(single, single))) < limit


def test_huge_random_steps_stay_in_the_domain() -> None:
    family = FactorPrecisionNormal(3)
    for seed in range(20):
        params = member(family, seed=seed)
        for _ in range(30):
            tangent = {k: torch.randn_like(v) for k, v in params.items()}
            params = family.retract(params, tangent, 10.0 ** float(6 * torch.rand(())))
        assert all(v.isfinite().all() for v in params.values())
        sd = family.stddev(params)
        assert (sd > 0).all() and sd.isfinite().all()
        assert family.entropy(params).isfinite()


def test_rank_out_of_range_is_refused() -> None:
    for rank in (0, 1.5):
        with pytest.raises(ValueError, match=f"whole rank of at least 1, got rank={rank}"):
            FactorPrecisionNormal(rank)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"rank=5.*only 5 dimensions.*at most 4"):
        FactorPrecisionNormal(5).init(torch.zeros(5), 0.1)


@pytest.mark.parametrize("optimizer", [NGVB, IFVB])
def test_optimizers_reach_the_exact_posterior(optimizer: type) -> None:
    """d = 3: rank 2 beside a diagonal holds every precision."""
    X, y = data()
    mean, P = exact_posterior(X, y)
    guide = AutoFactorPrecision(regression, rank=2)
    svi = SVI(regression, guide, optimizer(guide), BatchedELBO(8))
    for _ in range(200):
        svi.step(X, y)
    exact = torch.distributions.MultivariateNormal(mean, precision_matrix=P)
    with torch.no_grad():
        q = guide.get_posterior()
        found = torch.distributions.MultivariateNormal(q.mean, q.covariance_matrix)
        assert float(torch.distributions.kl_divergence(found, exact)) < 0.01
