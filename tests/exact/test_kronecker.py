"""curvature="kronecker" against loops over draws and data, and steps of NoisyKFAC with it."""

from itertools import combinations
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
import torch.nn.functional as F
from pyro import poutine
from pyro.infer import SVI
from pyro.infer.autoguide.initialization import init_to_sample
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import pyro_ngvi as ngvi
from pyro_ngvi import AutoMatrixNormal, BatchedELBO
from pyro_ngvi.curvature.taps.check import check_taps
from pyro_ngvi.curvature.taps.kronecker import KroneckerTaps
from pyro_ngvi.optim import NoisyKFAC
from pyro_ngvi.runtime.run import Minibatches, run_particles

WIDTH, HIDDEN, OUT, N = 3, 4, 2, 7


def latent(name: str, *shape: int, sd: float = 1.0) -> Tensor:
    return pyro.sample(name, dist.Normal(torch.zeros(shape), sd).to_event(len(shape)))


def data() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(3)
    return torch.randn(N, WIDTH, generator=g), torch.randn(N, OUT, generator=g)


def network(x: Tensor, y: Tensor, index: Any = None) -> None:
    """A weight as F.linear has it and one as ``h @ V`` has it, a bias, a latent noise."""
    w, b, v = latent("w", HIDDEN, WIDTH), latent("b", HIDDEN), latent("v", HIDDEN, OUT, sd=0.5)
    noise = pyro.sample("noise", dist.LogNormal(0.0, 0.3))
    with pyro.plate("data", N, subsample=index) as i:
        mean = F.linear(x[i], w, b).tanh() @ v
        pyro.sample("y", dist.Normal(mean, noise).to_event(1), obs=y[i])


def recorded(guide: Any, *args: Any, fixed: bool = False) -> list[Tensor]:
    """The draws of the guide from now on; ``fixed``: all of them at its location."""
    guide(*args)
    family, drawn = guide.family, []
    inner = family.draw

    def draw(params: Any, shape: torch.Size) -> Tensor:
        z = family.mean(params).expand(*shape, -1) if fixed else inner(params, shape)
        drawn.append(z.detach())
        return z

    family.draw = family.centred_draw = draw
    return drawn


def leave(guide: Any, loss: BatchedELBO, model: Any, *args: Any) -> dict[str, Tensor]:
    """What the loss leaves on the guide."""
    loss.loss_and_grads(model, guide, *args)
    left = guide.take_curvature()
    assert left.kind == "kronecker"
    return left.parts


def by_loops(theta: Tensor, x: Tensor, y: Tensor, index: list[int]) -> dict[str, Tensor]:
    """The factors of ``network`` at draws (S, d), by one autograd call a draw and datum."""
    want = {"kron_columns.w": torch.zeros(WIDTH, WIDTH), "kron_rows.w": torch.zeros(HIDDEN, HIDDEN)}
    want |= {"kron_columns.v": torch.zeros(OUT, OUT), "kron_rows.v": torch.zeros(HIDDEN, HIDDEN)}
    S, M = len(theta), len(index)
    for t in theta:
        w, b, v, log_noise = t.split([HIDDEN * WIDTH, HIDDEN, HIDDEN * OUT, 1])
        for i in index:
            first = (w.view(HIDDEN, WIDTH) @ x[i] + b).detach().requires_grad_()
            hidden = first.tanh()
            second = v.view(HIDDEN, OUT).T @ hidden
            log_p = dist.Normal(second, log_noise.exp()).log_prob(y[i]).sum()
            g, k = torch.autograd.grad(log_p, [first, second])
            want["kron_columns.w"] += x[i].outer(x[i]) / (S * M)
            want["kron_rows.w"] += N / M * g.outer(g) / S
            want["kron_rows.v"] += hidden.outer(hidden).detach() / (S * M)
            want["kron_columns.v"] += N / M * k.outer(k) / S
    return want


@pytest.mark.parametrize("S", [1, 3])
@pytest.mark.parametrize("index", [None, [0, 2, 3, 6]], ids=["all", "minibatch"])
def test_factors_equal_loops(S: int, index: list[int] | None) -> None:
    x, y = data()
    batch = None if index is None else torch.tensor(index)
    torch.manual_seed(0)
    guide = AutoMatrixNormal(network, init_scale=0.4)
    drawn = recorded(guide, x, y, batch)
    loss = BatchedELBO(S, curvature="kronecker", chunk_size=2)
    for _ in range(3):  # the first step takes another way than those after it
        left = leave(guide, loss, network, x, y, batch)
        for name, want in by_loops(drawn[-1], x, y, index or list(range(N))).items():
            torch.testing.assert_close(left[name], want, rtol=1e-10, atol=1e-12)
        prior = left["prior"].split([HIDDEN * WIDTH, HIDDEN, HIDDEN * OUT, 1])
        for part, precision in zip(prior, (1.0, 1.0, 4.0, 0.3**-2), strict=True):
            torch.testing.assert_close(part, torch.full_like(part, precision))
        assert len(left) == 5


def test_minibatches_average_to_the_whole() -> None:
    x, y = data()
    guide = AutoMatrixNormal(network, init_loc_fn=init_to_sample)
    recorded(guide, x, y, fixed=True)
    loss = BatchedELBO(1, curvature="kronecker")
    whole = leave(guide, loss, network, x, y)
    batches = [
        leave(guide, loss, network, x, y, torch.tensor(i)) for i in combinations(range(N), 3)
    ]
    assert not torch.allclose(batches[0]["kron_rows.w"], whole["kron_rows.w"], rtol=0.1)
    for name, want in whole.items():
        average = torch.stack([left[name] for left in batches]).mean(0)
        torch.testing.assert_close(average, want, rtol=1e-10, atol=1e-12)


def test_a_first_minibatch_of_one_decides_nothing() -> None:
    """Of one datum every layer seems fit; what mixes data is found out with the next."""

    def mixing(x: Tensor, y: Tensor) -> None:
        mean = F.linear(x, latent("w", OUT, WIDTH))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(mean - mean.mean(0), 1.0).to_event(1), obs=y)

    x, y = data()
    guide = AutoMatrixNormal(mixing)
    loss = BatchedELBO(2, curvature="kronecker")
    leave(guide, loss, mixing, x[:1], y[:1])
    with pytest.raises(
        ValueError, match=r"one linear layer that meets independent data.*'w' is not"
    ):
        leave(guide, loss, mixing, x, y)


def test_a_matrix_without_a_gradient_at_first_is_seen_later() -> None:
    """Two heads, and first data of one of them."""

    def heads(x: Tensor, y: Tensor, first: Tensor) -> None:
        one, two = (F.linear(x, latent(name, OUT, WIDTH)) for name in ("v", "w"))
        mean = torch.where(first.unsqueeze(-1), one, two)
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(mean, 1.0).to_event(1), obs=y)

    x, y = data()
    guide = AutoMatrixNormal(heads)
    loss = BatchedELBO(2, curvature="kronecker")
    all_first = torch.ones(len(x), dtype=torch.bool)
    parts = leave(guide, loss, heads, x, y, all_first)
    assert (parts["kron_rows.w"] == 0.0).all() and (parts["kron_rows.v"] != 0.0).any()
    parts = leave(guide, loss, heads, x, y, ~all_first)
    assert (parts["kron_rows.v"] == 0.0).all() and (parts["kron_rows.w"] != 0.0).any()


def test_a_prior_that_depends_on_a_latent_scale() -> None:
    def hierarchical(x: Tensor, y: Tensor) -> None:
        sd = pyro.sample("sd", dist.LogNormal(0.0, 1.0))
        w = pyro.sample("w", dist.Normal(torch.zeros(OUT, WIDTH), sd).to_event(2))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(x @ w.T, 1.0).to_event(1), obs=y)

    x, y = data()
    guide = AutoMatrixNormal(hierarchical, init_scale=0.4)
    drawn = recorded(guide, x, y)
    loss = BatchedELBO(3, curvature="kronecker")
    for _ in range(2):
        left = leave(guide, loss, hierarchical, x, y)
        precision = (-2.0 * drawn[-1][:, 0]).exp().mean().expand(OUT * WIDTH)
        torch.testing.assert_close(left["prior"][1:], precision)


def test_a_scale_on_the_data_counts_once() -> None:
    def weighted(x: Tensor, y: Tensor) -> None:
        with poutine.scale(scale=0.3):
            network(x, y)

    x, y = data()
    parts = []
    for model in (network, weighted):
        torch.manual_seed(0)
        guide = AutoMatrixNormal(model, init_loc_fn=init_to_sample)
        recorded(guide, x, y, fixed=True)
        parts.append(leave(guide, BatchedELBO(1, curvature="kronecker"), model, x, y))
    plain, scaled = parts
    torch.testing.assert_close(scaled["kron_rows.w"], 0.3 * plain["kron_rows.w"])
    torch.testing.assert_close(scaled["kron_columns.w"], plain["kron_columns.w"])
    torch.testing.assert_close(scaled["prior"], 0.3 * plain["prior"])


def net(dtype: torch.dtype = torch.float64) -> Any:
    torch.manual_seed(1)
    layers = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, OUT)).to(dtype)
    return ngvi.nn.bayesianize(layers, normal, num_data=4 * N)


def normal(output: Tensor) -> Any:
    return dist.Normal(output, 0.5).to_event(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_steps_on_a_network(dtype: torch.dtype) -> None:
    x, y = (v.to(dtype) for v in data())
    model = net(dtype)
    guide = AutoMatrixNormal(model, init_loc_fn=model.init_to_module, init_scale=0.03)
    optim = NoisyKFAC(guide, lr=0.1, curvature_lr=0.1)
    svi = SVI(model, guide, optim, BatchedELBO(4, curvature="kronecker"))
    losses: list[Any] = [svi.step(x, y) for _ in range(60)]
    assert sum(losses[-10:]) < 0.5 * sum(losses[:10])
    assert all(p.dtype == dtype and p.isfinite().all() for p in guide.parameters())
    state = optim.get_state()["natural"][""]
    kept = tree_leaves({name: part for name, part in state.items() if "kron" in name})
    assert kept and all(v.dtype == dtype for v in kept)
    assert optim.report().skipped == 0


def test_a_run_resumes_bit_for_bit() -> None:
    x, y = data()

    def start() -> tuple[Any, NoisyKFAC, SVI]:
        model = net()
        guide = AutoMatrixNormal(model, init_loc_fn=model.init_to_module)
        optim = NoisyKFAC(guide, lr=0.1, curvature_lr=0.1)
        return guide, optim, SVI(model, guide, optim, BatchedELBO(2, curvature="kronecker"))

    guide, optim, svi = start()
    for _ in range(3):
        svi.step(x, y)
    parameters = {k: v.clone() for k, v in guide.state_dict().items()}
    state, rng = optim.get_state(), torch.get_rng_state()
    for _ in range(4):
        svi.step(x, y)
    other, resumed, svi = start()
    other(x, y)
    other.load_state_dict(parameters)
    resumed.set_state(state)
    torch.set_rng_state(rng)
    for _ in range(4):
        svi.step(x, y)
    for name, p in guide.natural_params().items():
        assert torch.equal(p, other.natural_params()[name]), name


def test_taps_on_meta() -> None:
    """Shapes of the factors of a network, from tensors without numbers: nothing waits for them."""
    x, y = (v.to("meta") for v in data())

    def model() -> None:
        w, v = (
            pyro.sample(name, dist.Normal(torch.zeros(shape, device="meta"), 1.0).to_event(2))
            for name, shape in (("w", (HIDDEN, WIDTH)), ("v", (HIDDEN, OUT)))
        )
        with pyro.plate("data", N, device="meta"):
            pyro.sample("y", dist.Normal(F.linear(x, w).tanh() @ v, 1.0).to_event(1), obs=y)

    shapes = {"w": (2, HIDDEN, WIDTH), "v": (2, HIDDEN, OUT)}
    values = {k: torch.empty(s, device="meta", requires_grad=True) for k, s in shapes.items()}
    taps = KroneckerTaps(model, values)
    check_taps(taps, values, {}, (), {}, Minibatches())
    assert taps.fits("w") and taps.fits("v")

    def log_p(sites: Any) -> Tensor:
        return sites["y"]["fn"].log_prob(sites["y"]["value"]).sum()

    total = run_particles(taps, log_p, values, 2, (), {}, minibatches=Minibatches())
    (-total.sum() / 2).backward()
    factors = taps.factors(2)
    got = {name: tuple(K.shape for K in pair) for name, pair in factors.items()}
    assert got == {"w": ((HIDDEN, HIDDEN), (WIDTH, WIDTH)), "v": ((HIDDEN, HIDDEN), (OUT, OUT))}
    assert all(K.is_meta for pair in factors.values() for K in pair)
