"""What no guide over one flat vector can stand for: refused at its first call.

* An entry whose prior is masked out, and on which nothing else depends: the ELBO grows without bound
  as q widens there.
* An angle: its density on the circle is periodic on the real line, where torch puts it.
* A site in a subsampled plate, of which a run shows a part.
* A density with bounds that its distribution does not tell: a ``TransformedDistribution`` by an
  ``AffineTransform`` says that its support is the real line, whatever that of its base is.
* A support that moves with other latent sites, such as that of x ~ Uniform(0, s), or with a parameter
  that is learned: the guide maps R^d to the supports of the first run.

The first and the last show in a further run with the latent sites moved, where a site is masked or a
support has tensors for bounds.  Not checked: models that fail there.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from pyro import poutine
from torch import Tensor
from torch.distributions import (
    AffineTransform,
    TransformedDistribution,
    VonMises,
    biject_to,
    constraints,
)

from ..linalg.host import fixed_normal, own_random_state
from ..runtime.checks import bounds, check_whole_plates, moved
from ..runtime.density import Sites, innermost, is_minibatch, plain_support, sum_log_prob
from ..runtime.pyro_adapter import masks_of
from ..runtime.run import Minibatches, run_plainly
from ..runtime.told_in import told_in

Values = dict[str, Tensor]


def check_latents(
    guide: str, model: Callable[..., Any], sites: Sites, args: Any, kwargs: Any
) -> None:
    """Run ``model``, which hides no site, once more and compare with ``sites``, the latent ones."""
    check_whole_plates(guide, sites)
    supports = {name: bounds(site["fn"].support) for name, site in sites.items()}
    for name, site in sites.items():
        if isinstance(innermost(site["fn"]), VonMises):
            raise ValueError(
                f"{guide}: the latent site {name!r} is an angle, whose density has no end on the real "
                f'line. Write z = pyro.sample("{name}", dist.Uniform(-math.pi, math.pi)) and '
                f'pyro.factor("prior", dist.VonMises(loc, concentration).log_prob(z)).'
            )
        with told_in("models.md#bounds-that-a-distribution-hides"):
            if _hides_bounds(innermost(site["fn"])):
                raise ValueError(
                    f"{guide}: the prior of {name!r} is an affine TransformedDistribution, which says "
                    f"that its support is the real line, and its base has bounds. Sample the base, and "
                    f'move it: pyro.deterministic("{name}", loc + scale * x).'
                )

    masked = {name: mask for name, site in sites.items() if (mask := _masked(site)).any()}
    if not masked and not any(isinstance(v, Tensor) for found in supports.values() for v in found):
        return
    values = _elsewhere(sites, 1.0)

    def run(at: Values) -> Sites:
        with poutine.block(), own_random_state(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return run_plainly(model, values | at, args, kwargs, Minibatches())

    leaves = {name: values[name].clone().requires_grad_() for name in masked}
    try:
        with torch.enable_grad():
            again = run(leaves)
    except Exception:  # whatever a model may raise at values that are not its own choice
        return
    for name, before in supports.items():
        now = bounds(again[name]["fn"].support) if name in again else before
        learned = any(isinstance(v, Tensor) and v.requires_grad for v in now)
        if learned or moved(before, now, bool):
            raise ValueError(
                f"{guide}: the support of the latent site {name!r} is not fixed: it moves with other "
                f"latent sites or a learned parameter. Move the value instead: for x ~ Uniform(0, s) "
                f"write x = s * pyro.sample('u', Uniform(0, 1)), or detach s."
            )
    try:
        unseen = _unseen(masked, leaves, again, run, _elsewhere(sites, -3.0))
    except Exception:  # a density may not be defined there
        return
    for name, lost in unseen.items():
        raise ValueError(
            f"{guide}: {int(lost.sum())} of the {lost.numel()} entries of the latent site "
            f"{name!r} are masked out and nothing else depends on them, so q would widen there "
            "without end. Mask the observed site alone, by poutine.mask, not by obs_mask=."
        )


def _hides_bounds(fn: Any) -> bool:
    """Whether a distribution moves one with bounds, and does not move these."""
    return (
        isinstance(fn, TransformedDistribution)
        and type(fn).support is TransformedDistribution.support
        and all(isinstance(t, AffineTransform) for t in fn.transforms)
        and not isinstance(plain_support(fn.base_dist.support), type(constraints.real))
    )


def _elsewhere(sites: Sites, share: float) -> Values:
    """Values some ``share`` from those of the first run, in its supports."""
    values = {}
    for seed, (name, site) in enumerate(sites.items()):
        transform: Any = biject_to(site["fn"].support)
        u = transform.inv(site["value"])
        values[name] = transform(u + share * fixed_normal(*u.shape, seed=seed).to(u))
    return values


def _masked(site: Any) -> Tensor:
    """Which entries of a latent site have no prior."""
    masked = torch.zeros_like(site["value"], dtype=torch.bool)
    for mask, event_dim in masks_of(site):
        mask = torch.as_tensor(mask, dtype=torch.bool, device=masked.device)
        masked = masked | ~mask.reshape(mask.shape + (1,) * event_dim)
    return masked


def _unseen(
    masked: Values, leaves: Values, again: Sites, run: Callable[[Values], Sites], far: Values
) -> Values:
    """Masked entries that the log joint does not depend on, by site.

    Where the gradient is zero, moving them to ``far`` decides.  Of a minibatch nothing is known.
    """
    if not masked or any(map(is_minibatch, again.values())):
        return {}
    with torch.enable_grad():
        here = sum_log_prob(again)
        total = here + 0.0 * sum(leaf.sum() for leaf in leaves.values())
        grads = torch.autograd.grad(total, list(leaves.values()))
    found = {}
    for (name, leaf), grad in zip(leaves.items(), grads, strict=True):
        lost = masked[name] & (grad == 0.0)
        # a site masked as a whole has a flat prior, and not every entry need be seen
        if lost.all() if masked[name].all() else lost.any():
            with torch.no_grad():
                there = torch.where(lost, far[name], leaf)
                if bool(sum_log_prob(run({name: there})) == here):
                    found[name] = lost
    return found
