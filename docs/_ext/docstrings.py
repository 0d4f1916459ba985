"""Docstrings are written for a terminal; this turns them into markup while the site is built.

Shapes (*batch, d) and determinants |J| are no markup, displayed equations are indented paragraphs, and
a name in a role may stand without its module where only one public name ends so.
"""

import re
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.nodes import make_refnode

LITERAL = re.compile(r"(``.*?``|:\w+:`[^`]*`)")
UNPACKED = re.compile(r"(?<=[(\s])\*(?=\w+[,)])")
REFERENCE = re.compile(r"(?<=\w)_(?=\W|$)")
SECTION = re.compile(r"\s*[A-Z]\w*( \(.*\))?:$")


def escape(line: str) -> str:
    """``line`` with what docutils would read as markup escaped, outside of literals and roles."""
    parts = LITERAL.split(line)
    for i in range(0, len(parts), 2):
        plain = UNPACKED.sub(r"\*", parts[i].replace("|", r"\|"))
        parts[i] = REFERENCE.sub(r"\\_", plain)
    return "".join(parts)


def indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def markup(lines: list[str]) -> list[str]:
    """Equations, which are paragraphs deeper than the one before, as code; the rest escaped."""
    out: list[str] = []
    above, literal = "", -1  # the last line with text; the indentation of a literal block, or -1
    for i, line in enumerate(lines):
        if not line.strip():
            out.append(line)
            continue
        starts = i > 0 and not lines[i - 1].strip()
        deeper = indent(line) > indent(above)
        if literal >= 0 and starts and indent(line) < literal:
            literal = -1
        if literal < 0 and starts and deeper and above and not SECTION.match(above):
            literal = indent(line)
            if not above.rstrip().endswith("::"):
                out += [" " * indent(above) + ".. code-block:: text", ""]
        code = ">>>" in line or literal >= 0
        out.append(line if code else escape(line))
        above = line
    return out


def process_docstring(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]):
    if what in ("attribute", "property") and lines:
        lines[0] = lines[0].replace(": ", " – ", 1)  # napoleon would read a type before the colon
    lines[:] = markup(lines)


def resolve(app: Sphinx, env: Any, node: Any, content: nodes.TextElement) -> nodes.Node | None:
    """A link to the one documented name that ends in what the role names."""
    if node.get("refdomain") != "py":
        return None
    domain = env.domains["py"]
    target = node["reftarget"].removeprefix("pyro_ngvi.").split(".")
    for tail in (target, target[-1:]) if target[-1][:1].isupper() else (target,):
        ends = [at for n, at in domain.objects.items() if n.split(".")[-len(tail) :] == tail]
        places = {(at.docname, at.node_id): at for at in ends}
        if len(places) == 1:
            (at,) = places.values()
            return make_refnode(app.builder, node["refdoc"], at.docname, at.node_id, [content])
    return None


def setup(app: Sphinx) -> dict[str, Any]:
    app.setup_extension("sphinx.ext.autodoc")
    app.connect("autodoc-process-docstring", process_docstring, priority=400)  # before napoleon
    app.connect("missing-reference", resolve, priority=900)  # after intersphinx
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
