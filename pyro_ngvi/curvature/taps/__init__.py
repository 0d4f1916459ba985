"""Squares and Kronecker factors of gradients per example, at the layers of a network."""
