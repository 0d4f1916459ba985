"""Data that come, go and change: q is the exact posterior of the others, at once."""

import copy
import pickle
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI
from pyro.infer.autoguide import AutoGuideList
from pyro.optim import PyroOptim
from torch import Tensor

from pyro_ngvi import CVI, AutoSites, SitesELBO
from pyro_ngvi.distributions import GaussianProcess
from tests.exact.site_models import Case, all_but, cases, gap

N = 12
both = pytest.mark.parametrize("name", ["regression", "pairs"])
EVERY = torch.arange(N)


def fitted(name: str, index: Tensor = EVERY) -> tuple[Case, AutoSites, SVI]:
    case = cases(N)[name]
    return case, *case.fit(index)


@both
def test_removed_data_leave_the_posterior_of_the_others(name: str) -> None:
    """With no further step, again and again, and steps change nothing then."""
    case, guide, svi = fitted(name)
    left = EVERY
    for out in ([0, 7], 3, torch.tensor([8]), torch.arange(8) == 5):
        guide.remove(out)
        left = left[all_but(len(left), out)]
        assert gap(guide, case.posterior(left)) < 1e-10
        assert guide.sites()["y"].linear.shape == (len(left), case.A.shape[1])
        assert guide.plan is not None and tuple(guide.plan.groups[0].batch) == (len(left),)
    loss = svi.step(*case.args(left))
    assert gap(guide, case.posterior(left)) < 1e-10
    assert loss == pytest.approx(SitesELBO().loss(case.model, guide, *case.args(left)), abs=1e-9)


@both
def test_added_data_are_there_after_a_step(name: str) -> None:
    first = torch.arange(8)
    case, guide, svi = fitted(name, first)
    guide.add(4)
    assert gap(guide, case.posterior(first)) < 1e-10  # until then nothing has changed
    svi.step(*case.args(EVERY))
    assert gap(guide, case.posterior(EVERY)) < 1e-10


@both
def test_data_come_and_go_between_two_steps(name: str) -> None:
    case, guide, svi = fitted(name)
    guide.add(3)
    guide.remove([1, 13])  # an old one, and one that is not there yet
    guide.remove(0)
    old = EVERY[2:]
    assert gap(guide, case.posterior(old)) < 1e-10
    now = torch.cat([old, torch.tensor([1, 0])])
    svi.step(*case.args(now))
    assert gap(guide, case.posterior(now)) < 1e-10


@both
def test_fewer_data_than_latent_variables_and_more_again(name: str) -> None:
    """The guide keeps the directions that its data see, and more when these become more."""
    first = torch.arange(2)
    case, guide, svi = fitted(name, first)
    assert guide.algebra.basis is not None
    guide.add(1)
    guide.add(5)
    assert gap(guide, case.posterior(first)) < 1e-10
    guide.remove(0)
    assert gap(guide, case.posterior([1])) < 1e-10
    now = torch.arange(1, 8)
    svi.step(*case.args(now))
    assert guide.algebra.basis is None
    assert gap(guide, case.posterior(now)) < 1e-10
    guide.remove(torch.arange(5))
    assert gap(guide, case.posterior([6, 7])) < 1e-10


def test_other_data_of_the_same_number() -> None:
    """One datum is removed and another added: the maps of before do not hold any more."""
    case, guide, svi = fitted("regression", torch.arange(6))
    guide.remove(0)
    guide.add(1)
    now = torch.arange(1, 7)
    svi.step(*case.args(now))
    assert gap(guide, case.posterior(now)) < 1e-10


@both
def test_reset_forgets_what_data_said(name: str) -> None:
    case, guide, svi = fitted(name)
    guide.reset([2, 4])
    assert gap(guide, case.posterior(all_but(N, [2, 4]))) < 1e-10
    case.y[[2, 4]] += 1.0
    svi.step(*case.args(EVERY))
    assert gap(guide, case.posterior(EVERY)) < 1e-10
    guide.reset()
    assert guide.fresh and not any(p.any() for p in guide.natural_params().values())
    prior = dist.MultivariateNormal(
        torch.zeros(len(case.prior)), covariance_matrix=torch.diag(case.prior)
    )
    assert gap(guide, prior) < 1e-12
    svi.step(*case.args(EVERY))
    assert gap(guide, case.posterior(EVERY)) < 1e-10


def test_parameters_stay_those_of_the_store() -> None:
    """Same objects, so the loss, the optimizer and the parameter store all mean the same sites."""
    _, guide, _ = fitted("regression")
    before = guide.natural_params()
    guide.remove([1, 2])
    guide.add(1)
    store = pyro.get_param_store()
    for name, p in guide.natural_params().items():
        assert p is before[name] and p.is_leaf and p.requires_grad and p.grad is None
        assert store[f"{guide._pyro_name}.{name}"] is p
        assert len(p) == N - 1


def logistic(X: Tensor, y: Tensor | None = None) -> None:
    w = pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    with pyro.plate("data", len(X)):
        pyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)


def logistic_data(n: int) -> tuple[Tensor, Tensor]:
    X = torch.randn(n, 3)
    return X, (torch.rand(n) < torch.sigmoid(X @ torch.tensor([1.0, -1.0, 0.5]))).double()


def logistic_fit(X: Tensor, y: Tensor, steps: int = 30) -> tuple[AutoSites, SVI]:
    guide = AutoSites(logistic)
    svi = SVI(logistic, guide, CVI(guide), SitesELBO())
    for _ in range(steps):
        svi.step(X, y)
    return guide, svi


def elbo_of(svi: SVI, X: Tensor, y: Tensor) -> float:
    loss: Any = svi.evaluate_loss(X, y)
    return -loss


@pytest.mark.parametrize("change", ["remove", "add", "reset"])
def test_two_sweeps_refit_a_logistic_regression(change: str) -> None:
    """Within 1e-3 nats of the ELBO of a fit from the start, and below it."""
    X, y = logistic_data(60)
    fewer = torch.arange(4, 60)
    now = fewer if change == "remove" else torch.arange(60)
    begin = torch.arange(56) if change == "add" else torch.arange(60)
    guide, svi = logistic_fit(X[begin], y[begin])
    target = elbo_of(logistic_fit(X[now], y[now])[1], X[now], y[now])
    if change == "remove":
        guide.remove([0, 1, 2, 3])
    elif change == "add":
        guide.add(4)
    else:
        guide.reset([0, 5])
    for _ in range(2):
        svi.step(X[now], y[now])
    elbo = elbo_of(svi, X[now], y[now])
    assert target - 1e-3 < elbo < target + 1e-9
    for _ in range(30):
        svi.step(X[now], y[now])
    assert elbo_of(svi, X[now], y[now]) == pytest.approx(target, abs=1e-9)


def test_sweeps_before_a_change_are_not_compared_with_those_after() -> None:
    """After a reset the ELBO is lower; half of the last sweep must not be taken back for it."""
    X, y = logistic_data(40)
    guide, svi = logistic_fit(X, y, 3)
    fresh, _ = logistic_fit(X, y, 1)
    guide.reset()
    svi.step(X, y)
    for a, b in zip(guide.site_tensors()["y"], fresh.site_tensors()["y"], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_state_after_a_change_goes_to_another_optimizer() -> None:
    X, y = logistic_data(30)
    guide, svi = logistic_fit(X, y, 3)
    guide.remove(0)
    svi.step(X[1:], y[1:])
    state, kept = svi.optim.get_state(), copy.deepcopy(guide.state_dict())
    again, other = logistic_fit(X[1:], y[1:], 1)
    again.load_state_dict(kept)
    other.optim.set_state(state)
    for each in (svi, other):
        each.step(X[1:], y[1:])
    for a, b in zip(guide.site_tensors()["y"], again.site_tensors()["y"], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-13)


def test_two_groups_of_data() -> None:
    """Each of its own plate; changes of both between two steps."""

    def model(a: Tensor, b: Tensor) -> None:
        m = pyro.sample("m", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        with pyro.plate("first", len(a)):
            pyro.sample("a", dist.Normal(m[0], 1.0), obs=a)
        with pyro.plate("second", len(b)):
            pyro.sample("b", dist.Normal(m.sum(), 0.5), obs=b)

    def exact(a: Tensor, b: Tensor) -> dist.MultivariateNormal:
        ones, zero = torch.ones(2), torch.tensor([1.0, 0.0])
        P = torch.eye(2) + len(a) * torch.outer(zero, zero) + 4 * len(b) * torch.outer(ones, ones)
        V = torch.linalg.inv(P)
        return dist.MultivariateNormal(V @ (a.sum() * zero + 4 * b.sum() * ones), V)

    a, b = torch.randn(5), torch.randn(7)
    guide = AutoSites(model)
    svi = SVI(model, guide, CVI(guide), SitesELBO())
    svi.step(a, b)
    guide.remove([0], group="a")
    guide.add(1, group="b")
    guide.remove([2, 3], group="b")
    b = b[all_but(7, [2, 3])]
    assert gap(guide, exact(a[1:], b)) < 1e-12
    guide.reset(group="a")
    assert gap(guide, exact(a[:0], b)) < 1e-12
    b = torch.cat([b, torch.tensor([0.3])])
    svi.step(a[1:], b)
    assert gap(guide, exact(a[1:], b)) < 1e-12
    assert {n: len(v.mean) for n, v in guide.sites().items()} == {"a": 4, "b": 6}


def test_hyperparameters_that_have_moved_since_the_last_step() -> None:
    """The posterior without data is that at the parameters as they are now."""
    case = cases(N)["regression"]

    def model(X: Tensor, y: Tensor) -> None:
        sd = pyro.param("sd", torch.tensor(0.5), constraint=dist.constraints.positive)
        b = pyro.sample("b", dist.Normal(0.0, sd))
        with pyro.plate("data", len(X)):
            pyro.sample("y", dist.Normal(b, 1.0), obs=y)

    for change in ("remove", "add"):
        pyro.clear_param_store()
        guide = AutoSites(model)
        adam = pyro.optim.Adam({"lr": 0.3})  # pyright: ignore[reportAttributeAccessIssue]
        svi = SVI(model, guide, CVI(guide, others=adam), SitesELBO())
        for _ in range(3):
            svi.step(case.X, case.y)
        if change == "remove":
            guide.remove([0, 1])
        else:
            guide.add(2)
        y = case.y[2:] if change == "remove" else case.y
        precision = pyro.param("sd").item() ** -2 + len(y)
        q = guide.get_posterior()
        assert q.mean.item() == pytest.approx(float(y.sum() / precision), abs=1e-12)
        assert q.variance.item() == pytest.approx(1 / precision, abs=1e-12)


def test_minibatches_after_a_change() -> None:
    """A guide of minibatches takes data away after it has seen all data once more."""
    case = cases(N)["regression"]

    def model(X: Tensor, y: Tensor, size: int) -> None:
        b = pyro.sample("b", dist.Normal(0.0, 2.0))
        w = pyro.sample("w", dist.Normal(torch.zeros(3), 0.7).to_event(1))
        with pyro.plate("data", len(X), subsample_size=size) as i:
            pyro.sample("y", dist.Normal(X[i] @ w + b, 0.3), obs=y[i])

    guide = AutoSites(model)
    svi = SVI(model, guide, CVI(guide), SitesELBO())
    svi.step(case.X, case.y, 4)
    for _ in range(40):
        svi.step(case.X, case.y, 4)
    assert gap(guide, case.posterior(EVERY)) < 1e-10
    guide.refresh(case.X, case.y, N)
    guide.remove([3])
    left = all_but(N, 3)
    assert gap(guide, case.posterior(left)) < 1e-10
    guide.add(1)
    now = torch.cat([left, torch.tensor([3])])
    for _ in range(40):
        svi.step(*case.args(now), 4)
    assert gap(guide, case.posterior(now)) < 1e-10


@pytest.mark.parametrize("change", ["covariates", "order", "prior"])
def test_minibatches_of_data_that_see_other_things(change: str) -> None:
    """Sites are counted out of q by what their data saw, or q is wrong for good; ``refresh`` knows."""
    case = cases(N)["regression"]

    def model(X: Tensor, y: Tensor, index: Tensor | None, sd: float = 2.0) -> None:
        b = pyro.sample("b", dist.Normal(0.0, sd))
        w = pyro.sample("w", dist.Normal(torch.zeros(3), 0.7).to_event(1))
        with pyro.plate("data", len(X), subsample=index) as i:
            pyro.sample("y", dist.Normal(X[i] @ w + b, 0.3), obs=y[i])

    guide = AutoSites(model)
    svi = SVI(model, guide, CVI(guide), SitesELBO())
    X, y, sd = case.X.clone(), case.y, 2.0
    for index in EVERY.split(4):
        svi.step(X, y, index)
    assert gap(guide, case.posterior(EVERY)) < 1e-10
    svi.step(X, y + 1.0, EVERY[:4])  # data may change
    if change == "covariates":
        X[5] += 0.01
    elif change == "order":
        X, y = X.flip(0), y.flip(0)
    else:
        sd = 1.9
    with pytest.raises(ValueError, match=r"this minibatch do not see what they did") as caught:
        svi.step(X, y, EVERY[4:8], sd)
    assert len(str(caught.value)) <= 240
    guide.refresh(X, y, None, sd)
    for index in EVERY.split(4):
        svi.step(X, y, index, sd)
    whole = AutoSites(model)
    exact = SVI(model, whole, CVI(whole), SitesELBO())
    exact.step(X, y, None, sd)
    q, p = guide.get_posterior(), whole.get_posterior()
    torch.testing.assert_close(q.mean, p.mean, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(q.covariance_matrix, p.covariance_matrix, rtol=1e-8, atol=1e-8)
    guide.refresh(X, y, None, sd)
    guide.reset([5])  # of a site of 0 nothing was counted in
    X = X.clone()
    X[5] += 1.0
    svi.step(X, y, EVERY[4:8], sd)


def test_minibatches_after_the_prior_was_learned() -> None:
    """What data saw before is no longer known then, and nobody is asked for it."""
    case = cases(N)["regression"]

    def model(X: Tensor, y: Tensor, index: Tensor | None = None) -> None:
        sd = pyro.param("sd", torch.tensor(2.0), constraint=dist.constraints.positive)
        b = pyro.sample("b", dist.Normal(0.0, sd))
        w = pyro.sample("w", dist.Normal(torch.zeros(3), 0.7).to_event(1))
        with pyro.plate("data", len(X), subsample=index) as i:
            pyro.sample("y", dist.Normal(X[i] @ w + b, 0.3), obs=y[i])

    def learns(on: bool) -> None:
        dict(pyro.get_param_store().named_parameters())["sd"].requires_grad_(on)

    model(case.X, case.y)  # which makes the parameter
    learns(False)
    guide = AutoSites(model)
    adam = PyroOptim(torch.optim.Adam, {"lr": 0.01})
    svi = SVI(model, guide, CVI(guide, others=adam), SitesELBO())
    for index in EVERY.split(4):
        svi.step(case.X, case.y, index)
    learns(True)
    for _ in range(3):
        svi.step(case.X, case.y)
    learns(False)
    for index in EVERY.split(4):
        svi.step(case.X, case.y, index)
    assert pyro.param("sd").item() != 2.0


def test_copies_keep_the_data_of_their_original() -> None:
    case, guide, _ = fitted("regression")
    guide.remove(0)
    left = torch.arange(1, N)
    for twin in (copy.deepcopy(guide), pickle.loads(pickle.dumps(guide))):
        assert torch.equal(twin.sites()["y"].linear, guide.sites()["y"].linear)
        twin._model = guide._model  # which Pyro leaves out of copies
        twin.refresh(*case.args(left))
        twin.remove(0)
        assert gap(twin, case.posterior(left[1:])) < 1e-10
    assert gap(guide, case.posterior(left)) < 1e-10


def test_process_with_inducing_points_takes_and_loses_data() -> None:
    def kernel(X: Tensor, Z: Tensor | None = None, diag: bool = False) -> Tensor:
        if diag:
            return torch.ones(len(X))
        return torch.exp(-0.5 * (X[:, None] - (X if Z is None else Z)).square())

    def model(X: Tensor, y: Tensor | None = None) -> None:
        f = pyro.sample("f", GaussianProcess(kernel, X))
        with pyro.plate("data", len(X)):
            pyro.sample("y", dist.Normal(f, 0.4), obs=y)

    def fit(X: Tensor, y: Tensor) -> tuple[AutoSites, SVI]:
        guide = AutoSites(model, inducing=torch.linspace(0.0, 5.0, 4))
        svi = SVI(model, guide, CVI(guide), SitesELBO())
        svi.step(X, y)
        return guide, svi

    def distance(a: AutoSites, b: AutoSites) -> float:
        at = torch.linspace(-1.0, 6.0, 20)
        found = zip(a.predict(at)["f"], b.predict(at)["f"], strict=True)
        return max(float((x - y).abs().max()) for x, y in found)

    X, y = torch.linspace(0.0, 5.0, 15), torch.randn(15)
    guide, svi = fit(X, y)
    guide.remove([3, 4])
    left = all_but(15, [3, 4])
    assert distance(guide, fit(X[left], y[left])[0]) < 1e-10
    guide.add(2)
    now = torch.cat([left, torch.tensor([3, 4])])
    svi.step(X[now], y[now])
    assert distance(guide, fit(X, y)[0]) < 1e-10


def test_part_of_a_list_of_guides() -> None:
    """All latent sites are those of the part, so its data come and go as in a guide of its own."""
    case = cases(N)["regression"]
    guide = AutoGuideList(case.model)
    part = AutoSites(case.model)
    guide.append(part)
    svi = SVI(case.model, guide, CVI(guide), SitesELBO())
    svi.step(*case.args(EVERY))
    part.remove([0])
    assert gap(part, case.posterior(EVERY[1:])) < 1e-10
    svi.step(*case.args(EVERY[1:]))
    assert gap(part, case.posterior(EVERY[1:])) < 1e-10
