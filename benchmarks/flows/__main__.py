"""Flow guides beside Pyro's own: a table a target.

Run from the root of the repository: ``python -m benchmarks.flows --help``; for instance
``python -m benchmarks.flows --only hard_targets --data funnel10 banana --seeds 3 --quick``.  Targets
of posteriordb are read from the directory in ``PYRO_NGVI_DATA``.
"""

from __future__ import annotations

from ..paper_main import run_parts

#: module of this package -> what it measures
PARTS = {
    "hard_targets": "Targets with known answers: ELBO at equal time, k-hat, distance to exact draws",
    "preconditioners": "Natural gradients of one flow by several estimates of the Fisher matrix",
    "example3": "Example 3 of the paper on IFVB: the printed orthogonal flow on German credit",
}


if __name__ == "__main__":
    run_parts("benchmarks.flows", PARTS, "Flow guides beside Pyro's own, at equal time.")
