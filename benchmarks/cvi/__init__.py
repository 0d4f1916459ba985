"""Conjugate-computation VI against closed forms, this package's NGVB and GPyTorch's NGD."""
