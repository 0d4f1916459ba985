r"""State-space algebra: a block of states s_1, ..., s_T with a Gauss-Markov prior, in O(T).

Datum t sees state t, f_t = H_t s_t + b_t, so that sites become Gaussian factors of single states,

    h_t = H_t'(nu_t - Lambda_t b_t),  P_t = H_t' Lambda_t H_t,  c = sum nu_t'b_t - b_t'Lambda_t b_t / 2,

and q is a Gauss-Markov chain again (:func:`pyro_ngvi.sites.state_space.chain_posterior`).  Times
without data are data that are NaN, or masked.
"""

from __future__ import annotations

from typing import Any

import pyro
import torch
from torch import Tensor

from ..linalg.products import matvec
from .algebra import Algebra, View
from .bound_model import BoundModel, affine_maps
from .conditioned_model import for_each
from .dense import GaussianPotential
from .probe_points import digit_masks
from .state_space import ChainPosterior, chain_posterior
from .structure import LinearMap, ModelStructure

__all__ = ["ChainAlgebra"]


class _Smoothed:
    """q, with the constant of the sites."""

    def __init__(self, chain: ChainPosterior, constant: Tensor) -> None:
        self.chain = chain
        self.log_normalizer = chain.log_normalizer + constant
        self.proper = chain.proper

    def marginals(self, at: LinearMap) -> tuple[Tensor, Tensor]:
        H, q = at.design, self.chain
        mean = matvec(H, q.mean) + at.offset
        return mean, H @ q.covariance @ H.mT


class ChainAlgebra(Algebra):
    """Evidence of single states: h (T, S) and P (T, S, S).

    Raises:
        ValueError: where the predictor of datum t depends on other states than s_t, or there are not
            as many data as states; at a call with a minibatch.
    """

    def __init__(self, plan: ModelStructure, call: BoundModel) -> None:
        ((name, shape),) = plan.shapes.items()
        if len(shape) != 2:
            raise ValueError(
                f"AutoSites: the state-space site {name!r} has shape {tuple(shape)}, several chains of "
                f"states. Here it is one chain: make a guide for each, in a loop over the series."
            )
        T, S = shape
        super().__init__(GaussianPotential.none(plan.zero(), T, S))
        for group in plan.groups:
            if tuple(group.batch) != (T,):
                raise ValueError(
                    f"AutoSites: {group.name!r} has data of shape {tuple(group.batch)}, and the "
                    f"prior {name!r} has {T} states. A state-space prior takes a datum per state, "
                    "in order: make times without a datum NaN, and several data at a time one "
                    "MultivariateNormal."
                )
        _refuse_minibatch(call)
        self._check_local(plan, call)

    @staticmethod
    def _check_local(plan: ModelStructure, call: BoundModel) -> None:
        """Move the states whose number has a certain binary digit; the f of the others must stay."""
        (shape,) = plan.shapes.values()
        moved = digit_masks(shape[0], plan.device)
        states = call.probe.reshape(shape)

        def predictors(moved: Tensor) -> dict[str, Tensor]:
            noise = torch.where(moved.unsqueeze(-1), states, torch.zeros_like(states))
            return call.predictors(noise.reshape(-1))

        still = predictors(torch.zeros_like(moved[0]))
        for name, f in for_each(predictors, moved, 8).items():
            if not torch.equal(f[~moved], still[name].expand_as(f)[~moved]):
                raise ValueError(
                    f"AutoSites: the predictor of datum t of {name!r} depends on other states than "
                    f"that of time t. Put what it needs into the state, or write the prior as a "
                    f"MultivariateNormal for the dense algebra."
                )

    def view(self, call: BoundModel) -> View:
        """H and b, by running the model at the unit vectors of a state, at all times at once."""
        _refuse_minibatch(call)
        plan = call.plan
        (prior,) = call.block.values()
        T, S = prior.event_shape
        units = torch.eye(S, dtype=plan.dtype, device=plan.device)

        def predictors(state: Tensor) -> dict[str, Tensor]:
            return call.predictors(state.expand(T, S).reshape(-1))

        maps = affine_maps(predictors, units)
        view = View(maps, prior)
        last = self._view.get(tensors=view.tensors)
        if last is None:
            self._view.put(None if view.learns else view, tensors=view.tensors)
        return last or view

    @staticmethod
    def of_group(at: LinearMap, linear: Tensor, precision: Tensor) -> GaussianPotential:
        weighted = matvec(precision, at.offset)
        return GaussianPotential(
            (linear * at.offset - 0.5 * weighted * at.offset).sum(),
            matvec(at.design.mT, linear - weighted),
            at.design.mT @ precision @ at.design,
        )

    def posterior(self, view: View | None, evidence: GaussianPotential) -> _Smoothed:
        assert view is not None
        chain = chain_posterior(view.prior, evidence.linear, evidence.precision)
        return _Smoothed(chain, evidence.constant)

    def _chain(self, call: BoundModel) -> ChainPosterior:
        (prior,) = call.block.values()
        if prior.event_shape != self.linear.shape:
            raise ValueError(
                f"AutoSites: the state-space prior has {prior.event_shape[0]} states in this call, and "
                f"the guide knows of {len(self.linear)}. To predict, make the chain longer from the "
                f"start, with NaN for the data that are not there yet."
            )
        return chain_posterior(prior, self.linear, self.precision)

    def sample(self, call: BoundModel, name: str) -> dict[str, tuple[Tensor, Tensor]]:
        (site,) = call.plan.shapes
        q = self._chain(call).posterior()
        states = pyro.sample(name + "_noise", q, infer={"is_auxiliary": True})
        return {
            site: (states, torch.zeros(states.shape[:-2], dtype=states.dtype, device=states.device))
        }

    def mean_and_sd(self, call: BoundModel) -> tuple[Tensor, Tensor]:
        q = self._chain(call)
        variance = q.covariance.diagonal(dim1=-2, dim2=-1)
        return q.mean.reshape(-1), variance.sqrt().reshape(-1)

    def distribution(self, call: BoundModel) -> Any:
        return self._chain(call).posterior()


def _refuse_minibatch(call: BoundModel) -> None:
    if not call.whole:
        raise ValueError("AutoSites: a state-space prior takes all data, not a minibatch.")
