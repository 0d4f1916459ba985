"""Twenty steps of every rule x guide x loss, and what is read off fixed guides: to compare bit for bit.

    python -m tests.trajectories record before.pt
    python -m tests.trajectories compare before.pt [--only PART ...]

A recording holds for one machine and one build of torch, so it is made from the commit to compare with
and thrown away.  A pair that does not work is recorded by the class of its error.
"""

from __future__ import annotations

import argparse
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI, Trace_ELBO
from pyro.optim import Adam  # pyright: ignore[reportAttributeAccessIssue]
from torch import Tensor
from torch.nn.functional import linear

import pyro_ngvi as ngvi
from tests.exact import process_cases, site_cases
from tests.registry import BASELINES, FOREIGN, GUIDES, LOSSES, RULES, VARIANTS

STEPS, PARTICLES, SEEDS = 20, 3, (0, 1)
N, ROWS, COLUMNS = 12, 2, 3
GAUSSIAN = ("mean field", "full rank", "factor", "factor precision", "exponential", "matrix")
Z = torch.linspace(0.1, 4.9, 7, dtype=torch.float64)

Record = dict[str, Any]


def data() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(3)
    X = torch.randn(N, COLUMNS, generator=g)
    y = X @ torch.randn(COLUMNS, ROWS, generator=g) + 0.5 * torch.randn(N, ROWS, generator=g)
    return X, y


def model(X: Tensor, y: Tensor) -> None:
    """A matrix site and a positive one; right under vectorised particles too."""
    W = pyro.sample("W", dist.Normal(X.new_zeros(ROWS, COLUMNS), 1.0).to_event(2))
    s = pyro.sample("s", dist.Gamma(X.new_tensor(2.0), 2.0))
    with pyro.plate("data", len(X)):
        if W.dim() == 2:
            mean = linear(X, W)
        else:  # (S, 1, ...): vectorised particles
            mean = X @ W.mT.squeeze(-3)
            s = s.unsqueeze(-1)
        pyro.sample("y", dist.Normal(mean, s).to_event(1), obs=y)


def flattened(tree: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a nested state, by its path."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from flattened(value, f"{path}.{key}".lstrip("."))
    elif isinstance(tree, list | tuple):
        for i, value in enumerate(tree):
            yield from flattened(value, f"{path}.{i}")
    elif isinstance(tree, Tensor):
        yield path, tree.detach().clone()


def run(make: Callable[[], tuple[Any, tuple[Any, ...]]], seed: int) -> Record:
    """The losses, and the parameters after every step; the optimizer's state at the end."""
    pyro.clear_param_store()
    pyro.set_rng_seed(seed)
    try:
        svi, args = make()
        losses, params = [], []
        for _ in range(STEPS):
            losses.append(float(svi.step(*args)))
            named = dict(pyro.get_param_store().named_parameters())
            params.append({name: p.detach().clone() for name, p in named.items()})
    except Exception as error:  # refused, or not made for each other: that must stay so
        return {"error": type(error).__name__}
    state = dict(flattened(svi.optim.get_state()["natural"]))
    return {"losses": torch.tensor(losses), "params": params, "state": state}


def trained(rule: Any, guide: Any, loss: Any) -> tuple[Any, tuple[Any, ...]]:
    made = guide(model)
    return SVI(model, made, rule(made), loss(PARTICLES)), data()


def sites(case: Any, inducing: Any = None, **how: Any) -> tuple[Any, tuple[Any, ...]]:
    program, args = case()
    guide = ngvi.AutoSites(program, inducing=inducing)
    return SVI(program, guide, ngvi.CVI(guide, **how), ngvi.SitesELBO()), args


def few(case: Any, **how: Any) -> tuple[Any, tuple[Any, ...]]:
    svi, args = sites(case, **how)
    return svi, (*args, 10)


def conjugate(make: Callable[[], site_cases.Conjugate]) -> Any:
    case = make()
    return case.model, case.args


def logistic() -> Any:
    def program(X: Tensor, y: Tensor) -> None:
        w = site_cases.normal_weights(3)
        with pyro.plate("data", len(X)):
            pyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)

    return program, (site_cases.covariates(), site_cases.binary())


def batched_logistic() -> Any:
    def program(X: Tensor, y: Tensor) -> None:
        w = site_cases.normal_weights(3)
        with pyro.plate("data", len(X), subsample_size=10) as index:
            pyro.sample("y", dist.Bernoulli(logits=X[index] @ w), obs=y[index])

    return program, (site_cases.covariates(), site_cases.binary())


def robust() -> Any:
    return site_cases.student, (site_cases.gp_kernel(), site_cases.with_outliers())


def chain() -> Any:
    def program(t: Tensor, y: Tensor) -> None:
        one = torch.ones(())
        x: Any = pyro.sample("x", ngvi.distributions.matern_state_space(t, one, one))
        with pyro.plate("data", len(t)):
            pyro.sample("y", dist.Poisson(x[:, 0].exp()), obs=y)

    t = torch.linspace(0.0, 5.0, 30)
    return program, (t, site_cases.counts(t.sin().exp()))


def process(learn: bool, binary: bool) -> Any:
    program = process_cases.make_model(
        process_cases.Matern(learn=learn), binary=binary, learn=learn
    )
    return program, process_cases.data(binary=binary)


SITES: dict[str, Callable[[], Any]] = {
    **{name: partial(sites, partial(conjugate, c)) for name, c in site_cases.CONJUGATE.items()},
    "logistic": partial(sites, logistic),
    "logistic, half steps": partial(sites, logistic, lr=0.5),
    "logistic, minibatches": partial(sites, batched_logistic),
    "outliers": partial(sites, robust),
    "chain": partial(sites, chain),
    "process": partial(sites, partial(process, False, False)),
    "inducing": partial(sites, partial(process, False, True), inducing=Z),
    "learnt": partial(sites, partial(process, True, True), inducing=Z, others=Adam({"lr": 0.05})),
    "inducing, minibatches": partial(few, partial(process, True, True), inducing=Z),
}


def runs() -> Iterator[tuple[str, Callable[[], Any]]]:
    for rule, make in RULES.items():
        for guide, new in (GUIDES | FOREIGN).items():
            for loss, elbo in LOSSES.items():
                yield f"{rule} / {guide} / {loss}", partial(trained, make, new, elbo)
    for rule, make in (VARIANTS | BASELINES).items():
        for guide, new in (GUIDES | FOREIGN).items():
            for loss in (
                "Trace",
                "Batched",
                "Batched hessian",
                "Batched kronecker",
                "Batched scores",
            ):
                yield f"{rule} / {guide} / {loss}", partial(trained, make, new, LOSSES[loss])
    for name, make in SITES.items():
        yield f"CVI / sites: {name} / Sites", make


def fixed(guide: str) -> tuple[Any, tuple[Any, ...]]:
    """A guide after a few steps."""
    made = (GUIDES | FOREIGN)[guide](model)
    rule = ngvi.NGVB if guide in GAUSSIAN else ngvi.IFVB
    svi: Any = SVI(model, made, rule(made), Trace_ELBO(2))
    for _ in range(10):
        svi.step(*data())
    return made, data()


def groups(result: Any) -> Record:
    names: Any = result.groups() if callable(result.groups) else list(result.children)
    return {
        f"{group}.{name}": torch.as_tensor(value.values.copy())
        for group in names
        for name, value in result[group].data_vars.items()
        if value.dtype.kind in "fiub"
    }


def exported(guide: str) -> Record:
    made, args = fixed(guide)
    how: Any = {"num_samples": 100, "seed": 5}
    drawn = groups(ngvi.to_arviz(model, made, *args, **how))
    checked = ngvi.khat(model, made, *args, **how)
    numbers = {
        k: torch.as_tensor(v) for k, v in vars(checked).items() if isinstance(v, float | int)
    }
    return {**drawn, **{f"khat.{k}": v for k, v in numbers.items()}}


def left_out(name: str) -> Record:
    svi, args = SITES[name]()
    for _ in range(10):
        svi.step(*args)
    guide, found = svi.guide, {}
    for kind in ("loo", "influence"):
        result: Any = getattr(guide, kind)()
        for group, value in result.items() if isinstance(result, dict) else [("", result)]:
            found |= {f"{kind}.{group}.{k}": v for k, v in flattened(vars(value))}
    return found


def read(make: Callable[[], Record]) -> Record:
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    try:
        return make()
    except Exception as error:  # see ``run``
        return {"error": type(error).__name__}


def everything(only: list[str]) -> Iterator[tuple[str, Record]]:
    wanted = [
        (f"{name} / seed {seed}", partial(run, make, seed))
        for name, make in runs()
        for seed in SEEDS
    ]
    for guide in GUIDES | FOREIGN:
        wanted.append((f"export / {guide}", partial(read, partial(exported, guide))))
    for name in SITES:
        wanted.append((f"left out / {name}", partial(read, partial(left_out, name))))
    for name, make in wanted:
        if all(part in name for part in only):
            yield name, make()


def _uncounted(tree: dict[Any, Any]) -> dict[Any, Any]:
    """Without the numbers in the names of guides: how many there were before is no matter of a run."""
    return {re.sub(r"_\d+(?=\.)", "", str(key)): value for key, value in tree.items()}


def difference(before: Any, after: Any) -> str | None:
    """The first thing that differs, or ``None``."""
    if isinstance(before, Tensor) and isinstance(after, Tensor):
        if before.shape == after.shape and torch.equal(
            before.nan_to_num(7.0), after.nan_to_num(7.0)
        ):
            return None
        if before.shape != after.shape:
            return f"shape {tuple(before.shape)} -> {tuple(after.shape)}"
        return f"by {float((before - after).abs().max()):.3g}"
    if isinstance(before, dict) and isinstance(after, dict):
        before, after = map(_uncounted, (before, after))
        for key in sorted(before.keys() | after.keys(), key=str):
            if key not in before or key not in after:
                return f"{key} is {'new' if key in after else 'gone'}"
            found = difference(before[key], after[key])
            if found:
                return f"{key}: {found}"
        return None
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for i, (a, b) in enumerate(zip(before, after, strict=True)):
            found = difference(a, b)
            if found:
                return f"{i}: {found}"
        return None
    return None if before == after else f"{before!r} -> {after!r}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("record", "compare"))
    parser.add_argument("path")
    parser.add_argument("--only", nargs="*", default=[], help="parts that names have to contain")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    if given.what == "record":
        found = dict(everything(given.only))
        torch.save(found, given.path)
        works = sum("error" not in record for record in found.values())
        print(f"{works} work, {len(found) - works} are refused")
        return 0
    before, wrong, count = torch.load(given.path), 0, 0
    for name, record in everything(given.only):
        count += 1
        differs = difference(before.get(name, {}), record)
        if differs:
            wrong += 1
            print(f"{name}: {differs}", flush=True)
    print(f"{count} compared, {wrong} differ")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
