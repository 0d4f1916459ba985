r"""A hierarchy without its units: their latent variables are integrated out, one unit at a time.

Effects given v follow by independence chains, unit by unit (Tierney 1994): proposals u' with mean and
covariance of p(u_i | y_i, v), by the same points, and independent Student-t entries are taken with
probability min(1, w(u') / w(u)), w = p(y_i | u, v) p(u | v) / t(u), t their density.  After n of them
the error is at most (1 - L / max w)^n, L = p(y_i | v) (Mengersen & Tweedie 1996): where p(u_i | y_i, v)
is Gaussian L / max w is about .9 for one variable, .9^2 for two.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cached_property, partial
from typing import Any

import pyro
import torch
from pyro import poutine
from torch import Tensor

from ..linalg.cholesky import cholesky
from ..linalg.host import own_random_state
from ..linalg.products import matvec
from ..runtime.density import LatentLayout, Sites, free_dim, is_minibatch, with_density
from ..runtime.run import Minibatches, look, run_plainly
from .conditional import Conditionals
from .guide import AutoHierarchical
from .marginal import (
    AT_ONCE,
    FEW,
    NOTICED,
    at_globals,
    found_beyond,
    goes_astray,
    integrated,
    is_outside,
    led_back,
    log_likelihoods,
    point_count,
    weighted_terms,
)
from .runs import Drawn, Given, Held, Values
from .whole import Whole

#: degrees of freedom of proposals; how many there are for a unit of k latent variables, so many + k;
#: and at how many times the draws of the globals, as these are one point and quadrature splits its own
DEGREES, PROPOSALS, WIDER = 5.0, 4, 16
#: variance that is added to theirs, in those of q(u_i | v)
NARROWEST = 1.0 / 16.0
#: draws of the globals at which the quadrature is tried; of a block, whose points are random, times as
#: many points, and nats of error of the fewest of which a warning tells, less of more
TRIED, MORE, NOISE = 8, 8, 0.4
#: standard errors from which a unit is known to have more mass than the quadrature finds
SURE = 4.0


def collapse(
    guide: AutoHierarchical, *args: Any, points: int | None = None, **kwargs: Any
) -> Collapsed:
    r"""The model of a hierarchy's globals alone: the latent variables of units are integrated out.

    .. math:: p(v, y) = p(v) \, p(y_0 | v) \prod_i \int p(y_i | u_i, v) \, p(u_i | v) \, du_i,

    y_0 the data outside the plate of units, by quadrature around the q(u_i | v) of a trained guide;
    exact where data are Gaussian.  It is a Pyro model without arguments, globals and one
    ``pyro.factor``, for NUTS, a grid or any guide; :meth:`Collapsed.draw_units` adds the effects.

    A gradient costs one through the likelihood at all points: 20 for units of one latent variable, 49
    for two, 125 for three, 512 beyond; a block has 16 to 128 draws of its Gaussian at each v, after
    Newton's steps.  Not for minibatches of units, units of tens of latent variables, or several modes.

    Args:
        guide: a trained :class:`~pyro_ngvi.AutoHierarchical`; its sites are used as they are.
        args: those of its model, with all data.
        points: for each latent variable of a unit up to three, in all for more, and for a block.  Few
            and weak data need 40 to 160 far from q(v), as for the tail of a scale.
        kwargs: keyword arguments of the model.

    Raises:
        RuntimeError: for a guide that was never called.
        ValueError: for minibatches, another number of units, and data of several units outside their
            plate.

    Warns:
        RuntimeWarning: where more points change log p(y | v) at draws of q(v) by more than 0.1
            nats (of a block by 1.6 / sqrt(points)), or random points find a tenth more mass of a
            unit than those, as of a second mode.

    Sources: Rue, Martino & Chopin (2009, JRSS B 71); Liu & Pierce (1994, Biometrika 81).

    Example:
        >>> import pyro, torch, pyro.distributions as dist, pyro_ngvi as ngvi
        >>> from pyro.infer import MCMC, NUTS, SVI
        >>> def model(y):
        ...     s = pyro.sample("s", dist.HalfNormal(5.0))
        ...     with pyro.plate("schools", len(y)):
        ...         u = pyro.sample("u", dist.Normal(0.0, s))
        ...         pyro.sample("y", dist.Normal(u, 2.0), obs=y)
        >>> y = torch.tensor([3.0, 5.0, 1.0, -2.0])
        >>> guide = ngvi.AutoHierarchical(model)
        >>> svi = SVI(model, guide, ngvi.NGVB(guide), ngvi.BatchedELBO(16))
        >>> losses = [svi.step(y) for _ in range(30)]
        >>> globals = ngvi.collapse(guide, y)
        >>> globals.log_marginals({"s": torch.tensor([1.5])})  # log N(y_i; 0, 1.5^2 + 2^2)
        tensor([[-2.5552, -3.8352, -1.9152, -2.1552]])
        >>> mcmc = MCMC(NUTS(globals), num_samples=20, warmup_steps=20, disable_progbar=True)
        >>> mcmc.run()
        >>> exact = ngvi.hierarchy.ExactUnits(globals)
        >>> globals.draw_units(mcmc.get_samples())["u"].shape, exact()["u"].shape
        (torch.Size([20, 4]), torch.Size([4]))
    """
    model = Collapsed(guide, args, kwargs, points)
    model.warn()
    return model


def can_collapse(guide: AutoHierarchical, *args: Any, **kwargs: Any) -> bool:
    """Whether :func:`collapse` can tell data apart by unit, and integrate a block out."""
    with suppress(ValueError):
        return not Collapsed(guide, args, kwargs, None).too_rough
    return False


class Collapsed:
    """What :func:`pyro_ngvi.collapse` makes, with an example: a Pyro model of the globals v.

    ``error``: by how many nats a quarter more points, of a block 8 times as many, change log p(y | v)
    at draws of q(v); ``is_rough``: by more than 0.1, or 1.6 / sqrt(points).
    """

    def __init__(self, guide: AutoHierarchical, args: Any, kwargs: Any, points: int | None) -> None:
        if not isinstance(guide, AutoHierarchical):
            raise ValueError(
                f"Only AutoHierarchical has units to integrate out, and this is a "
                f"{type(guide).__name__}. Fit with guide='AutoHierarchical', or resample draws by "
                f"to_arviz(..., resample='psis')."
            )
        self.guide, self.units, self.points = guide, guide.units, points
        self.given = args, kwargs
        self.call, self.globals = guide._call(args, kwargs), partial(guide.globals, *args, **kwargs)
        nodes, parts = guide.prototype_trace.nodes, self.units.parts
        self._held: Any = Held(parts, None, further=[""])(self.call.model)  # to its end, units at 0
        start = {name: nodes[name]["value"] for name in self.units.globals}
        sites = look(self._held, start, args, kwargs)
        for name, site in sites.items():
            if is_minibatch(site):
                raise ValueError(
                    f"collapse needs all data, and the plate {name!r} takes {len(site['value'])} of "
                    f"{site['fn'].size}. Pass the arguments of the whole, without a minibatch."
                )
        self._dim = free_dim(sites)
        self._shapes = {name: value.shape for name, value in start.items()}
        frames = (frame for name in self._shapes for frame in nodes[name]["cond_indep_stack"])
        self._seen = {*self._shapes, *(frame.name for frame in frames)}
        self.point_count, total = point_count(self.units, points)
        #: how many draws of the globals bound the memory, one at least
        self.room = AT_ONCE / max(1, total * self.units.size * self.units.width)
        self._removals = guide.sites.removals
        with own_random_state(0), torch.no_grad():
            given, q = guide._at_draws(args, kwargs, TRIED, learning=True)
            self.call = given.call
            self._leads_back = goes_astray(guide, given, points)
            block, n = self.units.is_block, self.point_count
            counts = n, MORE * n if block else n + max(2, n // 4)
            few, more = (integrated(self.units, given, q, n).log_marginals for n in counts)
        self._tried_at = given, q, few
        #: nats by which more points change log p(y | v), at draws of q(v)
        change = few.sum(-1) - more.sum(-1)
        if block:  # the same at all draws of v it would change no posterior
            change = change - change.mean()
        self.error = float(change.abs().amax().nan_to_num(torch.inf))
        self.is_rough = self.error > (NOISE * (FEW / n) ** 0.5 if block else NOTICED)
        #: whether that is too much for draws of a block, which such a density would seem to bear out
        self.too_rough = block and self.is_rough

    @property
    def layout(self) -> LatentLayout:
        """The globals as one vector."""
        return LatentLayout(self.guide.globals.prototype_trace)

    @cached_property
    def missed(self) -> dict[int, float]:
        """Numbers of units of which the quadrature misses part, the worst first, and nats of these; of
        none where units are so large that random points would find no mode."""
        found = {}
        with own_random_state(0), torch.no_grad():
            beyond, error = found_beyond(self.units, *self._tried_at)
        for i in beyond.argsort(descending=True).tolist():
            if beyond[i] > max(NOTICED, SURE * float(error[i])):
                found[i] = float(beyond[i].log1p())
        return found

    def warn(self) -> None:
        """A RuntimeWarning of what the quadrature does not see, if there is anything."""
        doubt = "" if self.is_rough or not self.missed else self.missed_in_words
        if self.is_rough:
            doubt = (
                f"Quadrature over the {self.units.called} is off by {self.error:.2g} nats or more. "
                f"Pass points={2 * self.point_count} to ngvi.collapse, or train the guide for longer."
            )
        if doubt:
            warnings.warn(doubt, RuntimeWarning, stacklevel=3)

    @property
    def missed_in_words(self) -> str:
        """Of which units the quadrature misses a part."""
        worst, nats = next(iter(self.missed.items()))
        count = f"{len(self.missed)} of the {self.units.size} {self.units.called}"
        return (
            f"Quadrature misses part of {count}, most of unit {worst}, {nats:.2g} nats: given the "
            f"globals they have several modes, or a long tail"
        )

    def __call__(self) -> None:
        """Sample the globals; what the data say of them is a ``pyro.factor``."""
        call, units, width = self.call, self.units, -self._dim
        run = poutine.block(run_plainly, hide_fn=self._hides)
        sites: Sites = run(self._held, {}, call.args, call.kwargs, Minibatches())
        lead: torch.Size = torch.Size()
        values, total = {}, torch.zeros(())
        for name, site in with_density(sites).items():
            if name in units.globals:
                value = site["value"]
                # dimensions to the left of all plates are those of particles
                left = value.shape[: max(0, value.dim() - site["fn"].event_dim - width)]
                lead = max(lead, left, key=len)
                values[name] = value.reshape(-1, *self._shapes[name])
            elif is_outside(units, site):
                log_p = weighted_terms(site)
                log_p = log_p.reshape(*log_p.shape[:-width], -1)
                if name in call.owners:  # of the units: they have their part
                    log_p = log_p[..., call.owners[name] == units.size]
                total = total + log_p.sum(-1)
        total = total + self.log_marginals(values).sum(-1)
        name = units.plate or "block"
        with pyro.plate(f"_all_{name}", 1, dim=self._dim):
            pyro.factor(f"_log_p_{name}", total.reshape(*lead, *[1] * width))

    def _hides(self, msg: Any) -> bool:
        """All but the globals and their plates."""
        return msg["type"] == "sample" and msg["name"] not in self._seen

    def log_marginals(self, values: Values) -> Tensor:
        """log p(y_i | v) (S, units), in nats, at globals ``values`` (S, ...) by site."""
        return integrated(self.units, *self._given(values), self.points).log_marginals

    def by_unit(self, values: Values) -> tuple[Tensor, Tensor]:
        """:meth:`log_marginals`, in pieces, and which units (B,) have no data."""
        found, absent = [], torch.ones((), dtype=torch.bool)
        for piece in self._pieces(values):
            given, q = self._given(piece)
            found.append(integrated(self.units, given, q, self.points).log_marginals)
            # masked terms are 0 exactly, and no others are at each draw of v
            silent = (log_likelihoods(self.units, given, q.white) == 0.0).all(0)
            absent = absent.to(silent.device) & silent
        return torch.cat(found), absent

    def _pieces(self, values: Values, more: int = 1) -> Iterator[Values]:
        """Of so many draws of the globals as bound the memory, or ``more`` times as many."""
        size = max(1, int(more * self.room))
        for start in range(0, len(next(iter(values.values()))), size):
            yield {n: values[n][start : start + size] for n in self._shapes}

    def _given(self, values: Values) -> tuple[Given, Conditionals]:
        given = self.units.given(self.call, values)
        q = at_globals(self.units, given, self.guide._conditionals(given))
        return given, led_back(self.units, given, q) if self._leads_back else q

    def draw_units(self, values: Values) -> dict[str, Tensor]:
        """Draws (S, ...) of the units' latent sites by name, one for each of S draws of the globals.

        Args:
            values: (S, ...) by name, such as the ``get_samples()`` of Pyro's ``MCMC``.
        """
        return self.drawn_in_pieces(values)[0]

    @torch.no_grad()
    def drawn_in_pieces(self, values: Values) -> tuple[dict[str, Tensor], Tensor]:
        """Units (S, ...) by site given S draws of the globals, and log p(u_i | y_i, v) (S, units)."""
        more = 1 if self.units.is_block else WIDER
        found = [self.drawn(piece) for piece in self._pieces(values, more)]
        units = {name: torch.cat([x.values[name] for x in found]) for name in self.units.names}
        return units, torch.cat([x.log_q for x in found])

    def drawn(self, values: Values) -> Drawn:
        """Units given S draws of the globals, and log p(u_i | y_i, v) as their ``log_q``."""
        units = self.units
        if self.guide.sites.removals != self._removals:
            raise ValueError(
                f"These corrected draws are of {units.size} {units.called}, of which guide.remove has "
                f"taken some since. Fit anew, or predict by the guide alone."
            )
        given, q = self._given(values)
        k, found = units.width, integrated(units, given, q, self.points)
        # rounding, and points that are too coarse for a narrow posterior, leave no spread
        least = NARROWEST * torch.eye(k, dtype=q.white.dtype, device=q.white.device)
        outer = found.mean.unsqueeze(-1) * found.mean.unsqueeze(-2)
        root = None if units.is_block else cholesky(found.square - outer + least)

        def proposed() -> tuple[Tensor, Tensor, Tensor]:
            e = torch.randn_like(q.white)
            if root is None:  # tails of k entries would be far out in some
                w, log_t = q.drawn(e), -0.5 * e.square().sum(-1)
            else:
                chi = torch.randn_like(e.unsqueeze(-1).expand(*e.shape, int(DEGREES)))
                e = e * (DEGREES / chi.square().sum(-1)).sqrt()
                log_t = -0.5 * (DEGREES + 1.0) * torch.log1p(e.square() / DEGREES).sum(-1)
                w = q.drawn(found.mean + matvec(root, e))
            log_p = log_likelihoods(units, given, w) + given.latent.log_prob(w)
            return w, log_p, (log_p - log_t).nan_to_num(-torch.inf)

        w, log_p, log_w = proposed()
        for _ in range(PROPOSALS + (k if root is not None else PROPOSALS) - 1):
            new, log_p_new, log_w_new = proposed()
            takes = torch.rand_like(log_w).log() < log_w_new - log_w
            w = torch.where(takes.unsqueeze(-1), new, w)
            log_p = torch.where(takes, log_p_new, log_p)
            log_w = torch.where(takes, log_w_new, log_w)
        sites, log_det = units.mapped(given.latent.at(w), given.maps)
        return Drawn(sites, log_p - found.log_marginals - log_det, given.seen)


class ExactUnits:
    """A guide of a whole hierarchy, q(v, u) = q(v) prod_i p(u_i | y_i, v): its weights are those of the
    globals, p(y, v) / q(v), and do not decay with the number of units.  Example: :func:`collapse`.

    Args:
        collapsed: the model of the globals, :class:`Collapsed` or :class:`.Whole`.
        globals: a guide of it; q(v) of the hierarchical guide where not given.
    """

    #: weights of many draws, where a verdict has looked at these
    judged: Any = None

    def __init__(self, collapsed: Any, globals: Callable[[], Any] | None = None) -> None:
        self.collapsed, self.globals = collapsed, globals or collapsed.globals

    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Draw all latent sites: a dict of values by name."""
        guide, call = self.collapsed.guide, self.collapsed.call
        values = dict(self.globals())
        if isinstance(self.collapsed, Whole):
            return values
        with poutine.block():
            guide._create_plates(*call.args, **call.kwargs)
        drawn = self.collapsed.drawn({n: x.unsqueeze(0) for n, x in values.items()})
        of_units = drawn, guide.prototype_trace.nodes, guide.plates
        return values | self.collapsed.units.sample(*of_units)
