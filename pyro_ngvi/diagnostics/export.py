"""A fitted guide as ArviZ groups."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from .._version import __version__
from ..runtime.map_draws import map_draws
from ..runtime.summed_out import SummedOut, given_name
from ..runtime.vmap import Sites
from . import groups as _groups
from .arviz_compat import from_groups
from .draws import Fitted, random_state, sites_of_kind, warn_of_edges
from .export_checks import can_be_drawn, warn_of_factors, warn_of_scales, with_likelihood
from .khat import KHat, judge
from .prediction import PREDICTIONS, NewData, fixed_parameters, simulate
from .weights import systematic_resample

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
    predictions: tuple[Any, ...] | Mapping[str, Any] | None = None,
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
    * ``predictions``, ``predictions_constant_data`` where asked: what :func:`predict` draws at other
      arguments from the draws in ``posterior``, and those arguments.

    Arrays of more than ten million numbers (1,000 draws at 10,000 rows) are stored in float32, but
    for ``posterior``; leave out ``log_likelihood`` and ``posterior_predictive`` where even that is
    too much.

    With ``resample="psis"`` the posterior is corrected by importance sampling: the draws are resampled
    in proportion to their Pareto-smoothed weights (systematically: a draw of weight w comes S w
    times, rounded up or down), in the groups ``posterior``, ``log_likelihood``,
    ``posterior_predictive`` and ``predictions``. ``sample_stats`` stays that of the guide's own draws,
    and gains ``resampled_from``, the number of the one that each posterior draw is. Repeated draws
    stand side by side, so ArviZ's ESS and errors count them about right. It can correct what k-hat
    finds correctable, no more.

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
    made with them. A likelihood that cannot be drawn from has no predictive groups (a warning).

    The parameter store and gradients are left alone. The model runs batched over the draws, or
    once for each where it cannot. Not for a model that subsamples its data: give the full data.

    Args:
        model: the Pyro model. If a keyword argument of it has the name of an option here, bind
            it first with ``functools.partial``.
        guide: any trained Pyro guide of it.
        args: what the model is called with: the full data.
        num_samples: S, at least 25.
        prior: whether to add ``prior`` and ``prior_predictive``; every prior must be proper.
        posterior_predictive: whether to add that group.
        log_likelihood: whether to add that group.
        coords: labels by dimension; without them a dimension counts from 0.
        dims: names of all dimensions by site or argument, instead of the ones above.
        seed: makes the result repeatable and leaves the global random state as it was.
        batch_size: draws that the model sees at once; ``None`` for a number that bounds the
            memory beside the result.
        resample: ``"psis"`` for importance resampling, ``None`` for the guide's own draws.
        discrete: whether to draw the sites that are summed out.
        predictions: the model's arguments at new data, ``(X_new,)``, or its keyword arguments,
            ``{"X": X_new}``. Names of dimensions hold for them, ``coords`` do not: the rows are
            others.
        kwargs: keyword arguments of the model.

    Raises:
        ValueError: when a plate is subsampled; for data outside the support of their site; when
            the guide is a point mass, lacks a latent site of the model or is of another model;
            for fewer than 25 draws; when ``coords`` or ``dims`` do not fit; for another
            ``resample``, and with it for weights that are not finite; where :func:`predict`
            refuses ``predictions``.

    Warns:
        RuntimeWarning: where rounding has put draws onto the end of their support.
        UserWarning: for a guide that is a point mass in some latent sites.
        RuntimeWarning: with ``resample``, when the weights are not to be relied on.

    Example:
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
    with random_state(seed):  # apart: a guide's first run ever may draw more than later ones
        fitted = Fitted(model, guide, args, kwargs)
    prototype, observed = fitted.sites, sites_of_kind(fitted.sites, "observed")
    exported = fitted.shown
    groups: _groups.Groups = {}
    with random_state(seed):
        with_terms = with_likelihood(fitted.in_sum, prototype) if log_likelihood else ()
        draws = fitted.draw(num_samples, batch_size, with_terms)
        diagnostic = judge(fitted, draws, batch_size)
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
        values, posterior = draws.values, draws.sites
        if discrete and isinstance(fitted.joint, SummedOut):
            posterior = _with_discrete(fitted, fitted.joint, values, num_samples)
            values = values | {name: posterior[name] for name in fitted.joint.names}
            exported = list(posterior)
        groups["posterior"] = _groups.per_draw(**posterior)
        if log_likelihood:
            warn_of_scales(prototype, observed)
            warn_of_factors(prototype, observed)
            groups["log_likelihood"] = _groups.per_draw(**draws.log_likelihood)
        stats: dict[str, Any] = {"lp": draws.log_joint, "log_q": draws.log_q}
        stats["log_weights"] = diagnostic.log_weights
        if resample:
            stats["resampled_from"] = kept = _resample(diagnostic)
            values = {name: x[torch.from_numpy(kept).to(x.device)] for name, x in values.items()}
            for group in groups.values():
                group |= {name: x[:, kept] for name, x in group.items()}
        groups["sample_stats"] = _groups.per_draw(**stats)
        first = {name: x[0] for name, x in draws.values.items()}
        drawable = observed if can_be_drawn(fitted.model, observed, first) else []
        if drawable:
            for note in fixed_parameters(fitted.model, prototype, first):
                warnings.warn(note, UserWarning, stacklevel=2)
        predictive: list[tuple[Mapping[str, Any], dict[str, list[str]]]] = []
        if posterior_predictive:
            predictive.append((values, {"posterior_predictive": drawable}))
        if prior:
            predictive.append(({}, {"prior": exported, "prior_predictive": drawable}))
        for at, sites in predictive:
            parts = simulate(fitted.model, drawable, sites, at, num_samples, batch_size, small=True)
            groups |= {group: _groups.per_draw(**part) for group, part in parts.items()}
    pred_dims: dict[str, list[str]] = {}
    if predictions is not None:
        new = _new_data(model, {name: values[name] for name in fitted.latent}, predictions)
        for note in new.same_units():
            warnings.warn(note, UserWarning, stacklevel=2)
        with random_state(seed, PREDICTIONS):
            drawn = _groups.per_draw(**new.draw(batch_size=batch_size, small=True))
        constants = _groups.constants(model, new.args, new.kwargs, new.sites)
        named = {name: names for name, names in (dims or {}).items() if name in drawn | constants}
        of_new = {"predictions": drawn, "constant_data": constants}
        pred_dims = _groups.name_dims(of_new, new.sites, named, {})
        groups |= {"predictions": drawn, "predictions_constant_data": constants}
    sums = groups.get("log_likelihood", {}).keys() - prototype.keys()
    prototype = prototype | {name: fitted.in_sum[name] for name in sums}
    groups["observed_data"] = _groups.observations(prototype, observed)
    constants = _groups.constants(model, args, kwargs, prototype)
    for name, value in fitted.parameters.items():
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
        pred_dims=pred_dims,
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


def _with_discrete(
    fitted: Fitted, joint: SummedOut, values: Mapping[str, torch.Tensor], num_samples: int
) -> dict[str, torch.Tensor]:
    """All sites of the posterior, where those that are summed out are drawn given the others."""
    names = [*values, *sites_of_kind(fitted.sites, "deterministic"), *joint.names]
    given = {given_name(name): x for name, x in values.items()}

    def drawn(sites: Sites) -> Any:
        return {"values": {name: sites[name]["value"] for name in names}}

    return map_draws(joint.with_draws(values.keys()), drawn, given, num_samples)["values"]


def _new_data(model: Callable[..., Any], values: Mapping[str, Any], call: Any) -> NewData:
    if isinstance(call, Mapping):
        return NewData(model, values, (), call)
    if isinstance(call, tuple):
        return NewData(model, values, call, {})
    raise TypeError(
        f"predictions is a {type(call).__name__}; give the tuple of the model's arguments, (X_new,), "
        f"or a dict of its keyword arguments."
    )


def _resample(diagnostic: KHat) -> np.ndarray:
    """Numbers (S,) of the draws that stand for the posterior."""
    log_weights = diagnostic.psis_log_weights
    if diagnostic.decision == "unusable":
        warnings.warn(
            f'resample="psis" cannot be relied on here. {diagnostic.verdict}',
            RuntimeWarning,
            stacklevel=3,
        )
    return systematic_resample(log_weights, float(torch.rand((), dtype=torch.float64)))
