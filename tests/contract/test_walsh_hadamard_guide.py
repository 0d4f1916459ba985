"""AutoWalshHadamard: its sites, its objective by hand, what a user reads, and where its runs end."""

from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import SVI
from pyro.infer.autoguide import init_to_value
from pyro.optim import Adam  # pyright: ignore[reportAttributeAccessIssue]
from torch import Tensor

import pyro_ngvi as ngvi
from pyro_ngvi import NGVB, AutoWalshHadamard, BatchedELBO
from pyro_ngvi.nn import WalshHadamardReparam
from pyro_ngvi.optim import Constant
from tests import registry
from tests.contract.registry import perturbed
from tests.contract.walsh_hadamard_model import (
    COLUMNS,
    LOC,
    ROWS,
    SCALE,
    SD,
    N,
    data,
    exact,
    weights,
    weights_and_bias,
)
from tests.cubature import sphere_points
from tests.registry import some

SETTINGS: dict[str, dict[str, Any]] = {
    "mean field": {},
    "full rank": {"g": "full_rank", "rest": "full_rank"},
    "g_scale": {"g_scale": 0.6},
    "signs": {"train_diagonals": False},
}
settings = pytest.mark.parametrize("how", SETTINGS.values(), ids=SETTINGS)
LOSSES = some(registry.LOSSES, "Trace", "Trace vectorised", "Batched")


def guide_of(model: Any, **how: Any) -> Any:
    guide = AutoWalshHadamard(model, **how)
    guide(*data())
    return guide


def moved(model: Any, **how: Any) -> Any:
    """A guide away from its start, and diagonals that are no signs."""
    guide = perturbed(guide_of(model, **how))
    with torch.no_grad():
        for name, p in guide.named_parameters():
            if name.startswith(("left", "right")):
                p.add_(0.3 * torch.randn_like(p))
    return guide


def linear_map(guide: Any) -> Tensor:
    """A (entries, num_g) with vec((W - loc) / scale) = A g."""
    transform = guide._transform("W")
    made = transform(torch.eye(guide.matrices["W"].num_g))
    return ((made - transform.loc) / transform.scale).flatten(1).mT.detach()


def elbo_by_hand(guide: Any, theta: Tensor, g_scale: float) -> Tensor:
    """log p(y | W) + log p(g) + log p(rest) - log q, averaged over the rows of theta."""
    X, Y = data()
    K, A = guide.matrices["W"].num_g, linear_map(guide)
    log_scale, g, b = theta.split([1, K, ROWS], -1)
    W = (g @ A.mT).view(-1, ROWS, COLUMNS)
    log_lik = dist.Normal(X @ W.mT + b[:, None], log_scale[..., None].exp()).log_prob(Y)
    log_p = log_lik.sum((-1, -2)) + dist.Normal(0.0, g_scale).log_prob(g).sum(-1)
    log_p = log_p + dist.Normal(0.0, 1.0).log_prob(torch.cat([log_scale, b], -1)).sum(-1)
    return (log_p - guide.get_posterior().log_prob(theta)).mean()


@settings
@pytest.mark.parametrize("loss", LOSSES)
def test_elbo_is_that_of_the_reparameterised_model(how: dict[str, Any], loss: str) -> None:
    guide = moved(weights_and_bias, sites=["W"], sticking_the_landing=False, **how)
    elbo, n = LOSSES[loss], 1 if loss == "Trace" else 3
    elbo = elbo(n)
    elbo.loss(weights_and_bias, guide, *data())  # what a first call draws apart
    torch.manual_seed(1)
    with torch.no_grad():
        actual = elbo.loss(weights_and_bias, guide, *data())
    torch.manual_seed(1)
    theta = guide.get_posterior().rsample((n,))
    torch.testing.assert_close(-actual, elbo_by_hand(guide, theta, how.get("g_scale", 1.0)).item())
    # and that of poutine.reparam, with the same diagonals
    reparam = WalshHadamardReparam(
        **{k: v for k, v in how.items() if k in ("g_scale", "train_diagonals")}
    )
    model = poutine.reparam(weights_and_bias, {"W": reparam})
    for side in ("left", "right"):
        value = dict(guide.named_parameters()).get(f"{side}_g_W")
        if value is not None:
            pyro.param(f"W_{side}", value.detach())
    total = torch.zeros(())
    K = guide.matrices["W"].num_g
    for row in theta:
        values = {"scale": row[0].exp(), "W_g": row[1 : K + 1], "b": row[K + 1 :]}
        trace: Any = poutine.trace(poutine.condition(model, values)).get_trace(*data())
        # scale = exp(theta_0) has the density of theta_0 over scale
        total += trace.log_prob_sum() + row[0] - guide.get_posterior().log_prob(row)
    torch.testing.assert_close(torch.tensor(-actual), (total / n).detach())


@settings
def test_gradients_are_those_of_the_hand_written_bound(how: dict[str, Any]) -> None:
    """Also where rows and columns are cut off: the linear map has no others than the live entries."""
    guide = moved(weights_and_bias, sites=["W"], sticking_the_landing=False, **how)
    elbo = BatchedELBO(3)
    elbo.loss(weights_and_bias, guide, *data())
    torch.manual_seed(1)
    elbo.loss_and_grads(weights_and_bias, guide, *data())
    grads = {name: p.grad.clone() for name, p in guide.natural_params().items()}
    guide.zero_grad()
    torch.manual_seed(1)
    theta = guide.sampling_posterior().rsample((3,))
    (-elbo_by_hand(guide, theta, how.get("g_scale", 1.0))).backward()
    for name, p in guide.natural_params().items():
        lower = p.grad.tril() if "tril" in name else p.grad
        torch.testing.assert_close(grads[name], lower)


def exact_guide(**how: Any) -> tuple[Any, Tensor]:
    """A full-rank guide set to the posterior of g, and the log evidence of its model."""
    guide = guide_of(weights, g="full_rank", train_diagonals=False, **how)
    posterior, evidence = exact(linear_map(guide))
    with torch.no_grad():
        guide.g_W_loc.copy_(posterior.mean)
        guide.g_W_scale_tril.copy_(torch.linalg.cholesky(posterior.covariance_matrix))
    return guide, evidence


def test_at_the_posterior_of_g_every_draw_gives_the_evidence() -> None:
    guide, evidence = exact_guide()
    for _ in range(3):
        loss = BatchedELBO(2).loss(weights, guide, *data())
        torch.testing.assert_close(loss, -evidence.item(), rtol=1e-9, atol=1e-9)
    result = ngvi.khat(weights, guide, *data(), num_samples=100, seed=0)
    assert result.khat == 0.0 and abs(result.kl) < 1e-9


def test_exact_gradients_lead_to_the_posterior() -> None:
    """Sphere points make every expectation exact; dead numbers of h keep their prior N(0, 1)."""
    guide = guide_of(weights, g="full_rank", train_diagonals=False, init_scale=1.0)
    K = guide.matrices["W"].num_g
    points = sphere_points(K)

    def draw(params: dict[str, Tensor], shape: torch.Size) -> Tensor:
        noise = points if shape.numel() == len(points) else torch.zeros(*shape, K)
        return guide.family.rsample(params, noise)

    guide.family.draw = guide.family.centred_draw = draw
    optim = NGVB(guide, schedule=Constant(0.4), momentum=0.0, averaging=False)
    svi = SVI(weights, guide, optim, BatchedELBO(2 * K))
    for _ in range(60):
        svi.step(*data())
    posterior, _ = exact(linear_map(guide))
    q = guide.get_posterior()
    torch.testing.assert_close(q.mean, posterior.mean, rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(
        q.covariance_matrix, posterior.covariance_matrix, rtol=1e-6, atol=1e-8
    )
    matrix = guide.matrices["W"]
    h = matrix.transform(matrix.transform(q.covariance_matrix).mT)
    dead = torch.ones(K, dtype=torch.bool)
    dead[matrix.classes(torch.device("cpu"))] = False
    assert dead.nonzero().flatten().tolist() == [7]
    torch.testing.assert_close(h[7], torch.eye(K)[7], rtol=0, atol=1e-7)
    torch.testing.assert_close(matrix.transform(q.mean)[7], torch.tensor(0.0), rtol=0, atol=1e-7)


def test_a_run_as_it_comes_recovers_a_matrix_of_that_form() -> None:
    """Four seeds ended with all means within 0.0005 posterior sd of the exact posterior mean."""
    guide = guide_of(weights, g="full_rank", train_diagonals=False)
    transform, A = guide._transform("W"), linear_map(guide)
    torch.manual_seed(3)
    true = transform(torch.randn(guide.matrices["W"].num_g))
    X = data()[0]
    Y = X @ true.mT + SD * torch.randn(N, ROWS)
    svi = SVI(weights, guide, NGVB(guide), BatchedELBO(8))
    for _ in range(300):
        svi.step(X, Y)
    mean, sd = guide.site_moments("W")
    M = SCALE * torch.einsum("nj,ik->nkij", X, torch.eye(ROWS)).reshape(N * ROWS, -1) @ A
    P = torch.eye(len(A.mT)) + M.mT @ M / SD**2
    y = (Y - LOC * X.sum(-1, keepdim=True)).flatten()
    target = transform(torch.linalg.solve(P, M.mT @ y) / SD**2)
    assert ((mean - target).abs() / sd).max() < 0.005
    assert ((mean - true).abs() / sd).max() < 4.0  # 15 entries made of 7 numbers


def test_trained_diagonals_raise_the_bound() -> None:
    """Three seeds ended at -475 +- 17 after 100 steps, and with signs at -1322."""

    def trained(**how: Any) -> float:
        pyro.set_rng_seed(0)
        guide = guide_of(weights, g="full_rank", **how)
        optim = NGVB(guide, others=Adam({"lr": 0.02}))
        svi = SVI(weights, guide, optim, BatchedELBO(4))
        for _ in range(60):
            svi.step(*data())
        return -BatchedELBO(200).loss(weights, guide, *data())

    assert trained() > trained(train_diagonals=False) + 300.0


@settings
def test_median_quantiles_and_moments(how: dict[str, Any]) -> None:
    guide = moved(weights_and_bias, sites=["W"], **how)
    A, q = linear_map(guide), guide.get_posterior()
    K = guide.matrices["W"].num_g
    S = q.covariance_matrix[1 : K + 1, 1 : K + 1]
    mean, sd = guide.site_moments("W")
    torch.testing.assert_close(mean, (A @ q.mean[1 : K + 1]).view(ROWS, COLUMNS))
    torch.testing.assert_close(sd, (A @ S @ A.mT).diagonal().sqrt().view(ROWS, COLUMNS))
    torch.testing.assert_close(guide.median()["W"], mean)
    levels = [0.1, 0.5, 0.9]
    quantiles = guide.quantiles(levels)
    assert quantiles["W"].shape == (3, ROWS, COLUMNS) and quantiles["scale"].shape == (3,)
    z = torch.special.ndtri(torch.tensor(levels))
    torch.testing.assert_close(quantiles["W"], mean + sd * z.view(3, 1, 1))
    assert (quantiles["scale"].diff() > 0).all()
    n = 4000
    with torch.no_grad(), pyro.plate("n", n, dim=-2):
        W = guide(*data())["W"].reshape(n, ROWS, COLUMNS)
    below = (W.unsqueeze(1) <= quantiles["W"]).double().mean(0)
    p = torch.tensor(levels).view(3, 1, 1)
    standard_error = (p * (1 - p) / n).sqrt()
    assert ((below - p).abs() / standard_error).max() < 4.5  # 45 of them


def test_which_sites() -> None:
    def model(X: Tensor, Y: Tensor) -> None:
        for name, shape in {"a.W": (6, 4), "a_W": (4, 2), "row": (1, 3), "out": (2, 2)}.items():
            pyro.sample(name, dist.Normal(torch.zeros(shape), 1.0).to_event(2))
        pyro.sample("positive", dist.Gamma(2.0, torch.ones(3, 3)).to_event(2))
        pyro.sample("vector", dist.Normal(torch.zeros(10), 1.0).to_event(1))
        pyro.sample("cube", dist.Normal(torch.zeros(2, 3, 2), 1.0).to_event(3))
        pyro.sample("last", dist.Normal(torch.zeros(3, 3), 1.0).to_event(2))

    guide = guide_of(model)
    assert list(guide.matrices) == ["a.W", "a_W", "out"]
    assert len(set(guide.parts.values())) == 3  # names that differ by a dot alone
    guide = guide_of(model, sites=["cube", "vector", "last"])
    sizes = {name: (m.rows, m.columns) for name, m in guide.matrices.items()}
    assert sizes == {"vector": (3, 4), "cube": (2, 6), "last": (3, 3)}
    values = guide(*data())
    assert values["vector"].shape == (10,) and values["cube"].shape == (2, 3, 2)
    mean, sd = guide.site_moments("vector")
    assert mean.shape == (10,) and (sd > 0).all()
    optim = NGVB(guide, others=Adam({"lr": 0.01}))
    svi: Any = SVI(model, guide, optim, BatchedELBO(2))
    assert svi.step(*data()) < float("inf")


def test_numbers_with_and_without_an_output_layer() -> None:
    """Those that the docstring states."""
    sizes = ((16, 256), (256, 256), (256, 10))
    layers = [m for n, k in sizes for m in (torch.nn.Linear(n, k), torch.nn.ReLU())][:-1]
    net = torch.nn.Sequential(*layers)
    model = ngvi.nn.bayesianize(net, "normal", num_data=20, noise=0.1)
    x, y = torch.randn(20, 16), torch.randn(20, 10)
    assert sum(p.numel() for p in net.parameters()) == 72_714 == 145_428 // 2
    for sites, numbers in (
        (None, (3_594, 8_212)),
        (["0.weight", "2.weight", "4.weight"], (1_290, 3_870)),
    ):
        pyro.clear_param_store()
        guide = AutoWalshHadamard(model, sites, init_loc_fn=model.init_to_module)
        guide(x, y)
        assert (guide.latent_dim, sum(p.numel() for p in guide.parameters())) == numbers


def test_start() -> None:
    """At the nearest matrix of that form, as long as the one asked for."""
    W = torch.randn(ROWS, COLUMNS)
    guide = guide_of(weights, init_loc_fn=init_to_value(values={"W": W}), init_scale=0.2)
    u, median = (W - LOC) / SCALE, (guide.median()["W"] - LOC) / SCALE
    torch.testing.assert_close(median.square().sum(), u.square().sum())
    A = linear_map(guide)
    nearest = A @ torch.linalg.lstsq(A, u.view(-1, 1), driver="gelsd").solution
    torch.testing.assert_close(median.flatten() / u.norm(), nearest.flatten() / nearest.norm())
    torch.testing.assert_close(guide.site_moments("W")[1], torch.full((ROWS, COLUMNS), 0.2 * SCALE))


def test_verdicts_are_of_the_model_that_it_replaces() -> None:
    """No matrix of that form fits: for its own model the guide is exact, for the user's it is not."""
    X = torch.randn(60, 6, generator=torch.Generator().manual_seed(5))
    Y = X @ torch.randn(6, 3, generator=torch.Generator().manual_seed(6))

    def model() -> None:
        W: Any = pyro.sample("W", dist.Normal(torch.zeros(6, 3), 0.8).to_event(2))
        with pyro.plate("rows", len(X)):
            pyro.sample("Y", dist.Normal(X @ W, 0.5).to_event(1), obs=Y)

    pyro.set_rng_seed(0)
    guide = AutoWalshHadamard(model, sites=["W"], g="full_rank", train_diagonals=False)
    ngvi.fit(model, guide=guide, seed=0, progress=False)
    found = ngvi.khat(model, guide, seed=0)
    assert found.decision == "intervals" and found.replaced == ("W",) and found.missed is None
    assert found.verdict.startswith("For a model with the guide's own prior of 'W', not for yours")
    assert "not for yours" in str(
        ngvi.summary(ngvi.to_arviz(model, guide, num_samples=100, seed=0))
    )
    assert ngvi.diagnose(model, guide, num_chains=100).decision == "unusable"
    assert ngvi.khat(model, ngvi.AutoMeanFieldNormal(model), seed=0).replaced == ()
