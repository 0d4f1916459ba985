"""Guides that are normalizing flows, on targets that Gaussians fail at."""
