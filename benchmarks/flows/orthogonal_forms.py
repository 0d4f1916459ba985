r"""Orthogonal flows of other forms, activations and retractions than ``AutoOrthogonalFlow`` has.

    form="paper"     z = W_1 psi(W_0 eps + b_0) + mu
    form="scaled"    z = W_1 (s_1 o psi(L eps + b_0)) + mu                    (that of the package)
    form="whitened"  z = C W_1 psi(L eps + b_0) + mu

for one layer, with W orthogonal, s positive, C and L lower triangles (L diagonal for base="diagonal").
Further layers put x -> psi(W_k (s_k o x) + b_k), in the paper's form psi(W_k x + b_k), in front of the
last map.

The printed form (Godichon-Baggioni, Nguyen & Tran 2024, JASA, example 3) does *not identify* W_0:
W_0 eps has the law N(0, I) for every W_0, its tangent score is 0, and the Fisher matrix is singular.
It has no scales, and with the sigmoid each rotated coordinate lies in an interval of length 1 besides.

    "sinh-arcsinh"   that of the package
    "arcsinh"        arcsinh(x), whose tails are far lighter than a Gaussian's
    "leaky"          ((1 + l) x + (1 - l) (sqrt(1 + x^2) - 1)) / 2: slopes from l = 0.1 to 1
    "sigmoid"        1 / (1 + e^-x)

    "cayley"         that of the package
    "exponential"    W exp(A)
    "cholesky-qr"    W (I + A) R^-1 with R'R = (I + A)'(I + A), the paper's
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.linalg import solve_triangular
from torch.nn.functional import logsigmoid

import pyro_ngvi
from pyro_ngvi.families import OrthogonalFlow
from pyro_ngvi.families.base import Family, Tensors, clamp_exponent
from pyro_ngvi.families.orthogonal_flow import AffineMap, SinhArcsinh, is_rotation
from pyro_ngvi.linalg import stiefel

__all__ = [
    "ACTIVATIONS",
    "RETRACTIONS",
    "AmbientForm",
    "AutoOrthogonalForm",
    "OrthogonalForm",
    "retract",
]

#: nodes of the quadrature that centres and scales the start
NODES = 100
#: slope of "leaky" far to the left; far to the right it is 1
LEAK = 0.1
P, Q = 0.5 * (1.0 + LEAK), 0.5 * (1.0 - LEAK)


@dataclass(frozen=True)
class _Fixed:
    """An activation without parameters; ``layer`` stands for those of others."""

    layer: int
    names: tuple[str, ...] = ()

    def log_slope(self, params: Tensors, x: Tensor) -> Tensor:
        """log psi'(x)."""
        raise NotImplementedError

    def bend(self, params: Tensors, x: Tensor) -> Tensor:
        """psi'' / psi'."""
        raise NotImplementedError

    def start(self, like: Tensor, factor: float) -> Tensors:
        return {}

    def log_det(self, params: Tensors, x: Tensor) -> Tensor:
        return self.log_slope(params, x).sum(-1)

    def score(self, params: Tensors, x: Tensor, g: Tensor) -> tuple[Tensors, Tensor]:
        return {}, (g - self.bend(params, x)) * (-self.log_slope(params, x)).exp()


class _Arcsinh(_Fixed):
    def forward(self, params: Tensors, x: Tensor) -> Tensor:
        return torch.asinh(x)

    def inverse(self, params: Tensors, y: Tensor) -> Tensor:
        return torch.sinh(clamp_exponent(y))

    def log_slope(self, params: Tensors, x: Tensor) -> Tensor:
        return -0.5 * torch.log1p(x.square())

    def bend(self, params: Tensors, x: Tensor) -> Tensor:
        return -x / (1.0 + x.square())


class _Leaky(_Fixed):
    def forward(self, params: Tensors, x: Tensor) -> Tensor:
        square = x.square()
        # sqrt(1 + x^2) - 1 without cancellation
        return P * x + Q * square / (1.0 + torch.sqrt(1.0 + square))

    def inverse(self, params: Tensors, y: Tensor) -> Tensor:
        y = y + Q
        return (P * y - Q * torch.sqrt(y.square() + LEAK)) / LEAK

    def log_slope(self, params: Tensors, x: Tensor) -> Tensor:
        return torch.log(P + Q * x * torch.rsqrt(1.0 + x.square()))

    def bend(self, params: Tensors, x: Tensor) -> Tensor:
        r = torch.rsqrt(1.0 + x.square())
        return Q * r * r * r / (P + Q * x * r)


class _Sigmoid(_Fixed):
    def forward(self, params: Tensors, x: Tensor) -> Tensor:
        return torch.sigmoid(x)

    def inverse(self, params: Tensors, y: Tensor) -> Tensor:
        eps = torch.finfo(y.dtype).eps
        return torch.logit(y.clamp(eps, 1.0 - eps))

    def log_slope(self, params: Tensors, x: Tensor) -> Tensor:
        return logsigmoid(x) + logsigmoid(-x)

    def bend(self, params: Tensors, x: Tensor) -> Tensor:
        return -torch.tanh(0.5 * x)

    def inside(self, y: Tensor) -> Tensor:
        """Which ``y`` psi takes at all."""
        # what rounding does to a value near an end on its way through the rotations is no reason for
        # a density of 0
        margin = torch.finfo(y.dtype).eps ** 0.5
        return (y > -margin) & (y < 1.0 + margin)


ACTIVATIONS: dict[str, Any] = {
    "sinh-arcsinh": SinhArcsinh,
    "arcsinh": _Arcsinh,
    "leaky": _Leaky,
    "sigmoid": _Sigmoid,
}


def _exponential(W: Tensor, A: Tensor) -> Tensor:
    return W @ torch.linalg.matrix_exp(A)


def _cholesky_qr(W: Tensor, A: Tensor) -> Tensor:
    moved = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device) + A
    # a gram matrix squares the condition of a long step; the second round restores what that costs
    for _ in range(2):
        L, _ = torch.linalg.cholesky_ex(moved.mT @ moved)
        moved = solve_triangular(L.mT, moved, upper=True, left=False)
    return W @ moved


RETRACTIONS: dict[str, Any] = {
    "cayley": None,
    "exponential": _exponential,
    "cholesky-qr": _cholesky_qr,
}


def retract(W: Tensor, tangent: Tensor, method: str = "cayley") -> Tensor:
    """The orthogonal matrix (d, d) that W reaches along ``tangent`` (strictly lower triangular)."""
    if method == "cayley":
        return stiefel.retract(W, tangent)
    return stiefel.correct(RETRACTIONS[method](W, tangent - tangent.mT))


@dataclass(frozen=True)
class AnyMap(AffineMap):
    """y = b + L W (s o x) with any of L, W and s left out."""

    def linear(self, params: Tensors, x: Tensor) -> Tensor:
        """L W (s o x)."""
        if self.log_scale:
            x = x * params[self.log_scale].exp()
        if self.rotation:
            x = x @ params[self.rotation].mT
        if self.triangle:
            x = x @ params[self.triangle].tril().mT
        return x

    def transposed(self, params: Tensors, g: Tensor) -> Tensor:
        """s o W' L' g."""
        if self.triangle:
            g = g @ params[self.triangle].tril()
        if self.rotation:
            g = g @ params[self.rotation]
        if self.log_scale:
            g = g * params[self.log_scale].exp()
        return g

    def inverse(self, params: Tensors, y: Tensor) -> Tensor:
        x = y - params[self.shift]
        if self.triangle:
            flat = x.reshape(-1, x.shape[-1])
            L = params[self.triangle].tril()
            x = solve_triangular(L, flat.mT, upper=False).mT.reshape(x.shape)
        if self.rotation:
            x = x @ params[self.rotation]
        if self.log_scale:
            x = x * (-params[self.log_scale]).exp()
        return x

    def log_det(self, params: Tensors, x: Tensor) -> Tensor:
        """log |det dy/dx|, the same for all x: a 0-dim tensor."""
        total = params[self.shift].new_zeros(())
        if self.log_scale:
            total = total + params[self.log_scale].sum()
        if self.triangle:
            total = total + params[self.triangle].diagonal().abs().log().sum()
        return total

    def score(self, params: Tensors, x: Tensor, delta: Tensor) -> tuple[Tensors, Tensor]:
        """Scores (n, ...) of the parts, and g_y (n, d), from x and delta (n, d) at the same draws."""
        score: Tensors = {}
        g, w = delta, x
        if self.log_scale:
            score[self.log_scale] = -delta * x - 1.0
            g = delta * (-params[self.log_scale]).exp()
            w = x * params[self.log_scale].exp()
        if self.rotation:
            v, W = w, params[self.rotation]
            w = v @ W.mT
            score[self.rotation] = w.unsqueeze(-1) * g.unsqueeze(-2)
            g = g @ W.mT
        if self.triangle:
            L = params[self.triangle].tril()
            g = solve_triangular(L.mT, g.mT, upper=True).mT
            outer = g.unsqueeze(-1) * w.unsqueeze(-2)
            score[self.triangle] = -outer.tril() - torch.diag(1.0 / L.diagonal())
        score[self.shift] = -g
        return score, g


class OrthogonalForm(OrthogonalFlow):
    """Flows of ``layers`` elementwise activations between rotations; see the head of this file."""

    def __init__(
        self,
        layers: int = 1,
        activation: str = "sinh-arcsinh",
        form: str = "scaled",
        base: str = "full",
        retraction: str = "cayley",
    ) -> None:
        _check("activation", activation, ACTIVATIONS)
        _check("form", form, ("paper", "scaled", "whitened"))
        _check("base", base, ("full", "diagonal"))
        _check("retraction", retraction, RETRACTIONS)
        self.form, self.base, self.retraction = form, base, retraction
        self.activation = ACTIVATIONS[activation]
        super().__init__(layers)

    def _map(self, k: int) -> AffineMap:
        last = k == self.layers
        shift = "loc" if last else f"bias_{k}"
        if self.form == "paper":
            return AnyMap(shift, rotation=f"weight_{k}")
        if k == 0 and self.base == "diagonal":
            return AnyMap(shift, log_scale="base_log_scale")
        if k > 0 and last and self.form == "whitened":
            return AnyMap(shift, rotation=f"weight_{k}", triangle="scale_tril")
        return super()._map(k)

    def init(self, loc: Tensor, scale: float) -> Tensors:
        """Mean ``loc``, and every sd ``scale`` but for the printed form, which has no scales.

        What enters an activation has mean 0 and sd 1, by quadrature.
        """
        x, weights = np.polynomial.hermite_e.hermegauss(NODES)
        weights = weights / weights.sum()
        bends, params = self.parts[1::2], dict[str, Tensor]()
        for psi in bends:
            params |= psi.start(loc, 1.0)
        flat = {name: torch.zeros((), dtype=torch.float64) for name in params}
        for k, affine in enumerate(self.maps):
            last, factor, shift = k == self.layers, 1.0, 0.0
            if k > 0:
                x = bends[k - 1].forward(flat, torch.from_numpy(x)).numpy()
                mean = float(weights @ x)
                if self.form != "paper":
                    spread = float(np.sqrt(weights @ (x - mean) ** 2))
                    factor = (scale if last else 1.0) / spread
                shift = 0.0 if self.form == "paper" and not last else -factor * mean
            x = factor * x + shift
            params |= affine.start(loc, factor) | {affine.shift: torch.full_like(loc, shift)}
        params["loc"] = params["loc"] + loc
        return {name: params[name] for name in self.names}

    @property
    def has_transport(self) -> bool:
        """Not with a bounded activation, whose draws do not fill R^d."""
        return self.activation is not _Sigmoid

    def log_prob(self, params: Tensors, z: Tensor) -> Tensor:
        value = super().log_prob(params, z)
        if self.has_transport:
            return value
        leaving = self._backward(params, z)[2::2]
        inside = torch.stack([self.parts[1].inside(y).all(-1) for y in leaving]).all(0)
        return torch.where(inside, value, -torch.inf)

    def retract(
        self, params: Tensors, tangent: Tensors, step: Tensor | float, coordinates: str = "local"
    ) -> Tensors:
        new = super().retract(params, tangent, step)
        for name, W in params.items():
            if is_rotation(name):
                new[name] = retract(W, step * tangent[name], self.retraction)
        return new


class AmbientForm(OrthogonalForm):
    """Scores, and what is learnt of F, in R^(d x d), where the authors' scripts have them; a step V of
    a rotation W is projected on its tangents, W skew(W'V)."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.triangles = {name: k for name, k in self.triangles.items() if not is_rotation(name)}

    def _projected(self, params: Tensors, tangent: Tensors) -> Tensors:
        turns = {n: 0.5 * stiefel.pull(W, tangent[n]) for n, W in params.items() if is_rotation(n)}
        return tangent | turns

    def push(self, params: Tensors, tangent: Tensors) -> Tensors:
        turns = self._projected(params, tangent)
        rotations = {n: stiefel.push(params[n], turns[n]) for n in turns if is_rotation(n)}
        return super().push(params, tangent) | rotations

    def pull(self, params: Tensors, grads: Tensors) -> Tensors:
        return super().pull(params, grads) | {n: grads[n] for n in params if is_rotation(n)}

    def retract(
        self, params: Tensors, tangent: Tensors, step: Tensor | float, coordinates: str = "local"
    ) -> Tensors:
        return super().retract(params, self._projected(params, tangent), step)


class AutoOrthogonalForm(pyro_ngvi.AutoOrthogonalFlow):
    """``AutoOrthogonalFlow`` with an :class:`OrthogonalForm`; ``activation=None`` is the form's own."""

    kind: type[OrthogonalForm] = OrthogonalForm

    def __init__(
        self,
        model: Callable[..., Any],
        layers: int = 1,
        activation: str | None = None,
        *,
        form: str = "scaled",
        base: str = "full",
        retraction: str = "cayley",
        **kwargs: Any,
    ) -> None:
        if activation is None:
            activation = "sigmoid" if form == "paper" else "sinh-arcsinh"
        self._form = self.kind(layers, activation, form, base, retraction)
        super().__init__(model, layers, **kwargs)

    def make_family(self) -> Family:
        return self._form


def _check(what: str, value: str, choices: Any) -> None:
    if value not in choices:
        names = ", ".join(map(repr, choices))
        raise ValueError(f"{what} must be one of {names}, got {value!r}.")
