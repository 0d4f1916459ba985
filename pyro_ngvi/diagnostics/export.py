"""A fitted guide as ArviZ groups."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .._version import __version__
from ..linalg.host import own_random_state
from ..runtime.density import Sites
from ..runtime.model_density import map_draws
from ..runtime.summed_out import SummedOut, given_name
from .arviz_compat import from_groups
from .correction import corrected as corrected_guide
from .correction import decision_on
from .draws import Fitted, random_state, resampled, sites_of_kind, warn_of_edges, with_likelihood
from .groups import constants, name_dims, observations, per_draw
from .prediction import PREDICTIONS, NewData, fixed_parameters, simulate
from .verdict import judge


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
    corrected: bool = False,
    discrete: bool = False,
    predictions: tuple[Any, ...] | Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> Any:
    r"""Draws from any Pyro guide as ArviZ's ``InferenceData`` (0.x) or ``DataTree`` (1.x).

    The groups, with S = ``num_samples`` independent draws in one "chain":

    * ``posterior``: latent sites, constrained, and ``pyro.deterministic`` sites. The dimension of
      a plate has the plate's name, any other is called ``{site}_dim_{i}``.
    * ``sample_stats``, in nats: ``lp`` = log p(data, z) and ``log_q`` = log q(z), both over the sites
      as the model writes them (over the unconstrained space both would gain the same log-Jacobian),
      and ``log_weights`` = lp - log_q, normalised so that the weights sum to one.
    * ``log_likelihood``: per example and observed site, in nats, without ``poutine.scale`` (with a
      warning: ``az.loo`` would be wrong) and without ``pyro.factor`` (a warning where one lies in a
      plate with data); zero where the site is masked.
    * ``log_prior``: per latent site, in nats, for ``az.psense`` (``psens`` in 0.x); a part of the prior
      that is a ``pyro.factor`` is not in it.
    * ``posterior_predictive``, and where asked ``prior`` and ``prior_predictive``: observed sites
      drawn anew. A site that ``poutine.condition`` has fixed is one of them; fix parameters by
      ``poutine.do``. They are left out, with a warning, where a likelihood cannot be drawn from.
    * ``observed_data``: observed sites. ``constant_data``: the model's arguments that are tensors
      or arrays, unless they are the data of an observed site, and the fitted values of its parameters
      (``pyro.param``, modules), by name.
    * ``predictions``, ``predictions_constant_data`` where asked: what :func:`predict` draws at other
      arguments from the draws in ``posterior``, and those arguments.

    Arrays of more than ten million numbers (1,000 draws at 10,000 rows) are stored in float32, but
    for ``posterior``; leave groups out where even that is too much. The parameter store and gradients
    are left alone. The model runs batched over the draws, or once for each where it cannot. Not for a
    model that subsamples its data: give the full data.

    With ``resample="psis"`` the draws in ``posterior``, ``log_prior``, ``log_likelihood``,
    ``posterior_predictive`` and ``predictions`` are resampled in proportion to their Pareto-smoothed
    weights (systematically: a draw of weight w comes S w times, rounded up or down). ``sample_stats``
    stays that of the guide's own draws, and gains ``resampled_from``, the number of the one that each
    posterior draw is. Repeated draws stand side by side, so ArviZ's ESS and errors count them about
    right. It can correct what k-hat finds correctable, no more.

    With ``corrected`` the draws of an :class:`~pyro_ngvi.AutoHierarchical` are put right: units follow
    their globals exactly, and globals are resampled by weights of their own, the units integrated out
    (:func:`pyro_ngvi.diagnostics.corrected`). k-hat and verdict are those of the globals then, and do
    not get worse with the number of units; ``log_q`` is that of the corrected guide, and the attribute
    ``resample`` is "corrected".

    The attributes of the container and of ``posterior`` hold ``decision`` ("intervals", "resample" or
    "unusable") and ``verdict``, the same in words (:class:`~pyro_ngvi.diagnostics.KHat`); ``khat``,
    ``khat_threshold``, ``kl`` and ``ess``, of ``khat_samples`` draws (:func:`khat`); ``num_samples``,
    ``guide``, ``inference_library`` and its version, and where asked ``resample`` and ``resample_ess``,
    how many exact draws the smoothed weights are worth. ``arviz.summary`` shows R-hat and ESS as if the
    draws were a chain's: use :func:`pyro_ngvi.summary`. And ``arviz.loo`` takes draws for those of the
    posterior: use :func:`pyro_ngvi.diagnostics.loo`, or the ``arviz.loo_approximate_posterior`` of
    ArviZ 1.x, which takes ``lp`` and ``log_q``; resampled draws need no such correction.

    Latent sites that are marked ``infer={"enumerate": "parallel"}`` and not in the guide are summed
    out. ``log_likelihood`` is then that of the data without them: where data share such a variable,
    by the cells of the plates around all of it (``y_1..y_9_by_animal``), and left out with a warning
    where there is no such plate, as in a hidden Markov model of one series. With ``discrete`` they are
    drawn, given each draw of the others and the data, into ``posterior``, with the deterministic sites
    that depend on them (by ``pyro.infer.infer_discrete``, once for each draw), and predictions are
    made with them.

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
        corrected: whether to correct a hierarchical guide; it implies ``resample="psis"``.
        discrete: whether to draw the sites that are summed out.
        predictions: the model's arguments at new data, ``(X_new,)``, or its keyword arguments,
            ``{"X": X_new}``. Names of dimensions hold for them, ``coords`` do not: the rows are
            others.
        kwargs: keyword arguments of the model.

    Raises:
        ValueError: as :func:`khat`, but for a guide that is a point mass in some sites (a
            ``UserWarning``, and an infinite k-hat); when ``coords`` or ``dims`` do not fit; for
            another ``resample``, and with it for weights that are not finite; where :func:`predict`
            refuses ``predictions``.

    Warns:
        RuntimeWarning: where rounding has put draws onto the end of their support, and with
            ``resample`` when the weights are not to be relied on.

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
    attrs = {"guide": getattr(guide, "__name__", type(guide).__name__)}
    with random_state(seed):  # apart: a guide's first run ever may draw more than later ones
        if corrected:
            guide, resample = corrected_guide(guide, *args, **kwargs), "psis"
        fitted = Fitted(model, guide, args, kwargs, batches=True)
    sites, observed = fitted.sites, sites_of_kind(fitted.sites, "observed")
    if fitted.batches is not None:  # the rest has numbers for each datum
        observed, log_likelihood = [], False
    groups: dict[str, dict[str, np.ndarray]] = {}
    with random_state(seed):
        likelihoods = with_likelihood(fitted) if log_likelihood else ()
        draws = fitted.draw(num_samples, batch_size, likelihoods)
        found, own = judge(fitted, draws, batch_size), draws.weights
        decision, verdict = found.decision, found.verdict
        if corrected:
            decision, verdict = decision_on(found, guide.collapsed)
        warn_of_edges(sites, draws.values)
        if fixed := draws.point_masses:
            found = replace(found, khat=float("inf"))
            warnings.warn(
                f"All draws of {fixed} from the guide are the same point (AutoDelta?): what is "
                f"exported is the posterior of the rest given that point; k-hat is set to infinity.",
                UserWarning,
                stacklevel=2,
            )
        values, posterior, shown = draws.values, draws.sites, fitted.shown
        if discrete and isinstance(fitted.joint, SummedOut):
            posterior = _with_discrete(fitted, fitted.joint, values, num_samples)
            values = values | {name: posterior[name] for name in fitted.joint.names}
            shown = list(posterior)
        groups["posterior"] = per_draw(posterior)
        groups["log_prior"] = per_draw(draws.log_prior)
        groups["log_likelihood"] = per_draw(draws.log_likelihood)
        attrs |= {
            "inference_library": "pyro_ngvi",
            "inference_library_version": __version__,
            "num_samples": num_samples,
            "khat": found.khat,
            "khat_samples": len(found.log_weights),
            "khat_threshold": found.threshold,
            "kl": found.kl,
            "ess": found.ess,
            "decision": decision,
            "verdict": verdict,
        }
        stats = per_draw({"lp": draws.log_joint, "log_q": draws.log_q})
        stats |= per_draw({"log_weights": own.log_weights})
        if resample:
            weights = own.psis_log_weights
            asked = "corrected=True" if corrected else 'resample="psis"'
            if decision == "unusable" or (decision == "resample" and found.wanted):
                how = "cannot be relied on here" if decision == "unusable" else "wants more draws"
                warnings.warn(
                    f"{asked} {how}. {verdict}",
                    RuntimeWarning,
                    stacklevel=2,
                )
            kept, values = resampled(values, weights)
            stats |= per_draw({"resampled_from": kept})
            for group in groups.values():
                group |= {name: x[:, kept] for name, x in group.items()}
            attrs["resample"] = "corrected" if corrected else resample
            attrs |= {"resample_ess": float(1 / np.exp(2 * weights).sum())}
        groups["sample_stats"] = stats
        if drawable := observed if _can_be_drawn(fitted, observed) else []:
            for note in fixed_parameters(fitted.model, sites, draws.values):
                warnings.warn(note, UserWarning, stacklevel=2)
        how = num_samples, batch_size
        if posterior_predictive:
            drawn = simulate(fitted.model, drawable, drawable, values, *how)
            groups["posterior_predictive"] = per_draw(drawn)
        if prior:
            drawn = per_draw(simulate(fitted.model, drawable, [*shown, *drawable], {}, *how))
            groups["prior"] = {name: drawn[name] for name in shown}
            groups["prior_predictive"] = {name: drawn[name] for name in drawable}
    pred_dims = {}
    if predictions is not None:
        if not isinstance(predictions, tuple | Mapping):
            raise TypeError(
                f"predictions is a {type(predictions).__name__}; give the tuple of the model's "
                f"arguments, (X_new,), or a dict of its keyword arguments."
            )
        call = ((), predictions) if isinstance(predictions, Mapping) else (predictions, {})
        new = NewData(model, {name: values[name] for name in fitted.latent}, *call)
        for note in new.same_units():
            warnings.warn(note, UserWarning, stacklevel=2)
        with random_state(seed, PREDICTIONS):
            drawn = per_draw(new.draw(None, batch_size, small=True))
        given = constants(model, *call, new.sites)
        named = {name: names for name, names in (dims or {}).items() if name in drawn | given}
        pred_dims = name_dims({"predictions": drawn, "constant_data": given}, new.sites, named, {})
        groups |= {"predictions": drawn, "predictions_constant_data": given}
    sites = fitted.in_sum | sites
    groups["observed_data"] = observations(sites, observed)
    seen = (args, kwargs) if fitted.batches is None else ((), {})
    groups["constant_data"] = constants(model, *seen, sites)
    for name, value in fitted.parameters.items():
        taken = name in groups["constant_data"]
        groups["constant_data"][f"{name}_parameter" if taken else name] = value
    groups = {name: group for name, group in groups.items() if group}
    named = name_dims(groups, sites, dims or {}, coords or {})
    return from_groups(groups, coords=coords, dims=named, pred_dims=pred_dims, attrs=attrs)


def _with_discrete(
    fitted: Fitted, joint: SummedOut, values: Mapping[str, Tensor], num_samples: int
) -> dict[str, Tensor]:
    """All sites of the posterior, where those that are summed out are drawn given the others."""
    names = [*values, *sites_of_kind(fitted.sites, "deterministic"), *joint.names]
    given = {given_name(name): x for name, x in values.items()}

    def drawn(sites: Sites) -> Any:
        return {"values": {name: sites[name]["value"] for name in names}}

    return map_draws(joint.with_draws(values.keys()), drawn, given, num_samples)["values"]


def _can_be_drawn(fitted: Fitted, observed: Sequence[str]) -> bool:
    """Whether the data can be drawn anew; else a warning says which groups that leaves out."""
    try:
        with torch.no_grad(), own_random_state():
            for name in observed:
                fitted.sites[name]["fn"].sample()
    except NotImplementedError as error:
        warnings.warn(
            f"An observed site cannot be drawn ({error or 'it has no sample method'}): the "
            f"predictive groups are left out. Give it a sample method, or posterior_predictive=False.",
            UserWarning,
            stacklevel=3,
        )
        return False
    return True
