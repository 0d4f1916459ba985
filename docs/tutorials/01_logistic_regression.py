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
# # A logistic regression, from data to a posterior you can check
#
# **Level** first steps · **Tags** logistic regression, prior and posterior checks, ArviZ, NUTS ·
# **Time** twelve minutes to read, less than a minute to run on one core
#
# Which measurements of a cell say that a tumour is benign, and how sure can we be? We fit a
# logistic regression by natural-gradient variational inference, with one call, and then try hard
# to find something wrong with the answer.
#
# **You will learn** to check a prior before the fit, to fit with `ngvi.fit` and read what it
# prints, to take the posterior into ArviZ, to predict, to tell a good approximation from a bad
# one, and what a natural gradient is.
#
# **You should know** Pyro's `sample` and `plate`, and what a posterior is.
#
# **Contents**
#
# 1. [The data](#the-data)
# 2. [The model](#the-model)
# 3. [What does the prior say?](#what-does-the-prior-say)
# 4. [The fit](#the-fit)
# 5. [The posterior](#the-posterior)
# 6. [Does the model describe the data?](#does-the-model-describe-the-data)
# 7. [New tumours](#new-tumours)
# 8. [Is the approximation any good?](#is-the-approximation-any-good)
# 9. [What is a natural gradient?](#what-is-a-natural-gradient)
# 10. [Where next, and references](#where-next)

# %% tags=["remove-cell"]
# ruff: noqa: E402
import warnings

import torch

warnings.filterwarnings("ignore", category=FutureWarning, module="arviz")
warnings.filterwarnings("ignore", message="IProgress not found")  # tqdm without ipywidgets
torch.set_num_threads(1)  # the promised time is that of one core

# %%
import arviz as az
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pyro
import pyro.distributions as dist
from pyro.infer import MCMC, NUTS, Predictive
from sklearn.datasets import load_breast_cancer

import pyro_ngvi as ngvi

torch.set_default_dtype(torch.float64)
pyro.set_rng_seed(0)
print(
    "pyro_ngvi", ngvi.__version__, "with Pyro", pyro.__version__, "and PyTorch", torch.__version__
)

# %% tags=["remove-cell"]
plt.rcParams.update({"figure.dpi": 90, "figure.constrained_layout.use": True})

# %% [markdown]
# ## The data
#
# Street, Wolberg & Mangasarian (1993) measured cell nuclei in images of breast tumours;
# scikit-learn has the table. We take the "worst" values, the mean of the three largest
# nuclei in each image, and standardise them. The outcome is 1 for a benign tumour.

# %%
data = load_breast_cancer(as_frame=True)
table = data.data.filter(like="worst ").rename(columns=lambda name: name.removeprefix("worst "))
features = list(table.columns)
X = torch.tensor(table.to_numpy())
X = (X - X.mean(0)) / X.std(0)
y = torch.tensor(data.target.to_numpy(), dtype=X.dtype)
print(f"{len(X)} tumours, {int(y.sum())} of them benign; {len(features)} measurements")

# %% tags=["hide-input"]
figure, axes = plt.subplots(1, 3, figsize=(12, 3.8), width_ratios=[1, 1, 1.25])
for axis, (across, up) in zip(axes, [("radius", "texture"), ("radius", "perimeter")], strict=False):
    for label, colour, marker in ((1, "C0", "o"), (0, "C3", "x")):
        rows = data.target == label
        name = "benign" if label else "malignant"
        axis.plot(table[across][rows], table[up][rows], marker, color=colour, ms=3, alpha=0.6)
        axis.plot([], [], marker, color=colour, label=name)
    units = {"radius": "radius (µm)", "texture": "texture (sd of grey values)"}
    axis.set(xlabel=units[across], ylabel=units.get(up, "perimeter (µm)"))
axes[0].legend()
image = axes[2].imshow(np.corrcoef(X.T), cmap="RdBu_r", vmin=-1, vmax=1)
axes[2].set_xticks(range(10), features, rotation=60, ha="right", fontsize=8)
axes[2].set_yticks(range(10), features, fontsize=8)
_ = figure.colorbar(image, ax=axes[2], label="correlation")

# %% [markdown]
# Left: one measurement nearly separates the two kinds of tumour. Middle: radius and perimeter are
# almost the same number. Right: so are several others. The data will know the *sum* of such
# effects well and each of them badly. Whether an approximation keeps that in mind decides how good
# it is.
#
# ## The model
#
# The log odds of a benign tumour are linear in the standardised measurements,
#
# $$
# y_i \sim \text{Bernoulli}(\sigma(b + x_i^\top w)), \qquad
# b \sim N(0, 2^2), \qquad w_j \sim N(0, s^2),
# $$
#
# where $\sigma$ is the logistic function. In Pyro we write it for *one* draw of the latent
# variables, so that `X @ w` is a matrix times a vector. `y=None` lets us predict. The scale $s$ of
# the prior is an argument, because we want to look at it first.


# %%
def model(X, y=None, scale=1.0):
    intercept = pyro.sample("intercept", dist.Normal(0.0, 2.0))
    w = pyro.sample("w", dist.Normal(0.0, scale).expand([X.shape[1]]).to_event(1))
    with pyro.plate("tumour", len(X)):
        pyro.sample("y", dist.Bernoulli(logits=intercept + X @ w), obs=y)


# %% [markdown]
# ## What does the prior say?
#
# Before the data are seen, what does the model think of a tumour? We draw coefficients from the
# prior and look at the probability of "benign" that they give to each tumour of the table.

# %% tags=["hide-input"]
figure, axes = plt.subplots(1, 2, figsize=(9, 3), sharey=True)
for axis, scale in zip(axes, (10.0, 1.0), strict=True):
    draws = Predictive(model, num_samples=500, return_sites=("intercept", "w"))(X, scale=scale)
    logits = draws["intercept"].reshape(-1, 1) + draws["w"].reshape(500, -1) @ X.T
    prior = torch.sigmoid(logits).flatten().numpy()
    axis.hist(prior, bins=40, weights=np.full(len(prior), 1 / len(prior)), color="0.6")
    sure = np.mean((prior < 0.01) | (prior > 0.99))
    axis.set(title=f"s = {scale:g}: {sure:.0%} below 0.01 or above 0.99")
    axis.set(xlabel="P(benign) under the prior")
_ = axes[0].set(ylabel="share of tumours and draws")

# %% [markdown]
# A wide prior is not a modest one. With $s = 10$ the model is certain of nearly every tumour
# before it has seen any. With $s = 1$ it leaves room for every probability, and still for strong
# effects. We take $s = 1$, the default above. (For priors of logistic regressions see Gelman et
# al. 2008.)
#
# ## The fit
#
# Variational inference looks for the member $q$ of a family that makes the *evidence lower bound*
# largest,
#
# $$
# \text{ELBO}(q) = E_q[\log p(y, z) - \log q(z)] = \log p(y) - \text{KL}(q \,\|\, p(z \mid y)),
# $$
#
# and so is closest to the posterior. One call chooses the family, the optimizer and the loss, and
# stops when less than 0.05 nat is left to gain. Nothing is tuned.

# %%
fit = ngvi.fit(model, X, y, seed=1, progress=False)
print(fit)

# %% [markdown]
# Line by line:
#
# - *what was chosen*: `AutoFullRankNormal`, one Gaussian with any covariance over all eleven
#   coefficients; [`NGVB`](../reference/index.md), natural gradients; eight draws per step.
# - *why it stopped*: "converged" means that an estimate of what could still be gained within the
#   family has fallen below the tolerance.
# - *the ELBO*, and a verdict on the answer. More of that [below](#is-the-approximation-any-good).
#
# The fit took few steps because the guide does not start at a point. At its first call it looks
# for a Gaussian by Newton steps, from several places where log p is not concave:

# %%
print(fit.guide.start_report)

# %% [markdown]
# To see the optimizer at work we leave that search out, so that the guide starts at a point.

# %%
guide = ngvi.AutoFullRankNormal(model, init=None)
from_a_point = ngvi.fit(model, X, y, guide=guide, seed=1, progress=False)
print(from_a_point)

# %% tags=["hide-input"]
figure, axis = plt.subplots(figsize=(7, 3))
_ = from_a_point.plot(axis)

# %% [markdown]
# Each dot is an estimate of the ELBO from eight draws. The vertical lines are the steps after
# which the stop rule looked, and the orange band is what it found still to gain at the last one.
# The curve rises steeply and is flat soon. What ends the fit is the height of that band. The ELBO
# is that of the first fit, within the tolerance. The search had saved steps but not time: on a model
# as small as this it may cost more seconds than it saves ([benchmarks](../benchmarks/index.md)).
#
# `fit` is a thin layer over Pyro's own loop. [Start here](../start.md) writes that loop out.
#
# ## The posterior
#
# `fit.to_arviz` draws from the guide and fills ArviZ's groups. With labels for the dimension,
# tables and plots show names in place of numbers.

# %%
labels = {"coords": {"feature": features}, "dims": {"w": ["feature"]}}
idata = fit.to_arviz(num_samples=2000, seed=1, **labels)
print(ngvi.summary(idata))

# %% [markdown]
# Column by column: `mean` and `sd` of each coefficient, in log odds for one standard deviation of
# the measurement; then the ends of the interval that holds 94% of the draws and is the shortest to
# do so. A negative coefficient speaks against "benign". R-hat and effective sample size are
# missing on purpose: these draws are independent, so both would look perfect however wrong the
# guide was. The verdict under the table stands in their place.

# %% tags=["hide-input"]
_ = az.plot_forest(idata, var_names=["w", "intercept"], combined=True, figsize=(7, 4), textsize=10)
plt.title("94% intervals (thin) and middle halves (thick)", fontsize=10)
_ = plt.xlabel("log odds of benign, for one sd of the measurement")

# %% [markdown]
# Texture is known best: its interval is narrow and far from zero. Radius, perimeter and area each
# have a wide interval. They share one effect, and the data cannot say which of them it belongs to.
#
# ## Does the model describe the data?
#
# A posterior predictive check needs a question. Ours: is the share of benign tumours right for
# small nuclei, for middling and for large ones? We sort the tumours by radius into ten groups of
# equal size and compare each group with what the fitted model predicts for it.

# %% tags=["hide-input"]
replicated = idata["posterior_predictive"]["y"].values[0]  # (draw, tumour)
groups = np.array_split(np.argsort(X[:, features.index("radius")].numpy()), 10)
predicted = np.stack([replicated[:, group].mean(1) for group in groups], axis=1)
low, high = np.quantile(predicted, [0.05, 0.95], axis=0)
seen = np.array([y[group].mean() for group in groups])

figure, axis = plt.subplots(figsize=(6, 3.2))
axis.bar(range(1, 11), high - low, bottom=low, width=0.6, color="0.8", label="90% of predictions")
axis.plot(range(1, 11), seen, "o", label="data")
axis.set(xlabel="tenth of the tumours, by radius", ylabel="share benign", xticks=range(1, 11))
_ = axis.legend()
print(f"{((low <= seen) & (seen <= high)).sum()} of 10 shares are inside their bar")

# %% [markdown]
# The dots lie in their bars, also where the share falls from nearly all to nearly none. In this
# respect the model is good enough.
#
# ## New tumours
#
# `fit.predict` takes new inputs and gives draws of `y`. Here are three made-up tumours: an average
# one, and one with all measurements a standard deviation below or above the average.

# %%
X_new = torch.stack([torch.full((10,), value) for value in (-1.0, 0.0, 1.0)])
y_new = fit.predict(X_new, num_samples=2000, seed=1)["y"]  # (draw, tumour)
share = y_new.mean(0).numpy().round(3)
new = pd.DataFrame({"all measurements at": [-1, 0, 1], "P(benign)": share})
print(new.to_string(index=False))

# %% [markdown]
# Column by column: where the tumour is, in sds from the average, and the share of the draws that
# are benign. These probabilities average over the posterior of the coefficients.
#
# ## Is the approximation any good?
#
# The ELBO cannot tell. It is below a number that we do not know. `fit.diagnosis` asks Markov
# chains: a thousand short ones start at draws of the guide, and where they move, the guide was
# wrong.

# %%
print(fit.diagnosis)

# %% [markdown]
# For each site: the largest error of a mean, in posterior standard deviations, and the largest
# error of an sd. Then k-hat, from importance weights. It judges the joint distribution and is
# stricter than most questions: a k-hat near 0.7 with small errors of means and sds says that tails
# differ, not intervals.
#
# To see a bad answer, we fit the family that most people take first, independent Gaussians. And
# since no diagnosis beats a second opinion, we run NUTS once. It is slower and assumes no shape.

# %%
mean_field = ngvi.fit(model, X, y, guide="AutoMeanFieldNormal", seed=1, progress=False)
print(mean_field)

mcmc = MCMC(
    NUTS(model, jit_compile=True, ignore_jit_warnings=True),
    num_samples=600,
    warmup_steps=200,
    disable_progbar=True,
)
mcmc.run(X, y)
nuts = mcmc.get_samples()["w"].numpy()
diagnostics = mcmc.diagnostics()
fewest = float(diagnostics["w"]["n_eff"].min())
error = (2 * fewest) ** -0.5
print(f"\nNUTS: at least {fewest:.0f} effective draws, so sds are known to {error:.0%};")
print(f"{len(diagnostics['divergences']['chain 0'])} divergences")

# %% tags=["hide-input"]
draws = {
    "NUTS": nuts,
    "full rank": idata["posterior"]["w"].values[0],
    "mean field": mean_field.sample(2000, seed=1)["w"].numpy(),
}
colours = {"NUTS": "0.4", "full rank": "C0", "mean field": "C1"}
related = np.triu(np.abs(np.corrcoef(nuts.T)), k=1)
pair = np.array(np.unravel_index(related.argmax(), related.shape))
angle = np.linspace(0, 2 * np.pi, 100)
circle = np.stack([np.cos(angle), np.sin(angle)])

figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), width_ratios=[1, 1.4])
left.plot(*nuts[:, pair].T, ".", color=colours["NUTS"], ms=3, alpha=0.4, label="draws of NUTS")
for name in ("full rank", "mean field"):
    w = draws[name][:, pair]
    edge = w.mean(0)[:, None] + 2.15 * np.linalg.cholesky(np.cov(w.T)) @ circle
    left.plot(*edge, color=colours[name], lw=2, label=f"{name}, 90% region")
across, up = (features[k] for k in pair)
left.set(xlabel=f"coefficient of {across} (log odds)", ylabel=f"coefficient of {up} (log odds)")
left.legend(fontsize="small")
for name in ("full rank", "mean field"):
    right.plot(draws[name].std(0) / nuts.std(0), "o-", lw=0.7, color=colours[name], label=name)
right.axhline(1.0, color=colours["NUTS"], zorder=0)
right.set_xticks(range(10), features, rotation=40, ha="right", fontsize=9)
_ = right.set(ylabel="sd of the guide / sd of NUTS", ylim=(0, 1.3))

# %% [markdown]
# Left: the two coefficients that are most correlated. Full rank covers the draws of NUTS; mean
# field has no tilt, and fits into the middle. Right: its sds are too small for all measurements,
# and most of all for those that are correlated with others.

# %% tags=["hide-input"]
rows = []
for name, found in (("full rank", fit), ("mean field", mean_field)):
    ratio = draws[name].std(0) / nuts.std(0)
    shift = np.abs(draws[name].mean(0) - nuts.mean(0)) / nuts.std(0)
    rows.append((name, *found.elbo, found.verdict.decision, shift.max(), ratio.min(), ratio.max()))
columns = ["family", "ELBO", "s.e.", "decision", "worst mean", "least sd ratio", "largest"]
print(pd.DataFrame(rows, columns=columns).round(2).to_string(index=False))

# %% [markdown]
# The table has the ELBO with its standard error, the decision of the diagnosis, the largest
# difference of a mean from that of NUTS in sds, and the range of the ratios of the sds. Hold these
# against the error of NUTS itself, printed above.
#
# **Conclusion.** The means of both are within a fraction of an sd. The intervals are right with
# full rank and much too narrow with mean field, and the diagnosis said so without NUTS.
#
# If the verdict is bad, in this order: has it converged? Is the family too small (`guide="auto"`
# goes on to richer ones)? Is the posterior far from Gaussian, so that another parametrisation
# helps? If nothing does, these families are the wrong tool, and NUTS is the right one. [Is the fit
# converged?](../howto/convergence.md) has more.

# %% tags=["remove-cell"]
# what the text says of these numbers
by_family = {row[0]: row for row in rows}
assert by_family["full rank"][3] == "intervals"
assert by_family["mean field"][3] == "unusable"
assert by_family["full rank"][5] > 0.8
assert by_family["mean field"][5] < 0.6
assert by_family["full rank"][1] > by_family["mean field"][1] + 1.0
assert ((low <= seen) & (seen <= high)).sum() >= 8

# %% [markdown]
# ## What is a natural gradient?
#
# The optimizer above has no learning rate. To see why it needs none, take the smallest example
# with two parameters. 57 heads in 200 throws and a uniform prior: the posterior is Beta(58, 144).
# Our guide is $q = \text{Beta}(a, b)$, and we pretend not to know.
#
# For this family (and every exponential family with its conjugate model) the gradient of the KL
# divergence from the posterior can be written down,
#
# $$
# \nabla_\lambda \text{KL} = F(\lambda)\,(\lambda - \lambda_*),
# \qquad \lambda = (a, b), \quad \lambda_* = (58, 144),
# $$
#
# where $F(\lambda) = E_q[\nabla \log q \, \nabla \log q^\top]$ is the Fisher matrix of $q$. The
# gradient points at the answer, *bent by F*. The **natural gradient** $F^{-1} \nabla_\lambda
# \text{KL} = \lambda - \lambda_*$ takes the bend out (Amari 1998).
#
# Gradient descent and Adam move in $\log a$ and $\log b$, as Pyro stores them. Both get the best
# of twelve learning rates, the one with the smallest KL divergence after 150 steps. The natural
# gradient takes its full step, except that no step is longer than 1 in units of the Fisher matrix,
# about half a nat, which is where the trust region of `NGVB` begins. All gradients here are exact.

# %% tags=["hide-input"]
target = torch.tensor([58.0, 144.0])


def fisher(v):
    """Fisher matrix of Beta(a, b) in (a, b)."""
    return torch.diag(torch.polygamma(1, v)) - torch.polygamma(1, v.sum())


def kl(path):
    return torch.distributions.kl_divergence(
        dist.Beta(*path.T, validate_args=False), dist.Beta(*target)
    )


def first_order(start, make, rate, steps=150):
    v = start.log().requires_grad_()
    optim, path = make([v], lr=rate), [start]
    for _ in range(steps):
        now = v.detach().exp()
        v.grad = now * (fisher(now) @ (now - target))  # in log a, log b
        optim.step()
        path.append(v.detach().exp())
    return torch.stack(path)


def natural(start, steps=150):
    path = [start]
    for _ in range(steps):
        now = path[-1]
        step = target - now
        length = (step @ fisher(now) @ step).sqrt()
        path.append(now + step / length.clamp_min(1.0))
    return torch.stack(path)


starts = torch.tensor([[5.0, 45.0], [25.0, 25.0]])
grids = {
    "gradient": (torch.optim.SGD, np.geomspace(1e-4, 0.1, 12)),
    "Adam": (torch.optim.Adam, np.geomspace(0.005, 5.0, 12)),
}
paths, rates = {}, {}
for name, (make, grid) in grids.items():
    found = {rate: [first_order(start, make, rate) for start in starts] for rate in grid}
    ends = {rate: np.mean([float(kl(p)[-1]) for p in ps]) for rate, ps in found.items()}
    rates[name] = min((rate for rate in grid if np.isfinite(ends[rate])), key=ends.get)
    paths[name] = found[rates[name]]
paths["natural gradient"] = [natural(start) for start in starts]

figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.4))
a, b = np.meshgrid(np.geomspace(3, 150, 120), np.geomspace(15, 400, 120))
level = kl(torch.tensor(np.stack([a.ravel(), b.ravel()], 1))).reshape(a.shape)
left.contour(a, b, level, levels=[0.01, 0.1, 1, 10, 30], colors="0.8", linewidths=0.8)
for name, colour in (("gradient", "C0"), ("Adam", "C1"), ("natural gradient", "C2")):
    for path, line in zip(paths[name], ("-", "--"), strict=True):
        left.loglog(*path.T, ".-", color=colour, ms=3, lw=0.8)
        right.semilogy(kl(path).clamp_min(1e-6), line, color=colour)
    label = name if name not in rates else f"{name}, rate {rates[name]:.2g}"
    right.plot([], [], color=colour, label=label)
left.plot(*starts.T, "o", color="0.3", mfc="none", ms=9, label="starts")
left.plot(*target, "k*", ms=14, label="posterior")
left.set(xlabel="a", ylabel="b", xlim=(3, 150), ylim=(15, 400), title="paths of q = Beta(a, b)")
left.legend(loc="lower right")
right.set(xlabel="step", ylabel="KL(q, posterior) (nats)", ylim=(1e-6, 100))
right.set(title="how far from the answer")
_ = right.legend()
far = {name: [(kl(p) >= 0.01).nonzero().max() for p in ps] for name, ps in paths.items()}
first = {name: [int(k) + 1 if k < 150 else np.inf for k in ks] for name, ks in far.items()}
steps = pd.DataFrame(first, index=[f"from {tuple(start.tolist())}" for start in starts])
print("steps until KL stays below 0.01 nat (inf: not within 150)")
print(steps.to_string())

# %% [markdown]
# Left, grey: lines of equal KL divergence, a narrow valley. Gradient descent (blue) falls into it,
# where the *mean* $a / (a + b)$ of $q$ is right, and then creeps along it, where only the *width*
# changes. Adam (orange) is faster along the valley, and swings from side to side: a rate that
# suits the one direction does not suit the other. The natural gradient (green) knows the valley,
# since $F$ describes it, and takes the same few steps from both starts.
#
# **Conclusion.** The natural gradient measures a step by how much $q$ changes, not by how much its
# parameters do. A bound on that change suits posteriors of any scale and shape, so there is no
# rate to tune. With sampled gradients, as in the fit above, noise has to be averaged away as well:
# [natural gradients](../ideas/natural_gradients.md) and [the trust
# region](../ideas/trust_region.md) say how. What a step costs, and where the advantage ends, is in
# the [second tutorial](02_any_guide.ipynb).

# %% tags=["remove-cell"]
assert max(first["natural gradient"]) < 15
assert all(grid[0] < rates[name] < grid[-1] for name, (_, grid) in grids.items())
assert min(first["Adam"] + first["gradient"]) > max(first["natural gradient"])

# %% [markdown]
# ## Where next
#
# - [Any guide](02_any_guide.ipynb): natural gradients for Pyro's guides and your own.
# - [Which guide, which optimizer](../choose.md): by the structure of the model.
# - [Predictions](../howto/predictions.md), [priors](../howto/priors.md) and [comparing
#   models](../howto/comparing.md): more of what a fit can do.
#
# ## References
#
# - S. Amari (1998). Natural gradient works efficiently in learning. [*Neural Computation*
#   10(2)](https://doi.org/10.1162/089976698300017746).
# - A. Gelman, A. Jakulin, M. G. Pittau & Y.-S. Su (2008). A weakly informative default prior
#   distribution for logistic and other regression models. [*Annals of Applied Statistics*
#   2(4)](https://doi.org/10.1214/08-AOAS191).
# - M. D. Hoffman & A. Gelman (2014). The No-U-Turn sampler. [*JMLR*
#   15](https://jmlr.org/papers/v15/hoffman14a.html).
# - M. E. Khan & H. Rue (2023). The Bayesian learning rule. [*JMLR*
#   24](https://jmlr.org/papers/v24/22-0291.html).
# - W. N. Street, W. H. Wolberg & O. L. Mangasarian (1993). Nuclear feature extraction for breast
#   tumor diagnosis. *Proc. SPIE* 1905. The table: scikit-learn's `load_breast_cancer`.
# - Y. Wang, M. Kasprzak & J. H. Huggins (2023). A targeted accuracy diagnostic for variational
#   approximations. *AISTATS*. This is the idea behind `fit.diagnosis`.
# - Y. Yao, A. Vehtari, D. Simpson & A. Gelman (2018). Yes, but did it work? Evaluating variational
#   inference. *ICML*. [arXiv:1802.02538](https://arxiv.org/abs/1802.02538). This is k-hat.
