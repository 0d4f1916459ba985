"""AutoMetricNormal: a Gaussian with all correlations, whose covariance is the metric of the model."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..families.base import Family, Tensors
from ..guides.base import AutoFamily, FamilyDistribution
from ..guides.search import mode_of
from ..optim.rule import require
from ..runtime.model_density import ModelDensity
from ..runtime.pyro_adapter import has_model, model_as_given, unblocked
from .family import MetricNormal
from .whitening import WhiteModel


class AutoMetricNormal(AutoFamily):
    r"""All correlations of 10^5 latent variables and more: MGVI, q(xi) = N(m, (I + J' F J)^-1).

    xi are the latent variables in coordinates in which their prior is N(0, I), J the derivatives at m
    of the parameters of the likelihood, F its Fisher matrix.  Only m is learned, the covariance
    follows.  A step costs hundreds of gradients of the model, and needs all data.  Draws are made at
    the arguments of the last training step.

    It is exact for linear models with Gaussian noise, and close where data are informative.  *Not* for
    posteriors that are skewed within their own width, or scales that few data determine.  Up to
    d = 1,000 take :class:`~pyro_ngvi.AutoFullRankNormal`.  Copies have no model, so no draws.

    Priors: those of ``pyro_ngvi.metric.PRIORS``, others with an ``icdf``, and images of these; their
    parameters may depend on other sites.  Likelihoods: ``pyro_ngvi.metric.COORDINATES``.

    Args:
        model: a Pyro model with all of its data.
        init: "map" (default): m starts at the mode in white coordinates, by L-BFGS; ``None``: at
            ``init_loc_fn``, the centres of priors.
        cg_steps: steps of conjugate gradients at most.
        probes: vectors for log det M, where d and the number of data are above 1,024.
        kwargs: those of :class:`~pyro_ngvi.guides.AutoFamily`; ``init_scale`` has no use.

    Raises:
        ValueError: for numbers that are too small; at the first call, for a prior or likelihood that is
            not in the tables, a latent site that is masked or scaled, a subsampled plate, latent sites
            of other guides; and what :class:`~pyro_ngvi.guides.AutoFamily` raises.

    Example:
        >>> import pyro, torch, pyro.distributions as dist, pyro_ngvi as ngvi
        >>> def model(y):
        ...     steps = pyro.sample("steps", dist.Normal(torch.zeros(400), 0.1).to_event(1))
        ...     pyro.sample("y", dist.Poisson(steps.cumsum(0).exp()).to_event(1), obs=y)
        >>> guide = ngvi.AutoMetricNormal(model)
        >>> fit = ngvi.fit(model, torch.ones(400), guide=guide, max_steps=20, progress=False)
        >>> guide()["steps"].shape, guide.log_det()[1].item()
        (torch.Size([400]), 0.0)
    """

    family: MetricNormal
    traceable = tempers = False

    def __init__(
        self,
        model: Callable[..., Any],
        *,
        init: str | None = "map",
        cg_steps: int = 1000,
        probes: int = 4,
        **kwargs: Any,
    ) -> None:
        require(cg_steps >= 1, "cg_steps", "be positive", cg_steps)
        require(probes >= 2, "probes", "be at least 2", probes)
        self._settings = cg_steps, probes
        super().__init__(model, init=init, **kwargs)

    def make_family(self) -> Family:
        return MetricNormal(*self._settings)

    def _define_family(self, args: Any, kwargs: Any) -> None:
        model = unblocked(model_as_given(self))
        self.family.model = WhiteModel(model, self.prototype_trace, args, dict(kwargs))

    def _start(self, loc: Tensor, args: Any, kwargs: Any) -> Tensors:
        params = self.family.init(loc, self.init_scale)
        self.family.metric(params)  # what its likelihood lacks is said here
        if self.init == "map":
            params["loc"] = mode_of(ModelDensity(self.family.bound()), params["loc"], 10)
        return params

    def _distribution(self, params: Tensors, **how: Any) -> FamilyDistribution:
        self.family.forget()
        return super()._distribution(params, **how)

    def sampling_posterior(self, *args: Any, **kwargs: Any) -> FamilyDistribution:
        self._require_setup()
        if torch.is_grad_enabled() and has_model(self) and (args or kwargs):
            held, given = self.family.model, (*args, *kwargs, *kwargs.values())
            known = () if held is None else (*held.args, *held.kwargs, *held.kwargs.values())
            if len(given) != len(known) or any(map(operator.is_not, given, known)):
                try:
                    self._define_family(args, kwargs)
                except ValueError:  # new inputs without data: draws are those of before
                    if held is None:
                        raise
        elif self.family.stepped is not None:  # draws and densities are of the last step
            self.family.model = self.family.stepped
        return super().sampling_posterior()

    def log_q_error(self) -> float:
        """Standard error of log q, in nats, by that of log det M."""
        return 0.5 * float(self.log_det()[1])

    def log_det(self) -> tuple[Tensor, Tensor]:
        """log det M in nats, of which the ELBO has half, and its standard error; 0 where exact."""
        return self.family.log_det(self.get_posterior().params)
