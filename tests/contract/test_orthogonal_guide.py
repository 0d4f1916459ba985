"""AutoOrthogonalFlow: trained through SVI, saved and resumed, read by a user, and what is refused."""

import copy
import pickle
from functools import cache
from pathlib import Path
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Predictive, Trace_ELBO
from pyro.optim import Adam  # pyright: ignore[reportAttributeAccessIssue]
from torch import Tensor

from benchmarks.baselines.ifvb import StoredIFVB
from benchmarks.flows.orthogonal_forms import AutoOrthogonalForm
from pyro_ngvi import (
    AIFVB,
    IFVB,
    NGVB,
    AutoFullRankNormal,
    AutoOrthogonalFlow,
    BatchedELBO,
    to_arviz,
)
from pyro_ngvi.optim import SPRING
from tests.contract.resume import assert_resumes
from tests.covering import covering

COUNTS = torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64)
FORMS = ("scaled", "whitened", "paper")


def few_counts(y: Tensor) -> None:
    """Poisson counts with correlated log rates: the posterior is skewed to the left."""
    root = torch.tensor([[2.0, 0.0, 0.0], [1.6, 1.2, 0.0], [0.6, 0.9, 1.7]], dtype=y.dtype)
    z = pyro.sample("z", dist.MultivariateNormal(torch.zeros(3, dtype=y.dtype), scale_tril=root))
    pyro.sample("y", dist.Poisson(z.exp()).to_event(1), obs=y)


def positive() -> None:
    pyro.sample("rate", dist.Gamma(2.0, torch.ones(2)).to_event(1))
    pyro.sample("share", dist.Beta(2.0, 5.0))


@torch.no_grad()
def elbo(guide: Any, n: int = 40_000) -> tuple[float, float]:
    """The ELBO of :func:`few_counts` in nats, and its standard error."""
    torch.manual_seed(99)
    q = guide.get_posterior()
    z = q.rsample((n,))
    root = torch.tensor([[2.0, 0.0, 0.0], [1.6, 1.2, 0.0], [0.6, 0.9, 1.7]], dtype=z.dtype)
    prior = dist.MultivariateNormal(torch.zeros(3, dtype=z.dtype), scale_tril=root)
    joint = prior.log_prob(z) + dist.Poisson(z.exp()).log_prob(COUNTS.to(z)).sum(-1)
    weights = joint - q.log_prob(z)
    return float(weights.mean()), float(weights.std()) / n**0.5


@cache
def best_gaussian() -> tuple[float, float]:
    """Its ELBO and standard error."""
    pyro.set_rng_seed(0)
    gaussian = AutoFullRankNormal(few_counts)
    svi = SVI(few_counts, gaussian, NGVB(gaussian), BatchedELBO(16))
    for _ in range(40):
        svi.step(COUNTS)
    return elbo(gaussian)


def orthogonality(guide: AutoOrthogonalFlow) -> float:
    worst = 0.0
    for name, W in guide.natural_params().items():
        if name.startswith("weight_"):
            W = W.detach()
            error = (W.mT @ W - torch.eye(len(W), dtype=W.dtype)).abs().max()
            worst = max(worst, float(error))
    return worst


@pytest.mark.parametrize(("form", "optimizer"), [("scaled", IFVB), ("whitened", AIFVB)])
def test_beats_its_start_and_the_best_gaussian(form: str, optimizer: Any) -> None:
    best, error = best_gaussian()
    pyro.set_rng_seed(0)
    guide = AutoOrthogonalForm(few_counts, form=form)
    guide(COUNTS)
    start, start_error = elbo(guide)
    svi = SVI(few_counts, guide, optimizer(guide), BatchedELBO(32))
    for _ in range(100):
        svi.step(COUNTS)
    end, end_error = elbo(guide)
    assert end > start + 1.0 + 5.0 * (start_error + end_error)
    assert end > best + 3.0 * (error**2 + end_error**2) ** 0.5
    assert orthogonality(guide) < 1e-10


def banana() -> None:
    x = pyro.sample("x", dist.Normal(0.0, 1.0))
    pyro.sample("y", dist.Normal(0.7 * x.square(), 0.3))


def test_two_layers_hold_a_banana() -> None:
    """log Z is 0; the best Gaussian is 0.6 nats below."""
    pyro.set_rng_seed(0)
    guide = AutoOrthogonalFlow(banana, layers=2)
    svi = SVI(banana, guide, SPRING(guide), BatchedELBO(128, curvature="scores"))
    for _ in range(100):
        svi.step()
    with torch.no_grad():
        q = guide.get_posterior()
        z = q.rsample(torch.Size((40_000,)))
        x, y = z.unbind(1)
        joint = dist.Normal(0.0, 1.0).log_prob(x) + dist.Normal(0.7 * x**2, 0.3).log_prob(y)
        gap = q.log_prob(z) - joint
    assert float(gap.mean()) < 0.05 + 3.0 * float(gap.std()) / 200
    assert orthogonality(guide) < 1e-10


def test_printed_form_beats_its_start() -> None:
    """With the sigmoid, whose box of side 1 cannot hold this posterior; with Pyro's own loss."""
    pyro.set_rng_seed(0)
    guide = AutoOrthogonalForm(few_counts, form="paper", retraction="cholesky-qr")
    guide(COUNTS)
    start, start_error = elbo(guide)
    loss = Trace_ELBO(8, vectorize_particles=True, max_plate_nesting=1)
    svi = SVI(few_counts, guide, AIFVB(guide), loss)
    for _ in range(60):
        svi.step(COUNTS)
    end, end_error = elbo(guide)
    assert end > start + 5.0 * (start_error + end_error)
    assert orthogonality(guide) < 1e-10
    params = {name: p.detach() for name, p in guide.natural_params().items()}
    z = guide.family.draw(params, torch.Size((1000,)))
    centre = params["loc"] + 0.5 * params["weight_1"].sum(1)
    assert float((z - centre).norm(dim=1).max()) <= 0.5 * 3**0.5


def test_float32_stays_orthogonal() -> None:
    pyro.set_rng_seed(0)
    torch.set_default_dtype(torch.float32)
    guide = AutoOrthogonalFlow(few_counts, layers=2)
    svi = SVI(few_counts, guide, AIFVB(guide), BatchedELBO(8))
    for _ in range(50):
        svi.step(COUNTS.float())
    assert orthogonality(guide) < 1e-6
    assert all(p.dtype == torch.float32 for p in guide.natural_params().values())


class Run:
    """What a script holds."""

    def __init__(self, optimizer: Any, form: str) -> None:
        self.guide = AutoOrthogonalForm(few_counts, layers=2, form=form)
        self.optim = optimizer(self.guide)
        self.svi = SVI(few_counts, self.guide, self.optim, BatchedELBO(4))

    def steps(self, n: int) -> list[Any]:
        return [self.svi.step(COUNTS) for _ in range(n)]


#: an average is more state, of whatever form
@pytest.mark.parametrize(("form", "optimizer"), covering(FORMS, [IFVB, AIFVB], strength=1))
def test_resumed_run_is_the_unbroken_one(form: str, optimizer: Any, tmp_path: Path) -> None:
    assert_resumes(lambda: Run(optimizer, form), (COUNTS,), 12, 12, tmp_path)


def test_quantiles_and_copies() -> None:
    pyro.set_rng_seed(0)
    guide = AutoOrthogonalFlow(positive, layers=2)
    svi = SVI(positive, guide, AIFVB(guide), BatchedELBO(8))
    for _ in range(50):
        svi.step()
    quantiles = guide.quantiles([0.1, 0.5, 0.9])
    assert quantiles["rate"].shape == (3, 2) and quantiles["share"].shape == (3,)
    assert (quantiles["rate"].diff(dim=0) > 0).all() and (quantiles["rate"] > 0).all()
    assert ((quantiles["share"] > 0) & (quantiles["share"] < 1)).all()
    assert torch.equal(guide.median()["rate"], quantiles["rate"][1])
    draws = Predictive(positive, guide=guide, num_samples=2000, parallel=True)()["rate"]
    share = (draws.reshape(2000, 2) < quantiles["rate"][0]).double().mean(0)
    # 4,096 draws behind the quantile and 2,000 behind the share
    assert ((share - 0.1).abs() < 4.5 * (0.09 / 4096 + 0.09 / 2000) ** 0.5).all()
    for other in (copy.deepcopy(guide), pickle.loads(pickle.dumps(guide))):
        assert torch.equal(other.median()["rate"], guide.median()["rate"])


def test_to_arviz() -> None:
    pyro.set_rng_seed(0)
    guide = AutoOrthogonalFlow(few_counts)
    svi = SVI(few_counts, guide, IFVB(guide), BatchedELBO(4))
    for _ in range(10):
        svi.step(COUNTS)
    posterior: Any = to_arviz(few_counts, guide, COUNTS, num_samples=50)["posterior"]
    assert posterior["z"].shape == (1, 50, 3)


def test_one_latent_variable() -> None:
    def model() -> None:
        pyro.sample("x", dist.Gumbel(torch.zeros(()), 1.0))

    pyro.set_rng_seed(0)
    guide = AutoOrthogonalFlow(model, layers=2)
    svi = SVI(model, guide, AIFVB(guide), BatchedELBO(16))
    for _ in range(90):
        svi.step()
    low, middle, high = guide.quantiles([0.05, 0.5, 0.95])["x"]
    assert high - middle > 1.3 * (middle - low)  # exactly 2.604 against 1.464


def test_not_finite_gradient_is_skipped_and_named() -> None:
    def model(scale: Tensor) -> None:
        a = pyro.sample("a", dist.Normal(0.0, 1.0))
        b = pyro.sample("b", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        pyro.factor("f", -(b * scale).square().sum(-1) - a.square())

    pyro.set_rng_seed(0)
    guide = AutoOrthogonalFlow(model, layers=2)
    optim = IFVB(guide)
    svi = SVI(model, guide, optim, Trace_ELBO())
    svi.step(torch.tensor(1.0))
    before = {k: v.detach().clone() for k, v in guide.natural_params().items()}
    with pytest.warns(RuntimeWarning, match="skipped a step.*'b'"), pyro.validation_enabled(False):
        svi.step(torch.tensor(torch.inf))
    assert optim.report().skipped_sites == ("b",)
    assert all(torch.equal(v, before[k]) for k, v in guide.natural_params().items())


def test_rules_with_a_closed_form_are_refused() -> None:
    guide = AutoOrthogonalFlow(few_counts)
    with pytest.raises(ValueError, match="IFVB"):
        NGVB(guide)


@pytest.mark.parametrize("optimizer", [lambda _: Adam({"lr": 0.1}), StoredIFVB])
def test_optimizers_that_leave_the_rotations_are_refused(optimizer: Any) -> None:
    pyro.set_rng_seed(0)
    guide = AutoOrthogonalForm(few_counts, form="whitened", init_scale=1.0)
    svi = SVI(few_counts, guide, optimizer(guide), BatchedELBO(8))
    with pytest.raises(RuntimeError, match=r"no longer orthogonal.*IFVB"):
        for _ in range(100):
            svi.step(COUNTS)


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="activation must be one of"):
        AutoOrthogonalForm(few_counts, activation="relu")
    with pytest.raises(ValueError, match="layers must be"):
        AutoOrthogonalFlow(few_counts, layers=0)
