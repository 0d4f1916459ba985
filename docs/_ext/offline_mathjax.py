"""Formulas without a network: MathJax from sphinx-mathjax-offline, in parallel builds too."""

from importlib import import_module
from typing import Any

from sphinx.application import Sphinx


def setup(app: Sphinx) -> dict[str, Any]:
    import_module("sphinx-mathjax-offline").setup(app)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
