"""Draws of new data from a fitted guide, or from draws that were kept of it."""

import warnings
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import numpy as np
import torch
from pyro.infer.autoguide import AutoGuide
from torch import Tensor

from ..hierarchy import AutoHierarchical, ExactUnits
from ..runtime.density import Sites
from ..runtime.pyro_adapter import first_arguments
from ..runtime.run import Minibatches
from ..sites.site_guide import find_sites
from .correction import resampled
from .draws import guide_draws, random_state
from .new_data import NewData, fixed_parameters

PREDICTIONS = 1  # the stream of random numbers, another one than that of the guide's draws


def predict(
    model: Callable[..., Any],
    guide: Any,
    *args: Any,
    num_samples: int | None = None,
    sites: Collection[str] | None = None,
    from_prior: Collection[str] | None = None,
    batch_size: int | None = None,
    seed: int | None = None,
    **kwargs: Any,
) -> dict[str, Tensor]:
    """Draws from the posterior predictive at new data, one for each posterior draw: (S, ...) by site.

    The model runs at the new arguments with the guide's latent sites fixed at draws from the guide.
    All other sites are drawn from the model, observed ones too: leave the data out (``y=None`` in the
    model) or pass any tensor of their shape. The model is written for one draw (``X @ w``).

    Go through much new data in parts, with *kept* draws, which all parts then share:
    ``predict(model, to_arviz(model, guide, X, y), X_part)``.

    A latent site with a value for each unit of the fit (a plate over rows, not over groups) is refused
    where the new arguments give it another size, and comes with a warning where it has the same: for
    other units name it in ``from_prior``. A process over inputs
    follows to new ones where the guide is ``AutoSites``; else fit with the new ones too, their data
    masked. Further sites of a chain that is a loop of sites are drawn given its last one.

    Args:
        model: the Pyro model; bind a keyword argument with the name of an option here first.
        guide: any trained Pyro guide of it, called with the new arguments; or kept draws: what
            :func:`to_arviz` returned, or another container with a group ``posterior``; a dict of
            (S, ...), as ``samples`` of :func:`pyro_ngvi.integrate` or ``get_samples()`` of MCMC.
        args: what the model is called with, and ``kwargs``.
        num_samples: S. ``None`` for 1,000 from a guide, and for all kept draws; fewer of these are
            taken at equal distances.
        sites: names of the sites to return, latent ones too; ``"_RETURN"`` for what the model
            returns. ``None`` for the sites that are drawn anew and the deterministic ones.
        from_prior: latent sites to draw from the model, given the other sites, in place of the guide's
            or as the guide has none; empty to say that there are no others.
        batch_size: draws that the model sees at once; ``None`` for a number that bounds memory.
        seed: makes the result repeatable and leaves the global random state as it was: the draws of
            :func:`to_arviz` by the same seed, corrected ones from ``num_samples=1000`` on.

    Raises:
        ValueError: when the guide was never called, the model or the guide cannot run on these
            arguments, a latent site has another size with them, a minibatch is drawn from them, or a
            name is not one of a site.
        TypeError: when ``guide`` is neither a guide nor kept draws.

    Example:
        >>> import pyro, pyro.distributions as dist
        >>> def model(X, y=None):
        ...     w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        ...     with pyro.plate("data", len(X)):
        ...         pyro.sample("y", dist.Normal(X @ w, 1.0), obs=y)
        >>> guide = pyro.infer.autoguide.AutoNormal(model)
        >>> _ = guide(torch.ones(3, 2), torch.ones(3))  # and train it
        >>> predict(model, guide, torch.ones(5, 2), num_samples=100)["y"].shape
        torch.Size([100, 5])
    """
    count, exact = 1000 if num_samples is None else num_samples, None
    if isinstance(guide, ExactUnits):
        exact, guide = guide, guide.collapsed.guide
    if callable(guide):
        bound = partial(guide, *args, **kwargs)
        if isinstance(guide, AutoHierarchical) and guide.prototype_trace and guide.units.is_block:
            known, named = first_arguments(guide)  # it knows itself there alone
            bound = partial(guide, *known, **named)
        try:
            with random_state(seed):
                values = guide_draws(bound, count)[0] if exact is None else resampled(exact, count)
                if exact is not None and exact.collapsed.units is not None:
                    values |= _units_at(exact, values, args, kwargs)
        except (TypeError, AttributeError, RuntimeError) as error:
            reason = str(error).split(". ")[0]
            raise ValueError(
                f"The guide cannot run on these arguments: {reason}. If it reads the data, or "
                f"its block has another size, pass draws in its place: predict(model, "
                f"to_arviz(model, guide, X, y), X_new)."
            ) from error
    else:
        values = _kept(guide, num_samples, [*args, *kwargs.values()])
    new = NewData(model, values, args, kwargs, from_prior, may_lack=not callable(guide))
    notes = fixed_parameters(new.program, new.sites, new.values) + new.joint(guide)
    if from_prior is None and (isinstance(guide, AutoGuide) or not callable(guide)):
        if isinstance(guide, AutoHierarchical):
            _refuse_other_units(guide, new.sites)
        notes += new.same_units() + new.new_sites()
        if not any(find_sites(guide)):  # whose processes follow
            notes += new.same_rows()
    for note in notes:
        warnings.warn(note, stacklevel=2)
    with random_state(seed, PREDICTIONS):
        return new.draw(sites, batch_size)


@torch.no_grad()
def _units_at(
    exact: ExactUnits, values: dict[str, Tensor], args: Any, kwargs: Any
) -> dict[str, Tensor]:
    """The units of a call at corrected draws ``values``; further ones given their globals, as the
    trained guide has them: by their prior where it knows no data of theirs."""
    units, guide = exact.collapsed.units, exact.collapsed.guide
    if units.is_block:
        return {}
    drawn, found = guide.draw_units(values, args, kwargs, Minibatches()), {}
    for site in units.sites:
        old, new = site.rows(values[site.name]), site.rows(drawn.values[site.name])
        index = drawn.seen.index.to(new.device)
        kept = old.index_select(1, index.clamp_max(units.size - 1))
        found[site.name] = site.value(torch.where((index < units.size).unsqueeze(-1), kept, new))
    return found


def _refuse_other_units(guide: AutoHierarchical, sites: Sites) -> None:
    """Units of another number: beyond those of the fit, which it has, a guide goes by their prior."""
    units = guide.units
    names = ", ".join(map(repr, units.names[:3]))
    for frame in sites[units.names[0]]["cond_indep_stack"]:
        if frame.name == units.plate and frame.size != units.size:
            raise ValueError(
                f"The guide knows {units.size} units of {units.plate!r}; these arguments have "
                f"{frame.size}. For other units: predict(..., from_prior=[{names}]); "
                f"from_prior=[] if the first are those of the fit, and what follows is new."
            )


def _kept(kept: Any, num_samples: int | None, arguments: list[Any]) -> dict[str, Tensor]:
    """The draws of the group ``posterior``, chains one after the other, or of a dict, (S, ...)."""
    try:
        if isinstance(kept, dict):
            arrays = {name: torch.as_tensor(x).numpy(force=True) for name, x in kept.items()}
        else:
            each = kept["posterior"].data_vars.items()
            arrays = {str(n): x.transpose("chain", "draw", ...).values for n, x in each}
            arrays = {name: x.reshape(-1, *x.shape[2:]) for name, x in arrays.items()}
    except (TypeError, KeyError, AttributeError, ValueError, RuntimeError) as error:
        got = f"to_arviz returned, or a dict of draws (S, ...), and got {type(kept).__name__}."
        raise TypeError(f"predict takes a guide, what {got}") from error
    total = min((len(x) for x in arrays.values()), default=0)
    num_samples = total if num_samples is None else num_samples
    if not 1 <= num_samples <= total:
        raise ValueError(f"num_samples is {num_samples}, but {total} draws were kept.")
    at = np.arange(num_samples) * total // num_samples
    device = next((x.device for x in arguments if isinstance(x, Tensor)), None)
    return {name: torch.tensor(x[at], device=device) for name, x in arrays.items()}
