"""A device that the CPU plays: tensors there meet no tensors of the CPU, and reading one is a wait.

PyTorch takes ``lazy`` for a device of its own, of which it has no kernels here.  Its memory is that of
tensors of the CPU; operations are those of the CPU, on what tensors there hold.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import return_and_correct_aliasing

aten = torch.ops.aten
DEVICE = torch.device("lazy:0")
CPU = torch.device("cpu")

#: what takes indices from the CPU, as on a GPU
_INDEXED = (aten.index.Tensor, aten.index_put.default, aten.index_put_.default)
#: what moves numbers between devices
_MOVES = (aten._to_copy.default, aten.copy_.default)
#: what the host waits for
_WAITS = (aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default)
#: what they do then: nothing, or a ``RuntimeError``
waiting: dict[str, Any] = {"mode": 0}


def set_waiting(mode: Any) -> None:
    waiting["mode"] = mode


class There(Tensor):
    """A tensor there; ``held`` has its numbers."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> There:
        how = {"dtype": held.dtype, "layout": held.layout, "device": DEVICE}
        where = {"strides": held.stride(), "storage_offset": held.storage_offset()}
        return Tensor._make_wrapper_subclass(cls, held.size(), **where, **how)

    def __init__(self, held: Tensor) -> None:
        self.held = held

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({tuple(self.shape)}, {self.dtype})"

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        if not force:
            raise TypeError(f"can't convert {DEVICE} device type tensor to numpy")
        return self.detach().cpu().numpy(force=True)

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return self.numpy()

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        strangers: list[Tensor] = []
        a, k = _mapped(partial(_held, strangers), (args, kwargs))
        _check(func, args, [x for x in strangers if x.dim() > 0])
        target = args[0].device if func is aten.copy_.default else kwargs.get("device") or DEVICE
        moves = func in _MOVES and (target.type == "cpu" or not isinstance(args[-1], There))
        if moves or func in _WAITS or (func in _INDEXED and any(map(_is_mask, args[1]))):
            _wait(func)
        if target.type == DEVICE.type and "device" in kwargs:
            k = k | {"device": CPU}
        results = func(*a, **k)
        if target.type != DEVICE.type:
            return results
        results = _mapped(There, results)
        return return_and_correct_aliasing(func, args, kwargs, results)


def _mapped(f: Any, x: Any) -> Any:
    """What operations take and give, with ``f`` of each tensor; torch's tree_map takes longer."""
    if isinstance(x, Tensor):
        return f(x)
    if type(x) is tuple or type(x) is list:
        return type(x)([_mapped(f, y) for y in x])
    if type(x) is dict:
        return {key: _mapped(f, y) for key, y in x.items()}
    return x


def _held(strangers: list[Tensor], x: Tensor) -> Tensor:
    """The numbers of a tensor there; one of the CPU is noted as a stranger."""
    if isinstance(x, There):
        return x.held
    strangers.append(x)
    return x


def _is_mask(index: Tensor | None) -> bool:
    return index is not None and index.dtype == torch.bool


def _wait(func: Any) -> None:
    if waiting["mode"]:
        raise RuntimeError(f"{func} called a synchronizing operation")


def _check(func: Any, args: Any, strangers: list[Tensor]) -> None:
    if func in _INDEXED and isinstance(args[0], There):
        strangers = [x for x in strangers if x.is_floating_point()]
    if strangers and func not in _MOVES:
        raise RuntimeError(
            f"{func}: Expected all tensors to be on the same device, but found {DEVICE} and cpu!"
        )


def _factory(name: str) -> Any:
    # zeros without memory cannot be held
    packet, _, overload = name.replace("_efficientzerotensor", "zeros").partition(".")
    made = getattr(getattr(aten, packet), overload or "default")

    def make(*args: Any, **kwargs: Any) -> Tensor:
        return There(made(*args, **kwargs | {"device": CPU, "pin_memory": None}))

    return make


def _copy_from(self: Tensor, dst: Any, non_blocking: bool = False) -> Tensor:
    """Where PyTorch looks past subclasses: ``torch.tensor([1.0], device=DEVICE)``."""
    _wait("copy")
    dst.held.copy_(self)
    return dst


_library = torch.library.Library("aten", "IMPL")
_library.impl("_copy_from", _copy_from, "Lazy")
for _name in (
    *("empty.memory_format", "empty_strided", "_efficientzerotensor"),
    # what makes nothing first, to be resized
    *("eye", "eye.m", "arange", "arange.start", "arange.start_step", "linspace", "logspace"),
    *("randperm", "randperm.generator", "tril_indices", "triu_indices"),
):
    _library.impl(_name, _factory(_name), "Lazy")
