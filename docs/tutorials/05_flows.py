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
# # Posteriors that are not Gaussian: a banana and a funnel by normalizing flows
#
# The best Gaussian can be far from a curved posterior. A normalizing flow bends it. Flows are usually
# trained by Adam. Here natural gradients train them: at every step `SPRING` regresses log q - log p on
# the scores of a hundred draws. We then check the answer, see where importance weights help and where
# they do not, run HMC in the coordinates of the flow (NeuTra), and compare with Adam at equal time.
# About a minute and a half on one core.

# %%
import time
import warnings

import matplotlib.pyplot as plt
import numpy as np
import pyro
import pyro.distributions as dist
import torch
from pyro.infer import MCMC, NUTS, SVI, Predictive
from pyro.ops.stats import effective_sample_size

import pyro_ngvi as ngvi

torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)
pyro.set_rng_seed(0)


# %% [markdown]
# ## Two targets with known answers
#
# Both are proper densities without data, so log Z = 0 and minus the loss is the gap to it, KL(q || p).


# %%
def banana():
    x = pyro.sample("x", dist.Normal(0.0, 10.0))
    pyro.sample("y", dist.Normal(0.03 * (x.square() - 100.0), 1.0))


def funnel():
    v = pyro.sample("v", dist.Normal(0.0, 3.0))
    pyro.sample("x", dist.Normal(torch.zeros(9), (v / 2).exp()).to_event(1))


def kl(model, guide):
    """KL(q || p) in nats, from 10,000 draws."""
    return float(ngvi.BatchedELBO(10_000).loss(model, guide))


# %% [markdown]
# `fit` takes `SPRING` for a flow by itself. These targets let a flow come far closer than the usual
# 0.05 nat, so we ask it to go on.

# %%
fits = {}
for name, model in (("banana", banana), ("funnel", funnel)):
    gaussian = ngvi.fit(model, guide="AutoFullRankNormal", max_steps=500, seed=0)
    flow = ngvi.fit(model, guide="AutoCouplingFlow", tol=0.001, max_steps=600, seed=0)
    fits[name] = model, gaussian, flow
    for kind, fit in (("Gaussian", gaussian), ("flow", flow)):
        print(f"{name}, {kind}: {kl(model, fit.guide):.4f} nats,", end=" ")
        print(f"{fit.why_stopped} after {fit.steps} steps, {fit.seconds:.1f} s")
assert kl(banana, fits["banana"][2].guide) < 0.01 and kl(funnel, flow.guide) < 0.1

# %% [markdown]
# "Stalled" says that further steps gain nothing that can be told from noise: on the funnel the
# gradients of a Gaussian are very noisy. The flow starts at a Gaussian that it fits first, so it has
# only to learn what is left.


# %%
def first_two(found):
    names = ["x", "y"] if "y" in found else ["x", "v"]
    return names, [found[name].reshape(2000, -1)[:, 0].numpy() for name in names]


figure, axes = plt.subplots(2, 4, figsize=(14, 7), layout="constrained")
for row, (name, (model, gaussian, flow)) in zip(axes, fits.items(), strict=True):
    row[0].plot(np.clip(flow.losses, 1e-3, None), lw=0.7)
    row[0].set(
        yscale="log", title=f"{name}: training the flow", xlabel="step", ylabel="loss (nats)"
    )
    names, exact = first_two(Predictive(model, num_samples=2000)())
    limits = [np.quantile(e, [0.003, 0.997]) for e in exact]
    panels = {"exact": exact}
    panels |= {
        "Gaussian": first_two(gaussian.sample(2000))[1],
        "flow": first_two(flow.sample(2000))[1],
    }
    for axis, (title, points) in zip(row[1:], panels.items(), strict=True):
        axis.plot(*points, ".", ms=2, alpha=0.5)
        axis.set(title=title, xlim=limits[0], ylim=limits[1], xlabel=names[0], ylabel=names[1])
plt.show()

# %% [markdown]
# The Gaussian covers a part of each target; the flow has the shape of both.
#
# ## Is it right?
#
# Importance weights p / q tell. k-hat, the shape of their tail, answers one question: may we resample
# by them? Above 0.7 the answer is no, however many draws the bulk of the weights seems to be worth.
# It is an estimate, so we take it from five sets of draws.

# %%
khats = {}
for name, (model, gaussian, flow) in fits.items():
    for kind, fit in (("Gaussian", gaussian), ("flow", flow)):
        found = [ngvi.khat(model, fit.guide, num_samples=4000, seed=seed) for seed in range(5)]
        khats[name, kind] = np.array([f.khat for f in found])
        print(f"{name}, {kind}: k-hat", " ".join(f"{k:.2f}" for k in khats[name, kind]))
        print(f"    the first: {found[0].verdict}")
assert np.median(khats["funnel", "flow"]) > 0.7  # else the text below has to change

# %% [markdown]
# The funnel shows that a small KL divergence does not exclude a bad tail: its flow is a small fraction
# of a nat away, and yet k-hat is above 0.7 in most sets. Where v is far out, the flow does not follow
# all the way. (On the banana the flow is so near that all weights are almost equal, and the shape of
# their tail means little.)
#
# `to_arviz(resample="psis")` draws again by the smoothed weights. Does that correct the funnel?

# %%
flow = fits["funnel"][2]
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for seed in range(5):
        found = []
        for resample in (None, "psis"):
            data = flow.to_arviz(num_samples=4000, seed=seed, resample=resample)
            v = data["posterior"]["v"].values
            found.append(f"sd {v.std():.2f}, beyond 9 {(np.abs(v) > 9).mean():.2%}")
        print("v from the flow: " + found[0] + "; resampled: " + found[1])
print("exact: sd 3, beyond 9 0.27%")
told = [str(w.message) for w in caught if "resample" in str(w.message)]
print(f"warned in {len(told)} of 5: {told[0] if told else ''}")

# %% [markdown]
# The sd mostly comes nearer to the truth, as we can tell only because we know it. The far tail is a
# lottery: hardly any draw of the flow lies beyond three sds, and weights either find none there or
# repeat the one that they find. So the warning is right not to promise anything. What the flow does
# not reach must come from another method.

# %% [markdown]
# ## HMC in the coordinates of the flow
#
# NUTS on the funnel itself hardly enters the neck: where v is small, the scale of x is a small fraction
# of what it is elsewhere, and one step size does not fit both. `neutra` rewrites the model in terms of
# the noise that the flow starts from. There the posterior is nearly N(0, I), and NUTS can reach what
# the flow missed.

# %%
neutra = ngvi.neutra(funnel, flow.guide)


def run_nuts(model):
    pyro.set_rng_seed(1)
    chain = MCMC(NUTS(model), num_samples=400, warmup_steps=150, disable_progbar=True)
    start = time.process_time()
    chain.run()
    return chain, time.process_time() - start


chain, seconds = run_nuts(neutra)
by_neutra = neutra.transform_sample(chain.get_samples())["v"].reshape(-1)
plain_chain, plain_seconds = run_nuts(funnel)
by_nuts = plain_chain.get_samples()["v"].reshape(-1)
for name, v, s in (("NUTS", by_nuts, plain_seconds), ("NUTS by NeuTra", by_neutra, seconds)):
    print(f"{name}: mean of v {v.mean():+.2f}, sd {v.std():.2f}, smallest {v.min():+.1f},", end=" ")
    print(f"{effective_sample_size(v[None]).item():.0f} effective draws, {s:.0f} s")

# %%
figure, axis = plt.subplots(figsize=(9, 3), layout="constrained")
axis.plot(by_nuts, lw=0.8, label="NUTS")
axis.plot(by_neutra, lw=0.8, label="NUTS by NeuTra")
axis.axhline(-6.0, color="0.7", lw=0.8)
axis.axhline(6.0, color="0.7", lw=0.8, label="two sds")
axis.set(xlabel="draw", ylabel="v")
axis.legend()
plt.show()
assert by_nuts.min() > -6.0 > by_neutra.min() and abs(float(by_neutra.std()) - 3.0) < 1.0

# %% [markdown]
# Plain NUTS creeps along and never comes to the lower line; through the flow it jumps from end to end.
#
# ## The same guide by Adam
#
# The banana again: `SPRING` beside Adam at three rates with sixteen draws a step, three seconds of
# processor time for each run, three seeds. Both start at the Gaussian, whose fit is in the time.

# %%
SECONDS = 3.0
flows = {
    "SPRING": lambda guide: (ngvi.optim.SPRING(guide), ngvi.BatchedELBO(128, curvature="scores"))
}
for rate in (0.001, 0.003, 0.01):
    flows[f"Adam {rate}"] = lambda guide, rate=rate: (
        pyro.optim.Adam({"lr": rate}),
        ngvi.BatchedELBO(16),
    )
gaps = {}
for name, make in flows.items():
    gaps[name], number = [], []
    for seed in range(3):
        pyro.clear_param_store()
        pyro.set_rng_seed(seed)
        guide = ngvi.AutoCouplingFlow(banana)
        svi = SVI(banana, guide, *make(guide))
        start, steps = time.process_time(), 0
        while time.process_time() - start < SECONDS:
            svi.step()
            steps += 1
        gaps[name].append(kl(banana, guide))
        number.append(steps)
    median = np.median(number)
    print(f"{name}: " + ", ".join(f"{g:.4f}" for g in gaps[name]) + f" nats, {median:.0f} steps")
assert np.median(gaps["SPRING"]) < min(np.median(g) for n, g in gaps.items() if n != "SPRING")

# %% [markdown]
# `SPRING` ends nearer than Adam at any of the rates, on one easy target. `benchmarks/flows` has more of
# them, and more time: with fifty latent variables Adam is ahead.
#
# ## When not to use a flow
#
# - A posterior that is close to Gaussian: `AutoFullRankNormal` is enough there, and cheaper. Fit it
#   first and read its verdict, or let `fit(..., guide="auto")` do so.
# - Hundreds of latent variables: a score is as long as all parameters of the flow together.
# - Several separate modes: every method that minimises KL(q || p) may stay in one of them, and `khat`
#   does not see the modes that the guide never visits.
