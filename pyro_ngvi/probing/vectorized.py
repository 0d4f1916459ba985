"""Is a model right under Pyro's vectorised particles?  See :func:`check_vectorized`.

Do not use it for models that draw random numbers of their own or are enumerated: there is nothing
to compare with.
"""

import textwrap
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pyro
import torch
from pyro import poutine
from pyro.poutine.indep_messenger import CondIndepStackFrame
from pyro.poutine.messenger import Messenger
from pyro.poutine.util import site_is_subsample
from torch import Tensor

from ..linalg.host import own_random_state
from ..runtime.density import Site, Sites, free_dim, is_latent, site_log_prob, with_density
from ..runtime.model_density import batched_trace
from ..runtime.pyro_adapter import has_model, model_as_given
from ..runtime.run import (
    CannotBatch,
    Conditioned,
    Minibatches,
    run_both,
    run_in_loop,
    run_particles,
    run_plainly,
)

Program = Callable[..., Any]

_REMEDY = "Write `(X * w).sum(-1)`, or take BatchedELBO or vectorize_particles=False."


class BroadcastError(ValueError):
    """A model is wrong with vectorised particles; the message names the site."""


def check_vectorized(
    model: Program,
    guide: Program,
    *args: Any,
    num_particles: int = 2,
    **kwargs: Any,
) -> None:
    """Check that a model is right under ``Trace_ELBO(vectorize_particles=True)``.

    Pyro's vectorised particles are a plate around the model: a latent vector ``w`` of d elements
    arrives with shape (S, 1, ..., d), and ``X @ w`` then fails or, worse, broadcasts to a wrong
    loss. This draws S particles so, and compares each site's log probability, particle by
    particle, with that of the model run under ``vmap``, or one by one where ``vmap`` cannot run it.
    ``BatchedELBO`` needs no such check. The guides of pyro_ngvi do it themselves at their first
    vectorised call, unless they are part of an ``AutoGuideList`` or ``vmap`` cannot run the model.

    Args:
        num_particles: S, at least 2.

    Raises:
        ValueError: naming the first site that differs, and its shape.

    Example:
        >>> import torch, pyro, pyro.distributions as dist
        >>> from pyro.infer.autoguide import AutoNormal
        >>> def model(X):
        ...     w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        ...     with pyro.plate("data", 3):
        ...         pyro.sample("y", dist.Normal((X * w).sum(-1), 1.0), obs=torch.zeros(3))
        >>> check_vectorized(model, AutoNormal(model), torch.ones(3, 2))
    """
    if num_particles < 2:
        raise ValueError(f"num_particles is {num_particles}; a check needs at least 2.")
    programs = partial(model, *args, **kwargs), partial(guide, *args, **kwargs)
    with poutine.block(), torch.no_grad():
        single = run_both(*programs, (), {}, Minibatches())[1].sites
        particles = pyro.plate("_particles", num_particles, dim=free_dim(single))
        _check(*programs, single, particles, num_particles)


def check_vectorized_call(
    guide: Any, frame: CondIndepStackFrame, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """:func:`check_vectorized` for an autoguide that is being called inside the plate ``frame``.

    It raises only where the model can be compared, and leaves random state, parameter store and
    the handlers around the guide alone.
    """
    if not has_model(guide) or guide.master is not None:
        return  # a part of a list does not know the guide of the other sites
    store, error = pyro.get_param_store(), None
    known = set(store.keys())
    with (
        own_random_state(),
        poutine.block(),
        torch.no_grad(),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # the run itself says the same
        try:
            model = partial(model_as_given(guide), *args, **kwargs)
            guide = partial(guide, *args, **kwargs)
            _, single = run_both(model, guide, (), {}, Minibatches())
            if _is_comparable(model, single):
                _check(model, guide, single.sites, _Inside(frame), frame.size)
        except BroadcastError as found:
            error = found
        except Exception:  # whatever keeps the two from being compared is no fault of the model
            pass
    for name in set(store.keys()) - known:
        del store[name]
    if error is not None:
        raise error


class _Inside(Messenger):
    """As the vectorised plate of ``frame``, which is active outside and cannot be entered again."""

    def __init__(self, frame: CondIndepStackFrame) -> None:
        super().__init__()
        self.frame = frame

    def __call__(self, fn: Program) -> Program:
        return poutine.broadcast(super().__call__(fn))

    def _pyro_sample(self, msg: Site) -> None:
        msg["cond_indep_stack"] = (self.frame,) + msg["cond_indep_stack"]


def _is_comparable(model: Program, single: Conditioned) -> bool:
    """Whether the guide gives all that is random in the model, and ``vmap`` can run it."""
    latents, indices = {}, {}
    for name, site in single.sites.items():
        if site_is_subsample(site):
            indices[name] = site["value"]
        elif is_latent(site):
            if name not in single.values or site["infer"].get("enumerate"):
                return False
            latents[name] = site["value"]
    # Numbers that are drawn although all sites are given differ between two runs of any kind: noise,
    # dropout, or latent sites that a poutine.block hides.
    before = _random_state()
    run_plainly(model, latents | indices, (), {}, Minibatches())
    if any(not torch.equal(a, b) for a, b in zip(before, _random_state(), strict=True)):
        return False
    twice = {name: value.expand(2, *value.shape) for name, value in latents.items()}
    batched_trace(model, twice, num_particles=2, indices=indices)
    return True


def _random_state() -> list[Tensor]:
    on_devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return [torch.get_rng_state(), *on_devices]


def _check(
    model: Program, guide: Program, single: Sites, particles: Any, num_particles: int
) -> None:
    """Compare the model inside ``particles``, a plate of S, with the model run for each of them."""
    vectorized = _vectorized_trace(model, guide, particles)
    values, indices = {}, {}
    for name, site in vectorized.items():
        if site_is_subsample(site):
            indices[name] = site["value"]
        elif not site["is_observed"]:
            values[name] = _per_particle(site, single[name], num_particles)
    given: Any = model, _log_probs, values, num_particles, (), {}
    try:
        expected = run_particles(*given, minibatches=Minibatches(indices), sampling=True)
    except CannotBatch:
        with pyro.validation_enabled(False):
            expected = run_in_loop(*given, minibatches=Minibatches(indices))
    for name, wanted in expected.items():
        if name in vectorized:
            _compare(vectorized[name], wanted)


def _log_probs(sites: Sites) -> dict[str, Tensor]:
    return {name: site_log_prob(site)[1] for name, site in with_density(sites).items()}


def _vectorized_trace(model: Program, guide: Program, particles: Any) -> Sites:
    """The sample sites of a model with vectorised particles, as ``Trace_ELBO`` runs it."""
    recorder = poutine.trace(particles(guide))
    with pyro.validation_enabled(False):  # Pyro's own messages do not name the cause
        try:
            draws = recorder.get_trace()
            recorder = poutine.trace(poutine.replay(particles(model), trace=draws))
            recorder()
        except (RuntimeError, ValueError) as error:
            names = list(_sample_sites(recorder.trace))
            where = f"after the site {names[-1]!r}" if names else "before its first site"
            raise _failure(where, error) from error
        sites = _sample_sites(recorder.trace)
        for name, site in sites.items():
            if site_is_subsample(site):
                continue
            try:
                site["log_prob"] = site_log_prob(site)[1]
            except (RuntimeError, ValueError) as error:
                raise _failure(f"in the log_prob of the site {name!r}", error) from error
    return sites


def _sample_sites(trace: Any) -> Sites:
    return {name: site for name, site in trace.nodes.items() if site["type"] == "sample"}


def _failure(where: str, error: Exception) -> BroadcastError:
    reason = next(iter(str(error).splitlines()), type(error).__name__)
    reason = textwrap.shorten(reason, 80, placeholder=" ...")
    return BroadcastError(
        f"With vectorised particles the program fails {where}: {reason}. {_REMEDY}"
    )


def _per_particle(site: Site, single: Site, num_particles: int) -> Tensor:
    """The value of a latent site with the particles first and no padding, (S, *shape)."""
    value, shape = site["value"], single["value"].shape
    if value.numel() == shape.numel():  # the same for all particles
        return value.reshape(shape).expand(num_particles, *shape)
    if value.numel() != num_particles * shape.numel():
        raise BroadcastError(
            f"With vectorised particles the latent site {site['name']!r} has shape "
            f"{tuple(value.shape)}, but one draw has {tuple(shape)}: it broadcasts. {_REMEDY}"
        )
    return value.reshape(num_particles, *shape)


def _compare(site: Site, wanted: Tensor) -> None:
    actual = site["log_prob"].to(wanted)
    if actual.numel() == wanted.numel():
        # Rounding grows with the largest term; a wrong shape mixes the particles up, and moves the
        # terms by about their spread over the particles.
        finite = wanted.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
        spread = (finite - finite[:1]).abs().max()
        allowed = torch.finfo(wanted.dtype).eps ** 0.5 * finite.abs().max() + 1e-3 * spread
        close = torch.isclose(
            actual.reshape(wanted.shape), wanted, rtol=0.0, atol=float(allowed), equal_nan=True
        )
        if close.all():
            return
    raise BroadcastError(
        f"With vectorised particles the log_prob of the site {site['name']!r} has shape "
        f"{tuple(actual.shape)} and differs from one by one, {tuple(wanted.shape)}: the loss is "
        f"wrong. {_REMEDY}"
    )
