"""Small exact tools of linear algebra and integration."""

from .cubature import gauss_hermite
from .walsh_hadamard import walsh_hadamard_transform

__all__ = ["gauss_hermite", "walsh_hadamard_transform"]
