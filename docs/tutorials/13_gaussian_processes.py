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
# # Even or odd? A Gaussian process reads digits
#
# Is a handwritten digit even or odd? Five shapes on one side, five on the other: no straight line
# separates them. A Gaussian process puts a smooth random function of the 64 pixels in the place of
# the line. This page fits one by sweeps, learns its kernel on the way, finds the digits that it
# learns from, and replaces 1,397 function values by 200 inducing points.
#
# **You will**
#
# - write a Gaussian-process classifier as a Pyro model and fit it with `AutoSites`, without draws;
# - learn the parameters of the kernel by the same ELBO, and look at its ridge;
# - predict at new inputs, and compare with a tuned logistic regression on two splits;
# - use inducing points and minibatches to take in more data in the same time.
#
# **Contents** [The digits](#the-digits) · [The model](#a-random-function-of-64-pixels) ·
# [Sites](#which-digits-does-it-learn-from) · [The kernel](#which-kernel) · [Inducing
# points](#more-data-in-the-same-time) · [Limits](#when-not-to-use-it)
#
# *Level*: you know what a kernel is; [the tutorial on sites](06_sites.ipynb) explains these. *Tags*:
# Gaussian process, classification, hyperparameters, inducing points, minibatches. *Time*: ten minutes
# to read, about forty seconds to run on one core.

# %% tags=["remove-cell"]
# ruff: noqa: B018, E402
import warnings

import torch

warnings.filterwarnings("ignore", "\\s*ArviZ is undergoing", FutureWarning)
warnings.filterwarnings("ignore", "IProgress not found")
warnings.filterwarnings("ignore", category=FutureWarning, module="sklearn")
torch.set_num_threads(1)

# %% tags=["hide-input"]
import time

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pyro
import pyro.distributions as dist
import torch
from pyro.contrib.gp.kernels import RBF
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegressionCV

import pyro_ngvi as ngvi
from pyro_ngvi.distributions import GaussianProcess

torch.set_default_dtype(torch.float64)
plt.rcParams["figure.dpi"] = 90

# %% [markdown]
# ## The digits
#
# Scikit-learn comes with 1,797 digits of 8 x 8 pixels, the test part of a collection by Alpaydin
# and Kaynak (1998). In a random order we keep 400 for a test, and first learn from 400 others.


# %%
def split(seed):
    """Pixels in [0, 1] and labels, 1 for odd, of the data to learn from and of the test."""
    digits = load_digits()
    order = np.random.RandomState(seed).permutation(len(digits.data))
    X = torch.tensor(digits.data[order] / 16)
    odd = torch.tensor(digits.target[order] % 2).double()
    return X[400:], odd[400:], X[:400], odd[:400]


X_all, y_all, X_test, y_test = split(seed=0)
X, y = X_all[:400], y_all[:400]
print(f"{len(X_all):,} digits, {len(X)} of them to begin with; {y.mean():.0%} of these are odd")


# %% tags=["hide-input"]
def show(axes, images, titles):
    for axis, image, title in zip(axes.flat, images, titles, strict=True):
        axis.imshow(image.reshape(8, 8), cmap="Greys", vmin=0, vmax=1)
        axis.set_title(title, fontsize="small")
        axis.axis("off")


figure, axes = plt.subplots(1, 10, figsize=(8, 1.1), layout="constrained")
show(axes, X[:10], ["odd" if odd else "even" for odd in y[:10]])

# %% [markdown]
# Ten of the images with their labels. A person needs the digit to name its parity; the models below
# see nothing but the label.
#
# For comparison, a logistic regression whose penalty is chosen by cross-validation:


# %%
def scores(chance, y):
    """Share of right answers, and mean log density of the labels in nats."""
    right = ((chance > 0.5) == (y > 0.5)).double().mean()
    return float(right), float(torch.where(y > 0.5, chance, 1 - chance).log().mean())


def logistic(X, y):
    how = {"scoring": "neg_log_loss", "max_iter": 2000}
    return LogisticRegressionCV(Cs=np.logspace(-2, 2, 9), **how).fit(X, y)


line = torch.tensor(logistic(X, y).predict_proba(X_test)[:, 1])
print("test: accuracy {:.3f}, log density {:.3f} nats".format(*scores(line, y_test)))

# %% [markdown]
# ## A random function of 64 pixels
#
# $$f \sim \mathrm{GP}(0, k), \qquad
# k(x, x') = s^2 \exp\!\big(-\tfrac12 \|x - x'\|^2 / \ell^2\big),$$
# $$y_n \sim \mathrm{Bernoulli}\big(\mathrm{logit}^{-1} f(x_n)\big).$$
#
# `GaussianProcess` takes the kernels of Pyro. It is a site of its own, outside of the plate of the
# data. The argument `index` is for the minibatches of the last section.


# %%
def make_model():
    pyro.clear_param_store()
    kernel = RBF(64, variance=torch.tensor(10.0), lengthscale=torch.tensor(3.0))

    def model(X, y=None, index=None):
        pyro.module("kernel", kernel)
        data = pyro.plate("data", len(X), subsample=index)
        f = pyro.sample("f", GaussianProcess(kernel, X[data.indices], jitter=1e-4))
        with data:
            y = None if y is None else y[data.indices]
            pyro.sample("y", dist.Bernoulli(logits=f), obs=y)

    return model, kernel


def cvi(guide):
    return ngvi.CVI(guide, others=pyro.optim.Adam({"lr": 0.1, "betas": (0.8, 0.9)}))


model, kernel = make_model()
pyro.set_rng_seed(0)
fit = ngvi.fit(model, X, y, guide="AutoSites", optim=cvi, max_steps=30, progress=False)
fit

# %% [markdown]
# Each step is one sweep over all sites, by `CVI`, and one step in the kernel's parameters, by the
# Adam in `others=`. The sites make $q(f)$ follow a new kernel at once, so the two hardly
# disturb each other. Adam gets a short memory, as the first gradients are large and say little.
#
# The run ended at the limit of 30 steps; the kernel still moves a little. Of the joint posterior of
# all 400 function values importance weights tell nothing, as is common with hundreds of latent
# variables: their k-hat is .94. The verdict asks short chains, which move each value little. (On a
# machine where the weights take long it is that of k-hat alone: not usable.) What we want of this
# posterior are predictions, one input at a time. Those can be checked, and are below.
# `guide.predict` has mean and variance of $f$ at any inputs, and one integral turns them into a
# probability:

# %%
nodes, weights = map(torch.tensor, np.polynomial.hermite_e.hermegauss(64))
weights = weights / weights.sum()


def chance(guide, X):
    """P(odd) at new inputs, by quadrature over f."""
    mean, variance = guide.predict(X)["f"]
    return torch.sigmoid(mean[:, None] + variance.sqrt()[:, None] * nodes) @ weights


process = chance(fit.guide, X_test)
loo = fit.guide.loo()
print("test: accuracy {:.3f}, log density {:.3f} nats".format(*scores(process, y_test)))
print(f"leave-one-out on the data of the fit: {loo.elpd / loo.count:.3f} nats")

# %% [markdown]
# The function beats the line by far in both scores. The second line needs no test data: each digit
# is predicted from the 399 others, by dividing out its site. It comes close to the score of the
# test.
#
# ## Which digits does it learn from?
#
# The precision of a site tells how much its digit fixes $f$ at that place.

# %% tags=["hide-input"]
precision = fit.guide.sites()["y"].precision[:, 0, 0]
order = precision.argsort(descending=True)
chosen = torch.cat([order[:8], order[-8:]])
figure, axes = plt.subplots(2, 8, figsize=(8, 2.6), layout="constrained")
show(axes, X[chosen], [f"{precision[n]:.3f}" for n in chosen])
_ = figure.supylabel("flattest     most precise", fontsize="small")

# %% [markdown]
# Above each image stands the precision of its site. The upper row are digits of an unusual hand,
# which might be another one; the lower row are textbook digits, about which the function was sure
# already.

# %%
half = int((precision.sort(descending=True).values.cumsum(0) < precision.sum() / 2).sum())
print(f"{half} of {len(X)} digits have half of the precision of all sites")

# %% [markdown]
# As in a support-vector machine, a minority of the data carries the answer.
#
# ## Which kernel?
#
# The ELBO is a lower bound of the log evidence, which is what one would maximise in $s^2$ and
# $\ell$. Here is the bound over a grid, each point after six sweeps with the kernel held, and the
# path of a fit that learns it. To save time both have 100 inducing points, which are explained
# below.

# %% tags=["hide-input"]
sizes, lengths = np.logspace(0.5, 3, 6), np.logspace(0, 1, 6)
surface = np.zeros((len(sizes), len(lengths)))
for i, s in enumerate(sizes):
    for j, length in enumerate(lengths):
        other, held = make_model()
        held.variance, held.lengthscale = torch.tensor(s), torch.tensor(length)
        held.requires_grad_(False).eval()
        guide = ngvi.AutoSites(other, inducing=X[:100])
        how = {"guide": guide, "max_steps": 6, "progress": False}
        surface[i, j] = -ngvi.fit(other, X, y, **how).svi.evaluate_loss(X, y)

path = []
other, moving = make_model()
guide = ngvi.AutoSites(other, inducing=X[:100])
ngvi.fit(
    other,
    X,
    y,
    guide=guide,
    optim=cvi,
    max_steps=30,
    progress=False,
    callbacks=[lambda _: path.append((moving.lengthscale.item(), moving.variance.item()))],
)
figure, axis = plt.subplots(figsize=(5.5, 4), layout="constrained")
levels = -np.array([60, 40, 25, 15, 8, 4, 2, 0])
surface = surface - surface.max()
image = axis.contourf(lengths, sizes, surface, levels=levels, cmap="Blues", extend="min")
axis.plot(*np.array(path).T, "C3.-", markersize=4, linewidth=0.8, label="the fit, step by step")
axis.set(xscale="log", yscale="log", xlabel="length-scale $\\ell$ [pixel units]")
axis.set(ylabel="variance of $f$, $s^2$")
axis.legend(loc="upper left")
_ = figure.colorbar(image, label="ELBO, the best of the grid being 0 [nats]")

# %% [markdown]
# The bound has a ridge: longer length-scales want larger variances, and the data hardly tell them
# apart along it. The fit runs onto the ridge and then creeps along. A posterior for $s^2$ and
# $\ell$ would be as long as the ridge; this page has point estimates.
#
# ## More data in the same time
#
# A dense process costs $N^3$ per sweep. With $M$ *inducing points*, $q$ is kept for the values of $f$
# at $M$ inputs, here the first digits of the data, and a sweep costs $N M^2$. The bound is that of
# Titsias (2009), in the form of Adam et al. (2021), and at the same kernel it is never above the
# bound of the dense process. Minibatches become possible too: a step sees some digits and moves
# their sites alone.
#
# We run all of it on two splits. Seconds are processor time, as a multiple of that of the dense
# fit.

# %% tags=["hide-input"]
rows = []
for seed in range(2):
    X_all, y_all, X_test, y_test = split(seed)
    X, y = X_all[:400], y_all[:400]
    for inputs, labels in ((X, y), (X_all, y_all)):
        began = time.process_time()
        at_test = torch.tensor(logistic(inputs, labels).predict_proba(X_test)[:, 1])
        took = time.process_time() - began
        score = scores(at_test, y_test)
        rows.append((seed, "logistic regression", len(inputs), *score, np.nan, took))
    for name, inputs, labels, M, batch, steps in (
        ("dense", X, y, None, None, 30),
        ("100 inducing points", X, y, 100, None, 30),
        ("200 inducing points", X, y, 200, None, 30),
        ("200 inducing points", X_all, y_all, 200, None, 30),
        ("200, minibatches of 200", X_all, y_all, 200, 200, 50),
    ):
        pyro.set_rng_seed(seed)
        model, kernel = make_model()
        began = time.process_time()
        guide = ngvi.AutoSites(model, inducing=None if M is None else inputs[:M].clone())
        how = {"guide": guide, "optim": cvi, "max_steps": steps, "progress": False}
        if batch is not None:
            index = torch.randperm(len(inputs)).split(batch)
            how["data"] = [(inputs, labels, i) for i in index]
        run = ngvi.fit(model, inputs, labels, **how)
        if batch is not None:
            guide.refresh(inputs, labels)
        took = time.process_time() - began
        bound = -run.svi.evaluate_loss(inputs, labels)
        rows.append((seed, name, len(inputs), *scores(chance(guide, X_test), y_test), bound, took))

columns = ["split", "method", "digits", "accuracy", "log density", "ELBO", "seconds"]
results = pd.DataFrame(rows, columns=columns)
dense = results[results["method"] == "dense"].set_index("split")["seconds"]
results["time / dense"] = results["seconds"] / results["split"].map(dense)
grouped = results.groupby(["digits", "method"], sort=False)
table = grouped[["accuracy", "log density", "ELBO", "time / dense"]].mean()
table.insert(
    2, "its range", grouped["log density"].agg(lambda s: f"{s.min():.3f} to {s.max():.3f}")
)
table["ELBO"] = table["ELBO"].map(lambda bound: "" if np.isnan(bound) else f"{bound:.1f}")
table.round({"accuracy": 3, "log density": 3, "time / dense": 2})

# %% [markdown]
# Columns are means over the splits: right answers, log density of the test labels in nats, its
# range over the splits, the ELBO where there is one, and time.
#
# With 400 digits, leaving out 200 of 400 points costs 9 nats of ELBO, leaving out 300 costs 23, and the
# score goes down with it: this function, in 64 dimensions, is not smooth enough to be summed up by 100
# values. But inducing points buy data. 200 points that see all 1,397 digits predict better than the
# dense process on 400, in each split, for about the same time. Minibatches come to about the same
# answer as all data at once; they pay where the data do not fit into memory.
#
# The ELBOs of 400 and of 1,397 digits are not to be compared: they are bounds for different data.

# %% tags=["remove-cell"]
# what the text says of these numbers
of = results.pivot(index="split", columns=["digits", "method"], values="log density")
line, line_all = of[400, "logistic regression"], of[1397, "logistic regression"]
for column in of[400].columns.drop(["logistic regression"]):
    assert (of[400, column] > line + 0.03).all(), column
for column in of[1397].columns.drop("logistic regression"):
    assert (of[1397, column] > of[400, "dense"]).all(), column
ratio = table["time / dense"]
assert ratio[1397, "200 inducing points"] < 2 and ratio[400, "100 inducing points"] < 0.7
assert loo.count == 400 and abs(loo.elpd / 400 - scores(process, split(0)[3])[1]) < 0.05
assert half < 100

# %% [markdown]
# ## When not to use it
#
# - **Joint uncertainty of the kernel.** $s^2$ and $\ell$ are point estimates here.
# - **One dimension, many times.** A Matérn process over time is a chain, at a cost of $O(T)$:
#   {doc}`/howto/time_series`.
# - **Gaussian noise.** Then one sweep is exact, and leave-one-out is too; nothing above changes.
# - **Images.** A network with convolutions knows that pixels have neighbours. This kernel does not.
# - **float32.** An RBF kernel needs a jitter of $10^{-4}$ of its variance and more there.
#
# **Next** [data that arrive, change and leave](14_online.ipynb).
# {doc}`/howto/gaussian_processes` has several processes, means, and trained inducing inputs;
# {doc}`/ideas/sites` the equations.
#
# ## References
#
# - Rasmussen, C. E. and Williams, C. K. I. (2006). *Gaussian Processes for Machine Learning*. MIT
#   Press. Chapter 3 has such a picture of the evidence for two other digits.
# - Titsias, M. (2009). Variational learning of inducing variables in sparse Gaussian processes.
#   *AISTATS*.
# - Adam, V., Chang, P. E., Khan, M. E. and Solin, A. (2021). Dual parameterization of sparse
#   variational Gaussian processes. *NeurIPS*.
# - Khan, M. E. and Lin, W. (2017). Conjugate-computation variational inference. *AISTATS*.
# - Alpaydin, E. and Kaynak, C. (1998). Optical recognition of handwritten digits. UCI Machine
#   Learning Repository. The source of the data.

# %% tags=["hide-input"]
print("pyro_ngvi", ngvi.__version__, "| torch", torch.__version__, "| pyro", pyro.__version__)
