"""A start in an exponential family: members by mode and curvature, conjugate posteriors at once."""

from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI
from torch import Tensor
from torch.func import grad, jacrev

import pyro_ngvi as ngvi
from pyro_ngvi.families import MeanFieldDirichlet, MeanFieldGamma, MeanFieldNormal, ProductFamily
from pyro_ngvi.guides.member import conjugate
from pyro_ngvi.runtime.model_density import ModelDensity
from tests.exact.test_conjugate_steps import MODELS

NORMAL, GAMMA, BETA, SIMPLEX = (
    MeanFieldNormal(),
    MeanFieldGamma(),
    MeanFieldDirichlet(2),
    MeanFieldDirichlet(4),
)
MIXED = ProductFamily(
    {"gamma": GAMMA, "dirichlet4": SIMPLEX, "normal": NORMAL, "beta": BETA},
    [("gamma", 2), ("dirichlet4", 3), ("normal", 1), ("gamma", 1), ("beta", 2), ("dirichlet4", 3)],
)


@pytest.mark.parametrize(
    ("family", "d"), [(NORMAL, 3), (GAMMA, 4), (BETA, 3), (SIMPLEX, 6), (MIXED, 12)]
)
def test_a_member_is_known_by_its_mode_and_its_curvature(family: Any, d: int) -> None:
    torch.manual_seed(0)
    params = family.init(torch.randn(d), 0.7)
    params = {name: v + 0.5 * torch.randn_like(v) for name, v in params.items()}
    z = family.mean(params)
    H = torch.eye(d)
    for _ in range(30):  # Newton, for the mode
        H = jacrev(grad(lambda x: family.log_prob(params, x)))(z)
        z = z - torch.linalg.solve(H, grad(lambda x: family.log_prob(params, x))(z))
    # what is off the diagonal does not count
    found = family.matched(z, -H + torch.eye(d).roll(1, 0))
    assert found.keys() == params.keys()
    for name, value in params.items():
        torch.testing.assert_close(found[name], value, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("name", MODELS)
def test_a_guide_starts_at_the_posterior_of_a_conjugate_model(name: str) -> None:
    model, y, posterior = MODELS[name]
    torch.manual_seed(0)
    before = torch.get_rng_state()
    guide = ngvi.AutoExponentialFamily(model)
    with torch.no_grad():
        guide._setup_prototype(y)
    assert torch.equal(torch.get_rng_state(), before)
    q = guide.site_distribution("z")
    for key in posterior.arg_constraints:
        torch.testing.assert_close(getattr(q, key), getattr(posterior, key), rtol=1e-6, atol=1e-9)


def bounded(y: Tensor, n: Any = 7.0) -> None:
    """A Gamma, a Beta on (2, 5), a Dirichlet in a plate."""
    x: Any = pyro.sample("x", dist.Gamma(y.new_tensor(0.3), 2.0))
    p: Any = pyro.sample("p", dist.Uniform(2.0 * y.new_ones(2), 5.0).to_event(1))
    with pyro.plate("rows", 2):
        s: Any = pyro.sample("s", dist.Dirichlet(y.new_tensor([0.2, 1.0, 3.0])))
        pyro.sample("counts", dist.Multinomial(probs=s, validate_args=False), obs=y)
    pyro.sample("wait", dist.Exponential(x), obs=y.new_tensor(1.5))
    pyro.sample("hits", dist.Binomial(n, (p - 2.0) / 3.0).to_event(1), obs=y[0, :2])


def test_a_posterior_of_independent_members_is_recognised() -> None:
    y, rest = torch.tensor([[0.0, 1.0, 4.0], [2.0, 0.0, 0.0]]), {}
    for dtype, rtol in ((torch.float64, 1e-7), (torch.float32, 1e-3)):
        guide = ngvi.AutoExponentialFamily(bounded, init=None)
        guide(y.to(dtype))
        density = ModelDensity(bounded, (y.to(dtype),), rest)
        far = guide.get_posterior().mean.detach() + 6.0
        found = conjugate(density, guide.family, far)
        assert found is not None
        alpha = torch.tensor([0.2, 1.0, 3.0]) + y
        beta = torch.stack([1.0 + y[0, :2], 8.0 - y[0, :2]], -1)
        right = {"dirichlet3_log_concentration": alpha, "beta_log_concentration": beta}
        right |= {"gamma_log_concentration": torch.tensor([1.3])}
        right |= {"gamma_log_mean": torch.tensor([1.3 / 3.5])}
        for name, value in right.items():
            torch.testing.assert_close(found[name].exp(), value.to(dtype), rtol=rtol, atol=0.0)


def test_a_posterior_of_others_is_not() -> None:
    def weak(y: Tensor, coupling: float) -> None:
        rate: Any = pyro.sample("rate", dist.Gamma(y.new_ones(2), 1.0).to_event(1))
        pyro.sample("y", dist.Poisson(rate * (1.0 + coupling * rate.flip(0))).to_event(1), obs=y)

    for coupling, is_one in ((0.0, True), (0.03, False), (0.3, False)):
        guide = ngvi.AutoExponentialFamily(weak, init=None)
        guide(COUNTS[2:], coupling)
        density = ModelDensity(weak, (COUNTS[2:], coupling), {})
        theta = guide.get_posterior().mean.detach()
        assert (conjugate(density, guide.family, theta) is not None) is is_one


COUNTS, HITS = torch.tensor([0.0, 1.0, 0.0, 5.0]).double(), torch.tensor([8.0, 1.0]).double()


def rates(counts: Tensor, hits: Tensor) -> None:
    """Nothing of it is conjugate: rates share a factor, and two of the data tell of two sites."""
    one = counts.new_ones(())
    each: Any = pyro.sample("each", dist.Gamma(one.expand(4), 1.0).to_event(1))
    factor: Any = pyro.sample("factor", dist.HalfNormal(2.0 * one))
    p: Any = pyro.sample("p", dist.Beta(0.5 * one.expand(2), 1.0).to_event(1))
    share: Any = pyro.sample("share", dist.Dirichlet(one.expand(3)))
    pyro.sample("counts", dist.Poisson(each * factor).to_event(1), obs=counts)
    pyro.sample(
        "hits", dist.Binomial(10.0 * one, p * (1.0 - 0.1 * share[:2])).to_event(1), obs=hits
    )


def test_a_start_is_near_the_best_member() -> None:
    """Within half a nat; standard errors of both ELBOs are below 0.03."""
    elbos = []
    for init, steps in (("auto", 0), (None, 200), (None, 0)):
        pyro.clear_param_store()
        torch.manual_seed(0)
        guide = ngvi.AutoExponentialFamily(rates, init=init)
        guide(COUNTS, HITS)
        svi = SVI(rates, guide, ngvi.NGVB(guide), ngvi.BatchedELBO(8))
        for _ in range(steps):
            svi.step(COUNTS, HITS)
        elbos.append(-ngvi.BatchedELBO(2_000).loss(rates, guide, COUNTS, HITS))
    found, best, point = elbos
    assert found > best - 0.5
    assert point < best - 3.0


def test_a_minibatch_is_not_searched() -> None:
    def minibatch(y: Tensor) -> None:
        rate: Any = pyro.sample("rate", dist.Gamma(y.new_ones(()), 1.0))
        with pyro.plate("data", len(y), subsample_size=2) as i:
            pyro.sample("y", dist.Poisson(rate), obs=y[i])

    guide = ngvi.AutoExponentialFamily(minibatch)
    guide(COUNTS)
    assert guide.start_report is None
