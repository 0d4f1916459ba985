"""Sphinx settings: `make docs` builds the site into docs/_build/html, and warnings are errors."""

import os
import socket
import sys
from importlib.metadata import version as installed
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

project = "pyro_ngvi"
author = "the pyro_ngvi developers"
project_copyright = "the pyro_ngvi developers, Apache-2.0"
release = version = installed("pyro-ngvi")

extensions = [
    "myst_nb",  # Markdown, with code cells that run while the site is built
    "choose_chart",  # in _ext
    "docstrings",  # in _ext
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.intersphinx",
    "sphinx_copybutton",
    "sphinx_design",
    "offline_mathjax",  # in _ext
]
exclude_patterns = ["_build", "**.ipynb_checkpoints"]

# Pages
html_theme = "furo"
html_title = f"pyro_ngvi {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
copybutton_exclude = ".linenos, .gp, .go"

# Markdown
myst_enable_extensions = ["colon_fence", "deflist", "dollarmath", "amsmath", "attrs_inline"]
myst_heading_anchors = 3
suppress_warnings = ["mystnb.mime_priority"]

# Code cells run at every build and a failure stops it; notebooks are stored with their outputs
# and run by `make tutorials`.
os.environ.pop("MPLBACKEND", None)  # the cells' figures stay in the page
nb_execution_mode = os.environ.get("NGVI_DOCS_EXECUTION", "cache")
nb_execution_excludepatterns = ["tutorials/*.ipynb"]
nb_execution_raise_on_error = True
nb_execution_show_tb = True
nb_execution_timeout = 300
nb_merge_streams = True

# Docstrings
autodoc_typehints = "none"  # the signature has them in the source; here they would only be long
autodoc_member_order = "bysource"
autodoc_default_options = {"exclude-members": "make_family, search, apply"}  # for a guide's author
autoclass_content = "class"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False

# Links into other libraries' references, where their sites can be reached: a build needs no network.
_others = {
    "python": "https://docs.python.org/3/",
    "torch": "https://docs.pytorch.org/docs/stable/",
    "pyro": "https://docs.pyro.ai/en/stable/",
    "arviz": "https://python.arviz.org/en/stable/",
}


def _reached(url: str) -> bool:
    try:
        with socket.create_connection((url.split("/")[2], 443), timeout=2):
            return True
    except OSError:
        print(f"{url} is out of reach: names of it are no links in this build")
        return False


intersphinx_mapping = {name: (url, None) for name, url in _others.items() if _reached(url)}
