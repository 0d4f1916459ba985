"""Losses for ``pyro.infer.SVI``."""

from ..probing.vectorized import check_vectorized
from ..sites.loss import SitesELBO
from .batched import BatchedELBO

__all__ = ["BatchedELBO", "SitesELBO", "check_vectorized"]
