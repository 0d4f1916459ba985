"""The posteriors of posteriordb (and one of inference_gym) with published reference values.

Read from ``posteriordb/<name>.json`` and ``.npz`` in the directory in ``PYRO_NGVI_DATA``. An
improper flat prior is a proper distribution under ``mask(False)``: the same density as
``dist.ImproperUniform``, from which Pyro's initialisation can draw.
"""

import json
from typing import Any

import numpy as np
import torch
from torch import Tensor

from . import posteriordb_models as models
from .logistic import quadrature_elbo, standardise, with_intercept
from .optimum import BinaryRegression
from .problem import FAMILIES, Optimum, Problem, data_file
from .regression import flat_optima

# Optima of the full-rank and the mean-field Gaussian in nats, by `sample_average.bracket` with 2^14
# draws (2^17 for the eight schools); those of the probit regression by quadrature. Flat regressions
# have theirs in closed form.
OPTIMA: dict[str, tuple[Optimum, Optimum]] = {
    "arK": (Optimum(58.5708, 0.0005), Optimum(53.9967, 0.0007)),
    "eight_schools_noncentered": (Optimum(-31.5336, 0.0004), Optimum(-31.5970, 0.0002)),
    "german_credit_probit": (Optimum(-541.803126), Optimum(-544.266148)),
    "gp_regr": (Optimum(-27.5648, 0.0002), Optimum(-27.5660, 0.0002)),
    "kidscore_interaction": (Optimum(-1872.8209, 0.0002), Optimum(-1878.3879, 0.0002)),
    "low_dim_gauss_mix": (Optimum(-2115.6865, 0.0001), Optimum(-2115.9238, 0.0001)),
    "sblri_blr": (Optimum(-184.8009, 0.0002), Optimum(-184.8757, 0.0002)),
}

DIMENSIONS = {
    "arK": 7,
    "eight_schools_noncentered": 10,
    "german_credit_probit": 25,
    "gp_regr": 3,
    "kidscore_interaction": 5,
    "logearn_interaction_z": 5,
    "logmesquite": 8,
    "low_dim_gauss_mix": 5,
    "nes1980": 10,
    "sblri_blr": 6,
}


def load(name: str) -> Problem:
    """The problem of that name."""
    record = read(name)
    model, args, elbo = build(name, {k: np.asarray(v) for k, v in record["data"].items()})
    reference = record["reference"]["parameters"]
    if model is models.flat_regression:
        optimum = flat_optima(*args)
    else:
        optimum = dict(zip(FAMILIES, OPTIMA[name], strict=True))
    return Problem(
        name=name,
        model=model,
        args=tuple(torch.as_tensor(a) for a in args),
        dim=DIMENSIONS[name],
        optimum=optimum,
        mean={p: _tensor(v["mean"]) for p, v in reference.items()},
        sd={p: _tensor(v["sd"]) for p, v in reference.items()},
        load_draws=(lambda: draws(name)) if name != "german_credit_probit" else None,
        exact_elbo=elbo,
    )


def read(name: str) -> dict[str, Any]:
    """The JSON record of a posterior."""
    return json.loads(data_file(f"posteriordb/{name}.json").read_text())


def draws(name: str) -> dict[str, Tensor]:
    """Reference draws by name; for the eight schools also of the standardised effects z."""
    with np.load(data_file(f"posteriordb/{name}.npz")) as data:
        values = {p: torch.as_tensor(data[p]) for p in data.files}
    if name == "eight_schools_noncentered":
        values["z"] = (values["theta"] - values["mu"][:, None]) / values["tau"][:, None]
    return values


def _tensor(value: Any) -> Tensor:
    return torch.as_tensor(np.asarray(value, dtype=np.float64))


def design(*columns: Any) -> np.ndarray:
    """A design matrix with a first column of ones."""
    first = np.ones(len(columns[0]))
    return np.column_stack([first, *(np.asarray(c, dtype=np.float64) for c in columns)])


def build(name: str, data: dict[str, np.ndarray]) -> tuple[Any, tuple[np.ndarray, ...], Any]:
    """The model, its arguments, and its exact ELBO where there is one."""
    match name:
        case "arK":
            y, k = data["y"], int(data["K"])
            lags = np.column_stack([y[k - i : len(y) - i] for i in range(1, k + 1)])
            return models.autoregression, (lags, y[k:]), None
        case "eight_schools_noncentered":
            args = (data["y"].astype(np.float64), data["sigma"].astype(np.float64))
            return models.eight_schools_noncentered, args, None
        case "german_credit_probit":
            X = with_intercept(standardise(data["features"].astype(np.float64)))
            y = data["labels"].astype(np.float64)
            elbo = quadrature_elbo(BinaryRegression(X, y, np.ones(X.shape[1]), "probit"))
            return models.probit_regression, (X, y), elbo
        case "gp_regr":
            return models.gaussian_process, (data["x"], data["y"]), None
        case "kidscore_interaction":
            hs, iq = data["mom_hs"], data["mom_iq"]
            X = design(hs, iq, hs * iq)
            y = data["kid_score"].astype(np.float64)
            return models.flat_regression_half_cauchy, (X, y), None
        case "logearn_interaction_z":
            z = (data["height"] - data["height"].mean()) / data["height"].std(ddof=1)
            X = design(z, data["male"], z * data["male"])
            return models.flat_regression, (X, np.log(data["earn"])), None
        case "logmesquite":
            names = ("diam1", "diam2", "canopy_height", "total_height", "density")
            X = design(*(np.log(data[n]) for n in names), data["group"])
            return models.flat_regression, (X, np.log(data["weight"])), None
        case "low_dim_gauss_mix":
            return models.gaussian_mixture, (data["y"],), None
        case "nes1980":
            age = data["age_discrete"]
            X = design(
                data["real_ideo"],
                data["race_adj"],
                *(age == level for level in (2, 3, 4)),
                data["educ1"],
                data["gender"],
                data["income"],
            )
            return models.flat_regression, (X, data["partyid7"].astype(np.float64)), None
        case "sblri_blr":
            return models.normal_regression, (data["X"], data["y"]), None
    raise KeyError(f"There is no posterior called {name!r}; there are {', '.join(DIMENSIONS)}.")
