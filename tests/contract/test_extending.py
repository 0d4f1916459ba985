"""docs/tutorials/12_extending.py: its cells run in order, by public names; what they build is right.

These are the cells that are open to the reader; those that compare and plot run with the notebook.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch

PAGE = Path(__file__).parents[2] / "docs" / "tutorials" / "12_extending.py"
CELLS = re.findall(
    r"^# %%(?! \[markdown\])([^\n]*)\n(.*?)(?=^# %%|\Z)",
    PAGE.read_text(encoding="utf-8"),
    flags=re.M | re.S,
)
OPEN = [code for tags, code in CELLS if not tags]
#: torch's own warning, at the first use of forward mode
FORWARD_MODE = pytest.mark.filterwarnings("ignore:.torch.jit.script")


def member() -> None:
    """A posterior that is a member of the page's family, with 4 degrees of freedom."""
    loc, scale = torch.tensor([1.0, -2.0]), torch.tensor([0.5, 3.0])
    pyro.sample("z", dist.StudentT(4.0, loc, scale).to_event(1))


def four_counts(y: torch.Tensor) -> None:
    log_rate = pyro.sample("log_rate", dist.Normal(0.0, 10.0))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Poisson(log_rate.exp()), obs=y)


@pytest.fixture(scope="module")
def names() -> Iterator[dict[str, Any]]:
    before = torch.get_default_dtype()
    found: dict[str, Any] = {}
    for code in OPEN:
        exec(code, found)
    yield found
    torch.set_default_dtype(before)
    del found["ngvi"].curvature.ESTIMATORS["empirical_fisher"]


def test_the_page_uses_public_names_and_few_lines() -> None:
    tree = ast.parse("\n".join(code for _, code in CELLS))
    for node in ast.walk(tree):
        name = getattr(node, "attr", None) or getattr(node, "id", "")
        assert not name.startswith("_") or name in ("_", "__init__", "__version__")
        assert not isinstance(node, ast.ImportFrom) or "pyro_ngvi" not in str(node.module)
    sizes = {
        node.name: len(ast.unparse(node).splitlines())
        for node in ast.parse("\n".join(OPEN)).body
        if isinstance(node, ast.ClassDef | ast.FunctionDef)
    }
    assert sizes["MeanFieldStudentT"] <= 30 and sizes["FixedLength"] <= 15
    assert sizes["empirical_fisher"] <= 10


def test_the_fisher_matrix_is_that_of_the_scores(names: dict[str, Any]) -> None:
    """E[score score'] by 20,000 midpoints of the distribution function: exact to about 1e-4."""
    family = names["MeanFieldStudentT"](5.0)
    params = {"loc": torch.tensor([0.7]), "log_scale": torch.tensor([-0.4])}
    from scipy.stats import t

    levels = (torch.arange(20_000) + 0.5) / 20_000
    z = params["loc"] + params["log_scale"].exp() * torch.as_tensor(t.ppf(levels, 5.0)).unsqueeze(1)
    scores = family.pull(params, {k: v.T for k, v in family.score(params, z).items()})
    rows = torch.stack([scores["loc"][0], scores["log_scale"][0]], -1)
    wanted = torch.diag(torch.tensor([family.fisher["loc"], family.fisher["log_scale"]]))
    torch.testing.assert_close(rows.mT @ rows / 20_000, wanted, atol=1e-3, rtol=0)


def test_the_posterior_that_is_a_member_is_found(names: dict[str, Any]) -> None:
    """Sticking the landing leaves no noise at the posterior."""
    guide = type("AutoStudentT4", (names["AutoStudentT"],), {"df": 4.0})(member)
    svi = names["SVI"](member, guide, names["ngvi"].NGVB(guide), names["ngvi"].BatchedELBO(8))
    losses = [svi.step() for _ in range(400)]
    torch.testing.assert_close(guide.loc, torch.tensor([1.0, -2.0]), atol=0.02, rtol=0)
    torch.testing.assert_close(guide.log_scale.exp(), torch.tensor([0.5, 3.0]), atol=0, rtol=0.02)
    assert abs(losses[-1]) < 1e-2


def test_the_length_of_the_steps(names: dict[str, Any]) -> None:
    assert names["optim"].report().step_norm == pytest.approx(0.1)


def test_export_and_diagnostics_take_the_family(names: dict[str, Any]) -> None:
    guide, given = names["guide"], (names["sleep"], names["guide"], names["hours"])
    q = guide.quantiles([0.05, 0.5, 0.95])["mean"]
    assert q.shape == (3, 3) and (q.diff(dim=0) > 0).all()
    assert names["ngvi"].khat(*given).khat < 1.0
    idata = names["ngvi"].to_arviz(*given, num_samples=200)
    assert idata["posterior"]["mean"].shape == (1, 200, 3)


def test_the_family_joins_others(names: dict[str, Any]) -> None:
    guide = names["AutoMixedTails"](names["with_sd"])
    ngvi = names["ngvi"]
    svi = names["SVI"](names["with_sd"], guide, ngvi.NGVB(guide), ngvi.BatchedELBO(8))
    y = names["hours"][:, 2]
    for _ in range(50):
        svi.step(y)
    assert abs(guide.t_loc - y.mean()) < 0.1 and abs(guide.normal_loc - y.std().log()) < 0.2


@FORWARD_MODE
def test_a_registered_estimator_trains(names: dict[str, Any]) -> None:
    """With a nearly flat prior on its logarithm the rate is about Gamma(14, 4), a posteriori."""
    y, ngvi = torch.tensor([3.0, 5.0, 4.0, 2.0]), names["ngvi"]
    fitted = ngvi.AutoMeanFieldNormal(four_counts)
    loss = ngvi.BatchedELBO(8, curvature="empirical_fisher")
    svi = names["SVI"](four_counts, fitted, ngvi.optim.VON(fitted), loss)
    for _ in range(200):
        svi.step(y)
    assert float(fitted.median()["log_rate"].exp()) == pytest.approx(3.5, rel=0.15)


@FORWARD_MODE
def test_the_estimator_is_that_of_the_package(names: dict[str, Any]) -> None:
    ours, theirs = (
        names["trained"](kind, steps=3) for kind in ("empirical_fisher", "gauss_newton")
    )
    torch.testing.assert_close(ours.log_scale, theirs.log_scale)
