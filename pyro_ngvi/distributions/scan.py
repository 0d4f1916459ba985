"""x_t = A_t x_{t-1} + c_t for all t at once: O(T) work in log2(T) rounds.

A round joins the steps of each pair (2i, 2i + 1) into one, solves the chain of the pairs, which gives x
at odd t, and steps once from there to even t (Blelloch 1990, "Prefix sums and their applications"; for
Gaussian chains Sarkka & Garcia-Fernandez 2021).  Sums of positive semi-definite matrices only: nothing
cancels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..linalg.products import matvec

__all__ = ["interleave", "scan", "scan_moments"]


def interleave(even: Tensor, odd: Tensor, dim: int) -> Tensor:
    """e_0, o_0, e_1, o_1, ... along ``dim`` < 0; ``even`` may have one entry more."""
    pairs = odd.shape[dim]
    both = torch.stack((even.narrow(dim, 0, pairs), odd), dim).flatten(dim - 1, dim)
    if even.shape[dim] == pairs:
        return both
    return torch.cat((both, even.narrow(dim, pairs, 1)), dim)


def scan(transition: Tensor, shift: Tensor) -> Tensor:
    """x (..., T, S) of x_t = A_t x_{t-1} + c_t with x_{-1} = 0.

    Args:
        transition: A (T, S, S); A_0 has no effect.
        shift: c (..., T, S).
    """
    n = shift.shape[-2]
    if n == 1:
        return shift
    pairs, rest = n // 2, (n - 1) // 2
    A_even, A_odd = transition[0::2], transition[1::2]
    c_even, c_odd = shift[..., 0::2, :], shift[..., 1::2, :]
    odd = scan(A_odd @ A_even[:pairs], c_odd + matvec(A_odd, c_even[..., :pairs, :]))
    later = c_even[..., 1:, :] + matvec(A_even[1:], odd[..., :rest, :])
    return interleave(torch.cat((c_even[..., :1, :], later), -2), odd, -2)


def scan_moments(transition: Tensor, shift: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Means (T, S) and covariances (T, S, S) of x_t = A_t x_{t-1} + c_t + noise_t.

    ``noise`` (T, S, S) holds the covariances of independent noise; A_0 has no effect.
    """
    n = shift.shape[-2]
    if n == 1:
        return shift, noise
    pairs, rest = n // 2, (n - 1) // 2
    A_even, A_odd = transition[0::2], transition[1::2]
    c_even, c_odd = shift[0::2], shift[1::2]
    Q_even, Q_odd = noise[0::2], noise[1::2]
    joined = A_odd @ Q_even[:pairs] @ A_odd.mT + Q_odd
    c_joined = c_odd + matvec(A_odd, c_even[:pairs])
    mean, covariance = scan_moments(A_odd @ A_even[:pairs], c_joined, joined)
    A = A_even[1:]
    mean_even = torch.cat((c_even[:1], c_even[1:] + matvec(A, mean[:rest])))
    covariance_even = torch.cat((Q_even[:1], A @ covariance[:rest] @ A.mT + Q_even[1:]))
    return interleave(mean_even, mean, -2), interleave(covariance_even, covariance, -3)
