"""AutoHierarchical: units that follow their globals, by a prior times a site for each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import pyro
import torch
from pyro import poutine
from torch import Tensor

from ..guides import AutoFullRankNormal
from ..guides.base import AutoFamily
from ..guides.marginals import SiteValue
from ..guides.start import MadeAtFirstCall
from ..linalg.host import outside_autocast
from ..runtime.run import Minibatches
from .conditional import Conditionals, Sites, UnitPriors
from .units import Seen, Units, check_index, find_units

#: draws of the globals behind medians and quantiles, and halvings of the interval that holds one
DRAWS, HALVINGS = 64, 50


@dataclass(frozen=True)
class Drawn:
    """Units at S draws of the globals: values (S, ...) by site, log q of each unit (S, B)."""

    values: dict[str, Tensor]
    log_q: Tensor
    seen: Seen

    @property
    def total(self) -> Tensor:
        """log q of all units that those of the call stand for, (S,)."""
        return self.log_q.sum(-1) * self.seen.scale


class AutoHierarchical(MadeAtFirstCall):
    r"""Random effects that follow their globals: q(v, u) = q(v) prod_i q(u_i | v).

    ``globals`` makes the guide of v, any of this package or of Pyro.  The latent variables u_i of unit
    i (a patient, a school, a user) keep their Gaussian prior given v, *exactly*, times a Gaussian site:

        q(u_i | v) propto p(u_i | v) exp(nu_i' u_i - u_i' Lambda_i u_i / 2),

    so that effects shrink as their scale does, where every Gaussian q is too narrow.  Write models
    centred, u ~ Normal(m, s) and not m + s * Normal(0, 1): then a site holds what the data say of u_i
    whatever m and s are.

    Units are the entries of the largest plate that has Gaussian latent sites (``Normal``,
    ``MultivariateNormal``, ``LogNormal``); everything else is global.  The plate may be subsampled: a
    step costs what its minibatch costs, and a unit that is not seen still follows v by its prior.
    Not for units that depend on each other given v, such as chains and fields (:class:`AutoSites`).

    Sites are buffers, (n, k) and (n, k, k) for n units of k latent variables, and no optimizer moves
    them: they take a step whenever a loss is differentiated through a draw of their units, as running
    statistics of a normalisation layer do, and hold still in ``guide.eval()``.  So any optimizer may
    train q(v); equations are in :mod:`pyro_ngvi.hierarchy.conditional`.  The expectations take 1 + k
    backward passes through the likelihood.  Save them by ``guide.state_dict()``; Pyro's parameter store
    has q(v) alone.

    Args:
        model: a Pyro model whose units are independent given its other latent sites.
        globals: a guide class, or a function of a model that gives a guide.
        locals: names of the units' latent sites, all in one plate; found where not given.
        name: name of the guide in Pyro's parameter store.

    Raises:
        ValueError: at the first call, for a model without such units; at later calls for numbers of
            units that are out of range or come twice, and for another number of units.

    Example:
        >>> import pyro, torch, pyro.distributions as dist
        >>> from pyro.infer import SVI
        >>> import pyro_ngvi as ngvi
        >>> def model(y):
        ...     m = pyro.sample("m", dist.Normal(0.0, 5.0))
        ...     s = pyro.sample("s", dist.HalfNormal(5.0))
        ...     with pyro.plate("schools", len(y)):
        ...         u = pyro.sample("u", dist.Normal(m, s))
        ...         pyro.sample("y", dist.Normal(u, 2.0), obs=y)
        >>> guide = ngvi.AutoHierarchical(model)
        >>> svi = SVI(model, guide, ngvi.NGVB(guide), ngvi.BatchedELBO(16))
        >>> y = torch.tensor([3.0, 5.0, 1.0, -2.0])
        >>> losses = [svi.step(y) for _ in range(30)]
        >>> print(guide.units)
        4 units of 1 latent variable (u) in the plate 'schools', given m, s
    """

    linear: Tensor
    precision: Tensor
    visits: Tensor
    globals: Any

    def __init__(
        self,
        model: Callable[..., Any],
        globals: Callable[..., Any] = AutoFullRankNormal,
        locals: Sequence[str] | None = None,
        *,
        name: str | None = None,
    ) -> None:
        super().__init__(model)
        self.take_name(name)
        self._wanted = None if locals is None else list(locals)
        self._units: Units | None = None
        outer: Any = poutine.block(model, hide_fn=self._is_local)
        # a search for a start would see the units at random draws from their prior
        ours = isinstance(globals, type) and issubclass(globals, AutoFamily)
        self.globals = globals(outer, init=None) if ours else globals(outer)

    def _is_local(self, msg: Any) -> bool:
        return msg["type"] == "sample" and msg["name"] in self.units.names

    @property
    def units(self) -> Units:
        """What was found: prints as a sentence."""
        if self._units is None:
            raise RuntimeError(
                "AutoHierarchical does not know the units yet: call it once with the arguments of the "
                "model, or take a step of SVI."
            )
        return self._units

    # --- the first call

    def _check_prototype(self, part_trace: Any) -> None:
        """Pyro's guides of parts ask it of the guide that they are parts of."""

    def _setup_prototype(self, *args: Any, **kwargs: Any) -> None:
        with self._loading_waiting_state():
            super()._setup_prototype(*args, **kwargs)
            units = find_units(self.model, args, kwargs, self._wanted)
            like = self.prototype_trace.nodes[units.names[0]]["value"].detach()
            n, k = units.size, units.width
            self.register_buffer("linear", like.new_zeros(n, k))
            self.register_buffer("precision", like.new_zeros(n, k, k))
            self.register_buffer("visits", like.new_zeros(n))
            self._units = units

    # --- draws

    def draw_units(
        self, values: Mapping[str, Tensor], args: Any, kwargs: Any, minibatches: Minibatches
    ) -> Drawn:
        """The units at S draws of the globals, ``values`` (S, ...) by site.

        Where a loss is differentiated through the draws, the sites of these units take a step.
        """
        units, learning = self.units, torch.is_grad_enabled() and self.training
        prior, seen, maps = units.prior(self.model, args, kwargs, values, minibatches)
        check_index(seen, units, learning)
        sites = self._sites_of(seen)
        q = Conditionals.of(prior, sites.linear, sites.precision)
        z = q.draw(_antithetic(q.mean))
        log_q, drawn = q.log_prob(z), {}
        for site, own in units.parts():
            x = site.value(z[..., own])
            for transform in maps[site.name]:
                y = transform(x)
                log_det = transform.log_abs_det_jacobian(x, y)
                log_q = log_q - torch.stack([site.rows(d).sum(-1) for d in log_det])
                x = y
            drawn[site.name] = x
        if learning and z.requires_grad:
            fixed = {name: value.detach() for name, value in values.items()}
            step = partial(self._step, fixed, z.detach(), maps, prior, q, sites, seen)
            z.register_hook(lambda grad: step(args, kwargs, minibatches))
        return Drawn(drawn, log_q, seen)

    def _sites_of(self, seen: Seen) -> Sites:
        """The sites of the units of a call; zero for those that came after the first call."""
        sites = Sites(self.linear, self.precision, self.visits)
        if seen.whole and seen.size == self.units.size:
            return sites
        known = seen.index < self.units.size
        index = torch.where(known, seen.index, 0)
        rows = [x.index_select(0, index) for x in vars(sites).values()]
        return Sites(*(x * known.to(x).reshape(-1, *[1] * (x.dim() - 1)) for x in rows))

    @outside_autocast
    def _step(
        self,
        values: Mapping[str, Tensor],
        z: Tensor,
        maps: Any,
        prior: UnitPriors,
        q: Conditionals,
        sites: Sites,
        seen: Seen,
        args: Any,
        kwargs: Any,
        minibatches: Minibatches,
    ) -> None:
        """Move the sites of the units ``seen`` by what the data say at these draws."""
        found = self.units.slopes(self.model, args, kwargs, values, z, maps, minibatches)
        if found is None:
            return
        with torch.no_grad():
            g, H = (x / seen.scale for x in found)
            prior = UnitPriors(prior.linear.detach(), prior.precision.detach())
            q = Conditionals(q.mean.detach(), q.root.detach())
            moved = sites.moved(prior, q, g, H)
            for name, new in vars(moved).items():
                own = getattr(self, name)
                own.copy_(new) if seen.whole else own.index_copy_(0, seen.index, new)

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Draw all latent sites: a dict of values by name."""
        if self.prototype_trace is None:
            self._setup_prototype(*args, **kwargs)
        with poutine.block():
            self._create_plates(*args, **kwargs)
        values = dict(self.globals(*args, **kwargs))
        one = {name: value.unsqueeze(0) for name, value in values.items()}
        drawn = self.draw_units(one, args, kwargs, Minibatches())
        seen, units, trace = drawn.seen, self.units, self.prototype_trace
        share = drawn.log_q[0] / len(units.sites)
        unit_plate = pyro.plate(units.plate, seen.size, dim=units.dim, subsample=seen.given)
        for site in units.sites:
            node, value = trace.nodes[site.name], drawn.values[site.name][0]
            lead = value.dim() - node["fn"].event_dim
            # in other plates too: each entry of a unit has an equal part
            batch = value.new_ones(value.shape[:lead])
            batch = batch * (len(share) / max(batch.numel(), 1))
            axis = lead + units.dim
            log_q: Any = batch * share.reshape(-1, *[1] * (lead - axis - 1))
            with ExitStack() as stack:
                for frame in node["cond_indep_stack"]:
                    of_units = frame.name == units.plate
                    stack.enter_context(unit_plate if of_units else self.plates[frame.name])
                q = SiteValue(value, log_q, node["fn"].event_dim)
                values[site.name] = pyro.sample(site.name, q)
        return values


def _antithetic(like: Tensor) -> Tensor:
    """White noise (S, B, k), in pairs e, -e; one is left over where S is odd."""
    half = torch.randn_like(like[: (len(like) + 1) // 2])
    return torch.cat([half, -half[: len(like) // 2]])
