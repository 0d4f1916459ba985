"""The guide that bends a Gaussian between rotations: orthogonal flows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..families import OrthogonalFlow
from ..families.base import Family, Tensors
from ..linalg.host import host_bool, outside_autocast
from .base import AutoFamily
from .initialization import check_position
from .posterior import FamilyDistribution

__all__ = ["AutoOrthogonalFlow"]

#: largest relative change of a length under what should be a rotation
TOLERANCE = 1e-3


class AutoOrthogonalFlow(AutoFamily):
    r"""A normalizing flow of elementwise activations psi between rotations W of all latent variables.

    With eps ~ N(0, I), over the flat unconstrained vector z (d,), for one layer

        z = W_1 (s_1 o psi(L eps + b_0)) + mu

    with W orthogonal, s positive, L a lower triangle, and in psi a skewness and a tail of each
    coordinate, learnt too (:mod:`pyro_ngvi.families.orthogonal_flow`).  It says skewness and bent
    contours with d^2 numbers a layer.  The density and its inverse are closed forms.

    One layer says skewness; curved posteriors need ``layers=2`` or more.  Train it by
    :class:`~pyro_ngvi.optim.SPRING` with ``BatchedELBO(128, curvature="scores")``, by
    :class:`~pyro_ngvi.IFVB` or by :class:`~pyro_ngvi.AIFVB`, which all move the W as rotations.
    Not for thousands of latent variables (a step costs O(d^3)), nor for posteriors close to a
    Gaussian: :class:`AutoFullRankNormal` is exact there and far faster.

    Args:
        layers: number of activations, at least 1.

    See :class:`~pyro_ngvi.guides.base.AutoFamily` for the other arguments and the errors.

    Raises:
        ValueError: for another number of layers.
        RuntimeError: when a W is not orthogonal, because an optimizer that does not know rotations
            has stepped it; for losses that trace by torch.jit, which could not tell.

    Source: after Godichon-Baggioni, Nguyen & Tran (2024, JASA), example 3.

    Example:
        >>> import pyro, torch, pyro.distributions as dist
        >>> from pyro.infer import SVI, Trace_ELBO
        >>> import pyro_ngvi as ngvi
        >>> def model():
        ...     pyro.sample("x", dist.Gumbel(torch.zeros(2), 1.0).to_event(1))
        >>> guide = ngvi.AutoOrthogonalFlow(model)
        >>> optim = ngvi.AIFVB(guide)
        >>> svi = SVI(model, guide, optim, Trace_ELBO(8, vectorize_particles=True))
        >>> for _ in range(300):
        ...     loss = svi.step()
        >>> low, high = guide.quantiles([0.05, 0.95])["x"][:, 0]
        >>> bool(high > -low)  # a Gumbel is skewed to the right: -1.1, 3.0
        True
    """

    family: OrthogonalFlow

    def __init__(self, model: Callable[..., Any], layers: int = 1, **kwargs: Any) -> None:
        check_position(self, "layers", layers)
        self._layers = layers
        super().__init__(model, **kwargs)

    def make_family(self) -> Family:
        return OrthogonalFlow(self._layers)

    def sampling_posterior(self) -> FamilyDistribution:
        if torch.jit.is_tracing() and torch.is_grad_enabled():  # pyright: ignore[reportPrivateImportUsage]
            raise RuntimeError(
                f"{type(self).__name__} cannot be trained through torch.jit: its trace would no longer "
                f"check that the rotations are orthogonal. Use Trace_ELBO or BatchedELBO."
            )
        return super().sampling_posterior()

    @outside_autocast
    def _distribution(self, params: Tensors) -> FamilyDistribution:
        detached = {name: p.detach() for name, p in params.items()}
        if host_bool(self.family.drift(detached) > TOLERANCE):
            raise RuntimeError(
                f"The rotations of {type(self).__name__} are no longer orthogonal, so its density "
                f"would be wrong. An optimizer that does not know rotations has stepped them: train "
                f"this guide by pyro_ngvi.optim.SPRING, IFVB or AIFVB, in their default frame."
            )
        return super()._distribution(params)
