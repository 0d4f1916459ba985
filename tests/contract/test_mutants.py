"""benchmarks/mutants.py follows the source: each text that it replaces stands there once."""

from benchmarks.mutants import MUTANTS, PACKAGE, ROOT


def test_their_text_stands_in_the_source_once() -> None:
    for mutant in MUTANTS:
        source = (ROOT / PACKAGE / mutant.path).read_text(encoding="utf-8")
        assert source.count(mutant.old) == 1, mutant.name
        assert mutant.old != mutant.new, mutant.name
        assert all((ROOT / name).is_file() for name in mutant.files), mutant.name


def test_enough_of_them() -> None:
    assert len(MUTANTS) >= 30
    assert sum(bool(m.equivalent) for m in MUTANTS) <= 3
