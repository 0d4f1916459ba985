"""Commands of the shell that the documentation names: what they call is there, with those options."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    *(p for p in sorted(ROOT.glob("docs/**/*.md")) if "_build" not in p.parts),
    *sorted(ROOT.glob("docs/tutorials/*.py")),
    *sorted(ROOT.glob("benchmarks/**/*.md")),
    *sorted(ROOT.glob("benchmarks/**/*.py")),
]
TEXTS = {str(page.relative_to(ROOT)): page.read_text(encoding="utf-8") for page in PAGES}


def found(pattern: str) -> list[tuple[str, str]]:
    """What a pattern finds, with the page: a command ends with its line, a tick or a comment."""
    return [
        (x, page) for page, text in TEXTS.items() for x in re.findall(pattern, text, flags=re.M)
    ]


def sources(module: str) -> str:
    """The source of benchmarks.module, and of those of the package that it imports from."""
    path = ROOT.joinpath(*module.split("."))
    files = sorted(path.glob("*.py")) if path.is_dir() else [path.with_suffix(".py")]
    text = "".join(file.read_text(encoding="utf-8") for file in files)
    for name in re.findall(r"^from \.\.?(\w+) import", text, flags=re.M):
        if (other := ROOT / "benchmarks" / f"{name}.py").exists():
            text += other.read_text(encoding="utf-8")
    return text


@pytest.mark.parametrize(
    "command", sorted({x for x, _ in found(r"python -m (benchmarks[^`#\n\"]*)")})
)
def test_a_benchmark_takes_the_options_that_pages_name(command: str) -> None:
    module, *words = command.split()
    assert (ROOT / module.replace(".", "/")).is_dir() or (
        ROOT / f"{module.replace('.', '/')}.py"
    ).exists()
    text = sources(module)
    for option in (re.sub(r"[^\w-].*", "", word) for word in words if word.startswith("--")):
        assert option == "--help" or f'"{option}"' in text, f"{module} has no {option}"


def test_targets_of_make_are_there() -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.M)
    named = found(r"`make ([a-z0-9-]+)") + found(r"^make ([a-z0-9-]+)")
    assert named and not [(target, page) for target, page in named if target not in targets]


def test_extras_of_pip_are_there() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = [
        (extra, page)
        for extras, page in found(r"pip install [^`\n]*(?:pyro-ngvi|\.)\[([\w,-]+)\]")
        for extra in extras.split(",")
    ]
    assert named and not [x for x in named if x[0] not in project["optional-dependencies"]]
