"""What a new process loads and says: scripts that run one after the other in a new interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

IMPORT = """
import sys, torch, pyro
before = set(sys.modules)
import pyro_ngvi
heavy = {"arviz", "matplotlib", "pandas", "scipy", "sklearn", "xarray", "zuko"}
print(sorted(heavy & (set(sys.modules) - before)))
"""
#: torch 2.13 warns at it by DeprecationWarning, torch 2.15 by FutureWarning
FORWARD_MODE = """
import warnings, torch, pyro, pyro.distributions as dist, pyro_ngvi as ngvi
def model():
    pyro.sample("z", dist.StudentT(3.0, torch.zeros(3), 1.0).to_event(1))
guide = ngvi.AutoFullRankNormal(model)
loss = ngvi.BatchedELBO(2, curvature="hessian")
svi = pyro.infer.SVI(model, guide, ngvi.optim.VON(guide, lr=0.1), loss)
first = "torch._decomp.decompositions_for_jvp" not in sys.modules
with warnings.catch_warnings():
    warnings.simplefilter("error")
    svi.step()
print(first, "torch._decomp.decompositions_for_jvp" in sys.modules)
"""
ARVIZ = """

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "arviz":
            sys.meta_path.remove(self)
            warnings.warn("\\nArviZ is undergoing a major refactor to improve", FutureWarning)
            warnings.warn("of another kind", FutureWarning)
sys.meta_path.insert(0, Finder())
import numpy as np
from pyro_ngvi.diagnostics.arviz_compat import from_groups, summary
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    summary(from_groups({"posterior": {"x": np.zeros((1, 50))}}))
print([str(w.message) for w in seen if w.category is FutureWarning])
"""


@pytest.fixture(scope="module")
def printed() -> list[str]:
    """A line by script; warnings are on stderr, and are an error of these tests.

    For what a script looks at the process is still new: the first two import no ArviZ, and the second
    prints that nothing before it has taken a forward-mode derivative.
    """
    done = subprocess.run(
        [sys.executable, "-c", IMPORT + FORWARD_MODE + ARVIZ],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout.splitlines()


def test_the_import_leaves_arviz_and_matplotlib_alone(printed: list[str]) -> None:
    assert printed[0] == "[]"


def test_the_first_forward_mode_derivative_says_nothing(printed: list[str]) -> None:
    assert printed[1] == "True True"


def test_arviz_does_not_announce_its_plans_and_other_warnings_pass(printed: list[str]) -> None:
    assert printed[2:] == ["['of another kind']"]
