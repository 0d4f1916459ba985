"""docs/howto/gotchas*.md: their code runs, and does what the pages say."""

import re
from pathlib import Path
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoMultivariateNormal

import pyro_ngvi as ngvi

PAGES = sorted((Path(__file__).parents[2] / "docs" / "howto").glob("gotchas_*.md"))
PAGE = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)


def page_names() -> dict[str, Any]:
    names: dict[str, Any] = {"pyro": pyro}
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE, flags=re.M | re.S)
    assert blocks
    for block in blocks:
        exec(block, names)
    return names


class Interrupted(BaseException):
    pass


class Model:
    """Raises in call number ``cut``."""

    def __init__(self) -> None:
        self.calls, self.cut = 0, -1

    def __call__(self) -> None:
        self.calls += 1
        if self.calls == self.cut:
            raise Interrupted
        w: Any = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        pyro.sample("y", dist.Normal(w, 0.5).to_event(1), obs=torch.tensor([1.0, -1.0]))


@pytest.mark.parametrize("make", [ngvi.AutoFullRankNormal, AutoMultivariateNormal])
@pytest.mark.parametrize(("remedy", "alike"), [(True, True), (False, False)])
def test_a_step_cut_off_in_a_loss_of_pyro(make: Any, remedy: bool, alike: bool) -> None:
    """Pyro's own loss leaves the first particle's gradients; the page's function clears them."""
    step = page_names()["step_or_nothing"] if remedy else lambda svi: svi.step()
    ends = []
    for cut in (False, True):
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        model = Model()
        guide = make(model)
        ours = isinstance(guide, ngvi.AutoFullRankNormal)
        svi: Any = SVI(model, guide, (ngvi.NGVB if ours else ngvi.IFVB)(guide), Trace_ELBO(4))
        svi.step()
        if cut:
            model.cut = model.calls + 3
            with pytest.raises(Interrupted):
                step(svi)
        pyro.set_rng_seed(1)
        svi.step()
        ends.append([v.detach().clone() for v in pyro.get_param_store().values()])
    assert all(map(torch.equal, *ends)) is alike


def test_where_check_vectorized_agrees_and_later_draws_do_not() -> None:
    def model() -> None:
        z: Any = pyro.sample("z", dist.Normal(0.0, 1.0))
        shift = torch.where((z > 5.0).any(), 10.0, 0.0)
        with pyro.plate("data", 3):
            pyro.sample("y", dist.Normal(z + shift, 1.0), obs=torch.zeros(3))

    guide = ngvi.AutoMeanFieldNormal(model)
    ngvi.diagnostics.check_vectorized(model, guide)  # raises nothing at draws near zero
    far = pyro.poutine.condition(model, {"z": torch.tensor([[6.0], [0.0]])})
    with pyro.plate("particles", 2, dim=-2):
        fn: Any = pyro.poutine.trace(far).get_trace().nodes["y"].get("fn")
    assert fn.mean[1].eq(10.0).all()  # of the particle at 0, whose own run gives 0


def test_a_crossed_diagonal_leaves_a_density() -> None:
    """What the page says of a GPU, where the values of the diagonal are not read."""
    L, z = torch.tensor([[0.1, 0.0], [0.3, -0.2]]), torch.tensor([[0.2, -0.1]])
    family = ngvi.families.FullRankNormal()
    got = family.log_prob({"loc": torch.zeros(2), "scale_tril": L}, z)
    wanted = dist.MultivariateNormal(torch.zeros(2), L @ L.T).log_prob(z)
    torch.testing.assert_close(got, wanted)


def test_the_entries_that_errors_name_are_there() -> None:
    entries = {
        f"{page.stem.removeprefix('gotchas_')}.md#{heading_slug(heading)}"
        for page in PAGES
        for heading in re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.M)
    }
    source = Path(ngvi.__file__).parent.rglob("*.py")
    named = {n for f in source for n in re.findall(r'told_in\("(.*?)"\)', f.read_text("utf-8"))}
    assert len(named) > 10
    assert named <= entries


def heading_slug(heading: str) -> str:
    """The anchor of a heading, as GitHub and the site make it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def test_an_error_names_its_entry() -> None:
    def model(y: torch.Tensor) -> None:
        mean: Any = pyro.sample("mean", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Normal(mean * torch.ones(3, 1), 1.0), obs=y)

    with pytest.raises(ValueError, match="shapes were broadcast") as caught:
        ngvi.fit(model, torch.zeros(3))
    (note,) = caught.value.__notes__
    assert note.endswith("howto/gotchas_models.md#shapes-were-broadcast")
