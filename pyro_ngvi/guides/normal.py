"""Gaussian guides: the same guide around four families."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..families import FactorNormal, FactorPrecisionNormal, FullRankNormal, MeanFieldNormal
from ..families.base import Family
from ..linalg.host import host_bool
from .base import AutoFamily
from .initialization import check_position
from .posterior import FamilyDistribution

__all__ = [
    "AutoFactorNormal",
    "AutoFactorPrecision",
    "AutoFullRankNormal",
    "AutoMeanFieldNormal",
]


class AutoMeanFieldNormal(AutoFamily):
    """Independent Gaussians over all unconstrained latent variables.

    q(z) = N(z; mu, diag(sigma^2)) over the flat vector z (d,) of the latent sites, each taken to the
    real line by Pyro's own transform of its support.

    Use it for many latent variables that depend little on each other.  Where the posterior is
    correlated its sds are too small: compare the ELBO with :class:`AutoFullRankNormal`.

    See :class:`~pyro_ngvi.guides.base.AutoFamily` for the arguments and the errors.

    Example:
        >>> import pyro, torch, pyro.distributions as dist
        >>> from pyro.infer import SVI, Trace_ELBO
        >>> import pyro_ngvi as ngvi
        >>> def model(y):
        ...     mu = pyro.sample("mu", dist.Normal(0.0, 10.0))
        ...     with pyro.plate("data", len(y)):
        ...         pyro.sample("y", dist.Normal(mu, 1.0), obs=y)
        >>> guide = ngvi.AutoMeanFieldNormal(model)
        >>> svi = SVI(model, guide, ngvi.NGVB(guide), Trace_ELBO(8, vectorize_particles=True))
        >>> for _ in range(300):
        ...     loss = svi.step(torch.tensor([1.0, 2.0, 3.0]))
        >>> round(guide.median()["mu"].item(), 2)  # exactly 6 / 3.01
        1.99
    """

    def make_family(self) -> Family:
        return MeanFieldNormal()


class AutoFullRankNormal(AutoFamily):
    """One Gaussian with a full covariance over all unconstrained latent variables.

    q(z) = N(z; mu, L L') over the flat vector z (d,) of the latent sites, each taken to the real line
    by Pyro's own transform of its support.

    The first choice up to a few thousand latent variables: a step costs O(d^3).  Beyond, use
    :class:`AutoFactorNormal`.

    See :class:`~pyro_ngvi.guides.base.AutoFamily` for the arguments and the errors.

    Raises:
        RuntimeError: when an ordinary optimizer has stepped the diagonal of L to 0 or below, as Adam
            does in its first step at a learning rate of ``init_scale``; looked at on a CPU alone.

    Example:
        >>> import pyro, torch, pyro.distributions as dist
        >>> from pyro.infer import SVI, Trace_ELBO
        >>> import pyro_ngvi as ngvi
        >>> X = torch.tensor([[1.0, 0.9], [1.0, 1.1], [1.0, 1.3]])
        >>> def model(X, y):
        ...     w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        ...     with pyro.plate("data", len(y)):
        ...         pyro.sample("y", dist.Normal((X * w).sum(-1), 0.1), obs=y)
        >>> guide = ngvi.AutoFullRankNormal(model)
        >>> svi = SVI(model, guide, ngvi.NGVB(guide), Trace_ELBO(8, vectorize_particles=True))
        >>> for _ in range(200):
        ...     loss = svi.step(X, torch.tensor([1.0, 1.2, 1.4]))
        >>> exact = torch.linalg.inv(torch.eye(2) + 100 * X.T @ X)
        >>> torch.allclose(guide.get_posterior().covariance_matrix, exact, rtol=1e-3)
        True
    """

    def make_family(self) -> Family:
        return FullRankNormal()

    def sampling_posterior(self) -> FamilyDistribution:
        if torch.is_grad_enabled() and not torch.jit.is_tracing():  # pyright: ignore[reportPrivateImportUsage]
            crossed = self.natural_params()["scale_tril"].detach().diagonal() <= 0.0
            if host_bool(crossed.any()):
                raise RuntimeError(
                    f"AutoFullRankNormal: the optimizer took the diagonal of scale_tril to 0 or below "
                    f"(site {self.site_of(int(crossed.nonzero()[0]))!r}). Train it by pyro_ngvi.NGVB, "
                    f"lower the learning rate, or use Pyro's AutoMultivariateNormal."
                )
        return super().sampling_posterior()


class AutoFactorNormal(AutoFamily):
    """A Gaussian with covariance B B' + diag(c^2) over all unconstrained latent variables.

    B is d x rank, so memory and a draw cost O(d rank) and a natural-gradient step O(d rank^2): the
    guide for d from some hundreds to millions whose dependence has few directions.  For d below a
    few hundred :class:`AutoFullRankNormal` is both better and faster.

    Args:
        rank: number of columns of B, from 1 to d - 1; by default about sqrt(d), as in Pyro.

    See :class:`~pyro_ngvi.guides.base.AutoFamily` for the other arguments and the errors.

    Example:
        >>> import pyro, torch, pyro.distributions as dist
        >>> import pyro_ngvi as ngvi
        >>> def model():
        ...     return pyro.sample("x", dist.Normal(0.0, 1.0).expand([6]).to_event(1))
        >>> guide = ngvi.AutoFactorNormal(model, rank=2)
        >>> _ = guide()
        >>> guide.factor.shape
        torch.Size([6, 2])
    """

    def __init__(self, model: Callable[..., Any], rank: int | None = None, **kwargs: Any) -> None:
        check_position(self, "rank", rank)
        self._rank = rank
        super().__init__(model, **kwargs)

    def make_family(self) -> Family:
        return FactorNormal(1 if self._rank is None else self._rank)

    def _define_family(self) -> None:
        if self._rank is None:
            family: Any = self.family
            family.rank = max(1, min(self.latent_dim - 1, round(self.latent_dim**0.5)))


class AutoFactorPrecision(AutoFamily):
    """A Gaussian with *precision* U U' + diag(s) over all unconstrained latent variables.

    U is d x rank.  The factors are directions that the data determine well, all others keep the
    width that the diagonal gives them: the counterpart of :class:`AutoFactorNormal`, whose factors are
    directions that the data leave wide.  Costs are the same, O(d rank) for memory and a draw and
    O(d rank^2) for a natural-gradient step.  :class:`~pyro_ngvi.optim.SLANG` is written for this guide;
    :class:`~pyro_ngvi.NGVB` and :class:`~pyro_ngvi.IFVB` train it too.

    Args:
        rank: number of columns of U, from 1 to d - 1; by default about sqrt(d).

    See :class:`~pyro_ngvi.guides.base.AutoFamily` for the other arguments and the errors.

    Example:
        >>> import pyro, torch, pyro.distributions as dist
        >>> import pyro_ngvi as ngvi
        >>> def model():
        ...     return pyro.sample("x", dist.Normal(0.0, 1.0).expand([6]).to_event(1))
        >>> guide = ngvi.AutoFactorPrecision(model, rank=2)
        >>> _ = guide()
        >>> guide.log_precision.shape
        torch.Size([6])
    """

    def __init__(self, model: Callable[..., Any], rank: int | None = None, **kwargs: Any) -> None:
        check_position(self, "rank", rank)
        self._rank = rank
        super().__init__(model, **kwargs)

    def make_family(self) -> Family:
        return FactorPrecisionNormal(1 if self._rank is None else self._rank)

    def _define_family(self) -> None:
        if self._rank is None:
            family: Any = self.family
            family.rank = max(1, min(self.latent_dim - 1, round(self.latent_dim**0.5)))
