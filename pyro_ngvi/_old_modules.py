"""What pickles of version 0.1 ask for and this version does not have: the error names the version.

Python asks the finders of ``sys.meta_path`` one after the other.  This one comes last, so it hears only
of modules that do not exist.
"""

from __future__ import annotations

import sys
from functools import partial
from importlib import import_module
from importlib.abc import MetaPathFinder
from typing import Any

from ._version import __version__

PACKAGE = __name__.rpartition(".")[0]
#: classes whose instances 0.1 pickled, that have left a module which is still there
GONE = {"families.exponential": "ProductFamily", "guides.walsh_hadamard": "_Diagonals"}


def _advice(what: str) -> str:
    return (
        f"{PACKAGE} {__version__} has no {what}. A pickle that asks for it was written by {PACKAGE} "
        f"0.1: load what 0.1 saved as state_dict() and get_state() into a new guide and optimizer, or "
        f"unpickle it there."
    )


class NamesTheVersion(MetaPathFinder):
    """Adds to the error for a missing module of this package what to do about an old pickle."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> None:
        parent = sys.modules.get(fullname.rpartition(".")[0])
        # an import looks where the parent says; tools that search elsewhere for a file go on to do so
        if fullname.startswith(f"{PACKAGE}.") and path is getattr(parent, "__path__", None):
            raise ModuleNotFoundError(_advice(f"module {fullname!r}"), name=fullname)


def _refuse(gone: str, module: str, name: str) -> Any:
    if name == gone:
        raise ImportError(_advice(f"{module}.{name}"))
    raise AttributeError(f"module {module!r} has no attribute {name!r}")


def name_the_version() -> None:
    """Say it for modules and classes of 0.1 that are gone."""
    sys.meta_path.append(NamesTheVersion())
    for place, name in GONE.items():
        module: Any = import_module(f"{PACKAGE}.{place}")
        module.__getattr__ = partial(_refuse, name, module.__name__)
