"""What curvature="kronecker" and NoisyKFAC refuse: models, pairs, and steps that are not finite."""

from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
import torch.nn.functional as F
from pyro import poutine
from pyro.infer import SVI
from pyro.infer.autoguide import AutoGuideList
from torch import Tensor

from pyro_ngvi import NGVB, AutoMatrixNormal, AutoMeanFieldNormal, BatchedELBO
from pyro_ngvi.optim import VON, NoisyKFAC
from pyro_ngvi.optim.state import flat
from tests.exact.test_kronecker import OUT, WIDTH, N, data, latent, network


def embedding(x: Tensor, y: Tensor) -> None:
    observe(F.embedding(torch.arange(N) % 3, latent("E", 3, OUT)), y)


def twice(x: Tensor, y: Tensor) -> None:
    w = latent("E", WIDTH, WIDTH)
    observe(F.linear(F.linear(x, w).tanh(), w)[:, :OUT], y)


def squared(x: Tensor, y: Tensor) -> None:
    observe(x @ latent("E", WIDTH, OUT) ** 2, y)


def sliced(x: Tensor, y: Tensor) -> None:
    observe(F.linear(x, latent("E", 4, WIDTH)[:OUT]), y)


def sequence(x: Tensor, y: Tensor) -> None:
    observe(F.linear(x.expand(5, N, WIDTH).transpose(0, 1), latent("E", OUT, WIDTH)).mean(1), y)


def positive(x: Tensor, y: Tensor) -> None:
    w = pyro.sample("E", dist.LogNormal(torch.zeros(OUT, WIDTH), 1.0).to_event(2))
    observe(F.linear(x, w), y)


def masked(x: Tensor, y: Tensor) -> None:
    keep: Any = torch.arange(N) % 2 == 0
    with poutine.mask(mask=keep):
        observe(F.linear(x, latent("E", OUT, WIDTH)), y)


def no_plate(x: Tensor, y: Tensor) -> None:
    pyro.sample("y", dist.Normal(F.linear(x, latent("E", OUT, WIDTH)), 1.0).to_event(2), obs=y)


def observe(mean: Tensor, y: Tensor) -> None:
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(mean, 1.0).to_event(1), obs=y)


NO_LAYER = "weight of one linear layer.*'E' is not.*NGVB"


@pytest.mark.parametrize(
    ("model", "message"),
    [
        *[(m, NO_LAYER) for m in (embedding, twice, squared, sliced, sequence, positive)],
        (masked, "at 'y' one scale and no mask.*leave hidden data out"),
        (no_plate, "no observed site of the model lies in a plate"),
    ],
)
def test_models_that_are_refused(model: Any, message: str) -> None:
    x, y = data()
    guide = AutoMatrixNormal(model)
    svi = SVI(model, guide, NoisyKFAC(guide), BatchedELBO(2, curvature="kronecker"))
    with pytest.raises(ValueError, match=message):
        svi.step(x, y)


@pytest.mark.parametrize(
    ("guide_class", "optim", "kind", "message"),
    [
        (
            AutoMeanFieldNormal,
            VON,
            "kronecker",
            "Take AutoMatrixNormal, for NoisyKFAC",
        ),
        (AutoMatrixNormal, NoisyKFAC, "gauss_newton", "AutoMatrixNormal has no use for"),
        (AutoMatrixNormal, NoisyKFAC, None, 'left none.*curvature="kronecker"'),
        (AutoMatrixNormal, NGVB, "kronecker", "or take pyro_ngvi.optim.NoisyKFAC"),
    ],
)
def test_pairs_that_are_refused(guide_class: Any, optim: Any, kind: Any, message: str) -> None:
    guide = guide_class(network)
    svi = SVI(network, guide, optim(guide), BatchedELBO(2, curvature=kind))
    with pytest.raises((ValueError, RuntimeError), match=message):
        svi.step(*data())


def test_a_list_of_guides_is_refused() -> None:
    guide = AutoGuideList(network)
    guide.append(AutoMatrixNormal(poutine.block(network, expose=["w"])))
    guide.append(AutoMatrixNormal(poutine.block(network, hide=["w"])))
    with pytest.raises(ValueError, match="one guide over all latent sites only"):
        NoisyKFAC(guide)


@pytest.mark.filterwarnings("ignore:Encountered NaN")
def test_a_step_that_is_not_finite_is_skipped() -> None:
    """With a NaN among the data every site has one, in its gradient or its factors."""
    x, y = data()
    guide = AutoMatrixNormal(network)
    optim = NoisyKFAC(guide, lr=0.1, curvature_lr=0.1)
    svi = SVI(network, guide, optim, BatchedELBO(2, curvature="kronecker"))
    svi.step(x, y)
    before = {name: p.detach().clone() for name, p in guide.natural_params().items()}
    state = optim.get_state()["natural"][""]
    message = r"NoisyKFAC skipped a step: the gradient or curvature is not finite at 'w', 'b'"
    with pytest.warns(RuntimeWarning, match=message):
        svi.step(x, y.index_fill(0, torch.tensor([1]), torch.nan))
    assert all(torch.equal(p, before[name]) for name, p in guide.natural_params().items())
    after = optim.get_state()["natural"][""]
    assert all(
        torch.equal(flat(after)[name], v) for name, v in flat(state).items() if "kron" in name
    )
    svi.step(x, y)
    assert not any(torch.equal(p, before[name]) for name, p in guide.natural_params().items())
    assert optim.report().skipped == 1
