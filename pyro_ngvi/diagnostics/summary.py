"""A table of the posterior that says whether to believe it."""

from html import escape
from typing import Any

import numpy as np

from . import arviz_compat
from .shifts import COARSE_MEAN, COARSE_SD, shift_of

SELECTION = ("var_names", "filter_vars", "coords", "labeller")


def summary(data: Any, **kwargs: Any) -> Any:
    """``arviz.summary`` of a guide's draws, and under the table whether to believe it.

    R-hat, ESS and the error built on it are left out: of a guide's independent draws they look perfect,
    however wrong it is.  The line under the table is the verdict that :func:`pyro_ngvi.to_arviz` wrote,
    also in ``table.attrs["verdict"]``; it judges all sites, whatever ``var_names`` shows.

    Where raw draws are not to be taken as they are, two columns say which rows the normalised weights
    w_s of the draws x_s move by more than 0.3 sds or 30 %; NaN where neither moves that far:

        mean_shift = (sum_s w_s x_s - mean(x)) / sd_w,     sd_ratio = sd_w / sd(x),

    sd_w that of the weighted draws.  Where the verdict is "not usable", these are hints.

    Args:
        data: what :func:`pyro_ngvi.to_arviz` returned, or a :class:`~pyro_ngvi.fitting.Fit`.
        kwargs: of ``arviz.summary``; with ``fmt="xarray"`` there are no columns, and no line.

    Raises:
        ValueError: when ``kind`` is not ``"stats"``, the default, nor begins so.

    Example:
        >>> import pyro, pyro.distributions as dist, pyro_ngvi as ngvi
        >>> model = lambda: pyro.sample("z", dist.Normal(0.0, 1.0))
        >>> shifted = lambda: pyro.sample("z", dist.Normal(0.5, 1.0))
        >>> table = ngvi.summary(ngvi.to_arviz(model, shifted, seed=0))
        >>> round(float(table.loc["z", "mean_shift"]), 1), table.attrs["verdict"][:8]
        (-0.5, 'Resample')
    """
    if hasattr(type(data), "idata"):
        return data.summary(**kwargs)
    table = arviz_compat.summary(data, **kwargs)
    attrs = getattr(data, "attrs", {})
    verdict = attrs.get("verdict")
    of_posterior = kwargs.get("group") in (None, "posterior")
    if not (isinstance(verdict, str) and hasattr(table, "index") and of_posterior):
        return table
    if attrs.get("resample") == "psis":
        verdict = (
            f"Resampled: worth {attrs['resample_ess']:.0f} exact draws. Of the raw draws: {verdict}"
        )
    elif "resample" not in attrs and attrs["decision"] != "intervals":
        _add_shifts(table, data, {k: v for k, v in kwargs.items() if k in SELECTION})
    return _with_line(table, verdict)


def _add_shifts(table: Any, data: Any, selection: dict[str, Any]) -> None:
    """Columns for the rows that weights move."""
    try:
        log_weights = np.asarray(data["sample_stats"]["log_weights"]).reshape(-1)
    except KeyError:  # the group of the posterior alone
        return
    if not np.isfinite(log_weights.max()):
        return
    log_weights = log_weights - np.logaddexp.reduce(log_weights)  # of a part of the draws, perhaps
    mean, ratio = {}, {}
    for name, draws in data["posterior"].data_vars.items():
        if draws.dtype.kind == "f":
            shift = shift_of(draws.values.reshape(len(log_weights), *draws.shape[2:]), log_weights)
            far = (np.abs(shift.mean) > COARSE_MEAN) | (np.abs(shift.log_sd) > COARSE_SD)
            mean[name] = np.where(far, shift.mean, np.nan)
            ratio[name] = np.where(far, np.exp(shift.log_sd), np.nan)
    if any(np.isfinite(x).any() for x in mean.values()):
        for column, values in (("mean_shift", mean), ("sd_ratio", ratio)):
            series = arviz_compat.labelled(data, values, **selection)
            table[column] = series.reindex(table.index).round(2)


def _with_line(table: Any, line: str) -> Any:
    """The table, printed with a line under it."""
    import pandas as pd

    class Table(pd.DataFrame):
        """A DataFrame that prints a line under itself; what is made from it is a plain one."""

        def __reduce__(self) -> Any:
            return pd.DataFrame, (pd.DataFrame(self),)

        @property
        def _constructor(self) -> Any:
            return pd.DataFrame

        def __repr__(self) -> str:
            return f"{super().__repr__()}\n\n{line}"

        def _repr_html_(self) -> str | None:
            html = super()._repr_html_()
            return html and f"{html}<p>{escape(line)}</p>"

    table = Table(table)
    table.attrs["verdict"] = line
    return table
