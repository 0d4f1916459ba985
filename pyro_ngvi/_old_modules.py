"""Modules that version 0.1 had and this version does not: pickles of 0.1 ask for them.

Python asks the finders of ``sys.meta_path`` one after the other.  This one comes last, so it hears only
of modules that do not exist.
"""

from __future__ import annotations

import sys
from importlib.abc import MetaPathFinder
from typing import Any

from ._version import __version__

PACKAGE = __name__.rpartition(".")[0]


class NamesTheVersion(MetaPathFinder):
    """Adds to the error for a missing module of this package what to do about an old pickle."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> None:
        parent = sys.modules.get(fullname.rpartition(".")[0])
        # an import looks where the parent says; tools that search elsewhere for a file go on to do so
        if fullname.startswith(f"{PACKAGE}.") and path is getattr(parent, "__path__", None):
            raise ModuleNotFoundError(
                f"{PACKAGE} {__version__} has no module {fullname!r}. A pickle that asks for it was "
                f"written by {PACKAGE} 0.1: load what 0.1 saved as state_dict() and get_state() into "
                f"a new guide and optimizer, or unpickle it there.",
                name=fullname,
            )


def name_the_version() -> None:
    """Ask this finder after all others."""
    sys.meta_path.append(NamesTheVersion())
