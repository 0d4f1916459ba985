"""Metric Gaussian variational inference: covariances that follow from the mean, for many latents."""

from .family import MetricNormal
from .guide import AutoMetricNormal
from .likelihoods import COORDINATES
from .whitening import PRIORS

__all__ = ["COORDINATES", "PRIORS", "AutoMetricNormal", "MetricNormal"]
