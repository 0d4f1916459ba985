"""Faults at any operation of a step: it happened or not, and the next is as if undisturbed."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoNormal
from pyro.optim import Adam  # pyright: ignore[reportAttributeAccessIssue]
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import pyro_ngvi as ngvi
from pyro_ngvi.optim.state import flat as by_path
from tests.exact.site_cases import linear_data as data
from tests.registry import BASELINES, RULES, VARIANTS

pytestmark = pytest.mark.usefixtures("plain_start")


def model(X: Tensor, y: Tensor) -> None:
    scale = pyro.param("scale", torch.tensor(1.0), constraint=dist.constraints.positive)
    w: Any = pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    with pyro.plate("data", len(X)):
        pyro.sample("y", dist.StudentT(4.0, X @ w, scale), obs=y)


class Fault(BaseException):
    """As KeyboardInterrupt: no ``except Exception`` catches it."""


class FaultAt(TorchDispatchMode):
    """Raises before operation number ``k`` of torch; counts them for ``k`` = ``None``."""

    def __init__(self, k: int | None = None) -> None:
        super().__init__()
        self.k, self.count = k, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.count == self.k:
            self.k = None  # what restores the state is not cut off again
            raise Fault
        self.count += 1
        return func(*args, **(kwargs or {}))


def matrix_model(X: Tensor, y: Tensor) -> None:
    scale = pyro.param("scale", torch.tensor(1.0), constraint=dist.constraints.positive)
    W: Any = pyro.sample("w", dist.Normal(torch.zeros(3, 2), 1.0).to_event(2))
    with pyro.plate("data", len(X)):
        pyro.sample("y", dist.Normal(X @ W, scale).to_event(1), obs=torch.stack([y, -y], -1))


Fit = tuple[Callable[[Any], Any], Callable[[], Any]]


def curved(kind: str) -> Callable[[], Any]:
    return lambda: ngvi.BatchedELBO(2, curvature=kind)


#: a guide and a loss for each rule of the registry, and for forms of it that keep other state
FITS: dict[str, Fit] = {
    "NGVB": (ngvi.AutoFullRankNormal, lambda: Trace_ELBO(2)),
    "NGVB, averaged": (ngvi.AutoFullRankNormal, lambda: Trace_ELBO(2)),
    "VON": (ngvi.AutoFullRankNormal, curved("hessian")),
    "SLANG": (partial(ngvi.AutoFactorPrecision, rank=1), curved("gauss_newton")),
    "IVON": (ngvi.AutoMeanFieldNormal, curved("price")),
    "VOGN": (ngvi.AutoMeanFieldNormal, curved("gauss_newton")),
    "Vadam": (ngvi.AutoMeanFieldNormal, curved("squared_gradient")),
    "NAGVAC": (partial(ngvi.AutoFactorNormal, rank=1), lambda: ngvi.BatchedELBO(2)),
    "NoisyKFAC": (ngvi.AutoMatrixNormal, curved("kronecker")),
    "SPRING": (ngvi.AutoFullRankNormal, curved("scores")),
    "IFVB": (AutoNormal, lambda: Trace_ELBO(2)),
    "IFVB, window": (AutoNormal, lambda: Trace_ELBO(2)),
    "IFVB, dense": (ngvi.AutoFullRankNormal, lambda: Trace_ELBO(2)),
    "AIFVB": (AutoNormal, lambda: Trace_ELBO(2)),
    "CVI": (ngvi.AutoSites, ngvi.SitesELBO),
}


def fit(name: str) -> Any:
    make_guide, make_loss = FITS[name]
    program = matrix_model if name == "NoisyKFAC" else model
    guide = make_guide(program)
    optim: Any = (RULES | VARIANTS | BASELINES)[name]
    return SVI(program, guide, optim(guide, others=Adam({"lr": 0.1})), make_loss())


def test_every_rule_is_tried() -> None:
    assert {*RULES, "NAGVAC"} <= set(FITS)


def flat(state: Any) -> list[Any]:
    if isinstance(state, dict):
        return [x for key in sorted(state, key=str) for x in flat(state[key])]
    if isinstance(state, list | tuple):
        return [y for x in state for y in flat(x)]
    return [state.detach().clone() if isinstance(state, Tensor) else state]


def everything(svi: Any) -> list[Any]:
    """Parameters and states, without rows of a buffer that do not count yet."""
    state = svi.optim.get_state()
    state["natural"] = {path: by_path(own) for path, own in state["natural"].items()}
    for own in state["natural"].values():
        for name in [n for n in own if n.endswith("buffer")]:
            own[name] = own[name][: int(own[name.replace("buffer", "waiting")])]
    params = dict(pyro.get_param_store().named_parameters())
    return flat([params, state])


def same(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(
        torch.equal(x, y) if isinstance(x, Tensor) else x == y for x, y in zip(a, b, strict=True)
    )


def gradients() -> list[Tensor]:
    grads = (p.grad for _, p in pyro.get_param_store().named_parameters())
    return [g for g in grads if g is not None and bool(g.any())]


@pytest.mark.parametrize("kind", FITS)
def test_a_step_happens_or_not(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    svi = fit(kind)
    for _ in range(9):
        svi.step(*data())
    optim_type, call = type(svi.optim), type(svi.optim).__call__
    fault = FaultAt()

    def interrupted(self: Any, params: Any) -> None:
        with fault:
            call(self, params)

    monkeypatch.setattr(optim_type, "__call__", interrupted)
    # merges and the like come every few steps; early and late operations are tried in turn
    for turn in range(12) if "IFVB" in kind else range(1, 12, 2):
        pyro.set_rng_seed(turn)
        before, total = everything(svi), fault.count
        early, late = {turn, 3 * turn + 1, 17 * turn}, {31 * turn + 5, total // 2, total - 3}
        for k in sorted(early if turn % 4 in (0, 1) else late):
            if not 0 <= k < max(total, 1):
                continue
            fault = FaultAt(k)
            pyro.set_rng_seed(turn)
            try:
                svi.step(*data())
            except Fault:
                assert same(everything(svi), before), (turn, k)
                assert not gradients()
            else:
                break  # fewer operations at this turn: it happened
        else:
            fault = FaultAt()
            pyro.set_rng_seed(turn)
            svi.step(*data())
            assert not same(everything(svi), before)


@pytest.mark.parametrize("kind", FITS)
def test_the_next_step_is_as_if_undisturbed(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ends = []
    for disturbed in (False, True):
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        svi = fit(kind)
        for turn in range(14 if "IFVB" in kind else 8):  # merges come every few steps
            if disturbed and turn > 2:
                with monkeypatch.context() as patch:
                    cut_off(svi, patch, 7 * turn)
            pyro.set_rng_seed(turn)
            svi.step(*data())
        ends.append(flat(dict(pyro.get_param_store().named_parameters())))
    assert same(*ends)


def cut_off(svi: Any, patch: Any, k: int) -> None:
    """A step that raises in the optimizer."""
    call = type(svi.optim).__call__

    def interrupted(self: Any, params: Any) -> None:
        with FaultAt(k % 20):
            call(self, params)

    patch.setattr(type(svi.optim), "__call__", interrupted)
    with pytest.raises(Fault):
        svi.step(*data())


@pytest.mark.parametrize("accumulated", [False, True])
def test_a_loss_of_ours_leaves_no_part_of_its_gradients(accumulated: bool) -> None:
    for name in ("VOGN", "CVI"):
        pyro.clear_param_store()
        svi = fit(name)
        for _ in range(3):
            svi.step(*data())
        if accumulated:
            svi.loss_and_grads(model, svi.guide, *data())
        before = flat([p.grad for _, p in pyro.get_param_store().named_parameters()])
        counter = FaultAt()
        with counter:
            svi.loss(model, svi.guide, *data())
        cut = 0
        for k in range(counter.count // 2, 10 * counter.count, 7):  # the backward pass, too
            try:
                with FaultAt(k):
                    svi.loss_and_grads(model, svi.guide, *data())
            except BaseException:  # autograd may wrap it
                now = flat([p.grad for _, p in pyro.get_param_store().named_parameters()])
                assert same(now, before)
                cut += k > counter.count
            else:
                break
        assert cut > 1
