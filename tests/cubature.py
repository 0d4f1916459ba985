"""Noise that averages cubics over Gaussians exactly: a conjugate step without a seed."""

import math

import torch
from torch import Tensor


def sphere_points(d: int) -> Tensor:
    """The 2d points +-sqrt(d) e_i, equally weighted, shape (2d, d).

    They integrate every polynomial of degree 3 in d dimensions exactly against N(0, I)
    (Stroud 1971, the spherical-radial rule of degree 3).
    """
    points = math.sqrt(d) * torch.eye(d)
    return torch.cat([points, -points])
