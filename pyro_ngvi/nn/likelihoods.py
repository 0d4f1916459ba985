"""The distribution of ``y`` at the output of a module.

Each takes the output (*lead, M, ...), where ``lead`` counts the dimensions of vectorised particles,
and returns a distribution of batch shape (*lead, M): what follows the examples is one event.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

from ._refuse import refuse_other_than_pyro
from ._vectorized import broadcasts_to, over_rows

__all__ = ["Likelihood", "make_likelihood"]


class Likelihood:
    """A named likelihood, or one made of a function of the output."""

    #: latent sites that it samples itself, as far as they are known
    sites: tuple[str, ...] = ()

    def __call__(self, output: Tensor, lead: int) -> Any:
        """The distribution of y, of batch shape (*lead, M)."""
        raise NotImplementedError

    def cast(self, y: Tensor, dtype: torch.dtype, shape: torch.Size) -> Tensor:
        """``y`` as the distribution takes it; a last dimension of size 1 too many is dropped."""
        return y.squeeze(-1) if y.shape == (*shape, 1) else y


class _Categorical(Likelihood):
    def __call__(self, output: Tensor, lead: int) -> Any:
        return dist.Categorical(logits=output).to_event(max(0, output.dim() - lead - 2))

    def __str__(self) -> str:
        return '"categorical", classes from the last dimension of the output'


class _Bernoulli(Likelihood):
    def __call__(self, output: Tensor, lead: int) -> Any:
        logits = _without_last(output, lead)
        return dist.Bernoulli(logits=logits).to_event(logits.dim() - lead - 1)

    def cast(self, y: Tensor, dtype: torch.dtype, shape: torch.Size) -> Tensor:
        return super().cast(y, dtype, shape).to(dtype)

    def __str__(self) -> str:
        return '"bernoulli"'


class _Normal(_Bernoulli):
    """``noise`` is the sd, or a function that returns its prior."""

    def __init__(self, noise: float | Callable[[], Any] | None) -> None:
        self.noise = noise
        self.sites = () if isinstance(noise, float) else ("noise",)

    def __call__(self, output: Tensor, lead: int) -> Any:
        mean = _without_last(output, lead)
        event_dim = mean.dim() - lead - 1
        sd: Any = self.noise
        if not isinstance(sd, float):
            prior: Any = sd() if callable(sd) else dist.HalfCauchy(output.new_ones(()))
            wanted = "the prior of the sd; give a fixed sd as a number"
            refuse_other_than_pyro("The function noise", prior, f", {wanted}")
            sd = pyro.sample("noise", prior)
            _refuse_noise(prior, mean.shape[lead + 1 :], lead)
            # vectorised: (*lead, 1) before what is one event
            sd = over_rows(sd, prior.event_dim)
            split = sd.dim() - prior.event_dim
            ones = (1,) * (event_dim - prior.event_dim)
            sd = sd.reshape(sd.shape[:split] + ones + sd.shape[split:])
        return dist.Normal(mean, sd).to_event(event_dim)

    def __str__(self) -> str:
        return '"normal"'


class _Custom(Likelihood):
    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        self.function = function

    def __call__(self, output: Tensor, lead: int) -> Any:
        fn: Any = self.function(output)
        refuse_other_than_pyro(str(self), fn)
        return fn.to_event(max(0, len(fn.batch_shape) - lead - 1))

    def cast(self, y: Tensor, dtype: torch.dtype, shape: torch.Size) -> Tensor:
        return y

    def __str__(self) -> str:
        return f"the function {getattr(self.function, '__name__', type(self.function).__name__)}"


def _refuse_noise(prior: Any, outputs: torch.Size, lead: int) -> None:
    """Refuse a prior of the noise that is neither scalar nor one for each output of an example."""
    event, batch = prior.event_shape, prior.batch_shape
    one = lead > 0 or batch.numel() == 1  # in front are vectorised particles alone
    fits = not event or (len(event) == len(outputs) and broadcasts_to(event, outputs))
    if one and fits:
        return
    raise ValueError(
        f"The prior of the noise has batch shape {tuple(batch)} and event shape {tuple(event)}, an "
        f"example outputs of shape {tuple(outputs)}. Return a scalar prior, or one sd for each "
        "output as one event: dist.HalfCauchy(torch.ones(3)).to_event(1) for (3,)."
    )


def _without_last(output: Tensor, lead: int) -> Tensor:
    """An output (M, 1) as (M,): y of shape (M,) would be broadcast against it to (M, M)."""
    return output.squeeze(-1) if output.dim() - lead > 1 else output


def make_likelihood(
    likelihood: str | Callable[[Tensor], Any], noise: float | Callable[[], Any] | None
) -> Likelihood:
    """The likelihood that the user asks for.

    Raises:
        ValueError: for an unknown name, or a ``noise`` that is not positive or has no use.
        TypeError: for what is neither a name nor a function.
    """
    if noise is not None and likelihood != "normal":
        raise ValueError(f'noise belongs to likelihood="normal"; here it is {likelihood!r}.')
    if likelihood == "categorical":
        return _Categorical()
    if likelihood == "bernoulli":
        return _Bernoulli()
    if likelihood == "normal":
        return _Normal(_checked_noise(noise))
    if isinstance(likelihood, str):
        raise ValueError(
            f'likelihood is {likelihood!r}; it must be "categorical", "bernoulli", "normal" or a '
            f"function from the output of the module to a distribution."
        )
    if not callable(likelihood):
        raise TypeError(
            f"likelihood is a {type(likelihood).__name__}; give a name or a function from the output "
            f"of the module to a distribution."
        )
    return _Custom(likelihood)


def _checked_noise(noise: Any) -> Any:
    if noise is None or (
        callable(noise) and not isinstance(noise, torch.distributions.Distribution)
    ):
        return noise
    if isinstance(noise, bool) or not isinstance(noise, int | float):
        raise TypeError(
            f"noise is {noise!r}; give the sd as a number, or a function that returns the prior of "
            f"the sd, for instance lambda: dist.HalfNormal(1.0)."
        )
    if not 0.0 < noise < math.inf:
        raise ValueError(f"noise is {noise}; an sd must be positive and finite.")
    return float(noise)
