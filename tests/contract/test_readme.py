"""README: its code runs as it stands, its links lead somewhere, here and in the package's metadata."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
LINK = re.compile(r"\]\(([^)\s]+)\)")


def prose(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)


def test_every_python_block_runs_after_those_above_it() -> None:
    torch.set_default_dtype(torch.float32)  # as a reader has it
    names: dict[str, Any] = {}
    blocks = [*re.finditer(r"^```python\n(.*?)^```", README, flags=re.M | re.S)]
    for block in blocks:
        above = "\n" * README.count("\n", 0, block.start(1))  # so that errors name the page's lines
        exec(compile(above + block[1], "README.md", "exec"), names)
    assert len(blocks) >= 2
    assert {"w"} == set(names["idata"]["posterior"].data_vars)


def test_relative_links_lead_to_files() -> None:
    links = [link for link in LINK.findall(prose(README)) if not link.startswith("http")]
    assert {f"tutorials/{p.name}" for p in ROOT.glob("tutorials/*.ipynb")} <= set(links)
    assert [link for link in links if not (ROOT / link).is_file()] == []


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda p: p.stem)
def test_links_of_the_documents_lead_to_files(page: Path) -> None:
    assert f"](docs/{page.name})" in README
    links = LINK.findall(prose(page.read_text(encoding="utf-8")))
    wrong = [k for k in links if not k.startswith("http") and not (page.parent / k).is_file()]
    assert wrong == []


def test_links_of_the_metadata_are_absolute_and_below_the_repository() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    base = settings["project"]["urls"]["Repository"]
    assert all(url.startswith(base) for url in settings["project"]["urls"].values())
    page = README
    for rule in settings["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"][
        "substitutions"
    ]:
        page = re.sub(rule["pattern"], rule["replacement"], page)
    for before, after in zip(LINK.findall(prose(README)), LINK.findall(prose(page)), strict=True):
        if not before.startswith("http"):
            assert after.startswith(f"{base}/") and after.endswith(f"/main/{before}")
    assert f"]({base}/raw/main/docs/quickstart.png)" in page
    code = re.compile(r"^```.*?^```", flags=re.M | re.S)
    assert code.findall(page) == code.findall(README)
