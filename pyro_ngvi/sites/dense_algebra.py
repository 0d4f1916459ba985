"""The dense algebra of AutoSites: any jointly Gaussian block, by its white noise.

Formulas: :mod:`pyro_ngvi.sites.dense`.  Not for many thousands of latent variables *and* data: it keeps
min(D, N k)^2 numbers.
"""

from __future__ import annotations

from collections.abc import Mapping

import pyro
import torch
from torch import Tensor

from ..linalg.host_bool import at_hand
from .algebra import Algebra, View
from .bound_model import BoundModel
from .conditioned_model import for_each
from .dense import GaussianPotential, NoisePosterior, WhitePosterior, reduced
from .new_inputs import KnownInputs, split_draw, spread, white_noise
from .structure import LinearMap, ModelStructure

__all__ = ["DenseAlgebra"]


class DenseAlgebra(Algebra):
    """White noise eps (D,), or the R directions of it that the data see (``basis`` (D, R))."""

    basis: Tensor | None
    #: the predictors at the probe of the call for which ``_view`` was made
    _cached: dict[str, Tensor] | None = None
    _view: View | None = None

    def __init__(self, plan: ModelStructure, call: BoundModel) -> None:
        rows = sum(group.size * group.width for group in plan.groups)
        size = min(plan.dim, rows) if call.whole else plan.dim
        super().__init__(GaussianPotential.none(plan.zero(), size))
        basis = None
        if size < plan.dim:
            basis = torch.eye(plan.dim, size, dtype=plan.dtype, device=plan.device)
        self.register_buffer("basis", basis)
        #: where Gaussian processes of the block are at the data
        self.known = KnownInputs(call)

    def view(self, call: BoundModel) -> View:
        """Maps made by running the model, or those of the last call where they still hold.

        That they hold is tried at one random point, wherever the host can look without waiting: bit
        for bit, since a small column of covariates hides behind a large one from any tolerance.
        """
        if self.basis is not None and not call.whole:
            raise ValueError(
                f"AutoSites: the guide began with all data and keeps {self.basis.shape[1]} directions "
                f"of {self.basis.shape[0]} latent variables, so it can not take minibatches. Begin "
                f"with a minibatch."
            )
        self.known.follow(call)
        if self._cached is None or not self._still_hold(self._cached, call):
            maps = call.linear_maps()
            self._cached = None
            view = self._reduced_view(maps)
            if view.learns:
                return view
            self._cached = {name: f.detach() for name, f in call.at_probe.items()}
            self._view = view
        assert self._view is not None
        return self._view

    def _reduced_view(self, maps: dict[str, LinearMap]) -> View:
        if self.basis is None:
            return View(maps)
        smaller, basis = reduced(maps)
        assert basis is not None
        self.basis = basis.detach()
        return View(smaller)

    @staticmethod
    def _still_hold(cached: Mapping[str, Tensor], call: BoundModel) -> bool:
        for name, before in cached.items():
            seen = call.at_probe[name]
            if seen.requires_grad or seen.dtype != before.dtype:
                return False
            if not (at_hand(seen) and at_hand(before) and torch.equal(seen, before)):
                return False
        return True

    def posterior(self, view: View | None, evidence: GaussianPotential) -> WhitePosterior:
        return WhitePosterior(evidence)

    def sample(self, call: BoundModel, name: str) -> dict[str, tuple[Tensor, Tensor]]:
        q = self._noise_posterior()
        if self.known.moved(call.block):
            mean, root = self.known.joint(call, q, self.linear)
            noise = pyro.sample(name + "_noise", white_noise(mean), infer={"is_auxiliary": True})
            return split_draw(call, mean, root, noise)
        noise = pyro.sample(name + "_noise", q, infer={"is_auxiliary": True})
        lead = noise.shape[:-1]

        def values(noise: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
            return call.block_at(noise)

        if not lead:
            return values(noise)
        batched = for_each(values, noise.reshape(-1, noise.shape[-1]))
        return {
            site: (spread(z, lead, call.plan.event_dims[site]), spread(log_q, lead, 0))
            for site, (z, log_q) in batched.items()
        }

    def _noise_posterior(self) -> NoisePosterior:
        return NoisePosterior(self.posterior(None, self.evidence), self.basis)

    def mean_and_sd(self, call: BoundModel) -> tuple[Tensor, Tensor]:
        if self.known.moved(call.block):
            found = self.known.variances(call, self._noise_posterior())
            if found is not None:
                return found[0], found[1].sqrt()
        return super().mean_and_sd(call)

    def moments(self, call: BoundModel) -> tuple[Tensor, Tensor]:
        q = self._noise_posterior()
        if self.known.moved(call.block):
            mean, root = self.known.joint(call, q, self.linear)
            return mean, root.mT

        return call.flat_block(q.mean), call.moves_of_block(q.root())
