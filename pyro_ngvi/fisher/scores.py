r"""Scores of any guide: phi = grad_lambda log q_lambda(z) at draws z ~ q_lambda that are held fixed.

Of our families they are known in closed form (:func:`family_scores`).  For every other guide
(:class:`GuideScores`) log q is differentiated by autograd in the stored, unconstrained coordinates: the
guide runs with each drawn value detached, so that no gradient passes through the draw.

Subsampled plates: the sites of a plate of which n of N are seen get the factor sqrt(N / n).  The local
scores of a plate are independent with mean zero, so E[phi phi'] is then the Fisher matrix of all N.
Other scales (``poutine.scale`` around the guide) do not change q and are left out.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import pyro
import torch
from pyro import poutine
from pyro.infer.autoguide import AutoContinuous
from pyro.nn.module import pyro_method
from pyro.poutine.messenger import Messenger
from pyro.poutine.util import site_is_subsample
from torch import Tensor, nn

from ..families.base import Family, Tensors
from ..linalg.products import each_gradient
from ..runtime.density import Site, Sites, scale_and_mask
from ..runtime.run import Minibatches, run_particles, run_plainly
from .moved_draws import MovedDraws

__all__ = ["GuideScores", "family_scores", "packed_scores", "remember_arguments"]


def family_scores(family: Family, params: Tensors, n: int, stored: bool = False) -> Tensor:
    """n scores (n, D) from fresh draws: packed in the local frame of the family, or as ``stored``."""
    score = family.draw_scores(params, n)
    if stored:
        return torch.cat([v.reshape(n, -1) for v in score.values()], 1)
    return packed_scores(family, params, score)


def packed_scores(family: Family, params: Tensors, score: Tensors) -> Tensor:
    """Scores (n, D), packed in the local frame, from those in the stored coordinates."""
    n = len(next(iter(score.values())))
    if n == 1:
        return family.pack(family.pull(params, {k: v[0] for k, v in score.items()}))[None]
    return torch.func.vmap(lambda s: family.pack(family.pull(params, s)))(score)


def remember_arguments(guide: Callable[..., Any]) -> Callable[..., Any]:
    """A guide function that remembers the arguments of its last call.

    Optimizers that call a guide on their own (:class:`~pyro_ngvi.IFVB`) need them.  Guides that are
    modules are watched without it.  Give the wrapped function to the optimizer *and* to SVI.

    Example:
        >>> @remember_arguments
        ... def guide(x, y):
        ...     ...
        >>> guide(1, y=2)
        >>> guide.last_call
        ((1,), {'y': 2})
    """

    @functools.wraps(guide)
    def remembering(*args: Any, **kwargs: Any) -> Any:
        remembering.last_call = (args, kwargs)  # type: ignore[attr-defined]
        return guide(*args, **kwargs)

    remembering.last_call = None  # type: ignore[attr-defined]
    return remembering


class _Watch:
    """Forward hook that holds the arguments of the last call; copies of the module get an empty one."""

    def __init__(self) -> None:
        self.last_call: tuple[tuple[Any, ...], dict[str, Any]] | None = None

    def __call__(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.last_call = (args, kwargs)

    def __reduce__(self) -> Any:
        return (_Watch, ())


class _Fixed(Messenger):
    """Detaches every drawn value before the program goes on with it."""

    def _pyro_post_sample(self, msg: Site) -> None:
        if isinstance(msg["value"], Tensor):
            msg["value"] = msg["value"].detach()


class GuideScores:
    """Scores of a guide of any kind by autograd, in its unconstrained parameters.

    Args:
        guide: a function with ``pyro.param``, an ``EasyGuide``, any ``AutoGuide``.

    The guide is called with the arguments of its last call.

    Raises:
        ValueError: for a function that takes arguments and does not remember them; for a site whose
            density cannot be evaluated at a given value; when log q depends on no parameter.
    """

    def __init__(self, guide: Callable[..., Any]) -> None:
        self.guide = guide
        self._vmaps = True
        if isinstance(guide, nn.Module):
            self._watch: Any = _Watch()
            guide.register_forward_pre_hook(self._watch, with_kwargs=True)
        elif hasattr(guide, "last_call") or not _takes_arguments(guide):
            self._watch = guide
        else:
            raise ValueError(
                f"The guide {_name(guide)} takes arguments, and scores are drawn by calling it "
                f"again. Wrap it: guide = pyro_ngvi.optim.remember_arguments(guide), and give the "
                f"result to the optimizer and to SVI."
            )

    def leaves(self) -> dict[str, Tensor]:
        """The unconstrained parameters of the guide by their names in the parameter store."""
        with torch.no_grad(), poutine.block():
            return self._capture(lambda: self._log_q(1))[1]

    def draw(self, n: int, names: list[str] | None = None) -> Tensor:
        """n scores (n, D) at the present parameters, by those ``names``, flattened and joined."""
        with torch.enable_grad(), poutine.block():
            log_q, leaves = self._capture(lambda: self._log_q(n))
            if not log_q.requires_grad:
                raise ValueError(
                    f"log q of the guide {_name(self.guide)} depends on no parameter, so it has no "
                    f"scores. Point estimates (AutoDelta) are trained by pyro.optim.Adam."
                )
            wanted = [leaves[name] for name in (leaves if names is None else names)]
            grads = each_gradient(log_q, wanted)
        return torch.cat([g.reshape(n, -1) for g in grads], 1)

    def dependent(self) -> dict[str, Tensor]:
        """Those :meth:`leaves` on which log q depends at all.

        Raises:
            ValueError: for a guide that computes a site from a draw and from parameters, such as
                AutoStructured and AutoGaussian.
        """
        with torch.enable_grad(), poutine.block():
            self._refuse_moved_draws()
            log_q, leaves = self._capture(lambda: self._log_q(1))
            if not log_q.requires_grad:
                return {}
            trainable = _trainable(leaves)
            grads = torch.autograd.grad(log_q.sum(), list(trainable.values()), allow_unused=True)
        found = zip(trainable.items(), grads, strict=True)
        return {name: p for (name, p), grad in found if grad is not None}

    def _refuse_moved_draws(self) -> None:
        if _is_joint(self.guide):
            return
        args, kwargs = self._arguments()
        with poutine.trace(param_only=True) as recorder, MovedDraws() as moved:
            with pyro.validation_enabled(False):
                run_plainly(self.guide, {}, args, kwargs, Minibatches())
        name = moved.find(list(_trainable(_leaves(recorder)).values()))
        if name is not None:
            raise ValueError(
                f"The guide {_name(self.guide)} computes the site {name!r} from a draw and from "
                "parameters, so log q has no scores at a fixed value. Use a guide that draws its "
                "sites, such as pyro_ngvi.AutoFullRankNormal, or train this one by "
                "pyro.optim.Adam."
            )

    def _capture(self, run: Callable[[], Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        with poutine.trace(param_only=True) as recorder:
            log_q = run()
        return log_q, _leaves(recorder)

    def _arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        call = getattr(self._watch, "last_call", None)
        if call is not None:
            return call
        if not isinstance(self.guide, nn.Module) and _takes_arguments(self.guide):
            raise ValueError(
                f"The guide {_name(self.guide)} was not called yet, so its arguments are not known. "
                f"Give SVI the guide that pyro_ngvi.optim.remember_arguments returned, and step it."
            )
        return (), {}

    def _log_q(self, n: int) -> Tensor:
        """log q (n,) of n fixed draws, as a function of the parameters."""
        args, kwargs = self._arguments()
        if _is_joint(self.guide):
            with pyro.validation_enabled(False):
                q = _posterior(self.guide, *args, **kwargs)
                theta = q.sample((n,)).detach()
                return _evaluated("its joint latent vector", q, theta)
        if n > 1 and self._vmaps:
            try:
                with _Fixed():
                    shared = Minibatches()
                    return run_particles(
                        self.guide, _sum, {}, n, args, kwargs, minibatches=shared, sampling=True
                    )
            except RuntimeError:
                self._vmaps = False  # from now on one draw after the other
        with _Fixed(), pyro.validation_enabled(False):
            draws = [
                _sum(run_plainly(self.guide, {}, args, kwargs, Minibatches())) for _ in range(n)
            ]
        return torch.stack(draws)


def _leaves(recorder: Any) -> dict[str, Tensor]:
    """The recorded parameters; those with two names (tied, or AutoIAFNormal's prototype) once."""
    leaves: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, site in recorder.trace.nodes.items():
        if site["type"] == "param":
            leaf = site["value"].unconstrained()
            if id(leaf) not in seen:
                seen.add(id(leaf))
                leaves[name] = leaf
    return leaves


def _trainable(leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: p for name, p in leaves.items() if p.requires_grad}


@pyro_method
def _posterior(guide: Any, *args: Any, **kwargs: Any) -> Any:
    return guide.get_posterior(*args, **kwargs)


def _is_joint(guide: Any) -> bool:
    return (
        isinstance(guide, AutoContinuous)
        and type(guide).forward is AutoContinuous.forward
        and type(guide).sample_latent is AutoContinuous.sample_latent
    )


def _name(guide: Any) -> str:
    return repr(getattr(guide, "__name__", type(guide).__name__))


def _takes_arguments(guide: Callable[..., Any]) -> bool:
    # optional ones too: without them the scores would be those of another q than SVI's
    return bool(inspect.signature(guide).parameters)


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
        weight = 1.0
        for frame in site["cond_indep_stack"]:
            if frame.full_size is not None:
                weight *= (frame.full_size / frame.size) ** 0.5
        log_prob = scale_and_mask(log_prob, weight, site["mask"]).sum()
        total = log_prob if total is None else total + log_prob
    return torch.zeros(()) if total is None else total
