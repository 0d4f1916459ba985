"""Pictures of what the sites of an AutoSites guide say, of every datum; they need matplotlib."""

from typing import Any

import torch
from torch import Tensor

from ..sites.leave_one_out import Influence


def plot_influence(influence: Influence, ax: Any = None, *, label: int = 5) -> Any:
    """A stem for each datum: how far the posterior mean moves without it, in standard deviations.

    Args:
        influence: what ``guide.influence()`` gives.
        ax: matplotlib ``Axes``, which are returned; ``None`` for those of a new figure.
        label: how many of the most influential get their number.
    """
    ax = axes(ax)
    distance = influence.distance.detach().cpu()
    numbers = torch.arange(len(distance))
    markers, stems, base = ax.stem(numbers.numpy(), distance.numpy(), basefmt=" ", markerfmt=".")
    markers.set_markersize(4)
    stems.set_linewidth(0.8)
    base.set_visible(False)
    for n in influence.most(label).tolist():
        if torch.isfinite(distance[n]):
            at = (n, float(distance[n]))
            ax.annotate(str(n), at, textcoords="offset points", xytext=(4, 2), fontsize="small")
    for n in distance.isnan().nonzero().reshape(-1).tolist():  # no proper Gaussian without it
        ax.axvline(n, color="tab:red", linestyle=":", linewidth=1.0)
    ax.set_ylim(bottom=0.0)
    ax.set_xlabel(f"number in {influence.group!r}")
    ax.set_ylabel("shift of the posterior mean [sd]")
    return ax


def plot_sites(guide: Any, group: str | None = None, ax: Any = None) -> Any:
    """The sites as observations of f, Lambda^-1 nu +- Lambda^-1/2, against the posterior mean of f.

    Points on the diagonal are data that the posterior agrees with.  The flatter a site, the paler its
    point and bar: it says little.  One whose bar would be longer than the picture has no bar, and one
    without a peak (Lambda not positive definite) is left out.  At the arguments of the last step.

    Args:
        guide: a :class:`~pyro_ngvi.AutoSites`.
        group: name of a group of its data; not needed where there is one.
        ax: matplotlib ``Axes``, which are returned; ``None`` for those of a new figure.

    Raises:
        ValueError: for a group that is not there, and before the data of the last step are known.
    """
    group, mean = guide.predictor_means(group)
    ax = axes(ax)
    site = guide.sites()[group]
    variance = _variances(site.precision)
    shown = site.mean.isfinite() & (variance > 0.0)
    low, high = _limits(mean, site.mean[shown])
    says = variance.sqrt() < 0.5 * (high - low)
    several = mean.shape[-1] > 1
    for j in range(mean.shape[-1]):
        x, y, sd = (t[:, j].detach().cpu().numpy() for t in (mean, site.mean, variance.sqrt()))
        told, untold = ((shown & c)[:, j].cpu().numpy() for c in (says, ~says))
        look: dict[str, Any] = {"color": f"C{j}", "label": f"f[{j}]" if several else None}
        ax.plot(x[untold], y[untold], ".", markersize=3, alpha=0.1, color=f"C{j}")
        if told.any():
            x, y, sd = x[told], y[told], sd[told]
            strength = (0.1 + 0.9 * (sd.min() / sd)).clip(0.0, 1.0)
            ax.scatter(x, y, s=8, alpha=strength, linewidths=0, **look)
            ax.vlines(x, y - sd, y + sd, color=look["color"], linewidth=0.5, alpha=strength)
    ax.plot([low, high], [low, high], color="0.5", linewidth=0.8, zorder=0)
    ax.set_ylim(low, high)
    ax.set_xlabel("posterior mean of f")
    ax.set_ylabel("site, as an observation of f")
    if several:
        ax.legend()
    return ax


def _variances(precision: Tensor) -> Tensor:
    """The diagonal (N, k) of Lambda^-1, 0 where Lambda is not positive definite."""
    chol, info = torch.linalg.cholesky_ex(precision)
    proper = (info == 0).unsqueeze(-1)
    identity = torch.eye(precision.shape[-1]).to(precision)
    inverse = torch.cholesky_inverse(torch.where(proper.unsqueeze(-1), chol, identity))
    return torch.where(proper, inverse.diagonal(dim1=-2, dim2=-1), 0.0)


def _limits(mean: Tensor, peaks: Tensor) -> tuple[float, float]:
    """A range with all posterior means and most peaks: flat sites have theirs anywhere."""
    low, high = float(mean.min()), float(mean.max())
    if peaks.numel():
        inner = torch.quantile(peaks.reshape(-1)[:100_000], peaks.new_tensor([0.05, 0.95]))
        span = max(high - low, 1e-12)
        low = min(low, max(float(inner[0]), low - span))
        high = max(high, min(float(inner[1]), high + span))
    margin = 0.05 * max(high - low, 1e-12)
    return low - margin, high + margin


def axes(ax: Any) -> Any:
    """``ax``, or the axes of a new figure."""
    if ax is not None:
        return ax
    from matplotlib import pyplot

    return pyplot.subplots()[1]
