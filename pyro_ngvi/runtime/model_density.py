"""The log joint density of a Pyro model over its unconstrained space, as a pure batched function.

    log p~(theta) = log p(y, z(theta)) + log |det dz/dtheta|,    z = transform(theta).

The model is written for one draw (``X @ w``) and needs no plate for the particles.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from pyro import poutine
from pyro.infer.autoguide.initialization import InitMessenger
from torch import Tensor

from .density import BatchedTrace, batched_trace
from .layout import LatentLayout, feasible_value
from .marked import HidesMarked
from .summed_out import summed_out
from .vmap import Site, Sites

__all__ = ["ModelDensity"]


class ModelDensity:
    """The log joint density of a Pyro model over its unconstrained latent space, batched.

        density(theta)_s = log p(y, z(theta_s)) + log |det dz/dtheta (theta_s)|

    It is a pure function of ``theta`` (S, d) for fixed arguments: ``torch.func.grad`` and
    ``jacrev`` go through it. Parameters (``pyro.param``) and minibatches are looked up at
    each call. Do not use it where the support of a site depends on another latent site.

    Args:
        model: a Pyro model; it is run once here, to find its sites.
        args: its positional arguments.
        kwargs: its keyword arguments.
        indices: minibatches by plate, see :func:`batched_trace`; without them a subsampled
            plate is drawn anew at each call.
        init_loc_fn: value of a latent site in the prototype, as in Pyro's autoguides.
        chunk_size: run at most that many particles at a time.

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
        model: Callable[..., Any],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        indices: Mapping[str, Tensor] | None = None,
        init_loc_fn: Callable[[Site], Tensor] = feasible_value,
        chunk_size: int | None = None,
    ) -> None:
        self.args = args
        self.kwargs = dict(kwargs or {})
        self.indices = dict(indices or {})
        self.chunk_size = chunk_size
        with poutine.block(), torch.no_grad():
            whole = poutine.trace(model)
            prototype = poutine.trace(InitMessenger(init_loc_fn)(HidesMarked()(whole)))
            trace = prototype.get_trace(*args, **self.kwargs)
        self.model = summed_out(model, whole.trace.nodes)
        self.layout = LatentLayout(trace)
        nodes: Sites = dict(trace.nodes)
        initial = {name: nodes[name]["value"][None] for name in self.layout.transforms}
        self.initial: Tensor = self.layout.pack(initial)[0]
        """theta of the prototype, (d,)."""

    @property
    def dim(self) -> int:
        """d, the length of ``theta``."""
        return self.layout.dim

    def unpack(self, theta: Tensor) -> dict[str, Tensor]:
        """theta (S, d) to constrained values (S, *shape) by site."""
        return self.layout.unpack(theta)

    def pack(self, values: Mapping[str, Tensor]) -> Tensor:
        """Constrained values (S, *shape) by site to theta (S, d)."""
        return self.layout.pack(values)

    def trace(self, theta: Tensor) -> BatchedTrace:
        """The sites of the model at theta (S, d)."""
        return self._trace(self.layout.unpack(theta))

    def _trace(self, values: Mapping[str, Tensor]) -> BatchedTrace:
        return batched_trace(
            self.model,
            values,
            self.args,
            self.kwargs,
            indices=self.indices,
            randomness="same",
            chunk_size=self.chunk_size,
        )

    def __call__(self, theta: Tensor) -> Tensor:
        """The log joint density at theta (S, d), (S,), in nats."""
        values, log_det = self.layout.unpack_with_log_det(theta)
        return self._trace(values).log_joint() + log_det

    def per_example(self, theta: Tensor) -> dict[str, Tensor]:
        """The terms of the log joint by site, (S, *batch_shape), with scale and mask.

        All together they sum to ``density(theta)`` without the log-Jacobian.
        """
        sites = self.trace(theta).sites.items()
        return {name: site.log_prob for name, site in sites if site.kind != "deterministic"}
