"""From a model to an answer in one call, and its parts: advice, when to stop, how to go on tomorrow."""

from .advice import Advice, advise
from .batches import Batches
from .checkpoint import save
from .compare import compare
from .fit import Fit, fit
from .gap import Gap
from .load import load
from .stop import StopRule

__all__ = [
    "Advice",
    "Batches",
    "Fit",
    "Gap",
    "StopRule",
    "advise",
    "compare",
    "fit",
    "load",
    "save",
]
