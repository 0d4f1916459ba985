"""Pyro as pure functions: vmap over particles, densities, layouts, supports."""
