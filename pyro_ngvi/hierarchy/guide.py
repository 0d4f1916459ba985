"""AutoHierarchical: units that follow their globals, by a prior times a site for each."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from numbers import Integral
from typing import Any

import torch
from pyro import poutine
from pyro.infer.autoguide import AutoGuide
from torch import Tensor

from ..guides import AutoFullRankNormal
from ..guides.base import AutoFamily
from ..guides.marginals import levels_like, of_monotone
from ..guides.start import MadeAtFirstCall
from ..linalg.host import outside_autocast, own_random_state
from ..runtime.pyro_adapter import has_model, model_under
from ..runtime.run import FlatPriors, Minibatches, run_particles
from .conditional import Conditionals, antithetic, mixture_quantiles
from .find import check_index, find_units
from .marginal import at_globals, integrated, told_apart
from .runs import Call, Drawn, Given
from .slopes import moving, slopes
from .start import better_start
from .table import SiteTable
from .units import Units

#: noise in the steps of a unit's site before its first draw that counts: none at first, as expectations
#: under a wide prior may overflow; and draws that a step takes at least
FIRST_NOISE, ENOUGH = (0.0, 0.0, 1.0, 1.0), 8
#: draws of the globals behind medians and quantiles, fewer where there are very many units, and seed
DRAWS, FEWEST, MOST_NUMBERS, SEED = 256, 32, 1 << 22, 20_250_925


class AutoHierarchical(MadeAtFirstCall):
    r"""Random effects that follow their globals: q(v, u) = q(v) prod_i q(u_i | v).

    ``globals`` makes the guide of v, any of this package or of Pyro.  The latent variables u_i of unit
    i (a patient, a school, a user) keep their Gaussian prior given v, *exactly*, times a Gaussian site
    of parameters nu_i and Lambda_i (:mod:`pyro_ngvi.hierarchy.conditional`).  Write models centred,
    u ~ Normal(m, s), or name the effect, ``u = pyro.deterministic("u", m + s * z)`` (as Pyro's
    ``LocScaleReparam`` does).

    Units are the entries of the largest plate that has Gaussian latent sites (``Normal``,
    ``MultivariateNormal``, ``LogNormal``); everything else is global.  The plate may be subsampled: a
    step costs what its minibatch costs, and a unit that is not seen still follows v by its prior.
    Where they depend on each other given v (series, fields, crossed effects) there is one unit, a
    *block* of all Gaussian sites, up to 512 numbers, that change no scale; not for kinks there.
    Sites follow globals that enter the likelihood *beside* u, as in b + x'u or as the scale of data
    (:mod:`pyro_ngvi.hierarchy.unit_sites`), up to 128 numbers, each a backward pass more in a step, and
    where no gradient jumps (Laplace).  No globals in a minibatch of units.

    Sites are buffers, nu (n, k), Lambda (n, k, k), C (n, k, D), a (n, D) for n units of k latent
    variables and D such numbers (``guide.units.followed``).  They step when a loss is differentiated
    through draws of their units (and four times before the first), by 1 + k more backward passes, and
    hold still in ``guide.eval()``; any optimizer may train q(v).  ``guide.state_dict()`` saves them,
    Pyro's store does not.

    Args:
        model: a Pyro model whose units, or whose block, are Gaussian given its other latent sites.
        globals: a guide class, or a function of a model that gives a guide.
        locals: names of the units' latent sites, all in one plate, or of the block's, or the ``units``
            of another guide of the model and its data; found where not given.
        name: name of the guide in Pyro's parameter store.

    Raises:
        ValueError: at the first call, for a model without such units or block, and for a minibatch
            whose plate has drawn numbers that the model does not look at; at later calls for numbers of
            units that are out of range or come twice, and for another number of units.

    Example:
        >>> import pyro, torch, pyro.distributions as dist, pyro_ngvi as ngvi
        >>> from pyro.infer import SVI
        >>> def model(y):
        ...     m = pyro.sample("m", dist.Normal(0.0, 5.0))
        ...     s = pyro.sample("s", dist.HalfNormal(5.0))
        ...     with pyro.plate("schools", len(y)):
        ...         u = pyro.sample("u", dist.Normal(m, s))
        ...         pyro.sample("y", dist.Normal(u, 2.0), obs=y)
        >>> guide = ngvi.AutoHierarchical(model)
        >>> svi = SVI(model, guide, ngvi.NGVB(guide), ngvi.BatchedELBO(16))
        >>> losses = [svi.step(torch.tensor([3.0, 5.0, 1.0])) for _ in range(30)]
        >>> print(guide.units)
        3 units of 1 latent variable (u) in the plate 'schools', given m, s
        >>> guide.add(1)
        >>> guide.fit_units(torch.tensor([3.0, 5.0, 1.0, -2.0]))
        >>> guide.sites.precision.flatten()  # Lambda = 1 / 2.0^2
        tensor([0.2500, 0.2500, 0.2500, 0.2500])
    """

    globals: Any
    sites: SiteTable
    #: of one of several processes: as how many its units count, and what sets their noise apart
    share: float = 1.0
    apart: int | None = None

    def __init__(
        self,
        model: Callable[..., Any],
        globals: Callable[..., Any] = AutoFullRankNormal,
        locals: Sequence[str] | Units | None = None,
        *,
        name: str | None = None,
    ) -> None:
        super().__init__(model)
        self.take_name(name)
        self._wanted = locals if isinstance(locals, Units | None) else list(locals)
        self._units: Units | None = None
        outer: Any = poutine.block(model, hide_fn=self._is_local)
        self._ours = isinstance(globals, type) and issubclass(globals, AutoFamily)
        self.globals = globals(outer, init=None) if self._ours else globals(outer)
        if not isinstance(self.globals, AutoGuide):
            raise ValueError(
                f"AutoHierarchical: globals= makes an autoguide of a model, such as "
                f"pyro_ngvi.AutoMeanFieldNormal; it made {type(self.globals).__name__}."
            )

    def _is_local(self, msg: Any) -> bool:
        return msg["type"] == "sample" and msg["name"] in self.units.names

    @property
    def units(self) -> Units:
        """What was found: prints as a sentence."""
        if self._units is None:
            raise RuntimeError(
                "AutoHierarchical does not know the units yet: call it once with the model's arguments."
            )
        return replace(self._units, size=len(self.sites))

    # --- the first call

    def _check_prototype(self, part_trace: Any) -> None:
        """Pyro's guides of parts ask it of the guide that they are parts of."""

    def _setup_prototype(self, *args: Any, **kwargs: Any) -> None:
        call = self._call(args, kwargs)
        if self.master is not None:
            raise ValueError(
                "AutoHierarchical must see all latent sites, so it is no part of an AutoGuideList. Let "
                "its globals be the list: globals= takes a function of a model that makes it."
            )
        with self._loading_waiting_state(), model_under(self, FlatPriors()):
            super()._setup_prototype(*args, **kwargs)
            units, trace = find_units(call.model, args, kwargs, self._wanted), self.prototype_trace
            like = trace.nodes[units.names[0]]["value"].detach()
            values = {name: trace.nodes[name]["value"] for name in units.coordinates}
            followed = sum(shape.numel() for shape in units.phi_shapes(values).values())
            self.sites, self._units = SiteTable(like, units.size, units.width, followed), units
            if self._ours:
                self.globals.find_start = partial(better_start, units, call, self.globals)

    def draw_units(
        self,
        values: Mapping[str, Tensor],
        args: Any,
        kwargs: Any,
        minibatches: Minibatches,
        weight: float = 1.0,
    ) -> Drawn:
        """The units at S draws of the globals, ``values`` (S, ...) by site.

        Where a loss is differentiated through the draws, the sites of these units take a step.
        ``weight`` is that of what is observed.
        """
        learning = torch.is_grad_enabled() and self.training
        given = self.units.given(self._call(args, kwargs, minibatches), values)
        check_index(given.seen, self.units, learning)
        if learning and self.sites.any_new():
            self._begin(given.detached(), weight)
        q = self._conditionals(given)
        noise = antithetic(q.white, self.apart)
        w = q.drawn(noise)
        if learning:
            # a prior that is free of the globals leaves the draws without a graph
            w = w if w.requires_grad else w.requires_grad_()
            at, step = given.detached(), self._advance
            if len(w) >= ENOUGH:
                step = partial(self._step, q=q.detached(), noise=noise)
            w.register_hook(lambda grad: step(at, weight=weight))
        drawn, log_det = self.units.mapped(given.latent.at(w), given.maps)
        return Drawn(drawn, self.share * (q.log_q(noise) - log_det), given.seen)

    def _call(self, args: Any, kwargs: Any, minibatches: Minibatches | None = None) -> Call:
        if not has_model(self):  # Pyro leaves it out of copies
            raise RuntimeError(
                "This AutoHierarchical was unpickled or loaded, and does not carry the model. Make a "
                "new one by AutoHierarchical(model), and let it load this one's state_dict."
            )
        return Call(self.model, args, kwargs, Minibatches() if minibatches is None else minibatches)

    def _conditionals(self, given: Given) -> Conditionals:
        sites = self.sites.rows(given.seen)
        return Conditionals.of(given.priors, *sites.at(self.units.phi(given)))

    def _begin(self, given: Given, weight: float = 1.0) -> None:
        for noise in FIRST_NOISE if self.units.smooth else (1.0,) * len(FIRST_NOISE):
            self._advance(given, weight, noise)

    @torch.no_grad()
    def _advance(self, given: Given, weight: float = 1.0, noise: float = 1.0) -> None:
        """A step of the sites at fresh draws of the units, or nearer to their means by ``noise``."""
        given = given.repeated(-(-ENOUGH // len(given.priors.offset)))
        q = self._conditionals(given)
        self._step(given, q, noise * antithetic(q.white, self.apart), weight)

    @outside_autocast
    def _step(self, given: Given, q: Conditionals, noise: Tensor, weight: float) -> None:
        """Move the sites by what the data say at the draws of q with that ``noise`` (S, B, k)."""
        found = slopes(self.units, given, x := q.draw(noise), weight)
        if found is not None:
            moves = moving(self.units, given, x, self._conditionals, noise, weight)
            sites, phi = self.sites.rows(given.seen), self.units.phi(given)
            self.sites.put(given.seen, sites.moved(given.priors, phi, q.mean, x, found, moves))

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Draw all latent sites: a dict of values (*shape) by name."""
        if not self.prototype_trace:
            self._setup_prototype(*args, **kwargs)
        with poutine.block():
            self._create_plates(*args, **kwargs)
        values, nodes = dict(self.globals(*args, **kwargs)), self.prototype_trace.nodes
        for name, value in values.items():
            if value.dim() > nodes[name]["value"].dim():
                raise ValueError(
                    f"AutoHierarchical draws one particle at a call, and a plate around it asks for "
                    f"{name!r} of shape {tuple(value.shape)}. Take BatchedELBO(num_particles), or "
                    f"leave vectorize_particles and parallel out."
                )
        one = {name: value.unsqueeze(0) for name, value in values.items()}
        drawn = self.draw_units(one, args, kwargs, Minibatches())
        return values | self.units.sample(drawn, nodes, self.plates)

    # --- the answer

    @torch.no_grad()
    def median(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """The posterior median of every latent site, by name; arguments as for :meth:`quantiles`."""
        return {n: q[0] for n, q in self.quantiles([0.5], *args, **kwargs).items()}

    @torch.no_grad()
    def quantiles(self, quantiles: Any, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Posterior quantiles (L, *shape) of every latent site at L levels in (0, 1), entry by entry.

        Arguments: those of the model, whose units are meant.  Those of a unit are of a mixture of its
        Gaussians at 256 draws of the globals (32 for very many units), the same ones at every call.
        """
        units, levels = self.units, levels_like(quantiles, self.sites.linear)
        found = dict(self.globals.quantiles(quantiles))
        with own_random_state(SEED):
            given = self._given_globals(args, kwargs)
        if not bool(self.sites.visits.any()):
            warnings.warn(
                "AutoHierarchical: no unit has taken a step yet, so these are quantiles of the prior. "
                "Pyro's parameter store does not keep sites: save and load guide.state_dict().",
                stacklevel=2,
            )
        q = self._conditionals(given)
        mean, sd = given.latent.at(q.white), q._replace(prior=given.latent).sd()
        flat = levels.reshape(-1)
        each = units.values(mixture_quantiles(mean, sd, flat), given.maps)
        if any(given.maps.values()):  # which may fall
            mirrored = units.values(mixture_quantiles(mean, sd, 1.0 - flat), given.maps)
            each = {n: of_monotone(x, mirrored[n], flat) for n, x in each.items()}
        return found | {n: x.reshape(levels.shape + x.shape[1:]) for n, x in each.items()}

    @torch.no_grad()
    def log_marginals(
        self, *args: Any, num_draws: int = 256, points: int | None = None, **kwargs: Any
    ) -> Tensor:
        """log p(y_i | v), u_i integrated out by quadrature, at ``num_draws`` draws of v: (draws, units
        of the call), in nats; arguments as for :meth:`quantiles`, ``points`` as for ``collapse``."""
        with poutine.block():
            given, q = self._at_draws(args, kwargs, num_draws)
            return integrated(self.units, given, q, points).log_marginals

    def _at_draws(
        self, args: Any, kwargs: Any, draws: int, learning: bool = False
    ) -> tuple[Given, Conditionals]:
        """Draws of the globals, with data told apart by unit, and q there."""
        given = self._given_globals(args, kwargs, draws, learning)
        q = self._conditionals(given)
        if self.units.is_block:  # of data that the guide may not have seen
            slopes(self.units, given, q.mean)
        q = at_globals(self.units, given, q)
        return told_apart(self.units, given, q), q

    def _given_globals(
        self, args: Any, kwargs: Any, draws: int | None = None, learning: bool = False
    ) -> Given:
        """What a call says of its units at ``draws`` of the globals."""
        units, call = self.units, self._call(args, kwargs)

        def values(sites: Any) -> dict[str, Tensor]:
            return {name: sites[name]["value"] for name in units.globals}

        if draws is None:
            draws = max(FEWEST, min(DRAWS, MOST_NUMBERS // self.sites.linear.numel()))
        how = self.globals, values, {}, draws, args, kwargs
        with poutine.block():
            drawn = run_particles(*how, minibatches=call.minibatches, sampling=True)
            given = units.given(call, drawn)
        check_index(given.seen, units, learning)
        return given

    # --- units that come, go, or are new

    @torch.no_grad()
    def fit_units(self, *args: Any, num_steps: int = 20, **kwargs: Any) -> None:
        """Move the sites of the units of a call, new ones or with other data, and hold q(v).

        Args:
            args: those of the model, with data, and ``kwargs``.
            num_steps: steps of 256 draws of the globals each, 32 for very many units.
        """
        with poutine.block():
            for step in range(num_steps):
                given = self._given_globals(args, kwargs, learning=True)
                if step == 0:
                    self.sites.forget(given.seen)
                    self._begin(given)
                self._advance(given)

    def add(self, count: int) -> None:
        """Make room for ``count`` units more, at least 1, behind those of before, by their prior."""
        every = torch.arange(self.units.countable)  # refused before the first call, without a table
        if not isinstance(count, Integral) or count < 1:
            raise ValueError(f"count is how many units come, at least 1, got {count!r}.")
        self.sites.keep(every, count)

    def remove(self, indices: Tensor | Sequence[int]) -> None:
        """Forget the units of these numbers (n,), else ValueError; the others close up."""
        gone = torch.zeros(self.units.countable, dtype=torch.bool)
        index = torch.as_tensor(indices, device=gone.device).reshape(-1)
        whole = not index.is_floating_point() and index.dtype != torch.bool
        if not whole or not bool(((index >= 0) & (index < len(gone))).all()):
            raise ValueError(
                f"indices are numbers of units, from 0 to {len(gone) - 1}, got {str(indices)[:80]}."
            )
        gone[index.long()] = True
        self.sites.keep((~gone).nonzero().reshape(-1), 0)

    __deepcopy__ = MadeAtFirstCall.copied_with_model
