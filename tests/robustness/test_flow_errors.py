"""Flows that AutoFlow must refuse, or train whole: wrong numbers would come without a word."""

import copy
from pathlib import Path
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO
from torch import Tensor, nn

import pyro_ngvi as ngvi

transforms: Any = dist.transforms


def model() -> None:
    v = pyro.sample("v", dist.Normal(0.0, 1.0))
    pyro.sample("x", dist.Normal(v.square(), 0.5))


def called(flow: Any, **kwargs: Any) -> Any:
    guide = ngvi.AutoFlow(model, flow, init=None, **kwargs)
    guide()
    return guide


def coupling() -> Any:
    return transforms.affine_coupling(2, [4])


HIDING: dict[str, Any] = {
    "inverse": lambda d: transforms.affine_autoregressive(d, [4]).inv,
    "composed": lambda d: transforms.ComposeTransform([coupling(), coupling()]),
    "inverse of composed": lambda d: transforms.ComposeTransform([coupling(), coupling()]).inv,
    "one within a list": lambda d: [coupling(), transforms.affine_autoregressive(d, [4]).inv],
}


@pytest.mark.parametrize("name", HIDING)
def test_networks_inside_of_other_transforms_are_trained(name: str) -> None:
    guide = called(HIDING[name])
    flows = {k: p for k, p in guide.natural_params().items() if k.startswith("flow.")}
    before = {k: p.detach().clone() for k, p in flows.items()}
    loss = ngvi.BatchedELBO(16, curvature="scores")
    SVI(model, guide, ngvi.optim.SPRING(guide, averaging=False), loss).step()
    assert len(flows) >= 4
    assert all(not torch.equal(p, before[k]) for k, p in flows.items() if "bias" in k)
    copy.deepcopy(guide)


def test_a_transform_that_stands_twice_keeps_its_parameters() -> None:
    twice = coupling()
    guide = called([twice, transforms.Permute(torch.tensor([1, 0])), twice])
    names = list(guide.natural_params())
    for _ in range(2):
        guide()
        assert all(isinstance(p, nn.Parameter) for p in guide.natural_params().values())
        assert all(isinstance(p, nn.Parameter) for p in twice.parameters())
    assert sum(name.startswith("flow.") for name in names) == 4
    # both places take the given values: the score is the derivative of log q
    family, params = guide.family, {k: p.detach() for k, p in guide.natural_params().items()}
    z = torch.tensor([[0.3, -0.2]])
    name, h = names[-1], 1e-6
    ends = [family.log_prob(params | {name: params[name] + s * h}, z).item() for s in (1.0, -1.0)]
    derivative = (ends[0] - ends[1]) / (2 * h)
    assert family.score(params, z)[name].sum().item() == pytest.approx(derivative, rel=1e-5)


def test_a_module_with_two_names_keeps_its_parameters() -> None:
    # Pyro's holds its network under two names, and its splines do not run under vmap
    guide = called(lambda d: transforms.spline_autoregressive(d, [4], count_bins=4))
    loss = ngvi.BatchedELBO(8, curvature="scores")
    svi = SVI(model, guide, ngvi.optim.SPRING(guide), loss)
    before = [p.detach().clone() for p in guide.flow.parameters()]
    svi.step()
    svi.step()
    after = list(guide.flow.parameters())
    assert all(isinstance(p, nn.Parameter) for p in after)
    assert any(not torch.equal(p, q) for p, q in zip(before, after, strict=True))


class Dropping(nn.Module):
    cheap_inverse = True

    def __init__(self, d: int) -> None:
        super().__init__()
        self.net: Any = nn.Sequential(nn.Linear(1, 4), nn.Dropout(0.5), nn.Linear(4, d - 1))
        nn.init.zeros_(self.net[-1].weight)

    def forward(self, x: Tensor, inverse: bool = False) -> tuple[Tensor, Tensor]:
        a, b = x[..., :1], x[..., 1:]
        shift = self.net(a)
        return torch.cat([a, b - shift if inverse else b + shift], -1), x.new_zeros(x.shape[:-1])


BAD: dict[str, tuple[Any, str]] = {
    "tanh": (lambda d: [transforms.TanhTransform()], "TanhTransform maps onto Interval"),
    "tanh, then affine": (
        lambda d: [transforms.TanhTransform(), transforms.AffineTransform(0.0, 9.0)],
        "AffineTransform begins at Real",
    ),
    "sigmoid": (lambda d: transforms.SigmoidTransform(), "SigmoidTransform maps onto"),
    "exp": (lambda d: [coupling(), transforms.ExpTransform()], "ExpTransform maps onto"),
    "log": (lambda d: transforms.ExpTransform().inv, "begins at GreaterThan"),
    "a tensor": (
        lambda d: transforms.AffineTransform(torch.zeros(d, requires_grad=True), 1.0),
        "'loc' of the transform AffineTransform requires a gradient",
    ),
    "leaky relu": (
        lambda d: [coupling(), transforms.LeakyReLUTransform()],
        "LeakyReLUTransform has a kink at 0.*density.*jumps",
    ),
    "its inverse": (lambda d: transforms.LeakyReLUTransform().inv, "LeakyReLUTransform has a kink"),
    "batch norm": (lambda d: [coupling(), transforms.BatchNorm(d)], "BatchNorm"),
    "dropout": (Dropping, "has a Dropout"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_map_of_the_whole_space_is_refused(name: str) -> None:
    flow, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        called(flow)


@pytest.mark.parametrize("kind", ["UNAF", "CNF"])
def test_flows_without_scores_say_what_trains_them(kind: str) -> None:
    """Their backward pass runs the module with its own parameters, whatever it was called with."""
    zuko = pytest.importorskip("zuko")
    how = {"hidden_features": (4,)} | ({"transforms": 1, "signal": 4} if kind == "UNAF" else {})
    guide = called(lambda d: getattr(zuko.flows, kind)(d, **how))
    svi = SVI(model, guide, ngvi.optim.SPRING(guide), ngvi.BatchedELBO(4, curvature="scores"))
    with pytest.raises(RuntimeError, match=r"no scores.*UNAF and CNF.*pyro\.optim\.Adam.*NSF"):
        svi.step()
    adam: Any = pyro.optim.Adam({"lr": 0.01})  # pyright: ignore[reportAttributeAccessIssue]
    SVI(model, guide, adam, Trace_ELBO()).step()
    assert all(p.isfinite().all() for p in guide.parameters())


def test_positive_steps_between_real_ones_are_fine() -> None:
    called([transforms.ExpTransform(), transforms.ExpTransform().inv, coupling()])


def test_frozen_parameters_stay() -> None:
    flow = coupling()
    first = next(flow.parameters()).requires_grad_(False)
    with pytest.warns(UserWarning, match="requires_grad=False"):
        guide = called([flow])
        frozen = first.detach().clone()
        loss = ngvi.BatchedELBO(16, curvature="scores")
        SVI(model, guide, ngvi.optim.SPRING(guide), loss).step()
    assert torch.equal(first, frozen)
    assert sum(name.startswith("flow.") for name in guide.natural_params()) == 3


@pytest.mark.parametrize("kind", ["pyro", "own"])
def test_a_loaded_parameter_store_restores_the_whole_flow(kind: str, tmp_path: Path) -> None:
    def make() -> Any:
        if kind == "own":
            return ngvi.AutoCouplingFlow(model, layers=2, hidden=(4,), init=None, name="stored")
        return ngvi.AutoFlow(model, lambda d: [coupling()], init=None, name="stored")

    guide = make()
    svi = SVI(model, guide, ngvi.optim.SPRING(guide), ngvi.BatchedELBO(16, curvature="scores"))
    for _ in range(3):
        svi.step()
    saved = {k: p.detach().clone() for k, p in guide.natural_params().items()}
    pyro.get_param_store().save(str(tmp_path / "store"))
    pyro.clear_param_store()
    pyro.get_param_store().load(str(tmp_path / "store"))
    again = make()
    again()
    found = again.natural_params()
    assert all(torch.equal(found[k], v) for k, v in saved.items())
    optim = ngvi.optim.SPRING(again)
    SVI(model, again, optim, ngvi.BatchedELBO(16, curvature="scores")).step()
    assert optim.report().outcome != "skipped"


@pytest.mark.parametrize("kind", [ngvi.AutoFullRankNormal, ngvi.AutoCouplingFlow])
def test_a_copy_of_a_guide_with_a_given_name_has_another(kind: Any) -> None:
    guide = kind(model, name="mine to copy")
    guide()
    twin = copy.deepcopy(guide)
    before = {k: p.detach().clone() for k, p in guide.natural_params().items()}
    own = {k: p.detach().clone() for k, p in twin.natural_params().items()}
    SVI(model, twin, ngvi.IFVB(twin), ngvi.BatchedELBO(4)).step()
    assert all(torch.equal(p, before[k]) for k, p in guide.natural_params().items())
    assert any(not torch.equal(p, own[k]) for k, p in twin.natural_params().items())


def test_spring_refuses_a_single_draw() -> None:
    guide = called(lambda d: [coupling()])
    svi = SVI(model, guide, ngvi.optim.SPRING(guide), ngvi.BatchedELBO(1, curvature="scores"))
    with pytest.raises(ValueError, match="with each other"):
        svi.step()


def test_scores_are_refused_to_a_guide_whose_other_parameters_they_would_not_train() -> None:
    def layer() -> None:
        pyro.sample("w", dist.Normal(torch.zeros(4, 3), 1.0).to_event(2))

    guide = ngvi.AutoWalshHadamard(layer)
    optim = ngvi.optim.SPRING(guide, others=pyro.optim.Adam({"lr": 0.01}))  # pyright: ignore[reportAttributeAccessIssue]
    svi = SVI(layer, guide, optim, ngvi.BatchedELBO(8, curvature="scores"))
    with pytest.raises(ValueError, match="left_g_w, right_g_w"):
        svi.step()


def test_a_first_call_that_failed_says_the_same_again() -> None:
    def branching() -> None:
        x = pyro.sample("x", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        pyro.sample("y", dist.Normal(float(x[0]), 1.0), obs=torch.tensor(0.0))

    guide = ngvi.AutoFlow(branching, transforms.affine_coupling(3, [4]))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="vmap"):
            guide()
