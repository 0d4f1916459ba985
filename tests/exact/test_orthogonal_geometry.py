"""The frame of orthogonal flows: tangents, retractions, averages, devices, refusals."""

from typing import Any

import pytest
import torch

from benchmarks.flows.orthogonal_forms import AmbientForm, OrthogonalForm
from pyro_ngvi.curvature.derivatives import jvp
from pyro_ngvi.families import OrthogonalFlow
from pyro_ngvi.families.base import dot
from pyro_ngvi.fisher.scores import family_scores
from pyro_ngvi.optim.rule import Tail, step_average
from tests.exact.orthogonal_members import D, every, member, noise, some_tangent


@every
def test_pull_is_the_transpose_of_push(family: OrthogonalFlow) -> None:
    q = member(family)
    u = some_tangent(family, q, 1.0, seed=4)
    g = {name: torch.randn_like(v) for name, v in q.items()}
    pulled, pushed = family.pull(q, g), family.push(q, u)
    packed = torch.dot(family.pack(pulled), family.pack(u))
    torch.testing.assert_close(packed, dot(g, pushed), rtol=1e-11, atol=1e-11)
    # rules pair the dicts without packing them
    torch.testing.assert_close(dot(pulled, u), dot(g, pushed), rtol=1e-11, atol=1e-11)


@every
def test_retraction_starts_along_the_push(family: OrthogonalFlow) -> None:
    q = member(family)
    u = some_tangent(family, q, 1.0, seed=6)
    move = jvp(lambda t: family.retract(q, u, t), (torch.zeros(()),), (torch.ones(()),))[1]
    for name, velocity in family.push(q, u).items():
        torch.testing.assert_close(move[name], velocity, rtol=1e-10, atol=1e-10)


def test_ambient_steps_are_projected() -> None:
    """The velocity of W along V is W skew(W'V); gradients keep their normal part."""
    family = AmbientForm(1)
    q = member(family)
    W, V = q["weight_1"], torch.randn(D, D)
    u = {name: torch.zeros_like(v) for name, v in q.items()} | {"weight_1": V}
    move = jvp(lambda t: family.retract(q, u, t), (torch.zeros(()),), (torch.ones(()),))[1]
    wanted = 0.5 * W @ (W.mT @ V - V.mT @ W)
    torch.testing.assert_close(move["weight_1"], wanted)
    torch.testing.assert_close(family.push(q, u)["weight_1"], wanted)
    assert torch.equal(family.pull(q, u)["weight_1"], V)
    assert torch.equal(family.unpack(family.pack(u), q)["weight_1"], V)


@every
def test_pack_and_unpack(family: OrthogonalFlow) -> None:
    q = member(family)
    u = some_tangent(family, q, 1.0)
    back = family.unpack(family.pack(u), q)
    assert tuple(back) == family.names
    assert all(torch.equal(back[name], u[name]) for name in u)


@pytest.mark.parametrize("retraction", ["cayley", "exponential", "cholesky-qr"])
def test_long_steps_stay_in_the_domain(retraction: str) -> None:
    family = OrthogonalForm(2, form="whitened", retraction=retraction)
    q = member(family)
    for seed in range(20):
        q = family.retract(q, some_tangent(family, q, 1.0, seed), 10.0 ** (seed % 4 - 1))
        assert float(family.drift(q)) < 1e-10
        assert (q["scale_tril"].diagonal() > 0).all()
        fresh = member(family)  # scales would leave float64 after a few of these steps
        q = {k: v if k.startswith("weight_") else fresh[k] for k, v in q.items()}


@pytest.mark.slow
def test_orthogonal_after_ten_thousand_steps_in_float32() -> None:
    family = OrthogonalFlow(1)
    q = {k: v.float() for k, v in family.init(torch.zeros(5), 0.5).items()}
    generator = torch.Generator().manual_seed(0)
    D_all = len(family.pack(q))
    start, average = q, q
    for k in range(1, 10_001):
        vector = 0.05 * torch.randn(D_all, generator=generator, dtype=torch.float32)
        q = family.retract(q, family.unpack(vector, q), -1.0)
        if k % 10 == 0:
            average = family.average(average, q, torch.tensor(4.0 / (k / 10 + 3.0)))
        # the rest of q would walk away in so many random steps
        q = {k: v if k.startswith("weight_") else start[k] for k, v in q.items()}
    for params in (q, average):
        W = params["weight_1"]
        assert float((W.mT @ W - torch.eye(5, dtype=W.dtype)).abs().max()) < 1e-6


def test_average_is_orthogonal_where_a_chord_is_not() -> None:
    family = OrthogonalFlow(1)
    one, other = member(family, size=0.5, seed=1), member(family, size=0.5, seed=2)
    state: dict[str, Any] = {"average": dict(one)}
    zero = torch.zeros(())
    state |= {"average_total": zero, "average_square": zero}
    new = step_average(Tail(), family, state, other, torch.tensor(5.0))
    found = new["average"]
    assert float(family.drift(found)) < 1e-12
    chord = torch.lerp(one["weight_1"], other["weight_1"], 0.5)
    assert float(family.drift({"loc": one["loc"], "weight_1": chord})) > 1e-3
    assert torch.equal(found["loc"], torch.lerp(one["loc"], other["loc"], torch.tensor(4.0 / 8.0)))


@every
def test_no_value_is_read(family: OrthogonalFlow) -> None:
    params = {k: v.float() for k, v in member(family).items()}
    meta: Any = {k: v.to("meta") for k, v in params.items()}
    z = family.rsample(meta, torch.empty(3, D, device="meta", dtype=torch.float32))
    assert family.log_prob(meta, z).shape == (3,)
    scores = family_scores(family, meta, 2)
    assert scores.shape == (2, len(family.pack(meta))) and scores.dtype == torch.float32
    u = family.unpack(scores[0], meta)
    for tensors in (
        family.retract(meta, u, torch.ones((), device="meta", dtype=torch.float32)),
        family.pull(meta, meta),
        family.push(meta, u),
        family.average(meta, meta, torch.ones((), device="meta", dtype=torch.float32)),
        family.init(torch.empty(D, device="meta", dtype=torch.float32), 0.1),
    ):
        assert {k: (v.shape, v.dtype) for k, v in tensors.items()} == {
            k: (v.shape, v.dtype) for k, v in params.items()
        }
        assert all(v.device.type == "meta" for v in tensors.values())
    assert family.not_finite(meta).shape == (D,)


def test_not_finite_names_the_latent_entries() -> None:
    family = OrthogonalFlow(1)
    q = member(family)
    leaves = {k: v.clone().requires_grad_() for k, v in q.items()}
    z = family.rsample(leaves, noise(3))
    (z[:, 2] * torch.inf).sum().backward()
    grads: Any = {k: v.grad for k, v in leaves.items()}
    assert family.not_finite(grads).tolist() == [False, False, True, False]
    assert not family.not_finite(q).any()
    hidden = q | {"bias_0": torch.full((D,), torch.nan)}
    assert family.not_finite(hidden).all()


def test_fisher_matrix_is_refused() -> None:
    family = OrthogonalFlow(1)
    q = member(family)
    assert not family.known_fisher
    for call in (family.fisher_product, family.natural_gradient):
        with pytest.raises(NotImplementedError, match="estimate it by"):
            call(q, q)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"layers": 0}, "layers must be a whole number"),
        ({"layers": 1.0}, "layers must be a whole number"),
        ({"activation": "relu"}, "activation must be one of 'sinh-arcsinh'"),
        ({"form": "free"}, "form must be one of"),
        ({"base": "low"}, "base must be one of"),
        ({"retraction": "polar"}, "retraction must be one of"),
    ],
)
def test_refused_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OrthogonalForm(**arguments)
