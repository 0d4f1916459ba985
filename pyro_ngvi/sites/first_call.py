"""What an AutoSites guide finds out at its first call: the structure of the model, and its algebra."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from pyro import poutine
from pyro.poutine.util import site_is_subsample
from torch import Tensor, nn

from ..runtime.vmap import Minibatches
from .algebra import Algebra
from .bound_model import BoundModel
from .chain import ChainAlgebra
from .conditioned_model import ConditionedModel
from .dense import DenseAlgebra
from .find import make_plan
from .inducing import InducingAlgebra
from .structure import ModelStructure

__all__ = ["FirstCall", "check_arguments", "first_call"]


@dataclass(frozen=True)
class FirstCall:
    """``rest`` are values that stand for latent sites of other guides."""

    plan: ModelStructure
    algebra: Algebra
    rest: dict[str, Tensor]


def first_call(
    model: Callable[..., Any],
    own: set[str],
    args: Any,
    kwargs: Any,
    latent: str | None,
    inducing: Tensor | None,
) -> FirstCall:
    """Find the structure of a ``model`` at these arguments; ``own`` latent sites are the guide's.

    Raises:
        ValueError: for a model outside the class.
    """

    def rest() -> dict[str, Tensor]:
        """A value from the prior for every latent site that other guides of a list infer."""
        with torch.no_grad():
            trace = poutine.trace(model).get_trace(*args, **kwargs)
        sites: Any = trace.iter_stochastic_nodes()
        return {n: s["value"] for n, s in sites if n not in own and not site_is_subsample(s)}

    direct, values = inducing is not None, rest()
    runner = ConditionedModel(model, args, kwargs, values, Minibatches(), direct=direct)
    other = None
    if values:  # with the same data
        other = ConditionedModel(model, args, kwargs, rest(), runner.minibatches, direct=direct)
    plan = make_plan(runner, other, latent)
    return FirstCall(plan, _algebra(plan, BoundModel(plan, runner), inducing), values)


def _algebra(plan: ModelStructure, call: BoundModel, inducing: Tensor | None) -> Algebra:
    """The dense algebra, unless the prior has a structure that makes another one cheaper."""
    if inducing is not None:
        return InducingAlgebra(plan, call, inducing)
    if plan.direct:
        return ChainAlgebra(plan, call)
    return DenseAlgebra(plan, call)


def check_arguments(model: Any, args: Any, kwargs: Any) -> None:
    """Refuse arguments that the model does not take: no step has left those of a user."""
    program = model.forward if isinstance(model, nn.Module) else model
    try:
        inspect.signature(program).bind(*args, **kwargs)
    except TypeError as error:
        raise RuntimeError(
            f"AutoSites has not made a step whose arguments it could take ({error}): pass those of "
            f"the model, as in guide.median(X)."
        ) from error
