"""Pyro models of posteriordb's posteriors, written from their equations; parameters have their names.

Latent sites of other names are what a parameter there is a function of.  An improper flat prior is a
``dist.ImproperUniform``, or a proper one under ``mask(False)``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from pyro.distributions import constraints
from torch import Tensor

from ..problems import hierarchical
from ..problems.posteriordb import DIMENSIONS, build, design
from ..problems.posteriordb_models import flat_regression, flat_regression_half_cauchy

Model = Callable[..., None]


def _flat(name: str, support: Any, *shape: int) -> Tensor:
    return pyro.sample(name, dist.ImproperUniform(support, torch.Size(), torch.Size(shape)))


def arma(y: Tensor) -> None:
    """y_t = mu + phi y_{t-1} + theta e_{t-1} + e_t, e_t ~ Normal(0, sigma); y_0 is mu, e_0 is 0."""
    mu = pyro.sample("mu", dist.Normal(0.0, 10.0))
    phi = pyro.sample("phi", dist.Normal(0.0, 2.0))
    theta = pyro.sample("theta", dist.Normal(0.0, 2.0))
    sigma = pyro.sample("sigma", dist.HalfCauchy(2.5))
    before, error, means = mu, torch.zeros(()), []
    for value in y:
        means.append(mu + phi * before + theta * error)
        before, error = value, value - means[-1]
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(torch.stack(means, -1), sigma), obs=y)


def garch(y: Tensor, first: float) -> None:
    """sigma_t^2 = alpha0 + alpha1 (y_{t-1} - mu)^2 + beta1 sigma_{t-1}^2, all priors flat."""
    mu = _flat("mu", constraints.real)
    alpha0 = _flat("alpha0", constraints.positive)
    # flat where alpha1 + beta1 < 1
    shares = pyro.sample("shares", dist.Dirichlet(torch.ones(3)))
    alpha1 = pyro.deterministic("alpha1", shares[..., 0])
    beta1 = pyro.deterministic("beta1", shares[..., 1])
    variance = [torch.as_tensor(first**2) + 0.0 * mu]
    for value in y[:-1]:
        variance.append(alpha0 + alpha1 * (value - mu) ** 2 + beta1 * variance[-1])
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(mu, torch.stack(variance, -1).sqrt()), obs=y)


def _two_states(rows: list[Tensor], emission: Any, data: Tensor) -> None:
    """A hidden Markov chain whose first state is either with probability 1/2."""
    change = torch.stack(rows, -2).log().unsqueeze(-3)
    # Pyro's chain changes its state before the first datum, too
    first = torch.zeros_like(change) - math.log(2.0)
    change = torch.cat([first, change.expand(*change.shape[:-3], len(data) - 1, 2, 2)], -3)
    pyro.sample("data", dist.DiscreteHMM(torch.zeros(2), change, emission), obs=data)


def _drive(data: Tensor, prior: Tensor, support: Any, emission: Callable[[Tensor], Any]) -> None:
    rows = [pyro.sample(f"theta{k + 1}", dist.Dirichlet(prior[k])) for k in range(2)]
    levels = [_flat(name, support, 2) for name in ("phi", "lambda")]
    for name, level in zip(("phi", "lambda"), levels, strict=True):
        ordered = dist.Normal(torch.tensor([0.0, 3.0]), 1.0).to_event(1)
        pyro.factor(f"prior of {name}", ordered.log_prob(level))
    _two_states(rows, emission(torch.stack(levels, -1)).to_event(1), data)


def drive_exponential(data: Tensor, prior: Tensor) -> None:
    """1 / speed and distance to the hoop: exponential with a rate for each state, in order."""
    _drive(data, prior, constraints.positive_ordered_vector, dist.Exponential)


def drive_normal(data: Tensor, prior: Tensor, sd: Tensor) -> None:
    """The same, normal with known sds."""
    _drive(data, prior, constraints.ordered_vector, partial(_normal, sd))


def _normal(sd: Tensor, mean: Tensor) -> dist.Normal:
    return dist.Normal(mean, sd)


def hidden_markov(y: Tensor) -> None:
    """Normal with sd 1 about a mean for each state: positive, in order, near 3 and 10."""
    rows = [pyro.sample(f"theta{k + 1}", dist.Dirichlet(torch.ones(2))) for k in range(2)]
    mu = _flat("mu", constraints.positive_ordered_vector, 2)
    pyro.factor("prior of mu", dist.Normal(torch.tensor([3.0, 10.0]), 1.0).to_event(1).log_prob(mu))
    _two_states(rows, dist.Normal(mu, 1.0), y)


def poisson_process(x: Tensor, k: Tensor) -> None:
    """Counts with log rate a Gaussian process, of length-scale rho and sd alpha."""
    rho = pyro.sample("rho", dist.Gamma(25.0, 4.0))
    alpha = pyro.sample("alpha", dist.HalfNormal(2.0))
    rho, alpha = (v[..., None, None] for v in (rho, alpha))
    covariance = alpha**2 * torch.exp(-(((x[:, None] - x) / rho) ** 2) / 2)
    root = torch.linalg.cholesky(covariance + 1e-10 * torch.eye(len(x)))
    white = pyro.sample("f_tilde", dist.Normal(torch.zeros(len(x)), 1.0).to_event(1))
    f = pyro.deterministic("f", (root @ white[..., None])[..., 0], event_dim=1)
    with pyro.plate("data", len(k)):
        pyro.sample("k", dist.Poisson(f.exp()), obs=k)


def _runge_kutta(
    slope: Callable[[Tensor, float], Tensor], z: Tensor, times: np.ndarray, step: float
) -> Any:
    """Solutions at increasing times, from z at 0, by the classical method, in steps of that size."""
    found, t = [], 0.0
    for end in times:
        count = math.ceil((end - t) / step - 1e-9)
        h = (end - t) / count
        for _ in range(count):
            a = slope(z, t)
            b = slope(z + 0.5 * h * a, t + 0.5 * h)
            c = slope(z + 0.5 * h * b, t + 0.5 * h)
            z = z + h / 6.0 * (a + 2.0 * (b + c) + slope(z + h * c, t + h))
            t += h
        found.append(z)
    return torch.stack(found, -2)


def lotka_volterra(y: Tensor, times: np.ndarray) -> None:
    """Hares and lynxes, ``y`` (1 + N, 2): at time 0 and at times after; log-normal errors."""
    scale = torch.tensor([0.5, 0.05, 0.5, 0.05])
    theta = _flat("theta", constraints.positive, 4)
    center = torch.tensor([1.0, 0.05, 1.0, 0.05])
    pyro.factor("prior of theta", dist.Normal(center, scale).to_event(1).log_prob(theta))
    start = pyro.sample("z_init", dist.LogNormal(math.log(10.0), torch.ones(2)).to_event(1))
    sigma = pyro.sample("sigma", dist.LogNormal(-1.0, torch.ones(2)).to_event(1))
    growth, loss = theta[..., [0, 3]], theta[..., [1, 2]]

    def slope(log_z: Tensor, t: float) -> Tensor:
        # d log u = alpha - beta v, d log v = delta u - gamma
        u, v = log_z.exp().unbind(-1)
        rate = torch.stack([-loss[..., 0] * v, growth[..., 1] * u], -1)
        return rate + torch.stack([growth[..., 0], -loss[..., 1]], -1)

    path = _runge_kutta(slope, start.log(), times, step=0.2)
    path = torch.cat([start.log().unsqueeze(-2), path], -2)
    with pyro.plate("kinds", 2, dim=-1), pyro.plate("data", len(y), dim=-2):
        pyro.sample("y", dist.LogNormal(path, sigma.unsqueeze(-2)), obs=y)


def michaelis_menten(times: np.ndarray, y: Tensor, dose: float, volume: float) -> None:
    """Concentration in one compartment: first-order absorption, elimination of Michaelis and Menten."""
    k_a, K_m, V_m, sigma = (
        pyro.sample(n, dist.HalfCauchy(1.0)) for n in ("k_a", "K_m", "V_m", "sigma")
    )

    def slope(concentration: Tensor, t: float) -> Tensor:
        taken_up = (-k_a * t).exp() * dose * k_a / volume
        cleared = V_m / volume * concentration / (K_m + concentration)
        return (taken_up.unsqueeze(-1) if taken_up.dim() else taken_up) - cleared

    path = _runge_kutta(slope, 0.0 * k_a.unsqueeze(-1), times, step=0.1)[..., 0]
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.LogNormal(path.clamp_min(1e-12).log(), sigma), obs=y)


def centered_regression(X: Tensor, y: Tensor) -> None:
    """Standard normal effects of centred covariates, wide Student-t priors of the rest."""
    b = pyro.sample("b", dist.Normal(torch.zeros(X.shape[1]), 1.0).to_event(1))
    intercept = pyro.sample("Intercept", dist.StudentT(3.0, 8.0, 10.0))
    sigma = _flat("sigma", constraints.positive)
    pyro.factor("prior of sigma", dist.StudentT(3.0, 0.0, 10.0).log_prob(sigma))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(intercept + X @ b, sigma), obs=y)


def line(x: Tensor, y: Tensor, alpha: tuple[float, float], beta: tuple[float, float]) -> None:
    """y ~ Normal(alpha + beta x, sigma), with normal priors of alpha and beta."""
    a, b = pyro.sample("alpha", dist.Normal(*alpha)), pyro.sample("beta", dist.Normal(*beta))
    sigma = _flat("sigma", constraints.positive)
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(a + b * x, sigma), obs=y)


def two_processes(y: Tensor, bases: list[Tensor], roots: list[Tensor]) -> None:
    """Mean and log sd are Gaussian processes, by ``bases`` (N, K) of frequencies ``roots`` (K,)."""
    found = []
    for at, suffix in enumerate(("", "_sigma")):
        center, width = ((-13.0, 36.0), (0.0, 10.0))[at]
        level = pyro.sample(f"Intercept{suffix}", dist.StudentT(3.0, center, width))
        sd = _flat(f"sdgp{suffix}_1", constraints.positive)
        pyro.factor(f"prior of sdgp{suffix}_1", dist.StudentT(3.0, 0.0, 36.0).log_prob(sd))
        scale = pyro.sample(f"lscale{suffix}_1", dist.InverseGamma(1.124909, 0.0177))
        size = len(roots[at])
        white = pyro.sample(f"zgp{suffix}_1", dist.Normal(torch.zeros(size), 1.0).to_event(1))
        # the root of the spectral density of the squared exponential kernel
        density = (
            sd
            * (math.sqrt(2.0 * math.pi) * scale).sqrt()
            * (-0.25 * (scale * roots[at]) ** 2).exp()
        )
        weights = pyro.deterministic(f"weights{suffix}", density * white, event_dim=1)
        found.append(level + bases[at] @ weights)
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(found[0], found[1].exp()), obs=y)


def posterior(name: str, data: dict[str, np.ndarray]) -> tuple[Model, tuple[Any, ...]]:
    """The model of that name and its arguments, tensors of the default dtype."""
    model, *args = _build(name.split("-")[1], data)
    return model, tuple(map(_tensor, args))


def _tensor(x: Any) -> Any:
    if isinstance(x, list):
        return [_tensor(part) for part in x]
    return torch.as_tensor(x, dtype=torch.get_default_dtype()) if isinstance(x, np.ndarray) else x


def _standard(x: np.ndarray) -> np.ndarray:
    return (x - x.mean()) / (2.0 * x.std(ddof=1))


def _build(model: str, d: dict[str, np.ndarray]) -> tuple[Any, ...]:
    match model:
        case "arma11":
            return arma, d["y"]
        case "garch11":
            return garch, d["y"], float(d["sigma1"])
        case "hmm_drive_0":
            return drive_exponential, np.stack([d["u"], d["v"]], -1), d["alpha"]
        case "hmm_drive_1":
            sd = np.stack([d["tau"], d["rho"]])
            return drive_normal, np.stack([d["u"], d["v"]], -1), d["alpha"], sd
        case "hmm_example":
            return hidden_markov, d["y"]
        case "gp_pois_regr":
            return poisson_process, d["x"], d["k"]
        case "lotka_volterra":
            return lotka_volterra, np.concatenate([d["y_init"][None], d["y"]]), d["ts"].tolist()
        case "one_comp_mm_elim_abs":
            times = d["times"].tolist()
            return michaelis_menten, times, d["C_hat"], float(d["D"]), float(d["V"])
        case "diamonds":
            X = d["X"][:, 1:]
            return centered_regression, X - X.mean(0), d["Y"]
        case "kilpisjarvi":
            priors = [(float(d[f"pmu{p}"]), float(d[f"ps{p}"])) for p in ("alpha", "beta")]
            return line, d["x"], d["y"], *priors
        case "accel_gp":
            bases = [d["Xgp_1"], d["Xgp_sigma_1"]]
            return two_processes, d["Y"], bases, [d["slambda_1"][:, 0], d["slambda_sigma_1"][:, 0]]
        case "eight_schools_centered":
            return hierarchical.eight_schools_centered, d["y"], d["sigma"]
        case "blr" | "nes":
            model = {"blr": "sblri_blr", "nes": "nes1980"}[model]
    if model in DIMENSIONS:  # in the zoo, of the same data or others alike
        found, args, _ = build(model, d)
        return found, *args
    if "kidscore" in model:
        return _kidscore(model, d)
    return (_mesquite if "mesquite" in model else _earnings)(model, d)


def _kidscore(model: str, d: dict[str, np.ndarray]) -> tuple[Any, ...]:
    y, kind = d["kid_score"], model.removeprefix("kidscore_")
    if kind == "mom_work":
        return flat_regression, design(*(d["mom_work"] == level for level in (2, 3, 4))), y
    hs, iq = d["mom_hs"], d["mom_iq"]
    centred = {
        "interaction_c": (hs - hs.mean(), iq - iq.mean()),
        "interaction_c2": (hs - 0.5, iq - 100.0),
        "interaction_z": (_standard(hs), _standard(iq)),
    }
    if kind in centred:
        a, b = centred[kind]
        return flat_regression, design(a, b, a * b), y
    X = {"momhs": (hs,), "momiq": (iq,), "momhsiq": (hs, iq)}[kind]
    return flat_regression_half_cauchy, design(*X), y


def _earnings(model: str, d: dict[str, np.ndarray]) -> tuple[Any, ...]:
    earn, height = d["earn"], d["height"]
    male = d["male"]
    y = {"earn": earn, "log10earn": np.log10(earn), "logearn": np.log(earn)}[model.split("_")[0]]
    X = {
        "height": (height,),
        "height_male": (height, male),
        "interaction": (height, male, height * male),
        "logheight_male": (np.log(height), male),
    }[model.split("_", 1)[1]]
    return flat_regression, design(*X), y


def _mesquite(model: str, d: dict[str, np.ndarray]) -> tuple[Any, ...]:
    names = ("diam1", "diam2", "canopy_height", "total_height", "density")
    if model == "mesquite":
        return flat_regression, design(*(d[n] for n in names), d["group"]), d["weight"]
    logs = {n: np.log(d[n]) for n in names}
    area = logs["diam1"] + logs["diam2"]
    volume, shape = area + logs["canopy_height"], logs["diam1"] - logs["diam2"]
    height, density, group = logs["total_height"], logs["density"], d["group"]
    X = {
        "logmesquite_logvolume": (volume,),
        "logmesquite_logva": (volume, area, group),
        "logmesquite_logvas": (volume, area, shape, height, density, group),
        "logmesquite_logvash": (volume, area, shape, height, group),
    }[model]
    return flat_regression, design(*X), np.log(d["weight"])
