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
# # A hundred thousand groups: effects that follow their globals
#
# Random effects, players, schools, users: units i with latent variables u_i, whose prior has unknown
# parameters v. One Gaussian for everything gets one thing wrong that matters. Where the scale of the
# effects is small they crowd together, and where it is large they spread: the posterior is a funnel.
# `AutoHierarchical` has that funnel built in:
#
#     q(v, u) = q(v) prod_i q(u_i | v),
#     q(u_i | v)  propto  p(u_i | v) exp(nu_i' u_i - u_i' Lambda_i u_i / 2).
#
# The prior of the effects given v stays exactly as in your model, times a Gaussian *site* for each
# unit; q(v) is any guide, a full-rank Gaussian by default. `ngvi.fit` trains both, by natural
# gradients. About a minute on one core.

# %%
import matplotlib.pyplot as plt
import numpy as np
import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.infer import MCMC, NUTS
from pyro.infer.reparam import LocScaleReparam

import pyro_ngvi as ngvi

torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)
pyro.set_rng_seed(0)

# %% [markdown]
# ## 1. The funnel, beside NUTS
#
# Eight schools (Rubin 1981): effects of coaching, each with a known standard error. Write the model
# centred: the guide takes the prior of the effects as it stands.

# %%
effect = torch.tensor([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0])
error = torch.tensor([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0])


def schools(y):
    m = pyro.sample("m", dist.Normal(0.0, 5.0))
    s = pyro.sample("s", dist.HalfCauchy(5.0))
    with pyro.plate("schools", len(error)):
        u = pyro.sample("u", dist.Normal(m, s))
        pyro.sample("y", dist.Normal(u, error), obs=y)


fit = ngvi.fit(schools, effect, guide="AutoHierarchical", seed=0)
print(fit.guide.units)
print(fit)

# %% [markdown]
# Two more answers to hold it against: NUTS, which needs the non-centred form (`LocScaleReparam`), and
# the mean-field Gaussian that many would reach for first (the family of Pyro's `AutoNormal`).

# %%
nuts = MCMC(
    NUTS(
        poutine.reparam(schools, {"u": LocScaleReparam(0.0)}),
        jit_compile=True,
        ignore_jit_warnings=True,
    ),
    num_samples=1000,
    warmup_steps=500,
    disable_progbar=True,
)
nuts.run(effect)
kept = nuts.get_samples()
nuts_s = kept["s"]
nuts_u = kept["m"][:, None] + nuts_s[:, None] * kept["u_decentered"]

normal = ngvi.fit(schools, effect, guide="AutoMeanFieldNormal", seed=0)
print(normal)

# %%
figure, axes = plt.subplots(1, 3, figsize=(12, 3.6), sharex=True, sharey=True, layout="constrained")
ours, theirs = fit.sample(seed=0), normal.sample(seed=0)
panels = {
    "NUTS": (nuts_u, nuts_s),
    "AutoHierarchical": (ours["u"], ours["s"]),
    "AutoMeanFieldNormal": (theirs["u"], theirs["s"]),
}
for ax, (name, (u, s)) in zip(axes, panels.items(), strict=True):
    ax.scatter(u[:, 0], s.log(), s=4, alpha=0.4)
    ax.set(title=name, xlabel="effect of the first school (points)", xlim=(-40, 60), ylim=(-4, 5))
axes[0].set(ylabel="log s")
plt.show()
for name, (u, s) in panels.items():
    print(
        f"{name:20} log s {s.log().mean():5.2f} +- {s.log().std():.2f}   "
        f"first school {u[:, 0].mean():5.2f} +- {u[:, 0].std():.2f}"
    )

# %% [markdown]
# The middle panel has the shape of the first. Its tail to small log s is shorter, and the verdict above
# saw that: q(v) is a Gaussian and the posterior of log s is not. A flow for q(v),
# `AutoHierarchical(schools, ngvi.AutoCouplingFlow)` with `ngvi.IFVB`, follows it further. The third
# panel has no funnel at all.

# %% [markdown]
# ## 2. Shrinkage
#
# Hits of eighteen baseball players in their first 45 times at bat (Efron & Morris 1975). A binomial
# likelihood, so nothing is Gaussian but the prior of the effects.

# %%
hits = torch.tensor([18.0, 17, 16, 15, 14, 14, 13, 12, 11, 11, 10, 10, 10, 10, 10, 9, 8, 7])
at_bats = 45.0


def baseball(hits):
    m = pyro.sample("m", dist.Normal(0.0, 2.0))
    s = pyro.sample("s", dist.HalfNormal(1.0))
    with pyro.plate("players", len(hits)):
        u = pyro.sample("u", dist.Normal(m, s))
        pyro.sample("hits", dist.Binomial(at_bats, logits=u), obs=hits)


fit = ngvi.fit(baseball, hits, guide="AutoHierarchical", seed=0)
low, middle, high = torch.sigmoid(fit.guide.quantiles([0.05, 0.5, 0.95], hits)["u"])

figure, ax = plt.subplots(figsize=(8, 3.6), layout="constrained")
raw = hits / at_bats
ax.plot(raw, "o", mfc="none", label="hits / at bats")
ax.errorbar(
    np.arange(18), middle, [middle - low, high - middle], fmt=".", label="posterior, 5 to 95 %"
)
ax.axhline(float(raw.mean()), color="grey", lw=0.5, label="mean of all players")
ax.set(xlabel="player", ylabel="batting average")
ax.legend()
plt.show()

# %% [markdown]
# Every average is drawn most of the way to the mean of all: 45 times at bat hardly tell players apart.
# May the intervals be used? `fit.diagnosis` asks short Markov chains, site by site, and the line under
# ArviZ's table repeats its verdict. `fit.khat` asks importance weights of all twenty variables at once:

# %%
print(fit.diagnosis)
print(fit.summary(var_names=["m", "s"]))
print("k-hat:", fit.khat.verdict)

# %% [markdown]
# The two differ here. Resampling by such weights is out; the intervals of single sites, as in the
# figure, may be used: the chains started at these draws and hardly moved.

# %% [markdown]
# ## 3. A hundred thousand groups
#
# Logistic regressions of 100,000 groups with 1 to 10 data each: an intercept and a slope per group,
# so 200,000 latent variables and four globals. `data=` takes the minibatches: a step sees 500 groups
# and costs what 500 groups cost. Sites of groups that it does not see stay, and still follow v by
# their prior. Nothing is chosen here but the 400 steps, two passes over all groups, and the number of
# particles: `fit` finds the units by itself.

# %%
n, most = 100_000, 10
truth_m, truth_s = torch.tensor([-0.5, 0.8]), torch.tensor([0.8, 0.5])
coefficients = truth_m + truth_s * torch.randn(n, 2)
x = torch.randn(n, most)
y = torch.bernoulli(torch.sigmoid(coefficients[:, :1] + coefficients[:, 1:] * x))
seen = torch.arange(most) < torch.randint(1, most + 1, (n, 1))


def regressions(x, y, seen, index=None):
    m = pyro.sample("m", dist.Normal(torch.zeros(2), 3.0).to_event(1))
    s = pyro.sample("s", dist.HalfNormal(torch.full((2,), 2.0)).to_event(1))
    with pyro.plate("groups", len(x), subsample=index) as i:
        u = pyro.sample("u", dist.Normal(m, s).to_event(1))
        logits = u[..., :1] + u[..., 1:] * x[i]
        pyro.sample(
            "y",
            dist.Bernoulli(logits=logits).mask(seen[i]).to_event(1),
            obs=None if y is None else y[i],
        )


batches = [(x, y, seen, index) for index in torch.randperm(n).split(500)]
path = []
fit = ngvi.fit(
    regressions,
    data=batches,
    num_particles=8,
    max_steps=2 * len(batches),
    seed=0,
    callbacks=[lambda fit: path.append(fit.guide.globals.median()["s"].tolist())],
)
guide = fit.guide
print(fit.advice)
print(f"{len(path)} steps in {fit.report['seconds'].sum():.0f} s")
for name, true in (("m", truth_m), ("s", truth_s)):
    lower, upper = guide.globals.quantiles([0.025, 0.975])[name]
    lower, upper = lower.numpy().round(3), upper.numpy().round(3)
    print(f"{name}: 95 % {lower} to {upper}, drawn with {true.numpy()}")

# %%
figure, ax = plt.subplots(figsize=(7, 3), layout="constrained")
ax.plot(np.arange(1, len(path) + 1), path, label=["intercept", "slope"])
for value in truth_s:
    ax.axhline(float(value), color="grey", lw=0.5)
ax.set(xlabel="step", ylabel="median of s", xscale="log", title="grey: the truth")
ax.legend()
plt.show()

# %% [markdown]
# Both scales arrive within the first pass, and stay a little low. They lean downwards by a few per cent
# where a group has a handful of binary data, and neither more groups nor all data at once mend it:
# p(u_i | y_i, v) is skewed there, q(u_i | v) is a Gaussian, and its bound falls off more where the
# scale is larger. With 100,000 groups the interval is narrower than this bias.

# %% [markdown]
# ## 4. Units that are new
#
# `add` makes room for units, whose q is their prior given v until they take steps; `fit_units` moves
# their sites and holds q(v). `remove` forgets units.

# %%
new_x = torch.randn(2, most)
new_y = torch.stack([torch.ones(most), torch.zeros(most)])
x, y = torch.cat([x, new_x]), torch.cat([y, new_y])
seen = torch.cat([seen, torch.ones(2, most, dtype=torch.bool)])
index = torch.tensor([n, n + 1])
guide.add(2)
by_prior = guide.median(x, y, seen, index)["u"]
guide.fit_units(x, y, seen, index)
fitted = guide.median(x, y, seen, index)["u"]
print("intercepts by the prior:", by_prior[:, 0].numpy().round(2))
print("after ten ones, ten zeros:", fitted[:, 0].numpy().round(2))

# %% [markdown]
# Without data an intercept is at the mean; ten ones or ten zeros move it far to one side or the other.
#
# ## When not to use it
#
# - Units that depend on each other given v: chains and Gaussian processes are `AutoSites`'.
# - Two crossed sets of effects: make the smaller set global by `locals=["u"]`, as in item response. The
#   larger one follows it, for up to 128 such numbers.
# - Effects whose prior is not Gaussian or a map of a Gaussian: they join the globals.
# - A site is Gaussian, so units with little data and a skewed likelihood (Poisson zeros, all answers
#   right) have a q(u | v) that is too symmetric. `ngvi.khat` says how far to trust the whole.
# - Save it by `fit.save(path)`: Pyro's parameter store has q(v) alone.
