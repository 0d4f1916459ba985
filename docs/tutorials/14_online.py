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
# # Data that arrive, change and leave: a diagnosis kept up to date
#
# A clinic predicts from measurements of a biopsy whether a tumour is malignant. Patients come every
# week. A label turns out to be wrong. A patient withdraws consent. Each time the posterior should
# be the one that a fit to the present data would give, without fitting again from the start.
#
# `AutoSites` keeps a Gaussian factor for each observation, its *site*. So an observation can be
# added, changed or taken out, and two or three sweeps over the sites bring the rest up to date.
#
# **You will**
#
# - add data with `guide.add`, and compare with a fit from the start and with "yesterday's posterior
#   is today's prior";
# - find a wrong label, and correct it with `guide.reset`;
# - take out a patient with `guide.remove`, and measure what is left of them;
# - learn in minibatches that converge to the same posterior.
#
# **Contents** [The stream](#the-stream) · [Arrivals](#patients-arrive) ·
# [Corrections](#a-label-is-corrected) · [Withdrawals](#a-patient-leaves) ·
# [Minibatches](#too-many-for-one-step) · [Limits](#when-not-to-use-it)
#
# *Level*: you know logistic regression; [the tutorial on sites](06_sites.ipynb) explains these. *Tags*:
# online learning, GLM, unlearning, minibatches. *Time*: ten minutes to read, about ten seconds to run
# on one core.

# %% tags=["remove-cell"]
# ruff: noqa: E402
import warnings

import torch

warnings.filterwarnings("ignore", "\\s*ArviZ is undergoing", FutureWarning)
warnings.filterwarnings("ignore", "IProgress not found")
torch.set_num_threads(1)

# %% tags=["hide-input"]
import time

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pyro
import pyro.distributions as dist
import torch
from sklearn.datasets import load_breast_cancer

import pyro_ngvi as ngvi

torch.set_default_dtype(torch.float64)
plt.rcParams["figure.dpi"] = 90

# %% [markdown]
# ## The stream
#
# The breast-cancer data of Wisconsin (Wolberg, Street and Mangasarian 1995) have 569 tumours with
# thirty measurements each. They carry no dates, so a shuffled list stands for the order of arrival:
# 69 at first, then ten groups of fifty. We take logs, and standardise by the first 69 alone: the
# rest is not known yet.

# %%
data = load_breast_cancer()
order = torch.randperm(569, generator=torch.Generator().manual_seed(0))
X = torch.tensor(data.data).log1p()[order]
X = (X - X[:69].mean(0)) / X[:69].std(0)
y = torch.tensor(data.target == 0).double()[order]  # 1: malignant
print(f"{len(X)} tumours, {y.mean():.0%} malignant; of the first 69, {y[:69].mean():.0%}")


def logistic(X, y=None, index=None):
    intercept = pyro.sample("intercept", dist.Normal(0.0, 2.0))
    w = pyro.sample("w", dist.Normal(torch.zeros(X.shape[1]), 1.0).to_event(1))
    with pyro.plate("tumour", len(X), subsample=index) as rows:
        y = None if y is None else y[rows]
        pyro.sample("y", dist.Bernoulli(logits=intercept + X[rows] @ w), obs=y)


def fit_anew(X, y, sweeps=15):
    return ngvi.fit(logistic, X, y, guide="AutoSites", max_steps=sweeps, progress=False)


# %% [markdown]
# ## Patients arrive
#
# `guide.add(50)` makes room for fifty sites, which are zero: $q$ stays as it is. `fit.resume` then
# takes sweeps over all data that are there. We do two.

# %%
n = 69
online = fit_anew(X[:n], y[:n])
online.guide.add(50)
n += 50
online.resume(X[:n], y[:n], max_steps=2, progress=False)
print(online.guide.loo())

# %% [markdown]
# Two rivals. *From the start* fits all data so far anew, with the same two sweeps. *Posterior as
# prior* takes yesterday's Gaussian for the prior of today's data, and lets it converge; it never
# looks at old data again. For Gaussian likelihoods all three would be exact. Here each leaves a gap
# to the best Gaussian for the present data, in nats of the ELBO. Before each group is learnt we
# also ask how well it was predicted.

# %% tags=["hide-input"]
nodes, weights = map(torch.tensor, np.polynomial.hermite_e.hermegauss(64))
weights = weights / weights.sum()


def with_one(X):
    return torch.cat([torch.ones(len(X), 1), X], dim=1)


def average(function, q, X, y):
    """E function(f) of each datum, f its log odds of what it is, by quadrature."""
    Z = with_one(X) * (2 * y - 1)[:, None]
    mean, variance = Z @ q.mean, (Z @ q.covariance_matrix * Z).sum(1)
    return function(mean[:, None] + variance.sqrt()[:, None] * nodes) @ weights


prior = dist.MultivariateNormal(torch.zeros(31), torch.diag(torch.tensor([4.0] + [1.0] * 30)))


def elbo(q, X, y):
    q = dist.MultivariateNormal(q.mean, q.covariance_matrix)
    kl = torch.distributions.kl_divergence(q, prior)
    return float(average(torch.nn.functional.logsigmoid, q, X, y).sum() - kl)


def score(q, X, y):
    """Mean log predictive density, nats a tumour."""
    return float(average(torch.sigmoid, q, X, y).log().mean())


def given(q):
    """The model with another Gaussian for its prior."""

    def model(X, y=None):
        z = pyro.sample("z", dist.MultivariateNormal(q.mean, q.covariance_matrix))
        with pyro.plate("tumour", len(X)):
            pyro.sample("y", dist.Bernoulli(logits=with_one(X) @ z), obs=y)

    return model


n = 69
online = fit_anew(X[:n], y[:n])
chained = online.guide.get_posterior()
gaps, predicted, seconds = {}, [], {"add": 0.0, "converged anew": 0.0}
while n < len(X):
    new = slice(n, n + 50)
    predicted.append((n, score(online.guide.get_posterior(), X[new], y[new])))
    online.guide.add(50)
    n += 50
    began = time.process_time()
    online.resume(X[:n], y[:n], max_steps=2, progress=False)
    seconds["add"] += time.process_time() - began
    small = given(chained)
    how = {"guide": "AutoSites", "max_steps": 15, "progress": False}
    chained = ngvi.fit(small, X[new], y[new], **how).guide.get_posterior()
    began = time.process_time()
    anew = fit_anew(X[:n], y[:n])
    seconds["converged anew"] += time.process_time() - began
    limit = elbo(anew.guide.get_posterior(), X[:n], y[:n])
    short = fit_anew(X[:n], y[:n], sweeps=2).guide.get_posterior()
    for name, q in (
        ("add, two sweeps", online.guide.get_posterior()),
        ("posterior as prior", chained),
        ("from the start, two sweeps", short),
    ):
        gaps.setdefault(name, []).append(limit - elbo(q, X[:n], y[:n]))

figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
sizes = np.arange(119, 570, 50)
for (name, gap), mark in zip(gaps.items(), "os^", strict=True):
    left.plot(sizes, gap, mark + "-", label=name)
left.set(
    yscale="log", ylim=(5e-4, 3e3), xlabel="tumours seen", ylabel="nats below the best Gaussian"
)
left.legend(fontsize="small", loc="upper left")
right.plot(*np.array(predicted).T, "o-")
right.axhline(-np.log(2), color="0.6", linestyle=":", linewidth=0.8, label="a coin, and the prior")
right.set(xlabel="tumours seen", ylabel="mean log density of\nthe next fifty [nats]")
_ = right.legend(fontsize="small", loc="center right")

# %% [markdown]
# Left: with `add` and two sweeps the gap stays below a tenth of a nat, however many arrive. Two
# sweeps from the start are far away, since the old sites have to be found again. "Posterior as
# prior" starts well and its errors add up: what it made of early data was right for the posterior
# of that time, and is never corrected. Right: the model predicts the next patients well from the first
# groups on; ups and downs are those of fifty patients.

# %%
largest = pd.Series({name: max(gap) for name, gap in gaps.items()})
print("largest gap [nats]")
print(largest.round(3).to_string())
ratio = seconds["converged anew"] / seconds["add"]
print(f"time of 15 sweeps from the start, over that of add and two sweeps: {ratio:.1f}")

# %% [markdown]
# The largest gap of each over the ten groups, and what `add` saves: most of the time of a fit from the
# start.

# %% tags=["remove-cell"]
# what the text says of these numbers
assert largest["add, two sweeps"] < 0.1 < largest["posterior as prior"]
assert largest["from the start, two sweeps"] > 5
assert ratio > 1.5 and min(s for _, s in predicted) > -0.3

# %% [markdown]
# ## A label is corrected
#
# Suppose that one of the labels was typed in wrongly. We flip one on which the model was sure,
# learn from it, and look at what leave-one-out says.

# %%
sure = average(torch.sigmoid, online.guide.get_posterior(), X, y).argmax().item()
typed = y.clone()
typed[sure] = 1 - y[sure]
online.guide.reset(sure)
online.resume(X, typed, max_steps=3, progress=False)

surprise = online.guide.loo().pointwise["y"]
ranking = surprise.argsort()[:3].tolist()
print(f"tumour {sure} was flipped; the three most surprising labels: {ranking}")
print("their log densities given all others:", surprise[ranking].numpy().round(1))

# %% [markdown]
# The wrong label stands first, by a wide margin. The biopsy is read again, and the label corrected.
# `guide.reset` sets the site back to zero, so $q$ forgets what the old label said, and sweeps go on
# from there:

# %%
limit = elbo(fit_anew(X, y).guide.get_posterior(), X, y)
steps = {}


def note(event):
    steps[event] = limit - elbo(online.guide.get_posterior(), X, y)


note("the wrong label is in")
online.guide.reset(sure)
online.guide.refresh(X, y)
note("its site is reset")
for sweep in (1, 2, 3):
    online.resume(X, y, max_steps=1, progress=False)
    note(f"sweep {sweep}")
pd.Series(steps, name="nats below the best Gaussian").round(4).to_frame()

# %% [markdown]
# The reset alone undoes about half of the damage: the site is gone, but the others had bent to it.
# After three sweeps the posterior is that of the right labels.

# %% tags=["remove-cell"]
assert ranking[0] == sure and surprise[ranking[0]] < 1.5 * surprise[ranking[1]]
assert steps["the wrong label is in"] > 3 and abs(steps["sweep 3"]) < 0.05

# %% [markdown]
# ## A patient leaves
#
# Consent is withdrawn, and the posterior should be the one without this patient. We take the
# hardest case, the most influential one. `guide.remove` divides its site out at once.

# %%
leaver = int(online.guide.influence().most(1)[0])
keep = torch.arange(len(X)) != leaver
refit = fit_anew(X[keep], y[keep]).guide.get_posterior()


def distance():
    """KL from the refit without them, and the largest shift of a mean in sds."""
    q = online.guide.get_posterior()
    p, q = (dist.MultivariateNormal(g.mean, g.covariance_matrix) for g in (refit, q))
    shift = ((q.mean - p.mean) / p.stddev).abs().max()
    return float(torch.distributions.kl_divergence(q, p)), float(shift)


rows = {"with the patient": distance()}
online.guide.remove(leaver)
online.guide.refresh(X[keep], y[keep])
rows["removed"] = distance()
for sweep in (1, 2, 3):
    online.resume(X[keep], y[keep], max_steps=1, progress=False)
    rows[f"sweep {sweep}"] = distance()
columns = ["KL to the refit [nats]", "largest shift [sd]"]
pd.DataFrame(rows, index=columns).T.style.format("{:.1e}")

# %% [markdown]
# The KL divergence and the largest shift of a coefficient say what is left of the patient. Removing
# the site takes most of it away. The rest is in the other sites, which had adapted to this patient,
# and sweeps remove it. With a Gaussian likelihood the division alone would be exact.
#
# This concerns the posterior. Copies of draws, predictions and the standardisation above, which
# used the first 69 patients, are another matter.

# %% tags=["remove-cell"]
assert rows["with the patient"][0] > 2 * rows["removed"][0]
assert rows["sweep 3"][0] < 1e-2 and rows["sweep 3"][1] < 0.1

# %% [markdown]
# ## Too many for one step
#
# Where a sweep over all data is too long, a step may see a minibatch: it moves the sites of its
# data and leaves the others alone. Old sites stay in $q$, so there is no noise that a falling rate
# would have to average out.

# %%
batches = [(X, y, index) for index in torch.randperm(len(X)).split(57)]
how = {"guide": "AutoSites", "max_steps": 10, "progress": False}
mini = ngvi.fit(logistic, X, y, data=batches, **how)
passes = {1: limit - elbo(mini.guide.get_posterior(), X, y)}
for number in (2, 3, 4, 5, 6):
    mini.resume(max_steps=10, progress=False)
    passes[number] = limit - elbo(mini.guide.get_posterior(), X, y)
by_pass = pd.Series(passes, name="nats below the best Gaussian").rename_axis("pass")
by_pass.round(5).to_frame()

# %% [markdown]
# A pass is ten minibatches of 57. After six passes nothing that matters is left of the gap. For 569
# rows this saves nothing; it is meant for data that do not fit into memory.

# %% tags=["remove-cell"]
assert abs(passes[6]) < 1e-2

# %% [markdown]
# ## When not to use it
#
# - **A latent variable for each observation**, as in a Gaussian process at the inputs of the data: the
#   block itself would grow. Give room in advance: mark outcomes that are not there yet as NaN,
#   which counts as missing, and call `guide.reset` for an observation when it is filled in.
# - **A world that changes.** All data count alike, however old. Model the drift
#   ({doc}`/howto/time_series`), or remove what is too old.
# - **Streams too long to keep.** Sites need the data at every sweep. "Posterior as prior" needs the
#   last group alone, at the price that the picture shows.
# - **Models outside the class**: networks, priors that are not Gaussian. See
#   {doc}`/howto/minibatches` and {doc}`/howto/checkpoints` for these.
#
# **Next** {doc}`/howto/checkpoints` to stop tonight and go on tomorrow; {doc}`/ideas/sites` for the
# equations.
#
# ## References
#
# - Khan, M. E. and Lin, W. (2017). Conjugate-computation variational inference. *AISTATS*.
# - Opper, M. (1998). A Bayesian approach to on-line learning. In *On-line Learning in Neural
#   Networks*, Cambridge University Press. On "posterior as prior" with Gaussians.
# - Wolberg, W., Street, W. and Mangasarian, O. (1995). Breast cancer Wisconsin (diagnostic). UCI
#   Machine Learning Repository. The source of the data.

# %% tags=["hide-input"]
print("pyro_ngvi", ngvi.__version__, "| torch", torch.__version__, "| pyro", pyro.__version__)
