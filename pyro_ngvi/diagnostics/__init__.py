"""Whether to believe the answer."""

from pyro_ngvi.diagnostics.khat import KHat, khat, khat_from_log_weights

__all__ = ["KHat", "khat", "khat_from_log_weights"]
