"""Flows of every kind: inverse, log-determinant, scores by two routes, and the local frame."""

from typing import Any

import pyro.distributions.transforms as T
import pytest
import torch
import zuko
from torch import Tensor

from pyro_ngvi.families import FlowFamily
from pyro_ngvi.families.base import dot
from pyro_ngvi.flows.transforms import KINDS, as_flow, coupling_flow, spline_of_one

D = 3
FLOWS: dict[str, Any] = {
    **{kind: lambda kind=kind: coupling_flow(D, kind, 2, (6,), 4) for kind in KINDS},
    "spline of one": lambda: spline_of_one(4),
    "zuko MAF": lambda: as_flow(zuko.flows.MAF(D, transforms=2, hidden_features=(6,)), D),
    "zuko transform": lambda: as_flow(zuko.flows.NSF(D, transforms=1, bins=4).transform, D),
    "pyro coupling": lambda: as_flow(
        [T.affine_coupling(D, [6]), T.permute(D), T.affine_coupling(D, [6])], D
    ),
    "pyro spline": lambda: as_flow(T.spline_coupling(D, hidden_dims=[6], count_bins=4), D),
    "pyro IAF": lambda: as_flow(T.affine_autoregressive(D, [6]), D),
    "pyro composed": lambda: as_flow(
        T.ComposeTransformModule([T.affine_coupling(D, [4]), T.affine_coupling(D, [4])]), D
    ),
}
flows = pytest.mark.parametrize("kind", FLOWS)
affines = pytest.mark.parametrize("affine", ["diagonal", "full"])


def member(kind: str, affine: str) -> tuple[FlowFamily, dict[str, Tensor]]:
    """A flow away from the identity."""
    torch.manual_seed(3)
    flow = FLOWS[kind]().double()
    d = 1 if kind == "spline of one" else D
    family = FlowFamily(affine)
    family.define(flow)
    params = family.init(torch.linspace(-1.0, 2.0, d), 0.7)
    params = {k: v + 0.3 * torch.randn_like(v) for k, v in params.items()}
    return family, {k: v.tril() if k == "scale_tril" else v for k, v in params.items()}


@flows
@affines
def test_inverse_and_log_determinant(kind: str, affine: str) -> None:
    family, params = member(kind, affine)
    noise = torch.randn(7, family.noise_dim(params))
    z = family.rsample(params, noise)
    torch.testing.assert_close(family.noise_of(params, z), noise, atol=1e-8, rtol=0.0)
    jacobian = torch.stack(
        [torch.autograd.functional.jacobian(lambda e: family.rsample(params, e), e) for e in noise]
    )
    wanted = torch.linalg.slogdet(jacobian).logabsdet
    torch.testing.assert_close(family.transport(params, noise)[1], wanted, atol=1e-8, rtol=0.0)
    normal = -0.5 * (noise.square() + torch.log(torch.tensor(2 * torch.pi))).sum(-1)
    torch.testing.assert_close(family.log_prob(params, z), normal - wanted, atol=1e-8, rtol=0.0)


def one_by_one(family: FlowFamily, params: dict[str, Tensor], z: Tensor) -> dict[str, Tensor]:
    """Scores by plain autograd, a draw at a time."""
    rows = []
    for row in z:
        leaves = {k: v.detach().clone().requires_grad_() for k, v in params.items()}
        log_q = family.log_prob(leaves, row)
        grads = torch.autograd.grad(log_q, list(leaves.values()), allow_unused=True)
        pairs = zip(leaves.items(), grads, strict=True)
        rows.append({k: torch.zeros_like(p) if g is None else g for (k, p), g in pairs})
    return {k: torch.stack([r[k] for r in rows]) for k in params}


@flows
@affines
def test_scores(kind: str, affine: str) -> None:
    family, params = member(kind, affine)
    noise = torch.randn(5, family.noise_dim(params))
    z = family.rsample(params, noise)
    wanted = one_by_one(family, params, z)
    scores = family.score(params, z)
    both = [scores] if kind == "pyro spline" else [scores, family.path_score(params, noise)]
    for name in wanted:
        for found in (found[name] for found in both):
            if name == "scale_tril":
                found = found.tril()
            expected = wanted[name].tril() if name == "scale_tril" else wanted[name]
            torch.testing.assert_close(found, expected, atol=1e-7, rtol=1e-7)


@flows
def test_score_against_differences(kind: str) -> None:
    family, params = member(kind, "full")
    z = family.rsample(params, torch.randn(1, family.noise_dim(params)))
    score = family.score(params, z)
    step = 1e-5
    for name, value in params.items():
        direction = torch.randn_like(value)
        if name == "scale_tril":
            direction = direction.tril()
        ends = [
            family.log_prob(params | {name: value + sign * step * direction}, z)[0]
            for sign in (1, -1)
        ]
        slope = (ends[0] - ends[1]) / (2 * step)
        torch.testing.assert_close((score[name][0] * direction).sum(), slope, atol=1e-5, rtol=1e-4)


# of Pyro's spline they are taken one by one, and 2,000 of them take half a minute
@pytest.mark.parametrize("kind", [kind for kind in FLOWS if kind != "pyro spline"])
def test_scores_have_mean_zero(kind: str) -> None:
    family, params = member(kind, "diagonal")
    n = 2000
    scores = family.draw_scores(params, n)
    for value in scores.values():
        flat = value.reshape(n, -1)
        error = flat.std(0) / n**0.5
        assert (flat.mean(0).abs() <= 5.0 * error + 1e-9).all()


@affines
def test_local_frame(affine: str) -> None:
    family, params = member("affine", affine)
    tangent = family.unpack(torch.randn(len(family.pack(params))), params)
    gradient = {k: torch.randn_like(v) for k, v in params.items()}
    if affine == "full":
        gradient["scale_tril"] = gradient["scale_tril"].tril()
    one = dot(family.pull(params, gradient), tangent)
    other = dot(gradient, family.push(params, tangent))
    torch.testing.assert_close(one, other)
    again = family.unpack(family.pack(tangent), params)
    for name, value in tangent.items():
        torch.testing.assert_close(again[name], value)
    step = 1e-6
    moved = family.retract(params, tangent, step)
    velocity = family.push(params, tangent)
    for name, value in params.items():
        torch.testing.assert_close(
            (moved[name] - value) / step, velocity[name], atol=1e-4, rtol=1e-4
        )


@pytest.mark.parametrize("kind", KINDS)
@affines
def test_a_new_flow_is_a_gaussian(kind: str, affine: str) -> None:
    family = FlowFamily(affine)
    family.define(coupling_flow(D, kind, 3, (8, 8), 5).double())
    loc = torch.tensor([1.0, -2.0, 0.5])
    params = family.init(loc, 0.3)
    z = loc + torch.linspace(-1.0, 1.0, 12).reshape(4, D)
    wanted = torch.distributions.Normal(loc, 0.3).log_prob(z).sum(-1)
    torch.testing.assert_close(family.log_prob(params, z), wanted)
    # 4,096 draws: five standard errors
    assert ((family.mean(params) - loc).abs() < 5 * 0.3 / 64).all()
    assert ((family.stddev(params) / 0.3 - 1.0).abs() < 5 / 90).all()
    exact = 3 * (
        0.5 * torch.log(torch.tensor(2 * torch.pi * torch.e)) + torch.log(torch.tensor(0.3))
    )
    assert abs(float(family.entropy(params) - exact)) < 5 * 1.5**0.5 / 64


def test_entries_that_are_not_finite() -> None:
    family, params = member("affine", "diagonal")
    assert not family.not_finite(params).any()
    bad = params | {"loc": torch.tensor([0.0, torch.nan, 0.0])}
    assert family.not_finite(bad).tolist() == [False, True, False]
    name = family.names[-1]
    assert family.not_finite(params | {name: params[name] / 0.0}).all()


def test_pyro_transforms_keep_nothing() -> None:
    import copy

    family, params = member("pyro coupling", "diagonal")
    family.rsample(params, torch.randn(2, D))
    family.score(params, torch.randn(2, D))
    copy.deepcopy(family.flow)  # tensors of a graph cannot be copied
    x = torch.randn(4, D)
    first = family.log_prob(params, x)
    other = {k: v + 0.1 for k, v in params.items()}
    assert not torch.allclose(family.log_prob(other, x), first)
    torch.testing.assert_close(family.log_prob(params, x), first)


@pytest.mark.parametrize(
    ("flow", "error", "words"),
    [
        (T.planar(D), ValueError, "no inverse"),
        (zuko.flows.MAF(D + 1), ValueError, "length 3"),
        (zuko.flows.NCSF(D), ValueError, "standard normal"),
        (torch.nn.Linear(3, 3), TypeError, "Linear"),
        (["coupling"], TypeError, "list"),
        (T.affine_coupling(D + 2, [4]), ValueError, "length 3"),
    ],
)
def test_flows_that_are_refused(flow: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        as_flow(flow, D)


def test_meta_device() -> None:
    family = FlowFamily("full")
    family.define(coupling_flow(D, "affine", 2, (6,), 4).to("meta"))
    params = {k: v.to("meta") for k, v in family.init(torch.zeros(D, device="meta"), 0.1).items()}
    z = family.rsample(params, torch.randn(4, D, device="meta"))
    assert family.log_prob(params, z).shape == (4,)
    assert all(v.shape[0] == 4 for v in family.score(params, z).values())
