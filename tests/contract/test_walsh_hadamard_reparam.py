"""WalshHadamardReparam: hierarchical scales, plates, particles, starts, and its density by hand."""

from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import init_to_value
from pyro.optim import Adam  # pyright: ignore[reportAttributeAccessIssue]
from torch import Tensor

from pyro_ngvi import NGVB, AutoFullRankNormal, AutoMeanFieldNormal, BatchedELBO
from pyro_ngvi.guides.reparam import seed_of
from pyro_ngvi.linalg.walsh_hadamard_matrix import WalshHadamardMatrix
from pyro_ngvi.nn import WalshHadamardReparam as Reparam

N, GROUPS, ROWS, COLUMNS = 10, 2, 5, 3
MATRIX = WalshHadamardMatrix(ROWS, COLUMNS)


def data() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(2)
    return torch.randn(N, COLUMNS, generator=g), torch.randn(N, GROUPS, ROWS, generator=g)


def groups(X: Tensor, Y: Tensor) -> None:
    """A matrix for each group, with a latent scale: right under vectorised particles too."""
    tau = pyro.sample("tau", dist.LogNormal(X.new_zeros(()), X.new_ones(())))
    with pyro.plate("groups", GROUPS, dim=-1):
        wide = tau[..., None, None]
        W = pyro.sample("W", dist.Normal(X.new_zeros(ROWS, COLUMNS), wide).to_event(2))
    with pyro.plate("data", len(X), dim=-2), pyro.plate("groups_", GROUPS, dim=-1):
        # (..., 1, GROUPS, ROWS, COLUMNS) against (N, 1, COLUMNS, 1)
        W = W.unsqueeze(-4) if W.dim() == 3 else W
        mean = (W @ X[:, None, :, None]).squeeze(-1)
        pyro.sample("Y", dist.Normal(mean, 0.5).to_event(1), obs=Y)


def reparam(**how: Any) -> Any:
    return poutine.reparam(groups, {"W": Reparam(**how)})


def diagonals() -> tuple[Tensor, Tensor]:
    store = pyro.get_param_store()
    return store["W_left"].detach(), store["W_right"].detach()


def test_density_by_hand() -> None:
    X, Y = data()
    model = reparam(g_scale=0.7)
    model(X, Y)
    with torch.no_grad():
        for name in ("W_left", "W_right"):
            pyro.param(name).add_(0.3)
    g, tau = torch.randn(GROUPS, MATRIX.num_g), torch.tensor(1.3)
    trace: Any = poutine.trace(poutine.condition(model, {"W_g": g, "tau": tau})).get_trace(X, Y)
    W = trace.nodes["W"]["value"]
    torch.testing.assert_close(W, tau * MATRIX.dense(g, *diagonals()))
    expected = dist.Normal(0.0, 0.7).log_prob(g).sum() + dist.LogNormal(0.0, 1.0).log_prob(tau)
    mean = torch.einsum("gik,nk->ngi", W, X)
    expected = expected + dist.Normal(mean, 0.5).log_prob(Y).sum()
    torch.testing.assert_close(trace.log_prob_sum(), expected)


def test_prior_moments_are_those_of_the_site() -> None:
    """100,000 draws of the model without data: sd 1 for every entry; standard error 0.0022."""

    def prior() -> Any:
        loc = torch.full((ROWS, COLUMNS), 2.0)
        return pyro.sample("W", dist.Normal(loc, 0.5).to_event(2))

    model = poutine.reparam(prior, {"W": Reparam()})
    with pyro.plate("draws", 100_000), torch.no_grad():
        W: Any = model()
    assert W.shape == (100_000, ROWS, COLUMNS)
    assert ((W.mean(0) - 2.0).abs() < 5 * 0.5 / 100_000**0.5).all()
    assert ((W.std(0) - 0.5).abs() < 5 * 0.5 * 0.0022).all()


LOSSES = {
    "Trace": Trace_ELBO,
    "Trace vectorised": lambda n: Trace_ELBO(n, vectorize_particles=True, max_plate_nesting=2),
    "Batched": BatchedELBO,
}


@pytest.mark.parametrize("how", [{}, {"train_diagonals": False}], ids=str)
@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss(how: dict[str, Any], loss: str) -> None:
    """The mean of each loss over the noise is one number: at sd 1e-4 the loss itself is, nearly."""
    model = reparam(**how)
    guide = AutoMeanFieldNormal(model, init_scale=1e-4)
    optim = NGVB(guide, others=Adam({"lr": 0.01}))
    values = LOSSES[loss](3).loss(model, guide, *data()), BatchedELBO(3).loss(model, guide, *data())
    # the entropy term, sum of noise^2 / 2 over three draws, has mean d / 2 and sd sqrt(d / 6)
    assert abs(values[0] - values[1]) < 5 * (2 * guide.latent_dim / 6) ** 0.5
    svi: Any = SVI(model, guide, optim, LOSSES[loss](3))
    losses = [svi.step(*data()) for _ in range(40)]
    assert sum(losses[-5:]) < sum(losses[:5])
    assert guide(*data())["W_g"].shape == (GROUPS, 8)
    left = dict(pyro.get_param_store().items()).get("W_left")
    if how.get("train_diagonals", True):
        assert left is not None and (left.abs() != 1.0).any()  # trained
    else:
        assert left is None


def test_start_at_a_matrix() -> None:
    """init_to_value of W itself: the nearest matrix of that form, as long."""

    def model() -> None:
        pyro.sample("W", dist.Normal(torch.full((ROWS, COLUMNS), 0.5), 2.0).to_event(2))

    small = poutine.reparam(model, {"W": Reparam(train_diagonals=False)})
    W = torch.randn(ROWS, COLUMNS)
    guide = AutoFullRankNormal(small, init_loc_fn=init_to_value(values={"W": W}))
    guide()
    median: Any = guide.median()
    trace: Any = poutine.trace(poutine.condition(small, median)).get_trace()
    left, right = MATRIX.signs(seed_of("W"), W)
    u, start = (W - 0.5) / 2.0, (trace.nodes["W"]["value"] - 0.5) / 2.0
    g = MATRIX.projection(u, left, right)
    near = MATRIX.dense(g, left, right)
    torch.testing.assert_close(start, near / near.norm() * u.norm())


def test_signs_are_a_function_of_the_name() -> None:
    def model() -> None:
        for name in ("W", "V"):
            pyro.sample(name, dist.Normal(torch.zeros(ROWS, COLUMNS), 1.0).to_event(2))

    values = {"W_g": torch.ones(8), "V_g": torch.ones(8)}
    made = []
    for seed in (0, 1):
        pyro.set_rng_seed(seed)
        config: Any = {"W": Reparam(train_diagonals=False), "V": Reparam(train_diagonals=False)}
        small = poutine.condition(poutine.reparam(model, config), values)
        nodes: Any = poutine.trace(small).get_trace().nodes
        made.append((nodes["W"]["value"], nodes["V"]["value"]))
    assert torch.equal(made[0][0], made[1][0]) and torch.equal(made[0][1], made[1][1])
    assert not torch.equal(made[0][0], made[0][1])
