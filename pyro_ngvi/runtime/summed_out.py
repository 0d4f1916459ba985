r"""A Pyro model without its enumerated sites, as a Pyro model.

For discrete sites z that are marked ``infer={"enumerate": "parallel"}``, x the other latent sites:

    p(y, x) = sum_z p(y, x, z),

by Pyro's enumeration (``pyro.poutine.enum``, with ``pyro.markov`` and its limits) and its tensor
variable elimination (``pyro.ops.contract``; Obermeyer et al. 2019).  Sites that share enumerated
variables are one factor of the sum.  What the model then samples in their place is

* an observed site with the log probability log p(y | x), of one entry for each cell of the plates
  that all of the factor lie in.  It keeps the name of the data, ``y``, where it has their plates, and
  else says what it is: ``y_1..y_9_by_animal``, ``y_together`` where there is no such plate;
* a ``pyro.factor`` with log p(x) for latent sites whose prior depends on z, which have no density of
  their own any more.

As in ``TraceEnum_ELBO``, a scale, such as that of a minibatch, acts on the logarithm of the sum.

When not to use it: on models whose sum Pyro cannot do, above all an enumerated site outside of a
plate on which data in several plates depend in turn.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
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

__all__ = ["SummedOut", "summed_out"]

Program = Callable[..., Any]


def summed_out(model: Program, sites: Mapping[str, Site], given: Collection[str] = ()) -> Program:
    """``model`` with its marked sites summed out; ``model`` itself where there are none.

    Args:
        model: a Pyro model.
        sites: its sample sites in a plain run.
        given: marked sites that a guide samples, which stay as they are.
    """
    names = [name for name, site in sites.items() if is_marked(site) and name not in given]
    return SummedOut(model, names, max(map(_rank, sites.values()))) if names else model


def _rank(site: Site) -> int:
    """How many dimensions on the right a site takes for its plates, or for a batch without one."""
    if site["type"] != "sample" or site_is_subsample(site):
        return 0
    dims = [-frame.dim for frame in site["cond_indep_stack"] if frame.vectorized]
    return max(_batch_dim(site), *dims, 0)


def _batch_dim(site: Site) -> int:
    fn, value = site["fn"], site["value"]
    given = value.dim() - fn.event_dim if isinstance(value, Tensor) else 0
    mask = site["mask"].dim() if isinstance(site["mask"], Tensor) else 0
    return max(len(fn.batch_shape), given, mask)


class SummedOut:
    """What :func:`summed_out` returns: a model to be called like the one it is made of.

    Attributes:
        names: the sites that are summed out.
    """

    def __init__(self, model: Program, names: Collection[str], nesting: int) -> None:
        self.names = tuple(names)
        self._first = -1 - nesting
        self._model = poutine.infer_config(model, cast(Any, self._config))

    def _config(self, site: Site) -> dict[str, Any]:
        return {"enumerate": None} if is_marked(site) and site["name"] not in self.names else {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with _Collector(self.names, -1 - self._first) as collector, _Enumerates(self._first):
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
            drawn: Any = infer_discrete(conditioned, first_available_dim=self._first)
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
        if site_is_subsample(msg) or (
            _batch_dim(msg) <= self.nesting and msg["name"] not in self.names
        ):
            return
        self.sites[msg["name"]] = msg.copy()
        if msg["name"] in self.names or msg["is_observed"]:
            msg["stop"] = True
        else:
            msg["fn"] = _WithoutDensity(msg["fn"], self.nesting)

    def _pyro_post_sample(self, msg: Any) -> None:
        if msg["name"] in self.sites:
            self.sites[msg["name"]]["value"] = msg["value"]


class _WithoutDensity(dist.TorchDistribution):
    """Shape, support and draws of a prior that depends on enumerated variables, for one of their
    values."""

    arg_constraints: ClassVar[Any] = {}  # pyright: ignore[reportIncompatibleMethodOverride]

    def __init__(self, fn: Any, nesting: int) -> None:
        self.fn, self._extra = fn, max(len(fn.batch_shape) - nesting, 0)
        shape = fn.batch_shape[self._extra :]
        super().__init__(shape, fn.event_shape, validate_args=False)

    @property
    def has_rsample(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.fn.has_rsample

    @property
    def support(self) -> Any:
        return self.fn.support

    def rsample(self, sample_shape: Any = ()) -> Tensor:
        draw = self.fn.rsample if self.fn.has_rsample else self.fn.sample
        return draw(sample_shape)[(slice(None),) * len(sample_shape) + (0,) * self._extra]

    def log_prob(self, value: Tensor) -> Tensor:
        return value.new_zeros(value.shape[: value.dim() - self.event_dim])


class _Summed(dist.TorchDistribution):
    """A log probability that is known already; support and event shape are those of the data."""

    arg_constraints: ClassVar[Any] = {}  # pyright: ignore[reportIncompatibleMethodOverride]

    def __init__(self, log_prob: Tensor, fn: Any = None) -> None:
        self._log_prob, self._fn = log_prob, fn
        event_shape = torch.Size() if fn is None else fn.event_shape
        super().__init__(log_prob.shape, event_shape, validate_args=False)

    @property
    def support(self) -> Any:
        return dist.constraints.real if self._fn is None else self._fn.support

    def log_prob(self, value: Tensor) -> Tensor:
        return self._log_prob


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
            kept = {
                "log_prob": unscaled if name in names else masked,
                "unscaled_log_prob": unscaled,
            }
            trace.add_node(name, **{**site, **kept, "mask": None})
    trace.pack_tensors()
    symbols: dict[str, str] = trace.plate_to_symbol
    dims = set(trace.symbol_to_dim) - set(symbols.values())
    for summed, members in _connected(trace, dims):
        _Factor(trace, members, summed, symbols, names).sample()


def _connected(trace: Any, dims: set[str]) -> list[tuple[set[str], list[str]]]:
    """Names of sites that share enumerated dimensions, directly or through others, and these."""
    groups: list[tuple[set[str], list[str]]] = []
    for name, node in trace.nodes.items():
        own, members = dims.intersection(node["packed"]["log_prob"]._pyro_dims), [name]
        apart = []
        for group in groups:
            if own.isdisjoint(group[0]):
                apart.append(group)
            else:
                own, members = own | group[0], group[1] + members
        groups = [*apart, (own, members)]
    return groups


class _Factor:
    """The sites of one connected component, and their sum."""

    def __init__(
        self,
        trace: Any,
        members: list[str],
        dims: set[str],
        symbols: dict[str, str],
        names: Collection[str],
    ) -> None:
        self.nodes: Any = {name: node for name, node in trace.nodes.items() if name in members}
        self.dims, self.symbols = dims, symbols
        self.symbol_to_dim: dict[str, int] = trace.symbol_to_dim
        self.data = [n for n, node in self.nodes.items() if site_kind(node) == "observed"]
        self.others = [n for n in self.nodes if n not in self.data]
        self.latent = [n for n in self.others if n not in names]
        self.ordinal = frozenset.intersection(*map(self._ordinal, self.nodes))

    def _ordinal(self, name: str) -> frozenset[str]:
        stack = self.nodes[name]["cond_indep_stack"]
        return frozenset(self.symbols[frame.name] for frame in stack if frame.vectorized)

    def _sum(self, names: list[str]) -> Tensor:
        """The log of the sum of the product of these sites, in the plates of all, (...)."""
        tree: OrderedDict[frozenset[str], list[Any]] = OrderedDict()
        for name in names:
            term = self.nodes[name]["packed"]["log_prob"]
            tree.setdefault(self._ordinal(name), []).append(term)
        frames = [f for n in names for f in self.nodes[n]["cond_indep_stack"] if f.vectorized]
        ring = LogRing(dim_to_size={self.symbols[f.name]: f.size for f in frames})
        how: Any = {"target_ordinal": self.ordinal, "ring": ring}
        return packed.unpack(contract_to_tensor(tree, self.dims, **how), self.symbol_to_dim)

    def sample(self) -> None:
        first = self.nodes[next(iter(self.nodes))]
        stack = first["cond_indep_stack"]
        frames = tuple(f for f in stack if self.symbols.get(f.name) in self.ordinal)
        log_prior = self._sum(self.others) if self.latent else None
        with _At(frames, self._scale()):
            if self.data:
                total = self._sum([*self.nodes])
                self._sample_data(total if log_prior is None else total - log_prior, frames)
            if log_prior is not None:
                pyro.factor(f"{self.latent[0]}_summed_out", log_prior)

    def _sample_data(self, log_prob: Tensor, frames: tuple[Any, ...]) -> None:
        name = self.data[0]
        if len(self.data) == 1 and self._ordinal(name) == self.ordinal:
            node = self.nodes[name]
            pyro.sample(name, _Summed(log_prob, node["fn"]), obs=node["value"])
            return
        if len(self.data) > 1:
            name = f"{name}..{self.data[-1]}"
        plates = "_".join(frame.name for frame in frames)
        name = f"{name}_by_{plates}" if plates else f"{name}_together"
        pyro.sample(name, _Summed(log_prob), obs=torch.zeros_like(log_prob))

    def _scale(self) -> Any:
        scales = [node["scale"] for node in self.nodes.values()]
        if any(s is not scales[0] and float(s) != float(scales[0]) for s in scales):
            names = ", ".join(map(repr, self.nodes))
            raise ValueError(
                f"The sites {names} share an enumerated variable but not their scale (of "
                f"poutine.scale, or of a subsampled plate), so their sum has none. Put all of them "
                f"into the plate, or under the same scale."
            )
        return scales[0]
