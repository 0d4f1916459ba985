"""What can not become a Pyro model, each refused in a sentence that names the module and the fix.

The log-likelihood must be a sum over examples that are independent given the weights, and the same at
every run. That leaves out

* batch normalisation by the statistics of the minibatch (training mode, or no running statistics);
* instance normalisation that updates running statistics;
* layers that draw random numbers in training mode: dropout, ``RReLU``, the ``dropout`` of recurrent
  and attention layers;
* embeddings whose gradient is not that of their output, or that write into their weight
  (``padding_idx``, ``scale_grad_by_freq``, ``max_norm``);
* modules whose second run returns another output than the first, such as ``F.dropout`` inside a
  ``forward`` or a running mean (seen by two runs at the model's first).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from numbers import Integral
from typing import Any

import torch
from pyro.nn import PyroModule
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.parameter import is_lazy

from ..linalg.host_bool import host_bool

__all__ = [
    "checked_num_data",
    "refuse_change",
    "refuse_mode",
    "refuse_module",
    "refuse_names",
    "to_watch",
]

_CONTAIN_DROPOUT = (nn.RNNBase, nn.MultiheadAttention)


def refuse_module(module: Any) -> None:
    """Refuse what is no module, or has nothing to sample, or can not be sampled."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"bayesianize takes a torch.nn.Module, got {type(module).__name__}.")
    for path, part in module.named_modules():
        if isinstance(part, torch.jit.ScriptModule):
            raise ValueError(
                f"{_name(path, part)} is compiled by torch.jit, which takes no other weights than its "
                f"own. Give the module that it was made of."
            )
        if isinstance(part, PyroModule):
            raise ValueError(
                f"{_name(path, part)} is a PyroModule already, with sites of its own. Give ordinary "
                f"modules of torch."
            )
        refuse_mode(path, part)
        _refuse_embedding(path, part)
    sampled = {name: p for name, p in module.named_parameters() if p.requires_grad}
    for name, p in sampled.items():
        if is_lazy(p):
            raise ValueError(
                f"The parameter {name!r} has no shape yet. Run the module once on a batch first."
            )
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


def _refuse_embedding(path: str, part: Any) -> None:
    if not isinstance(part, nn.Embedding | nn.EmbeddingBag) or not part.weight.requires_grad:
        return
    if part.max_norm is not None:
        raise ValueError(
            f"{_name(path, part)} has max_norm={part.max_norm}: it rescales its weight in place when "
            f"it runs, so that the densities would be those of other values. Leave max_norm out; the "
            f"prior keeps the weights small."
        )
    if part.padding_idx is not None:
        raise ValueError(
            f"{_name(path, part)} has padding_idx={part.padding_idx}: torch gives that row no "
            "gradient, so q would not be fitted there. Leave it out and multiply the embedded "
            f"tokens by (tokens != {part.padding_idx}).unsqueeze(-1), or freeze the weight by "
            "requires_grad_(False)."
        )
    if part.scale_grad_by_freq:
        raise ValueError(
            f"{_name(path, part)} has scale_grad_by_freq=True: its gradients would not be those of the "
            f"log-likelihood. Leave it out."
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
    number = num_data if isinstance(num_data, Integral) and not isinstance(num_data, bool) else 0
    if number < 1:
        raise ValueError(f"num_data is {num_data!r}; it must be a positive integer, len(dataset).")
    return int(number)


def to_watch(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """The modules whose mode decides, with their paths: ``train()`` may be called later."""
    kinds = (_BatchNorm, _InstanceNorm, _DropoutNd, nn.RReLU, *_CONTAIN_DROPOUT)
    return [(path, part) for path, part in module.named_modules() if isinstance(part, kinds)]


def refuse_mode(path: str, module: nn.Module) -> None:
    """Refuse a module whose mode makes it random, or mixes examples."""
    part: Any = module
    if isinstance(part, _BatchNorm) and (part.training or part.running_mean is None):
        why, fix = (
            "is in training mode",
            "Call module.eval() to keep its running statistics, or use",
        )
        if part.running_mean is None:
            why, fix = "keeps no running statistics", "Use"
        raise ValueError(
            f"{_name(path, part)} {why}: it would normalise each example by the others in its "
            f"minibatch, so that examples are not independent given the weights and minibatches do "
            f"not add up to the data. {fix} GroupNorm or LayerNorm."
        )
    if not part.training:
        return
    if isinstance(part, _InstanceNorm) and part.track_running_stats:
        raise ValueError(
            f"{_name(path, part)} is in training mode and updates its running statistics at every "
            f"run. Call module.eval(), or leave out track_running_stats."
        )
    if (
        (isinstance(part, _DropoutNd) and part.p > 0)
        or (isinstance(part, _CONTAIN_DROPOUT) and part.dropout > 0)
        or isinstance(part, nn.RReLU)
    ):
        raise ValueError(
            f"{_name(path, part)} is in training mode, where it draws random numbers (dropout): noise "
            f"on top of that of the sampled weights. Call module.eval(), or take it out."
        )


def _name(path: str, module: nn.Module) -> str:
    return f"The module {path!r} ({type(module).__name__})" if path else type(module).__name__
