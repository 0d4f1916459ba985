"""What q of an AutoSites guide would be without a datum, from its sites: methods of the guide."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from .influence import Influence, influence_of
from .leave_one_out import SiteLOO, loo_of
from .snapshot import Snapshot, take_snapshot
from .views import Indices, SiteViews, checked

__all__ = ["WithoutData"]


class WithoutData(SiteViews):
    """Mixed into :class:`~pyro_ngvi.AutoSites`."""

    #: what became of the data since the last call, if anything
    _since: Any = None

    def loo(self, *args: Any, **kwargs: Any) -> SiteLOO:
        """Leave-one-out predictive densities from the sites, without refitting.

        Arguments: those of the model with all data; by default those of the last step.
        Equations and how it compares with PSIS-LOO: :mod:`pyro_ngvi.sites.leave_one_out`.
        """
        return loo_of(self._snapshot("loo", args, kwargs))

    def influence(
        self,
        *args: Any,
        group: str | None = None,
        groups: Sequence[Indices] | None = None,
        **kwargs: Any,
    ) -> Influence:
        """How far the posterior moves when a datum, or a set of them, is left out, without refitting.

        Args:
            args: those of the model with all data; by default those of the last step.
            group: name of the group of the guide; not needed where there is one.
            groups: sets of data to leave out together, each as numbers or a mask (N,); ``None`` for
                every datum by itself.
            kwargs: keyword arguments of the model.

        Raises:
            ValueError: for a minibatch, a group or data that are not there.
            NotImplementedError: for ``groups``, where the guide's algebra is not dense.

        Equations: :mod:`pyro_ngvi.sites.cavity`.
        """
        chosen = self._group("influence", group)
        sets = None
        if groups is not None:
            sets = [checked("influence", indices, chosen) for indices in groups]
        return influence_of(self._snapshot("influence", args, kwargs), chosen.name, sets)

    def _predictor_means(self, group: str | None = None) -> tuple[str, Tensor]:
        """Name of a group and the posterior mean (N, k) of its f, at the arguments of the last step."""
        name = self._group("sites", group).name
        return name, self._snapshot("sites", (), {}).marginals[name].mean

    def _snapshot(self, what: str, args: Any, kwargs: Any) -> Snapshot:
        self._plan()
        if self._rest:
            raise NotImplementedError(
                f"AutoSites.{what} is for guides of all latent sites of a model; here other guides of "
                f"the list infer {', '.join(map(repr, self._rest))}."
            )
        if not args and not kwargs and self._last is not None:
            if self._since is not None and self._since.last is self._last:
                raise ValueError(
                    f"AutoSites.{what}: data were added or removed since the last call, and those of "
                    f"now are not known. Pass them as arguments, or call guide.refresh(*args)."
                )
            args, kwargs = self._last
        guide: Any = self
        if not args and not kwargs:
            guide.check_arguments(args, kwargs)
        call = guide.call_of(args, kwargs)
        if not call.whole:
            raise ValueError(
                f"AutoSites.{what} needs all data; this call has a minibatch. Make the size of the "
                f"minibatch an argument of the model, and pass the full data."
            )
        return take_snapshot(guide, call)
