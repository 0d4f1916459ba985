"""The flow chart of docs/choose.md, drawn as an SVG: `{choose-chart}` in a page."""

from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

#: width of all, of a question, of an answer; height of a box
W, LEFT, RIGHT, BOX = 360, 164, 158, 54

QUESTIONS = [
    (
        ["A GaussianProcess or a", "GaussianStateSpace", "prior?"],
        ["`AutoSites", "`CVI", "`SitesELBO()"],
    ),
    (
        ["Units with Gaussian", "effects that share a", "mean or a scale?"],
        ["`AutoHierarchical", "`NGVB", "`BatchedELBO(16)"],
    ),
    (
        ["More than 100 latent", "variables, and all of", "them Gaussian a priori?"],
        ["`AutoSites", "`CVI", "`SitesELBO()"],
    ),
    (
        ["Up to 1,000 latent", "variables?"],
        ["`AutoFullRankNormal", "`NGVB", "`BatchedELBO(8 or 32)"],
    ),
    (
        ["Up to 100,000 latent", "variables?"],
        ["`AutoFactorNormal", "`NGVB", "`BatchedELBO(8)"],
    ),
]
ELSE = ["`AutoMeanFieldNormal", "`NGVB", "`BatchedELBO(8)"]
VERDICTS = [
    (["“Take the intervals", "as they are”"], ["Use the draws"]),
    (["“Resample”"], ["`fit.to_arviz(", '`resample="psis")']),
    (["“Not usable” or", "“Not clear”"], ['`fit(guide="auto")', "then NUTS"]),
]
LABEL = (
    "Flow chart: what fit chooses, and what to do after each verdict. The list below says the same."
)
STYLE = """
.chart { display: block; width: 100%; max-width: 430px; margin: 0 auto; }
.chart text {
  font-size: 12.5px; fill: var(--color-foreground-primary, #111);
  font-family: var(--font-stack, sans-serif);
}
.chart text.code { font-size: 11.5px; font-family: var(--font-stack--monospace, monospace); }
.chart text.bold { font-weight: 600; }
.chart rect { stroke-width: 1.2; }
.chart rect.ask {
  fill: var(--color-background-secondary, #f5f5f5); stroke: var(--color-foreground-muted, #777);
}
.chart rect.take {
  fill: var(--color-background-primary, #fff); stroke: var(--color-brand-primary, #2757dd);
}
.chart .line {
  stroke: var(--color-foreground-secondary, #555); stroke-width: 1.3; fill: none;
}
.chart .head { fill: var(--color-foreground-secondary, #555); }
"""
TIP = (
    '<defs><marker id="tip" viewBox="0 0 8 8" refX="6" refY="4" markerWidth="7" markerHeight="7" '
    'orient="auto"><path d="M0 0L8 4L0 8z" class="head"/></marker></defs>'
)


def text(x: float, y: float, lines: list[str]) -> str:
    """Lines of text around the height y; those that begin with a backtick are code, with * bold."""
    top, shapes = y - 7.5 * (len(lines) - 1), ""
    for k, line in enumerate(lines):
        kind = {"`": "code", "*": "bold"}.get(line[0], "plain")
        where = f'x="{x}" y="{top + 15 * k + 4}" text-anchor="middle" class="{kind}"'
        shapes += f"<text {where}>{line.lstrip('`*')}</text>"
    return shapes


def box(x: float, y: float, width: float, lines: list[str], kind: str, height: float = BOX) -> str:
    where = f'x="{x}" y="{y}" width="{width}" height="{height}" rx="7" class="{kind}"'
    return f"<rect {where}/>" + text(x + width / 2, y + height / 2, lines)


def arrow(x: float, y: float, to_x: float, to_y: float, label: str = "") -> str:
    line = f'<path d="M{x} {y}L{to_x} {to_y}" class="line" marker-end="url(#tip)"/>'
    if not label:
        return line
    at = (x + 14, (y + to_y) / 2) if x == to_x else ((x + to_x) / 2 - 4, y - 8)
    return line + text(*at, [label])


def chart() -> str:
    """HTML of the chart."""
    y, shapes = 2, ""
    for question, answer in QUESTIONS:
        shapes += box(1, y, LEFT, question, "ask")
        shapes += box(W - RIGHT - 1, y, RIGHT, answer, "take")
        shapes += arrow(LEFT + 2, y + BOX / 2, W - RIGHT - 4, y + BOX / 2, "yes")
        shapes += arrow(LEFT / 2, y + BOX + 1, LEFT / 2, y + BOX + 21, "no")
        y += BOX + 24
    shapes += box(1, y, LEFT, ELSE, "take")
    shapes += text(W - RIGHT / 2 - 1, y + BOX / 2, ["*Then fit, and read", "*the verdict:"])
    y += BOX + 22
    for said, done in VERDICTS:
        shapes += box(1, y, LEFT, said, "ask", 42)
        shapes += box(W - RIGHT - 1, y, RIGHT, done, "take", 42)
        shapes += arrow(LEFT + 2, y + 21, W - RIGHT - 4, y + 21)
        y += 50
    svg = f'<svg class="chart" viewBox="0 0 {W} {y}" role="img" aria-label="{LABEL}">'
    return f"<style>{STYLE}</style>{svg}{TIP}{shapes}</svg>"


class ChooseChart(SphinxDirective):
    """The chart in the page; other formats than HTML have the list below it."""

    def run(self) -> list[nodes.Node]:
        return [nodes.raw("", chart(), format="html")]


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_directive("choose-chart", ChooseChart)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
