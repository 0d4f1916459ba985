"""Gaussian guides: a family each."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from torch import Tensor

from ..families import (
    FactorNormal,
    FactorPrecisionNormal,
    FullRankNormal,
    MatrixNormal,
    MeanFieldNormal,
    ProductFamily,
)
from ..families.base import Family
from .base import AutoFamily

#: values of ``init`` for families that can be matched to any Gaussian
LAPLACE = ("map", "laplace", "auto")
#: families of several sites together, by the name that arguments give them
NORMAL: dict[str, type[Family]] = {"mean_field": MeanFieldNormal, "full_rank": FullRankNormal}


def joint_family(argument: str, kind: str) -> Any:
    """The entry of ``NORMAL`` that an argument of a guide names."""
    if kind not in NORMAL:
        raise ValueError(f"{argument} must be {' or '.join(map(repr, NORMAL))}, got {kind!r}.")
    return NORMAL[kind]


class AutoMeanFieldNormal(AutoFamily):
    """Independent Gaussians over all unconstrained latent variables: q(z) = N(z; mu, diag(sigma^2)).

    Use it for many latent variables that depend little on each other.  Where the posterior is
    correlated its sds are too small: compare the ELBO with :class:`AutoFullRankNormal`.  Stored:
    ``loc`` = mu and ``log_scale`` = log sigma (d,).  Arguments and errors are those of
    :class:`~pyro_ngvi.guides.AutoFamily`.

    Example:
        >>> import pyro, torch, pyro.distributions as dist, pyro_ngvi as ngvi
        >>> def model(y):
        ...     mu = pyro.sample("mu", dist.Normal(0.0, 10.0))
        ...     pyro.sample("y", dist.Normal(mu, 1.0).expand([3]).to_event(1), obs=y)
        >>> y = torch.tensor([1.0, 2.0, 3.0])
        >>> fit = ngvi.fit(model, y, guide="AutoMeanFieldNormal", seed=0, progress=False)
        >>> round(fit.guide.median()["mu"].item(), 2)  # exactly 6 / 3.01
        1.99
    """

    starts = LAPLACE

    def make_family(self) -> Family:
        return MeanFieldNormal()


class AutoFullRankNormal(AutoFamily):
    """One Gaussian over all unconstrained latent variables: q(z) = N(z; mu, L L').

    The first choice up to a few thousand latent variables: a step costs O(d^3).  Beyond, use
    :class:`AutoFactorNormal`.  Stored: ``loc`` = mu (d,), ``scale_tril`` = L (d, d).  Arguments and
    errors are those of :class:`~pyro_ngvi.guides.AutoFamily`.

    Raises:
        RuntimeError: when an ordinary optimizer has stepped the diagonal of L to 0 or below, as Adam
            does in its first step at a learning rate of ``init_scale``; looked at on a CPU alone.

    Example:
        >>> import pyro, torch, pyro.distributions as dist, pyro_ngvi as ngvi
        >>> from pyro.infer import SVI, Trace_ELBO
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

    triangle = "scale_tril"
    starts, begins_narrow = LAPLACE, True

    def make_family(self) -> Family:
        return FullRankNormal()


class _WithFactors(AutoFamily):
    """A guide whose family has a rank, by default about sqrt(d) as in Pyro."""

    kind: Callable[[int], Any]
    begins_narrow = True

    def __init__(self, model: Callable[..., Any], rank: int | None = None, **kwargs: Any) -> None:
        self._rank = rank
        super().__init__(model, **kwargs)

    def make_family(self) -> Family:
        return self.kind(1 if self._rank is None else self._rank)

    def _define_family(self, args: Any, kwargs: Any) -> None:
        if self._rank is None:
            family: Any = self.family
            family.rank = max(1, min(self.latent_dim - 1, round(self.latent_dim**0.5)))


class AutoFactorNormal(_WithFactors):
    """A Gaussian with covariance B B' + diag(c^2) over all unconstrained latent variables.

    A draw costs O(d rank) and a natural-gradient step O(d rank^2).  For d from some hundreds to
    millions; below, :class:`AutoFullRankNormal` is both better and faster.  Stored: ``loc`` and
    ``log_scale`` = log c (d,), ``factor`` = B (d, rank).

    Args:
        rank: number of columns of B, from 1 to d - 1; by default about sqrt(d).
        kwargs: those of :class:`~pyro_ngvi.guides.AutoFamily`, whose errors it raises.

    Raises:
        ValueError: for a rank that is no whole number from 1; at the first call, for d or more.

    Example:
        >>> import pyro, pyro.distributions as dist, pyro_ngvi as ngvi
        >>> def model():
        ...     pyro.sample("x", dist.Normal(0.0, 1.0).expand([6]).to_event(1))
        >>> guide = ngvi.AutoFactorNormal(model, rank=2)
        >>> _ = guide()
        >>> guide.factor.shape, round(guide.get_posterior().variance[0].item(), 2)
        (torch.Size([6, 2]), 1.0)
    """

    kind = FactorNormal
    starts = ("map", "auto")


class AutoFactorPrecision(_WithFactors):
    """A Gaussian with *precision* U U' + diag(s) over all unconstrained latent variables.

    Factors are directions that the data determine well, those of :class:`AutoFactorNormal`, at the same
    costs, directions that they leave wide.  Stored: ``loc`` and ``log_precision`` = log s (d,),
    ``factor`` = U (d, rank).
    :class:`~pyro_ngvi.optim.SLANG` is written for this guide; NGVB and IFVB train it too.

    Args:
        rank: number of columns of U, from 1 to d - 1; by default about sqrt(d).
        kwargs: those of :class:`~pyro_ngvi.guides.AutoFamily`, whose errors it raises.

    Raises:
        ValueError: as :class:`AutoFactorNormal`.

    Example:
        >>> import pyro, pyro.distributions as dist, pyro_ngvi as ngvi
        >>> def model():
        ...     pyro.sample("x", dist.Normal(0.0, 1.0).expand([6]).to_event(1))
        >>> guide = ngvi.AutoFactorPrecision(model, rank=2)
        >>> _ = guide()
        >>> guide.log_precision.shape
        torch.Size([6])
    """

    kind = FactorPrecisionNormal
    starts = LAPLACE


class AutoProduct(AutoFamily):
    """A guide in which parts of the vector are independent, each in a family of its own."""

    family: ProductFamily

    def _part(self, name: str) -> tuple[str, Family]:
        """The part to which a site belongs, and its family."""
        raise NotImplementedError

    def _define_family(self, args: Any, kwargs: Any) -> None:
        parts: dict[str, Family] = {}
        segments: list[tuple[str, int]] = []
        for name, shape in self._unconstrained_shapes.items():
            part, family = self._part(name)
            parts.setdefault(part, family)
            segments.append((part, shape.numel()))
        self.family.define(parts, segments)


def part_name(prefix: str, site: str, taken: Collection[str]) -> str:
    """A name that a parameter of a module may have, different for every site."""
    name = f"{prefix}_{site.replace('.', '_')}"
    while name in taken:
        name += "_"
    return name


class AutoMatrixNormal(AutoProduct):
    """Matrix-normal distributions: Gaussians whose covariance is a Kronecker product.

    Each latent site whose value is a matrix (n, m), its plates counted, n and m above 1, gets
    vec(W) ~ N(vec(M), (A A') kron (B B')) in unconstrained space, for the price of n^2 + m^2 numbers.
    All other sites, and matrices to which their transform gives another shape, share one Gaussian.
    Sites are independent of each other.

    Made for the weight matrices of networks and of multi-output regressions.  For a few thousand latent
    variables :class:`AutoFullRankNormal` holds more.

    Args:
        rest: "mean_field" or "full_rank", for all sites that are not matrices.
        kwargs: those of :class:`~pyro_ngvi.guides.AutoFamily`, whose errors it raises.

    Raises:
        ValueError: for another ``rest``; at the first call, for a model without a matrix.

    Example:
        >>> import pyro, torch, pyro.distributions as dist
        >>> from pyro.infer import SVI
        >>> import pyro_ngvi as ngvi
        >>> X = torch.tensor([[1.0, 0.9], [1.0, 1.1], [1.0, 1.3]])
        >>> def model(X, Y):
        ...     W = pyro.sample("W", dist.Normal(0.0, 1.0).expand([2, 3]).to_event(2))
        ...     pyro.sample("Y", dist.Normal(X @ W, 0.5).to_event(2), obs=Y)
        >>> guide = ngvi.AutoMatrixNormal(model)
        >>> svi = SVI(model, guide, ngvi.NGVB(guide), ngvi.BatchedELBO(8))
        >>> for _ in range(200):
        ...     loss = svi.step(X, X @ torch.tensor([[1.0, 0.0, -1.0], [0.5, 1.0, 0.0]]))
        >>> M, A, B = guide.site_factors("W")
        >>> rows = torch.linalg.inv(torch.eye(2) + 4 * X.T @ X).contiguous()
        >>> bool((torch.kron(A @ A.T, B @ B.T) - torch.kron(rows, torch.eye(3))).abs().max() < 1e-3)
        True
    """

    def __init__(self, model: Callable[..., Any], rest: str = "mean_field", **kwargs: Any) -> None:
        self._rest = joint_family("rest", rest)
        #: names of the parts of the family, by the site that is a matrix
        self.matrices: dict[str, str] = {}
        super().__init__(model, **kwargs)

    def make_family(self) -> Family:
        # its parts are known once the sites are
        return ProductFamily({}, [], linear=False, curvature_form="kronecker")

    def _define_family(self, args: Any, kwargs: Any) -> None:
        self.matrices = {}
        sites = dict(self.prototype_trace.iter_stochastic_nodes())
        for name, site in sites.items():
            shape = self._unconstrained_shapes[name]
            if len(shape) == 2 and min(shape) > 1 and shape == site["value"].shape:
                self.matrices[name] = part_name("matrix", name, self.matrices.values())
        if not self.matrices:
            shapes = ", ".join(f"{n!r} {tuple(s['value'].shape)}" for n, s in sites.items())
            raise ValueError(
                f"AutoMatrixNormal needs a latent site that is a matrix, both dimensions above 1, and "
                f"the model has {shapes}. Use pyro_ngvi.AutoMeanFieldNormal(model)."
            )
        super()._define_family(args, kwargs)

    def _part(self, name: str) -> tuple[str, Family]:
        if name in self.matrices:
            return self.matrices[name], MatrixNormal(*self._unconstrained_shapes[name])
        return "rest", self._rest()

    def site_factors(self, name: str) -> tuple[Tensor, Tensor, Tensor]:
        """M (n, m), A (n, n) and B (m, m), detached, of a site in ``matrices``: W = M + A E B'.

        A A' is the covariance between rows, B B' that between columns, each known up to a factor that
        the other takes back.
        """
        params = self._current()
        own = self.family.own(self.matrices[name], params)
        A, B = own["row_tril"].detach().tril(), own["column_tril"].detach().tril()
        return own["loc"].detach().reshape(len(A), len(B)), A, B
