"""BatchedELBO and to_arviz with programs that torch.func.vmap cannot run."""

import warnings
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch

import pyro_ngvi as ngvi

Y = torch.tensor([0.3, -1.2])


@pytest.fixture(autouse=True)
def _clean():
    torch.set_default_dtype(torch.float64)
    pyro.clear_param_store()
    pyro.set_rng_seed(0)


def branching(y=Y):
    z = pyro.sample("z", dist.Normal(0.0, 1.0))
    slope = 2.0 if z > 0 else 0.5
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(slope * z, 1.0), obs=y.double())


def test_a_branch_runs_in_a_loop_with_one_notice():
    guide = ngvi.AutoMeanFieldNormal(branching, sticking_the_landing=False)
    guide()
    loss = ngvi.BatchedELBO(5)
    with pytest.warns(RuntimeWarning, match="each of 5 particles has a run of its own") as caught:
        pyro.set_rng_seed(1)
        ours = loss.loss(branching, guide)
        loss.loss_and_grads(branching, guide)
        loss.loss_and_grads(branching, guide)
    assert sum("a run of its own" in str(w.message) for w in caught) == 1
    pyro.set_rng_seed(1)
    q = guide.get_posterior()
    draws = q.rsample((5,))
    total: Any = 0.0
    for z in draws:
        fixed = pyro.poutine.condition(branching, data={"z": z[0]})
        total += pyro.poutine.trace(fixed).get_trace().log_prob_sum() - q.log_prob(z)
    torch.testing.assert_close(torch.tensor(ours), -total.detach() / 5)


def test_a_guide_that_branches_runs_in_a_loop():
    def guide():
        loc = pyro.param("loc", torch.tensor(0.1))
        z = pyro.sample("z", dist.Normal(loc, 1.0))
        if z > 100:
            raise ArithmeticError

    def model():
        pyro.sample("z", dist.Normal(0.0, 1.0))

    with pytest.warns(RuntimeWarning, match="a run of its own"):
        ngvi.BatchedELBO(300).loss_and_grads(model, guide)
    grad: Any = pyro.param("loc").grad
    assert abs(float(grad) - 0.1) < 4 / 300**0.5  # the mean of 300 draws of unit variance


def test_an_error_of_the_program_is_shown_and_not_the_notice():
    calls = 0

    def model():
        nonlocal calls
        calls += 1
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        if calls > 3:
            raise RuntimeError("a mistake of the user")
        return z

    guide = ngvi.AutoMeanFieldNormal(model)
    guide()
    calls = 0
    loss = ngvi.BatchedELBO(2)
    loss.loss(model, guide)
    calls = 10
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeError, match=r"^a mistake of the user$"):
            loss.loss(model, guide)


def test_curvature_keeps_the_error():
    guide = ngvi.AutoMeanFieldNormal(branching)
    guide()
    with pytest.warns(RuntimeWarning, match="a run of its own"):
        ngvi.BatchedELBO(2, curvature="price").loss_and_grads(branching, guide)
    left: Any = guide.take_curvature()
    assert left.kind == "price"
    with pytest.raises(RuntimeError, match=r"cannot run under torch\.func\.vmap"):
        ngvi.BatchedELBO(2, curvature="hessian").loss_and_grads(branching, guide)


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
def test_discrete_hmm_runs_under_vmap():
    y = torch.tensor([0.3, 1.1, -0.4])

    def model():
        loc = pyro.sample("loc", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        initial, transition = torch.zeros(2), torch.tensor([[0.0, 1.0], [0.5, 0.0]])
        hmm = dist.DiscreteHMM(initial, transition, dist.Normal(loc, 1.0), duration=3)
        pyro.sample("y", hmm, obs=y)

    guide = ngvi.AutoFullRankNormal(model)
    guide()
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        assert torch.isfinite(ngvi.BatchedELBO(3).loss_and_grads(model, guide))
    density, theta = ngvi.diagnostics.ModelDensity(model), torch.randn(2, 2)
    for each, z in zip(density(theta), theta, strict=True):
        fixed = pyro.poutine.condition(model, data={"loc": z})
        torch.testing.assert_close(each, pyro.poutine.trace(fixed).get_trace().log_prob_sum())


X = torch.linspace(-1.0, 1.0, 12, dtype=torch.float64)
GRADES = torch.arange(12) % 3


def graded(predictor: torch.Tensor, cuts: torch.Tensor) -> dist.Categorical:
    """An ordered logistic that writes into a tensor of its own, as vmap does not let it."""
    below = torch.sigmoid(cuts - predictor.unsqueeze(-1))
    probs = torch.zeros(*below.shape[:-1], below.shape[-1] + 1, dtype=below.dtype)
    probs[..., 0], probs[..., -1] = below[..., 0], 1.0 - below[..., -1]
    probs[..., 1:-1] = below.diff(dim=-1)
    return dist.Categorical(probs)


def ordinal(x: torch.Tensor, y: torch.Tensor) -> None:
    """vmap cannot run it; in a plate of particles it would broadcast as it should."""
    slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(y)):
        cutpoints = torch.tensor([-0.5, 0.5])
        pyro.sample("y", graded(slope * x, cutpoints), obs=y)


def for_one_draw(x: torch.Tensor, y: torch.Tensor) -> None:
    """As it is written for one draw of w, it fails in a plate of particles."""
    w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    with pyro.plate("data", len(y)):
        predictor = torch.stack([x, x.square()], -1) @ w
        pyro.sample("y", graded(predictor, torch.tensor([-0.5, 0.5])), obs=y)


def one_by_one(model: Any, guide: Any, seed: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The loss of six draws, and its gradients, by plain runs."""
    pyro.set_rng_seed(seed)
    q = guide.sampling_posterior()  # whose draws are centred
    theta = q.rsample((6,))
    name = next(iter(guide._unconstrained_shapes))
    total: Any = -q.log_prob(theta).sum()
    for z in theta:
        value = z.reshape(guide._unconstrained_shapes[name])
        fixed = pyro.poutine.condition(model, data={name: value})
        total = total + pyro.poutine.trace(fixed).get_trace(X, GRADES).log_prob_sum()
    loss = -total / 6
    return loss.detach(), list(torch.autograd.grad(loss, list(guide.parameters())))


@pytest.mark.parametrize("model", [ordinal, for_one_draw])
def test_a_run_for_each_particle(model: Any) -> None:
    guide = ngvi.AutoMeanFieldNormal(model)
    guide(X, GRADES)
    loss = ngvi.BatchedELBO(6)
    own = "each of 6 particles has a run of its own"
    with pytest.warns(RuntimeWarning, match=own) as caught:
        for seed in range(4):
            pyro.set_rng_seed(seed)
            for p in guide.parameters():
                p.grad = None
            found = loss.loss_and_grads(model, guide, X, GRADES)
            wanted, grads = one_by_one(model, guide, seed)
            torch.testing.assert_close(found, wanted)
            for p, g in zip(guide.parameters(), grads, strict=True):
                torch.testing.assert_close(p.grad, g)
    assert len([w for w in caught if "vmap cannot run" in str(w.message)]) == 1


class NoSample(dist.Normal):
    def sample(self, *args, **kwargs):
        raise NotImplementedError

    def rsample(self, *args, **kwargs):
        raise NotImplementedError


def test_arviz_without_sample_gives_the_other_groups():
    def model():
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        with pyro.plate("data", 2):
            pyro.sample("y", NoSample(z, 1.0), obs=torch.zeros(2))

    guide = ngvi.AutoMeanFieldNormal(model)
    guide()
    with pytest.warns(UserWarning, match="predictive groups are left out") as caught:
        data = ngvi.to_arviz(model, guide, num_samples=30, seed=0, prior=True)
    assert len([w for w in caught if issubclass(w.category, UserWarning)]) == 1
    assert data["log_likelihood"]["y"].shape == (1, 30, 2)
    assert data["prior"]["z"].shape == (1, 30)
    with pytest.raises(KeyError):
        data["posterior_predictive"]
