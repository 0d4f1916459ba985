"""Hierarchical models, run from the root: ``python -m benchmarks.hierarchical --help``."""

from __future__ import annotations

from ..paper_main import run_parts
from ..time_to_target import prepare

#: module of this package -> what it measures
PARTS = {
    "fits": "Six models against NUTS: globals and effects, steps and seconds",
    "corrected": "The same models, draws as they are and put right by weights on the globals",
    "blocks": "One block given hyperparameters (series, field, crossed, nested, spatial) against NUTS",
    "scale": "A hundred thousand groups in minibatches, beside AutoNormal and Adam",
}


if __name__ == "__main__":
    prepare()
    run_parts("benchmarks.hierarchical", PARTS, "Hierarchical models: answers, steps, seconds.")
