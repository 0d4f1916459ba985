"""Steps on a GPU: all that work on a CPU, with the same numbers, and none that waits for the GPU."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import pyro_ngvi as ngvi
from benchmarks.gpu import free_step
from pyro_ngvi.fisher import low_rank
from pyro_ngvi.linalg import spectral
from pyro_ngvi.linalg.host import forbid_waiting
from tests import trajectories
from tests.contract.test_every_pair import ALL, WORKS
from tests.registry import LOSSES, RULES
from tests.trajectories import COLUMNS, ROWS, SITES, flattened, model

pytestmark = [
    pytest.mark.usefixtures("plain_start"),
    pytest.mark.filterwarnings(
        "ignore:Failed to verify mean field",
        "ignore:.*leaves what is not natural",
        "ignore:Specified kernel cache directory could not be created",
    ),
]

PAIRS = [(rule, g) for rule, rows in WORKS.items() for guides, _ in rows for g in guides]
STEPS, FREE = 20, 100


def losses_of(rule: str, guide: str) -> list[str]:
    return next(losses for guides, losses in WORKS[rule] if guide in guides)


def elsewhere(svi: Any, device: torch.device) -> list[str]:
    """Parameters and numbers of the optimizer that are on another device; counters are the host's."""
    named = dict(pyro.get_param_store().named_parameters())
    state = svi.optim.get_state().get("natural", {})
    named |= {n: x for n, x in flattened(state) if x.is_floating_point()}
    named |= {f"buffer {n}": b for n, b in svi.guide.named_buffers() if b.is_floating_point()}
    return [f"{name} on {x.device}" for name, x in named.items() if x.device != device]


@pytest.mark.parametrize(("rule", "guide"), PAIRS)
def test_a_pair_steps(rule: str, guide: str, device: torch.device, float32_default: None) -> None:
    wrong = []
    for loss in losses_of(rule, guide):
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        X, y = (x.to(device, torch.float32) for x in trajectories.data())
        made = ALL[guide](model)
        svi: Any = SVI(model, made, RULES[rule](made), LOSSES[loss](3))
        try:
            found = [float(svi.step(X, y)) for _ in range(3)]
        except Exception as error:
            wrong.append(f"{loss}: {type(error).__name__}: {str(error).splitlines()[0]}")
            continue
        if not all(map(math.isfinite, found)):
            wrong.append(f"{loss}: losses {found}")
        wrong += [f"{loss}: {what}" for what in elsewhere(svi, device)]
    assert not wrong, "; ".join(wrong)


class NoiseOfTheCPU(TorchFunctionMode):
    """Normal and uniform numbers are drawn on the CPU, then moved: the same for every device."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (torch.randn, torch.rand) and kwargs.get("generator") is None:
            where = kwargs.get("device") or "cpu"
            return func(*args, **kwargs | {"device": "cpu"}).to(where)
        if func in (torch.randn_like, torch.rand_like):
            return func(args[0].cpu(), *args[1:], **kwargs).to(args[0].device)
        if func in (torch.Tensor.normal_, torch.Tensor.uniform_):
            noise = torch.empty(args[0].shape, dtype=args[0].dtype)
            return args[0].copy_(func(noise, *args[1:], **kwargs))
        return func(*args, **kwargs)


def visited(
    rule: str, guide: str, loss: str, device: torch.device, scale: float = 1.0
) -> list[Tensor]:
    """All parameters after each step."""
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    X, y = (x.to(device) * scale for x in trajectories.data())
    made, params = ALL[guide](model), list[Tensor]()
    svi: Any = SVI(model, made, RULES[rule](made), LOSSES[loss](3))
    with NoiseOfTheCPU():
        for _ in range(STEPS):
            svi.step(X, y)
            now = sorted(pyro.get_param_store().named_parameters())
            params.append(torch.cat([p.detach().cpu().reshape(-1) for _, p in now]))
    return params


NORMAL = ["mean field", "full rank", "factor", "factor precision", "matrix", "mixture"]
NUMBERS = [
    *product(["NGVB", "IFVB", "SPRING"], NORMAL),
    *product(["VON"], ["mean field", "full rank"]),
    *product(["SPRING", "IFVB"], ["affine coupling", "spline coupling", "orthogonal flow"]),
    ("VOGN", "mean field"),
    ("IVON", "mean field"),
]


@pytest.mark.parametrize(("rule", "guide"), NUMBERS)
def test_the_same_noise_gives_the_same_numbers(
    rule: str, guide: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums in another order differ by some units in the last place, 2e-16, and steps magnify that.

    On a CPU the data are rescaled by 1 + 1e-15 instead.  Leading eigenvectors are approximate on a GPU,
    as exact ones would have to be waited for: so they are here on both.
    """
    monkeypatch.setattr(spectral, "EXACT", 0)
    for module in (spectral, low_rank):
        monkeypatch.setattr(module, "symmetric_eigen", spectral.qr_iteration)
    losses = losses_of(rule, guide)
    loss = "Batched" if "Batched" in losses else losses[0]
    on_cpu = device.type == "cpu"
    here = visited(rule, guide, loss, torch.device("cpu"))
    there = visited(rule, guide, loss, device, 1.0 + 1e-15 * on_cpu)
    apart = [float((a - b).norm() / a.norm()) for a, b in zip(here, there, strict=True)]
    assert max(apart) <= 1e-9, f"{loss}: relative differences by step {apart}"


def still(device: torch.device) -> tuple[Callable[..., Any], tuple[Tensor, ...]]:
    """The model of the pairs without a number that would have to go to the device."""
    like: Any = {"device": device, "dtype": torch.float32}
    zeros, ones = torch.zeros(ROWS, COLUMNS, **like), torch.ones(ROWS, COLUMNS, **like)
    two = torch.tensor(2.0, **like)

    def program(X: Tensor, y: Tensor) -> None:
        W = pyro.sample("W", dist.Normal(zeros, ones).to_event(2))
        s = pyro.sample("s", dist.Gamma(two, two))
        with pyro.plate("data", len(X)):
            pyro.sample("y", dist.Normal(X @ W.mT, s).to_event(1), obs=y)

    X, y = (x.to(**like) for x in trajectories.data())
    return program, (X, y)


def assert_nothing_waits(svi: Any, args: Any) -> None:
    with pyro.validation_enabled(False):
        for _ in range(12):  # until every library is set up, and estimates have met their memory
            free_step(svi, args)
        with forbid_waiting():
            for _ in range(FREE):
                free_step(svi, args)


# the last takes a Cholesky factor of its covariance in a constructor of torch that waits
WAITING = ("list", "Zuko's flow", "covariance")
STILL = [
    (rule, guide, loss)
    for rule, guide in PAIRS
    for loss in [next((x for x in losses_of(rule, guide) if x.startswith("Batched")), None)]
    if loss is not None and guide not in WAITING
]


@pytest.mark.parametrize(("rule", "guide", "loss"), STILL)
def test_no_step_waits(
    rule: str, guide: str, loss: str, gpu: torch.device, float32_default: None
) -> None:
    program, args = still(gpu)
    made = ALL[guide](program)
    assert_nothing_waits(SVI(program, made, RULES[rule](made), LOSSES[loss](3)), args)


@pytest.mark.parametrize(
    ("rule", "curvature"), [(ngvi.optim.VOGN, "gauss_newton"), (ngvi.optim.IVON, "price")]
)
def test_no_step_of_a_network_waits(
    rule: Any, curvature: str, gpu: torch.device, float32_default: None
) -> None:
    net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).to(gpu)
    network = ngvi.nn.bayesianize(net, "categorical", num_data=40, prior=1.0)
    x = torch.linspace(-1.0, 1.0, 200).view(40, 5).sin().to(gpu)
    guide = ngvi.AutoMeanFieldNormal(network, init_loc_fn=network.init_to_module)
    svi = SVI(network, guide, rule(guide), ngvi.BatchedELBO(2, curvature=curvature))
    assert_nothing_waits(svi, (x, (x[:, :3].argmax(-1))))


def test_no_step_of_sites_waits(gpu: torch.device) -> None:
    zeros, ones = torch.zeros(3, device=gpu), torch.ones(3, device=gpu)

    def program(X: Tensor, y: Tensor) -> None:
        w = pyro.sample("w", dist.Normal(zeros, ones).to_event(1))
        with pyro.plate("data", len(X)):
            pyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)

    X, y = (x.to(gpu) for x in SITES["logistic"]()[1])
    guide = ngvi.AutoSites(program)
    assert_nothing_waits(SVI(program, guide, ngvi.CVI(guide), ngvi.SitesELBO()), (X, y))
