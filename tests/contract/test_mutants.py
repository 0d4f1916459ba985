"""benchmarks/mutants.py follows the source: each text that it replaces stands there once."""

import pytest

from benchmarks.mutants import MUTANTS, PACKAGE, ROOT, Mutant


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)
def test_its_text_stands_in_the_source_once(mutant: Mutant) -> None:
    source = (ROOT / PACKAGE / mutant.path).read_text(encoding="utf-8")
    assert source.count(mutant.old) == 1
    assert mutant.old != mutant.new
    assert all((ROOT / name).is_file() for name in mutant.files)


def test_enough_of_them() -> None:
    assert len(MUTANTS) >= 30
    assert sum(bool(m.equivalent) for m in MUTANTS) <= 3
