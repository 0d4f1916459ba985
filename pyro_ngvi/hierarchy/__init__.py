"""Hierarchical models: units whose latent variables follow the globals."""

from .collapsed import Collapsed, ExactUnits, collapse
from .guide import AutoHierarchical

__all__ = ["AutoHierarchical", "Collapsed", "ExactUnits", "collapse"]
