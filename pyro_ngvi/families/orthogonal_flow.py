r"""Orthogonal flows: elementwise activations between rotations of R^d.

With eps ~ N(0, I) and psi elementwise and strictly increasing (:mod:`.sinh_arcsinh`),

    z = W_1 (s_1 o psi(L eps + b_0)) + mu

for one layer, with W_k orthogonal, s_k > 0 stored as logs and L a lower triangle with positive
diagonal.  Further layers put x -> psi(W_k (s_k o x) + b_k) in front of the last map.

psi is the identity at the start, with a skewness and a tail learnt for each coordinate, so that q
starts as a Gaussian.  There L, W_1 and s_1 say some things twice, and the Fisher matrix is singular
until the activations bend.  One layer says skewness; curved posteriors (a banana, a funnel) need two.

    log q(z) = log N(eps; 0, I) - sum log |det of the affine maps| - sum log psi'(a),

with the inverse in closed form.  Scores at fixed z follow from the inside out, through the affine maps
(:mod:`._affine_map`) and the activations, starting with d log q / d eps = -eps.

Local frame: shifts in units of what enters their map, logs of scales, left-trivialised tangents of the
W_k (:mod:`pyro_ngvi.linalg.stiefel`), relative moves of triangles.  Scores there are *tangent* scores:
directions that leave the orthogonal matrices are not in it.  Momentum keeps its numbers in this frame,
which is its transport by left translation.  The Fisher matrix has no closed form: train by
:class:`pyro_ngvi.optim.SPRING`, :class:`pyro_ngvi.IFVB` or :class:`pyro_ngvi.AIFVB`.  Averages of
iterates are Riemannian means of the W_k.

log q takes W' for the inverse of W, so W must stay orthogonal: optimizers that do not know the frame
(Adam, ``frame="stored"``) make it wrong, and the guide refuses what they leave.

Other forms, activations and retractions, the printed ones of Godichon-Baggioni, Nguyen & Tran (2024,
JASA, example 3) among them, are subclasses in ``benchmarks/flows/orthogonal_forms.py``.

Not for: posteriors close to a Gaussian (``FullRankNormal`` is exact there, with a known Fisher matrix).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ..linalg import stiefel
from ._affine_map import AffineMap
from .base import Family, Tensors, log_normal
from .sinh_arcsinh import SinhArcsinh

__all__ = ["OrthogonalFlow"]

#: sd of what enters an activation at the start
START = 1.0
#: nodes of the quadrature that centres and scales the start
NODES = 100


class OrthogonalFlow(Family):
    """Flows of ``layers`` elementwise activations between rotations; see the head of this file.

    Args:
        layers: number of activations, at least 1.

    Raises:
        ValueError: for another number of layers.

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
    has_transport = True

    def __init__(self, layers: int = 1) -> None:
        if not isinstance(layers, int) or layers < 1:
            raise ValueError(f"layers must be a whole number of at least 1, got {layers!r}.")
        self.layers = layers
        self.bends = [self._bend(k) for k in range(layers)]
        self.maps = [self._map(k) for k in range(layers + 1)]
        self.names = tuple(name for part in (*self.maps, *self.bends) for name in part.names)
        self.triangles = {n: k for m in self.maps for n, k in m.triangles.items()}
        #: momentum acts on all: no block of the Fisher matrix is known to stand apart
        self.location = self.names

    def _bend(self, k: int) -> SinhArcsinh:
        """The activation behind map k."""
        return SinhArcsinh(k)

    def _map(self, k: int) -> AffineMap:
        """The affine map of layer k; the last one puts out z."""
        if k == 0:
            return AffineMap("bias_0", triangle="base_tril")
        shift = "loc" if k == self.layers else f"bias_{k}"
        return AffineMap(shift, log_scale=f"log_scale_{k}", rotation=f"weight_{k}")

    def init(self, loc: Tensor, scale: float) -> Tensors:
        """Mean ``loc`` and every sd ``scale``."""
        x, weights = np.polynomial.hermite_e.hermegauss(NODES)
        weights = weights / weights.sum()
        params: Tensors = {n: torch.zeros_like(loc) for psi in self.bends for n in psi.names}
        flat = {name: torch.zeros((), dtype=torch.float64) for name in params}
        factor, shift = (
            START,
            0.0,
        )  # of the coming map, from standardised values to what it puts out
        for k, affine in enumerate(self.maps):
            if k > 0:
                x = self.bends[k - 1].forward(flat, torch.from_numpy(x)).numpy()
                mean = float(weights @ x)
                spread = float(np.sqrt(weights @ (x - mean) ** 2))
                factor = (scale if k == self.layers else START) / spread
                shift = -factor * mean
            x = factor * x + shift
            params |= affine.start(loc, factor, shift)
        params["loc"] = params["loc"] + loc
        return {name: params[name] for name in self.names}

    def _forward(self, params: Tensors, noise: Tensor) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """z, and for each activation what enters it and what leaves it."""
        entering, leaving = [], []
        x = noise
        for affine, psi in zip(self.maps, self.bends, strict=False):
            entering.append(affine.forward(params, x))
            x = psi.forward(params, entering[-1])
            leaving.append(x)
        return self.maps[-1].forward(params, x), entering, leaving

    def rsample(self, params: Tensors, noise: Tensor) -> Tensor:
        return self._forward(params, noise)[0]

    def _backward(self, params: Tensors, z: Tensor) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """eps, and for each activation what enters it and what leaves it."""
        entering, leaving = [], []
        y = z
        for k in reversed(range(self.layers)):
            leaving.insert(0, self.maps[k + 1].inverse(params, y))
            y = self.bends[k].inverse(params, leaving[0])
            entering.insert(0, y)
        return self.maps[0].inverse(params, y), entering, leaving

    def transport(self, params: Tensors, noise: Tensor) -> tuple[Tensor, Tensor]:
        z, entering, _ = self._forward(params, noise)
        return z, self._log_det(params, entering)

    def noise_of(self, params: Tensors, z: Tensor) -> Tensor:
        return self._backward(params, z)[0]

    def _log_det(self, params: Tensors, entering: list[Tensor]) -> Tensor:
        """log |det dz / deps| at the draws whose activations are entered by these."""
        total = torch.stack([m.log_det(params) for m in self.maps]).sum()
        for psi, a in zip(self.bends, entering, strict=True):
            total = total + psi.log_slope(params, a).sum(-1)
        return total

    def log_prob(self, params: Tensors, z: Tensor) -> Tensor:
        noise, entering, _ = self._backward(params, z)
        return log_normal(noise) - self._log_det(params, entering)

    def score(self, params: Tensors, z: Tensor) -> Tensors:
        return self._score(params, *self._backward(params, z))

    def draw_scores(self, params: Tensors, n: int) -> Tensors:
        # the activations of a draw are known, and no rounding on a way back enters
        loc = params["loc"]
        noise = torch.randn((n, loc.shape[-1]), dtype=loc.dtype, device=loc.device)
        _, entering, leaving = self._forward(params, noise)
        return self._score(params, noise, entering, leaving)

    def _score(
        self, params: Tensors, noise: Tensor, entering: list[Tensor], leaving: list[Tensor]
    ) -> Tensors:
        score: Tensors = {}
        x, delta = noise, -noise
        for k, affine in enumerate(self.maps):
            own, g = affine.score(params, x, delta)
            score |= own
            if k < self.layers:
                psi, a, x = self.bends[k], entering[k], leaving[k]
                delta = (g - psi.bend(params, a)) * (-psi.log_slope(params, a)).exp()
                score |= psi.score(params, a, delta)
        return {name: score[name] for name in self.names}

    def push(self, params: Tensors, tangent: Tensors) -> Tensors:
        return self._together([m.push(params, tangent) for m in self.maps], tangent)

    def pull(self, params: Tensors, grads: Tensors) -> Tensors:
        return self._together([m.pull(params, grads) for m in self.maps], grads)

    def retract(
        self, params: Tensors, tangent: Tensors, step: Tensor | float, coordinates: str = "local"
    ) -> Tensors:
        new = [m.retract(params, tangent, step) for m in self.maps]
        bends = [name for psi in self.bends for name in psi.names]
        return self._together(new, {k: params[k] + step * tangent[k] for k in bends})

    def _together(self, parts: list[Tensors], rest: Tensors) -> Tensors:
        joint = rest | {name: v for part in parts for name, v in part.items()}
        return {name: joint[name] for name in self.names}

    def average(self, average: Tensors, params: Tensors, rate: Tensor) -> Tensors:
        """Riemannian means of the rotations, plain ones of the rest."""
        return {
            name: stiefel.average(average[name], v, rate)
            if is_rotation(name)
            else torch.lerp(average[name], v, rate.to(v))
            for name, v in params.items()
        }

    def drift(self, params: Tensors) -> Tensor:
        """How far the rotations are from orthogonal, | |W v| / |v| - 1 | at worst for one v each."""
        worst = params["loc"].new_zeros(())
        for name, W in params.items():
            if is_rotation(name):
                v = torch.arange(1.0, W.shape[-1] + 1.0, dtype=W.dtype, device=W.device).cos()
                norm = torch.linalg.vector_norm
                worst = torch.maximum(worst, (norm(W @ v) / norm(v) - 1.0).abs())
        return worst

    def not_finite(self, params: Tensors) -> Tensor:
        # a gradient that is not finite in one latent entry spoils one row of the last map, and all
        # that lies behind it
        last = self.maps[-1].names
        rows = ~torch.isfinite(params["loc"])
        for name in last:
            if params[name].dim() == 2:
                rows = rows | ~torch.isfinite(params[name]).all(-1)
        rest = [~torch.isfinite(v).all() for name, v in params.items() if name not in last]
        return rows | (torch.stack(rest).any() & ~rows.any())


def is_rotation(name: str) -> bool:
    return name.startswith("weight_")
