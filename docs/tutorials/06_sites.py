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
# # One Gaussian site a datum: from a GLM to a Gaussian process to data that come and go
#
# In many models the latent variables are jointly Gaussian a priori, and datum n sees them through a
# few linear combinations f_n: generalised linear models, Gaussian processes, random effects, time
# series. The best Gaussian posterior of such a model is the prior times one Gaussian factor a datum,
#
#     q(z)  propto  p(z) prod_n exp(nu_n f_n - Lambda_n f_n^2 / 2),
#
# a *site*. `AutoSites` finds the f_n in your model, `SitesELBO` takes expectations over them by
# quadrature, without draws, and `CVI` steps the sites by natural gradients, with no rate to choose.
# A posterior that is kept datum by datum can also be taken apart datum by datum: leave-one-out
# densities, influence, and data that arrive or leave. About half a minute on one core.

# %%
import warnings

import matplotlib.pyplot as plt
import numpy as np
import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.contrib.gp.kernels import RBF
from pyro.infer import SVI
from pyro.infer.autoguide import AutoGuideList
from sklearn.datasets import load_breast_cancer, load_diabetes, make_moons

import pyro_ngvi as ngvi
from pyro_ngvi.diagnostics import plot_influence, plot_sites
from pyro_ngvi.distributions import GaussianProcess, matern_state_space

with warnings.catch_warnings():  # ArviZ announces its next major release
    warnings.simplefilter("ignore", FutureWarning)
    import arviz as az

torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)
pyro.set_rng_seed(0)

# %% [markdown]
# ## 1. A logistic regression
#
# The breast cancer data of tutorial 01, here with all thirty measurements.

# %%
data = load_breast_cancer()
X = torch.tensor(data.data)
X = (X - X.mean(0)) / X.std(0)
y = torch.tensor(data.target, dtype=X.dtype)


def logistic(X, y=None):
    intercept = pyro.sample("intercept", dist.Normal(0.0, 2.0))
    w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([X.shape[1]]).to_event(1))
    with pyro.plate("tumour", len(X)):
        pyro.sample("y", dist.Bernoulli(logits=intercept + X @ w), obs=y)


steps = []
fit = ngvi.fit(
    logistic,
    X,
    y,
    guide="AutoSites",
    callbacks=[lambda fit: steps.append(float(fit.svi.optim.report().step_norm))],
)
guide, best = fit.guide, fit.svi.evaluate_loss(X, y)
print(fit.advice)
for sweep in range(1, 11):
    loss = fit.losses[sweep]  # that before the next sweep
    print(
        f"after sweep {sweep:2d}: loss {loss:9.4f}, {loss - best:.1e} nats from its limit,",
        f"step {steps[sweep - 1]:.3f}",
    )
error = ngvi.SitesELBO().quadrature_error(logistic, guide, X, y)
print(f"error of the quadrature: {error:.0e} nats")

# %% [markdown]
# `fit` takes `CVI` and `SitesELBO` for these sites by itself. The loss has no noise, so it says whether
# we are there. `step_norm` is the length of a sweep: half its square is about the KL divergence between
# q before and after, in nats.
#
# For comparison `NGVB`, the general rule, on eight draws a step and from a point as the sites are
# (`init=None`; else its guide would search for a Gaussian first). Both go to the same Gaussian. The
# gap of `NGVB` comes from draws, so it has an error, and `outcome` says whether the trust region
# shortened a step. We write the loop to look on the way:

# %%
full_rank = ngvi.AutoFullRankNormal(logistic, init=None)
ngvb = SVI(logistic, full_rank, ngvi.NGVB(full_rank), ngvi.BatchedELBO(num_particles=8))
draws = ngvi.BatchedELBO(num_particles=400)
outcomes = []
for step in range(1, 301):
    ngvb.step(X, y)
    outcomes.append(ngvb.optim.report().outcome)
    if step in (10, 30, 60, 100, 300):
        gaps = np.array([float(draws.loss(logistic, full_rank, X, y)) for _ in range(10)]) - best
        print(
            f"after step {step:3d}: {gaps.mean():6.2f} nats from the same limit, standard error",
            f"{gaps.std(ddof=1) / 10**0.5:.2f}, {outcomes.count('damped')} steps damped so far",
        )
assert outcomes[:60].count("damped") > 30

# %% [markdown]
# Most of the way is made of damped steps: the trust region lets `NGVB` move by half a nat or so a
# step, because a longer step on noisy gradients may be a wrong one. The first sweeps of `CVI` are
# far longer. Only the last fraction of a nat is a matter of noise.

# %% [markdown]
# ### What a site is
#
# A site reads as an observation of f_n: with value nu / Lambda and variance 1 / Lambda. The picture
# shows these observations against the posterior mean of f_n. A label of 1 says "f is larger than
# you think", so its site lies above the diagonal, and the prior pulls the other way. Where the label
# is no surprise the site is nearly flat and says next to nothing: these are the pale points. So
# Lambda shows which data carry the fit, here those at the boundary between the two classes.

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
plot_sites(guide, ax=left)
left.set(xlim=(-12, 12), ylim=(-20, 20))
where = guide.median()
f = where["intercept"] + X @ where["w"]
precision = guide.sites()["y"].precision[:, 0, 0]
for label, name in enumerate(data.target_names):
    right.plot(f[y == label], precision[y == label], ".", label=name)
right.set(xlabel="posterior mean of f", ylabel="precision of the site")
right.legend()
plt.show()

# %% [markdown]
# The sites that weigh most are those near f = 0, where a tumour might be either.
#
# Draws and tables come through ArviZ, as of any guide:

# %%
features = list(data.feature_names)
labels = {"coords": {"feature": features}, "dims": {"w": ["feature"]}}
idata = fit.to_arviz(num_samples=4000, seed=1, **labels)
print(ngvi.summary(idata, var_names=["w"], coords={"feature": features[:5]}))

# %% [markdown]
# The sweeps found the best Gaussian; whether that is good enough is another question, and this verdict
# is about it. Tutorial 01 says how to read it.

# %% [markdown]
# ## 2. What the sites know
#
# ### Leave-one-out
#
# Divide datum n's site out of q, and what is left is, nearly, the posterior without datum n. From it
# follows log p(y_n | all others), by quadrature again. PSIS-LOO computes the same from draws of q,
# weighted by 1 / p(y_n | z), which fails for data that q depends on; it says so itself, by a k-hat a
# datum.

# %%
loo = guide.loo()
with warnings.catch_warnings():  # ArviZ warns of the k-hats that we count
    warnings.simplefilter("ignore", UserWarning)
    psis = az.loo(idata, pointwise=True)
print(loo)
print(f"PSIS: elpd_loo {psis.elpd_loo:.2f}, {int((psis.pareto_k > 0.7).sum())} k-hats above 0.7")

# %% [markdown]
# Who is right? We fit again without each of the fifteen data on which the two differ most. (The refit
# is a Gaussian as well, so this checks the division, and not whether a Gaussian is good enough.)


# %%
def average(function, mean, variance, points=64):
    """E function(f) for f ~ N(mean, variance), by Gauss-Hermite quadrature."""
    x, weights = np.polynomial.hermite_e.hermegauss(points)
    x, weights = torch.tensor(x), torch.tensor(weights / weights.sum())
    return function(mean[..., None] + variance[..., None].sqrt() * x) @ weights


def predictive(guide, n):
    """log p(y_n | what the guide has seen)."""
    q, x = guide.get_posterior(), torch.cat([torch.ones(1), X[n]])
    mean, variance = x @ q.mean, x @ q.covariance_matrix @ x
    return float(average(torch.sigmoid, (2 * y[n] - 1) * mean, variance).log())


hard = np.argsort(-np.abs(loo.pointwise["y"].numpy() - psis.loo_i.values))[:15]


def refit_without(n):
    rest = torch.arange(len(X)) != n
    return ngvi.fit(logistic, X[rest], y[rest], guide="AutoSites", max_steps=15).guide


refits = {n: refit_without(n) for n in hard.tolist()}
refitted = np.array([predictive(refit, n) for n, refit in refits.items()])
by_sites, by_psis = loo.pointwise["y"].numpy()[hard], psis.loo_i.values[hard]
for name, found in (("sites", by_sites), ("PSIS", by_psis)):
    print(
        f"{name}: mean absolute error against the refit {np.abs(found - refitted).mean():.3f} nats"
    )

figure, axis = plt.subplots(figsize=(4.5, 4), layout="constrained")
axis.plot(refitted, by_psis, "x", label="PSIS-LOO")
axis.plot(refitted, by_sites, "o", fillstyle="none", label="guide.loo()")
axis.axline((-1, -1), slope=1, color="0.5", linewidth=0.8, zorder=0)
axis.set(xlabel="log density by refit (nats)", ylabel="without refitting (nats)")
axis.legend()
plt.show()
assert np.abs(by_sites - refitted).mean() < np.abs(by_psis - refitted).mean()

# %% [markdown]
# The sites agree with the refits; PSIS is far off for a few data.
#
# ### Influence
#
# The same division says how far the posterior mean moves without a datum, in posterior standard
# deviations, a Cook's distance for any likelihood. `shift` gives the move of every coefficient,
# with the datum less without. We hold it against the refit for the most influential datum.

# %%
influence = guide.influence()
print(influence)
first = int(influence.most(1)[0])
without = refit_without(first)
with_it, alone = guide.get_posterior(), without.get_posterior()
sd = with_it.variance.sqrt()
shift = influence.shift([first])[0] / sd
moved = (with_it.mean - alone.mean) / sd

figure, (left, right) = plt.subplots(
    1, 2, figsize=(11, 3.8), layout="constrained", width_ratios=(2, 1)
)
plot_influence(influence, left)
right.plot(moved, shift, "o")
right.axline((0, 0), slope=1, color="0.5", linewidth=0.8, zorder=0)
right.set(
    xlabel="by refit [sd]", ylabel="from the sites [sd]", title=f"coefficients without {first}"
)
plt.show()
x = torch.cat([torch.ones(1), X[first]])
there, gone = x @ with_it.mean, x @ alone.mean
predicted = there - influence.prediction[first, 0]
print(
    f"tumour {first} is {data.target_names[int(y[first])]}; its f, negative if malignant, with it"
)
print(f"in the data {there:+.2f}, without {gone:+.2f} by refit and {predicted:+.2f} from the sites")

# %% [markdown]
# The figures fall a little short for a datum that matters as much, because the other sites would move
# too. Take the list from the sites, and refit for the few at its head.

# %% [markdown]
# ## 3. A Gaussian-process classifier
#
# `GaussianProcess(kernel, X)` takes the kernels of Pyro, and is a site of its own outside of the
# plate. The kernel's parameters are learnt by `others=`: their gradient holds the *sites* and lets q
# follow the prior, so Adam and the sweeps disturb each other little. Adam with a short memory: the
# gradients of the first sweeps are large and mean little.

# %%
points, classes = make_moons(600, noise=0.3, random_state=0)
A, new = torch.tensor(points[:200]), torch.tensor(points[200:])
a, later = torch.tensor(classes[:200]).double(), torch.tensor(classes[200:]).double()
kernel = RBF(2, variance=torch.tensor(4.0), lengthscale=torch.tensor(1.5))


def classifier(X, y=None, size=None):
    pyro.module("kernel", kernel)
    data = pyro.plate("data", len(X), subsample_size=size)
    f = pyro.sample("f", GaussianProcess(kernel, X[data.indices], jitter=1e-4))
    with data:
        y = None if y is None else y[data.indices]
        pyro.sample("y", dist.Bernoulli(logits=f), obs=y)


def learn(model, guide, *args, steps):
    others = pyro.optim.Adam({"lr": 0.1, "betas": (0.8, 0.9)})
    optim = ngvi.CVI(guide, others=others)
    return ngvi.fit(model, *args, guide=guide, optim=optim, max_steps=steps)


def held_out(guide):
    """Mean log predictive density of the points that were not used."""
    mean, variance = guide.predict(new)["f"]
    return float(average(torch.sigmoid, (2 * later - 1) * mean, variance).log().mean())


process = ngvi.AutoSites(classifier)
fit = learn(classifier, process, A, a, steps=60)
print(f"loss after 6 steps {fit.losses[6]:.2f},", end=" ")
print(f"after {fit.steps} {fit.svi.evaluate_loss(A, a):.2f} nats ({fit.why_stopped});", end=" ")
print(
    f"variance {kernel.variance.item():.1f}, length-scale {kernel.lengthscale.item():.2f};", end=" "
)
print(f"{held_out(process):.3f} nats a new point")

# %% [markdown]
# `guide.predict` gives mean and variance of f at any inputs, without draws. In the pictures below the
# points are as large as their sites are precise: most of what is learnt comes from the boundary.

# %%
side = 60
grid = torch.cartesian_prod(torch.linspace(-2, 3, side), torch.linspace(-1.5, 2, side))


def draw(guide, axis, title):
    mean, variance = guide.predict(grid)["f"]
    chance = average(torch.sigmoid, mean, variance).reshape(side, side)
    horizontal, vertical = grid.reshape(side, side, 2).unbind(-1)
    axis.contourf(horizontal, vertical, chance, levels=10, cmap="RdBu", alpha=0.6, vmin=0, vmax=1)
    axis.contour(horizontal, vertical, chance, levels=[0.5], colors="k", linewidths=0.8)
    precision = guide.sites()["y"].precision[:, 0, 0]
    axis.scatter(*A.T, c=a, s=4 + 300 * precision, cmap="RdBu", edgecolors="k", linewidths=0.4)
    axis.set(title=title, xlabel="first coordinate", ylabel="second coordinate")


# %% [markdown]
# The algebra above is cubic in the number of data. With inducing points (crosses) it is cubic in
# theirs; given as an `nn.Parameter`, they are moved too.

# %%
inducing = ngvi.AutoSites(classifier, inducing=torch.nn.Parameter(A[:20].clone()))
loss = learn(classifier, inducing, A, a, steps=60).svi.evaluate_loss(A, a)
print(f"20 inducing points: loss {loss:.2f} nats, {held_out(inducing):.3f} nats a new point")

figure, axes = plt.subplots(1, 2, figsize=(11, 4), layout="constrained", sharey=True)
draw(process, axes[0], f"the process at all {len(A)} points")
draw(inducing, axes[1], "20 inducing points")
axes[1].plot(*inducing.inducing.detach().T, "k+", markersize=10)
plt.show()

# %% [markdown]
# Twenty points draw the same boundary as all.
#
# Minibatches step the sites of their data and leave the others. A prior cannot be learnt that way,
# since the other sites would have to follow, so the kernel stays as it is now.

# %%
kernel.requires_grad_(False).eval()
for size, count in ((200, 8), (20, 80)):
    guide = ngvi.AutoSites(classifier, inducing=inducing.inducing.detach())
    loss = learn(classifier, guide, A, a, size, steps=count).svi.evaluate_loss(A, a)
    print(f"{count} steps with {size} data each: loss {loss:.4f} nats")

# %% [markdown]
# ## 4. Data that come and go
#
# The tumours again, in the order of a shuffled list: some at first, then chunks of a hundred.
# `guide.add` makes room for new sites, at zero; two sweeps (`fit.resume`) fill them and bring the old
# ones up to date. For comparison, a guide that begins anew with all data so far: how far it is after
# two sweeps, and how many it needs to come as close.

# %%
order = torch.randperm(len(X), generator=torch.Generator().manual_seed(0))
seen = order[:169]
online = ngvi.fit(logistic, X[seen], y[seen], guide="AutoSites", max_steps=10)


def gap_to(target):
    return online.svi.evaluate_loss(X[seen], y[seen]) - target


for chunk in order[169:].split(100):
    seen = torch.cat([seen, chunk])
    online.guide.add(len(chunk))
    online.resume(X[seen], y[seen], max_steps=2)
    anew = ngvi.fit(logistic, X[seen], y[seen], guide="AutoSites")
    target = anew.svi.evaluate_loss(X[seen], y[seen])
    gap, anew = gap_to(target), anew.losses - target
    print(
        f"{len(seen)} data: {gap:.4f} nats above the limit; anew, after two sweeps {anew[2]:.0f},",
        end=" ",
    )
    print(f"{int((anew > gap).sum())} sweeps to come as close")

# %% [markdown]
# And one tumour is withdrawn. `guide.remove` divides its site out at once, which would be exact with
# a Gaussian likelihood; with another one, two sweeps make up for the other sites. We take the most
# influential one, the hardest case.

# %%
place = int((seen == first).nonzero())
online.guide.remove(place)
seen = seen[seen != first]
target = ngvi.fit(logistic, X[seen], y[seen], guide="AutoSites").svi.evaluate_loss(X[seen], y[seen])
print(f"site divided out: {gap_to(target):.4f} nats above the limit")
for sweep in (1, 2):
    online.resume(X[seen], y[seen], max_steps=1)
    print(f"after {sweep} sweep{'s' * (sweep > 1)}: {gap_to(target):.4f}")
assert abs(gap_to(target)) < 0.05

# %% [markdown]
# ### A time series
#
# Counts at many times, of a rate that a Matern process drives. As a chain of states
# (`matern_state_space`) this is the same Gaussian process, at a cost that grows as the number of
# times and not its cube. Times without a count are NaN.

# %%
pyro.set_rng_seed(1)


def made_up(T):
    times = torch.linspace(0.0, T / 100, T)
    log_rate = 0.3 + times.sin() + 0.5 * (3.1 * times).sin()
    counts = torch.poisson(log_rate.exp())
    counts[T * 9 // 20 : T * 11 // 20] = torch.nan
    return times, log_rate, counts


def series(times, y=None):
    lengthscale = pyro.param("lengthscale of s", torch.tensor(1.0), dist.constraints.positive)
    variance = pyro.param("variance of s", torch.tensor(1.0), dist.constraints.positive)
    s = pyro.sample("s", matern_state_space(times, lengthscale, variance, nu=2.5))
    with pyro.plate("times", len(times)):
        pyro.sample("y", dist.Poisson(s[:, 0].exp()), obs=y)


times, log_rate, counts = made_up(2000)
chain = ngvi.AutoSites(series)
fit = learn(series, chain, times, counts, steps=25)
print(f"25 steps, {fit.report['seconds'].sum():.1f} s: loss {fit.losses[-1]:.2f} nats,", end=" ")
print(f"length-scale {pyro.param('lengthscale of s').item():.2f},", end=" ")
print(f"variance {pyro.param('variance of s').item():.2f}")
print(chain.loo())

# %%
mean, variance = (t[:, 0] for t in chain.predict(times)["s"])
low, high = (mean + z * variance.sqrt() for z in (-1.645, 1.645))
figure, axis = plt.subplots(figsize=(11, 3.5), layout="constrained")
axis.plot(times, counts, ".", color="0.7", markersize=3, label="counts")
axis.fill_between(times, low.exp(), high.exp(), alpha=0.4, label="90% band of the rate")
axis.plot(times, mean.exp(), label="median of the rate")
axis.plot(times, log_rate.exp(), "k:", linewidth=1.0, label="true rate")
axis.set(xlabel="time", ylabel="count, rate", ylim=(0, 12))
axis.legend(ncols=4, fontsize="small")
plt.show()
inside = ((low < log_rate) & (log_rate < high)).double().mean()
print(f"the band holds {inside:.0%} of the true rates")
assert 0.75 < inside

# %% [markdown]
# The band widens where counts are missing, and holds about as many true rates as it should.
# Neighbouring rates err together, so one series is a rough check.
#
# The seconds of a sweep grow no faster than the number of times:

# %%
taken = {}
for T in (2000, 4000, 8000):
    t, _, n = made_up(T)
    guide = ngvi.AutoSites(series)
    seconds = learn(series, guide, t, n, steps=4).report["seconds"]
    taken[T] = seconds[1:].sum()  # the first step sets up
    print(f"{T:,} times: {taken[T] / taken[2000]:.1f} times the seconds of {2000:,}")

# %% [markdown]
# ## 5. When not to use it
#
# A latent variable that is not Gaussian a priori, such as the noise scale of a regression, is not
# part of the block. `AutoSites` says so:

# %%
diabetes = load_diabetes()
X, y = (torch.tensor(t) for t in (diabetes.data, diabetes.target))
X, y = X / X.std(0), (y - y.mean()) / y.std()


def regression(X, y=None):
    noise = pyro.sample("noise", dist.HalfCauchy(1.0))
    w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([X.shape[1]]).to_event(1))
    with pyro.plate("patient", len(X)):
        pyro.sample("y", dist.Normal(X @ w, noise), obs=y)


try:
    ngvi.fit(regression, X, y, guide="AutoSites")
except ValueError as error:
    print(str(error).split(". ")[0] + ".")

# %% [markdown]
# Another guide of a list takes it. Its draws make the targets noisy, so `lr` is less than 1.

# %%
guide = AutoGuideList(regression)
guide.append(ngvi.AutoSites(poutine.block(regression, hide=["noise"])))
guide.append(ngvi.AutoMeanFieldNormal(poutine.block(regression, expose=["noise"])))

optim = ngvi.CVI(guide, lr=0.3, others=ngvi.NGVB(guide))
loss = ngvi.SitesELBO(num_particles=2)
both = ngvi.fit(regression, X, y, guide=guide, optim=optim, loss=loss, max_steps=100)
joint = ngvi.fit(regression, X, y, guide="AutoFullRankNormal")
for name, fit in (("list", both), ("a full Gaussian over all", joint)):
    noise = fit.guide.median(X, y)["noise"].item()
    print(f"{name}: ELBO {fit.elbo[0]:.2f} +- {fit.elbo[1]:.2f} nats, noise {noise:.3f}")
assert abs(both.elbo[0] - joint.elbo[0]) < 0.5

# %% [markdown]
# What else to know:
#
# - The scale of a *prior* cannot be left to another guide like that: the block would change with
#   every draw. Learn it (`pyro.param`, as in part 4), write the model with standardised variables
#   and the scale in the likelihood (their part as `pyro.deterministic("f", ...)`), or use
#   `AutoFullRankNormal` for all.
# - A datum may depend on at most 64 linear combinations of the block. Networks, and likelihoods that
#   tie several data's predictors together, are for `NGVB`, `IVON` and the other optimizers.
# - A dense block of D variables costs D^3 a sweep: some thousands. Above that, inducing points or a
#   chain.
# - q is Gaussian, however exact the sweeps are. Read the verdict of `khat`.
# - With a likelihood that is not log-concave (Student-t), sites may have negative precisions and
#   there may be several optima; steps are halved where q would not be proper.
