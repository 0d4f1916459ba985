"""Tables with a column for the paper, one for its authors' code and one for this package; figures."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["Row", "save", "steps", "table"]


class Row(NamedTuple):
    """One line of a table."""

    what: str
    paper: str
    code: str
    ours: str


def table(title: str, rows: Sequence[Any]) -> str:
    """A Markdown table of rows of four cells."""
    lines = [("", "paper", "authors' code", "ours"), ("---",) * 4, *rows]
    body = "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)
    return f"### {title}\n\n{body}\n"


def steps(values: Mapping[int, float], digits: int = 3) -> str:
    """``"100: 0.5, 1,000: 2e-06"`` for what was measured after so many steps."""
    return ", ".join(f"{k:,}: {v:.{digits}g}" for k, v in values.items())


def save(
    out: Path | None,
    name: str,
    lines: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    x_label: str,
    y_label: str,
    scales: tuple[str, str] = ("symlog", "log"),
    styles: Mapping[str, Mapping[str, Any]] | None = None,
) -> None:
    """Lines {label: (x, y)} as ``out/name.json`` and, where Matplotlib is installed, ``name.png``."""
    if out is None:
        return
    out.mkdir(parents=True, exist_ok=True)
    data = {label: {"x": list(x), "y": list(y)} for label, (x, y) in lines.items()}
    (out / f"{name}.json").write_text(json.dumps(data))
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print(f"Matplotlib is not installed: {name} is saved as JSON only.")
        return
    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axes = figure.add_subplot()
    for label, (x, y) in lines.items():
        style: dict[str, Any] = dict((styles or {}).get(label, {}))
        if len(x) == 1:
            style["marker"] = "o"
        axes.plot(x, y, label=label, **style)
    axes.set(xlabel=x_label, ylabel=y_label, xscale=scales[0], yscale=scales[1])
    axes.legend(fontsize="small")
    figure.savefig(out / f"{name}.png", dpi=120)
