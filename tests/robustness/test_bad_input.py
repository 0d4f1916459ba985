"""Wrong models, guides, data and arguments: refused in a sentence that names what and where."""

import functools
import math
from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import SVI, Trace_ELBO, TraceMeanField_ELBO
from pyro.infer.autoguide import AutoDelta, AutoGuideList, AutoNormal
from pyro.nn import PyroModule
from torch import Tensor
from torch.distributions import AffineTransform

import pyro_ngvi as ngvi
from pyro_ngvi import NGVB, AutoFactorNormal, AutoFullRankNormal, BatchedELBO
from pyro_ngvi.optim import Constant
from tests.contract.registry import GUIDES, LOSSES, D, N, data, regression
from tests.covering import covering

guides = pytest.mark.parametrize("kind", GUIDES)
#: each guide and each loss: the refusals that take both are not made where they meet
guides_and_losses = pytest.mark.parametrize(("kind", "loss"), covering(GUIDES, LOSSES, strength=1))


def normal(name: str = "x") -> Tensor:
    return pyro.sample(name, dist.Normal(torch.zeros(3), 1.0).to_event(1))


def step(kind: str, loss: str, model: Any, *args: Any) -> Any:
    guide = GUIDES[kind](model)
    return SVI(model, guide, NGVB(guide), LOSSES[loss](2)).step(*args)


# --- models -----------------------------------------------------------------------------------


@guides_and_losses
@pytest.mark.parametrize("observed", [True, False])
def test_no_latent_site(kind: str, loss: str, observed: bool) -> None:
    def model() -> None:
        if observed:
            pyro.sample("y", dist.Normal(0.0, 1.0), obs=torch.tensor(0.0))

    with pytest.raises(RuntimeError, match="found no latent variables"):
        step(kind, loss, model)


DISCRETE = {
    "Bernoulli": lambda: dist.Bernoulli(0.5),
    "Categorical": lambda: dist.Categorical(torch.ones(3)),
    "Poisson": lambda: dist.Poisson(2.0),
}


@guides_and_losses
@pytest.mark.parametrize("fn", DISCRETE)
def test_discrete_latent_site(kind: str, loss: str, fn: str) -> None:
    def model() -> None:
        normal()
        pyro.sample("label", DISCRETE[fn]())

    with pytest.raises(ValueError, match=r"'label'(.|\n)*(infer={.enumerate.|hide=\['label'\])"):
        step(kind, loss, model)


@guides
def test_refused_model_is_refused_again(kind: str) -> None:
    """A second call says the same, and does not stumble over what the first left behind."""

    def model() -> None:
        with pyro.plate("data", 10, subsample_size=3):
            pyro.sample("local", dist.Normal(0.0, 1.0))

    guide = GUIDES[kind](model)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"'local' lies in the subsampled plate 'data'"):
            guide()


@guides_and_losses
def test_subsampled_local_latents(kind: str, loss: str) -> None:
    def model() -> None:
        with pyro.plate("data", 10, subsample_size=3):
            pyro.sample("local", dist.Normal(0.0, 1.0))

    with pytest.raises(ValueError, match=r"'local' .* plate 'data' \(3 of 10\).*create_plates"):
        step(kind, loss, model)


@guides
def test_sequential_plate(kind: str) -> None:
    def model() -> None:
        for i in pyro.plate("data", 3):
            pyro.sample(f"z_{i}", dist.Normal(0.0, 1.0))

    with pytest.raises(NotImplementedError, match=r"sequential pyro\.plate"):
        GUIDES[kind](model)()


@guides
def test_support_without_a_transform(kind: str) -> None:
    def model() -> None:
        pyro.sample("direction", dist.ProjectedNormal(torch.ones(3)))

    with pytest.raises(ValueError, match="spherical sample site 'direction'"):
        GUIDES[kind](model)()


SEEN: Any = torch.tensor([True, False, True])


def obs_mask(seen: Any) -> Callable[[], None]:
    def model() -> None:
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        with pyro.plate("data", 3):
            pyro.sample("y", dist.Normal(x, 1.0), obs=torch.ones(3), obs_mask=seen)

    return model


def padded(seen: Any) -> Callable[[], None]:
    def model() -> None:
        mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
        with pyro.plate("data", 3), poutine.mask(mask=seen):
            a = pyro.sample("a", dist.Normal(mean, 1.0))
            pyro.sample("y", dist.Normal(a, 1.0), obs=torch.ones(3))

    return model


def masked_events() -> None:
    fn: Any = dist.Gamma(torch.ones(2, 3), 1.0).mask(SEEN)
    pyro.sample("a", fn.to_event(2))


def flat_and_unseen() -> None:
    normal()
    pyro.sample("a", dist.Normal(0.0, 1.0).mask(False))


MASKED = {
    "obs_mask": (obs_mask(SEEN), "2 of the 3 entries of the latent site 'y_unobserved'"),
    "nothing missing": (obs_mask(SEEN | True), "3 of the 3 entries of .* 'y_unobserved'"),
    "padding": (padded(SEEN), "1 of the 3 entries of the latent site 'a'"),
    "in the distribution": (masked_events, "2 of the 6 entries of the latent site 'a'"),
    "flat and unseen": (flat_and_unseen, "1 of the 1 entries of the latent site 'a'"),
}


@guides
@pytest.mark.parametrize("case", MASKED)
def test_masked_latent_entries_that_nothing_depends_on(kind: str, case: str) -> None:
    """q has a density there and p has none: the ELBO would grow without bound."""
    model, message = MASKED[case]
    guide = GUIDES[kind](model)
    for _ in range(2):
        with pytest.raises(ValueError, match=f"{message}.*Mask the observed site alone"):
            guide()


def mask_on_the_data() -> None:
    with pyro.plate("data", 3):
        a = pyro.sample("a", dist.Normal(0.0, 1.0))
        with poutine.mask(mask=SEEN):
            pyro.sample("y", dist.Normal(a, 1.0), obs=torch.ones(3))


def flat_prior(minibatch: int = 3) -> Callable[[], None]:
    def model() -> None:
        a = pyro.sample("a", dist.Normal(torch.zeros(3), 1.0).to_event(1).mask(False))
        with pyro.plate("data", 3, subsample_size=minibatch) as index:
            pyro.sample("y", dist.Normal(a[index], 1.0), obs=torch.ones(3)[index])

    return model


def partly_flat(
    link: Callable[[torch.Tensor], torch.Tensor], minibatch: int = 3
) -> Callable[[], None]:
    def model() -> None:
        seen: Any = torch.tensor([True, False, False])
        with poutine.mask(mask=seen):
            a = pyro.sample("a", dist.Normal(torch.zeros(3), 1.0))
        with pyro.plate("data", 3, subsample_size=minibatch) as index:
            pyro.sample("y", dist.Normal(link(a)[index], 1.0), obs=torch.ones(3)[index])

    return model


class WithFunction(PyroModule):
    """Its attribute is called as Pyro calls the function within its handlers."""

    func = staticmethod(functools.partial(torch.clamp, min=-9.0))

    def forward(self) -> None:
        z = pyro.sample("z", dist.LogNormal(torch.zeros(3), 1.0).to_event(1))
        pyro.sample("y", dist.Normal(self.func(z), 1.0).to_event(1), obs=torch.ones(3))


ALLOWED = {
    "partly flat, no gradient": partly_flat(lambda a: torch.round(100.0 * a) / 100.0),
    "partly flat, kinked": partly_flat(torch.relu),
    "partly flat, minibatch": partly_flat(lambda a: a, minibatch=1),
    "attribute func": WithFunction(),
    "all true": padded(SEEN | True),
    "nothing observed": obs_mask(~SEEN & SEEN),
    "mask on the data": mask_on_the_data,
    "flat prior": flat_prior(),
    "flat prior, minibatch": flat_prior(minibatch=1),
    "flat prior, data hidden from the guide": poutine.block(flat_prior(), hide=["y"]),
}


@pytest.mark.parametrize(("kind", "case"), covering(GUIDES, ALLOWED, strength=1))
def test_masks_that_leave_every_entry_a_density(kind: str, case: str) -> None:
    state = torch.get_rng_state()
    GUIDES[kind](ALLOWED[case])._setup_prototype()
    if "minibatch" not in case:  # which the first run itself draws
        assert torch.equal(torch.get_rng_state(), state)


def nested_uniform() -> None:
    s = pyro.sample("s", dist.Gamma(5.0, 1.0))
    with pyro.plate("data", 3):
        pyro.sample("x", dist.Uniform(0.0, s))


def nested_below() -> None:
    s = pyro.sample("s", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    pyro.sample("x", dist.ImproperUniform(dist.constraints.less_than(s), (), (2,)))


MOVING = {"interval": nested_uniform, "half-line": nested_below}


@guides
@pytest.mark.parametrize("case", MOVING)
def test_support_that_moves_with_another_latent_site(kind: str, case: str) -> None:
    """The guide would keep the support of the first run."""
    guide = GUIDES[kind](MOVING[case])
    for _ in range(2):
        with pytest.raises(ValueError, match=r"support of the latent site 'x' is not fixed.*x = s"):
            guide()


def learned_interval(learn: bool = True) -> None:
    hi = pyro.param("hi", torch.arange(3.0, 7.0), constraint=dist.constraints.positive)
    hi = hi if learn else hi.detach()
    pyro.sample("x", dist.Uniform(0.0, hi).to_event(1))


@guides
def test_support_that_moves_with_a_learned_parameter(kind: str) -> None:
    guide = GUIDES[kind](learned_interval)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"site 'x' is not fixed.*a learned parameter"):
            guide()
    GUIDES[kind](lambda: learned_interval(learn=False))()


@guides
def test_support_is_not_checked_where_the_model_fails(kind: str) -> None:
    """Only the first run's values suit this model; the check leaves neither error nor draws."""
    runs = []

    def model() -> None:
        runs.append(1)
        s = pyro.sample("s", dist.Gamma(torch.full((3,), 5.0), 1.0).to_event(1))
        pyro.sample("x", dist.Uniform(0.0, s).to_event(1))
        torch.rand(len(runs) - 1)
        if len(runs) == 2:
            raise RuntimeError(f"no answer at {s}")

    state = torch.get_rng_state()
    GUIDES[kind](model, init=None)._setup_prototype()
    assert len(runs) == 2
    assert torch.equal(torch.get_rng_state(), state)


@guides
def test_start_that_is_not_finite(kind: str) -> None:
    def start(site: Any) -> Tensor:
        return torch.full(site["fn"].shape(), math.inf if site["name"] == "bad" else 0.0)

    def model() -> None:
        normal("good")
        pyro.sample("bad", dist.Normal(torch.zeros(2), 1.0).to_event(1))

    with pytest.raises(ValueError, match=r"not finite at the site 'bad'\. Pass another one"):
        GUIDES[kind](model, init_loc_fn=start)()


@guides_and_losses
@pytest.mark.parametrize("size", [3, 7])
@pytest.mark.parametrize("indexed", [False, True])
def test_plate_of_a_latent_site_that_changes_its_size(
    kind: str, loss: str, size: int, indexed: bool
) -> None:
    """Under an autoguide of Pyro, ``y[index]`` would silently leave out new data."""

    def model(y: Tensor) -> None:
        with pyro.plate("groups", len(y)) as index:
            z = pyro.sample("z", dist.Normal(0.0, 1.0))
            pyro.sample("y", dist.Normal(z, 1.0), obs=y[index] if indexed else y)

    guide = GUIDES[kind](model)
    svi = SVI(model, guide, NGVB(guide), LOSSES[loss](2))
    svi.step(torch.zeros(5))
    before = guide.get_posterior().mean.detach().clone()
    with pytest.raises(
        ValueError, match=rf"plate\('groups'\) at site . dim -1, ({size} vs 5|5 vs {size})"
    ):
        svi.step(torch.zeros(size))
    assert torch.equal(guide.get_posterior().mean, before)


# --- guides and optimizers that do not belong together ---------------------------------------


@guides
@pytest.mark.parametrize("loss", [Trace_ELBO, TraceMeanField_ELBO])
def test_guide_of_another_model_under_an_elbo_of_pyro(kind: str, loss: Any) -> None:
    """Pyro warns (an error in these tests) and names the site."""
    guide = GUIDES[kind](lambda: normal("other"))
    with pytest.raises(UserWarning, match=r"vars in guide but not model(.|\n)*'other'"):
        SVI(normal, guide, NGVB(guide), loss()).step()


@guides
def test_guide_of_another_model_under_batched_elbo(kind: str) -> None:
    guide = GUIDES[kind](lambda: normal("other"))
    with pytest.raises(ValueError, match=r"guide samples 'other', which is no site of the model"):
        SVI(normal, guide, NGVB(guide), BatchedELBO()).step()


@guides_and_losses
@pytest.mark.parametrize("set_up", [False, True])
def test_optimizer_of_another_guide(kind: str, loss: str, set_up: bool, plain_start: None) -> None:
    guide, other = GUIDES[kind](normal), GUIDES[kind](normal)
    if set_up:
        other()
    svi = SVI(normal, guide, NGVB(other), LOSSES[loss](2))
    with pytest.raises(
        ValueError, match=r"SVI trains another guide\. Build the optimizer with the"
    ):
        svi.step()
    assert guide.get_posterior().mean.tolist() == [0.0, 0.0, 0.0]


def test_optimizer_without_a_guide_of_ours() -> None:
    listed = AutoGuideList(normal)
    listed.append(AutoDelta(normal))
    for guide, name in (
        (AutoNormal(normal), "AutoNormal"),
        (listed, "AutoGuideList"),
        (normal, "normal"),
    ):
        with pytest.raises(ValueError, match=f"found none in {name}. Use for instance pyro_ngvi"):
            NGVB(guide)


def test_part_of_pyro_in_a_list_needs_others() -> None:
    def model() -> None:
        normal("x")
        normal("z")

    guide = AutoGuideList(model)
    guide.append(AutoFullRankNormal(poutine.block(model, expose=["x"])))
    guide.append(AutoDelta(poutine.block(model, hide=["x"])))
    with pytest.raises(ValueError, match=r"has others: AutoGuideList.1.z. .*others=pyro.optim"):
        SVI(model, guide, NGVB(guide, others=None), Trace_ELBO()).step()


# --- arguments --------------------------------------------------------------------------------

BAD_ARGUMENTS = [
    *[("lr", value, r"lr must lie in \(0, 1\], got") for value in (-0.1, 0.0, 1.5)],
    *[("lr", value, r"lr must lie in .*, got") for value in (math.nan, math.inf, "1", None)],
    *[("trust_radius", v, "trust_radius must be positive or None, got") for v in (-1.0, 0.0)],
    ("trust_radius", math.nan, "trust_radius must be positive or None, got nan"),
    *[("momentum", v, r"momentum must lie in \[0, 1\), got") for v in (-0.1, 1.0, math.inf)],
    ("momentum", math.nan, r"momentum must lie in \[0, 1\), got nan"),
    ("schedule", "cosine", 'schedule must be "noise", "constant", .* got \'cosine\''),
    ("schedule", 0.1, r"schedule must .* a function of k, or have init\(\) and gain\(\), got 0.1"),
    ("averaging", -1.0, "a power of log k that is not negative, or .* got -1.0"),
    *[("averaging", v, "averaging must be a bool, a power of log k") for v in (math.nan, math.inf)],
    ("averaging", "tail", r"averaging must be a bool, .* or have rate\(\), got 'tail'"),
    ("coordinates", "dual", "coordinates='dual' is not available for FullRankNormal"),
    ("others", "adam", r"others must be a pyro.optim.PyroOptim such as .*, got str"),
    ("others", torch.optim.Adam, r"others must be a pyro.optim.PyroOptim such as .*, got type"),
]


@pytest.mark.parametrize(("name", "value", "message"), BAD_ARGUMENTS)
def test_argument_of_the_optimizer(name: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NGVB(AutoFullRankNormal(normal), **{name: value})


@guides
@pytest.mark.parametrize("init_scale", [0, 0.0, -1.0, math.nan, math.inf, "0.1"])
def test_init_scale(kind: str, init_scale: Any) -> None:
    with pytest.raises(ValueError, match="init_scale must be a positive number, got"):
        GUIDES[kind](normal, init_scale=init_scale)


@guides
def test_init(kind: str) -> None:
    with pytest.raises(ValueError, match=r"init must be None or \"map\".*, got 'newton'"):
        GUIDES[kind](normal, init="newton")


@pytest.mark.parametrize("rank", [0, -1, 1.5])
def test_rank_that_is_no_positive_integer(rank: Any) -> None:
    with pytest.raises(ValueError, match=f"rank of at least 1, got rank={rank}"):
        AutoFactorNormal(normal, rank=rank)


@pytest.mark.parametrize("rank", [D, D + 4])
def test_rank_too_large(rank: int) -> None:
    guide = AutoFactorNormal(normal, rank=rank)
    for _ in range(2):
        with pytest.raises(ValueError, match=rf"rank={rank}, but .* only 3 dim.* at most 2"):
            guide()


# --- data -------------------------------------------------------------------------------------


@guides_and_losses
def test_empty_plate(kind: str, loss: str) -> None:
    """Pyro's own refusal, at the line of the plate."""
    X, y = data()
    with pytest.raises(ZeroDivisionError, match="size cannot be zero"):
        step(kind, loss, regression, X[:0], y[:0])


@guides
def test_empty_data_without_a_plate_leave_the_prior(kind: str) -> None:
    def model(y: Tensor) -> None:
        x = normal()
        pyro.sample("y", dist.Normal(x[:1].expand(len(y)), 1.0).to_event(1), obs=y)

    guide = GUIDES[kind](model)
    svi = SVI(model, guide, NGVB(guide, schedule=Constant(0.5)), BatchedELBO(8))
    for _ in range(40):
        svi.step(torch.zeros(0))
    mean = guide.get_posterior().mean.detach()
    torch.testing.assert_close(mean, torch.zeros(3), atol=1e-6, rtol=0)
    variance = guide.get_posterior().variance.detach()
    torch.testing.assert_close(variance, torch.ones(3), atol=1e-6, rtol=0)


@guides_and_losses
def test_nan_in_the_data(kind: str, loss: str) -> None:
    """The observed site is named, by Pyro's validation under its own losses."""
    X, y = data()
    y[N // 2] = math.nan
    what = r"site '?y'?(.|\n)*(found invalid values|1 of its 6 values are NaN)"
    with pytest.raises(ValueError, match=what):
        step(kind, loss, regression, X, y)


@pytest.mark.parametrize(
    "base", [dist.HalfNormal(1.0), dist.Independent(dist.Beta(torch.full((3,), 2.0), 2.0), 1)]
)
def test_bounds_that_a_distribution_hides_are_refused(base: Any) -> None:
    """An affine TransformedDistribution says that its support is the real line."""
    moves = AffineTransform(1.0, -2.0)

    def model() -> None:
        pyro.sample("z", dist.TransformedDistribution(base, [moves]))

    def moved() -> None:
        x = pyro.sample("x", base)
        pyro.deterministic("z", 1.0 - 2.0 * x)

    with pytest.raises(ValueError, match="prior of 'z' is an affine TransformedDistribution"):
        AutoFullRankNormal(model)()
    guide = AutoFullRankNormal(moved)
    assert (1.0 - 2.0 * guide()["x"] < 1.0).all()
    for own in (dist.AffineBeta(2.0, 2.0, 0.0, 3.0), dist.Gumbel(0.0, 1.0)):
        AutoFullRankNormal(lambda own=own: pyro.sample("z", own))()


@guides
def test_angles_are_refused(kind: str) -> None:
    """Their density has no end on the real line: the bound grows as q widens, above log Z."""

    def model() -> None:
        with pyro.plate("angles", 2):
            pyro.sample("z", dist.VonMises(torch.tensor(0.0), torch.tensor(2.0)))

    with pytest.raises(ValueError, match=r"the latent site 'z' is an angle.*Uniform\(-math.pi"):
        GUIDES[kind](model)()


def test_data_beyond_a_bound_that_moves() -> None:
    def model(y: torch.Tensor, least: float) -> None:
        end = pyro.sample("end", dist.Uniform(least, 10.0))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Uniform(0.0, end), obs=y)

    y = torch.tensor([0.3, 7.7])
    with pytest.raises(ValueError, match=r"1 of its 2 values, as 7\.7, are outside") as told:
        ngvi.fit(model, y, 0.0, progress=False)
    assert len(str(told.value)) <= 240
    # what it says: p(end | y) goes as end^-2 on (7.7, 10)
    fit = ngvi.fit(model, y, float(y.max()), seed=0, progress=False)
    mean = torch.tensor(10.0 / 7.7).log() / (1.0 / 7.7 - 1.0 / 10.0)
    assert fit.sample(4000, seed=0)["end"].mean().item() == pytest.approx(mean.item(), abs=0.1)


def test_a_discrete_site_may_be_data_that_were_not_passed() -> None:
    def model(X: torch.Tensor, y: Any = None) -> None:
        w: Any = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        with pyro.plate("data", len(X)):
            pyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)

    with pytest.raises(
        ValueError, match=r"site 'y' is discrete\. If it is data, pass them"
    ) as told:
        ngvi.fit(model, torch.ones(3, 2), progress=False)
    assert len(str(told.value)) <= 240
