"""The dense algebra of AutoSites: any jointly Gaussian block, by its white noise.

Formulas: :mod:`pyro_ngvi.sites.dense`.  Not for many thousands of latent variables *and* data: it keeps
min(D, N k)^2 numbers.
"""

from __future__ import annotations

import pyro
import torch
from torch import Tensor

from .algebra import Algebra, View
from .bound_model import BoundModel, moves
from .conditioned_model import for_each
from .dense import GaussianPotential, NoisePosterior, WhitePosterior, reduced
from .new_inputs import KnownInputs, draw_jointly, spread
from .structure import LinearMap, ModelStructure

__all__ = ["DenseAlgebra"]


class DenseAlgebra(Algebra):
    """White noise eps (D,), or the R directions of it that the data see (``basis`` (D, R))."""

    basis: Tensor | None

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
                f"of {self.basis.shape[0]} latent variables, so it cannot take minibatches. Begin "
                f"with a minibatch."
            )
        self.known.follow(call)
        at_probe = call.at_probe.values()
        view = self._view.get(tensors=at_probe)
        if view is None:
            view = self._reduced_view(call.linear_maps())
            self._view.put(None if view.learns else view, tensors=[f.detach() for f in at_probe])
        return view

    def make_room(self, plan: ModelStructure) -> None:
        """The directions that data see become all, where data see them all."""
        basis, rows = self.basis, sum(g.size * g.width for g in plan.groups)
        if basis is None or rows < plan.dim:
            return
        e = self.evidence
        self.basis = None
        self._view.put(None)
        self.evidence = GaussianPotential(
            e.constant, basis @ e.linear, basis @ e.precision @ basis.mT
        )

    def _reduced_view(self, maps: dict[str, LinearMap]) -> View:
        if self.basis is None:
            return View(maps)
        smaller, basis = reduced(maps)
        assert basis is not None
        self.basis = basis.detach()
        return View(smaller)

    def posterior(self, view: View | None, evidence: GaussianPotential) -> WhitePosterior:
        return WhitePosterior(evidence)

    def sample(self, call: BoundModel, name: str) -> dict[str, tuple[Tensor, Tensor]]:
        q = self._noise_posterior()
        if self.known.moved(call.block):
            mean, root = self.known.joint(call, q, self.linear)
            return draw_jointly(call, name + "_noise", mean, root)
        noise = pyro.sample(name + "_noise", q, infer={"is_auxiliary": True})
        lead = noise.shape[:-1]
        if not lead:
            return call.block_at(noise)
        batched = for_each(call.block_at, noise.reshape(-1, noise.shape[-1]))
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
        return call.flat_block(q.mean), moves(call.flat_block, q.root())
