"""Losses for ``pyro.infer.SVI``."""

from .batched import BatchedELBO

__all__ = ["BatchedELBO"]
