"""Which file may import which: layers, no circles, no private names of another subpackage."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "pyro_ngvi"

#: from the ground up: a file imports from its own subpackage and from those before it
LAYERS = (
    "_version",
    "linalg",
    "runtime",
    "distributions",
    "probing",
    "families",
    "curvature",
    "flows",
    "fisher",
    "optim",
    "guides",
    "metric",
    "losses",
    "compiled",
    "distributed",
    "sites",
    "hierarchy",
    "diagnostics",
    "fitting",
    "nn",
)
FILES = sorted(p for p in PACKAGE.rglob("*.py") if len(p.relative_to(PACKAGE).parts) > 1)


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def layer(module: str) -> str:
    return module.split(".")[1]


@cache
def imports(path: Path) -> list[tuple[str, str]]:
    """(module, name) of every import of the package in a file, those inside functions too.

    A module is the file that the name comes from.  Imports for type checkers alone are left out.
    """
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    own = module_name(path).split(".")
    folder = own if path.name == "__init__.py" else own[:-1]
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.level or "pyro_ngvi" in str(node.module)):
            base = folder[: len(folder) - node.level + 1] if node.level else []
            source = ".".join([*base, *(node.module or "").split(".")]).rstrip(".")
            for alias in node.names:
                whole = f"{source}.{alias.name}"
                at = PACKAGE.parent / whole.replace(".", "/")
                is_file = at.with_suffix(".py").exists() or (at / "__init__.py").exists()
                found.append((whole if is_file else source, alias.name))
    return found


def test_imports_go_down() -> None:
    for path in FILES:
        name = module_name(path)
        for module, _ in imports(path):
            lower = LAYERS.index(layer(module)) <= LAYERS.index(layer(name))
            assert lower, f"{module} lies above {name}"


def test_there_is_no_circle_of_files() -> None:
    files = {module_name(p): {m for m, _ in imports(p)} for p in FILES}
    left = dict(files)
    while left:
        free = [m for m, needs in left.items() if not (needs - {m}) & left.keys()]
        assert free, f"these import each other: {sorted(left)}"
        for module in free:
            del left[module]


def test_private_names_stay_in_their_subpackage() -> None:
    for path in FILES:
        own = layer(module_name(path))
        for module, name in imports(path):
            parts = [*module.split(".")[2:], name]
            private = [p for p in parts if p.startswith("_") and not p.startswith("__")]
            inside = layer(module) in (own, "_version")
            assert inside or not private, f"{module_name(path)} imports {module}.{name}"


def test_every_subpackage_has_a_layer() -> None:
    assert {layer(module_name(p)) for p in FILES} == {*LAYERS} - {"_version"}


def test_the_root_has_few_private_files() -> None:
    assert len([p for p in PACKAGE.glob("_*.py") if not p.name.startswith("__")]) <= 3
