"""Hierarchical models: units that follow their globals beside NUTS, Gaussians and Adam."""
