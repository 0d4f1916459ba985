"""AutoMetricNormal within Pyro and this package: losses, rules, exports, copies, refusals."""

from __future__ import annotations

import copy
import warnings
from functools import cache
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import SVI, Trace_ELBO, TraceMeanField_ELBO
from pyro.infer.autoguide import AutoGuideList, init_to_value
from pyro.optim import Adam  # pyright: ignore[reportAttributeAccessIssue]
from torch import Tensor, nn

import pyro_ngvi as ngvi
from pyro_ngvi.metric import family
from tests.contract.registry import data, exact_posterior, regression

X = torch.linspace(-1.0, 1.0, 20).double()
Y = (1.0 + X).exp().round()


def poisson(x: Tensor, y: Tensor | None = None, subsample: int | None = None) -> None:
    """Counts with a level of unknown size, and a bent rate; right under vectorised particles too."""
    s = pyro.sample("s", dist.Exponential(X.new_tensor(0.5)))
    b = pyro.sample("b", dist.Normal(X.new_zeros(2), 1.0).to_event(1))
    with pyro.plate("data", len(x), subsample_size=subsample) as i:
        f = b[..., 0] * x[i] + b[..., 1] * x[i].square()
        pyro.sample("y", dist.Poisson(s * f.exp()), obs=None if y is None else y[i])


def stepped(steps: int = 3, rule: Any = ngvi.NGVB, loss: Any = None, **settings: Any) -> Any:
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    guide = ngvi.AutoMetricNormal(poisson, **settings)
    svi = SVI(poisson, guide, rule(guide), loss or ngvi.BatchedELBO(4))
    losses = [svi.step(X, Y) for _ in range(steps)]
    assert bool(torch.isfinite(torch.tensor(losses)).all())
    return guide, svi


RULES = [ngvi.IFVB, pytest.param(ngvi.AIFVB, marks=pytest.mark.slow), ngvi.optim.SPRING]


@cache
def mean_by_ngvb() -> Tensor:
    return stepped(40)[0].loc.detach()


@pytest.mark.parametrize("rule", RULES)
def test_rules_that_step_it_end_at_the_same_mean(rule: Any) -> None:
    scores = rule is ngvi.optim.SPRING
    loss = ngvi.BatchedELBO(32, curvature="scores") if scores else None
    guide, _ = stepped(100 if rule is ngvi.AIFVB else 30, rule, loss)
    torch.testing.assert_close(guide.loc, mean_by_ngvb(), rtol=0.0, atol=0.1)


@pytest.mark.parametrize(
    "loss",
    [
        Trace_ELBO(),
        Trace_ELBO(4, vectorize_particles=True),
        TraceMeanField_ELBO(),
        ngvi.BatchedELBO(3),
    ],
)
@pytest.mark.filterwarnings("ignore:Failed to verify mean field")
def test_losses_estimate_the_same_elbo(loss: Any) -> None:
    _, svi = stepped(2, loss=loss)
    found = torch.tensor([svi.evaluate_loss(X, Y) for _ in range(50)])
    wanted = -ngvi.khat(poisson, svi.guide, X, Y, seed=0).elbo
    assert abs(float(found.mean()) - wanted) < 4.0 * float(found.std()) / 50**0.5 + 0.05


def test_from_a_loop_to_predictions() -> None:
    guide, svi = stepped(0)
    stop = ngvi.StopRule(svi, max_steps=100)
    while not stop(svi.step(X, Y), X, Y):
        pass
    assert stop.reason == "converged"
    idata = ngvi.to_arviz(poisson, guide, X, Y, num_samples=400, seed=0)
    assert dict(idata["posterior"].sizes)["draw"] == 400
    assert "Take the intervals" in str(ngvi.summary(idata))
    new = ngvi.predict(poisson, guide, torch.zeros(3).double(), num_samples=50, seed=0)
    assert new["y"].shape == (50, 3)
    full: Any = ngvi.fit(poisson, X, Y, guide="AutoFullRankNormal", seed=0, progress=False)
    ours, theirs = idata["posterior"]["b"].values[0], full.idata["posterior"]["b"].values[0]
    assert abs(ours.mean(0) - theirs.mean(0)).max() < 0.3 * theirs.std(0).max()
    assert abs(ours.std(0) / theirs.std(0) - 1.0).max() < 0.2


def test_fit_takes_it_by_name() -> None:
    fit = ngvi.fit(poisson, X, Y, guide="AutoMetricNormal", seed=0, progress=False)
    assert isinstance(fit.guide, ngvi.AutoMetricNormal)
    assert fit.why_stopped == "converged"


def test_a_state_goes_into_a_new_guide() -> None:
    guide, _ = stepped()
    other = ngvi.AutoMetricNormal(poisson)
    other.load_state_dict(guide.state_dict())
    other(X, Y)
    assert torch.equal(other.loc, guide.loc)
    pyro.set_rng_seed(1)
    draw = guide.get_posterior().rsample((2,))
    pyro.set_rng_seed(1)
    assert torch.equal(other.get_posterior().rsample((2,)), draw)
    duplicate = copy.deepcopy(guide)
    assert torch.equal(duplicate.loc, guide.loc)
    with pytest.raises(RuntimeError, match="a copy has no model"):
        duplicate.median()
    assert guide.median()["s"] > 0.0


def test_parameters_of_the_model_are_learned_by_the_evidence() -> None:
    """The slope of the ELBO in a prior scale is that of the evidence of a linear model, by 4 errors."""
    A, y = data()

    def model() -> None:
        s = pyro.param("s", A.new_tensor(0.5), constraint=dist.constraints.positive)
        w = pyro.sample("w", dist.Normal(A.new_zeros(3), s).to_event(1))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(A @ w, 1.0), obs=y)

    guide = ngvi.AutoMetricNormal(model)
    loss = ngvi.BatchedELBO(200)
    svi = SVI(model, guide, ngvi.NGVB(guide, others=Adam({"lr": 0.0})), loss)
    for _ in range(30):
        svi.step()
    raw: Any = pyro.get_param_store()._params["s"]
    slopes = []
    for _ in range(50):
        raw.grad = None
        loss.loss_and_grads(model, guide)
        grad: Any = raw.grad
        slopes.append(-grad)
    found = torch.stack(slopes)
    s = pyro.param("s").detach().requires_grad_()
    S = s.square() * A @ A.mT + torch.eye(len(y)).double()
    evidence = dist.MultivariateNormal(torch.zeros_like(y), S).log_prob(y)
    (slope,) = torch.autograd.grad(evidence, s)
    assert (
        abs(float(found.mean() - (s * slope).detach())) < 4.0 * float(found.std()) / 50**0.5 < 0.2
    )


def test_parameters_of_a_module_are_no_latents() -> None:
    A, y = data()
    net = nn.Linear(3, 1).double()

    def model() -> None:
        pyro.module("net", net)
        w = pyro.sample("w", dist.Normal(A.new_zeros(3), 1.0).to_event(1))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(A @ w + net(A).squeeze(-1), 1.0), obs=y)

    guide = ngvi.AutoMetricNormal(model)
    guide()
    M = guide.family.metric({"loc": guide.loc}).product(torch.eye(3).double())
    torch.testing.assert_close(M, exact_posterior(A, y)[1])


def test_a_start_of_the_users_own() -> None:
    values = {"s": X.new_tensor(0.7), "b": X.new_tensor([0.3, -0.2])}
    guide = ngvi.AutoMetricNormal(poisson, init_loc_fn=init_to_value(values=values), init=None)
    guide(X, Y)
    torch.testing.assert_close(guide.loc[1:], values["b"])
    torch.testing.assert_close(guide.median()["s"], values["s"], rtol=0.1, atol=0.0)


def test_a_step_that_is_not_finite_is_skipped() -> None:
    guide, svi = stepped()
    before = guide.loc.detach().clone()
    with pytest.warns(RuntimeWarning, match="skipped a step"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Encountered NaN")
        svi.step(X * torch.inf, Y)
    assert torch.equal(guide.loc, before)


def test_too_few_steps_of_conjugate_gradients_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(family, "SMALL", 0)
    guide, _ = stepped(1)
    guide.family.cg_steps = 1
    with pytest.warns(RuntimeWarning, match="1 steps of conjugate gradients do not solve"):
        guide.get_posterior().rsample((2,))


def no_data() -> None:
    pyro.sample("x", dist.Normal(X.new_tensor(1.0), 2.0))


def test_a_model_without_data_is_its_prior() -> None:
    guide = ngvi.AutoMetricNormal(no_data)
    svi: Any = SVI(no_data, guide, ngvi.NGVB(guide), ngvi.BatchedELBO(2))
    assert abs(svi.step()) < 1e-12
    assert float(guide.log_det()[0]) == 0.0


def gamma(*args: Any) -> None:
    pyro.sample("g", dist.Gamma(2.0, 1.0))


def masked() -> None:
    hidden: Any = torch.tensor(False)
    with poutine.mask(mask=hidden):
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
    pyro.sample("y", dist.Normal(x, 1.0), obs=torch.tensor(0.0))


def scaled() -> None:
    with poutine.scale(scale=2.0):
        pyro.sample("x", dist.Normal(0.0, 1.0))


def factor() -> None:
    x = pyro.sample("x", dist.Normal(0.0, 1.0))
    pyro.factor("f", -x.square())


def overdispersed() -> None:
    r = pyro.sample("r", dist.Exponential(1.0))
    pyro.sample("y", dist.NegativeBinomial(r, torch.tensor(0.5)), obs=torch.tensor(1.0))


def mixture() -> None:
    x = pyro.sample("x", dist.Normal(0.0, 1.0))
    z = pyro.sample("z", dist.Bernoulli(0.5), infer={"enumerate": "parallel"})
    pyro.sample("y", dist.Normal(x + z, 1.0), obs=torch.tensor(0.0))


REFUSED: list[tuple[Any, str]] = [
    (gamma, r"'g' \(Gamma\) is no closed form of normal noise: take LogNormal"),
    (masked, r"'x' \(Normal\) is masked or scaled"),
    (scaled, r"'x' \(Normal\) is masked or scaled"),
    (factor, r"'f', Unit, is not known\. Take a likelihood of pyro_ngvi\.metric\.COORDINATES"),
    (overdispersed, "'y', NegativeBinomial of latent total_count, is not known"),
    (mixture, r"'z' \(Bernoulli\) is not of this guide, which takes all"),
]


@pytest.mark.parametrize(("model", "reason"), REFUSED, ids=lambda x: getattr(x, "__name__", ""))
def test_what_is_refused(model: Any, reason: str) -> None:
    for _ in range(2):  # the next call says the same again
        with pytest.raises(ValueError, match=reason) as error:
            guide = ngvi.AutoMetricNormal(model)
            guide()
        assert len(str(error.value)) <= 240


def test_a_call_at_other_arguments_leaves_the_answer() -> None:
    guide, svi = stepped(20)
    wanted = ngvi.khat(poisson, guide, X, Y, seed=0).elbo
    guide(X[:5], Y[:5])
    guide(X[:5])  # new inputs without data
    Trace_ELBO().loss(poisson, guide, X[:5], Y[:5])
    assert ngvi.khat(poisson, guide, X, Y, seed=0).elbo == wanted
    assert torch.isfinite(torch.tensor(svi.step(X, Y)))


def test_a_weight_on_the_kl_is_refused_and_a_scale_is_followed() -> None:
    with pytest.raises(ValueError, match=r"poutine.scale\(scale=0.04\) around the data"):
        stepped(1, loss=ngvi.BatchedELBO(4, kl_weight=25.0))


def test_the_error_of_log_det_is_one_of_the_elbo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(family, "SMALL", 0)
    guide, _ = stepped(5, probes=2)
    _, error = guide.log_det()
    assert error > 0.0
    found = ngvi.khat(poisson, guide, X, Y, seed=0)
    assert found.elbo_error >= 0.5 * error


def test_a_prior_that_is_folded_is_refused() -> None:
    def model() -> None:
        w = pyro.sample("w", dist.FoldedDistribution(dist.Normal(1.0, 1.0)))
        pyro.sample("y", dist.Normal(w, 1.0), obs=torch.tensor(0.5))

    with pytest.raises(ValueError, match=r"'w' .* is no closed form of normal noise"):
        ngvi.AutoMetricNormal(model)()


def test_quantiles_of_sites_that_mix_entries_where_draws_are_fewer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(family, "SMALL", 0)  # as of many entries
    monkeypatch.setattr(family, "NUMBERS", 2**10)

    def model() -> None:
        ordered = [dist.transforms.OrderedTransform()]
        base = dist.Normal(torch.zeros(3), 1.0).to_event(1)
        cut = pyro.sample("cut", dist.TransformedDistribution(base, ordered))
        x = pyro.sample("x", dist.Normal(torch.zeros(10), 1.0).to_event(1))
        pyro.sample("y", dist.Normal(x + cut[0], 1.0).to_event(1), obs=torch.ones(10))

    guide = ngvi.AutoMetricNormal(model)
    guide()
    assert guide.median()["cut"].diff().min() > 0.0


def test_minibatches_and_lists_are_refused() -> None:
    with pytest.raises(ValueError, match=r"'data' .* is a subsampled plate: pass all data"):
        ngvi.AutoMetricNormal(poisson)(X, Y, 5)
    both = AutoGuideList(poisson)
    both.append(ngvi.AutoMetricNormal(poutine.block(poisson, expose=["b"])))
    both.append(ngvi.AutoFullRankNormal(poutine.block(poisson, expose=["s"])))
    with pytest.raises(ValueError, match=r"'s' .* is not of this guide"):
        both(X, Y)


def test_regression_of_the_contract_tests_in_float32() -> None:
    A, y = data(torch.float32)
    guide = ngvi.AutoMetricNormal(regression)
    svi = SVI(regression, guide, ngvi.NGVB(guide), ngvi.BatchedELBO(4))
    for _ in range(20):
        svi.step(A, y)
    mean, _ = exact_posterior(A, y)
    torch.testing.assert_close(guide.loc.detach(), mean, rtol=0.0, atol=1e-4)
