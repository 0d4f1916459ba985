"""What an AutoSites guide says of its latent functions at any inputs, without draws."""

from __future__ import annotations

from typing import Any

import pyro
import torch
from torch import Tensor

from ..distributions.gaussian_process import GaussianProcess
from ..linalg.host_bool import at_hand
from ..runtime.vmap import Minibatches
from .bound_model import BoundModel
from .whitening import other_priors

__all__ = ["SitePrediction", "same_objects"]


class SitePrediction:
    """Mixed into :class:`~pyro_ngvi.AutoSites`."""

    algebra: Any
    master: Any
    inducing: Tensor | None
    call_of: Any
    _require_setup: Any
    _up_to_date: Any
    _unpack: Any

    def predict(self, *args: Any, **kwargs: Any) -> dict[str, tuple[Tensor, Tensor]]:
        """Mean and variance of every entry of every latent site under q, by name, in their shapes.

        Arguments are those of the model, without data: ``guide.predict(X_new)``.  A
        ``GaussianProcess`` follows to new inputs by its conditional, and its jitter is part of the
        variance.  No draws, and no matrix in the number of new inputs (unless other latent sites
        depend on the process).  Beside a process, sites of another shape with these arguments, such as
        a noise of every datum, are left out: q says nothing of their new entries.

        Raises:
            RuntimeError: before the guide's first call with data.
            ValueError: where the prior of another site is not the one of the last step: it is made
                of the arguments, as that of a state-space process at other times.  A guide that was
                unpickled can not tell before its next step.

        Example: see :class:`~pyro_ngvi.distributions.GaussianProcess`.
        """
        self._require_setup()
        self._up_to_date()
        with torch.no_grad():
            call = self.call_of(args, kwargs)
            others = self.check_prior(call, leave_out=True)
            mean, sd = (self._unpack(x, call) for x in self.algebra.mean_and_sd(call))
        return {name: (m, sd[name].square()) for name, m in mean.items() if name not in others}

    def check_prior(self, call: BoundModel, leave_out: bool = False) -> list[str]:
        """Refuse a call at which q would be the sites with another prior than that of the last step.

        A ``GaussianProcess`` knows its inputs, and follows to others; of no other prior that is made
        of the model's arguments can be told which of its entries saw which datum.  With ``leave_out``
        the names of sites that have another shape now are returned instead, where a process is there
        to be predicted.

        Raises:
            ValueError: with the name of the latent site.
        """
        guide: Any = self
        if guide._last is None or not at_hand(call.plan.zero()):
            return []
        if same_objects(guide._last, (call.runner.args, call.runner.kwargs)):
            return []
        with torch.no_grad():
            before, now = _blocks(guide._call_before(), call)
            fixed = {n: fn for n, fn in before.items() if not isinstance(fn, GaussianProcess)}
            others = [name for name, fn in fixed.items() if now[name].shape() != fn.shape()]
            if others and not (leave_out and len(fixed) < len(now)):
                name = others[0]
                raise ValueError(
                    f"AutoSites: {name!r} has the shape {tuple(now[name].shape())} with these "
                    f"arguments, "
                    f"and {tuple(fixed[name].shape())} with those of the last step, so it can not be "
                    f"predicted. Give it a GaussianProcess, or make it a part of the likelihood."
                )
            for name in other_priors({n: fixed[n] for n in fixed if n not in others}, now):
                raise ValueError(
                    f"AutoSites: the prior of {name!r} is another one with these arguments than with "
                    f"those of the last step. Let the times or inputs to predict at be among those of "
                    f"the steps, with NaN for their data, or give the site a GaussianProcess."
                )
        return others

    def _given_minibatches(self) -> dict[str, Tensor]:
        """Those of plates that a list of guides has made: a process at their data is drawn there."""
        plates = {} if self.master is None else getattr(self.master(), "plates", {})
        return {n: p.indices for n, p in plates.items() if p.subsample_size < p.size}

    def _announce_minibatches(self, call: Any, given: dict[str, Tensor]) -> None:
        """Tell the model which data a process was drawn at, by the sites of the plates' indices."""
        drawn: Minibatches = call.runner.minibatches
        for name, index in drawn.items():
            if self.inducing is not None and name not in given:
                pyro.plate(name, call.sites[name]["fn"].size, subsample=index)


def _blocks(before: BoundModel, now: BoundModel) -> tuple[dict[str, Any], dict[str, Any]]:
    """The Gaussians of the block at two calls, given others of it that are not 0.

    At 0 the prior of a site given another one, such as Normal(X @ w, 1), is the same for all X.
    """
    if any(isinstance(fn, GaussianProcess) for fn in now.block.values()):
        return before.block, now.block  # whose noise has another length with other inputs
    first, second = (c.runner(c.probe, look_at=c.plan.block_places).own for c in (before, now))
    return first, second


def same_objects(a: tuple[Any, Any], b: tuple[Any, Any]) -> bool:
    """Whether two calls have the very same arguments and keyword arguments."""
    (args, kwargs), (others, other_kwargs) = a, b
    if len(args) != len(others) or kwargs.keys() != other_kwargs.keys():
        return False
    same = all(x is y for x, y in zip(args, others, strict=True))
    return same and all(x is other_kwargs[name] for name, x in kwargs.items())
