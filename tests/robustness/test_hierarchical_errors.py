"""What AutoHierarchical refuses, and what a unit whose data are of no use does to the others."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoGuideList
from torch import Tensor

import pyro_ngvi as ngvi
from pyro_ngvi.diagnostics.draws import Draws

Y = torch.tensor([1.0, -0.5, 2.0, 0.3, 0.9, -1.2]).double()
ZERO = torch.zeros(()).double()
MASK: Any = Y > 0.0
UNSEEN: Any = torch.arange(6) != 3


def scale() -> Any:
    return pyro.sample("s", dist.HalfNormal(ZERO + 1.0))


def good(index: Any = None, size: int = len(Y)) -> None:
    s = scale()
    with pyro.plate("units", size, subsample=index) as i:
        u: Any = pyro.sample("u", dist.Normal(ZERO, s))
        pyro.sample("y", dist.Normal(u, 0.5), obs=Y[i])


def no_plate() -> None:
    m: Any = pyro.sample("m", dist.Normal(ZERO, 1.0))
    fn: Any = dist.Normal(m, 1.0).expand([6])
    pyro.sample("y", fn.to_event(1), obs=Y)


def no_globals() -> None:
    with pyro.plate("units", 6):
        u: Any = pyro.sample("u", dist.Normal(ZERO, 1.0))
        pyro.sample("y", dist.Normal(u, 1.0), obs=Y)


def noise(loc: Tensor, sd: Any) -> Any:
    """With a kink: else all that is Gaussian is a block."""
    return dist.Laplace(loc, sd)


def data_see_several() -> None:
    s = scale()
    with pyro.plate("units", 6):
        u: Any = pyro.sample("u", dist.Normal(ZERO, s))
    pyro.sample("y", noise(u.cumsum(0), 1.0).to_event(1), obs=Y)


def gamma_units() -> None:
    s = scale()
    with pyro.plate("units", 6):
        u: Any = pyro.sample("u", dist.Normal(ZERO, s))
        t: Any = pyro.sample("t", dist.Gamma(ZERO + 2.0, 2.0))
        pyro.sample("y", noise(u, t), obs=Y)


def scales_that_are_units() -> None:
    s = scale()
    with pyro.plate("units", 6):
        u: Any = pyro.sample("u", dist.Normal(ZERO, s))
        w: Any = pyro.sample("w", dist.Normal(ZERO, u.exp()))
        pyro.sample("y", noise(w, 1.0), obs=Y)


def means_that_bend() -> None:
    s = scale()
    with pyro.plate("units", 6):
        u: Any = pyro.sample("u", dist.Normal(ZERO, s))
        w: Any = pyro.sample("w", dist.Normal(u.square(), 1.0))
        pyro.sample("y", noise(w, 1.0), obs=Y)


def priors_that_see_several() -> None:
    s = scale()
    with pyro.plate("units", 6):
        u: Any = pyro.sample("u", dist.Normal(ZERO, s))
        w: Any = pyro.sample("w", dist.Normal(u.cumsum(0), 1.0))
        pyro.sample("y", noise(w, 1.0), obs=Y)


def enumerated() -> None:
    s = scale()
    with pyro.plate("units", 6):
        u: Any = pyro.sample("u", dist.Normal(ZERO, s))
        k: Any = pyro.sample("k", dist.Bernoulli(ZERO + 0.3), infer={"enumerate": "parallel"})
        pyro.sample("y", dist.Normal(u + k, 1.0), obs=Y)


def masked_prior() -> None:
    s = scale()
    with pyro.plate("units", 6), poutine.mask(mask=MASK):
        u: Any = pyro.sample("u", dist.Normal(ZERO, s))
        pyro.sample("y", dist.Normal(u, 1.0), obs=Y)


def in_another_minibatch() -> None:
    s = scale()
    with pyro.plate("units", 6, dim=-1), pyro.plate("times", 4, subsample_size=3, dim=-2):
        u: Any = pyro.sample("u", dist.Normal(ZERO, s))
        pyro.sample("y", dist.Normal(u, 1.0), obs=Y.expand(3, 6))


def wide() -> None:
    s = scale()
    with pyro.plate("units", 6):
        fn: Any = dist.Normal(ZERO, s).expand([100])
        u: Any = pyro.sample("u", fn.to_event(1))
        pyro.sample("y", dist.Normal(u.sum(-1), 1.0), obs=Y)


REFUSED: list[tuple[Callable[..., None], str]] = [
    (no_plate, "no plate of units was found"),
    (no_globals, "there are no globals"),
    (data_see_several, "data see several units of 'units'"),
    (gamma_units, "'t' in the plate 'units' is Gamma"),
    (scales_that_are_units, "a scale among the units' sites u, w"),
    (means_that_bend, "a mean among the units' sites u, w is not linear"),
    (priors_that_see_several, "the priors of u, w in a unit depend on other units"),
    (enumerated, "'k' is enumerated"),
    (masked_prior, "the prior of 'u' stands under poutine.scale, poutine.mask"),
    (in_another_minibatch, "a subsampled plate beside 'units'"),
    (wide, "has 100 latent variables, more than 64"),
]


@pytest.mark.parametrize(("model", "part"), REFUSED, ids=[m.__name__ for m, _ in REFUSED])
def test_models_without_units_are_refused(model: Any, part: str) -> None:
    guide = ngvi.AutoHierarchical(model)
    for _ in range(2):  # the second call says the same
        with pytest.raises(ValueError, match=part) as error:
            guide()
        assert len(str(error.value)) <= 260


def test_locals_that_are_not_there() -> None:
    with pytest.raises(ValueError, match="locals= names 'v', and the latent sites"):
        ngvi.AutoHierarchical(good, locals=["v"])()


def test_locals_are_taken_at_their_word() -> None:
    guide = ngvi.AutoHierarchical(gamma_units, locals=["u"])
    svi = SVI(gamma_units, guide, ngvi.NGVB(guide), ngvi.BatchedELBO(4))
    svi.step()
    assert guide.units.names == ("u",) and guide.units.globals == ("s", "t")


def test_globals_must_make_an_autoguide() -> None:
    with pytest.raises(ValueError, match="globals= makes an autoguide"):
        ngvi.AutoHierarchical(good, globals=lambda model: torch.nn.Linear(1, 1))


def test_before_the_first_call() -> None:
    guide = ngvi.AutoHierarchical(good)
    with pytest.raises(RuntimeError, match="does not know the units yet"):
        guide.median()


@pytest.mark.parametrize(
    ("index", "part"),
    [([1, 1], "comes twice"), ([0, 6], "got the numbers 0 to 6"), ([-1, 2], "numbers -1 to 2")],
)
def test_numbers_of_units(index: list[int], part: str) -> None:
    guide = ngvi.AutoHierarchical(good)
    guide()
    before = {n: b.clone() for n, b in guide.sites.named_buffers()}
    with pytest.raises((ValueError, IndexError), match=part):
        guide(torch.tensor(index))
    assert all(torch.equal(b, before[n]) for n, b in guide.sites.named_buffers())


def part_of_the_data(y: Tensor) -> None:
    s = scale()
    with pyro.plate("units", 6, subsample_size=len(y)):
        u: Any = pyro.sample("u", dist.Normal(ZERO, s))
        pyro.sample("y", dist.Normal(u, 0.5), obs=y)


def test_numbers_of_units_that_the_model_does_not_look_at() -> None:
    """Else the data of a minibatch go to units at random."""
    guide = ngvi.AutoHierarchical(part_of_the_data)
    for _ in range(2):
        with pytest.raises(
            ValueError, match="draws numbers of units at which the model does not look"
        ):
            guide(Y[:3])
    guide(Y)
    assert guide.units.plate == "units"


@pytest.mark.parametrize("guide", [None, "auto", "AutoHierarchical"])
def test_a_fit_of_units_without_their_numbers(guide: str | None) -> None:
    with pytest.raises(ValueError, match=r"pyro.plate\('units', 6, subsample=index\)"):
        ngvi.fit(part_of_the_data, data=Y.split(2), guide=guide, max_steps=2, progress=False)


def test_another_number_of_units() -> None:
    guide = ngvi.AutoHierarchical(good)
    svi = SVI(good, guide, ngvi.NGVB(guide), ngvi.BatchedELBO(4))
    svi.step(torch.tensor([0, 1]))
    with pytest.raises(ValueError, match="has 9 units in this call, and had 6 before"):
        svi.step(torch.tensor([0, 1]), 9)
    with pytest.raises(ValueError, match="count is how many units come"):
        guide.add(0)
    with pytest.raises(ValueError, match="count is how many units come"):
        guide.add(1.5)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("bad", [[7], [-1], [0.5], [True] * 6])
def test_units_that_are_not_there_do_not_go(bad: Any) -> None:
    guide = ngvi.AutoHierarchical(good)
    for go in (lambda: guide.remove([0]), lambda: guide.add(1)):
        with pytest.raises(RuntimeError, match="does not know the units yet"):
            go()
    guide()
    with pytest.raises(ValueError, match="numbers of units, from 0 to 5, got"):
        guide.remove(bad)
    assert len(guide.sites) == 6


def test_a_part_of_a_list_of_guides() -> None:
    guide = AutoGuideList(good)
    guide.append(ngvi.AutoHierarchical(good))
    with pytest.raises(ValueError, match="Let its globals be the list"):
        guide()


def test_vectorised_particles_are_refused() -> None:
    guide = ngvi.AutoHierarchical(good)
    svi = SVI(good, guide, ngvi.NGVB(guide), Trace_ELBO(3, vectorize_particles=True))
    with pytest.raises(ValueError, match="draws one particle at a call"):
        svi.step()


@pytest.mark.parametrize("kind", ["hessian", "price", "scores"])
def test_curvature_of_the_loss_is_refused(kind: str) -> None:
    guide = ngvi.AutoHierarchical(good)
    svi = SVI(good, guide, ngvi.NGVB(guide), ngvi.BatchedELBO(4, curvature=kind))
    with pytest.raises(ValueError, match="AutoHierarchical has no use for"):
        svi.step()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_unit_whose_likelihood_is_not_finite_keeps_its_site(bad: float) -> None:
    weight = torch.ones(6).double()

    def model() -> None:
        s = scale()
        with pyro.plate("units", 6):
            u: Any = pyro.sample("u", dist.Normal(ZERO, s))
            pyro.factor("y", weight * dist.Normal(u, 0.5).log_prob(Y))

    guide = ngvi.AutoHierarchical(model)
    svi = SVI(model, guide, ngvi.NGVB(guide), ngvi.BatchedELBO(4))
    svi.step()
    before = guide.sites.linear.clone()
    weight[2] = bad
    with pytest.warns((UserWarning, RuntimeWarning)):
        svi.step()
    moved = (guide.sites.linear != before).squeeze(-1)
    assert moved.tolist() == [True, True, False, True, True, True]
    assert guide.sites.linear.isfinite().all() and guide.globals.loc.isfinite().all()


def test_units_without_data_keep_their_prior() -> None:
    def model(y: Tensor = Y) -> None:
        s = scale()
        with pyro.plate("units", 6):
            u: Any = pyro.sample("u", dist.Normal(ZERO, s))
            with poutine.mask(mask=UNSEEN):
                pyro.sample("y", dist.Normal(u, 0.5), obs=y)

    guide = ngvi.AutoHierarchical(model)
    svi = SVI(model, guide, ngvi.NGVB(guide), ngvi.BatchedELBO(4))
    for _ in range(5):
        svi.step()
    assert guide.sites.precision[3] == 0.0 and guide.sites.linear[3] == 0.0
    assert (guide.sites.precision[:3] > 0.0).all()


def test_large_counts_under_a_wide_prior() -> None:
    counts = torch.tensor([0.0, 3.0, 1e6, 40.0, 7e3, 1.0]).double()

    def model() -> None:
        s: Any = pyro.sample("s", dist.HalfNormal(ZERO + 20.0))
        with pyro.plate("units", 6):
            u: Any = pyro.sample("u", dist.Normal(ZERO, s))
            pyro.sample("y", dist.Poisson(u.exp()), obs=counts)

    guide = ngvi.AutoHierarchical(model)
    svi = SVI(model, guide, ngvi.NGVB(guide), ngvi.BatchedELBO(8))
    for _ in range(150):
        svi.step()
    middle = guide.median()["u"]
    assert torch.allclose(middle[[2, 4]], counts[[2, 4]].log(), atol=0.05)
    assert middle[0] < 0.0


def test_models_that_cannot_be_batched_and_leave_their_support_far_out() -> None:
    """exp(u) is 0 in float32 on the segments along which kinks are looked for."""
    y = torch.linspace(-1.0, 1.0, 6)

    def model() -> None:
        s: Any = pyro.sample("s", dist.HalfNormal(20.0))
        assert float(s.detach()) > 0.0  # no vmap here
        with pyro.plate("units", 6):
            u: Any = pyro.sample("u", dist.Normal(torch.zeros(()), s))
            pyro.sample("y", dist.Normal(0.0, u.exp()), obs=y)

    guide = ngvi.AutoHierarchical(model)
    svi = SVI(model, guide, ngvi.NGVB(guide), Trace_ELBO())
    svi.step()
    assert guide.units.smooth and (guide.sites.visits > 0).all()


@pytest.mark.parametrize("kind", ["one number", "no unit's"])
def test_a_number_for_the_data_of_several_units_is_not_told_apart(kind: str) -> None:
    index, design = torch.arange(6).repeat_interleave(2), torch.eye(6)
    design[:, 2] = 0.0  # as if that datum were flat in its unit: 0 * NaN is NaN

    def model() -> None:
        s = scale()
        with pyro.plate("units", 6):
            u: Any = pyro.sample("u", dist.Normal(ZERO, s))
        if kind == "one number":
            pyro.sample("y", dist.Normal(u[index], 1.0).to_event(1), obs=Y.repeat(2))
        else:
            with pyro.plate("data", 6):
                pyro.sample("y", dist.Normal(u @ design, 1.0), obs=Y)

    guide = ngvi.AutoHierarchical(model)
    guide()
    with pytest.raises(
        ValueError, match="a number of 'y' outside the plate 'units' is of sev"
    ) as e:
        guide.log_marginals()
    assert len(str(e.value)) <= 240 and "or nothing shows of which" in str(e.value)


# --- integrating units out


def subsampled(y: Tensor, size: int | None = None) -> None:
    s = scale()
    with pyro.plate("units", len(y), subsample_size=size) as i:
        u: Any = pyro.sample("u", dist.Normal(ZERO, s))
        pyro.sample("y", dist.Poisson(u.exp()), obs=y[i])


COUNTS = torch.tensor([0.0, 3.0, 1.0, 9.0, 2.0, 0.0])


def trained() -> Any:
    pyro.set_rng_seed(0)
    guide = ngvi.AutoHierarchical(subsampled)
    svi = SVI(subsampled, guide, ngvi.NGVB(guide), ngvi.BatchedELBO(8))
    for _ in range(20):
        svi.step(COUNTS)
    return guide


def test_collapse_wants_a_trained_guide_of_units_with_all_its_data() -> None:
    with pytest.raises(RuntimeError, match="does not know the units yet"):
        ngvi.collapse(ngvi.AutoHierarchical(subsampled), COUNTS)
    other: Any = ngvi.AutoFullRankNormal(subsampled)
    with pytest.raises(ValueError, match=r"Only AutoHierarchical has units.*AutoFullRank"):
        ngvi.to_arviz(subsampled, other, COUNTS, corrected=True)
    guide = trained()
    with pytest.raises(ValueError, match="the plate 'units' takes 2 of 6"):
        ngvi.collapse(guide, COUNTS, 2)
    with pytest.raises(ValueError, match="has 5 units in this call, and had 6 before"):
        ngvi.collapse(guide, COUNTS[1:])


def test_too_few_points_are_noticed() -> None:
    with pytest.warns(RuntimeWarning, match=r"off by 0\.\d+ nats or more. Pass points=2"):
        ngvi.collapse(trained(), COUNTS, points=1)


def test_weights_that_fail_say_what_to_do() -> None:
    """Of a guide that is moved far from the posterior."""
    guide = trained()
    with torch.no_grad():
        guide.globals.loc.add_(1.5)
        guide.globals.scale_tril.mul_(0.02)
    with pytest.warns(RuntimeWarning, match=r"^corrected=True cannot .*NUTS on ngvi.collapse"):
        found = ngvi.to_arviz(subsampled, guide, COUNTS, corrected=True, num_samples=100, seed=0)
    assert found.attrs["decision"] == "unusable"


def products(y: torch.Tensor) -> None:
    """Two-parameter item responses: a product of latent variables is not nearly Gaussian."""
    spread = pyro.sample("spread", dist.HalfNormal(1.0))
    with pyro.plate("items", y.shape[1], dim=-1):
        slope = pyro.sample("slope", dist.LogNormal(0.0, spread))
        level = pyro.sample("level", dist.Normal(0.0, 1.0))
    with pyro.plate("persons", len(y), dim=-2):
        skill = pyro.sample("skill", dist.Normal(0.0, 1.0))
        with pyro.plate("answers", y.shape[1], dim=-1):
            pyro.sample("y", dist.Bernoulli(logits=slope * (skill - level)), obs=y)


@pytest.mark.filterwarnings("ignore:Quadrature over the block is off")
def test_a_correction_that_does_not_work_is_not_recommended() -> None:
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    y = torch.bernoulli(torch.full((12, 3), 0.5))
    how: Any = {"guide": "AutoHierarchical", "max_steps": 5, "progress": False, "seed": 0}
    fit = ngvi.fit(products, y, **how)
    assert not fit.verdict.ok and "corrected=True" not in str(fit)
    words = r"corrected=True cannot be relied on here\. Not usable: log p\(y \| v\) is off by"
    with pytest.warns(RuntimeWarning, match=words):
        found = fit.to_arviz(corrected=True, num_samples=50, seed=0)
    assert found.attrs["decision"] == "unusable"


def test_corrected_draws_without_a_density_weigh_nothing() -> None:
    """Far out, as where a scale rounds to 0; they made an error of all of them."""
    log_p, log_q = torch.randn(2, 100)
    log_p[3], log_q[5] = torch.nan, torch.nan
    draws = Draws({}, log_q, log_p, 0.0, {}, {}, {}).without_nan()
    log_w = draws.weights.log_weights
    assert list(np.isneginf(log_w).nonzero()[0]) == [3, 5]
    left = [i for i in range(100) if i not in (3, 5)]
    ratio = (log_p - log_q).numpy()[left]
    weights = np.exp(draws.weights.psis_log_weights)
    assert weights[[3, 5]].sum() < 1e-12 and weights.sum() == pytest.approx(1.0)
    np.testing.assert_allclose(log_w[left] - log_w[left][0], ratio - ratio[0])
