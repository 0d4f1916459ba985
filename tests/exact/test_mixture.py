"""Mixtures: the bound and its gradients by quadrature, the Fisher matrix, one component, exact fits."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO
from torch import Tensor
from torch.func import jacrev

import pyro_ngvi as ngvi
from pyro_ngvi.families import FullRankNormal, MeanFieldNormal, MixtureNormal
from pyro_ngvi.families.base import Tensors
from pyro_ngvi.families.mixture import LEAST

COMPONENTS: dict[str, Any] = {"full": FullRankNormal, "diagonal": MeanFieldNormal}
every_kind = pytest.mark.parametrize("kind", COMPONENTS)


def member(kind: str, K: int = 3, d: int = 2, seed: int = 0) -> tuple[MixtureNormal, Tensors]:
    family = MixtureNormal(COMPONENTS[kind](), K)
    torch.manual_seed(seed)
    params = family.init(torch.randn(d), 1.5)
    scales = "scale_tril" if kind == "full" else "log_scale"
    noise = 0.3 * torch.randn_like(params[scales])
    params[scales] = params[scales] + (noise.tril() if kind == "full" else noise)
    params["logits"] = torch.randn(K).log_softmax(-1)
    return family, params


def nodes(n: int, d: int) -> tuple[Tensor, Tensor]:
    """Gauss-Hermite nodes (n^d, d) and weights of N(0, I)."""
    x, w = map(torch.as_tensor, np.polynomial.hermite_e.hermegauss(n))
    grids = torch.cartesian_prod(*[x] * d).reshape(-1, d)
    weights = torch.cartesian_prod(*[w / w.sum()] * d).reshape(-1, d).prod(-1)
    return grids, weights


def log_p(z: Tensor) -> Tensor:
    """Not Gaussian, and smooth."""
    return -0.25 * z.square().sum(-1) + (z[..., 0] + 0.3).sin() + 0.2 * z.prod(-1).cos()


def at_nodes(family: MixtureNormal, params: Tensors, x: Tensor) -> Tensor:
    """Points (K, n, d), differentiable in the parameters."""
    own = [{n: v[k] for n, v in family.own(params).items()} for k in range(family.num_components)]
    return torch.stack([family.component.transport(p, x)[0] for p in own])


@every_kind
@pytest.mark.parametrize("d", [1, 2])
def test_gradients_are_those_of_the_bound(kind: str, d: int) -> None:
    """With log q at detached parameters, as a step has it, against the whole bound by quadrature."""
    family, params = member(kind, d=d)
    params["loc"] = 0.5 * params["loc"]  # log q is smooth enough for the quadrature
    x, w = nodes(150, d)

    def loss(p: Tensors, of_q: Tensors) -> Tensor:
        z = at_nodes(family, p, x)
        return (family.probs(p).unsqueeze(-1) * w * (family.log_prob(of_q, z) - log_p(z))).sum()

    whole: Any = jacrev(lambda p: loss(p, p))(params)
    ours: Any = jacrev(lambda p: loss(p, params))(params)
    for name, wanted in whole.items():
        torch.testing.assert_close(ours[name], wanted, rtol=1e-6, atol=1e-6)

    # the weights cancel, and the weights' own gradient is what the family says
    R = [(w * (log_p(z) - family.log_prob(params, z))).sum() for z in at_nodes(family, params, x)]
    u = family.natural_gradient(params, family.pull(params, whole))
    pi = family.probs(params)
    torch.testing.assert_close(
        u["logits"], pi @ torch.stack(R) - torch.stack(R), rtol=1e-5, atol=1e-6
    )


@every_kind
def test_gradients_of_draws_are_those_of_the_bound_for_any_share_of_the_path(kind: str) -> None:
    """The mean of 40 gradients of 500 draws of each component, within 5.5 of its standard errors."""

    def model() -> None:
        prior: Any = dist.Normal(torch.zeros(2), 1.0).to_event(1)
        z = pyro.sample("z", prior)
        pyro.factor("target", log_p(z) - prior.log_prob(z))

    family, params = member(kind)
    params["loc"] = 0.5 * params["loc"]
    x, w = nodes(100, 2)

    def bound(p: Tensors) -> Tensor:
        z = at_nodes(family, p, x)
        return (family.probs(p).unsqueeze(-1) * w * (family.log_prob(p, z) - log_p(z))).sum()

    exact: Any = jacrev(bound)(params)
    guide = ngvi.AutoMixtureNormal(model, 3, kind, init=None)
    guide()
    torch.manual_seed(3)
    loss, found = ngvi.BatchedELBO(500), []
    own = guide.natural_params()
    with torch.no_grad():
        for name, p in own.items():
            p.copy_(params[name])
    for _ in range(40):
        guide.path_share = torch.tensor([0.2, 1.0, 0.6])
        loss.loss_and_grads(model, guide)
        found.append({name: p.grad for name, p in own.items()})
        for p in own.values():
            p.grad = None
        guide.take_curvature()
    for name, wanted in exact.items():
        sample = torch.stack([g[name] for g in found])
        error = sample.std(0) / len(sample) ** 0.5
        wanted = wanted.tril() if name == "scale_tril" else wanted
        assert ((sample.mean(0) - wanted).abs() <= 5.5 * error + 1e-9).all(), name


@every_kind
def test_the_fisher_matrix_is_that_of_component_and_value(kind: str) -> None:
    family, params = member(kind)
    x, w = nodes(12, 2)
    lower = torch.ones(2, 2).tril().bool()

    def joint(p: Tensors, z: Tensor) -> Tensor:
        return (p["logits"].log_softmax(-1) + family.component_log_prob(p, z)).diagonal()

    def packed(tangent: Tensors) -> Tensor:
        if kind == "full":
            tangent = tangent | {"scale_tril": tangent["scale_tril"][:, lower]}
        return torch.cat([v.flatten() for v in tangent.values()])

    free = packed({n: torch.arange(v.numel()).reshape(v.shape) for n, v in params.items()})
    offset, units = 0, []
    for name, v in params.items():
        for i in range(v.numel()):
            entry = torch.zeros(v.numel())
            entry[i] = 1.0
            zero = {n: torch.zeros_like(t) for n, t in params.items()}
            if kind != "full" or name != "scale_tril" or lower.flatten()[i % 4]:
                units.append(zero | {name: entry.reshape(v.shape)})
        offset += v.numel()
    assert len(units) == len(free)
    F = torch.stack([packed(family.fisher_product(params, u)) for u in units])
    found = torch.zeros_like(F)
    z = at_nodes(family, params, x)
    for s in range(len(w)):
        scores: Any = jacrev(joint)(params, z[:, s])
        for k in range(family.num_components):
            score = packed(family.pull(params, {n: v[k] for n, v in scores.items()}))
            found += family.probs(params)[k] * w[s] * score.outer(score)
    torch.testing.assert_close(F, found, rtol=1e-9, atol=1e-9)


@every_kind
def test_density_quantiles_and_moments(kind: str) -> None:
    family, params = member(kind)
    L = params["scale_tril"].tril() if kind == "full" else params["log_scale"].exp().diag_embed()
    components: Any = dist.MultivariateNormal(params["loc"], scale_tril=L)
    mixture = dist.MixtureSameFamily(dist.Categorical(logits=params["logits"]), components)
    z = torch.randn(5, 4, 2)
    torch.testing.assert_close(family.log_prob(params, z), mixture.log_prob(z))
    torch.testing.assert_close(family.mean(params), mixture.mean)
    torch.testing.assert_close(family.stddev(params), mixture.stddev)
    levels = torch.tensor([1e-6, 0.05, 0.5, 0.95, 1.0 - 1e-6])
    at = family.icdf(params, levels)
    marginal = dist.Normal(params["loc"], components.stddev)
    below = torch.einsum("k,nkd->nd", family.probs(params), marginal.cdf(at.unsqueeze(1)))
    torch.testing.assert_close(below, levels.unsqueeze(-1).expand(-1, 2), rtol=1e-9, atol=1e-12)


def bent(y: Tensor) -> None:
    x = pyro.sample("x", dist.Normal(torch.zeros(2), 2.0).to_event(1))
    with pyro.plate("data", 3):
        pyro.sample("y", dist.Normal(x[0].square() - x[1], 1.0), obs=y)


@every_kind
def test_one_component_is_the_gaussian_guide_step_for_step(kind: str) -> None:
    """From a narrow start too, where the share of the path in the gradient of log q is below 1."""
    single = {"full": ngvi.AutoFullRankNormal, "diagonal": ngvi.AutoMeanFieldNormal}[kind]
    one = partial(ngvi.AutoMixtureNormal, num_components=1, covariance=kind)
    y, ends = torch.tensor([1.0, 2.0, 1.5]), []
    for make in (single, one):
        pyro.clear_param_store()
        torch.manual_seed(0)
        guide: Any = make(bent, init=None)
        optim = ngvi.NGVB(guide)
        svi: Any = SVI(bent, guide, optim, ngvi.BatchedELBO(4))
        losses = [float(svi.step(y)) for _ in range(60)]
        state = optim.get_state()["natural"][""]
        params = {n: p.detach().squeeze(0) for n, p in guide.natural_params().items()}
        params.pop("logits", None)
        ends.append((params, torch.tensor(losses), state["path_share"].squeeze()))
    torch.testing.assert_close(*ends, rtol=1e-7, atol=1e-9)


def of_mixture(loc: Tensor, scale_tril: Tensor, probs: Tensor, lift: float = 0.0) -> Any:
    """A model whose posterior is a mixture, with log evidence ``lift``."""

    def model() -> None:
        x = pyro.sample("x", dist.Normal(torch.zeros_like(loc[0]), 10.0).to_event(1))
        components: Any = dist.MultivariateNormal(loc, scale_tril=scale_tril)
        target = dist.MixtureSameFamily(dist.Categorical(probs), components)
        prior = dist.Normal(0.0, 10.0).log_prob(x).sum(-1)
        pyro.factor("target", target.log_prob(x) - prior + lift)

    return model


@every_kind
def test_an_exact_fit_has_no_noise_and_takes_no_step(kind: str) -> None:
    _, params = member(kind, K=3)
    tril = params["scale_tril"].tril() if kind == "full" else params["log_scale"].exp().diag_embed()
    model = of_mixture(params["loc"], tril, params["logits"].exp(), lift=7.0)
    guide = ngvi.AutoMixtureNormal(model, 3, kind, init=None)
    guide()
    with torch.no_grad():
        for name, p in guide.natural_params().items():
            p.copy_(params[name])
    optim = ngvi.NGVB(guide)
    svi: Any = SVI(model, guide, optim, ngvi.BatchedELBO(4))
    for _ in range(20):
        assert float(svi.step()) == pytest.approx(-7.0, abs=1e-10)
        assert optim.report().step_norm < 1e-10
    for name, p in guide.natural_params().items():
        torch.testing.assert_close(p.detach(), params[name], rtol=1e-10, atol=1e-10)


def test_the_weights_of_apart_components_are_right_after_few_steps() -> None:
    """log pi_k += R_k - mean is exact where components do not overlap; a step is e-fold at most."""
    loc, tril = torch.tensor([[-30.0], [30.0]]), torch.ones(2, 1, 1)
    probs = torch.tensor([0.9, 0.1])
    guide = ngvi.AutoMixtureNormal(of_mixture(loc, tril, probs), 2, init=None)
    guide()
    with torch.no_grad():
        guide.loc.copy_(loc)
        guide.scale_tril.copy_(tril)
    optim = ngvi.NGVB(guide, schedule="constant")
    svi: Any = SVI(guide.model, guide, optim, ngvi.BatchedELBO(2))
    for _ in range(4):
        svi.step()
    torch.testing.assert_close(guide.weights, probs, rtol=1e-9, atol=1e-9)


def test_a_lost_component_moves_to_where_the_posterior_is_missed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two components start on one of three modes; the third has a neighbour whose tail meets it."""
    monkeypatch.setattr("pyro_ngvi.optim.mixture.WAIT", 20.0)  # steps before one may move
    loc = torch.tensor([[-9.0, 0.0], [0.0, 0.0], [4.0, 0.0]])
    tril = torch.eye(2).expand(3, 2, 2)
    model = of_mixture(loc, tril, torch.full((3,), 1 / 3))
    pyro.set_rng_seed(1)
    guide = ngvi.AutoMixtureNormal(model, 3, init=None)
    guide()
    with torch.no_grad():
        guide.loc.copy_(torch.tensor([[-9.0, 0.0], [-9.0, 0.0], [0.0, 0.0]]))
        guide.scale_tril.copy_(tril)
    optim = ngvi.NGVB(guide)
    svi: Any = SVI(model, guide, optim, ngvi.BatchedELBO(8))
    for _ in range(150):
        svi.step()
    assert float(optim.get_state()["natural"][""]["moves"]) >= 1
    order = guide.loc[:, 0].argsort()
    torch.testing.assert_close(guide.loc[order], loc, rtol=0.0, atol=0.05)
    torch.testing.assert_close(guide.weights, torch.full((3,), 1 / 3), rtol=0.0, atol=0.02)
    assert (guide.weights.log() > LEAST).all()


def test_a_loss_without_strata_is_refused_in_a_sentence() -> None:
    guide = ngvi.AutoMixtureNormal(bent, 2)
    svi: Any = SVI(bent, guide, ngvi.NGVB(guide), Trace_ELBO(2))
    with pytest.raises(RuntimeError, match="BatchedELBO"):
        svi.step(torch.ones(3))
    assert svi.evaluate_loss(torch.ones(3)) > 0.0


@pytest.mark.parametrize(("sd", "moves"), [(1.4, False), (1.05, True)])
def test_a_component_inside_a_wider_one_is_no_twin(sd: float, moves: bool) -> None:
    """KL(N(0, 1) | N(0, 1.4)) is 0.09 nats, the other way 0.14: only both ways tell; of 1.05 0.01."""
    tril = torch.tensor([[[sd]], [[1.0]]])
    guide = ngvi.AutoMixtureNormal(
        of_mixture(torch.zeros(2, 1), tril, torch.ones(2) / 2), 2, init=None
    )
    guide()
    with torch.no_grad():
        guide.loc.zero_()
        guide.scale_tril.copy_(tril)
    optim = ngvi.NGVB(guide)
    SVI(guide.model, guide, optim, ngvi.BatchedELBO(2)).step()
    (rule,) = optim._rules.values()
    params = {name: p.detach() for name, p in guide.natural_params().items()}
    params["scale_tril"], params["loc"] = tril, torch.zeros(2, 1)
    state = rule.start(params)
    state["components"]["count"] += 1000.0  # has waited
    state["points"][0], state["log_p"][0] = 8.0, 0.0  # missed
    quantiles = torch.distributions.Normal(0.0, 1.0).icdf((torch.arange(200.0) + 0.5) / 200.0)
    drawn = {"draws": quantiles[:, None, None] * tril[:, 0], "residuals": torch.zeros(200, 2)}
    own = {name: state[name] for name in ("components", "weights")}
    _, _, stays = rule._moved(params, dict(params), own, state, drawn)
    assert bool(stays) is not moves
