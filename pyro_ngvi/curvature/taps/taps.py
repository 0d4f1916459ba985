r"""Per-example squared gradients of a network's weights, from the backward pass that is run anyway.

For a latent site W that a model uses as the weight or bias of F.linear, a convolution, an embedding, a
normalisation, a matrix product, a sum or a product by entries,

    H_W = 1/S sum_s sum_i scale_i mask_i g_si^2,     g_si = d log p(y_i | z_s) / dW,

the diagonal of VOGN (Khan et al. 2018, arXiv:1806.04854), follows from the inputs of the layer and the
gradients of its outputs (:mod:`pyro_ngvi.curvature.taps.squares`; Goodfellow 2015), at the cost of
about one more matrix product a layer. No prior is in it, and it is in the constrained value of the
site.

How: while the model runs, a ``TorchFunctionMode`` sees the layers and puts behind each an identity
whose backward reduces what comes by, at once (:mod:`pyro_ngvi.curvature.taps.run`). So the loss's own
backward pass does everything: with loss = -1/S sum_s (sum_i scale log p(y_i | z_s) + ...), what comes
by is -scale/S times the gradient.

Memory: the inputs of the layers until the backward pass has gone by (autograd holds the same tensors),
then for one layer at a time the squares of its input and of its output gradient, and ``budget`` bytes
where per-example gradients have to be formed (a weight used at several places: convolutions, sequences,
or several times). A weight that is used several times also holds the output gradients of these uses
until the last has come.

Do not use it where examples are not independent given the latents (batch normalisation, attention over
the batch). :meth:`LayerTaps.discover` finds such models out and says so in ``reasons``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ...runtime.run import Minibatches
from .check import check_taps
from .run import LayerMode, Run, SiteWatch, Use, scale_refusal
from .squares import Inputs, Member, View, joint_squares

__all__ = ["BUDGET", "LayerTaps"]

BUDGET = 2**26
"""Default bytes for per-example gradients that have to be formed."""


class LayerTaps:
    """A model with taps behind the layers whose weights are latent sites; call it like the model.

    Made by :meth:`discover`. For each later step: run it in place of the model under
    :func:`~pyro_ngvi.runtime.run.run_particles`, call ``backward`` on the loss, and take
    :meth:`squared_gradients`. With gradients off it is the model and no more.
    """

    def __init__(self, model: Callable[..., Any], budget: int = BUDGET) -> None:
        self.model = model
        self.budget = budget
        self.sites: tuple[str, ...] = ()
        """The latent sites that are covered."""
        self.reasons: dict[str, str] = {}
        """Why another latent site is not covered: a sentence by name."""
        self.undecided = False
        """Whether some latent had no gradient when the taps were checked, so that nothing was seen."""
        self.failure: str | None = None
        """Why the last :meth:`squared_gradients` returned nothing, if it did."""
        self.examples = 0
        """How many leading dimensions of a layer's output number the examples."""
        self.twins: dict[str, Tensor] = {}  # meta tensors in the shape of the sites' values
        self.groups: dict[str, tuple[int, ...]] = {}  # the group of each use of a site
        self.observed = ""  # the site whose log_prob numbers the examples
        self.signature: Any = None
        # While the taps are checked, what comes by is put here instead of being reduced.
        self.arrivals: list[tuple[Use, Inputs, Tensor]] | None = None
        self.last: Run | None = None
        self._like: dict[str, Tensor] = {}
        self._totals: dict[str, Tensor] = {}
        self._runs: set[Run] = set()

    @classmethod
    def discover(
        cls,
        model: Callable[..., Any],
        values: Mapping[str, Tensor],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        minibatches: Minibatches | None = None,
        shared: Mapping[str, Tensor] | None = None,
        examples: int | None = None,
        budget: int = BUDGET,
    ) -> LayerTaps:
        """Run the model once, find the layers, and check that taps give the right gradients.

        The check is :func:`~pyro_ngvi.curvature.taps.check.check_taps`; it waits for the device, and
        leaves the random state alone. On the meta device, without numbers, only shapes are checked.

        Args:
            values: constrained value (S, ...) of each latent site; the first particle is used.
            minibatches: those of subsampled plates, as for ``run_particles``.
            shared: further values by site, without a particle dimension.
            examples: an example is an entry of the first so many dimensions of the observed
                sites' log_prob; of all dimensions by default.
            budget: bytes for per-example gradients that have to be formed.

        Raises:
            RuntimeError: when the model cannot run under ``vmap``.

        >>> import torch, pyro, pyro.distributions as dist
        >>> from pyro_ngvi.runtime.run import run_particles
        >>> def model(x, y):
        ...     w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        ...     with pyro.plate("data", len(x)):
        ...         pyro.sample("y", dist.Normal(x @ w, 1.0), obs=y)
        >>> def log_likelihood(sites):
        ...     return sites["y"]["fn"].log_prob(sites["y"]["value"]).sum()
        >>> data = torch.tensor([[1.0, 0.0], [0.0, 2.0]]), torch.tensor([3.0, 0.5])
        >>> values = {"w": torch.zeros(1, 2, requires_grad=True)}
        >>> taps = LayerTaps.discover(model, values, data)
        >>> log_p = run_particles(
        ...     taps, log_likelihood, values, 1, data, {}, minibatches=Minibatches()
        ... )
        >>> (-log_p.sum()).backward()
        >>> taps.squared_gradients(num_particles=1)
        {'w': tensor([9., 1.])}
        """
        taps = cls(model, budget)
        for name, value in values.items():
            taps.twins[name] = torch.empty(value.shape[1:], device="meta")
            taps._like[name] = value.new_empty(0)
        check_taps(taps, values, args, kwargs or {}, minibatches, shared or {}, examples)
        return taps

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or (self.arrivals is None and not self.sites):
            return self.model(*args, **kwargs)
        self.last = run = Run()
        mode = LayerMode(run, self.arrived)
        with SiteWatch(run, self.twins, mode.weights), mode:
            result = self.model(*args, **kwargs)
        run.as_checked = run.signature() == self.signature and not run.batch_norm
        return result

    def clear(self) -> None:
        """Forget what an earlier run left, such as one that an error broke off."""
        self._totals, self._runs, self.last = {}, set(), None

    def squared_gradients(self, num_particles: int) -> dict[str, Tensor]:
        """Take H_W by site, in the shape of its value, after one ``backward`` of the loss.

        A site that is not there needs another route: ``reasons`` says why, or ``failure`` when
        all are missing because this run was not like the checked one.

        Args:
            num_particles: S; the loss is the average over so many.
        """
        totals, runs, run = self._totals, self._runs, self.last
        self.clear()
        factor = self._factor(run, num_particles)
        if factor is None:
            return {}
        self._totals = totals
        for other in runs:  # where the loss does not depend on one of several uses
            for (site, _), members in other.waiting.items():
                self._reduce_jointly(site, members)
        self._totals = {}
        result = {}
        for name in self.sites:
            if name in totals:
                result[name] = totals[name].mul_(factor).view(self.twins[name].shape)
            else:
                result[name] = self._like[name].new_zeros(self.twins[name].shape)
        return result

    def _factor(self, run: Run | None, num_particles: int) -> float | None:
        """S / scale, which makes of squares of gradients of the loss what is wanted."""
        if run is None or not run.as_checked:
            self.failure = "The model was not run, or called other layers than when it was checked."
            return None
        scale = run.scales[self.observed]
        self.failure = scale_refusal(self.observed, scale)
        return num_particles / scale if self.failure is None else None

    def arrived(self, run: Run, uses: list[Use], xs: Inputs, g: Tensor) -> None:
        """Reduce the output gradients g (S, ...) of one layer, whose inputs are xs (S or 1, ...)."""
        read = {use: xs if use.layer.reads_inputs else () for use in uses}
        if self.arrivals is not None:
            self.arrivals += [(use, own, g) for use, own in read.items()]
            return
        if not run.as_checked:
            return
        for use, own in read.items():
            own, b = self._rows(use, own, g)
            groups = self.groups[use.site]
            group = groups[use.ordinal]
            if groups.count(group) == 1:
                self._add(use.site, use.view, use.layer.squares(own, b, self.budget))
                continue
            self._runs.add(run)
            members = run.waiting.setdefault((use.site, group), [])
            members.append((use.layer, use.view, own, b))
            if len(members) == groups.count(group):
                self._reduce_jointly(use.site, run.waiting.pop((use.site, group)))

    def _rows(self, use: Use, xs: Inputs, g: Tensor) -> tuple[Inputs, Tensor]:
        """xs (S or 1, n, ...) and g (S, n, ...), one row an example, in the dtype of the sites."""
        dtype = self._like[use.site].dtype  # autocast may have others
        xs = tuple(x.to(dtype) if x.is_floating_point() else x for x in xs)
        return tuple(x.flatten(1, self.examples) for x in xs), g.detach().to(dtype).flatten(
            1, self.examples
        )

    def _reduce_jointly(self, site: str, members: list[Member]) -> None:
        twin = self.twins[site]
        squares = joint_squares(members, twin.numel(), self.budget)
        self._add(site, View.like(twin), squares.view(twin.shape))

    def _add(self, site: str, view: View, squares: Tensor) -> None:
        twin, total = self.twins[site], self._totals.get(site)
        if total is None and view == View.like(twin):
            self._totals[site] = squares.reshape(-1)
            return
        if total is None:
            total = self._totals[site] = squares.new_zeros(twin.numel())
        view.of(total).add_(squares)
