"""A Pyro model as a pure batched function.

:func:`batched_trace` runs a model once under ``torch.func.vmap``, with the latent sites of S
particles fixed.  The model is written for one draw (``X @ w``) and needs no plate for the particles.
"""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import pyro.distributions as dist
import torch
from pyro.distributions.util import scale_and_mask
from pyro.poutine.indep_messenger import CondIndepStackFrame
from pyro.poutine.util import site_is_subsample
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .pyro_adapter import layers_of
from .vmap import Minibatches, Randomness, Site, Sites, run_particles, sum_per_particle

Kind = Literal["latent", "observed", "deterministic", "factor"]


def site_kind(site: Site) -> Kind:
    """What a recorded sample site is: latent, observed, deterministic or factor."""
    if not site["is_observed"]:
        return "latent"
    if (site["infer"] or {}).get("_deterministic") or _is_function(site["fn"]):
        return "deterministic"
    return "factor" if isinstance(innermost(site["fn"]), dist.Unit) else "observed"


def with_density(sites: Sites) -> Sites:
    """The sites that have a term in the log joint: no index of a plate, nothing deterministic."""
    return {
        name: site
        for name, site in sites.items()
        if not site_is_subsample(site) and site_kind(site) != "deterministic"
    }


def _is_function(fn: Any) -> bool:
    """Whether a distribution is what Pyro's reparametrisations leave of a site: a point, masked out."""
    *outer, base = layers_of(fn)
    masked = any(isinstance(f, dist.MaskedDistribution) and f._mask is False for f in outer)
    return masked and isinstance(base, dist.Delta)


def innermost(fn: Any) -> Any:
    """The distribution within ``to_event`` and ``mask``."""
    return layers_of(fn)[-1]


class _MaskedWrites(TorchFunctionMode):
    """Writes ``x[mask] = number``, which has no rule under ``vmap``, as ``masked_fill_``."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.__setitem__:
            x, mask, value = args
            if getattr(mask, "dtype", None) is torch.bool and isinstance(value, int | float):
                return x.masked_fill_(mask, value)
        return func(*args, **(kwargs or {}))


def _evaluated(site: Site) -> Tensor:
    fn = site["fn"]
    # torch's Multinomial writes by a mask; only there, because a mode makes every call slower
    with _MaskedWrites() if isinstance(innermost(fn), dist.Multinomial) else nullcontext():
        return fn.log_prob(site["value"], *site["args"], **site["kwargs"])


def site_log_prob(site: Site) -> tuple[Tensor, Tensor]:
    """The log probability of a recorded site in nats: unscaled, and with scale and mask."""
    try:
        log_prob = _evaluated(site)
        return log_prob, scale_and_mask(log_prob, site["scale"], site["mask"])
    except RuntimeError as error:
        error.add_note(f"in the log_prob of the site {site['name']!r}")
        raise


@dataclass(frozen=True)
class BatchedSite:
    """One sample site of S particles.

    ``value`` is (S, *batch_shape, *event_shape); ``log_prob`` (with scale and mask) and
    ``unscaled_log_prob`` (with neither) are (S, *batch_shape), in nats. ``scale`` is a number or a
    tensor (S, ...), ``mask`` None, a bool or a tensor (S, ...). ``plates`` is Pyro's stack of
    plate frames.
    """

    kind: Kind
    value: Tensor
    log_prob: Tensor
    unscaled_log_prob: Tensor
    scale: float | Tensor
    mask: bool | Tensor | None
    event_dim: int
    plates: tuple[CondIndepStackFrame, ...]

    @property
    def log_prob_sum(self) -> Tensor:
        """``log_prob`` summed over the batch, (S,)."""
        return sum_per_particle(self.log_prob)


@dataclass(frozen=True)
class BatchedTrace:
    """The sample sites of S particles in the order of the model, and the minibatches they share."""

    sites: dict[str, BatchedSite]
    indices: dict[str, Tensor] = field(default_factory=dict)

    def log_joint(self) -> Tensor:
        """The sum of all sites' log probabilities, (S,), in nats."""
        return torch.stack([site.log_prob_sum for site in self.sites.values()]).sum(0)


def batched_trace(
    model: Callable[..., Any],
    values: Mapping[str, Tensor],
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    num_particles: int | None = None,
    indices: Mapping[str, Tensor] | None = None,
    randomness: Randomness = "different",
    chunk_size: int | None = None,
) -> BatchedTrace:
    """Run ``model`` once under ``vmap`` with the sites in ``values`` fixed (they stay latent).

    Latent sites that are not in ``values`` are drawn from the model.

    Args:
        values: site name to *constrained* value, (S, *batch_shape, *event_shape).
        num_particles: S, needed only where ``values`` is empty.
        indices: minibatch (n,) of a subsampled plate by name, the same for all particles; drawn
            once where it is not given. A minibatch that the model itself passes is kept.
        randomness: ``"different"`` draws for each particle, or the ``"same"`` for all.
        chunk_size: run at most that many particles at a time, to bound memory.

    Raises:
        ValueError: when S is not known.
        RuntimeError: when the model cannot run under ``vmap``: it brings the value of a latent
            site into Python (``.item()``, ``if``), writes it in place into another tensor, or
            draws a site whose sampler has no batching rule (Beta, Dirichlet, LKJ, von Mises);
            then use ``pyro.infer.Predictive`` or ``Trace_ELBO``.

    Example:
        >>> import torch, pyro, pyro.distributions as dist
        >>> def model(X, y):
        ...     w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        ...     with pyro.plate("data", len(y)):
        ...         pyro.sample("y", dist.Normal(X @ w, 1.0), obs=y)
        >>> trace = batched_trace(model, {"w": torch.zeros(8, 2)}, (torch.eye(2), torch.ones(2)))
        >>> trace.sites["y"].log_prob.shape, trace.log_joint().shape
        (torch.Size([8, 2]), torch.Size([8]))
    """
    if num_particles is None:
        if not values:
            raise ValueError("Give num_particles, because `values` fixes no site to read it from.")
        num_particles = len(next(iter(values.values())))
    recorded: Sites = {}

    def tensors(sites: Sites) -> dict[str, dict[str, Tensor]]:
        recorded.clear()
        result = {}
        for name, site in sites.items():
            if site_is_subsample(site):
                continue
            recorded[name] = site
            # Improper priors put their log_prob on the CPU, whatever their value lies on.
            unscaled, log_prob = (x.to(site["value"].device) for x in site_log_prob(site))
            fields = {"value": site["value"], "scale": site["scale"], "mask": site["mask"]}
            fields |= {"log_prob": log_prob, "unscaled_log_prob": unscaled}
            result[name] = {key: x for key, x in fields.items() if isinstance(x, Tensor)}
        return result

    minibatches = Minibatches(indices)
    batched = run_particles(
        model,
        tensors,
        values,
        num_particles,
        args,
        kwargs or {},
        minibatches=minibatches,
        randomness=randomness,
        sampling=randomness == "different",
        chunk_size=chunk_size,
    )
    sites = {}
    for name, site in recorded.items():
        fields = {"value": site["value"], "scale": site["scale"], "mask": site["mask"]}
        fields |= batched[name]
        sites[name] = BatchedSite(
            kind=site_kind(site),
            event_dim=site["fn"].event_dim,
            plates=site["cond_indep_stack"],
            **fields,
        )
    return BatchedTrace(sites, dict(minibatches))
