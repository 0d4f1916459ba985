r"""Gauss-Markov chains (linear Gaussian state-space models), with all times at once.

Draws and moments are scans: a round joins the steps of each pair into one, solves the chain of the
pairs, which gives the states at odd t, and steps once from there to even t (Blelloch 1990, "Prefix sums
and their applications"; for Gaussian chains Sarkka & Garcia-Fernandez 2021).  Sums of positive
semi-definite matrices only: nothing cancels.  O(T S^3) in log2(T) rounds.
"""

from __future__ import annotations

from math import log, pi
from typing import Any

import torch
from pyro.distributions import TorchDistribution
from torch import Tensor
from torch.distributions import constraints

from ..linalg.cholesky import cholesky_or_nan
from ..linalg.host import host_bool
from ..linalg.products import matvec


class GaussianStateSpace(TorchDistribution):
    """A Gauss-Markov chain s of T states in R^S; event shape (T, S).

        s_1 ~ N(m, C),    s_{t+1} = A_t s_t + c_t + noise_t,    noise_t ~ N(0, Q_t),    t = 1..T-1.

    The parameters are those of one chain; :meth:`expand` makes independent copies, as a plate does.
    Not for exactly singular C or Q_t, which have no density.  Nearly singular ones are fine if they are
    so along the axes of the state (smooth processes in small steps, integrated noise).

    Args:
        initial_loc: m (S,).
        initial_covariance, initial_scale_tril: C (S, S), positive definite, or its Cholesky factor.
        transition: A (T-1, S, S), or (S, S) for all steps.
        noise_covariance, noise_scale_tril: Q (T-1, S, S), or (S, S) for all steps, or its factor.
        offset: c (T-1, S), or (S,) for all steps; by default 0.
        num_steps: T; needed only where nothing given has a dimension of time.

    Raises:
        ValueError: for wrong shapes, an unknown T, a covariance given twice or not (positive definite).

    Example:
        >>> import torch
        >>> C = torch.tensor([[1.0, 0.0], [0.0, 0.5]])
        >>> A = torch.tensor([[1.0, 0.1], [0.0, 1.0]])
        >>> d = GaussianStateSpace(torch.zeros(2), C, A, 0.1 * C, num_steps=100)
        >>> d.event_shape, d.sample((3,)).shape, d.variance[1]  # A C A' + 0.1 C
        (torch.Size([100, 2]), torch.Size([3, 100, 2]), tensor([1.1050, 0.5500]))
    """

    arg_constraints: Any = {  # noqa: RUF012 - as in torch
        "initial_loc": constraints.real_vector,
        "initial_scale_tril": constraints.independent(constraints.real, 2),
        "transition": constraints.independent(constraints.real, 3),
        "noise_scale_tril": constraints.independent(constraints.real, 3),
        "offset": constraints.independent(constraints.real, 2),
    }
    support: Any = constraints.independent(constraints.real, 2)
    has_rsample = True
    #: times (T,) of the states, where whoever made the chain knows them
    times: Tensor | None = None

    def __init__(
        self,
        initial_loc: Tensor,
        initial_covariance: Tensor | None = None,
        transition: Any = None,
        noise_covariance: Tensor | None = None,
        offset: Tensor | None = None,
        *,
        num_steps: int | None = None,
        initial_scale_tril: Tensor | None = None,
        noise_scale_tril: Tensor | None = None,
        validate_args: bool | None = None,
    ) -> None:
        S = initial_loc.shape[-1]
        offset = initial_loc.new_zeros(S) if offset is None else offset
        # factored before it is expanded: once where all steps are the same
        C = _factor("initial", initial_covariance, initial_scale_tril, validate_args)
        Q = _factor("noise", noise_covariance, noise_scale_tril, validate_args)
        parts: Any = (initial_loc, 1), (C, 2), (transition, 2), (Q, 2), (offset, 1)
        names = "initial_loc", "initial covariance", "transition", "noise covariance", "offset"
        for name, (x, rank) in zip(names, parts, strict=True):
            if x.shape[-rank:] != (S,) * rank or x.dim() > rank + ("initial" not in name):
                raise ValueError(
                    f"GaussianStateSpace: {name} has shape {tuple(x.shape)}; for states of {S} numbers "
                    f"it must be {(S,) * rank}. Copies of a chain are made by expand()."
                )
            if x.dim() > rank:
                if num_steps is not None and 1 <= num_steps != len(x) + 1:
                    raise ValueError(
                        f"GaussianStateSpace: {name} is for {len(x) + 1} states, where num_steps, or "
                        f"what comes before, says {num_steps}."
                    )
                num_steps = len(x) + 1 if num_steps is None else num_steps
        if num_steps is None or num_steps < 1:
            raise ValueError(
                "GaussianStateSpace: give the number of states, num_steps >= 1, or a transition, noise "
                "or offset for each step."
            )
        self.initial_loc, self.initial_scale_tril = initial_loc, C
        self.transition = transition.expand(num_steps - 1, S, S)
        self.noise_scale_tril = Q.expand(num_steps - 1, S, S)
        self.offset = offset.expand(num_steps - 1, S)
        super().__init__(torch.Size(), torch.Size((num_steps, S)), validate_args=validate_args)

    @property
    def initial_covariance(self) -> Tensor:
        """C (S, S)."""
        return self.initial_scale_tril @ self.initial_scale_tril.mT

    @property
    def noise_covariance(self) -> Tensor:
        """Q (T-1, S, S)."""
        return self.noise_scale_tril @ self.noise_scale_tril.mT

    def expand(self, batch_shape: Any, _instance: Any = None) -> GaussianStateSpace:
        """Independent copies of the chain, of the batch shape that is given."""
        new: Any = self._get_checked_instance(GaussianStateSpace, _instance)
        vars(new).update(vars(self))
        shapes = torch.Size(batch_shape), self.event_shape
        TorchDistribution.__init__(new, *shapes, validate_args=False)
        new._validate_args = self._validate_args
        return new

    def steps(self) -> tuple[Tensor, Tensor, Tensor]:
        """A (T, S, S), c (T, S), L (T, S, S) with the first state as a step from 0."""
        A = torch.cat((torch.zeros_like(self.initial_scale_tril).unsqueeze(0), self.transition))
        c = torch.cat((self.initial_loc.unsqueeze(0), self.offset))
        L = torch.cat((self.initial_scale_tril.unsqueeze(0), self.noise_scale_tril))
        return A, c, L

    def rsample(self, sample_shape: Any = ()) -> Tensor:
        """Draws (*sample_shape, *batch_shape, T, S), differentiable in the parameters."""
        shape, like = self._extended_shape(torch.Size(sample_shape)), self.initial_loc
        return self.from_noise(torch.randn(shape, dtype=like.dtype, device=like.device))

    def from_noise(self, noise: Tensor) -> Tensor:
        """The draw (..., T, S) that white ``noise`` (..., T, S) makes."""
        A, c, L = self.steps()
        return scan(A, c + matvec(L, noise))[0]

    def log_det_root(self) -> Tensor:
        """log |det ds / dnoise|, a 0-dim tensor."""
        return self.steps()[2].diagonal(dim1=-2, dim2=-1).log().sum()

    def log_prob(self, value: Tensor) -> Tensor:
        """log p(s) in nats, (...), for ``value`` (..., T, S)."""
        if self._validate_args:
            self._validate_sample(value)
        A, c, L = self.steps()
        before = torch.nn.functional.pad(value[..., :-1, :], (0, 0, 1, 0))
        left = (value - c - matvec(A, before)).unsqueeze(-1)
        square = torch.linalg.solve_triangular(L, left, upper=False).square().sum((-3, -2, -1))
        result = -0.5 * (square + self.event_shape.numel() * log(2 * pi)) - self.log_det_root()
        return result.expand(torch.broadcast_shapes(result.shape, self.batch_shape))

    def moments(self) -> tuple[Tensor, Tensor]:
        """Mean (T, S) and covariance (T, S, S) of each state of one copy of the chain."""
        A, c, L = self.steps()
        return scan(A, c, L @ L.mT)

    @property
    def mean(self) -> Tensor:
        """E s_t, (*batch_shape, T, S)."""
        A, c, _ = self.steps()
        return scan(A, c)[0].expand(self._extended_shape())

    @property
    def variance(self) -> Tensor:
        """Var s_t, entry by entry, (*batch_shape, T, S)."""
        variance = self.moments()[1].diagonal(dim1=-2, dim2=-1)
        return variance.expand(self._extended_shape())


def local_level(
    num_steps: int,
    initial_scale: Tensor | float,
    step_scale: Tensor | float,
    *,
    validate_args: bool | None = None,
) -> GaussianStateSpace:
    """A random walk: s_1 ~ N(0, initial_scale^2), s_{t+1} ~ N(s_t, step_scale^2).

    Args:
        num_steps: T, at least 1.
        initial_scale, step_scale: positive numbers, or 0-dim tensors.

    Raises:
        ValueError: for a ``num_steps`` below 1, scales that are not one positive number.

    Example:
        >>> local_level(3, initial_scale=1.0, step_scale=2.0).variance.squeeze(-1)
        tensor([1., 5., 9.])
    """
    tensors = [x for x in (initial_scale, step_scale) if isinstance(x, Tensor)]
    like = tensors[0] if tensors else torch.empty(())
    if not like.dtype.is_floating_point:
        like = like.to(torch.get_default_dtype())
    return GaussianStateSpace(
        like.new_zeros(1),
        transition=like.new_ones(1, 1),
        initial_scale_tril=one_number("initial_scale", initial_scale, like).reshape(1, 1),
        noise_scale_tril=one_number("step_scale", step_scale, like).reshape(1, 1),
        num_steps=num_steps,
        validate_args=validate_args,
    )


def one_number(name: str, value: Tensor | float, like: Tensor) -> Tensor:
    """``value`` as a 0-dim tensor of the dtype and device of ``like``."""
    number = torch.as_tensor(value, dtype=like.dtype, device=like.device)
    if number.dim():
        raise ValueError(f"{name} has shape {tuple(number.shape)}; it must be one number.")
    return number


def validates(validate_args: bool | None) -> bool:
    """Whether arguments are to be checked by value: as asked, else as set for all distributions."""
    default = torch.distributions.Distribution._validate_args
    return default if validate_args is None else validate_args


def _factor(
    name: str, covariance: Tensor | None, scale_tril: Tensor | None, validate_args: bool | None
) -> Tensor:
    """The one of the two that is given, as a lower Cholesky factor."""
    if (covariance is None) == (scale_tril is None):
        raise ValueError(f"Give one of {name}_covariance and {name}_scale_tril.")
    if covariance is not None:
        factor, exists = cholesky_or_nan(covariance)
        if host_bool(exists.all()) is False and validates(validate_args):
            raise ValueError(
                f"{name}_covariance is not positive definite; it is singular where a part of the state "
                f"has no noise of its own. Add 1e-6 of the others, say, to its diagonal."
            )
        return factor
    root: Any = scale_tril
    diagonal = root.diagonal(dim1=-2, dim2=-1)
    if validates(validate_args) and not bool((root.tril() == root).all() & (diagonal > 0.0).all()):
        raise ValueError(f"{name}_scale_tril is not lower triangular with a positive diagonal.")
    return root


def scan(transition: Tensor, shift: Tensor, noise: Any = None) -> tuple[Tensor, Any]:
    """x_t = A_t x_{t-1} + c_t (..., T, S) from x_{-1} = 0, and covariances of such chains.

    ``noise`` holds the covariances (T, S, S) of independent noise in each step; A_0 has no effect.
    """
    n = shift.shape[-2]
    if n == 1:
        return shift, noise
    pairs, rest = n // 2, (n - 1) // 2
    even, odd, joined = transition[0::2], transition[1::2], None
    c_even, c_odd = shift[..., 0::2, :], shift[..., 1::2, :]
    if noise is not None:
        joined = odd @ noise[0::2][:pairs] @ odd.mT + noise[1::2]
    both = c_odd + matvec(odd, c_even[..., :pairs, :])
    x, covariance = scan(odd @ even[:pairs], both, joined)
    A = even[1:]
    later = c_even[..., 1:, :] + matvec(A, x[..., :rest, :])
    x = interleave(torch.cat((c_even[..., :1, :], later), -2), x, -2)
    if noise is not None:
        later = A @ covariance[:rest] @ A.mT + noise[0::2][1:]
        covariance = interleave(torch.cat((noise[:1], later)), covariance, -3)
    return x, covariance


def interleave(even: Tensor, odd: Tensor, dim: int) -> Tensor:
    """e_0, o_0, e_1, o_1, ... along ``dim`` < 0; ``even`` may have one entry more."""
    pairs = odd.shape[dim]
    both = torch.stack((even.narrow(dim, 0, pairs), odd), dim).flatten(dim - 1, dim)
    if even.shape[dim] == pairs:
        return both
    return torch.cat((both, even.narrow(dim, pairs, 1)), dim)
