"""What the tests of advice in errors share: the messages, the code in them, and models."""

import ast
import math
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine  # noqa: F401  (advised)
from pyro.distributions import Uniform  # noqa: F401  (advised)
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoGuideList, AutoNormal  # noqa: F401  (advised)
from pyro.poutine import block  # noqa: F401  (advised)
from torch import Tensor

import pyro_ngvi
import pyro_ngvi as ngvi  # noqa: F401  (advised)
from pyro_ngvi import AutoMeanFieldNormal, AutoSites  # noqa: F401  (advised)

N = 20
X = torch.linspace(-1.0, 1.0, N, dtype=torch.float64)
Y = torch.sin(3.0 * X)


def literal(node: ast.expr) -> str:
    """The text of a message, with {} in the place of what is put in."""
    if isinstance(node, ast.JoinedStr):
        return "".join(literal(v) for v in node.values)
    if isinstance(node, ast.Constant):
        return str(node.value)
    return "{}"


def messages() -> list[str]:
    """The messages of exceptions and warnings with a call, a keyword or a name of Pyro in them."""
    found = []
    for path in Path(pyro_ngvi.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            call = node.exc if isinstance(node, ast.Raise) else node
            warns = isinstance(call, ast.Call) and ast.unparse(call.func) == "warnings.warn"
            if isinstance(call, ast.Call) and call.args and (call is not node or warns):
                found.append(literal(call.args[0]))
    return [m for m in found if re.search(r"[\w}]\([^)]*\w|\b\w+=|\bpyro\w*\.\w", m)]


def said(call: Callable[[], Any], part: str) -> str:
    """The message of the error that ``call`` raises; it has ``part`` in it."""
    with pytest.raises((ValueError, RuntimeError, TypeError)) as caught:
        call()
    assert part in str(caught.value)
    return str(caught.value)


def advised(message: str, start: str, **names: Any) -> Any:
    """The value of the first expression in ``message`` that begins with ``start`` and closes."""
    code = message[message.index(start) :]
    depth = 0
    for end, c in enumerate(code):
        depth += (c in "([{") - (c in ")]}")
        if (c in ")]}" and depth == 0) or depth < 0:
            code = code[: end + (depth == 0)]
            break
    return eval(code, {**globals(), **names})  # the code of our own messages


def steps(model: Any, guide: Any, optim: Any, loss: Any = None, count: int = 3) -> None:
    svi: Any = SVI(model, guide, optim, loss or Trace_ELBO())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(count):
            assert math.isfinite(svi.step())


def line(y: Tensor | None = Y) -> None:
    w: Any = pyro.sample("w", dist.Normal(0.0, 1.0))
    b: Any = pyro.sample("b", dist.Normal(0.0, 1.0))
    with pyro.plate("data", N):
        pyro.sample("y", dist.Normal(w * X + b, 0.5), obs=y)


def local() -> None:
    b: Any = pyro.sample("b", dist.Normal(0.0, 1.0))
    with pyro.plate("data", N, subsample_size=5) as i:
        z = pyro.sample("z", dist.Normal(b, 1.0))
        pyro.sample("y", dist.Normal(z, 0.5), obs=Y[i])
