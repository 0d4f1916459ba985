"""Conjugate-computation VI: exact where it should be, and its time beside that of others.

Run from the root of the repository: ``python -m benchmarks.cvi --help``.  Data sets of LIBSVM and the
UCI repository are read from the directory in ``PYRO_NGVI_DATA``.
"""

from __future__ import annotations

from ..paper_main import run_parts
from ..time_to_target import prepare

#: module of this package -> what it measures
PARTS = {
    "conjugate": "Conjugate models: one sweep against the closed form",
    "logistic": "Logistic regression: sweeps and seconds, beside NGVB and Adam",
    "gp_classification": "Gaussian processes with binary data and counts, beside GPyTorch's NGD",
    "minibatch": "a9a in minibatches, against all data at once",
    "state_space": "A long series of counts, by filtering and smoothing",
    "marginals": "Marginals with hyperparameters integrated out, beside long Markov chains and NUTS",
}


if __name__ == "__main__":
    prepare()
    run_parts("benchmarks.cvi", PARTS, "Conjugate-computation VI: exactness and time.")
