"""docs/run_elsewhere.py finds what the pages show of other packages; `make elsewhere` runs it."""

import ast
from typing import Any

import numpy as np
import pytest

from docs import run_elsewhere


@pytest.mark.parametrize("name", run_elsewhere.PACKAGES)
def test_blocks_are_found_and_compile(name: str) -> None:
    code = run_elsewhere.block(name)
    if name == "Stan":
        assert code.startswith("data {") and "model {" in code
        return
    imported = {
        alias.name.split(".")[0]
        for node in ast.walk(ast.parse(code))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in (node.names if isinstance(node, ast.Import) else [ast.alias(str(node.module))])
    }
    assert run_elsewhere.PACKAGES[name] in imported
    assert "not run" not in code


def test_what_is_not_installed_is_left_out(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(run_elsewhere.PACKAGES, "PyMC", "no_such")
    monkeypatch.setattr(run_elsewhere, "find_spec", lambda name: None)
    monkeypatch.setattr(run_elsewhere, "ours", lambda: {"fit": Fit(0.0)})
    run_elsewhere.main(["--only", "PyMC"])
    assert "PyMC: left out, no_such is not installed" in capsys.readouterr().out


class Fit:
    """Draws whose mean is off by so many sds in the first entry of w."""

    def __init__(self, shift: float) -> None:
        noise = np.random.default_rng(int(shift * 10.0) + 1)
        w = noise.normal(size=(1, 1000, 3))
        w[0, :, 0] += shift
        values: Any = {"a": noise.normal(size=(1, 1000)), "w": w}
        self.elbo = (-55.0, 0.01)
        self.idata = Idata({k: Values(v) for k, v in values.items()})


class Idata:
    def __init__(self, posterior: Any) -> None:
        self.posterior = posterior


class Values:
    def __init__(self, values: Any) -> None:
        self.values = values

    def to_numpy(self) -> Any:
        return self.values


def test_what_is_allowed() -> None:
    """t sds cost t^2 / 2 nats: 0.5 sds are allowed at a gap of 0.125 and not at one of 0.

    The noise of two times 1,000 draws is allowed beside it: 4 sqrt(2 / 1000) = 0.18 sds.
    """
    own = {k: v.values[0] for k, v in Fit(0.0).idata.posterior.items()}
    names = {"fit": Fit(0.5)}
    assert "allowed" in run_elsewhere.agree(names, own, 0.125)
    with pytest.raises(AssertionError):
        run_elsewhere.agree(names, own, 0.0)
    with pytest.raises(AssertionError, match="below our ELBO"):
        run_elsewhere.agree(names, own, 1.5)
    # their standard error is that of four numbers with a variance of 1 / 6
    found = run_elsewhere.gap(names, [-55.5, -56.5, -56.0, -56.0])
    assert found == pytest.approx(1.0 + 2.0 * (0.01**2 + (1 / 6) / 4) ** 0.5)
