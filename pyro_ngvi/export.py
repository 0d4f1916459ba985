"""A fitted guide as ArviZ groups."""

import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from pyro_ngvi import _groups
from pyro_ngvi._arviz_compat import from_groups
from pyro_ngvi._draws import (
    SampleObserved,
    draw_and_evaluate,
    prototype_sites,
    random_state,
    run_batched,
    sites_of_kind,
    warn_of_edges,
)
from pyro_ngvi._fitted import fitted_parameters
from pyro_ngvi._particles import Minibatches, Sites, run_plainly
from pyro_ngvi._random import own_random_state
from pyro_ngvi._summed_out import SummedOut, given_name, summed_out
from pyro_ngvi._version import __version__
from pyro_ngvi.density import BatchedTrace, site_kind, site_log_prob
from pyro_ngvi.diagnostics._pareto import systematic_resample
from pyro_ngvi.diagnostics.khat import KHat, judge

__all__ = ["to_arviz"]


def to_arviz(
    model: Callable[..., Any],
    guide: Callable[..., Any],
    *args: Any,
    num_samples: int = 1000,
    prior: bool = False,
    posterior_predictive: bool = True,
    log_likelihood: bool = True,
    coords: Mapping[str, Sequence[Any]] | None = None,
    dims: Mapping[str, Sequence[str]] | None = None,
    seed: int | None = None,
    batch_size: int | None = None,
    resample: str | None = None,
    discrete: bool = False,
    **kwargs: Any,
) -> Any:
    r"""Draws from any Pyro guide as ArviZ's ``InferenceData`` (0.x) or ``DataTree`` (1.x).

    The groups, with S = ``num_samples`` independent draws in one "chain":

    * ``posterior``: latent sites, constrained, and ``pyro.deterministic`` sites. The dimension of
      a plate has the plate's name, any other is called ``{site}_dim_{i}``.
    * ``sample_stats``: ``lp`` = log p(data, z) and ``log_q`` = log q(z), both over the sites as the
      model writes them (over the unconstrained space both would gain the same log-Jacobian), and
      ``log_weights`` = lp - log_q, normalised so that the weights sum to one. In nats.
    * ``log_likelihood``: per example and observed site, in nats, without ``poutine.scale`` (with a
      warning: ``az.loo`` would be wrong) and without ``pyro.factor`` (a warning where one lies in a
      plate with data); zero where the site is masked.
    * ``posterior_predictive``, and where asked ``prior`` and ``prior_predictive``: observed sites
      drawn anew. A site that ``poutine.condition`` has fixed is one of them; fix parameters by
      ``poutine.do``.
    * ``observed_data``: observed sites. ``constant_data``: the model's arguments that are tensors
      or arrays, unless they are the data of an observed site, and the fitted values of its parameters
      (``pyro.param``, modules), by name.

    With ``resample="psis"`` the posterior is corrected by importance sampling: the draws are
    resampled in proportion to their Pareto-smoothed weights (systematically: a draw of weight w
    comes S w times, rounded up or down), in the groups ``posterior``, ``log_likelihood`` and
    ``posterior_predictive``. ``sample_stats`` stays that of the guide's own draws, and gains
    ``resampled_from``, the number of the one that each posterior draw is. Repeated draws stand side
    by side, so ArviZ's ESS and errors count them about right. It can correct what k-hat finds
    correctable, no more.

    The attributes of the container and of ``posterior`` hold ``decision`` ("intervals", "resample" or
    "unusable") and ``verdict``, the same in words (:class:`~pyro_ngvi.diagnostics.KHat`); ``khat``,
    ``khat_threshold``, ``kl`` and ``ess``; ``num_samples``, ``guide``, ``inference_library`` and
    its version, and where asked ``resample`` and ``resample_ess``, how many exact draws the
    smoothed weights are worth. ``arviz.summary`` shows R-hat and ESS as if the draws were a
    chain's: use :func:`pyro_ngvi.summary`. The ``arviz.loo_approximate_posterior`` of ArviZ 1.x
    takes ``lp`` and ``log_q``; resampled draws need no such correction, nor fit to these.

    Latent sites that are marked ``infer={"enumerate": "parallel"}`` and not in the guide are summed
    out. ``log_likelihood`` is then that of the data without them: where data share such a variable,
    by the cells of the plates around all of it (``y_1..y_9_by_animal``), and left out with a warning
    where there is no such plate, as in a hidden Markov model of one series. With ``discrete`` they are
    drawn, given each draw of the others and the data, into ``posterior``, with the deterministic sites
    that depend on them (by ``pyro.infer.infer_discrete``, once for each draw), and predictions are
    made with them. A likelihood that can not be drawn from has no predictive groups (a warning).

    The parameter store and gradients are left alone. The model runs batched over the draws, or
    once for each where it can not. Not for a model that subsamples its data: give the full data.

    :param model: the Pyro model. If a keyword argument of it has the name of an option here, bind
        it first with ``functools.partial``.
    :param guide: any trained Pyro guide of it.
    :param args: what the model is called with: the full data.
    :param num_samples: S, at least 25.
    :param prior: whether to add ``prior`` and ``prior_predictive``; every prior must be proper.
    :param posterior_predictive: whether to add that group.
    :param log_likelihood: whether to add that group.
    :param coords: labels by dimension; without them a dimension counts from 0.
    :param dims: names of all dimensions by site or argument, instead of the ones above.
    :param seed: makes the result repeatable and leaves the global random state as it was.
    :param batch_size: draws that the model sees at once, to bound memory; ``None`` for all.
    :param resample: ``"psis"`` for importance resampling, ``None`` for the guide's own draws.
    :param discrete: whether to draw the sites that are summed out.
    :param kwargs: keyword arguments of the model.
    :warns RuntimeWarning: where rounding has put draws onto the end of their support.
    :warns UserWarning: for a guide that is a point mass in some latent sites.
    :warns RuntimeWarning: with ``resample``, when k-hat says that the weights are not to be relied
    on. :raises ValueError: when a plate is subsampled; for data outside the support of their site;
        when the guide is a point mass, lacks a latent
        site of the model or is of another model; for fewer than 25 draws; when ``coords`` or
        ``dims`` do not fit; for another ``resample``, and with it for weights that are not finite.

    >>> import pyro, torch, pyro.distributions as dist
    >>> from pyro.infer.autoguide import AutoNormal
    >>> def model(y):
    ...     mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
    ...     with pyro.plate("unit", len(y)):
    ...         pyro.sample("y", dist.Normal(mu, 1.0), obs=y)
    >>> data = to_arviz(model, AutoNormal(model), torch.ones(3), num_samples=100, seed=0)
    >>> data["log_likelihood"]["y"].dims
    ('chain', 'draw', 'unit')
    >>> data.attrs["guide"]
    'AutoNormal'
    """
    if resample not in (None, "psis"):
        raise ValueError(f'resample must be None or "psis", got {resample!r}.')
    with random_state(
        seed
    ):  # apart, because a guide's first run ever may draw more than later ones
        prototype = prototype_sites(model, guide, args, kwargs)
    latent = sites_of_kind(prototype, "latent")
    observed = sites_of_kind(prototype, "observed")
    exported = [*latent, *sites_of_kind(prototype, "deterministic")]
    groups: _groups.Groups = {}
    with random_state(seed):
        joint = summed_out(model, prototype)
        draws = draw_and_evaluate(joint, guide, args, kwargs, latent, num_samples, batch_size)
        diagnostic = judge(joint, args, kwargs, prototype, draws, batch_size)
        warn_of_edges(prototype, draws.values)
        if fixed := draws.point_masses:
            diagnostic = replace(diagnostic, khat=float("inf"))
            warnings.warn(
                f"All draws of {', '.join(map(repr, fixed))} from the guide are the same point "
                f"(AutoDelta?): what is exported is the posterior of the rest given that point, with "
                f"sds of 0 for it, and no weights could correct that; k-hat is set to infinity.",
                UserWarning,
                stacklevel=2,
            )
        values, source = draws.values, draws.model
        if discrete and isinstance(joint, SummedOut):
            given = {given_name(name): x for name, x in values.items()}
            source = run_batched(joint.with_draws(latent), given, args, kwargs, num_samples)
            values = values | {name: source.sites[name].value for name in joint.names}
            exported += joint.names
        # without draws of them, a function of enumerated sites has the shape of all their values
        exported = [n for n in exported if _has_shape(source, n, prototype[n]["value"].shape)]
        groups["posterior"] = _groups.site_values(source, exported)
        if log_likelihood:
            _warn_of_scales(prototype, observed)
            _warn_of_factors(prototype, observed)
            data = _data_sites(draws.model, prototype)
            groups["log_likelihood"] = _groups.log_likelihoods(draws.model, data)
        stats: dict[str, Any] = {"lp": draws.log_joint, "log_q": draws.log_q}
        stats["log_weights"] = diagnostic.log_weights
        if resample:
            stats["resampled_from"] = kept = _resample(diagnostic)
            values = {name: x[torch.from_numpy(kept).to(x.device)] for name, x in values.items()}
            for group in groups.values():
                group |= {name: x[:, kept] for name, x in group.items()}
        groups["sample_stats"] = _groups.per_draw(**stats)
        at = {name: x[0] for name, x in draws.values.items()}

        def drawn_anew(names: Collection[str]) -> Sites:
            with own_random_state():
                return run_plainly(SampleObserved(names)(model), at, args, kwargs, Minibatches())

        predict = SampleObserved(observed)(model)
        try:
            drawn_anew(observed)
        except NotImplementedError as error:
            warnings.warn(
                f"An observed site can not be drawn ({error or 'it has no sample method'}): the "
                f"predictive groups are left out. Give its distribution a sample method, or pass "
                f"posterior_predictive=False.",
                UserWarning,
                stacklevel=2,
            )
            posterior_predictive, predict = False, model
        else:
            _warn_of_fixed(prototype, observed, drawn_anew)
        if posterior_predictive:
            run = run_batched(predict, values, args, kwargs, num_samples, batch_size)
            groups["posterior_predictive"] = _groups.site_values(run, observed)
        if prior:
            run = run_batched(predict, {}, args, kwargs, num_samples, batch_size)
            groups["prior"] = _groups.site_values(run, exported)
            if predict is not model:
                groups["prior_predictive"] = _groups.site_values(run, observed)
    with torch.no_grad(), own_random_state():
        in_joint = run_plainly(joint, at, args, kwargs, Minibatches())
    sums = groups.get("log_likelihood", {}).keys() - prototype.keys()
    prototype |= {name: in_joint[name] for name in sums}
    groups["observed_data"] = _groups.observations(prototype, observed)
    constants = _groups.constants(model, args, kwargs, prototype)
    for name, value in fitted_parameters(model, guide, args, kwargs).items():
        constants[f"{name}_parameter" if name in constants else name] = value
    groups["constant_data"] = constants
    groups = {name: group for name, group in groups.items() if group}
    resampling: dict[str, str | float] = {}
    if resample:
        ess = float(1 / np.exp(2 * diagnostic.psis_log_weights).sum())
        resampling = {"resample": resample, "resample_ess": ess}
    return from_groups(
        groups,
        coords=coords,
        dims=_groups.name_dims(groups, prototype, dims or {}, coords or {}),
        attrs={
            "inference_library": "pyro_ngvi",
            "inference_library_version": __version__,
            "guide": getattr(guide, "__name__", type(guide).__name__),
            "num_samples": num_samples,
            "khat": diagnostic.khat,
            "khat_threshold": diagnostic.threshold,
            "kl": diagnostic.kl,
            "ess": diagnostic.ess,
            "decision": diagnostic.decision,
            "verdict": diagnostic.verdict,
            **resampling,
        },
    )


def _has_shape(trace: BatchedTrace, name: str, shape: torch.Size) -> bool:
    return name in trace.sites and trace.sites[name].value.shape[1:] == shape


def _data_sites(trace: BatchedTrace, prototype: Sites) -> list[str]:
    """The observed sites with a likelihood by example: all but the sums without a plate."""
    data = [name for name, site in trace.sites.items() if site.kind == "observed"]
    whole = [n for n in data if n not in prototype and not trace.sites[n].plates]
    if whole:
        warnings.warn(
            f"The data {', '.join(map(repr, whole))} share an enumerated variable and have no "
            f"likelihood by example: log_likelihood leaves them out. A plate of independent series "
            f"around them gives it their likelihoods.",
            UserWarning,
            stacklevel=3,
        )
    return [name for name in data if name not in whole]


def _warn_of_scales(sites: Sites, observed: Iterable[str]) -> None:
    """ArviZ takes for granted that the posterior holds each likelihood once."""
    for name in observed:
        if bool((torch.as_tensor(sites[name]["scale"]) != 1.0).any()):
            warnings.warn(
                f"The observed site {name!r} stands under poutine.scale, so the posterior holds p^c, "
                f"and log_likelihood is log p. az.loo and az.waic weigh draws by 1 / p and are wrong "
                f"here; AutoSites.loo() is not. log_likelihood=False leaves the group out.",
                UserWarning,
                stacklevel=3,
            )


def _warn_of_factors(sites: Sites, observed: Iterable[str]) -> None:
    """A factor in the plate of data may be a part of their likelihood, as of censored data."""
    plates = {frame.name for name in observed for frame in sites[name]["cond_indep_stack"]}
    for name, site in sites.items():
        if site_kind(site) == "factor" and plates & {f.name for f in site["cond_indep_stack"]}:
            warnings.warn(
                f"The pyro.factor {name!r} lies in a plate with data, and log_likelihood does not have "
                f"it. Where it stands for a likelihood (of censored data, say) az.loo and az.waic are "
                f"wrong: write it as an observed site.",
                UserWarning,
                stacklevel=3,
            )


def _warn_of_fixed(
    prototype: Sites, observed: Iterable[str], run: Callable[[Collection[str]], Sites]
) -> None:
    """Sites that poutine.condition has fixed count as data, whatever they stand for.

    What other data, of more than a number, depend on, and is one number, is taken for a parameter;
    ``run`` draws some observed sites anew.
    """
    numbers = [name for name in observed if prototype[name]["fn"].shape().numel() == 1]
    others = [name for name in observed if name not in numbers]
    if not (numbers and others):
        return

    def terms(anew: Collection[str]) -> list[torch.Tensor]:
        sites = run(anew)
        return [site_log_prob(sites[name])[0] for name in others]

    before = terms(())
    for name in numbers:
        after = terms((name,))
        if not all(map(torch.equal, before, after)):
            warnings.warn(
                f"The observed site {name!r} is one number, and others depend on it, as on a parameter "
                f"that poutine.condition has fixed: here it counts as data, has a log_likelihood, and "
                f"is drawn anew in posterior_predictive, with all that depends on it. Fix parameters "
                f"by pyro.poutine.do(model, data=...), or in the model.",
                UserWarning,
                stacklevel=3,
            )


def _resample(diagnostic: KHat) -> np.ndarray:
    """Numbers (S,) of the draws that stand for the posterior."""
    log_weights = diagnostic.psis_log_weights
    if diagnostic.decision == "unusable":
        warnings.warn(
            f'resample="psis" can not be relied on here. {diagnostic.verdict}',
            RuntimeWarning,
            stacklevel=3,
        )
    return systematic_resample(log_weights, float(torch.rand((), dtype=torch.float64)))
