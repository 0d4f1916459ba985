r"""Normalizing flows behind an affine map: :class:`FlowFamily`, and its scores.

**Scores** at a fixed z take the inverse, phi = grad_lambda log q(z): one vmapped pass.  Where the
inverse takes d passes (inverse autoregressive flows) it is used once, without gradients, and the rest
is the path identity, one d x d solve a draw: with J = dz/deps,

    s = grad_z log q = J^-T grad_eps [log N(eps) - log |det J|],
    phi = -grad_lambda log |det J| - (dz/dlambda)' s.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev, vjp, vmap

from ..linalg.products import each_gradient
from .base import Tensors, log_normal
from .full_rank import FullRankNormal
from .mean_field import MeanFieldNormal
from .product import AugmentedGaussian

#: what the names of a flow's parameters begin with
PREFIX = "flow."

GAUSSIANS: dict[str, type[MeanFieldNormal | FullRankNormal]] = {
    "diagonal": MeanFieldNormal,
    "full": FullRankNormal,
}


class FlowFamily(AugmentedGaussian):
    """Densities of z = mu + A T(eps), eps ~ N(0, I), T any invertible network, set by :meth:`define`:

        log q(z) = log N(eps; 0, I) - log |det A| - log |det dT/deps|,    eps = T^-1(A^-1 (z - mu)).

    Stored: mu and A as a Gaussian family stores them, and the parameters of T by their own names behind
    "flow.".  Local frame: the Gaussian's for mu and A, plain coordinates for T.  The Fisher matrix has
    no closed form, and is singular: networks have many parameters that say the same.

    Not for d in the thousands: a score is as long as all parameters together.  Zuko's UNAF and CNF,
    whose backward pass reads their module, have no scores: RuntimeError.

    Args:
        affine: "diagonal" or "full", the form of A; another raises ValueError.

    Example:
        >>> import torch, pyro.distributions as dist, pyro_ngvi as ngvi
        >>> family = FlowFamily("diagonal")
        >>> family.define(ngvi.flows.as_flow(dist.transforms.AffineTransform(0.0, 2.0), d=2))
        >>> q = family.init(torch.zeros(2), scale=0.5)  # z = 0.5 * 2 eps
        >>> family.log_prob(q, torch.zeros(2))  # -log(2 pi)
        tensor(-1.8379)
    """

    # no Newton steps and no momentum: as for all guides whose Fisher matrix is estimated
    newton_like = True
    nearly_singular = True
    noise_radius = 0.6
    names: tuple[str, ...] = ()

    def __init__(self, affine: str = "full") -> None:
        if affine not in GAUSSIANS:
            raise ValueError(f"affine must be {' or '.join(map(repr, GAUSSIANS))}, got {affine!r}.")
        self.gaussian: MeanFieldNormal | FullRankNormal = GAUSSIANS[affine]()
        self.flow: Any = None
        self._places: dict[str, str] = {}
        self._vmaps = True

    def define(self, flow: nn.Module) -> None:
        """Set T: ``flow(x, inverse)`` gives the image (..., d) and log |det| (...) of either direction.

        Its attribute ``cheap_inverse`` says whether the inverse takes about as long as the flow.
        """
        self.flow = flow
        trainable = _trainable(flow)
        self.names = (*self.gaussian.names, *trainable)
        self._places = places(flow, trainable)

    def init(self, loc: Tensor, scale: float) -> Tensors:
        own = {name: p.detach().clone() for name, p in _trainable(self.flow).items()}
        return self.gaussian.init(loc, scale) | own

    def _run(self, params: Tensors, x: Tensor, inverse: bool) -> tuple[Tensor, Tensor]:
        if torch.jit.is_tracing():  # pyright: ignore[reportPrivateImportUsage]
            own = _trainable(self.flow)
            if all(params[name].data_ptr() == p.data_ptr() for name, p in own.items()):
                return self.flow(x, inverse)  # traces know no functional_call
        own = {place: params[name] for place, name in self._places.items()}
        return functional_call(self.flow, own, (x, inverse), tie_weights=False)

    def transport(self, params: Tensors, noise: Tensor) -> tuple[Tensor, Tensor]:
        x, log_det = self._run(params, noise, False)
        z, outer = self.gaussian.transport(params, x)
        return z, log_det + outer

    def noise_of(self, params: Tensors, z: Tensor) -> Tensor:
        return self._run(params, self.gaussian.noise_of(params, z), True)[0]

    def rsample(self, params: Tensors, noise: Tensor) -> Tensor:
        return self.transport(params, noise)[0]

    def log_prob(self, params: Tensors, z: Tensor) -> Tensor:
        noise, log_det = self._run(params, self.gaussian.noise_of(params, z), True)
        return log_normal(noise) + (log_det - self.gaussian.log_det(params))

    def score(self, params: Tensors, z: Tensor) -> Tensors:
        if self._vmaps:
            try:
                if self.flow.cheap_inverse:
                    return super().score(params, z)
                with torch.no_grad():
                    noise = self.noise_of(params, z)
                return self.path_score(params, noise)
            except RuntimeError:  # Pyro's splines index by masks
                self._vmaps = False
        with torch.enable_grad():
            leaves = {name: v.detach().requires_grad_() for name, v in params.items()}
            value = self.log_prob(leaves, z)
            try:
                grads = each_gradient(value, list(leaves.values()))
            except RuntimeError as error:  # Zuko's UNAF and CNF run their networks anew to go back
                raise RuntimeError(
                    "AutoFlow: this flow has no scores, as Zuko's UNAF and CNF: log q cannot be "
                    "differentiated in parameters passed to it. Train it by pyro.optim.Adam with "
                    "Trace_ELBO, or take zuko.flows.NSF or NAF."
                ) from error
        return dict(zip(leaves, grads, strict=True))

    def path_score(self, params: Tensors, noise: Tensor) -> Tensors:
        """Scores at z = rsample(noise), for noise (n, d), without the inverse."""

        def one(eps: Tensor) -> Tensors:
            J = jacrev(lambda e: self.transport(params, e)[0])(eps)
            pulled = grad(lambda e: log_normal(e) - self.transport(params, e)[1])(eps)
            s = torch.linalg.solve_ex(J.mT, pulled)[0]
            (_, log_det), pull, *_ = vjp(lambda p: self.transport(p, eps), params)
            return pull((-s, -torch.ones_like(log_det)))[0]

        return vmap(one)(noise)


def places(module: nn.Module, named: Mapping[str, Tensor]) -> dict[str, str]:
    """The names of the parameters that are ``named``, by each place in which one of them stands.

    Left to find the places, ``functional_call`` loses the parameters of a module with several names.
    """
    name_of = {id(p): name for name, p in named.items()}
    return {
        f"{path}.{leaf}".lstrip("."): name_of[id(p)]
        for path, part in module.named_modules()
        for leaf, p in part.named_parameters(recurse=False)
        if id(p) in name_of
    }


def _trainable(flow: nn.Module) -> Tensors:
    """The parameters of a flow, without those that its owner has frozen."""
    return {PREFIX + name: p for name, p in flow.named_parameters() if p.requires_grad}
