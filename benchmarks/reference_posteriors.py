"""Verdict against error on posteriors with published answers: do ``khat`` and ``diagnose`` know?

For every reference posterior, three guides, several lengths of training and seeds: the largest error
of a raw posterior mean, in reference sds, and of a raw sd, as a factor, beside what ``khat`` and
``diagnose`` decided without the reference.  "intervals" is wrong where a mean is off by more than 0.3
sds or an sd by more than 30 %; a good fit is doubted where neither is and the decision is another one.

    PYRO_NGVI_DATA=... python -m benchmarks.reference_posteriors --steps 50 200 1000 --seeds 2
"""

from __future__ import annotations

import argparse
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import pyro
import torch
from pyro.infer import SVI

import pyro_ngvi as ngvi

from .problems import Problem, load, names

GUIDES = {
    "full rank": ngvi.AutoFullRankNormal,
    "mean field": ngvi.AutoMeanFieldNormal,
    "factor 1": lambda model: ngvi.AutoFactorNormal(model, rank=1),
}
MEAN, SD = 0.3, 1.3


class Row(NamedTuple):
    """A fit: the largest errors of its raw and of its resampled draws, and what was said of them."""

    problem: str
    guide: str
    steps: int
    seed: int
    raw: tuple[float, float]
    resampled: tuple[float, float]
    found: ngvi.diagnostics.KHat
    diagnosis: ngvi.diagnostics.Diagnosis

    @property
    def good(self) -> bool:
        return self.raw[0] <= MEAN and self.raw[1] <= SD


def errors(reference: Any, draws: Mapping[str, Any]) -> tuple[float, float]:
    """The largest error of a mean in reference sds, and the largest factor between sds."""
    means, factors = [0.0], [1.0]
    for name, mean in reference.mean.items():
        x, sd = np.asarray(draws[name]), np.asarray(reference.sd[name])
        means.append(float(np.abs((x.mean(0) - np.asarray(mean)) / sd).max()))
        factors.append(float(np.exp(np.abs(np.log(x.std(0) / sd))).max()))
    return max(means), max(factors)


def judged(problem: Problem, guide: Any, name: str, steps: int, seed: int, draws: int) -> Row:
    def exported(resample: str | None) -> dict[str, np.ndarray]:
        data = ngvi.to_arviz(
            problem.model,
            guide,
            *problem.args,
            num_samples=draws,
            seed=1,
            posterior_predictive=False,
            log_likelihood=False,
            resample=resample,
        )
        return {n: x.values[0] for n, x in data["posterior"].data_vars.items()}

    found = ngvi.khat(problem.model, guide, *problem.args, num_samples=draws, seed=1)
    raw = errors(problem, exported(None))
    # where there is nothing to resample by, the figures are those of the raw draws
    resampled = errors(problem, exported("psis")) if found.ess > 0 else raw
    diagnosis = ngvi.diagnose(problem.model, guide, *problem.args, seed=1)
    return Row(problem.name, name, steps, seed, raw, resampled, found, diagnosis)


def fits(steps: list[int], seeds: int, draws: int) -> Iterator[Row]:
    for problem in map(load, [*names("posteriordb"), "eight_schools_centered"]):
        for name, make in GUIDES.items():
            for seed in range(seeds):
                pyro.clear_param_store()
                pyro.set_rng_seed(seed)
                guide = make(problem.model)
                svi = SVI(problem.model, guide, ngvi.NGVB(guide), ngvi.BatchedELBO(8))
                done = 0
                for length in sorted(steps):
                    for _ in range(length - done):
                        svi.step(*problem.args)
                    done = length
                    yield judged(problem, guide, name, length, seed, draws)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--steps", type=int, nargs="+", default=[50, 200, 1000])
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--draws", type=int, default=1000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    warnings.simplefilter("ignore", RuntimeWarning)  # of weights that are not to be relied on
    rows = []
    print(
        "posterior | guide | steps | seed | mean off, sds | sd off, factor | resampled | khat "
        "| diagnose"
    )
    print("---|---|---|---|---|---|---|---|---")
    for row in fits(options.steps, options.seeds, options.draws):
        rows.append(row)
        marks = [
            f"{x.decision}{' (WRONG)' * (x.ok and not row.good)}"
            for x in (row.found, row.diagnosis)
        ]
        print(
            f"{row.problem} | {row.guide} | {row.steps} | {row.seed} | {row.raw[0]:.2f} | "
            f"{row.raw[1]:.2f} | {row.resampled[0]:.2f}, {row.resampled[1]:.2f} | "
            f"{' | '.join(marks)}",
            flush=True,
        )
    good = sum(row.good for row in rows)
    for who in ("khat", "diagnose"):
        said = [row.found if who == "khat" else row.diagnosis for row in rows]
        tally = Counter((x.decision, row.good) for x, row in zip(said, rows, strict=True))
        print(f"\n{who}, {len(rows)} fits; good and bad raw intervals by decision:")
        for decision in ("intervals", "resample", "unclear", "unusable"):
            print(f"{decision}: {tally[decision, True]} good, {tally[decision, False]} bad")
        print(f"good fits that are doubted: {good - tally['intervals', True]} of {good}")
    resample = [row.resampled for row in rows if row.found.decision == "resample"]
    right = sum(mean <= MEAN and sd <= SD for mean, sd in resample)
    print(f'resampled draws are good in {right} of {len(resample)} that are called "resample"')


if __name__ == "__main__":
    main()
