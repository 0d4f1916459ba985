"""Random Fourier features of a squared-exponential kernel, for Gaussian processes as linear layers."""

from __future__ import annotations

import math
from typing import Any

import torch
from pyro.nn import PyroModule, PyroParam
from torch import Tensor
from torch.distributions import constraints

from ..optim.rule import require
from .walsh_hadamard import check_width
from .weights import over_rows


class RandomFourierFeatures(PyroModule):
    r"""phi(x) = s / sqrt(R) [cos(x/l Omega), sin(x/l Omega)]: x (..., in) to (..., 2 R).

    The columns of Omega (m, R) are R draws of w ~ N(0, I), so that phi(x) phi(x')' tends to

        k(x, x') = s^2 exp(-1/2 sum_d (x_d - x'_d)^2 / l_d^2) = s^2 E cos(w'(x - x') / l)

    (Rahimi & Recht 2007).  The error of one entry has variance s^4 ((1 + rho^4) / 2 - rho^2) / R with
    rho = k / s^2; the diagonal is exact.  A linear layer with independent N(0, 1) weights behind them
    is a draw of the process, and layers of both a deep Gaussian process (Cutajar, Bonilla, Michiardi &
    Filippone 2017); :class:`~pyro_ngvi.nn.WalshHadamardLinear` of ``weight_sd=1`` will do (Rossi,
    Marmin & Filippone 2020, section 3.2).  Not for rough functions in many dimensions, where an error
    1 / sqrt(R) is large beside a small kernel, nor for a few hundred data, where an exact Gaussian
    process is as cheap.

    ``lengthscale`` l is (in_features,), or () without ``ard``, and ``variance`` s^2 is (): positive
    parameters, which a natural-gradient optimizer leaves to its ``others``.  ``omega`` (m, R) is a
    buffer.  Set one of them to a ``PyroSample`` to make it latent; with vectorised particles of it,
    or of x, the result is (S, M, 2 R).

    Args:
        in_features, num_features: m and R.
        lengthscale: l, a positive number, or a tensor (in_features,); by default sqrt(m) / 2, as in the
            code of these papers, for standardised x.
        ard: a length-scale for every input.
        variance: s^2, a positive number.
        seed: of Omega; by default it comes from torch's random state.
        device, dtype: as for ``nn.Linear``.

    Raises:
        ValueError: for a length-scale or variance that is not positive, R < 1; when called, for an x
            whose last dimension is not m.

    Example:
        >>> import torch
        >>> layer = RandomFourierFeatures(2, 2000, lengthscale=1.0, seed=0)
        >>> x = torch.tensor([[0.0, 0.0], [1.0, 0.0]])
        >>> phi = layer(x)
        >>> (phi @ phi.mT).detach().round(decimals=1)  # exp(-1/2) = 0.61
        tensor([[1.0000, 0.6000],
                [0.6000, 1.0000]])
    """

    lengthscale: Any
    variance: Any
    omega: Any

    def __init__(
        self,
        in_features: int,
        num_features: int,
        *,
        lengthscale: float | Tensor | None = None,
        ard: bool = True,
        variance: float = 1.0,
        seed: int | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        require(num_features >= 1, "num_features", "be at least 1", num_features)
        self.in_features, self.num_features, self.ard = in_features, num_features, bool(ard)
        if lengthscale is None:
            lengthscale = 0.5 * math.sqrt(in_features)
        shapes = {"lengthscale": (in_features,) if ard else (), "variance": ()}
        for name, value in (("lengthscale", lengthscale), ("variance", variance)):
            value = torch.as_tensor(value, device=device).detach()
            value = value.to(dtype or torch.get_default_dtype())
            positive = ((value > 0.0) & value.isfinite()).all()
            if value.device.type != "meta" and not bool(positive):
                raise ValueError(f"{name} must be positive and finite, got {value.tolist()}.")
            setattr(self, name, PyroParam(value.expand(shapes[name]).clone(), constraints.positive))
        draws = None if seed is None else torch.Generator("cpu").manual_seed(seed)
        where, shape = None if seed is None else "cpu", (in_features, num_features)
        drawn = torch.randn(shape, generator=draws, dtype=dtype, device=where)
        self.register_buffer("omega", drawn.to(device or torch.get_default_device()))

    def forward(self, x: Tensor) -> Tensor:
        """x (..., in_features) to (..., 2 num_features)."""
        check_width(self, x)
        omega = self.omega
        if omega.dim() > 3:  # particles (S, 1, in, R): the rows of x take the place of the 1
            omega = omega.squeeze(-3)
        # a latent has the dimensions of particles, a parameter none
        lengthscale = over_rows(self.lengthscale, int(self.ard))
        if not self.ard:
            lengthscale = lengthscale.unsqueeze(-1)
        angles = (x / lengthscale) @ omega
        scale = (over_rows(self.variance, 0) / self.num_features).sqrt().unsqueeze(-1)
        return scale * torch.cat([angles.cos(), angles.sin()], -1)
