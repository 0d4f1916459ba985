"""The one place that touches private names of Pyro.  ``tests/contract/test_pyro_adapter.py`` holds it.

Pyro keys the parameters of a guide by the guide's class name, so that a second guide of a class
silently takes over the parameters of the first (or fails on their shape).  There is no public way
to name an ``AutoGuide``; ``PyroModule`` keeps the name in ``_pyro_name``.
"""

from __future__ import annotations

import itertools
from collections import defaultdict

from pyro.nn import PyroModule

__all__ = ["claim_name", "module_name", "rename"]

_counters: dict[str, itertools.count[int]] = defaultdict(itertools.count)
_claimed: set[str] = set()


def claim_name(wanted: str) -> str:
    """A name that no guide of this process has had: ``wanted``, or ``wanted_2``, ``wanted_3`` ...

    Names are not given back when a guide is deleted, since its parameters stay in the parameter
    store.  They depend on the order of construction alone, so a restarted script gets the same.
    """
    name = wanted
    while name in _claimed:
        name = f"{wanted}_{next(_counters[wanted]) + 2}"
    _claimed.add(name)
    return name


def is_claimed(name: str) -> bool:
    return name in _claimed


def module_name(module: PyroModule) -> str:
    """The name under which the parameters of ``module`` stand in the parameter store."""
    return module._pyro_name


def rename(module: PyroModule, name: str) -> None:
    """Give ``module`` a name before its first parameter is registered."""
    module._pyro_name = name
