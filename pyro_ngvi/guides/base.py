"""The part that all our guides share: Pyro's ``AutoContinuous`` around a family."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from pyro.infer.autoguide import AutoContinuous
from pyro.infer.autoguide.initialization import init_to_median
from torch import Tensor, nn

from .._pyro_adapter import claim_name, module_name, rename
from ..families.base import Family, Tensors
from .posterior import FamilyDistribution
from .warm_start import find_mode

__all__ = ["AutoFamily", "find_blocks"]


class AutoFamily(AutoContinuous):
    """A guide whose flat latent vector follows a :class:`~pyro_ngvi.families.Family`.

    Subclasses name their family; everything else is here.  The parameters are plain tensors in the
    coordinates of the family, so any optimizer may train them; the natural-gradient optimizers find
    them through :func:`find_blocks`.

    Args:
        model: a Pyro model whose latent sites are all continuous and of fixed size.
        init_loc_fn: a Pyro initialisation strategy for the location.
        init_scale: standard deviation of every unconstrained latent variable at the start.
        sticking_the_landing: evaluate log q at detached parameters (on by default; see
            :class:`~pyro_ngvi.guides.posterior.FamilyDistribution`).  Turn it off to get the plain
            reparameterised gradient.
        init: ``None``, or ``"map"`` to move the location to the posterior mode by L-BFGS first.
        name: name of the guide in Pyro's parameter store.  By default a name that no other guide
            of the process has, so that two guides never share parameters by accident.

    Raises:
        ValueError: at the first call, for a latent site that is discrete or inside a subsampled
            plate, or a model without latent sites.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        *,
        init_loc_fn: Callable[..., Any] = init_to_median,
        init_scale: float = 0.1,
        sticking_the_landing: bool = True,
        init: str | None = None,
        name: str | None = None,
    ) -> None:
        if not isinstance(init_scale, int | float) or not 0.0 < init_scale < float("inf"):
            raise ValueError(f"init_scale must be a positive number, got {init_scale!r}.")
        if init not in (None, "map"):
            raise ValueError(f'init must be None or "map", got {init!r}.')
        super().__init__(model, init_loc_fn=init_loc_fn)
        rename(self, claim_name(type(self).__name__) if name is None else name)
        self.family = self._make_family()
        self.init_scale = float(init_scale)
        self.sticking_the_landing = sticking_the_landing
        self.init = init

    def _make_family(self) -> Family:
        raise NotImplementedError

    def _setup_prototype(self, *args: Any, **kwargs: Any) -> None:
        with torch.no_grad():
            self._setup_latents(*args, **kwargs)
        loc = self._init_loc()
        if not torch.isfinite(loc).all():
            bad = [site["name"] for site, value in self._unpack_latent(loc) if not_finite(value)]
            raise ValueError(
                f"{type(self).__name__}: init_loc_fn gives a starting point that is not finite at "
                f"site(s) {', '.join(map(repr, bad))}. Pass another one, for instance "
                f"init_loc_fn=pyro.infer.autoguide.init_to_feasible."
            )
        if self.init == "map":
            loc = find_mode(self.model, loc, args, kwargs)
        for key, value in self.family.init(loc, self.init_scale).items():
            setattr(self, key, nn.Parameter(value))

    def _setup_latents(self, *args: Any, **kwargs: Any) -> None:
        guide = type(self).__name__
        try:
            super()._setup_prototype(*args, **kwargs)
        except RuntimeError as error:
            if "found no latent variables" not in str(error):
                raise
            raise ValueError(
                f"{guide}: the model has no latent site, so there is nothing to infer. Every "
                f"pyro.sample of it is observed, enumerated or hidden from the guide."
            ) from error
        except NotImplementedError as error:
            if "support" not in str(error) and "transform" not in str(error):
                raise
            raise ValueError(
                f"{guide}: {error}. The guide is a density over R^d: marginalise a discrete site by "
                f"config_enumerate with TraceEnum_ELBO and hide it from the guide by poutine.block, "
                f"or leave it to another guide of an AutoGuideList."
            ) from error
        assert self.prototype_trace is not None
        for name, site in self.prototype_trace.iter_stochastic_nodes():
            for frame in site["cond_indep_stack"]:
                full = frame.full_size
                if full is not None and full != frame.size:
                    raise ValueError(
                        f"{guide}: latent site {name!r} lies in the subsampled plate "
                        f"{frame.name!r} ({frame.size} of {full}). A joint guide would need all "
                        f"{full} values at every step. Use the plate without subsample_size, or "
                        f"give this site to pyro.infer.autoguide.AutoNormal(create_plates=...) in "
                        f"an AutoGuideList."
                    )

    def natural_params(self) -> dict[str, nn.Parameter]:
        """The tensors of the family, by name; empty before the first call."""
        own = dict(self.named_parameters(recurse=False))
        return {name: own[name] for name in self.family.names if name in own}

    def _current(self) -> Tensors:
        # attribute access registers the parameters with Pyro
        return {name: getattr(self, name) for name in self.family.names}

    def get_posterior(self, *args: Any, **kwargs: Any) -> FamilyDistribution:
        """q as a distribution over the flat, unconstrained latent vector (d,)."""
        self._require_setup()
        return FamilyDistribution(
            self.family, self._current(), sticking_the_landing=self.sticking_the_landing
        )

    def _loc_scale(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self._require_setup()
        params = self._current()
        return params["loc"], self.family.stddev(params)

    def _require_setup(self) -> None:
        if self.prototype_trace is None:
            raise RuntimeError(
                f"{type(self).__name__} does not know the model's sites yet: call it once with the "
                f"arguments of the model, or take a step of SVI."
            )

    def site_of(self, index: int) -> str:
        """Name of the latent site that holds entry ``index`` of the flat latent vector."""
        self._require_setup()
        end = 0
        for name, shape in self._unconstrained_shapes.items():
            end += shape.numel()
            if index < end:
                return name
        raise IndexError(f"The latent vector has {end} entries, there is no entry {index}.")

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # a copy in the process of its original gets parameters of its own
        rename(self, claim_name(module_name(self)))


def not_finite(value: Tensor) -> bool:
    return not bool(torch.isfinite(value).all())


def find_blocks(guide: Any) -> Iterator[tuple[str, AutoFamily]]:
    """Our guides within ``guide``: itself, or its parts, each with its path ("" for itself)."""
    if not isinstance(guide, nn.Module):
        return
    for path, module in guide.named_modules():
        if isinstance(module, AutoFamily):
            yield path, module
