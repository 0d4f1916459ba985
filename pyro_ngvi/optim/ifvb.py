r"""IFVB: natural gradients of any guide, without inverting the Fisher matrix.

At every step, from draws z ~ q that have nothing to do with the model,

    phi = grad_lambda log q_lambda(z)                     scores: F = E[phi phi']
    G = F^-1 g                                            estimate of the natural gradient
    lambda <- step along -G                               the rule of NGVB

so all that a guide has to offer is log q: Pyro's autoguides, mixtures, functions with ``pyro.param``.

**Guides that are not ours** are stepped in the unconstrained coordinates in which Pyro stores them, but
for positive-definite matrices and Cholesky factors, and locations that go with them, which have frames
(:mod:`pyro_ngvi.optim.frames`).  There F changes as q moves, and G comes from conjugate gradients with
the present F (:class:`~pyro_ngvi.fisher.ConjugateGradients`).  A step is held against the KL from the q
before (:mod:`pyro_ngvi.optim.divergence`), and draws of such guides are steady while it trains them
(:mod:`pyro_ngvi.distributions.steady`).

**Our families** offer their frame: scores and gradients are taken in units of q itself, where F hardly
changes while q moves, so that one score a step is enough for a low-rank estimate.

**Flows**, ours and Pyro's, have thousands of parameters and a nearly singular Fisher matrix.  Their
default is a damped window of scores, which moves little where the scores say little.  Where F is that
of a few scores there is less room for noise, 0.6 in place of 3 times sqrt(b_k).

**Gain.**  Nothing says that the Fisher matrix of other guides and of flows is the Hessian of the loss,
so there the gain falls as k^(-2/3), without momentum.

Not for: guides whose Fisher matrix is known (NGVB is as good and cheaper), guides without a density
(AutoDelta), densities that cannot be evaluated at a given point (flows without an inverse).

Source: Godichon-Baggioni, Nguyen & Tran (2024, JASA), equations (4.6), Algorithms 1 and 2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from pyro import poutine
from pyro.optim import PyroOptim
from torch import Tensor

from ..families.base import Tensors
from ..fisher import ConjugateGradients, InverseFisher, LowRank, Window
from ..fisher.products import from_scores
from ..fisher.scores import family_scores
from ..linalg.host import own_random_state
from .blocks import Coordinates, GuideBlock, UsingAverage
from .host import NaturalGradientOptim, find_blocks
from .ifvb_rule import IFVBRule
from .ngvb import make_rule
from .rule import Averaging, State, require
from .schedules import RobbinsMonro, Schedule
from .state import ADAM

#: scores that make the first guess of the diagonal, where it is not known
FIRST_SCORES = 32
#: where the Fisher matrix is not known: above k^-1, which averages need too, and waiting for the signal
SLOW = RobbinsMonro(scale=0.3, offset=20.0, power=2.0 / 3.0, patience=0.3)
#: noise_radius of steps by exact products; larger noisy ones kill components of mixtures
HELD = 3.0
#: path of the block of parameters that belong to no guide of ours
REST = "others' guides"


class IFVB(NaturalGradientOptim):
    """Inversion-free variational Bayes: natural gradients for any guide that has a density.

    Parameters on which log q does not depend (networks in the model, say) go to ``others``.  Equations,
    source, and what it is not for: :mod:`pyro_ngvi.optim.ifvb`.

    Args:
        guide: the guide that SVI trains: ours, Pyro's, a mixture of both in an ``AutoGuideList``, or a
            function.  A function with arguments has to be wrapped, see
            :func:`~pyro_ngvi.optim.remember_arguments`.
        lr: factor in (0, 1] on the gain of the schedule.
        schedule, momentum, averaging: as for NGVB; by default what suits the guide.  Guides that are
            ours hold the average; beside other guides the optimizer keeps it, see :meth:`use_average`.
        fisher: what stands for the inverse Fisher matrix, from ``pyro_ngvi.fisher``:
            ``ConjugateGradients()``, ``LowRank(32, growth=1.0)``, ``Window(128)`` or ``Dense()``.
            ``None``: the first for guides that are not ours, that window for flows, else that low rank.
        num_scores: scores drawn per step; ``None``: 8 for a window, 64 for conjugate gradients without
            exact products, which need none, else 1.
        trust_radius: largest length of a step in the estimated Fisher norm, nats^(1/2), until steps
            that agree show that they may be longer; ``None``: no bound.
        clip_norm: largest Euclidean norm of the natural gradient (the paper's device); ``None``: none.
        others: a ``PyroOptim`` for all other parameters; see :class:`~pyro_ngvi.NGVB`.
        steady: whether draws of guides that are not ours are made steady.  ``False`` for losses that
            are not an ELBO (RenyiELBO, ReweightedWakeSleep), whose gradients need the score.

    Raises:
        ValueError: for arguments out of range; at the first step for a guide without scores.

    Example:
        >>> import pyro, torch, pyro.distributions as dist, pyro_ngvi as ngvi
        >>> from pyro.infer import SVI, Trace_ELBO
        >>> from pyro.infer.autoguide import AutoMultivariateNormal
        >>> model = lambda: pyro.sample("x", dist.Normal(torch.tensor([3.0, -1.0]), 2.0).to_event(1))
        >>> guide = AutoMultivariateNormal(model)
        >>> optim = ngvi.IFVB(guide)
        >>> svi = SVI(model, guide, optim, Trace_ELBO(4, vectorize_particles=True))
        >>> for _ in range(200):
        ...     loss = svi.step()
        >>> bool((guide.median()["x"] - torch.tensor([3.0, -1.0])).abs().max() < 0.5)
        True
    """

    #: whether scores are drawn at the average of the iterates
    scores_at_average: ClassVar[bool] = False

    def __init__(
        self,
        guide: Any,
        lr: float = 1.0,
        schedule: Schedule | Callable[[Tensor], Tensor] | str | None = None,
        fisher: InverseFisher | ConjugateGradients | None = None,
        num_scores: int | None = None,
        trust_radius: float | None = 1.0,
        clip_norm: float | None = None,
        momentum: float | None = None,
        averaging: Averaging | float | bool | None = None,
        others: PyroOptim | None = ADAM,
        *,
        steady: bool = True,
    ) -> None:
        whole = num_scores is None or (isinstance(num_scores, int) and num_scores >= 1)
        require(whole, "num_scores", "be a whole number of at least 1 or None", num_scores)
        require(clip_norm is None or clip_norm > 0.0, "clip_norm", "be positive or None", clip_norm)
        if not (fisher is None or hasattr(fisher, "product") or hasattr(fisher, "solve")):
            raise ValueError(
                f"fisher must be an estimate such as pyro_ngvi.fisher.LowRank(32, growth=1.0), "
                f"got {fisher!r}."
            )
        if not callable(guide):
            raise ValueError(
                f"IFVB steps a guide, and got {type(guide).__name__}. Pass the guide that SVI trains: "
                f"IFVB(guide)."
            )
        self._fisher = fisher
        self._steady = steady
        self._num_scores = num_scores
        arguments: dict[str, Any] = {"lr": lr, "trust_radius": trust_radius, "schedule": schedule}
        arguments |= {"momentum": momentum, "averaging": averaging, "clip_norm": clip_norm}
        self._rule_arguments = arguments
        self.make_rule(Coordinates(()))  # which refuses arguments out of range
        self._rest: GuideBlock | None = None
        self._rest_known = False
        super().__init__(guide, others)
        if "" not in self._rules:
            self._rest = GuideBlock(guide, steady)

    def _blocks(self) -> Iterator[tuple[str, Any]]:
        yield from find_blocks(self.guide)
        if self._rest is not None and self._rest.natural_params():
            yield REST, self._rest

    def make_rule(self, family: Any) -> IFVBRule:
        suited: Any = LowRank(32, growth=1.0) if family.known_fisher else ConjugateGradients()
        few = family.nearly_singular and not getattr(family, "exact", False)
        fisher = self._fisher or (Window(128) if few else suited)
        exact = isinstance(fisher, ConjugateGradients) and getattr(family, "exact", False)
        if isinstance(family, Coordinates) and not exact:  # an estimate from scores knows no blocks
            family = replace(family, exact=False, locations=())
        arguments: dict[str, Any] = self._rule_arguments
        if not family.known_fisher and arguments["schedule"] is None:
            arguments = arguments | {"schedule": SLOW}
        rule = make_rule(family, **arguments)
        if exact and rule.noise_radius == Coordinates.noise_radius:
            rule = replace(rule, noise_radius=HELD)
        return IFVBRule(rule, fisher)

    def step_blocks(self, params: list[Tensor]) -> list[Tensor]:
        if self._rest is not None and not self._rest_known:
            self._find_rest(self._rest)
        return super().step_blocks(params)

    def _find_rest(self, rest: GuideBlock) -> None:
        ours = {id(p) for _, b in find_blocks(self.guide) for p in b.natural_params().values()}
        with own_random_state():
            rest.find(ours)
        self._rest_known = True
        if rest.natural_params():
            self._adopt(REST, rest)
        elif not ours:
            raise ValueError(
                f"{type(self).__name__}: log q of the guide depends on no parameter, so it has no "
                f"scores (AutoDelta and guides that detach their parameters are of this kind). Train "
                f"it by pyro.optim.Adam."
            )

    def _draw(self, path: str, block: Any, values: Tensors, n: int) -> Tensor:
        """n scores of a block at the iterate ``values``, or at the average of its iterates."""
        held, averages = block.natural_params(), []
        if self.scores_at_average and block.holds_average:
            values = {k: p.detach() for k, p in held.items()}
        elif self.scores_at_average and path in self._states:
            values = self._states[path]["average"]
            averages = [(held, values)]
        if not isinstance(block, GuideBlock):
            return family_scores(block.family, values, n, self._rules[path].family)
        with UsingAverage(averages):
            return block.draw_scores(n)

    def _init_state(self, path: str, block: Any, values: Tensors) -> State:
        rule = self._rules[path]
        if rule.family.orthogonal_frame or not rule.fisher.starts_from_guess:
            return rule.init(values)
        # one by one: draws made together share the minibatch of a subsampled plate
        draws = [self._draw(path, block, values, 1) for _ in range(FIRST_SCORES)]
        return rule.init(values, torch.cat(draws))

    def _beside_gradients(
        self, path: str, block: Any, values: Tensors, parts: Tensors
    ) -> Mapping[str, Any]:
        fisher = self._rules[path].fisher
        count = self._num_scores or fisher.scores_a_step
        if not isinstance(fisher, ConjugateGradients):
            return {"scores": self._draw(path, block, values, count)}
        if not isinstance(block, GuideBlock):
            return {"product": from_scores(self._draw(path, block, values, count))}
        product = block.product() or from_scores(block.draw_scores(count))
        reference, own = block.divergence.reference(), block.natural_params()

        def divergence(new: Tensors) -> Tensor:
            with UsingAverage([(own, new)]), poutine.block():
                return reference()

        return {"product": product, "divergence": divergence}

    def use_average(self) -> UsingAverage:
        """Put the averages of the iterates into the guide; in a ``with`` statement, for a while.

        A RuntimeError before the first step, and without averaging.
        """
        blocks = [(path, b) for path, b in self._blocks() if not (b.holds_average and b.averaged)]
        averages = [(b.natural_params(), self._states.get(p, {}).get("average")) for p, b in blocks]
        # parameters that are not ours are found at the first step
        unknown = self._rest is not None and not self._rest_known
        if unknown or any(average is None for _, average in averages):
            raise RuntimeError(
                "There is no average: take a step first, with AIFVB or IFVB(averaging=True)."
            )
        return UsingAverage(averages)
