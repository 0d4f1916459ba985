"""What the tests of advice in errors share: the messages, the code in them, and models."""

import ast
import math
import re
import warnings
from collections.abc import Callable, Iterator
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


def texts() -> Iterator[tuple[str, str]]:
    """Place and text of every message of an exception or a warning, {} where a value is put in."""
    root = Path(pyro_ngvi.__file__).parent
    for path in sorted(root.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and node.args:
                name = ast.unparse(node.func)
                if re.search(r"(Error|Warning|warnings\.warn|OtherCourse)$", name):
                    yield f"{path.relative_to(root)}:{node.lineno}", literal(node.args[0])
            if isinstance(node, ast.FunctionDef) and node.name == "refuses":  # of a rule
                for end in ast.walk(node):
                    if isinstance(end, ast.Return) and isinstance(end.value, ast.expr):
                        yield f"{path.relative_to(root)}:{end.lineno}", literal(end.value)


TEXTS = dict(texts())

#: names of the reader's own program; words with a bracket, as site(s) and q(z); an optional library
READERS = set("kernel prior mean self f p hi noise x site q rate init gain zuko".split())


def expression(code: str) -> str:
    """The first expression of ``code``, up to where it closes."""
    depth = 0
    for end, c in enumerate(code):
        depth += (c in "([{") - (c in ")]}")
        if (c in ")]}" and depth == 0) or depth < 0:
            return code[: end + (depth == 0)]
    return code


def calls(text: str) -> Iterator[tuple[str, str]]:
    """The calls in a message to what is not the reader's own: what is called, and the whole call."""
    for match in re.finditer(r"(?<![\w.\]})'\"])((?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*)\(", text):
        if match[1].split(".")[0] not in READERS:
            yield match[1], expression(text[match.start() :])


def messages() -> list[str]:
    """Those with a call, a keyword or a name of Pyro in them."""
    code = r"[\w}]\([^)]*\w|\b\w+=|\bpyro\w*\.\w"
    return [text for text in TEXTS.values() if re.search(code, text)]


def said(call: Callable[[], Any], part: str) -> str:
    """The message of the error that ``call`` raises; it has ``part`` in it."""
    with pytest.raises((ValueError, RuntimeError, TypeError)) as caught:
        call()
    assert part in str(caught.value)
    return str(caught.value)


def advised(message: str, start: str, **names: Any) -> Any:
    """The value of the first expression in ``message`` that begins with ``start`` and closes."""
    code = expression(message[message.index(start) :])
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
