r"""Mass far from all draws of a guide, of few latent variables, that draws of the prior find.

With Z the guide's estimate of p(y), z_s draws of the prior and x_s in sds of the guide from its mean,

.. math:: m = \frac{1}{S Z} \sum_{s \text{ far}} p(y \mid z_s), \qquad
          v = \frac{1}{S Z} \sum_{s \text{ far}} p(y \mid z_s)\, x_s^2

are the mass of what is far, and what it adds to the variance: of a hundredth of the mass 60 sds away 36
variances, though p(y) is all but right.  A long tail is far too, but log p does not fall on the way.
"""

from __future__ import annotations

import math
from contextlib import suppress

import torch
from pyro import poutine, validation_enabled
from torch import Tensor

from ..guides.found import BARRIER
from ..runtime.density import LatentLayout
from ..runtime.model_density import map_draws
from .draws import Draws, Fitted, joint_of
from .mirrors import APART
from .shifts import COARSE_SD
from .weights import Evidence, evidence_of, prior_weights

#: latent variables at most, draws of the prior, those they are worth at least where their moments are
#: taken, and points of the way to what is far
FEW, DRAWS, WORTH, WAY = 3, 16_000, 25, 16


def mass_elsewhere(fitted: Fitted, draws: Draws, guide: Evidence, batch_size: int | None) -> float:
    """Nats of evidence in another mode, less two standard errors, where they make an sd 30 % larger; 0
    where there is none, or more than :data:`FEW` latent variables."""
    layout = None
    with suppress(ValueError, NotImplementedError):  # of discrete sites and angles there is none
        layout = fitted.layout
    if layout is None or layout.dim > FEW:
        return 0.0
    found = prior_weights(fitted.model, fitted.latent, DRAWS, batch_size)
    if found is None:
        return 0.0
    log_w, values = found
    own, x = layout.pack(draws.values).double(), layout.pack(values).double()
    # numbers that are rounded to the end of a support are nowhere
    units = ((x - own.mean(0)) / own.std(0)).abs().nan_to_num(0.0, 0.0)
    far = (units > APART).any(1)
    relative = torch.where(far, log_w - guide.log, -torch.inf)
    mass = evidence_of(relative.numpy(force=True))
    sure = 1.0 - 2.0 * mass.error
    added = (relative.exp().unsqueeze(1) * units.square()).mean(0).amax()
    if not sure > 0.0 or not float(added) * sure > math.expm1(2.0 * COARSE_SD):
        return 0.0
    to, best = int(relative.argmax()), int(draws.log_joint.argmax())
    t = torch.linspace(0.0, 1.0, WAY).to(x).unsqueeze(1)
    way = layout.unpack(torch.lerp(own[best], x[to], t).to(next(iter(values.values()))))
    with torch.no_grad(), poutine.block(), validation_enabled(False):
        log_p = map_draws(fitted.joint, joint_of, way, WAY, batch_size).nan_to_num(-torch.inf)
    falls = float(log_p.amin()) < float(torch.minimum(log_p[0], log_p[-1])) - BARRIER
    return math.log1p(math.exp(mass.log) * sure) if falls else 0.0


def moments(fitted: Fitted, layout: LatentLayout) -> tuple[Tensor, Tensor] | None:
    """Mean (d,) and covariance of the posterior, unconstrained, by draws of the prior; of few latent
    variables, and where these are worth :data:`WORTH` exact ones."""
    found = prior_weights(fitted.model, fitted.latent, DRAWS) if layout.dim <= FEW else None
    if found is None:
        return None
    log_w, values = found
    w = log_w.softmax(0).to(next(iter(values.values())))
    theta = layout.pack(values)
    if not float(w.square().sum()) * WORTH < 1.0 or not bool(theta[w > 0.0].isfinite().all()):
        return None
    theta = theta.where(w.unsqueeze(1) > 0.0, 0.0)
    rest = theta - (mean := w @ theta)
    return mean, (w.unsqueeze(1) * rest).mT @ rest
