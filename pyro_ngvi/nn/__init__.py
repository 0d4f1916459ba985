"""Neural networks as Pyro models: weights become sample sites, minibatches get their scale."""

from .bayesianize import BayesianModule, bayesianize
from .predict import Prediction, predict

__all__ = ["BayesianModule", "Prediction", "bayesianize", "predict"]
