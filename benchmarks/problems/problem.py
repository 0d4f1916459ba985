"""What a problem of the zoo is: a Pyro model, its data, and what is known of its posterior."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

DATA_VARIABLE = "PYRO_NGVI_DATA"
FAMILIES: tuple[str, str] = ("full_rank", "mean_field")


class DataNotFound(FileNotFoundError):
    """A problem needs a data file that is not on this machine."""


def data_file(relative: str) -> Path:
    """The path of a data file below the directory that ``PYRO_NGVI_DATA`` names.

    Raises
    ------
    DataNotFound
        If the variable is unset or the file is absent.
    """
    root = os.environ.get(DATA_VARIABLE)
    if not root:
        raise DataNotFound(
            f"The data file {relative!r} is needed, and the environment variable {DATA_VARIABLE} "
            "is not set: set it to the directory that holds the data sets."
        )
    path = Path(root) / relative
    if not path.is_file():
        raise DataNotFound(
            f"The data file {relative!r} is not below {root!r} (from {DATA_VARIABLE}): "
            "point the variable at the directory that holds the data sets."
        )
    return path


@dataclass(frozen=True)
class Optimum:
    """The largest ELBO that a family reaches on a problem, in nats.

    ``error`` is 0 for closed forms and quadrature (right to all printed digits); for sample
    averages it is half the width of the bracket between an upper and a lower estimate.
    """

    elbo: float
    error: float = 0.0


@dataclass(frozen=True)
class Problem:
    """A model, its data, and the answers.

    Attributes
    ----------
    model, args
        ``model(*args)`` is a Pyro model that is correct called plainly, under
        :func:`torch.func.vmap` over conditioned latents, and under ``vectorize_particles=True``.
    dim
        Length of the unconstrained latent vector.
    optimum
        Best ELBO of a Gaussian in the unconstrained space, by family (``"full_rank"``,
        ``"mean_field"``); a family that is not there has no known optimum.
    mean, sd
        Reference posterior means and standard deviations in the constrained space, by name.
    load_draws
        Reads reference draws, where there are any; use :meth:`reference_draws`.
    exact_elbo
        ``(loc, scale_tril) -> nats``: the ELBO of a Gaussian by quadrature, where it is known.
    """

    name: str
    model: Callable[..., Any]
    args: tuple[Any, ...]
    dim: int
    optimum: Mapping[str, Optimum] = field(default_factory=dict)
    mean: Mapping[str, Tensor] = field(default_factory=dict)
    sd: Mapping[str, Tensor] = field(default_factory=dict)
    load_draws: Callable[[], dict[str, Tensor]] | None = None
    exact_elbo: Callable[[Tensor, Tensor], float] | None = None

    def reference_draws(self) -> dict[str, Tensor]:
        """Reference posterior draws by name, constrained, draws along the first axis.

        Raises
        ------
        LookupError
            If the problem has none.
        """
        if self.load_draws is None:
            raise LookupError(f"There are no reference draws for the problem {self.name!r}.")
        return self.load_draws()

    def to(self, *args: Any) -> "Problem":
        """The same problem with its floating-point data moved as by :meth:`torch.Tensor.to`."""

        def move(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            if value.is_floating_point():
                return value.to(*args)
            devices = [a for a in args if not isinstance(a, torch.dtype)]
            return value.to(*devices) if devices else value

        return replace(self, args=tuple(move(a) for a in self.args))
