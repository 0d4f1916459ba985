"""Gaussian priors over functions and chains of states."""

from .matern import matern_state_space
from .state_space import GaussianStateSpace, local_level

__all__ = ["GaussianStateSpace", "local_level", "matern_state_space"]
