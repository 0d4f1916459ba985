"""Results of the papers on the Bayesian learning rule again: paper / this package, line by line.

Run from the root of the repository: ``python -m benchmarks.blr_papers --help``.  The data sets are
read from the directory in ``PYRO_NGVI_DATA``; "digits" comes with scikit-learn.
"""

from __future__ import annotations

from ..paper_main import run_parts

#: module of this package -> what it repeats
PARTS = {
    "fig1": "Khan & Nielsen (2018), figure 1(b): test log loss in bits by epoch",
    "slang": "Mishkin et al. (2018), table 1: logistic regression, nats",
    "digits": "A small convolutional network on scikit-learn's digits (no published numbers)",
    "uci": "Khan et al. (2018) and Mishkin et al. (2018): UCI regression, RMSE and log-likelihood",
}


if __name__ == "__main__":
    run_parts("benchmarks.blr_papers", PARTS, "Papers on the Bayesian learning rule, run again.")
