"""Normalizing flows of other libraries, in one form."""

from .transforms import CouplingFlow, PyroFlow, Stretch, ZukoFlow, as_flow, coupling_flow

__all__ = ["CouplingFlow", "PyroFlow", "Stretch", "ZukoFlow", "as_flow", "coupling_flow"]
