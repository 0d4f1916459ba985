"""Draws of new data from a fitted guide, or from draws that were kept of it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import numpy as np
import pyro
import torch
from pyro.infer.autoguide import AutoGuide
from pyro.poutine.messenger import Messenger
from torch import Tensor

from ..runtime.density import Site, Sites, site_kind, site_log_prob
from ..runtime.model_density import Parts, map_draws, without_plates
from ..runtime.run import Minibatches, look
from .draws import SampleObserved, compact, guide_draws, random_state, sites_of_kind

__all__ = ["predict"]

PREDICTIONS = 1  # the stream of random numbers, another one than that of the guide's draws
RETURN = "_RETURN"


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
    """Draws from the posterior predictive distribution at new data, one for each posterior draw.

    The model runs at the new arguments with the guide's latent sites fixed at draws from the guide.
    All other sites are drawn from the model, observed ones too: leave the data out (``y=None`` in the
    model) or, where the model needs them for their size, pass any tensor of their shape.

    The draws are batched by ``torch.func.vmap``, so write the model for one draw (``X @ w``); a model
    that cannot run under ``vmap`` runs once for each. A posterior that importance resampling has
    corrected predicts from its kept draws: ``predict(model, to_arviz(..., resample="psis"), X_new)``.

    A guide knows the units that it was trained on. A latent site with a value for each of them (a
    plate over rows, not over groups) is refused where the new arguments give it another size, and
    comes with a warning where it has the same size, since the new rows may be other units. For other
    units name the site in ``from_prior``. Where latent sites are a process over the inputs, use
    ``AutoSites`` with a ``GaussianProcess``, which follows to new inputs.

    Args:
        model: the Pyro model. If a keyword argument of it has the name of an option here, bind it
            first with ``functools.partial``.
        guide: any trained Pyro guide of it, called with the new arguments; or kept draws: what
            :func:`to_arviz` returned, or another ``InferenceData`` or ``DataTree`` with a group
            ``posterior``. Variables there that are no latent sites of the model are left alone.
        args: what the model is called with.
        num_samples: S. ``None`` for 1,000 from a guide, and for all kept draws; fewer of these are
            taken at equal distances.
        sites: names of the sites to return, latent ones too; ``"_RETURN"`` for what the model
            returns. ``None`` for the sites that are drawn anew and the deterministic ones: those of
            ``pyro.infer.Predictive`` but for the guide's own.
        from_prior: latent sites of the guide to draw from the model instead, given the other sites;
            empty to say that there are none.
        batch_size: draws that the model sees at once; ``None`` for a number that bounds the memory
            beside the result, S times the size of the sites.
        seed: makes the result repeatable and leaves the global random state as it was. The same seed
            gives the draws of :func:`to_arviz`, posterior and ``predictions``.
        kwargs: keyword arguments of the model.

    Returns:
        Values by site, (S, ...), in the order of the model.

    Raises:
        ValueError: when the guide was never called, the model or the guide cannot run on these
            arguments, a latent site has another size with them, a minibatch is drawn from them, or a
            name is not one of a site.
        TypeError: when ``guide`` is neither a guide nor kept draws.

    Warns:
        UserWarning: when a latent site has a value for each row, or a parameter was fixed by
            ``poutine.condition`` (use ``poutine.do``).

    Example:
        >>> import pyro.distributions as dist
        >>> def model(X, y=None):
        ...     w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        ...     with pyro.plate("data", len(X)):
        ...         pyro.sample("y", dist.Normal(X @ w, 1.0), obs=y)
        >>> guide = pyro.infer.autoguide.AutoNormal(model)
        >>> _ = guide(torch.ones(3, 2), torch.ones(3))  # and train it
        >>> predict(model, guide, torch.ones(5, 2), num_samples=100)["y"].shape
        torch.Size([100, 5])
    """
    keeps_units = isinstance(guide, AutoGuide) or not callable(guide)
    if callable(guide):
        num_samples = 1000 if num_samples is None else num_samples
        if num_samples < 1:
            raise ValueError(f"num_samples is {num_samples}; give at least 1.")
        with random_state(seed):
            try:
                values, _ = guide_draws(guide, args, kwargs, num_samples)
            except (TypeError, AttributeError) as error:
                raise ValueError(
                    f"The guide cannot run on these arguments: {error}. If it reads the data, draw "
                    f"from it with them and pass these draws in its place: predict(model, "
                    f"to_arviz(model, guide, X, y), X_new)."
                ) from error
    else:
        values = _kept(guide, num_samples, [*args, *kwargs.values()])
    new = NewData(model, values, args, kwargs, from_prior, may_lack=not callable(guide))
    first = {name: x[0] for name, x in new.values.items()}
    notes = fixed_parameters(new.program, new.sites, first)
    if keeps_units and from_prior is None:
        notes += new.same_units()
    for note in notes:
        warnings.warn(note, UserWarning, stacklevel=2)
    with random_state(seed, PREDICTIONS):
        return new.draw(sites, batch_size)


def _kept(kept: Any, num_samples: int | None, arguments: list[Any]) -> dict[str, Tensor]:
    """The draws of the group ``posterior``, chains one after the other, (S, ...)."""
    try:
        variables = kept["posterior"].data_vars
        arrays = {str(n): x.transpose("chain", "draw", ...).values for n, x in variables.items()}
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        raise TypeError(
            f"predict takes a guide, or what to_arviz returned, with a group 'posterior' of dimensions "
            f"chain and draw; got {type(kept).__name__}."
        ) from error
    arrays = {name: x.reshape(-1, *x.shape[2:]) for name, x in arrays.items()}
    total = min((len(x) for x in arrays.values()), default=0)
    if num_samples is None:
        num_samples = total
    if not 1 <= num_samples <= total:
        raise ValueError(f"num_samples is {num_samples}, but {total} draws were kept.")
    at = np.arange(num_samples) * total // num_samples
    device = next((x.device for x in arguments if isinstance(x, Tensor)), None)
    return {name: torch.tensor(x[at], device=device) for name, x in arrays.items()}


class NewData:
    """A model at new arguments, its latent sites fixed at draws from the posterior.

    Args:
        model: the Pyro model.
        values: posterior draws by site, (S, ...); a slash in a name may have become a dot.
        args: the new arguments.
        kwargs: the new keyword arguments.
        from_prior: names in ``values`` that are drawn from the model all the same.
        may_lack: whether ``values`` may name more than latent sites of the model.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        values: Mapping[str, Tensor],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        from_prior: Collection[str] | None = None,
        may_lack: bool = False,
    ) -> None:
        self.args, self.kwargs = args, kwargs
        self.program = partial(model, *args, **kwargs)
        self.num_samples = len(next(iter(values.values()), ()))
        dotted = {_dotted(name): x for name, x in values.items()}
        for name in from_prior or ():
            if dotted.pop(_dotted(name), None) is None:
                raise ValueError(
                    f"from_prior names {name!r}, but the draws are of {sorted(values)}."
                )
        minibatches = Minibatches()
        try:
            with _AtFirstDraw({name: x[0] for name, x in dotted.items()}):
                ran = look(self.program, {}, minibatches=minibatches)
        except (TypeError, AttributeError) as error:
            raise ValueError(
                f"The model cannot run on these arguments: {error}. Give the data a default and take "
                f"sizes from the rest (y=None, len(X)), or pass any tensor in their place, such as "
                f"torch.zeros(len(X)): data are drawn anew."
            ) from error
        for name in minibatches:
            raise ValueError(
                f"The plate {name!r} draws {len(ran[name]['value'])} of {ran[name]['fn'].size} rows. "
                f"Make the size of the minibatch an argument of the model, and pass the full size here."
            )
        self.sites = without_plates(ran)
        latent = sites_of_kind(self.sites, "latent")
        self.values = {name: dotted[_dotted(name)] for name in latent if _dotted(name) in dotted}
        others = dotted.keys() - {_dotted(name) for name in self.values}
        if may_lack and self.values:
            others &= {_dotted(name) for name in sites_of_kind(self.sites, "observed")}
        if others:
            raise ValueError(
                f"The posterior has draws of {sorted(others)}, which are no latent sites of the model "
                f"at these arguments. Is it that of another model, or of a reparametrised one?"
            )

    @property
    def new(self) -> list[str]:
        """The sites that are drawn anew, and the deterministic ones."""
        kinds = ("latent", "observed", "deterministic")
        return [n for n, x in self.sites.items() if n not in self.values and site_kind(x) in kinds]

    def draw(
        self,
        names: Collection[str] | None = None,
        batch_size: int | None = None,
        small: bool = False,
    ) -> dict[str, Tensor]:
        """Values of the named sites, (S, ...); with ``small`` large ones are stored in float32."""
        program: Callable[[], Any] = self.program
        if names is None:
            names = self.new
        elif RETURN in names:
            program = _returning(program)
        there = [n for n, x in self.sites.items() if site_kind(x) != "factor"]
        if unknown := sorted(set(names) - {*there, RETURN}):
            raise ValueError(f"sites names {unknown}, but the sites of the model are {there}.")
        return simulate(
            program,
            sites_of_kind(self.sites, "observed"),
            {"new": [name for name in [*there, RETURN] if name in names]},
            self.values,
            self.num_samples,
            batch_size,
            small,
        )["new"]

    def same_units(self) -> list[str]:
        """A warning about latent sites in the plates of new data, if there are any."""
        drawn = [self.sites[n] for n in self.new if site_kind(self.sites[n]) != "deterministic"]
        plates = {frame.name for site in drawn for frame in site["cond_indep_stack"]}
        return [
            f"The latent site {name!r} lies in the plate {frame.name!r} with the new data, whose rows "
            f"are taken for the units that the guide was trained on, in their order. For other units: "
            f"predict(..., from_prior=[{name!r}]); from_prior=[] confirms the same."
            for name in self.values
            for frame in self.sites[name]["cond_indep_stack"]
            if frame.vectorized and frame.name in plates
        ]


def simulate(
    model: Callable[[], Any],
    observed: Collection[str],
    groups: Mapping[str, Collection[str]],
    values: Mapping[str, Tensor],
    num_samples: int,
    batch_size: int | None,
    small: bool = False,
) -> Parts:
    """Sites by group, (S, ...), where all but those in ``values`` are drawn from the model.

    ``observed`` names the sites that hold data; ``small`` stores large arrays in float32.
    """

    def chosen(sites: Sites) -> Parts:
        def stored(name: str) -> Tensor:
            value = sites[name]["value"]
            return compact(value, num_samples) if small else value

        return {group: {name: stored(name) for name in names} for group, names in groups.items()}

    return map_draws(SampleObserved(observed)(model), chosen, values, num_samples, batch_size)


def fixed_parameters(
    model: Callable[[], Any], prototype: Sites, at: Mapping[str, Tensor]
) -> list[str]:
    """Warnings about sites that poutine.condition has fixed: they count as data, whatever they are.

    What other data, of more than a number, depend on, and is one number, is taken for a parameter.
    """
    observed = sites_of_kind(prototype, "observed")
    numbers = [name for name in observed if prototype[name]["fn"].shape().numel() == 1]
    drawn = [name for name in sites_of_kind(prototype, "latent") if name not in at]
    others = [name for name in [*observed, *drawn] if name not in numbers]
    at = {**at, **{name: prototype[name]["value"] for name in drawn}}

    def terms(anew: Collection[str]) -> list[Tensor]:
        # without validation, since data that only give a size may lie outside their support
        with torch.no_grad(), pyro.validation_enabled(False):
            sites = look(SampleObserved(anew)(model), at)
            return [site_log_prob(sites[name])[0].nan_to_num() for name in others]

    if not (numbers and others):
        return []
    before = terms(())
    return [
        f"The observed site {name!r} is one number, and others depend on it, as on a parameter that "
        f"poutine.condition has fixed: here it counts as data, and is drawn anew with all that depends "
        f"on it. Fix parameters by pyro.poutine.do(model, data=...), or in the model."
        for name in numbers
        if not all(map(torch.equal, before, terms((name,))))
    ]


class _AtFirstDraw(Messenger):
    """Fixes latent sites at one draw from the posterior, and refuses those of another size."""

    def __init__(self, at: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.at = at

    def _pyro_sample(self, msg: Site) -> None:
        value = self.at.get(_dotted(msg["name"]))
        if value is None or msg["is_observed"]:
            return
        name, shape = msg["name"], tuple(msg["fn"].shape())
        if value.shape != shape:
            raise ValueError(
                f"The latent site {name!r} has shape {tuple(value.shape)} in the posterior and {shape} "
                f"here. For units that the guide has not seen: predict(..., from_prior=[{name!r}]); "
                f"for a GaussianProcess in AutoSites: predict(model, guide, ...)."
            )
        msg["value"], msg["done"] = value, True


def _dotted(name: str) -> str:
    return name.replace("/", ".")  # as to_arviz stores it


def _returning(model: Callable[[], Any]) -> Callable[[], Any]:
    """The model with what it returns as a site."""

    def program() -> None:
        value = model()
        if not isinstance(value, Tensor):
            raise ValueError(
                f"{RETURN!r} is a {type(value).__name__}; the model returns no tensor."
            )
        pyro.deterministic(RETURN, value)

    return program
