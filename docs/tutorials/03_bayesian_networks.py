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
# # A Bayesian neural network, and whether it is worth it
#
# **Level** intermediate · **Tags** neural networks, VOGN, IVON, Bayes by backprop, calibration ·
# **Time** twelve minutes to read, a minute and a half to run on one core
#
# A trained network gives one answer. A Bayesian network averages the answers of many networks, and
# can say where it is unsure. We make one from an ordinary `torch.nn.Module`, look at its error
# bars, and then put it to a fair test against networks that are not Bayesian. They are hard to
# beat.
#
# **You will learn** to turn a module into a Pyro model with `ngvi.nn.bayesianize`, to choose a
# prior for a network, to see what the family does to error bars, to train by `VOGN`, `IVON` and
# Adam, to compare methods on equal terms, and what a tempered posterior is.
#
# **You should know** how a network is trained in PyTorch, and Pyro's `SVI`.
#
# **Contents**
#
# 1. [The colour of wine](#the-colour-of-wine)
# 2. [A network becomes a model](#a-network-becomes-a-model)
# 3. [Error bars](#error-bars)
# 4. [Digits: the contest](#digits-the-contest)
# 5. [Digits: the result](#digits-the-result)
# 6. [Which method?](#which-method), and [references](#references)

# %% tags=["remove-cell"]
# ruff: noqa: E402
import time
import warnings

import torch

warnings.filterwarnings("ignore", category=FutureWarning, module="arviz")
warnings.filterwarnings("ignore", message="IProgress not found")  # tqdm without ipywidgets
torch.set_num_threads(1)  # the promised time is that of one core

# %%
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pyro
import pyro.distributions as dist
from pyro.infer import SVI
from pyro.infer.autoguide import AutoDelta, AutoNormal
from sklearn.datasets import load_digits, load_wine
from torch import nn

import pyro_ngvi as ngvi

print(
    "pyro_ngvi", ngvi.__version__, "with Pyro", pyro.__version__, "and PyTorch", torch.__version__
)

# %% tags=["remove-cell"]
plt.rcParams.update({"figure.dpi": 90, "figure.constrained_layout.use": True})

# %% [markdown]
# ## The colour of wine
#
# How strong is the colour of a wine, given its flavanoids? The table of 178 Italian wines comes
# with scikit-learn (Forina et al. 1988). We take logarithms of the colour, standardise both, and
# keep a third of the wines for testing.

# %%
wines = load_wine(as_frame=True).frame
raw = torch.tensor(wines[["flavanoids", "color_intensity"]].to_numpy(), dtype=torch.float32)
raw[:, 1] = raw[:, 1].log()
order = torch.randperm(len(raw), generator=torch.Generator().manual_seed(0))
train, test = order[:120], order[120:]
x, y = ((raw - raw[train].mean(0)) / raw[train].std(0)).unbind(1)
x = x[:, None]
print(f"{len(train)} wines to train, {len(test)} to test")

# %% tags=["hide-input"]
figure, axis = plt.subplots(figsize=(6.5, 3.2))
axis.plot(x[train], y[train], "k.", label="to train")
axis.plot(x[test], y[test], "kx", ms=5, alpha=0.5, label="to test")
axis.set(xlabel="flavanoids (standardised)", ylabel="log colour (standardised)")
_ = axis.legend()

# %% [markdown]
# Not a line: pale wines are in the middle. And the scatter is not the same everywhere: it is
# widest at the left.
#
# ## A network becomes a model
#
# The network has five hidden units and two outputs, $f_1$ for the mean and $f_2$ for the sd of
# $y$, so that the scatter may change with $x$:
#
# $$
# y_i \sim N\big(f_1(x_i; w), \; \sigma(x_i; w)^2\big), \qquad \sigma = 0.01 + \text{softplus}(f_2).
# $$
#
# `bayesianize` turns it into a Pyro model, with a normal prior for each weight. `num_data` is the
# size of the whole training set, so that minibatches would count as what they are.


# %%
def likelihood(output):
    sd = 0.01 + nn.functional.softplus(output[..., 1])
    return dist.Normal(output[..., 0], sd)


def wine_model(prior):
    net = nn.Sequential(nn.Linear(1, 5), nn.Tanh(), nn.Linear(5, 2))
    return ngvi.nn.bayesianize(net, likelihood, num_data=len(train), prior=prior)


pyro.set_rng_seed(0)
model = wine_model(prior={"0.*": 1.5, "2.*": 0.7})
for name, shape in model.sites.items():
    print(name, tuple(shape))

# %% [markdown]
# The weights are sample sites, with the names and shapes that they have in the module. `prior`
# gives sds by pattern: 1.5 in the first layer, 0.7 in the second. Are these good numbers? Look at
# functions that the prior draws, beside those of a prior of sd 5 for all weights.

# %% tags=["hide-input"]
grid = torch.linspace(-2.5, 5.0, 200)[:, None]
figure, axes = plt.subplots(1, 2, figsize=(10, 3.2), sharey=True)
priors = {"sd 5 everywhere": 5.0, "sds 1.5 and 0.7": {"0.*": 1.5, "2.*": 0.7}}
for axis, (title, prior) in zip(axes, priors.items(), strict=True):
    drawn = wine_model(prior)
    with torch.no_grad(), pyro.poutine.block():
        lines = torch.stack([drawn(grid)[:, 0] for _ in range(25)])
    axis.plot(grid[:, 0], lines.T, color="C0", lw=0.8, alpha=0.6)
    axis.axhspan(-2, 2, color="0.85", zorder=0)
    axis.set(title=title, xlabel="flavanoids (standardised)", ylim=(-15, 15))
_ = axes[0].set(ylabel="mean of y under the prior")

# %% [markdown]
# The grey band is where standardised wines can be. On the left the prior expects cliffs far
# outside of it; on the right, smooth curves of about the right size. A prior in the space of
# weights means nothing until one has seen its functions.
#
# ## Error bars
#
# With 22 weights we can afford both families of the [first
# tutorial](01_logistic_regression.ipynb): a full covariance, which is the default of `fit`, and a
# Gaussian for each weight, which is what nearly all larger Bayesian networks use.

# %%
fits = {
    guide: ngvi.fit(model, x[train], y[train], guide=guide, max_steps=200, seed=0, progress=False)
    for guide in ("AutoMeanFieldNormal", "AutoFullRankNormal")
}

# %% [markdown]
# `ngvi.nn.predict` averages over draws of the weights. By the law of total variance the predictive
# variance has two parts, the scatter of the wines and how much the draws disagree about the mean:
#
# $$
# \text{Var}(y \mid x) = E_w[\sigma(x; w)^2] + \text{Var}_w[f_1(x; w)].
# $$

# %% tags=["hide-input"]
figure, axes = plt.subplots(1, 2, figsize=(11, 3.8), sharey=True)
rows = []
for axis, (name, fit) in zip(axes, fits.items(), strict=True):
    seen = ngvi.nn.predict(model, fit.guide, grid, num_samples=500, keep_draws=True, seed=1)
    mean_sd = seen.draws.std(0)
    for sd, alpha, label in ((seen.sd, 0.2, "2 sd of wines"), (mean_sd, 0.5, "2 sd of the mean")):
        low, high = seen.mean - 2 * sd, seen.mean + 2 * sd
        axis.fill_between(grid[:, 0], low, high, color="C3", alpha=alpha, lw=0, label=label)
    axis.plot(grid[:, 0], seen.mean, color="C3")
    axis.plot(x[train], y[train], "k.", ms=4)
    axis.plot(x[test], y[test], "kx", ms=4, alpha=0.6)
    axis.set(title=name, xlabel="flavanoids (standardised)", ylim=(-4.5, 4.5))
    tested = ngvi.nn.predict(model, fit.guide, x[test], y[test], num_samples=500, seed=1)
    distance = (tested.mean - y[test]).abs() / tested.sd
    shares = [(distance < width).float().mean().item() for width in (0.674, 1.645)]
    at = [mean_sd[(grid[:, 0] - place).abs().argmin()].item() for place in (0.0, 5.0)]
    rows.append((name, fit.elbo[0], tested.log_density.mean().item(), *shares, *at))
axes[0].set(ylabel="log colour (standardised)")
_ = axes[0].legend(loc="lower right")
columns = ["guide", "ELBO", "test log density", "in 50%", "in 90%", "sd of mean at 0", "at 5"]
wine_table = pd.DataFrame(rows, columns=columns)
print(wine_table.round(2).to_string(index=False))
bell = dist.Normal(0.0, 1.0).log_prob(y[test]).mean().item()
print(f"one Gaussian for all wines: test log density {bell:.2f} nats per wine")

# %% [markdown]
# Column by column: the ELBO in nats; the mean log density of test wines; the shares of test wines
# inside their central 50% and 90% intervals; and the sd of the mean in the middle of the data and
# beyond their end.
#
# Both find the bend, and both beat one Gaussian for all wines by the same margin. With 58 test
# wines the shares are known to four to seven percentage points, so both are a little modest.
# But look to the right of the last wine: with the full covariance the inner band is wider, by a
# third at 5, with independent weights it stays about as narrow as in the middle. The ELBO, which is
# higher for the full covariance, says the same of the weights.
#
# Is the wider band wide enough? Ask the fits.

# %% tags=["remove-cell"]
# what the text says of these numbers
first, second = (wine_table.set_index("guide").loc[name] for name in fits)
assert min(first["test log density"], second["test log density"]) > bell + 0.2
assert abs(first["test log density"] - second["test log density"]) < 0.1
assert 1.2 * first["at 5"] < second["at 5"] < 1.5 * first["at 5"]
assert first["at 5"] < 1.2 * first["sd of mean at 0"] < second["at 5"]
assert second["ELBO"] > first["ELBO"] + 2.0

# %%
for fit in fits.values():
    print(fit.verdict, "\n")

# %% [markdown]
# Neither is usable, and away from the data that is the right judgement of their predictions. Five
# hidden units can change places and signs, so the posterior has $5! \, 2^5 = 3840$ modes that are
# alike, and others that are not; a Gaussian sits in one of them. What all of the modes have to say
# about wines beyond the data is more than one Gaussian knows, and another start may end in a mode
# with a wider band.
#
# **Conclusion.** Where there are data, the two families predict alike. Where there are none,
# independent weights do not know that they do not know, and a full covariance knows it in part. If
# error bars away from the data matter, take a family with correlations: `AutoFullRankNormal`, up to
# some thousand weights; for a network as small as this one check against `NUTS`. Larger networks
# can have `AutoMatrixNormal` or [`AutoWalshHadamard`](04_walsh_hadamard.ipynb); look at their bands
# before you trust them, and do not interpret weights one by one.
#
# ## Digits: the contest
#
# Handwritten digits of 8 × 8 pixels, from scikit-learn, and a network with one hidden layer of 32
# units. Five ways to train it:
#
# | | what is fitted | optimizer |
# |---|---|---|
# | MAP | one best network (`AutoDelta`) | Adam |
# | ensemble (Lakshminarayanan et al. 2017) | five MAP networks, a fifth of the steps each | Adam |
# | BBB (Blundell et al. 2015) | a Gaussian for each weight (`AutoNormal`) | Adam |
# | VOGN (Khan et al. 2018) | the same family | `ngvi.optim.VOGN`: squared gradients of single digits |
# | IVON (Shen et al. 2024) | the same family | `ngvi.optim.IVON`: gradients, a natural step |
#
# The loss has a weight $\kappa$ on the KL term, `kl_weight`:
#
# $$
# E_q[-\log p(y \mid w)] + \kappa \, \text{KL}(q(w) \,\|\, p(w)).
# $$
#
# $\kappa = 1$ is Bayes' rule. A smaller weight gives a *tempered* or "cold" posterior (Wenzel et
# al. 2020), as if each digit had been seen $1 / \kappa$ times. For MAP it is a weaker prior.
#
# The rules, the same for all: every run costs about the same. Rates of Adam and $\kappa$ are
# chosen on validation digits of *one* split. Then everything is run again on four *other* splits
# into 900 digits to train and 797 to test. All splits draw from the same 1,797 digits, so some
# test digits have been validation digits; a choice among a handful of settings learns little from
# that. The folded cells have the details.

# %% tags=["hide-input"]
digits = load_digits()
images = torch.tensor(digits.data / 16.0, dtype=torch.float32)
labels = torch.tensor(digits.target)
figure, axes = plt.subplots(1, 10, figsize=(9, 1.2))
for axis, image, label in zip(axes, images, labels, strict=False):
    axis.imshow(image.reshape(8, 8), cmap="gray_r")
    axis.set(title=str(label.item()), xticks=[], yticks=[])

# %% [markdown]
# Ten of the images, with their labels. Most are plain, but the 5 and the 9 are not easy to tell apart.
# A good classifier is sure of most digits and in doubt about some.

# %% tags=["hide-input"]
TRAIN = 900
STEPS = {"MAP": 200, "ensemble": 200, "BBB": 150, "VOGN": 120, "IVON": 200}


def start(model):
    return {"init_loc_fn": model.init_to_module, "init_scale": 0.03}


def best(model, rate, kl_weight):
    guide = AutoDelta(model, init_loc_fn=model.init_to_module)
    return guide, pyro.optim.Adam({"lr": rate}), ngvi.BatchedELBO(1, kl_weight=kl_weight)


def bbb(model, rate, kl_weight):
    guide = AutoNormal(model, **start(model))
    return guide, pyro.optim.Adam({"lr": rate}), ngvi.BatchedELBO(4, kl_weight=kl_weight)


def vogn(model, rate, kl_weight):
    guide = ngvi.AutoMeanFieldNormal(model, **start(model))
    loss = ngvi.BatchedELBO(4, curvature="gauss_newton", kl_weight=kl_weight)
    return guide, ngvi.optim.VOGN(guide), loss


def ivon(model, rate, kl_weight):
    guide = ngvi.AutoMeanFieldNormal(model, **start(model))
    return guide, ngvi.optim.IVON(guide), ngvi.BatchedELBO(4, kl_weight=kl_weight)


def trained(method, rate, kl_weight, train, seed, steps):
    pyro.clear_param_store()
    pyro.set_rng_seed(seed)
    net = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
    model = ngvi.nn.bayesianize(net, "categorical", num_data=len(train))
    guide, optim, loss = method(model, rate, kl_weight)
    svi, used, taken = SVI(model, guide, optim, loss), 0.0, 0
    while taken < steps:
        for rows in train[torch.randperm(len(train))].split(100)[: steps - taken]:
            began = time.process_time()
            svi.step(images[rows], labels[rows])
            used, taken = used + time.process_time() - began, taken + 1
    return model, guide, used


def probabilities(name, rate, kl_weight, train, seed, *inputs):
    """Predictions for each of ``inputs``, and the processor time of the training."""
    parts, used, total = 5 if name == "ensemble" else 1, 0.0, [0.0] * len(inputs)
    for part in range(parts):
        how = methods[name], rate, kl_weight, train, seed + 1000 * part, STEPS[name] // parts
        model, guide, seconds = trained(*how)
        number, used = 1 if isinstance(guide, AutoDelta) else 100, used + seconds
        for k, x in enumerate(inputs):
            mean = ngvi.nn.predict(model, guide, x, num_samples=number, seed=1).mean
            total[k] = total[k] + mean / parts
    return total, guide, used


def nats(prob, labels):
    """Negative log likelihood of each digit."""
    return -prob[torch.arange(len(labels)), labels].clamp_min(1e-12).log()


def reliability(prob, labels, bins=10):
    """Confidence, accuracy and count by bin of confidence, and the expected calibration error."""
    confidence, label = prob.max(-1)
    right, bin_of = (label == labels).float(), (confidence * bins).long().clamp_max(bins - 1)
    at = [(confidence[bin_of == b], right[bin_of == b]) for b in range(bins)]
    points = np.array([(c.mean().item(), r.mean().item(), len(c)) for c, r in at if len(c)])
    return points, (np.abs(points[:, 0] - points[:, 1]) * points[:, 2]).sum() / len(labels)


# %% [markdown]
# First the tuning, on one split: four weights for each method, and two rates where Adam is at
# work. `VOGN` and `IVON` keep their default rates, which fall with the steps. The numbers of steps
# are fixed, so that the tables can be reproduced, and chosen so that runs cost about the same; the
# line below the table says how nearly. The score is the negative log likelihood of validation
# digits, in nats per digit; lower is better.

# %% tags=["hide-input"]
methods = {"MAP": best, "ensemble": best, "BBB": bbb, "VOGN": vogn, "IVON": ivon}
rates = {"MAP": (0.01, 0.03), "ensemble": (0.03, 0.1), "BBB": (0.01, 0.03)}
rates |= {"VOGN": ("default",), "IVON": ("default",)}
weights = (1.0, 0.1, 0.03, 0.01)
order = torch.randperm(len(images), generator=torch.Generator().manual_seed(100))
tune, validation = order[:TRAIN], order[TRAIN:]

for method in (best, bbb, vogn, ivon):  # the first steps load code
    trained(method, 0.01, 1.0, tune, 0, 3)
seconds = {name: [] for name in methods}
rows = []
for name in methods:
    for rate in rates[name]:
        scores = []
        for weight in weights:
            (prob,), _, used = probabilities(name, rate, weight, tune, 100, images[validation])
            seconds[name].append(used)
            scores.append(nats(prob, labels[validation]).mean().item())
        rows.append((name, rate, *scores))
columns = ["method", "rate", *(f"weight {w:g}" for w in weights)]
tuning = pd.DataFrame(rows, columns=columns)
print(tuning.round(3).to_string(index=False))
cost = {name: np.median(used) for name, used in seconds.items()}
print("processor time of a run, in that of MAP:", end=" ")
print(", ".join(f"{name} {cost[name] / cost['MAP']:.1f}" for name in methods))


def chosen(name, columns):
    """The best rate and weight of a method among those columns."""
    own = tuning[tuning["method"] == name].set_index("rate")[columns]
    rate, column = own.stack().idxmin()
    return rate, float(column.split()[1])


# %% [markdown]
# ## Digits: the result
#
# Each method has two rows: at weight 1, Bayes' rule, with its best rate there, and at the weight
# that the tuning chose. Every number is a mean over four splits. *ECE*, the expected calibration
# error (Guo et al. 2017), sorts the digits by the confidence of their prediction and averages the
# gap between confidence and accuracy. The last column is the test set moved by one pixel to the
# right, which no network has seen in training.

# %% tags=["hide-input"]
SPLITS = 4
moved = images.reshape(-1, 8, 8).roll(1, dims=-1).flatten(1)
plans = {}
for name in methods:
    if name != "ensemble":
        plans[name, "1"] = chosen(name, ["weight 1"])
    plans[name, "tuned"] = chosen(name, list(tuning.columns[2:]))

results, points, guides = [], {}, {}
for seed in range(SPLITS):
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    train, test = order[:TRAIN], order[-797:]
    for (name, kind), (rate, weight) in plans.items():
        inputs = images[test], moved[test]
        (prob, prob_moved), guide, _ = probabilities(name, rate, weight, train, seed, *inputs)
        found, ece = reliability(prob, labels[test])
        points.setdefault((name, kind), []).append(found)
        guides[name, kind] = guide
        accuracy = (prob.argmax(-1) == labels[test]).float().mean().item()
        score, far = (nats(p, labels[test]).mean().item() for p in (prob, prob_moved))
        results.append((name, kind, seed, accuracy, score, ece, far))
columns = ["method", "weight", "split", "accuracy", "nats per digit", "ECE", "nats, moved"]
results = pd.DataFrame(results, columns=columns)
means = results.groupby(["method", "weight"], sort=False).mean().drop(columns="split")
means = means.reset_index()
means["weight"] = [
    f"{plans[m, k][1]:g}" for m, k in zip(means["method"], means["weight"], strict=True)
]
print(means.round(3).to_string(index=False))

# %% [markdown]
# The differences need error bars. Since all methods saw the same splits, we take differences from
# MAP split by split, at the tuned weights.

# %% tags=["hide-input"]
tuned = results[results["weight"] == "tuned"].set_index(["split", "method"])
rows = []
for name in ("ensemble", "BBB", "VOGN", "IVON"):
    row = [name]
    for column in ("nats per digit", "ECE", "nats, moved"):
        gap = tuned[column].unstack()[name] - tuned[column].unstack()["MAP"]
        row += [gap.mean(), gap.std() / SPLITS**0.5]
    rows.append(row)
columns = ["method - MAP", "nats per digit", "s.e.", "ECE", "s.e.", "nats, moved", "s.e."]
differences = pd.DataFrame(rows, columns=columns)
print(differences.round(3).to_string(index=False))

# %% tags=["hide-input"]
colours = {"MAP": "0.3", "ensemble": "C0", "BBB": "C1", "VOGN": "C2", "IVON": "C3"}
figure, axes = plt.subplots(1, 2, figsize=(10, 4.2), sharey=True)
for axis, kind in zip(axes, ("1", "tuned"), strict=True):
    axis.plot([0, 1], [0, 1], ":", color="0.6")
    for name, colour in colours.items():
        if (name, kind) not in points:
            continue
        every = np.concatenate(points[name, kind])
        bin_of = np.minimum((every[:, 0] * 10).astype(int), 9)
        drawn = []
        for b in range(10):
            part = every[bin_of == b]
            if part[:, 2].sum() >= 20:  # of the test digits of all splits
                drawn.append(np.average(part[:, :2], axis=0, weights=part[:, 2]))
        axis.plot(*np.array(drawn).T, "o-", color=colour, lw=0.8, ms=4, label=name)
    axis.set(xlabel="confidence", title="weight 1" if kind == "1" else "tuned weight")
axes[0].set(ylabel="accuracy")
_ = axes[1].legend()

# %% [markdown]
# Dots on the dotted line are perfectly calibrated: of the predictions made with confidence 0.8,
# eighty percent are right. Above it a method is too modest, below it too sure. Bins with fewer
# than twenty digits are left out.
#
# What the tables say:
#
# - **Weight 1 is too modest.** There the Bayesian networks are less accurate than MAP, and their
#   calibration error is several times as large. Three optimizers agree, so the likely reason is
#   what they share: independent Gaussians cannot follow the posterior of a network, and the noise
#   of the weights reaches the prediction (Trippe & Turner 2018). At a smaller weight it is gone,
#   and so is Bayes' rule.
# - **Tuned, nobody beats MAP on digits like those of training.** BBB and IVON are within two
#   standard errors of it; VOGN and the ensemble, whose members had a fifth of the steps each, are
#   a little behind.
# - **Moved by a pixel, all are bad**: a guess would score $\log 10 = 2.3$ nats. But the order
#   is reversed. Bayes' rule at weight 1 loses least, then the ensemble; the networks that were
#   tuned to be confident are confidently wrong.
#
# Some of the choices lie at the edge of the grid of the tuning. A wider search would change these
# rows a little, and could help MAP as well.
#
# **Conclusion.** On data like those of training, a tuned MAP network is as good as its Bayesian
# rivals and less work. What the modesty of Bayes' rule buys is caution elsewhere. Decide which of
# the two you need, and test on data that differ from those of training, as the last column does.

# %% tags=["remove-cell"]
# what the text says of these numbers
score = results.groupby(["method", "weight"])[["nats per digit", "ECE", "nats, moved"]].mean()
best_map = score.loc[("MAP", "tuned")]
for name in ("BBB", "VOGN", "IVON"):
    one, at_best = score.loc[(name, "1")], score.loc[(name, "tuned")]
    assert one["ECE"] > 2 * best_map["ECE"], name
    assert at_best["nats per digit"] < one["nats per digit"], name
    assert -0.01 < at_best["nats per digit"] - best_map["nats per digit"] < 0.05, name
    assert one["nats, moved"] < best_map["nats, moved"], name
assert score.loc[("ensemble", "tuned"), "nats, moved"] < best_map["nats, moved"]

# %% [markdown]
# ## Which method?
#
# | you want | take |
# |---|---|
# | a label and its confidence, on data like those of training | MAP, its prior tuned |
# | caution on other data | Bayes' rule at weight 1 (IVON, VOGN, BBB), or an ensemble |
# | error bars of a small network | `ngvi.fit`: `AutoFullRankNormal` and `NGVB` |
# | a Bayesian network without a rate to search | IVON or VOGN, at their default rates |
# | a guide of Pyro's that is not Gaussian | Adam, or [`IFVB`](02_any_guide.ipynb) |
#
# If you temper, say so, and choose the weight on validation data. Four settings decide most runs.
# Start at the weights of the module, with a small `init_scale` (0.01 to 0.03 for hundreds of
# inputs): from a wide start the noise of the weights hides the signal. `num_data` is
# `len(dataset)`, not the size of a minibatch. Look at how many sds are still those of the prior.
# And plot functions that the prior draws. [Bayesian networks: how to](../howto/networks.md) has
# the recipes, larger networks and minibatches from a `DataLoader`.
#
# ## References
#
# - C. Blundell, J. Cornebise, K. Kavukcuoglu & D. Wierstra (2015). Weight uncertainty in neural
#   networks. *ICML*. [arXiv:1505.05424](https://arxiv.org/abs/1505.05424).
# - M. Forina et al. (1988). PARVUS: an extendible package for data exploration, classification and
#   correlation. The table: scikit-learn's `load_wine`; the digits: its `load_digits`.
# - C. Guo, G. Pleiss, Y. Sun & K. Q. Weinberger (2017). On calibration of modern neural networks.
#   *ICML*. [arXiv:1706.04599](https://arxiv.org/abs/1706.04599).
# - M. E. Khan et al. (2018). Fast and scalable Bayesian deep learning by weight-perturbation in
#   Adam. *ICML*. [arXiv:1806.04854](https://arxiv.org/abs/1806.04854).
# - B. Lakshminarayanan, A. Pritzel & C. Blundell (2017). Simple and scalable predictive
#   uncertainty estimation using deep ensembles. *NeurIPS*.
#   [arXiv:1612.01474](https://arxiv.org/abs/1612.01474).
# - Y. Shen et al. (2024). Variational learning is effective for large deep networks. *ICML*.
#   [arXiv:2402.17641](https://arxiv.org/abs/2402.17641).
# - B. Trippe & R. Turner (2018). Overpruning in variational Bayesian neural networks.
#   [arXiv:1801.06230](https://arxiv.org/abs/1801.06230).
# - F. Wenzel et al. (2020). How good is the Bayes posterior in deep neural networks really?
#   *ICML*. [arXiv:2002.02405](https://arxiv.org/abs/2002.02405).
