"""Every message of the package, read from its source: its length, and that the code in it exists.

tests/robustness/test_advice.py runs the advice of a part of them; here each call, dotted name and
keyword of all of them is looked up where a reader would: in this package, Pyro, torch and ArviZ.
"""

import importlib
import inspect
import pkgutil
import re
from collections.abc import Callable
from typing import Any

import arviz
import numpy
import pyro
import pyro.contrib.gp
import pyro.distributions
import pyro.infer.autoguide
import pyro.optim
import torch
from pyro import poutine

import pyro_ngvi
from tests.robustness.advice_cases import TEXTS, calls

MOST = 240
PLACEHOLDER = 10  # characters that a value put in is taken for


def test_the_messages_are_found() -> None:
    assert len(TEXTS) > 150


def test_no_message_is_longer_than_it_may_be() -> None:
    lengths = {place: len(text.replace("{}", "x" * PLACEHOLDER)) for place, text in TEXTS.items()}
    assert not {place: n for place, n in lengths.items() if n > MOST}


# What a word before a dot stands for in the messages.
ROOTS: dict[str, Any] = {
    "pyro_ngvi": pyro_ngvi,
    "ngvi": pyro_ngvi,
    "pyro": pyro,
    "poutine": poutine,
    "torch": torch,
    "dist": pyro.distributions,
    "az": arviz,
    "arviz": arviz,
    "np": numpy,
    "constraints": pyro.distributions.constraints,
    "transforms": pyro.distributions.transforms,
    "nn": pyro_ngvi.nn,
    "diagnostics": pyro_ngvi.diagnostics,
    "optim": pyro_ngvi.optim,
    "losses": pyro_ngvi,
    "math": importlib.import_module("math"),
    "functools": importlib.import_module("functools"),
    "copy": importlib.import_module("copy"),
    "module": torch.nn.Module,
    "svi": pyro.infer.SVI,
    "guide": pyro_ngvi.AutoSites,
    "store": type(pyro.get_param_store()),
}
# Where a word without a dot is looked up, in this order.
PLACES: list[Any] = [
    pyro_ngvi,
    pyro_ngvi.optim,
    pyro_ngvi.nn,
    pyro_ngvi.flows,
    pyro_ngvi.diagnostics,
    pyro_ngvi.distributions,
    pyro_ngvi.AutoSites,
    pyro_ngvi.families,
    pyro_ngvi.families.Family,
    pyro_ngvi.NGVB,
    pyro.distributions,
    pyro.infer,
    pyro.infer.autoguide,
    pyro.optim,
    importlib.import_module("pyro.nn"),
    poutine,
    pyro,
    torch.Tensor,
    torch.nn.Module,
    torch.nn,
    __builtins__ if not isinstance(__builtins__, dict) else type("B", (), __builtins__),
]


def looked_up(path: str) -> Any:
    """What a dotted name stands for; None where nothing does."""
    first, *rest = path.split(".")
    found = ROOTS.get(first)
    if found is None:
        found = next((getattr(p, first) for p in PLACES if hasattr(p, first)), None)
    for part in rest:
        if found is not None and not hasattr(found, part):
            return None
        found = getattr(found, part, None)
    return found


def keywords_of(call: str) -> list[str]:
    """The names of the keywords of a call, not of the calls in it."""
    depth, flat = 0, ""
    for c in call:
        depth -= c in ")]}"
        flat += c if depth == 1 else " "
        depth += c in "([{"
    return re.findall(r"(\w+)=(?!=)", flat)


def test_the_calls_and_names_in_a_message_exist() -> None:
    unknown = []
    for place, text in TEXTS.items():
        for path, call in calls(text):
            keywords, found = keywords_of(call), looked_up(path)
            if found is None:
                unknown.append((place, path))
            elif keywords and callable(found):
                parameters, others = named(found)
                if not others and not set(keywords) <= parameters:
                    unknown.append((place, f"{path}{keywords}"))
        for path in re.findall(r"\b(?:pyro_ngvi|ngvi|pyro|torch|poutine|az)(?:\.\w+)+", text):
            if looked_up(path) is None:
                unknown.append((place, path))
    assert not unknown


def named(call: Callable[..., Any]) -> tuple[set[str], bool]:
    """The parameters of ``call``, and whether it takes others besides, or does not say."""
    try:
        parameters = inspect.signature(call).parameters.values()
    except (TypeError, ValueError):
        return set(), True
    return {p.name for p in parameters}, any(p.kind is p.VAR_KEYWORD for p in parameters)


def keywords_of_all() -> set[str]:
    """Every parameter of a function or class of this package, or of one that its messages send to."""
    modules = [
        importlib.import_module(m.name)
        for m in pkgutil.walk_packages(pyro_ngvi.__path__, "pyro_ngvi.")
    ]
    found: set[str] = set()
    for home in [*modules, pyro, pyro.infer, pyro.infer.autoguide, pyro.distributions, poutine]:
        for value in vars(home).values():
            members = vars(value).values() if isinstance(value, type) else ()
            for call in (value, *members):
                if callable(call):
                    found |= named(call)[0]
    # of torch.nn's recurrent layers, of Pyro's kernels, of DataLoader
    return found | {"batch_first", "diag", "drop_last"}


def test_the_keywords_in_a_message_are_parameters() -> None:
    known = keywords_of_all()
    used = {
        (place, keyword)
        for place, text in TEXTS.items()
        for keyword in re.findall(r"(?<![\w.])([a-z]\w{3,})=(?![= ])", text)
    }
    assert not {(place, keyword) for place, keyword in used if keyword not in known}
