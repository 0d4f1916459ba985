"""What one run of a model tells of its latent variables, and which guide that speaks for."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from torch import nn
from torch.distributions import biject_to, constraints

from .. import guides, sites
from ..distributions import GaussianProcess, GaussianStateSpace
from ..guides.member import conjugate
from ..hierarchy import AutoHierarchical
from ..hierarchy.find import NumbersUntold, find_units
from ..linalg.host import own_random_state
from ..runtime.density import innermost, is_latent, is_minibatch, plain_support, site_kind
from ..runtime.model_density import ModelDensity
from ..runtime.pyro_adapter import is_marked
from ..runtime.run import look
from ..runtime.store import ModuleParams, traced_params
from .door import naming_arguments

#: latent variables from which a Cholesky factor costs too much, and from which factors do
FULL_RANK, FACTOR = 1_000, 100_000
#: globals for each latent variable of the units, up to which these are apart: a horseshoe has a scale
#: for each coefficient, and some of its own
BESIDE = 2
#: latent variables above which sites are wanted where they can be had: no step of theirs has noise, of
#: which a Cholesky factor gets d^2 / 2 numbers; and numbers of a design, and of products with it
FEW, DESIGN, WORK = 100, 10**8, 10**11
#: priors that :class:`~pyro_ngvi.AutoSites` alone follows to new inputs
PROCESSES = GaussianProcess, GaussianStateSpace


class Structure:
    """What a run of a model tells: ``d`` latent variables, numbers of all ``data``, the name of a
    latent ``process``, whether these are the ``whole`` data, none of which stands for others, plates
    of latent variables that take a ``part`` of their units, whether a latent variable ``is_free`` to be
    any real number, those whose prior is ``improper``, and whether the model ``has_params`` that are
    trained beside the guide's."""

    def __init__(self, model: Any, args: Any, kwargs: Any) -> None:
        self.model, self.args, self.kwargs = model, args, kwargs
        # a draw of the prior may give the data a density that is not valid
        with poutine.block(), ModuleParams(), pyro.validation_enabled(False):
            with naming_arguments(model, args, kwargs), poutine.trace(param_only=True) as seen:
                found = look(model, {}, args, kwargs)
        own = model.parameters() if isinstance(model, nn.Module) else ()
        self.has_params = any(p.requires_grad for p in (*own, *traced_params(seen)))
        latents = [s for s in found.values() if is_latent(s) and not is_marked(s)]
        self.discrete = [s["name"] for s in latents if s["fn"].support.is_discrete]
        latents = [s for s in latents if s["name"] not in self.discrete]
        flat = dist.ImproperUniform
        self.improper = [s["name"] for s in latents if isinstance(innermost(s["fn"]), flat)]
        self.sizes = {
            s["name"]: biject_to(s["fn"].support).inv(s["value"]).numel() for s in latents
        }
        self.d = sum(self.sizes.values())
        priors = [s["name"] for s in latents if isinstance(innermost(s["fn"]), PROCESSES)]
        self.process = next(iter(priors), None)
        self.data, kinds = 0.0, {name: site_kind(s) for name, s in found.items()}
        self.is_prior = not {"observed", "factor"} & set(kinds.values())
        plates = {name: site for name, site in found.items() if is_minibatch(site)}
        inside = {frame.name for s in latents for frame in s["cond_indep_stack"]}
        self.whole, self.part = not plates, {n: s for n, s in plates.items() if n in inside}
        self.is_free = any(plain_support(s["fn"].support) is constraints.real for s in latents)
        for site in (s for s in found.values() if kinds[s["name"]] == "observed"):
            shares = (f.size / f.full_size for f in site["cond_indep_stack"])
            self.data += torch.as_tensor(site["value"]).numel() / math.prod(shares)
            self.whole &= bool((torch.as_tensor(site["scale"]) <= 1.0).all())

    @cached_property
    def units(self) -> Any:
        """Units of the model, whose search runs it several times."""
        try:
            return find_units(self.model, self.args, self.kwargs, None)
        except NumbersUntold:  # other guides have no place for units of a minibatch
            raise
        except (ValueError, NotImplementedError):  # why it has none; priors without draws
            return None

    def guide(self, free: bool = True) -> tuple[Any, str]:
        """The guide to begin with, and why; ``free``: whether rule and loss may be those of sites."""
        for name in self.discrete:
            raise ValueError(
                f"The latent site {name!r} is discrete. If it is data, pass them; else mark it "
                f'infer={{"enumerate": "parallel"}}, which sums it out, of an infinite support as a '
                f"Categorical up to a bound."
            )
        if self.process is not None and self.suits_sites:
            return sites.AutoSites, f"for the process {self.process}"
        if free and self.is_conjugate:
            return guides.AutoExponentialFamily, "which holds the posterior"
        units = self.units
        if units is not None:
            inside = units.size * units.width  # of which d may have a minibatch
            beside = sum(self.sizes.get(name, 0) for name in units.globals)
            if beside < BESIDE * inside and beside <= FULL_RANK:
                return AutoHierarchical, f"for {units}"
        if free and self._is_wide() and not self.has_params and self.suits_sites:
            return sites.AutoSites, f"for {self.d:,} latent variables, Gaussian a priori"
        return self.normal()

    def _is_wide(self) -> bool:
        """Whether a Gaussian over all latent variables is slow to find, and sites can be held."""
        d, design = self.d, self.d * self.data
        return self.whole and d > FEW and design <= DESIGN and min(d, self.data) * design <= WORK

    @cached_property
    def is_conjugate(self) -> bool:
        """Whether the latent variables, none of them free, are independent members of the exponential
        families of their supports, given the data."""
        if self.is_free or self.has_params or not self.whole or not 0 < self.d <= FULL_RANK:
            return False
        return holds_posterior(self.model, self.args, self.kwargs)

    @cached_property
    def suits_sites(self) -> bool:
        """Whether sites take the model, which runs it many times."""
        return sites_take(self.model, self.args, self.kwargs)

    def normal(self) -> tuple[Any, str]:
        """The Gaussian over all latent variables, and why."""
        d = self.d
        why, normal = f"for {d:,} latent variable{'s' * (d != 1)}", guides.AutoFullRankNormal
        if d > FULL_RANK:
            few = d <= FACTOR and self.whole  # by minibatches steps of factors from afar are noise
            normal = guides.AutoFactorNormal if few else guides.AutoMeanFieldNormal
        return normal, why


@contextmanager
def _trying() -> Iterator[None]:
    """Ends where a guide does not take a model, and leaves nothing behind."""
    # whatever a model says at points far from its prior, as a guide of another kind may never see
    with suppress(Exception), poutine.block(), own_random_state(), torch.no_grad():
        with pyro.get_param_store().scope():
            yield


def sites_take(model: Any, args: Any, kwargs: Any) -> bool:
    """Whether :class:`~pyro_ngvi.AutoSites`, which ``integrate`` fits too, takes a model."""
    with _trying():
        sites.AutoSites(model, name="advice")(*args, **kwargs)
        return True
    return False


def holds_posterior(model: Any, args: Any, kwargs: Any) -> bool:
    """Whether the posterior of a model is a member of its :class:`~pyro_ngvi.AutoExponentialFamily`."""
    with _trying():
        guide = guides.AutoExponentialFamily(model, init=None, name="advice")
        guide(*args, **kwargs)
        start = guide.get_posterior().mean
        return conjugate(ModelDensity(model, args, kwargs), guide.family, start) is not None
    return False
