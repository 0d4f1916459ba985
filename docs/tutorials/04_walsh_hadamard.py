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
# # A wide network that ignores its data, and what Walsh-Hadamard weights change
#
# Give each weight of a wide network a Gaussian of its own and maximise the ELBO. The network may
# end up learning nothing: the weights return to their prior, and the data are called noise. For odd
# activations and Gaussian noise Coker et al. (2022) prove that the optimum does this as the width
# grows. This page watches it happen on a medical data set, and then makes the weights of a layer
# from far fewer Gaussian numbers, as Rossi, Marmin and Filippone (2020) propose.
#
# **You will**
#
# - see a bound improve while predictions get worse, and where the weights are then;
# - see how a matrix is made from one vector by two fast transforms;
# - compare both guides over widths and splits, with a ridge regression and an ordinary network
#   beside them.
#
# **Contents** [The data](#the-patients) · [Mean field](#a-gaussian-for-each-weight) ·
# [Walsh-Hadamard](#a-matrix-from-a-vector) · [Widths](#width-by-width) · [Larger
# layers](#matrices-that-are-never-formed) · [Limits](#when-not-to-use-it)
#
# *Level*: you have fitted a Bayesian network before ([a Bayesian neural
# network](03_bayesian_networks.ipynb)). *Tags*: Bayesian network, mean field, wide layers. *Time*: ten
# minutes to read, about two minutes to run on one core.

# %% tags=["remove-cell"]
# ruff: noqa: E402
import warnings

import torch

warnings.filterwarnings("ignore", "\\s*ArviZ is undergoing", FutureWarning)
warnings.filterwarnings("ignore", "IProgress not found")
torch.set_num_threads(1)

# %% tags=["hide-input"]
import time
from functools import partial

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI
from sklearn.datasets import load_diabetes
from sklearn.linear_model import RidgeCV
from torch import nn

import pyro_ngvi as ngvi

plt.rcParams["figure.dpi"] = 90

# %% [markdown]
# ## The patients
#
# Efron et al. (2004) followed 442 patients with diabetes: ten measurements at the start, and how
# far the disease had progressed after a year. We learn from 300 patients and test on 142. All
# columns are standardised by the 300.


# %%
def split(seed):
    data = load_diabetes(scaled=False)
    order = np.random.RandomState(seed).permutation(442)
    columns = np.column_stack([data.data, data.target])[order]
    columns = (columns - columns[:300].mean(0)) / columns[:300].std(0)
    columns = torch.tensor(columns, dtype=torch.float32)
    x, y = columns[:, :-1], columns[:, -1]
    return x[:300], y[:300], x[300:], y[300:]


x, y, x_test, y_test = split(seed=0)


def of_ridge(x, y, x_test, y_test):
    """RMSE, and mean log density in nats, of a ridge regression."""
    ridge = RidgeCV(np.logspace(-2, 3, 11)).fit(x, y)
    at = torch.as_tensor(ridge.predict(x_test)).float()
    sd = (torch.as_tensor(ridge.predict(x)).float() - y).std()
    rmse = (at - y_test).square().mean().sqrt()
    return float(rmse), float(dist.Normal(at, sd).log_prob(y_test).mean())


def of_constant(y, y_test):
    rmse = (y_test - y.mean()).square().mean().sqrt()
    return float(rmse), float(dist.Normal(y.mean(), y.std()).log_prob(y_test).mean())


pd.DataFrame(
    [of_constant(y, y_test), of_ridge(x, y, x_test, y_test)],
    index=["one Gaussian for all y", "ridge regression"],
    columns=["RMSE [sd of y]", "log density [nats]"],
).round(3)

# %% [markdown]
# The first column is the error of the prediction for the 142, in sds of y, and the second the mean
# log density of their outcomes, where higher is better. A line explains half of the variance. A good
# network should not do worse than the line, whatever its width.

# %% tags=["hide-input"]
figure, axis = plt.subplots(figsize=(6, 3), layout="constrained")
axis.plot(x[:, 2], y, ".", color="0.4", label="to learn from")
axis.plot(x_test[:, 2], y_test, "x", color="C3", ms=4, alpha=0.7, label="to test")
axis.set(xlabel="body mass index [sd]", ylabel="progression [sd]")
_ = axis.legend(fontsize="small")

# %% [markdown]
# One of the ten measurements, against the outcome. The disease progresses faster in heavier patients,
# and the scatter around any curve is wide: there is a signal to learn, and a lot of noise to mistake
# for it.
#
# ## A Gaussian for each weight
#
# The network is 10-256-256-1 with ReLU. Its prior keeps the size of each layer's output the same at
# any width. `ngvi.nn.bayesianize` makes the model, with the sd of the noise as one more unknown.


# %%
def prior(name, weight):
    sd = (2 / weight.shape[-1]) ** 0.5 if weight.dim() == 2 else 1.0
    return dist.Normal(weight.new_zeros(()), weight.new_tensor(sd))


def make_model(width):
    first, middle, last = nn.Linear(10, width), nn.Linear(width, width), nn.Linear(width, 1)
    net = nn.Sequential(first, nn.ReLU(), middle, nn.ReLU(), last)
    return ngvi.nn.bayesianize(net, "normal", num_data=300, prior=prior)


def mean_field(model, scale=0.1):
    start = {"init_loc_fn": model.init_to_module, "init_scale": scale}
    guide = ngvi.AutoMeanFieldNormal(model, **start)
    return guide, ngvi.NGVB(guide)


def mean_field_adam(model, rate):
    guide, _ = mean_field(model, scale=0.01)
    return guide, pyro.optim.Adam({"lr": rate})


# %% [markdown]
# We write the loop, to look on the way: after each of the given numbers of steps it notes the loss
# and the scores on the test patients. `init_scale` is the sd of each weight at the start, once
# narrow, once wide. Adam starts narrow and has three rates. Each run is done on three splits, each
# with a seed of its own.


# %%
def train(make_guide, width, looks, data, seed=0):
    """The guide, and a row for each look: steps, seconds, loss, RMSE, log density, noise."""
    x, y, x_test, y_test = data
    pyro.clear_param_store()
    pyro.set_rng_seed(seed)
    model = make_model(width)
    guide, optim = make_guide(model)
    svi = SVI(model, guide, optim, ngvi.BatchedELBO(2))
    used, losses, rows = 0.0, [], []
    for look in looks:
        began = time.process_time() - used
        while len(losses) < look:
            losses.append(svi.step(x, y))
        used = time.process_time() - began
        seen = ngvi.nn.predict(model, guide, x_test, y_test, num_samples=100, seed=1)
        rmse = (seen.mean - y_test).square().mean().sqrt().item()
        density, noise = seen.log_density.mean().item(), guide.median()["noise"].item()
        rows.append((look, used, np.median(losses[-20:]), rmse, density, noise))
    return guide, rows


looks, splits, fits = (50, 100, 200), [split(seed) for seed in range(3)], {}


def over_splits(makers):
    """Means over the splits, and the range of the log density; keeps guides of the first."""
    rows = []
    for name, make_guide in makers.items():
        for seed, data in enumerate(splits):
            guide, found = train(make_guide, 256, looks, data, seed)
            fits.setdefault(name, guide)
            rows += [(name, *row) for row in found]
    columns = ["guide", "steps", "seconds", "loss", "RMSE", "log density", "noise"]
    group = pd.DataFrame(rows, columns=columns).groupby(["guide", "steps"], sort=False)
    table = group.mean()
    table.insert(4, "lowest", group["log density"].min())
    table.insert(5, "highest", group["log density"].max())
    return table


makers = {"NGVB, narrow start": partial(mean_field, scale=0.01), "NGVB, wide start": mean_field}
makers |= {f"Adam {rate}": partial(mean_field_adam, rate=rate) for rate in (0.003, 0.01, 0.03)}
first = over_splits(makers)
digits = {"loss": 0, "RMSE": 3, "log density": 3, "lowest": 3, "highest": 3, "noise": 2}
digits["seconds"] = 1
first.round(digits)

# %% [markdown]
# Means over the three splits; *lowest* and *highest* are the range of the log density. The loss falls
# in every run, as it should, and where it has come far down, the predictions have got worse. NGVB
# predicts passably at first from the narrow start, and less well at every look. From the wide start
# the network is hardly better than one Gaussian for all y, and the noise, in the last column, is put
# at the sd of y or more: all is called noise. Adam goes the same way at the pace of its rate, at
# about the same cost of a step. At 0.003 it is about as good as the line after 200 steps, at a loss
# more than thirty times that of NGVB; at 0.01 it has begun to slip; at 0.03 it ends below one
# Gaussian. So a good mean-field fit of this network is one that was stopped early, and the bound does
# not say when. (The seconds depend on the machine.)
#
# ## A matrix from a vector
#
# The weights of the 256 x 256 matrix are the trouble: each pays for leaving its prior, and the data
# speak of few of them. Suppose that a $D \times D$ matrix is made from one Gaussian vector $g$ with
# $D$ entries:
#
# $$W = s\,\sqrt D\; S_1\, H\, \mathrm{diag}(g)\, H\, S_2 .$$
#
# $H$ is the Hadamard matrix, all entries $\pm 1/\sqrt D$. $S_1$ and $S_2$ are diagonal, start as
# random signs and are trained as parameters; $s$ is the prior sd of a weight. Only $g$ has a
# posterior. Here is a small one:

# %%
D = 4
pyro.set_rng_seed(0)
H = torch.tensor([[1.0, 1.0], [1.0, -1.0]])
H = torch.kron(H, H) / D**0.5
left, right = (torch.randint(2, (2, D)) * 2.0 - 1.0).unbind()
g = torch.randn(D)
W = D**0.5 * left.diag() @ H @ g.diag() @ H @ right.diag()
pd.DataFrame(W.numpy()).round(2)

# %% [markdown]
# Four numbers, up to their signs, fill the sixteen places, each once in every row and column. A
# priori each entry has the variance of $g$, and the entries of a row are independent, while the
# rows share their numbers. So one learns 256 numbers for this layer and not 65,536, and data that
# say much about 256 numbers pull them off their prior.
#
# `AutoWalshHadamard` puts this in the place of weight matrices. By default it takes those inside of
# a network. Here the layers of input and output are wide as well, so we name all three. The biases
# keep their mean-field Gaussians. `NGVB` trains the Gaussians, and Adam the diagonals.


# %%
def walsh_hadamard(model):
    sites = ["0.weight", "2.weight", "4.weight"]
    start = {"init_loc_fn": model.init_to_module, "init_scale": 0.1}
    guide = ngvi.AutoWalshHadamard(model, sites, **start)
    return guide, ngvi.NGVB(guide, others=pyro.optim.Adam({"lr": 0.03}))


second = over_splits({"Walsh-Hadamard": walsh_hadamard})
counts = {name: sum(p.numel() for p in guide.parameters()) for name, guide in fits.items()}
print(f"parameters: mean field {counts['NGVB, wide start']:,},", end=" ")
print(f"Walsh-Hadamard {counts['Walsh-Hadamard']:,}")
second.round(digits)

# %% [markdown]
# The loss falls, and the noise stays near three quarters. The predictions are somewhat behind the
# line and move by a few hundredths of a nat, but they do not slide to those of one Gaussian. The
# losses of the two tables are not to be compared: here the KL term is that of $g$, since $W$, an
# image of fewer numbers, has no density. Predictions are. Where are the weights of the middle
# matrix now?

# %% tags=["hide-input"]
sd = (2 / 256) ** 0.5
matrices = {
    "mean field, wide start": fits["NGVB, wide start"].median()["2.weight"],
    "Walsh-Hadamard": fits["Walsh-Hadamard"].site_moments("2.weight")[0],
}
figure, axis = plt.subplots(figsize=(6, 3.2), layout="constrained")
for (name, mean), colour in zip(matrices.items(), ("0.5", "C0"), strict=True):
    bins = np.linspace(-3, 3, 121)
    where = (mean / sd).flatten().detach().numpy().clip(-3, 3)
    axis.hist(
        where, bins=bins, density=True, histtype="stepfilled", color=colour, alpha=0.6, label=name
    )
axis.set(xlabel="posterior mean of a weight [sd of its prior]", ylabel="density", yscale="log")
axis.legend()
spread = {name: float((mean / sd).std()) for name, mean in matrices.items()}
print({name: round(value, 3) for name, value in spread.items()}, "sd of the posterior means")

# %% [markdown]
# The means of the mean-field weights are all near zero, that of the prior. Many of the Walsh-Hadamard
# weights have moved, some by more than a prior sd; the last bars hold all beyond three. The line
# above the picture has the spread of both.
#
# ## Width by width
#
# Is it the width? We vary it, on the same three splits. Both guides start alike, at sds of 0.1, and
# take 100 steps each. An ordinary network of width 256 is added, stopped by a tenth of its data.


# %% tags=["hide-input"]
def ordinary(x, y, x_test, y_test, width=256):
    """An ordinary network by AdamW, stopped where its error on 30 held-out patients was least."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(10, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1)
    )
    optim = torch.optim.AdamW(net.parameters(), 1e-3)
    best = (float("inf"), None)
    for _ in range(60):
        optim.zero_grad()
        (net(x[30:]).squeeze(-1) - y[30:]).square().mean().backward()
        optim.step()
        with torch.no_grad():
            error = (net(x[:30]).squeeze(-1) - y[:30]).square().mean().item()
            if error < best[0]:
                best = error, net(x_test).squeeze(-1)
    fn = dist.Normal(best[1], best[0] ** 0.5)
    return float((best[1] - y_test).square().mean().sqrt()), float(fn.log_prob(y_test).mean())


rows = []
for seed, data in enumerate(splits):
    rows.append(("one Gaussian", 0, seed, *of_constant(data[1], data[3])))
    rows.append(("ridge", 0, seed, *of_ridge(*data)))
    rows.append(("ordinary network", 256, seed, *ordinary(*data)))
    for name, make_guide in (("mean field", mean_field), ("Walsh-Hadamard", walsh_hadamard)):
        for width in (16, 64, 256):
            _, [row] = train(make_guide, width, (100,), data, seed)
            rows.append((name, width, seed, row[3], row[4]))
widths = pd.DataFrame(rows, columns=["guide", "width", "split", "RMSE", "log density"])

figure, axis = plt.subplots(figsize=(6, 3.6), layout="constrained")
for name, mark, colour in (("mean field", "s", "0.5"), ("Walsh-Hadamard", "o", "C0")):
    own = widths[widths["guide"] == name]
    axis.plot(own["width"], own["log density"], mark, color=colour, alpha=0.4)
    middle = own.groupby("width")["log density"].mean()
    axis.plot(middle.index, middle, color=colour, label=name)
for name, style in (("ridge", "k--"), ("one Gaussian", "k:")):
    level = widths.loc[widths["guide"] == name, "log density"].mean()
    axis.plot([16, 256], [level, level], style, linewidth=0.9, label=name)
axis.set(xscale="log", xlabel="width of the hidden layers", xticks=[16, 64, 256])
axis.set(xticklabels=[16, 64, 256], ylabel="log density of new patients [nats]")
axis.minorticks_off()
_ = axis.legend(fontsize="small")

# %% [markdown]
# Points are splits, lines their means. The mean-field guide gets worse with every factor of four in
# the width, nearly down to one Gaussian for all patients. The other loses a few hundredths of a nat.
# At width 16 there is little to repair.

# %%
by_width = widths.groupby(["guide", "width"], sort=False)[["RMSE", "log density"]]
by_width.agg(["mean", "min", "max"]).round(3)

# %% [markdown]
# The table has the ranges. The ridge regression is still as good as any: a Walsh-Hadamard network
# of any width is not better than a line on these patients, and it is not meant to be. What it shows
# is that width need not hurt. For regressions on which
# networks pay see [the paper's experiments, run again](../benchmarks/whvi_paper.md): eight data sets
# and longer runs.

# %% tags=["remove-cell"]
# what the text says of these numbers
narrow = first.loc["NGVB, narrow start"]
assert narrow["log density"].iloc[0] > narrow["log density"].iloc[-1]
assert narrow["loss"].iloc[0] > narrow["loss"].iloc[-1]
wide = first.loc["NGVB, wide start"]
assert second["log density"].iloc[-1] > wide["log density"].iloc[-1] + 0.1
assert counts["Walsh-Hadamard"] < counts["NGVB, wide start"] / 5
assert spread["Walsh-Hadamard"] > 3 * spread["mean field, wide start"]
middle = widths.groupby(["guide", "width"])["log density"].mean()
assert middle["mean field", 16] > middle["mean field", 256] + 0.1
assert middle["Walsh-Hadamard", 256] > middle["mean field", 256] + 0.1
assert middle["ridge", 0] > middle["Walsh-Hadamard"].max() - 0.02

# %% [markdown]
# ## Matrices that are never formed
#
# `AutoWalshHadamard` works with any model and makes every draw of $W$ in full. A layer
# `ngvi.nn.WalshHadamardLinear` takes the product $W x$ by two fast transforms, $O(D \log D)$, and
# $W$ never exists. Parameters of one layer, with the means and sds of a mean-field guide:

# %%
rows = []
for width in (256, 1024, 4096):
    layer = ngvi.nn.WalshHadamardLinear(width, width)
    dense = 2 * (width * width + width)
    few = 2 * (layer.matrix.num_g + width) + sum(p.numel() for p in layer.parameters())
    rows.append((width, f"{dense:,}", f"{few:,}"))
pd.DataFrame(rows, columns=["width", "dense layer", "Walsh-Hadamard layer"]).set_index("width")

# %% [markdown]
# ## When not to use it
#
# - **It does not approximate your posterior.** $W$ has no density, so the bound is that of a model
#   in which $g$ has the prior. {class}`pyro_ngvi.AutoProperWalshHadamard` adds white noise and
#   bounds the evidence of your model; it is often loose.
# - **The diagonals are point estimates**, fitted without a prior. No interval includes their
#   uncertainty.
# - **Small layers.** For a few hundred weights {class}`pyro_ngvi.AutoMatrixNormal` or
#   {class}`pyro_ngvi.AutoFullRankNormal` keep the model as it is.
# - **Other ways out.** Stopping early, a tempered KL term and ensembles are others, and are not
#   compared here.
#
# **Next** {doc}`/howto/networks`, and {doc}`/ideas/walsh_hadamard` for the equations.
#
# ## References
#
# - Coker, B., Bruinsma, W., Burt, D., Pan, W. and Doshi-Velez, F. (2022). Wide mean-field Bayesian
#   neural networks ignore the data. *AISTATS*.
# - Rossi, S., Marmin, S. and Filippone, M. (2020). Walsh-Hadamard variational inference for
#   Bayesian deep learning. *NeurIPS*.
# - Efron, B., Hastie, T., Johnstone, I. and Tibshirani, R. (2004). Least angle regression. *Annals
#   of Statistics* 32, 407–499. The source of the data.

# %% tags=["hide-input"]
print("pyro_ngvi", ngvi.__version__, "| torch", torch.__version__, "| pyro", pyro.__version__)
