"""MGVI by NIFTy, to compare ``benchmarks.metric`` with: where ``nifty8`` and ``jax`` are installed.

python -m benchmarks.metric small_field --export field.npz        # in the usual environment
python benchmarks/metric_nifty.py field.npz --iterations 10       # in the other
"""

import argparse
import time

import jax
import jax.numpy as jnp
import nifty8.re as jft  # pyright: ignore[reportMissingImports]
import numpy as np

jax.config.update("jax_enable_x64", True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("field")
    parser.add_argument("--iterations", type=int, default=10)
    parser.add_argument("--samples", type=int, default=2, help="pairs")
    args = parser.parse_args()
    data = np.load(args.field)
    amplitude, y = jnp.asarray(data["amplitude"]), jnp.asarray(data["y"])
    n = len(y)

    def field(xi: jax.Array) -> jax.Array:
        return jnp.fft.ifft2(amplitude * jnp.fft.fft2(xi.reshape(n, n))).real

    likelihood = jft.Poissonian(y.astype(int)).amend(lambda xi: jnp.exp(1.0 + field(xi)))
    key, start = jax.random.PRNGKey(0), time.time()
    samples, _ = jft.optimize_kl(
        likelihood,
        jnp.zeros(n * n),
        key=key,
        n_total_iterations=args.iterations,
        n_samples=args.samples,
        sample_mode="linear_resample",
        draw_linear_kwargs={
            "cg_name": None,
            "cg_kwargs": {"absdelta": 1e-4 * n * n, "maxiter": 500},
        },
        kl_kwargs={"minimize_kwargs": {"name": None, "xtol": 1e-4, "maxiter": 20}},
        odir=None,
    )
    print(f"{n} x {n}: {args.iterations} iterations in {time.time() - start:.1f} s", flush=True)
    if "mean" not in data:
        return
    m, pairs, draw = samples.pos, [], jax.jit(jft.draw_linear_residual, static_argnames=("cg",))
    for one in jax.random.split(jax.random.PRNGKey(1), 1000):
        residual, _ = draw(likelihood, m, one, cg_kwargs={"absdelta": 1e-6 * n * n, "maxiter": 500})
        pairs += [field(m + residual), field(m - residual)]
    f = np.stack(pairs)
    ratio = np.log(f.std(0) / data["sd"])
    mean = np.sqrt(np.mean(((f.mean(0) - data["mean"]) / data["sd"]) ** 2))
    print(f"mean rmse {mean:.3f} sd, log sd: bias {ratio.mean():.4f}, rms {ratio.std():.4f}")


if __name__ == "__main__":
    main()
