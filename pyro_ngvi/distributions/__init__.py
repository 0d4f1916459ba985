"""Gaussian priors over functions and chains of states."""

from .gaussian_process import GaussianProcess
from .matern import matern_state_space
from .state_space import GaussianStateSpace, local_level

__all__ = ["GaussianProcess", "GaussianStateSpace", "local_level", "matern_state_space"]
