"""Scores of guides against finite differences of log q at the same draw."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.contrib.easyguide import EasyGuide
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import (
    AutoDelta,
    AutoDiagonalNormal,
    AutoGuideList,
    AutoIAFNormal,
    AutoLowRankMultivariateNormal,
    AutoMultivariateNormal,
    AutoNormal,
)
from pyro.nn import PyroModule
from pyro.optim import PyroOptim
from torch import Tensor
from torch.distributions import constraints

from pyro_ngvi.fisher.scores import GuideScores
from pyro_ngvi.fisher.watch import remember_arguments


def model() -> None:
    a = pyro.sample("a", dist.Normal(0.0, 1.0))
    pyro.sample("b", dist.LogNormal(a, torch.ones(2)).to_event(1))


def parts(model: Callable[..., Any]) -> AutoGuideList:
    guide = AutoGuideList(model)
    guide.append(AutoMultivariateNormal(poutine.block(model, expose=["a"])))
    guide.append(AutoNormal(poutine.block(model, expose=["b"])))
    return guide


class Easy(EasyGuide):
    def guide(self) -> None:
        loc = pyro.param("loc", torch.tensor([0.1, 0.2, 0.3]))
        tril = pyro.param("tril", 0.5 * torch.eye(3), constraint=constraints.lower_cholesky)
        self.group(match="a|b").sample("ab", dist.MultivariateNormal(loc, scale_tril=tril))


def by_hand(model: Any) -> Callable[..., Any]:
    def guide() -> None:
        loc = pyro.param("loc", torch.tensor(0.3))
        scale = pyro.param("scale", torch.tensor(0.7), constraint=constraints.positive)
        low = pyro.param("low", torch.tensor([0.5, 0.6]), constraint=constraints.unit_interval)
        a = pyro.sample("a", dist.Normal(loc, scale))
        pyro.sample("b", dist.LogNormal(a * low, scale).to_event(1))

    return guide


def mixture(model: Any) -> Callable[..., Any]:
    def guide() -> None:
        locs = pyro.param("locs", torch.tensor([[-1.0, 0.5], [1.0, 0.0]]))
        scales = pyro.param("scales", torch.ones(2, 2), constraint=constraints.positive)
        logits = pyro.param("logits", torch.tensor([0.2, -0.4]))
        pyro.sample("z", dist.MixtureOfDiagNormals(locs, scales, logits))

    return guide


def same_family(model: Any) -> Callable[..., Any]:
    def guide() -> None:
        locs = pyro.param("locs", torch.tensor([-1.0, 0.5]))
        probs = pyro.param("probs", torch.tensor([0.3, 0.7]), constraint=constraints.simplex)
        q = dist.MixtureSameFamily(dist.Categorical(probs), dist.Normal(locs, 1.0))
        pyro.sample("z", q)

    return guide


GUIDES: dict[str, Callable[..., Any]] = {
    "AutoNormal": AutoNormal,
    "AutoDiagonalNormal": AutoDiagonalNormal,
    "AutoMultivariateNormal": AutoMultivariateNormal,
    "AutoLowRank": AutoLowRankMultivariateNormal,
    "AutoIAFNormal": lambda m: AutoIAFNormal(m, hidden_dim=[4]),
    "AutoGuideList": parts,
    "EasyGuide": lambda m: Easy(m),
    "function": by_hand,
    "mixture": mixture,
    "MixtureSameFamily": same_family,
}


def moved_from_the_start(guide: Any) -> GuideScores:
    """Scores of a guide with parameters that are all different."""
    guide()
    scores = GuideScores(guide)
    with torch.no_grad():
        for p in scores.leaves().values():
            p += 0.2 * torch.randn_like(p)
    return scores


def log_q(guide: Any, trace: Any) -> Tensor:
    for site in trace.nodes.values():
        if site["type"] == "sample":  # a new object: flows remember what they made an old one of
            site["value"] = site["value"].clone()
    with torch.no_grad(), poutine.block(), pyro.validation_enabled(False):
        replayed = poutine.trace(poutine.replay(guide, trace=trace)).get_trace()
        return torch.as_tensor(replayed.log_prob_sum())


@pytest.mark.parametrize("name", GUIDES)
def test_against_finite_differences(name: str) -> None:
    guide = GUIDES[name](model)
    scores = moved_from_the_start(guide)
    leaves = scores.dependent()
    pyro.set_rng_seed(7)
    got = scores.draw(1, list(leaves))[0]
    pyro.set_rng_seed(7)
    with torch.no_grad():
        trace = poutine.trace(guide).get_trace()  # the same random numbers, hence the same draw
    h, slopes = 1e-6, []
    for p in leaves.values():
        flat = p.detach().view(-1)
        for i in range(len(flat)):
            start = flat[i].clone()
            flat[i] = start + h
            ahead = log_q(guide, trace)
            flat[i] = start - h
            slopes.append((ahead - log_q(guide, trace)) / (2 * h))
            flat[i] = start
    wanted = torch.stack(slopes)
    assert (got != 0).any()
    torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", GUIDES)
def test_scores_have_mean_zero(name: str) -> None:
    """1,000 scores by blocks of 100 and 100 single ones: each mean within 4.5 standard errors."""
    scores = moved_from_the_start(GUIDES[name](model))
    names = list(scores.dependent())
    many = torch.cat([scores.draw(100, names) for _ in range(10)])
    few = torch.cat([scores.draw(1, names) for _ in range(100)])
    for x in (many, few):
        error = x.std(0) / len(x) ** 0.5
        assert (x.mean(0).abs() <= 4.5 * error + 1e-12).all()
    # and the same second moments
    one, other = many.square(), few.square()
    error = (one.var(0) / len(one) + other.var(0) / len(other)).sqrt()
    assert ((one.mean(0) - other.mean(0)).abs() <= 4.5 * error + 1e-12).all()


@pytest.mark.parametrize("name", ["AutoDiagonalNormal", "AutoMultivariateNormal", "AutoLowRank"])
def test_rows_are_the_scores_of_their_draws(name: str) -> None:
    guide = GUIDES[name](model)
    scores = moved_from_the_start(guide)
    leaves = scores.dependent()
    pyro.set_rng_seed(3)
    got = scores.draw(5, list(leaves))
    pyro.set_rng_seed(3)
    q = guide.get_posterior()
    for row, z in zip(got, q.sample(torch.Size((5,))), strict=True):
        grads = torch.autograd.grad(q.log_prob(z), list(leaves.values()), retain_graph=True)
        wanted = torch.cat([g.reshape(-1) for g in grads])
        torch.testing.assert_close(row, wanted, rtol=1e-10, atol=1e-12)


class Frozen(dist.Normal):
    """A normal that always draws 1."""

    def rsample(self, sample_shape: Any = torch.Size()) -> Tensor:  # noqa: B008
        shape = self._extended_shape(sample_shape)
        return 1.0 + 0.0 * torch.randn(shape)  # random, so that vmap takes it for one

    def expand(self, batch_shape: Any, _instance: Any = None) -> Any:
        return Frozen(self.loc.expand(batch_shape), self.scale.expand(batch_shape))


@pytest.mark.parametrize("vmaps", [True, False])
def test_every_way_gives_the_same_scores(vmaps: bool) -> None:
    """One draw, five under vmap, five in a loop (a guide that looks at its draw)."""

    def guide() -> None:
        loc = pyro.param("loc", torch.tensor(0.3))
        scale = pyro.param("scale", torch.tensor(0.7), constraint=constraints.positive)
        z = pyro.sample("z", Frozen(loc, scale))
        if not vmaps and z > 0.0:  # data dependent: refused by vmap
            pyro.sample("w", Frozen(2.0 * loc, scale))

    scores = GuideScores(guide)
    one, five = scores.draw(1), scores.draw(5)
    assert ("draws" not in scores._failed) is vmaps
    assert five.shape == (5, 2)
    torch.testing.assert_close(five, one.expand(5, 2), rtol=1e-12, atol=0)
    u, v = (1.0 - 0.3) / 0.7, (1.0 - 0.6) / 0.7
    wanted = torch.tensor([[u / 0.7, u * u - 1.0]])  # in log(scale)
    if not vmaps:
        wanted = wanted + torch.tensor([[2.0 * v / 0.7, v * v - 1.0]])
    torch.testing.assert_close(one, wanted)


def test_a_parameter_that_only_some_draws_use() -> None:
    def guide() -> None:
        z = pyro.sample("z", dist.Normal(pyro.param("loc", torch.tensor(0.0)), 1.0))
        name = "up" if z > 0.0 else "down"
        for either in ("up", "down"):
            pyro.param(either, torch.tensor(0.0))
        pyro.sample("w", dist.Normal(pyro.param(name), 1.0))

    rows = GuideScores(guide).draw(20, ["up", "down"])
    assert ((rows != 0).sum(1) == 1).all() and (rows != 0).any(0).all()


def test_fisher_matrix_of_a_mean_field_guide() -> None:
    """In loc and the softplus inverse s of the scale: diag(1, 2 (d scale / ds)^2) / scale^2."""
    guide = AutoNormal(model, init_scale=0.5)
    scores = moved_from_the_start(guide)
    rows = torch.cat([scores.draw(200) for _ in range(20)])
    leaves = scores.leaves()
    wanted = []
    for name, p in leaves.items():
        raw = p if ".scales." in name else leaves[name.replace(".locs.", ".scales.")]
        scale = torch.nn.functional.softplus(raw)
        top = 2.0 * torch.sigmoid(raw).square() if ".scales." in name else torch.ones_like(raw)
        wanted.append((top / scale.square()).reshape(-1))
    wanted = torch.diag(torch.cat(wanted)).detach()
    products = rows[:, :, None] * rows[:, None, :]
    error = products.std(0) / len(rows) ** 0.5
    assert ((products.mean(0) - wanted).abs() <= 4.5 * error).all()


def subsampled(size: int | None, draws: int = 8) -> Tensor:
    """E[phi phi'] of a guide with a plate of 6, and its standard error."""
    pyro.clear_param_store()

    def model() -> None:
        pyro.sample("a", dist.Normal(0.0, 1.0))
        with pyro.plate("data", 6, subsample_size=size):
            pyro.sample("b", dist.Normal(0.0, 1.0))

    def plates() -> Any:
        return pyro.plate("data", 6, subsample_size=size, dim=-1)

    guide = AutoNormal(model, create_plates=plates)
    guide()
    scores = GuideScores(guide)
    names = sorted(scores.dependent())
    rows = torch.cat([scores.draw(draws, names) for _ in range(300 if size else 100)])
    products = rows[:, :, None] * rows[:, None, :]
    # the draws of a call share a minibatch: the error of the mean of their means
    means = products.unflatten(0, (-1, draws)).mean(1)
    return torch.stack([means.mean(0), means.std(0) / len(means) ** 0.5])


def test_subsampled_plate_has_the_fisher_matrix_of_all() -> None:
    (full, full_error), (part, part_error) = subsampled(None), subsampled(2)
    error = (full_error.square() + part_error.square()).sqrt()
    assert ((full - part).abs() <= 4.5 * error).all()
    # a third of it, as without the factor, would have been seen in the local locations
    assert ((2.0 / 3.0) * full.diagonal() > 4.5 * error.diagonal())[1:7].all()


def test_masks_count_and_scales_do_not() -> None:
    seen: Any = torch.tensor([True, False, True])

    def guide() -> None:
        loc = pyro.param("loc", torch.zeros(3))
        with pyro.plate("data", 3), poutine.mask(mask=seen):
            pyro.sample("z", dist.Normal(loc, 1.0))

    for program in (guide, poutine.scale(guide, scale=7.0)):
        pyro.set_rng_seed(5)
        rows = GuideScores(program).draw(200)
        assert (rows[:, 1] == 0).all()
        # the mean of 400 squares of standard normals has standard error 0.07
        assert rows[:, [0, 2]].square().mean() == pytest.approx(1.0, abs=0.28)


def test_draw_touches_nothing() -> None:
    guide = AutoNormal(model)
    svi = SVI(model, guide, PyroOptim(torch.optim.Adam, {"lr": 0.01}), Trace_ELBO())
    svi.step()
    scores = GuideScores(guide)
    for p in scores.leaves().values():
        p.grad = torch.full_like(p, 3.0)
    store = {k: v.clone() for k, v in pyro.get_param_store().items()}
    with poutine.trace() as recorder:
        for n in (1, 5):
            scores.draw(n)
        scores.dependent()
    assert not recorder.trace.nodes
    assert all((p.grad == 3.0).all() for p in scores.leaves().values() if p.grad is not None)
    assert all(p.grad is not None for p in scores.leaves().values())
    after = dict(pyro.get_param_store().items())
    assert after.keys() == store.keys()
    assert all(torch.equal(after[k], v) for k, v in store.items())


def model_of_data(x: Tensor) -> None:
    pyro.sample("z", dist.Normal(x.sum(), 1.0))


def test_arguments_of_the_last_call() -> None:
    class Amortised(PyroModule):
        def forward(self, x: Tensor, scale: float = 1.0) -> None:
            loc = pyro.param("loc", torch.tensor(0.0))
            pyro.sample("z", dist.Normal(x.sum() * loc, scale))

    guide = Amortised()
    scores = GuideScores(guide)
    for x, scale in ((1.0, 1.0), (10.0, 1.0), (10.0, 5.0)):
        guide(torch.tensor([x]), scale=scale)
        size = scores.draw(200).square().mean()
        # of 200 squares of normals: standard error 10%
        assert float(size) == pytest.approx((x / scale) ** 2, rel=0.45)


def test_copies_carry_no_arguments() -> None:
    guide = AutoNormal(model_of_data)
    scores = GuideScores(guide)
    guide(torch.arange(3.0))
    for other in (copy.deepcopy(guide), pickle.loads(pickle.dumps(guide))):
        (hook,) = other._forward_pre_hooks.values()
        (after,) = other._forward_hooks.values()
        assert hook.__self__ is after.__self__ is other.ngvi_watch
        assert other.ngvi_watch.last_call is None and scores._watch.last_call is not None
        other(torch.arange(4.0))
        assert len(scores._watch.last_call[0][0]) == 3


def test_remembered_arguments() -> None:
    @remember_arguments
    def guide(x: Tensor, power: int = 1) -> None:
        loc = pyro.param("loc", torch.tensor(0.0))
        pyro.sample("z", dist.Normal(x.sum() ** power * loc, 1.0))

    scores = GuideScores(guide)
    guide(torch.tensor(1.0))
    small = scores.draw(100).square().mean()
    guide(torch.tensor(10.0), power=2)
    assert scores.draw(100).square().mean() > 100.0 * small
    assert guide.__name__ == "guide"


def test_point_estimates_have_no_scores_and_stand_aside() -> None:
    guide = AutoDelta(model)
    guide()
    assert GuideScores(guide).dependent() == {}
    both = AutoGuideList(model)
    both.append(AutoDelta(poutine.block(model, expose=["a"])))
    both.append(AutoNormal(poutine.block(model, expose=["b"])))
    both()
    found = GuideScores(both).dependent()
    assert len(found) == 2 and all(".b" in name for name in found)


def test_a_tied_parameter_is_found_once() -> None:
    """AutoIAFNormal holds its first weight under a second name."""
    guide = AutoIAFNormal(model, hidden_dim=[4])
    guide()
    leaves = list(GuideScores(guide).leaves().values())
    assert len({id(p) for p in leaves}) == len(leaves) == 4
