"""The weights of a module as latent sites: modules that can have them, their priors, many at once.

The log-likelihood must be a sum over examples that are independent given the weights, and the same at
every run.  That leaves out the modules in the table below, and those whose second run returns another
output than the first, such as ``F.dropout`` inside a ``forward`` or a running mean.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

import pyro.distributions as dist
import torch
from pyro.nn import PyroModule
from pyro.poutine.messenger import Messenger
from pyro.poutine.util import site_is_subsample
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.modules.lazy import LazyModuleMixin

from ..families.flow import places
from ..linalg.host import host_bool
from ..runtime.stand_ins import stand_ins

# A distribution is Any: to a type checker Pyro's are abstract.
Prior: TypeAlias = float | Callable[[str, Tensor], Any]


def _draws(module: Any) -> bool:
    if isinstance(module, nn.RReLU):
        return True
    return (module.p if isinstance(module, _DropoutNd) else module.dropout) > 0


def _other_gradient(module: Any) -> bool:
    odd = module.padding_idx is not None or module.max_norm is not None
    return module.weight.requires_grad and (odd or module.scale_grad_by_freq)


#: what is refused: kinds of modules, when, and what is said after the module's name
REFUSED: list[tuple[tuple[type, ...], Callable[[Any], bool], str]] = [
    (
        (PyroModule,),
        lambda m: True,
        "is a PyroModule already, with sites of its own. Give ordinary modules of torch.",
    ),
    (
        (LazyModuleMixin,),
        lambda m: m.has_uninitialized_params(),
        "has parameters that are not made yet. Run the whole module once before, on some inputs.",
    ),
    (
        (torch.jit.ScriptModule,),
        lambda m: True,
        "is compiled by torch.jit: its weights cannot be drawn. Give the module that it was made of.",
    ),
    (
        (nn.Embedding, nn.EmbeddingBag),
        _other_gradient,
        "has padding_idx, max_norm or scale_grad_by_freq: its gradients are not those of the "
        "density. Leave them out (for padding multiply by (tokens != i).unsqueeze(-1)), or freeze "
        "the weight.",
    ),
    (
        (_BatchNorm,),
        lambda m: m.training or m.running_mean is None,
        "is in training mode, or keeps no running statistics: it normalises each example by the "
        "others in its minibatch. Call module.eval() if it keeps them, or use GroupNorm or "
        "LayerNorm.",
    ),
    (
        (_InstanceNorm,),
        lambda m: m.training and m.track_running_stats,
        "is in training mode and updates its running statistics at every run. Call module.eval().",
    ),
    (
        (_DropoutNd, nn.RReLU, nn.RNNBase, nn.MultiheadAttention),
        lambda m: m.training and _draws(m),
        "is in training mode, where it draws random numbers. Call module.eval(), or take it out.",
    ),
]


def refuse(parts: Iterable[tuple[str, nn.Module]]) -> None:
    """Refuse parts of a module, given with their paths, by the table."""
    for path, part in parts:
        for kinds, when, says in REFUSED:
            if isinstance(part, kinds) and when(part):
                raise ValueError(f"The module {path!r} ({type(part).__name__}) {says}")


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
        "The module returns another output when it is run again: it updates a buffer (spectral_norm), "
        "or draws random numbers (F.dropout). Call module.eval(), or take that layer out."
    )


def refuse_other_than_pyro(function: str, returned: Any) -> None:
    """Refuse a function of the user that returns no distribution, or one of torch."""
    if not hasattr(returned, "to_event"):
        raise TypeError(
            f"{function} returns {type(returned).__name__}; it must return a distribution of "
            f"pyro.distributions."
        )


def sd_or_function(value: Any, what: str, example: str) -> Any:
    """A positive sd as a float, or the user's function that stands in its place."""
    if callable(value) and not isinstance(value, torch.distributions.Distribution):
        return value
    number: Any = value if isinstance(value, int | float) and not isinstance(value, bool) else 0.0
    if not 0.0 < number < math.inf:
        raise ValueError(
            f"{what} is {value!r}; give the sd as a positive number, or a function that returns "
            f"one of pyro.distributions: {example}."
        )
    return float(number)


def choose_prior(prior: Prior | Mapping[str, Prior], name: str) -> Prior:
    """The prior of the parameter ``name``: an sd, or a function."""
    if isinstance(prior, Mapping):
        found = [p for pattern, p in prior.items() if fnmatchcase(name, pattern)]
        if not found:
            raise ValueError(
                f"prior has no pattern that fits the parameter {name!r}; its patterns are "
                f'{list(prior)}. Add one, for instance "*": 1.0 as the last.'
            )
        prior = found[0]
    cauchy = "lambda name, p: dist.Cauchy(p.new_tensor(0.0), p.new_tensor(1.0))"
    return sd_or_function(prior, f"The prior of {name!r}", cauchy)


def centred_normal(like: Tensor, shape: tuple[int, ...], sd: float = 1.0) -> Any:
    """Independent centred normals, one event, in dtype and place of the tensor ``like``.

    Arguments are not validated: under ``vmap`` and on a GPU it would cost.
    """
    zero = like.detach().new_zeros(())
    base: Any = dist.Normal(zero, zero.new_full((), sd), validate_args=False)
    return base.expand(shape).to_event(len(shape))


def prior_from(function: Any, name: str, parameter: Tensor, sampled: dict[str, Tensor]) -> Any:
    """The prior of a parameter, one event of its shape: normals of an sd, or what a function returns.

    ``sampled`` holds the hyperparameters of this run of the model so far; new ones are added.
    """
    shape = parameter.shape
    if not callable(function):
        return centred_normal(parameter, shape, function)
    with _Hyperparameters(name, sampled):
        fn: Any = function(name, parameter)
    refuse_other_than_pyro(f"The prior of {name!r}", fn)
    if fn.shape() != shape:
        outer = shape[: len(shape) - fn.event_dim]
        if not broadcasts_to(fn.batch_shape, outer) or outer + fn.event_shape != shape:
            raise ValueError(
                f"The prior of {name!r} has shape {tuple(fn.shape())}, the parameter has shape "
                f"{tuple(shape)}. Return a distribution of that shape, or a scalar one."
            )
        fn = fn.expand(outer)
    return fn.to_event(len(fn.batch_shape))


class _Hyperparameters(Messenger):
    """Gives a hyperparameter that another prior function has sampled again: one site, which they share.

    Those of vectorised particles would be broadcast against the dimensions of the parameter.
    """

    def __init__(self, name: str, sampled: dict[str, Tensor]) -> None:
        super().__init__()
        self.name, self.sampled = name, sampled
        self._inside: set[str] = set()

    def _pyro_sample(self, msg: Any) -> None:
        # plates around the run add themselves after this, those of the function itself did before
        self._inside = {frame.name for frame in msg["cond_indep_stack"]}
        if msg["name"] in self.sampled:
            msg["value"], msg["done"], msg["stop"] = self.sampled[msg["name"]], True, True

    def _pyro_post_sample(self, msg: Any) -> None:
        # pyro.deterministic and pyro.factor draw nothing; what a reparametrisation leaves is a draw
        nothing = msg["infer"].get("_deterministic") or isinstance(msg["fn"], dist.Unit)
        if site_is_subsample(msg) or (msg["is_observed"] and nothing):
            return
        if any(f.dim and f.name not in self._inside for f in msg["cond_indep_stack"]):
            raise ValueError(
                f"The prior function of {self.name!r} samples {msg['name']!r}, which vectorised "
                f"particles would each have of their own. Use pyro_ngvi.BatchedELBO, or leave "
                f"vectorize_particles and parallel out."
            )
        self.sampled.setdefault(msg["name"], msg["value"])


def broadcasts_to(shape: torch.Size, target: torch.Size) -> bool:
    """Whether a tensor of that ``shape`` is broadcast to ``target`` as it stands."""
    try:
        return torch.broadcast_shapes(shape, target) == target
    except RuntimeError:
        return False


def over_rows(value: Tensor, event_dim: int) -> Tensor:
    """A latent value of particles (S, *event) as (S, 1, *event), to meet the rows of the data.

    ``pyro.infer.Predictive(parallel=True)`` leaves that dimension out; any other value stays as it is.
    """
    return value.unsqueeze(1) if value.dim() - event_dim == 1 else value


def run_vectorized(
    module: nn.Module, weights: Mapping[str, Tensor], inputs: Any
) -> tuple[Any, int]:
    """The output (*lead, M, ...) at weights (*lead, 1, *shape), and the length of ``lead``.

    The 1 is the place of the plate of the data; ``pyro.infer.Predictive(parallel=True)`` leaves it
    out. Weights without ``lead`` are shared.
    """
    batched, shared, lead = {}, {}, torch.Size()
    for name, w in weights.items():
        shape = module.get_parameter(name).shape
        own = w.shape[: w.dim() - len(shape)]
        own = own[:-1] if len(own) > 1 else own
        if own.numel() == 1:
            shared[name] = w.reshape(shape) if own else w
        else:
            batched[name], lead = w.reshape(own.numel(), *shape), own

    own_places = places(module, {name: module.get_parameter(name) for name in weights})

    def run(batched: dict[str, Tensor]) -> Any:
        here = {**batched, **shared}
        own = {place: here[name] for place, name in own_places.items()}
        return torch.func.functional_call(module, own, inputs, tie_weights=False)

    if not batched:
        return run({}), 0
    with stand_ins():
        output = torch.func.vmap(run, randomness="different")(batched)
    if isinstance(output, Tensor):
        output = output.reshape(lead + output.shape[1:])
    return output, len(lead)
