"""Noisy K-FAC against dense matrices, and its end on a regression whose factors are known."""

from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI
from torch import Tensor
from torch.utils._pytree import tree_map

from pyro_ngvi import AutoMatrixNormal, AutoMeanFieldNormal, BatchedELBO
from pyro_ngvi.curvature.estimators import Curvature
from pyro_ngvi.families import MatrixNormal, MeanFieldNormal, ProductFamily
from pyro_ngvi.optim.noisy_kfac import NoisyKFAC, NoisyKFACRule, covariance_factors
from pyro_ngvi.optim.state import flat
from tests.cubature import sphere_points
from tests.exact.rule_cases import update

N, M = 3, 4
FAMILY = ProductFamily(
    {"w": MatrixNormal(N, M), "rest": MeanFieldNormal()}, [("rest", 2), ("w", N * M)], linear=False
)


def positive(d: int, seed: int) -> Tensor:
    root = torch.randn(d, d + 2, generator=torch.Generator().manual_seed(seed))
    return root @ root.mT / d


def problem(seed: int = 0) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    g = torch.Generator().manual_seed(seed)
    params = FAMILY.init(torch.randn(2 + N * M, generator=g), 0.5)
    grads = {k: torch.randn(v.shape, generator=g) for k, v in params.items()}
    grads["curvature.kron_columns.w"] = positive(M, seed + 1)
    grads["curvature.kron_rows.w"] = 30.0 * positive(N, seed + 2)
    grads["curvature.prior"] = torch.cat(
        [torch.full((2,), 9.0), 2.0 + torch.rand(N * M, generator=g)]
    )
    return params, grads


def precision(grads: dict[str, Tensor], t: Tensor) -> Tensor:
    """(S + sqrt(t) / pi) kron (A + sqrt(t) pi), written out as in the paper."""
    A, S = grads["curvature.kron_columns.w"], grads["curvature.kron_rows.w"]
    pi = ((A.trace() / M) / (S.trace() / N)).sqrt()
    return torch.kron(S + t.sqrt() / pi * torch.eye(N), A + t.sqrt() * pi * torch.eye(M))


def test_damping_multiplies_out_to_the_prior() -> None:
    """S kron A + tau I and the two cross terms that the head names; their traces are alike."""
    _, grads = problem()
    A, S, tau = grads["curvature.kron_columns.w"], grads["curvature.kron_rows.w"], torch.tensor(2.5)
    pi = ((A.trace() / M) / (S.trace() / N)).sqrt()
    cross = pi * torch.kron(S, torch.eye(M)), torch.kron(torch.eye(N), A) / pi
    expected = torch.kron(S, A) + tau * torch.eye(N * M) + tau.sqrt() * (cross[0] + cross[1])
    torch.testing.assert_close(cross[0].trace(), cross[1].trace())
    factors = covariance_factors(S, A, tau)
    assert all(torch.equal(L, L.tril()) for L in factors)
    root = torch.kron(*factors)
    torch.testing.assert_close(root @ root.mT, torch.linalg.inv(expected))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_without_statistics_the_prior_remains(dtype: torch.dtype) -> None:
    for S, A in ((torch.zeros(N, N), torch.zeros(M, M)), (positive(N, 0), torch.zeros(M, M))):
        root = torch.kron(*covariance_factors(S.to(dtype), A.to(dtype), 4.0))
        torch.testing.assert_close(root @ root.mT, 0.25 * torch.eye(N * M, dtype=dtype))


@pytest.mark.parametrize("damping", [0.0, 3.0])
def test_a_step_is_that_of_the_dense_matrices(damping: float) -> None:
    params, grads = problem()
    rule = NoisyKFACRule(FAMILY, lr=0.3, damping=damping, trust_radius=torch.inf)
    new, _, report = update(rule, params, grads, rule.init(params))
    tau = grads["curvature.prior"][2:].mean()
    P = precision(grads, tau)
    covariance = FAMILY.parts["w"].covariance(FAMILY.own("w", new))
    torch.testing.assert_close(covariance, torch.linalg.inv(P))
    move = 0.3 * torch.linalg.solve(precision(grads, tau + damping), grads["w_loc"])
    torch.testing.assert_close(new["w_loc"], params["w_loc"] - move)
    # the rest takes a step of its own natural gradient
    variance = (2.0 * params["rest_log_scale"]).exp()
    rest = 0.3 * variance * grads["rest_loc"]
    torch.testing.assert_close(new["rest_loc"], params["rest_loc"] - rest)
    scale = 0.5 * 0.3 * grads["rest_log_scale"]
    torch.testing.assert_close(new["rest_log_scale"], params["rest_log_scale"] - scale)
    # the Fisher length of the move of the means, at the new factors, and of the scales
    square = move @ P @ move + (rest.square() / variance).sum() + 2.0 * scale.square().sum()
    torch.testing.assert_close(report.step_norm, square.sqrt())


def test_a_long_move_ends_at_the_trust_radius() -> None:
    params, grads = problem()
    grads = {k: v * (1.0 if k.startswith("curvature") else 1e2) for k, v in grads.items()}
    free = NoisyKFACRule(FAMILY, lr=0.3, trust_radius=torch.inf)
    bound = NoisyKFACRule(FAMILY, lr=0.3, trust_radius=0.5)
    far, _, long = update(free, params, grads, free.init(params))
    near, _, short = update(bound, params, grads, bound.init(params))
    assert long.step_norm > 0.5 and not long.damped and short.damped
    torch.testing.assert_close(short.step_norm, torch.tensor(0.5))
    for key in ("w_loc", "rest_loc", "rest_log_scale"):
        share = 0.5 / long.step_norm
        torch.testing.assert_close(near[key] - params[key], share * (far[key] - params[key]))
    assert torch.equal(near["w_row_tril"], far["w_row_tril"])


def test_averages_start_with_the_first_statistics() -> None:
    params, first = problem(0)
    _, second = problem(10)
    _, third = problem(20)
    rule = NoisyKFACRule(FAMILY, curvature_lr=0.4)
    state, seen = rule.init(params), []
    for grads in (first, second, third):
        params, state, _ = update(rule, params, grads, state)
        seen.append(state["kron_columns"]["w"])
    A = [grads["curvature.kron_columns.w"] for grads in (first, second, third)]
    torch.testing.assert_close(seen[0], A[0])
    torch.testing.assert_close(seen[1], 0.5 * (A[0] + A[1]))
    torch.testing.assert_close(seen[2], 0.6 * seen[1] + 0.4 * A[2])


def test_a_step_that_is_not_finite_is_refused() -> None:
    params, grads = problem()
    rule = NoisyKFACRule(FAMILY)
    _, state, _ = update(rule, params, grads, rule.init(params))
    broken = grads | {"curvature.kron_rows.w": torch.full((N, N), torch.nan)}
    new, after, report = update(rule, params, broken, state)
    assert not report.finite and report.skipped == 1
    assert all(torch.equal(new[k], v) for k, v in params.items())
    assert torch.equal(after["kron_rows"]["w"], state["kron_rows"]["w"])
    assert report.bad_entries.tolist() == [False] * 2 + [True] * (N * M)


def test_update_on_meta() -> None:
    params, grads = problem()
    rule = NoisyKFACRule(FAMILY, damping=1.0)
    state = rule.init(params)
    meta = tree_map(lambda v: v.to("meta"), (params, grads, state))
    new, after, report = update(rule, *meta)
    real, there, _ = update(rule, params, grads, state)
    for ours, theirs in ((new, real), (flat(after), flat(there))):
        assert {k: (v.shape, v.dtype) for k, v in ours.items()} == {
            k: (v.shape, v.dtype) for k, v in theirs.items()
        }
    assert report.step_norm.device.type == "meta"


NOISE, TAU, DATA = 0.5, 2.0, 25


def data() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(2)
    X = torch.randn(DATA, M, generator=g)
    W = torch.randn(N, M, generator=g)
    return X, X @ W.mT + NOISE * torch.randn(DATA, N, generator=g)


def layer(X: Tensor, Y: Tensor) -> None:
    W = pyro.sample("W", dist.Normal(torch.zeros(N, M), TAU**-0.5).to_event(2))
    with pyro.plate("data", len(Y)):
        pyro.sample("Y", dist.Normal(X @ W.mT, NOISE).to_event(1), obs=Y)


class WithFactors(BatchedELBO):
    """A loss that leaves what it is known to be here: g g' has mean I / NOISE^2 under the model."""

    def loss_and_grads(self, model: Any, guide: Any, *args: Any, **kwargs: Any) -> Any:
        loss = super().loss_and_grads(model, guide, *args, **kwargs)
        X = args[0]
        parts = {
            "kron_columns.W": X.mT @ X / len(X),
            "kron_rows.W": len(X) / NOISE**2 * torch.eye(N),
            "prior": torch.full((N * M,), TAU),
        }
        guide.curvature = Curvature("kronecker", parts)
        return loss


def fit(model: Any, X: Tensor, Y: Tensor, loss: Any, steps: int) -> Any:
    """The guide after steps whose draws make the moments of q, up to the second, exact."""
    guide = AutoMatrixNormal(model)
    guide(X, Y)
    family, points = guide.family, sphere_points(N * M)

    def draw(params: dict[str, Tensor], shape: torch.Size) -> Tensor:
        noise = points if shape.numel() == len(points) else torch.zeros(*shape, N * M)
        return family.rsample(params, noise)

    family.draw = family.centred_draw = draw
    optim = NoisyKFAC(guide, lr=0.5, curvature_lr=0.5, trust_radius=None)
    svi = SVI(model, guide, optim, loss)
    for _ in range(steps):
        svi.step(X, Y)
    return guide


def test_regression_of_one_layer() -> None:
    """The exact mean, and the covariance of the damped factors, from gradients without noise."""
    X, Y = data()
    guide = fit(layer, X, Y, WithFactors(2 * N * M), 60)
    exact = X.mT @ X / NOISE**2 + TAU * torch.eye(M)
    mean = torch.linalg.solve(exact, X.mT @ Y / NOISE**2).mT
    torch.testing.assert_close(guide.median()["W"], mean, rtol=1e-8, atol=1e-8)
    A, S = X.mT @ X / DATA, DATA / NOISE**2 * torch.eye(N)
    statistics = {"curvature.kron_columns.w": A, "curvature.kron_rows.w": S}
    P = precision(statistics, torch.tensor(TAU))
    torch.testing.assert_close(guide.get_posterior().covariance_matrix, torch.linalg.inv(P))
    # the damped precision exceeds the exact one, as the head says
    excess = P - torch.kron(torch.eye(N), exact)
    assert torch.linalg.eigvalsh(excess).min() > 0


def test_regression_with_the_factors_of_the_loss() -> None:
    """The exact mean; the covariance of the damped factors of E_q of products of residuals."""
    X, Y = data()
    guide = fit(layer, X, Y, BatchedELBO(2 * N * M, curvature="kronecker"), 120)
    exact = X.mT @ X / NOISE**2 + TAU * torch.eye(M)
    mean = torch.linalg.solve(exact, X.mT @ Y / NOISE**2).mT
    torch.testing.assert_close(guide.median()["W"], mean, rtol=1e-8, atol=1e-8)
    residual = Y - X @ mean.mT
    A, rows, columns = X.mT @ X / DATA, torch.eye(N), torch.eye(M)
    for _ in range(200):  # S depends on q, by the covariance of W x
        products = residual.mT @ residual + (X @ columns * X).sum() * rows
        L, R = covariance_factors(products / NOISE**4, A, TAU)
        rows, columns = L @ L.mT, R @ R.mT
    wanted = torch.kron(rows, columns)
    torch.testing.assert_close(guide.get_posterior().covariance_matrix, wanted)


def test_a_vague_prior_and_fitting_residuals_give_the_exact_posterior() -> None:
    """Residuals of covariance NOISE^2 with DATA - M degrees of freedom, across the inputs."""
    tau = 1e-12

    def vague(X: Tensor, Y: Tensor) -> None:
        W = pyro.sample("W", dist.Normal(torch.zeros(N, M), tau**-0.5).to_event(2))
        with pyro.plate("data", len(Y)):
            pyro.sample("Y", dist.Normal(X @ W.mT, NOISE).to_event(1), obs=Y)

    X, Y = data()
    Q, _ = torch.linalg.qr(torch.cat([X, Y], 1))
    W = 0.1 * torch.arange(N * M, dtype=X.dtype).reshape(N, M)
    Y = X @ W.mT + NOISE * (DATA - M) ** 0.5 * Q[:, M:]
    guide = fit(vague, X, Y, BatchedELBO(2 * N * M, curvature="kronecker"), 120)
    exact = torch.kron(torch.eye(N), NOISE**2 * torch.linalg.inv(X.mT @ X).contiguous())
    covariance = guide.get_posterior().covariance_matrix
    torch.testing.assert_close(covariance, exact, rtol=1e-5, atol=1e-8)
    torch.testing.assert_close(guide.median()["W"], W, rtol=1e-6, atol=1e-6)


def test_what_is_refused() -> None:
    X, Y = data()
    wrongs: list[dict[str, Any]] = [{"lr": 2.0}, {"damping": -1.0}, {"trust_radius": 0.0}]
    for wrong in [*wrongs, {"prior_precision": -2.0}]:
        with pytest.raises(ValueError, match=next(iter(wrong))):
            NoisyKFAC(AutoMatrixNormal(layer), **wrong)
    with pytest.raises(ValueError, match=r"AutoMeanFieldNormal.*pyro_ngvi\.AutoMatrixNormal"):
        NoisyKFAC(AutoMeanFieldNormal(layer))
    guide = AutoMatrixNormal(layer)
    svi = SVI(layer, guide, NoisyKFAC(guide), BatchedELBO(2))
    with pytest.raises(RuntimeError, match=r'left none\. Pass .*curvature="kronecker"\)'):
        svi.step(X, Y)
