r"""Independent Gamma and Dirichlet variables, over the coordinates in which they fill R^d.

An exponential family, log q(z) = <eta, T(z)> - A(eta), has in its natural parameters eta the Hessian
of A as Fisher matrix.  The local frames make it the identity, and moves are linear in eta,

    eta <- eta - b F^-1 g = eta - b dL/d(mean parameters)        (Khan & Nielsen 2018),

each shortened in those elements (Gamma) or vectors (Dirichlet) where a parameter would lose over 3/4.

**Gamma**, of rate b = a / m: eta = (a, -b), T = (z, e^z).  In (log m, log a)
F = diag(a, a^2 trigamma(a) - a), without a difference of large numbers; the frame divides by its root.
With relative velocities v of m and w of a, a <- a (1 + s w) and b <- b (1 + s (w - v)).

**Dirichlet** (alpha), K entries with total T: in relative velocities the Hessian of A is, with
D = diag(alpha^2 trigamma(alpha)), c = trigamma(T), w = D^(-1/2) alpha, r = 1 - c w'w and
S = I - (1 - sqrt r) ww' / w'w,

    D - c alpha alpha' = D^(1/2) S S D^(1/2),   velocity = D^(-1/2) S^-1 tangent.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, pad

from ..linalg.cholesky import SMALLEST
from .base import LOG_2PI, Family, Tensors, clamp_exponent
from .log_gamma import digamma_gap, inverse_trigamma, log_gamma_draw, stirling, trigamma_excess


class WhitenedFamily(Family):
    """A family with independent entries of z and the identity as Fisher matrix in the local frame."""

    coordinates = ("local", "natural")  # one and the same
    orthogonal_frame = True

    def covariance(self, params: Tensors) -> Tensor:
        return torch.diag(self.stddev(params).square())

    def scale_tril(self, params: Tensors) -> Tensor:
        return torch.diag(self.stddev(params))

    def fisher_product(self, params: Tensors, tangent: Tensors) -> Tensors:
        return dict(tangent)

    def natural_gradient(self, params: Tensors, gradient: Tensors) -> Tensors:
        return dict(gradient)


class MeanFieldGamma(WhitenedFamily):
    """Independent Gamma distributions of x = e^z, over z: with u = z - log m, for each entry

        log q(z) = a (u - e^u) + a log a - lgamma(a),    the density of z, not of x.

    Stored: ``log_mean`` = log m, ``log_concentration`` = log a (d,).  F is the identity in the frame.

    Example:
        >>> import torch
        >>> family = MeanFieldGamma()
        >>> q = family.init(torch.zeros(3), scale=0.5)
        >>> family.mean(q).abs().max() < 1e-6, family.stddev(q)
        (tensor(True), tensor([0.5000, 0.5000, 0.5000]))
    """

    names = ("log_mean", "log_concentration")
    location = names

    def init(self, loc: Tensor, scale: float) -> Tensors:
        # the sd of z is the root of trigamma(a), its mean log m - (log a - digamma(a))
        a = inverse_trigamma(torch.full_like(loc, scale**2))
        return {"log_mean": loc + digamma_gap(a), "log_concentration": a.log()}

    def matched(self, loc: Tensor, precision: Tensor) -> Tensors:
        """The member with mode loc (d,) and the diagonal of precision (d, d) as -d^2 log q / dz^2."""
        # log q = a (u - e^u) + ...
        return {"log_mean": loc.clone(), "log_concentration": precision.diagonal().log()}

    def draw(self, params: Tensors, shape: torch.Size) -> Tensor:
        a = params["log_concentration"].exp()
        z = params["log_mean"] + log_gamma_draw(a, torch.Size(shape) + a.shape)
        # as torch.distributions.Gamma: the model sees x = e^z, and log 0 is not a number to work with
        return z.clamp_min(math.log(torch.finfo(z.dtype).tiny))

    def log_prob(self, params: Tensors, z: Tensor) -> Tensor:
        log_a = params["log_concentration"]
        a, u = log_a.exp(), z - params["log_mean"]
        return (a * (u - u.expm1()) + 0.5 * (log_a - LOG_2PI) - stirling(a)).sum(-1)

    def score(self, params: Tensors, z: Tensor) -> Tensors:
        a = params["log_concentration"].exp()
        u = z - params["log_mean"]
        e = u.expm1()
        return {"log_mean": a * e, "log_concentration": a * (u - e + digamma_gap(a))}

    def entropy(self, params: Tensors) -> Tensor:
        log_a = params["log_concentration"]
        a = log_a.exp()
        return (a * digamma_gap(a) - 0.5 * (log_a - LOG_2PI) + stirling(a)).sum()

    def kl(self, params: Tensors, other: Tensors) -> Tensor:
        log_a, log_b = params["log_concentration"], other["log_concentration"]
        a, b = log_a.exp(), log_b.exp()
        ratio = params["log_mean"] - other["log_mean"]
        mean = b * (ratio.expm1() - ratio)
        shape = (b - a) * digamma_gap(a) + 0.5 * (log_a - log_b) + stirling(b) - stirling(a)
        return (mean + shape).sum()

    def mean(self, params: Tensors) -> Tensor:
        return params["log_mean"] - digamma_gap(params["log_concentration"].exp())

    def stddev(self, params: Tensors) -> Tensor:
        a = params["log_concentration"].exp()
        return (a + trigamma_excess(a)).sqrt() / a

    def icdf(self, params: Tensors, levels: Tensor) -> Tensor:
        from scipy.special import gammaincinv

        a = params["log_concentration"].detach().exp()
        p = levels.unsqueeze(-1)
        x = gammaincinv(a.double().cpu().numpy(), p.double().cpu().numpy())
        x = torch.as_tensor(x).to(a.device)
        # P(x) = x^a / Gamma(a + 1) to first order, where x itself underflows
        small = (p.log() + torch.lgamma(a + 1.0)) / a
        z = torch.where(x > 1e-30, x.log().to(a), small)
        return z + (params["log_mean"] - params["log_concentration"]).detach()

    def frame(self, params: Tensors) -> Tensors:
        log_a = params["log_concentration"]
        excess = trigamma_excess(log_a.exp())
        return {"log_mean": (-0.5 * log_a).exp(), "log_concentration": excess.rsqrt()}

    def retract(
        self, params: Tensors, tangent: Tensors, step: Tensor | float, coordinates: str = "local"
    ) -> Tensors:
        velocity = self.push(params, tangent)
        w = step * velocity["log_concentration"]
        rate = w - step * velocity["log_mean"]
        room = 1.0 - SMALLEST
        shrink = room / torch.maximum(-w, -rate).clamp_min(room)
        change = torch.log1p(shrink * w)
        log_mean = params["log_mean"] + change - torch.log1p(shrink * rate)
        log_a = clamp_exponent(params["log_concentration"] + change)
        return {"log_mean": log_mean, "log_concentration": log_a}

    def not_finite(self, params: Tensors) -> Tensor:
        return ~(params["log_mean"].isfinite() & params["log_concentration"].isfinite())


def _total(x: Tensor) -> Tensor:
    return x.sum(-1, keepdim=True)


def _tail(x: Tensor) -> Tensor:
    """x_{k+1} + ... + x_K for k = 1..K-1, by sums alone."""
    return x[..., 1:].flip(-1).cumsum(-1).flip(-1)


class MeanFieldDirichlet(WhitenedFamily):
    """Independent Dirichlet distributions over K = ``size`` entries each, 2 for the Beta family.

    z (n (K - 1),) holds n simplices in the inverse of PyTorch's ``StickBreakingTransform``:

        sigmoid(z_k - log(K - k)) = x_k / (1 - x_1 - ... - x_{k-1}),   k = 1..K-1,
        log q(z) = sum_k alpha_k log x_k + lgamma(sum_k alpha_k) - sum_k lgamma(alpha_k).

    These fractions are independent Beta(alpha_k, alpha_{k+1} + ... + alpha_K), hence the z_k too
    (Sethuraman 1994).  Stored: ``log_concentration`` = log alpha (n, K).  F is I in the frame.

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
        self.size = size

    def _log_offset(self, like: Tensor) -> Tensor:
        return torch.arange(self.size - 1, 0, -1, dtype=like.dtype, device=like.device).log()

    def _logits(self, z: Tensor) -> Tensor:
        """Of the fractions of the stick, (..., n, K - 1), for z (..., n (K - 1))."""
        return z.unflatten(-1, (-1, self.size - 1)) - self._log_offset(z)

    def _log_x(self, z: Tensor) -> Tensor:
        """log x (..., n, K) of z (..., n (K - 1)); 1 - x is never formed."""
        t = self._logits(z)
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

    def matched(self, loc: Tensor, precision: Tensor) -> Tensors:
        """The member with this mode and, in sum, the curvatures on the diagonal of this matrix.

        The log density of a fraction f = sigmoid(t) is alpha log f + rest log(1 - f): its mode is the
        mean p of x, its curvature (alpha + rest) f (1 - f), where alpha + rest is T times what is left.
        """
        t, log_p = self._logits(loc), self._log_x(loc)
        left = pad(logsigmoid(-t).cumsum(-1), (1, 0))[..., :-1]
        share = _total((left + logsigmoid(t) + logsigmoid(-t)).exp())
        total = _total(precision.diagonal().unflatten(-1, t.shape[-2:])) / share
        return {"log_concentration": log_p + total.log()}

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
        t, t0 = self._logits(z), alpha.log() - rest.log()
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

    def _root(self, params: Tensors) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """D^(-1/2), and x -> S^-1 x."""
        alpha = params["log_concentration"].exp()
        total, excess = _total(alpha), trigamma_excess(alpha)
        diagonal = alpha + excess
        w = alpha * diagonal.rsqrt()
        # r T = h - e + e h / T with h = T - w'w and e the excess of T: no difference of large numbers
        h, e = _total(alpha * excess / diagonal), trigamma_excess(total)
        r = (h * (1.0 + e / total) - e) / total
        unit, root = w * _total(w.square()).rsqrt(), r.sqrt()
        return diagonal.rsqrt(), lambda x: x + (1.0 / root - 1.0) * unit * _total(unit * x)

    def push(self, params: Tensors, tangent: Tensors) -> Tensors:
        scale, stretch = self._root(params)
        return {"log_concentration": scale * stretch(tangent["log_concentration"])}

    def pull(self, params: Tensors, grads: Tensors) -> Tensors:
        scale, stretch = self._root(params)
        return {"log_concentration": stretch(scale * grads["log_concentration"])}

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

    one, two, level = (x.double().cpu() for x in (a, b, p))
    x = torch.as_tensor(betaincinv(*(v.numpy() for v in (one, two, level))))
    # P(x) = x^a / (a B(a, b)) to first order, where x itself underflows
    log_beta = torch.as_tensor(betaln(one.numpy(), two.numpy()))
    small = level.log() + one.log() + log_beta
    return torch.where(x > 1e-30, x.log(), small / one).to(a)
