r"""A Pyro model without its enumerated sites, as a Pyro model.

For discrete sites z that are marked ``infer={"enumerate": "parallel"}``, x the other latent sites:

    p(y, x) = sum_z p(y, x, z),

by Pyro's enumeration (with ``pyro.markov`` and its limits) and tensor variable elimination (Obermeyer
et al. 2019).  Sites that share enumerated variables are one factor.  In its place the model samples

* an observed site with log p(y | x), an entry for each cell of the plates that all of the factor lie
  in.  It has the name of the data, ``y``, where it has their plates, and else says what it is:
  ``y_1..y_9_by_animal``, ``y_together`` where there is no such plate;
* a ``pyro.factor`` with log p(x) for latent sites whose prior depends on z: they have no other density.

As in ``TraceEnum_ELBO``, a scale acts on the logarithm of the sum.  Pyro cannot sum out a site outside
of a plate on which data in several plates depend in turn.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping
from typing import Any, ClassVar, cast

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.infer import infer_discrete
from pyro.ops import packed
from pyro.ops.contract import contract_to_tensor
from pyro.ops.rings import LogRing
from pyro.poutine.enum_messenger import EnumMessenger
from pyro.poutine.messenger import Messenger
from pyro.poutine.util import site_is_subsample
from torch import Tensor

from .density import Site, Sites, site_kind, site_log_prob
from .pyro_adapter import is_marked
from .run import Program


def summed_out(model: Program, sites: Mapping[str, Site], given: Collection[str] = ()) -> Program:
    """``model`` without the marked sites among ``sites``, those of a plain run; ``model`` itself where
    there are none.  Marked sites that a guide samples, ``given``, stay."""
    names = [name for name, site in sites.items() if is_marked(site) and name not in given]
    if not names:
        return model
    nesting = 0  # dimensions on the right for plates, or for a batch without one
    for site in sites.values():
        if site["type"] == "sample" and not site_is_subsample(site):
            dims = [-frame.dim for frame in site["cond_indep_stack"] if frame.vectorized]
            nesting = max(nesting, _batch_dim(site), *dims)
    return SummedOut(model, names, nesting)


def _batch_dim(site: Site) -> int:
    fn, value = site["fn"], site["value"]
    given = value.dim() - fn.event_dim if isinstance(value, Tensor) else 0
    mask = site["mask"].dim() if isinstance(site["mask"], Tensor) else 0
    return max(len(fn.batch_shape), given, mask)


class SummedOut:
    """A model to be called like the one it is made of, without the sites ``names``."""

    def __init__(self, model: Program, names: Collection[str], nesting: int) -> None:
        self.names = tuple(names)
        self._nesting = nesting
        self._model = poutine.infer_config(model, cast(Any, self._config))

    def _config(self, site: Site) -> dict[str, Any]:
        return {"enumerate": None} if is_marked(site) and site["name"] not in self.names else {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with _Collector(self.names, self._nesting) as collector, _Enumerates(-1 - self._nesting):
            result = self._model(*args, **kwargs)
        _sample_sums(collector.sites, self.names)
        return result

    def with_draws(self, latent: Collection[str]) -> Program:
        """The model with its enumerated sites drawn from p(z | x, y), for ``values`` of x that stand
        under the names :func:`given_name` of the sites ``latent``."""

        def program(*args: Any, **kwargs: Any) -> Any:
            values = {
                name: pyro.sample(given_name(name), dist.Unit(torch.zeros(()))) for name in latent
            }
            conditioned = poutine.condition(self._model, data=values)
            drawn: Any = infer_discrete(conditioned, first_available_dim=-1 - self._nesting)
            return drawn(*args, **kwargs)

        return program


def given_name(name: str) -> str:
    """Under which name :meth:`SummedOut.with_draws` asks for the value of a site."""
    return f"_given_{name}"


class _Enumerates(EnumMessenger):
    """Pyro's own reads the shape off ``value.data``, to which ``vmap`` gives no access."""

    def _pyro_post_sample(self, msg: Any) -> None:
        if isinstance(msg["value"], Tensor):
            msg = {**msg, "value": torch.empty(msg["value"].shape, device="meta")}
        super()._pyro_post_sample(msg)


class _Collector(Messenger):
    """Keeps the sites that depend on enumerated ones for itself, and leaves the others alone.

    Latent ones are seen outside too, without their density and in the shape of one value.
    """

    def __init__(self, names: Collection[str], nesting: int) -> None:
        super().__init__()
        self.names, self.nesting, self.sites = names, nesting, Sites()

    def _pyro_sample(self, msg: Any) -> None:
        name, fn = msg["name"], msg["fn"]
        if site_is_subsample(msg) or (_batch_dim(msg) <= self.nesting and name not in self.names):
            return
        self.sites[name] = msg.copy()
        if name in self.names or msg["is_observed"]:
            msg["stop"] = True
        else:
            msg["fn"] = _Known(fn, fn.batch_shape[max(len(fn.batch_shape) - self.nesting, 0) :])

    def _pyro_post_sample(self, msg: Any) -> None:
        if msg["name"] in self.sites:
            self.sites[msg["name"]]["value"] = msg["value"]


class _Known(dist.TorchDistribution):
    """Support and draws of ``fn``, for one value of the enumerated variables that it depends on; with a
    log probability that is known already, or none."""

    arg_constraints: ClassVar[Any] = {}  # pyright: ignore[reportIncompatibleMethodOverride]

    def __init__(self, fn: Any, shape: torch.Size, log_prob: Tensor | None = None) -> None:
        self.fn, self._log_prob = fn, log_prob
        super().__init__(shape, fn.event_shape, validate_args=False)

    @property
    def has_rsample(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.fn.has_rsample

    @property
    def support(self) -> Any:
        return self.fn.support

    def rsample(self, sample_shape: Any = ()) -> Tensor:
        draw = self.fn.rsample if self.fn.has_rsample else self.fn.sample
        enumerated = len(self.fn.batch_shape) - len(self.batch_shape)
        return draw(sample_shape)[(slice(None),) * len(sample_shape) + (0,) * enumerated]

    def log_prob(self, value: Tensor) -> Tensor:
        none = value.shape[: value.dim() - self.event_dim]
        return value.new_zeros(none) if self._log_prob is None else self._log_prob


class _At(Messenger):
    """Samples with these plates and this scale, whatever is active."""

    def __init__(self, frames: tuple[Any, ...], scale: Any) -> None:
        super().__init__()
        self.frames, self.scale = frames, scale

    def _pyro_sample(self, msg: Any) -> None:
        msg["cond_indep_stack"] = self.frames
        msg["scale"] = msg["scale"] * self.scale


def _sample_sums(sites: Sites, names: Collection[str]) -> None:
    """Sample what is left of ``sites`` when ``names`` are summed out."""
    trace = poutine.Trace()
    for name, site in sites.items():
        if site_kind(site) != "deterministic":
            unscaled, masked = site_log_prob({**site, "scale": 1.0})
            # a mask hides data; a hidden z still sums to one
            kept = unscaled if name in names else masked
            changed = {"log_prob": kept, "unscaled_log_prob": unscaled, "mask": None}
            trace.add_node(name, **{**site, **changed})
    trace.pack_tensors()
    dims = set(trace.symbol_to_dim) - set(trace.plate_to_symbol.values())
    for summed, members in _connected(trace, dims):
        _sample_sum(trace, summed, members, names)


def _connected(trace: Any, dims: set[str]) -> list[Any]:
    """Enumerated dimensions that sites share, directly or through others, and names of these sites."""
    groups: list[Any] = []
    for name, node in trace.nodes.items():
        own = dims.intersection(node["packed"]["log_prob"]._pyro_dims), {name}
        touching = [group for group in groups if group[0] & own[0]]
        apart = [group for group in groups if not group[0] & own[0]]
        groups = [*apart, [set().union(*sets) for sets in zip(own, *touching, strict=True)]]
    return groups


def _sample_sum(trace: Any, dims: set[str], members: set[str], names: Collection[str]) -> None:
    """Sample the sum over ``dims`` of the sites ``members``, which are connected."""
    symbols: dict[str, str] = trace.plate_to_symbol
    nodes: Any = {name: node for name, node in trace.nodes.items() if name in members}
    stacks = {n: node["cond_indep_stack"] for n, node in nodes.items()}
    frames = {n: [f for f in stack if f.vectorized] for n, stack in stacks.items()}
    plates = {n: frozenset(symbols[f.name] for f in own) for n, own in frames.items()}
    shared = frozenset.intersection(*plates.values())

    def log_sum(members: list[str]) -> Tensor:
        """The log of the sum of the product of these sites, in the plates of all, (...)."""
        tree: OrderedDict[frozenset[str], list[Any]] = OrderedDict()
        for n in members:
            tree.setdefault(plates[n], []).append(nodes[n]["packed"]["log_prob"])
        ring = LogRing(dim_to_size={symbols[f.name]: f.size for n in members for f in frames[n]})
        how: Any = {"target_ordinal": shared, "ring": ring}
        return packed.unpack(contract_to_tensor(tree, dims, **how), trace.symbol_to_dim)

    scale, *scales = (node["scale"] for node in nodes.values())
    if any(s is not scale and float(s) != float(scale) for s in scales):
        raise ValueError(
            f"The sites {', '.join(map(repr, nodes))} share an enumerated variable but not their scale "
            f"(of poutine.scale, or of a subsampled plate), so their sum has none. Put all of them "
            f"into the plate, or under the same scale."
        )
    data = [n for n, node in nodes.items() if site_kind(node) == "observed"]
    others = [n for n in nodes if n not in data]
    latent = [n for n in others if n not in names]
    log_prior = log_sum(others) if latent else None
    kept = tuple(f for f in next(iter(stacks.values())) if symbols.get(f.name) in shared)
    with _At(kept, scale):
        if data:
            total = log_sum([*nodes]) if log_prior is None else log_sum([*nodes]) - log_prior
            name, node = data[0], nodes[data[0]]
            if len(data) == 1 and plates[name] == shared:
                fn, value = node["fn"], node["value"]
            else:
                fn, value = dist.Normal(0.0, 1.0), torch.zeros_like(total)
                name = f"{name}..{data[-1]}" if len(data) > 1 else name
                by = "_".join(f.name for f in kept)
                name = f"{name}_by_{by}" if by else f"{name}_together"
            pyro.sample(name, _Known(fn, total.shape, total), obs=value)
        if log_prior is not None:
            pyro.factor(f"{latent[0]}_summed_out", log_prior)
