"""The guide under more than one hand: other optimizers, restored parameters, moved tensors."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, JitTrace_ELBO, Trace_ELBO
from pyro.optim import ClippedAdam

import pyro_ngvi as ngvi
from pyro_ngvi.optim.state import flat

y = torch.linspace(-1.0, 2.0, 40)


def model(y):
    mu = pyro.sample("mu", dist.Normal(torch.zeros(2, dtype=y.dtype), 10.0).to_event(1))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(mu.sum(-1), 1.0), obs=y)


def train(guide, optim, steps, data=y):
    svi = SVI(model, guide, optim, ngvi.BatchedELBO(4))
    for _ in range(steps):
        svi.step(data)
    return svi


def test_adam_after_an_averaging_optimizer_trains_what_the_guide_shows():
    guide = ngvi.AutoMeanFieldNormal(model)
    train(guide, ngvi.NGVB(guide), 20)
    assert guide.offset_is_intact()
    svi = train(guide, ClippedAdam({"lr": 0.1, "lrd": 0.99}), 400)
    assert not guide.offset_is_intact()
    # the sum of both is known well: mean y, and its ELBO is that of a fit
    before = guide.loc.sum().item()
    assert abs(before - y.mean().item()) < 0.1
    with torch.no_grad():
        shown = guide.get_posterior().mean.sum()
        sampled = guide.sampling_posterior().mean.sum()
    assert shown == sampled
    assert svi is not None


def test_loaded_parameters_are_where_the_next_step_starts():
    guide = ngvi.AutoMeanFieldNormal(model)
    optim = ngvi.NGVB(guide)
    train(guide, optim, 100)
    far = {**guide.state_dict(), "loc": torch.full((2,), 7.0)}
    guide.load_state_dict(far)
    train(guide, optim, 1)
    assert (guide.loc - 7.0).abs().max() < 1.0  # one trust region away, not back at the old average


def test_moving_the_guide_moves_the_optimizer():
    guide = ngvi.AutoMeanFieldNormal(model)
    optim = ngvi.NGVB(guide)
    train(guide, optim, 10)
    pyro.clear_param_store()
    guide.float()
    train(guide, optim, 3, y.float())
    state = optim.get_state()["natural"][""]
    kinds = {v.dtype for v in flat(state).values()}
    assert kinds == {torch.float32, torch.bool}
    assert guide.loc.dtype == torch.float32


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.*torch.jit")
def test_tracing_an_averaged_guide_is_refused():
    guide = ngvi.AutoMeanFieldNormal(model)
    guide(y)
    svi = SVI(model, guide, ngvi.NGVB(guide), JitTrace_ELBO())
    with pytest.raises(RuntimeError, match="averaging=False"):
        svi.step(y)


def test_a_loss_without_gradient_in_the_guide_is_refused():
    guide = ngvi.AutoMeanFieldNormal(model)
    optim = ngvi.NGVB(guide)
    train(guide, optim, 1)
    for p in guide.natural_params().values():
        p.grad = None
    with pytest.raises(
        ValueError, match=r"under torch.no_grad\(\), or are they frozen.*landing=False"
    ):
        optim(set(guide.natural_params().values()))
    with torch.no_grad(), pytest.raises(ValueError, match="or are they frozen"):
        SVI(model, guide, optim, ngvi.BatchedELBO(2)).step(y)


@pytest.mark.parametrize(
    ("kind", "steps"), [(ngvi.AutoFullRankNormal, 75), (ngvi.AutoMeanFieldNormal, 250)]
)
def test_new_data_after_convergence_are_followed_at_once(kind, steps):
    """A typical length that fell to rounding must not make every gradient an outlier."""
    guide = kind(model)
    optim = ngvi.NGVB(guide)
    train(guide, optim, 120)
    train(guide, optim, steps, y + 3.0)
    total = guide.median(y)["mu"].sum()
    assert abs(total - (y + 3.0).mean()) < 0.2  # the posterior sd of the sum is 0.16


def test_a_subsampled_plate_may_grow_and_shrink():
    def subsampled(y):
        mu = pyro.sample("mu", dist.Normal(0.0, 10.0))
        with pyro.plate("data", len(y), subsample_size=10) as index:
            assert index is not None
            seen.append(int(index.max()))
            pyro.sample("y", dist.Normal(mu, 1.0), obs=y[index])

    seen: list[int] = []
    guide = ngvi.AutoFullRankNormal(subsampled)
    svi = SVI(subsampled, guide, ngvi.NGVB(guide), ngvi.BatchedELBO(4))
    for _ in range(5):
        svi.step(torch.zeros(30))
    assert max(seen) < 30
    for _ in range(20):
        svi.step(torch.zeros(500))
    assert max(seen) >= 100
    seen.clear()
    assert svi.evaluate_loss(torch.zeros(15)) is not None
    assert max(seen) < 15


def test_trace_elbo_and_batched_elbo_train_alike():
    answers = []
    for loss in (Trace_ELBO(8, vectorize_particles=True), ngvi.BatchedELBO(8)):
        pyro.set_rng_seed(1)
        guide = ngvi.AutoFullRankNormal(conjugate)
        svi = SVI(conjugate, guide, ngvi.NGVB(guide), loss)
        for _ in range(60):
            svi.step(y)
        answers.append(guide.get_posterior().covariance_matrix.detach())
    torch.testing.assert_close(answers[0], answers[1], rtol=1e-9, atol=1e-12)


def conjugate(y):
    mu = pyro.sample("mu", dist.Normal(0.0, 10.0))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(mu, 1.0), obs=y)
