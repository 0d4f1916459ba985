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
# # Student's sleepers: a family, a rule and an estimator of your own
#
# In 1908 "Student" asked of ten patients whether a drug had made them sleep longer, and found the
# distribution that has his name. It is not among the families of this package. We add it, see what
# it is good for and where it is no help, and add a rule for the steps and an estimator of curvature.
# Each is a short class or a function, and the package stays as it is.
#
# - A **family** of distributions knows its density and its Fisher matrix.
# - A **rule** says where to go from a gradient.
# - An **estimator** turns the draws of a step into an expected curvature.
#
# The rest is there already and works with yours: the guide, the refusal of steps that are not finite,
# averages, reports, saving, `khat`, `to_arviz`.
#
# **You will**
#
# - write a mean-field Student-t family, test it, and fit it to a posterior that is a member;
# - learn where heavier tails pay, and where they cost;
# - write a rule whose steps all have one length, and see what it lacks beside `NGVB`;
# - write the empirical Fisher matrix as an estimator, and measure its error on seven sets of counts.
#
# **Contents** [The sleepers](#ten-sleepers) · [A family](#a-family-mean-field-student-t) ·
# [Tails that pay](#tails-that-pay) · [Tails that do not](#tails-that-do-not) ·
# [A rule](#a-rule-steps-of-one-length) · [An estimator](#an-estimator-the-empirical-fisher-matrix) ·
# [Checks](#what-the-package-checks-for-you) · [Limits](#where-not-to-go)
#
# *Level*: advanced; you have written a guide of your own ([how](../howto/own_guide.md)) and know what
# a Fisher matrix is ([why](../ideas/natural_gradients.md)). *Tags*: families, rules, curvature,
# Student-t, empirical Fisher. *Time*: ten minutes to read, about twenty seconds to run on one core.

# %% tags=["remove-cell"]
# ruff: noqa: E402
import warnings

import torch

warnings.filterwarnings("ignore", "\\s*ArviZ is undergoing", FutureWarning)
warnings.filterwarnings("ignore", "IProgress not found")
torch.set_num_threads(1)

# %%
from dataclasses import dataclass
from functools import partial

import matplotlib.pyplot as plt
import pandas as pd
import pyro
import pyro.distributions as dist
import scipy.stats
import torch
from pyro.infer import SVI
from pyro.infer.autoguide import init_to_value
from torch.distributions import constraints

import pyro_ngvi as ngvi

torch.set_default_dtype(torch.float64)
plt.rcParams["figure.dpi"] = 90

# %% [markdown]
# ## Ten sleepers
#
# Cushny and Peebles (1905) measured by how many hours each of two soporifics lengthened the sleep of
# ten patients. Student asked three questions. Does the first help? Does the second? Is the second
# better than the first?

# %%
first = torch.tensor([0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0])
second = torch.tensor([1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4])
hours = torch.stack([first, second, second - first], 1)
questions = ["first", "second", "difference"]
pd.DataFrame({"mean": hours.mean(0), "sd": hours.std(0)}, questions).round(2)

# %% [markdown]
# He took the hours to be normal, with a mean and an sd that are both unknown. With a flat prior on the
# mean and on the log of the sd, the sd can be integrated out on paper. What is left for the mean is
#
# $$p(\mu \mid y) \propto \Big(\sum_{i=1}^n (y_i - \mu)^2\Big)^{-n/2},$$
#
# a Student-t distribution with $n - 1 = 9$ degrees of freedom. The model asks all three questions at
# once, each of its own column, as he did:


# %%
def sleep(hours):
    with pyro.plate("question", hours.shape[1]):
        mean = pyro.sample("mean", dist.ImproperUniform(constraints.real, (), ()))
        squares = (hours - mean).square().sum(0)
        pyro.factor("data", -0.5 * len(hours) * squares.log())


# %% [markdown]
# ## A family: mean-field Student-t
#
# A family is a set of pure functions of a dict of tensors, the parameters: how a member starts, how it
# draws, its log density, and its Fisher matrix F. Here (Lange, Little and Taylor 1989)
#
# $$
# z_i = \mu_i + \sigma_i t_i, \quad t_i \sim \text{Student-t}(\nu), \quad F =
# \operatorname{diag}\left(\frac{\nu + 1}{(\nu + 3)\,\sigma^2},\; \frac{2 \nu}{\nu + 3}\right) \quad
# \text{in } (\mu, \log \sigma).
# $$
#
# `frame` measures the moves of $\mu$ in units of $\sigma$. In those units F is the same for every
# member, so momentum may act on $\mu$. `fisher_product` and `natural_gradient` are F and its inverse
# in these units.


# %%
class MeanFieldStudentT(ngvi.families.Family):
    names = ("loc", "log_scale")
    location = ("loc",)

    def __init__(self, df):
        self.df = df
        self.fisher = {"loc": (df + 1) / (df + 3), "log_scale": 2 * df / (df + 3)}

    def init(self, loc, scale):  # with sd `scale` everywhere
        log_scale = torch.full_like(loc, scale * ((self.df - 2) / self.df) ** 0.5).log()
        return {"loc": loc.clone(), "log_scale": log_scale}

    def marginals(self, params):
        return dist.StudentT(self.df, params["loc"], params["log_scale"].exp(), validate_args=False)

    def draw(self, params, shape):
        return self.marginals(params).rsample(shape)

    def log_prob(self, params, z):
        return self.marginals(params).log_prob(z).sum(-1)

    def frame(self, params):
        return {"loc": params["log_scale"].exp()}

    def fisher_product(self, params, tangent):
        return {name: self.fisher[name] * v for name, v in tangent.items()}

    def natural_gradient(self, params, gradient):
        return {name: v / self.fisher[name] for name, v in gradient.items()}


class AutoStudentT(ngvi.guides.AutoFamily):
    df = 9.0

    def make_family(self):
        return MeanFieldStudentT(self.df)


# %% [markdown]
# {class}`~pyro_ngvi.families.Family` makes the rest: scores and entropies by automatic differentiation,
# moments and quantiles from 4,096 draws of a fixed seed. Write `mean`, `stddev`, `icdf` and so on where
# you know them in closed form. {class}`~pyro_ngvi.guides.AutoFamily` makes the guide, and every
# optimizer that needs no curvature steps it.
#
# **First check: is that F?** F is the expected product of the scores, the gradients of $\log q$.
# `score` finds them by automatic differentiation, `pull` takes them to the frame, and midpoints of
# the distribution function stand for draws.

# %%
family = MeanFieldStudentT(5.0)
q = {"loc": torch.tensor([0.7]), "log_scale": torch.tensor([-0.4])}
levels = (torch.arange(20_000) + 0.5) / 20_000
z = q["loc"] + q["log_scale"].exp() * torch.as_tensor(scipy.stats.t.ppf(levels, 5.0))[:, None]
scores = family.pull(q, {name: v.T for name, v in family.score(q, z).items()})
rows = torch.cat([scores["loc"], scores["log_scale"]])
print("by the scores:", (rows @ rows.T / 20_000).numpy().round(4).tolist())
print("written above:", family.fisher)

# %% tags=["remove-cell"]
estimated = rows @ rows.T / 20_000
assert (estimated - torch.diag(torch.tensor(list(family.fisher.values())))).abs().max() < 1e-3

# %% [markdown]
# **Second check: a posterior that is a member.** The posterior of the sleepers is one, with location
# $\bar y$, scale $s / \sqrt n$ and 9 degrees of freedom. A fit has to find it.

# %%
pyro.set_rng_seed(0)
guide = AutoStudentT(sleep)
svi = SVI(sleep, guide, ngvi.NGVB(guide), ngvi.BatchedELBO(8))
for _ in range(200):
    svi.step(hours)
center, scale = hours.mean(0), hours.std(0) / len(hours) ** 0.5
errors = {
    "location [scales]": (guide.loc - center) / scale,
    "log scale": guide.log_scale - scale.log(),
}
pd.DataFrame({k: v.detach() for k, v in errors.items()}, questions).style.format("{:.0e}")

# %% [markdown]
# What is left is far below anything that matters. Gradients here leave out the score of q ("sticking
# the landing"), and then they have no noise where q is the posterior. So this check is sharp: a wrong
# density or a wrong draw would show. A wrong F would still end here, only later; that takes the first
# check.

# %% tags=["remove-cell"]
assert all(v.abs().max() < 1e-3 for v in errors.values())

# %% [markdown]
# ## Tails that pay
#
# What does a Gaussian make of the same posterior, and a Student-t with the wrong $\nu$? Quadrature on a
# grid gives the exact answer, and the KL divergence of each fit from it.


# %% tags=["hide-input"]
def fitted(model, guide, *args, steps=100):
    """Trained by NGVB with 32 draws a step."""
    pyro.set_rng_seed(0)
    svi = SVI(model, guide, ngvi.NGVB(guide), ngvi.BatchedELBO(32))
    for _ in range(steps):
        svi.step(*args)
    return guide


def with_df(base, df):
    return type("AnotherDf", (base,), {"df": df})


x = center + scale * torch.linspace(-60, 60, 24_001)[:, None]  # a grid for each question
step = x[1] - x[0]
log_p = -5 * (hours[:, None] - x).square().sum(0).log()
log_p = log_p - (log_p + step.log()).logsumexp(0)
share_below = ((log_p.exp() * step).cumsum(0)).numpy()
exact = {
    "KL [nats]": 0.0,
    "2.5%": float(x[(share_below[:, 2] < 0.025).sum(), 2]),
    "97.5%": float(x[(share_below[:, 2] < 0.975).sum(), 2]),
    "P(difference < 0)": float((log_p[:, 2].exp() * step[2])[x[:, 2] < 0].sum()),
}

guides = {f"Student-t, {df}": with_df(AutoStudentT, df)(sleep) for df in (3, 5, 9, 20, 60)}
guides["Gaussian"] = ngvi.AutoMeanFieldNormal(sleep)
rows, log_q = {"exact": exact}, {}
for name, one in guides.items():
    params = {k: v.detach() for k, v in fitted(sleep, one, hours).natural_params().items()}
    loc, sd = params["loc"], params["log_scale"].exp()
    marginal = one.family.marginals(params) if "t" in name[:9] else dist.Normal(loc, sd)
    log_q[name] = marginal.log_prob(x)
    shape = scipy.stats.t(one.df) if "Student" in name else scipy.stats.norm
    low, high = (float(loc[2] + sd[2] * shape.ppf(level)) for level in (0.025, 0.975))
    rows[name] = {
        "KL [nats]": float((log_q[name].exp() * (log_q[name] - log_p) * step).sum()),
        "k-hat": ngvi.khat(sleep, one, hours).khat,
        "2.5%": low,
        "97.5%": high,
        "P(difference < 0)": float(shape.cdf(-loc[2] / sd[2])),
    }
tails = pd.DataFrame(rows).T[["KL [nats]", "k-hat", "2.5%", "97.5%", "P(difference < 0)"]]
formats = dict.fromkeys(tails, "{:.2f}") | {"KL [nats]": "{:.4f}", "P(difference < 0)": "{:.5f}"}
tails.style.format(formats, na_rep="")

# %% tags=["hide-input"]
figure, axis = plt.subplots(figsize=(7, 3.4), layout="constrained")
axis.plot(x[:, 2], log_p[:, 2], "k", label="exact")
for name, style in (("Student-t, 9", "C0--"), ("Student-t, 3", "C2:"), ("Gaussian", "C1-.")):
    axis.plot(x[:, 2], log_q[name][:, 2], style, label=name)
axis.axvline(0, color="0.7", lw=0.8)
axis.set(xlim=(-2.4, 5.6), ylim=(-16, 1), ylabel="log density [nats]")
axis.set(xlabel="mean of the difference [hours of sleep]")
_ = axis.legend(loc="lower center", fontsize="small", ncols=2)

# %% [markdown]
# The Student-t with 9 degrees of freedom lies on the exact curve. The Gaussian follows it for some two
# scales on either side and then falls away; with 3 degrees of freedom the tail is too heavy. (KL is
# that of all three questions together, the rest of the table is about the difference.)
#
# How much that matters depends on the question. In nats the Gaussian loses little, its k-hat is below
# 0.7, and its interval is right to a tenth of an hour. Student's own question was about a tail: how
# probable is it that the second drug is *not* better? There the Gaussian is wrong by a factor:

# %% tags=["hide-input"]
ratio = exact["P(difference < 0)"] / tails.loc["Gaussian", "P(difference < 0)"]
print(f"exact: one in {1 / exact['P(difference < 0)']:.0f}")
print(f"the Gaussian's is {ratio:.0f} times smaller")

# %% [markdown]
# Take heavier tails for questions about tails, and let the ELBO choose $\nu$: its maximum is where the
# KL divergence is smallest. (Where all weights are nearly equal, as with 9 degrees of freedom, the
# k-hat of what is left says nothing but that it is low.)

# %% tags=["remove-cell"]
assert abs(exact["P(difference < 0)"] - scipy.stats.t.cdf(float(-center[2] / scale[2]), 9)) < 1e-4
kl = tails["KL [nats]"]
assert kl.drop("exact").idxmin() == "Student-t, 9" and kl["Student-t, 9"] < 2e-3
assert kl["Gaussian"] < 0.05 and kl["Gaussian"] < kl["Student-t, 3"]
assert tails["k-hat"].max() < 0.7 and ratio > 5
assert (
    tails.loc["Gaussian", ["2.5%", "97.5%"]] - tails.loc["exact", ["2.5%", "97.5%"]]
).abs().max() < 0.1

# %% [markdown]
# ## Tails that do not
#
# Nobody integrates by hand if a machine can do it. Here is the same analysis of the differences with
# the sd left in:


# %%
def with_sd(y):
    mean = pyro.sample("mean", dist.ImproperUniform(constraints.real, (), ()))
    log_sd = pyro.sample("log_sd", dist.ImproperUniform(constraints.real, (), ()))
    with pyro.plate("patient", len(y)):
        pyro.sample("y", dist.Normal(mean, log_sd.exp()), obs=y)


# %% [markdown]
# The mean is what it was: its exact posterior is still the Student-t. So we take our family for it, and
# a normal distribution for `log_sd`. {class}`~pyro_ngvi.families.ProductFamily` joins the two:


# %%
class AutoMixedTails(ngvi.guides.AutoFamily):
    df = 9.0

    def make_family(self):
        parts = {"t": MeanFieldStudentT(self.df), "normal": ngvi.families.MeanFieldNormal()}
        order = [("t", 1), ("normal", 1)]  # mean, log_sd
        return ngvi.families.ProductFamily(parts, order, linear=False)


# %% tags=["hide-input"]
y = hours[:, 2]
means, sds = torch.linspace(-6, 9, 601), torch.linspace(-2, 3.5, 401)
M, L = torch.meshgrid(means, sds, indexing="ij")
log_joint = dist.Normal(M[..., None], L.exp()[..., None]).log_prob(y).sum(-1)
cell = (means[1] - means[0]) * (sds[1] - sds[0])
log_evidence = float((log_joint + cell.log()).flatten().logsumexp(0))


def gap(t, normal, df):
    """Log evidence minus the ELBO, in closed form; t and normal: location and scale of a factor."""
    (m, a), (ell, b) = t, normal
    shape = scipy.stats.norm if df is None else scipy.stats.t(df)
    squares = (y - m).square().sum() + len(y) * a**2 * float(shape.var())
    inside = -len(y) * ell - 0.5 * (2 * b**2 - 2 * ell).exp() * squares
    entropy = float(shape.entropy()) + a.log() + float(scipy.stats.norm.entropy()) + b.log()
    return log_evidence - float(inside + scipy.stats.norm.logpdf(0) * len(y) + entropy)


gaps, chances = {}, {}
for df in (3, 5, 9, 20, 60, None):
    one = ngvi.AutoMeanFieldNormal(with_sd) if df is None else with_df(AutoMixedTails, df)(with_sd)
    p = {k: v.detach() for k, v in fitted(with_sd, one, y, steps=150).natural_params().items()}
    loc = p["loc"] if df is None else torch.cat([p["t_loc"], p["normal_loc"]])
    log_sd = p["log_scale"] if df is None else torch.cat([p["t_log_scale"], p["normal_log_scale"]])
    t, normal = zip(loc, log_sd.exp(), strict=True)
    gaps[df] = gap(t, normal, df)
    shape = scipy.stats.norm if df is None else scipy.stats.t(df)
    chances[df] = float(shape.cdf(float(-t[0] / t[1])))

tried = [df for df in gaps if df is not None]
figure, axis = plt.subplots(figsize=(7, 3.4), layout="constrained")
curves = {
    "sd integrated out": (
        [kl[f"Student-t, {df}"] / 3 for df in tried],
        kl["Gaussian"] / 3,
        "C0",
        "o",
    ),
    "sd in the model": ([gaps[df] for df in tried], gaps[None], "C1", "s"),
}
for name, (values, gaussian, colour, mark) in curves.items():
    axis.loglog(tried, values, mark + "-", color=colour, label=name)
    axis.axhline(gaussian, color=colour, ls=":", lw=1)
axis.set(
    xlabel="degrees of freedom of q(mean)", ylabel="KL to the posterior\n[nats for one question]"
)
axis.set_xticks(tried, map(str, tried))
axis.minorticks_off()
_ = axis.legend(fontsize="small", title="dotted: the Gaussian")

# %% [markdown]
# Blue: with the sd integrated out there is a best number of degrees of freedom, 9, as there should be.
# Orange: with the sd in the model every Student-t is worse than the Gaussian, the more so the heavier
# its tails. This is no fault of the fit. The best factor for the mean is proportional to $\exp \mathbb
# E_{q(\sigma)}[\log p(\mu, \sigma, y)]$. That is the exponential of a quadratic in $\mu$: a Gaussian
# *exactly*. Given the sd the mean is normal. Its heavy tail comes from the draws in which the sd is
# large, and that is dependence, which no product of factors has.

# %% tags=["hide-input"]
about = pd.DataFrame({"KL [nats]": gaps, "P(difference < 0)": chances})
about.index = [f"Student-t, {df}" for df in tried] + ["Gaussian"]
about.style.format({"KL [nats]": "{:.4f}", "P(difference < 0)": "{:.5f}"})

# %% [markdown]
# The last column is a warning: the ELBO ranks the Gaussian first, and its tail probability, which
# should be the exact one from above, is the furthest off. A mean-field ELBO does not judge the tails
# of a margin. Integrate out what can be, or take a guide that knows dependence
# ([flows](05_flows.ipynb)).

# %% tags=["remove-cell"]
values = [gaps[df] for df in tried]
assert (
    values == sorted(values, reverse=True)
    and gaps[None] < values[-1] + 1e-3
    and gaps[None] < 0.9 * gaps[9]
)
assert chances[None] == min(chances.values()) and chances[None] < 0.1 * exact["P(difference < 0)"]

# %% [markdown]
# ## A rule: steps of one length
#
# A rule is a frozen dataclass with a `family` and the method `step`. It returns a
# {class}`~pyro_ngvi.optim.Step`: where it goes, how far in the Fisher norm (nats$^{1/2}$), and by what
# gain. What it has to remember begins in its method `start`, and goes on in `Step(state=...)`. It must
# not wait for the device, nor keep state in itself.


# %%
@dataclass(frozen=True)
class FixedLength(ngvi.optim.Rule):
    family: ngvi.families.Family
    length: float = 0.1

    def step(self, params, grads, state):
        G = self.family.natural_gradient(params, self.family.pull(params, grads))
        gain = self.length / self.family.fisher_norm(params, G)
        new = self.family.retract(params, G, -gain)
        return ngvi.optim.Step(new, length=torch.full_like(gain, self.length), gain=gain)


optim = ngvi.optim.NaturalGradient(guide, FixedLength)
svi = SVI(sleep, guide, optim, ngvi.BatchedELBO(8))
for _ in range(5):
    svi.step(hours)
print(optim.report())

# %% [markdown]
# A step of Fisher length $r$ moves q by about $r^2 / 2$ nats, whatever the units and the scales of the
# parameters. So one number suits every model, and a wild gradient cannot throw q away. What
# is wrong with such a rule? We start all three means at five hours with an sd of 0.1, and watch the KL
# divergence from q to the posterior.

# %% tags=["hide-input"]
t_levels = torch.as_tensor(scipy.stats.t.ppf((torch.arange(2000) + 0.5) / 2000, 9))[:, None]
posterior = dist.StudentT(9.0, center, scale)


@torch.no_grad()
def distance(guide):
    q = dist.StudentT(9.0, guide.loc, guide.log_scale.exp())
    z = guide.loc + guide.log_scale.exp() * t_levels
    return float((q.log_prob(z) - posterior.log_prob(z)).mean(0).sum())


def fixed(length):
    return lambda guide: ngvi.optim.NaturalGradient(guide, partial(FixedLength, length=length))


bare = {"trust_radius": None, "schedule": "constant", "momentum": 0.0, "averaging": False}
rules = {f"length {r}": fixed(r) for r in (1.0, 0.3, 0.1)}
rules |= {"gain 1, no bound": lambda guide: ngvi.NGVB(guide, **bare), "NGVB": ngvi.NGVB}
far = {"init_loc_fn": init_to_value(values={"mean": torch.full((3,), 5.0)}), "init_scale": 0.1}
walks = {}
for name, make in rules.items():
    pyro.set_rng_seed(0)
    one = AutoStudentT(sleep, init=None, **far)
    svi = SVI(sleep, one, make(one), ngvi.BatchedELBO(8))
    walks[name] = []
    for _ in range(150):
        svi.step(hours)
        walks[name].append(distance(one))
walks = pd.DataFrame(walks, index=range(1, 151))

figure, axis = plt.subplots(figsize=(7, 3.6), layout="constrained")
for name, style in zip(walks, ("C1", "C2", "C3", "0.6", "k"), strict=True):
    axis.semilogy(walks[name], color=style, lw=2 if name == "NGVB" else 1.2, label=name)
axis.set(xlabel="step", ylabel="KL from q to the posterior [nats]", ylim=(2e-5, 5e3))
_ = axis.legend(fontsize="small", ncols=2, loc="lower left")

# %% tags=["hide-input"]
late = walks.iloc[-20:].median()
arrived = (walks < 1.0).idxmax().where((walks < 1.0).any())
table = pd.DataFrame({"first below 1 nat, step": arrived, "KL, median of the last 20 steps": late})
table.style.format(dict(zip(table, ("{:.0f}", "{:.1e}"), strict=True)), na_rep="never")

# %% [markdown]
# Every fixed length is a bargain between arrival and accuracy. Long steps arrive soon, and then jump
# to and fro over the optimum, some $r^2 / 2$ nats away at most. Short ones end nearer to it and take
# far longer. The other extreme, the whole natural gradient without a bound, never arrives: where q is
# far from the posterior a step as long as the gradient says goes too far.
#
# `NGVB` has both halves of what is missing. Its *gain* lets steps shrink with the gradient, and decays,
# so the walk ends. Its *trust region* bounds their length where the gradient is wild, and grows while
# steps agree. [The page on it](../ideas/trust_region.md) has the equations.

# %% tags=["remove-cell"]
assert abs(optim.report().step_norm - 0.1) < 1e-12
assert late["length 1.0"] > late["length 0.3"] > late["length 0.1"] > 3 * late["NGVB"]
assert all(late[f"length {r}"] < r**2 / 2 for r in (1.0, 0.3, 0.1)) and late["gain 1, no bound"] > 1
assert arrived["length 1.0"] < arrived["length 0.3"] < arrived["length 0.1"]
assert arrived["NGVB"] < 0.6 * arrived["length 0.1"] and arrived.isna()["gain 1, no bound"]

# %% [markdown]
# ## An estimator: the empirical Fisher matrix
#
# An estimator of curvature is one function of the draws of a step, and one entry of a table. This one
# sums squared gradients of single observations in place of the Hessian. Its argument `drawn` has
#
# - `drawn.data(t)`: log probability and weight of each observation at a draw `t`;
# - `drawn.rest_curvature()`: the Hessian of the prior, in the form that the guide's family takes
#   (`drawn.form`, here "diagonal");
# - `drawn.average(function)`: the mean of a function over the draws.
#
# `jacfwd` runs the model once for each latent variable, `jacrev` once for each observation: take the
# fewer.


# %%
def empirical_fisher(drawn):
    def squares(t):
        J = torch.func.jacfwd(lambda t: drawn.data(t)[0])(t)  # (observations, latent variables)
        return drawn.data(t)[1] @ J.square()

    return {"diagonal": drawn.average(squares) + drawn.rest_curvature()}


ngvi.curvature.ESTIMATORS["empirical_fisher"] = empirical_fisher

# %% [markdown]
# Rules take it where they take `curvature="hessian"`. (The package has it, with shortcuts for
# networks, as `"gauss_newton"`: VOGN of Khan et al. 2018 is made of it.) We try it on one Poisson rate
# for each of seven sets of counts: yeast cells in the squares of a haemacytometer, by Student again,
# in four dilutions; Prussian soldiers killed by a horse; accidents of women in a munitions factory;
# insects on plots that were treated with six sprays, of which the model knows nothing.

# %%
how_often = {  # how many times 0, 1, 2, ... were counted
    "yeast A": [213, 128, 37, 18, 3, 1],
    "yeast B": [103, 143, 98, 42, 8, 4, 2],
    "yeast C": [75, 103, 121, 54, 30, 13, 2, 1, 0, 1],
    "yeast D": [0, 20, 43, 53, 86, 70, 54, 37, 18, 10, 5, 2, 2],
    "horse kicks": [109, 65, 22, 3, 1],
    "accidents": [447, 132, 42, 21, 3, 2],
}
counts = {
    name: torch.arange(float(len(times))).repeat_interleave(torch.tensor(times))
    for name, times in how_often.items()
}
insects = """
10 7 20 14 14 12 10 23 17 20 14 13 11 17 21 11 16 14 17 17 19 21 7 13 0 1 7 2 3 1 2 1 3 0 1 4
3 5 12 6 4 3 5 5 5 5 2 4 3 5 3 5 3 6 1 1 3 2 6 4 11 9 15 22 15 16 13 10 26 26 24 13
"""
counts["insects"] = torch.tensor([float(number) for number in insects.split()])
group = torch.arange(7).repeat_interleave(torch.tensor([len(v) for v in counts.values()]))


def rates(group, y):
    with pyro.plate("source", 7):
        log_rate = pyro.sample("log_rate", dist.Normal(0.0, 10.0))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Poisson(log_rate[group].exp()), obs=y)


def trained(curvature, steps=60):
    pyro.set_rng_seed(0)
    guide = ngvi.AutoMeanFieldNormal(rates)
    optim = ngvi.optim.VON(guide, averaging=True)
    svi = SVI(rates, guide, optim, ngvi.BatchedELBO(8, curvature=curvature))
    for _ in range(steps):
        svi.step(group, torch.cat(list(counts.values())))
    return guide


# %% tags=["hide-input"]
fits = {name: trained(name) for name in ("hessian", "empirical_fisher")}
sums = torch.stack([v.sum() for v in counts.values()])
sizes = torch.tensor([float(len(v)) for v in counts.values()])
by_source = pd.DataFrame(
    {
        "mean": sums / sizes,
        "variance / mean": [float(v.var(correction=0) / v.mean()) for v in counts.values()],
        "rate": fits["empirical_fisher"].median()["log_rate"].exp(),
        "sd of log rate, exact": torch.special.polygamma(1, sums).sqrt(),
        "by the Hessian": fits["hessian"].log_scale.detach().exp(),
        "by the empirical Fisher": fits["empirical_fisher"].log_scale.detach().exp(),
    },
    index=list(counts),
)
wrong = by_source["by the empirical Fisher"] / by_source["by the Hessian"]
formats = ["{:.2f}"] * 3 + ["{:.4f}"] * 3
by_source.style.format(dict(zip(by_source, formats, strict=True)))

# %% tags=["hide-input"]
figure, axis = plt.subplots(figsize=(7, 3.6), layout="constrained")
line = torch.linspace(0.88, 6.2, 100)
axis.plot(line, line**-0.5, color="0.6", lw=1, label="square root of mean / variance")
axis.axhline(1.0, color="k", ls=":", lw=0.8, label="the Hessian")
spread = by_source["variance / mean"]
places = {"yeast D": (-16, 16), "yeast B": (8, 9), "horse kicks": (-62, -13), "yeast C": (-46, -14)}
for name in by_source.index:
    at = {"xytext": places.get(name, (9, 6)), "textcoords": "offset points", "fontsize": 8}
    axis.plot(spread[name], wrong[name], "C0o")
    axis.annotate(name, (spread[name], wrong[name]), **at)
axis.set(xscale="log", xlabel="variance / mean of the counts", xlim=(0.7, 6.6), ylim=(0.35, 1.15))
axis.set(ylabel="sd by the empirical Fisher\nover sd by the Hessian")
axis.set_xticks([1, 1.5, 2, 3, 4, 6], ["1", "1.5", "2", "3", "4", "6"])
axis.minorticks_off()
_ = axis.legend(fontsize="small")

# %% [markdown]
# The Hessian of a log rate is the expected number of events, the empirical Fisher the sum of $(y_i -
# \lambda)^2$. Both are equal in expectation if counts scatter as a Poisson says, as the horse kicks
# and most of the yeast do. Where they scatter more the empirical Fisher takes the excess for
# information: the worse the model fits, the *narrower* q becomes. The insects get less than half of
# the sd that the model implies. The rates are right, since curvature only sets the scale, and nothing
# warns.
#
# Kunstner, Balles and Hennig (2019) say where else it goes wrong: far from the optimum, too, it need
# not look like a curvature. Here that would only cost steps; the sd is where it costs the answer. Take
# the Hessian where it is cheap, `curvature="price"` where it is not, and outer products where these
# are what a large network can afford; then compare an sd or two. What the other estimators
# compute is in {doc}`/ideas/bayesian_learning_rule`.

# %% tags=["remove-cell"]
assert (by_source["by the Hessian"] / by_source["sd of log rate, exact"] - 1).abs().max() < 0.03
assert (wrong * spread**0.5 - 1).abs().max() < 0.02
assert (by_source["rate"] / by_source["mean"] - 1).abs().max() < 0.01
assert wrong["insects"] < 0.5 and (spread.drop(["insects", "accidents"]) - 1).abs().max() < 0.25
assert (
    trained("gauss_newton", 5).log_scale - trained("empirical_fisher", 5).log_scale
).abs().max() < 1e-9
del ngvi.curvature.ESTIMATORS["empirical_fisher"]

# %% [markdown]
# ## What the package checks for you
#
# Everything that reads a guide reads yours:

# %%
print(guide.quantiles([0.05, 0.5, 0.95])["mean"].numpy().round(2))
print(f"k-hat {ngvi.khat(sleep, guide, hours).khat:.2f}")
idata = ngvi.to_arviz(sleep, guide, hours, num_samples=200)
print(dict(idata["posterior"].sizes))

# %% [markdown]
# A family that is to be part of this package takes a line in `tests/registry.py`. The contract tests
# then check its density, scores, frame and Fisher matrix against automatic differentiation and draws.
# Guides, rules and losses have such tables too.
# [Contributing](../about/contributing.md) says how to run the tests.
#
# ## Where not to go
#
# - **Heavy tails where the posterior has thin ones.** We gave `log_sd` a normal factor for a reason:
#   under a Student-t $\mathbb E[e^{-2 \log \sigma}]$, which is in the ELBO, is infinite. A fit
#   would still print a number, and change it whenever a draw is far enough out.
# - **A family whose F you do not know.** Leave `natural_gradient` out and train it by
#   {class}`~pyro_ngvi.IFVB`, which learns F from scores. For guides that exist see
#   [your own guide](../howto/own_guide.md).
# - **A rule for a new schedule.** `NGVB(guide, schedule=...)` takes a function of the step count.
# - **An estimator for speed alone**, before the sd has been compared once with that of the Hessian.
#
# **Next** {doc}`/reference/families` and {doc}`/reference/tools` for all that can be overridden.
#
# ## References
#
# - Amari, S. (1998). Natural gradient works efficiently in learning. *Neural Computation* 10:251.
#   [doi:10.1162/089976698300017746](https://doi.org/10.1162/089976698300017746)
# - Beall, G. (1942). The transformation of data from entomological field experiments so that the
#   analysis of variance becomes applicable. *Biometrika* 32. The insects, `InsectSprays` of R.
# - von Bortkiewicz, L. (1898). *Das Gesetz der kleinen Zahlen*. The horses: ten corps, twenty years.
# - Cushny, A. R. and Peebles, A. R. (1905). The action of optical isomers II: hyoscines. *Journal of
#   Physiology* 32:501. The sleepers.
# - Greenwood, M. and Yule, G. U. (1920). An inquiry into the nature of frequency distributions
#   representative of multiple happenings. *JRSS* 83:255. The accidents.
# - Khan, M. E., Nielsen, D., Tangkaratt, V., Lin, W., Gal, Y. and Srivastava, A. (2018). Fast and
#   scalable Bayesian deep learning by weight-perturbation in Adam. *ICML*.
#   [arXiv:1806.04854](https://arxiv.org/abs/1806.04854)
# - Kunstner, F., Balles, L. and Hennig, P. (2019). Limitations of the empirical Fisher approximation
#   for natural gradient descent. *NeurIPS*. [arXiv:1905.12558](https://arxiv.org/abs/1905.12558)
# - Lange, K. L., Little, R. J. A. and Taylor, J. M. G. (1989). Robust statistical modeling using the t
#   distribution. *JASA* 84:881.
#   [doi:10.1080/01621459.1989.10478852](https://doi.org/10.1080/01621459.1989.10478852)
# - Student (1907). On the error of counting with a haemacytometer. *Biometrika* 5:351. The yeast.
# - Student (1908). The probable error of a mean. *Biometrika* 6:1. The three questions.

# %% tags=["hide-input"]
print("pyro_ngvi", ngvi.__version__, "| torch", torch.__version__, "| pyro", pyro.__version__)
