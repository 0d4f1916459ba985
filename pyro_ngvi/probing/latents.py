"""What no guide over one flat vector can stand for: refused at its first call.

* An entry without a density: its prior is masked out, and nothing else depends on it.  q has a density
  there, so the ELBO grows without bound as q widens.  A flat prior, ``.mask(False)`` on a site that the
  likelihood sees, is not meant.
* An angle: its density on the circle is periodic on the real line, where torch puts it, and q has no
  end there either.
* A site in a subsampled plate, of which a run shows a part.
* A support that moves with other latent sites, such as that of x ~ Uniform(0, s), or with a parameter
  that is learned.  The guide maps R^d to the supports of the first run, whatever s is.

The first and the last show in further runs of the model, with the latent sites moved: by the log joint,
by the transforms to the supports, which must map the same numbers to the same values, and by a support
whose bounds require gradients.  There is none where all supports are the real line and nothing is
masked.  Not checked: a model that fails at the moved values, and what only other arguments would show.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from pyro import poutine
from torch import Tensor
from torch.distributions import VonMises, biject_to

from ..linalg.host import fixed_normal, own_random_state
from ..runtime.checks import bounds, check_whole_plates
from ..runtime.density import innermost, is_minibatch, site_log_prob
from ..runtime.pyro_adapter import masks_of
from ..runtime.run import Minibatches, run_plainly

__all__ = ["check_latents"]


def check_latents(
    guide: str, model: Callable[..., Any], sites: dict[str, Any], args: Any, kwargs: Any
) -> None:
    """Run ``model``, which hides no site, once more and compare with ``sites``, the latent ones."""
    check_whole_plates(guide, sites)
    _check_angles(guide, sites)
    masked = {name: mask for name, site in sites.items() if (mask := _masked(site)).any()}
    moved, values = _moved(sites)
    if not masked and _all_real(moved, values):
        return
    leaves = {name: values[name].clone().requires_grad_() for name in masked}
    try:
        with torch.enable_grad():
            again = _run(model, values | leaves, args, kwargs)
    except Exception:  # whatever a model may raise at values that are not its own choice
        return
    for name, u in moved.items():
        if name in again and _differ(values[name], again[name], u):
            raise ValueError(
                f"{guide}: the support of the latent site {name!r} is not fixed: it moves with "
                "other latent sites, and the guide would keep the first. Move the value instead: "
                "for x ~ Uniform(0, s) write x = s * pyro.sample('u', Uniform(0, 1))."
            )
        numbers = bounds(again[name]["fn"].support) if name in again else []
        if any(isinstance(v, Tensor) and v.requires_grad for v in numbers):
            raise ValueError(
                f"{guide}: the support of the latent site {name!r} is made of a tensor that requires "
                f"gradients, and the guide would keep that of the first run. Instead of x ~ "
                f"Uniform(0, hi) "
                f'write x = hi * pyro.sample("u", Uniform(0, 1)), or hi.detach().'
            )
    if masked:
        _, elsewhere = _moved(sites, -3.0)

        def log_joint(name: str, where: Tensor) -> Tensor:
            there = torch.where(where, elsewhere[name], values[name])
            return _log_joint(_run(model, values | {name: there}, args, kwargs))

        _check_masked(guide, masked, leaves, again, log_joint)


def _check_angles(guide: str, sites: dict[str, Any]) -> None:
    for name, site in sites.items():
        if isinstance(innermost(site["fn"]), VonMises):
            raise ValueError(
                f"{guide}: the latent site {name!r} is an angle: its density has no end on the real "
                f"line. "
                f'Write z = pyro.sample("{name}", dist.Uniform(-math.pi, math.pi)) and '
                f'pyro.factor("prior", dist.VonMises(loc, concentration).log_prob(z)).'
            )


def _moved(
    sites: dict[str, Any], share: float = 1.0
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Unconstrained values, some ``share`` from the first run's, and their images in its supports."""
    moved, values = {}, {}
    for seed, (name, site) in enumerate(sites.items()):
        transform: Any = biject_to(site["fn"].support)
        u = transform.inv(site["value"])
        moved[name] = u + share * fixed_normal(*u.shape, seed=seed).to(u)
        values[name] = transform(moved[name])
    return moved, values


def _all_real(moved: dict[str, Tensor], values: dict[str, Tensor]) -> bool:
    return all(
        u.shape == values[n].shape and bool((u == values[n]).all()) for n, u in moved.items()
    )


def _run(model: Any, values: dict[str, Tensor], args: Any, kwargs: Any) -> dict[str, Any]:
    with poutine.block(), own_random_state(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return run_plainly(model, values, args, kwargs, Minibatches())


def _differ(value: Tensor, site: Any, u: Tensor) -> bool:
    try:
        now: Any = biject_to(site["fn"].support)
        other = now(u)
    except Exception:  # no transform there, or not of this shape: the run itself says so better
        return False
    few = 4.0 * torch.finfo(value.dtype).eps
    same_shape = other.shape == value.shape
    return same_shape and not torch.allclose(value, other, rtol=few, atol=0.0, equal_nan=True)


def _masked(site: Any) -> Tensor:
    """Which entries of a latent site have no prior."""
    shape = site["value"].shape
    masked = torch.zeros(shape, dtype=torch.bool, device=site["value"].device)
    for mask, event_dim in masks_of(site):
        mask = torch.as_tensor(mask, dtype=torch.bool, device=masked.device)
        masked = masked | ~mask.reshape(mask.shape + (1,) * event_dim)
    return masked


def _log_joint(sites: dict[str, Any]) -> Tensor:
    total: Any = sum(site_log_prob(site)[1].sum() for site in sites.values())
    return total


def _check_masked(
    guide: str,
    masked: dict[str, Tensor],
    leaves: dict[str, Tensor],
    again: dict[str, Any],
    log_joint: Callable[[str, Tensor], Tensor],
) -> None:
    """Refuse masked entries that the log joint does not depend on.

    Where the gradient is zero, ``log_joint(name, entries)`` moves these far to the other side: a
    likelihood may have no gradient, or be flat where the run was.
    """
    if any(map(is_minibatch, again.values())):
        return  # other data may see what these do not
    try:
        with torch.enable_grad():
            here = _log_joint(again)
            total = here + 0.0 * sum(leaf.sum() for leaf in leaves.values())
            grads = torch.autograd.grad(total, list(leaves.values()))
    except Exception:  # a density may not be defined there
        return
    for name, grad in zip(leaves, grads, strict=True):
        lost = masked[name] & (grad == 0.0)
        # a site masked as a whole has a flat prior, and not every entry need be seen
        if not (lost.all() if masked[name].all() else lost.any()):
            continue
        try:
            with torch.no_grad():
                depends = not bool(log_joint(name, lost) == here)
        except Exception:
            return
        if not depends:
            raise ValueError(
                f"{guide}: {int(lost.sum())} of the {lost.numel()} entries of the latent site "
                f"{name!r} are masked out and nothing else depends on them, so q would widen there "
                "without end. Mask the observed site alone: they keep their prior."
            )
