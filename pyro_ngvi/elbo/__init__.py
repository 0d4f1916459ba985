"""Losses for ``pyro.infer.SVI``."""

from pyro_ngvi.elbo.batched import BatchedELBO
from pyro_ngvi.elbo.sites import SitesELBO
from pyro_ngvi.elbo.vectorized import check_vectorized

__all__ = ["BatchedELBO", "SitesELBO", "check_vectorized"]
