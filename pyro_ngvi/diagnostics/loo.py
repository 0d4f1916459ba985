"""Leaving out each datum in turn, of as many data as one likes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import numpy as np
from torch import Tensor

from ..runtime.density import Sites, site_log_prob
from ..runtime.model_density import Parts, map_draws
from .arviz_compat import loo_in_pieces
from .draws import Fitted, compact, mask_of, random_state, resampled, with_likelihood
from .groups import name_dims
from .khat import judge

#: log likelihoods that are held at once: a GiB, in float32 as `to_arviz` stores so many of them
HELD = 2**28
#: those that ArviZ sees at once, of which it makes several copies in float64
SEEN = 2**23


def loo(
    model: Callable[..., Any],
    guide: Callable[..., Any],
    *args: Any,
    num_samples: int = 1000,
    var_name: str | None = None,
    seed: int | None = None,
    batch_size: int | None = None,
    **kwargs: Any,
) -> Any:
    """``arviz.loo`` in bounded memory: Pareto-smoothed importance sampling, leaving out one datum.

    The same as of :func:`to_arviz` with this seed, resampled where the verdict asks for it, but that
    the log likelihoods, draws times data, are not held: the model runs through all draws again for
    every 2^28 of them, and that masked data are no data.  Not for data that depend on each other given
    the latent variables, nor for leaving out units of a hierarchy (:func:`loo_units`).

    Args:
        model: the Pyro model.
        guide: any trained guide of it.
        args: what the model is called with: the full data.
        num_samples: draws.
        var_name: the observed site, where there are several.
        seed: makes the result repeatable and leaves the global random state as it was.
        batch_size: draws that the model sees at once; ``None`` for a number that bounds the memory.
        kwargs: keyword arguments of the model.

    Returns:
        ArviZ's ``ELPDData``, in nats, with the terms of all data.

    Raises:
        ValueError: as :func:`khat`, and where no or several sites have a likelihood by datum.

    Warns:
        RuntimeWarning: where the verdict is "unusable".

    Source:
        Vehtari, Simpson, Gelman, Yao & Gabry 2024, Pareto smoothed importance sampling, JMLR 25(72).

    Example:
        >>> import pyro, torch, pyro.distributions as dist
        >>> from pyro.infer.autoguide import AutoNormal
        >>> def model(y):
        ...     mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
        ...     with pyro.plate("unit", len(y)):
        ...         pyro.sample("y", dist.Normal(mu, 1.0), obs=y)
        >>> found = loo(model, AutoNormal(model, init_scale=0.2), torch.linspace(-1.0, 1.0, 20), seed=0)
        >>> found.n_data_points
        20
    """
    with random_state(seed):
        fitted = Fitted(model, guide, args, kwargs)
    fitted.shown = fitted.latent  # a deterministic site may be as large as the data
    names = with_likelihood(fitted)
    if var_name is not None and var_name not in names:
        raise ValueError(f"var_name is {var_name!r}; the sites with a likelihood are {names}.")
    if var_name is None and len(names) != 1:
        some = f"choose one of {names} by var_name" if names else "loo needs data in a plate"
        raise ValueError(f"{len(names)} observed sites have a likelihood by datum: {some}.")
    name = var_name or names[0]
    with random_state(seed):
        draws = fitted.draw(num_samples, batch_size)
        found = judge(fitted, draws, batch_size)
        values = draws.values
        if found.decision == "unusable":
            warnings.warn(
                f"loo cannot be relied on here. {found.verdict}"[:240], RuntimeWarning, stacklevel=2
            )
        if found.decision == "resample":
            _, values = resampled(values, found.psis_log_weights)

    def terms(rows: Tensor) -> Tensor:
        """Log likelihoods of some data at all draws."""

        def chosen(sites: Sites) -> Parts:
            term = site_log_prob(sites[name])[0]
            return {"": {"": compact(term, num_samples).flatten()[rows]}}

        return map_draws(fitted.joint, chosen, values, num_samples, batch_size)[""][""]

    def pieces(rows: Tensor) -> Iterator[np.ndarray]:
        held, few = terms(rows), max(1, SEEN // num_samples)
        for i in range(0, len(rows), few):
            yield held[:, i : i + few].cpu().numpy().copy()  # a view would keep all rows

    site = fitted.in_sum[name]
    one = site_log_prob(site)[0]
    dims = name_dims({"": {name: one.numpy(force=True)}}, fitted.in_sum, {}, {})[name]
    shape = dict(zip(dims, one.shape, strict=False))
    rows = mask_of(site).expand(one.shape).flatten().nonzero()[:, 0]
    if len(rows) < one.numel():
        shape = {f"{name}_seen": len(rows)}
    parts = rows.split(max(1, HELD // num_samples))
    return loo_in_pieces(chain.from_iterable(map(pieces, parts)), shape)
