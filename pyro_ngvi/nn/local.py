r"""Local reparameterisation: draws of a layer's latent vectors for every datum.

For a likelihood that is a product over data the bound has one expectation per datum,

    ELBO = sum_i E_q(g) [log p(y_i | f(x_i; g))] - KL(q(g) || p(g)),                          (1)

so each may have a draw g_i ~ q(g) of its own, and the estimate stays unbiased (Kingma, Salimans &
Welling 2015, section 2.2).  With one draw for all data the noise of its gradient is

    Var(sum_i grad_i) = sum_i Var(grad_i) + 2 sum_{i<j} Cov(grad_i, grad_j),

and the covariances, nearly all of it where there are many data, are zero with a draw for each.  Rossi,
Marmin & Filippone (2020) do this for matrices S1 H diag(g) H S2, where it costs little more:
the product is taken datum by datum anyway.

The KL term of (1) is exact by default, as in that paper, or ("sampled") stays log q(g) - log p(g) at
the shared draw.

Variance of the gradient of one particle (its trace, in the local frame of a mean-field q), over that
with one draw for all, after so many steps of NGVB; 256 data, 8 inputs, noise of sd 0.2 (first row 0.5):

    outputs of the layers    0 steps    100 steps    1,000 steps
    1                           0.02           19             21
    64, 1                       0.03         0.21           0.08
    64, 64, 1                   0.02         0.06           0.04

The ELBO of the two networks after 1,000 steps of one particle was 38 to 113 nats higher, in six runs of
six; a step took 1.9 times as long (draws of M K numbers in place of K).

The first row shows when not to use it.  Sticking the landing (:mod:`pyro_ngvi.guides.posterior`) lets
the noise of log q cancel that of the likelihood as q approaches the posterior, and it cannot cancel
that of other draws: near the optimum of a family that nearly holds the posterior, as for a linear
model, the shared draw has the smaller noise.

Also not for a likelihood that is no product over the first dimension of x, for rows that share a datum
but are folded into that dimension (patches of an image), nor for guides that correlate g with other
sites, which are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import pyro
import torch
from pyro.infer.autoguide import AutoGuide
from pyro.poutine.messenger import Messenger
from torch import Tensor

from ..guides.reparam import normal_of
from ._site_posterior import NoFactor, SitePosteriors
from .weights import over_rows

__all__ = ["LocalModel", "draws_for_data", "local_reparameterization"]

_active: ContextVar[_LocalDraws | None] = ContextVar("_active", default=None)


def local_reparameterization(
    model: Callable[..., Any], guide: AutoGuide, *, kl: str = "exact"
) -> LocalModel:
    r"""``model``, with draws for every datum in each of its Walsh-Hadamard layers.

    The result takes the place of the model in ``SVI`` and has the same latent sites:

        SVI(local_reparameterization(model, guide), guide, optim, loss)

    While gradients are recorded and the guide gives the value of a layer's site "g", every datum, an
    entry of the first dimension of the layer's input, gets a draw of its own from q(g), the same at
    each call of the layer; "bias" likewise, where the guide does not correlate it with other sites.
    Otherwise (evaluation, prediction, curvature) all data share the values of the sites.  The ELBO
    and its expected gradient are those of the model; :mod:`pyro_ngvi.nn.local` says when their noise
    is smaller. The result is a function, no module: hand the model itself to ``khat``, ``to_arviz``
    and ``Predictive``, and call its ``train()`` and ``eval()``.

    Args:
        model: a Pyro model with :class:`~pyro_ngvi.nn.WalshHadamardLinear` layers, whose likelihood
            is a product over data.
        guide: the guide of ``model``, in which g is independent of all other sites: a mean-field
            guide of this package, Pyro's ``AutoNormal`` or ``AutoDiagonalNormal``, or an
            ``AutoGuideList`` where it is the only site of a guide of this package.
        kl: "exact" adds to the model a factor of mean zero, "<site>_kl", that puts the closed form
            of KL(q(g) || p(g)) in the place of log q(g) - log p(g); "sampled" does not.

    Raises:
        TypeError: when ``guide`` is no autoguide.
        ValueError: for another ``kl``; when the model is run, for a site that the guide lacks or
            correlates with others, a prior of g that is not normal, and inputs of a layer that do
            not say what a datum is.
        RuntimeError: when the model is run with draws of another guide, while this was never called.

    Example:
        >>> import pyro, torch, pyro.distributions as dist
        >>> from pyro.infer import SVI
        >>> import pyro_ngvi as ngvi
        >>> class Regression(pyro.nn.PyroModule):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.layer = ngvi.nn.WalshHadamardLinear(4, 1)
        ...     def forward(self, x, y):
        ...         mean = self.layer(x).squeeze(-1)
        ...         with pyro.plate("data", len(x)):
        ...             pyro.sample("y", dist.Normal(mean, 0.5), obs=y)
        >>> model = Regression()
        >>> guide = ngvi.AutoMeanFieldNormal(model)
        >>> optim = ngvi.NGVB(guide, others=pyro.optim.Adam({"lr": 0.01}))
        >>> local = ngvi.nn.local_reparameterization(model, guide)
        >>> svi = SVI(local, guide, optim, ngvi.BatchedELBO(2))
        >>> x = torch.randn(50, 4)
        >>> loss = svi.step(x, x.sum(-1))
    """
    return LocalModel(model, guide, kl=kl)


class LocalModel:
    """The model that :func:`local_reparameterization` makes; see there."""

    def __init__(self, model: Callable[..., Any], guide: AutoGuide, *, kl: str = "exact") -> None:
        if kl not in ("exact", "sampled"):
            raise ValueError(f'kl must be "exact" or "sampled", got {kl!r}.')
        if not isinstance(guide, AutoGuide):
            raise TypeError(
                f"local_reparameterization reads q(g) from an autoguide, such as "
                f"pyro_ngvi.AutoMeanFieldNormal(model), and got {type(guide).__name__}."
            )
        self.model, self.guide, self.kl = model, guide, kl

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.model(*args, **kwargs)
        draws = _LocalDraws(self.guide)
        token = _active.set(draws)
        try:
            with draws:
                result = self.model(*args, **kwargs)
        finally:
            _active.reset(token)
        if self.kl == "exact":
            for name, term in draws.corrections():
                pyro.factor(f"{name}_kl", term, has_rsample=True)
        return result


def draws_for_data(value: Tensor, x: Tensor, needed: bool = True) -> Tensor:
    """For a layer's ``forward``: its site's ``value`` (..., K), or a draw for each datum of ``x``.

    The result broadcasts with the rows of ``x`` (..., in).  Where the site cannot have draws of its
    own, a ``value`` that is not ``needed`` stays shared.
    """
    shared = over_rows(value, 1)
    draws = _active.get()
    return shared if draws is None else draws.for_data(value, shared, x, needed)


class _LocalDraws(Messenger):
    """During one run of a model: which tensor is the value of which site, and the draws for data."""

    def __init__(self, guide: AutoGuide) -> None:
        super().__init__()
        self.posteriors = SitePosteriors(guide, "local_reparameterization")
        self.sites: dict[int, Any] = {}
        self.drawn: dict[str, tuple[torch.Size, Tensor]] = {}

    def _pyro_post_sample(self, msg: Any) -> None:
        # only a guide in training gives a value that is part of the graph of parameters
        if not msg["is_observed"] and _unwrapped(msg["value"]).requires_grad:
            self.sites[id(msg["value"])] = msg.copy()

    def for_data(self, value: Tensor, shared: Tensor, x: Tensor, needed: bool) -> Tensor:
        site = self.sites.get(id(value))
        if site is None or x.dim() < 2:
            return shared
        name = site["name"]
        lead = _lead(name, shared, x)
        if name in self.drawn:
            before, drawn = self.drawn[name]
            if before != lead:
                raise ValueError(
                    f"The layer of the site {name!r} is called for data of shapes {tuple(before)} "
                    f"and {tuple(lead)} in one run of the model, so that a datum cannot keep its "
                    f"draw. Use the model without local_reparameterization."
                )
            return drawn
        try:
            q = self.posteriors[name]
        except NoFactor:
            if needed:
                raise
            return shared
        drawn = q.family.draw(q.params, lead)
        self.drawn[name] = lead, drawn
        return drawn

    def corrections(self) -> Iterator[tuple[str, Tensor]]:
        """log q(g) - log p(g) - KL(q || p), of mean zero, for each site with draws for data."""
        for site in self.sites.values():
            name, fn, g = site["name"], site["fn"], site["value"]
            if name not in self.drawn:
                continue
            normal = normal_of(fn)
            if normal is None:
                raise ValueError(
                    f"The prior of {name!r} is not independent normals, and its KL has no closed form "
                    f'here: use local_reparameterization(model, guide, kl="sampled").'
                )
            q = self.posteriors[name]
            yield name, q.log_prob(g) - fn.log_prob(g) - q.kl(*normal)


def _lead(name: str, g: Tensor, x: Tensor) -> torch.Size:
    """The shape in front of (K,) of the draws for data: a datum is an entry of x's first dimension."""
    if g.dim() == 1:
        return torch.Size((x.shape[0], *(1,) * (x.dim() - 2)))
    if x.dim() > g.dim():
        raise ValueError(
            f"With vectorised particles {name!r} has shape {tuple(g.shape)} and its layer an input of "
            f"shape {tuple(x.shape)}, in which data and particles cannot be told apart. Use "
            f"pyro_ngvi.BatchedELBO."
        )
    return torch.broadcast_shapes(g.shape[:-1], x.shape[:-1])


def _unwrapped(x: Tensor) -> Tensor:
    """The tensor inside the wrappers of ``torch.func``, which hide the graph outside of them."""
    if hasattr(torch.func, "debug_unwrap"):  # from torch 2.7 on
        return torch.func.debug_unwrap(x)
    functorch: Any = torch._C._functorch  # pyright: ignore[reportAttributeAccessIssue]
    while functorch.is_functorch_wrapped_tensor(x):
        x = functorch.get_unwrapped(x)
    return x
