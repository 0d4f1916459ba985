"""A Gaussian process at given inputs, with nothing computed before it is asked for."""

from __future__ import annotations

from collections.abc import Callable
from math import log, pi
from typing import Any, cast

import torch
from pyro.distributions import TorchDistribution
from torch import Tensor, nn
from torch.distributions import constraints

from ..linalg.cholesky import cholesky_or_nan
from ..linalg.host import host_bool
from ..linalg.triangular import solve
from ..runtime.pyro_adapter import with_draws_held


class GaussianProcess(TorchDistribution):
    """f ~ N(mean(inputs), kernel(inputs) + jitter I): one draw at all inputs, event shape (N,).

    A site of its own, outside of the plate of the data.  With minibatches (and ``inducing=`` given to
    :class:`~pyro_ngvi.AutoSites`) make the plate first and f at its indices.  Parameters of kernel
    and mean are learned by ``CVI(guide, others=Adam(...))``; hold others by ``requires_grad_(False)``.
    Draws and densities take the Cholesky factor of the N x N matrix; inducing points need neither.

    Args:
        kernel: any callable with the calls of ``pyro.contrib.gp.kernels``: ``kernel(X)`` (N, N),
            ``kernel(X, Z)`` (N, M), ``kernel(X, diag=True)`` (N,).
        inputs: X (N, ...), in whatever form the kernel takes it.
        mean: a number, a function of the inputs to (N,), or ``None`` for 0.
        jitter: variance of white noise at every input, new ones too: a part of the model.  1e-6 suits
            unit variances in float64; an RBF kernel in float32 needs 1e-4 and more.

    Raises:
        ValueError: for a kernel matrix that is not positive definite, a jitter below 0, a mean of
            another shape; in the plate of the data.

    Example:
        >>> import pyro, pyro.distributions as dist, pyro_ngvi as ngvi
        >>> kernel = lambda X, Z=None, diag=False: (
        ...     torch.ones(len(X)) if diag else (-(X[:, None] - (X if Z is None else Z)).abs()).exp())
        >>> X = torch.linspace(0, 5, 60)
        >>> y = (X.sin() > 0).float()
        >>> def model(X, y=None, batch=None):
        ...     data = pyro.plate("data", len(X), subsample_size=batch)
        ...     f = pyro.sample("f", ngvi.distributions.GaussianProcess(kernel, X[data.indices]))
        ...     with data:
        ...         obs = None if y is None else y[data.indices]
        ...         pyro.sample("y", dist.Bernoulli(logits=f), obs=obs)
        >>> guide = ngvi.AutoSites(model, inducing=X[::6])
        >>> svi = pyro.infer.SVI(model, guide, ngvi.CVI(guide), ngvi.SitesELBO())
        >>> losses = [svi.step(X, y, batch=20) for _ in range(60)]  # minibatches of 20
        >>> mean, variance = guide.predict(torch.tensor([1.5, 4.5]))["f"]  # at new inputs
        >>> mean.sign(), variance.shape
        (tensor([ 1., -1.]), torch.Size([2]))
    """

    arg_constraints: Any = {}  # noqa: RUF012 - as in torch
    support: Any = constraints.real_vector
    has_rsample = True

    def __init__(
        self,
        kernel: Callable[..., Tensor],
        inputs: Tensor,
        mean: Callable[[Tensor], Tensor] | Tensor | float | None = None,
        jitter: float = 1e-6,
        validate_args: bool | None = None,
    ) -> None:
        if isinstance(jitter, Tensor) or not jitter >= 0.0:  # a tensor would not be learned
            raise ValueError(f"GaussianProcess: jitter is {jitter!r}; it must be a number >= 0.")
        self.kernel: Any = with_draws_held(kernel)
        self.mean_function: Any = with_draws_held(mean)
        self.inputs, self.jitter = inputs, float(jitter)
        self._loc: Tensor | None = None
        self._scale_tril: Tensor | None = None
        super().__init__(torch.Size(), inputs.shape[:1], validate_args=validate_args)

    def expand(self, batch_shape: Any, _instance: Any = None) -> GaussianProcess:
        """Independent draws of the process; refused for the plate of its own inputs."""
        batch_shape, size = torch.Size(batch_shape), len(self.inputs)
        if batch_shape == self.batch_shape:
            return self
        if batch_shape[-1] == size > 1:
            raise self.in_plate(batch_shape)
        new: Any = self._get_checked_instance(GaussianProcess, _instance)
        vars(new).update(vars(self))
        TorchDistribution.__init__(new, batch_shape, self.event_shape, validate_args=False)
        new._validate_args = self._validate_args
        return new

    def in_plate(self, batch_shape: torch.Size) -> ValueError:
        """What is wrong where the site of a process stands in a plate of the model."""
        return ValueError(
            f"A GaussianProcess is one draw at all of its {len(self.inputs)} inputs, and cannot be "
            f"expanded to batch shape {tuple(batch_shape)}. Take its site out of the plate, at "
            f"X[data.indices]; independent processes are sites of their own."
        )

    @property
    def loc(self) -> Tensor:
        """mean(X), (*batch_shape, N)."""
        if self._loc is None:
            self._loc = self._mean_of(self.mean_function, self.inputs)
        return self._loc.expand(self._extended_shape())

    mean = loc

    def mean_at(self, inputs: Tensor) -> Tensor:
        """mean(Z) (M,) at other inputs; 0 for a mean that is given as a number for each of its own."""
        mean: Any = self.mean_function
        return self._mean_of(None if isinstance(mean, Tensor) and mean.dim() else mean, inputs)

    @staticmethod
    def _mean_of(mean: Any, X: Tensor) -> Tensor:
        if not callable(mean):
            dtype = X.dtype if X.is_floating_point() else torch.get_default_dtype()
            loc = torch.as_tensor(0.0 if mean is None else mean, dtype=dtype, device=X.device)
            return loc.expand(X.shape[:1])
        loc: Any = mean(X)
        if loc.shape != X.shape[:1]:
            raise ValueError(
                f"GaussianProcess: mean(inputs) has shape {tuple(loc.shape)}, and must have "
                f"{tuple(X.shape[:1])}: a number for each input."
            )
        return loc

    @property
    def covariance_matrix(self) -> Tensor:
        """k(X, X) + jitter I, (N, N)."""
        return with_jitter(self.kernel(self.inputs), self.jitter)

    @property
    def scale_tril(self) -> Tensor:
        """Lower triangular R (N, N) with R R' the covariance; kept."""
        if self._scale_tril is None:
            self._scale_tril = factor(self.covariance_matrix, self.jitter)
        return self._scale_tril

    @property
    def variance(self) -> Tensor:
        """k(x, x) + jitter at every input, (*batch_shape, N)."""
        return (self.kernel(self.inputs, diag=True) + self.jitter).expand(self._extended_shape())

    def from_noise(self, noise: Tensor) -> Tensor:
        """loc + R noise for white ``noise`` (..., N)."""
        return self.loc + noise @ self.scale_tril.mT

    def log_det_root(self) -> Tensor:
        """log |det R|, a 0-dim tensor."""
        return self.scale_tril.diagonal().log().sum()

    def rsample(self, sample_shape: Any = ()) -> Tensor:
        """Draws (*sample_shape, *batch_shape, N)."""
        shape = self._extended_shape(torch.Size(sample_shape))
        return self.from_noise(torch.randn(shape, dtype=self.loc.dtype, device=self.loc.device))

    def log_prob(self, value: Tensor) -> Tensor:
        """log p(value) (...) in nats for ``value`` (..., N), in the batch shape at least."""
        if self._validate_args:
            self._validate_sample(value)
        noise = solve(self.scale_tril, value - self.loc)
        squares = noise.square().sum(-1) + noise.shape[-1] * log(2 * pi)
        return -0.5 * squares - self.log_det_root()

    def __getstate__(self) -> dict[str, Any]:
        if isinstance(self.kernel, nn.Module):
            # Pyro leaves a weakref on every parameter, each time anew
            for p in self.kernel.parameters():
                cast(dict[str, Any], vars(p)).pop("unconstrained", None)
        return self.__dict__


def with_jitter(matrix: Tensor, jitter: float) -> Tensor:
    """matrix + jitter I."""
    return matrix + jitter * matrix.new_ones(matrix.shape[-1]).diag()


def factor(matrix: Tensor, jitter: float) -> Tensor:
    """The lower Cholesky factor; where there is none an error, or NaN where the host cannot look."""
    root, exists = cholesky_or_nan(matrix)
    if host_bool(exists.all()) is False:
        raise ValueError(
            f"GaussianProcess: a kernel matrix of {matrix.shape[-1]} inputs is not positive "
            f"definite in {str(matrix.dtype).removeprefix('torch.')} with jitter={jitter:g}. Raise "
            f"jitter (RBF in float32: 1e-4 of its variance), use float64, or look for a NaN."
        )
    return root
