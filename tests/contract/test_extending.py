"""docs/howto/extending.md: its blocks run in order, by public names, and what they build is right."""

import ast
import re
from pathlib import Path
from typing import Any

import pytest
import torch

PAGE = (Path(__file__).parents[2] / "docs" / "howto" / "extending.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE, flags=re.M | re.S)


@pytest.fixture(scope="module")
def names() -> dict[str, Any]:
    torch.manual_seed(0)
    found: dict[str, Any] = {}
    for block in BLOCKS:
        exec(block, found)
    del found["ngvi"].curvature.ESTIMATORS["empirical_fisher"]
    return found


def test_the_page_uses_public_names_and_few_lines() -> None:
    tree = ast.parse("\n".join(BLOCKS))
    for node in ast.walk(tree):
        name = getattr(node, "attr", None) or getattr(node, "id", "")
        assert not name.startswith("_") or name in ("_", "__init__")
        assert not isinstance(node, ast.ImportFrom) or "pyro_ngvi" not in str(node.module)
    sizes = {
        node.name: len(ast.unparse(node).splitlines())
        for node in tree.body
        if isinstance(node, ast.ClassDef | ast.FunctionDef)
    }
    assert sizes["MeanFieldStudentT"] <= 30 and sizes["FixedLength"] <= 15


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
    """The first guide of the page, refitted: sticking the landing leaves no noise at the posterior."""
    guide = names["AutoStudentT"](names["model"])
    svi = names["SVI"](
        names["model"], guide, names["ngvi"].NGVB(guide), names["ngvi"].BatchedELBO(8)
    )
    losses = [svi.step() for _ in range(400)]
    torch.testing.assert_close(guide.loc, torch.tensor([1.0, -2.0]), atol=0.02, rtol=0)
    torch.testing.assert_close(guide.log_scale.exp(), torch.tensor([0.5, 3.0]), atol=0, rtol=0.02)
    assert abs(losses[-1]) < 1e-2


def test_the_length_of_the_steps(names: dict[str, Any]) -> None:
    assert names["optim"].report().step_norm == pytest.approx(0.1)


def test_export_and_diagnostics_take_the_family(names: dict[str, Any]) -> None:
    guide = names["guide"]
    q = guide.quantiles([0.05, 0.5, 0.95])["z"]
    assert q.shape == (3, 2) and (q.diff(dim=0) > 0).all()
    assert names["ngvi"].khat(names["model"], guide).khat < 1.0
    idata = names["ngvi"].to_arviz(names["model"], guide, num_samples=200)
    assert idata["posterior"]["z"].shape == (1, 200, 2)


def test_a_registered_estimator_trains(names: dict[str, Any]) -> None:
    """With a nearly flat prior on its logarithm the rate is about Gamma(14, 4), a posteriori."""
    log_rate = names["fitted"].median()["log_rate"]
    assert float(log_rate.exp()) == pytest.approx(3.5, rel=0.15)
