r"""Gauss-Markov chains (linear Gaussian state-space models), with all times at once.

    s_1 ~ N(m, C),    s_{t+1} = A_t s_t + c_t + noise_t,    noise_t ~ N(0, Q_t),    t = 1..T-1.

Log densities are sums over t of independent terms; draws and moments are scans of log2(T) rounds
(:mod:`pyro_ngvi.distributions.scan`).  Both are O(T S^3) and have no loop over t in Python.

The name is NumPyro's.  Theirs has one transition and one covariance for all t, starts at
s_1 = noise_1 (that is m = 0, C = Q) and has no offset; here every step has its own and the first state
has a law of its own.

Not for exactly singular C or Q_t, which have no density; nearly singular ones are fine as long as they
are so along the axes of the state (smooth processes in small steps, integrated noise).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from pyro.distributions import TorchDistribution
from torch import Tensor
from torch.distributions import constraints

from ..linalg.products import matvec
from .scan import scan, scan_moments

__all__ = ["GaussianStateSpace", "local_level"]

LOG_2PI = math.log(2.0 * math.pi)


class GaussianStateSpace(TorchDistribution):
    """A Gauss-Markov chain s of T states in R^S; event shape (T, S).

    The parameters are those of one chain, without batch dimensions; :meth:`expand` makes independent
    copies of it, as a plate does.  Each covariance can be given by its lower Cholesky factor instead.

    Args:
        initial_loc: m (S,).
        initial_covariance: C (S, S), positive definite.
        transition: A (T-1, S, S), or (S, S) for all steps.
        noise_covariance: Q (T-1, S, S), or (S, S) for all steps; positive definite.
        offset: c (T-1, S), or (S,) for all steps; by default 0.
        num_steps: T; needed only where nothing given has a dimension of time.
        initial_scale_tril: in place of ``initial_covariance``.
        noise_scale_tril: in place of ``noise_covariance``.

    Raises:
        ValueError: for wrong shapes, numbers of steps that do not agree, a covariance given twice or
            not at all, and, with validation on, for covariances that are not positive definite.

    Example:
        >>> import torch
        >>> C = torch.tensor([[1.0, 0.0], [0.0, 0.5]])
        >>> A = torch.tensor([[1.0, 0.1], [0.0, 1.0]])
        >>> d = GaussianStateSpace(torch.zeros(2), C, A, 0.1 * C, num_steps=100)
        >>> d.event_shape, d.sample((3,)).shape
        (torch.Size([100, 2]), torch.Size([3, 100, 2]))
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
        transition: Tensor | None = None,
        noise_covariance: Tensor | None = None,
        offset: Tensor | None = None,
        *,
        num_steps: int | None = None,
        initial_scale_tril: Tensor | None = None,
        noise_scale_tril: Tensor | None = None,
        validate_args: bool | None = None,
    ) -> None:
        if initial_loc.dim() != 1 or not initial_loc.shape[0]:
            raise ValueError(
                f"initial_loc has shape {tuple(initial_loc.shape)}; it must be (S,). "
                "Batches of chains are made by expand()."
            )
        if transition is None:
            raise ValueError("transition is missing; it must be (T-1, S, S) or (S, S).")
        S = initial_loc.shape[0]
        C = _one("initial", initial_covariance, initial_scale_tril)
        Q = _one("noise", noise_covariance, noise_scale_tril)
        if C[1].shape != (S, S):
            raise ValueError(
                f"{C[0]} has shape {tuple(C[1].shape)}; for states of {S} numbers it must be {(S, S)}."
            )
        per_step: dict[str, tuple[Tensor, tuple[int, ...]]]
        per_step = {"transition": (transition, (S, S)), Q[0]: (Q[1], (S, S))}
        if offset is not None:
            per_step["offset"] = (offset, (S,))
        steps = _number_of_steps(per_step, num_steps)

        check = validates(validate_args)
        self.initial_loc = initial_loc
        self.initial_scale_tril = _factor(*C, check)
        self.transition = transition.expand(steps, S, S)
        # factored before they are expanded: once where all steps are the same
        self.noise_scale_tril = _factor(*Q, check).expand(steps, S, S)
        offset = initial_loc.new_zeros(S) if offset is None else offset
        self.offset = offset.expand(steps, S)
        super().__init__(torch.Size(), torch.Size((steps + 1, S)), validate_args=validate_args)

    @property
    def initial_covariance(self) -> Tensor:
        """C (S, S)."""
        return self.initial_scale_tril @ self.initial_scale_tril.mT

    @property
    def noise_covariance(self) -> Tensor:
        """Q (T-1, S, S)."""
        return self.noise_scale_tril @ self.noise_scale_tril.mT

    def expand(self, batch_shape: Any, _instance: Any = None) -> GaussianStateSpace:
        """Independent copies of the chain; an existing batch shape must broadcast to the new one."""
        new: Any = self._get_checked_instance(GaussianStateSpace, _instance)
        old, batch_shape = self.batch_shape, torch.Size(batch_shape)
        pairs = zip(old[::-1], batch_shape[::-1], strict=False)
        if len(old) > len(batch_shape) or any(a not in (1, b) for a, b in pairs):
            raise ValueError(
                f"Batch shape {tuple(old)} cannot be expanded to {tuple(batch_shape)}."
            )
        for name in (*self.arg_constraints, "times"):
            setattr(new, name, getattr(self, name))
        TorchDistribution.__init__(new, batch_shape, self.event_shape, validate_args=False)
        new._validate_args = self._validate_args
        return new

    def _steps(self) -> tuple[Tensor, Tensor, Tensor]:
        """A (T, S, S), c (T, S), L (T, S, S) with the first state as a step from 0."""
        A = torch.cat((torch.zeros_like(self.initial_scale_tril).unsqueeze(0), self.transition))
        c = torch.cat((self.initial_loc.unsqueeze(0), self.offset))
        L = torch.cat((self.initial_scale_tril.unsqueeze(0), self.noise_scale_tril))
        return A, c, L

    def rsample(self, sample_shape: Any = ()) -> Tensor:
        """Draws (*sample_shape, *batch_shape, T, S), differentiable in the parameters."""
        like = self.initial_loc
        shape = self._extended_shape(torch.Size(sample_shape))
        return self.from_noise(torch.randn(shape, dtype=like.dtype, device=like.device))

    def from_noise(self, noise: Tensor) -> Tensor:
        """The draw that white ``noise`` (..., T, S) makes."""
        A, c, L = self._steps()
        return scan(A, c + matvec(L, noise))

    def log_det_root(self) -> Tensor:
        """log |det ds / dnoise|, a 0-dim tensor."""
        L = self._steps()[2]
        return L.diagonal(dim1=-2, dim2=-1).log().sum()

    def log_prob(self, value: Tensor) -> Tensor:
        """log p(s) in nats, (...), for ``value`` (..., T, S)."""
        if value.shape[-2:] != self.event_shape:
            raise ValueError(
                f"The value has shape {tuple(value.shape)}; "
                f"its last dimensions must be (T, S) = {tuple(self.event_shape)}."
            )
        if self._validate_args:
            self._validate_sample(value)
        A, c, L = self._steps()
        before = torch.nn.functional.pad(value[..., :-1, :], (0, 0, 1, 0))
        left = (value - c - matvec(A, before)).unsqueeze(-1)
        noise = torch.linalg.solve_triangular(L, left, upper=False)
        log_det = L.diagonal(dim1=-2, dim2=-1).log().sum()
        size = value.shape[-2] * value.shape[-1]
        result = -0.5 * (noise.square().sum((-3, -2, -1)) + size * LOG_2PI) - log_det
        if self.batch_shape:
            result = result.expand(torch.broadcast_shapes(result.shape, self.batch_shape))
        return result

    def moments(self) -> tuple[Tensor, Tensor]:
        """Mean (T, S) and covariance (T, S, S) of each state of one copy of the chain."""
        A, c, L = self._steps()
        return scan_moments(A, c, L @ L.mT)

    @property
    def mean(self) -> Tensor:
        """(*batch_shape, T, S)."""
        A, c, _ = self._steps()
        return scan(A, c).expand(self._extended_shape())

    @property
    def variance(self) -> Tensor:
        """(*batch_shape, T, S)."""
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
        ValueError: for a ``num_steps`` below 1, scales that are no numbers or, with validation on, not
            positive.

    Example:
        >>> local_level(3, initial_scale=1.0, step_scale=2.0).variance.squeeze(-1)
        tensor([1., 5., 9.])
    """
    tensors = [x for x in (initial_scale, step_scale) if isinstance(x, Tensor)]
    like = tensors[0] if tensors else torch.empty(())
    if not like.dtype.is_floating_point:
        like = like.to(torch.get_default_dtype())
    first = positive_number("initial_scale", initial_scale, like, validate_args)
    step = positive_number("step_scale", step_scale, like, validate_args)
    return GaussianStateSpace(
        like.new_zeros(1),
        transition=like.new_ones(1, 1),
        initial_scale_tril=first.reshape(1, 1),
        noise_scale_tril=step.reshape(1, 1),
        num_steps=num_steps,
        validate_args=validate_args,
    )


def positive_number(
    name: str, value: Tensor | float, like: Tensor, validate_args: bool | None
) -> Tensor:
    """``value`` as a 0-dim tensor of the dtype and device of ``like``."""
    number = torch.as_tensor(value, dtype=like.dtype, device=like.device)
    if number.dim():
        raise ValueError(f"{name} has shape {tuple(number.shape)}; it must be one number.")
    if validates(validate_args) and not bool(number > 0.0):
        raise ValueError(f"{name} must be positive, got {float(number)}.")
    return number


def validates(validate_args: bool | None) -> bool:
    """Whether arguments are to be checked by value: as asked, else as set for all distributions."""
    default = torch.distributions.Distribution._validate_args
    return default if validate_args is None else validate_args


def _one(name: str, covariance: Tensor | None, scale_tril: Tensor | None) -> tuple[str, Tensor]:
    """The one of the two that is given, and its name."""
    names = f"{name}_covariance", f"{name}_scale_tril"
    if covariance is not None and scale_tril is None:
        return names[0], covariance
    if scale_tril is not None and covariance is None:
        return names[1], scale_tril
    given = "both are" if covariance is not None else "neither is"
    raise ValueError(f"Give one of {names[0]} and {names[1]}; {given} given.")


def _number_of_steps(
    per_step: dict[str, tuple[Tensor, tuple[int, ...]]], num_steps: int | None
) -> int:
    """T - 1 from tensors (T-1, *shape) or (*shape) and from ``num_steps``, which must agree."""
    known: dict[str, int] = {}
    if num_steps is not None:
        if num_steps < 1:
            raise ValueError(f"num_steps must be at least 1, got {num_steps}.")
        known["num_steps"] = num_steps
    for name, (value, shape) in per_step.items():
        if value.shape == shape:
            continue
        if value.shape[1:] != shape:
            wanted = "(T-1, " + ", ".join(map(str, shape)) + ")"
            raise ValueError(
                f"{name} has shape {tuple(value.shape)}; for states of {shape[0]} numbers it must be "
                f"{wanted}, or {shape} for all steps."
            )
        known[name] = len(value) + 1
    if not known:
        raise ValueError(
            "The number of states T is not known: give num_steps, or one of "
            f"{', '.join(per_step)} with a dimension of time."
        )
    if len(set(known.values())) > 1:
        said = ", ".join(f"{T} by {name}" for name, T in known.items())
        raise ValueError(f"The number of states T is not one: {said}. Tensors have T - 1 entries.")
    return next(iter(known.values())) - 1


def _factor(name: str, value: Tensor, check: bool) -> Tensor:
    """The lower Cholesky factor of a covariance; a factor as it is."""
    if name.endswith("scale_tril"):
        wrong = (value.triu(1) != 0.0).any(-1) | ~(value.diagonal(dim1=-2, dim2=-1) > 0.0)
        wrong, what = wrong.any(-1), "lower triangular with a positive diagonal"
    else:
        value, info = torch.linalg.cholesky_ex(value)
        wrong, what = info != 0, "positive definite"
    if check and bool(wrong.any()):
        where = f"[{int(wrong.nonzero()[0])}]" if wrong.dim() else ""
        raise ValueError(f"{name}{where} is not {what}.")
    return value
