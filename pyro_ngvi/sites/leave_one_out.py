r"""What q would be without data, and how well it predicts them, from the sites: no refitting.

    elpd = sum_n log int p(y_n | f_n) q_-n(f_n) df_n,      q_-n  propto  q / t_n,

by quadrature at points where q_-n t_n is (Liu & Pierce 1994, Biometrika 81).

For q(f_n) = N(m, C), S S' = C, and its site t_n(f) = exp(nu' f - f' Lambda f / 2) the *cavity* q / t_n
is proportional to N(m_, C_),

    C_ = (C^-1 - Lambda)^-1 = S M^-1 S',    m - m_ = C_ g,    M = I - S' Lambda S,    g = nu - Lambda m,

proper where M is positive definite.  C is never inverted, so it may be singular.  In the whole block
with posterior covariance V, of which f_n sees A (C = A V A'), dividing out t_n moves the mean by V A'
r, of squared length r' C r = (C_ g)' r in units of q's precision, where by Woodbury

    r = (I - Lambda C)^-1 g = g + Lambda C_ g,    KL(q_-n || q) = (tr M^-1 - k + log |M| + r' C r) / 2.

All of it needs the k x k marginals only, so it holds in every algebra (Opper & Winther 2000).  Where
noise is far below what the other data leave open, M is near 0, and its subtraction leaves no digits:
then :func:`.dense.remainders` has M and g for k = 1, and else the datum is *lost*.  A set G of data is
one site of its stacked predictors; where these have more entries than the block, of the block itself
(Lambda_G -> A_G' Lambda_G A_G, g_G -> A_G' g_G, C_G -> V).

The other sites stay as they are with all data: exact for a Gaussian likelihood; with others they would
follow a little (Vehtari, Mononen, Tolvanen, Sivula & Winther 2016, JMLR 17(103)), as they do after
``guide.remove(n)`` and a few steps.  Under ``poutine.scale`` sites are of p^c, and p is predicted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..linalg.cholesky import inverse_triangle
from ..linalg.products import eye_like, matvec
from ..linalg.spectral import square_root
from ..optim.rule import require
from .algebra import Snapshot
from .dense import WhitePosterior, remainders
from .expectation import quadrature_points
from .joint import in_latent, white_posterior

#: points for each entry of f for up to three, and in all for more: p is less smooth than log p
ORDERS, SOBOL = {1: 128, 2: 32, 3: 16}, 8192
#: entries of f that are evaluated at once
CHUNK = 2**23
#: rows of all data, or D if more, up to which roundings are answered by a matrix of N x N
FEW = 1024
#: nats by which roundings may move a log density; N with random signs are 1/14 of the sum's error
LOST = 0.05


@dataclass(frozen=True)
class Cavity:
    """Gaussians of f without their sites, and how far q is from there; NaN where not ``proper`` (n,),
    or ``lost`` (n,) to roundings.  ``move`` (n, k) is m - m_, ``pull`` (n, k) r; ``distance`` (n,) and
    ``kl`` (n,) are those of an :class:`Influence`.
    """

    mean: Tensor
    covariance: Tensor
    proper: Tensor
    lost: Tensor
    move: Tensor
    pull: Tensor
    distance: Tensor
    kl: Tensor


def cavities(at: Snapshot, name: str) -> Cavity:
    """Those of every datum of a group."""
    m, q = at.marginals[name], at.posterior
    what, dense = (m.mean, m.covariance, *at.sites[name]), isinstance(q, WhitePosterior)
    eps, moved, size = torch.finfo(m.mean.dtype).eps, m.covariance.diagonal(dim1=-2, dim2=-1), 0.0
    if dense:
        moved, size = q.sensitivity(at.view.maps[name].design)
    of_M = (what[3].diagonal(dim1=-2, dim2=-1).abs() * moved).sum(-1)
    of_mean = torch.maximum(m.mean.abs(), (moved * size).sqrt())
    found = divide_out(*what, errors=(4.0 * eps * of_M, eps * of_mean))
    if dense and at.complete and m.mean.shape[-1] == 1 and bool(found.lost.any()):
        left = remainders(at.view.maps, at.sites, name, max(len(q.mean), FEW))
        if left is not None:
            errors = 4.0 * left[2], torch.zeros_like(m.mean)
            found = divide_out(*what, errors=errors, left=left[:2])
    return found


def divide_out(
    mean: Tensor,
    covariance: Tensor,
    linear: Tensor,
    precision: Tensor,
    *,
    errors: tuple[Tensor, Tensor] | None = None,
    left: tuple[Tensor, Tensor] | None = None,
) -> Cavity:
    """The cavities of q(f) = N(mean (n, k), covariance (n, k, k)) without sites (n, k), (n, k, k).

    ``errors`` are those of M (n,) and of the mean in g (n, k); ``left`` has M and g known otherwise.
    """
    k = mean.shape[-1]
    finite = torch.isfinite(covariance).all(-1).all(-1)
    S = square_root(torch.where(finite.reshape(-1, 1, 1), covariance, 0.0))
    Lambda = 0.5 * (precision + precision.mT)
    M, g = left or (eye_like(S) - S.mT @ Lambda @ S, linear - matvec(Lambda, mean))
    chol, info = torch.linalg.cholesky_ex(M)
    proper = (info == 0) & finite & torch.isfinite(g).all(-1)
    inverse, lost = inverse_triangle(chol), torch.zeros_like(finite)
    trace = inverse.square().sum((-2, -1))
    if errors is not None:  # over M, which may be rounding alone where it is below 0, and in sds
        least = M.diagonal(dim1=-2, dim2=-1).abs().amin(-1)
        over = torch.where(proper, trace, least.reciprocal())
        blur = (Lambda.diagonal(dim1=-2, dim2=-1).abs() * errors[1]).unsqueeze(-2) @ S.abs()
        lost = finite & (errors[0] * over + blur.sum((-2, -1)) * over.sqrt() > LOST)
    proper = proper & ~lost
    half = inverse @ S.mT
    C = half.mT @ half
    move = matvec(C, g)
    pull = g + matvec(Lambda, move)
    square = (move * pull).sum(-1).clamp_min(0.0)
    log_det = 2.0 * torch.diagonal(chol, dim1=-2, dim2=-1).log().sum(-1)
    kl = 0.5 * (trace - k + log_det + square)

    def known(x: Tensor) -> Tensor:
        return torch.where(proper.reshape(-1, *[1] * (x.dim() - 1)), x, torch.nan)

    figures = map(known, (move, pull, square.sqrt(), kl.clamp_min(0.0)))
    return Cavity(known(mean - move), known(C), proper, lost, *figures)


@dataclass(frozen=True)
class SiteLOO:
    """Expected log predictive density of new data, by leave-one-out, in nats: ``guide.loo()``.

    A datum is one value of an observed site, or of several where these see the same predictor.

    Attributes:
        elpd: sum_n log p(y_n | y_-n); NaN where some cavity is not proper, or lost to roundings.
        se: its standard error, sqrt(N Var_n), for independent terms.
        p_loo: log density of the data under q less ``elpd``, the effective number of parameters.
        pointwise: by group, log p(y_n | y_-n) (N,); NaN where the cavity is not proper, or no datum is.
        improper: how many data have a cavity that is not a proper Gaussian.
        absent: how many are missing (NaN) or masked.
        lost: how many have a density that roundings may move by ``LOST`` = 0.05 nats; NaN, too.

    Example:
        >>> import pyro, pyro.distributions as dist, pyro_ngvi as ngvi
        >>> def model(y):
        ...     w = pyro.sample("w", dist.Normal(0.0, 10.0))
        ...     with pyro.plate("data", len(y)):
        ...         pyro.sample("y", dist.Normal(w, 1.0), obs=y)
        >>> fit = ngvi.fit(model, torch.tensor([0.0, 1.0, 5.0]), guide="AutoSites", progress=False)
        >>> print(fit.guide.loo())
        elpd_loo -13.85 nats, standard error 4.31, p_loo 5.40 (of 3 data)
    """

    elpd: float
    se: float
    p_loo: float
    pointwise: dict[str, Tensor] = field(repr=False)
    improper: int
    absent: int
    lost: int = 0

    @property
    def count(self) -> int:
        """How many data there are, absent ones left out."""
        return sum(x.numel() for x in self.pointwise.values()) - self.absent

    def __str__(self) -> str:
        of = f"of {self.count} data"
        if self.lost:
            dtype = next(iter(self.pointwise.values())).dtype
            return (
                f"No elpd: the digits of {self.lost} {of} are lost in {dtype}: their noise is too far "
                f"below what the other data leave open. Use torch.float64, or a larger noise."
            )
        if self.improper:
            rest = sum(float(x.nansum()) for x in self.pointwise.values())
            return (
                f"No elpd: {self.improper} {of} have a cavity that is no proper Gaussian (the others "
                f"sum to {rest:.2f} nats). Take more steps, or refit without them."
            )
        gone = f"; {self.absent} missing" if self.absent else ""
        return (
            f"elpd_loo {self.elpd:.2f} nats, standard error {self.se:.2f}, p_loo {self.p_loo:.2f} "
            f"({of}{gone})"
        )


@torch.no_grad()
def loo_of(at: Snapshot) -> SiteLOO:
    """The leave-one-out densities of every datum of a snapshot."""
    pointwise, improper, lost, absent, gained = {}, 0, 0, 0, 0.0
    for name, m in at.marginals.items():
        cavity = cavities(at, name)
        left = cavity.covariance if m.rest is None else cavity.covariance + m.rest
        without, silent = _log_predictive(at, name, cavity.mean, left)
        with_it, _ = _log_predictive(at, name, *m.whole)
        known = cavity.proper & ~silent
        pointwise[name] = torch.where(known, without, torch.nan)
        improper += int((~cavity.proper & ~cavity.lost & ~silent).sum())
        lost += int((cavity.lost & ~silent).sum())
        absent += int(silent.sum())
        gained += float(torch.where(known, with_it - without, 0.0).sum())
    if improper or lost:
        elpd = se = gained = float("nan")
    else:
        terms = torch.cat([x[~x.isnan()] for x in pointwise.values()])
        elpd, se = float(terms.sum()), float((len(terms) * terms.var(correction=0)).sqrt())
    return SiteLOO(elpd, se, gained, pointwise, improper, absent, lost)


def _log_predictive(
    at: Snapshot, name: str, mean: Tensor, covariance: Tensor
) -> tuple[Tensor, Tensor]:
    """log E p(y_n | f) (N,) for f ~ N(mean, covariance) of a group; which data have p = 1 always.

    The points f = mean + S v, v = start + spread x, lie where N(mean, covariance) times the site is, or
    somewhat wider: those of the cavity itself would miss a likelihood that is much narrower.
    """
    size, k = mean.shape
    linear, precision = at.sites[name]
    mean, S = mean.nan_to_num(0.0), square_root(covariance.nan_to_num(0.0))
    values, U = torch.linalg.eigh(eye_like(S) + S.mT @ precision @ S)
    values = values.clamp_min(0.1)  # beside a rest the product need not be proper
    g = linear.unsqueeze(-1) - precision @ mean.unsqueeze(-1)
    start = (U @ ((U.mT @ (S.mT @ g)) / values.unsqueeze(-1))).squeeze(-1)
    widest = 1.3 if k not in ORDERS else max(1.0, ORDERS[k] ** 0.5 / 3.8)
    sd = values.rsqrt() * values.pow(0.25).clamp(1.0 / widest, widest)
    spread, log_det = U * sd.unsqueeze(-2), sd.log().sum(-1)

    points = quadrature_points(k, ORDERS.get(k, SOBOL), mean)
    total = mean.new_full((size,), -torch.inf)
    silent = torch.ones(size, dtype=torch.bool, device=mean.device)
    rows = max(1, CHUNK // max(size * k, 1))
    for x, w in zip(points.x.split(rows), points.weights.split(rows), strict=True):
        v = start + torch.einsum("nij,qj->qni", spread, x)
        # log N(v; 0, I) dv / (N(x; 0, I) dx)
        log_ratio = 0.5 * (x.square().sum(-1, keepdim=True) - v.square().sum(-1)) + log_det
        f = {n: m.mean.expand(len(x), *m.mean.shape) for n, m in at.marginals.items()}
        f[name] = mean + torch.einsum("nij,qnj->qni", S, v)
        log_p = at.call.log_likelihood(f, scaled=False)[name]
        silent = silent & (log_p == 0.0).all(0)
        terms = log_p + log_ratio + w.log().unsqueeze(-1)
        total = torch.logaddexp(total, torch.logsumexp(terms, 0))
    return total, silent


@dataclass(frozen=True)
class Influence:
    """What q would be without each of G data, or sets of data, of a group: ``guide.influence()``.

    Attributes:
        distance: (G,), how far the posterior mean of the latent block moves, sqrt(d' V^-1 d), in sds.
            Squared, over the number of coefficients of a linear model with a flat prior and the noise
            known, it is Cook's distance (1977).
        kl: (G,), KL(q without || q) in nats.
        prediction: for each the shift (k,) of the mean of its own f, with less without; (G, k) for
            single data, a list of (n, k) for sets.
        improper: how many leave no proper Gaussian, or one lost to roundings; their figures are NaN.

    Example:
        >>> import pyro, pyro.distributions as dist, pyro_ngvi as ngvi
        >>> def model(y):
        ...     w = pyro.sample("w", dist.Normal(0.0, 10.0))
        ...     with pyro.plate("data", len(y)):
        ...         pyro.sample("y", dist.Normal(w, 1.0), obs=y)
        >>> fit = ngvi.fit(model, torch.tensor([0.0, 1.0, 5.0]), guide="AutoSites", progress=False)
        >>> found = fit.guide.influence()
        >>> found.most(2), float(found.distance.max().round()), found.shift([0, 2]).squeeze(-1).round()
        (tensor([2, 0]), 3.0, tensor([-1.,  1.]))
    """

    group: str
    distance: Tensor = field(repr=False)
    kl: Tensor = field(repr=False)
    prediction: Tensor | list[Tensor] = field(repr=False)
    improper: int
    _shift: Callable[[Tensor], Tensor] = field(repr=False)

    def most(self, count: int = 10) -> Tensor:
        """Numbers (count,) of the data, or sets, of the largest distance, improper ones first."""
        require(count >= 0, "count", "not be negative", count)
        order = self.distance.nan_to_num(torch.inf).argsort(descending=True, stable=True)
        return order[:count]

    def shift(self, indices: Any = None) -> Tensor:
        """Posterior mean of the flat latent vector (n, D) with the data less that without.

        Of the data, or sets, of these numbers; ``None`` for all.  Not for state-space priors.
        """
        every = torch.arange(len(self.distance), device=self.distance.device)
        chosen = every if indices is None else every[torch.as_tensor(indices)].reshape(-1)
        return self._shift(chosen)

    def __str__(self) -> str:
        first = ", ".join(f"{n} ({float(self.distance[n]):.2f})" for n in self.most(5).tolist())
        bad = f"; {self.improper} leave no proper Gaussian" if self.improper else ""
        return (
            f"Influence of {len(self.distance)} parts of {self.group!r} on the posterior mean, in "
            f"posterior standard deviations; the most: {first}{bad}"
        )


@torch.no_grad()
def influence_of(at: Snapshot, group: str, sets: Sequence[Tensor] | None) -> Influence:
    """The influence of every datum of a group, or of each of some sets of them (numbers)."""
    if sets is not None:
        return _of_sets(at, group, sets)
    cavity = cavities(at, group)

    def shift(chosen: Tensor) -> Tensor:
        design = at.view.maps[group].design[chosen]
        pulls = torch.einsum("nkr,nk->nr", design, cavity.pull[chosen])
        return in_latent(at, white_posterior(at, "shift()").solve(pulls))

    improper = int((~cavity.proper).sum())
    return Influence(group, cavity.distance, cavity.kl, cavity.move, improper, shift)


def _of_sets(at: Snapshot, group: str, sets: Sequence[Tensor]) -> Influence:
    q, design = white_posterior(at, "groups="), at.view.maps[group].design
    mean, (linear, precision) = at.marginals[group].mean, at.sites[group]
    figures, predictions, pulls = [], [], []
    for index in sets:
        A = design[index].flatten(0, 1)
        stacked = torch.block_diag(*precision[index])
        g = linear[index].flatten() - stacked @ mean[index].flatten()
        whole = len(A) > len(q.mean)  # the same site as one of the block itself
        if whole:
            stacked, g = A.mT @ stacked @ A, A.mT @ g
        half = q.covariance_half() if whole else q.half(A)
        # the site of mean 0 and linear term g moves as that of f_hat and nu does
        site = g[None], stacked[None]
        cavity = divide_out(torch.zeros_like(site[0]), (half.mT @ half)[None], *site)
        pulls.append(cavity.pull[0] if whole else A.mT @ cavity.pull[0])
        figures.append((cavity.distance, cavity.kl, cavity.proper))
        predictions.append((A @ q.solve(pulls[-1])).reshape(len(index), -1))
    distance, kl, proper = map(torch.cat, zip(*figures, strict=True))

    def shift(chosen: Tensor) -> Tensor:
        return in_latent(at, q.solve(torch.stack(pulls)[chosen]))

    return Influence(group, distance, kl, predictions, int((~proper).sum()), shift)
