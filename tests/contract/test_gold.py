"""``benchmarks.gold`` reads posteriordb's files, and its hand-written likelihoods are what they say."""

import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from scipy.integrate import solve_ivp

from benchmarks.gold.__main__ import judged
from benchmarks.gold.database import Database
from benchmarks.gold.models import arma, garch, lotka_volterra, michaelis_menten, posterior

NAME = "small-blr"


def write(path: Path, content: Any, inside: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if not inside:
        path.write_text(json.dumps(content))
        return
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(inside, json.dumps(content))


@pytest.fixture(params=[True, False], ids=["draws", "moments"])
def database(tmp_path: Path, request: pytest.FixtureRequest) -> Database:
    """A regression whose posterior is nearly its least squares', sigma being known well."""
    rng = np.random.default_rng(0)
    X = rng.standard_normal((400, 2))
    y = X @ [1.0, -2.0] + 0.5 * rng.standard_normal(400)
    precision = X.T @ X
    beta = np.linalg.solve(precision, X.T @ y)
    # the mean of sigma, sigma^2 inverse gamma of (n - p - 1) / 2
    s = float(np.sqrt(np.sum((y - X @ beta) ** 2) / (400 - 2 - 2.5)))
    draws = rng.multivariate_normal(beta, s**2 * np.linalg.inv(precision), 4000)
    draws = np.column_stack([draws, s + s / 800**0.5 * rng.standard_normal(4000)])
    root, names = tmp_path / "posterior_database", ["beta[1]", "beta[2]", "sigma"]
    record = {"name": NAME, "data_name": "small", "reference_posterior_name": NAME}
    write(root / f"posteriors/{NAME}.json", record | {"dimensions": {"beta": 2, "sigma": 1}})
    write(root / "posteriors/none.json", {"name": "none", "reference_posterior_name": None})
    write(root / "data/data/small.json.zip", {"X": X.tolist(), "y": y.tolist()}, "small.json")
    folder = root / "reference_posteriors"
    for kind, power in (("mean_value", 1), ("mean_squared_value", 2)):
        values = (draws**power).mean(0).tolist()
        moment = {"names": names, kind: values, "mcse_mean": [0.01, 0.02, 0.03]}
        write(folder / f"summary_statistics/{kind}/{kind}/{NAME}.json", moment)
    if request.param:
        chains = [dict(zip(names, x.T.tolist(), strict=True)) for x in np.split(draws, 4)]
        write(folder / f"draws/draws/{NAME}.json.zip", chains, f"{NAME}.json")
    return Database(tmp_path)


def test_a_posterior_is_read_and_judged(database: Database) -> None:
    assert database.names() == [NAME]
    reference = database.reference(NAME)
    assert reference.mean["beta"].shape == (2,) and reference.mean["sigma"].shape == ()
    assert reference.sd["beta"] == pytest.approx(0.025, rel=0.1)
    assert float(reference.error["sigma"]) == 0.03
    row = judged(NAME, database, None, seed=0)
    assert row.good and row.decision == "intervals" and row.mean < 0.1 and row.sd < 1.1
    # 4,000 draws of each, whose ends have errors of 0.05 sd
    assert row.end < 0.2 or np.isnan([row.end, *reference.low["beta"]]).all()


def test_a_folder_without_the_database_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="git clone"):
        Database(tmp_path)


def observed(model: Any, *args: Any, **at: Any) -> Any:
    """The data's site where the latent ones are ``at`` these values."""
    values = {name: torch.tensor(x) for name, x in at.items()}
    with poutine.trace() as seen:
        poutine.condition(model, data=values)(*args)
    return seen.trace.nodes["y"]


def test_recursions_of_series() -> None:
    """One step at a time, in NumPy."""
    y = torch.tensor([0.3, -0.5, 1.2, 0.4])
    mu, phi, theta, sigma = 0.2, 0.7, -0.4, 0.9
    error, before, log_p = 0.0, mu, 0.0
    for value in y.tolist():
        mean = mu + phi * before + theta * error
        error, before = value - mean, value
        log_p += float(dist.Normal(mean, sigma).log_prob(torch.tensor(value)))
    site = observed(arma, y, mu=mu, phi=phi, theta=theta, sigma=sigma)
    assert float(site["fn"].log_prob(y).sum()) == pytest.approx(log_p)
    a0, a1, b1, s, log_p = 0.5, 0.3, 0.4, 0.7, 0.0
    for t, value in enumerate(y.tolist()):
        s = s if t == 0 else (a0 + a1 * (float(y[t - 1]) - mu) ** 2 + b1 * s**2) ** 0.5
        log_p += float(dist.Normal(mu, s).log_prob(torch.tensor(value)))
    site = observed(garch, y, 0.7, mu=mu, alpha0=a0, shares=[a1, b1, 1.0 - a1 - b1])
    assert float(site["fn"].log_prob(y).sum()) == pytest.approx(log_p)


def test_paths_of_differential_equations_are_those_of_scipy() -> None:
    """To a hundredth of the errors that the models take data to have."""
    times = [float(t) for t in range(1, 21)]
    theta, start, sigma = [0.55, 0.028, 0.8, 0.024], [33.0, 6.0], [0.25, 0.25]

    def rate(t: float, z: Any) -> Any:
        return [(theta[0] - theta[1] * z[1]) * z[0], (theta[3] * z[0] - theta[2]) * z[1]]

    path = solve_ivp(rate, (0.0, 20.0), start, t_eval=times, rtol=1e-9, atol=1e-9).y.T
    y = torch.tensor(np.vstack([start, path]))
    site = observed(lotka_volterra, y, times, theta=theta, z_init=start, sigma=sigma)
    assert (site["fn"].loc - y.log()).abs().max() < 0.01 * sigma[0]
    k_a, K_m, V_m, dose, volume = 0.8, 0.3, 2.0, 30.0, 2.0

    def change(t: float, c: Any) -> Any:
        return np.exp(-k_a * t) * dose * k_a / volume - V_m / volume * c / (K_m + c)

    times = times[:12]
    path = solve_ivp(change, (0.0, 12.0), [0.0], t_eval=times, rtol=1e-9, atol=1e-9).y[0]
    given = times, torch.tensor(path), dose, volume
    site = observed(michaelis_menten, *given, k_a=k_a, K_m=K_m, V_m=V_m, sigma=0.1)
    assert (site["fn"].loc - torch.tensor(path).log()).abs().max() < 1e-3


def test_designs_have_a_column_for_each_coefficient() -> None:
    rng = np.random.default_rng(0)
    fields = ("earn", "height", "male", "kid_score", "mom_hs", "mom_iq", "mom_work", "weight")
    fields += ("diam1", "diam2", "canopy_height", "total_height", "density", "group")
    data = {name: 1.0 + rng.random(9) for name in fields}
    columns = {
        "kidiq-kidscore_momhsiq": 3,
        "kidiq-kidscore_interaction_z": 4,
        "kidiq-kidscore_mom_work": 4,
        "earnings-log10earn_height": 2,
        "earnings-logearn_interaction": 4,
        "earnings-logearn_logheight_male": 3,
        "mesquite-mesquite": 7,
        "mesquite-logmesquite_logva": 4,
        "mesquite-logmesquite_logvash": 6,
    }
    for name, count in columns.items():
        _, (X, y) = posterior(name, data)
        assert X.shape == (9, count) and y.shape == (9,)
