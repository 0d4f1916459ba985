r"""IFVB and AIFVB: natural gradients of any guide, with the Fisher matrix learnt from scores.

At every step, with draws z ~ q that have nothing to do with the model,

    phi = grad_lambda log q_lambda(z)                     one or more scores
    F^-1 <- update of the inverse by phi                  no inversion, see pyro_ngvi.fisher
    G = F^-1 g                                            estimate of the natural gradient
    lambda <- step along -G                               the rule of optim/rule.py

so all that a guide has to offer is log q: Pyro's autoguides, mixtures, functions with ``pyro.param``.
Our own families offer their frame besides: scores and gradients are then taken in units of q itself,
where the Fisher matrix hardly changes while q moves, which is what makes its running average a good
estimate.  Other guides are stepped in the unconstrained coordinates in which Pyro stores them.

Defaults are this project's: the calibrated low-rank estimate (:class:`~pyro_ngvi.fisher.LowRank`)
with the steps of NGVB.  A gain of 1/k relies on a Fisher matrix that is the Hessian of the loss, which
nothing says of guides of other packages.  There the gain falls as k^(-2/3), without momentum, and with
less room for noise (0.6 in place of 3 times sqrt(b_k): far from the optimum of a mixture, larger noisy
steps in coordinates that are not q's own kill components).  A component of a mixture that fits worse
for a while loses its weight along the exact natural gradient too; it comes back only while steps are
long enough, another reason for a slow decay.

Flows, ours and Pyro's, and guides with networks have thousands of parameters and a nearly singular
Fisher matrix.  Their default is a damped window (:class:`~pyro_ngvi.fisher.Window`), which moves
little where the scores say little, with the same slow gain; the low-rank estimate takes huge steps
there (benchmarks/flows/README.md).

With a :class:`RobbinsMonro` schedule of power alpha, the regularisation c_beta k^-beta of
:class:`~pyro_ngvi.fisher.Dense` has to keep to 1/2 < alpha < 1 and 0 < beta < alpha - 1/2 (theorems 5.1
to 5.3).  Algorithms 1 and 2 as printed stand in ``benchmarks/baselines``.

Not for: guides whose Fisher matrix is known (NGVB is as good and cheaper), guides without a density
(AutoDelta), densities that cannot be evaluated at a given point (flows without an inverse).

Source: Godichon-Baggioni, Nguyen & Tran (2024, JASA), equations (4.6), Algorithms 1 and 2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from pyro.optim import PyroOptim
from torch import Tensor

from ..families.base import Tensors
from ..fisher import InverseFisher
from ..fisher.geometry import Coordinates
from ..fisher.scores import family_scores
from ..linalg.host import own_random_state
from ._fisher_forms import Suited, as_estimate
from .block import GuideBlock, find_blocks
from .host import NaturalGradientOptim
from .ifvb_rule import IFVBRule
from .natural_gradient import make_rule, rule_arguments
from .others_state import ADAM
from .rule import Averaging, Report, UsingAverage, part
from .schedules import RobbinsMonro, Schedule, check_convergence

__all__ = ["IFVB", "IFVBRule"]

#: scores that make the first guess of the diagonal, where it is not known
FIRST_SCORES = 32
#: where the Fisher matrix is not known: above k^-1, which averages need too, and waiting for the signal
SLOW = RobbinsMonro(scale=0.3, offset=20.0, power=2.0 / 3.0, patience=0.3)
#: path of the block of parameters that belong to no guide of ours
REST = "others' guides"


class IFVB(NaturalGradientOptim):
    """Inversion-free variational Bayes: natural gradients for any guide that has a density.

    Parameters on which log q does not depend (networks in the model, say) go to ``others``.

    Args:
        guide: the guide that SVI trains: ours, Pyro's, a mixture of both in an ``AutoGuideList``, or a
            function.  A function with arguments has to be wrapped, see
            :func:`~pyro_ngvi.optim.remember_arguments`.
        lr: factor in (0, 1] on the gain of the schedule.
        schedule: as for NGVB.  ``None``: that of NGVB; in stored coordinates and for flows
            ``RobbinsMonro(0.3, 20, 2/3, patience=0.3)``.
        fisher: the estimate of the inverse Fisher matrix, from ``pyro_ngvi.fisher``:
            ``LowRank(32, growth=1.0)``, ``Window(128)`` (the last scores and a ridge) or ``Dense()``
            (D x D).  ``None``: that window for flows and guides with networks, else that low rank.
        num_scores: scores drawn per step; ``None``: 8 for a window, else 1.
        trust_radius: largest length of a step in the estimated Fisher norm, nats^(1/2); ``None``: none.
        clip_norm: largest Euclidean norm of the natural gradient (the paper's device); ``None``: none.
        momentum: heavy-ball coefficient in [0, 1); ``None``: what suits the guide.
        averaging: as for NGVB.  Guides that are ours then hold the average; beside other guides it is
            kept by the optimizer, see :meth:`use_average`.
        frame: "family" (default): scores and steps of our guides in the local frame of their family;
            "stored": in the coordinates of their parameters, as for all other guides.
        others: a ``PyroOptim`` for all other parameters; see :class:`~pyro_ngvi.NGVB`.
        by_layer: no entries of F between the layers of a flow; other guides are one layer.
        keywords: in place of ``fisher``.  ``window`` (K) and ``damping`` change the default;
            ``form="low_rank"``, "window" or "dense" chooses, with ``eps``, ``c_beta`` and ``beta`` of
            ``Dense``.

    Raises:
        ValueError: for arguments out of range; at the first step for a guide without scores.

    Example:
        >>> import pyro, torch, pyro.distributions as dist
        >>> from pyro.infer import SVI, Trace_ELBO
        >>> from pyro.infer.autoguide import AutoMultivariateNormal
        >>> import pyro_ngvi as ngvi
        >>> def model():
        ...     pyro.sample("x", dist.Normal(torch.tensor([3.0, -1.0]), 2.0).to_event(1))
        >>> guide = AutoMultivariateNormal(model)
        >>> optim = ngvi.IFVB(guide)
        >>> svi = SVI(model, guide, optim, Trace_ELBO(4, vectorize_particles=True))
        >>> for _ in range(400):
        ...     loss = svi.step()
        >>> bool((guide.median()["x"] - torch.tensor([3.0, -1.0])).abs().max() < 0.5)
        True
    """

    learns_fisher = True

    def __init__(
        self,
        guide: Any,
        lr: float = 1.0,
        schedule: Schedule | Callable[[Tensor], Tensor] | str | None = None,
        fisher: InverseFisher | None = None,
        num_scores: int | None = None,
        trust_radius: float | None = 1.0,
        clip_norm: float | None = None,
        momentum: float | None = None,
        averaging: Averaging | float | bool | None = None,
        frame: str = "family",
        others: PyroOptim | None = ADAM,
        *,
        by_layer: bool = False,
        **keywords: Any,
    ) -> None:
        if frame not in ("family", "stored"):
            raise ValueError(f'frame must be "family" or "stored", got {frame!r}.')
        if num_scores is not None and (not isinstance(num_scores, int) or num_scores < 1):
            raise ValueError(
                f"num_scores must be a whole number of at least 1 or None, got {num_scores!r}."
            )
        self._stored = frame == "stored"
        self._fisher = as_estimate(fisher, **keywords)
        if isinstance(schedule, RobbinsMonro) and getattr(self._fisher, "c_beta", 0.0):
            check_convergence(schedule.power, getattr(self._fisher, "beta", None))
        self._by_layer = by_layer
        self._num_scores = num_scores
        if clip_norm is not None and not clip_norm > 0.0:
            raise ValueError(f"clip_norm must be positive or None, got {clip_norm!r}.")
        self._rule_arguments = rule_arguments(
            lr, trust_radius, schedule, momentum, averaging, clip_norm=clip_norm
        )
        self._rest: GuideBlock | None = None
        self._rest_known = False
        super().__init__(guide, others)
        if "" not in self._rules:
            self._rest = GuideBlock(guide)

    def _blocks(self) -> Iterator[tuple[str, Any]]:
        yield from find_blocks(self.guide)
        if self._rest is not None and self._rest.natural_params():
            yield REST, self._rest

    def make_rule(self, family: Any) -> IFVBRule:
        fisher = self._fisher
        estimate = fisher.estimate(family) if isinstance(fisher, Suited) else fisher
        if self._stored:
            family = Coordinates(family.names)
        arguments = self._rule_arguments
        if not family.known_fisher and arguments["schedule"] is None:
            arguments = arguments | {"schedule": SLOW}
        return IFVBRule(make_rule(family, arguments), estimate, self._by_layer)

    def _step(self, params: list[Tensor]) -> None:
        if self._rest is not None and not self._rest_known:
            self._find_rest()
        super()._step(params)

    def _find_rest(self) -> None:
        assert self._rest is not None
        ours = {id(p) for _, b in find_blocks(self.guide) for p in b.natural_params().values()}
        with own_random_state():
            self._rest.find(ours)
        self._rest_known = True
        if self._rest.natural_params():
            self._adopt(REST, self._rest)
        elif not ours:
            raise ValueError(
                f"{type(self).__name__}: log q of the guide depends on no parameter, so it has no "
                f"scores (AutoDelta and guides that detach their parameters are of this kind). Train "
                f"it by pyro.optim.Adam."
            )

    def _draw(self, path: str, block: Any, values: Tensors, n: int) -> Tensor:
        """n scores of a block at the iterate ``values``."""
        if isinstance(block, GuideBlock):
            return block.draw_scores(n)
        return family_scores(block.family, values, n, self._stored)

    def _init_state(self, path: str, block: Any, values: Tensors) -> Tensors:
        known = block.family.orthogonal_frame and not self._stored
        if known or not self._rules[path].fisher.starts_from_guess:
            return self._rules[path].init(values)
        # one by one: draws made together share the minibatch of a subsampled plate
        draws = [self._draw(path, block, values, 1) for _ in range(FIRST_SCORES)]
        scores = torch.cat(draws)
        return self._rules[path].init(values, scores)

    def _update(
        self, path: str, block: Any, values: Tensors, grads: Tensors, state: Tensors
    ) -> tuple[Tensors, Tensors, Report]:
        rule = self._rules[path]
        count = self._num_scores or rule.fisher.scores_a_step
        scores = self._draw(path, block, values, count)
        return rule.update(values, grads, state, scores)

    def use_average(self) -> UsingAverage:
        """Put the averages of the iterates into the guide; as a context manager, for a while.

        Guides that are ours hold their average anyway.  Without an average (no ``averaging``, or no
        step yet) this is an error.

        Example (``optim`` an :class:`AIFVB` that has taken steps)::

            with optim.use_average():
                samples = Predictive(model, guide=guide, num_samples=1000)(X)
            optim.use_average()  # for good
        """
        averages = []
        # parameters that are not ours are found at the first step
        none = self._rest is not None and not self._rest_known
        for path, block in self._blocks():
            if block.holds_average and block.averaged:
                continue
            average = part(self._states.get(path, {}), "average.")
            none = none or not average
            averages.append((block.natural_params(), average))
        if none:
            raise RuntimeError(
                "There is no average: take a step first, with AIFVB or IFVB(averaging=True)."
            )
        return UsingAverage(averages)
