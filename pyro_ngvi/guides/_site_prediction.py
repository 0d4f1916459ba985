"""What an AutoSites guide says of its latent functions at any inputs, without draws."""

from __future__ import annotations

from typing import Any

import pyro
import torch
from torch import Tensor

from .._known import at_hand
from .._particles import Minibatches
from ..distributions.gaussian_process import GaussianProcess
from ..sites.call import Call
from ..sites.whitening import other_priors

__all__ = ["SitePrediction"]


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
        depend on the process).

        Raises:
            RuntimeError: before the guide's first call with data.
            ValueError: where the prior of another site is not the one of the last step: it is made
                of the arguments, as that of a state-space process at other times.

        Example: see :class:`~pyro_ngvi.distributions.GaussianProcess`.
        """
        self._require_setup()
        self._up_to_date()
        with torch.no_grad():
            call = self.call_of(args, kwargs)
            self.check_prior(call)
            mean, sd = (self._unpack(x, call) for x in self.algebra.mean_and_sd(call))
        return {name: (m, sd[name].square()) for name, m in mean.items()}

    def check_prior(self, call: Call) -> None:
        """Refuse a call at which q would be the sites with another prior than that of the last step.

        A ``GaussianProcess`` knows its inputs, and follows to others; of no other prior that is made
        of the model's arguments can be told which of its entries saw which datum.

        Raises:
            ValueError: with the name of the latent site.
        """
        guide: Any = self
        if guide._last is None or not at_hand(call.plan.zero()):
            return
        if _same_objects(guide._last, (call.runner.args, call.runner.kwargs)):
            return
        with torch.no_grad():
            before, now = guide._call_before().block, call.block
            fixed = {
                name: fn
                for name, fn in before.items()
                if not isinstance(fn, GaussianProcess) and now[name].shape() == fn.shape()
            }
            for name in other_priors(fixed, now):
                raise ValueError(
                    f"AutoSites: the prior of {name!r} is another one with these arguments than with "
                    f"those of the last step, so the guide does not know q here. To predict at other "
                    f"times or inputs let them be among those of the steps, with NaN for their data, "
                    f"or give the site a GaussianProcess, which predicts at any inputs."
                )

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


def _same_objects(a: tuple[Any, Any], b: tuple[Any, Any]) -> bool:
    """Whether two calls have the very same arguments and keyword arguments."""
    (args, kwargs), (others, other_kwargs) = a, b
    if len(args) != len(others) or kwargs.keys() != other_kwargs.keys():
        return False
    same = all(x is y for x, y in zip(args, others, strict=True))
    return same and all(x is other_kwargs[name] for name, x in kwargs.items())
