"""Where version 0.1 had ``AutoSites``: its pickles name this module."""

from ..runtime.old_pickles import refuse_pickled as __getattr__

__all__ = ["__getattr__"]
