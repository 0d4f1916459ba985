r"""Simulation-based calibration: whether fits to data that the model makes find what made them.

For theta from the prior and y given it, theta and S draws from the exact posterior given y are
exchangeable, so that PITs (:class:`Calibration`) are uniform, for discrete theta too.  They end at
1 / (S + 1), which is 3.3 sds for 1,000 draws: where many truths lie beyond all draws, z = Phi^-1(PIT)
is instead their distance from the draws in sds.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pyro
import torch
from pyro import poutine
from torch import Tensor
from tqdm.auto import tqdm

from ..linalg.host import own_random_state
from ..runtime.checks import refuse_minibatches
from ..runtime.density import Sites, site_kind, sum_log_prob
from ..runtime.model_density import map_draws, without_plates
from ..runtime.run import Conditioned, Minibatches
from ..runtime.store import ModuleParams
from .arviz_compat import from_groups
from .draws import Fitted, guide_draws, random_state, sites_of_kind
from .groups import name_dims, per_draw
from .new_data import fixed_parameters, simulate

#: simulations below which limits of many are too far for p-values
FEWEST = 20
#: probability of an alarm, over all tests of a site together, where nothing is wrong
ALPHA = 0.01
#: share of truths beyond all draws, above twice that of exact guides, where PITs do not say how far
BEYOND = 0.05
#: the largest distance from the draws in sds of theirs, as from draws that are all alike
FARTHEST = 1e6
#: the log density of data and latent sites together, whose PITs stand beside those of the sites
JOINT = "log_joint"


@dataclass(frozen=True)
class Uniformity:
    r"""What the PITs of a site say, entry by entry: arrays of the shape of the site.

    Attributes:
        bias: the mean of z = Phi^-1(PIT), by how many sds of the guide the truth lies above its draws.
        ratio: the sd of z, that which the draws should have over theirs: above 1, theirs is too small.
        uniform: p-value of Kolmogorov and Smirnov's test of the PITs.
        symmetric: p-value of :math:`\sup_x |F(x) + F(1 - x) - 1|`, the distance of PITs and 1 - PITs,
            zero but for noise where the guide is not biased (Yao et al., section 3); as of the maximum
            of a Brownian motion, the limit of the signs of PIT - 1/2 from the ends inwards.
        spread: p-value of :math:`\sum (z - \bar z)^2`, which has :math:`\chi^2_{N-1}`.  Where more than
            5 % of truths lie beyond all draws it is the larger one of PITs and of distances in sds.

    Example:
        >>> found = Uniformity(*map(np.array, (0.1, 2.0, 1e-5, 0.5, 1e-9)))
        >>> found.findings(), found.p_value
        (['sds too small by a factor of 2'], 3...e-09)
    """

    bias: np.ndarray
    ratio: np.ndarray
    uniform: np.ndarray
    symmetric: np.ndarray
    spread: np.ndarray

    @property
    def p_value(self) -> float:
        """The smallest of all p-values, times how many there are (Bonferroni), at most 1."""
        of_all = np.stack([self.uniform, self.symmetric, self.spread])
        return float(min(1.0, of_all.size * of_all.min()))

    def findings(self, alpha: float = ALPHA) -> list[str]:
        """What is wrong, in words, by p-values below ``alpha`` over their number."""
        level = alpha / (3 * self.bias.size)
        skewed, spread = self.symmetric < level, self.spread < level
        bias, ratio, n = self.bias, self.ratio, self.bias.size
        by_sd = "by {:.2g} sd".format
        by_factor = "by a factor of {:.2g}".format
        kinds = (
            ("biased low", skewed & (bias > 0.0), bias, by_sd),
            ("biased high", skewed & (bias <= 0.0), -bias, by_sd),
            ("sds too small", spread & (ratio > 1.0), ratio, by_factor),
            ("sds too large", spread & (ratio <= 1.0), 1.0 / ratio, by_factor),
        )
        found = [
            f"{what} {by(x[at].max())}" + f" at most, in {at.sum()} of {n} entries" * (n > 1)
            for what, at, x, by in kinds
            if at.any()
        ]
        shape = (self.uniform < level).any() and not found
        return [*found, *["another shape than the posterior's"] * bool(shape)]


@dataclass(frozen=True)
class Calibration:
    """What :func:`pyro_ngvi.diagnostics.calibrate` found.

    Attributes:
        pits: by site, (N, ...), in the order of the simulations, without those that failed: the shares
            of draws below the truth, (#below + u (1 + #equal)) / (S + 1), u uniform.
        sites: :class:`Uniformity` of each.
        failed: errors of the fits that failed, by number of the simulation.
        dims: names of dimensions by site.

    Example:
        >>> pits = np.linspace(0.0, 0.5, 102)[1:-1]  # all truths are below the medians
        >>> found = Calibration({"m": pits}, {"m": uniformity(pits)}, {}, {"m": []})
        >>> found.ok, found.verdict[:31], round(float(found.sites["m"].bias), 1)
        (False, "Not calibrated: 'm' biased high", -0.8)
    """

    pits: dict[str, np.ndarray] = field(repr=False)
    sites: dict[str, Uniformity] = field(repr=False)
    failed: dict[int, Exception]
    dims: dict[str, list[str]] = field(repr=False)

    @property
    def findings(self) -> dict[str, str]:
        """What is wrong, in words, by site, which share the probability of a false alarm."""
        found = {name: x.findings(ALPHA / len(self.sites)) for name, x in self.sites.items()}
        return {name: ", ".join(words) for name, words in found.items() if words}

    @property
    def ok(self) -> bool:
        """Whether nothing was found, and no fit failed."""
        return not self.findings and not self.failed

    @property
    def verdict(self) -> str:
        """What was found, in words."""
        n = len(next(iter(self.pits.values())))
        wrong = "; ".join(f"{name!r} {words}" for name, words in self.findings.items())
        errors = (
            f"standard errors {n**-0.5:.2f} sd of a mean, {100 * (2 * n) ** -0.5:.0f} % of an sd"
        )
        found = f"Not calibrated: {wrong}" if wrong else "Nothing found wrong"
        failed = f" {len(self.failed)} more fits failed, and count for nothing here."
        return f"{found} ({n} simulations: {errors})." + failed * bool(self.failed)

    @property
    def idata(self) -> Any:
        """ArviZ's container with the PITs in the group ``prior_sbc``, for its ``plot_ecdf_pit``."""
        return from_groups({"prior_sbc": per_draw(self.pits)}, dims=self.dims)

    def __str__(self) -> str:
        found = self.findings
        lines = [
            f"  {name} ({'off' if name in found else 'good'}): p-value {x.p_value:.2g}; "
            f"uniform {x.uniform.min():.2g}, symmetric {x.symmetric.min():.2g}, "
            f"spread {x.spread.min():.2g}" + f" at least, of {x.bias.size}" * (x.bias.size > 1)
            for name, x in self.sites.items()
        ]
        return "\n".join([self.verdict, *lines])


def calibrate(
    model: Callable[..., Any],
    fit: Callable[[Callable[..., Any]], Any],
    *args: Any,
    num_simulations: int = 200,
    num_samples: int = 1000,
    seed: int | None = None,
    progress: bool = True,
    **kwargs: Any,
) -> Calibration:
    r"""Whether fits to data that the model makes are right on average over its prior.

    Latent sites and data are drawn from the model N times, each time ``fit`` is called for these data,
    and PITs (:class:`Calibration`) are uniform where guides are exact.  Where they lean to one side,
    means are biased; in the shape of a U, sds are too small.  So of deterministic sites, and of
    ``log_joint``, the log density of data and latent sites: it alone tells a guide that gives back the
    prior, and wrong correlations.  Biased low, draws lie too far out; high, too near the mode.

    Not for one posterior, which :func:`pyro_ngvi.diagnose` judges, nor for likelihoods under
    ``poutine.scale``, from which data are not drawn, nor with a guide that reads the data from its
    arguments, which stay those given, as do masks, plates and lags of a series.

    Each fit has a parameter store of its own.  Until one fit has worked its error is raised; later ones
    are warned of and kept.  Ctrl-C ends it with what there is.

    Args:
        model: the Pyro model.
        fit: trains a guide of the model that it is given, the model with drawn data in place of its
            observed values, to be called as the model.  Returns it, or what has it as ``guide``:
            ``lambda model: ngvi.fit(model, X, y, progress=False)``.
        args: those of the model, and ``kwargs``: the full data, of which shapes and masks count.
        num_simulations: N, at least 20.
        num_samples: draws of each guide.
        seed: makes the result repeatable, whatever seeds ``fit`` sets.
        progress: whether to show a bar.

    Raises:
        ValueError: for a model without data, with a minibatch, parameters or ``pyro.factor``; for fewer
            than 20 simulations, or fits that worked; as :func:`pyro_ngvi.khat`.
        NotImplementedError: of an improper prior.

    Sources: Talts et al. (2018), arXiv 1804.06788; Yao et al. (2018), "Yes, but did it work?", ICML,
    section 3; for ``log_joint`` Modrak et al. (2023), Bayesian Analysis.

    Example:
        >>> import pyro.distributions as dist
        >>> def model(y):
        ...     m = pyro.sample("m", dist.Normal(0.0, 1.0))
        ...     pyro.sample("y", dist.Normal(m, 1.0), obs=y)
        >>> def fit(model):  # the posterior, but for its sd: 0.71
        ...     y = pyro.poutine.trace(model).get_trace(torch.tensor(0.0)).nodes["y"]["value"]
        ...     return lambda _: pyro.sample("m", dist.Normal(0.5 * y, 0.35))
        >>> got = calibrate(model, fit, torch.tensor(0.0), num_simulations=100, seed=0, progress=False)
        >>> got.findings["m"]
        'sds too small by a factor of 2...'
    """
    if num_simulations < FEWEST:
        raise ValueError(
            f"num_simulations is {num_simulations}; raise num_simulations to {FEWEST} or more."
        )
    program, store = partial(model, *args, **kwargs), pyro.get_param_store()
    with store.scope():
        sites = _drawn_sites(program)
    observed = sites_of_kind(sites, "observed")
    for note in fixed_parameters(program, sites, {}):
        warnings.warn(note, stacklevel=2)
    root = int(torch.randint(2**31, (), device="cpu")) if seed is None else seed
    names = [name for name, site in sites.items() if site_kind(site) != "deterministic"]
    with random_state(root):
        drawn = simulate(program, observed, names, {}, num_simulations, None, small=False)
    runs: list[dict[str, np.ndarray]] = []
    failed: dict[int, Exception] = {}
    for i in tqdm(range(num_simulations), unit="fit", leave=False, disable=not progress):
        truth = {name: x[i] for name, x in drawn.items()}
        given = poutine.condition(model, data={name: truth[name] for name in observed})
        try:
            with store.scope():
                with random_state(root, 2 * i + 1):
                    found = fit(given)
                if getattr(found, "why_stopped", None) in ("interrupted", "terminated"):
                    raise KeyboardInterrupt
                # apart, for a fit may set a seed: draws of all guides would be alike
                with random_state(root, 2 * i + 2):
                    fitted = Fitted(given, getattr(found, "guide", found), args, kwargs)
                    runs.append(_pits(fitted, truth, num_samples))
        except KeyboardInterrupt:
            if len(runs) < FEWEST:
                raise
            break
        except Exception as error:
            if not runs:
                error.add_note(f"in simulation {i} of {num_simulations} of calibrate")
                raise
            failed[i] = error
            warnings.warn(
                f"calibrate: the fit of simulation {i} failed and is left out: {error!r:.80}. Its "
                f"error is kept in Calibration.failed[{i}].",
                RuntimeWarning,
                stacklevel=2,
            )
    if len(runs) < FEWEST:
        raise ValueError(
            f"calibrate: {len(runs)} of {num_simulations} fits worked, and {FEWEST} are needed. Look "
            f"at the error of one: {next(iter(failed.values()))!r:.80}."
        )
    by_site = {name: np.stack([x[name] for x in runs], 1) for name in runs[0]}
    pits = {name: pit for name, (pit, _) in by_site.items()}
    tests = {name: uniformity(x[0], x[1], num_samples) for name, x in by_site.items()}
    return Calibration(pits, tests, failed, name_dims({"prior_sbc": pits}, sites, {}, {}))


def _drawn_sites(program: Callable[[], Any]) -> Sites:
    """The sites of a model all of which can be drawn."""
    minibatches = Minibatches()
    with torch.no_grad(), own_random_state(), ModuleParams(), Conditioned({}, minibatches) as ran:
        program()
    refuse_minibatches(ran.sites, minibatches)
    sites = without_plates(ran.sites)
    for name in [*ran.params, *sites_of_kind(sites, "factor")]:
        raise ValueError(
            f"calibrate draws all unknowns from the model, and {name!r} is a parameter or a "
            f"pyro.factor, without a distribution. Make it a sample site, or a number (a buffer)."
        )
    if not sites_of_kind(sites, "observed"):
        raise ValueError(
            "calibrate: the model has no observed site with these arguments. Pass the data, or "
            "anything of their shape: they are drawn anew."
        )
    return sites


def _pits(fitted: Fitted, truth: Mapping[str, Tensor], num_samples: int) -> dict[str, np.ndarray]:
    """PITs of what the model shows at the truth and at draws of the guide, and the distance of the
    truth from their mean in sds of theirs: (2, ...) by site."""
    draws, _ = guide_draws(fitted.guide, num_samples)
    values = {name: torch.cat([truth[name][None], draws[name]]) for name in fitted.latent}

    def shown(sites: Sites) -> dict[str, Tensor]:
        found = {name: sites[name]["value"] for name in fitted.shown}
        return found | {JOINT: sum_log_prob(sites)}

    pits = {}
    for name, x in map_draws(fitted.joint, shown, values, num_samples + 1).items():
        if x.isnan().any():
            raise ValueError(
                f"{name!r} is NaN at draws of the guide: its fit has diverged. Give another "
                f"guide, or smaller steps."
            )
        below, same = ((x[1:] < x[0]).sum(0).cpu(), (x[1:] == x[0]).sum(0).cpu())
        u = torch.rand(below.shape, dtype=torch.float64, device="cpu")
        pit = (below + u * (1 + same)) / (num_samples + 1)
        value = x.cpu().double()
        tiny = torch.finfo(value.dtype).tiny
        far = (value[0] - value[1:].mean(0)) / value[1:].std(0, correction=0).clamp_min(tiny)
        pits[name] = torch.stack([pit, far.clamp(-FARTHEST, FARTHEST)]).numpy()
    return pits


def uniformity(
    pit: np.ndarray, far: np.ndarray | None = None, num_samples: int | None = None
) -> Uniformity:
    """The tests of PITs (N, ...), entry by entry, with distances from the mean in sds of the draws."""
    x, n, root = torch.from_numpy(pit), len(pit), len(pit) ** 0.5
    z = ranked = torch.special.ndtri(x)
    if far is not None and num_samples is not None:
        end = 1.0 / (num_samples + 1)
        beyond = (torch.minimum(x, 1.0 - x) < end).double().mean(0) > BEYOND + 4.0 * end
        distance = torch.from_numpy(far)
        z = torch.where(beyond & ~distance.isnan().any(0), distance, ranked)
    counts = torch.arange(max(n, 100) + 1, dtype=x.dtype).reshape(-1, *[1] * (x.dim() - 1))
    steps, j = counts[: n + 1] / n, counts[1:100]
    sign = 1.0 - 2.0 * ((j - 1.0) % 2.0)
    ends = x.sort(0).values
    gap = torch.maximum(steps[1:] - ends, ends - steps[:-1]).amax(0)
    gap = gap * (root + 0.12 + 0.11 / root)  # Stephens' correction for finite N
    uniform = 2.0 * (sign * (-2.0 * (j * gap).square()).exp()).sum(0)
    inwards = (x - 0.5).abs().argsort(0, descending=True)
    walk = (x - 0.5).sign().gather(0, inwards).cumsum(0).abs().amax(0) / root
    symmetric = 4.0 * (sign * torch.special.ndtr((1.0 - 2.0 * j) * walk)).sum(0)
    # an alarm needs the ranks, which know no tails, and what they cannot tell from a bias
    sds, half = torch.stack([ranked.std(0), z.std(0)]), x.new_tensor(0.5 * (n - 1))
    below = torch.special.gammainc(half, half * sds.square())
    spread = 2.0 * torch.minimum(below, 1.0 - below).amax(0)
    ps = (p.clamp(0.0, 1.0) for p in (uniform, symmetric, spread))
    return Uniformity(*(t.numpy() for t in (z.mean(0), sds[1], *ps)))
