"""IFVB and AIFVB against Algorithms 1 and 2 written out by hand, and everything around them."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoNormal
from torch import Tensor

from benchmarks.baselines import PaperDense, PaperWindow, algorithm_1, algorithm_2
from benchmarks.baselines.ifvb import check_convergence
from pyro_ngvi import AIFVB, IFVB, AutoFullRankNormal, AutoMeanFieldNormal
from pyro_ngvi.families import FullRankNormal, MeanFieldNormal
from pyro_ngvi.families.base import Tensors
from pyro_ngvi.fisher import Dense, InverseFisher, LowRank
from pyro_ngvi.fisher.scores import family_scores
from pyro_ngvi.optim import RobbinsMonro
from pyro_ngvi.optim.blocks import Coordinates
from pyro_ngvi.optim.ifvb import SLOW
from pyro_ngvi.optim.ifvb_rule import IFVBRule
from pyro_ngvi.optim.ngvb import make_rule
from pyro_ngvi.optim.rule import LogPower
from pyro_ngvi.optim.schedules import Custom, NoiseClock
from pyro_ngvi.optim.state import flat
from tests.contract.registry import data, regression
from tests.covering import covering
from tests.robustness.advice_cases import line, steps

D, STEPS = 4, 50
C_A, C_A_PRIME, ALPHA, EPS, BETA = 0.3, 20.0, 0.7, 2.0, 0.15
FORMS: dict[str, InverseFisher] = {
    "dense": PaperDense(EPS),
    "dense, calibrated": Dense(),
    "paper": PaperWindow(3, c_beta=0.5),
    "low rank": LowRank(3, growth=3.0),
}


def printed(fisher: InverseFisher, averaging: Any = False) -> IFVBRule:
    """Algorithm 1 or 2 on two plain tensors of 1 + 3 entries."""
    frame: Any = Coordinates(("a", "b"))
    return IFVBRule(
        make_rule(
            frame,
            1.0,
            None,
            Custom(lambda k: C_A * (C_A_PRIME + k) ** -ALPHA),
            0.0,
            averaging,
            clip_norm=None,
        ),
        fisher,
    )


def start() -> Tensors:
    return {"a": torch.tensor([0.4]), "b": torch.tensor([-1.0, 2.0, 0.5])}


def split(lam: Tensor) -> Tensors:
    return {"a": lam[:1], "b": lam[1:]}


def join(params: Tensors) -> Tensor:
    return torch.cat([params["a"], params["b"]])


def gradient(lam: Tensor) -> Tensor:
    """Of a loss that is not quadratic."""
    return torch.sinh(lam - 1.0) + 0.3 * lam.sum()


def draw(lam: Tensor, n: int, generator: torch.Generator) -> Tensor:
    """Scores whose Fisher matrix is neither diagonal nor constant."""
    noise = torch.randn(n, D, generator=generator)
    return (1.0 + lam.square()) * noise + 0.5 * noise.sum(-1, keepdim=True)


def by_hand(
    size: int, c_beta: float, averaging: bool = False, seed: int = 7
) -> tuple[list[Tensor], list[Tensor]]:
    """Algorithms 1 and 2 with H itself, inverted at every step: iterates and averages."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    lam = average = join(start())
    H, total, n = EPS * torch.eye(D), 0.0, 0
    iterates, averages = [], []
    for k in range(STEPS):
        phi = draw(average if averaging else lam, size, generator)
        H = H + phi.T @ phi
        n += size
        if c_beta:
            z = torch.randn(D)
            H = H + c_beta * (k + 1.0) ** -BETA * torch.outer(z, z)
        lam = lam - C_A * (C_A_PRIME + k) ** -ALPHA * n * torch.linalg.solve(H, gradient(lam))
        weight = math.log(k + 2.0) ** 2
        total += weight
        average = average + weight / total * (lam - average)
        iterates.append(lam)
        averages.append(average)
    return iterates, averages


def by_rule(rule: IFVBRule, size: int, seed: int = 7) -> tuple[list[Tensor], list[Tensor]]:
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    params = start()
    state = rule.init(params)
    at = join(params)
    iterates, averages = [], []
    for _ in range(STEPS):
        grads = split(gradient(join(params)))
        params, state, report = rule.update(
            params, grads, state, {"scores": draw(at, size, generator)}
        )
        assert bool(report.finite)
        at = join(params)
        if rule.averaging:
            at = torch.cat([state["average"]["a"], state["average"]["b"]])
        iterates.append(join(params))
        averages.append(at)
    return iterates, averages


def close(got: list[Tensor], wanted: list[Tensor]) -> None:
    torch.testing.assert_close(torch.stack(got), torch.stack(wanted), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("c_beta", [0.0, 0.8])
def test_algorithm_1_by_hand(size: int, c_beta: float) -> None:
    iterates, _ = by_hand(size, c_beta)
    close(by_rule(printed(PaperDense(EPS, c_beta, BETA)), size)[0], iterates)


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("c_beta", [0.0, 0.8])
def test_algorithm_2_by_hand(size: int, c_beta: float) -> None:
    """Scores drawn at the average, gradients taken at the iterate."""
    iterates, averages = by_hand(size, c_beta, averaging=True)
    got = by_rule(printed(PaperDense(EPS, c_beta, BETA), averaging=2.0), size)
    close(got[0], iterates)
    close(got[1], averages)


@pytest.mark.parametrize("power", [0.0, 1.0, 2.0])
def test_the_average_is_the_weighted_mean(power: float) -> None:
    """From the first step on, where (log k)^w as printed would be 0 / 0."""
    iterates, averages = by_rule(printed(PaperDense(EPS), averaging=power), 1)
    for k in range(1, STEPS + 1):
        weights = torch.log(torch.arange(2.0, k + 2.0)) ** power
        mean = (weights[:, None] * torch.stack(iterates[:k])).sum(0) / weights.sum()
        torch.testing.assert_close(averages[k - 1], mean, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("momentum", [0.0, 0.6])
def test_the_baseline_is_algorithm_1(momentum: float) -> None:
    """In SVI: the count of scores starts at 0, steps at c_a / c_a'^alpha.

    With momentum a move is an average of steps, each with the rate of its time.
    Written out again from the scores that the optimizer draws and the gradients that it gets.
    """
    scores: list[Tensor] = []
    grads: list[Tensor] = []
    values: list[Tensor] = []

    class Watched(IFVB):
        def _beside_gradients(self, path: str, block: Any, values_: Tensors, parts: Tensors) -> Any:
            values.append(torch.cat([v.reshape(-1) for v in values_.values()]))
            left = [p.grad.reshape(-1) for p in block.natural_params().values()]
            grads.append(torch.cat(left))
            return super()._beside_gradients(path, block, values_, parts)

        def _draw(self, path: str, block: Any, v: Tensors, n: int) -> Tensor:
            scores.append(super()._draw(path, block, v, n))
            return scores[-1]

    def model() -> None:
        pyro.sample("x", dist.Normal(torch.tensor([3.0, -1.0]), 2.0).to_event(1))

    guide = AutoNormal(model, init_scale=1.0)
    optim = algorithm_1(
        guide,
        c_a=C_A,
        c_a_prime=C_A_PRIME,
        alpha=ALPHA,
        eps=EPS,
        c_beta=0.0,
        num_scores=3,
        momentum=momentum,
        optimizer=Watched,
    )
    svi = SVI(model, guide, optim, Trace_ELBO(4, vectorize_particles=True))
    for _ in range(STEPS):
        svi.step()
    assert len(scores) == STEPS
    assert scores[0].shape == (3, 4)
    H, move = EPS * torch.eye(4), torch.zeros(4)
    for k in range(STEPS - 1):
        H = H + scores[k].T @ scores[k]
        step = C_A * (C_A_PRIME + k) ** -ALPHA * 3 * (k + 1)
        move = momentum * move + (1.0 - momentum) * step * torch.linalg.solve(H, grads[k])
        torch.testing.assert_close(values[k + 1], values[k] - move, rtol=1e-9, atol=1e-9)


def test_the_printed_window_steps_a_guide_of_ours() -> None:
    guide = AutoFullRankNormal(line)
    steps(line, guide, IFVB(guide, fisher=PaperWindow(100)))


# --- AIFVB in SVI ---------------------------------------------------------------------------------


def normal_model() -> None:
    pyro.sample("x", dist.Normal(torch.tensor([3.0, -1.0]), 2.0).to_event(1))


GUIDES: dict[str, Callable[[Any], Any]] = {
    "Pyro's": AutoNormal,
    "mean field": partial(AutoMeanFieldNormal, init=None),
    "full rank": partial(AutoFullRankNormal, init=None),
}


def fit(guide: Any, optim: Any, steps: int) -> SVI:
    svi = SVI(normal_model, guide, optim, Trace_ELBO(2, vectorize_particles=True))
    for _ in range(steps):
        svi.step()
    return svi


def held(guide: Any) -> list[Tensor]:
    return [p.detach().clone() for p in guide.parameters()]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def averages(optim: Any) -> list[Tensor]:
    (state,) = optim.get_state()["natural"].values()
    return list(state["average"].values())


@pytest.mark.parametrize("kind", GUIDES)
def test_scores_are_drawn_at_the_average(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    guide = GUIDES[kind](normal_model)
    # exact products are those of the iterate
    optim = AIFVB(guide, fisher=LowRank(32, growth=1.0))
    svi = fit(guide, optim, 5)
    wanted = averages(optim)
    if kind != "Pyro's":
        seen: list[Tensors] = []

        def spy(family: Any, params: Tensors, n: int, frame: Any) -> Tensor:
            seen.append({k: v.clone() for k, v in params.items()})
            return family_scores(family, params, n, frame)

        monkeypatch.setattr("pyro_ngvi.optim.ifvb.family_scores", spy)
        svi.step()
        drawn_at = list(seen[0].values())
    else:
        (block,) = (b for _, b in optim._blocks())
        there: list[list[Tensor]] = []
        draw_scores = block.draw_scores

        def spy_scores(n: int) -> Tensor:
            there.append([p.detach().clone() for p in block.natural_params().values()])
            return draw_scores(n)

        monkeypatch.setattr(block, "draw_scores", spy_scores)
        svi.step()
        drawn_at = there[0]
    assert same(drawn_at, wanted)
    (state,) = optim.get_state()["natural"].values()
    assert not same(drawn_at, list(state["average"].values()))


@pytest.mark.parametrize("kind", GUIDES)
def test_use_average_for_a_while_and_for_good(kind: str) -> None:
    guide = GUIDES[kind](normal_model)
    optim = AIFVB(guide)
    fit(guide, optim, 20)
    before, wanted = held(guide), averages(optim)
    assert same(before, wanted) == (kind != "Pyro's")  # ours hold the average already
    with optim.use_average():
        assert same(held(guide), wanted)
    assert same(held(guide), before)
    optim.use_average()
    assert same(held(guide), wanted)


def test_the_iterate_comes_back_after_an_error() -> None:
    guide = AutoNormal(normal_model)
    optim = AIFVB(guide)
    fit(guide, optim, 5)
    before = held(guide)
    with pytest.raises(ZeroDivisionError):
        with optim.use_average():
            raise ZeroDivisionError
    assert same(held(guide), before)


def test_no_average_no_use() -> None:
    guide = AutoNormal(normal_model)
    optim = IFVB(guide, averaging=False)
    fit(guide, optim, 3)
    with pytest.raises(RuntimeError, match="no average"):
        optim.use_average()
    with pytest.raises(RuntimeError, match="take a step first"):
        AIFVB(AutoNormal(normal_model)).use_average()


@pytest.mark.parametrize("optimizer", [IFVB, AIFVB])
def test_the_gain_falls_slowly_where_the_hessian_is_not_known(optimizer: type[IFVB]) -> None:
    """1/k is for guides whose Fisher matrix is the Hessian at a Gaussian posterior."""

    def schedule(guide: Any, **arguments: Any) -> Any:
        optim = optimizer(guide, **arguments)
        fit(guide, optim, 1)
        (rule,) = optim._rules.values()
        return rule.rule.schedule

    assert schedule(AutoNormal(normal_model)) == SLOW
    assert schedule(AutoFullRankNormal(normal_model)) == NoiseClock()
    own = RobbinsMonro(power=0.6)
    assert schedule(AutoNormal(normal_model), schedule=own) == own


# --- the conditions of the theorems ---------------------------------------------------------------


@pytest.mark.parametrize("alpha", [0.5, 0.3, 1.0, 1.2])
def test_alpha_outside_the_theorems(alpha: float) -> None:
    with pytest.raises(ValueError, match=rf"1/2 < alpha < 1 .* and alpha = {alpha:g}\."):
        check_convergence(alpha)
    with pytest.raises(ValueError, match="1/2 < alpha < 1"):
        algorithm_1(AutoNormal(normal_model), c_a=1.0, alpha=alpha, c_beta=0.0)


@pytest.mark.parametrize("beta", [0.0, 0.25, 0.4])
def test_beta_outside_the_theorems(beta: float) -> None:
    message = rf"0 < beta < alpha - 1/2 = 0\.25 .* and beta = {beta:g}\."
    with pytest.raises(ValueError, match=message):
        check_convergence(0.75, beta)
    guide = AutoNormal(normal_model)
    with pytest.raises(ValueError, match=message):
        algorithm_2(guide, c_a=1.0, alpha=0.75, beta=beta)
    algorithm_1(guide, c_a=1.0, alpha=0.75, beta=beta, c_beta=0.0)  # beta is then of no account
    algorithm_1(guide, c_a=1.0, alpha=0.75, beta=beta, check=False)


# --- bad scores, singular Fisher matrices ---------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e200])
def test_bad_scores_are_left_out(form: str, bad: float) -> None:
    """A row with one bad entry counts as no row at all; the step goes on with the others."""
    rule = printed(FORMS[form])
    generator = torch.Generator().manual_seed(3)
    good = [torch.randn(2, D, generator=generator) for _ in range(20)]

    def run(blocks: list[Tensor]) -> Tensor:
        torch.manual_seed(0)
        params = start()
        state = rule.init(params)
        for rows in blocks:
            params, state, report = rule.update(
                params, split(gradient(join(params))), state, {"scores": rows}
            )
            assert bool(report.finite)
        return join(params)

    spoilt = [rows.clone() for rows in good]
    zeroed = [rows.clone() for rows in good]
    for k in (0, 7, 8):
        spoilt[k][1, 2] = bad
        zeroed[k][1] = math.nan
    got = run(spoilt)
    assert got.isfinite().all()
    torch.testing.assert_close(got, run(zeroed), rtol=0.0, atol=0.0)


@pytest.mark.parametrize("form", FORMS)
def test_singular_fisher_matrices_stay_finite(form: str) -> None:
    """Scores in (mu, vec Sigma) never have an antisymmetric part: F has rank 5 of 6."""
    fisher = FORMS[form]
    # clipped, without which the paper's window leaves the domain
    frame: Any = Coordinates(("mu", "Sigma"))
    rule = IFVBRule(make_rule(frame, 1.0, 1.0, RobbinsMonro(), 0.0, False, clip_norm=0.1), fisher)
    torch.manual_seed(2)
    target, wanted = torch.tensor([1.0, -2.0]), torch.tensor([[2.0, 0.5], [0.5, 1.0]])
    params = {"mu": torch.zeros(2), "Sigma": torch.eye(2)}

    def scores(n: int) -> Tensor:
        Sigma = 0.5 * (params["Sigma"] + params["Sigma"].T)
        P = torch.linalg.inv(Sigma)
        w = torch.randn(n, 2) @ torch.linalg.cholesky(P).T  # P (z - mu) ~ N(0, P)
        outer = 0.5 * (w[:, :, None] * w[:, None, :] - P)
        return torch.cat([w, outer.reshape(n, 4)], 1)

    state = rule.init(params, scores(32))
    first = None
    for _ in range(300):
        Sigma = 0.5 * (params["Sigma"] + params["Sigma"].T)
        precision = torch.linalg.inv(wanted)
        in_mu = precision @ (params["mu"] - target)  # of KL(q || N(target, wanted))
        in_Sigma = 0.5 * (precision - torch.linalg.inv(Sigma))
        size = torch.linalg.vector_norm(torch.cat([in_mu, in_Sigma.reshape(-1)]))
        first = size if first is None else first
        params, state, report = rule.update(
            params, {"mu": in_mu, "Sigma": in_Sigma}, state, {"scores": scores(1)}
        )
        assert bool(report.finite)
    assert first is not None
    assert all(v.isfinite().all() for v in (*params.values(), *flat(state).values()))
    if form != "paper":  # whose lengths mean nothing
        assert size < 0.1 * first


# --- saving, meta device --------------------------------------------------------------------------

SAVED: dict[str, dict[str, Any]] = {
    "dense": {"fisher": PaperDense(1.0, c_beta=0.5)},
    "low rank": {"fisher": LowRank(3, growth=1.0)},
    "paper": {"fisher": PaperWindow(4, c_beta=0.5)},
}


class Run:
    """Guide, optimizer and SVI of a script."""

    def __init__(self, kind: str, optimizer: type[IFVB], form: str) -> None:
        self.guide = GUIDES[kind](regression)
        self.optim = optimizer(self.guide, num_scores=2, **SAVED[form])
        self.svi = SVI(regression, self.guide, self.optim, Trace_ELBO(2))

    def steps(self, n: int) -> list[Any]:
        return [self.svi.step(*data()) for _ in range(n)]

    def checkpoint(self, path: Path) -> None:
        self.optim.save(str(path / "optim"))
        torch.save((self.guide.state_dict(), torch.get_rng_state()), path / "rest")

    def restore(self, path: Path) -> None:
        guide, rng = torch.load(path / "rest")
        self.guide(*data())  # the guide learns its sites
        self.guide.load_state_dict(guide)
        self.optim.load(str(path / "optim"))
        torch.set_rng_state(rng)


@pytest.mark.parametrize(
    ("kind", "optimizer", "form", "before"),
    [
        (*who, *what)
        for who, what in covering(
            product(GUIDES, [IFVB, AIFVB]), product(SAVED, [5, 13]), strength=1
        )
    ],
)
def test_a_run_resumes_bit_for_bit(
    kind: str, optimizer: type[IFVB], form: str, before: int, tmp_path: Path
) -> None:
    """In a fresh process, and in one that went on; 13 steps are beyond the first merge."""
    run = Run(kind, optimizer, form)
    run.steps(before)
    run.checkpoint(tmp_path)
    losses = run.steps(9)
    wanted = held(run.guide)
    run.restore(tmp_path)
    assert run.steps(9) == losses
    assert same(held(run.guide), wanted)
    pyro.clear_param_store()
    resumed = Run(kind, optimizer, form)
    resumed.restore(tmp_path)
    assert resumed.steps(9) == losses
    assert same(held(resumed.guide), wanted)


@pytest.mark.parametrize("form", SAVED)
def test_one_state_restores_twice(form: str) -> None:
    """Steps write into the tensors of their own state, not into those of the caller."""
    run = Run("full rank", IFVB, form)
    run.steps(5)
    state, guide = run.optim.get_state(), copy.deepcopy(run.guide.state_dict())
    rng = torch.get_rng_state()

    def again() -> list[Any]:
        run.guide.load_state_dict(guide)
        run.optim.set_state(state)
        torch.set_rng_state(rng)
        return run.steps(9)

    assert again() == again()


def layout(tensors: Tensors) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (v.shape, v.dtype) for name, v in tensors.items()}


@pytest.mark.parametrize(
    ("form", "averaging", "frame"),
    covering(FORMS, [None, LogPower()], ["stored", "mean field", "full rank"], strength=1),
)
def test_meta_device(form: str, averaging: LogPower | None, frame: str) -> None:
    """No value is read: what runs on tensors without values cannot make a GPU wait.

    float32 beside a default of float64 shows what would be promoted; counters of the host stay there.
    """
    family: Any = MeanFieldNormal() if frame != "full rank" else FullRankNormal()
    params = family.init(torch.zeros(5, dtype=torch.float32), 0.5)
    own = family
    if frame == "stored":
        family = Coordinates(family.names)
    scores = family_scores(own, params, 2, family)
    rule = IFVBRule(
        make_rule(family, 1.0, 1.0, None, None, averaging if averaging else False, clip_norm=3.0),
        FORMS[form],
    )
    grads = {name: torch.randn_like(p) for name, p in params.items()}

    def run(device: str) -> tuple[Tensors, Tensors, Any]:
        new = {name: p.to(device) for name, p in params.items()}
        state = rule.init(new, scores.to(device))
        report = None
        for _ in range(12):  # a merge of the low-rank estimate among them
            new, state, report = rule.update(
                new,
                {k: g.to(device) for k, g in grads.items()},
                state,
                {"scores": scores.to(device)},
            )
        return new, flat(state), report

    params_there, state_there, report = run("meta")
    params_here, state_here, _ = run("cpu")
    assert layout(params_there) == layout(params_here)
    assert layout(state_there) == layout(state_here)
    assert {v.device.type for v in params_there.values()} == {"meta"}
    assert report.step_norm.device.type == "meta"
    counters = {"fisher.updates", "fisher.waiting", "fisher.next_merge"}
    assert all(
        v.device.type == "meta" or (k in counters and v.dtype == torch.long)
        for k, v in state_there.items()
    )
