r"""Orthogonal flows: elementwise activations between rotations of R^d, and their scores.

**Scores** at fixed z, from the inside out, start with delta = d log q / d eps = -eps.  Through a map
y = b + L W (s o x), with delta = d log q / dx, v = s o x and w = W v,

    g_v = delta / s,   g_w = W g_v,   g_y = L^-T g_w,
    score of b  -g_y,  of log s  -delta o x - 1,  of W  w g_v',  of L  -tril(g_y w') - diag(1 / L_ii);

through y = psi(x), with g = d log q / dx of what lies within,

    delta = (g - psi''/psi') / psi',    score of a parameter c  =  -delta dpsi/dc - dlog psi'/dc.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import astuple, dataclass
from functools import reduce
from itertools import accumulate, chain
from typing import Any

import torch
from torch import Tensor

from ..linalg import stiefel
from ..linalg.triangular import solve
from .base import Family, Tensors, clamp_exponent, interpolate, log_normal

#: largest |t|: the power of a tail stays within e^-T and e^T
TAIL = 0.25
LOG_2 = math.log(2.0)


@dataclass(frozen=True)
class SinhArcsinh:
    """psi of one layer; ``layer`` tells its parameters from those of other layers."""

    layer: int

    @property
    def names(self) -> tuple[str, ...]:
        """Names of its parameters, each (d,) and 0 at the start."""
        return f"skew_{self.layer}", f"tail_{self.layer}"

    def start(self, like: Tensor, factor: float) -> Tensors:
        return {name: torch.zeros_like(like) for name in self.names}

    def _log_power(self, params: Tensors) -> tuple[Tensor, Tensor]:
        """t, and dt / du."""
        share = torch.tanh(params[self.names[1]] / TAIL)
        return TAIL * share, 1.0 - share.square()

    def _inner(self, params: Tensors, x: Tensor) -> tuple[Tensor, Tensor]:
        """(e^t arcsinh(x), the same + c), the second bounded so that sinh of it does not overflow."""
        v = self._log_power(params)[0].exp() * torch.asinh(x)
        return v, clamp_exponent(v + params[self.names[0]])

    def forward(self, params: Tensors, x: Tensor) -> Tensor:
        return torch.sinh(self._inner(params, x)[1])

    def inverse(self, params: Tensors, y: Tensor) -> Tensor:
        t, _ = self._log_power(params)
        v = (torch.asinh(y) - params[self.names[0]]) * (-t).exp()
        return torch.sinh(clamp_exponent(v))

    def log_slope(self, params: Tensors, x: Tensor) -> Tensor:
        """log psi'(x)."""
        _, w = self._inner(params, x)
        log_cosh = w.abs() + torch.log1p(torch.exp(-2.0 * w.abs())) - LOG_2
        return log_cosh + self._log_power(params)[0] - 0.5 * torch.log1p(x.square())

    def log_det(self, params: Tensors, x: Tensor) -> Tensor:
        return self.log_slope(params, x).sum(-1)

    def score(self, params: Tensors, x: Tensor, g: Tensor) -> tuple[Tensors, Tensor]:
        """Scores (n, d) of its parameters, and delta (n, d), from x and g (n, d) at the same draws."""
        (v, w), (t, slope) = self._inner(params, x), self._log_power(params)
        tanh, square = torch.tanh(w), 1.0 + x.square()
        bend = t.exp() * tanh * torch.rsqrt(square) - x / square  # psi'' / psi'
        delta = (g - bend) * (-self.log_slope(params, x)).exp()
        skew = -delta * torch.cosh(w) - tanh
        return {self.names[0]: skew, self.names[1]: slope * (skew * v - 1.0)}, delta


@dataclass(frozen=True)
class AffineMap:
    """y = b + L x, or y = b + W (s o x); the fields are the names of the parts in ``params``."""

    shift: str
    log_scale: str = ""
    rotation: str = ""
    triangle: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(filter(None, astuple(self)))

    def start(self, like: Tensor, factor: float) -> Tensors:
        """The parts of x -> factor x, for x of the shape (d,) of ``like``."""
        zero, stretch = torch.zeros_like(like), torch.full_like(like, factor)
        parts = zero, stretch.log(), torch.diag(zero + 1.0), torch.diag(stretch)
        return {name: v for name, v in zip(astuple(self), parts, strict=True) if name}

    def linear(self, params: Tensors, x: Tensor) -> Tensor:
        """L x, or W (s o x)."""
        if self.triangle:
            return x @ params[self.triangle].tril().mT
        return x * params[self.log_scale].exp() @ params[self.rotation].mT

    def transposed(self, params: Tensors, g: Tensor) -> Tensor:
        if self.triangle:
            return g @ params[self.triangle].tril()
        return g @ params[self.rotation] * params[self.log_scale].exp()

    def forward(self, params: Tensors, x: Tensor) -> Tensor:
        return params[self.shift] + self.linear(params, x)

    def inverse(self, params: Tensors, y: Tensor) -> Tensor:
        x = y - params[self.shift]
        if self.triangle:
            return solve(params[self.triangle].tril(), x)
        return x @ params[self.rotation] * (-params[self.log_scale]).exp()

    def log_det(self, params: Tensors, x: Tensor) -> Tensor:
        """log |det dy/dx|, the same for all x: a 0-dim tensor."""
        if self.triangle:
            return params[self.triangle].diagonal().abs().log().sum()
        return params[self.log_scale].sum()

    def score(self, params: Tensors, x: Tensor, delta: Tensor) -> tuple[Tensors, Tensor]:
        """Scores (n, ...) of the parts, and g_y (n, d), from x and delta (n, d) at the same draws."""
        if self.triangle:
            L = params[self.triangle].tril()
            g = solve(L, delta, transposed=True)
            outer = g.unsqueeze(-1) * x.unsqueeze(-2)
            score = {self.triangle: -outer.tril() - torch.diag(1.0 / L.diagonal())}
        else:
            log_s, W = params[self.log_scale], params[self.rotation]
            g_v, w = delta * (-log_s).exp(), x * log_s.exp() @ W.mT
            g = g_v @ W.mT
            score = {self.rotation: w.unsqueeze(-1) * g_v.unsqueeze(-2)}
            score[self.log_scale] = -delta * x - 1.0
        return score | {self.shift: -g}, g


class OrthogonalFlow(Family):
    """Flows of K elementwise activations psi between rotations W: with eps ~ N(0, I) in R^d,

        x_0 = L eps + b_0,    x_k = b_k + W_k (s_k o psi(x_{k-1})),    z = x_K,    b_K = mu,
        psi(x) = sinh(e^t arcsinh(x) + c),    t = T tanh(u / T),    T = 1/4,
        log q(z) = log N(eps; 0, I) - sum log |det of the affine maps| - sum log psi'(x_k).

    psi is the identity at the start; c bends it to either side, and e^t is the power of its tails
    (Jones & Pewsey 2009, Biometrika 96:761).  A tail too heavy would lose the ELBO by a rare draw.

    Stored: ``loc`` = mu and ``bias_k`` = b_k (d,), ``base_tril`` = L (d, d), ``log_scale_k`` = log s_k
    (d,), ``weight_k`` = W_k (d, d), ``skew_k`` = c and ``tail_k`` = u (d,) of each psi.  Local frame:
    b + L t, b + W (s o t), log s + m, W (a - a') with a strictly lower, L (I + M) with M lower.  The
    Fisher matrix has no closed form, and is singular while psi is straight.

    Args:
        layers: K, at least 1, else ValueError.

    Example:
        >>> import torch
        >>> family = OrthogonalFlow(layers=1)
        >>> q = family.init(torch.zeros(2, dtype=torch.float64), scale=0.5)
        >>> family.stddev(q).round(decimals=2)
        tensor([0.5000, 0.5000], dtype=torch.float64)
    """

    newton_like = True
    nearly_singular = True
    noise_radius = 0.6
    activation: Callable[[int], Any] = SinhArcsinh

    def __init__(self, layers: int = 1) -> None:
        if not isinstance(layers, int) or layers < 1:
            raise ValueError(f"layers must be a whole number of at least 1, got {layers!r}.")
        self.layers = layers
        self.maps = [self._map(k) for k in range(layers + 1)]
        bends = [self.activation(k) for k in range(layers)]
        self.names = tuple(name for part in (*self.maps, *bends) for name in part.names)
        #: from the noise to z, an activation behind each map but the last
        self.parts: list[Any] = [*chain(*zip(self.maps, bends, strict=False)), self.maps[-1]]
        rotations = {m.rotation: -1 for m in self.maps if m.rotation}
        self.triangles = rotations | {m.triangle: 0 for m in self.maps if m.triangle}
        #: momentum acts on all: no block of the Fisher matrix is known to stand apart
        self.location = self.names

    def _map(self, k: int) -> AffineMap:
        """The affine map of layer k; the last one puts out z."""
        if k == 0:
            return AffineMap("bias_0", triangle="base_tril")
        shift = "loc" if k == self.layers else f"bias_{k}"
        return AffineMap(shift, log_scale=f"log_scale_{k}", rotation=f"weight_{k}")

    def init(self, loc: Tensor, scale: float) -> Tensors:
        """N(loc, scale^2 I): all maps but the last start as the identity."""
        params: Tensors = {}
        for part in self.parts:
            params |= part.start(loc, scale if part is self.parts[-1] else 1.0)
        params["loc"] = loc.clone()
        return {name: params[name] for name in self.names}

    def _forward(self, params: Tensors, noise: Tensor) -> list[Tensor]:
        """The noise, and what leaves each part: z at last."""
        return list(accumulate(self.parts, lambda x, f: f.forward(params, x), initial=noise))

    def _backward(self, params: Tensors, z: Tensor) -> list[Tensor]:
        """The same of given z."""
        path = accumulate(self.parts[::-1], lambda y, f: f.inverse(params, y), initial=z)
        return list(path)[::-1]

    def _log_det(self, params: Tensors, path: list[Tensor]) -> Tensor:
        """log |det dz / deps|."""
        return reduce(torch.add, map(lambda f, x: f.log_det(params, x), self.parts, path))

    def rsample(self, params: Tensors, noise: Tensor) -> Tensor:
        return self._forward(params, noise)[-1]

    def noise_of(self, params: Tensors, z: Tensor) -> Tensor:
        return self._backward(params, z)[0]

    def transport(self, params: Tensors, noise: Tensor) -> tuple[Tensor, Tensor]:
        path = self._forward(params, noise)
        return path[-1], self._log_det(params, path)

    def log_prob(self, params: Tensors, z: Tensor) -> Tensor:
        path = self._backward(params, z)
        return log_normal(path[0]) - self._log_det(params, path)

    def score(self, params: Tensors, z: Tensor) -> Tensors:
        return self._score(params, self._backward(params, z))

    def draw_scores(self, params: Tensors, n: int) -> Tensors:
        # the activations of a draw are known, and no rounding on a way back enters
        return self._score(params, self._forward(params, self._noise(params, torch.Size((n,)))))

    def _score(self, params: Tensors, path: list[Tensor]) -> Tensors:
        score, delta = {}, -path[0]
        for part, x in zip(self.parts, path, strict=False):
            own, delta = part.score(params, x, delta)
            score |= own
        return {name: score[name] for name in self.names}

    def push(self, params: Tensors, tangent: Tensors) -> Tensors:
        velocity = super().push(params, tangent)
        return velocity | {m.shift: m.linear(params, tangent[m.shift]) for m in self.maps}

    def pull(self, params: Tensors, grads: Tensors) -> Tensors:
        pulled = super().pull(params, grads)
        return pulled | {m.shift: m.transposed(params, grads[m.shift]) for m in self.maps}

    def retract(
        self, params: Tensors, tangent: Tensors, step: Tensor | float, coordinates: str = "local"
    ) -> Tensors:
        new = {name: clamp_exponent(params[name] + step * tangent[name]) for name in self.names}
        for name, k in self.triangles.items():
            new[name] = stiefel.retract(params[name], step * tangent[name], k)
        moves = {m.shift: step * m.linear(params, tangent[m.shift]) for m in self.maps}
        return new | {name: params[name] + v for name, v in moves.items()}

    def average(self, average: Tensors, params: Tensors, rate: Tensor) -> Tensors:
        """Riemannian means of the rotations, plain ones of the rest."""
        turned = {n: W for n, W in params.items() if is_rotation(n)}
        means = {n: stiefel.average(average[n], W, rate) for n, W in turned.items()}
        return interpolate(average, params, rate) | means

    def drift(self, params: Tensors) -> Tensor:
        """How far rotations are from orthogonal: the largest | |W v| / |v| - 1 |, of one v, 0-dim."""
        norm, like = torch.linalg.vector_norm, params["loc"]
        v = torch.arange(1.0, len(like) + 1.0, dtype=like.dtype, device=like.device).cos()
        rotations = [W for name, W in params.items() if is_rotation(name)]
        return torch.stack([(norm(W @ v) / norm(v) - 1.0).abs() for W in rotations]).amax()


def is_rotation(name: str) -> bool:
    return name.startswith("weight_")
