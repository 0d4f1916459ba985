r"""MGVI's family: Gaussians whose precision M = I + J' F J is a function of their mean.

With A = F^(1/2) J, (n, d), M = I + A'A, and no matrix is made: A v and A'w are derivatives of one
recorded run of the model.  A draw solves

    M r = e + A'e',    e ~ N(0, I_d), e' ~ N(0, I_n),    so that r ~ N(0, M^-1),

by conjugate gradients.  Where d or n is at most :data:`SMALL`, I + A'A or I + AA' is made after all: it
is faster there, and exact.  log det M comes from Lanczos quadrature at fixed vectors of signs, the same
in each step, so that the ELBO of one m compares with that of another.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch.func import vjp, vmap

from ..families.base import LOG_2PI, Family, Tensors
from ..linalg.host import fixed_normal, outside_vmap
from ..linalg.positive import RESIDUAL, descend, log_forms
from .likelihoods import coordinates
from .whitening import WHITE, WhiteModel

#: size up to which a matrix is made whole
SMALL = 1024
#: share of the squared residual that the direction of a step leaves
COARSE = 1e-6
#: numbers in the rows that are multiplied at once
NUMBERS = 2**22


def by_rows(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """``function`` of rows (K, n) for x (..., n), outside of any ``vmap``, and without gradients."""

    class Rows(torch.autograd.Function):
        @staticmethod
        def forward(x: Any) -> Any:
            return function(x.reshape(-1, x.shape[-1])).reshape(*x.shape[:-1], -1)

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            ctx.mark_non_differentiable(output)

        @staticmethod
        def vmap(info: Any, in_dims: Any, x: Tensor) -> tuple[Tensor, int]:
            result: Any = Rows.apply(x.movedim(in_dims[0], 0))
            return result, 0

    return Rows.apply(x)  # pyright: ignore[reportReturnType]


class Metric:
    """M = I + A'A at a point, by products with A."""

    def __init__(self, model: WhiteModel, loc: Tensor, steps: int, probes: int) -> None:
        self.at, self.d, self.steps, self.probes = loc.clone(), len(loc), steps, probes

        def rows(xi: Tensor) -> Tensor:
            g = coordinates(model.sites({WHITE: xi})).to(loc)
            return g if len(g) else 0.0 * xi[:1]  # no data

        with torch.no_grad():  # of parameters of the model
            g, pull, *_ = vjp(rows, self.at)
            self.n, self._pull = len(g), lambda w: pull(w)[0]
            # A v is the derivative of A'w in w
            push: Any = vjp(self._pull, torch.zeros_like(g))[1]
            self._push = lambda v: push(v)[0]

    def push(self, V: Tensor) -> Tensor:
        """A v (K, n) of rows v (K, d)."""
        return self._products(V, self._push)

    def pull(self, W: Tensor) -> Tensor:
        """A'w (K, d) of rows w (K, n)."""
        return self._products(W, self._pull)

    def _products(self, rows: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        if len(rows) == 1:
            return function(rows[0])[None]
        return vmap(function, chunk_size=max(1, NUMBERS // max(self.n, self.d)))(rows)

    def product(self, V: Tensor) -> Tensor:
        """M v (K, d) of rows v (K, d)."""
        return V + self._products(V, lambda v: self._pull(self._push(v)))

    @cached_property
    def root(self) -> Tensor | None:
        """Cholesky factor of the smaller one of M and I + AA'; ``None`` where both are large."""
        k = min(self.n, self.d)
        if k > SMALL:
            return None
        one = torch.eye(k, dtype=self.at.dtype, device=self.at.device)
        if self.d == k:
            H = self.product(one)
        else:
            H = one + self._products(one, lambda w: self._push(self._pull(w)))
        return torch.linalg.cholesky_ex(0.5 * (H + H.mT))[0]

    def solve(self, B: Tensor, share: float = RESIDUAL) -> Tensor:
        """M^-1 b (K, d) of rows b (K, d); NaN where M is not finite."""
        if self.root is not None and self.d <= self.n:
            return torch.cholesky_solve(B.mT, self.root).mT
        if self.root is not None:
            return B - self.pull(torch.cholesky_solve(self.push(B).mT, self.root).mT)
        share = max(share, torch.finfo(B.dtype).eps)  # in float32 no smaller one is reached
        X, ended, flat, _ = descend(self.product, B, self.steps, share=share)
        if not ended:
            warnings.warn(
                f"AutoMetricNormal: {self.steps} steps of conjugate gradients do not solve for a draw. "
                f"Raise cg_steps, or narrow priors that are far wider than what the data say.",
                RuntimeWarning,
                stacklevel=2,
            )
        return torch.full_like(X, torch.nan) if flat is not None else X

    def draws(self, noise: Tensor) -> Tensor:
        """r (K, d) of rows of noise (K, d + n)."""
        own, data = noise.split([self.d, self.n], -1)
        return self.solve(own + self.pull(data))

    @cached_property
    def log_det(self) -> tuple[Tensor, Tensor]:
        """log det M and its standard error, which is 0 where it is exact."""
        if self.root is not None:
            value = 2.0 * self.root.diagonal().log().sum()
            return value, torch.zeros_like(value)
        signs = fixed_normal(self.probes, self.d, seed=self.d).sign().to(self.at)
        forms = log_forms(self.product, signs, self.steps)
        return forms.mean(), forms.std() / self.probes**0.5


class MetricNormal(Family):
    """Gaussians whose precision is a function of their mean: the family of ``AutoMetricNormal``.

        xi ~ N(m, M^-1),    M = I + J' F J,    z = theta(xi) the unconstrained vector (d,),

    in coordinates xi (d,) in which the prior is N(0, I), F the Fisher matrix of the likelihood in its
    parameters and J their derivatives at m.  Stored: ``loc`` = m (d,), whose Fisher matrix is M.  Draws
    are m + r with r held fixed, as M is: a fit ends where the expected gradient of the log joint in xi
    vanishes, at the best m for its covariance (Knollmueller & Ensslin 2019, arXiv:1901.11033).

    Args:
        cg_steps: steps of conjugate gradients at most, each a product with M.
        probes: vectors of signs for log det M, where d and the number of data are above 1,024.

    Raises:
        RuntimeError: for a copy, which has no model.

    Example:
        >>> import pyro, torch, pyro.distributions as dist, pyro_ngvi as ngvi
        >>> def model(y):
        ...     x = pyro.sample("x", dist.Normal(0.0, 1.0))
        ...     pyro.sample("y", dist.Normal(x, 0.5), obs=y)
        >>> guide = ngvi.AutoMetricNormal(model)
        >>> _ = guide(torch.tensor(1.0))
        >>> q = guide.get_posterior()
        >>> q.params["loc"].detach(), q.family.log_det(q.params)[0]  # 4 / 5, log(1 + 4)
        (tensor([0.8000]), tensor(1.6094))
    """

    names = ("loc",)
    newton_like = True

    def __init__(self, cg_steps: int = 1000, probes: int = 4) -> None:
        self.cg_steps, self.probes = cg_steps, probes
        self.model: WhiteModel | None = None
        #: the model of the last step of an optimizer of ours, as others may have been asked since
        self.stepped: WhiteModel | None = None
        self._last: Metric | None = None

    def forget(self) -> None:
        """Make the metric anew at the next use: the model or its parameters may have changed."""
        self._last = None

    def bound(self) -> WhiteModel:
        """The model, or an error."""
        if self.model is None:
            raise RuntimeError(
                "AutoMetricNormal: a copy has no model, and its covariance is made of one. Keep the "
                "original, or load guide.state_dict() into a new AutoMetricNormal(model)."
            )
        return self.model

    def metric(self, params: Tensors) -> Metric:
        """M at a mean; kept until the next."""
        loc = params["loc"].detach()
        if self._last is None or not torch.equal(self._last.at, loc):
            model = self.bound()
            made = model, loc, self.cg_steps, self.probes
            self._last = outside_vmap(lambda: Metric(*made))  # which outlives the vmap
        return self._last

    @torch.no_grad()
    def log_det(self, params: Tensors) -> tuple[Tensor, Tensor]:
        """log det M and its standard error, in nats."""
        metric = self.metric(params)
        return outside_vmap(lambda: metric.log_det)

    def init(self, loc: Tensor, scale: float) -> Tensors:
        return {"loc": self.bound().white(loc[None])[0][0]}

    def noise_dim(self, params: Tensors) -> int:
        metric = self.metric(params)
        return metric.d + metric.n

    def rsample(self, params: Tensors, noise: Tensor) -> Tensor:
        return self._theta(params["loc"] + by_rows(self.metric(params).draws, noise))

    def _theta(self, xi: Tensor) -> Tensor:
        return self.bound().theta(xi.reshape(-1, xi.shape[-1])).reshape(xi.shape)

    def centred_draw(self, params: Tensors, shape: torch.Size) -> Tensor:
        """Antithetic pairs m + r, m - r; without a partner a draw is one by itself."""
        if shape.numel() % 2:
            return super().centred_draw(params, shape)
        noise = self._noise(params, torch.Size((shape.numel() // 2,)))
        r = by_rows(self.metric(params).draws, noise)
        return self._theta(params["loc"] + torch.cat([r, -r]).reshape(*shape, -1))

    def fixed_draws(self, params: Tensors, n: int = 4096) -> Tensor:
        return super().fixed_draws(params, max(64, min(n, NUMBERS // self.dim(params))))

    def log_prob(self, params: Tensors, z: Tensor) -> Tensor:
        metric = self.metric(params)
        xi, log_jacobian = self.bound().white(z.reshape(-1, z.shape[-1]))
        r = xi - params["loc"]
        Mr = by_rows(metric.product, r.detach())
        square = 2.0 * (r * Mr).sum(-1) - (r.detach() * Mr).sum(-1)  # of gradient 2 M r
        constant = 0.5 * (self.log_det(params)[0] - metric.d * LOG_2PI)
        return (constant - 0.5 * square + log_jacobian).reshape(z.shape[:-1])

    def score(self, params: Tensors, z: Tensor) -> Tensors:
        r = self.bound().white(z)[0] - params["loc"]
        return {"loc": by_rows(self.metric(params).product, r)}

    def fisher_product(self, params: Tensors, tangent: Tensors) -> Tensors:
        return {"loc": by_rows(self.metric(params).product, tangent["loc"])}

    def natural_gradient(self, params: Tensors, gradient: Tensors) -> Tensors:
        self.stepped = self.model
        solve = partial(self.metric(params).solve, share=COARSE)
        return {"loc": by_rows(solve, gradient["loc"])}

    def __getstate__(self) -> dict[str, Any]:
        # a graph cannot be copied, and a copy comes without a model, as Pyro's
        return vars(self) | {"model": None, "stepped": None, "_last": None}
