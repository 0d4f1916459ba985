"""Everything that the next step depends on, in one file; and back, bit for bit.

A file is what ``torch.save`` writes of dicts, tensors and numbers, so that reading it runs no code, and
its digest.  It replaces the one before in a single step, once all of it stands on the disk: whatever
happens meanwhile, the path holds a whole one.
"""

from __future__ import annotations

import hashlib
import os
import pickle
from collections.abc import Iterator, Mapping
from functools import partial
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any

import pyro
import torch
from pyro.infer import SVI
from pyro.nn import PyroModule
from torch import Tensor, nn

from .._version import __version__
from ..guides.found import Found
from ..optim.host import NaturalGradientOptim, describe, find_blocks
from ..optim.state import OthersState
from ..runtime.store import BASELINES, module_name
from .batches import Batches, all_random_states, set_all_random_states
from .gap import gradients_taken_back
from .stop import StopRule

FORMAT = 1
#: what stands behind the file of ``torch.save``, which does not mind
DIGEST = hashlib.sha256


def save(
    path: str | os.PathLike[str],
    svi: SVI,
    *,
    stop: StopRule | None = None,
    batches: Batches | None = None,
    extra: Any = None,
) -> None:
    """Write everything that the next step of ``svi`` depends on, for :func:`pyro_ngvi.load`.

    That is parameters and buffers of guide and model, other parameters that the optimizer steps, its
    state, and the random states of torch, its devices, NumPy and Python.  The file is replaced once the
    new one is whole.  Not saved: code (model, guide class, settings of the optimizer), data,
    ``kl_weight``, buffers that a *function* registers by ``pyro.module``, generators of your own.

    Args:
        path: the file.
        svi: the ``pyro.infer.SVI``, after one step at least.
        stop: the stop rule of the loop.
        batches: the minibatches of the loop, of which the place in the epoch is saved.
        extra: anything of tensors, numbers, strings, lists, tuples and dicts.

    Raises:
        ValueError: before the first step, and for an ``extra`` that could not be read back.

    Example:
        >>> import os, tempfile, pyro, torch, pyro.distributions as dist, pyro_ngvi as ngvi
        >>> def model(y):
        ...     pyro.sample("y", dist.Normal(pyro.sample("m", dist.Normal(0.0, 1.0)), 1.0), obs=y)
        >>> def run():
        ...     guide = ngvi.AutoFullRankNormal(model)
        ...     return SVI(model, guide, ngvi.NGVB(guide), ngvi.BatchedELBO(4))
        >>> svi, y = run(), torch.tensor(2.0)
        >>> path = os.path.join(tempfile.mkdtemp(), "run.ngvi")
        >>> loss = svi.step(y)
        >>> ngvi.save(path, svi)
        >>> expected = svi.step(y)
        >>> pyro.clear_param_store()  # tomorrow
        >>> svi = run()
        >>> ngvi.load(path, svi, y)
        >>> svi.step(y) == expected
        True
    """
    write(path, collect(svi, stop, batches, extra))


def collect(svi: SVI, stop: Any = None, batches: Any = None, extra: Any = None) -> dict[str, Any]:
    """What :func:`save` writes: plain data."""
    guide, optim = svi.guide, svi.optim
    ours = isinstance(optim, NaturalGradientOptim)
    if getattr(guide, "prototype_trace", ()) is None:
        raise ValueError(
            f"save: {type(guide).__name__} has not been called yet, so there is nothing to save. "
            f"Take a step of SVI first."
        )
    stepped = optim.others if ours else optim
    modules = [m for m in (guide, svi.model) if isinstance(m, nn.Module)]
    owned = {id(p) for m in modules for p in m.parameters()}
    store = pyro.get_param_store()
    unconstrained = dict(store.named_parameters())
    trained = () if stepped is None else stepped.optim_objs
    names = {str(store.param_name(p)) for p in trained if id(p) not in owned}
    names |= {name for name in unconstrained if name.startswith(BASELINES)}
    versions = {"pyro_ngvi": __version__, "torch": str(torch.__version__), "pyro": pyro.__version__}
    return {
        "format": FORMAT,
        "versions": versions,
        "guide": {
            "name": called(guide),
            "stored": _stored(guide),
            "latents": _latents(guide),
            "state": _state(guide),
            "starts": {path: b.start_report.plain() for path, b in _searched(guide)},
        },
        "model": _state(svi.model),
        "params": {name: unconstrained[name].detach().clone() for name in sorted(names)},
        "optim": {
            "name": called(optim),
            "state": optim.get_state() if ours else OthersState(guide).save(optim),
        },
        "stop": None if stop is None else stop.state_dict(),
        "batches": None if batches is None else batches.state_dict(),
        "extra": extra,
        "random": all_random_states(),
    }


def restore(
    saved: Mapping[str, Any],
    svi: SVI,
    args: Any,
    kwargs: Any,
    stop: Any = None,
    batches: Any = None,
    path: Any = "the file",
) -> Any:
    """Put what :func:`collect` gave into a loop made anew."""
    guide, model, optim = svi.guide, svi.model, svi.optim
    own = saved["guide"]
    names = {"guide": (guide, own["name"]), "optimizer": (optim, saved["optim"]["name"])}
    for what, (now, then) in names.items():
        if called(now) != then:
            raise ValueError(
                f"{path} is of a run with the {what} {then}, and this one has {called(now)}."
            )
    for what, now, then in (("stop", stop, saved["stop"]), ("batches", batches, saved["batches"])):
        if (now is None) != (then is None):
            was, give = ("without", "leave it out") if then is None else ("with", "pass it")
            raise ValueError(f"{path} was saved {was} {what}=: {give} here too.")
    _fill(path, "model", model, saved["model"])
    if isinstance(guide, nn.Module):
        # guides of ours that do not know their sites yet keep it, and do not search for a start
        guide.load_state_dict(own["state"], strict=False)
    # a step without its end: guide and model make their parameters, and the loss knows the model
    try:
        with gradients_taken_back(block for _, block in find_blocks(guide)):
            svi.loss_and_grads(model, guide, *args, **kwargs)
    except TypeError as error:
        if args or kwargs:
            raise
        why = f"{error}. Give load the arguments of the run, as ngvi.load(path, model, X, y)"
        raise ValueError(f"{path}: {why}.") from error
    if _latents(guide) != own["latents"]:
        raise ValueError(
            f"{path} is of another model: its latent sites are {_listed(own['latents'])}, and here "
            f"they are {_listed(_latents(guide))}."
        )
    _fill(path, "model", model, saved["model"])
    _fill(path, "guide", guide, own["state"])
    for where, block in find_blocks(guide):
        if where in own.get("starts", ()):  # verdicts ask which modes a search has seen
            block.start_report = Found.of_plain(own["starts"][where])
    _fill_store(path, saved["params"])
    if isinstance(optim, NaturalGradientOptim):
        optim.set_state(_renamed(saved["optim"]["state"], own["stored"], _stored(guide)))
    else:
        others = OthersState(guide)
        others.load(optim, saved["optim"]["state"])
        others.restore(optim)
    if stop is not None:
        stop.load_state_dict(saved["stop"])
    if batches is not None:
        batches.load_state_dict(saved["batches"])
    set_all_random_states(saved["random"])
    return saved["extra"]


def _searched(guide: Any) -> Iterator[tuple[str, Any]]:
    """Blocks whose start a search has found, by path."""
    blocks = find_blocks(guide)
    return ((p, b) for p, b in blocks if getattr(b, "start_report", None) is not None)


def write(path: str | os.PathLike[str], tree: Any) -> None:
    """Replace the file at ``path`` by a new one, as a whole or not at all."""
    path = Path(path)
    beside = path.with_name(path.name + ".tmp")
    with open(beside, "wb+") as file:
        torch.save(tree, file)
        file.flush()
        file.write(_digest(file, file.tell()))
        file.flush()
        os.fsync(file.fileno())
    try:
        torch.load(beside, weights_only=True, map_location="meta", mmap=True)
    except pickle.UnpicklingError:
        beside.unlink()
        raise ValueError(
            "save: something in extra= or in the optimizer's state is no tensor, number, string, list, "
            "tuple or dict (a function?), and would run code when it is read back."
        ) from None
    os.replace(beside, path)
    if os.name == "posix":  # the new name on the disk too
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What :func:`write` wrote, on the CPU.  No code in the file runs."""
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END) - DIGEST().digest_size
        file.seek(max(size, 0))
        whole = size > 0 and _digest(file, size) == file.read()
    try:
        tree = torch.load(path, weights_only=True, map_location="cpu") if whole else None
    except Exception:  # zip and pickle raise anything over what is no file of theirs
        tree = None
    if not isinstance(tree, dict) or "format" not in tree:
        raise ValueError(
            f"load: {path} is no whole file of pyro_ngvi.save: it is damaged, cut off, or something "
            f"else."
        )
    if tree["format"] != FORMAT:
        raise ValueError(
            f"load: {path} has format {tree['format']}, written by pyro_ngvi "
            f"{tree['versions']['pyro_ngvi']}; this version, {__version__}, reads format {FORMAT}."
        )
    return tree


def _digest(file: Any, size: int) -> bytes:
    """Of the first ``size`` bytes of a file."""
    with mmap(file.fileno(), size, access=ACCESS_READ) as first:
        return DIGEST(first).digest()


def bare(maker: Any) -> Any:
    """What makes a guide or an optimizer, without arguments that are bound to it."""
    return maker.func if isinstance(maker, partial) else maker


def called(thing: Any) -> str:
    """What a guide or an optimizer, or what makes one, is called: a ``PyroOptim`` by what it wraps."""
    thing = bare(thing)
    inner = getattr(thing, "pt_optim_constructor", None)
    if inner is not None and not isinstance(thing, NaturalGradientOptim):
        thing = inner
    return describe(thing)


def _renamed(tree: Any, old: str | None, new: str | None) -> Any:
    """A state whose keys are names in Pyro's store, for a guide that is called otherwise there."""
    if not isinstance(tree, dict) or old == new or old is None or new is None:
        return tree
    keys = {k: new + k[len(old) :] if str(k).startswith(f"{old}.") else k for k in tree}
    return {keys[k]: _renamed(v, old, new) for k, v in tree.items()}


def _stored(guide: Any) -> str | None:
    return module_name(guide) if isinstance(guide, PyroModule) else None


def _latents(guide: Any) -> dict[str, tuple[int, ...]] | None:
    """The latent sites of an autoguide by shape, if it knows them."""
    trace = getattr(guide, "prototype_trace", None)
    if trace is None:
        return None
    return {n: tuple(site["value"].shape) for n, site in trace.iter_stochastic_nodes()}


def _listed(latents: dict[str, tuple[int, ...]] | None) -> str:
    return ", ".join(f"{n} {s}" for n, s in list((latents or {}).items())[:3]) or "not known"


def _state(module: Any) -> dict[str, Tensor] | None:
    return module.state_dict() if isinstance(module, nn.Module) else None


def _fill(path: Any, what: str, module: Any, state: dict[str, Any] | None) -> None:
    """Load the state of a guide or model, unless it is a function."""
    if isinstance(module, nn.Module) != (state is not None):
        raise ValueError(
            f"{path}: its {what} is a {'module' if state else 'function'}, and here not."
        )
    if state is None:
        return
    for name, now in module.state_dict().items():
        then = state.get(name)
        if isinstance(then, Tensor) and then.dtype != now.dtype:
            raise ValueError(
                f"{path} holds {name} of the {what} in {then.dtype}, and here it is {now.dtype}."
            )
    module.load_state_dict(state)


def _fill_store(path: Any, saved: Mapping[str, Tensor]) -> None:
    store = pyro.get_param_store()
    for name, value in saved.items():
        if name not in store:
            if not name.startswith(BASELINES):
                raise ValueError(
                    f"{path} has a parameter {name!r} that guide and model do not have."
                )
            store[name] = value
        own = dict(store.named_parameters())[name]
        if own.shape != value.shape or own.dtype != value.dtype:
            raise ValueError(
                f"{path} holds {name!r} as {tuple(value.shape)}, {value.dtype}; here it is "
                f"{tuple(own.shape)}, {own.dtype}."
            )
        with torch.no_grad():
            own.copy_(value)
