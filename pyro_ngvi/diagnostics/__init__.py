"""Whether to believe the answer."""

from ..sites.influence import Influence
from ..sites.leave_one_out import SiteLOO
from .khat import KHat, khat, khat_from_log_weights
from .plots import plot_influence, plot_sites
from .summary import summary

__all__ = [
    "Influence",
    "KHat",
    "SiteLOO",
    "khat",
    "khat_from_log_weights",
    "plot_influence",
    "plot_sites",
    "summary",
]
