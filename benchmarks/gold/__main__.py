"""``fit(model, *args)`` with defaults against the gold standard of posteriordb, and what it said.

For each posterior with a reference: the guide that ``fit`` took, processor seconds until the verdict is
there, the largest error of a mean over all parameters, in reference sds, of an sd, as a factor, and of
an end of a central 90 % interval, in sds; and the verdict, which knows nothing of the reference.  "Take
the intervals as they are" is wrong where a mean is off by more than 0.3 sds or an sd by more than 30 %.

    git clone https://github.com/stan-dev/posteriordb
    python -m benchmarks.gold posteriordb
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections import Counter
from collections.abc import Set
from typing import Any, NamedTuple

import numpy as np
import pyro
import torch
from torch import Tensor

import pyro_ngvi as ngvi

from ..reference_posteriors import MEAN, SD, errors
from .database import ENDS, Database, Reference
from .models import posterior

DRAWS = 4000


class Row(NamedTuple):
    name: str
    guide: str
    steps: int
    seconds: float
    mean: float
    sd: float
    end: float
    decision: str
    verdict: str

    @property
    def good(self) -> bool:
        return self.mean <= MEAN and self.sd <= SD


def draws(fit: Any, names: Set[str]) -> dict[str, Tensor]:
    """Of these sites, deterministic ones too, in float64."""
    found = {name: x.detach() for name, x in fit.sample(DRAWS, seed=1).items()}
    if others := sorted(names - found.keys()):
        found |= ngvi.predict(fit.model, found, *fit.args, sites=others, from_prior=[])
    return {name: found[name].double() for name in names}


def end_error(reference: Reference, draws: dict[str, Tensor]) -> float:
    """The largest error of an end of a 90 % interval in reference sds; NaN where none is known."""
    errors = []
    for name, sd in reference.sd.items():
        ends = zip(ENDS, (reference.low[name], reference.high[name]), strict=True)
        errors += [np.abs(np.quantile(draws[name].numpy(), p, 0) - end) / sd for p, end in ends]
    return float(np.max(np.concatenate([np.ravel(e) for e in errors])))


def judged(name: str, database: Database, guide: Any, seed: int) -> Row:
    model, args = posterior(name, database.data(name))
    pyro.clear_param_store()
    began = time.process_time()
    fit = ngvi.fit(model, *args, guide=guide, seed=seed, progress=False)
    verdict = fit.verdict
    seconds = time.process_time() - began
    reference = database.reference(name)
    drawn = draws(fit, reference.mean.keys())
    found = errors(reference, drawn)
    return Row(
        name,
        type(fit.guide).__name__,
        fit.steps,
        seconds,
        *found,
        end_error(reference, drawn),
        verdict.decision,
        verdict.verdict,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("database", help="the folder that holds posterior_database")
    parser.add_argument("--only", nargs="+", default=[], help="parts of names")
    parser.add_argument("--auto", action="store_true", help='fit(guide="auto")')
    parser.add_argument("--float32", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32 if options.float32 else torch.float64)
    warnings.simplefilter("ignore")
    database = Database(options.database)
    rows = []
    print(
        "posterior | guide | steps | seconds | mean off, sds | sd off, factor | end off, sds | verdict"
    )
    print("---|---|---|---|---|---|---|---")
    for name in database.names():
        if options.only and not any(part in name for part in options.only):
            continue
        try:
            row = judged(name, database, "auto" if options.auto else None, options.seed)
        except Exception as error:
            print(f"{name} | {type(error).__name__}: {str(error)[:240]!r}", flush=True)
            continue
        rows.append(row)
        wrong = " (WRONG)" * (row.decision == "intervals" and not row.good)
        print(
            f"{name} | {row.guide} | {row.steps} | {row.seconds:.1f} | {row.mean:.2f} | {row.sd:.2f} | "
            f"{row.end:.2f} | {row.verdict}{wrong}",
            flush=True,
        )
    tally = Counter((row.decision, row.good) for row in rows)
    print("\ngood and bad intervals by verdict:")
    for decision in ("intervals", "resample", "unclear", "unusable"):
        print(f"{decision}: {tally[decision, True]} good, {tally[decision, False]} bad")


if __name__ == "__main__":
    main()
