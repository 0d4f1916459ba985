"""What cannot become a Pyro model, each refused in a sentence that names the module and the fix.

The log-likelihood must be a sum over examples that are independent given the weights, and the same at
every run.  That leaves out the modules in the two tables below, and those whose second run returns
another output than the first, such as ``F.dropout`` inside a ``forward`` or a running mean (seen by
two runs at the model's first).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from numbers import Integral
from typing import Any, NamedTuple

import torch
from pyro.nn import PyroModule
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.instancenorm import _InstanceNorm

from ..linalg.host import host_bool

__all__ = [
    "checked_num_data",
    "refuse_change",
    "refuse_mode",
    "refuse_module",
    "refuse_names",
    "refuse_other_than_pyro",
    "to_watch",
]


class _ModuleError(NamedTuple):
    """What is said, after the name, of a module ``m`` of these ``kinds`` ``when`` that holds."""

    says: str
    kinds: tuple[type, ...]
    when: Callable[[Any], bool] = lambda m: True


_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)


def _draws(module: Any) -> bool:
    if isinstance(module, nn.RReLU):
        return True
    return (module.p if isinstance(module, _DropoutNd) else module.dropout) > 0


#: by what they are
_BY_KIND = [
    _ModuleError(
        "is compiled by torch.jit, which takes no other weights than its own. Give the module that "
        "it was made of.",
        (torch.jit.ScriptModule,),
    ),
    _ModuleError(
        "is a PyroModule already, with sites of its own. Give ordinary modules of torch.",
        (PyroModule,),
    ),
    _ModuleError(
        "has max_norm={m.max_norm}: it rescales its weight in place when it runs, so that the "
        "densities would be those of other values. Leave max_norm out; the prior keeps the weights "
        "small.",
        _EMBEDDINGS,
        lambda m: m.weight.requires_grad and m.max_norm is not None,
    ),
    _ModuleError(
        "has padding_idx={m.padding_idx}: torch gives that row no gradient, so q would not be fitted "
        "there. Leave it out and multiply the embedded tokens by (tokens != {m.padding_idx})"
        ".unsqueeze(-1), or freeze the weight by requires_grad_(False).",
        _EMBEDDINGS,
        lambda m: m.weight.requires_grad and m.padding_idx is not None,
    ),
    _ModuleError(
        "has scale_grad_by_freq=True: its gradients would not be those of the log-likelihood. Leave "
        "it out.",
        _EMBEDDINGS,
        lambda m: m.weight.requires_grad and m.scale_grad_by_freq,
    ),
]

#: by their mode, which ``train()`` and ``eval()`` may change later
_BY_MODE = [
    _ModuleError(
        "is in training mode, or keeps no running statistics: it would normalise each example by the "
        "others in its minibatch, and examples are to be independent. Call module.eval() if it keeps "
        "them, or use GroupNorm or LayerNorm.",
        (_BatchNorm,),
        lambda m: m.training or m.running_mean is None,
    ),
    _ModuleError(
        "is in training mode and updates its running statistics at every run. Call module.eval(), or "
        "leave out track_running_stats.",
        (_InstanceNorm,),
        lambda m: m.training and m.track_running_stats,
    ),
    _ModuleError(
        "is in training mode, where it draws random numbers (dropout): noise on top of that of the "
        "sampled weights. Call module.eval(), or take it out.",
        (_DropoutNd, nn.RReLU, nn.RNNBase, nn.MultiheadAttention),
        lambda m: m.training and _draws(m),
    ),
]


def _refuse(path: str, module: nn.Module, errors: list[_ModuleError]) -> None:
    kind = type(module).__name__
    name = f"The module {path!r} ({kind})" if path else kind
    for says, kinds, when in errors:
        if isinstance(module, kinds) and when(module):
            raise ValueError(f"{name} {says.format(m=module)}")


def refuse_mode(path: str, module: nn.Module) -> None:
    """Refuse a module whose mode makes it random, or mixes examples."""
    _refuse(path, module, _BY_MODE)


def to_watch(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """The modules whose mode decides, with their paths."""
    kinds = tuple(kind for error in _BY_MODE for kind in error.kinds)
    return [(path, part) for path, part in module.named_modules() if isinstance(part, kinds)]


def refuse_module(module: Any) -> None:
    """Refuse what is no module, or has nothing to sample, or cannot be sampled."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"bayesianize takes a torch.nn.Module, got {type(module).__name__}.")
    for path, part in module.named_modules():
        _refuse(path, part, [*_BY_KIND, *_BY_MODE])
    sampled = {name: p for name, p in module.named_parameters() if p.requires_grad}
    for name, p in sampled.items():
        if not p.is_floating_point():
            raise ValueError(
                f"The parameter {name!r} has dtype {p.dtype}; only real floating-point parameters can "
                f"be sampled. Freeze it by requires_grad_(False)."
            )
    if not sampled:
        frozen = any(True for _ in module.parameters())
        raise ValueError(
            f"{type(module).__name__} has no parameter to sample"
            + (": all have requires_grad=False." if frozen else ".")
        )


def refuse_change(first: Any, second: Any) -> None:
    """Refuse a module that returned ``first`` and then, at the same weights and inputs, ``second``."""
    if not isinstance(first, Tensor) or not isinstance(second, Tensor):
        return
    few = 1e3 * torch.finfo(first.dtype).eps if first.is_floating_point() else 0.0
    if first.shape == second.shape:
        same = torch.isclose(first, second, rtol=few, atol=few, equal_nan=True).all()
        if host_bool(same) is not False:
            return
    raise ValueError(
        "The module returns another output when it is run again, at the same weights and inputs: it "
        "updates a buffer (spectral_norm in training mode), or draws random numbers (F.dropout). Call "
        "module.eval(), if that stops it, or take that layer out."
    )


def refuse_names(names: Collection[str], reserved: Mapping[str, str]) -> None:
    """Refuse parameters with the name of another site."""
    for name, what in reserved.items():
        if name in names:
            raise ValueError(
                f"The parameter {name!r} has the name of {what}. Rename it, or wrap the module: "
                f"torch.nn.Sequential(module) calls it '0.{name}'."
            )


def checked_num_data(num_data: Any) -> int:
    """``num_data`` as an int."""
    if num_data is None:
        raise ValueError(
            "num_data is missing: give the number of examples in the training set, len(dataset). It "
            "tells how much of the data a minibatch is; without it the prior would count too much."
        )
    if isinstance(num_data, bool) or not isinstance(num_data, Integral) or num_data < 1:
        raise ValueError(f"num_data is {num_data!r}; it must be a positive integer, len(dataset).")
    return int(num_data)


def refuse_other_than_pyro(function: str, returned: Any, what: str = "") -> None:
    """Refuse a function of the user that returns no distribution, or one of torch."""
    if not hasattr(returned, "to_event"):
        raise TypeError(
            f"{function} returns {type(returned).__name__}; it must return a distribution of "
            f"pyro.distributions{what}."
        )
