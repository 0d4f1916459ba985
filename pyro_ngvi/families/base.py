"""What a variational family has to know: its density, its samples and its own geometry."""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.func import grad, vmap
from torch.linalg import solve_triangular

from ..linalg import stiefel
from ..linalg.host import own_random_state
from ..linalg.noise import even
from .vectors import Tensors, sample_quantiles

LOG_2PI = math.log(2.0 * math.pi)
#: draws behind moments, entropies and divergences that have no closed form
DRAWS = 4096
NO_FISHER = "Fisher matrix in closed form: estimate it by pyro_ngvi.optim.SPRING, IFVB or AIFVB"


def dot(a: Tensors, b: Tensors) -> Tensor:
    """Sum of products over all entries: pairs a gradient with a tangent of the same frame."""
    pairs = ((x, b[name]) for name, x in a.items())
    return reduce(torch.add, (torch.dot(x, y) if x.dim() == 1 else (x * y).sum() for x, y in pairs))


def interpolate(a: Tensors, b: Tensors, share: Tensor) -> Tensors:
    """a + share (b - a), tensor by tensor."""
    return {name: torch.lerp(a[name], b[name], share.to(b[name])) for name in b}


def clamp_exponent(x: Tensor) -> Tensor:
    """Clamp so that ``exp(x)`` neither underflows to 0 nor overflows (leave a wide margin)."""
    limit = 0.5 * math.log(torch.finfo(x.dtype).max)
    return x.clamp(-limit, limit)


def log_normal(x: Tensor) -> Tensor:
    """log N(x; 0, I), shape (...), of x (..., d)."""
    return -0.5 * (x.square() + LOG_2PI).sum(-1)


def with_backward(forward: Callable[..., Any], backward: Callable[..., Any]) -> Callable[..., Any]:
    """``forward(*inputs)`` with gradients ``backward(*grads, *inputs, *outputs)``, maybe None."""

    class Function(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            ctx.set_materialize_grads(False)
            ctx.save_for_backward(*inputs, *([output] if isinstance(output, Tensor) else output))

        @staticmethod
        def backward(ctx: Any, *grads: Tensor | None) -> Any:
            return backward(*grads, *ctx.saved_tensors)

    # else torch would work out the signature at every call
    forward.__signature__ = inspect.signature(forward)  # pyright: ignore[reportFunctionMemberAccess]
    Function.forward = staticmethod(forward)

    def apply(*inputs: Tensor) -> Any:
        tracing = torch.jit.is_tracing()  # pyright: ignore[reportPrivateImportUsage]
        to_save = tracing and not torch.is_grad_enabled()  # a saved trace keeps no gradients
        return forward(*inputs) if to_save else Function.apply(*inputs)

    return apply


class Family(ABC):
    """A family of distributions over R^d with its information geometry; densities are in nats.

    Pure functions over dicts of tensors by :attr:`names`: ``params``, as the guide stores them;
    ``grads`` g, Euclidean gradients in them; ``tangent`` u, in the *local frame of q*, where the Fisher
    matrix F is simplest.  J takes u to a velocity of ``params`` (:meth:`push`): the natural gradient is
    F^-1 J' g, and a short step u has KL = u' F u / 2 nats.  J is I unless :meth:`frame`
    or ``triangles`` say otherwise.  What a family lacks raises NotImplementedError.
    docs/tutorials/12_extending.ipynb says what a new one gives.

    Example:
        >>> import torch, pyro_ngvi as ngvi
        >>> family, g = ngvi.families.MeanFieldNormal(), torch.ones(1)
        >>> q = family.init(torch.zeros(1), scale=0.5)
        >>> u = family.natural_gradient(q, family.pull(q, {"loc": g, "log_scale": g}))
        >>> u, family.retract(q, u, -0.1)["loc"]
        ({'loc': tensor([0.5000]), 'log_scale': tensor([0.5000])}, tensor([-0.0250]))
    """

    #: names of the tensors in ``params``
    names: tuple[str, ...]

    #: coordinate systems in which :meth:`retract` can move
    coordinates: tuple[str, ...] = ("local",)
    #: names of lower triangles (0) and rotations (-1), moved as in :mod:`pyro_ngvi.linalg.stiefel`:
    #: the highest diagonal of their tangents
    triangles: Mapping[str, int] = {}
    #: whether a natural step of length 1 is Newton's at a Gaussian posterior; else momentum helps
    newton_like: bool = False
    #: names of the tensors that momentum acts on, maybe none: in the local frame their block of F is
    #: the same for every q, and has no entries between it and the rest
    location: tuple[str, ...] = ()
    #: steps of gain b have at most this Fisher length times sqrt(b)
    noise_radius: float = 3.0
    #: whether F is diagonal in the local frame, and the same for every q
    orthogonal_frame: bool = False
    #: the curvature that the family asks a loss for: "diagonal" (d,), "dense" (d, d), "low_rank"
    #: ("rows" (n, d), "diagonal": rows' rows + diag), "kronecker" (two factors for each matrix site)
    curvature_form: str | None = None
    #: whether F is nearly singular, as that of a flow's networks is
    nearly_singular: bool = False

    @property
    def has_transport(self) -> bool:
        """Whether draws are a smooth one-to-one map of d normal variables onto R^d."""
        return type(self).transport is not Family.transport

    @property
    def known_fisher(self) -> bool:
        """Whether the Fisher matrix is known; where not, it has to be estimated from scores."""
        return type(self).natural_gradient is not Family.natural_gradient

    def _lacks(self, what: str) -> NotImplementedError:
        return NotImplementedError(f"{type(self).__name__} has no {what}.")

    @abstractmethod
    def init(self, loc: Tensor, scale: float) -> Tensors:
        """A member centred at ``loc`` (d,), every sd equal to ``scale``; of some, each to its own."""

    def dim(self, params: Tensors) -> int:
        """d, the length of the latent vector; by default that of the first tensor."""
        return params[self.names[0]].shape[-1]

    def noise_dim(self, params: Tensors) -> int:
        """Number of standard normal variables that make one draw."""
        return self.dim(params)

    def rsample(self, params: Tensors, noise: Tensor) -> Tensor:
        """Draws (..., d) from standard normal ``noise`` (..., noise_dim), differentiably."""
        raise self._lacks("closed form for its draws from normal noise; use draw(params, shape)")

    def transport(self, params: Tensors, noise: Tensor) -> tuple[Tensor, Tensor]:
        """z = rsample(noise) (..., d) and log |det dz/dnoise| (...), differentiable in the noise."""
        raise self._lacks("map of d normal variables onto R^d")

    def noise_of(self, params: Tensors, z: Tensor) -> Tensor:
        """The noise (..., d) that makes the draws ``z`` (..., d): the inverse of :meth:`transport`."""
        raise self._lacks("map of R^d onto d normal variables")

    def draw(self, params: Tensors, shape: torch.Size) -> Tensor:
        """Draws (*shape, d), differentiably.  Families whose noise is not normal have their own."""
        return self.rsample(params, self._noise(params, shape))

    def _noise(self, params: Tensors, shape: torch.Size) -> Tensor:
        like = next(iter(params.values()))
        return torch.randn((*shape, self.noise_dim(params)), dtype=like.dtype, device=like.device)

    def centred_draw(self, params: Tensors, shape: torch.Size) -> Tensor:
        """As :meth:`draw`, of noise with mean zero over all draws: :mod:`~pyro_ngvi.linalg.noise`."""
        if type(self).draw is not Family.draw:
            return self.draw(params, shape)
        return self.rsample(params, even(self._noise(params, shape)))

    def fixed_draws(self, params: Tensors, n: int = DRAWS) -> Tensor:
        """Draws (n, d) of a fixed seed, without gradients: the same q always gives the same."""
        with torch.no_grad(), own_random_state(0):
            return self.draw(params, torch.Size((n,)))

    @abstractmethod
    def log_prob(self, params: Tensors, z: Tensor) -> Tensor:
        """log q(z), shape (...), of points ``z`` (..., d)."""

    def score(self, params: Tensors, z: Tensor) -> Tensors:
        """Gradient of log q(z) in ``params`` at fixed ``z`` (n, d); each entry has a leading n."""
        return vmap(grad(self.log_prob), in_dims=(None, 0))(params, z)

    def draw_scores(self, params: Tensors, n: int) -> Tensors:
        """Scores of n fresh draws; each entry has a leading n."""
        return self.score(params, self.draw(params, torch.Size((n,))))

    def average(self, average: Tensors, params: Tensors, rate: Tensor) -> Tensors:
        """A running average moved by the share ``rate``: (1 - rate) average + rate params."""
        return interpolate(average, params, rate)

    def not_finite(self, params: Tensors) -> Tensor:
        """Entries of z (d,) that are not finite in ``params`` or ``grads``; all, if only others are."""
        own = ~torch.isfinite(torch.atleast_2d(params["loc"])).all(0)
        found = torch.stack([~torch.isfinite(v).all() for v in params.values()]).any()
        return torch.where(own.any(), own, found)

    def mean(self, params: Tensors) -> Tensor:
        """Expectation of z, (d,); by default of 4,096 draws, as all moments and quantiles here."""
        return self.fixed_draws(params).mean(0)

    def stddev(self, params: Tensors) -> Tensor:
        """Marginal standard deviations (d,) of z."""
        return self.fixed_draws(params).std(0)

    def covariance(self, params: Tensors) -> Tensor:
        """The covariance (d, d) of z.  For small d: plots, tests, summaries."""
        return torch.atleast_2d(torch.cov(self.fixed_draws(params).mT))

    def scale_tril(self, params: Tensors) -> Tensor:
        """Lower triangular L (d, d) with L L' the covariance.  For small d."""
        return torch.linalg.cholesky(self.covariance(params))

    def icdf(self, params: Tensors, levels: Tensor) -> Tensor:
        """Marginal quantiles (n, d) of z at ``levels`` (n,), each in (0, 1)."""
        return sample_quantiles(self.fixed_draws(params), levels)

    def entropy(self, params: Tensors) -> Tensor:
        """-E[log q(z)] in nats, a 0-dim tensor."""
        with own_random_state(0):
            return -self.log_prob(params, self.draw(params, torch.Size((DRAWS,)))).mean()

    def kl(self, params: Tensors, other: Tensors) -> Tensor:
        """KL(q || other) = E_q[log q(z) - log other(z)] of two members, in nats, a 0-dim tensor."""
        with own_random_state(0):
            z = self.draw(params, torch.Size((DRAWS,)))
        return (self.log_prob(params, z) - self.log_prob(other, z)).mean()

    def frame(self, params: Tensors) -> Tensors:
        """The units of the local frame, by name and entry; a name that is left out has units of 1."""
        return {}

    def push(self, params: Tensors, tangent: Tensors) -> Tensors:
        """J u, the velocity of ``params`` along a tangent u, in their shapes."""
        moved = {n: stiefel.push(params[n], tangent[n], k) for n, k in self.triangles.items()}
        return tangent | moved | {n: u * tangent[n] for n, u in self.frame(params).items()}

    def pull(self, params: Tensors, grads: Tensors) -> Tensors:
        """J' g, gradients in the local frame: <pull(g), u> = <g, push(u)>."""
        own = {name: grads[name] for name in self.names}
        own |= {n: stiefel.pull(params[n], grads[n], k) for n, k in self.triangles.items()}
        return own | {n: u * grads[n] for n, u in self.frame(params).items()}

    def pull_curvature(self, params: Tensors, gradient: Tensors, curvature: Tensors) -> Tensors:
        """``gradient`` with its scale part made from the expected Hessian H of -log p(y, z).

        By Price's theorem dLoss / dSigma = (H - Sigma^-1) / 2.  ``curvature``: :attr:`curvature_form`.
        """
        raise self._lacks("use for curvature")

    def dilation(self, params: Tensors) -> Tensors:
        """d params / ds while all sds grow as e^s; empty: unknown, or without entropy."""
        return {}

    def fisher_product(self, params: Tensors, tangent: Tensors) -> Tensors:
        """F u for a tangent u: a gradient in the local frame."""
        raise self._lacks(NO_FISHER)

    def natural_gradient(self, params: Tensors, gradient: Tensors) -> Tensors:
        """The tangent u with F u = ``gradient``, for a gradient in the local frame."""
        raise self._lacks(NO_FISHER)

    def retract(
        self, params: Tensors, tangent: Tensors, step: Tensor | float, coordinates: str = "local"
    ) -> Tensors:
        """``params`` moved along u = ``tangent``, here params + step J u; no step leaves the domain."""
        return {name: params[name] + step * v for name, v in self.push(params, tangent).items()}

    def pack(self, tensors: Tensors) -> Tensor:
        """The free coordinates of a gradient or tangent in the local frame, one vector (D,)."""
        cut = {n: stiefel.pack(tensors[n], k) for n, k in self.triangles.items()}
        return torch.cat([cut[n] if n in cut else tensors[n].reshape(-1) for n in self.names])

    def unpack(self, vector: Tensor, like: Tensors) -> Tensors:
        """The inverse of :meth:`pack`; ``like`` gives names and shapes."""
        parts = dict(zip(self.names, vector.split(list(self.sizes(like).values())), strict=True))
        whole = {n: stiefel.unpack(parts[n], len(like[n]), k) for n, k in self.triangles.items()}
        return {n: whole[n] if n in whole else v.reshape(like[n].shape) for n, v in parts.items()}

    def sizes(self, like: Tensors) -> dict[str, int]:
        """The number of entries of each part of :meth:`pack`, by name: D in sum."""
        cut = {n: stiefel.pack(like[n], k) for n, k in self.triangles.items()}
        return {n: cut.get(n, like[n]).numel() for n in self.names}

    def inner(self, params: Tensors, u: Tensors, v: Tensors) -> Tensor:
        """<u, F v> of two tangents, a 0-dim tensor: a short step u has KL = <u, F u> / 2 nats."""
        return dot(u, self.fisher_product(params, v))

    def fisher_norm(self, params: Tensors, tangent: Tensors) -> Tensor:
        """The length sqrt(<u, F u>) of a tangent, in nats^(1/2), a 0-dim tensor."""
        return self.inner(params, tangent, tangent).clamp_min(0.0).sqrt()


class NormalFamily(Family):
    """Gaussians N(mu, Sigma), mu stored as ``loc``: log q = log N(eps; 0, I) - log det(Sigma) / 2.

    Example:
        >>> import torch, pyro_ngvi as ngvi
        >>> family, z = ngvi.families.FullRankNormal(), torch.zeros(2)
        >>> family.kl(family.init(z + 1.0, 1.0), family.init(z, 1.0))  # |1|^2 / 2
        tensor(1.)
    """

    location = ("loc",)

    @abstractmethod
    def log_det(self, params: Tensors) -> Tensor:
        """log det(Sigma) / 2, a 0-dim tensor."""

    def log_prob(self, params: Tensors, z: Tensor) -> Tensor:
        return log_normal(self.noise_of(params, z)) - self.log_det(params)

    def mean(self, params: Tensors) -> Tensor:
        return params["loc"]

    def covariance(self, params: Tensors) -> Tensor:
        L = self.scale_tril(params)
        return L @ L.mT

    def icdf(self, params: Tensors, levels: Tensor) -> Tensor:
        return self.mean(params) + self.stddev(params) * torch.special.ndtri(levels).unsqueeze(-1)

    def entropy(self, params: Tensors) -> Tensor:
        return self.log_det(params) + 0.5 * self.dim(params) * (1.0 + LOG_2PI)

    def kl(self, params: Tensors, other: Tensors) -> Tensor:
        """KL(q || other) in nats, a 0-dim tensor.  For small d, unless the family has its own."""
        shift = (self.mean(params) - self.mean(other)).unsqueeze(-1)
        both = torch.cat([self.scale_tril(params), shift], -1)
        square = solve_triangular(self.scale_tril(other), both, upper=False).square().sum()
        return 0.5 * (square - self.dim(params)) - (self.log_det(params) - self.log_det(other))

    def precision_step(
        self, params: Tensors, grads: Tensors, curvature: Tensors, rate: Tensor, safe: bool
    ) -> Tensors:
        """``params`` with precision P + rate (H - P), and, if ``safe``, the second-order term.

        H is the ``curvature`` or, if that is empty, what ``grads`` say.
        """
        gradient = self.pull(params, grads)
        if curvature:
            gradient = self.pull_curvature(params, gradient, curvature)
        tangent = self.natural_gradient(params, gradient)
        tangent["loc"] = torch.zeros_like(tangent["loc"])
        return self.retract(params, tangent, -rate, "improved" if safe else "natural")

    def covariance_product(
        self, params: Tensors, v: Tensor, damping: Tensor | float = 0.0
    ) -> Tensor:
        """(Sigma^-1 + damping I)^-1 v for v (d,): a natural step of the mean."""
        raise self._lacks("covariance product")
