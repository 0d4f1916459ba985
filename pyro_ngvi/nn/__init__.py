"""Neural networks as Pyro models: weights become sample sites, layers with few latent numbers."""

from ..guides.reparam import WalshHadamardReparam
from .bayesianize import BayesianModule, bayesianize
from .local import LocalModel, local_reparameterization
from .predict import Prediction, predict
from .random_features import RandomFourierFeatures
from .walsh_hadamard import WalshHadamardLinear

__all__ = [
    "BayesianModule",
    "LocalModel",
    "Prediction",
    "RandomFourierFeatures",
    "WalshHadamardLinear",
    "WalshHadamardReparam",
    "bayesianize",
    "local_reparameterization",
    "predict",
]
