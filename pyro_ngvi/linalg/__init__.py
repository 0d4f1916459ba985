"""Small exact tools of linear algebra and integration."""

from .cubature import gauss_hermite, sphere_points

__all__ = ["gauss_hermite", "sphere_points"]
