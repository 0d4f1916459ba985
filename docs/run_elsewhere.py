"""Runs what docs/coming_from.md and docs/howto/processes.md show of other packages: `make elsewhere`.

The code is read from the pages.  Each fit of the logistic regression has to agree with ours.  Let g be
its ELBO below ours, in nats.  Near the best Gaussian the ELBO of another falls by its Kullback-Leibler
divergence from it, which no marginal exceeds: a mean that is off by t sds costs t^2 / 2, an sd that is
off by a factor e^r costs r^2.  So from n draws

    |mean - ours| <= (sqrt(2 g) + 4 / sqrt(n)) sd,   |log(sd / ours)| <= sqrt(g) + 4 / sqrt(2 n),

the second terms four standard errors of a draw's mean and log sd.  g is measured, two standard errors
added; it has to be below :data:`GAP`.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pyro
import torch
from pyro.infer import SVI

DOCS = Path(__file__).parent
PACKAGES = {"Pyro": "pyro", "NumPyro": "numpyro", "PyMC": "pymc", "Stan": "stan"}
PACKAGES |= {"Lightning": "lightning", "Fabric": "lightning"}
PROJECTS = {"pyro": "pyro-ppl", "stan": "pystan"}
#: nats; Adam at a constant rate is left about half a nat below
GAP = 1.0
Draws = dict[str, Any]


def fences(page: str, start: str, language: str = "python") -> list[str]:
    """The fenced blocks of a language that follow a line, up to the next heading or tab."""
    text = (DOCS / page).read_text(encoding="utf-8")
    lines = text[text.index(f"\n{start}\n") + len(start) + 2 :]
    part = re.split(r"^(?:#+ .*|:::+.*)$", lines, maxsplit=1, flags=re.M)[0]
    found = re.findall(rf"^```{language}\n(.*?)^```", part, flags=re.M | re.S)
    assert found, f"{page}: no block of {language} after {start!r}"
    return found


def block(name: str) -> str:
    """The code of one of :data:`PACKAGES`."""
    if name == "Fabric":
        return fences("howto/processes.md", "## Fabric and Lightning")[0]
    if name == "Lightning":
        return fences("coming_from.md", "## Lightning")[0]
    language = "stan" if name == "Stan" else "python"
    return fences("coming_from.md", f":::{{tab-item}} {name}", language)[0]


def ours() -> dict[str, Any]:
    """What the page's own first cell leaves: data, model and fit."""
    names: dict[str, Any] = {}
    cell = fences("coming_from.md", "## One model, five ways", r"\{code-cell\} python")[0]
    exec(re.sub(r"^:tags:.*\n", "", cell, flags=re.M), names)
    return names


def arrays(names: dict[str, Any]) -> dict[str, Any]:
    return {"X": names["X"].numpy(), "y": names["y"].numpy()}


def pyros(names: dict[str, Any]) -> tuple[Draws, float]:
    """Draws, and the upper end of the gap."""
    pyro.set_rng_seed(0)
    pyro.clear_param_store()
    found = {k: names[k] for k in ("pyro", "dist", "torch", "X", "y")}
    exec(block("Pyro"), found)
    loss = found["Trace_ELBO"](num_particles=1000, vectorize_particles=True, max_plate_nesting=1)
    arguments = found["model"], found["guide"], found["X"], found["y"]
    return found["draws"], gap(names, [-loss.loss(*arguments) for _ in range(5)])


def numpyros(names: dict[str, Any]) -> tuple[Draws, float]:
    found = arrays(names)
    exec(block("NumPyro"), found)
    loss, key = found["Trace_ELBO"](num_particles=1000), found["jax"].random.PRNGKey
    arguments = found["result"].params, found["model"], found["guide"], found["X"], found["y"]
    values = [-float(loss.loss(key(k), *arguments)) for k in range(5)]
    return found["draws"], gap(names, values)


def pymcs(names: dict[str, Any]) -> tuple[Draws, float]:
    found = arrays(names)
    exec(block("PyMC"), found)
    posterior = found["idata"].posterior
    draws = {name: posterior[name].to_numpy()[0] for name in ("a", "w")}
    return draws, gap(names, -found["approx"].hist[-2000:])


def stans(names: dict[str, Any]) -> tuple[Draws, float]:
    """The posterior, by PyStan's NUTS, since it has no variational methods: our divergence from it.

    A draw of NUTS counts as a quarter of an independent one.
    """
    found = arrays(names) | {"program": block("Stan")}
    exec(fences("coming_from.md", ":::{tab-item} Stan")[0], found)
    fit = found["fit"]
    draws = {"a": fit["a"][0][::4], "w": fit["w"].T[::4]}
    weights = np.asarray(names["fit"].khat.log_weights)
    return draws, float(
        np.log(np.exp(weights - weights.max()).mean()) + weights.max() - weights.mean()
    )


def gap(names: dict[str, Any], elbos: Any) -> float:
    """Two standard errors above the estimate."""
    best, error = names["fit"].elbo
    other = float(np.std(elbos, ddof=1)) / len(elbos) ** 0.5
    return best - float(np.mean(elbos)) + 2.0 * (error**2 + other**2) ** 0.5


def agree(names: dict[str, Any], draws: Draws, most: float) -> str:
    """Holds means and sds against ours; what was found, in units of what is allowed."""
    assert most < GAP, f"{most:.2f} nats below our ELBO"
    most = max(most, 0.0)
    posterior, worst = names["fit"].idata.posterior, []
    for name in ("a", "w"):
        found, own = np.asarray(draws[name]), posterior[name].to_numpy()[0]
        sd, n = own.std(0), len(found)
        noise = 4.0 * (1.0 / n + 1.0 / len(own)) ** 0.5
        means = np.abs(found.mean(0) - own.mean(0)) / sd / ((2.0 * most) ** 0.5 + noise)
        sds = np.abs(np.log(found.std(0) / sd)) / (most**0.5 + noise / 2.0**0.5)
        worst += [float(means.max()), float(sds.max())]
    says = f"at most {most:.2f} nats apart; means and sds of a, of w at " + ", ".join(
        f"{w:.2f}" for w in worst
    )
    assert max(worst) <= 1.0, says
    return f"{says} of what is allowed"


def lightnings(names: dict[str, Any]) -> str:
    """Steps are those of ``svi.step``; a run goes on from a checkpoint bit for bit."""
    import logging

    for kind in ("pytorch", "fabric"):
        logging.getLogger(f"lightning.{kind}.utilities.rank_zero").setLevel(logging.ERROR)
    found = dict(names)
    exec(block("Lightning"), found)
    quiet = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False}
    quiet |= {"enable_model_summary": False, "enable_checkpointing": False}

    def made(batch_size: int) -> tuple[Any, Any]:
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        X, y = names["X"], names["y"]
        data = torch.utils.data.TensorDataset(X, y)
        shuffle = batch_size < len(X)
        loader = torch.utils.data.DataLoader(data, batch_size=batch_size, shuffle=shuffle)
        return found["Posterior"](found["minibatches"], len(X), X[:64], y[:64]), loader

    def trained(module: Any, loader: Any, **how: Any) -> Any:
        trainer = found["L"].Trainer(**quiet, **how)
        trainer.fit(module, loader)
        return trainer

    whole, loader = made(64)
    trainer = trained(whole, loader, max_epochs=4)
    assert trainer.global_step == 36 and "loss" in trainer.callback_metrics
    half, loader = made(64)
    first = trained(half, loader, max_epochs=2)
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "half.ckpt")
        first.save_checkpoint(path)
        half, loader = made(64)
        found["L"].Trainer(**quiet, max_epochs=4).fit(half, loader, ckpt_path=path)
    same(half.guide, whole.guide)
    short, loader = made(64)
    assert trained(short, loader, max_steps=5, max_epochs=9).global_step == 5

    module, loader = made(len(names["X"]))
    random = torch.get_rng_state()
    trained(module, loader, max_epochs=6)
    other, _ = made(len(names["X"]))
    ngvi = found["ngvi"]
    loss = ngvi.BatchedELBO(num_particles=8)
    svi = SVI(found["minibatches"], other.guide, ngvi.NGVB(other.guide), loss)
    torch.set_rng_state(random)
    for _ in range(6):
        next(iter(loader))  # draws the number from which workers would start
        svi.step(names["X"], names["y"], len(names["X"]))
    same(module.guide, other.guide)
    return "bit for bit from a checkpoint, and the steps of svi.step"


def same(one: Any, other: Any) -> None:
    for name, value in one.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name


def fabrics(names: dict[str, Any]) -> str:
    """Two processes hold the parameters of one, to 1e-10."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for devices in (1, 2):
            script, result = Path(folder) / "script.py", Path(folder) / f"{devices}.pt"
            code = block("Fabric").replace("devices=2", f"devices={devices}")
            script.write_text(
                f"{code}    if fabric.is_global_zero:\n"
                f"        torch.save(guide.state_dict(), {str(result)!r})\n"
            )
            for _ in range(2):
                run = subprocess.run([sys.executable, script], capture_output=True, text=True)
                if run.returncode >= 0:  # else a signal ended it: seen once
                    break
            assert run.returncode == 0, run.stderr[-2000:]
            found.append(torch.load(result, weights_only=True))
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-10, atol=1e-10)
    return "two processes hold the parameters of one"


FITS: dict[str, Callable[..., tuple[Draws, float]]] = {
    "Pyro": pyros,
    "NumPyro": numpyros,
    "PyMC": pymcs,
    "Stan": stans,
}
OTHERS: dict[str, Callable[..., str]] = {"Lightning": lightnings, "Fabric": fabrics}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", nargs="+", default=list(PACKAGES), choices=list(PACKAGES))
    names = ours()
    print(f"ours: ELBO {names['fit'].elbo[0]:.2f}", flush=True)
    for name in parser.parse_args(arguments).only:
        package = PACKAGES[name]
        if find_spec(package) is None:
            print(f"{name}: left out, {package} is not installed", flush=True)
            continue
        says = agree(names, *FITS[name](names)) if name in FITS else OTHERS[name](names)
        print(f"{name} ({version(PROJECTS.get(package, package))}): {says}", flush=True)


if __name__ == "__main__":
    main()
