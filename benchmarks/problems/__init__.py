"""A zoo of Pyro models with data and known answers, for statistical tests and benchmarks.

>>> from benchmarks.problems import load
>>> problem = load("wdbc")
>>> problem.dim, problem.optimum["full_rank"].elbo
(31, -55.465137)
"""

from collections.abc import Callable, Iterable, Iterator
from functools import cache

from . import hierarchical, logistic, posteriordb, regression
from .log_joint import LogJoint
from .problem import DataNotFound, Optimum, Problem

__all__ = ["DataNotFound", "LogJoint", "Optimum", "Problem", "load", "load_present", "names"]

_KINDS: dict[str, tuple[tuple[str, ...], Callable[[str], Problem]]] = {
    "logistic": (tuple(logistic.REGRESSIONS), logistic.load),
    "posteriordb": (tuple(posteriordb.DIMENSIONS), posteriordb.load),
    "hierarchical": (
        ("eight_schools_centered", "varying_intercepts", "horseshoe"),
        hierarchical.load,
    ),
    "regression": (tuple(regression.VARIANTS), regression.load),
}


def names(kind: str | None = None) -> list[str]:
    """Names of all problems, or of one kind: logistic, posteriordb, hierarchical, regression."""
    kinds = _KINDS if kind is None else (kind,)
    return [name for k in kinds for name in _KINDS[k][0]]


@cache
def load(name: str) -> Problem:
    """The problem of that name, read or simulated on first use; float64.

    Raises
    ------
    DataNotFound
        If it needs a data file that is not there.
    KeyError
        If there is no problem of that name.
    """
    for members, loader in _KINDS.values():
        if name in members:
            return loader(name)
    raise KeyError(f"There is no problem called {name!r}; there are {', '.join(names())}.")


def load_present(chosen: Iterable[str]) -> Iterator[Problem]:
    """The problems of these names; one whose data file is not there is left out, and printed."""
    for name in chosen:
        try:
            yield load(name)
        except DataNotFound as error:
            print(f"{name} is left out. {error}")
