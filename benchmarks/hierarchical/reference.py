"""NUTS on the whole model, effects non-centred: means and sds of globals (positive ones by their log).

    python -m benchmarks.hierarchical.reference --out benchmarks/hierarchical/references.json

Chains of a case run one after the other; ``--only`` makes some again.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import pyro
import torch
from pyro import poutine
from pyro.infer import MCMC, NUTS
from pyro.infer.reparam import LocScaleReparam
from pyro.ops.stats import effective_sample_size, gelman_rubin
from torch import Tensor

from ..time_to_target import prepare
from .models import Case, cases

POSITIVE = ("s", "a", "noise")
WHERE = Path(__file__).with_name("references.json")


def coordinates(draws: dict[str, Tensor]) -> Tensor:
    """Globals (chains, draws, D): all sites but the effects by name, positive ones by their log."""
    kept = {n: x for n, x in draws.items() if n != "u"}
    parts = [x.log() if n in POSITIVE else x for n, x in sorted(kept.items())]
    return torch.cat([x.reshape(*x.shape[:2], -1) for x in parts], -1)


def nuts(case: Case, draws: int, chains: int, seed: int) -> dict[str, Any]:
    """Means and sds, (D,) of globals and (n k,) of effects, with R-hat, effective draws and seconds."""
    model: Any = poutine.reparam(case.model, config={"u": LocScaleReparam(0.0)})
    kept, seconds = [], 0.0
    for chain in range(chains):
        pyro.set_rng_seed(seed + chain)
        start = time.perf_counter()
        kernel = NUTS(model, jit_compile=True, ignore_jit_warnings=True, target_accept_prob=0.9)
        mcmc = MCMC(kernel, num_samples=draws, warmup_steps=draws // 2, disable_progbar=True)
        mcmc.run(*case.args)
        seconds += time.perf_counter() - start
        found = mcmc.get_samples()
        u = []
        for i in range(draws):  # the effects, from their non-centred form
            one: Any = poutine.condition(model, {n: x[i] for n, x in found.items()})
            trace: Any = poutine.trace(one).get_trace(*case.args)
            u.append(trace.nodes["u"]["value"])
        del found["u_decentered"]
        kept.append({**found, "u": torch.stack(u)})
    both = {n: torch.stack([x[n] for x in kept]) for n in kept[0]}
    v, u = coordinates(both), both["u"].reshape(chains, draws, -1)
    every = torch.cat([v, u], -1)
    return {
        "mean": v.mean((0, 1)).tolist(),
        "sd": v.reshape(-1, v.shape[-1]).std(0).tolist(),
        "unit_mean": u.mean((0, 1)).tolist(),
        "unit_sd": u.reshape(-1, u.shape[-1]).std(0).tolist(),
        "r_hat": float(gelman_rubin(every).max()),
        "draws": float(effective_sample_size(v).min()),
        "seconds": seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="NUTS references of benchmarks.hierarchical.")
    parser.add_argument("--only", nargs="+")
    parser.add_argument("--draws", type=int, default=4000, help="of each chain, after half as many")
    parser.add_argument("--chains", type=int, default=2)
    parser.add_argument("--out", type=Path, default=WHERE)
    settings = parser.parse_args()
    prepare()
    for case in cases():
        if settings.only and case.name not in settings.only:
            continue
        found = nuts(case, settings.draws, settings.chains, seed=0)
        every = json.loads(settings.out.read_text()) if settings.out.exists() else {}
        settings.out.write_text(json.dumps({**every, case.name: found}) + "\n")
        short = {n: round(found[n], 3) for n in ("r_hat", "draws", "seconds")}
        print(case.name, short, flush=True)


if __name__ == "__main__":
    main()
