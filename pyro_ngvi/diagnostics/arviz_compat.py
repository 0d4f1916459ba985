"""ArviZ 0.x and 1.x behind one interface: the only file that knows which of them is installed.

It needs neither torch nor Pyro, nor anything else of this package, so that it can be tested where only
ArviZ is installed. ArviZ takes as long to import as torch, so it is imported at the first use.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np


def from_groups(
    groups: Mapping[str, Mapping[str, np.ndarray]],
    *,
    coords: Mapping[str, Sequence[Any]] | None = None,
    dims: Mapping[str, Sequence[str]] | None = None,
    pred_dims: Mapping[str, Sequence[str]] | None = None,
    attrs: Mapping[str, str | float] | None = None,
) -> Any:
    """Builds ArviZ's container from plain arrays: ``InferenceData`` (0.x) or ``DataTree`` (1.x).

    Arrays are (chain, draw, *rest) where sampled, else ``rest``, whose dimensions ``dims`` names by
    variable, or ``pred_dims``.  A slash in a name, which netCDF refuses, becomes a dot.
    """
    arviz = _arviz()
    old = arviz.__version__.startswith("0.")
    root, labels = dict(attrs or {}), _without_slashes(coords or {})
    datasets = {}
    for name, group in groups.items():
        how: dict[str, Any] = {"skip_event_dims": name in ("log_likelihood", "log_prior")}
        if name.startswith("predictions"):
            how |= {"dims": _names(pred_dims)}
        elif name != "sample_stats":  # one of which may have the name of a site
            how |= {"dims": _names(dims), "coords": labels}
        if name.endswith("_data"):
            how["default_dims" if old else "sample_dims"] = []
        attributes = root if name == "posterior" else None
        datasets[name] = arviz.dict_to_dataset(_without_slashes(group), attrs=attributes, **how)
    if old:
        return arviz.InferenceData(attrs=root, **datasets)
    import xarray as xr

    data = xr.DataTree.from_dict(datasets)
    data.attrs = root
    return data


def _names(dims: Mapping[str, Sequence[str]] | None) -> dict[str, list[str]]:
    plain = _without_slashes(dims or {})
    return {name: [dim.replace("/", ".") for dim in names] for name, names in plain.items()}


@cache
def _arviz() -> Any:
    with warnings.catch_warnings():
        # Once a day ArviZ 0.23 announces 1.0; both work here, so the user need not choose.
        warnings.filterwarnings("ignore", r"\s*ArviZ is undergoing a major refactor")
        import arviz
    return arviz


def _without_slashes(by_name: Mapping[str, Any]) -> dict[str, Any]:
    return {name.replace("/", "."): value for name, value in by_name.items()}


def summary(data: Any, **kwargs: Any) -> Any:
    """``arviz.summary`` without the figures of Markov chains; see :func:`pyro_ngvi.summary`."""
    kind = kwargs.pop("kind", "stats")
    if not str(kind).startswith("stats"):
        raise ValueError(
            f"kind={kind!r} asks for diagnostics of Markov chains, which mean nothing for a "
            "guide's independent draws. Use kind='stats', or arviz.summary to see them regardless."
        )
    az = _arviz()
    table = az.summary(data, kind=kind, **kwargs)
    old = az.__version__.startswith("0.")
    if old and not {"round_to", "fmt"} & kwargs.keys() and "sd" in table:
        if (small := table["sd"] == 0).any():  # to three decimals
            table[small] = az.summary(data, kind=kind, round_to="none", **kwargs)[small]
    return table


def elpd_data(
    terms: np.ndarray,
    fitted: np.ndarray,
    shapes: np.ndarray,
    dims: Mapping[str, int],
    draws: int,
    by_guide: tuple[int, float] = (0, 0.0),
    latent: int = 0,
) -> Any:
    """What ``arviz.loo`` returns of log p(y_i | y_-i) (N,), log p(y_i | y) and k-hats; its warning, by
    how many k-hats are large by tails of a guide, the k-hat of these with all data, and how many latent
    variables there are."""
    import xarray as xr

    def shaped(x: np.ndarray) -> Any:
        coords = {dim: range(n) for dim, n in dims.items()}
        return xr.DataArray(x.reshape([*dims.values()]), dims=[*dims], coords=coords)

    some = np.linspace(0.0, 1.0, 2 * draws).reshape(1, draws, 2)
    data = from_groups({group: {"y": some} for group in ("posterior", "log_likelihood")})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # said of what stands in for the data
        frame = _arviz().loo(data, pointwise=True, reff=1.0)  # with the scale, the bound of k-hat
    bad = int((shapes > frame.good_k).sum())
    if bad:
        at = np.unravel_index(np.nanargmax(shapes), [*dims.values()])
        where = ", ".join(map(str, at)) or "the one"  # of a site without dimensions
        where += f" ({np.nanmax(shapes):.2f})"
        others, tail = by_guide
        why = (
            "the posterior depends on them. Look at them, refit without them, or give the model "
            "heavier tails."
        )
        if 2 * bad > terms.size and latent >= terms.size:
            why = (
                "no estimate where each has latent variables of its own. Integrate these out "
                "(AutoHierarchical, loo_units), or leave out groups."
            )
        elif 2 * bad > terms.size:
            why = (
                "no estimate: most of these decide the posterior. Refit without each in turn, or give "
                "tighter priors."
            )
        if others >= bad:
            why = (
                f"by tails of the guide (k-hat {tail:.2f} with all data), not by these. A richer "
                f"guide, or NUTS, tells more."
            )
        warnings.warn(
            f"Estimated shape parameter of Pareto distribution is greater than {frame.good_k:.2f} for "
            f"{bad} of {terms.size} data{f' ({others} by the guide)' * (0 < others < bad)}, most for "
            f"{where}: {why}",
            stacklevel=3,
        )
    old, n = _arviz().__version__.startswith("0."), terms.size
    whole = {
        "elpd_loo" if old else "elpd": float(terms.sum()),
        "se": float(n * terms.var(ddof=0 if old else 1)) ** 0.5,
        "p_loo" if old else "p": float((fitted - terms).sum()),
        "n_data_points": n,
        "warning": bad > 0,
        "loo_i" if old else "elpd_i": shaped(terms),
        "pareto_k": shaped(shapes),
    }
    if not old:
        return replace(frame, **whole)
    whole = dict(frame) | whole
    return type(frame)(list(whole.values()), index=list(whole))


def compare(elpds: Mapping[str, Any], **kwargs: Any) -> Any:
    """``arviz.compare``."""
    return _arviz().compare(dict(elpds), **kwargs)


def labelled(data: Any, values: Mapping[str, np.ndarray], **selection: Any) -> Any:
    """A number for each entry, by variable, as a series with the labels of :func:`summary`."""
    import xarray as xr

    few = {name: data["posterior"][name].isel(chain=[0], draw=slice(4)) for name in values}
    group = xr.Dataset(
        {name: x.copy(data=np.broadcast_to(values[name], x.shape)) for name, x in few.items()}
    )
    az = _arviz()
    old = az.__version__.startswith("0.")
    table = az.summary(
        az.convert_to_inference_data(group) if old else xr.DataTree.from_dict({"posterior": group}),
        kind="stats",
        round_to=12 if old else "none",
        **selection,
    )
    return table["mean"]
