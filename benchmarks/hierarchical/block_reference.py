"""NumPyro's NUTS on the models of one block, effects non-centred or whitened, in float64.

    python -m benchmarks.hierarchical.block_reference

Needs NumPyro (the extra `bench`).  Before the chains run, the density of each model is compared with
that of the Pyro model at three points of the prior: ``log_density_gap`` is the largest difference.
Seconds are the processor's, compilation included.
"""

# NumPyro is optional.
# pyright: reportMissingImports=false

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyro
import torch
from pyro import poutine

from ..time_to_target import prepare
from .block_models import ITEMS, JITTER, PERSONS, SCHOOLS, BlockCase, block_cases, coordinates

WHERE = Path(__file__).with_name("block_references.json")
#: chains one after the other, draws of each, after so many more
CHAINS, DRAWS, WARMUP = 2, 4000, 1000
R_HAT = 1.01


def in_numpyro() -> dict[str, tuple[Callable[..., None], dict[str, str]]]:
    """The models by name, and by site of Pyro's that is not sampled here: the noise it is made of."""
    import jax.numpy as jnp
    import numpyro
    import numpyro.distributions as dist
    from jax.scipy.linalg import solve_triangular

    sample, named = numpyro.sample, numpyro.deterministic

    def noise(name: str, n: int) -> Any:
        return sample(name, dist.Normal(0.0, 1.0).expand([n]))

    def half_normal(name: str, scale: float = 2.0) -> Any:
        return sample(name, dist.HalfNormal(scale))

    def series(y: Any) -> None:
        s, start = half_normal("s", 1.0), sample("start", dist.Normal(0.0, 2.0))
        level = named("level", start + s * jnp.cumsum(noise("z", len(y))))
        sample("y", dist.Poisson(jnp.exp(level)), obs=y)

    def gp(x: Any, y: Any) -> None:
        length, amplitude = sample("length", dist.LogNormal(0.0, 1.0)), half_normal("amplitude")
        K = amplitude**2 * jnp.exp(-0.5 * ((x[:, None] - x) / length) ** 2)
        root = jnp.linalg.cholesky(K + JITTER * jnp.eye(len(x)))
        f = named("f", root @ noise("f_z", len(x)))
        sample("y", dist.Bernoulli(logits=f), obs=y)

    def crossed(person: Any, item: Any, y: Any) -> None:
        a_scale, b_scale = half_normal("a_scale"), half_normal("b_scale")
        m = sample("m", dist.Normal(0.0, 2.0))
        a = named("a", a_scale * noise("a_z", PERSONS))
        b = named("b", b_scale * noise("b_z", ITEMS))
        sample("y", dist.Bernoulli(logits=m + a[person] + b[item]), obs=y)

    def nested(school: Any, group: Any, y: Any) -> None:
        school_scale, class_scale = half_normal("school_scale"), half_normal("class_scale")
        sd, m = half_normal("noise"), sample("m", dist.Normal(0.0, 5.0))
        u = named("u", m + school_scale * noise("u_z", SCHOOLS))
        v = named("v", u[school] + class_scale * noise("v_z", len(school)))
        sample("y", dist.Normal(v[group], sd), obs=y)

    def car(W: Any, expected: Any, y: Any) -> None:
        s, rho = half_normal("s", 1.0), sample("rho", dist.Beta(4.0, 2.0))
        b = sample("b", dist.Normal(0.0, 2.0))
        root = jnp.linalg.cholesky(jnp.diag(W.sum(1)) - rho * W)
        f = named("f", s * solve_triangular(root.T, noise("f_z", len(y)), lower=False))
        sample("y", dist.Poisson(expected * jnp.exp(b + f)), obs=y)

    return {
        "series": (series, {}),
        "gp": (gp, {"f": "f_z"}),
        "crossed": (crossed, {"a": "a_z", "b": "b_z"}),
        "nested": (nested, {"u": "u_z", "v": "v_z"}),
        "car": (car, {"f": "f_z"}),
    }


def density_gap(case: BlockCase, model: Any, noises: dict[str, str], args: Any) -> float:
    """The largest difference of the log densities at three draws of NumPyro's prior."""
    import jax
    import jax.numpy as jnp
    from jax.flatten_util import ravel_pytree
    from numpyro import handlers
    from numpyro.infer.util import log_density

    gap = 0.0
    for seed in range(3):
        seeded = handlers.seed(model, jax.random.PRNGKey(seed))
        sites = handlers.trace(seeded).get_trace(*args)
        free = {
            n: x["value"]
            for n, x in sites.items()
            if x["type"] == "sample" and not x["is_observed"]
        }
        rest = {n: x for n, x in free.items() if n not in noises.values()}
        flat, unravel = ravel_pytree({n: free[n] for n in noises.values()})

        def effects(z: Any, rest: Any = rest, unravel: Any = unravel) -> Any:
            put = handlers.substitute(model, {**rest, **unravel(z)})
            trace = handlers.trace(put).get_trace(*args)
            return jnp.concatenate([trace[n]["value"] for n in noises])

        log_p, _ = log_density(model, args, {}, free)
        if noises:
            log_p -= jnp.linalg.slogdet(jax.jacobian(effects)(flat))[1]
        values = {**rest, **{n: sites[n]["value"] for n in noises}}
        put = {n: torch.tensor(jax.device_get(x)) for n, x in values.items()}
        conditioned: Any = poutine.condition(case.model, put)
        trace = poutine.trace(conditioned).get_trace(*case.args)
        gap = max(gap, abs(float(trace.log_prob_sum()) - float(log_p)))
    return gap


def nuts(case: BlockCase) -> dict[str, Any]:
    """Means and sds of hyperparameters and effects, R-hat, effective draws, processor seconds."""
    import jax
    import numpy as np
    from numpyro.diagnostics import effective_sample_size, split_gelman_rubin
    from numpyro.infer import MCMC, NUTS

    model, noises = in_numpyro()[case.name]
    args = tuple(x.numpy() for x in case.args)
    gap = density_gap(case, model, noises, args)
    start = time.process_time()
    mcmc = MCMC(
        NUTS(model, target_accept_prob=0.95),
        num_warmup=WARMUP,
        num_samples=DRAWS,
        num_chains=CHAINS,
        chain_method="sequential",
        progress_bar=False,
    )
    mcmc.run(jax.random.PRNGKey(0), *args)
    found = jax.device_get(mcmc.get_samples())
    seconds = time.process_time() - start
    sites = {n: torch.from_numpy(np.array(x)) for n, x in found.items()}
    made: dict[str, Any] = {"log_density_gap": gap}
    for name, x in coordinates(sites, case).items():
        chains = x.reshape(CHAINS, DRAWS, -1).numpy()
        made[name] = {
            "mean": x.mean(0).tolist(),
            "sd": x.std(0).tolist(),
            "r_hat": float(split_gelman_rubin(chains).max()),
            "draws": float(effective_sample_size(chains).min()),
        }
        assert made[name]["r_hat"] < R_HAT, (case.name, name, made[name])
    divergent = int(mcmc.get_extra_fields()["diverging"].sum())
    return {**made, "divergent": divergent, "seconds": seconds}


def main() -> None:
    import numpyro

    parser = argparse.ArgumentParser(description="NUTS references of the models of one block.")
    parser.add_argument("--only", nargs="+")
    parser.add_argument("--out", type=Path, default=WHERE)
    settings = parser.parse_args()
    prepare()
    numpyro.enable_x64()
    pyro.enable_validation(True)
    for case in block_cases():
        if settings.only and case.name not in settings.only:
            continue
        found = nuts(case)
        every = json.loads(settings.out.read_text()) if settings.out.exists() else {}
        settings.out.write_text(json.dumps({**every, case.name: found}) + "\n")
        worst = max(found[n]["r_hat"] for n in ("hyper", "log_hyper", "effects"))
        fewest = min(found[n]["draws"] for n in ("hyper", "log_hyper", "effects"))
        print(
            f"{case.name:8} {found['seconds']:.1f} s, R-hat {worst:.4f}, draws {fewest:.0f}, "
            f"{found['divergent']} divergent, log densities {found['log_density_gap']:.1e} apart",
            flush=True,
        )


if __name__ == "__main__":
    main()
