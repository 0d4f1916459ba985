"""A picture of a run."""

from __future__ import annotations

from typing import Any

import numpy as np


def plot_steps(fit: Any, ax: Any = None) -> Any:
    """The ELBO over the steps of a fit, and above its last value the nats that were still to gain, in
    ``ax`` or in those of a new figure."""
    from matplotlib import pyplot

    ax, elbo = ax or pyplot.subplots()[1], -fit.losses
    steps = np.arange(1, len(elbo) + 1)
    ax.plot(steps, elbo, ".", markersize=3, alpha=0.4, label="ELBO of a step")
    last = elbo[-max(2, len(elbo) // 4) :]
    level = float(last[np.isfinite(last)].mean()) if np.isfinite(last).any() else 0.0
    gap = fit.gap
    if gap is not None and np.isfinite(gap.nats):
        top = level + max(gap.nats, 0.0) + gap.error
        ax.axhspan(level, top, color="tab:orange", alpha=0.3, label="still to gain")
    for k, _ in fit.stop.looks:
        ax.axvline(k, color="0.8", linewidth=0.5, zorder=0)
    if np.isfinite(elbo).any():
        ax.set_ylim(min(np.quantile(elbo[np.isfinite(elbo)], 0.05), level - 1.0), None)
    ax.set_xlabel("step")
    ax.set_ylabel("ELBO [nats]")
    ax.legend()
    return ax
