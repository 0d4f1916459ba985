r"""Independent Dirichlet vectors, as a family over their stick-breaking coordinates.

x ~ Dirichlet(alpha) on the simplex of K entries, with total T = sum alpha and z in R^(K-1) the inverse
of PyTorch's ``StickBreakingTransform``: with fractions of what is left of the stick,

    sigmoid(z_k - log(K - k)) = x_k / (1 - x_1 - ... - x_{k-1}),   k = 1..K-1,
    log q(z) = sum_k alpha_k log x_k + lgamma(T) - sum_k lgamma(alpha_k),   |dx/dz| = x_1 ... x_K.

The fractions are independent Beta(alpha_k, alpha_{k+1} + ... + alpha_K), so the z_k are independent
with variance trigamma(alpha_k) + trigamma(alpha_{k+1} + ... + alpha_K).  K = 2 is the Beta(alpha_1,
alpha_2) of a probability, with z its logit.

Stored: ``log_concentration`` = log alpha (n, K).  The Hessian of the log-normaliser,

    diag(trigamma(alpha)) - trigamma(T) 1 1',

is, in relative velocities, D - c alpha alpha' with D = diag(alpha^2 trigamma(alpha)), c = trigamma(T).
The local frame divides by its root: with w = D^(-1/2) alpha, r = 1 - c w'w and
S = I - (1 - sqrt r) ww' / w'w,

    D - c alpha alpha' = D^(1/2) S S D^(1/2),   velocity = D^(-1/2) S^-1 tangent,   F = I.

Retraction: linear in the natural parameters, alpha <- alpha (1 + s velocity), where s = 1, or smaller
in those vectors where an entry would lose more than 3/4; each vector has an s of its own.

Sources: as for ``MeanFieldGamma``; Sethuraman (1994) for the fractions.  Not where simplices depend on
other latent variables strongly: use a full-rank Gaussian there.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, pad

from ..linalg.cholesky import SMALLEST
from ._special import digamma_gap, log_gamma_draw, stirling, trigamma_excess
from .base import LOG_2PI, Tensors, clamp_exponent
from .exponential import WhitenedFamily

__all__ = ["MeanFieldDirichlet"]


def _total(x: Tensor) -> Tensor:
    return x.sum(-1, keepdim=True)


def _tail(x: Tensor) -> Tensor:
    """x_{k+1} + ... + x_K for k = 1..K-1, by sums alone."""
    return x[..., 1:].flip(-1).cumsum(-1).flip(-1)


class MeanFieldDirichlet(WhitenedFamily):
    """Independent Dirichlet distributions over ``size`` entries each, in stick-breaking coordinates.

    The flat latent vector has (size - 1) entries for each simplex.  ``size=2`` is the Beta family.

    Raises:
        ValueError: for fewer than two entries, or a latent vector that is not made of whole simplices.

    Example:
        >>> import torch
        >>> family = MeanFieldDirichlet(3)
        >>> q = {"log_concentration": torch.tensor([[1.0, 2.0, 4.0]]).log()}
        >>> family.stddev(q)  # fractions Beta(1, 6) and Beta(2, 4)
        tensor([1.3514, 0.9637])
    """

    names = ("log_concentration",)
    location = names

    def __init__(self, size: int) -> None:
        if size < 2:
            raise ValueError(f"A simplex has at least two entries, got size={size}.")
        self.size = size

    def _simplices(self, z: Tensor) -> Tensor:
        if z.shape[-1] % (self.size - 1):
            raise ValueError(
                f"A vector of {z.shape[-1]} entries does not split into stick-breaking coordinates "
                f"of simplices of {self.size}: it needs a multiple of {self.size - 1}."
            )
        return z.unflatten(-1, (-1, self.size - 1))

    def _log_offset(self, like: Tensor) -> Tensor:
        return torch.arange(self.size - 1, 0, -1, dtype=like.dtype, device=like.device).log()

    def _log_x(self, z: Tensor) -> Tensor:
        """log x (..., n, K) of z (..., n (K - 1)); 1 - x is never formed."""
        t = self._simplices(z)
        t = t - self._log_offset(t)
        left = logsigmoid(-t).cumsum(-1)  # log of what is left of the stick
        return pad(logsigmoid(t), (0, 1)) + pad(left, (1, 0))

    def init(self, loc: Tensor, scale: float) -> Tensors:
        # The vector alpha has room for the mean and one width: the mean of x is the image of loc, and
        # the variances of z average to scale^2.  They fall as the total grows: bisect its logarithm.
        log_p = self._log_x(loc)
        low = torch.full_like(log_p[..., :1], -30.0)
        high = torch.full_like(low, 60.0)
        for _ in range(60):
            middle = 0.5 * (low + high)
            variance = self._variance((log_p + middle).exp()).mean(-1, keepdim=True)
            wide = variance > scale**2
            low, high = torch.where(wide, middle, low), torch.where(wide, high, middle)
        return {"log_concentration": log_p + 0.5 * (low + high)}

    def dim(self, params: Tensors) -> int:
        return params["log_concentration"][..., 1:].numel()

    def draw(self, params: Tensors, shape: torch.Size) -> Tensor:
        log_alpha = params["log_concentration"]
        g = log_alpha + log_gamma_draw(log_alpha.exp(), torch.Size(shape) + log_alpha.shape)
        rest = g[..., 1:].flip(-1).logcumsumexp(-1).flip(-1)
        return (g[..., :-1] - rest + self._log_offset(g)).flatten(-2)

    def _density(self, params: Tensors) -> tuple[Tensor, Tensor, Tensor]:
        """alpha, log of its mean vector p = alpha / T, and -log B(alpha) + sum alpha log p."""
        log_alpha = params["log_concentration"]
        alpha = log_alpha.exp()
        total = _total(alpha)
        log_total = total.log()
        half = 0.5 * (log_alpha - LOG_2PI) - stirling(alpha)
        constant = half.sum(-1) - (0.5 * (log_total - LOG_2PI) - stirling(total)).squeeze(-1)
        return alpha, log_alpha - log_total, constant

    def log_prob(self, params: Tensors, z: Tensor) -> Tensor:
        # sum alpha (log x - log p) by fractions of the stick, each as its logit's distance u from that
        # of its mean pi: log(1 - x) - log(1 - pi) = -change, log x - log pi = u - change
        alpha, _, constant = self._density(params)
        rest = _tail(alpha)
        alpha = alpha[..., :-1]
        t, t0 = self._simplices(z), alpha.log() - rest.log()
        t = t - self._log_offset(t)
        u = t - t0
        near = (alpha / (alpha + rest) * u.clamp(-1.0, 1.0).expm1()).log1p()
        change = torch.where(u.abs() < 1.0, near, logsigmoid(-t0) - logsigmoid(-t))
        return ((alpha * u - (alpha + rest) * change).sum(-1) + constant).sum(-1)

    def _gap(self, alpha: Tensor) -> Tensor:
        """log p - E[log x]."""
        return digamma_gap(alpha) - digamma_gap(_total(alpha))

    def score(self, params: Tensors, z: Tensor) -> Tensors:
        alpha, log_p, _ = self._density(params)
        return {"log_concentration": alpha * (self._log_x(z) - log_p + self._gap(alpha))}

    def entropy(self, params: Tensors) -> Tensor:
        alpha, _, constant = self._density(params)
        return (alpha * self._gap(alpha)).sum() - constant.sum()

    def kl(self, params: Tensors, other: Tensors) -> Tensor:
        alpha, log_p, constant = self._density(params)
        beta, log_r, other_constant = self._density(other)
        means = (beta - alpha) * self._gap(alpha) + beta * (log_r - log_p)
        return means.sum() + (constant - other_constant).sum()

    def mean(self, params: Tensors) -> Tensor:
        alpha = params["log_concentration"].exp()
        z = torch.digamma(alpha[..., :-1]) - torch.digamma(_tail(alpha))
        return (z + self._log_offset(z)).flatten(-2)

    def _variance(self, alpha: Tensor) -> Tensor:
        return torch.polygamma(1, alpha[..., :-1]) + torch.polygamma(1, _tail(alpha))

    def stddev(self, params: Tensors) -> Tensor:
        return self._variance(params["log_concentration"].exp()).sqrt().flatten(-2)

    def icdf(self, params: Tensors, levels: Tensor) -> Tensor:
        alpha = params["log_concentration"].detach().exp()
        a, b = alpha[..., :-1].flatten(), _tail(alpha).flatten()
        p = levels.unsqueeze(-1)
        # from the end that is the shorter one, so that neither x nor 1 - x is rounded to 1
        lower, upper = _log_beta_quantile(a, b, p), _log_beta_quantile(b, a, 1.0 - p)
        log_x = torch.where(lower < upper, lower, torch.log(-torch.expm1(upper)))
        log_rest = torch.where(lower < upper, torch.log(-torch.expm1(lower)), upper)
        offset = self._log_offset(alpha).expand(alpha[..., 1:].shape).flatten()
        return log_x - log_rest + offset

    def entry_icdf(self, params: Tensors, levels: Tensor) -> Tensor:
        """Quantiles (L, n, size) at ``levels`` (L,) of the entries x_k ~ Beta(alpha_k, T - alpha_k)."""
        alpha = params["log_concentration"].detach().double().exp()
        rest = _total(alpha) - alpha
        p = levels.reshape(-1, 1, 1)
        return _log_beta_quantile(alpha, rest, p).exp().to(levels)

    def _root(self, params: Tensors) -> tuple[Tensor, Tensor, Tensor]:
        """D^(-1/2), the unit vector along w, and sqrt(r)."""
        alpha = params["log_concentration"].exp()
        total, excess = _total(alpha), trigamma_excess(alpha)
        diagonal = alpha + excess
        w = alpha * diagonal.rsqrt()
        # r T = h - e + e h / T with h = T - w'w and e the excess of T: no difference of large numbers
        h, e = _total(alpha * excess / diagonal), trigamma_excess(total)
        r = (h * (1.0 + e / total) - e) / total
        return diagonal.rsqrt(), w * _total(w.square()).rsqrt(), r.sqrt()

    def _stretch(self, unit: Tensor, root: Tensor, x: Tensor) -> Tensor:
        """S^-1 x."""
        return x + (1.0 / root - 1.0) * unit * _total(unit * x)

    def push(self, params: Tensors, tangent: Tensors) -> Tensors:
        scale, unit, root = self._root(params)
        return {
            "log_concentration": scale * self._stretch(unit, root, tangent["log_concentration"])
        }

    def pull(self, params: Tensors, grads: Tensors) -> Tensors:
        scale, unit, root = self._root(params)
        return {"log_concentration": self._stretch(unit, root, scale * grads["log_concentration"])}

    def retract(
        self, params: Tensors, tangent: Tensors, step: Tensor | float, coordinates: str = "local"
    ) -> Tensors:
        change = step * self.push(params, tangent)["log_concentration"]
        room = 1.0 - SMALLEST
        shrink = room / (-change).amax(-1, keepdim=True).clamp_min(room)
        moved = params["log_concentration"] + torch.log1p(shrink * change)
        return {"log_concentration": clamp_exponent(moved)}

    def not_finite(self, params: Tensors) -> Tensor:
        bad = ~params["log_concentration"].isfinite().all(-1, keepdim=True)
        return bad.expand(*bad.shape[:-1], self.size - 1).flatten()


def _log_beta_quantile(a: Tensor, b: Tensor, p: Tensor) -> Tensor:
    """log of the p-quantile of Beta(a, b)."""
    from scipy.special import betaincinv, betaln

    one, two, level = (x.double().cpu().numpy() for x in (a, b, p))
    x = torch.as_tensor(betaincinv(one, two, level))
    # P(x) = x^a / (a B(a, b)) to first order, where x itself underflows
    small = (torch.as_tensor(level).log() + a.cpu().double().log()) + torch.as_tensor(
        betaln(one, two)
    )
    return torch.where(x > 1e-30, x.log(), small / a.cpu().double()).to(a)
