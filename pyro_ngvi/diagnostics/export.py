"""A fitted guide as ArviZ groups."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .._version import __version__
from ..hierarchy import ExactUnits
from ..linalg.host import own_random_state
from ..runtime.density import Sites
from ..runtime.model_density import map_draws
from ..runtime.store import listed
from ..runtime.summed_out import SummedOut, given_name
from .arviz_compat import from_groups
from .correction import corrected as corrected_guide
from .correction import decision_on, for_resampling
from .draws import Fitted, random_state, sites_of_kind, with_likelihood
from .draws import resample as resampled_by
from .groups import constants, name_dims, observations, per_draw
from .new_data import NewData, fixed_parameters, shared_sums, simulate
from .prediction import PREDICTIONS
from .rounding import warn_of_rounding
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

    The groups, with S = ``num_samples`` independent draws in one "chain", as arrays (1, S, *shape):

    * ``posterior``: latent sites, constrained, and ``pyro.deterministic`` sites. The dimension of
      a plate has the plate's name, any other is called ``{site}_dim_{i}``.
    * ``sample_stats``, in nats: ``lp`` = log p(data, z) and ``log_q`` = log q(z), both over the sites
      as the model writes them, and ``log_weights`` = lp - log_q, normalised to weights of sum one.
    * ``log_likelihood``: per example and observed site, in nats, without ``poutine.scale`` and factors
      (with a warning: ``az.loo`` would be wrong); zero where the site is masked.
    * ``log_prior``: per latent site, in nats, for ``az.psense`` (``psens`` in 0.x), without factors.
    * ``posterior_predictive``, and where asked ``prior`` and ``prior_predictive``: observed sites
      drawn anew, those that ``poutine.condition`` fixed too (fix parameters by ``poutine.do``); left
      out, with a warning, where a likelihood cannot be drawn from.
    * ``observed_data``. ``constant_data``: the model's other arguments that are tensors or arrays, and
      the fitted values of its parameters (``pyro.param``, modules), by name.
    * ``predictions``, ``predictions_constant_data`` where asked: what :func:`predict` draws at other
      arguments from the draws in ``posterior``, and those arguments.

    Arrays of more than ten million numbers are stored in float32, but for ``posterior``. The model runs
    batched over the draws, or once for each where it cannot. Not for a model that subsamples its data.

    The attributes of the container and of ``posterior`` hold ``decision`` ("intervals", "resample",
    "unusable" or "unclear") and ``verdict``, the same in words (:class:`~pyro_ngvi.diagnostics.KHat`);
    ``khat``, ``khat_threshold``, ``kl`` and ``ess``, of ``khat_samples`` draws; ``num_samples``,
    ``guide``, ``inference_library`` and its version, and where asked ``resample`` and ``resample_ess``,
    how many exact draws the smoothed weights are worth. In place of ``arviz.summary`` and
    ``arviz.loo``, which take the draws for those of a chain, use :func:`pyro_ngvi.summary` and
    :func:`pyro_ngvi.diagnostics.loo`.

    Latent sites that are marked ``infer={"enumerate": "parallel"}`` and not in the guide are summed
    out. Where data share such a variable, ``log_likelihood`` is by the cells of the plates around all
    of it (``y_1..y_9_by_animal``), and left out with a warning where there is none.

    Args:
        model: the Pyro model. If a keyword argument of it has the name of an option here, bind
            it first with ``functools.partial``.
        guide: any trained Pyro guide of it; one of ``corrected`` draws gives these.
        args: those of both, and ``kwargs``: the full data.
        num_samples: S, at least 25.
        prior: whether to add ``prior`` and ``prior_predictive``; every prior must be proper.
        posterior_predictive: whether to add that group; so ``log_likelihood``.
        coords: labels by dimension; without them a dimension counts from 0.
        dims: names of all dimensions by site or argument.
        seed: makes the result repeatable and leaves the global random state as it was.
        batch_size: draws that the model sees at once; ``None`` for a number that bounds memory.
        resample: ``"psis"``: draws of the posterior and from it are resampled in proportion to their
            Pareto-smoothed weights (a draw of weight w comes S w times, rounded up or down);
            ``sample_stats`` keeps the guide's own, and in ``resampled_from`` which of them each is. It
            can correct what k-hat finds correctable, no more. ``None``: the guide's own draws.
        corrected: whether draws of an :class:`~pyro_ngvi.AutoHierarchical` are resampled ones of
            :func:`pyro_ngvi.diagnostics.corrected`, of four times as many where one would come more
            than ten times and be more than one in a hundred; statistics are then of those taken. It
            implies ``resample="psis"``.
        discrete: whether to draw the sites that are summed out, given the others and the data.
        predictions: the model's arguments at new data, ``(X_new,)``, or its keyword arguments,
            ``{"X": X_new}``. Names of dimensions hold for them, ``coords`` do not.

    Raises:
        ValueError: as :func:`khat`, but for a guide that is a point mass in some sites (a
            ``UserWarning``, and an infinite k-hat); for ``coords`` or ``dims`` that do not fit,
            another ``resample``, or weights of it that are not finite; as :func:`predict`.
        TypeError: for ``predictions`` that are no tuple or dict.

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
        >>> data["log_likelihood"]["y"].dims, data["posterior"]["mu"].shape, data.attrs["guide"]
        (('chain', 'draw', 'unit'), (1, 100), 'AutoNormal')
    """
    if resample not in (None, "psis"):
        raise ValueError(f'resample must be None or "psis", got {resample!r}.')
    trained = guide.collapsed.guide if isinstance(guide, ExactUnits) else guide
    attrs = {"guide": getattr(trained, "__name__", type(trained).__name__)}
    with random_state(seed):  # apart: a guide's first run ever may draw more than later ones
        if corrected and not isinstance(guide, ExactUnits):
            guide = corrected_guide(guide, *args, **kwargs)
        if corrected := isinstance(guide, ExactUnits):
            resample = "psis"
        fitted = Fitted(model, guide, args, kwargs, batches=True)
    sites, observed = fitted.sites, sites_of_kind(fitted.sites, "observed")
    if fitted.batches is not None:  # the rest has numbers for each datum
        observed, log_likelihood = [], False
    with random_state(seed):
        likelihoods = with_likelihood(fitted) if log_likelihood else ()
        drawn_by = partial(for_resampling, fitted) if corrected else fitted.draw
        draws = drawn_by(num_samples, batch_size, likelihoods)
        found, own = judge(fitted, draws, batch_size), draws.weights
        decision, verdict = found.decision, found.verdict
        if corrected:
            more = guide.judged  # a verdict that comes from more draws holds for fewer
            if more is not None and len(more.log_weights) > len(found.log_weights):
                found = replace(more, missed=found.missed)
            decision, verdict = decision_on(found, guide.collapsed)
        warn_of_rounding(sites, draws.values)
        if fixed := draws.point_masses:
            found = replace(found, khat=float("inf"))
            warnings.warn(
                f"All draws of {fixed} from the guide are the same point (AutoDelta?): what is "
                f"exported is the posterior of the rest given that point; k-hat is set to infinity.",
                stacklevel=2,
            )
        values, posterior, shown = draws.values, draws.sites, fitted.shown
        if discrete and isinstance(fitted.joint, SummedOut):
            posterior = _with_discrete(fitted, fitted.joint, values, len(draws.log_q))
            values = values | {name: posterior[name] for name in fitted.joint.names}
            shown = list(posterior)
        groups = {"posterior": per_draw(posterior)}
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
        stats = {"lp": draws.log_joint, "log_q": draws.log_q, "log_weights": own.log_weights}
        if resample:
            kept, weights = resampled_by(own, num_samples)
            asked = "corrected=True" if corrected else 'resample="psis"'
            if decision == "unusable" or found.wanted:
                how = "cannot be relied on here" if decision == "unusable" else "wants more draws"
                how += f", num_samples={found.wanted}" * (decision == "intervals")
                warnings.warn(f"{asked} {how}. {verdict}", RuntimeWarning, stacklevel=2)
            values = {n: x[torch.from_numpy(kept).to(x.device)] for n, x in values.items()}
            if len(draws.log_q) > num_samples:  # of those that were taken of more
                stats = {name: x[kept] for name, x in stats.items()}
            stats["resampled_from"] = kept
            for group in groups.values():
                group |= {name: x[:, kept] for name, x in group.items()}
            attrs["resample"] = "corrected" if corrected else resample
            attrs |= {"resample_ess": float(1 / np.exp(2 * weights).sum())}
        groups["sample_stats"] = per_draw(stats)
        if drawable := observed if _can_be_drawn(fitted, observed) else []:
            for note in fixed_parameters(fitted.model, sites, draws.values):
                warnings.warn(note, stacklevel=2)
        how, shared = (num_samples, batch_size), shared_sums(sites, observed)
        if posterior_predictive:
            if drawable and (unknown := [n for n in shared if n not in values]):
                warnings.warn(
                    f"posterior_predictive draws {listed(unknown, 3)}, summed out in the fit, from the "
                    f"prior, without regard to the data. discrete=True draws them from the posterior.",
                    stacklevel=2,
                )
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
        known = [*fitted.latent, *shared]
        new = NewData(model, {name: values[name] for name in known if name in values}, *call)
        for note in [*new.joint(guide), *new.same_units(), *new.new_sites(), *new.same_rows()]:
            warnings.warn(note, stacklevel=2)
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

    def drawn(sites: Sites) -> dict[str, Tensor]:
        return {name: sites[name]["value"] for name in names}

    return map_draws(joint.with_draws(values.keys()), drawn, given, num_samples)


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
            stacklevel=3,
        )
        return False
    return True
