"""Draws of new data from a fitted guide, or from draws that were kept of it."""

import warnings
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import pyro
import torch
from pyro.infer.autoguide import AutoGuide
from pyro.poutine.messenger import Messenger
from torch import Tensor
from torch.distributions import Independent
from torch.utils._pytree import tree_map

from ..hierarchy import AutoHierarchical
from ..runtime.density import Site, Sites, site_kind, site_log_prob
from ..runtime.model_density import map_draws, without_plates
from ..runtime.run import Minibatches, look
from ..sites.site_guide import find_sites
from .draws import compact, guide_draws, random_state, refuse_minibatches, sites_of_kind

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
    """Draws from the posterior predictive at new data, one for each posterior draw: (S, ...) by site.

    The model runs at the new arguments with the guide's latent sites fixed at draws from the guide.
    All other sites are drawn from the model, observed ones too: leave the data out (``y=None`` in the
    model) or, where the model needs them for their size, pass any tensor of their shape. The model is
    written for one draw (``X @ w``); where ``vmap`` cannot run it, it runs once for each.

    Go through much new data in parts, with *kept* draws, which all parts then share:
    ``predict(model, to_arviz(model, guide, X, y), X_part)``.

    A guide knows the units that it was trained on. A latent site with a value for each of them (a plate
    over rows, not over groups) is refused where the new arguments give it another size, and comes with
    a warning where it has the same. For other units name it in ``from_prior``. A process over inputs
    follows to new ones where the guide is ``AutoSites``; all else knows it at those of the fit alone.

    Args:
        model: the Pyro model. If a keyword argument of it has the name of an option here, bind it
            first with ``functools.partial``.
        guide: any trained Pyro guide of it, called with the new arguments; or kept draws: what
            :func:`to_arviz` returned, or another container with a group ``posterior``; a dict of
            (S, ...), as ``samples`` of :func:`pyro_ngvi.integrate` or ``get_samples()`` of MCMC.
        args: what the model is called with, and ``kwargs``.
        num_samples: S. ``None`` for 1,000 from a guide, and for all kept draws; fewer of these are
            taken at equal distances.
        sites: names of the sites to return, latent ones too; ``"_RETURN"`` for what the model
            returns. ``None`` for the sites that are drawn anew and the deterministic ones.
        from_prior: latent sites of the guide to draw from the model instead, given the other sites;
            empty to say that there are none.
        batch_size: draws that the model sees at once; ``None`` for a number that bounds memory.
        seed: makes the result repeatable and leaves the global random state as it was. The same seed
            gives the draws of :func:`to_arviz`, posterior and ``predictions``.

    Raises:
        ValueError: when the guide was never called, the model or the guide cannot run on these
            arguments, a latent site has another size with them, a minibatch is drawn from them, or a
            name is not one of a site.
        TypeError: when ``guide`` is neither a guide nor kept draws.

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
    if callable(guide):
        bound = partial(guide, *args, **kwargs)
        try:
            with random_state(seed):
                values, _ = guide_draws(bound, 1000 if num_samples is None else num_samples)
        except (TypeError, AttributeError, RuntimeError) as error:
            raise ValueError(
                f"The guide cannot run on these arguments: {error}. If it reads the data, or "
                f"its block has another size, pass draws in its place: predict(model, "
                f"to_arviz(model, guide, X, y), X_new)."
            ) from error
    else:
        values = _kept(guide, num_samples, [*args, *kwargs.values()])
    new = NewData(model, values, args, kwargs, from_prior, may_lack=not callable(guide))
    notes = fixed_parameters(new.program, new.sites, new.values)
    if from_prior is None and (isinstance(guide, AutoGuide) or not callable(guide)):
        if isinstance(guide, AutoHierarchical):
            _refuse_other_units(guide, new.sites)
        notes += new.same_units()
        if not any(find_sites(guide)):  # whose processes follow
            notes += new.same_rows()
    for note in notes:
        warnings.warn(note, stacklevel=2)
    with random_state(seed, PREDICTIONS):
        return new.draw(sites, batch_size)


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


class NewData:
    """A model at new arguments, its latent sites but for ``from_prior`` fixed at posterior draws
    ``values`` (S, ...), by site or :func:`to_arviz`'s name; with ``may_lack`` of further ones too."""

    def __init__(
        self,
        model: Callable[..., Any],
        values: Mapping[str, Tensor],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        from_prior: Collection[str] | None = None,
        may_lack: bool = False,
    ) -> None:
        self.model, self.call = model, (args, dict(kwargs))
        self.program = partial(model, *args, **kwargs)
        self.num_samples = len(next(iter(values.values()), ()))
        dotted = {_dotted(name): x for name, x in values.items()}
        for name in from_prior or ():
            if dotted.pop(_dotted(name), None) is None:
                raise ValueError(f"from_prior names {name!r}; the draws are of {sorted(values)}.")
        minibatches = Minibatches()
        try:
            with _AtFirstDraw({name: x[0] for name, x in dotted.items()}):
                ran = look(self.program, {}, minibatches=minibatches)
        except (TypeError, AttributeError) as error:
            way = "Give the data a default (y=None), or any values, torch.zeros(len(X)): they are drawn"
            if "unexpected keyword" in str(error):
                way = "Options of predict are num_samples, sites, from_prior, batch_size and seed"
            raise ValueError(f"The model cannot run on these arguments: {error}. {way}.") from error
        refuse_minibatches(ran, minibatches)
        self.sites = without_plates(ran)
        self.observed = sites_of_kind(self.sites, "observed")
        latent = sites_of_kind(self.sites, "latent")
        self.values = {name: dotted[_dotted(name)] for name in latent if _dotted(name) in dotted}
        others = dotted.keys() - {_dotted(name) for name in self.values}
        if may_lack and self.values:
            others &= {_dotted(name) for name in self.observed}
        if others:
            raise ValueError(
                f"The posterior has draws of {sorted(others)}, which are no latent sites of the "
                f"model here. Is it that of another model, or of a reparametrised one?"
            )
        self.there = [name for name, site in self.sites.items() if site_kind(site) != "factor"]
        #: drawn anew, or deterministic
        self.new = [name for name in self.there if name not in self.values]

    def draw(
        self, names: Collection[str] | None, batch_size: int | None, small: bool = False
    ) -> dict[str, Tensor]:
        """Values of the named sites, (S, ...); with ``small`` large ones are stored in float32."""
        names = self.new if names is None else names
        if unknown := sorted(set(names) - {*self.there, RETURN}):
            raise ValueError(f"sites names {unknown}, but the sites of the model are {self.there}.")

        def returning() -> None:
            pyro.deterministic(RETURN, self.program())

        program = returning if RETURN in names else self.program
        names = [name for name in [*self.there, RETURN] if name in names]
        how = self.num_samples, batch_size, small
        return simulate(program, self.observed, names, self.values, *how)

    @property
    def _plates(self) -> dict[str, int]:
        """Plates of new data, and how many rows they have."""
        drawn = [self.sites[n] for n in self.new if site_kind(self.sites[n]) != "deterministic"]
        return {frame.name: frame.size for site in drawn for frame in site["cond_indep_stack"]}

    def same_rows(self) -> list[str]:
        """Warnings about latent vectors with an entry for each row: with fewer rows they have fewer."""
        notes = []
        for plate, size in self._plates.items():
            shapes = {name: self.sites[name]["fn"].shape() for name in self.values}
            alike = [n for n in shapes if size > 1 and size in self.sites[n]["fn"].event_shape]
            if not alike:
                continue
            fewer: Sites = {}
            with suppress(Exception):  # whatever a model has against other arguments
                args, kwargs = tree_map(partial(_without_last, size=size), self.call)
                fewer = look(self.model, {}, args, kwargs)
            notes += [
                f"The latent site {name!r} has an entry for each row in {plate!r} of the fit. The same "
                f"rows? Say predict(..., from_prior=[]). Others: fit with them, masked, or predict by "
                f"an AutoSites guide, which follows to new inputs."
                for name in alike
                if name in fewer and fewer[name]["fn"].shape() != shapes[name]
            ]
        return notes

    def same_units(self) -> list[str]:
        """A warning about latent sites in the plates of new data, if there are any."""
        plates = self._plates
        return [
            f"The latent site {name!r} lies in the plate {frame.name!r} with the new data, whose "
            f"rows are taken for the units that the guide was trained on. For other units: "
            f"predict(..., from_prior=[{name!r}]); from_prior=[] confirms the same."
            for name in self.values
            for frame in self.sites[name]["cond_indep_stack"]
            if frame.vectorized and frame.name in plates
        ]


def _without_last(x: Any, size: int) -> Any:
    """An argument of the model without its last row, where it has so many."""
    return x[:-1] if isinstance(x, Tensor) and x.shape[:1] == (size,) else x


def simulate(
    model: Callable[[], Any],
    observed: Collection[str],
    names: Collection[str],
    values: Mapping[str, Tensor],
    num_samples: int,
    batch_size: int | None,
    small: bool = True,
) -> dict[str, Tensor]:
    """The named sites, (S, ...), where all but ``values`` are drawn from the model, data too."""

    def chosen(sites: Sites) -> dict[str, Tensor]:
        found = {name: sites[name]["value"] for name in names}
        return {n: compact(x, num_samples) if small else x for n, x in found.items()}

    program = SampleObserved(observed)(model)
    return map_draws(program, chosen, values, num_samples, batch_size)


def fixed_parameters(
    model: Callable[[], Any], prototype: Sites, draws: Mapping[str, Tensor]
) -> list[str]:
    """Warnings about what poutine.condition has fixed: one number that others, of more, depend on."""
    observed = sites_of_kind(prototype, "observed")
    numbers = [name for name in observed if prototype[name]["fn"].shape().numel() == 1]
    drawn = [name for name in sites_of_kind(prototype, "latent") if name not in draws]
    others = [name for name in [*observed, *drawn] if name not in numbers]
    if not (numbers and others):
        return []
    at = {name: x[0] for name, x in draws.items()}
    at |= {name: prototype[name]["value"] for name in drawn}

    def terms(*anew: str) -> list[Tensor]:
        # without validation, since data that only give a size may lie outside their support
        with torch.no_grad(), pyro.validation_enabled(False):
            sites = look(SampleObserved(anew)(model), at)
            return [site_log_prob(sites[name])[0].nan_to_num() for name in others]

    before = terms()
    return [
        f"The observed site {name!r} is one number, and others depend on it, as on a parameter "
        f"that poutine.condition has fixed: it counts as data, and is drawn anew. Fix parameters "
        f"by pyro.poutine.do(model, data=...), or in the model."
        for name in numbers
        if not all(map(torch.equal, before, terms(name)))
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
                f"The latent site {name!r} has shape {tuple(value.shape)} in the posterior and "
                f"{shape} here. For units new to the guide: predict(..., from_prior=[{name!r}]). For a "
                f"function at new inputs: predict by its AutoSites guide, or fit with them, masked."
            )
        msg["value"], msg["done"] = value, True


def _dotted(name: str) -> str:
    return name.replace("/", ".")  # as to_arviz stores it


class SampleObserved(Messenger):
    """Draws the named observed sites from the model instead of taking their data, in their shape."""

    def __init__(self, names: Collection[str]) -> None:
        super().__init__()
        self.names = names

    def _pyro_sample(self, msg: Site) -> None:
        if msg["name"] in self.names:
            fn, data = msg["fn"], msg["value"]
            if isinstance(data, Tensor):  # many data of one distribution, perhaps, without a plate
                shape = torch.broadcast_shapes(data.shape, fn.shape())
                msg["fn"] = fn if shape == fn.shape() else _expanded(fn, shape)
            msg["is_observed"], msg["value"], msg["done"] = False, None, False


def _expanded(fn: Any, shape: torch.Size) -> Any:
    """``fn`` with draws of this shape, which it broadcasts to."""
    if isinstance(fn, Independent):
        return _expanded(fn.base_dist, shape).to_event(fn.reinterpreted_batch_ndims)
    return fn.expand(shape[: len(shape) - fn.event_dim])
