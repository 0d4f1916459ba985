"""A checkout of posteriordb (Magnusson et al. 2025, https://github.com/stan-dev/posteriordb), as it is.

Its data and draws are read where they lie: none are part of this repository.
"""

from __future__ import annotations

import json
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

#: probabilities below the ends of a 90 % interval
ENDS = 0.05, 0.95


@dataclass(frozen=True)
class Reference:
    """Means and sds (*shape) of each parameter, how far the reference means may be off, and the ends of
    90 % intervals, 5 and 95 % of the draws; NaN where the moments are known alone."""

    mean: dict[str, np.ndarray]
    sd: dict[str, np.ndarray]
    error: dict[str, np.ndarray]
    low: dict[str, np.ndarray]
    high: dict[str, np.ndarray]


class Database:
    """The database at ``root``, the folder that holds ``posterior_database``."""

    def __init__(self, root: str | Path) -> None:
        self.path = Path(root) / "posterior_database"
        if not self.path.is_dir():
            raise FileNotFoundError(
                f"{self.path} is not there: git clone https://github.com/stan-dev/posteriordb, and "
                f"pass the folder."
            )

    def names(self) -> list[str]:
        """Posteriors with a reference."""
        found = [self._json(f"posteriors/{p.name}") for p in self.path.glob("posteriors/*.json")]
        return sorted(p["name"] for p in found if p["reference_posterior_name"])

    def data(self, name: str) -> dict[str, np.ndarray]:
        record = self._json(f"posteriors/{name}.json")
        with zipfile.ZipFile(self.path / f"data/data/{record['data_name']}.json.zip") as file:
            values = json.loads(file.read(file.namelist()[0]))
        return {key: np.asarray(value, dtype=np.float64) for key, value in values.items()}

    def reference(self, name: str) -> Reference:
        """From the draws, or where they are not in the checkout from the published moments."""
        record = self._json(f"posteriors/{name}.json")
        reference, dims = record["reference_posterior_name"], record["dimensions"]
        first = self._moment(reference, "mean_value")
        try:
            with zipfile.ZipFile(self._draws(reference)) as file:
                chains = json.loads(file.read(file.namelist()[0]))
            draws = {key: np.concatenate([chain[key] for chain in chains]) for key in chains[0]}
            sd = {key: x.std() for key, x in draws.items()}
            low, high = ({k: np.quantile(x, p) for k, x in draws.items()} for p in ENDS)
        except FileNotFoundError:
            second = self._moment(reference, "mean_squared_value")
            sd = {key: np.sqrt(second[key][0] - mean**2) for key, (mean, _) in first.items()}
            low = high = dict.fromkeys(first, np.nan)
        mean, error = ({key: x[i] for key, x in first.items()} for i in (0, 1))

        def of_shape(values: dict[str, Any]) -> dict[str, np.ndarray]:
            each = {p: [v for k, v in values.items() if k.split("[")[0] == p] for p in dims}
            return {p: np.squeeze(np.array(x)) for p, x in each.items()}

        return Reference(*map(of_shape, (mean, sd, error, low, high)))

    def _draws(self, reference: str) -> Path:
        return self.path / f"reference_posteriors/draws/draws/{reference}.json.zip"

    def _moment(self, reference: str, kind: str) -> dict[str, tuple[float, float]]:
        """A moment of each entry and its Monte Carlo error."""
        folder = f"reference_posteriors/summary_statistics/{kind}/{kind}"
        found = self._json(f"{folder}/{reference}.json")
        columns = (found[key] for key in ("names", kind, "mcse_mean"))
        return {key: (value, error) for key, value, error in zip(*columns, strict=True)}

    def _json(self, path: str) -> Any:
        return json.loads((self.path / path).read_text())
