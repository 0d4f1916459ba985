"""Which guide, rule and loss for a model, and why."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from pyro.infer import SVI, autoguide
from pyro.infer.autoguide import AutoGuide
from pyro.optim import PyroOptim
from torch import nn

from .. import guides, hierarchy, metric, optim, sites
from ..guides import AutoFlow, AutoOrthogonalFlow
from ..hierarchy import AutoHierarchical
from ..linalg.host import own_random_state
from ..losses import BatchedELBO
from ..optim.host import find_blocks
from ..runtime.store import OwnName, claim_name, rename
from ..sites import SitesELBO
from ..sites.site_guide import SiteGuide, find_sites
from .checkpoint import bare, called
from .structure import Structure

#: where the classes stand that have names
GUIDES, OPTIMS = (guides, hierarchy, metric, sites, autoguide), (optim, sites)
#: beginnings of modules whose classes and functions want settings, not a guide
LOOKALIKES = ("pyro.optim.", "torch.optim")

#: latent variables from which a Cholesky factor, of d^2 / 2 noisy entries, gets as many particles
MANY = 32
ADAM = (
    "optim= is an optimizer or a function of the guide that gives one: for Adam pass "
    "pyro.optim.Adam({'lr': 0.01})."
)


@dataclass
class Advice:
    """Guide, or its class, optimizer, or what makes one of a guide, and loss for a ``model``.

    Attributes:
        reasons: a clause for each choice, as which it prints.
        recipe: names from which ``advise`` makes the same again; ``None`` for the user's own objects.
        units: those that were found in these data, for a guide of units.

    Example:
        >>> import pyro, pyro.distributions as dist, pyro_ngvi as ngvi
        >>> advice = ngvi.advise(lambda: pyro.sample("x", dist.LogNormal(1.0, 0.3)))
        >>> advice.guide.__name__, advice.recipe["optim"], advice.svi().step() < 10.0
        ('AutoFullRankNormal', 'NGVB', True)
    """

    model: Any
    guide: Any
    optim: Any
    loss: Any
    reasons: tuple[str, ...]
    recipe: dict[str, Any]
    units: Any = None

    def svi(self, *, known: bool = False) -> SVI:
        """The parts put together; if ``known`` for these data, whose units are not looked for again."""
        guide = self.guide
        if _is_maker(guide):
            found = {"locals": self.units} if known and self.units is not None else {}
            guide = guide(self.model, **found)
            if not isinstance(guide, OwnName) and isinstance(guide, AutoGuide):
                # Pyro calls all guides of a class the same, and a second one takes over the first
                rename(guide, claim_name(type(guide).__name__))
        elif self.optim is optim.IFVB and not isinstance(guide, nn.Module):
            guide = optim.remember_arguments(guide)
        made = self.optim if isinstance(self.optim, PyroOptim) else self.optim(guide)
        return SVI(self.model, guide, made, self.loss)

    def __str__(self) -> str:
        return "; ".join(self.reasons) + "."


def advise(
    model: Any,
    *args: Any,
    guide: Any = None,
    optim: Any = None,
    loss: Any = None,
    num_particles: int | None = None,
    **kwargs: Any,
) -> Advice:
    """Which guide, optimizer and loss :func:`pyro_ngvi.fit` takes for a model, and why.

    By the structure of the model alone; what is given is kept:

    * guide: :class:`~pyro_ngvi.AutoSites` where it takes the model, and a latent site is a Gaussian
      process or a chain of this package, or there are more than 100 latent variables, all data,
      which times them are at most 10^8, and no parameters;
      :class:`~pyro_ngvi.AutoExponentialFamily` where that holds the posterior, as gradients show,
      and no latent variable is a real number; :class:`~pyro_ngvi.AutoHierarchical` where at least
      half of the latent variables are Gaussian ones of units, or of a block whose prior depends on
      the others, or of more than 100 coefficients of Gaussian data, and the others are at most
      1,000; else a Gaussian over all of them: :class:`~pyro_ngvi.AutoFullRankNormal` up to 1,000,
      :class:`~pyro_ngvi.AutoFactorNormal` up to 100,000, :class:`~pyro_ngvi.AutoMeanFieldNormal`
      above, and above 1,000 of minibatches.
    * optimizer: :class:`~pyro_ngvi.NGVB` where the family knows its Fisher matrix, ``CVI`` for sites,
      ``SPRING`` for flows, ``IFVB`` for any other guide.
    * loss: :class:`~pyro_ngvi.BatchedELBO` of 8 particles, with the curvature that the optimizer asks
      for; 16 for units, 32 for a full Gaussian over at least 32 latent variables, 128 for flows;
      ``SitesELBO`` for sites.

    Args:
        model: a Pyro model, and ``args``, ``kwargs`` its arguments.
        guide: a guide, a class of guides, or the name of one of this package or of Pyro.
        optim: an optimizer, a class (or function of the guide), or the name of one of this package.
        loss: a loss.
        num_particles: draws of a step.

    Raises:
        ValueError: for names that are not known, and ``num_particles`` beside a ``loss``.

    Example:
        >>> import pyro, torch, pyro.distributions as dist, pyro_ngvi as ngvi
        >>> def model():
        ...     pyro.sample("x", dist.Gamma(torch.full((3,), 9.0), 3.0).to_event(1))
        >>> print(ngvi.advise(model))
        AutoExponentialFamily, which holds the posterior; NGVB, exact natural gradients; 8 particles; no
        data, so this is the prior.
    """
    if loss is not None and num_particles is not None:
        raise ValueError(
            "num_particles= is a matter of the loss: give it there, or leave loss= out."
        )
    guide = _named("guide", guide, GUIDES, AutoGuide) if isinstance(guide, str) else guide
    rule = _named("optim", optim, OPTIMS, PyroOptim) if isinstance(optim, str) else optim
    own_loss, why_guide, why_rule = loss is not None, "as given", "as given"
    is_prior, structure, units = False, None, None
    if guide is None:
        structure = Structure(model, args, kwargs)
        free = rule in (None, sites.CVI) and isinstance(loss, SitesELBO | None)
        (guide, why_guide), is_prior = structure.guide(free), structure.is_prior
        units = structure.units if guide is AutoHierarchical else None
    kind = bare(guide) if _is_maker(guide) else type(guide)
    if rule is None:
        rule, why_rule = _rule_for(kind, guide)
    elif not isinstance(rule, PyroOptim) and (
        not callable(rule) or str(getattr(rule, "__module__", "")).startswith(LOOKALIKES)
    ):
        raise ValueError(ADAM)
    if loss is None:

        def dim() -> int:
            if structure is not None:
                return structure.d
            with suppress(TypeError), own_random_state():  # arguments are missing
                return Structure(model, args, kwargs).d
            return 0

        loss = _loss_for(kind, rule, num_particles, dim)
        over_sites = isinstance(loss, SitesELBO)
        why = "sums over sites" if over_sites else f"{loss.num_particles} particles"
    elif isinstance(loss, str | type):
        raise ValueError("loss= is a loss, not its class or name: pass pyro.infer.Trace_ELBO().")
    else:
        why = f"{type(loss).__name__}, as given"
    reasons = f"{called(guide)}, {why_guide}", f"{called(rule)}, {why_rule}", why
    reasons += ("no data, so this is the prior",) * is_prior
    recipe = {
        "guide": _name_of(guide, GUIDES),
        "optim": _name_of(rule, OPTIMS),
        "loss": None if own_loss else "chosen",
        "num_particles": None if own_loss else loss.num_particles,
    }
    return Advice(model, guide, rule, loss, reasons, recipe, units)


def _named(what: str, name: str, places: tuple[Any, ...], of: type) -> Any:
    known = {n: getattr(p, n) for p in reversed(places) for n in p.__all__}
    known = {n: x for n, x in known.items() if isinstance(x, type) and issubclass(x, of)}
    if name not in known:
        if (what, name.lower()) == ("optim", "adam"):
            raise ValueError(ADAM)
        near = get_close_matches(name, known, n=5, cutoff=0.0)
        auto = ": that is for fit, which tries several" * (f"{what}={name}" == "guide=auto")
        raise ValueError(f"There is no {what} called {name!r}{auto}. Near are {', '.join(near)}.")
    return known[name]


def _name_of(thing: Any, places: tuple[Any, ...]) -> str | None:
    name = getattr(thing, "__name__", "")
    return name if any(getattr(place, name, None) is thing for place in places if name) else None


def _is_maker(guide: Any) -> bool:
    """Whether something makes a guide of a model; else it is one."""
    return isinstance(bare(guide), type)


def _rule_for(kind: type, guide: Any) -> tuple[Any, str]:
    if issubclass(kind, SiteGuide) or any(find_sites(guide)):
        return sites.CVI, "fixed points of the sites"
    if issubclass(kind, AutoFlow | AutoOrthogonalFlow):
        return optim.SPRING, "natural gradients from scores"
    if isinstance(guide, AutoHierarchical):  # scores, as of a flow, it has none
        exact = _rule_for(type(guide.globals), guide.globals)[0] is optim.NGVB
    else:
        named = hasattr(kind, "make_family") or kind is AutoHierarchical
        exact = named or any(find_blocks(guide))
    if exact:
        return optim.NGVB, "exact natural gradients"
    return optim.IFVB, "natural gradients of any guide"


def _loss_for(kind: type, rule: Any, num_particles: int | None, dim: Callable[[], int]) -> Any:
    if issubclass(kind, SiteGuide) or rule is sites.CVI:  # which refuses other guides
        return SitesELBO() if num_particles is None else SitesELBO(num_particles)
    accepts = getattr(rule, "accepts", (None,))
    ways = [way for way in (None, "price", *accepts) if way in accepts]
    if num_particles is None:
        num_particles = 128 if ways[0] == "scores" else 16 if kind is AutoHierarchical else 8
        if (kind, rule) == (guides.AutoFullRankNormal, optim.NGVB) and dim() >= MANY:
            num_particles = MANY
    return BatchedELBO(num_particles, curvature=ways[0])
