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
# **Time** a quarter of an hour to read, a minute and a half to run on one core
#
# A trained network gives one answer. A Bayesian network averages the answers of many networks, and
# can say where it is unsure. We make one from an ordinary `torch.nn.Module`, look at its error
# bars, and then put it to a fair test against networks that are not Bayesian. It does not win
# every column.
#
# **You will learn** to turn a module into a Pyro model with `ngvi.nn.bayesianize`, to fit it by
# `IVON`, `VOGN` or Adam, to read its predictions, to compare methods on equal terms, and what a
# tempered posterior is.
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
# 6. [Why weight 1 is too modest](#why-weight-1-is-too-modest)
# 7. [Which method?](#which-method), and [references](#references)

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
from torch.utils.data import DataLoader, TensorDataset

import pyro_ngvi as ngvi

print(
    "pyro_ngvi", ngvi.__version__, "with Pyro", pyro.__version__, "and PyTorch", torch.__version__
)

# %% tags=["remove-cell"]
plt.rcParams.update({"figure.dpi": 90, "figure.constrained_layout.use": True})

# %% [markdown]
# ## The colour of wine
#
# How strong is the colour of a wine with so many flavanoids? The table of 178 Italian wines comes
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
# The network has two outputs, $f_1$ and $f_2$, for the mean and the sd of $y$, so that the scatter
# may change with $x$. All weights get the prior $N(0, 1)$:
#
# $$
# w_j \sim N(0, 1), \qquad
# y_i \sim N\big(f_1(x_i; w), \; \sigma(x_i; w)^2\big), \qquad \sigma = 0.01 + \text{softplus}(f_2).
# $$
#
# `bayesianize` makes the Pyro model. `num_data` is the size of the whole training set, so that
# minibatches count as what they are.


# %%
def likelihood(output):
    sd = 0.01 + nn.functional.softplus(output[..., 1])
    return dist.Normal(output[..., 0], sd)


pyro.set_rng_seed(0)
net = nn.Sequential(nn.Linear(1, 20), nn.Tanh(), nn.Linear(20, 2))
model = ngvi.nn.bayesianize(net, likelihood, num_data=len(train))
print(model.sites)

# %% [markdown]
# The weights are sample sites with the names and shapes that they have in the module. The guide is
# one Gaussian for each weight. It starts at the weights that torch gave the network: a guide that
# starts at the centre of the prior has all hidden units alike. `IVON` is a natural-gradient
# optimizer for this family (Shen et al. 2024).

# %%
loader = DataLoader(TensorDataset(x[train], y[train]), batch_size=40, shuffle=True)
guide = ngvi.AutoMeanFieldNormal(model, init_loc_fn=model.init_to_module, init_scale=0.1)
fit = ngvi.fit(
    model,
    x[train],
    y[train],
    data=loader,
    guide=guide,
    optim=ngvi.optim.IVON,
    num_particles=8,
    max_steps=600,
    seed=0,
    progress=False,
)
print(fit.why_stopped, "after", fit.steps, "steps")

# %% [markdown]
# ## Error bars
#
# `ngvi.nn.predict` averages over draws of the weights. By the law of total variance the predictive
# variance has two parts: the scatter of the wines, and how much the draws of the network disagree
# about the mean,
#
# $$
# \text{Var}(y \mid x) = E_w[\sigma(x; w)^2] + \text{Var}_w[f_1(x; w)].
# $$

# %% tags=["hide-input"]
grid = torch.linspace(-2.5, 5.0, 200)[:, None]
seen = ngvi.nn.predict(model, guide, grid, num_samples=500, keep_draws=True, seed=1)
mean_sd = seen.draws.std(0)
figure, axis = plt.subplots(figsize=(7.5, 3.8))
for sd, alpha, label in ((seen.sd, 0.2, "wines"), (mean_sd, 0.5, "the mean")):
    low, high = seen.mean - 2 * sd, seen.mean + 2 * sd
    axis.fill_between(grid[:, 0], low, high, color="C3", alpha=alpha, lw=0, label=f"2 sd, {label}")
axis.plot(grid[:, 0], seen.mean, color="C3")
axis.plot(x[train], y[train], "k.", ms=4)
axis.plot(x[test], y[test], "kx", ms=4, alpha=0.6)
axis.set(xlabel="flavanoids (standardised)", ylabel="log colour (standardised)", ylim=(-4.5, 4.5))
_ = axis.legend(loc="lower right")

tested = ngvi.nn.predict(model, guide, x[test], y[test], num_samples=500, seed=1)
inside = ((tested.mean - y[test]).abs() < 1.645 * tested.sd).float().mean().item()
bell = dist.Normal(0.0, 1.0).log_prob(y[test]).mean().item()
at = {place: mean_sd[(grid[:, 0] - place).abs().argmin()].item() for place in (0.0, 5.0)}
print(
    f"test log density: {tested.log_density.mean():.2f} nats a wine; one Gaussian for all: {bell:.2f}"
)
print(f"test wines inside their central 90% interval: {inside:.0%}")
print(f"sd of the mean: {at[0.0]:.2f} at 0, {at[5.0]:.2f} at 5")

# %% tags=["remove-cell"]
assert tested.log_density.mean() > bell + 0.05
assert at[5.0] > 1.5 * at[0.0]
assert inside > 0.9

# %% [markdown]
# The network finds the bend, and the dark band opens where there are no wines to the right. But
# the light band is wide: more than nine tenths of the test wines lie in their 90% interval. Part
# of the noise of the weights, which the data hardly move, has become noise of the prediction. We
# meet it again below.
#
# **Conclusion.** Error bars grow away from the data, as they should. Whether they have the right
# size is a question for test data.
#
# ## Digits: the contest
#
# Handwritten digits of 8 × 8 pixels, from scikit-learn, and a network with one hidden layer of 32
# units. Five ways to train it:
#
# | | what is fitted | optimizer |
# |---|---|---|
# | MAP | one best network (`AutoDelta`) | Adam |
# | ensemble | five MAP networks from five starts, a fifth of the time each | Adam |
# | BBB (Blundell et al. 2015) | a Gaussian for each weight (`AutoNormal`) | Adam |
# | VOGN (Khan et al. 2018) | the same family | `ngvi.optim.VOGN`: squared gradients of single digits |
# | IVON (Shen et al. 2024) | the same family | `ngvi.optim.IVON`: gradients as a natural step |
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
# The rules, the same for all: every run gets the same processor time. Rates and $\kappa$ are
# chosen on validation digits of *one* split. Then everything is run again on four *other* splits
# into 900 digits to train and 797 to test; validation digits are not used there. The folded cells
# have the details.

# %% tags=["hide-input"]
digits = load_digits()
images = torch.tensor(digits.data / 16.0, dtype=torch.float32)
labels = torch.tensor(digits.target)
figure, axes = plt.subplots(1, 10, figsize=(9, 1.2))
for axis, image, label in zip(axes, images, labels, strict=False):
    axis.imshow(image.reshape(8, 8), cmap="gray_r")
    axis.set(title=str(label.item()), xticks=[], yticks=[])

# %% tags=["hide-input"]
SECONDS, TRAIN = 0.9, 900


def start(model):
    return {"init_loc_fn": model.init_to_module, "init_scale": 0.03}


def best(model, rate, kl_weight):
    guide = AutoDelta(model, init_loc_fn=model.init_to_module)
    return guide, pyro.optim.Adam({"lr": rate}), ngvi.BatchedELBO(1, kl_weight=kl_weight)


def bbb(model, rate, kl_weight):
    guide = AutoNormal(model, **start(model))
    return guide, pyro.optim.Adam({"lr": rate}), ngvi.BatchedELBO(4, kl_weight=kl_weight)


def rates_of(rate):
    """The default of VOGN and IVON, which falls with the steps, or a constant."""
    return {} if rate == "default" else {"lr": rate, "curvature_lr": rate}


def vogn(model, rate, kl_weight):
    guide = ngvi.AutoMeanFieldNormal(model, **start(model))
    loss = ngvi.BatchedELBO(4, curvature="gauss_newton", kl_weight=kl_weight)
    return guide, ngvi.optim.VOGN(guide, **rates_of(rate)), loss


def ivon(model, rate, kl_weight):
    guide = ngvi.AutoMeanFieldNormal(model, **start(model))
    return guide, ngvi.optim.IVON(guide, **rates_of(rate)), ngvi.BatchedELBO(4, kl_weight=kl_weight)


def trained(method, rate, kl_weight, train, seed, seconds):
    pyro.clear_param_store()
    pyro.set_rng_seed(seed)
    net = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
    model = ngvi.nn.bayesianize(net, "categorical", num_data=len(train))
    guide, optim, loss = method(model, rate, kl_weight)
    svi = SVI(model, guide, optim, loss)
    used, steps = 0.0, 0
    while used < seconds:
        for rows in train[torch.randperm(len(train))].split(100):
            began = time.process_time()
            svi.step(images[rows], labels[rows])
            used, steps = used + time.process_time() - began, steps + 1
    return model, guide, steps


def probabilities(model, guide, inputs):
    number = 1 if isinstance(guide, AutoDelta) else 100
    return ngvi.nn.predict(model, guide, inputs, num_samples=number, seed=1).mean


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
# First the tuning, on one split: two rates and four weights for each method. The score is the
# negative log likelihood of validation digits, in nats a digit; lower is better.

# %% tags=["hide-input"]
methods = {"MAP": best, "BBB": bbb, "VOGN": vogn, "IVON": ivon}
rates = {"MAP": (0.003, 0.01), "BBB": (0.01, 0.03)}
rates |= dict.fromkeys(("VOGN", "IVON"), ("default", 0.1))
weights = (1.0, 0.3, 0.1, 0.03)
order = torch.randperm(len(images), generator=torch.Generator().manual_seed(100))
tune, validation = order[:TRAIN], order[TRAIN:]

for method in methods.values():  # the first steps load code
    trained(method, 0.01, 1.0, tune, 0, seconds=0.05)
rows = []
for name, method in methods.items():
    for rate in rates[name]:
        scores = []
        for weight in weights:
            model, guide, _ = trained(method, rate, weight, tune, 100, SECONDS)
            prob = probabilities(model, guide, images[validation])
            scores.append(nats(prob, labels[validation]).mean().item())
        rows.append((name, rate, *scores))
columns = ["method", "rate", *(f"weight {w:g}" for w in weights)]
tuning = pd.DataFrame(rows, columns=columns)
print(tuning.round(3).to_string(index=False))


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
# error, sorts the digits by the confidence of their prediction and averages the gap between
# confidence and accuracy. The last column is the test set moved by one pixel to the right, which
# no network has seen in training.

# %% tags=["hide-input"]
SPLITS = 4
moved = images.reshape(-1, 8, 8).roll(1, dims=-1).flatten(1)
plans = {}
for name in methods:
    plans[name, "1"] = chosen(name, ["weight 1"])
    plans[name, "tuned"] = chosen(name, list(tuning.columns[2:]))
    if name == "MAP":
        plans["ensemble", "tuned"] = plans["MAP", "tuned"]

results, points, guides = [], {}, {}
for seed in range(SPLITS):
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    train, test = order[:TRAIN], order[-797:]
    for (name, kind), (rate, weight) in plans.items():
        method, parts = methods.get(name, best), 5 if name == "ensemble" else 1
        prob, prob_moved, steps = 0.0, 0.0, 0
        for part in range(parts):
            run_seed = seed + 1000 * part
            model, guide, taken = trained(method, rate, weight, train, run_seed, SECONDS / parts)
            prob = prob + probabilities(model, guide, images[test]) / parts
            prob_moved = prob_moved + probabilities(model, guide, moved[test]) / parts
            steps += taken
        found, ece = reliability(prob, labels[test])
        points.setdefault((name, kind), []).append(found)
        guides[name, kind] = guide
        accuracy = (prob.argmax(-1) == labels[test]).float().mean().item()
        score, far = (nats(p, labels[test]).mean().item() for p in (prob, prob_moved))
        results.append((name, kind, seed, steps, accuracy, score, ece, far))
columns = ["method", "weight", "split", "steps", "accuracy", "nats a digit", "ECE", "nats, moved"]
results = pd.DataFrame(results, columns=columns)
means = results.groupby(["method", "weight"], sort=False).mean().drop(columns="split")
means = means.assign(steps=means["steps"].astype(int)).reset_index()
means["weight"] = [
    f"{plans[m, k][1]:g}" for m, k in zip(means["method"], means["weight"], strict=True)
]
print(means.round(3).to_string(index=False))

# %% [markdown]
# `steps` shows what a step costs: in the same time MAP makes several times as many. The
# differences need error bars. Since all methods saw the same splits, we take differences from MAP
# split by split, at the tuned weights.

# %% tags=["hide-input"]
tuned = results[results["weight"] == "tuned"].set_index(["split", "method"])
rows = []
for name in ("ensemble", "BBB", "VOGN", "IVON"):
    row = [name]
    for column in ("nats a digit", "ECE", "nats, moved"):
        gap = tuned[column].unstack()[name] - tuned[column].unstack()["MAP"]
        row += [gap.mean(), gap.std() / SPLITS**0.5]
    rows.append(row)
columns = ["method - MAP", "nats a digit", "s.e.", "ECE", "s.e.", "nats, moved", "s.e."]
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
# CONCLUSION
#
# ## Why weight 1 is too modest
#
# The family is the likely reason, not the optimizer, since three optimizers agree. It gives
# independent Gaussians to more weights than there are digits. Then the KL term is cheapest if many
# weights stay at their prior, and their noise reaches the prediction (Trippe & Turner 2018). The
# next cell counts weights whose sd is above 0.5, where the prior has 1.

# %% tags=["hide-input"]
rows = []
for name in ("VOGN", "IVON"):
    shares = [(guides[name, k].log_scale.exp() > 0.5).float().mean().item() for k in ("1", "tuned")]
    rows.append((name, *shares))
columns = ["method", "weight 1", "tuned weight"]
print("share of weights that stay near the prior")
near = pd.DataFrame(rows, columns=columns)
print(near.round(2).to_string(index=False))
