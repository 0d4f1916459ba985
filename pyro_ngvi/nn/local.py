r"""Local reparameterisation: draws of a layer's latent vectors for every datum.

For a likelihood that is a product over data the bound has one expectation per datum,

    ELBO = sum_i E_q(g) [log p(y_i | f(x_i; g))] - KL(q(g) || p(g)),

so each may have a draw g_i ~ q(g) of its own (Kingma, Salimans & Welling 2015, section 2.2; Rossi,
Marmin & Filippone 2020 for matrices S1 H diag(g) H S2).  The covariances between the gradients of
different data, nearly all of the noise of their sum where there are many, are then zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import pyro
import torch
from pyro.infer.autoguide import AutoGuide, AutoGuideList
from pyro.poutine.messenger import Messenger
from torch import Tensor
from torch.distributions import biject_to

from ..families.base import LOG_2PI
from ..guides.base import AutoFamily, FamilyDistribution
from ..guides.marginals import factor, place
from ..guides.reparam import normal_of
from ..linalg.host import setting
from .weights import over_rows

_active: ContextVar[_LocalDraws | None] = ContextVar("_active", default=None)


class LocalModel:
    r"""``model``, with draws for every datum in each of its Walsh-Hadamard layers.

    The result takes the place of the model in ``SVI`` and has the same latent sites.  While gradients
    are recorded and the guide gives the value of a layer's site "g", every datum, an entry of the first
    dimension of the layer's input, gets a draw of its own from q(g), the same at each call of the
    layer; "bias" likewise, where the guide does not correlate it with other sites.  Otherwise
    (evaluation, prediction, curvature) all data share the values of the sites.  The ELBO and its
    expected gradient are those of the model.  Where the prior of g is independent normals, a factor of
    mean zero, "<site>_kl", puts the closed form of KL(q(g) || p(g)) in the place of log q(g) -
    log p(g).  Hand the model itself to ``khat``, ``to_arviz`` and ``Predictive``.

    Not near the optimum of a family that nearly holds the posterior, where sticking the landing lets
    the noise of log q cancel that of the likelihood at the shared draw alone.  Nor for a likelihood
    that is no product over the first dimension of x, or rows that share a datum but are folded into
    that dimension (patches of an image).

    Args:
        model: a Pyro model with :class:`~pyro_ngvi.nn.WalshHadamardLinear` layers.
        guide: the autoguide of ``model``, in which g is independent of all other sites: a mean-field
            guide of this package, or an ``AutoGuideList`` where it is the only site of one.

    Raises:
        TypeError: for a guide that is no autoguide, or a model that is one.
        ValueError: when the model is run, for a site that the guide lacks or correlates with others,
            vectorised particles, and inputs of a layer that do not say what a datum is.

    Example:
        >>> import pyro, torch, pyro.distributions as dist, pyro_ngvi as ngvi
        >>> from pyro.infer import SVI
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

    def __init__(self, model: Callable[..., Any], guide: AutoGuide) -> None:
        if not isinstance(guide, AutoGuide) or isinstance(model, AutoGuide):
            raise TypeError(
                f"local_reparameterization reads q(g) from an autoguide, and got "
                f"{type(model).__name__}, {type(guide).__name__}."
            )
        self.model, self.guide = model, guide

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.model(*args, **kwargs)
        draws = _LocalDraws(self.guide)
        with setting(_active, draws), draws:
            result = self.model(*args, **kwargs)
        for name, term in draws.corrections():
            pyro.factor(f"{name}_kl", term, has_rsample=True)
        return result


local_reparameterization = LocalModel


def draws_for_data(value: Tensor, x: Tensor, needed: bool = True) -> Tensor:
    """For a layer's ``forward``: its site's ``value`` (..., K), or a draw for each datum of ``x``.

    The result broadcasts with the rows of ``x`` (..., in).  Where the site cannot have draws of its
    own, a ``value`` that is not ``needed`` stays shared.
    """
    draws = _active.get()
    own = None if draws is None else draws.for_data(value, x, needed)
    return over_rows(value, 1) if own is None else own


class _LocalDraws(Messenger):
    """During one run of a model: which tensor is the value of which site, and the draws for data."""

    def __init__(self, guide: AutoGuide) -> None:
        super().__init__()
        self.guide = guide
        self.sites: dict[int, Any] = {}
        self.drawn: dict[str, tuple[torch.Size, Tensor, FamilyDistribution]] = {}

    def _pyro_post_sample(self, msg: Any) -> None:
        # only a guide in training gives a value that is part of the graph of parameters
        if not msg["is_observed"] and _unwrapped(msg["value"]).requires_grad:
            self.sites[id(msg["value"])] = msg.copy()

    def for_data(self, value: Tensor, x: Tensor, needed: bool) -> Tensor | None:
        """A draw for each entry of x's first dimension; ``None`` where they share the value."""
        site = self.sites.get(id(value))
        if site is None or x.dim() < 2:
            return None
        name, lead = site["name"], torch.Size((x.shape[0], *(1,) * (x.dim() - 2)))
        if value.dim() > 1 or (name in self.drawn and lead != self.drawn[name][0]):
            raise ValueError(
                f"The layer of {name!r}, of shape {tuple(value.shape)}, takes an x of shape "
                f"{tuple(x.shape)}, which does not say what a datum is (vectorised particles, or the "
                f"data of another call). Use pyro_ngvi.BatchedELBO, or the model itself."
            )
        if name not in self.drawn:
            q = posterior_of(self.guide, name, needed)
            if q is None:
                return None
            self.drawn[name] = lead, q.family.draw(q.params, lead), q
        return self.drawn[name][1]

    def corrections(self) -> Iterator[tuple[str, Tensor]]:
        """log q(g) - log p(g) - KL(q || p), of mean zero, for each site with draws for data."""
        for site in self.sites.values():
            name, fn, g = site["name"], site["fn"], site["value"]
            normal = normal_of(fn)
            if name not in self.drawn or normal is None:
                continue
            (loc, scale), q = normal, self.drawn[name][2]
            square = (q.variance + (q.mean - loc).square()) / scale.square()
            cross_entropy = (0.5 * (square + LOG_2PI) + scale.log()).sum(-1)
            yield name, q.log_prob(g) - fn.log_prob(g) - (cross_entropy - q.entropy())


def posterior_of(guide: AutoGuide, name: str, needed: bool) -> FamilyDistribution | None:
    """q of one site, a real vector (K,), as the guide draws it now; refused or None: no factor."""
    for part in guide.modules():
        trace: Any = getattr(part, "prototype_trace", None)
        if trace is None or isinstance(part, AutoGuideList) or name not in trace.nodes:
            continue
        found = _factor(part, name, trace)
        if found is None and needed:
            raise ValueError(
                f"local_reparameterization cannot draw {name!r} alone from {type(part).__name__}. It "
                f"takes a real vector outside of plates, of pyro_ngvi.AutoMeanFieldNormal(model), say, "
                f"or the only site of a part of an AutoGuideList."
            )
        return found
    raise ValueError(
        f"The guide of local_reparameterization, {type(guide).__name__}, has no site {name!r}, or was "
        f"never called. Hand over the guide that SVI trains."
    )


def _factor(guide: Any, name: str, trace: Any) -> FamilyDistribution | None:
    site, count = trace.nodes[name], len(list(trace.iter_stochastic_nodes()))
    real = biject_to(site["fn"].support)(site["value"]) is site["value"]
    if not isinstance(guide, AutoFamily) or not real or site["cond_indep_stack"]:
        return None
    own, q = place(guide._unconstrained_shapes, name), guide.sampling_posterior()
    found = factor(q.family, q.params, own, alone=count == 1)
    return found and FamilyDistribution(*found, sticking_the_landing=guide.sticking_the_landing)


def _unwrapped(x: Tensor) -> Tensor:
    """The tensor inside the wrappers of ``torch.func``, which hide the graph outside of them."""
    functorch: Any = torch._C._functorch  # pyright: ignore[reportAttributeAccessIssue]
    while functorch.is_functorch_wrapped_tensor(x):
        x = functorch.get_unwrapped(x)
    return x
