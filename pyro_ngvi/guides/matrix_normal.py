"""The guide that gives each matrix among the latent sites a matrix-normal distribution."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..families import MatrixNormal, ProductFamily
from ..families.base import Family
from .base import AutoFamily
from .initialization import check_position
from .parts import NORMAL, check_normal, part_name

__all__ = ["AutoMatrixNormal"]


class AutoMatrixNormal(AutoFamily):
    """Matrix-normal distributions: Gaussians whose covariance is a Kronecker product.

    Each latent site whose value is a matrix (n, m), its plates counted, n and m above 1, gets
    vec(W) ~ N(vec(M), (A A') kron (B B')): all correlations between rows and between columns for the
    price of n^2 + m^2 numbers.  All other sites share one Gaussian.  Sites are independent of each
    other.  Values are those of Pyro's unconstrained space; a matrix that its transform gives another
    shape (a batch of simplices, a Cholesky factor of a correlation) counts as another site.

    Made for the weight matrices of networks and of multi-output regressions, whose posterior it holds
    exactly where noise and prior are Kronecker products too.  For one Gaussian over everything, up to a
    few thousand latent variables, use :class:`AutoFullRankNormal`.

    Args:
        rest: "mean_field" or "full_rank", for all sites that are not matrices.

    See :class:`~pyro_ngvi.guides.base.AutoFamily` for the other arguments and the errors.

    Raises:
        ValueError: for another ``rest``; at the first call, for a model without a matrix.

    Example:
        >>> import pyro, torch, pyro.distributions as dist
        >>> from pyro.infer import SVI
        >>> import pyro_ngvi as ngvi
        >>> X = torch.tensor([[1.0, 0.9], [1.0, 1.1], [1.0, 1.3]])
        >>> def model(X, Y):
        ...     W = pyro.sample("W", dist.Normal(0.0, 1.0).expand([2, 3]).to_event(2))
        ...     with pyro.plate("data", len(Y)):
        ...         pyro.sample("Y", dist.Normal(X @ W, 0.5).to_event(1), obs=Y)
        >>> guide = ngvi.AutoMatrixNormal(model)
        >>> svi = SVI(model, guide, ngvi.NGVB(guide), ngvi.BatchedELBO(8))
        >>> for _ in range(400):
        ...     loss = svi.step(X, X @ torch.tensor([[1.0, 0.0, -1.0], [0.5, 1.0, 0.0]]))
        >>> rows = torch.linalg.inv(torch.eye(2) + 4 * X.T @ X).contiguous()
        >>> exact = torch.kron(rows, torch.eye(3))
        >>> bool((guide.get_posterior().covariance_matrix - exact).abs().max() < 1e-3)
        True
        >>> M, A, B = guide.site_factors("W")
        >>> M.shape, A.shape, B.shape
        (torch.Size([2, 3]), torch.Size([2, 2]), torch.Size([3, 3]))
    """

    family: ProductFamily

    def __init__(self, model: Callable[..., Any], rest: str = "mean_field", **kwargs: Any) -> None:
        check_position(self, "rest", rest)
        check_normal("rest", rest)
        self._rest = rest
        #: names of the parts of the family, by the site that is a matrix
        self.matrices: dict[str, str] = {}
        super().__init__(model, **kwargs)

    def make_family(self) -> Family:
        # its parts are known once the sites are
        return ProductFamily({}, [], linear=False, curvature_form="kronecker")

    def _define_family(self) -> None:
        prototype: Any = self.prototype_trace
        parts: dict[str, Family] = {}
        segments: list[tuple[str, int]] = []
        self.matrices = {}
        for name, site in prototype.iter_stochastic_nodes():
            shape = self._unconstrained_shapes[name]
            if len(shape) == 2 and min(shape) > 1 and shape == site["value"].shape:
                part = part_name("matrix", name, parts)
                parts[part] = MatrixNormal(*shape)
                self.matrices[name] = part
            else:
                part = "rest"
                parts.setdefault(part, NORMAL[self._rest]())
            segments.append((part, shape.numel()))
        if not self.matrices:
            sites = ", ".join(
                f"{name!r} {tuple(site['value'].shape)}"
                for name, site in prototype.iter_stochastic_nodes()
            )
            raise ValueError(
                f"AutoMatrixNormal is for latent sites that are matrices, with two dimensions above 1, "
                f"and the model has none: {sites}. Use pyro_ngvi.AutoMeanFieldNormal(model), or "
                f"AutoFullRankNormal for a few thousand latent variables."
            )
        self.family.define(parts, segments)

    def site_factors(self, name: str) -> tuple[Tensor, Tensor, Tensor]:
        """M (n, m), A (n, n) and B (m, m) of a site: W = M + A E B' in unconstrained space.

        A A' is the covariance between rows, B B' that between columns, each known up to a factor that
        the other takes back.  Detached from the parameters of the guide.

        Raises:
            ValueError: when the site is not one of those in ``matrices``.
        """
        self._require_setup()
        if name not in self.matrices:
            raise ValueError(
                f"The guide has no matrix-normal site {name!r}; it has "
                f"{', '.join(map(repr, self.matrices))}."
            )
        own = self.family.own(self.matrices[name], self._current())
        A, B = own["row_tril"].detach().tril(), own["column_tril"].detach().tril()
        return own["loc"].detach().reshape(len(A), len(B)), A, B
