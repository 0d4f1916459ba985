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
# # A wide Bayesian network: mean-field collapses to the prior, Walsh-Hadamard does not
#
# Give every weight of a wide network a Gaussian of its own, fit it, and the network may learn nothing:
# the weights stay at their prior and the data are called noise. For odd activations such as tanh, and
# Gaussian noise, Coker, Bruinsma, Burt, Pan & Doshi-Velez (2022, "Wide mean-field Bayesian neural
# networks ignore the data") prove that the best mean-field guide does this as the width grows.
#
# Rossi, Marmin & Filippone (2020, "Walsh-Hadamard variational inference for Bayesian deep learning")
# make the D x D weights of a layer from D Gaussian numbers instead. We look at what that does to the
# weights, fit one network both ways, and then go to layers whose weights are never formed. The
# notebook takes about two minutes on one core.

# %%
import math
import time

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI, Predictive
from pyro.infer.autoguide import init_to_sample
from pyro.nn import PyroModule, PyroParam, PyroSample
from torch import nn
from torch.distributions import constraints

import pyro_ngvi as ngvi
from pyro_ngvi.guides.reparam import WalshHadamardTransform
from pyro_ngvi.linalg.walsh_hadamard_matrix import WalshHadamardMatrix

torch.set_num_threads(1)  # so that seconds below are those of one core

# %% [markdown]
# ## D numbers for D x D weights
#
# W = scale sqrt(D) S1 H diag(g) H S2: the Gaussian vector g has D entries, H is the Hadamard matrix
# with entries +-1/sqrt(D), and S1 and S2 are diagonals, which start as random signs. Since H has a
# fast transform, W x costs O(D log D). Entry (i, j) of W is the number h[i xor j] of h = H g, up to
# the signs of its row and column, so each row of W holds all of h in another order.
#
# Here is an 8 x 8 matrix whose g has a diagonal covariance, once with equal sds and once with sds from
# 0.1 to 2. The correlation of all 64 weights is exact on the left and in the middle; on the right it
# comes from draws of g that are made into W.

# %%
pyro.set_rng_seed(0)
matrix = WalshHadamardMatrix(8, 8)
sds = torch.logspace(-1.0, math.log10(2.0), 8)
left, right = matrix.signs(seed=0, like=sds)  # the diagonals S1 and S2
to_W = WalshHadamardTransform(matrix, torch.zeros(8, 8), torch.ones(8, 8), lambda: (left, right))

number = 20_000
draws = to_W(sds * torch.randn(number, 8)).flatten(1)
exact = matrix.covariance(torch.diag(sds**2), left, right)
drawn = draws.mT.cov()


def correlation(covariance):
    sd = covariance.diagonal().sqrt()
    return covariance / (sd * sd[:, None])


figure, axes = plt.subplots(1, 3, figsize=(12, 4.2), layout="constrained")
panels = {
    "equal sds": matrix.covariance(torch.eye(8), left, right),
    "sds from 0.1 to 2": exact,
    f"the same, {number:,} draws": drawn,
}
for axis, (title, covariance) in zip(axes, panels.items(), strict=True):
    image = axis.imshow(correlation(covariance).numpy(), cmap="RdBu", vmin=-1, vmax=1)
    axis.set(title=title, xticks=range(0, 64, 8), yticks=range(0, 64, 8))
    axis.set(xlabel="weight", ylabel="weight")
_ = figure.colorbar(image, ax=axes, label="correlation of two weights (row by row)")

# %%
variances = exact.diagonal()
standard_error = ((variances * variances[:, None] + exact**2) / number).sqrt()
gap = ((drawn - exact) / standard_error).abs().max().item()
print(f"largest difference: {gap:.1f} standard errors")
assert gap < 5.0
# what the text says of these numbers
assert torch.allclose(variances, variances.mean().expand(64), rtol=1e-4)

# %% [markdown]
# With equal sds each weight is fully correlated, up to its sign, with the seven others of its class
# i xor j, one in each row, and with no other: a row of the picture has eight coloured cells. With
# unequal sds the classes are correlated among themselves as well, and the entries of a class still
# move as one. A mean-field guide has only the diagonal of this picture.
#
# The variances of the weights are all equal, whatever the sds of g.
#
# ## One network, two guides
#
# Points of a curve in two clumps, with noise of sd 0.1, and a network 1-128-128-1 with tanh.
# The prior keeps the scale of each layer's output the same at any width.


# %%
def truth(x):
    return (torch.sin(2 * x) + 0.3 * x).squeeze(-1)


def clumps():
    return torch.cat([2 * torch.rand(150) - 2.5, 1.5 * torch.rand(150) + 1])[:, None]


pyro.set_rng_seed(0)
x, x_test = clumps(), clumps()
y, y_test = (truth(at) + 0.1 * torch.randn(len(at)) for at in (x, x_test))
grid = torch.linspace(-3.5, 3.5, 141)[:, None]


def prior(name, weight):
    sd = (
        2.0
        if name.startswith("0.")
        else (2 / weight.shape[-1]) ** 0.5
        if weight.dim() == 2
        else 1.0
    )
    return dist.Normal(weight.new_zeros(()), weight.new_tensor(sd))


def make_model():
    layers = nn.Linear(1, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 1)
    return ngvi.nn.bayesianize(nn.Sequential(*layers), "normal", num_data=len(x), prior=prior)


# %% [markdown]
# `AutoWalshHadamard` by default takes the matrices inside of the network, here the 128 x 128 one: the
# input and output layers and the biases have a mean-field guide as before. With `g="full_rank"` q(g)
# has a full covariance, which for 128 numbers is affordable. `NGVB` trains the Gaussians, and Adam
# the diagonals S1 and S2. Mean-field runs with `NGVB` and with Adam, at two rates and two starts. Every
# run gets the same processor time; we look once on the way and once at the end.


# %%
def mean_field(model, rate, **start):
    guide = ngvi.AutoMeanFieldNormal(model, **start)
    return guide, pyro.optim.Adam({"lr": rate}) if rate else ngvi.NGVB(guide)


def walsh_hadamard(model, g, **start):
    guide = ngvi.AutoWalshHadamard(model, g=g, **start)
    return guide, ngvi.NGVB(guide, others=pyro.optim.Adam({"lr": 0.01}))


methods = {
    "mean-field, NGVB": (mean_field, None, 0.1),
    "mean-field, Adam 0.01": (mean_field, 0.01, 0.1),
    "mean-field, Adam 0.01, narrow start": (mean_field, 0.01, 0.01),
    "mean-field, Adam 0.003, narrow start": (mean_field, 0.003, 0.01),
    "Walsh-Hadamard": (walsh_hadamard, "mean_field", 0.1),
    "Walsh-Hadamard, full q(g)": (walsh_hadamard, "full_rank", 0.1),
}
LOOKS = (1.5, 6.0)  # seconds of processor time
fits, rows = {}, []
for name, (method, option, scale) in methods.items():
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    model = make_model()
    guide, optim = method(model, option, init_loc_fn=model.init_to_module, init_scale=scale)
    svi = SVI(model, guide, optim, ngvi.BatchedELBO(4))
    used, losses = 0.0, []
    for look in LOOKS:
        began = time.process_time() - used
        while used < look:
            losses.append(svi.step(x, y))
            used = time.process_time() - began
        seen = ngvi.nn.predict(model, guide, x_test, y_test, num_samples=400, seed=1)
        rmse = (seen.mean - truth(x_test)).square().mean().sqrt().item()
        density = seen.log_density.mean().item()
        noise = guide.median()["noise"].item()
        loss = np.median(losses[-20:])
        rows.append((name, look, len(losses), loss, rmse, density, noise))
    fits[name] = model, guide

# %% [markdown]
# RMSE is that of the predictive mean to the true curve, and the log density that of new points of the
# same clumps, in nats for each. The loss is the median of the last twenty steps.

# %%
columns = ["guide", "seconds", "steps", "loss", "RMSE", "log density", "noise"]
table = pd.DataFrame(rows, columns=columns)
digits = {"loss": 0, "RMSE": 3, "log density": 2, "noise": 2}
print(table.round(digits).to_string(index=False))
bell = dist.Normal(y.mean(), y.std())
flat = (y.mean() - truth(x_test)).square().mean().sqrt().item()
best = dist.Normal(truth(x_test), 0.1).log_prob(y_test).mean().item()
print(f"one Gaussian for all y: RMSE {flat:.3f}, log density {bell.log_prob(y_test).mean():.2f}")
print(f"the true curve with its true noise: log density {best:.2f}, noise 0.1")
counts = {name: sum(p.numel() for p in guide.parameters()) for name, (_, guide) in fits.items()}
for name in ("mean-field, NGVB", "Walsh-Hadamard", "Walsh-Hadamard, full q(g)"):
    print(f"{name}: {counts[name]:,} parameters")

# %% [markdown]
# Light: two predictive sds, where points should be. Dark: two sds of the network's output, which is
# what the weights are unsure of.

# %%
figure, axes = plt.subplots(1, 3, figsize=(13, 3.9), sharey=True, layout="constrained")
widths = []
shown = ("mean-field, NGVB", "Walsh-Hadamard", "Walsh-Hadamard, full q(g)")
for axis, name in zip(axes, shown, strict=True):
    model, guide = fits[name]
    seen = ngvi.nn.predict(model, guide, grid, num_samples=400, keep_draws=True, seed=1)
    output = seen.draws.std(0)
    for sd, alpha in ((seen.sd, 0.2), (output, 0.45)):
        low, high = seen.mean - 2 * sd, seen.mean + 2 * sd
        axis.fill_between(grid[:, 0], low, high, color="C0", alpha=alpha, linewidth=0)
    axis.plot(grid[:, 0], seen.mean, color="C0")
    axis.plot(grid[:, 0], truth(grid), "k--", linewidth=0.8)
    axis.plot(x, y, "k.", markersize=2)
    axis.set(title=name, xlabel="x", ylim=(-3, 3))
    at = torch.tensor([(grid[:, 0] - u).abs().argmin() for u in (-1.5, 0.2, 1.75, 3.5)])
    widths += [(name, what, *sd[at].tolist()) for what, sd in (("y", seen.sd), ("output", output))]
places = ["in clump, -1.5", "between, 0.2", "in clump, 1.75", "outside, 3.5"]
print(pd.DataFrame(widths, columns=["guide", "sd of", *places]).round(2).to_string(index=False))
# what the text says of these numbers
last = table.groupby("guide").last()
flat_fits = ["mean-field, NGVB", "mean-field, Adam 0.01"]
assert (last.loc[flat_fits, "RMSE"] > 0.4).all()
narrow = table[table["guide"] == "mean-field, Adam 0.01, narrow start"]
assert narrow["RMSE"].iloc[0] < narrow["RMSE"].iloc[1]
for name in ("Walsh-Hadamard", "Walsh-Hadamard, full q(g)"):
    assert last.loc[name, "RMSE"] < 0.3, name
    assert last.loc[name, "log density"] > last.loc[flat_fits, "log density"].max() + 0.4, name
    assert counts[name] < counts["mean-field, NGVB"], name

# %% [markdown]
# From the wide start mean-field has learnt next to nothing: a nearly flat line, and the rest of y is
# called noise. From the narrow start it follows the curve at first, while its loss is many times that
# of the flat fits. With the larger rate the loss then comes down, and with it the fit is lost; with the
# smaller rate that has not happened yet in the time given. A good mean-field fit of this network is one
# that was stopped early: the low losses are those of collapsed guides. The Walsh-Hadamard guides keep
# the curve while their loss falls, the diagonal one with a small part of the parameters.
#
# But look at the bands. The noise is put well above its true value, so they are much too wide in the
# clumps, and the log density is far from that of the truth. And they are about as wide between the
# clumps and outside as they are at the data: outside, the true curve leaves the band. This guide does
# not know where it knows nothing. And all of this is one data set and one seed.
#
# The loss cannot tell which guide is better. That of `AutoWalshHadamard` bounds the evidence of a
# model in which g has a prior and W is made of g; that of mean-field bounds the evidence of the model
# as written. Compare predictions, as in the table.
#
# `khat` asks how far q is from the posterior of its own model, as a joint distribution of all numbers.
# With hundreds of numbers no guide here gets near the threshold of 0.7:

# %%
for name, (model, guide) in fits.items():
    print(f"{name}: k-hat {ngvi.khat(model, guide, x, y, num_samples=500, seed=1).khat:.1f}")

# %% [markdown]
# ## Weights that are never formed
#
# `AutoWalshHadamard` works with any model, and therefore makes every draw of W in full. In a layer
# `ngvi.nn.WalshHadamardLinear` the product W x is taken by two fast transforms and W does not exist.
# Its latent sites are g and the bias. Any guide goes with it; start it at a draw of the prior
# (`init_to_sample`), since at g = 0 no gradient reaches the layer below.
#
# `local_reparameterization` goes further: every example gets a draw of g of its own, which makes the
# gradient less noisy in a hidden layer, for the price of more random numbers.
#
# Two networks 5-1024-1024-1 for the function of Friedman (1991), which has five inputs:


# %%
def friedman(points, seed):
    u = np.random.RandomState(seed).uniform(size=(points, 5))
    y = 10 * np.sin(np.pi * u[:, 0] * u[:, 1]) + 20 * (u[:, 2] - 0.5) ** 2
    y = y + 10 * u[:, 3] + 5 * u[:, 4]
    x = (u - 0.5) * 12**0.5
    return torch.tensor(x, dtype=torch.float32), torch.tensor((y - 14.4) / 4.9, dtype=torch.float32)


NUM_DATA = 4000
x, y = friedman(NUM_DATA, seed=0)
x_test, y_test = friedman(1000, seed=1)


def batches(steps, size=128):
    for _ in range(steps):
        rows = torch.randint(len(x), (size,))
        yield x[rows], y[rows]


class Wide(PyroModule):
    def __init__(self, width):
        super().__init__()
        self.first = ngvi.nn.WalshHadamardLinear(5, width)
        self.second = ngvi.nn.WalshHadamardLinear(width, width)
        self.last = ngvi.nn.WalshHadamardLinear(width, 1, square=True)
        self.noise = PyroParam(torch.tensor(0.3), constraints.positive)

    def forward(self, x, y=None):
        mean = self.last(self.second(self.first(x).tanh()).tanh()).squeeze(-1)
        with pyro.plate("data", NUM_DATA, subsample=torch.arange(len(x))):
            pyro.sample("y", dist.Normal(mean, self.noise), obs=y)
        return mean


def walsh_hadamard_layers():
    model = Wide(1024)
    guide = ngvi.AutoMeanFieldNormal(model, init_loc_fn=init_to_sample, init_scale=0.1)
    guide(x[:2], y[:2])
    optim = ngvi.NGVB(guide, others=pyro.optim.Adam({"lr": 0.01}))
    local = ngvi.nn.local_reparameterization(model, guide)
    svi = SVI(local, guide, optim, ngvi.BatchedELBO(1))
    return svi, guide, model, [*guide.parameters(), *model.parameters()]


def dense_layers():
    layers = nn.Linear(5, 1024), nn.Tanh(), nn.Linear(1024, 1024), nn.Tanh(), nn.Linear(1024, 1)
    fan_in = {"0.weight": 5**-0.5, "2.weight": 1 / 32, "4.weight": 1 / 32, "*": 1.0}
    model = ngvi.nn.bayesianize(nn.Sequential(*layers), "normal", num_data=NUM_DATA, prior=fan_in)
    guide = ngvi.AutoMeanFieldNormal(model, init_loc_fn=model.init_to_module, init_scale=0.1)
    svi = SVI(model, guide, ngvi.NGVB(guide), ngvi.BatchedELBO(1))
    svi.step(x[:2], y[:2])
    return svi, guide, model, list(guide.parameters())


# %%
pyro.clear_param_store()
pyro.set_rng_seed(0)
small, dense = walsh_hadamard_layers(), dense_layers()
seconds = {"small": [], "dense": []}
for _ in range(6):  # by turns, so that a busy machine hits both
    for name, (svi, *_) in (("small", small), ("dense", dense)):
        began = time.process_time()
        for batch in batches(5):
            svi.step(*batch)
        seconds[name].append((time.process_time() - began) / 5)
rows = []
for label, name, made in (("Walsh-Hadamard", "small", small), ("dense mean-field", "dense", dense)):
    count = sum(p.numel() for p in made[-1])
    rows.append((label, count, 1e3 * np.median(seconds[name][1:])))
wide = pd.DataFrame(rows, columns=["layers", "parameters", "ms a step"])
print(wide.round(1).to_string(index=False))
print(f"all weights of the network: {5 * 1024 + 1024 * 1024 + 1024:,}")
assert rows[0][1] < rows[1][1] / 50

# %%
svi, guide, model, _ = small
for batch in batches(300):
    svi.step(*batch)
returned = Predictive(model, guide=guide, num_samples=30, return_sites=("_RETURN",))
mean = returned(x_test)["_RETURN"].mean(0).detach()
wide_rmse = (mean - y_test).square().mean().sqrt().item()
print(f"RMSE on 1,000 new points: {wide_rmse:.2f} sd of y")
assert wide_rmse < 0.3

# %% [markdown]
# A dense layer has two numbers for each weight and touches them all at each step; the Walsh-Hadamard
# network has a few numbers for each hidden unit. How much time this saves depends on the width and the
# batch: a small layer is faster as a matrix (`benchmarks/whvi_paper`).
#
# ## A Gaussian process with few parameters
#
# `RandomFourierFeatures` are R cosines and R sines of random directions; a linear layer with
# independent N(0, 1) weights on top of them is a Gaussian process with a squared-exponential kernel,
# nearly. With `square=True` the 2 R weights of that layer are the entries of a square Walsh-Hadamard
# matrix, so that 2 R weights come from sqrt(2 R) numbers. Same function, same points, and the same
# processor time for each:


# %%
class Process(PyroModule):
    def __init__(self, features, whvi):
        super().__init__()
        self.features = ngvi.nn.RandomFourierFeatures(5, features, seed=0)
        if whvi:
            how = {"bias": False, "weight_sd": 1.0, "square": True}
            self.layer = ngvi.nn.WalshHadamardLinear(2 * features, 1, **how)
        else:
            self.w = PyroSample(dist.Normal(torch.zeros(2 * features), 1.0).to_event(1))
        self.noise = PyroParam(torch.tensor(0.3), constraints.positive)
        self.whvi = whvi

    def forward(self, x, y=None):
        phi = self.features(x)
        mean = self.layer(phi).squeeze(-1) if self.whvi else phi @ self.w
        with pyro.plate("data", NUM_DATA, subsample=torch.arange(len(x))):
            pyro.sample("y", dist.Normal(mean, self.noise), obs=y)
        return mean


rows = []
for label, features, whvi in (
    ("Walsh-Hadamard, 512 features", 512, True),
    ("mean-field, 32 features", 32, False),
    ("mean-field, 512 features", 512, False),
):
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    model = Process(features, whvi)
    guide = ngvi.AutoMeanFieldNormal(model, init_loc_fn=init_to_sample)
    optim = ngvi.NGVB(guide, others=pyro.optim.Adam({"lr": 0.01}))
    svi = SVI(model, guide, optim, ngvi.BatchedELBO(4))
    began, steps = time.process_time(), 0
    for batch in batches(10_000, size=256):
        svi.step(*batch)
        steps += 1
        if time.process_time() - began > 7.0:
            break
    with torch.no_grad():  # the mean is linear in the latent vector: its mean gives the mean
        mean = pyro.condition(model, data=guide.median())(x_test)
    count = sum(p.numel() for module in (guide, model) for p in module.parameters())
    rows.append((label, count, steps, (mean - y_test).square().mean().sqrt().item()))
processes = pd.DataFrame(rows, columns=["weights", "parameters", "steps", "RMSE (sd of y)"])
print(processes.round(3).to_string(index=False))
assert rows[0][3] < rows[1][3]

# %% [markdown]
# With as many parameters the Walsh-Hadamard process affords 512 features, where independent weights
# afford 32, and in the same time it is nearer to the function. It is no longer a Gaussian process
# exactly, since its weights are dependent. This is one run; `benchmarks/whvi_paper` has five functions,
# a sparse Gaussian process, and longer runs.
#
# ## What it does not do
#
# - **It does not approximate your posterior.** W is a linear image of fewer numbers, so it has no
#   density, and the bound is that of the reparameterised model. `AutoProperWalshHadamard`
#   adds white noise to W and bounds the evidence of your model; try both.
# - **S1 and S2 are point estimates.** They are trained without a prior, and nothing in the bands
#   tells how unsure they are.
# - **The bands are not a reason to extrapolate**, as the second figure shows.
# - **It is for wide layers.** For a few hundred weights `AutoMatrixNormal` and `AutoFullRankNormal`
#   keep the model as it is: try them first.
