"""Is a model right under Pyro's vectorised particles?  See :func:`check_vectorized`."""

import textwrap
import warnings
from functools import partial
from typing import Any

import pyro
import torch
from pyro import poutine
from pyro.poutine.indep_messenger import CondIndepStackFrame
from pyro.poutine.messenger import Messenger
from pyro.poutine.util import site_is_subsample
from torch import Tensor

from ..linalg.host import own_random_state, random_states, same_states
from ..runtime.density import Site, Sites, free_dim, is_latent, site_log_prob, with_density
from ..runtime.pyro_adapter import has_model, model_as_given
from ..runtime.run import (
    CannotBatch,
    Conditioned,
    Minibatches,
    Program,
    run_both,
    run_in_loop,
    run_particles,
    run_plainly,
)


class BroadcastError(ValueError):
    """A model is wrong with vectorised particles; the message names the site."""


def _wrong(what: str) -> BroadcastError:
    # not in the class: Pyro makes an exception anew from the text of one that passes through a trace
    return BroadcastError(
        f"With vectorised particles {what}. Write `(X * w).sum(-1)`, or take BatchedELBO or "
        f"vectorize_particles=False."
    )


def check_vectorized(
    model: Program, guide: Program, *args: Any, num_particles: int = 2, **kwargs: Any
) -> None:
    """Check that a model is right under ``Trace_ELBO(vectorize_particles=True)``.

    Pyro's vectorised particles are a plate around the model: a latent vector ``w`` of d elements
    arrives with shape (S, 1, ..., d), and ``X @ w`` then fails or, worse, broadcasts to a wrong
    loss. This compares each site's log probability with that of the model run for each of S particles.
    Do not use it for models that draw random numbers of their own or are enumerated. ``BatchedELBO``
    needs no such check; guides of pyro_ngvi do it themselves at their first vectorised call, unless
    they are part of an ``AutoGuideList`` or ``vmap`` cannot run the model.

    Args:
        model: the Pyro model, and ``guide`` a guide of it.
        args: those of both, and ``kwargs``.
        num_particles: S, at least 2.

    Raises:
        ValueError: naming the first site that differs, and its shape.

    Example:
        >>> import torch, pyro, pyro.distributions as dist
        >>> from pyro.infer.autoguide import AutoNormal
        >>> def model(X):
        ...     w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        ...     with pyro.plate("data", 3):
        ...         pyro.sample("y", dist.Normal(X @ w, 1.0), obs=torch.zeros(3))
        >>> check_vectorized(model, AutoNormal(model), torch.ones(3, 2))  # (X * w).sum(-1) would do
        Traceback (most recent call last):
        pyro_ngvi.probing.vectorized.BroadcastError: With vectorised particles the program fails ...
    """
    if num_particles < 2:
        raise ValueError(f"num_particles is {num_particles}; a check needs at least 2.")
    model, guide = partial(model, *args, **kwargs), partial(guide, *args, **kwargs)
    with poutine.block(), torch.no_grad():
        single = run_both(model, guide, (), {}, Minibatches())[1].sites
        particles = pyro.plate("_particles", num_particles, dim=free_dim(single))
        _check(model, guide, single, particles, num_particles)


def check_vectorized_call(
    guide: Any, frame: CondIndepStackFrame, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """The same for an autoguide that is being called inside the plate ``frame``, without a trace.

    It raises only where the model can be compared.
    """
    if not has_model(guide) or guide.master is not None:
        return  # a part of a list does not know the guide of the other sites
    store = pyro.get_param_store()
    known = set(store.keys())
    try:
        # the run itself gives the same warnings
        with own_random_state(), poutine.block(), torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = partial(model_as_given(guide), *args, **kwargs)
            guide = partial(guide, *args, **kwargs)
            single = run_both(model, guide, (), {}, Minibatches())[1]
            if _draws_all(model, single):
                _check(model, guide, single.sites, _Inside(frame), frame.size, batched=True)
    except BroadcastError:
        raise
    except Exception:  # whatever keeps the two from being compared is no fault of the model
        pass
    finally:
        for name in set(store.keys()) - known:
            del store[name]


class _Inside(Messenger):
    """As the vectorised plate of ``frame``, which is active outside and cannot be entered again."""

    def __init__(self, frame: CondIndepStackFrame) -> None:
        super().__init__()
        self.frame = frame

    def __call__(self, fn: Program) -> Program:
        return poutine.broadcast(super().__call__(fn))

    def _pyro_sample(self, msg: Site) -> None:
        msg["cond_indep_stack"] = (self.frame,) + msg["cond_indep_stack"]


def _draws_all(model: Program, run: Conditioned) -> bool:
    """Whether the guide's values are all that is random in the model, and none is enumerated.

    Others differ between any two runs: noise, dropout, latent sites that a poutine.block hides.
    """
    for name, site in run.sites.items():
        if is_latent(site) and (name not in run.values or site["infer"].get("enumerate")):
            return False
    before, values = random_states(), {name: site["value"] for name, site in run.sites.items()}
    run_plainly(model, values, (), {}, Minibatches())
    return same_states(before, random_states())


def _check(
    model: Program, guide: Program, single: Sites, particles: Any, size: int, batched: bool = False
) -> None:
    """Compare the model inside ``particles``, a plate of S, with runs for each of them."""

    def log_probs(sites: Sites) -> dict[str, Tensor]:
        return {name: site_log_prob(site)[1] for name, site in with_density(sites).items()}

    vectorized = _vectorized(model, guide, particles)
    values, indices = {}, {}
    for name, site in vectorized.items():
        if site_is_subsample(site):
            indices[name] = site["value"]
        elif not site["is_observed"]:
            values[name] = _per_particle(site, single[name]["value"].shape, size)
    given: Any = model, log_probs, values, size, (), {}
    try:
        expected = run_particles(*given, minibatches=Minibatches(indices), sampling=True)
    except CannotBatch:
        if batched:
            raise
        with pyro.validation_enabled(False):
            expected = run_in_loop(*given, minibatches=Minibatches(indices))
    for name, wanted in expected.items():
        if name in vectorized:
            _compare(vectorized[name], wanted)


def _vectorized(model: Program, guide: Program, particles: Any) -> Sites:
    """The sample sites of a model with vectorised particles, as ``Trace_ELBO`` runs it."""
    ran, where = Conditioned({}, Minibatches()), ""
    try:
        with pyro.validation_enabled(False):  # Pyro's own messages do not name the cause
            with ran:
                particles(guide)()
            ran = Conditioned({n: x["value"] for n, x in ran.sites.items()}, Minibatches())
            with ran:
                particles(model)()
            for name, site in ran.sites.items():
                if not site_is_subsample(site):
                    where = f"in the log_prob of the site {name!r}"
                    site["log_prob"] = site_log_prob(site)[1]
    except (RuntimeError, ValueError) as error:
        names = list(ran.sites)
        where = where or (f"after the site {names[-1]!r}" if names else "before its first site")
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        reason = textwrap.shorten(reason, 80, placeholder=" ...")
        raise _wrong(f"the program fails {where}: {reason}") from error
    return ran.sites


def _per_particle(site: Site, shape: torch.Size, size: int) -> Tensor:
    """The value of a latent site with the particles first and no padding, (S, *shape)."""
    value = site["value"]
    if value.numel() == shape.numel():  # the same for all particles
        return value.reshape(shape).expand(size, *shape)
    if value.numel() != size * shape.numel():
        raise _wrong(
            f"the latent site {site['name']!r} has shape {tuple(value.shape)}, but one draw has "
            f"{tuple(shape)}: it broadcasts"
        )
    return value.reshape(size, *shape)


def _compare(site: Site, wanted: Tensor) -> None:
    actual = site["log_prob"].to(wanted)
    if actual.numel() == wanted.numel():
        # rounding grows with the largest term; a wrong shape moves terms by about their spread
        finite = wanted.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
        spread = (finite - finite[:1]).abs().max()
        atol = float(torch.finfo(wanted.dtype).eps ** 0.5 * finite.abs().max() + 1e-3 * spread)
        if torch.allclose(actual.reshape(wanted.shape), wanted, 0.0, atol, equal_nan=True):
            return
    raise _wrong(
        f"the log_prob of the site {site['name']!r} has shape {tuple(actual.shape)} and differs from "
        f"one by one, {tuple(wanted.shape)}: the loss is wrong"
    )
