"""The quickstart: what it prints, the figure it saves, the ELBO it measures, what it refuses."""

import re
from pathlib import Path

import pytest
import torch
from pyro.infer import SVI, Trace_ELBO

import pyro_ngvi as ngvi
from benchmarks.problems import load
from docs import quickstart


def test_prints_the_tour_and_saves_the_figure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quickstart, "LOOKS", 10)
    monkeypatch.setattr(quickstart, "ADAM_STEPS", 2)
    figure = tmp_path / "figure.png"
    quickstart.main(["--steps", "100", "--out", str(figure), "--seed", "1"])
    shown = capsys.readouterr()
    for name in quickstart.SHOWN:
        assert re.search(rf"w\[{name}\] +-?\d", shown.out)
    assert re.search(r"k-hat -?\d\.\d\d from 1000 draws", shown.out)
    ngvb = re.search(r"^NGVB +\d+\.\d+ s, (\d+) steps.*after.* 100 steps$", shown.out, re.M)
    assert ngvb and int(ngvb[1]) <= 100
    assert re.search(r"^Adam +not reached +not reached.*after.* 200 steps$", shown.out, re.M)
    # no terminal: a line after each look that is a power of two, and at the end, and no bar
    assert "\r" not in shown.err
    found = re.findall(r"^(\d+) of 300 steps, ELBO: NGVB -[\d.]+, Adam -[\d.]+$", shown.err, re.M)
    assert len(found) == len(shown.err.splitlines()) == 5
    assert found[-1] == "300" and found == sorted(found, key=int)
    assert figure.read_bytes().startswith(b"\x89PNG")
    assert str(figure) in shown.out


def test_measures_the_elbo_within_1_nat_of_the_optimum_to_0_02_nat() -> None:
    problem = load("wdbc")
    X, y, features = quickstart.load_data()
    torch.testing.assert_close((X, y), problem.args[:2])
    assert len(features) == X.shape[1] == problem.dim
    assert problem.exact_elbo is not None
    assert quickstart.OPTIMUM == pytest.approx(problem.optimum["full_rank"].elbo, abs=1e-4)

    guide = ngvi.AutoFullRankNormal(quickstart.model)
    loss = Trace_ELBO(num_particles=8, vectorize_particles=True, max_plate_nesting=1)
    svi = SVI(quickstart.model, guide, ngvi.NGVB(guide), loss=loss)
    log_joint = ngvi.diagnostics.ModelDensity(quickstart.model, (X, y), chunk_size=50)
    noise = quickstart.fixed_noise(400, problem.dim)
    for steps in (100, 100):
        for _ in range(steps):
            svi.step(X, y)
        q = guide.get_posterior()
        exact = problem.exact_elbo(q.mean, q.scale_tril)
        assert quickstart.OPTIMUM - exact < 1.0
        assert quickstart.elbo_of(guide, log_joint, noise) == pytest.approx(exact, abs=0.02)


def test_names_a_library_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quickstart, "find_spec", lambda name: None if name == "sklearn" else name)
    with pytest.raises(SystemExit, match="needs scikit-learn: pip install scikit-learn"):
        quickstart.main([])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "at least one step"),
        (["--out", "no/such/directory/figure.png"], "no directory no/such/directory"),
    ],
)
def test_refuses_arguments_before_it_trains(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        quickstart.main(arguments)
    assert message in capsys.readouterr().err
