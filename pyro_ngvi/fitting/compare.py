"""Several fits in one table."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..diagnostics import arviz_compat
from ..diagnostics.loo import data_of
from .result import Result


def compare(fits: Mapping[str, Result], *, var_name: str | None = None, **options: Any) -> Any:
    """``arviz.compare`` of fits to the same data, and what each fit says of itself.

    ArviZ's columns rank *models* by how well they predict a datum that is left out; behind them are
    ``elbo``, ``elbo_se`` in nats, which compare *guides* of one model, and the ``decision`` of the
    verdict.  Not for fits that are "unusable".

    Args:
        fits: by name; of :func:`pyro_ngvi.fit`, with all data.
        var_name: the observed site, where there are several.
        options: of ``arviz.compare``, whose ``DataFrame`` it returns, the best model first.

    Raises:
        ValueError: where a model has no likelihood by datum, or the data differ.

    Example:
        >>> import pyro, torch, pyro.distributions as dist, pyro_ngvi as ngvi
        >>> def model(y, scale):
        ...     m = pyro.sample("m", dist.Normal(0.0, 10.0))
        ...     with pyro.plate("data", len(y)):
        ...         pyro.sample("y", dist.Normal(m, scale), obs=y)
        >>> y = torch.linspace(-2.0, 2.0, 30)
        >>> how = {"guide": "AutoMeanFieldNormal", "seed": 0, "progress": False}
        >>> fits = {f"sd {s}": ngvi.fit(model, y, s, **how) for s in (1.0, 5.0)}
        >>> list(ngvi.compare(fits).index)
        ['sd 1.0', 'sd 5.0']
    """
    if not isinstance(fits, Mapping):
        raise TypeError(
            f'compare takes a dict of fits, {{"a": fit_a, "b": fit_b}}; got {type(fits).__name__}.'
        )
    if not fits:
        raise ValueError("compare got no fits. Pass a dict of them by name.")
    by_datum, held = {}, {}
    for name, fit in fits.items():
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            try:
                by_datum[name] = fit.loo(var_name=var_name)
            except ValueError as error:
                error.add_note(f"in the fit {name!r} of compare")
                raise
        for each in said:
            warnings.warn(f"{each.message} This is {name!r}.", each.category, stacklevel=2)
        data = data_of(fit.model, fit.guide, fit.args, fit.kwargs, var_name)
        # in float32, which one of the models may hold them in
        held[name] = data.astype(np.float32)
        first = next(iter(held))
        differ = f"{len(held[first])} and {len(data)} of them"
        if held[first].shape == data.shape:
            others = (held[first] != held[name]).sum()
            differ = f"{others} of the {len(data)} are not the same" * bool(others)
        if differ:
            raise ValueError(
                f"compare: the data of the fits {first!r} and {name!r} differ, {differ}. A score says "
                f"nothing against one of other data: fit all models to the same, in the same order."
            )
    table = arviz_compat.compare(by_datum, **options)
    for name, fit in fits.items():
        table.loc[name, ["elbo", "elbo_se"]] = fit.elbo
        table.loc[name, "decision"] = fit.verdict.decision
    return table
