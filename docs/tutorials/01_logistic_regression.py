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
# # A logistic regression from end to end
#
# Variational inference replaces the posterior by the closest member of a family of distributions
# that we can sample from. Pyro gives us the model and the training loop; `pyro_ngvi` gives us
# guides that know their own geometry and an optimizer, `NGVB`, that uses it.
#
# We fit one small model in several ways, ask each answer how far it can be trusted, and compare
# all of them with NUTS, which is slower but makes no assumption about the shape of the posterior.
# Not every answer will be good. The notebook takes less than a minute on one core.

# %%
import warnings

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pyro
import pyro.distributions as dist
import torch
from pyro.infer import MCMC, NUTS, SVI
from sklearn.datasets import load_breast_cancer

import pyro_ngvi as ngvi

with warnings.catch_warnings():  # ArviZ announces its next major release
    warnings.simplefilter("ignore", FutureWarning)
    import arviz as az

torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)
pyro.set_rng_seed(0)

# %% [markdown]
# ## The data
#
# Measurements of cell nuclei in images of tumours come with scikit-learn. We take the "worst" ones,
# the largest values in each image, and standardise them. The label is 1 for a benign tumour. Some
# of the measurements say nearly the same thing, and that will matter.

# %%
data = load_breast_cancer(as_frame=True)
table = data.data.filter(like="worst ")
features = [name.removeprefix("worst ") for name in table.columns]
X = torch.tensor(table.to_numpy())
X = (X - X.mean(0)) / X.std(0)
y = torch.tensor(data.target.to_numpy(), dtype=X.dtype)

correlation = np.triu(np.corrcoef(X.T), k=1)
i, j = np.unravel_index(correlation.argmax(), correlation.shape)
print(f"{len(X)} tumours, {len(features)} of {data.data.shape[1]} measurements:")
print(", ".join(features))
print(f"most correlated: {features[i]} and {features[j]}, {correlation[i, j]:.3f}")

# %% [markdown]
# ## The model
#
# An ordinary Pyro model, written for *one* draw of its latent variables, so `X @ w` is a plain
# matrix-vector product. `BatchedELBO`, below, runs several draws at once and needs no help from
# the model.


# %%
def model(X, y):
    intercept = pyro.sample("intercept", dist.Normal(0.0, 2.0))
    w = pyro.sample("w", dist.Normal(0.0, 2.0).expand([X.shape[1]]).to_event(1))
    with pyro.plate("tumour", len(y)):
        pyro.sample("y", dist.Bernoulli(logits=intercept + X @ w), obs=y)


# %% [markdown]
# ## Guide, optimizer, loop
#
# The guide says which family: here one Gaussian with a full covariance matrix over all
# coefficients. The optimizer follows the natural gradient and chooses the length of its own
# steps, so there is no learning rate to set. The loop is Pyro's `SVI`, unchanged. We keep the
# loss and, for curiosity, what the optimizer reports about every step.

# %%
guide = ngvi.AutoFullRankNormal(model)
optim = ngvi.NGVB(guide)
svi = SVI(model, guide, optim, loss=ngvi.BatchedELBO(num_particles=8))
elbo, reports = [], []
for _ in range(400):
    elbo.append(-float(svi.step(X, y)))
    reports.append(optim.report())
print(f"mean of the last 50 ELBO estimates: {np.mean(elbo[-50:]):.2f} nats")

# %% [markdown]
# ## Has it converged?
#
# The left panel shows the ELBO, a lower bound on the log evidence. Each value is an average over
# eight draws, so it goes on rattling even when nothing moves any more; what we want to see is a
# curve that has stopped rising.
#
# This one hardly rises: the guide did not start at a point. At its first call it looked for a
# Gaussian, by a few Newton steps from several places, and its report says what it saw.
#
# The right panel shows what the optimizer did from there. The *gain* is the share of the natural
# gradient that it dares to follow, and the *step* is the distance travelled, measured so that the KL
# divergence between one q and the next is about half its square, in nats. The trust radius is the
# longest step allowed. Where gradients are mostly noise the gain falls, which averages the noise away;
# should successive gradients agree again, it rises.

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.5), layout="constrained")
left.plot(elbo, linewidth=0.8)
left.set(xlabel="step", ylabel="ELBO (nats)", title="8-draw estimates of the ELBO")
left.set_ylim(np.median(elbo[-100:]) - 30, np.median(elbo[-100:]) + 5)
right.semilogy([r.step_norm for r in reports], linewidth=0.8, label="step")
right.semilogy([r.radius for r in reports], "--", color="0.5", label="trust radius")
right.semilogy([r.gain for r in reports], label="gain")
right.set(xlabel="step", ylabel="length, or share (gain)", title="what NGVB did")
_ = right.legend()

# %% [markdown]
# The report of the last step, in full. `outcome` is `"accepted"`, `"damped"` when the trust
# radius shortened the step, or `"skipped"` when the gradient was not finite; then the parameters
# stay as they were and `skipped_sites` names the culprits.

# %%
print(reports[-1])
print(pd.Series([r.outcome for r in reports]).value_counts().to_string())
print(guide.start_report)

# %% [markdown]
# ## The posterior, through ArviZ
#
# `to_arviz` draws from the guide and fills ArviZ's groups: posterior, log likelihood, posterior
# predictive and so on. Giving the dimension its labels once means that every table and plot shows
# names rather than numbers.
#
# `ngvi.summary` is `arviz.summary` without R-hat and effective sample size. These ask whether a
# Markov chain has mixed, and our draws are independent: they would look perfect however wrong the
# guide was.

# %%
labels = {"coords": {"feature": features}, "dims": {"w": ["feature"]}}
idata = ngvi.to_arviz(model, guide, X, y, num_samples=2000, seed=1, **labels)
print(ngvi.summary(idata))

# %%
_ = az.plot_forest(idata, var_names=["w", "intercept"], combined=True, figsize=(7, 4))

# %% [markdown]
# ## Does the model describe the data?
#
# A posterior predictive check needs a question to ask. Ours: is the share of benign tumours right
# for small nuclei, for middling ones and for large ones? We sort the tumours by radius into ten
# groups. The bars hold 90% of the shares that the fitted model predicts; the dots are the data, and
# should mostly lie inside.

# %%
replicated = idata["posterior_predictive"]["y"].values[0]  # (draw, tumour)
groups = np.array_split(np.argsort(X[:, features.index("radius")].numpy()), 10)
predicted = np.stack([replicated[:, group].mean(1) for group in groups], axis=1)
low, high = np.quantile(predicted, [0.05, 0.95], axis=0)
seen = np.array([y[group].mean() for group in groups])

figure, axes = plt.subplots(figsize=(6, 3.2), layout="constrained")
axes.bar(range(1, 11), high - low, bottom=low, width=0.6, color="0.8", label="90% of predictions")
axes.plot(range(1, 11), seen, "o", label="data")
axes.set(xlabel="tenth of the tumours, by radius", ylabel="share benign")
_ = axes.legend()
print(f"{((low <= seen) & (seen <= high)).sum()} of 10 shares are inside their bar")

# %% [markdown]
# ## Can the guide be believed?
#
# The ELBO alone cannot tell: it is a lower bound on a number that we do not know. `khat` looks at
# the importance weights p/q of the guide's draws, and its verdict answers two questions that are
# easily confused:
#
# - *May I use the guide's means and intervals as they are?* Only if the weights are nearly equal.
# - *If not, can the weights repair them?* That is what the number k-hat itself says. If the guide's
#   tails are too light, a few weights dwarf all others, and k-hat is large. Below its threshold, 0.7
#   or a little less for few draws, draws that are resampled by their weights
#   (`to_arviz(..., resample="psis")`) can be relied on. A small k-hat says nothing for the draws
#   as they come.
#
# Neither answer can speak of a region of the posterior that no draw has reached.

# %%
print(ngvi.khat(model, guide, X, y, num_samples=2000, seed=1).verdict)

# %% [markdown]
# ## Which family?
#
# A simpler family is cheaper, and in a large model it may be all we can afford. What does it cost
# in quality? We fit five:
#
# - *mean-field*: independent coefficients;
# - *factor*: a diagonal covariance plus 1, 5 or 10 common factors, `B B' + diag(c^2)`;
# - *full rank*: any covariance, the guide from above.
#
# `ngvi.fit` writes the loop for us, and ends it when less than 0.05 nat is left to gain.
#
# The ELBO is estimated as the mean of log p - log q over the draws, with its standard error.
# Higher is better, and the difference between two guides is how much closer, in KL divergence,
# one of them is to the posterior. k-hat is an estimate too, so we take it from five sets of draws.

# %%
guides = {"mean-field": ngvi.AutoMeanFieldNormal(model)}
for rank in (1, 5, 10):
    guides[f"factor, rank {rank}"] = ngvi.AutoFactorNormal(model, rank=rank)
for guide_of_family in guides.values():
    ngvi.fit(model, X, y, guide=guide_of_family, max_steps=1000)
guides["full rank"] = guide

rows, sds = [], {}
for name, guide_of_family in guides.items():
    draws = ngvi.to_arviz(model, guide_of_family, X, y, num_samples=2000, seed=2, **labels)
    stats, posterior = draws["sample_stats"], draws["posterior"]
    log_ratio = (stats["lp"] - stats["log_q"]).values.ravel()
    error = log_ratio.std() / len(log_ratio) ** 0.5
    khats = sorted(
        ngvi.khat(model, guide_of_family, X, y, num_samples=2000, seed=seed).khat
        for seed in range(5)
    )
    rows.append((name, log_ratio.mean(), error, khats[2], khats[0], khats[-1]))
    sds[name] = posterior["w"].values[0].std(0)
columns = ["family", "ELBO", "error", "k-hat, median", "smallest", "largest"]
print(pd.DataFrame(rows, columns=columns).round(2).to_string(index=False))

# %% [markdown]
# ## Against NUTS
#
# NUTS draws from the posterior itself. A few hundred draws take a while even for this little
# model, but they are a yardstick that owes nothing to any family. The effective sample size says
# how good a yardstick: with n effective draws, a standard deviation is known to about 1/sqrt(2n)
# of itself.

# %%
mcmc = MCMC(NUTS(model), num_samples=600, warmup_steps=300, disable_progbar=True)
mcmc.run(X, y)
diagnostics = mcmc.diagnostics()
nuts = mcmc.get_samples()["w"].numpy()
fewest = float(diagnostics["w"]["n_eff"].min())
print(f"fewest effective draws: {fewest:.0f}, so sds are known to {1 / (2 * fewest) ** 0.5:.0%}")
print(f"divergences: {len(diagnostics['divergences']['chain 0'])}")

# %%
figure, axes = plt.subplots(figsize=(8, 3.8), layout="constrained")
for name, sd in sds.items():
    axes.plot(sd / nuts.std(0), "o-", linewidth=0.7, label=name)
axes.axhline(1.0, color="0.5", zorder=0)
axes.set_xticks(range(len(features)), features, rotation=30, ha="right")
axes.set(ylabel="sd of the guide / sd of NUTS", ylim=(0, None))
_ = axes.legend(fontsize="small")

# %%
ratios = pd.DataFrame({name: sd / nuts.std(0) for name, sd in sds.items()}, index=features)
print(ratios.round(2).to_string())

# %% [markdown]
# What to read from it:
#
# - **Mean-field** standard deviations are too small, and most of all where measurements are
#   correlated. With radius, perimeter and area in the model, the data know the sum of their
#   effects far better than any one of them. An independent Gaussian can only respect the
#   well-known direction by being narrow in all of them. The predictions may still be fine; the
#   intervals of single coefficients are not.
# - **Factors** repair this as far as the rank reaches. At the largest possible rank, one less
#   than the number of latent variables, nothing is left to repair.
# - **Full rank** comes close to NUTS. Hold what is left against the error of NUTS itself, printed
#   above. Beyond it, the posterior is not quite Gaussian; the intervals then tend to be somewhat
#   narrow, because a Gaussian that minimises KL(q, p) avoids regions where p is small.
#
# The ELBO puts the families in order, as far as its error allows, but does not say which of them
# are good enough. k-hat does not say it either: it moves from one set of draws to the next, and where
# it is small it promises good *weighted* draws. Whether the sds can be used as they come is in the
# ratios above, and without NUTS in the verdict.

# %% [markdown]
# ## When the verdict is bad
#
# In this order:
#
# 1. *Has it converged?* If the ELBO still rises, train longer, or use more particles.
# 2. *Is the family too small?* Go from mean-field to factors to full rank, as above.
# 3. *Is the posterior far from Gaussian?* Write the model so that it is not. The classic case is
#    a hierarchical model, and we look at one below.
# 4. *Nothing helps?* Then variational inference with these families is the wrong tool for this
#    posterior. Use NUTS, perhaps from a start that the guide found.
#
# The eight schools: each school's effect comes from a common population of unknown spread `tau`.
# Written directly, the effects must crowd together where `tau` is small, so the posterior is
# shaped like a funnel, and no Gaussian is. Written as standardised effects `z` times `tau`, the
# posterior of the same model is closer to one.

# %%
effect = torch.tensor([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0])
error = torch.tensor([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0])


def centred(effect, error):
    mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
    tau = pyro.sample("tau", dist.HalfCauchy(5.0))
    with pyro.plate("school", len(effect)):
        theta = pyro.sample("theta", dist.Normal(mu, tau))
        pyro.sample("y", dist.Normal(theta, error), obs=effect)


def standardised(effect, error):
    mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
    tau = pyro.sample("tau", dist.HalfCauchy(5.0))
    with pyro.plate("school", len(effect)):
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Normal(mu + tau * z, error), obs=effect)


for schools in (centred, standardised):
    fit = ngvi.fit(schools, effect, error, guide="AutoFullRankNormal", seed=1)
    print(f"{schools.__name__}: ELBO {fit.elbo[0]:.2f} nats; {fit.khat.verdict}\n")

# %% [markdown]
# Same data, same model, same family: only the coordinates differ. Both ELBOs bound the same log
# evidence, so they may be compared, and the higher one is the better approximation.
# `pyro.infer.reparam` makes this change for you without rewriting the model.
#
# ## The same in one call
#
# `ngvi.fit` can choose guide, optimizer and loss as well, and says whether to believe the answer. With
# `guide="auto"` it goes on to richer guides where the first will not do, as for the schools in the form
# that we wrote first. Its verdict is a diagnosis: short Hamiltonian Monte Carlo chains start at draws
# of the guide, and where they lead tells how far means and standard deviations are off, site by site.

# %%
quick = ngvi.fit(model, X, y, seed=1)
print(quick, "\n")
schools = ngvi.fit(centred, effect, error, guide="auto", seed=1)
print(schools, "\n")
print(schools.diagnosis)

# %% [markdown]
# In short: fit, look at the curve, read the verdict, and when it matters compare with NUTS once. A
# guide that has passed this test on one data set is a fast way to fit others like it; read the
# verdict for each of them.
