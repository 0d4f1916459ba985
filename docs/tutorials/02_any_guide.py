# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#       jupytext_version: 1.19.6
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Natural gradients for any guide
#
# `NGVB` needs a guide that knows its own geometry: the Fisher matrix of q, which says how much q
# changes when its parameters do. The families of `pyro_ngvi` know theirs. A guide that you wrote
# yourself does not, and neither do Pyro's own.
#
# `IFVB` finds it out. At every step it solves F x = g by a few steps of conjugate gradients, which
# need products F v and no matrix. For sites with known distributions, normals, gammas, betas and
# many others, a product is a derivative of the KL divergence of the guide from itself, and exact. For
# mixtures and the like it comes from *scores*: draws from the guide, and log q differentiated there.
# All it asks of a guide is that log q can be evaluated; the model is not called once more.
#
# | guide | optimizer |
# |---|---|
# | one of ours (`AutoFullRankNormal`, ...) | `NGVB`: nothing has to be learnt |
# | Pyro's autoguides, mixtures, functions with `pyro.param` | `IFVB` |
# | the same, and you want error bars on the answer itself | `AIFVB`: averages its steps |
# | no density (`AutoDelta`), or one that cannot be evaluated | `pyro.optim.Adam` |
#
# For one fit of such a guide `ngvi.fit(model, *args, guide=guide)` takes `IFVB` by itself. Here we
# write the loops, to compare optimizers at equal time. Three examples: one where we know the answer,
# one with two modes, and one that asks whether the run was long enough. A little over a minute on one
# core.

# %%
import time

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pyro
import pyro.distributions as dist
import torch
from pyro.distributions import constraints
from pyro.infer import SVI, Predictive, Trace_ELBO
from pyro.infer.autoguide import AutoNormal

import pyro_ngvi as ngvi

torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)

# %% [markdown]
# ## A coin, and why the gradient crawls
#
# 57 heads in 200 throws, and a uniform prior: the posterior is Beta(58, 144). We write the guide
# by hand, a Beta with two parameters, and pretend not to know.
#
# `remember_arguments` is the one thing to remember: `IFVB` has to call the guide on its own, and a
# function that takes arguments must tell it which. Guides that are modules, such as Pyro's
# autoguides, do so without help.

# %%
throws = torch.cat([torch.ones(57), torch.zeros(143)])
exact = dist.Beta(58.0, 144.0)


def coin(throws):
    p = pyro.sample("p", dist.Beta(1.0, 1.0))
    with pyro.plate("throw", len(throws)):
        pyro.sample("y", dist.Bernoulli(p), obs=throws)


def beta_guide(a, b):
    @ngvi.optim.remember_arguments
    def guide(throws):
        q_a = pyro.param("a", torch.tensor(a), constraint=constraints.positive)
        q_b = pyro.param("b", torch.tensor(b), constraint=constraints.positive)
        pyro.sample("p", dist.Beta(q_a, q_b))

    return guide


# %% [markdown]
# Now the same loop with three optimizers, two starts and three seeds. Plain gradient descent and Adam
# need a learning rate, so they get a grid of four each; the rate whose KL divergence at the end is
# smallest (median over starts and seeds) stands for the method. A step of `IFVB` costs more than
# one of Adam, so every run gets the same processor time and makes as many steps as it can. We record
# the path of (a, b).

# %%
SECONDS, SEEDS = 0.5, 3
STARTS = ((5.0, 45.0), (25.0, 25.0))
rates = {"gradient": (0.001, 0.003, 0.01, 0.03), "Adam": (0.05, 0.1, 0.2, 0.4), "IFVB": (None,)}
colours = {"gradient": "C0", "Adam": "C1", "IFVB": "C2", "NGVB": "C3"}


def optimizer(name, rate, guide):
    if name == "IFVB":
        return ngvi.IFVB(guide)
    return {"gradient": pyro.optim.SGD, "Adam": pyro.optim.Adam}[name]({"lr": rate})


def for_seconds(step, seconds):
    """Call `step` until that much processor time is used; how many calls, and what they gave."""
    began, results = time.process_time(), []
    while time.process_time() - began < seconds:
        results.append(step())
    return results


def path_of(name, rate, start, seed, seconds=SECONDS):
    pyro.clear_param_store()
    pyro.set_rng_seed(seed)
    guide = beta_guide(*start)
    elbo = Trace_ELBO(num_particles=8, vectorize_particles=True, max_plate_nesting=1)
    svi = SVI(coin, guide, optimizer(name, rate, guide), elbo)

    def step():
        svi.step(throws)
        return pyro.param("a").item(), pyro.param("b").item()

    return torch.tensor([start, *for_seconds(step, seconds)])


def divergence(path):
    """KL(q, posterior) in nats along a path, down to the rounding of the formula."""
    return torch.distributions.kl_divergence(dist.Beta(*path.T), exact).clamp_min(1e-13)


def final(path):
    """Median of the last tenth of a path, since the last step alone is noisy."""
    return divergence(path[-(len(path) // 10) - 1 :]).median().item()


path_of("IFVB", None, STARTS[0], 0, seconds=0.2)  # the first steps load code
runs = {
    (name, rate): [path_of(name, rate, start, seed) for start in STARTS for seed in range(SEEDS)]
    for name in rates
    for rate in rates[name]
}
table = pd.DataFrame(
    [
        (name, rate or "", np.median([len(p) - 1 for p in found]), *np.quantile(ends, [0.5, 0, 1]))
        for (name, rate), found in runs.items()
        for ends in [[final(path) for path in found]]
    ],
    columns=["method", "rate", "steps", "KL at the end, median", "best", "worst"],
)
print(table.to_string(index=False, float_format=lambda v: f"{v:.3g}"))
tuned = table.loc[table.groupby("method")["KL at the end, median"].idxmin()].set_index("method")
paths = {
    (name, start): runs[name, tuned.loc[name, "rate"] or None][i * SEEDS]
    for name in rates
    for i, start in enumerate(STARTS)
}

# %% [markdown]
# For this guide there is an easier way, too. `AutoExponentialFamily` sees that `p` lives between 0
# and 1, and takes a Beta whose Fisher matrix is known. No function to write, and `NGVB` drives it.

# %%
pyro.clear_param_store()
pyro.set_rng_seed(0)
auto = ngvi.AutoExponentialFamily(coin)
svi = SVI(coin, auto, ngvi.NGVB(auto), ngvi.BatchedELBO(num_particles=8))


def step():
    svi.step(throws)
    q = auto.site_distribution("p")
    return q.concentration1.item(), q.concentration0.item()


paths["NGVB", "auto"] = torch.tensor(for_seconds(step, SECONDS))
print(f"NGVB: {len(paths['NGVB', 'auto'])} steps, KL at the end {final(paths['NGVB', 'auto']):.1g}")

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
for (name, start), path in paths.items():
    label = name if start != (25.0, 25.0) else None
    if name != "NGVB":
        left.loglog(*path.T, ".-", color=colours[name], markersize=2, linewidth=0.7)
        left.plot(*start, "o", color="0.3", markerfacecolor="none", markersize=9)
    dashes = "--" if start == (25.0, 25.0) else "-"
    seconds = np.linspace(0.0, SECONDS, len(path))
    right.semilogy(seconds, divergence(path), dashes, color=colours[name], lw=1, label=label)
left.plot(58, 144, "k*", markersize=16, zorder=5, label="posterior")
ridge = np.geomspace(3, 150, 2)
left.plot(ridge, ridge * 144 / 58, ":", color="0.6", zorder=0, label="right mean")
left.set(xlabel="a", ylabel="b", title="paths from two starts (circles)")
left.set(xlim=(4, 250), ylim=(15, 600))
left.tick_params(which="minor", labelleft=False)
right.set(xlabel="seconds", ylabel="KL(q, posterior), nats", title="how far from the answer")
left.legend()
_ = right.legend()

# %% [markdown]
# The first-order methods find the right *mean* first: they drop onto the dotted line, where
# a / (a + b) is right. Then they move along it. Along the line only the width of q changes, and there
# the KL divergence is far flatter than across. The next cell prints how much, as the ratio of the two
# eigenvalues of q's Fisher matrix in the coordinates that Pyro stores, log a and log b.

# %%
for point in (*STARTS, (58.0, 144.0)):
    curvature = torch.autograd.functional.hessian(
        lambda v: torch.distributions.kl_divergence(
            dist.Beta(*v.exp()), dist.Beta(*v.exp().detach())
        ),
        torch.tensor(point).log(),
    )
    low, high = torch.linalg.eigvalsh(curvature)
    print(f"at (a, b) = {point}: {high / low:.0f} times steeper across than along")
# what the text says of these numbers
best = tuned["KL at the end, median"]
assert best["IFVB"] < best[["Adam", "gradient"]].min()
assert tuned.loc["IFVB", "worst"] < 1e-6
assert final(paths["NGVB", "auto"]) < 1e-4

# %% [markdown]
# A rate that suits the steep direction is slow in the flat one; a rate that is fast in the flat one
# keeps q shaking across. The best rate is a compromise, and the table shows what it costs: Adam at its
# best rate comes close to the posterior, but not to rest. In units of the Fisher matrix both
# directions look alike. Products with that of a Beta are exact, and `IFVB` makes the draws *steady*:
# their gradients have no noise where q is the posterior. So it needs no rate and ends there, to the
# rounding of the numbers, from either start. `NGVB` does so too, at a lower price a step.
#
# ## Two modes, two components
#
# Cameras see the square of a wave and not its sign. Here is the smallest such problem: eight
# measurements `y = (x'w)^2 + noise` of a vector `w` with two entries. `w` and `-w` explain the data
# equally well, so the posterior has two modes, and a Gaussian can hold only one of them.
#
# A mixture can hold both. Nobody has its Fisher matrix in closed form, so 64 scores a step stand for
# it. The two components start opposite each other, which uses the symmetry that we know of.

# %%
noise = torch.Generator().manual_seed(3)
X = torch.randn(8, 2, generator=noise) * torch.tensor([1.0, 0.3])
y = (X @ torch.tensor([0.8, 1.5])).square() + 0.3 * torch.randn(8, generator=noise)


def squares(X, y):
    w = pyro.sample("w", dist.Normal(torch.zeros(2), 2.0).to_event(1))
    pyro.sample("y", dist.Normal((w @ X.mT).square(), 0.3).to_event(1), obs=y)


def opposite():
    centre = torch.randn(2)
    return torch.stack([centre, -centre])


@ngvi.optim.remember_arguments
def mixture(X, y):
    locs = pyro.param("locs", opposite)
    scales = pyro.param("scales", 0.5 * torch.ones(2, 2), constraint=constraints.positive)
    logits = pyro.param("logits", torch.zeros(2))
    pyro.sample("w", dist.MixtureOfDiagNormals(locs, scales, logits))


# %% [markdown]
# In two dimensions a grid gives us the exact posterior, and the log evidence that the ELBO cannot
# exceed. Each method gets the same eight random starts and the same processor time; Adam is tried
# at three rates. At the end we estimate the ELBO from 4,000 draws.

# %%
horizontal, vertical = torch.linspace(-2.5, 2.5, 201), torch.linspace(-4.0, 4.0, 201)
grid = torch.cartesian_prod(horizontal, vertical)


def log_joint(w):
    prior = dist.Normal(0.0, 2.0).log_prob(w).sum(-1)
    return prior + dist.Normal((w @ X.mT).square(), 0.3).log_prob(y).sum(-1)


cell = (horizontal[1] - horizontal[0]) * (vertical[1] - vertical[0])
evidence = (log_joint(grid).logsumexp(0) + cell.log()).item()


def run_mixture(make_optim, seed, seconds=0.75):
    pyro.clear_param_store()
    pyro.set_rng_seed(seed)
    elbo = Trace_ELBO(num_particles=16, vectorize_particles=True, max_plate_nesting=0)
    svi = SVI(squares, mixture, make_optim(mixture), elbo)
    curve = -np.array(for_seconds(lambda: svi.step(X, y), seconds))
    with torch.no_grad():
        q = dist.MixtureOfDiagNormals(*(pyro.param(k) for k in ("locs", "scales", "logits")))
        draws = q.sample((4000,))
        gap = (log_joint(draws) - q.log_prob(draws)).mean().item() - evidence
    weight = pyro.param("logits").detach().softmax(0).min().item()
    return curve, draws[:400], weight, gap


methods = {
    "Adam, 0.03": lambda guide: pyro.optim.Adam({"lr": 0.03}),
    "Adam, 0.1": lambda guide: pyro.optim.Adam({"lr": 0.1}),
    "Adam, 0.3": lambda guide: pyro.optim.Adam({"lr": 0.3}),
    "IFVB": lambda guide: ngvi.IFVB(guide),
}
mixtures = {name: [run_mixture(make, seed) for seed in range(8)] for name, make in methods.items()}

# %%
figure, axes = plt.subplots(1, 3, figsize=(12, 4), layout="constrained")
box = np.ones(20) / 20
for name, colour in (("Adam, 0.03", "C1"), ("Adam, 0.1", "C4"), ("IFVB", "C2")):
    for i, (curve, *_) in enumerate(mixtures[name][:3]):
        seconds, smooth = np.linspace(0, 0.75, len(curve)), np.convolve(curve, box, "valid")
        label = None if i else name
        axes[0].plot(seconds[len(box) - 1 :], smooth, color=colour, linewidth=0.9, label=label)
axes[0].axhline(evidence, color="k", linestyle=":", label="log evidence")
axes[0].set(xlabel="seconds", ylabel="ELBO (nats)", ylim=(evidence - 12, evidence + 1))
axes[0].set_title("ELBO of three starts, mean of twenty steps")
axes[0].legend(fontsize="small", loc="lower right")
density = (log_joint(grid) - log_joint(grid).max()).exp().reshape(201, 201).T
for axis, name in zip(axes[1:], ("Adam, 0.03", "IFVB"), strict=True):
    axis.contour(horizontal, vertical, density, levels=[0.01, 0.1, 0.5], colors="k", linewidths=0.7)
    axis.plot(*mixtures[name][1][1].T, ".", color="C2" if name == "IFVB" else "C1", markersize=3)
    axis.set(title=f"{name}: draws at the end", xlim=(-2, 2), ylim=(-3.2, 3.2))
    axis.set(xlabel="first entry of w", ylabel="second entry of w")

# %%
gaps = pd.DataFrame({name: [gap for *_, gap in found] for name, found in mixtures.items()})
weights = pd.DataFrame({name: [w for _, _, w, _ in found] for name, found in mixtures.items()})
ahead = gaps.sub(gaps["IFVB"], axis=0).lt(0).sum()
summary = pd.DataFrame(
    {
        "steps": [np.median([len(curve) for curve, *_ in found]) for found in mixtures.values()],
        "ELBO - log evidence, median": gaps.median(),
        "worst start": gaps.min(),
        "best start": gaps.max(),
        "IFVB is above in": [f"{n} of 8" if name != "IFVB" else "" for name, n in ahead.items()],
        "smaller weight, median": weights.median(),
        "below 0.05 in": [f"{n} of 8" for n in weights.lt(0.05).sum()],
    }
)
print(summary.round(2).T.to_string())
# what the text says of these numbers
assert (gaps["IFVB"] < 0.1).all()  # a bound, up to the noise of its estimate
assert gaps["IFVB"].median() > gaps.drop(columns="IFVB").median().max() - 0.3

# %% [markdown]
# No method wins by much. The medians differ by less than the starts do, and which rate of Adam is best
# depends on how long we let it run. What `IFVB` saves is the search for that rate.
#
# Look at the smaller weight, too. Both modes are equally likely, so it should be one half, and
# it rarely is, with any of the methods: around one half the ELBO hardly depends on it. If it
# reaches zero, one mode is lost, and the ELBO stops log 2 = 0.69 nats lower than it might. Such a
# *dying component* has a reason of its own under natural gradients. The Fisher matrix of its location
# is proportional to its weight. As the weight falls, almost no draw tells about the component, the
# estimate there is poor, and a step in units of a tiny Fisher matrix is long, as far as the KL from
# the guide before it allows. Four things help:
#
# - start the components apart, and wide enough to feel the posterior;
# - use more particles, and if need be `num_scores`, which draws more scores a step;
# - try several starts, and keep the one with the highest ELBO;
# - look at the weights afterwards. A component that has all but died comes back now and then, while
#   steps are long; do not count on it.
#
# ## Was the run long enough?
#
# Variational answers have two errors. One is that q has the wrong shape; k-hat looks for it, as in
# the first tutorial. The other is that the run was noisy and stopped at some point, so that another
# run would have given other parameters. `AIFVB` can tell how large this second error is. It averages
# its iterates, and theory gives the covariance of such an average around the optimum from two
# matrices that can be measured at the end: the noise of a gradient, and the curvature of the loss.
#
# The data are the flights of the space shuttle before the last one of Challenger: the temperature at
# launch, in degrees Fahrenheit, and whether an O-ring was damaged. The guide is Pyro's own
# `AutoNormal`.

# %%
fahrenheit = "53 57 58 63 66 67 67 67 68 69 70 70 70 70 72 73 75 75 76 76 78 79 81"
temperature = torch.tensor([float(t) for t in fahrenheit.split()])
damaged = torch.tensor([float(d) for d in "11110000001010001000000"])
warmth = (temperature - temperature.mean()) / temperature.std()


def shuttle(warmth, damaged):
    intercept = pyro.sample("intercept", dist.Normal(0.0, 2.0))
    slope = pyro.sample("slope", dist.Normal(0.0, 2.0))
    with pyro.plate("flight", len(warmth)):
        pyro.sample("damaged", dist.Bernoulli(logits=intercept + slope * warmth), obs=damaged)


def run_shuttle(steps, seed):
    pyro.clear_param_store()
    pyro.set_rng_seed(seed)
    guide = AutoNormal(shuttle)
    optim = ngvi.AIFVB(guide)
    svi = SVI(shuttle, guide, optim, ngvi.BatchedELBO(num_particles=4))
    for _ in range(steps):
        svi.step(warmth, damaged)
    return guide, optim, svi


# %% [markdown]
# A guide of another package holds the last iterate. The average is read inside `use_average()`.

# %%
errors, averages = {}, {}
for steps in (200, 800):
    guide, optim, svi = run_shuttle(steps, seed=0)
    covariance = optim.asymptotic_covariance(svi, warmth, damaged)
    errors[steps] = {k: v.item() for k, v in covariance.stddev.items()}
    averages[steps] = {k: v.item() for k, v in covariance.average.items()}
    if steps == 200:
        with optim.use_average():
            plain = Predictive(guide, num_samples=1000)(warmth, damaged)
        widened = optim.posterior_with_algorithmic_uncertainty(svi, warmth, damaged)

# %% [markdown]
# Does the theory tell the truth? We run the 200 steps eight more times, with other random numbers,
# and look at the spread of the answers. n runs know a standard deviation only to about
# 1/sqrt(2 (n - 1)) of itself, so that is the agreement we may ask for.

# %%
again = []
for seed in range(1, 9):
    guide, optim, _ = run_shuttle(200, seed)
    with optim.use_average():
        store = pyro.get_param_store()
        again.append({k: store[k].unconstrained().item() for k in store})
again = pd.DataFrame(again)

table = pd.DataFrame(
    {
        "average, 200 steps": averages[200],
        "s.e., 200 steps": errors[200],
        "spread of eight runs": again.std(),
        "s.e., 800 steps": errors[800],
    }
)
table["200 / 800"] = table["s.e., 200 steps"] / table["s.e., 800 steps"]
table["s.e. / spread"] = table["s.e., 200 steps"] / table["spread of eight runs"]
print(table.round(3).to_string())
print(f"eight runs know their spread to {14**-0.5:.0%}")

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.6), layout="constrained")
places = np.arange(len(table))
left.errorbar(places, again.std(), again.std() / 14**0.5, fmt="ko", label="spread of eight runs")
left.plot(places - 0.15, table["s.e., 200 steps"], "C0s", label="s.e., 200 steps")
left.plot(places + 0.15, table["s.e., 800 steps"], "C1s", label="s.e., 800 steps")
short = [name.removeprefix("AutoNormal.").replace("scales", "log scale") for name in table.index]
left.set_xticks(places, [name.replace("locs.", "loc ").replace(".", " ") for name in short])
left.set(ylabel="standard error", ylim=(0, 0.12), title="one parameter beside the other")
left.legend()
name = "AutoNormal.locs.slope"
at = np.linspace(averages[200][name] - 0.2, averages[200][name] + 0.2, 300)
for (steps, error), colour in zip(errors.items(), ("C0", "C1"), strict=True):
    bell = dist.Normal(averages[steps][name], error[name]).log_prob(torch.tensor(at)).exp()
    right.plot(at, bell, colour, label=f"one run of {steps} steps")
right.plot(again[name], np.zeros(8), "k|", markersize=20, label="eight runs of 200")
right.set(
    xlabel="mean of the slope",
    ylabel="density",
    yticks=[],
    ylim=(0, None),
    title="where the optimum may be",
)
_ = right.legend()

# %% [markdown]
# Theory says that the standard errors of a run four times as long are half as large, and that those of
# the short run agree with the spread of the runs; the two last columns show how nearly. The standard
# errors cost a few hundred gradients and one run; the spread cost eight runs.
#
# Are they large? What matters is their size beside that of the posterior.
# `posterior_with_algorithmic_uncertainty` draws each sample from a guide whose parameters are drawn
# too, so that both uncertainties are in it:

# %%
rows = {
    "guide": {k: plain[k].std().item() for k in ("intercept", "slope")},
    "widened": {k: widened[k].std().item() for k in ("intercept", "slope")},
}
print(pd.DataFrame(rows).round(3).to_string())
print(f"a thousand draws know an sd to {2000**-0.5:.0%} of itself")
for site in ("intercept", "slope"):
    error = errors[200][f"AutoNormal.locs.{site}"]
    wider = (1 + (error / rows["guide"][site]) ** 2) ** 0.5 - 1
    print(f"{site}: the error of its mean, {error:.3f}, makes an sd wider by {wider:.1%}")
# what the text says of these numbers
ratio = np.array([errors[200][k] / errors[800][k] for k in table.index])
assert (ratio > 1.3).all() and (ratio < 3.1).all(), ratio  # sqrt(800 / 200) = 2
spread = np.array([errors[200][k] / again[k].std() for k in table.index])
assert (spread > 0.4).all() and (spread < 2.5).all(), spread
assert table.loc["AutoNormal.locs.slope", "average, 200 steps"] < -1.0  # cold is dangerous

# %% [markdown]
# What the error of the means adds is smaller than the noise with which a thousand draws know an sd, so
# the columns differ by little more than that noise. For this posterior 200 steps were enough, and now
# we know. Had the widened draws been visibly wider, more steps would be the cure.
#
# ## What it costs, and where it fails
#
# - **Scores.** log q must be computable at a given point, and depend on the parameters. `AutoDelta` has
#   no density, some flows have no inverse; then `IFVB` says so at the first step. So it does for guides
#   that shift a draw by their parameters, such as `AutoStructured`.
# - **Time.** Each step differentiates the guide a few times, for the products, and looks at how far it
#   moved. The tables above show how many fewer steps it made in the same time. That is with models
#   as cheap as these; the more a model costs, the less it matters.
# - **Coordinates.** Other guides are stepped in the coordinates in which Pyro stores their parameters.
#   Ours bring a frame that moves along with q: prefer them, and `NGVB`, where they fit.
# - **Losses.** The draws of the guide are made *steady* while `IFVB` trains it: log q has the gradient
#   of the path alone, which is right for every ELBO. `RenyiELBO` and `ReweightedWakeSleep` are none,
#   and need `IFVB(guide, steady=False)`.
# - **Standard errors** know about noise only. They cannot see that a run has not converged, or is
#   stuck in the wrong mode, or that the family is too small; and for runs that are very short they
#   are too large.
#
# The first tutorial's questions remain: has the curve stopped rising, and what does `khat` say?
