"""What a step of SVI reads and replaces beside parameters: tensors in attributes of its optimizer.

An optimizer of ours replaces attributes and entries of dicts, and writes into none.  So all that a
later step depends on is found in the attributes of the optimizer and of the parts of the guide.
"""

from __future__ import annotations

from operator import is_
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from ..optim.host import NaturalGradientOptim

#: attributes that are looked up elsewhere, that users read, and a count of what others have stored
_ELSEWHERE = ("_parameters", "_modules", "_reports", "_store_size")
#: stands for a tensor
_TENSOR = object()


class StepState:
    """The ``tensors`` in attributes of an optimizer and its blocks, in a fixed order, at one moment."""

    def __init__(self, optim: Any) -> None:
        self.tensors: list[Tensor] = []
        self._places: list[tuple[dict[str, Any], str, TreeSpec, list[Any]]] = []
        self._rest: dict[tuple[int, str], Any] = {}
        self._written: list[_Mark] = []
        self._marks: list[_Mark] = []
        self._sizes: list[tuple[dict[str, Any], int]] = []
        for holder in optim.holders() if isinstance(optim, NaturalGradientOptim) else ():
            self._sizes.append((vars(holder), len(vars(holder))))
            for name, value in vars(holder).items():
                if name in _ELSEWHERE:
                    continue
                mark = _Mark(vars(holder), name)
                leaves, spec = tree_flatten(value)
                if any(_counts(leaf) for leaf in leaves):
                    rest = [_TENSOR if _counts(leaf) else leaf for leaf in leaves]
                    self._places.append((vars(holder), name, spec, rest))
                    self.tensors += [leaf for leaf in leaves if _counts(leaf)]
                    self._written.append(mark)
                else:
                    self._marks.append(mark)
                    self._rest[id(holder), name] = leaves

    def is_untouched(self) -> bool:
        """Whether every attribute still holds the very object that it held here, or was written."""
        return all(len(own) == size for own, size in self._sizes) and all(
            mark.holds() for mark in (*self._written, *self._marks)
        )

    def differs(self, other: StepState) -> str | None:
        """The first attribute that is not the same in ``other``, tensors apart."""
        mine, others = ({(id(p[0]), p[1]): p for p in s._places} for s in (self, other))
        for key in [*mine, *others]:
            a, b = mine.get(key), others.get(key)
            if a is None or b is None or a[2] != b[2] or not _same(a[3], b[3]):
                return key[1]
        for key in [*self._rest, *other._rest]:
            if not _same(self._rest.get(key), other._rest.get(key)):
                return key[1]
        return None

    def write(self, tensors: list[Tensor]) -> None:
        """Put ``tensors`` in the places of those that were there."""
        self.tensors, following = tensors, iter(tensors)
        for attributes, name, spec, rest in self._places:
            leaves = [next(following) if leaf is _TENSOR else leaf for leaf in rest]
            attributes[name] = tree_unflatten(leaves, spec)
        self._written = [_Mark(attributes, name) for attributes, name, _, _ in self._places]


class _Mark:
    """The object that an attribute holds, and those in it if it is a dict."""

    def __init__(self, attributes: dict[str, Any], name: str) -> None:
        self.attributes, self.name, self.value = attributes, name, attributes[name]
        self.inner = list(self.value.values()) if isinstance(self.value, dict) else []

    def holds(self) -> bool:
        now: Any = self.attributes.get(self.name)
        if now is not self.value or not self.inner:
            return now is self.value
        return len(now) == len(self.inner) and all(map(is_, now.values(), self.inner))


def _counts(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and not isinstance(leaf, nn.Parameter)


def _same(a: Any, b: Any) -> bool:
    if a is None or b is None or len(a) != len(b):
        return False
    plain = (int, float, str, bool, type(None))
    return all(x is y or (isinstance(x, plain) and x == y) for x, y in zip(a, b, strict=True))
