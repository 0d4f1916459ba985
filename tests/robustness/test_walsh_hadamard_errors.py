"""What AutoWalshHadamard and WalshHadamardReparam refuse, in sentences that name the fix."""

from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from torch import Tensor

from pyro_ngvi import AutoProperWalshHadamard, AutoWalshHadamard, BatchedELBO
from pyro_ngvi.nn import WalshHadamardReparam
from tests.contract.walsh_hadamard_model import COLUMNS, ROWS, data, weights


def one(fn: Any, plate: int | None = None, scale: float = 1.0) -> Any:
    """A model of one site "W", and another matrix after it."""

    def model() -> None:
        if plate is None:
            with poutine.scale(scale=scale):
                pyro.sample("W", fn)
        else:
            with pyro.plate("p", plate):
                pyro.sample("W", fn)
        pyro.sample("last", dist.Normal(torch.zeros(3, 3), 1.0).to_event(2))

    return model


NORMAL = dist.Normal(torch.zeros(4, 3), 1.0)
REFUSED: dict[str, Any] = {
    "scalar": one(dist.Normal(0.0, 1.0)),
    "no event": one(NORMAL),
    "half an event": one(NORMAL.to_event(1)),
    "plate": one(NORMAL.to_event(2), plate=2),
    "scaled": one(NORMAL.to_event(2), scale=0.5),
    "masked": one(NORMAL.mask(torch.tensor(True)).to_event(2)),
    "Laplace": one(dist.Laplace(torch.zeros(4, 3), 1.0).to_event(2)),
    "Gamma": one(dist.Gamma(torch.ones(4, 3), 1.0).to_event(2)),
    "correlated": one(dist.MultivariateNormal(torch.zeros(4, 3), torch.eye(3)).to_event(1)),
}


@pytest.mark.parametrize("kind", [AutoWalshHadamard, AutoProperWalshHadamard])
@pytest.mark.parametrize("model", REFUSED.values(), ids=REFUSED)
def test_site_that_can_not_be_made_of_g(model: Any, kind: Any) -> None:
    guide = kind(model, ["W"])
    for _ in range(2):  # the second call says the same again
        words = rf"{kind.__name__}: 'W' is no latent site of independent normals.*'last' \(3, 3\)"
        with pytest.raises(ValueError, match=words):
            guide()


def test_arguments() -> None:
    model = one(NORMAL.to_event(2))
    for name, value in (("g", "x"), ("rest", "low_rank")):
        how: dict[str, Any] = {name: value}
        with pytest.raises(
            ValueError, match=f"{name} must be 'mean_field' or 'full_rank', got '{value}'"
        ):
            AutoWalshHadamard(model, **how)
    with pytest.raises(ValueError, match=r"init must be None, got 'map'"):
        AutoWalshHadamard(model, init="map")
    # the proper guide's diagonals stay signs, and its prior is that of the model
    other: dict[str, Any]
    for other in ({"train_diagonals": True}, {"g_scale": 2.0}):
        with pytest.raises(TypeError, match=next(iter(other))):
            AutoProperWalshHadamard(model, **other)


def test_named_site_that_is_not_there() -> None:
    with pytest.raises(ValueError, match=r"'V' is no latent site.* has 'W' \(4, 3\), 'last'"):
        AutoWalshHadamard(one(NORMAL.to_event(2)), ["W", "V"])()

    def observed() -> None:
        pyro.sample("W", NORMAL.to_event(2), obs=torch.zeros(4, 3))
        pyro.sample("z", dist.Normal(0.0, 1.0))

    with pytest.raises(ValueError, match=r"'W' is no latent site.* has 'z'"):
        AutoWalshHadamard(observed, ["W"])()


def test_no_matrix_to_find() -> None:
    def model() -> None:
        pyro.sample("row", dist.Normal(torch.zeros(1, 3), 1.0).to_event(2))
        pyro.sample("plain", NORMAL.to_event(1))
        pyro.sample("last", NORMAL.to_event(2))

    words = r"found no Gaussian matrix.*'row' \(1, 3\), .*Name some by sites=.*AutoMeanFieldNormal"
    with pytest.raises(ValueError, match=words):
        AutoWalshHadamard(model)()


def test_moments_before_the_first_call() -> None:
    guide = AutoWalshHadamard(one(NORMAL.to_event(2)))
    with pytest.raises(RuntimeError, match="call it once"):
        guide.site_moments("W")


@pytest.mark.parametrize("where", ["loc", "scale", "other matrix"])
def test_prior_that_depends_on_another_site(where: str) -> None:
    def model() -> None:
        z = pyro.sample("z", dist.Gamma(2.0, 1.0))
        V = pyro.sample("V", NORMAL.to_event(2))
        loc = z * torch.ones(4, 3) if where == "loc" else torch.zeros(4, 3)
        loc = V if where == "other matrix" else loc
        scale = z if where == "scale" else torch.ones(())
        pyro.sample("W", dist.Normal(loc, scale).to_event(2))
        pyro.sample("last", NORMAL.to_event(2))

    words = r"prior of 'W' is trained or depends on other latent sites.*poutine\.reparam"
    state = torch.get_rng_state()
    with pytest.raises(ValueError, match=words):
        AutoWalshHadamard(model)()
    assert torch.equal(state, torch.get_rng_state())
    AutoWalshHadamard(model, ["V"])()  # another one may be named


@pytest.mark.parametrize(
    ("fn", "words"),
    [
        (dist.Laplace(torch.zeros(4, 3), 1.0).to_event(2), r"'W' is Independent"),
        (NORMAL, r"'W' is Normal with event shape \(\)"),
    ],
    ids=["Laplace", "no event"],
)
def test_reparam_of_another_site(fn: Any, words: str) -> None:
    model = poutine.reparam(one(fn), {"W": WalshHadamardReparam()})
    with pytest.raises(ValueError, match=r"by \.to_event\(\.\.\.\)\. The site " + words):
        model()


def test_reparam_of_an_observed_site() -> None:
    def model(W: Tensor) -> None:
        pyro.sample("W", NORMAL.to_event(2), obs=W)

    with pytest.raises(ValueError, match=r"for latent sites.* 'W' .*, observed"):
        poutine.reparam(model, {"W": WalshHadamardReparam()})(torch.zeros(4, 3))


def test_a_scale_around_the_model_alone_is_refused() -> None:
    """It would leave a share of log p(W) in the objective, without bound."""
    scaled = poutine.scale(weights, scale=0.1)
    guide = AutoWalshHadamard(weights, ["W"])
    with pytest.raises(ValueError, match=r"differ in scale or mask at the site 'W'"):
        BatchedELBO(2).loss(scaled, guide, *data())
    with poutine.scale(scale=0.1):  # around both
        BatchedELBO(2).loss(weights, guide, *data())
    proper = AutoProperWalshHadamard(weights, ["W"])
    BatchedELBO(2).loss(scaled, proper, *data())


def test_a_trained_prior_is_refused() -> None:
    def model(X: Tensor, Y: Tensor) -> None:
        sd = pyro.param("sd", torch.tensor(1.0), constraint=dist.constraints.positive)
        W = pyro.sample("W", dist.Normal(X.new_zeros(ROWS, COLUMNS), sd).to_event(2))
        with pyro.plate("data", len(X)):
            pyro.sample("Y", dist.Normal(X @ W.mT, 1.0).to_event(1), obs=Y)

    with pytest.raises(ValueError, match="is trained or depends"):
        AutoWalshHadamard(model, ["W"])(*data())
    AutoProperWalshHadamard(model, ["W"])(*data())


def test_the_last_matrix_is_the_last_event_of_two_dimensions() -> None:
    def model() -> None:
        for name, shape in (("W", (8, 4)), ("U", (8, 8)), ("Z", (3, 2))):
            pyro.sample(name, dist.Normal(torch.zeros(shape), 1.0).to_event(2))
        with pyro.plate("groups", 5):
            pyro.sample("b", dist.Normal(torch.zeros(2), 1.0).to_event(1))

    guide = AutoWalshHadamard(model)
    guide()
    assert list(guide.matrices) == ["W", "U"]
    with pytest.raises(ValueError, match=r"'W' is no latent site .* neither scaled nor masked"):
        AutoWalshHadamard(poutine.scale(model, scale=0.5))()
