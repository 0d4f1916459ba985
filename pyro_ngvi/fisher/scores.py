r"""Scores of any guide: phi = grad_lambda log q_lambda(z) at draws z ~ q_lambda that are held fixed.

Of our families they are known in closed form.  For every other guide log q is differentiated by
autograd in the stored, unconstrained coordinates: the guide runs with each drawn value detached, or,
where it computes values from noise and parameters, with noise that moves (:mod:`.moved_draws`).

Subsampled plates: the sites of a plate of which n of N are seen get the factor sqrt(N / n), with which
E[phi phi'] is the Fisher matrix of all N.  Other scales do not change q and are left out.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.nn.module import pyro_method
from pyro.poutine.messenger import Messenger
from pyro.poutine.util import site_is_subsample
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ..families.base import Family, Tensors
from ..linalg.products import each_gradient
from ..runtime.density import Site, Sites, innermost, is_latent, minibatch_scale, scale_and_mask
from ..runtime.pyro_adapter import draws_one_vector
from ..runtime.run import Minibatches, at_particle, run_particles, run_plainly
from ..runtime.store import RefuseShadowed, leaf_of
from .moved_draws import FreeDraws, MovedDraws
from .watch import guide_name, takes_arguments, watch


def family_scores(family: Family, params: Tensors, n: int, frame: Any = None) -> Tensor:
    """n scores (n, D) from fresh draws, packed in a ``frame``, by default the family's own."""
    return packed_scores(frame or family, params, family.draw_scores(params, n))


def packed_scores(family: Any, params: Tensors, score: Tensors) -> Tensor:
    """Scores (n, D), packed in the frame ``family``, from those in the stored coordinates."""
    n = len(next(iter(score.values())))
    if n == 1:
        return family.pack(family.pull(params, {k: v[0] for k, v in score.items()}))[None]
    return torch.func.vmap(lambda s: family.pack(family.pull(params, s)))(score)


class _Fixed(Messenger):
    """Detaches every drawn value before the program goes on with it."""

    def _pyro_post_sample(self, msg: Site) -> None:
        if isinstance(msg["value"], Tensor):
            msg["value"] = msg["value"].detach()


def _held(fixed: bool) -> Any:
    return _Fixed() if fixed else nullcontext()


class GuideScores:
    """Scores of a guide of any kind by autograd, in its unconstrained parameters.

    The guide is called with the arguments of its last call.  ``steady``: whether its draws become so in
    the loss (:mod:`pyro_ngvi.distributions.steady`).
    """

    def __init__(self, guide: Callable[..., Any], steady: bool = False) -> None:
        self.guide = guide
        self._failed: set[str] = set()
        self._watch = watch(guide, steady)
        #: the sites that make up z, of a guide that moves its draws
        self._targets: list[str] = []

    def leaves(self) -> dict[str, Tensor]:
        """The unconstrained parameters of the guide by their names in the parameter store."""
        with torch.no_grad(), poutine.block():
            return self.capture(lambda: self.held(1)())[1]

    def draw(self, n: int, names: list[str] | None = None) -> Tensor:
        """n scores (n, D) at the present parameters, by those ``names``, flattened and joined."""
        with torch.enable_grad(), poutine.block():
            log_q, leaves = self.capture(lambda: self.held(n)())
            wanted = [leaves[name] for name in (leaves if names is None else names)]
            grads = each_gradient(log_q, wanted)
        return torch.cat([g.reshape(n, -1) for g in grads], 1)

    def dependent(self) -> dict[str, Tensor]:
        """Those :meth:`leaves` on which log q depends at all."""
        with torch.enable_grad(), poutine.block(), RefuseShadowed():
            if not self.is_joint:
                self._find_moved_draws()
            log_q, leaves = self.capture(lambda: self.held(1)())
            if not log_q.requires_grad:
                return {}
            trainable = {name: p for name, p in leaves.items() if p.requires_grad}
            grads = torch.autograd.grad(log_q.sum(), list(trainable.values()), allow_unused=True)
        found = zip(trainable.items(), grads, strict=True)
        return {name: p for (name, p), grad in found if grad is not None}

    @property
    def moves_draws(self) -> bool:
        """Whether sites are computed from draws and from parameters; known after :meth:`dependent`."""
        return bool(self._targets)

    def _find_moved_draws(self) -> None:
        """Find what :class:`MovedDraws` needs, and refuse a guide whose moved sites have no scores."""
        with FreeDraws() as free, pyro.validation_enabled(False):
            _, leaves = self.capture(lambda: self.run(fixed=False))
        trainable = [p for p in leaves.values() if p.requires_grad]
        moved = free.moved(trainable)
        self._targets = free.targets() if moved else []
        flaw = self._held_moved(1).flaw(trainable) if moved else None
        if flaw is not None:
            raise ValueError(
                f"The guide {guide_name(self.guide)} computes {moved[0]!r} from draws and parameters, "
                f"{flaw}: log q has no scores. Use pyro_ngvi.AutoFullRankNormal, or train this guide "
                "by pyro.optim.Adam."
            )

    def _held_moved(self, n: int) -> MovedDraws:
        minibatches = Minibatches()
        with torch.no_grad():
            noise: Any = self._draws(n, minibatches)
        if isinstance(noise, list):
            noise = tree_map(lambda *x: torch.stack(x), *noise)
        at = functools.partial(self._of_sites, n=n, minibatches=minibatches, fixed=False)
        return MovedDraws(functools.partial(at, reduce=self._parts), noise)

    def _parts(self, sites: Sites) -> tuple[Tensor, Tensor, Tensor]:
        """log q, its part in Delta sites, and z of one run."""
        deltas = {n: s for n, s in sites.items() if isinstance(innermost(s["fn"]), dist.Delta)}
        z = [sites[name]["value"].reshape(-1) for name in self._targets]
        return _sum(sites), _sum(deltas), torch.cat(z)

    def capture(self, run: Callable[[], Any]) -> tuple[Any, dict[str, Tensor]]:
        """What ``run`` returns, and the parameters it met; those with two names (tied) once."""
        with poutine.trace(param_only=True) as recorder:
            result = run()
        nodes: Any = recorder.trace.nodes
        params = {n: leaf_of(s["value"]) for n, s in nodes.items() if s["type"] == "param"}
        first = {id(p): name for name, p in reversed(params.items())}
        return result, {name: p for name, p in params.items() if first[id(p)] == name}

    def _arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        call = getattr(self._watch, "last_call", None)
        if call is not None:
            return call
        if not isinstance(self.guide, nn.Module) and takes_arguments(self.guide):
            raise ValueError(
                f"The guide {guide_name(self.guide)} was not called yet, so its arguments are "
                f"not known. Give SVI the guide that pyro_ngvi.optim.remember_arguments returned, and "
                f"step it."
            )
        return (), {}

    def run(
        self,
        values: Tensors | None = None,
        minibatches: Minibatches | None = None,
        fixed: bool = True,
    ) -> Sites:
        """The sites of one run of the guide, at ``values`` or at draws, ``fixed`` ones by default."""
        args, kwargs = self._arguments()
        shared = Minibatches() if minibatches is None else minibatches
        with _held(fixed), self._as_it_is(), pyro.validation_enabled(False):
            return run_plainly(self.guide, values or {}, args, kwargs, shared)

    def held(self, n: int) -> Callable[[], Tensor]:
        """n draws from the guide as it is now; calls give log q (n,) of them as it is then."""
        with torch.no_grad(), poutine.block():
            if self.is_joint:
                return functools.partial(self._of_joint, self.posterior().sample((n,)))
            if self.moves_draws:
                return self._held_moved(n)
            minibatches = Minibatches()
            values = self._draws(n, minibatches)
        return functools.partial(self._of_sites, values, n, minibatches)

    def _draws(self, n: int, minibatches: Minibatches) -> Tensors | list[Tensors]:
        """Values by site of n runs: together (n, ...), or of each."""
        if n > 1 and "draws" not in self._failed:
            try:
                return self._in_vmap({}, n, minibatches, _values)
            except Exception:  # a run by itself shows what is wrong in any
                self._failed.add("draws")
        return [_values(self.run(minibatches=minibatches)) for _ in range(n)]

    def _of_sites(
        self,
        values: Tensors | list[Tensors],
        n: int,
        minibatches: Minibatches,
        reduce: Callable[[Sites], Any] | None = None,
        fixed: bool = True,
    ) -> Any:
        """log q (n,), or what ``reduce`` makes of sites, at those values, held ``fixed`` or not."""
        reduce = reduce or _sum
        if isinstance(values, dict) and "densities" not in self._failed:
            try:
                return self._in_vmap(values, n, minibatches, reduce, fixed)
            except RuntimeError:
                self._failed.add("densities")
        each = (
            values if isinstance(values, list) else [at_particle(s, values, None) for s in range(n)]
        )
        found = [reduce(self.run(v, minibatches, fixed)) for v in each]
        return tree_map(lambda *x: torch.stack(x), *found)

    def _in_vmap(
        self, values: Tensors, n: int, minibatches: Minibatches, reduce: Any, fixed: bool = True
    ) -> Any:
        args, kwargs = self._arguments()
        given: Any = self.guide, reduce, values, n, args, kwargs
        with _held(fixed), self._as_it_is():
            return run_particles(*given, minibatches=minibatches, sampling=not values)

    @property
    def is_joint(self) -> bool:
        """Whether the guide draws one flat vector in Pyro's own way."""
        return draws_one_vector(self.guide)

    def posterior(self) -> Any:
        """The distribution of that vector."""
        args, kwargs = self._arguments()
        with pyro.validation_enabled(False):
            return _posterior(self.guide, *args, **kwargs)

    def _of_joint(self, theta: Tensor) -> Tensor:
        with pyro.validation_enabled(False):
            # another tensor at each call: transforms remember what they made of the last one
            return _evaluated("its joint latent vector", self.posterior(), theta.detach())

    @contextmanager
    def _as_it_is(self) -> Iterator[None]:
        """Calls of the guide inside have its own distributions, whose log densities have scores."""
        before = getattr(self._watch, "steadies", False)
        if before:
            self._watch.steadies = False
        try:
            yield
        finally:
            if before:
                self._watch.steadies = True


@pyro_method
def _posterior(guide: Any, *args: Any, **kwargs: Any) -> Any:
    return guide.get_posterior(*args, **kwargs)


def _evaluated(what: str, fn: Any, value: Tensor) -> Tensor:
    try:
        return fn.log_prob(value)
    except (NotImplementedError, KeyError) as error:
        raise ValueError(
            f"The density of {what} ({type(fn).__name__}) cannot be evaluated at a given value, only "
            f"at a draw of its own, so the guide has no scores here. Use a distribution whose "
            f"transform has an inverse, or train the guide by pyro.optim.Adam."
        ) from error


def _sum(sites: Sites) -> Tensor:
    """log q of one draw, each site times sqrt(N / n) of its subsampled plates."""
    total: Any = None
    for name, site in sites.items():
        if site_is_subsample(site) or site["is_observed"]:
            continue
        log_prob = _evaluated(f"the site {name!r} of the guide", site["fn"], site["value"])
        log_prob = scale_and_mask(log_prob, minibatch_scale(site) ** 0.5, site["mask"]).sum()
        total = log_prob if total is None else total + log_prob
    return torch.zeros(()) if total is None else total


def drawing(sites: Sites) -> Sites:
    """The sites that draw: not those whose value a run computed from its draws."""
    return {
        name: site
        for name, site in sites.items()
        if is_latent(site) and not isinstance(innermost(site["fn"]), dist.Delta)
    }


def _values(sites: Sites) -> Tensors:
    return {name: site["value"] for name, site in drawing(sites).items()}
