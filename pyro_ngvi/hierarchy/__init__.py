"""Hierarchical models: units whose latent variables follow the globals."""

from .guide import AutoHierarchical

__all__ = ["AutoHierarchical"]
