"""Mirror images of a guide's draws that are modes of their own, with their shares of the mass."""

from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.distributions.transforms import OrderedTransform
from pyro.infer import config_enumerate
from pyro.infer.autoguide import AutoNormal

import pyro_ngvi as ngvi

ZERO = torch.zeros(()).double()


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).double()


SQUARE = 1.5 + 0.5 * noise(30)
GROUPS = noise(15, seed=3).repeat(4) + 0.5 * noise(60)
PARTS = torch.cat([noise(12) - 3.0, noise(28, seed=1) + 3.0])
X = noise(60, 3)
LINE = X @ torch.tensor([2.0, -1.0, 3.0]).double() + noise(60, seed=2)


@pytest.fixture(autouse=True)
def _clean() -> None:
    pyro.clear_param_store()


def fitted(model: Any, guide: Any, **how: Any) -> Any:
    return ngvi.fit(model, guide=guide, seed=0, progress=False, **how)


def squared() -> None:
    b: Any = pyro.sample("b", dist.Normal(ZERO + 0.3, 0.8))
    with pyro.plate("data", 30):
        pyro.sample("y", dist.Normal(b.square(), 0.5), obs=SQUARE)


def told(fit: Any) -> str:
    assert fit.verdict.decision in ("unclear", "unusable") and fit.khat.modes == 2
    words = fit.khat.mirrored
    assert fit.verdict.verdict.startswith(words) and 0 < len(words) <= 240
    return words


@pytest.mark.parametrize("kind", ["flow", "Pyro's"])
def test_a_sign_that_data_do_not_see(kind: str) -> None:
    """The share is 1 / (1 + exp(2 0.3 |b| / 0.64)): of the prior's densities at -b and b."""
    guide = "AutoCouplingFlow" if kind == "flow" else AutoNormal(squared)
    with pytest.warns(UserWarning, match="single latent") if kind == "flow" else _nothing():
        fit = fitted(squared, guide, max_steps=60)
    b = fit.sample(1000, seed=0)["b"]
    share = float(1.0 / (1.0 + (2.0 * 0.3 * b / 0.64).exp()).mean())
    words = told(fit)
    assert words.startswith("There is another mode, with the signs of 'b' turned and ")
    found = float(words.split("and ")[1].split("%")[0]) / 100.0
    assert found == pytest.approx(share, abs=0.02)


class _nothing:
    def __enter__(self) -> None: ...
    def __exit__(self, *args: object) -> None: ...


def product() -> None:
    s: Any = pyro.sample("s", dist.Normal(ZERO, 1.0))
    with pyro.plate("groups", 15):
        z: Any = pyro.sample("z", dist.Normal(ZERO, 1.0))
    with pyro.plate("data", 60):
        pyro.sample("y", dist.Normal(s * z[torch.arange(60) % 15], 0.5), obs=GROUPS)


def test_few_larger_weights_among_equal_ones_hide_no_mode() -> None:
    def model() -> None:
        two = dist.Normal(torch.tensor([5.0, -5.0]), 1.0)
        z: Any = pyro.sample("z", dist.MixtureSameFamily(dist.Categorical(torch.ones(2)), two))
        pyro.factor("few", 2.0 * (z.abs() - 7.75).clamp(min=0.0))

    found = ngvi.khat(model, lambda: pyro.sample("z", dist.Normal(5.0, 1.0)), seed=0)
    assert found.khat > 1.0 and found.reliable
    assert "with the signs of 'z' turned and 50% of the mass" in found.mirrored


def test_signs_of_two_sites_together() -> None:
    words = told(fitted(product, AutoNormal(product), max_steps=150))
    assert "the signs of 's', 'z' turned and 50% of the mass" in words


def test_a_wide_mode_whose_image_holds_no_draw() -> None:
    """Means 5 sds apart, and all draws on one side of 0: skewed, as flows are."""

    def model() -> None:
        a, b = (pyro.sample(name, dist.Normal(ZERO, 1.0)) for name in "ab")
        pyro.sample("y", dist.Normal(a * b, 0.1), obs=ZERO + 0.8)

    def guide() -> None:
        a: Any = pyro.sample("a", dist.LogNormal(ZERO, 0.35))
        pyro.sample("b", dist.LogNormal(-a.log() - 0.22, 0.12))

    words = ngvi.khat(model, guide, seed=0).mirrored
    assert "the signs of 'a', 'b' turned and 50% of the mass" in words


@config_enumerate
def components() -> None:
    w: Any = pyro.sample("w", dist.Beta(ZERO + 2.0, 2.0))
    c: Any = pyro.sample("c", dist.Normal(torch.zeros(2).double(), 3.0).to_event(1))
    with pyro.plate("data", 40):
        k: Any = pyro.sample("k", dist.Bernoulli(w))
        pyro.sample("y", dist.Normal(c[k.long()], 1.0), obs=PARTS)


def test_components_and_their_weight_exchanged() -> None:
    guide = ngvi.AutoFullRankNormal(components, init=None, init_loc_fn=_apart)
    words = told(fitted(components, guide))
    assert "with entries 0 and 1 of 'c' exchanged and 50% of the mass" in words


def _apart(site: Any) -> Any:
    at = {
        "w": ZERO + 0.5,
        "c": torch.tensor([-2.0, 2.0]).double(),
        "c1": ZERO - 2.0,
        "c2": ZERO + 2.0,
    }
    return at.get(site["name"])


def named_apart(y: torch.Tensor, prior: float = 3.0, size: int = 40) -> None:
    w: Any = pyro.sample("w", dist.Uniform(ZERO, 1.0))
    c1, c2 = (pyro.sample(f"c{i}", dist.Normal(ZERO, s)) for i, s in ((1, 3.0), (2, prior)))
    with pyro.plate("data", size, subsample_size=len(y)):
        weights = dist.Categorical(torch.stack([w, 1.0 - w], -1))
        pyro.sample(
            "y", dist.MixtureSameFamily(weights, dist.Normal(torch.stack([c1, c2], -1), 1.0)), obs=y
        )


@pytest.mark.parametrize("stream", [False, True])
def test_single_sites_and_their_weight_exchanged(stream: bool) -> None:
    """Of minibatches the image has the same density under each, or is not known."""
    mixed = PARTS[torch.randperm(40, generator=torch.Generator().manual_seed(0))]
    how: Any = {"data": [(part,) for part in mixed.split(20)]} if stream else {}
    for prior in 3.0, 6.0:

        def model(y: torch.Tensor, prior: float = prior) -> None:
            named_apart(y, prior)

        pyro.clear_param_store()
        guide = ngvi.AutoFullRankNormal(model, init=None, init_loc_fn=_apart)
        args = () if stream else (PARTS,)
        words = ngvi.fit(
            model, *args, guide=guide, seed=0, progress=False, max_steps=100, **how
        ).khat.mirrored
        assert ("with 'c1', 'c2' exchanged and 50% of the mass" in words) is (prior == 3.0)
        assert ("'c1', 'c2' exchanged" in words) is (prior == 3.0 or not stream)


def regressed() -> None:
    w: Any = pyro.sample("w", dist.Normal(torch.zeros(3).double(), 5.0).to_event(1))
    s: Any = pyro.sample("s", dist.HalfNormal(ZERO + 2.0))
    with pyro.plate("data", 60):
        pyro.sample("y", dist.Normal(X @ w, s), obs=LINE)


def ordered() -> None:
    """With a flat prior, which Stan's users write so: its density does not know the order."""
    base = dist.Normal(torch.zeros(2).double(), 1.0).to_event(1)
    prior: Any = dist.TransformedDistribution(base, [OrderedTransform()])
    c: Any = pyro.sample("c", prior.mask(False))
    pyro.factor("prior", dist.Normal(ZERO, 3.0).log_prob(c).sum(-1))
    with pyro.plate("data", 40):
        weights = dist.Categorical(probs=torch.tensor([0.5, 0.5]).double())
        pyro.sample("y", dist.MixtureSameFamily(weights, dist.Normal(c, 1.0)), obs=PARTS)


def test_an_order_rules_the_exchange_out() -> None:
    assert fitted(ordered, "AutoFullRankNormal").khat.mirrored == ""


def one_mode() -> None:
    """N(.57, 1 / 6), of which the mirror image of the mean is 2.8 sds away."""
    pyro.sample("b", dist.Normal(ZERO + 0.57, (1.0 / 6.0) ** 0.5))


def _narrow() -> None:
    pyro.sample("b", dist.Normal(ZERO + 0.57, 0.08))


def _far() -> None:
    pyro.sample("b", dist.Normal(ZERO + 3.0, 0.05))


def test_nothing_is_said_where_there_is_one_mode_or_the_guide_holds_both() -> None:
    assert fitted(regressed, AutoNormal(regressed), max_steps=60).khat.mirrored == ""
    far = ngvi.khat(squared, _far, seed=0)
    assert far.mirrored == "" and not far.reliable
    narrow = ngvi.khat(one_mode, _narrow, seed=0)
    assert narrow.mirrored == "" and not narrow.ok
    both = fitted(squared, ngvi.AutoMixtureNormal(squared, 2))
    assert both.khat.mirrored == "" and both.verdict.ok
