"""Whether to believe the answer."""

from pyro_ngvi.diagnostics.influence import Influence
from pyro_ngvi.diagnostics.khat import KHat, khat, khat_from_log_weights
from pyro_ngvi.diagnostics.leave_one_out import SiteLOO
from pyro_ngvi.diagnostics.plots import plot_influence, plot_sites
from pyro_ngvi.diagnostics.summary import summary

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
