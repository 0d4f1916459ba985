"""Walsh-Hadamard variational inference (Rossi, Marmin & Filippone 2020), run again.

Run from the root of the repository: ``python -m benchmarks.whvi_paper --help``.  The UCI sets are read
from the directory in ``PYRO_NGVI_DATA``.
"""

from __future__ import annotations

from ..paper_main import run_parts

#: module of this package -> what it repeats
PARTS = {
    "table1": "Table 1: UCI regression, RMSE / test MNLL in nats",
    "optimizers": "The bound by NGVB and by Adam",
    "cost": "Parameters and the time of a step against width",
    "figure2": "Figure 2: Gaussian processes by random features, RMSE against parameters",
}


if __name__ == "__main__":
    run_parts("benchmarks.whvi_paper", PARTS, "Walsh-Hadamard variational inference, run again.")
