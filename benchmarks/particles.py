"""How near default settings come to the optimum with 1, 4, 8 and 32 particles.

Run from the root of the repository: ``python -m benchmarks.particles --help``.  For every problem of
the zoo, both families and every number of particles: the gap to the best ELBO of the family after 100,
300 and 1,000 steps, and for full-rank guides the largest error of a posterior mean (in reference sds)
and the largest relative error of an sd.  The worst of the seeds is printed.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import pyro
import torch
from pyro.infer import SVI
from torch import Tensor

import pyro_ngvi as ngvi

from .problems import LogJoint, Problem, load_present, names
from .problems.problem import FAMILIES
from .time_to_target import Elbo, evaluator, prepare

GUIDES: dict[str, Any] = {
    "full_rank": ngvi.AutoFullRankNormal,
    "mean_field": ngvi.AutoMeanFieldNormal,
}


def moment_errors(problem: Problem, loc: Tensor, scale_tril: Tensor) -> tuple[float, float]:
    """Largest |mean - reference| / reference sd and |sd / reference sd - 1|, constrained space."""
    if not problem.mean:
        return float("nan"), float("nan")
    noise = torch.randn(4096, problem.dim, generator=torch.Generator().manual_seed(7))
    noise = torch.cat([noise, -noise])
    values = LogJoint(problem).constrain(loc + noise @ scale_tril.mT)
    if "theta" in problem.mean and "z" in values:  # eight schools, non-centered
        values["theta"] = values["mu"].unsqueeze(-1) + values["tau"].unsqueeze(-1) * values["z"]
    mean_error, sd_error = 0.0, 0.0
    for name in problem.mean:
        if name not in values:
            continue
        mean, sd = problem.mean[name], problem.sd[name]
        draws = values[name]
        mean_error = max(mean_error, float(((draws.mean(0) - mean).abs() / sd).max()))
        sd_error = max(sd_error, float((draws.std(0) / sd - 1).abs().max()))
    return mean_error, sd_error


def run(
    problem: Problem,
    family: str,
    particles: int,
    seed: int,
    steps: tuple[int, ...],
    elbo: Elbo,
    init: str | None = "auto",
):
    """Gaps to the optimum at ``steps``, the two moment errors at the end, and skipped steps."""
    pyro.clear_param_store()
    pyro.set_rng_seed(seed)
    guide = GUIDES[family](problem.model, init=init)
    optim = ngvi.NGVB(guide)
    svi = SVI(problem.model, guide, optim, ngvi.BatchedELBO(particles))
    gaps, done = [], 0
    loc = scale_tril = torch.empty(0)
    for step in steps:
        for _ in range(step - done):
            svi.step(*problem.args)
        done = step
        with torch.no_grad():
            q = guide.get_posterior()
            loc = q.mean.detach().clone()
            scale_tril = q.scale_tril.detach()
        gaps.append(problem.optimum[family].elbo - elbo(loc, scale_tril))
    return gaps, *moment_errors(problem, loc, scale_tril), optim.report().skipped


def main(arguments: list[str] | None = None) -> None:
    """Runs the benchmark and prints one line for a problem, family and number of particles."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--problems", nargs="+", default=names(), metavar="NAME")
    parser.add_argument("--families", nargs="+", default=FAMILIES, choices=FAMILIES)
    parser.add_argument("--particles", nargs="+", default=(1, 4, 8, 32), type=int)
    parser.add_argument("--steps", nargs="+", default=(100, 300, 1000), type=int)
    parser.add_argument("--seeds", default=2, type=int)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--point", action="store_true", help="start at a point")
    p = parser.parse_args(arguments)
    prepare()
    rows, init = [], None if p.point else "auto"
    heads = " ".join(f"{f'gap@{k}':>9}" for k in p.steps)
    print(f"{'problem':34} {'family':10} {'S':>3} {heads} {'mean':>7} {'sd':>7} skipped")
    for problem in load_present(p.problems):
        elbo = evaluator(problem)
        for family in p.families:
            if family not in problem.optimum:
                continue
            for particles in p.particles:
                runs = [
                    run(problem, family, particles, seed, tuple(p.steps), elbo, init)
                    for seed in range(p.seeds)
                ]
                gaps = [max(r[0][i] for r in runs) for i in range(len(p.steps))]
                mean, sd, skipped = (max(r[i] for r in runs) for i in (1, 2, 3))
                shown = " ".join(f"{gap:9.3g}" for gap in gaps)
                print(
                    f"{problem.name:34} {family:10} {particles:3d} {shown} "
                    f"{mean:7.3f} {sd:7.3f} {skipped:d}",
                    flush=True,
                )
                rows.append(
                    {
                        "problem": problem.name,
                        "family": family,
                        "particles": particles,
                        "steps": p.steps,
                    }
                    | {"gaps": gaps, "mean_error": mean, "sd_error": sd, "skipped": skipped}
                )
    if p.json is not None:
        p.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
