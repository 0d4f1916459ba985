"""Code that an error advises: the error is raised, the code is read out of it, and is run.

The table holds a part of the messages with code in them, not all; the first test holds it to messages
that the package has.
"""

import copy
import math
from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.distributions import Uniform
from pyro.distributions import transforms as T
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoDelta, AutoNormal
from pyro.optim import Adam  # pyright: ignore[reportAttributeAccessIssue]
from torch import Tensor

import pyro_ngvi as ngvi
from tests.registry import BASELINES, RULES
from tests.robustness.advice_cases import N, X, Y, advised, line, local, messages, said, steps

pytestmark = pytest.mark.usefixtures("plain_start")


def subsampled_plate(part: str) -> None:
    said_ = said(lambda: ngvi.AutoMeanFieldNormal(local)(), part)
    guide = advised(
        said_, "AutoGuideList(", model=local, f=lambda: pyro.plate("data", N, subsample_size=5)
    )
    guide.append(ngvi.AutoFullRankNormal(poutine.block(local, hide=["z"])))
    guide.append(advised(said_, "AutoNormal(", model=local))
    steps(local, guide, ngvi.NGVB(guide))


def scale_beside_sites(noncentred: bool) -> Callable[[str], None]:
    def check(part: str) -> None:
        def model(centred: bool = False) -> None:
            s: Any = pyro.sample("s", dist.HalfNormal(1.0))
            z: Any = pyro.sample("z", dist.Normal(0.0, s if centred else torch.ones(())))
            f = s * z * X if noncentred and not centred else z * X
            with pyro.plate("data", N):
                pyro.sample("y", dist.Normal(f, 0.5 if noncentred else s), obs=Y)

        centred = noncentred
        message = said(lambda: ngvi.AutoSites(model)(centred), part)
        assert "scale * z in the likelihood" in message
        guide = advised(message, "AutoGuideList(", model=model)
        guide.append(advised(message, "AutoSites(block", model=model))
        guide.append(advised(message, "AutoMeanFieldNormal(", model=model))
        steps(model, guide, ngvi.CVI(guide), ngvi.SitesELBO())

    return check


def optimizer_of_sites(rule: Callable[[Any], Any]) -> Callable[[str], None]:
    def check(part: str) -> None:
        guide = ngvi.AutoSites(line)
        message = said(lambda: rule(guide), part)
        optim = advised(message, "pyro_ngvi.CVI(", guide=guide)
        steps(line, guide, optim, advised(message, "pyro_ngvi.SitesELBO("))

    return check


def sites_in_another_loss(part: str) -> None:
    guide = ngvi.AutoSites(line)
    message = said(lambda: steps(line, guide, ngvi.CVI(guide)), part)
    optim = advised(message, "pyro_ngvi.CVI(", guide=guide)
    steps(line, guide, optim, advised(message, "pyro_ngvi.SitesELBO("))


def sites_with_adam(part: str) -> None:
    guide = ngvi.AutoSites(line)
    message = said(lambda: steps(line, guide, Adam({"lr": 0.01}), ngvi.SitesELBO()), part)
    steps(line, guide, advised(message, "pyro_ngvi.CVI(", guide=guide), ngvi.SitesELBO())


def no_curvature(kind: str, guide_of: Callable[[Any], Any]) -> Callable[[str], None]:
    def check(part: str) -> None:
        guide = guide_of(line)
        optim = getattr(ngvi.optim, kind)(guide, lr=0.1)
        message = said(lambda: steps(line, guide, optim), part)
        loss = advised(message, "pyro_ngvi.BatchedELBO(", num_particles=4)
        steps(line, guide, optim, loss)

    return check


def others_are_missing(part: str) -> None:
    def model() -> None:
        line()
        pyro.sample("c", dist.Normal(pyro.param("m", torch.zeros(())), 1.0), obs=torch.ones(()))

    guide = ngvi.AutoFullRankNormal(model)
    message = said(lambda: steps(model, guide, ngvi.NGVB(guide, others=None)), part)
    steps(model, guide, ngvi.NGVB(guide, others=advised(message, "pyro.optim.Adam(")))


def others_is_no_optimizer(part: str) -> None:
    guide, wrong = ngvi.AutoFullRankNormal(line), torch.optim.Adam([torch.zeros(1)])
    message = said(lambda: ngvi.NGVB(guide, others=wrong), part)  # pyright: ignore[reportArgumentType]
    steps(line, guide, ngvi.NGVB(guide, others=advised(message, "pyro.optim.Adam(")))


def ngvb_of_pyros_guide(part: str) -> None:
    message = said(lambda: ngvi.NGVB(AutoNormal(line)), part)
    guide = advised(message, "pyro_ngvi.AutoFullRankNormal(", model=line)
    steps(line, guide, ngvi.NGVB(guide))
    theirs = AutoNormal(line)
    steps(line, theirs, ngvi.IFVB(theirs))


def cvi_of_another(part: str) -> None:
    guide = ngvi.AutoFullRankNormal(line)
    message = said(lambda: ngvi.CVI(guide), part)
    sites = advised(message, "pyro_ngvi.AutoSites(", model=line)
    steps(line, sites, ngvi.CVI(sites), ngvi.SitesELBO())
    steps(line, guide, ngvi.NGVB(guide))


def spring_of_pyros_guide(part: str) -> None:
    message = said(lambda: ngvi.optim.SPRING(AutoNormal(line)), part)
    guide = advised(message, "pyro_ngvi.AutoCouplingFlow(", model=line)
    loss = ngvi.BatchedELBO(num_particles=16, curvature="scores")
    steps(line, guide, ngvi.optim.SPRING(guide), loss)


def spring_with_one_draw(part: str) -> None:
    guide = ngvi.AutoFullRankNormal(line)
    one = ngvi.BatchedELBO(num_particles=1, curvature="scores")
    message = said(lambda: steps(line, guide, ngvi.optim.SPRING(guide), one), part)
    fresh = ngvi.AutoFullRankNormal(line)
    steps(
        line,
        fresh,
        ngvi.optim.SPRING(fresh),
        advised(message, "BatchedELBO(", BatchedELBO=ngvi.BatchedELBO),
    )


def diagonal_of(kind: str, loss: str) -> Callable[[str], None]:
    def check(part: str) -> None:
        message = said(
            lambda: getattr(ngvi.optim, kind)(ngvi.AutoFullRankNormal(line), lr=0.1), part
        )
        guide = advised(message, "pyro_ngvi.AutoMeanFieldNormal(", model=line)
        optim = getattr(ngvi.optim, kind)(guide, lr=0.1)
        steps(line, guide, optim, ngvi.BatchedELBO(num_particles=4, curvature=loss))

    return check


def moving_support(part: str) -> None:
    def model(advice: str | None = None) -> None:
        s: Any = pyro.sample("s", dist.LogNormal(0.0, 1.0))
        x: Any = advised(advice, "s * pyro", s=s) if advice else pyro.sample("x", Uniform(0, s))
        pyro.sample("y", dist.Normal(x, 0.5), obs=torch.ones(()))

    message = said(lambda: ngvi.AutoMeanFieldNormal(model)(), part)
    fixed: Any = lambda: model(message)  # noqa: E731
    guide = ngvi.AutoMeanFieldNormal(fixed)
    steps(fixed, guide, ngvi.NGVB(guide))


def angle(part: str) -> None:
    loc, concentration = torch.zeros(()), torch.tensor(2.0)

    def model(advice: str | None = None) -> None:
        if advice is None:
            z: Any = pyro.sample("z", dist.VonMises(loc, concentration))
        else:
            z = advised(advice, "pyro.sample(")
            advised(advice, "pyro.factor(", z=z, loc=loc, concentration=concentration)
        pyro.sample("y", dist.Normal(z, 0.5), obs=torch.ones(()))

    message = said(lambda: ngvi.AutoMeanFieldNormal(model)(), part)
    fixed: Any = lambda: model(message)  # noqa: E731
    guide = ngvi.AutoMeanFieldNormal(fixed)
    steps(fixed, guide, ngvi.NGVB(guide))


def no_scores(part: str) -> None:
    guide = AutoDelta(line)
    assert said(lambda: steps(line, guide, ngvi.IFVB(guide)), part).endswith("by pyro.optim.Adam.")
    steps(line, guide, Adam({"lr": 0.01}))


def shared_flow(part: str) -> None:
    flow = T.affine_coupling(2)
    first = ngvi.AutoFlow(line, flow)
    first()
    with pytest.warns(UserWarning, match=part) as caught:
        ngvi.AutoFlow(line, flow)()
    message = str(caught[0].message)
    guide = ngvi.AutoFlow(line, advised(message, "copy.deepcopy(", flow=flow, copy=copy))
    steps(line, guide, ngvi.IFVB(guide))


def scores_without_arguments(part: str) -> None:
    def model(y: Tensor) -> None:
        line(y)

    def of(y: Tensor) -> None:
        for name in ("w", "b"):
            pyro.sample(name, dist.Normal(pyro.param(f"mean of {name}", y.mean().detach()), 1.0))

    message = said(lambda: SVI(model, of, ngvi.IFVB(of), Trace_ELBO()).step(Y), part)
    guide = advised(message, "pyro_ngvi.optim.remember_arguments(", guide=of)
    svi: Any = SVI(model, guide, ngvi.IFVB(guide), Trace_ELBO())
    assert all(math.isfinite(svi.step(Y)) for _ in range(3))


def no_matrix(part: str) -> None:
    message = said(lambda: ngvi.AutoMatrixNormal(line)(), part)
    guide = advised(message, "pyro_ngvi.AutoMeanFieldNormal(", model=line)
    steps(line, guide, ngvi.NGVB(guide))


def scheduled_by_pyro(part: str) -> None:
    guide = ngvi.AutoFullRankNormal(line)
    wrapped: Any = ngvi.NGVB(guide).pt_optim_constructor
    message = said(lambda: wrapped([torch.zeros(1)]), part)
    steps(line, guide, advised(message, "NGVB(", NGVB=ngvi.NGVB, guide=guide))


def no_estimate(part: str) -> None:
    guide, wrong = ngvi.AutoFullRankNormal(line), "low_rank"
    message = said(lambda: ngvi.IFVB(guide, fisher=wrong), part)  # pyright: ignore[reportArgumentType]
    steps(line, guide, ngvi.IFVB(guide, fisher=advised(message, "pyro_ngvi.fisher.LowRank(")))


def noise(part: str) -> None:
    net, wrong = torch.nn.Linear(1, 1), "wide"
    make: Any = lambda noise: ngvi.nn.bayesianize(net, "normal", num_data=N, noise=noise)  # noqa: E731
    message = said(lambda: make(wrong), part)
    model = make(advised(message, "lambda:"))
    guide = ngvi.AutoMeanFieldNormal(model)
    steps(lambda: model(X[:, None], Y[:, None]), guide_of_data(guide), ngvi.NGVB(guide))


def guide_of_data(guide: Any) -> Any:
    return lambda: guide(X[:, None], Y[:, None])


CASES: dict[str, list[Callable[[str], None]]] = {
    "lies in the subsampled plate": [subsampled_plate],
    ", not Gaussian, or has no data": [scale_beside_sites(True), scale_beside_sites(False)],
    "cannot step the sites of AutoSites": [
        optimizer_of_sites((RULES | BASELINES)[name])
        for name in ("NGVB", "IFVB", "AIFVB", "SPRING", "VON", "NAGVAC", "NoisyKFAC")
    ],
    "give its sites no gradient": [sites_in_another_loss],
    "No optimizer took": [sites_with_adam],
    "by a curvature, and": [
        no_curvature("VON", ngvi.AutoFullRankNormal),
        no_curvature("VOGN", ngvi.AutoMeanFieldNormal),
        no_curvature("Vadam", ngvi.AutoMeanFieldNormal),
    ],
    "Say who trains them": [others_are_missing],
    "others must be a pyro.optim.PyroOptim": [others_is_no_optimizer],
    "and found none in": [ngvb_of_pyros_guide, cvi_of_another, spring_of_pyros_guide],
    "compares the draws of a step": [spring_with_one_draw],
    "precision must be diagonal": [
        diagonal_of("IVON", "price"),
        diagonal_of("Vadam", "squared_gradient"),
    ],
    "it moves with other latent sites": [moving_support],
    "is an angle": [angle],
    "so it has no scores": [no_scores],
    "belongs to another guide too": [shared_flow],
    "scores are drawn by calling it again": [scores_without_arguments],
    "needs a latent site that is a matrix": [no_matrix],
    "want one for each tensor": [scheduled_by_pyro],
    "fisher must be an estimate": [no_estimate],
    "give the sd as a positive number, or a function that returns": [noise],
}


@pytest.mark.parametrize("part", CASES)
def test_the_package_says_so(part: str) -> None:
    assert any(part in message for message in messages())


@pytest.mark.parametrize(
    ("part", "case"),
    [(part, case) for part, cases in CASES.items() for case in cases],
    ids=lambda v: getattr(v, "__qualname__", None),
)
def test_the_advice_can_be_followed(part: str, case: Callable[[str], None]) -> None:
    case(part)


def test_a_full_gaussian_over_many_gets_more_particles() -> None:
    """Whoever names it, and without a draw of noise that a seed before would have given a fit."""

    def model(d: int) -> None:
        pyro.sample("x", dist.Normal(torch.zeros(d), 1.0).to_event(1))

    def particles(d: int, **how: Any) -> int:
        before = torch.get_rng_state()
        found = ngvi.advise(model, d, **how).loss.num_particles
        assert "guide" not in how or torch.equal(before, torch.get_rng_state())
        return found

    assert (particles(31), particles(32), particles(40, num_particles=8)) == (8, 32, 8)
    assert particles(40, guide="AutoFullRankNormal") == 32
    assert particles(40, guide="AutoMeanFieldNormal") == 8
    assert particles(40, guide="AutoFullRankNormal", optim="VON") == 8
    # the arguments come later, or with a minibatch
    assert ngvi.advise(model, guide=ngvi.AutoFullRankNormal).loss.num_particles == 8
    fit = ngvi.fit(model, data=[(40,)], guide="AutoFullRankNormal", max_steps=1, progress=False)
    assert fit.advice.loss.num_particles == 32
