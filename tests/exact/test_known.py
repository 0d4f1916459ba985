"""A branch on what is known must not change results: with and without it, bit for bit."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO
from torch.func import vmap

import pyro_ngvi as ngvi
from pyro_ngvi.families import FactorNormal, FullRankNormal, MeanFieldNormal
from pyro_ngvi.linalg import host
from pyro_ngvi.linalg.host import apart, choose, fixed_normal, host_bool, own_random_state
from pyro_ngvi.optim import NoiseClock, Tail
from pyro_ngvi.optim.natural_gradient import NaturalGradientRule
from pyro_ngvi.optim.state import flat

D = 6
FAMILIES = {"mean": MeanFieldNormal(), "full": FullRankNormal(), "factor": FactorNormal(2)}


@pytest.fixture
def unknown(monkeypatch):
    """Call it, and no value is known any more, as on a GPU."""

    def make_unknown() -> None:
        monkeypatch.setattr(host, "at_hand", lambda x: False)

    return make_unknown


def test_known_and_choose():
    yes, no = torch.tensor(True), torch.tensor(False)
    assert host_bool(yes) is True and host_bool(no) is False
    assert host_bool(yes.to("meta")) is None
    seen = []
    vmap(lambda x: seen.append(host_bool(x > 0)) or x)(torch.ones(2))
    assert seen == [None]
    x, y = {"a": torch.ones(3)}, {"a": torch.zeros(3)}
    assert torch.equal(choose(yes, x, y)["a"], x["a"])
    assert torch.equal(choose(no, x, y)["a"], y["a"])


def test_fixed_normal_numbers_are_plain_and_the_same_under_vmap():
    plain, before, seen = fixed_normal(3, seed=1), torch.get_rng_state(), []

    def program(x):
        seen.append(torch.equal(fixed_normal(3, seed=1), plain))
        return x

    vmap(program, randomness="different")(torch.ones(2))
    assert seen == [True]
    assert torch.equal(torch.get_rng_state(), before)


def test_streams_share_no_seed() -> None:
    seeds = {apart(seed, stream) for seed in range(50) for stream in range(20)}
    assert len(seeds | {*range(50)}) == 1050


def test_a_seed_of_its_own_is_none_of_a_gpu_that_is_not_in_use(monkeypatch):
    """Which would have it once it is, in place of the seed that was given to it."""
    seeds = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
    torch.manual_seed(3)
    drawn = torch.rand(5)
    with own_random_state(3):
        assert torch.equal(torch.rand(5), drawn)
    assert seeds == [3]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with own_random_state(4):
        pass
    assert seeds == [3, 4]


def updates(family, momentum, averaging):
    """Ten updates on gradients of which some are zero, not finite, or too large to square."""
    rule = NaturalGradientRule(
        family, schedule=NoiseClock(), momentum=momentum, averaging=averaging
    )
    g = torch.Generator().manual_seed(0)
    params = family.init(torch.zeros(D, dtype=torch.float32), 0.5)
    state, results = rule.init(params), []
    for k in range(10):
        grads = {name: torch.randn(p.shape, generator=g).to(p) for name, p in params.items()}
        special = {3: 0.0, 5: math.nan, 6: math.inf, 7: 1e30}.get(k, 1.0)
        grads = {name: special * v for name, v in grads.items()}
        params, state, report = rule.update(params, grads, state)
        results.append({**params, **flat(state), **vars(report)})
    return results


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("averaging", [None, Tail()], ids=["iterate", "average"])
def test_update(family, momentum, averaging, unknown):
    with_answers = updates(family, momentum, averaging)
    unknown()
    without = updates(family, momentum, averaging)
    assert [bool(r["finite"]) for r in without] == [k not in (5, 6) for k in range(10)]
    for one, other in zip(with_answers, without, strict=True):
        assert one.keys() == other.keys()
        for name in one:
            assert torch.equal(one[name], other[name]), name
            assert one[name].dtype == other[name].dtype, name


def model():
    pyro.sample("x", dist.Normal(torch.zeros(D), 1.0).to_event(1))


def run():
    """Steps of an averaging optimizer with somebody else's write between."""
    torch.manual_seed(0)
    guide = ngvi.AutoMeanFieldNormal(model)
    svi = SVI(model, guide, ngvi.NGVB(guide), Trace_ELBO())
    seen = []
    for k in range(6):
        if k == 3:
            with torch.no_grad():
                guide.loc.add_(1.0)
        svi.step()
        seen += [guide.loc.detach().clone(), guide.sampling_posterior().mean.detach()]
    return torch.stack(seen)


def test_lag(unknown):
    with_answers = run()
    unknown()
    assert torch.equal(run(), with_answers)
