"""The damped window against explicit inverses."""

from typing import Any

import pyro.distributions as dist
import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from benchmarks.flows.preconditioners import conjugate_gradient, fisher_operator
from pyro_ngvi.families import FlowFamily
from pyro_ngvi.families.base import Tensors
from pyro_ngvi.fisher import InverseFisher, Window
from pyro_ngvi.flows.transforms import as_flow
from pyro_ngvi.optim.ifvb_rule import IFVBRule
from pyro_ngvi.optim.natural_gradient import NaturalGradientRule
from pyro_ngvi.optim.state import flat

D = 6


def run(estimate: InverseFisher, blocks: list[Tensor], d: int = D) -> Tensors:
    state = estimate.init(torch.linspace(0.5, 3.0, d), 1.0)
    for scores in blocks:
        state = estimate.update(state, scores)
    return state


def matrix(estimate: InverseFisher, state: Tensors, d: int = D) -> Tensor:
    return torch.stack([estimate.product(state, e) for e in torch.eye(d)])


def by_inversion(estimate: Window, blocks: list[Tensor]) -> Tensor:
    """The definition: the mean over the last ``size`` scores, and a ridge."""
    rows = torch.cat(blocks)[-estimate.size :]
    fisher = rows.T @ rows / len(rows)
    ridge = estimate.damping * fisher.diagonal().mean() * torch.eye(rows.shape[1])
    return torch.linalg.inv(fisher + ridge)


@pytest.mark.parametrize("size", [3, 6, 16])
@pytest.mark.parametrize("damping", [1.0, 1e-3])
@pytest.mark.parametrize("updates", [1, 2, 3, 9])
@pytest.mark.parametrize("scores", [1, 4, 20])
def test_window_against_the_inverse(size: int, damping: float, updates: int, scores: int) -> None:
    """Partly filled, full and turned round; K below, at and above D; more scores at once than K."""
    estimate = Window(size, damping)
    blocks = [torch.randn(scores, D) * torch.linspace(0.3, 3.0, D) for _ in range(updates)]
    got = matrix(estimate, run(estimate, blocks))
    torch.testing.assert_close(got, by_inversion(estimate, blocks), rtol=1e-10, atol=1e-10)


def test_a_block_equals_its_rows() -> None:
    estimate, scores = Window(5), torch.randn(13, D)
    wanted = matrix(estimate, run(estimate, [scores]))
    for parts in (scores.split(1), scores.split(4), scores.split(7)):
        torch.testing.assert_close(
            matrix(estimate, run(estimate, list(parts))), wanted, rtol=1e-12, atol=1e-12
        )


def test_kept_products_do_not_drift() -> None:
    """After many turns of the ring they are those of its rows."""
    estimate = Window(7)
    state = run(estimate, [torch.randn(3, D) * 10.0 ** (k % 5) for k in range(200)])
    torch.testing.assert_close(state["gram"], state["rows"] @ state["rows"].T, rtol=1e-12, atol=0)


def test_before_the_first_score_the_ridge_is_that_of_the_first_guess() -> None:
    estimate, g = Window(4, damping=0.5), torch.randn(D)
    state = estimate.init(torch.linspace(0.5, 3.0, D), 1.0)
    torch.testing.assert_close(estimate.product(state, g), g / (0.5 * 1.75))
    bad = estimate.update(state, torch.full((2, D), torch.nan))
    torch.testing.assert_close(estimate.product(bad, g), g / (0.5 * 1.75))


def test_rows_that_are_not_finite_leave_their_place_to_the_old_ones() -> None:
    estimate, old = Window(4), torch.randn(4, D)
    new = torch.randn(3, D)
    for bad in (torch.nan, -torch.inf, 0.5 * torch.finfo(torch.float64).max):
        scores = new.clone()
        scores[1, 2] = scores[1, 3] = bad
        got = matrix(estimate, run(estimate, [old, scores]))
        kept = torch.stack([new[0], old[1], new[2], old[3]])
        torch.testing.assert_close(got, by_inversion(estimate, [kept]), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("scale", [1e-12, 1e12])
def test_float32_of_any_size(scale: float) -> None:
    """Squares of 1e12 and 1e-12 are within its range, their ridge is far from 1."""
    scores = torch.randn(20, D)
    wanted = by_inversion(Window(8), [scores]) @ torch.ones(D)
    estimate = Window(8)
    state = estimate.init(torch.ones(D, dtype=torch.float32), 1.0)
    state = estimate.update(state, (scale * scores).float())
    got = scale * (scale * estimate.product(state, torch.ones(D, dtype=torch.float32)))
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("before", [1, 5])
def test_resumes_bit_for_bit(before: int) -> None:
    estimate = Window(7)
    scores = [torch.randn(2, D) for _ in range(12)]
    state = run(estimate, scores[:before])
    saved = tree_map(torch.clone, state)
    for rows in scores[before:]:
        state, saved = estimate.update(state, rows), estimate.update(saved, rows)
    assert flat(state).keys() == flat(saved).keys()
    assert all(torch.equal(v, flat(saved)[name]) for name, v in flat(state).items())


def test_an_update_leaves_the_state_before_alone() -> None:
    estimate = Window(7)
    state = run(estimate, [torch.randn(2, D)])
    before = {name: v.clone() for name, v in state.items()}
    estimate.update(state, torch.randn(2, D))
    assert all(torch.equal(v, before[name]) for name, v in state.items())


# --- flows ------------------------------------------------------------------------------------------


def flow_family(affine: str, flow: Any, d: int = 3) -> tuple[FlowFamily, Tensors]:
    family = FlowFamily(affine)
    family.define(as_flow(flow, d).to(torch.float64))
    return family, family.init(torch.zeros(d), 0.5)


def coupling(d: int = 3) -> Any:
    return dist.transforms.affine_coupling(d, [4])


def test_rule_steps_along_the_explicit_natural_gradient() -> None:
    family, params = flow_family("full", [coupling(), coupling()])
    estimate = Window(5, 0.5)
    rule = IFVBRule(NaturalGradientRule(family), estimate)
    scores = [torch.randn(4, len(family.pack(params))) for _ in range(3)]
    state = rule.init(params, scores[0])
    for rows in scores[1:]:
        grads = {name: torch.randn_like(p) for name, p in params.items()}
        _, state, _ = rule.update(params, grads, state, {"scores": rows})
    inverse = by_inversion(estimate, scores)
    g = family.pack(family.pull(params, grads))
    wanted = inverse @ g / (g @ inverse @ g).sqrt()  # the state holds it at length 1
    found = state["direction"]
    torch.testing.assert_close(family.pack(found), wanted, rtol=1e-9, atol=1e-12)


# --- what the benchmark compares with ---------------------------------------------------------------


def test_fisher_operator_is_the_mean_of_the_scores() -> None:
    family, params = flow_family("full", [coupling(), coupling()])
    params = {name: p + 0.1 * torch.randn_like(p) for name, p in params.items()}
    z = torch.randn(40, 3)
    score = family.score(params, z)
    rows = torch.func.vmap(lambda s: family.pack(family.pull(params, s)))(score)
    product, trace = fisher_operator(family, params, z)
    v = torch.randn(rows.shape[1])
    torch.testing.assert_close(product(v), rows.T @ (rows @ v) / 40, rtol=1e-10, atol=1e-12)
    exact = rows.square().sum() / 40
    traces = torch.stack([fisher_operator(family, params, z)[1] for _ in range(200)])
    assert (traces.mean() - exact).abs() < 4.5 * traces.std() / 200**0.5
    assert trace > 0


def test_conjugate_gradient_solves_in_as_many_steps_as_there_are_unknowns() -> None:
    root = torch.randn(D, D)
    matrix_, g = root @ root.T + torch.eye(D), torch.randn(D)
    x = conjugate_gradient(lambda v: matrix_ @ v, g, D)
    torch.testing.assert_close(x, torch.linalg.solve(matrix_, g), rtol=1e-8, atol=1e-8)
    assert (conjugate_gradient(lambda v: matrix_ @ v, g, 2) - x).abs().max() > 1e-6
