"""Walsh-Hadamard reparameterisation of Gaussian sites: from W to the few numbers g that make it."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro.infer.reparam.reparam import Reparam
from torch import Tensor, nn
from torch.distributions import Transform, constraints

from ..linalg.host import constant
from ..linalg.walsh_hadamard_matrix import WalshHadamardMatrix, matrix_for


def normal_of(fn: Any) -> tuple[Tensor, Tensor] | None:
    """loc and scale, in the shape of a value, of a distribution of independent normals; else None."""
    shape = fn.shape()
    while isinstance(fn, torch.distributions.Independent):
        fn = fn.base_dist
    if not isinstance(fn, torch.distributions.Normal):
        return None
    return fn.loc.expand(shape), fn.scale.expand(shape)


def hold_diagonals(module: nn.Module, suffix: str, signs: Any, train: bool) -> None:
    """Make the diagonals parameters of ``module``, or buffers that nobody trains."""
    for side, diagonal in zip(("left", "right"), signs, strict=True):
        if train:
            setattr(module, side + suffix, nn.Parameter(diagonal))
        else:
            module.register_buffer(side + suffix, diagonal)


def seed_of(name: str) -> int:
    """A seed for the signs of a site, the same in every process."""
    return zlib.crc32(name.encode())


class WalshHadamardTransform(Transform):
    """g (..., num_g) to W = loc + scale o U(g) (..., *shape), the event shape of a site.

    ``inv`` takes W to the g whose matrix lies nearest, made as long as W.  ``log_abs_det_jacobian`` is
    log p(g) - log p(W) with the priors of both, which makes the joint density of W that of g.
    """

    domain = constraints.real_vector
    bijective = False

    def __init__(
        self,
        matrix: WalshHadamardMatrix,
        loc: Tensor,
        scale: Tensor,
        diagonals: Callable[[], tuple[Tensor, Tensor]],
        g_scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.matrix, self.diagonals, self.g_scale = matrix, diagonals, g_scale
        self.loc, self.scale = loc, scale

    @property
    def codomain(self) -> Any:
        return constraints.independent(constraints.real, len(self.matrix.shape))

    def _call(self, x: Tensor) -> Tensor:
        return constant(self.loc) + constant(self.scale) * self.matrix.dense(x, *self.diagonals())

    def _entries(self, value: Tensor) -> Tensor:
        return value.flatten(-len(self.matrix.shape))

    def _inverse(self, y: Tensor) -> Tensor:
        U, diagonals = (y - self.loc) / self.scale, self.diagonals()
        g = self.matrix.projection(U, *diagonals)
        near = self.matrix.dense(g, *diagonals)
        long, short = (self._entries(x).square().sum(-1) for x in (U, near))
        return g * torch.where(short > 0.0, long / short, 1.0).sqrt().unsqueeze(-1)

    def log_abs_det_jacobian(self, x: Tensor, y: Tensor) -> Tensor:
        p_g = dist.Normal(0.0, self.g_scale, validate_args=False).log_prob(x).sum(-1)
        prior = dist.Normal(constant(self.loc), constant(self.scale), validate_args=False)
        return p_g - self._entries(prior.log_prob(y)).sum(-1)

    def stddev(self, g_covariance: Tensor) -> Tensor:
        """sd of each entry of W, from the variances (num_g,) or the covariance (num_g, num_g) of g."""
        return self.scale * self.matrix.variance(g_covariance, *self.diagonals()).sqrt()


class WalshHadamardReparam(Reparam):
    r"""A Gaussian site made of few numbers g, for ``poutine.reparam``.

    A site W ~ N(loc, scale^2), entry by entry, of shape (n, m) becomes W = loc + scale o U(g), with
    g ~ N(0, g_scale^2 I) and U of :mod:`pyro_ngvi.linalg.walsh_hadamard_matrix` (Rossi, Marmin &
    Filippone 2020): the site "W" becomes a deterministic one, with the latent "W_g" (num_g,) in its
    place; loc and scale may depend on other sites.  The diagonals start as random signs, a function of
    the name of the site, and are parameters "W_left" and "W_right", left to ``others`` by
    natural-gradient optimizers; with ``NGVB`` pass ``averaging=False`` while they are trained.

    This is another model, with another evidence, whose bound says nothing of yours, and W has no
    density.  Not for sites that need every entry to move on its own.

    Args:
        g_scale: prior sd of g.
        train_diagonals: ``False`` keeps the signs.

    Raises:
        ValueError: at a run of the model, for a site that is observed, not Gaussian, or whose event
            shape is empty.

    Example:
        >>> import pyro, torch, pyro.distributions as dist, pyro_ngvi as ngvi
        >>> from pyro import poutine
        >>> def model():
        ...     return pyro.sample("W", dist.Normal(0.0, 1.0).expand([50, 13]).to_event(2))
        >>> small = poutine.reparam(model, {"W": ngvi.nn.WalshHadamardReparam()})
        >>> trace = poutine.trace(small).get_trace()
        >>> trace.nodes["W_g"]["value"].shape, trace.nodes["W"]["value"].shape
        (torch.Size([64]), torch.Size([50, 13]))
    """

    def __init__(self, *, g_scale: float = 1.0, train_diagonals: bool = True) -> None:
        self.g_scale, self.train_diagonals = float(g_scale), train_diagonals

    def apply(self, msg: Any) -> Any:
        name, fn, value = msg["name"], msg["fn"], msg["value"]
        normal = normal_of(fn)
        if msg["is_observed"] or normal is None or not fn.event_dim:
            raise ValueError(
                f"WalshHadamardReparam is for latent sites of independent normals, declared as one "
                f"event by .to_event(...). The site {name!r} is {type(fn).__name__} with event shape "
                f"{tuple(fn.event_shape)}, {'observed' if msg['is_observed'] else 'latent'}."
            )
        loc, scale = normal
        matrix = matrix_for(fn.event_shape)
        signs: Any = matrix.signs(seed_of(name), loc)
        diagonals: Any = signs
        if self.train_diagonals:
            sides = zip(("left", "right"), signs, strict=True)
            diagonals = tuple(pyro.param(f"{name}_{side}", start) for side, start in sides)
            if any(d.shape != start.shape for d, start in zip(diagonals, signs, strict=True)):
                raise ValueError(
                    f"WalshHadamardReparam: the parameter store holds diagonals of another model for "
                    f"the site {name!r}. Call pyro.clear_param_store() first, or rename the site."
                )
        transform = WalshHadamardTransform(matrix, loc, scale, lambda: diagonals, self.g_scale)
        start = None
        if value is not None:  # of an init_loc_fn
            start = transform.inv(value)
            value._pyro_custom_init = False  # it is not lost, as Pyro would warn where W differs
        zero = loc.new_zeros(matrix.num_g)
        prior: Any = dist.Normal(zero, torch.full_like(zero, self.g_scale)).to_event(1)
        prior = prior.expand(fn.batch_shape)
        g = pyro.sample(f"{name}_g", prior, obs=start, infer={"is_observed": False})
        W = transform(g)
        delta = dist.Delta(W, event_dim=fn.event_dim).mask(False)
        return {"fn": delta, "value": W, "is_observed": True}
