r"""Inducing points: a Gaussian process seen through its values at M inputs Z.

    u = f(Z) = mean(Z) + L eps,  eps ~ N(0, I_M),   f_n = b_n + a_n' eps + rest_n
    q(eps) propto N(eps; 0, I) prod_n exp(nu_n g_n - Lambda_n g_n^2 / 2),   g_n = b_n + a_n' eps,
    ELBO = log Z + sum_n E log p(y_n | f_n) - E log t_n(g_n),

with a_n and rest_n as in :mod:`pyro_ngvi.sites.regression`, q(eps) = N(m, C) and E log p under
N(b_n + a_n' m, a_n' C a_n + var rest_n).  The sites are the dual parameters of Adam, Chang, Khan &
Solin (2021); for a Gaussian likelihood the bound is that of Titsias (2009) after one step.  The sites
of a minibatch see its data only, so each replaces its own share of the evidence, O(B M^2 + M^3), and no
gradient noise is left: minibatches converge to where all data do.

Where minibatches learn hyperparameters, what the other sites say would be that of an older prior.  The
coordinates eps change most with it; those of u hardly do, in which f_n is an interpolation of u with
weights L^-T a_n.  So the evidence is then kept for L eps, and hyperparameters see q(u) move with the
prior at held evidence, as they do with all data.  What is left of older weights is forgotten: the
evidence is a *running* average, of which one pass of the data replaces a tenth by its own estimate.
``guide.refresh`` with all data, or a step with them, makes it exact again.

Not for several processes or other latent sites in the same block, nor for data that see f at inputs
other than their own; the dense algebra does these.
"""

from __future__ import annotations

import pyro
import torch
from torch import Tensor, nn

from ..distributions.gaussian_process import GaussianProcess, factor
from .algebra import Algebra, SiteTensors, View
from .call import Call
from .dense import Evidence, WhitePosterior
from .new_inputs import split_draw, white_noise
from .plan import LinearMap, Plan
from .regression import Regression, regress

__all__ = ["InducingAlgebra"]

#: share of a running average that one pass of the data replaces: more is noise, less is old
FORGOTTEN = 0.1


class InducingAlgebra(Algebra):
    """White noise eps (M,) at ``inducing`` (M, ...)."""

    inducing: Tensor
    _regression: Regression | None = None
    _drawn: tuple[Regression, Tensor, Tensor, Tensor] | None = None

    def __init__(self, plan: Plan, call: Call, inducing: Tensor) -> None:
        site = _only_process(plan, call)
        inputs = call.block[site].inputs
        if inducing.shape[1:] != inputs.shape[1:] or not len(inducing):
            raise ValueError(
                f"AutoSites: inducing has shape {tuple(inducing.shape)}, and the inputs of the "
                f"GaussianProcess {site!r} have {tuple(inputs.shape)}. They must agree in all but "
                f"the first dimension."
            )
        super().__init__(Evidence.none(plan.zero(), len(inducing)))
        self.site, self.group = site, plan.groups[0].name
        if isinstance(inducing, nn.Parameter):
            self.inducing = inducing  # that of the guide, not a second one
        else:
            self.register_buffer("inducing", inducing)

    def view(self, call: Call) -> View:
        """The maps at the inputs of the call."""
        found = regress(call.block[self.site], self.inducing, self._regression)
        self._regression = found if call.whole and not found.learns else None
        # in direct runs f at the probe is the probe itself, and would not show another prior
        probe = found.probe()
        call.at_probe = {self.group: probe.unsqueeze(-1)}
        design, offset = found.design.unsqueeze(1), found.offset.unsqueeze(-1)
        rest = found.rest.reshape(-1, 1, 1)
        return View({self.group: LinearMap(design, offset, rest)}, prior=found.root)

    def begin_running(self, view: View) -> None:
        if not self.running:
            size = torch.eye(len(view.prior)).to(view.prior)
            inverse = torch.linalg.solve_triangular(view.prior.detach(), size, upper=False)
            self.evidence, self.running = self.evidence.of(inverse), True

    def white(self, view: View, evidence: Evidence) -> Evidence:
        return evidence.of(view.prior) if self.running else evidence

    def after(self, view: View, change: SiteTensors, sites: SiteTensors, call: Call) -> Evidence:
        if not self.running:
            return super().after(view, change, sites, call)
        lasting = View({name: _of_values(at, view.prior) for name, at in view.maps.items()})
        replaced = super().after(lasting, change, sites, call)
        weights = {name: call.weight(name) for name in sites}
        scaled = {n: (weights[n] * nu, weights[n] * Lambda) for n, (nu, Lambda) in sites.items()}
        away = self.collect(lasting, scaled).plus(replaced, -1.0)
        return replaced.plus(away, FORGOTTEN / max(weights.values()))

    def posterior(self, view: View | None, evidence: Evidence) -> WhitePosterior:
        assert view is not None
        return WhitePosterior(self.white(view, evidence))

    def mean_and_sd(self, call: Call) -> tuple[Tensor, Tensor]:
        found = regress(call.block[self.site], self.inducing)
        q = self.posterior(View({}, found.root), self.evidence)
        mean, variance = found.marginals(q.mean, q.half(found.design))
        return mean, variance.sqrt()

    def moments(self, call: Call) -> tuple[Tensor, Tensor]:
        mean, root = self._joint(call)
        return mean, root.mT

    def sample(self, call: Call, name: str) -> dict[str, tuple[Tensor, Tensor]]:
        mean, root = self._joint(call)
        noise = pyro.sample(name + "_noise", white_noise(mean), infer={"is_auxiliary": True})
        return split_draw(call, mean, root, noise)

    def _joint(self, call: Call) -> tuple[Tensor, Tensor]:
        """Mean (N,) and root R (N, N) of f at the inputs of the call: covariance R R', triangular."""
        fn, last = call.block[self.site], self._drawn
        found = regress(fn, self.inducing, None if last is None else last[0])
        if last is not None and found is last[0] and self.linear is last[1]:
            return last[2:]
        q = self.posterior(View({}, found.root), self.evidence)
        half = q.half(found.design)
        root = factor(fn.rest_covariance(found.design) + half.mT @ half, fn.jitter)
        mean = found.design @ q.mean + found.offset
        self._drawn = None if found.learns else (found, self.linear, mean, root)
        return mean, root


def _of_values(at: LinearMap, root: Tensor) -> LinearMap:
    """A map of eps as one of L eps."""
    A = torch.linalg.solve_triangular(root, at.design.flatten(0, 1), upper=False, left=False)
    return LinearMap(A.reshape(at.design.shape), at.offset, at.rest)


def _only_process(plan: Plan, call: Call) -> str:
    """The name of the block's one site, a GaussianProcess that is the predictor; refuses others."""
    names = [name for name, fn in call.block.items() if isinstance(fn, GaussianProcess)]
    if len(call.block) != 1 or not names:
        found = ", ".join(f"{name!r} ({type(fn).__name__})" for name, fn in call.block.items())
        raise ValueError(
            f"AutoSites(inducing=...) is for a model whose only Gaussian latent site is one "
            f"GaussianProcess, and this model has {found}. Put linear terms into its kernel, give "
            f"other sites to other guides of an AutoGuideList, or leave inducing out."
        )
    site = names[0]
    for group in plan.groups:
        places = [place.site for place in group.predictor.places]
        if places != [site] or group.width != 1:
            where = " and ".join(str(place) for place in group.predictor.places)
            raise ValueError(
                f"AutoSites(inducing=...): the data of {group.name!r}, of shape {tuple(group.batch)}, "
                f"see the GaussianProcess {site!r} through {where}, {group.width} number(s) a datum. "
                f"With inducing points datum n must see {site!r} at its own input n only: "
                f"GaussianProcess(kernel, X) with the inputs of the data, in their order."
            )
    return site
