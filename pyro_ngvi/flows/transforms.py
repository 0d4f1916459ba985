"""Flows of other libraries behind one small interface, and the couplings that AutoCouplingFlow takes.

A flow here is a module with ``flow(x, inverse) -> (image, log |det|)`` for x (..., d) and a flag
``cheap_inverse``: what :class:`~pyro_ngvi.families.FlowFamily` asks for.  :func:`as_flow` makes one of

- a flow or lazy transform of Zuko (Rozet et al. 2022), which maps z to eps;
- a transform of ``pyro.distributions.transforms``, or a list of them, which map eps to z.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable
from typing import Any

import pyro
import torch
from torch import Tensor, nn
from torch.distributions import Transform, constraints

from ..families.base import log_normal
from ..runtime.density import plain_support
from ..runtime.pyro_adapter import forget_cached, with_inner

#: kinds of layers
KINDS = ("affine", "spline", "autoregressive")
#: an affine layer stretches by a factor between 1 / LARGEST and LARGEST, so that it cannot throw draws
#: far away in the tails of eps, where no training was
LARGEST = 10.0
#: networks of couplings see REACH tanh(x / REACH): far out, where no training was, they say the same
REACH = 4.0
#: parts of networks that draw, or change with the batch
NOT_FIXED = (
    nn.modules.dropout._DropoutNd,
    nn.modules.batchnorm._NormBase,
    pyro.distributions.transforms.BatchNorm,  # pyright: ignore[reportAttributeAccessIssue]
)
#: maps with a kink, where their density jumps
KINKED = (pyro.distributions.transforms.LeakyReLUTransform,)  # pyright: ignore[reportAttributeAccessIssue]


class ZukoFlow(nn.Module):
    """A lazy transform of Zuko from z to eps, turned round: what :func:`as_flow` makes of it.

    Example:
        >>> import torch, zuko
        >>> flow = ZukoFlow(zuko.flows.MAF(2).transform)
        >>> torch.allclose(flow(flow(torch.ones(2))[0], inverse=True)[0], torch.ones(2), atol=1e-4)
        True
    """

    cheap_inverse = True

    def __init__(self, transform: nn.Module) -> None:
        super().__init__()
        self.transform = transform

    def forward(self, x: Tensor, inverse: bool = False) -> tuple[Tensor, Tensor]:
        """The image of x (..., d) and log |det| (...): from eps to z, ``inverse`` from z to eps."""
        to_noise = self.transform()
        return (to_noise if inverse else to_noise.inv).call_and_ladj(x)


class PyroFlow(nn.Module):
    """Transforms of Pyro from eps to z, in the order in which they act: of :func:`as_flow` too.

    Example:
        >>> import torch, pyro.distributions as dist
        >>> PyroFlow([dist.transforms.AffineTransform(1.0, 2.0)])(torch.zeros(2))
        (tensor([1., 1.]), tensor(1.3863))
    """

    def __init__(self, transforms: Iterable[Any], cheap_inverse: bool = True) -> None:
        super().__init__()
        self.steps = list(transforms)
        # networks may lie inside of a ComposeTransform or an inverse; each once, since functional_call
        # leaves a module with two names without its parameters
        parts = [t for step in self.steps for t in with_inner(step)]
        inner = {id(t): t for t in parts if isinstance(t, nn.Module)}
        deeper = {id(m) for t in inner.values() for m in t.modules() if m is not t}
        self.modules_of_steps = nn.ModuleList(t for key, t in inner.items() if key not in deeper)
        self.cheap_inverse = cheap_inverse

    def forward(self, x: Tensor, inverse: bool = False) -> tuple[Tensor, Tensor]:
        """The image of x (..., d) and log |det| (...): from eps to z, ``inverse`` from z to eps."""
        total = x.new_zeros(x.shape[:-1])
        for t in reversed(self.steps) if inverse else self.steps:
            # a new tensor is in no cache, so nothing is looked up that belongs to other parameters
            start = x.view_as(x)
            end = t.inv(start) if inverse else t(start)
            log_det = t.log_abs_det_jacobian(*((end, start) if inverse else (start, end)))
            log_det = log_det.reshape(*log_det.shape[: x.dim() - 1], -1).sum(-1)
            total = total - log_det if inverse else total + log_det
            forget_cached(t)
            x = end
        return x, total


class Stretch:
    """x <- x e^s + t, element by element, with s = log(10) tanh(raw_0 / log(10)), t = raw_1 of ``raw``
    (..., k, 2) for x (..., k); gives the image and s (..., k).

    Example:
        >>> Stretch()(torch.tensor([3.0]), torch.tensor([[0.0, 1.0]]), inverse=False)
        (tensor([4.]), tensor([0.]))
    """

    size = 2

    def __call__(self, x: Tensor, raw: Tensor, inverse: bool) -> tuple[Tensor, Tensor]:
        limit = math.log(LARGEST)
        s, t = limit * torch.tanh(raw[..., 0] / limit), raw[..., 1]
        return ((x - t) * (-s).exp(), -s) if inverse else (x * s.exp() + t, s)


class Spline:
    """A monotone rational-quadratic spline of Zuko on [-5, 5], the identity beyond."""

    def __init__(self, bins: int) -> None:
        self.transform, self.bins = _zuko().transforms.MonotonicRQSTransform, bins
        self.size = 3 * bins - 1

    def __call__(self, x: Tensor, raw: Tensor, inverse: bool) -> tuple[Tensor, Tensor]:
        t = self.transform(*raw.split([self.bins, self.bins, self.bins - 1], -1))
        return (t.inv if inverse else t).call_and_ladj(x)


class CouplingFlow(nn.Module):
    """Layers (a, b) -> (f(b; network(4 tanh(a / 4))), a) from z to eps, f element by element (Dinh,
    Sohl-Dickstein & Bengio 2017, ICLR), a the halves of the d variables in turn, the networks with
    layers of ``hidden`` units.  The identity, but for the order of variables, until it is trained.

    Example:
        >>> flow = CouplingFlow(3, Stretch(), layers=2, hidden=(8,))
        >>> flow(torch.tensor([[1.0, 2.0, 3.0]]))  # image (..., d) and log |det| (...)
        (tensor([[1., 2., 3.]], ...), tensor([0.], ...))
    """

    cheap_inverse = True

    def __init__(self, d: int, element: Any, layers: int, hidden: tuple[int, ...]) -> None:
        super().__init__()
        self.element = element
        # in turn the first half of the variables and the second
        self.given = [(d + 1) // 2 if i % 2 == 0 else d // 2 for i in range(layers)]
        self.layers = nn.ModuleList(_network(k, (d - k) * element.size, hidden) for k in self.given)

    def forward(self, x: Tensor, inverse: bool = False) -> tuple[Tensor, Tensor]:
        """The image of x (..., d) and log |det| (...): from eps to z, ``inverse`` from z to eps."""
        total = x.new_zeros(x.shape[:-1])
        pairs = list(zip(self.given, self.layers, strict=True))
        for k, network in pairs if inverse else reversed(pairs):
            moved = x.shape[-1] - k
            a, b = x.split([k, moved], -1) if inverse else x.split([moved, k], -1)[::-1]
            raw = network(REACH * torch.tanh(a / REACH)).unflatten(-1, (moved, self.element.size))
            b, log_det = self.element(b, raw, not inverse)
            total = total + log_det.sum(-1)
            x = torch.cat([b, a] if inverse else [a, b], -1)
        return x, total


def _network(inputs: int, outputs: int, hidden: tuple[int, ...]) -> nn.Sequential:
    sizes, parts = [inputs, *hidden], list[nn.Module]()
    for before, after in zip(sizes, hidden, strict=False):
        parts += [nn.Linear(before, after), nn.SiLU()]
    return nn.Sequential(*parts, _silent(nn.Linear(sizes[-1], outputs)))


def _silent(layer: Any) -> Any:
    """A linear layer that gives zeros until it is trained."""
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


def as_flow(flow: Any, d: int) -> nn.Module:
    """A flow of this module from what a user passes, checked at two points of R^d: a module with
    ``flow(x, inverse=False) -> (image, log |det|)``, (..., d) to (..., d) and (...), from eps to z.

    Args:
        flow: a flow or lazy transform of Zuko, a transform of Pyro or a list of them, a module
            like that with a flag ``cheap_inverse``, or a function of d that makes one of these.
        d: the number of unconstrained latent variables.

    Raises:
        TypeError: for anything else.
        ValueError: for a flow of another dimension, without an inverse, with a kink or dropout, or over
            another base than N(0, I).

    Example:
        >>> flow = as_flow(pyro.distributions.transforms.AffineTransform(1.0, 2.0), 2)
        >>> flow(torch.tensor([1.0, 7.0]), inverse=True)
        (tensor([0., 3.]), tensor(-1.3863))
    """
    if not isinstance(flow, nn.Module | Transform) and callable(flow):
        flow = flow(d)
    name = type(flow).__name__
    steps = list(flow) if isinstance(flow, list | tuple | nn.ModuleList) else [flow]
    if isinstance(flow, nn.Module) and hasattr(flow, "cheap_inverse"):
        module = flow
    elif all(isinstance(t, Transform) for t in steps):
        _check_steps(steps, d)
        module = PyroFlow(steps, cheap_inverse=not any(_inverts_one_by_one(t) for t in steps))
    elif isinstance(flow, nn.Module) and type(flow).__module__.startswith("zuko"):
        if hasattr(flow, "base"):
            _check_base(flow, name, d)
        module = ZukoFlow(getattr(flow, "transform", flow))
    else:
        raise TypeError(
            f"flow is a {name}. Pass a flow of Zuko (zuko.flows.NSF({d}), say), a transform of "
            f"pyro.distributions.transforms or a list of them, or a function of the dimension that "
            f"makes one."
        )
    for part in module.modules():
        if isinstance(part, NOT_FIXED) and getattr(part, "p", 1.0) > 0.0:
            raise ValueError(
                f"The flow {name} has a {type(part).__name__}, which makes another map of every call: "
                f"log q would not be the density of the draws. Build the flow without it."
            )
    _check_round_trip(module, name, d)
    return module


def _check_steps(steps: Iterable[Any], d: int) -> None:
    """Refuse transforms of Pyro that are no smooth maps of R^d onto R^d, or hold untrained numbers."""
    parts = [part for step in steps for part in getattr(step, "parts", [step])]
    ends = [(type(t).__name__, plain_support(t.domain), plain_support(t.codomain)) for t in parts]
    real = plain_support(constraints.real)
    space = [("the base", real, real), *ends, ("the vector of latent variables", real, real)]
    for (last, _, image), (name, domain, _) in itertools.pairwise(space):
        if str(image) != str(domain):
            raise ValueError(
                f"In the flow {last} maps onto {image}, and then {name} begins at {domain}. "
                f"A flow is a smooth map of R^{d} onto itself."
            )
    for t in parts:
        if kinked := [part for part in with_inner(t) if isinstance(part, KINKED)]:
            raise ValueError(
                f"The transform {type(kinked[0]).__name__} has a kink at 0, where the density of its "
                f"draws jumps. Gradients do not see a jump, so the answer would be wrong. Take a "
                f"smooth map of R^{d} onto itself, such as a coupling or a spline."
            )
        for name, v in (pair for part in with_inner(t) for pair in vars(part).items()):
            if isinstance(v, Tensor) and v.requires_grad and v.is_leaf:
                raise ValueError(
                    f"The tensor {name!r} of the transform {type(t).__name__} requires a gradient, but "
                    f"is no parameter of a module, so nothing would train it. Detach it, or use a "
                    f"transform that is an nn.Module."
                )


def _check_base(flow: Any, name: str, d: int) -> None:
    base = flow.base()
    with torch.no_grad():
        like = next(flow.parameters())
        x = torch.linspace(-1.0, 2.0, d, dtype=like.dtype, device=like.device)
        try:
            found = base.log_prob(x)
        except (RuntimeError, ValueError):
            return  # another dimension: the round trip says so
        wanted = log_normal(x)
    if found.shape != wanted.shape or not torch.allclose(found, wanted, rtol=1e-4):
        raise ValueError(
            f"The base of {name} is {type(base).__name__}, and not the standard normal from which the "
            f"guide draws. Pass the transform alone, if it is a map of R^{d}."
        )


@torch.no_grad()
def _check_round_trip(flow: nn.Module, name: str, d: int) -> None:
    like = next(iter(flow.parameters()), torch.zeros(()))
    x = torch.linspace(-1.0, 1.5, 2 * d, dtype=like.dtype, device=like.device).reshape(2, d)
    try:
        y, log_det = flow(x, False)
        back, inverse_log_det = flow(y, True)
    # KeyError: transforms of Pyro that look into their cache and nowhere else
    except (NotImplementedError, KeyError) as error:
        raise ValueError(
            f"The flow {name} has no inverse, so log q cannot be evaluated at a given point, and "
            f"there are no scores. Take one with an inverse, such as a coupling or a spline."
        ) from error
    except (RuntimeError, ValueError, AssertionError, AttributeError, TypeError) as error:
        raise ValueError(
            f"The flow {name} does not map vectors of length {d}, the number of unconstrained latent "
            f"variables of the model: {error}"
        ) from error
    if y.shape != x.shape or log_det.shape != x.shape[:1]:
        raise ValueError(
            f"The flow {name} gives an image of shape {tuple(y.shape)} and log-determinants of shape "
            f"{tuple(log_det.shape)} for {tuple(x.shape)}: it has to map R^{d} to itself."
        )
    same = torch.allclose(log_det, -inverse_log_det, atol=1e-2)
    if not (same and torch.allclose(back, x, atol=1e-3)):
        raise ValueError(
            f"The flow {name} is not inverted by its inverse: the round trip of a point is off by "
            f"{float((back - x).abs().max()):.2g}."
        )


def _inverts_one_by_one(transform: Any) -> bool:
    # the autoregressive transforms of Pyro find the entries of x in turn
    if hasattr(transform, "parts"):
        return any(_inverts_one_by_one(t) for t in transform.parts)
    return getattr(transform, "autoregressive", False)


def coupling_flow(d: int, kind: str, layers: int, hidden: tuple[int, ...], bins: int) -> nn.Module:
    """A flow on R^d to be trained, first the identity; ImportError without Zuko, but for "affine".

    Args:
        d: the number of variables.
        kind: "affine" or "spline" for a :class:`CouplingFlow`, "autoregressive" for Zuko's ``MAF``.
        layers: how many, with networks of ``hidden`` widths.
        bins: of a spline, between -5 and 5.

    Example:
        >>> coupling_flow(2, "affine", layers=2, hidden=(8,), bins=8)(torch.ones(2))[0].tolist()
        [1.0, 1.0]
    """
    if kind != "autoregressive":
        return CouplingFlow(d, Stretch() if kind == "affine" else Spline(bins), layers, hidden)
    zuko = _zuko()
    stretch = functools.partial(zuko.transforms.MonotonicAffineTransform, slope=1.0 / LARGEST)
    how: dict[str, Any] = {"hidden_features": hidden, "activation": nn.SiLU, "univariate": stretch}
    flow = zuko.flows.MAF(d, transforms=layers, **how)
    for part in flow.transform.transforms:
        _silent([m for m in part.hyper.modules() if hasattr(m, "weight")][-1])
    return ZukoFlow(flow.transform)


def spline_of_one(bins: int) -> nn.Module:
    """The identity as a monotone spline of one variable."""
    zuko = _zuko()
    flow = zuko.flows.NSF(1, transforms=1, bins=bins, hidden_features=())
    for p in flow.parameters():
        nn.init.zeros_(p)
    return ZukoFlow(flow.transform)


def _zuko() -> Any:
    try:
        import zuko
    except ImportError as error:
        raise ImportError(
            "AutoCouplingFlow takes splines and autoregressive layers from Zuko, which is not "
            'installed: pip install zuko, or pip install "pyro-ngvi[flows]".'
        ) from error
    return zuko
