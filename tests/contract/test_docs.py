"""The documentation: each public name is in the reference, documented; notebooks hold what they show.

Building the site (`make docs`) runs the code on its pages and checks its links.
"""

import ast
import inspect
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import nbformat
import pytest

import pyro_ngvi as ngvi
from pyro_ngvi import fisher

DOCS = Path(__file__).parents[2] / "docs"
NOTEBOOKS = sorted((DOCS / "tutorials").glob("*.ipynb"))
MODULES = [
    ngvi,
    *(value for value in map(ngvi.__dict__.get, ngvi.__all__) if inspect.ismodule(value)),
    fisher,
]


def public() -> dict[str, Any]:
    """Every public class and function by its shortest public name."""
    found: dict[int, tuple[str, Any]] = {}
    for module in MODULES:
        for name in module.__all__:
            value = getattr(module, name)
            if callable(value):
                found.setdefault(id(value), (f"{module.__name__}.{name}", value))
    return dict(found.values())


def documented() -> list[str]:
    pages = "\n".join(p.read_text(encoding="utf-8") for p in (DOCS / "reference").glob("*.md"))
    return re.findall(r"^\.\. auto(?:class|function):: (\S+)$", pages, flags=re.M)


def members(cls: type) -> Iterator[tuple[str, str | None]]:
    """Public methods and properties that this package defines, with their docstrings."""
    for base in cls.__mro__:
        if base.__module__.startswith("pyro_ngvi"):
            for name, value in vars(base).items():
                if name.startswith("_") or inspect.isclass(value):
                    continue
                if isinstance(value, property) or callable(getattr(value, "__func__", value)):
                    yield name, inspect.getdoc(getattr(cls, name) if callable(value) else value)


def test_the_reference_has_every_public_name_once() -> None:
    names = documented()
    assert sorted(set(names)) == sorted(names)
    assert set(public()) - set(names) == set()


def test_what_the_reference_names_exists() -> None:
    for name in documented():
        path, _, last = name.rpartition(".")
        assert callable(getattr(import_module(path), last))


def test_public_names_show_how_they_are_used() -> None:
    """By an example, or by naming the example that makes or takes them."""
    for name in documented():
        path, _, last = name.rpartition(".")
        assert "xample" in (inspect.getdoc(getattr(import_module(path), last)) or ""), name


def test_public_names_and_their_members_say_what_they_do() -> None:
    for name, value in public().items():
        assert inspect.getdoc(value), name
        if inspect.isclass(value):
            assert not {n for n, text in members(value) if not text}, name


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebooks_are_stored_as_they_ran(path: Path) -> None:
    """Each agrees with its text, has run from top to bottom, and shows no error and no warning."""
    jupytext = pytest.importorskip("jupytext")
    notebook, text = nbformat.read(path, as_version=4), jupytext.read(path.with_suffix(".py"))
    assert [(c.cell_type, c.source) for c in notebook.cells] == [
        (c.cell_type, c.source) for c in text.cells
    ]
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell.outputs]
    assert not [o for o in outputs if o.output_type == "error" or o.get("name") == "stderr"]
    assert any("image/png" in output.get("data", {}) for output in outputs)


def test_nothing_but_the_progress_of_a_fit_is_printed_or_logged() -> None:
    """The package tells by warnings; :mod:`pyro_ngvi.fitting.progress` states the choice."""
    found = set()
    root = DOCS.parent / "pyro_ngvi"
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            prints = isinstance(node, ast.Call) and getattr(node.func, "id", None) == "print"
            modules = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if prints or any(m.split(".")[0] == "logging" for m in modules):
                found.add(path.relative_to(root).as_posix())
    assert found == {"fitting/progress.py"}
