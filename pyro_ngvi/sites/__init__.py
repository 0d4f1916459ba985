"""Gaussian sites for single data: the guide AutoSites, its loss SitesELBO, its optimizer CVI."""

from .cvi import CVI
from .guide import AutoSites
from .loss import SitesELBO

__all__ = ["CVI", "AutoSites", "SitesELBO"]
