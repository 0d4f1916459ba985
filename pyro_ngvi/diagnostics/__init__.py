"""Whether to believe the answer."""

from ..probing.vectorized import check_vectorized
from ..runtime.model_density import ModelDensity
from ..sites.leave_one_out import Influence, SiteLOO
from .by_chains import diagnose
from .calibration import Calibration, Uniformity, calibrate
from .correction import Corrected, corrected
from .diagnosis import Diagnosis
from .export import to_arviz
from .khat import KHat, khat_from_log_weights
from .linear_response import LinearResponse, linear_response
from .loo import loo
from .moved import Moved
from .over_batches import OverBatches
from .prediction import predict
from .summary import summary
from .unit_loo import UnitLOO, loo_units
from .verdict import khat

__all__ = [
    "Calibration",
    "Corrected",
    "Diagnosis",
    "Influence",
    "KHat",
    "LinearResponse",
    "ModelDensity",
    "Moved",
    "OverBatches",
    "SiteLOO",
    "Uniformity",
    "UnitLOO",
    "calibrate",
    "check_vectorized",
    "corrected",
    "diagnose",
    "khat",
    "khat_from_log_weights",
    "linear_response",
    "loo",
    "loo_units",
    "predict",
    "summary",
    "to_arviz",
]
