"""Fits on one rank of several, for ``test_distributed.py``: ``main`` in a process for each rank.

Every fit is of all data, of which each rank has its rows; what it leaves is to be that of one process.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from datetime import timedelta
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
import torch.distributed
from pyro.infer import SVI, Trace_ELBO, TraceEnum_ELBO
from pyro.infer.autoguide import AutoMultivariateNormal, AutoNormal
from torch import Tensor
from torch.nn.functional import linear

import pyro_ngvi as ngvi
from pyro_ngvi.distributed.processes import from_all, rank, world_size
from pyro_ngvi.distributed.svi import APART
from pyro_ngvi.linalg.host import own_random_state

#: past the comparison of the ranks at step 6, and the first steps, which go another way
STEPS, N, D = 8, 26, 3


def data() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(3)
    X = torch.randn(N, D, generator=g)
    return X, X.sum(-1) + 0.5 * torch.randn(N, generator=g)


def regression(X: Tensor, y: Tensor) -> None:
    w = pyro.sample("w", dist.Normal(X.new_zeros(D), 1.0).to_event(1))
    s = pyro.sample("s", dist.Gamma(X.new_tensor(2.0), 2.0))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(X @ w, s), obs=y)


def all_the_same(X: Tensor, y: Tensor) -> None:
    """Beside the data, an observation that every rank has, and a term that belongs to none."""
    regression(X, y)
    w = pyro.sample("v", dist.Normal(0.0, 1.0))
    pyro.sample("measured", dist.Normal(w, 0.3), obs=torch.tensor(0.7))
    pyro.factor("penalty", -w.square())


def learnt(X: Tensor, y: Tensor) -> None:
    """A parameter of the model, which starts at another number on each rank but that of rank 0."""
    w = pyro.sample("w", dist.Normal(X.new_zeros(D), 1.0).to_event(1))
    s = pyro.param("s", torch.tensor(1.0 + rank()), constraint=dist.constraints.positive)
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(X @ w, s), obs=y)


def minibatch(X: Tensor, y: Tensor, index: Tensor) -> None:
    w = pyro.sample("w", dist.Normal(X.new_zeros(D), 1.0).to_event(1))
    with pyro.plate("data", N, subsample=index):
        pyro.sample("y", dist.Normal(X[index] @ w, 0.5), obs=y[index])


def local(X: Tensor, y: Tensor) -> None:
    """As many latent variables as data, with shards of one size on all ranks."""
    with pyro.plate("data", 6):
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Normal(z, 1.0), obs=y[:6])


def outside(X: Tensor, y: Tensor) -> None:
    """A datum that all ranks have: each would give it a site."""
    m = pyro.sample("m", dist.Normal(X.new_zeros(()), 1.0))
    pyro.sample("measured", dist.Normal(m, 0.3), obs=torch.tensor(0.7))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(m, 1.0), obs=y)


def by_rank(X: Tensor, y: Tensor) -> None:
    regression(X, y)
    pyro.sample(f"x{rank()}", dist.Normal(0.0, 1.0), obs=y[0])


def empirical(X: Tensor, y: Tensor) -> None:
    m = pyro.sample("m", dist.Normal(y.mean(), 1.0))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(m, 1.0), obs=y)


def reads_data(model: Any) -> Any:
    def guide(X: Tensor, y: Tensor) -> None:
        w = pyro.sample(
            "w", dist.Normal(pyro.param("a", torch.zeros(D)) + y.mean(), 1.0).to_event(1)
        )
        pyro.sample("s", dist.LogNormal(w.sum(), 1.0))

    return guide


def one_label(X: Tensor, y: Tensor) -> None:
    """A discrete variable of all data together, whose sum is no product over ranks."""
    m = pyro.sample("m", dist.Normal(torch.tensor([-1.0, 1.0]), 1.0).to_event(1))
    k = pyro.sample("k", dist.Bernoulli(0.4), infer={"enumerate": "parallel"})
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(m[k.long()], 0.5), obs=y)


def two_sites(X: Tensor, y: Tensor) -> None:
    m = pyro.sample("m", dist.Normal(torch.tensor([-1.0, 1.0]), 1.0).to_event(1))
    with pyro.plate("data", len(y)):
        k = pyro.sample("k", dist.Bernoulli(0.4), infer={"enumerate": "parallel"}).long()
        pyro.sample("y", dist.Normal(m[k], 0.5), obs=y)
        pyro.sample("x", dist.Normal(-m[k], 1.0), obs=X[:, 0])


def visits(X: Tensor, y: Tensor) -> None:
    """A label by row of X, whose entries stand in a plate within."""
    m = pyro.sample("m", dist.Normal(torch.tensor([-1.0, 1.0]), 1.0).to_event(1))
    with pyro.plate("data", len(y), dim=-1):
        k = pyro.sample("k", dist.Bernoulli(0.4), infer={"enumerate": "parallel"}).long()
        with pyro.plate("visits", D, dim=-2):
            pyro.sample("x", dist.Normal(m[k], 1.0), obs=X.mT)


def mixture(X: Tensor, y: Tensor) -> None:
    m = pyro.sample("m", dist.Normal(torch.tensor([-1.0, 1.0]), 1.0).to_event(1))
    with pyro.plate("data", len(y)):
        k = pyro.sample("k", dist.Bernoulli(0.4), infer={"enumerate": "parallel"})
        pyro.sample("y", dist.Normal(m[k.long()], 0.5), obs=y)


def layer(X: Tensor, y: Tensor) -> None:
    W = pyro.sample("W", dist.Normal(X.new_zeros(2, D), 1.0).to_event(2))
    with pyro.plate("data", len(y)):
        mean = linear(X, W)
        pyro.sample("y", dist.Normal(mean, 0.5).to_event(1), obs=torch.stack([y, -y], -1))


def ours(
    guide: str, optim: Callable[..., Any], model: Any = regression, /, **loss: Any
) -> Callable[[], SVI]:
    def make() -> SVI:
        made = getattr(ngvi, guide)(model)
        return SVI(model, made, optim(made), ngvi.BatchedELBO(4, **loss))

    return make


def pyros(guide: Any, optim: Callable[..., Any], loss: Any, model: Any = regression) -> Any:
    def make() -> SVI:
        made = guide(model)
        return SVI(model, made, optim(made), loss)

    return make


def adam(guide: Any) -> Any:
    return pyro.optim.Adam({"lr": 0.05})  # pyright: ignore[reportAttributeAccessIssue]


optim = ngvi.optim
FITS: dict[str, Callable[[], SVI]] = {
    "NGVB, mean field": ours("AutoMeanFieldNormal", ngvi.NGVB),
    "NGVB, full rank": ours("AutoFullRankNormal", ngvi.NGVB),
    "NGVB, factor": ours("AutoFactorNormal", ngvi.NGVB),
    "NGVB, full rank, Hessian": ours("AutoFullRankNormal", ngvi.NGVB, curvature="hessian"),
    "NGVB, terms of all ranks": ours("AutoFullRankNormal", ngvi.NGVB, all_the_same),
    "NGVB, summed out": ours("AutoFullRankNormal", ngvi.NGVB, mixture),
    "NGVB, two sites summed out": ours("AutoFullRankNormal", ngvi.NGVB, two_sites),
    "NGVB, summed out by row": ours("AutoFullRankNormal", ngvi.NGVB, visits),
    "NGVB, others": ours(
        "AutoMeanFieldNormal",
        lambda guide: ngvi.NGVB(guide, others=adam(guide)),
        learnt,
    ),
    "VON": ours("AutoFullRankNormal", optim.VON, curvature="hessian"),
    "VOGN": ours("AutoMeanFieldNormal", optim.VOGN, curvature="gauss_newton"),
    "IVON": ours("AutoMeanFieldNormal", optim.IVON, curvature="price"),
    "SLANG": ours("AutoFactorPrecision", partial(optim.SLANG, lr=0.1), curvature="gauss_newton"),
    "SPRING": ours("AutoCouplingFlow", optim.SPRING, curvature="scores"),
    "IFVB": ours("AutoFullRankNormal", ngvi.IFVB),
    "IFVB, Pyro's guide": pyros(AutoMultivariateNormal, ngvi.IFVB, Trace_ELBO(4)),
    "AIFVB": ours("AutoMeanFieldNormal", ngvi.AIFVB),
    "Adam, Pyro's guide": pyros(AutoNormal, adam, Trace_ELBO(4)),
    "Adam, Pyro's enumeration": pyros(
        lambda model: AutoNormal(pyro.poutine.block(model, expose=["m"])),
        adam,
        TraceEnum_ELBO(max_plate_nesting=1),
        mixture,
    ),
}


def run(fit: Callable[[], SVI], batches: Iterable[Any], **how: Any) -> dict[str, Any]:
    """The losses of a fit, and what the guide and Pyro's store hold at its end."""
    pyro.clear_param_store()
    pyro.set_rng_seed(17 + rank())  # which the first step makes that of rank 0
    svi = fit()
    svi = ngvi.distributed.wrap(svi, ["data"], check_every=6, **how)
    losses = [svi.step(*batch) for batch in batches]
    store = {k: v.detach().clone() for k, v in pyro.get_param_store().named_parameters()}
    return {"losses": torch.tensor(losses), **store}


def batches_of(size: int) -> Iterable[Any]:
    """Each rank's part of the same minibatches."""
    X, y = data()
    g = torch.Generator().manual_seed(5)
    for _ in range(STEPS):
        yield X, y, ngvi.distributed.shard(torch.randperm(N, generator=g)[:size])


def one_gradient(curvature: str, factor: bool = False) -> dict[str, Any]:
    """What one loss of data that all ranks have leaves, and what those of single ranks leave."""
    pyro.clear_param_store()
    guide = (ngvi.AutoFactorPrecision if factor else ngvi.AutoFullRankNormal)(regression)
    alone = SVI(regression, guide, adam(guide), ngvi.BatchedELBO(4, curvature=curvature))
    svi = ngvi.distributed.wrap(alone, plates=[])

    def left_by(svi: SVI) -> dict[str, Tensor]:
        guide.curvature = None
        loss = svi.loss_and_grads(svi.model, guide, *data())
        assert guide.curvature is not None
        grads = {k: p.grad for k, p in guide.natural_params().items() if p.grad is not None}
        for p in guide.natural_params().values():
            p.grad = None
        return {"loss": torch.as_tensor(loss), **guide.curvature.parts, **grads}

    left_by(svi)
    pyro.set_rng_seed(3)
    left = left_by(svi)
    pyro.set_rng_seed(3)
    seed = int(torch.randint(2**62, ()))
    single = []
    for r in range(world_size()):
        with own_random_state((seed + r * APART) % 2**62):
            single.append(left_by(alone))
    return {"all": left, "single": single, "own": svi.own_noise}


def gaussian(own_noise: bool) -> float:
    """KL from the posterior, which is Gaussian, after 60 steps on shards."""
    X, y = data()

    def model(X: Tensor, y: Tensor) -> None:
        w = pyro.sample("w", dist.Normal(X.new_zeros(D), 1.0).to_event(1))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(X @ w, 1.0), obs=y)

    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    guide = ngvi.AutoFullRankNormal(model)
    svi = SVI(model, guide, ngvi.NGVB(guide), ngvi.BatchedELBO(8))
    svi = ngvi.distributed.wrap(svi, ["data"], own_noise=own_noise)
    for _ in range(60):
        svi.step(*ngvi.distributed.shard(X, y))
    precision = torch.eye(D) + X.mT @ X
    mean = torch.linalg.solve(precision, X.mT @ y)
    exact = torch.distributions.MultivariateNormal(mean, precision_matrix=precision)
    with torch.no_grad():
        q = guide.get_posterior()
        q = torch.distributions.MultivariateNormal(q.mean, q.covariance_matrix)
        return float(torch.distributions.kl_divergence(q, exact))


def with_faults() -> dict[str, Any]:
    """NaN in the data of the last rank at one step, then random numbers that only one rank draws."""
    svi = ours("AutoFullRankNormal", ngvi.NGVB)()
    svi = ngvi.distributed.wrap(svi, plates=["data"])
    X, y = ngvi.distributed.shard(*data())
    losses = []
    for k in range(6):
        bad = k == 3 and rank() == world_size() - 1
        with warnings.catch_warnings(record=True) as caught:
            losses.append(svi.step(X, y * torch.nan if bad else y))
            if k == 3:
                message = str(caught[-1].message)
    svi.check()
    skipped = svi.optim.report().skipped
    try:
        svi.step(X, y) if rank() else svi.evaluate_loss(X, y)
        calls = ""
    except RuntimeError as error:
        calls = str(error)
    torch.randn(rank())  # nothing on rank 0
    try:
        svi.check()
        apart = ""
    except RuntimeError as error:
        apart = str(error)
    return {
        "losses": losses,
        "skipped": skipped,
        "message": message,
        "calls": calls,
        "apart": apart,
    }


def slopes(X: Tensor, y: Tensor, index: Tensor | None = None) -> None:
    """More latent variables than a rank has rows, counts, and tails that are not log-concave."""
    A = torch.cat([X, X.square(), X.cos(), X.sin(), (2.0 * X).cos(), (2.0 * X).sin()], -1)
    w = pyro.sample("w", dist.Normal(X.new_zeros(A.shape[1]), 1.0).to_event(1))
    m = pyro.sample("m", dist.Normal(0.0, 2.0))
    with pyro.plate("data", len(y), subsample=index) as rows:
        f = m + A[rows] @ w
        pyro.sample("y", dist.StudentT(3.0, f, 0.5), obs=y[rows])
        pyro.sample("k", dist.Poisson((0.3 * f).exp()), obs=y[rows].abs().round())


def parts_of_batches(steps: int) -> Iterable[Any]:
    """Numbers of a rank's rows, of 24 in all, in minibatches that have as many of each rank."""
    g = torch.Generator().manual_seed(2)
    first = ngvi.distributed.shard(torch.arange(24))[0]
    X, y = ngvi.distributed.shard(*(x[:24] for x in data()))
    for _ in range(steps):
        rows = (
            torch.cat([6 * block + torch.randperm(6, generator=g)[:2] for block in range(4)])
            - first
        )
        yield X, y, rows[(rows >= 0) & (rows < len(y))]


def by_sites(model: Any, batches: Iterable[Any], scaled_to: Any = None) -> dict[str, Any]:
    """Losses, what sites say together, q, and the sites of all ranks."""
    pyro.clear_param_store()
    pyro.set_rng_seed(17 + rank())
    guide = ngvi.AutoSites(model)
    svi = SVI(model, guide, ngvi.CVI(guide), ngvi.SitesELBO())
    svi, batches = (
        ngvi.distributed.wrap(svi, ["data"], check_every=1, scaled_to=scaled_to),
        [*batches],
    )
    losses = [svi.step(*batch) for batch in batches]
    draws = guide(*batches[-1])
    sites = from_all([p.detach() for p in guide.natural_params().values()])
    return {
        "losses": torch.tensor(losses),
        "evaluated": torch.tensor(svi.evaluate_loss(*batches[-1])),
        "precision": guide.get_posterior().covariance_matrix,
        **{name: x.detach() for name, x in (guide.median() | draws).items()},
        **{str(i): torch.cat(parts) for i, parts in enumerate(zip(*sites, strict=True))},
        "report": torch.tensor([svi.optim.report().damped, svi.optim.report().left]),
    }


def groups(y: Tensor, labels: Tensor, size: int | None = None) -> None:
    """Units with a mean and a count of labels each: Gaussian given the globals without the labels."""
    m = pyro.sample("m", dist.Normal(y.new_zeros(()), 3.0))
    s = pyro.sample("s", dist.HalfNormal(y.new_tensor(2.0)))
    with pyro.plate("units", len(y), subsample_size=size) as rows:
        u = pyro.sample("u", dist.Normal(m, s))
        pyro.sample("y", dist.Normal(u, 0.7), obs=y[rows])
        if labels.numel():
            pyro.sample("labels", dist.Binomial(5, logits=u), obs=labels[rows])


def by_units(steps: int, *mine: Tensor, size: int | None = None) -> dict[str, Any]:
    """Losses, q(v), and the sites of the units of all ranks in their order."""
    pyro.clear_param_store()
    pyro.set_rng_seed(17 + rank())
    guide = ngvi.AutoHierarchical(groups)
    svi = SVI(groups, guide, ngvi.NGVB(guide), ngvi.BatchedELBO(16))
    scaled_to = None if size is None else "shard"
    svi = ngvi.distributed.wrap(svi, ["units"], check_every=1, scaled_to=scaled_to)
    losses = [svi.step(*mine, size) for _ in range(steps)]
    assert (guide.share, guide.apart) == (1.0, None)
    if world_size() > 1:
        with pytest.raises(ValueError, match="weights of all of them are not known"):
            ngvi.khat(svi.program, guide, *mine)
    q, sites = guide.globals.get_posterior(), guide.sites
    parts = from_all([sites.linear, sites.precision])
    return {
        "losses": torch.tensor(losses),
        "loc": q.mean.detach(),
        "covariance": q.covariance_matrix.detach(),
        "linear": torch.cat([linear for linear, _ in parts]),
        "precision": torch.cat([precision for _, precision in parts]),
    }


def in_one_call(path: Path) -> dict[str, Any]:
    """Fits by ``fit``, what is read of them, and how they end where one rank has had enough."""
    last = rank() == world_size() - 1
    how: Any = {"distributed": {"plates": ["data"]}, "seed": 4, "progress": False}

    def fit(model: Any = regression, **options: Any) -> Any:
        pyro.clear_param_store()
        return ngvi.fit(model, *ngvi.distributed.shard(*data()), **how, **options)

    done = fit()
    vars(done)["_word"] = done.khat  # one process alone would correct the draws
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # k-hat of a datum
        loo = done.loo()
    terms: Any = loo.loo_i if hasattr(loo, "loo_i") else loo.elpd_i
    found = {
        "losses": torch.tensor(done.losses),
        "looks": torch.tensor([(k, gap.nats, gap.error) for k, gap in done.stop.looks]),
        "read": torch.tensor([*done.elbo, done.khat.khat, done.khat.ess]),
        "loo": torch.tensor([loo.n_data_points, *terms.values]),
        "draws": torch.tensor(done.idata["posterior"]["w"].values),
        "why": [done.why_stopped, done.khat.decision, len(repr(done).splitlines())],
    }
    with_sites = fit(slopes, guide="AutoSites")
    found["sites"] = torch.tensor([*with_sites.losses, *with_sites.elbo, with_sites.khat.khat])
    alike = ngvi.fit(all_the_same, *data(), **how | {"distributed": {"plates": []}})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loos = [alike.loo(var_name="y"), alike.loo(var_name="measured")]
    found["alike"] = [loo.n_data_points for loo in loos]
    late = fit(tol=0.0, max_time=0.05 if last else 60.0)
    asked = fit(tol=0.0, max_steps=20, callbacks=[lambda fit: last and fit.steps == 3])
    found["ends"] = from_all((late.why_stopped, late.steps, asked.why_stopped, asked.steps))
    fit(tol=0.0, max_steps=8, checkpoint=path)
    found["written"] = path.exists()
    found["refused"] = []
    stored: Any = {"model": slopes, "guide": "AutoSites", "checkpoint": path.with_suffix(".no")}
    for options in ({"guide": "auto"}, {"compile": True}, {"guide": "AutoHierarchical"}, stored):
        try:
            fit(**options)
        except ValueError as error:
            found["refused"].append(str(error))
    return found


def sites(model: Any) -> Callable[[], SVI]:
    def make() -> SVI:
        guide = ngvi.AutoSites(model)
        return SVI(model, guide, ngvi.CVI(guide), ngvi.SitesELBO())

    return make


def units(model: Any) -> Callable[[], SVI]:
    def make() -> SVI:
        guide = ngvi.AutoHierarchical(model)
        return SVI(model, guide, ngvi.NGVB(guide), ngvi.BatchedELBO(16))

    return make


def series(y: Tensor) -> None:
    """A random walk behind data of the rank, which is one unit, a block."""
    s = pyro.sample("s", dist.HalfNormal(y.new_tensor(1.0)))
    z = pyro.sample("z", dist.Normal(y.new_zeros(5), 1.0).to_event(1))
    x = pyro.deterministic("x", s * z.cumsum(-1))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Poisson(x.mean().exp()), obs=y.abs().round())


def refused() -> dict[str, str]:
    """What is said at the first step, by all ranks."""
    X, y = ngvi.distributed.shard(*data())
    full = ("AutoFullRankNormal", ngvi.NGVB)
    batch, plate = next(iter(batches_of(8))), ["data"]
    vadam = ours("AutoMeanFieldNormal", optim.Vadam, curvature="squared_gradient")
    cases: dict[str, tuple[Any, Any, Any]] = {
        "scale": (ours(*full, minibatch), batch, {"plates": plate}),
        "no scale": (ours(*full), (X, y), {"plates": plate, "scaled_to": "whole"}),
        "local": (ours(*full, local), (X, y), {"plates": plate}),
        "no such plate": (ours(*full), (X, y), {"plates": ["date"]}),
        "shards": (ours(*full), (X, y), {"plates": []}),
        "site": (ours(*full, by_rank), (X, y), {"plates": plate}),
        "prior": (ours(*full, empirical), (X, y), {"plates": plate}),
        "guide": (pyros(reads_data, adam, Trace_ELBO()), (X, y), {"plates": plate}),
        "label": (ours(*full, one_label), (X, y), {"plates": plate}),
        "squares": (vadam, (X, y), {"plates": plate}),
        "sites, learned": (sites(learnt), (X, y), {"plates": plate}),
        "sites, outside": (sites(outside), (X, y), {"plates": plate}),
        "sites, no plates": (sites(outside), data(), {"plates": []}),
        "units, no plate": (units(groups), (y, y[:0]), {"plates": []}),
        "units, a block": (units(series), (y,), {"plates": plate}),
    }
    found = {}
    for name, (make, args, how) in cases.items():
        pyro.clear_param_store()
        try:
            ngvi.distributed.wrap(make(), **how).step(*args)
        except (ValueError, RuntimeError) as error:
            found[name] = str(error)
    return found


def main(number: int, world: int, store: str, out: str) -> None:
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    # the start is that of rank 0, which sees the data of one shard
    search: Any = import_module("pyro_ngvi.guides.search")
    search.UNASKED = -1
    flow: Any = import_module("pyro_ngvi.guides.flow")
    flow.find_gaussian = lambda g, family, params, *_: params
    if world > 1:
        how: Any = {"rank": number, "world_size": world, "timeout": timedelta(seconds=120)}
        torch.distributed.init_process_group("gloo", init_method=f"file://{store}", **how)
    X, y = data()
    mine, even = ngvi.distributed.shard(X, y), ngvi.distributed.shard(X[:24], y[:24])
    found: dict[str, Any] = {name: run(fit, [mine] * STEPS) for name, fit in FITS.items()}
    found["CVI"] = by_sites(slopes, [mine] * 12)
    found["CVI, minibatches"] = by_sites(slopes, parts_of_batches(12), "shard")
    small = ours("AutoFullRankNormal", ngvi.NGVB, minibatch)
    found["minibatches"] = run(small, batches_of(8), scaled_to="whole")
    kronecker = ours("AutoMatrixNormal", optim.NoisyKFAC, layer, curvature="kronecker")
    found["NoisyKFAC"] = run(kronecker, [even] * STEPS)
    rows = ngvi.distributed.shard(y)
    found["units"] = by_units(40, rows, rows[:0])
    twice = 5.0 * torch.sigmoid(ngvi.distributed.shard(y[:12].repeat(2))).round(decimals=1)
    twice = twice.round()
    found["units, labels"] = by_units(60, twice, twice)
    found["units, minibatches"] = by_units(300, twice, twice, size=len(twice) // 2)
    found["fit"] = in_one_call(Path(out).with_suffix(".fit"))
    if world > 1:
        found["own noise"] = [
            one_gradient("hessian"),
            one_gradient("gauss_newton", factor=True),
            one_gradient("scores"),
        ]
        found["shared noise"], found["noise of ranks"] = gaussian(False), gaussian(True)
        found["faults"], found["refused"] = with_faults(), refused()
        torch.distributed.destroy_process_group()
    if number == 0:
        torch.save(found, out)
