"""Quantiles of guides whose marginals are not those of a Gaussian."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributions import biject_to

from .base import AutoFamily

__all__ = ["AutoWithQuantiles"]


class AutoWithQuantiles(AutoFamily):
    """An :class:`AutoFamily` whose medians and quantiles come from the family's ``icdf``."""

    def median(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Posterior median of each latent site; on a simplex that of its stick-breaking coordinates."""
        return {name: q[0] for name, q in self.quantiles([0.5], *args, **kwargs).items()}

    @torch.no_grad()
    def quantiles(self, quantiles: Any, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Posterior quantiles (len(quantiles), ...) of each latent site, for levels in (0, 1)."""
        self._require_setup()
        params = self._current()
        like = next(iter(params.values()))
        levels = torch.as_tensor(quantiles, dtype=like.dtype, device=like.device)
        result: dict[str, list[Tensor]] = {}
        for z in self.family.icdf(params, levels):
            unpacked: Any = self._unpack_latent(z)
            for site, value in unpacked:
                transform: Any = biject_to(site["fn"].support)
                result.setdefault(site["name"], []).append(transform(value))
        return {name: torch.stack(values) for name, values in result.items()}
