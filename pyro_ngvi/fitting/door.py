"""What a fit asks of what it is given."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import pyro
import torch
from pyro import poutine
from pyro.infer import RenyiELBO, Trace_ELBO, TraceGraph_ELBO, TraceTMC_ELBO
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ..diagnostics import diagnose, khat, loo, predict, to_arviz
from ..linalg.host import own_random_state
from ..runtime.checks import check_missing, tensor_of, warn_of_noise
from ..runtime.density import Sites, is_latent, site_kind, site_log_prob
from ..runtime.pyro_adapter import is_marked
from ..runtime.run import Minibatches, look
from ..runtime.store import ModuleParams, OwnName

#: what a fit is read by, whose options have names that an argument of the model cannot have
READERS = to_arviz, khat, diagnose, loo, predict
#: names that other libraries give to options of a fit, and what does it here
MEANT = {
    "num_steps": "max_steps= bounds the run, which ends by itself",
    "num_iterations": "max_steps= bounds the run, which ends by itself",
    "n": "max_steps= bounds the run, which ends by itself",
    "steps": "max_steps= bounds the run, which ends by itself",
    "epochs": "max_steps= bounds the run, which ends by itself",
    "time_limit": "max_time= bounds the run, in seconds",
    "batch_size": "minibatches come from a DataLoader, data=loader",
    "lr": "there is no rate to choose; for Adam pass optim=pyro.optim.Adam({'lr': 0.01})",
    "optimizer": "it is called optim=",
    "num_samples": "fit.to_arviz(num_samples=...) and fit.sample(...) draw",
}
#: losses of Pyro's that do not sum out marked sites: they draw them, or, TMC's, count their prior twice
NOT_SUMMING = Trace_ELBO, TraceGraph_ELBO, RenyiELBO, TraceTMC_ELBO
#: by guide, what marks the fit that trained it last
_LAST: WeakKeyDictionary[Any, object] = WeakKeyDictionary()


def take_guide(guide: Any, mark: object) -> None:
    """Note that the fit of this mark trains a guide."""
    _LAST[guide] = mark


def check_guide_of(guide: Any, mark: object) -> None:
    """Refuse to read a guide for a fit whose answer it no longer holds."""
    if _LAST.get(guide, mark) is not mark:
        raise ValueError(
            "The guide of this fit was given to a later one, which trained it further. Read a fit "
            "before that, or give each a guide of its own: guide=copy.deepcopy(guide)."
        )


def check_names(model: Any, kwargs: Mapping[str, Any]) -> None:
    """Keyword arguments of the model go to what reads a fit, beside options of its own."""
    takes = [*MEANT]
    with suppress(TypeError, ValueError):  # what has no signature takes anything
        takes = inspect.signature(model).parameters.values()
        takes = [*MEANT] if any(p.kind is p.VAR_KEYWORD for p in takes) else [p.name for p in takes]
    for name in sorted(kwargs.keys() & MEANT.keys() - {*takes}):
        raise TypeError(f"fit has no option {name!r}, nor does the model take it: {MEANT[name]}.")
    for reader in READERS:
        options = inspect.signature(reader).parameters.values()
        taken = {p.name for p in options if p.kind is p.KEYWORD_ONLY} & kwargs.keys()
        for name in sorted(taken):
            raise ValueError(
                f"{name!r}, an argument of the model, is also an option of {reader.__name__}, which "
                f"reads a fit. Pass functools.partial(model, {name}=...) as the model."
            )


#: what takes any arguments, and what PyTorch says where it does not mix two
ANY = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
DTYPES = "dtype", "scalar type", "result type"


@contextmanager
def naming_arguments(
    model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[None]:
    """Within it errors have a note on arguments of the model that torch does not mix with others, and
    on those with numbers that are not finite where values were invalid."""
    try:
        yield
    except (TypeError, RuntimeError, ValueError, AttributeError) as error:
        notes = list(_of_nan(model, args, kwargs)) if "nvalid values" in str(error) else []
        for name, x in _by_name(model, args, kwargs).items():
            dtype, wanted = getattr(x, "dtype", None), torch.get_default_dtype()
            kind = f"is of type {type(x).__name__}"
            if isinstance(x, Tensor):
                said = ("two bool tensors",) if dtype is torch.bool else DTYPES
                if dtype is wanted or not any(words in str(error) for words in said):
                    continue
                kind = f"is of {dtype}, and the default is {wanted}"
            elif not hasattr(x, "__array__"):
                continue
            notes.append(
                f"The argument {name!r} of the model {kind}. For numbers pass {tensor_of(name, x)}."
            )
        for note in notes:
            if note not in getattr(error, "__notes__", ()):
                error.add_note(note)
        raise


def _signature(model: Any) -> inspect.Signature | None:
    """What a model takes, ``None`` where nothing says so."""
    with suppress(TypeError, ValueError):
        return inspect.signature(getattr(model, "forward", model))
    return None


def _by_name(model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    """The arguments of a model by their names, or by their places where it takes any."""
    takes = _signature(model)
    if takes is not None and not any(p.kind in ANY for p in takes.parameters.values()):
        with suppress(TypeError):  # of which it does not take some
            return takes.bind(*args, **kwargs).arguments
    return {f"args[{i}]": x for i, x in enumerate(args)} | {**kwargs}


def _of_nan(model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[str]:
    """Which arguments have NaN or infinite numbers, in words."""
    for name, x in _by_name(model, args, kwargs).items():
        for what, numbers in ("NaN", torch.isnan), ("infinite", torch.isinf):
            count = int(numbers(x).sum()) if isinstance(x, Tensor) else 0
            if count:
                yield f"The argument {name!r} of the model is {what} in {count} of {x.numel()} numbers."


def check_numbers(
    model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], minibatches: Minibatches
) -> Sites:
    """Refuse NaN by which data have no density, and warn of noise, by runs at two draws of the prior;
    gives the sites of the first."""
    with poutine.block(), ModuleParams(), pyro.validation_enabled(False):
        again = partial(look, model, args=args, kwargs=kwargs, minibatches=minibatches)
        seen = again({})
        with own_random_state(torch.initial_seed() // 2 + 1):  # another draw of the prior
            check_missing(seen, again)
            with suppress(RuntimeError):  # of a density that cannot be evaluated there
                if told := next(_of_nan(model, args, kwargs), None):
                    at = {name: site["value"] for name, site in seen.items() if is_latent(site)}
                    x, more = tree_map_only(Tensor, Tensor.nan_to_num, (args, dict(kwargs)))
                    _check_density(told, seen, look(model, at, x, more, minibatches))
                warn_of_noise(seen, again)
    return seen


def _check_density(told: str, sites: Sites, filled: Sites) -> None:
    """Refuse arguments of which this is ``told`` where log p of data is NaN, and is not when they are
    ``filled``."""
    for name in (name for name in sites if site_kind(sites[name]) == "observed" and name in filled):
        now, then = (bool(site_log_prob(x[name])[1].isnan().any()) for x in (sites, filled))
        if now and not then:
            raise ValueError(
                f"{told} So log p of {name!r} is NaN. Leave these rows out, or fill them in."
            )


def check_batch(model: Any, batch: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Refuse a dict, which is one argument, by the names of several of the model's own."""
    takes = _signature(model)
    names, named = [], batch[0] if len(batch) == 1 else None
    if takes is not None and isinstance(named, Mapping):
        names = sorted(takes.parameters.keys() & named.keys() - kwargs)
    if len(names) > 1:
        raise ValueError(
            f"Each minibatch of data= is a dict with names of the model's arguments, as {names[0]!r}, "
            f"and is one argument. Let the collate_fn= of the DataLoader return tuples, or the model "
            f"take the dict."
        )


def check_source(
    model: Any, source: Any, batch: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> None:
    """Refuse tensors for the arguments of one call in the place of minibatches: the model takes all of
    them at once, and with the first alone cannot run, or observes nothing."""
    takes = _signature(model)
    tensors = isinstance(source, tuple | list) and all(isinstance(x, Tensor) for x in source)
    if not tensors or len(source) < 2 or takes is None or not _binds(takes, source, kwargs):
        return
    if _binds(takes, batch, kwargs):
        with poutine.block(), ModuleParams(), pyro.validation_enabled(False):
            sites = look(model, {}, batch, kwargs)
        if {"observed", "factor"} & {*map(site_kind, sites.values())}:
            return
    raise ValueError(
        f"data= is {len(source)} tensors, each a minibatch, and with the first alone the model "
        f"observes nothing. Pass all data by position, fit(model, X, y), or minibatches of all "
        f"arguments: a DataLoader of a TensorDataset of them."
    )


def _binds(takes: inspect.Signature, args: Any, kwargs: Mapping[str, Any]) -> bool:
    try:
        takes.bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def check_sums(loss: Any, guide: Any, sites: Sites, args: Any, kwargs: Any) -> None:
    """Refuse a loss that does not sum out the marked sites, and so is of another posterior."""
    marked = [n for n in sites if is_marked(sites[n])] if isinstance(loss, NOT_SUMMING) else []
    if marked and not isinstance(guide, OwnName):  # one of the user's may draw them
        marked = [n for n in marked if n not in look(guide, {}, args, kwargs)]
    for name in marked:
        raise ValueError(
            f"{type(loss).__name__} does not sum out the site {name!r}, which is marked to be "
            f"enumerated: the fit would be of another posterior. Leave loss= out, which takes "
            f"BatchedELBO, or pass pyro.infer.TraceEnum_ELBO()."
        )


def warn_of_minibatches(sites: Sites, plates: Collection[str]) -> None:
    """Of ``plates`` whose examples the model draws itself: no figure of a fit is one of all data."""
    for name in plates:
        warnings.warn(
            f"The plate {name!r} takes {len(sites[name]['value'])} of {sites[name]['fn'].size} "
            "examples at each step, so that this fit will have no verdict or predictions. Make the "
            "size an argument of the model, and pass the full size, or minibatches as data=loader.",
            UserWarning,
            stacklevel=2,
        )


def warn_of_no_globals(sites: Sites) -> None:
    """Of priors inside the plate of the data: each datum has latent variables of its own alone."""
    latent = {name: site for name, site in sites.items() if is_latent(site)}
    data = [site for site in sites.values() if site_kind(site) == "observed"]
    plates = [{f.name for f in site["cond_indep_stack"]} for site in (*latent.values(), *data)]
    shared = set.intersection(*plates) if latent and data else set()
    count = sum(site["value"].numel() for site in data)
    if shared and sum(site["value"].numel() for site in latent.values()) >= 2 * count:
        names = ", ".join(map(repr, [*latent][:3]))
        warnings.warn(
            f"Each of {count} data has latent variables of its own ({names}), and they share none. "
            f"Write priors that all data share before the plate {min(shared)!r}.",
            UserWarning,
            stacklevel=2,
        )


def is_true(answer: Any) -> bool:
    """Whether a callback says by a truth value, not by what it happens to return, that it is enough."""
    kind, entries = getattr(answer, "dtype", type(answer)), getattr(answer, "shape", ())
    return kind in (bool, torch.bool) and not entries and bool(answer)


def begins_with(guide: Any, args: Any, kwargs: Any) -> bool:
    """Whether a guide without a start now has it from this minibatch alone, which no step is to see.

    Not one without correlations: where data have some it is too sure of a place that is off."""
    if getattr(guide, "begins_with_part", True) or guide.prototype_trace is not None:
        return False
    if guide.family.curvature_form != "dense":
        return False
    guide.begins_with_part = True
    with poutine.block():
        guide(*args, **kwargs)
    return True


def check_spread(guide: Any, compile: bool | str) -> None:
    """Refuse what ``fit`` does not do on several processes."""
    if compile:
        raise ValueError("Steps of several processes are not compiled: leave compile= out.")
    if hasattr(guide, "draw_units"):
        raise ValueError(
            "fit has no verdict on units of several processes. Write the loop, with the SVI that "
            "pyro_ngvi.distributed.wrap makes, or name another guide."
        )
