"""Pyro's Gaussian guides as members of our families, whose Fisher matrices are known."""

from __future__ import annotations

from operator import attrgetter, is_
from typing import Any

import torch
from pyro import infer
from pyro.infer import autoguide
from torch import Tensor, nn

from ..families import FactorNormal, FullRankNormal, MeanFieldNormal
from ..losses import BatchedELBO
from ..optim.blocks import HoldsIterate
from ..runtime.density import LatentLayout
from ..runtime.model_density import ModelDensity

#: guides that have a twin
GUIDES = (
    autoguide.AutoNormal,
    autoguide.AutoDiagonalNormal,
    autoguide.AutoMultivariateNormal,
    autoguide.AutoLowRankMultivariateNormal,
)
_NAMES = "Trace_ELBO", "TraceEnum_ELBO", "TraceGraph_ELBO"
#: losses whose expectation is the negative ELBO; TraceMeanField_ELBO has another one with AutoNormal,
#: where a support is constrained
ELBOS = {BatchedELBO, *(getattr(infer, kind + name) for kind in ("", "Jit") for name in _NAMES)}


def has_twin(guide: Any, loss: Any) -> bool:
    """Whether the guide is one of Pyro's Gaussians, and the loss the ELBO."""
    return type(guide) in GUIDES and type(loss) in ELBOS and getattr(loss, "kl_weight", 1.0) == 1.0


class Twin(HoldsIterate):
    """What a guide of Pyro's that :func:`has_twin` holds, in a family of ours: a block for
    :class:`GapMeter`, if it ``fits``: all entries of the guide are trained, and of the model here;
    ``subsamples``: whether it draws minibatches."""

    def __init__(self, guide: Any, model: Any, args: Any, kwargs: Any, particles: int) -> None:
        self._model, self._args, self._particles = model, args, particles
        self._density = ModelDensity(model, args, kwargs)
        self.family, held = _held(guide, self._density.layout)
        self._params = {name: nn.Parameter(x.detach().clone()) for name, x in held.items()}
        sites = [name for name, _ in guide.prototype_trace.iter_stochastic_nodes()]
        same = sites == [*self._density.layout.transforms]
        trained = all(p.requires_grad for p in guide.parameters())
        self.fits = same and trained and self._params["loc"].shape == (self._density.dim,)
        self.subsamples = self.fits and bool(self._density.trace(held["loc"].unsqueeze(0)).indices)

    def natural_params(self) -> dict[str, nn.Parameter]:
        """The parameters, by name."""
        return self._params

    _current = natural_params

    def gradient(self, *args: Any, **kwargs: Any) -> None:
        """That of the negative ELBO at arguments of the model, by the path of the draws alone."""
        same = len(args) == len(self._args) and all(map(is_, args, self._args))
        density = self._density if same else ModelDensity(self._model, args, kwargs)
        z = self.family.centred_draw(self._params, torch.Size([self._particles]))
        fixed = {name: p.detach() for name, p in self._params.items()}
        loss = (self.family.log_prob(fixed, z) - density(z)).mean()
        found = torch.autograd.grad(loss, [*self._params.values()])
        for p, g in zip(self._params.values(), found, strict=True):
            p.grad = g


def _held(guide: Any, layout: LatentLayout) -> tuple[Any, dict[str, Tensor]]:
    """Family and parameters of what a guide holds."""
    kind = type(guide)
    if kind is autoguide.AutoNormal:
        loc, scale = (
            torch.cat([attrgetter(name)(values).reshape(-1) for name in layout.transforms])
            for values in (guide.locs, guide.scales)
        )
    else:
        loc, scale = guide.loc, guide.scale
    if kind is autoguide.AutoMultivariateNormal:
        return FullRankNormal(), {"loc": loc, "scale_tril": scale[:, None] * guide.scale_tril}
    if kind is autoguide.AutoLowRankMultivariateNormal:
        factor = scale[:, None] * guide.cov_factor
        held = {"loc": loc, "factor": factor, "log_scale": scale.log()}
        return FactorNormal(factor.shape[1]), held
    return MeanFieldNormal(), {"loc": loc, "log_scale": scale.log()}
