"""What AutoSites refuses, models and data, and in which words."""

from collections.abc import Callable
from typing import Any, cast

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.nn import PyroModule
from torch import Tensor

import pyro_ngvi as ngvi
from tests.exact.site_cases import N, normal_weights
from tests.robustness.site_error_cases import D, X, logistic, made, plain, y_real

# --- models outside of the class


def likelihood(f: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], None]:
    """y ~ Normal(f(w), 1) for w (D,)."""

    def model(X: Tensor, y: Tensor) -> None:
        w = normal_weights(D)
        with pyro.plate("data", len(X)):
            pyro.sample("y", dist.Normal(f(w), 1.0), obs=y)

    return model


def prior(loc: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], None]:
    """v ~ Normal(loc(w), 1)."""

    def model(X: Tensor, y: Tensor) -> None:
        w = normal_weights(D)
        v: Any = pyro.sample("v", dist.Normal(loc(w), 1.0).to_event(1))
        with pyro.plate("data", len(X)):
            pyro.sample("y", dist.Normal(X @ v, 1.0), obs=y)

    return model


def latent_scale(X: Tensor, y: Tensor) -> None:
    s: Any = pyro.sample("s", dist.HalfNormal(1.0))
    w = normal_weights(D)
    with pyro.plate("data", len(X)):
        pyro.sample("y", dist.Normal(X @ w, s), obs=y)


def bilinear(X: Tensor, y: Tensor) -> None:
    w, v = normal_weights(D), normal_weights(D, "v")
    with pyro.plate("data", len(X)):
        pyro.sample("y", dist.Normal(X @ (w * v), 1.0), obs=y)


def scaled_by_another(X: Tensor, y: Tensor) -> None:
    w = normal_weights(D)
    v: Any = pyro.sample("v", dist.Normal(torch.zeros(D), w.exp()).to_event(1))
    with pyro.plate("data", len(X)):
        pyro.sample("y", dist.Normal(X @ v, 1.0), obs=y)


def network(X: Tensor, y: Tensor) -> None:
    hidden: Any = pyro.sample("hidden", dist.Normal(torch.zeros(D, 5), 1.0).to_event(2))
    w = normal_weights(5)
    with pyro.plate("data", len(X)):
        pyro.sample("y", dist.Normal((X @ hidden).tanh() @ w, 1.0), obs=y)


def branch(X: Tensor, y: Tensor) -> None:
    w: Any = pyro.sample("w", dist.Normal(0.0, 1.0))
    f = 2.0 * w if w > 0 else w * 1.0
    with pyro.plate("data", len(X)):
        pyro.sample("y", dist.Normal(f, 1.0), obs=y)


def loop(X: Tensor, y: Tensor) -> None:
    w: Any = pyro.sample("w", dist.Normal(0.0, 1.0))
    f = w
    for _ in range(int(w.abs() * 10.0)):
        f = f + 1.0
    with pyro.plate("data", len(X)):
        pyro.sample("y", dist.Normal(f, 1.0), obs=y)


def with_factor(soft: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], None]:
    def model(X: Tensor, y: Tensor) -> None:
        w = normal_weights(D)
        pyro.factor("soft", soft(w))
        with pyro.plate("data", len(X)):
            pyro.sample("y", dist.Normal(X @ w, 1.0), obs=y)

    return model


def weighted_prior(handler: Any) -> Callable[[Tensor, Tensor], None]:
    def model(X: Tensor, y: Tensor) -> None:
        with handler():
            w = normal_weights(D)
        with pyro.plate("data", len(X)):
            pyro.sample("y", dist.Normal(X @ w, 1.0), obs=y)

    return model


def local_latent(X: Tensor, y: Tensor) -> None:
    with pyro.plate("data", len(X), subsample_size=10) as i:
        a: Any = pyro.sample("a", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Normal(a, 1.0), obs=y[i])


def scale_far_from_the_prior(X: Tensor, y: Tensor) -> None:
    w = normal_weights(D)
    with pyro.plate("data", len(X)):
        pyro.sample("y", dist.Normal(X @ w, 1.0 + (w.abs().sum() - 200.0).relu()), obs=y)


def no_latent(X: Tensor, y: Tensor) -> None:
    with pyro.plate("data", len(X)):
        pyro.sample("y", dist.Normal(X[:, 0], 1.0), obs=y)


def unseen(X: Tensor, y: Tensor) -> None:
    normal_weights(D)
    no_latent(X, y)


def too_wide(X: Tensor, y: Tensor) -> None:
    W: Any = pyro.sample("W", dist.Normal(torch.zeros(D, 70), 1.0).to_event(2))
    with pyro.plate("data", len(X)):
        pyro.sample("y", dist.Categorical(logits=X @ W), obs=y.abs().long())


class Buffered(PyroModule):
    """Writes its predictor into a buffer in parts, or into a copy of it."""

    def __init__(self, copied: bool) -> None:
        super().__init__()
        self.copied = copied
        self.register_buffer("f", torch.zeros(N, dtype=torch.float64))

    def forward(self, X: Tensor, y: Tensor) -> None:
        w = normal_weights(D)
        f: Any = self.f
        f = f.clone() if self.copied else f
        f[: N // 2] = X[: N // 2] @ w
        f[N // 2 :] = X[N // 2 :] @ w
        with pyro.plate("data", len(X)):
            pyro.sample("y", dist.Normal(f, 1.0), obs=y)


OUTSIDE = {
    "latent scale": (latent_scale, r"latent site 's' is HalfNormal.*AutoGuideList\(model\)"),
    "bilinear": (bilinear, r"not depend on the latent block .* linear.*result that is not linear"),
    "bilinear prior": (scaled_by_another, "first result that is not linear"),
    "square of the prior": (prior(lambda w: w.square()), "first result that is not linear"),
    "hinge in the prior": (prior(torch.relu), "first result that is not linear"),
    "modulus in the prior": (prior(torch.abs), "first result that is not linear"),
    "scale far from the prior": (scale_far_from_the_prior, "first result that is not linear"),
    "network": (network, "through at most 64 linear combinations"),
    "sum over the data": (
        likelihood(lambda w: (X() @ w).tanh() @ torch.ones(N, N)),
        "not one by one",
    ),
    "cumulative": (likelihood(lambda w: (X() @ w).tanh().cumsum(0)), "not one by one"),
    "normalised": (likelihood(lambda w: (X() @ w).softmax(0)), "not one by one"),
    "branch": (branch, "not run the same operations at every|not linear"),
    "loop": (loop, "does not run the same operations at every value"),
    "limit in the prior": (prior(lambda w: w.clamp(max=2.5)), "result that is not linear"),
    "masked prior": (
        weighted_prior(lambda: poutine.mask(mask=cast(Any, torch.tensor(False)))),
        "scale or a mask",
    ),
    "scaled prior": (weighted_prior(lambda: poutine.scale(scale=0.5)), "scale or a mask"),
    "local latent site": (local_latent, "prior of 'a' stands under a scale or a mask"),
    "no latent site": (no_latent, "no latent site of its own"),
    "no data that depend": (unseen, "no observed site depends on the latent block"),
    "overwritten": (Buffered(False), r"keeps the tensor .* 'y'.*new tensor: .*self\.f\.clone\(\)"),
    "too many entries": (too_wide, "at most 64 linear combinations"),
}


FACTORS: dict[str, Callable[[Tensor], Tensor]] = {
    "power": lambda w: -w.pow(4).sum(),
    "differences": lambda w: -w.diff().square().sum(),
    "sum": lambda w: -(w.sum() - 1.0).square(),
    "order": lambda w: -torch.relu(w[0] - w[1]),
    "box": lambda w: torch.where(w.abs() < 3.0, 0.0, -100.0).sum(),
}
OUTSIDE |= {
    f"factor, {name}": (with_factor(soft), "factor 'soft' depends on the latent block")
    for name, soft in FACTORS.items()
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_model_outside_of_the_class(name: str) -> None:
    """At the first call, and at the next again."""
    model, message = OUTSIDE[name]
    guide, svi = made(model)
    for _ in range(2):
        with pytest.raises(ValueError, match=message):
            svi.step(X(), y_real())
    assert guide.plan is None


def test_a_copy_of_a_buffer_is_fine() -> None:
    losses = []
    for model in (Buffered(True), likelihood(lambda w: X() @ w)):
        _, svi = made(model)
        losses.append([svi.step(X(), y_real()) for _ in range(2)])
    assert losses[0] == pytest.approx(losses[1], abs=1e-9)


def test_a_factor_that_does_not_see_the_block() -> None:
    losses = []
    for constant in (0.0, 2.0):
        _, svi = made(with_factor(lambda w, c=constant: torch.full((3,), c) + 0.0 * len(w)))
        losses.append(svi.step(X(), y_real()))
    assert losses[0] - losses[1] == pytest.approx(6.0, abs=1e-9)


def test_an_observed_site_whose_design_is_zero() -> None:
    def model(X: Tensor, y: Tensor) -> None:
        w = normal_weights(D)
        pyro.sample("zero", dist.Normal((0.0 * w).sum(), 1.0), obs=torch.tensor(2.0))
        with pyro.plate("data", len(X)):
            pyro.sample("y", dist.Normal(X @ w, 0.5), obs=y)

    losses = []
    for each in (model, plain):
        _, svi = made(each)
        losses.append([svi.step(X(), y_real()) for _ in range(2)][-1])
    extra = -dist.Normal(0.0, 1.0).log_prob(torch.tensor(2.0))
    assert losses[0] - losses[1] == pytest.approx(float(extra), abs=1e-6)


def soft_limit(y: Tensor, a: Tensor | None = None) -> None:
    """An observed site, and an sd, that see the block only above a point."""
    a = cast(Tensor, pyro.sample("a", dist.Normal(0.0, 1.0), obs=a))
    pyro.sample("limit", dist.Normal(torch.relu(a - 1.0), 0.3), obs=torch.tensor(0.0))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(a, 1.0 + torch.relu(a - 6.0)), obs=y)


def test_what_is_seen_beyond_a_point_only() -> None:
    """Against a sum over a grid; the best Gaussian is 0.03 nats from log Z here."""
    y = torch.full((5,), 4.0)
    guide, svi = made(soft_limit)
    for _ in range(20):
        svi.step(y)
    grid = torch.linspace(-8.0, 12.0, 801)
    terms = torch.stack(
        [poutine.trace(soft_limit).get_trace(y, a).log_prob_sum() for a in grid]  # type: ignore
    )
    log_z = terms.logsumexp(0) + (grid[1] - grid[0]).log()
    mean = (terms.softmax(0) * grid).sum()
    assert log_z - 0.05 < -svi.evaluate_loss(y) < log_z + 1e-3
    assert guide.median()["a"] == pytest.approx(float(mean), abs=0.03)


def test_scale_around_the_step() -> None:
    _, svi = made(plain)
    with poutine.scale(scale=0.1), pytest.raises(ValueError, match="scale or a mask"):
        svi.step(X(), y_real())


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        ("g", "'g' is no site"),
        ("w", "'w' is no site whose value is linear"),
        ("y", "'y' is no site"),
    ],
)
def test_declared_latent_that_is_not_there(declared: str, message: str) -> None:
    _, svi = made(logistic, latent=declared)
    with pytest.raises(ValueError, match=message):
        svi.step(X(), (y_real() > 0).double())


def test_declared_latent_that_is() -> None:
    guide, svi = made(logistic, latent="f")
    svi.step(X(), (y_real() > 0).double())
    assert str(guide.plan.groups[0].places[0]) == "the site 'f'"


# --- what integrate refuses, with the reason


def given_t(handler: Any = None, size: int | None = None, **kwargs: Any) -> Callable[..., None]:
    """m ~ N(0, t), y ~ N(m, 2) in a plate of ``size``, with ``handler`` around the prior of m."""

    def model(y: Tensor) -> None:
        t: Any = pyro.sample("t", dist.HalfNormal(y.new_tensor(3.0)))
        with handler() if handler else poutine.scale(scale=1.0):
            m: Any = pyro.sample("m", dist.Normal(0.0, t))
        with pyro.plate("data", size or len(y), subsample_size=len(y)):
            pyro.sample("y", dist.Normal(m, 2.0), obs=y, **kwargs)

    return model


def no_gaussian(y: Tensor) -> None:
    t: Any = pyro.sample("t", dist.HalfNormal(y.new_tensor(3.0)))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(0.0, t), obs=y)


def event(y: Tensor) -> None:
    t: Any = pyro.sample("t", dist.HalfNormal(y.new_tensor(3.0)))
    with pyro.plate("data", len(y)):
        m: Any = pyro.sample("m", dist.Normal(0.0, t))
        pyro.sample("y", dist.Normal(m[:, None], 2.0).to_event(1), obs=y.expand(3, -1).mT)


def moving_support(y: Tensor) -> None:
    a: Any = pyro.sample("a", dist.HalfNormal(y.new_tensor(3.0)))
    t: Any = pyro.sample("t", dist.Uniform(y.new_tensor(0.0), a))
    m: Any = pyro.sample("m", dist.Normal(0.0, t))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(m, 2.0), obs=y)


NOT_INTEGRATED = {
    "obs_mask": (
        given_t(obs_mask=torch.arange(12) < 8),
        "prior of 'y_unobserved' stands under a scale or a mask",
    ),
    "event": (event, "'y' has data of shape .*what is one datum"),
    "scale": (given_t(lambda: poutine.scale(scale=2.0)), "prior of 'm' stands under a scale"),
    "no Gaussian": (no_gaussian, "no latent site of its own"),
    "minibatch": (given_t(size=100), "does not say which data"),
    "support": (moving_support, "support of the hyperparameter 't' depends on other latent"),
}


@pytest.mark.parametrize("name", NOT_INTEGRATED)
def test_integrate_says_why(name: str) -> None:
    model, message = NOT_INTEGRATED[name]
    with pytest.raises(ValueError, match=message) as caught:
        ngvi.integrate(model, torch.linspace(-1.0, 2.0, 12, dtype=torch.float64))
    assert str(caught.value).startswith("integrate")
    assert len(str(caught.value)) <= 240
