"""NeuTra: Hamiltonian Monte Carlo in the coordinates of a trained guide."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.distributions.util import sum_rightmost
from pyro.infer.autoguide import AutoContinuous
from pyro.infer.reparam.reparam import Reparam
from pyro.poutine.plate_messenger import block_plate
from torch import Tensor
from torch.distributions import Transform, biject_to, constraints


class FamilyTransform(Transform):
    """eps (..., d) to z (..., d) as an ``AutoFamily`` draws, at the parameters of now."""

    domain = constraints.real_vector
    codomain = constraints.real_vector
    bijective = True

    def __init__(self, guide: Any) -> None:
        super().__init__()
        posterior = guide.get_posterior()
        self.family = posterior.family
        # a guide that puts a prior of its own in place of the model's draws another thing than the site
        if not self.family.has_transport or guide.replaced_priors:
            raise NotImplementedError(
                f"{type(guide).__name__} does not map d standard normal variables onto R^d, one to "
                f"one. NeuTra needs a guide that does: AutoCouplingFlow, AutoFlow, "
                f"AutoOrthogonalFlow, AutoFullRankNormal, AutoMatrixNormal or AutoMeanFieldNormal."
            )
        # optimizers write to parameters in place
        self.params = {name: p.detach().clone() for name, p in posterior.params.items()}
        self._last: tuple[Tensor, Tensor, Tensor] | None = None

    def _call(self, x: Tensor) -> Tensor:
        y, log_det = self.family.transport(self.params, x)
        self._last = x, y, log_det
        return y

    def _inverse(self, y: Tensor) -> Tensor:
        return self.family.noise_of(self.params, y)

    def log_abs_det_jacobian(self, x: Tensor, y: Tensor) -> Tensor:
        # asked for right after the call that found it: one pass through a flow instead of two
        if self._last is not None and self._last[0] is x and self._last[1] is y:
            return self._last[2]
        return self.family.transport(self.params, x)[1]

    def with_cache(self, cache_size: int = 1) -> Transform:
        return self  # what it would cache is kept anyway

    def __getstate__(self) -> dict[str, Any]:
        # tensors of a graph cannot be copied
        return {**super().__getstate__(), "_last": None}


class NeuTra(Reparam):
    """The model in the coordinates of a trained guide, for ``pyro.infer.NUTS`` and ``HMC``.

    A guide that draws z = T(eps), eps ~ N(0, I), with T a smooth one-to-one map onto R^d, turns the
    posterior into a density of eps,

        log p~(eps) = log p(y, T(eps)) + log |det dT/deps|,

    which is N(0, I) where the guide is exact.  HMC walks there, and T takes its samples back: exact up
    to the error of the chain, however bad the guide.  ``pyro.infer.reparam.NeuTraReparam`` adds
    log |det dT/deps| for *each entry* of the first latent site's batch, so samples another posterior
    for flows and sites in plates.  Not where the guide misses a mode.

    The result is called like the model.  Its one latent site is called ``name``; the sites of the
    guide depend on it deterministically.  Our guides are taken as they are now.

    Args:
        model: the model of the guide.  Latent sites that the guide does not know stay as they are.
        guide: a trained guide, ours or one of Pyro's with ``get_transform``.

    Raises:
        TypeError: for a guide without one flat latent vector.
        NotImplementedError: for a guide whose draws are not such a map, like those with factors.
        RuntimeError: for a guide that was never called.
        ValueError: when the model is run, if it lacks a latent site of the guide, observes one, scales
            or masks one.

    Source: Hoffman et al. (2019), "NeuTra-lizing bad geometry in Hamiltonian Monte Carlo".

    Example:
        >>> import pyro, pyro.distributions as dist, pyro_ngvi as ngvi
        >>> from pyro.infer import MCMC, NUTS
        >>> def model():
        ...     x = pyro.sample("x", dist.Normal(0.0, 1.0))
        ...     pyro.sample("y", dist.Normal(3 * x, 0.1))
        >>> guide = ngvi.fit(model, guide="AutoFullRankNormal", seed=0, progress=False).guide
        >>> reparameterised = ngvi.neutra(model, guide)
        >>> chain = MCMC(NUTS(reparameterised), 200, warmup_steps=50, disable_progbar=True)
        >>> chain.run()
        >>> draws = reparameterised.transform_sample(chain.get_samples())
        >>> bool((draws["y"] - 3 * draws["x"]).std() < 0.15)
        True
    """

    def __init__(self, model: Callable[..., Any], guide: AutoContinuous) -> None:
        if not hasattr(guide, "get_base_dist") or not hasattr(guide, "get_transform"):
            raise TypeError(
                f"neutra needs a guide with one flat latent vector (AutoContinuous), "
                f"such as pyro_ngvi.AutoFullRankNormal(model), and got {type(guide).__name__}."
            )
        self.guide = guide
        self.base: Any = guide.get_base_dist()
        self.transform: Any = guide.get_transform()
        prototype: Any = guide.prototype_trace
        self._sites = dict(prototype.iter_stochastic_nodes())
        frames = [frame for site in self._sites.values() for frame in site["cond_indep_stack"]]
        self._plates = {frame.dim for frame in frames if frame.vectorized}
        self.name = f"{next(iter(self._sites))}_shared_latent"
        self._values: dict[str, Tensor] | None = None
        self._reparameterised = poutine.reparam(model, config=self._reparam_of)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        self._values = None
        result = self._reparameterised(*args, **kwargs)
        if self._values is None or len(self._values) > 0:
            missing = self._sites if self._values is None else self._values
            raise ValueError(
                f"neutra: the model does not have the latent sites {sorted(missing)} of the guide. Is "
                f"it a guide of another model?"
            )
        return result

    def _reparam_of(self, site: Any) -> NeuTra | None:
        name = site["name"]
        if name not in self._sites:
            return None
        scaled = site["mask"] is not None or bool((torch.as_tensor(site["scale"]) != 1.0).any())
        if site["is_observed"] or scaled:
            raise ValueError(
                f"neutra: the site {name!r} is latent in the guide, and here it is observed, or scaled "
                f"or masked together with the Jacobian of the guide. Train a guide of the model as it "
                f"is now, and scale or mask the likelihood alone."
            )
        return self

    def apply(self, msg: Any) -> Any:
        fn = msg["fn"]
        if self._values is None:
            self._values = self._draw()
        latent = self._values.pop(msg["name"])
        transform: Any = biject_to(fn.support)
        value = transform(latent)
        log_det = transform.log_abs_det_jacobian(latent, value)
        log_det = sum_rightmost(log_det, log_det.dim() - value.dim() + fn.event_dim)
        point = dist.Delta(value, fn.log_prob(value) + log_det, event_dim=fn.event_dim)
        return {"fn": point, "value": value, "is_observed": True}

    def _draw(self) -> dict[str, Tensor]:
        """Draw the shared latent outside the plates of the model, and unpack what it makes."""
        with ExitStack() as stack:
            for dim in self._plates:
                stack.enter_context(block_plate(dim=dim, strict=False))
            noise: Any = pyro.sample(self.name, self.base.mask(False))
            z = self.transform(noise)
            log_det: Any = self.transform.log_abs_det_jacobian(noise, z)
            # Pyro's own guides may leave it by entry
            log_det = sum_rightmost(log_det, log_det.dim() - z.dim() + 1)
            pyro.factor(f"{self.name}_log_det", log_det)
        return self._unpack(z)

    def _unpack(self, z: Tensor) -> dict[str, Tensor]:
        guide: Any = self.guide
        return {site["name"]: value for site, value in guide._unpack_latent(z)}

    @torch.no_grad()
    def transform_sample(self, samples: Mapping[str, Tensor] | Tensor) -> dict[str, Tensor]:
        """Samples of a chain, or the shared latent (..., d), as values (..., *shape) by site."""
        latent = samples if isinstance(samples, Tensor) else samples[self.name]
        # room for the plates of the sites, which the dimension of the draws would be taken for
        room = max(len(site["fn"].batch_shape) for site in self._sites.values())
        z = self.transform(latent.reshape(-1, latent.shape[-1]))
        values = self._unpack(z.reshape(len(z), *[1] * room, z.shape[-1]))
        result = {}
        for name, site in self._sites.items():
            transform: Any = biject_to(site["fn"].support)
            result[name] = transform(values[name]).reshape(latent.shape[:-1] + site["value"].shape)
        return result


neutra = NeuTra
