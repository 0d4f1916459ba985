r"""Covariances that a mean-field guide hides: how its means answer a small change of the model.

A mean-field Gaussian has the sds of conditionals, too small where latents depend on each other.  Its
means are better, and so is what they do when log p is tilted by t g(z):

    Cov(g) = d E_t[g] / dt at t = 0                                                        (1)

holds for the posterior, and *defines* the linear-response covariance of a fit.  With eta the
parameters of q, H the Hessian of the negative ELBO at its minimum and J = dE_q[g] / deta,

    Cov_LR(g) = J H^-1 J'                                                                  (2)

(Giordano, Broderick & Jordan 2018, "Covariances, robustness, and variational Bayes", JMLR 19(51);
with fixed draws, Giordano, Ingram & Broderick 2024, JMLR 25(18)).

Here eta = (a, m) at zero, in units of the fit: for fixed standard normal e_s

    z_s = mu + sigma * (a + (1 + m) * e_s),
    loss(eta) = -mean_s log p(y, z_s) - sum_j log(1 + m_j),

z_s being linear in eta, H = mean_s W_s' A_s W_s + diag(0, 1), W_s = (1, diag(e_s)), where A_s is the
Hessian of -log p in these units.  So H is positive definite for *any* draws where log p is concave
(as the ELBO is: Challis & Barber 2013, JMLR 14), and (2) for g = z exact for a Gaussian posterior.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pyro.distributions as dist
import torch
from torch import Tensor
from torch.func import grad, jacrev, vjp, vmap

from ..families import MeanFieldNormal
from ..families.vectors import entry_name, pack, unpack
from ..linalg.hessian import ROWS
from ..linalg.host import fixed_normal, own_random_state
from ..linalg.positive import solve_positive
from ..probing.kinks import kinked_sites
from ..runtime.density import LatentLayout, Site, Sites, innermost, is_latent
from ..runtime.model_density import MOST_NUMBERS, Largest, ModelDensity
from ..runtime.run import Minibatches, run_particles, run_plainly
from .draws import Fitted, random_state

#: Newton steps at most, and nats that may be left to gain after them
MOST_STEPS, ENOUGH = 20, 1e-4


@dataclass(frozen=True)
class LinearResponse:
    """Linear-response moments of the latent sites asked for, in their constrained space.

    Attributes:
        mean: the guide's means, of the shape of each site; so
        sd: standard deviations by linear response, the roots of the diagonal of ``covariance``.
        guide_sd: the guide's own: far smaller where it lacks a correlation.
        covariance: between all entries, (K, K): sites in the order of ``sd``, each flattened by rows.

    Example:
        >>> import pyro, torch, pyro.distributions as dist, pyro_ngvi as ngvi
        >>> C = torch.tensor([[1.0, 0.6], [0.6, 1.0]])
        >>> model = lambda: pyro.sample("z", dist.MultivariateNormal(torch.zeros(2), C))
        >>> guide = pyro.infer.autoguide.AutoNormal(model, init_scale=0.8)  # the mean-field optimum
        >>> ngvi.diagnostics.linear_response(model, guide).covariance.round(decimals=2)
        tensor([[1.0000, 0.6000],
                [0.6000, 1.0000]])
    """

    mean: dict[str, Tensor]
    sd: dict[str, Tensor]
    guide_sd: dict[str, Tensor]
    covariance: Tensor = field(repr=False)


@torch.no_grad()  # torch.func differentiates nonetheless
def linear_response(
    model: Callable[..., Any],
    guide: Callable[..., Any],
    *args: Any,
    sites: Collection[str] | None = None,
    num_samples: int = 128,
    seed: int = 0,
    **kwargs: Any,
) -> LinearResponse:
    """Standard deviations and covariances that a fitted mean-field guide should have had:

        Cov = J H^-1 J',    J = dE_q[z] / deta,   H the Hessian of the negative ELBO in eta,

    eta the parameters of q (Giordano, Broderick & Jordan 2018, JMLR 19(51)).  Exact for Gaussian
    posteriors.  Newton steps, mostly two or three, go from the guide, which is left
    alone, to the optimum on fixed draws, each by ``2 d num_samples`` products with the Hessian of the
    model; above d = 1,000 conjugate gradients need fewer, where ``sites`` have few entries.

    When not to use it: where means are wrong, as with several modes, and where the posterior is far
    from Gaussian (funnels), as it is of first order: :func:`pyro_ngvi.diagnose` tells.  Up to a few
    thousand latents :class:`pyro_ngvi.AutoFullRankNormal` has correlations itself.

    Args:
        model: the Pyro model; its marked discrete sites are summed out.
        guide: a trained guide of independent normals in unconstrained space: ``AutoMeanFieldNormal``,
            Pyro's ``AutoNormal`` and ``AutoDiagonalNormal``, lists of them.
        args: those of both, and ``kwargs``: the full data.
        sites: names of latent sites, by default all.
        num_samples: draws, in antithetic pairs that have each latent's mean and variance exactly.
        seed: of these draws.

    Raises:
        ValueError: for another guide, an unknown site, a density whose gradient jumps (Laplace priors),
            a guide near no minimum, where H is positive definite, and as :func:`pyro_ngvi.khat`.

    Example:
        >>> import pyro, pyro.distributions as dist, torch
        >>> from pyro.infer.autoguide import AutoNormal
        >>> precision = torch.tensor([[1.0, 0.9], [0.9, 1.0]])
        >>> prior = dist.MultivariateNormal(torch.zeros(2), precision_matrix=precision)
        >>> model = lambda: pyro.sample("z", prior)
        >>> guide = AutoNormal(model, init_scale=1.0)  # the mean-field optimum, as it happens
        >>> found = linear_response(model, guide)
        >>> [round(float(sd["z"][0]), 3) for sd in (found.guide_sd, found.sd)]  # 1, 0.19^(-1/2)
        [1.0, 2.294]
    """
    with random_state(seed):
        fitted = Fitted(model, guide, args, kwargs)
        density = ModelDensity(model, args, kwargs)
        mu, sigma = _independent_normals(fitted, density.layout)
    layout = density.layout
    chosen = list(layout.transforms) if sites is None else list(sites)
    if not chosen or (unknown := set(chosen) - layout.transforms.keys()):
        named = sorted(unknown) if chosen else "without a name"
        raise ValueError(
            f"The model has no latent sites {named}; choose sites among {list(layout.transforms)}."
        )
    if num_samples < 2:
        raise ValueError(f"num_samples is {num_samples}; give a pair of draws, 2, or more.")
    _refuse_kinks(density, mu, args, kwargs)
    noise = antithetic(num_samples, len(mu), seed).to(mu)

    def points(eta: Tensor, e: Tensor) -> Tensor:
        a, m = eta.chunk(2)
        return mu + sigma * (a + (1.0 + m) * e)

    def loss(eta: Tensor, e: Tensor) -> Tensor:
        entropy = eta.chunk(2)[1].log1p().sum()
        return -(density(points(eta, e)).sum() + len(e) * entropy) / len(noise)

    def moments(eta: Tensor) -> Tensor:
        values = layout.unpack(points(eta, noise))
        return pack({name: values[name].mean(0) for name in chosen})

    with own_random_state(), Largest() as largest:
        density(mu[None])
    pieces = noise.split(max(1, MOST_NUMBERS // (ROWS * largest.numel)))

    def product(eta: Tensor, V: Tensor) -> Tensor:
        total = torch.zeros_like(V)
        for e in pieces:
            made: Any = vjp(grad(partial(loss, e=e)), eta)
            total += vmap(lambda v, pull=made[1]: pull(v)[0], chunk_size=ROWS)(V.to(eta))
        return total

    eta = torch.zeros_like(mu).repeat(2)
    fisher = torch.tensor([1.0, 2.0]).to(eta).double().repeat_interleave(len(mu))
    for _ in range(MOST_STEPS):
        J: Any = jacrev(moments, chunk_size=ROWS)(eta)
        g = sum((grad(loss)(eta, e) for e in pieces), torch.zeros_like(eta))
        B = torch.cat([J, g[None]]).double()
        X, direction = solve_positive(partial(product, eta), B, fisher)
        # a natural-gradient step where H is not positive
        step = -(X[-1] if direction is None else B[-1] / fisher).to(eta)
        value = sum(loss(eta, e) for e in pieces)
        enough = 2.0 * max(ENOUGH, 64.0 * torch.finfo(g.dtype).eps * abs(float(value)))
        if direction is None and float(-g @ step) <= enough:
            break
        shorter = (eta + 0.5**k * step for k in range(20))
        eta = next((x for x in shorter if bool(sum(loss(x, e) for e in pieces) <= value)), eta)
    else:
        where = int((step if direction is None else direction).abs().argmax()) % len(mu)
        name = entry_name(where, layout.unconstrained_shapes)
        raise ValueError(
            f"The loss has no minimum within {MOST_STEPS} Newton steps of the guide: it falls on along "
            f"{name!r}. Train longer, or raise num_samples."
        )
    covariance = (B[:-1] @ X[:-1].mT).to(mu)
    values = layout.unpack(points(torch.zeros_like(eta), noise))
    mean = {name: values[name].mean(0) for name in chosen}
    sd = unpack(covariance.diagonal().sqrt(), mean)
    guide_sd = {name: values[name].var(0, correction=0).sqrt() for name in chosen}
    return LinearResponse(mean, sd, guide_sd, 0.5 * (covariance + covariance.mT))


def antithetic(n: int, d: int, seed: int) -> Tensor:
    """Standard normal noise (n, d) in pairs e and -e, each column with variance 1 exactly."""
    half = fixed_normal(max(1, n // 2), d, seed=seed)
    half = half / half.square().mean(0).sqrt()
    return torch.cat([half, -half])


def _independent_normals(fitted: Fitted, layout: LatentLayout) -> tuple[Tensor, Tensor]:
    """Means and sds (d,) of a guide's independent normals, in the order of the model's sites."""

    def normals(sites: Sites) -> list[Site]:
        return [x for x in sites.values() if is_latent(x) and not isinstance(x["fn"], dist.Delta)]

    def flat(parts: Iterable[Tensor]) -> Tensor:
        return torch.cat([x.reshape(-1) for x in parts])

    drawn, again = (run_plainly(fitted.guide, {}, (), {}, Minibatches()) for _ in range(2))
    found = normals(drawn)
    kinds = [getattr(x["fn"], "family", innermost(x["fn"])) for x in found]
    if all(isinstance(kind, dist.Normal | MeanFieldNormal) for kind in kinds):
        z, mu = flat(x["value"] for x in found), flat(x["fn"].mean for x in found)
        # a normal that depends on another draw has another mean each time
        same = torch.equal(mu, flat(x["fn"].mean for x in normals(again)))
        made = layout.unpack(z[None]) if same and len(z) == layout.dim else None
        if made and all(torch.allclose(x[0], drawn[name]["value"]) for name, x in made.items()):
            return mu, flat(x["fn"].variance.sqrt() for x in found)
    kind = getattr(fitted.guide.func, "__name__", type(fitted.guide.func).__name__)
    raise ValueError(
        f"linear_response corrects independent normals in unconstrained space, and {kind} is "
        f"none or has its sites in another order. Train pyro_ngvi.AutoMeanFieldNormal(model)."
    )


def _refuse_kinks(density: ModelDensity, mu: Tensor, args: Any, kwargs: Any) -> None:
    def run(t: Tensor, reduce: Callable[[Sites], Any]) -> Any:
        values, log_det = density.layout.unpack_with_log_det(t[None])
        how: Any = {"minibatches": Minibatches()}
        return run_particles(density.model, reduce, values, 1, args, kwargs, **how), log_det[0]

    for name in kinked_sites(run, mu, density.layout, lambda _: True):
        raise ValueError(
            f"The gradient of the log probability of {name!r} jumps, as that of Laplace and |x| does: "
            f"second derivatives miss that. Train pyro_ngvi.AutoFullRankNormal(model) for its sds."
        )
