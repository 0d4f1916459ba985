"""Run a Pyro program with values put in: plainly, or once under ``torch.func.vmap`` for S particles.

Three things a Pyro program does cannot happen inside ``vmap`` and are moved out of it here:

* creating a parameter: the program is run once without ``vmap`` and then again with it;
* drawing a minibatch: it is drawn outside and shared by all particles;
* filling a tensor with random numbers in place, as ``torch.distributions`` does.
"""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, Literal, TypeAlias, TypeVar

import pyro
import torch
from pyro.distributions import ImproperUniform
from pyro.poutine.messenger import Messenger
from pyro.poutine.util import site_is_subsample
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from ..linalg.host import own_random_state, random_states, set_random_states
from .density import Site, Sites, feasible_value, innermost, is_latent, is_minibatch
from .stand_ins import stand_ins

T = TypeVar("T")
Program: TypeAlias = Callable[..., Any]
Args: TypeAlias = tuple[Any, ...]
Kwargs: TypeAlias = Mapping[str, Any]
Values: TypeAlias = Mapping[str, Tensor]
Randomness = Literal["same", "different", "error"]


class CannotBatch(RuntimeError):
    """A program cannot run under ``torch.func.vmap``; ``where`` it stopped."""

    def __init__(self, where: str, reason: str, singular: bool = False) -> None:
        advice = (
            "Keep latent values in torch (no .item(), if or NumPy) and out of in-place writes, or use "
            "pyro.infer.Trace_ELBO."
        )
        if "inplace randomness" in reason:
            reason = "it draws numbers itself, as at a site that poutine.block hides"
            advice = "Inside of the block, give such a site a value by poutine.condition."
        super().__init__(
            f"A matrix of the program cannot be factored or inverted at one of the draws ({where}). "
            f"Add more to its diagonal, or take float64."
            if singular
            else f"The program cannot run under torch.func.vmap ({where}): {reason}. {advice}"
        )
        self.where = where


class _Missing(Exception):
    """Something that has to be made outside ``vmap``: a parameter, or a minibatch of a plate."""

    def __init__(self, name: str, subsample: Any = None) -> None:
        super().__init__(name, subsample and _sizes(subsample))
        self.subsample = subsample


class Minibatches(dict[str, Tensor]):
    """The index (n,) of each subsampled plate, shared by the particles, and how to redraw it."""

    def __init__(self, fixed: Values | None = None) -> None:
        super().__init__(fixed or {})
        self._subsamples: dict[str, Any] = {}
        self._before: dict[str, list[Tensor]] = {}

    def fits(self, name: str, subsample: Any) -> bool:
        """Whether there is an index for ``name`` that is a draw from ``subsample``."""
        if name in self and name not in self._subsamples:  # given by the caller
            return len(self[name]) == subsample.subsample_size
        return name in self and _sizes(self._subsamples[name]) == _sizes(subsample)

    def draw(self, name: str, subsample: Any) -> Tensor:
        """Draw the index of the plate ``name`` and remember how.

        One that was redrawn in another size is drawn again from the same random state: a run that goes
        on from a file knows of no other.
        """
        self._subsamples[name] = subsample
        before = self._before.pop(name, None)
        with nullcontext() if before is None else own_random_state():
            if before is not None:
                set_random_states(before)
            self[name] = subsample()
        return self[name]

    def redraw(self) -> None:
        """Draw a new index for every plate that was drawn before."""
        for name, subsample in self._subsamples.items():
            self._before[name] = random_states()
            self[name] = subsample()


def _sizes(subsample: Any) -> tuple[int, int]:
    return subsample.size, subsample.subsample_size


class Conditioned(Messenger):
    """Fixes latent sites and minibatches, which stay latent; records sample sites and parameters.

    What is deterministic gives way to a value of its name.  A minibatch that the program itself passes
    (``plate(..., subsample=index)``) is never replaced.

    Args:
        values: value by site; for a plate's name, its minibatch.
        minibatches: those of subsampled plates to which ``values`` gives none.
        in_vmap: raise :class:`_Missing` where a parameter or a minibatch has to be made.
    """

    def __init__(self, values: Values, minibatches: Minibatches, in_vmap: bool = False) -> None:
        super().__init__()
        self.values, self.minibatches, self.in_vmap = values, minibatches, in_vmap
        self.sites: Sites = {}
        self.params: dict[str, Tensor] = {}

    def _pyro_sample(self, msg: Site) -> None:
        name, fn, of_plate = msg["name"], msg["fn"], site_is_subsample(msg)
        if name in self.values and (msg["infer"] or {}).get("_deterministic"):
            msg["value"] = self.values[name]
        if msg["is_observed"] or (of_plate and msg["value"] is not None):
            return
        if name in self.values:
            msg["value"] = self.values[name]
            msg["done"] = True
        elif of_plate and (fn.subsample_size or fn.size) < fn.size:
            if self.minibatches.fits(name, fn):
                msg["value"] = self.minibatches[name]
            elif self.in_vmap:
                raise _Missing(name, fn)
            else:
                msg["value"] = self.minibatches.draw(name, fn)

    def _pyro_post_sample(self, msg: Site) -> None:
        name = msg["name"]
        if name in self.sites:
            raise ValueError(f"Two sample sites have the name {name!r}; rename one of them.")
        self.sites[name] = msg.copy()

    def _pyro_param(self, msg: Site) -> None:
        new = msg["value"] is None and msg["name"] not in pyro.get_param_store()
        # Modules with local parameters made them before, and keep them out of the store.
        if self.in_vmap and new and not pyro.settings.get("module_local_params"):
            raise _Missing(msg["name"])

    def _pyro_post_param(self, msg: Any) -> None:
        self.params[msg["name"]] = msg["value"]


class _BatchedSamplers(TorchFunctionMode):
    """Draws out of place where samplers fill a tensor with random numbers, the same for all particles.

    The tensor that should have been filled becomes NaN, which finds out code that goes on to use it.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.clamp_:  # of gamma variates; it has no batching rule
            return args[0].copy_(torch.clamp(*args, **kwargs))
        fill = _FILLS.get(func)
        if fill is None:
            return func(*args, **kwargs)
        drawn = fill(*args, **kwargs)
        args[0].fill_(float("nan"))
        return drawn


def _uniform(x: Tensor, low: float = 0.0, high: float = 1.0) -> Tensor:
    # rand_like may return 0, where an inverse distribution function is infinite.
    u = torch.rand_like(x).clamp_min(torch.finfo(x.dtype).tiny)
    return low + (high - low) * u


_FILLS: dict[Any, Callable[..., Tensor]] = {
    torch.Tensor.normal_: lambda x, mean=0.0, std=1.0: mean + std * torch.randn_like(x),
    torch.Tensor.uniform_: _uniform,
    torch.Tensor.exponential_: lambda x, lambd=1.0: -_uniform(x).log() / lambd,
    torch.Tensor.cauchy_: lambda x, median=0.0, sigma=1.0: (
        median + sigma * (torch.pi * (_uniform(x) - 0.5)).tan()
    ),
}


def run_particles(
    program: Program,
    reduce: Callable[[Sites], T],
    values: Values,
    num_particles: int,
    args: Args,
    kwargs: Kwargs,
    *,
    minibatches: Minibatches,
    shared: Values | None = None,
    randomness: Randomness = "different",
    sampling: bool = False,
    chunk_size: int | None = None,
) -> T:
    """Run ``program`` under ``vmap`` over particles and return ``reduce(sites)``, batched.

    Args:
        program: a model or a guide.
        reduce: maps the recorded sites of one particle to a pytree of tensors.
        values: constrained value by site, (S, ...).
        minibatches: those of subsampled plates; what is missing is drawn and added.
        shared: further values by site, which have no particle dimension.
        sampling: whether the program draws sites itself (every torch call is then slower).

    Raises:
        CannotBatch: when the program cannot run under ``vmap``.
    """
    sites: Sites = {}

    def body(values: dict[str, Tensor], _: Tensor) -> T:
        nonlocal sites
        handler = Conditioned({**values, **(shared or {})}, minibatches, in_vmap=True)
        sites = handler.sites
        with handler:
            program(*args, **kwargs)
        return reduce(sites)

    def plain_run() -> Sites:
        """The first particle without ``vmap``, which creates parameters."""
        with pyro.poutine.block():
            return look(program, at_particle(0, values, shared), args, kwargs, minibatches)

    batched = torch.func.vmap(body, randomness=randomness, chunk_size=chunk_size)
    inputs = (dict(values), torch.empty(num_particles, device="cpu"))
    made: set[tuple[Any, ...]] = set()
    while True:
        try:
            # validation branches on tensors
            with (
                pyro.validation_enabled(False),
                stand_ins(),
                _BatchedSamplers() if sampling else nullcontext(),
            ):
                return batched(*inputs)
        except _Missing as need:
            name = need.args[0]
            if need.args in made:
                raise RuntimeError(
                    f"{name!r} changes between two runs of the same model; parameters and the "
                    f"sizes of subsampled plates must not be random."
                ) from need
            made.add(need.args)
            if need.subsample is None:
                plain_run()
            else:
                minibatches.draw(name, need.subsample)
        except RuntimeError as error:
            where = f"the last site it reached is {list(sites)[-1]!r}" if sites else "at its start"
            try:
                plain = plain_run()
                following = [name for name in plain if name not in sites]
                where += f", on the way to {following[0]!r}" if following else ""
                if not sampling:
                    reduce(plain)
            except ValueError as refused:
                if not sampling:  # a site that the caller refuses may be what cannot run
                    raise refused from error
            except Exception:  # of a program that is wrong without vmap too
                pass
            where = next(iter(getattr(error, "__notes__", ())), where)
            reason = next(iter(str(error).splitlines()), type(error).__name__).rstrip(". ")
            singular = isinstance(error, torch.linalg.LinAlgError)  # pyright: ignore
            raise CannotBatch(where, reason, singular) from error


def run_in_loop(
    program: Program,
    reduce: Callable[[Sites], Any],
    values: Values,
    num_particles: int,
    args: Args,
    kwargs: Kwargs,
    *,
    minibatches: Minibatches,
    shared: Values | None = None,
) -> Any:
    """As :func:`run_particles`, one after the other, without ``vmap``, and validated as Pyro is set."""

    def one(s: int) -> Any:
        at = at_particle(s, values, shared)
        return reduce(run_plainly(program, at, args, kwargs, minibatches))

    return tree_map(lambda *x: torch.stack(x), *map(one, range(num_particles)))


class FlatPriors(Messenger):
    """Puts a point of the support in the place of a draw that there is not."""

    def _pyro_sample(self, msg: Site) -> None:
        if msg["value"] is None and isinstance(innermost(msg["fn"]), ImproperUniform):
            msg["value"], msg["done"] = feasible_value(msg), True


def at_particle(s: int, values: Values, shared: Values | None) -> dict[str, Tensor]:
    """What particle number ``s`` has: its own of ``values`` (S, ...), and what is ``shared``."""
    return {name: value[s] for name, value in values.items()} | dict(shared or {})


def run_plainly(
    program: Program, values: Values, args: Args, kwargs: Kwargs, minibatches: Minibatches
) -> Sites:
    """Run one particle without ``vmap``, which creates parameters, and return its sites."""
    with Conditioned(values, minibatches) as handler:
        program(*args, **kwargs)
    return handler.sites


def look(
    program: Program,
    values: Values,
    args: Args = (),
    kwargs: Kwargs | None = None,
    minibatches: Minibatches | None = None,
) -> Sites:
    """As :func:`run_plainly`, without a graph and with the random state put back at the end; flat
    priors, which have no draws, are at a point of their support."""
    drawn = Minibatches() if minibatches is None else minibatches
    with torch.no_grad(), own_random_state(), FlatPriors():
        return run_plainly(program, values, args, kwargs or {}, drawn)


def run_both(
    model: Program, guide: Program, args: Args, kwargs: Kwargs, minibatches: Minibatches
) -> tuple[Conditioned, Conditioned]:
    """One plain run of a guide, and of its model at the draw: the handlers, guide's and model's.

    They hold what they saw; the model's ``values`` are the guide's latent sites and minibatches.
    """
    with Conditioned({}, minibatches) as of_guide:
        guide(*args, **kwargs)
    drawn = {
        name: torch.as_tensor(site["value"])
        for name, site in of_guide.sites.items()
        if is_minibatch(site) or is_latent(site)
    }
    with Conditioned(drawn, minibatches) as of_model:
        model(*args, **kwargs)
    return of_guide, of_model
