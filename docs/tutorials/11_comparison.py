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
# # Which model? Comparison, checks and sensitivity with ArviZ
#
# Four models of one small table of counts, fitted by `ngvi.fit` and taken through ArviZ: what each
# cannot reproduce, which predicts best, where leave-one-out is not to be trusted, and how much the
# answer owes to the prior.
#
# **Level** intermediate. **Tags** ArviZ, leave-one-out, Pareto k, predictive checks, prior sensitivity.
# **Reading** 12 minutes, about twenty seconds of computing on one core. **Written for** pyro_ngvi 0.2,
# ArviZ 0.23.
#
# **Goals**
#
# - Check a model against its own predictions.
# - Read `ngvi.compare` column by column, and know what ELBO and elpd each compare.
# - Notice a leave-one-out estimate that fails, and repair it.
# - Measure prior sensitivity from one fit, and confirm it by refits.
#
# **Contents**
#
# 1. [Data](#data)
# 2. [Two models and their prior](#two-models-and-their-prior)
# 3. [Fit](#fit)
# 4. [Posterior predictive checks](#posterior-predictive-checks)
# 5. [Two more models](#two-more-models)
# 6. [Comparison](#comparison)
# 7. [A leave-one-out estimate that fails](#a-leave-one-out-estimate-that-fails)
# 8. [ELBO or elpd?](#elbo-or-elpd)
# 9. [Prior sensitivity](#prior-sensitivity)
# 10. [Summary](#summary)
#
# Before this: [a logistic regression](01_logistic_regression.ipynb). Related:
# [comparing](../howto/comparing.md), [priors](../howto/priors.md),
# [predictions](../howto/predictions.md).

# %% tags=["remove-cell"]
# ruff: noqa: E402
import warnings

warnings.filterwarnings("ignore", message=r"\s*ArviZ is undergoing", category=FutureWarning)
warnings.filterwarnings("ignore", message="IProgress not found")
# of k-hats, which the page prints
warnings.filterwarnings("ignore", message="Estimated shape parameter", category=UserWarning)

import matplotlib.pyplot as plt
import torch

torch.set_num_threads(1)
plt.rcParams["figure.dpi"] = 90

# %%
import arviz as az
import numpy as np
import pandas as pd
import pyro
import pyro.distributions as dist
from pyro import poutine

import pyro_ngvi as ngvi

torch.set_default_dtype(torch.float64)

# %% [markdown]
# ## Data
#
# Insects that were counted on 72 plots after spraying with one of six insecticides (Beall 1942; the
# data set `InsectSprays` of R). Which sprays work, and how sure is that?

# %%
table = {
    "A": "10 7 20 14 14 12 10 23 17 20 14 13",
    "B": "11 17 21 11 16 14 17 17 19 21 7 13",
    "C": "0 1 7 2 3 1 2 1 3 0 1 4",
    "D": "3 5 12 6 4 3 5 5 5 5 2 4",
    "E": "3 5 3 5 3 6 1 1 3 2 6 4",
    "F": "11 9 15 22 15 16 13 10 26 26 24 13",
}
y = torch.tensor([float(count) for row in table.values() for count in row.split()])
spray = torch.arange(6).repeat_interleave(12)

# %% tags=["hide-input"]
figure, axis = plt.subplots(figsize=(7, 2.8), layout="constrained")
jitter = np.random.default_rng(0).uniform(-0.15, 0.15, len(y))
axis.plot(spray.numpy() + jitter, y, "o", mfc="none", ms=5)
axis.set(xlabel="spray", ylabel="insects on a plot", xticks=range(6), xticklabels=list(table))
plt.show()

# %% [markdown]
# C, D and E work better than A, B and F. (No plot was left without a spray, so nobody knows whether the
# latter work at all.) Where counts are large they also scatter more. The question for a model is how
# much more.
#
# ## Two models and their prior
#
# The first model has one rate for all plots, the second a rate for each spray:
#
# $$y_i \sim \text{Poisson}(e^{a_{s(i)}}), \qquad a_s \sim N(2, 1).$$


# %%
def one_rate(spray, y=None):
    log_rate = pyro.sample("log_rate", dist.Normal(2.0, 1.0))
    with pyro.plate("plot", len(spray)):
        pyro.sample("y", dist.Poisson(log_rate.exp()), obs=y)


def poisson(spray, y=None, sd=1.0):
    with pyro.plate("spray", 6):
        log_rate = pyro.sample("log_rate", dist.Normal(2.0, sd))
    with pyro.plate("plot", len(spray)):
        pyro.sample("y", dist.Poisson(log_rate[spray].exp()), obs=y)


# %% [markdown]
# The prior says that a rate is $e^2 \approx 7$ insects, give or take a factor of $e$. Does it put
# counts where counts can be?

# %% tags=["hide-input"]
pyro.set_rng_seed(0)
simulated = pyro.infer.Predictive(poisson, num_samples=2000)(spray)["y"].reshape(2000, -1)
levels = torch.tensor([0.05, 0.5, 0.95])
low, middle, high = simulated.quantile(levels).tolist()
print(f"a count by the prior: median {middle:.0f}, 90 % {low:.0f} to {high:.0f};", end=" ")
print(f"largest in the data {y.max():.0f}")

# %% [markdown]
# It does: the data are neither excluded nor given away.
#
# ## Fit

# %%
fits = {}
for name, model in (("one rate", one_rate), ("Poisson", poisson)):
    fits[name] = ngvi.fit(model, spray, y, seed=0, progress=False)
    print(f"{name}: {fits[name].why_stopped} after {fits[name].steps} steps.", end=" ")
    print(fits[name].verdict.verdict)

# %% [markdown]
# Both posteriors are nearly Gaussian, and the verdicts say so: take the intervals as they are. The
# table of the second, with names for the rows:

# %%
names = {"coords": {"spray": list(table)}, "dims": {"log_rate": ["spray"]}}
ngvi.summary(fits["Poisson"].to_arviz(seed=0, **names))

# %% [markdown]
# *mean* and *sd* are those of the draws, *hdi_3%* to *hdi_97%* is the shortest interval with 94 % of
# them. There is no R-hat or effective sample size: draws of a guide are independent, and such columns
# would be perfect even for a wrong guide. The verdict under the table takes their place.

# %% [markdown]
# ## Posterior predictive checks
#
# A model that fits should produce data like ours. Choose a statistic that the model was not fitted to.
# Here it is the *dispersion*: the variance of the counts of a spray over their mean, averaged over
# sprays. A Poisson distribution has 1.


# %%
def dispersion(counts):
    by_spray = counts.reshape(-1, 6, 12)
    return (by_spray.var(2) / by_spray.mean(2).clamp_min(0.1)).mean(1)


def check(fit):
    drawn = fit.predict(spray, num_samples=4000, seed=0)["y"]
    statistic = dispersion(drawn)
    return statistic, float((statistic >= dispersion(y)).double().mean())


observed = dispersion(y).item()
checks = {name: check(fit) for name, fit in fits.items()}


# %% tags=["hide-input"]
def histograms(checks):
    _, axis = plt.subplots(figsize=(7, 2.8), layout="constrained")
    for name, (statistic, p) in checks.items():
        axis.hist(statistic.numpy(), 60, range=(0.3, 3.2), alpha=0.5, label=f"{name}, p = {p:.3f}")
    axis.axvline(observed, color="k", lw=1, label="data")
    axis.set(xlabel="dispersion within sprays", ylabel="predicted data sets", yticks=[])
    axis.legend()
    plt.show()


histograms(checks)

# %% [markdown]
# *p* is the share of predicted data sets with at least the dispersion of the data (vertical line). Few
# data sets of either model scatter as much as ours. The Poisson models do not describe the scatter,
# and their intervals would be too narrow.

# %% tags=["remove-cell"]
assert checks["Poisson"][1] < 0.05

# %% [markdown]
# ## Two more models
#
# Two usual ways to let counts scatter more. The *negative binomial* has variance
# $\mu + \omega \mu^2$; $\omega = 0$ is the Poisson distribution. The other gives each plot an *effect*
# of its own, $y_i \sim \text{Poisson}(e^{a_{s(i)} + e_i})$, $e_i \sim N(0, \sigma^2)$. `power` will be
# needed later, to strengthen or weaken the prior.


# %%
def negative_binomial(spray, y=None, scale=0.5, power=1.0):
    with poutine.scale(scale=power):
        with pyro.plate("spray", 6):
            log_rate = pyro.sample("log_rate", dist.Normal(2.0, 1.0))
        omega = pyro.sample("omega", dist.HalfNormal(scale))
    with pyro.plate("plot", len(spray)):
        counts = dist.NegativeBinomial(1.0 / omega, logits=log_rate[spray] + omega.log())
        pyro.sample("y", counts, obs=y)


def plot_effects(spray, y=None):
    with pyro.plate("spray", 6):
        log_rate = pyro.sample("log_rate", dist.Normal(2.0, 1.0))
    sigma = pyro.sample("sigma", dist.HalfNormal(0.5))
    with pyro.plate("plot", len(spray)):
        e = pyro.sample("e", dist.Normal(0.0, sigma))
        pyro.sample("y", dist.Poisson((log_rate[spray] + e).exp()), obs=y)


fits["negative binomial"] = ngvi.fit(negative_binomial, spray, y, tol=0.005, seed=0, progress=False)
fits["plot effects"] = ngvi.fit(
    plot_effects, spray, y, guide="AutoHierarchical", seed=0, progress=False
)
for name in ("negative binomial", "plot effects"):
    print(f"{name}: {fits[name].verdict.verdict}")

# %% [markdown]
# `AutoHierarchical` suits the effects, whose scale is unknown ([hierarchies at
# scale](07_hierarchies.ipynb)).
# Its guide alone is not to be taken as it is: it gets the tail of $\sigma$ near zero wrong. But
# `fit` has integrated the effects out and found weights that correct the draws, so that the intervals
# may be taken as they are. All that we read of this fit below is corrected, but for the ELBO, and
# where we hand over `fit.guide`. The fit of the negative binomial is corrected too; its guide alone
# has an sd of $\log \omega$ that is wrong by about as much as the bounds allow.
#
# A check of the effects model asks for *new* plots: their effects come from the prior given
# $\sigma$, `from_prior=["e"]`. With the fitted effects it would hardly fail, as they follow the data.

# %%
checks["negative binomial"] = check(fits["negative binomial"])
new_plots = fits["plot effects"].predict(spray, num_samples=4000, seed=0, from_prior=["e"])
statistic = dispersion(new_plots["y"])
checks["plot effects"] = statistic, float((statistic >= observed).double().mean())

# %% tags=["hide-input"]
histograms({name: checks[name] for name in ("Poisson", "negative binomial", "plot effects")})

# %% [markdown]
# For both new models the data are an ordinary draw. Do they also predict better?

# %% tags=["remove-cell"]
assert min(checks[name][1] for name in ("negative binomial", "plot effects")) > 0.1

# %% [markdown]
# ## Comparison
#
# `ngvi.compare` calls `arviz.compare` on leave-one-out scores of the fits.

# %%
compared = ngvi.compare(fits)
compared.round(2)

# %% [markdown]
# Column by column:
#
# - **elpd_loo**: $\sum_i \log p(y_i \mid y_{-i})$, in nats: how well each count is predicted by the
#   others.
# - **p_loo**: how much worse that is than predicting counts that the fit has seen. In a healthy
#   model it is about the number of parameters that the data move. Far above, as for *one rate*,
#   which has a single one, it says that the model is wrong.
# - **elpd_diff** and **dse**: the distance from the best model and its standard error. Read them
#   together.
# - **weight**: weights of the models in a mixture of their predictions (stacking).
# - **se**: the standard error of `elpd_loo`, which is mostly common to all models. `dse` is what
#   counts.
# - **warning**: some Pareto k-hats are too large, and the score of the row is not to be trusted.
# - **elbo**, **elbo_se**: the ELBO and its Monte-Carlo error, in nats.
# - **decision**: whether intervals of the fit may be taken as they are, here the corrected ones.

# %% tags=["hide-input"]
ax = az.plot_compare(compared.drop(columns=["elbo", "elbo_se", "decision"]), figsize=(7, 2.6))
ax.set(xlabel="elpd_loo [nats]", title="")
plt.show()

# %% [markdown]
# *One rate* is out of the question: its distance is many standard errors. The Poisson model is three
# nats behind the best, not much more than the standard error of that. The predictive check saw its
# fault more clearly. *Plot effects* seem to be ahead of the negative binomial by three standard errors,
# but their row carries a warning.

# %% tags=["remove-cell"]
assert compared.loc["plot effects", "warning"] and not compared.loc["Poisson", "warning"]
assert compared.loc["one rate", "elpd_diff"] > 5 * compared.loc["one rate", "dse"]
assert compared.loc["plot effects", "p_loo"] > 12 and compared.index[0] == "plot effects"
assert not compared.loc["negative binomial", "warning"]
behind = compared["elpd_diff"] / compared["dse"]
assert 2.4 < behind["negative binomial"] < 3.4 and 1 < behind["Poisson"] < 2
assert (compared["decision"] == "intervals").all()
for name in ("negative binomial", "plot effects"):
    assert "corrected" in fits[name].verdict.verdict
assert "guide alone: Take" not in fits["plot effects"].verdict.verdict
assert "guide alone: Not usable" not in fits["negative binomial"].verdict.verdict

# %% [markdown]
# ## A leave-one-out estimate that fails
#
# `elpd_loo` comes from one fit. Draws are reweighted by $p(y, z) / q(z) / p(y_i \mid z)$, as if they
# came from the posterior and count $i$ had been left out, and the *Pareto k-hat* of count $i$ is the
# shape of the tail of these weights. Above 0.7 the estimate fails.

# %% tags=["hide-input"]
figure, axis = plt.subplots(figsize=(8, 2.8), layout="constrained")
for name, marker in (("Poisson", "x"), ("negative binomial", "."), ("plot effects", "o")):
    axis.plot(fits[name].loo().pareto_k.values, marker, mfc="none", ms=5, label=name)
axis.axhline(0.7, color="grey", lw=0.8)
axis.set(xlabel="plot", ylabel="Pareto k-hat")
axis.legend(ncols=3, loc="lower left", bbox_to_anchor=(0, 1))
plt.show()
for name in ("negative binomial", "plot effects"):
    bad = int((fits[name].loo().pareto_k > 0.7).sum())
    print(f"{name}: k-hat above 0.7 for {bad} of {len(y)} plots")

# %% [markdown]
# With an effect of its own each count informs one latent variable that nothing else informs. Leave it
# out and that variable falls back to its prior, far from the draws. The large `p_loo` of the effects
# was a sign too.
#
# The remedy is to integrate the effect out, count by count, before reweighting what all counts share.
# For guides with units this is one call:

# %%
by_units = ngvi.diagnostics.loo_units(fits["plot effects"].guide, spray, y)
print("plot effects:     ", by_units)
other = fits["negative binomial"].loo()
print(f"negative binomial: elpd_loo {other.elpd_loo:.2f} nats, standard error {other.se:.2f}")
difference = by_units.pointwise.numpy() - other.loo_i.values
error = difference.std() * len(y) ** 0.5
print(f"difference:        {difference.sum():.2f} nats, standard error {error:.2f}")

# %% [markdown]
# The lead is gone: without the failing weights the effects are behind by less than one standard
# error. The two models predict alike. Take the negative binomial, which is smaller.

# %% tags=["remove-cell"]
assert (by_units.khat < 0.7).all() and -error < difference.sum() < 0

# %% [markdown]
# How firm are these numbers? Draws are random. Scores of the same fits from three sets of 2,000 draws:

# %%
rows = {}
for name in ("Poisson", "negative binomial", "plot effects"):
    fit = fits[name]
    how = {"num_samples": 2000}
    found = [
        ngvi.diagnostics.loo(fit.model, fit.guide, spray, y, seed=s, **how) for s in range(1, 4)
    ]
    rows[name] = [f.elpd_loo for f in found]
pd.DataFrame(rows, index=[f"draws {s}" for s in range(1, 4)]).T.round(2)

# %% [markdown]
# They differ by less than half a nat in each row, and more draws make that less. In the
# last row the error is not only noise: all three are above what the integrated estimate says, by more
# than they differ among themselves. More draws would not show that.

# %% tags=["remove-cell"]
assert all(max(row) - min(row) < 0.5 for row in rows.values())
effects = rows["plot effects"]
assert min(effects) - by_units.elpd > max(effects) - min(effects)

# %% [markdown]
# ## ELBO or elpd?
#
# The table has both, and they answer different questions. The ELBO bounds the log evidence
# $\log p(y)$, which averages the likelihood over the *prior*. It ranks guides of one model. Between
# models it depends on how wide priors are, also where the posterior does not. The Poisson model with
# a prior ten times as wide:

# %%
wide = ngvi.fit(poisson, spray, y, sd=10.0, seed=0, progress=False)
rows = {
    "a ~ N(2, 1)": (fits["Poisson"].elbo[0], fits["Poisson"].loo().elpd_loo),
    "a ~ N(2, 10)": (wide.elbo[0], wide.loo().elpd_loo),
}
pd.DataFrame(rows, index=["elbo", "elpd_loo"]).T.round(2)

# %% [markdown]
# The ELBO pays nearly $\log 10$ nats for each of six rates; the predictions are the same. Compare
# evidence only between priors that you mean.

# %% tags=["remove-cell"]
assert rows["a ~ N(2, 1)"][0] - rows["a ~ N(2, 10)"][0] > 8.0
assert abs(rows["a ~ N(2, 1)"][1] - rows["a ~ N(2, 10)"][1]) < 1.0

# %% [markdown]
# ## Prior sensitivity
#
# Raise the prior to a power $\alpha$ near 1, and see what moves (Kallioinen et al. 2023). Draws of
# one fit are enough: `to_arviz` keeps the log prior of each draw, and the weights are
#
# $$w_s \propto p(z_s)^{\alpha - 1}.$$
#
# To have something to find we take a second prior for $\omega$ that is ten times narrower.

# %%
closely = {"tol": 0.005, "seed": 0, "progress": False}
narrow = ngvi.fit(negative_binomial, spray, y, scale=0.05, **closely)


def weighted_mean(fit, alpha, name):
    idata = fit.to_arviz(num_samples=4000, seed=0)
    log_prior = sum(
        v.values.reshape(4000, -1).sum(1) for v in idata["log_prior"].data_vars.values()
    )
    weights = np.exp((alpha - 1.0) * (log_prior - log_prior.max()))
    return float(np.average(idata["posterior"][name].values[0], weights=weights))


powers = np.array([0.5, 0.8, 1.0, 1.25, 2.0])
curves = {
    "omega ~ HalfNormal(0.5)": [
        weighted_mean(fits["negative binomial"], a, "omega") for a in powers
    ],
    "omega ~ HalfNormal(0.05)": [weighted_mean(narrow, a, "omega") for a in powers],
}

# %% [markdown]
# Importance weights are an approximation. Refits with the prior to that power, `power=` of the model,
# are the check. (`tol=0.005` lets these fits come closer to their optimum than the usual 0.05 nat, so
# that small differences show.)

# %%
refits = {}
for name, scale in (("omega ~ HalfNormal(0.5)", 0.5), ("omega ~ HalfNormal(0.05)", 0.05)):
    refits[name] = []
    for power in powers[::2]:
        refit = ngvi.fit(negative_binomial, spray, y, scale=scale, power=power, **closely)
        refits[name].append(float(refit.sample(4000, seed=0)["omega"].mean()))

# %% tags=["hide-input"]
figure, axis = plt.subplots(figsize=(7, 3), layout="constrained")
for place, (name, curve) in enumerate(curves.items()):
    axis.plot(powers, curve, color=f"C{place}", label=f"{name}, by weights")
    axis.plot(powers[::2], refits[name], "o", mfc="none", color=f"C{place}", label="by refits")
axis.set(xlabel="power of the prior", ylabel="posterior mean of omega", xscale="log")
axis.set_ylim(0.0, None)
axis.set_xticks(powers, [f"{p:g}" for p in powers])
axis.minorticks_off()
axis.legend(fontsize="small")
plt.show()

# %% [markdown]
# Weights and refits agree, also at half and at twice the power, which is more than is asked of weights.
# Under the wide prior the mean of $\omega$ hardly depends on the power. The narrow one pulls it down
# the harder the more it counts.

# %% tags=["remove-cell"]
slopes = {name: c[-1] / c[0] for name, c in curves.items()}
assert slopes["omega ~ HalfNormal(0.05)"] < slopes["omega ~ HalfNormal(0.5)"] - 0.05
for name, curve in curves.items():
    assert np.allclose(curve[::2], refits[name], rtol=0.04), (name, curve, refits[name])

# %% [markdown]
# ArviZ turns the slopes at $\alpha = 1$ into one number for each variable, for the prior and for the
# likelihood:

# %%
rows = {}
for name, fit in (("wide prior", fits["negative binomial"]), ("narrow prior", narrow)):
    for component in ("prior", "likelihood"):
        found = az.psens(fit.idata, component=component)
        rows[name, component] = {
            "omega": float(found["omega"]),
            "log_rate, largest": float(found["log_rate"].max()),
        }
pd.DataFrame(rows).T.round(3)

# %% [markdown]
# Above about 0.05 a component matters. Large for the likelihood and small for the prior is the usual,
# healthy case. Large for both says that prior and data pull in different directions, or that the
# data are weak: the narrow prior on $\omega$. The rates are not affected. (This is `psens` of ArviZ
# 0.x; ArviZ 1.x has it as `psense` and reads the same groups.)

# %% [markdown]
# ## Summary
#
# - A predictive check asks whether the model is wrong; comparison asks which one predicts better.
#   Here the check was the sharper tool.
# - Read `elpd_diff` with `dse`, `warning` before `rank`, and `decision` before anything else.
# - Effects of single observations break PSIS-LOO. Integrate them out, by `loo_units` or by the sites of
#   [`AutoSites`](06_sites.ipynb); or leave out for real, by a refit.
# - The ELBO is for guides, `elpd_loo` for models.
# - Power-scaling is local. It tells whether a prior matters, not what a different prior would give.
# - None of this applies to a fit that is "unusable": read
#   [when a Gaussian fails](10_when_gaussians_fail.ipynb) first.
#
# Reference: {func}`pyro_ngvi.compare`, {func}`pyro_ngvi.to_arviz`, {func}`pyro_ngvi.diagnostics.loo`,
# {func}`pyro_ngvi.diagnostics.loo_units`, {func}`pyro_ngvi.summary`.
#
# ## References
#
# - G. Beall (1942), The transformation of data from entomological field experiments. *Biometrika* 32.
# - A. Vehtari, A. Gelman and J. Gabry (2017), Practical Bayesian model evaluation using leave-one-out
#   cross-validation and WAIC. *Statistics and Computing* 27.
# - A. Vehtari, D. Simpson, A. Gelman, Y. Yao and J. Gabry (2024), Pareto smoothed importance sampling.
#   *JMLR* 25.
# - Y. Yao, A. Vehtari, D. Simpson and A. Gelman (2018), Using stacking to average Bayesian predictive
#   distributions. *Bayesian Analysis* 13.
# - N. Kallioinen, T. Paananen, P.-C. Bürkner and A. Vehtari (2023), Detecting and diagnosing prior and
#   likelihood sensitivity with power-scaling. *Statistics and Computing* 34.

# %% tags=["hide-input"]
versions = f"pyro_ngvi {ngvi.__version__}, Pyro {pyro.__version__}, torch {torch.__version__}"
print(f"{versions}, ArviZ {az.__version__}")
