"""The arrays of ArviZ's groups, and the names of their dimensions, from traces of a Pyro model."""

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..runtime.density import Site, Sites, site_kind


def _array(x: Tensor | np.ndarray) -> np.ndarray:
    return x.detach().cpu().numpy() if isinstance(x, Tensor) else x


def per_draw(variables: Mapping[str, Tensor | np.ndarray]) -> dict[str, np.ndarray]:
    """Adds the dimension of the chain, (1, S, ...)."""
    return {name: _array(x)[None] for name, x in variables.items()}


def observations(prototype: Sites, names: Collection[str]) -> dict[str, np.ndarray]:
    """The data of the named sites, in the shape of the site."""
    sites = {name: prototype[name] for name in names}
    return {name: _array(site["value"].expand(_shape(site))) for name, site in sites.items()}


def constants(
    model: Callable[..., Any], args: Any, kwargs: Any, prototype: Sites
) -> dict[str, np.ndarray]:
    """The arrays among the arguments, by name, of ``*args`` by name and position, without the data of
    observed sites; one that has the name of a site is called ``{name}_argument``."""
    signature = inspect.signature(model.forward if isinstance(model, nn.Module) else model)
    arguments: dict[str, Any] = {}
    for name, value in signature.bind(*args, **kwargs).arguments.items():
        match signature.parameters[name].kind:
            case inspect.Parameter.VAR_POSITIONAL:
                arguments |= {f"{name}_{i}": x for i, x in enumerate(value)}
            case inspect.Parameter.VAR_KEYWORD:
                arguments |= value
            case _:
                arguments[name] = value
    observed = [site["value"] for site in prototype.values() if site["is_observed"]]
    return {
        f"{name}_argument" if name in prototype else name: _array(x)
        for name, x in arguments.items()
        if isinstance(x, Tensor | np.ndarray) and not any(x is y for y in observed)
    }


def name_dims(
    groups: Mapping[str, Mapping[str, np.ndarray]],
    prototype: Sites,
    dims: Mapping[str, Sequence[str]],
    coords: Mapping[str, Sequence[Any]],
) -> dict[str, list[str]]:
    """Names of the dimensions of every variable: the user's, else plates, else numbers."""
    shapes = {name: x.shape for name, x in groups.get("constant_data", {}).items()}
    sites = {name for group in groups.values() for name in group} & set(prototype)
    shapes |= {name: _shape(prototype[name]) for name in sites}
    named = {name: [f"{name}_dim_{i}" for i in range(len(shape))] for name, shape in shapes.items()}
    taken = {*shapes, "chain", "draw"}
    for name in sites:
        for i, plate in _plates(prototype[name]).items():
            # A dimension cannot have the name of a variable that is not its coordinate.
            named[name][i] = f"{plate}_dim" if plate in taken else plate
    for name, given in dims.items():
        if name not in shapes:
            raise ValueError(f"dims names {name!r}, but the variables are {sorted(shapes)}.")
        if isinstance(given, str) or len(given) != len(shapes[name]):
            raise ValueError(
                f"dims[{name!r}] is {given!r}; {name!r} has shape {tuple(shapes[name])}, so give a "
                f"list of {len(shapes[name])} names."
            )
        named[name] = list(given)
    there = {dim for names in named.values() for dim in names}
    for dim in coords.keys() - there:
        raise ValueError(f"coords names {dim!r}, but the dimensions are {sorted(there)}.")
    return named


def _shape(site: Site) -> torch.Size:
    """The shape of one draw of a site, whose data may have been broadcast against it."""
    if site_kind(site) == "deterministic":
        return site["value"].shape
    return torch.broadcast_shapes(site["value"].shape, site["fn"].shape())


def _plates(site: Site) -> dict[int, str]:
    """Which dimension of a site, from the left, belongs to which plate."""
    shape, event_dim = _shape(site), site["fn"].event_dim
    if site_kind(site) == "deterministic" and event_dim == len(shape):
        event_dim = 0  # pyro.deterministic takes all for event dimensions unless told otherwise
    batch_dim = len(shape) - event_dim
    return {
        batch_dim + frame.dim: frame.name
        for frame in site["cond_indep_stack"]
        if frame.vectorized
        and -frame.dim <= batch_dim
        and shape[batch_dim + frame.dim] == frame.size
    }
