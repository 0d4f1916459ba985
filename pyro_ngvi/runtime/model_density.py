"""A Pyro program at many draws: the log joint as a pure function, pieces of bounded size."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from pyro import poutine
from pyro.infer.autoguide.initialization import InitMessenger
from pyro.poutine.util import site_is_subsample
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from ..linalg.host import own_random_state
from .density import (
    LatentLayout,
    Site,
    Sites,
    feasible_value,
    site_log_prob,
    sum_per_particle,
)
from .pyro_adapter import HidesMarked
from .run import (
    Args,
    CannotBatch,
    Kwargs,
    Minibatches,
    Program,
    Values,
    run_in_loop,
    run_particles,
)
from .summed_out import summed_out

Parts = dict[str, dict[str, Tensor]]

MOST_NUMBERS = 2**20  # in the largest tensor of one piece: 8 MB in float64
#: what raises for a singular matrix, and what tells of it
CHECKED: dict[Any, Any] = {
    torch.linalg.cholesky: torch.linalg.cholesky_ex,
    torch.linalg.inv: torch.linalg.inv_ex,
    torch.inverse: torch.linalg.inv_ex,
    torch.linalg.solve: torch.linalg.solve_ex,
}


def log_joint(
    model: Program,
    values: Values,
    args: Args = (),
    kwargs: Kwargs | None = None,
    *,
    minibatches: Minibatches | None = None,
    chunk_size: int | None = None,
) -> Tensor:
    """The log joint (S,) of a model, in nats, at ``values`` (S, ...) of all its latent sites."""

    def terms(sites: Sites) -> dict[str, Tensor]:
        # Improper priors put their log_prob on the CPU, whatever their value lies on.
        return {
            n: site_log_prob(x)[1].to(x["value"].device) for n, x in without_plates(sites).items()
        }

    count = len(next(iter(values.values())))
    minibatches = Minibatches() if minibatches is None else minibatches
    how: Any = {"minibatches": minibatches, "randomness": "same", "chunk_size": chunk_size}
    found = run_particles(model, terms, values, count, args, kwargs or {}, **how)
    return torch.stack([sum_per_particle(log_prob) for log_prob in found.values()]).sum(0)


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
            In ``Minibatches`` the first call puts those that it draws, and later ones take them.
        init_loc_fn: value of a latent site in the prototype, as in Pyro's autoguides.
        chunk_size: run at most that many particles at a time.

    Attributes:
        dim: d, the length of ``theta``.
        initial: theta of the prototype, (d,).
        unpack: theta (S, d) to constrained values (S, *shape) by site.
        pack: constrained values (S, *shape) by site to theta (S, d).

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
        with poutine.block(), torch.no_grad():
            whole = poutine.trace(model)
            prototype = poutine.trace(InitMessenger(init_loc_fn)(HidesMarked()(whole)))
            trace: Any = prototype.get_trace(*args, **(kwargs or {}))
        self.layout = layout = LatentLayout(trace)
        self.dim, self.pack, self.unpack = layout.dim, layout.pack, layout.unpack
        initial = {name: trace.nodes[name]["value"][None] for name in layout.transforms}
        self.initial: Tensor = layout.pack(initial)[0]
        self.model = summed_out(model, whole.trace.nodes)
        self._args, self._kwargs = args, dict(kwargs or {})
        self._indices, self._chunk_size = indices, chunk_size

    def __call__(self, theta: Tensor) -> Tensor:
        """The log joint density at theta (S, d), (S,), in nats."""
        values, log_det = self.layout.unpack_with_log_det(theta)
        given = self._indices
        minibatches = given if isinstance(given, Minibatches) else Minibatches(given)
        how: Any = {"minibatches": minibatches, "chunk_size": self._chunk_size}
        return log_joint(self.model, values, self._args, self._kwargs, **how) + log_det


def map_draws(
    program: Program,
    reduce: Callable[[Sites], Parts],
    values: Values,
    num_samples: int,
    batch_size: int | None = None,
) -> Parts:
    """``reduce`` of the sites of ``program`` at each draw, stacked along a new first dimension.

    A program that ``vmap`` cannot run, runs once for each draw.

    Args:
        program: a model or a guide, its arguments bound.
        reduce: maps the sites of one draw, without those of plates, to tensors in two levels of names.
        values: constrained values by site, (S, ...); other sites are drawn.
        num_samples: S.
        batch_size: draws that run at once; ``None`` for as many as a million numbers allow.
    """
    names: set[str] = set()

    def chosen(sites: Sites) -> Parts:
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
            found: Parts | None = None
            for start in range(0, num_samples, batch_size):
                size = min(batch_size, num_samples - start)
                some = {name: x[start : start + size] for name, x in values.items()}
                part = run_particles(program, chosen, some, size, (), {}, sampling=True, **how)
                if found is None:
                    found = tree_map(lambda x: x.new_empty(num_samples, *x.shape[1:]), part)
                # copied, since results that are kept between large tensors scatter the heap
                tree_map(lambda x, y: x.narrow(0, start, size).copy_(y), found, part)  # noqa: B023
            return found or {}
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
