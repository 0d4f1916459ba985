"""The one place that touches private names of Pyro.  ``tests/contract/test_pyro_adapter.py`` holds it.

Pyro keys the parameters of a guide by the guide's class name, or by its place in an
``AutoGuideList``, so that a second guide silently takes over the parameters of the first (or fails
on their shape).  There is no public way to name an ``AutoGuide``; ``PyroModule`` keeps the name in
``_pyro_name`` and sets that of a part in ``_pyro_set_supermodule``.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pyro.infer.autoguide import AutoGuide
from pyro.nn import PyroModule

__all__ = ["OwnName", "claim_name", "has_model", "kept_whole", "module_name", "rename"]

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


def module_name(module: PyroModule) -> str:
    """The name under which the parameters of ``module`` stand in the parameter store."""
    return module._pyro_name


def rename(module: PyroModule, name: str) -> None:
    """Give ``module`` a name before its first parameter is registered."""
    module._pyro_name = name


class OwnName:
    """Mixed into a ``PyroModule``: as a part of another module it has a name of its own too."""

    def _pyro_set_supermodule(self, name: str, context: Any) -> None:
        parent: Any = super()
        parent._pyro_set_supermodule(claim_name(name), context)


def has_model(guide: AutoGuide) -> bool:
    """Whether ``guide`` can run its model: Pyro leaves the model out of copies."""
    return guide._model is not None


@contextmanager
def kept_whole(guide: AutoGuide) -> Iterator[None]:
    """Around ``AutoGuide.__getstate__``, which takes model and master from the original too."""
    model, master = guide._model, guide.master
    try:
        yield
    finally:
        guide._model, guide.master = model, master
