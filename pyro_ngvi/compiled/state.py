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
        #: by attribute its structure, if there are tensors in it, and what is in it, tensors all alike
        self._forms: dict[tuple[int, str], tuple[TreeSpec | None, list[Any]]] = {}
        self._marks: dict[tuple[int, str], _Mark] = {}
        self._sizes: list[tuple[dict[str, Any], int]] = []
        for holder in optim.holders() if isinstance(optim, NaturalGradientOptim) else ():
            self._sizes.append((vars(holder), len(vars(holder))))
            for name, value in vars(holder).items():
                if name in _ELSEWHERE:
                    continue
                leaves, spec = tree_flatten(value)
                rest = [_TENSOR if _counts(leaf) else leaf for leaf in leaves]
                tensors = [leaf for leaf in leaves if _counts(leaf)]
                self._marks[id(holder), name] = _Mark(vars(holder), name)
                self._forms[id(holder), name] = spec if tensors else None, rest
                self.tensors += tensors

    def is_untouched(self) -> bool:
        """Whether every attribute still holds the very object that it held here, or was written."""
        same = all(len(own) == size for own, size in self._sizes)
        return same and all(mark.holds() for mark in self._marks.values())

    def differs(self, other: StepState) -> str | None:
        """The first attribute that is not the same in ``other``, tensors apart."""
        for key in self._forms | other._forms:
            a, b = self._forms.get(key), other._forms.get(key)
            if a is None or b is None or a[0] != b[0] or not _same(a[1], b[1]):
                return key[1]
        return None

    def write(self, tensors: list[Tensor]) -> None:
        """Put ``tensors`` in the places of those that were there."""
        self.tensors, following = tensors, iter(tensors)
        for key, (spec, rest) in self._forms.items():
            if spec is not None:
                attributes, name = self._marks[key].attributes, key[1]
                leaves = [next(following) if leaf is _TENSOR else leaf for leaf in rest]
                attributes[name] = tree_unflatten(leaves, spec)
                self._marks[key] = _Mark(attributes, name)


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


def _same(a: list[Any], b: list[Any]) -> bool:
    plain = (int, float, str, bool, type(None))
    pairs = zip(a, b, strict=False)
    return len(a) == len(b) and all(x is y or (isinstance(x, plain) and x == y) for x, y in pairs)
