"""A Pyro program at many draws: traces, the log joint as a pure function, pieces of bounded size."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import pyro
import torch
from pyro import poutine
from pyro.infer.autoguide.initialization import InitMessenger
from pyro.poutine.indep_messenger import CondIndepStackFrame
from pyro.poutine.util import site_is_subsample
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from ..linalg.host import own_random_state
from .density import (
    Kind,
    LatentLayout,
    Site,
    Sites,
    feasible_value,
    site_kind,
    site_log_prob,
    sum_per_particle,
    with_density,
)
from .pyro_adapter import HidesMarked
from .run import (
    Args,
    CannotBatch,
    Kwargs,
    Minibatches,
    Program,
    Randomness,
    Values,
    run_in_loop,
    run_particles,
)
from .summed_out import summed_out

T = TypeVar("T")

MOST_NUMBERS = 2**20  # in the largest tensor of one piece: 8 MB in float64
#: what raises for a singular matrix, and what tells of it
CHECKED: dict[Any, Any] = {
    torch.linalg.cholesky: torch.linalg.cholesky_ex,
    torch.linalg.inv: torch.linalg.inv_ex,
    torch.inverse: torch.linalg.inv_ex,
    torch.linalg.solve: torch.linalg.solve_ex,
}


@dataclass(frozen=True)
class BatchedSite:
    """One sample site of S particles: tensors (S, ...), log probabilities (S, *batch_shape) in nats
    with scale and mask, and with neither; ``plates`` is Pyro's stack of plate frames."""

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
    model: Program,
    values: Values,
    args: Args = (),
    kwargs: Kwargs | None = None,
    *,
    num_particles: int | None = None,
    indices: Values | None = None,
    randomness: Randomness = "different",
    chunk_size: int | None = None,
) -> BatchedTrace:
    """Run ``model`` once under ``vmap`` with the sites in ``values`` fixed (they stay latent).

    Latent sites that are not in ``values`` are drawn from the model.

    Args:
        values: *constrained* value by site, (S, *batch_shape, *event_shape).
        num_particles: S, needed only where ``values`` is empty.
        indices: minibatch (n,) of a subsampled plate by name, the same for all particles; drawn
            once where neither this nor the model gives it.
        randomness: ``"different"`` draws for each particle, or the ``"same"`` for all.
        chunk_size: run at most that many particles at a time, to bound memory.

    Raises:
        CannotBatch: a RuntimeError, when the model cannot run under ``vmap``, or draws a site whose
            sampler has no batching rule (Beta, Dirichlet, LKJ, von Mises).
    """
    if num_particles is None:
        if not values:
            raise ValueError("Give num_particles, because `values` fixes no site to read it from.")
        num_particles = len(next(iter(values.values())))
    recorded: dict[str, BatchedSite] = {}

    def tensors(sites: Sites) -> dict[str, dict[str, Tensor]]:
        recorded.clear()
        for name, site in without_plates(sites).items():
            value, fn = site["value"], site["fn"]
            # Improper priors put their log_prob on the CPU, whatever their value lies on.
            unscaled, log_prob = (x.to(value.device) for x in site_log_prob(site))
            how = site["scale"], site["mask"], fn.event_dim, site["cond_indep_stack"]
            recorded[name] = BatchedSite(site_kind(site), value, log_prob, unscaled, *how)
        return {
            name: {key: x for key, x in vars(site).items() if isinstance(x, Tensor)}
            for name, site in recorded.items()
        }

    minibatches = Minibatches(indices)
    how: Any = {"randomness": randomness, "sampling": randomness == "different"}
    how |= {"minibatches": minibatches, "chunk_size": chunk_size}
    batched = run_particles(model, tensors, values, num_particles, args, kwargs or {}, **how)
    sites = {name: replace(site, **batched[name]) for name, site in recorded.items()}
    return BatchedTrace(sites, dict(minibatches))


def _log_joint(sites: Sites) -> Tensor:
    # Improper priors put their log_prob on the CPU, whatever their value lies on.
    terms = [site_log_prob(x)[1].sum().to(x["value"].device) for x in with_density(sites).values()]
    return torch.stack(terms).sum()


class ModelDensity:
    """The log joint density of a Pyro model over its unconstrained latent space, batched.

        density(theta)_s = log p(y, z(theta_s)) + log |det dz/dtheta (theta_s)|

    It is a pure function of ``theta`` (S, d) for fixed arguments, in nats: ``torch.func.grad`` and
    ``jacrev`` go through it. Parameters (``pyro.param``) and minibatches are looked up at
    each call. Do not use it where the support of a site depends on another latent site.

    Args:
        model: a Pyro model; it is run once here, to find its sites.
        args: its positional arguments.
        kwargs: its keyword arguments.
        indices: minibatches (n,) by plate; without them a subsampled plate is drawn anew at each call.
        init_loc_fn: value of a latent site in the prototype, as in Pyro's autoguides.
        chunk_size: run at most that many particles at a time.

    Attributes:
        dim: d, the length of ``theta``.
        initial: theta of the prototype, (d,).
        unpack: theta (S, d) to constrained values (S, *shape) by site.
        pack: constrained values (S, *shape) by site to theta (S, d).
        program: the model with its arguments, enumerated sites summed out.

    Raises:
        ValueError: when a latent site is discrete or there is none.

    Example:
        >>> import torch, pyro, pyro.distributions as dist
        >>> def model(y):
        ...     scale = pyro.sample("scale", dist.Exponential(1.0))
        ...     pyro.sample("y", dist.Normal(0.0, scale), obs=y)
        >>> density = ModelDensity(model, (torch.tensor(2.0),))
        >>> density.dim, density(torch.zeros(3, 1)).shape
        (1, torch.Size([3]))
        >>> torch.func.grad(lambda theta: density(theta[None])[0])(torch.zeros(1))
        tensor([3.])
    """

    def __init__(
        self,
        model: Program,
        args: Args = (),
        kwargs: Kwargs | None = None,
        *,
        indices: Values | None = None,
        init_loc_fn: Callable[[Site], Tensor] = feasible_value,
        chunk_size: int | None = None,
    ) -> None:
        # a first look; in the middle of all supports a model may be NaN
        with poutine.block(), torch.no_grad(), pyro.validation_enabled(False):
            whole = poutine.trace(model)
            prototype = poutine.trace(InitMessenger(init_loc_fn)(HidesMarked()(whole)))
            trace: Any = prototype.get_trace(*args, **(kwargs or {}))
        self.layout = layout = LatentLayout(trace)
        self.dim, self.pack, self.unpack = layout.dim, layout.pack, layout.unpack
        initial = {name: trace.nodes[name]["value"][None] for name in layout.transforms}
        self.initial: Tensor = layout.pack(initial)[0]
        self.model = summed_out(model, whole.trace.nodes)
        self.program = partial(self.model, *args, **(kwargs or {}))
        self._indices = indices
        self._how: Any = {"randomness": "same", "chunk_size": chunk_size}

    def trace(self, theta: Tensor) -> BatchedTrace:
        """The sites of the model at theta (S, d)."""
        return batched_trace(self.program, self.unpack(theta), indices=self._indices, **self._how)

    def __call__(self, theta: Tensor) -> Tensor:
        """The log joint density at theta (S, d), (S,), in nats."""
        values, log_det = self.layout.unpack_with_log_det(theta)
        how = self._how | {"minibatches": Minibatches(self._indices)}
        return run_particles(self.program, _log_joint, values, len(theta), (), {}, **how) + log_det


def map_draws(
    program: Program,
    reduce: Callable[[Sites], T],
    values: Values,
    num_samples: int,
    batch_size: int | None = None,
) -> T:
    """``reduce`` of the sites of ``program`` at each draw, stacked along a new first dimension.

    A program that ``vmap`` cannot run, runs once for each draw.

    Args:
        program: a model or a guide, its arguments bound.
        reduce: maps the sites of one draw, without those of plates, to a pytree of tensors.
        values: constrained values by site, (S, ...); other sites are drawn.
        num_samples: S.
        batch_size: draws that run at once; ``None`` for as many as a million numbers allow.
    """
    names: set[str] = set()

    def chosen(sites: Sites) -> T:
        sites = without_plates(sites)
        if names and (changed := names ^ sites.keys()):
            raise ValueError(
                f"The sites {sorted(changed)} are there in some draws and not in others, so they "
                "cannot be stored as arrays. Write the model with the same sites in every run."
            )
        names.update(sites)
        return reduce(sites)

    how: Any = {"minibatches": Minibatches()}
    with torch.no_grad(), warnings.catch_warnings():
        # torch.binomial under vmap resizes its own output, correctly, and warns about it.
        warnings.filterwarnings("ignore", "An output with one or more elements was resized")
        try:
            if batch_size is None:
                one = {name: x[:1] for name, x in values.items()}
                with own_random_state(), Largest() as largest:
                    run_particles(program, chosen, one, 1, (), {}, sampling=True, **how)
                batch_size = max(1, MOST_NUMBERS // largest.numel)
            found: Any = None
            for start in range(0, num_samples, batch_size):
                size = min(batch_size, num_samples - start)
                some = {name: x[start : start + size] for name, x in values.items()}
                part = run_particles(program, chosen, some, size, (), {}, sampling=True, **how)
                if found is None:
                    found = tree_map(lambda x: x.new_empty(num_samples, *x.shape[1:]), part)
                # copied, since results that are kept between large tensors scatter the heap
                tree_map(lambda x, y: x.narrow(0, start, size).copy_(y), found, part)  # noqa: B023
            return found
        except CannotBatch:
            # A program that is wrong rather than unbatchable shows its own error in the loop.
            return run_in_loop(program, chosen, values, num_samples, (), {}, **how)


def without_plates(sites: Sites) -> Sites:
    """The sites but for the indices of plates."""
    return {name: site for name, site in sites.items() if not site_is_subsample(site)}


class NaNWhereSingular(TorchFunctionMode):
    """Factors, inverses and solutions of a singular matrix are NaN, not an error for all draws."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if (checked := CHECKED.get(func)) is None:
            return func(*args, **(kwargs or {}))
        found, info = checked(*args, **(kwargs or {}))
        bad = (info != 0).reshape(info.shape + (1,) * (found.dim() - info.dim()))
        return found.masked_fill(bad, torch.nan)


class Largest(TorchFunctionMode):
    """The size of the largest tensor that differs between draws, for one draw, under ``vmap``."""

    numel = 1

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.numel() > self.numel:
            try:
                result[(0,) * result.dim()].item()
            except RuntimeError:  # one value for each draw
                self.numel = result.numel()
        return result
