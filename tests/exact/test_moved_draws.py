"""Scores of guides that compute z from noise and from parameters, against densities in closed form."""

import functools
from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import SVI
from pyro.infer.autoguide import AutoGaussian, AutoStructured
from torch import Tensor
from torch.distributions import biject_to, constraints

import pyro_ngvi as ngvi
from pyro_ngvi.fisher.products import SelfDivergence, from_ratios
from pyro_ngvi.fisher.scores import GuideScores
from tests.covering import covering


def model() -> None:
    a = pyro.sample("a", dist.Normal(0.0, 1.0))
    pyro.sample("b", dist.LogNormal(a, torch.ones(2)).to_event(1))


def with_simplex() -> None:
    """A site with more entries than freedom: the Jacobian has more rows than columns."""
    model()
    pyro.sample("p", dist.Dirichlet(torch.ones(3)))


def own(model: Any) -> Callable[[], None]:
    """One site drawn by itself, the other computed from it, from noise, and from a parameter."""

    def guide() -> None:
        loc = pyro.param("loc", torch.tensor(0.3))
        scale = pyro.param("scale", torch.tensor([0.7, 0.4]), constraint=constraints.positive)
        slope = pyro.param("slope", torch.tensor([0.5, -0.2]))
        a = pyro.sample("a", dist.Normal(loc, 0.8))
        base = dist.Normal(torch.zeros(2), 1.0).to_event(1)
        e = pyro.sample("e", base, infer={"is_auxiliary": True})
        u = slope * a + scale * e
        pyro.sample("b", dist.Delta(u.exp(), (-u - scale.log()).sum(-1), 1))  # pyright: ignore

    return guide


GUIDES: dict[str, tuple[Callable[..., Any], Any]] = {
    "structured": (AutoStructured, model),
    "structured, normal": (
        functools.partial(AutoStructured, conditionals="normal", dependencies="linear"),
        model,
    ),
    "structured, simplex": (AutoStructured, with_simplex),
    "gaussian": (functools.partial(AutoGaussian, backend="dense"), with_simplex),
    "function": (own, model),
}
SUPPORTS = {"b": constraints.positive, "p": constraints.simplex}


def unconstrained(sites: Any, names: list[str]) -> Tensor:
    values = [(SUPPORTS.get(n, constraints.real), sites[n]["value"]) for n in names]
    return torch.cat([biject_to(s).inv(v).reshape(-1) for s, v in values])


class Closed:
    """log q of a guide whose unconstrained values are m + A n, n standard normal."""

    def __init__(self, guide: Any, names: list[str]) -> None:
        self.guide, self.names = guide, names

    def _at(self, n: Tensor) -> Tensor:
        """Unconstrained values at the standard normal noise ``n``."""
        start = 0

        class Place(poutine.messenger.Messenger):
            def _pyro_sample(self, msg: Any) -> None:
                nonlocal start
                fn = msg["fn"]
                while isinstance(fn, dist.Independent):
                    fn = fn.base_dist
                if not isinstance(fn, dist.Delta):
                    size = torch.Size(fn.batch_shape + fn.event_shape)
                    e = n[start : start + size.numel()].reshape(size)
                    start += size.numel()
                    joint = isinstance(fn, dist.MultivariateNormal)
                    msg["value"] = fn.loc + (fn.scale_tril @ e if joint else fn.scale * e)
                    msg["done"] = True

        with torch.no_grad(), pyro.validation_enabled(False):
            sites = poutine.trace(Place()(self.guide)).get_trace().nodes
        return unconstrained(sites, self.names)

    def log_prob(self, u: Tensor) -> Tensor:
        """Density (...) of unconstrained values (..., K)."""
        zero = torch.zeros(u.shape[-1])
        m = self._at(zero)
        A = torch.stack([self._at(row) - m for row in torch.eye(len(zero))], 1)
        return dist.MultivariateNormal(m, A @ A.mT).log_prob(u)


def prepared(name: str) -> tuple[GuideScores, dict[str, Tensor], Closed]:
    kind, of = GUIDES[name]
    pyro.set_rng_seed(1)
    guide = kind(of)
    guide()
    scores = GuideScores(guide)
    leaves = scores.dependent()
    with torch.no_grad():
        for p in leaves.values():
            p += 0.2 * torch.randn_like(p)
    return scores, leaves, Closed(guide, ["a", "b", "p"] if of is with_simplex else ["a", "b"])


def draws(scores: GuideScores, closed: Closed, n: int, seed: int) -> Tensor:
    """Unconstrained values (n, K) of the draws that ``scores`` makes from this seed."""
    pyro.set_rng_seed(seed)
    held: Any = scores.held(n)
    held()
    z = held._z
    at = {name: slice(*k) for name, k in {"a": (0, 1), "b": (1, 3), "p": (3, 6)}.items()}
    order = scores._targets
    start, found = 0, {}
    for name in order:
        size = at[name].stop - at[name].start
        found[name] = z[:, start : start + size]
        start += size
    rows = [
        unconstrained({name: {"value": v[s]} for name, v in found.items()}, closed.names)
        for s in range(n)
    ]
    return torch.stack(rows)


@pytest.mark.parametrize(("name", "n"), covering(GUIDES, [1, 4], strength=1))
def test_scores_against_differences_of_the_density(name: str, n: int) -> None:
    scores, leaves, closed = prepared(name)
    u = draws(scores, closed, n, 7)
    pyro.set_rng_seed(7)
    got = scores.draw(n, list(leaves))
    h, slopes = 1e-5, []
    for p in leaves.values():
        flat = p.detach().view(-1)
        for i in range(len(flat)):
            start = flat[i].clone()
            flat[i] = start + h
            ahead = closed.log_prob(u)
            flat[i] = start - h
            slopes.append((ahead - closed.log_prob(u)) / (2 * h))
            flat[i] = start
    assert (got != 0).any(0).sum() > len(closed.names)
    torch.testing.assert_close(got, torch.stack(slopes, 1), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", GUIDES)
def test_density_of_held_draws_where_parameters_have_gone(name: str) -> None:
    """The noise that leads to z again is found, not only its first order."""
    scores, leaves, closed = prepared(name)
    u = draws(scores, closed, 6, 3)
    pyro.set_rng_seed(3)
    held = scores.held(6)
    before, wanted_before = held().detach(), closed.log_prob(u)
    with torch.no_grad():
        for p in leaves.values():
            p += 0.2 * torch.randn_like(p)
    wanted = closed.log_prob(u) - wanted_before
    assert wanted.abs().max() > 0.1
    torch.testing.assert_close(held().detach() - before, wanted, rtol=1e-8, atol=1e-8)


def test_a_plain_loop_where_vmap_cannot_run() -> None:
    scores, leaves, _ = prepared("structured")
    pyro.set_rng_seed(7)
    together = scores.draw(4, list(leaves))
    scores._failed.add("densities")
    pyro.set_rng_seed(7)
    torch.testing.assert_close(scores.draw(4, list(leaves)), together)


def test_divergence_is_that_of_the_sites_not_of_the_noise() -> None:
    """KL of two Gaussians, from 4,096 draws: within 4.5 standard errors."""
    scores, leaves, closed = prepared("structured")
    assert SelfDivergence(scores).product(list(leaves)) is None
    pyro.set_rng_seed(0)
    held = scores.held(4096)
    before, u = held().detach(), closed._at(torch.zeros(3))
    A = torch.stack([closed._at(row) - u for row in torch.eye(3)], 1)
    then = dist.MultivariateNormal(u, A @ A.mT)
    with torch.no_grad():
        for p in leaves.values():
            p += 0.05 * torch.randn_like(p)
    u = closed._at(torch.zeros(3))
    A = torch.stack([closed._at(row) - u for row in torch.eye(3)], 1)
    wanted = torch.distributions.kl_divergence(then, dist.MultivariateNormal(u, A @ A.mT))
    now = held().detach()
    ratio = now - before
    error = (ratio.expm1() - ratio).std() / 4096**0.5
    assert abs(from_ratios(now, before) - wanted) < 4.5 * error


def test_ifvb_finds_a_correlated_posterior() -> None:
    """y = u + v with little noise: KL below 0.05 nat, where the best diagonal Gaussian has 1.3."""

    def sum_of_two() -> None:
        u = pyro.sample("u", dist.Normal(0.0, 1.0))
        v = pyro.sample("v", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Normal(u + v, 0.2), obs=torch.tensor(1.0))

    pyro.set_rng_seed(0)
    pyro.clear_param_store()
    guide = AutoStructured(sum_of_two)
    optim = ngvi.IFVB(guide)
    svi = SVI(sum_of_two, guide, optim, ngvi.BatchedELBO(8))
    for _ in range(40):
        svi.step()
    closed = Closed(guide, ["u", "v"])
    m = closed._at(torch.zeros(2))
    A = torch.stack([closed._at(row) - m for row in torch.eye(2)], 1)
    precision = torch.eye(2) + torch.ones(2, 2) / 0.04
    exact = dist.MultivariateNormal(
        torch.linalg.solve(precision, torch.ones(2) / 0.04), precision_matrix=precision
    )
    kl = torch.distributions.kl_divergence(dist.MultivariateNormal(m, A @ A.mT), exact)
    assert kl < 0.05


def more_noise() -> None:
    scale = pyro.param("scale", torch.tensor(0.5), constraint=constraints.positive)
    e = pyro.sample("e", dist.Normal(torch.zeros(2), 1.0).to_event(1), infer={"is_auxiliary": True})
    pyro.sample("a", dist.Delta(scale * e.sum(-1), -scale.log()))  # pyright: ignore


def no_density() -> None:
    scale = pyro.param("scale", torch.tensor(0.5), constraint=constraints.positive)
    e = pyro.sample("e", dist.Normal(0.0, 1.0), infer={"is_auxiliary": True})
    pyro.sample("a", dist.Delta(scale * e))  # pyright: ignore


def no_direction() -> None:
    scale = pyro.param("scale", torch.tensor(0.5), constraint=constraints.positive)
    e = pyro.sample("e", dist.Normal(torch.zeros(2), 1.0).to_event(1), infer={"is_auxiliary": True})
    pyro.sample("a", dist.Delta(scale * (e.sum(-1, keepdim=True) + 0.0 * e), torch.zeros(()), 1))  # pyright: ignore


@pytest.mark.parametrize(
    "guide, why",
    [
        (more_noise, "from 2 random numbers for its 1 entries"),
        (no_density, r"with log_density=0, where -log\|det\| of its Jacobian is 0.69"),
        (no_direction, "from noise that does not move it in every direction"),
        (
            AutoStructured(
                model, conditionals={"a": "normal", "b": "delta"}, dependencies="linear"
            ),
            "that lies on a surface which moves with them",
        ),
    ],
)
def test_guides_without_such_a_density(guide: Any, why: str) -> None:
    guide()
    if isinstance(guide, AutoStructured):
        with torch.no_grad():
            guide.deps.b.a.weight += 0.3  # pyright: ignore
    with pytest.raises(ValueError, match=why) as error:
        GuideScores(guide).dependent()
    assert len(str(error.value)) <= 240
