"""What AutoSites refuses where data come, go or are left out, in sentences that name the fix."""

from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.contrib.gp.kernels import RBF
from pyro.infer import SVI
from pyro.infer.autoguide import AutoGuideList
from torch import Tensor

from pyro_ngvi import CVI, AutoMeanFieldNormal, AutoSites, SitesELBO
from pyro_ngvi.distributions import GaussianProcess, local_level
from pyro_ngvi.nn import bayesianize

N = 6
X = torch.linspace(-1.0, 1.0, N, dtype=torch.float64)
Y = (X + 1.0) ** 2


def line(X: Tensor, y: Tensor | None = None) -> None:
    b = pyro.sample("b", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(X)):
        pyro.sample("y", dist.Normal(b * X, 1.0), obs=y)


def two_groups(X: Tensor, y: Tensor) -> None:
    b = pyro.sample("b", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    with pyro.plate("data", len(X)):
        pyro.sample("y", dist.Normal(b[0] * X, 1.0), obs=y)
        pyro.sample("other", dist.Normal(b[1] + X, 1.0), obs=y)


def table(X: Tensor, y: Tensor) -> None:
    b = pyro.sample("b", dist.Normal(0.0, 1.0))
    with pyro.plate("rows", len(X)), pyro.plate("columns", 2):
        pyro.sample("y", dist.Normal(b * X, 1.0), obs=y.expand(2, N))


def effects(X: Tensor, y: Tensor) -> None:
    with pyro.plate("data", len(X)):
        f = pyro.sample("f", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Normal(f * X, 1.0), obs=y)


def process(X: Tensor, y: Tensor) -> None:
    f = pyro.sample("f", dist.MultivariateNormal(torch.zeros(len(X)), torch.eye(len(X))))
    with pyro.plate("data", len(X)):
        pyro.sample("y", dist.Normal(f, 1.0), obs=y)


def at_inputs(X: Tensor, y: Tensor) -> None:
    f = pyro.sample("f", GaussianProcess(RBF(1).requires_grad_(False), X))
    with pyro.plate("data", len(X)):
        pyro.sample("y", dist.Normal(f, 1.0), obs=y)


def shifted(X: Tensor, y: Tensor) -> None:
    b = pyro.sample("b", dist.Normal(0.0, 1.0))
    f = pyro.sample("f", GaussianProcess(RBF(1).requires_grad_(False), X))
    with pyro.plate("data", len(X)):
        pyro.sample("y", dist.Normal(f + b, 1.0), obs=y)


def chain(X: Tensor, y: Tensor) -> None:
    z = pyro.sample("z", local_level(len(X), initial_scale=1.0, step_scale=0.3))
    with pyro.plate("data", len(X)):
        pyro.sample("y", dist.Normal(z[:, 0], 1.0), obs=y)


def stepped(model: Callable[..., Any] = line, *args: Any) -> AutoSites:
    guide = AutoSites(model)
    SVI(model, guide, CVI(guide), SitesELBO()).step(X, Y, *args)
    return guide


BAD_NUMBERS: dict[str, Any] = {
    "too large": [0, N],
    "twice": [1, 3, 1],
    "fraction": [0.5],
    "short mask": torch.ones(3).bool(),
}
CHANGES: dict[str, Callable[[AutoSites, Any], Any]] = {
    "remove": lambda guide, numbers: guide.remove(numbers),
    "reset": lambda guide, numbers: guide.reset(numbers),
    "influence": lambda guide, numbers: guide.influence(groups=[numbers]),
}


def unchanged(guide: AutoSites) -> tuple[Tensor, ...]:
    q = guide.get_posterior()
    return (
        q.mean,
        q.covariance_matrix,
        *(p.detach().clone() for p in guide.natural_params().values()),
    )


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("case", BAD_NUMBERS)
def test_numbers_that_are_not_there(case: str, change: str) -> None:
    """Nothing has changed after the refusal."""
    guide = stepped()
    before = unchanged(guide)
    refused = r"more than once|ind(ex|ices)|numbers from 0 to 5, or by a mask"
    with pytest.raises((ValueError, IndexError), match=refused):
        CHANGES[change](guide, BAD_NUMBERS[case])
    assert all(torch.equal(a, b) for a, b in zip(before, unchanged(guide), strict=True))


def test_nothing_to_remove_is_no_error() -> None:
    guide = stepped()
    guide.remove([])
    guide.reset(torch.zeros(N).bool())
    assert guide.sites()["y"].linear.shape == (N, 1)


def test_all_data_go_and_others_come() -> None:
    guide = AutoSites(line)
    svi = SVI(line, guide, CVI(guide), SitesELBO())
    svi.step(X, Y)
    guide.remove(range(N))
    assert guide.get_posterior().variance.item() == pytest.approx(1.0)
    guide.add(2)
    svi.step(X[:2], Y[:2])
    other = AutoSites(line)
    SVI(line, other, CVI(other), SitesELBO()).step(X[:2], Y[:2])
    assert torch.allclose(guide.get_posterior().mean, other.get_posterior().mean)


def test_groups_have_names() -> None:
    guide = stepped(two_groups)
    for change in (lambda: guide.remove(0), lambda: guide.add(1), lambda: guide.reset(0)):
        with pytest.raises(ValueError, match="name a group of data, one of 'y', 'other'"):
            change()
    with pytest.raises(ValueError, match="no group 'z', one of 'y', 'other'"):
        guide.remove(0, group="z")
    with pytest.raises(ValueError, match="name a group of data"):
        guide.influence()
    assert len(guide.influence(group="other").distance) == N


@pytest.mark.parametrize("change", ["remove", "add"])
def test_data_of_two_dimensions_stay(change: str) -> None:
    guide = stepped(table)
    with pytest.raises(ValueError, match=r"shape \(2, 6\).*one dimension.*NaN.*reset"):
        getattr(guide, change)(1)
    guide.reset(1)  # which can be done
    assert guide.sites()["y"].precision.flatten().count_nonzero() == 2 * N - 1


@pytest.mark.parametrize("model", [effects, process, at_inputs, shifted, chain])
def test_blocks_with_an_entry_for_each_datum(model: Callable[..., Any]) -> None:
    """What the sites say is forgotten at once; a block of another size is refused."""
    guide = AutoSites(model)
    svi = SVI(model, guide, CVI(guide), SitesELBO())
    svi.step(X, Y)
    guide.reset([0])
    assert guide.sites()["y"].precision[0].item() == 0.0
    guide.remove(1)
    with pytest.raises(
        ValueError, match=r"A block of another size needs a guide of its own|states"
    ):
        svi.step(X[1:], Y[1:])


def test_before_the_first_call() -> None:
    guide = AutoSites(line)
    for ask in (guide.sites, guide.loo, guide.influence, guide.reset, lambda: guide.remove(0)):
        with pytest.raises(RuntimeError, match="does not know the model's sites yet"):
            ask()
    with pytest.raises(RuntimeError, match="does not know the model's sites yet"):
        guide.add(1)


def minibatch(X: Tensor, y: Tensor, size: int) -> None:
    b = pyro.sample("b", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(X), subsample_size=size) as i:
        pyro.sample("y", dist.Normal(b * X[i], 1.0), obs=y[i])


def test_minibatches_do_not_know_the_other_data() -> None:
    guide = stepped(minibatch, 4)
    index = guide.sites()["y"].precision[:, 0, 0].nonzero().squeeze(-1)
    before = unchanged_sites = [p.detach().clone() for p in guide.natural_params().values()]
    with pytest.raises(RuntimeError, match=r"what these data see.*guide\.refresh\(\*args\)"):
        guide.remove(index[:1])
    after = guide.natural_params().values()
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True)), unchanged_sites
    for ask in (guide.loo, guide.influence):
        with pytest.raises(ValueError, match="needs all data here, and this call has a minibatch"):
            ask()
    guide.refresh(X, Y, N)
    guide.remove(index[:1])


def test_diagnostics_after_a_change_need_the_data() -> None:
    guide = stepped()
    guide.remove(0)
    for what in ("loo", "influence"):
        with pytest.raises(ValueError, match="data were added or removed"):
            getattr(guide, what)()
        with pytest.raises(ValueError, match=r"data of shape \(6,\) in this call.*shape \(5,\)"):
            getattr(guide, what)(X, Y)
        getattr(guide, what)(X[1:], Y[1:])


def test_step_with_data_that_were_not_announced() -> None:
    guide = AutoSites(line)
    svi = SVI(line, guide, CVI(guide), SitesELBO())
    svi.step(X, Y)
    with pytest.raises(ValueError, match=r"Announce data .* by guide\.add\(count\)"):
        svi.step(X[1:], Y[1:])
    guide.remove(0)
    svi.step(X[1:], Y[1:])


def unnumbered(X: Tensor, y: Tensor) -> None:
    """A loader hands over the rows, and the plate draws numbers that nobody looks at."""
    b = pyro.sample("b", dist.Normal(0.0, 1.0))
    with pyro.plate("data", N, subsample_size=len(X)) as i:
        assert str(i) and i is not None and i.dtype == torch.long and len(i) == len(X)
        pyro.sample("y", dist.Normal(b * X + torch.zeros_like(i), 1.0), obs=y)


@pytest.mark.parametrize("first", [2, N])
@pytest.mark.parametrize(
    "model",
    [unnumbered, bayesianize(torch.nn.Linear(1, 1).double(), "normal", num_data=N, noise=1.0)],
)
def test_minibatches_without_numbers(model: Any, first: int) -> None:
    """Each datum would take the site of another one, and the answer would be far off."""
    guide = AutoSites(model)
    svi = SVI(model, guide, CVI(guide), SitesELBO())
    x = X if model is unnumbered else X[:, None]
    if first == N:
        svi.step(x, Y)
    with pytest.raises(ValueError, match="does not say which data: pass their numbers"):
        svi.step(x[:2], Y[:2])


def test_guides_of_part_of_the_latent_sites() -> None:
    def model(X: Tensor, y: Tensor) -> None:
        scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
        b = pyro.sample("b", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(X)):
            pyro.sample("y", dist.Normal(b * X, scale), obs=y)

    guide = AutoGuideList(model)
    part = AutoSites(pyro.poutine.block(model, hide=["scale"]))
    guide.append(part)
    guide.append(AutoMeanFieldNormal(pyro.poutine.block(model, expose=["scale"])))
    guide(X, Y)
    for ask in (part.loo, part.influence):
        with pytest.raises(NotImplementedError, match="other guides of the list infer 'scale'"):
            ask(X, Y)


def test_state_space_prior_has_no_joint_shift() -> None:
    influence = (guide := stepped(chain)).influence()
    assert influence.distance.shape == (N,)
    with pytest.raises(NotImplementedError, match=r"shift\(\) needs the joint posterior"):
        influence.shift([0])
    with pytest.raises(NotImplementedError, match="groups= needs the joint posterior"):
        guide.influence(groups=[[0, 1]])
