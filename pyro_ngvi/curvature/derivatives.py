r"""Hessians of functions of one draw (d,), and products of the gradients of single data.

For a function of theta (d,) to N log probabilities, with Jacobian J (N, d) and weights w_i >= 0,
sum_i w_i J_i J_i' has three forms: "dense" (d, d), its "diagonal" (d,), or "low_rank", the rows
sqrt(w_i) J_i (N, d).  J comes in blocks of ``budget`` bytes a draw: of columns by forward mode where
that is cheaper, else, or where an operation has no forward mode, of rows by reverse mode.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache, reduce
from typing import Any

import torch
import torch.nn.functional as F
from pyro.distributions.util import scale_and_mask
from pyro.poutine.util import site_is_subsample
from torch import Tensor
from torch.func import grad, vjp, vmap
from torch.overrides import TorchFunctionMode

from ..linalg.host import fixed_normal
from ..runtime.density import Site, Sites, site_kind, site_log_prob
from ..runtime.pyro_adapter import unmasked

#: columns of a Hessian that are computed at a time, for each draw
CHUNK = 64
#: random halves of the entries that are tried at each of three points
HALVES = 8
#: bytes for a block of a Jacobian
BUDGET = 2**28

Function = Callable[[Tensor], Tensor]


@cache
def _load_rules() -> None:
    """Compiles rules by torch.jit.script, as the first use of forward mode does."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`torch.jit.script")
        one = torch.ones((), device="cpu")
        torch.func.jvp(torch.sin, (one,), (one,))


def jvp(f: Callable[..., Any], primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> Any:
    """``torch.func.jvp``, without torch's warning about itself."""
    _load_rules()
    return torch.func.jvp(f, primals, tangents)


def hessian(function: Function, t: Tensor, diagonal: bool = False) -> Tensor:
    """The Hessian, or its diagonal, by forward over reverse mode, ``CHUNK`` columns at a time."""
    indices = torch.arange(len(t), device=t.device)

    def column(i: Tensor) -> Tensor:
        e = (indices == i).to(t)
        product = jvp(grad(function), (t,), (e,))[1]
        return (product * e).sum() if diagonal else product

    H = vmap(column, out_dims=-1, chunk_size=CHUNK, randomness="same")(indices)
    return H if diagonal else 0.5 * (H + H.mT)


def hessian_product(function: Function, t: Tensor, v: Tensor) -> Tensor:
    """H v, by reverse over reverse mode: for one v far cheaper than forward over reverse."""
    return grad(lambda t: grad(function)(t) @ v)(t)


def is_diagonal(function: Function, t: Tensor) -> bool:
    """Whether the Hessian is diagonal: for v that is zero in half of the entries, so is H v there."""
    values = fixed_normal(len(t), seed=len(t)).to(t)
    halves = (fixed_normal(HALVES, len(t), seed=len(t) + 1) > 0.0).to(t)
    away = torch.arange(1, len(t) + 1, dtype=t.dtype, device=t.device).sin()
    # at points away from the draw too: where it lies, terms may vanish that do so nowhere else
    for point in (t, t + away, t - 0.7 * away):
        for half in halves:
            if ((1.0 - half) * hessian_product(function, point, half * values) != 0.0).any():
                return False
    return True


def is_datum(site: Site) -> bool:
    """Whether a site is observed in a plate, so that its entries are data."""
    if site_is_subsample(site) or site_kind(site) != "observed":
        return False
    return any(f.vectorized for f in site["cond_indep_stack"])


def data_of(sites: Sites) -> tuple[Tensor, Tensor]:
    """Log probability of each datum (N,), without scale, and its scale times mask (N,)."""
    log_probs, weights = [], []
    for site in filter(is_datum, sites.values()):
        plain, _ = site_log_prob(site)
        log_probs.append(scale_and_mask(plain, 1.0, site["mask"]).reshape(-1))
        shown = torch.ones_like(plain) * unmasked(site)
        weights.append(scale_and_mask(shown, site["scale"], None).reshape(-1))
    if not log_probs:
        raise ValueError(
            "Gradients of single data: no observed site of the model lies in a plate. Put it in one, "
            'with pyro.plate("data", N): pyro.sample("y", ..., obs=y), or use curvature="hessian".'
        )
    return torch.cat(log_probs), torch.cat(weights)


def products(
    f: Function, theta: Tensor, weights: Tensor, form: str = "diagonal", budget: int = BUDGET
) -> Tensor:
    """sum_i w_i J_i J_i' in a form."""
    n, d = len(weights), len(theta)
    room = budget // theta.element_size()
    columns, rows = max(1, room // max(1, 4 * n)), max(1, room // (3 * d + n))
    # in the dense form a block is made once, and once more for each block after it
    passes = sum(d - start for start in range(0, d, columns)) if form == "dense" else d
    if passes <= n or n == 0:
        try:
            return _by_columns(f, theta, weights.unsqueeze(-1), form, columns)
        except NotImplementedError:  # an operation without forward mode
            pass
    return _by_rows(f, theta, weights.unsqueeze(-1), form, rows)


def _by_columns(f: Function, theta: Tensor, w: Tensor, form: str, size: int) -> Tensor:
    def block(part: slice) -> Tensor:
        along = vmap(lambda e: jvp(f, (theta,), (e,))[1], out_dims=-1, randomness="same")
        return along(_basis(theta, len(theta), part))

    parts = _parts(len(theta), size)
    if form == "diagonal":
        return torch.cat([(w * block(part).square()).sum(0) for part in parts])
    if form == "low_rank":
        return w.sqrt() * torch.cat([block(part) for part in parts], 1)
    lower = []
    for a, part in enumerate(parts):
        J = block(part)
        left = (w * J).mT
        lower.append([left @ block(other) for other in parts[:a]] + [left @ J])
    # the blocks above the diagonal are those below it, transposed
    n = range(len(parts))
    return torch.cat(
        [torch.cat([lower[a][b] if b <= a else lower[b][a].mT for b in n], 1) for a in n]
    )


def _by_rows(f: Function, theta: Tensor, w: Tensor, form: str, size: int) -> Tensor:
    with _PlainPReLU():
        pullback: Any = vjp(f, theta)[1]

    def block(part: slice) -> Tensor:
        return vmap(lambda e: pullback(e)[0], randomness="same")(_basis(theta, len(w), part))

    parts = _parts(len(w), size)
    if form == "low_rank":
        return w.sqrt() * torch.cat([block(part) for part in parts])
    if form == "diagonal":
        return reduce(torch.add, ((w[part] * block(part).square()).sum(0) for part in parts))
    pairs = ((w[part], block(part)) for part in parts)
    return reduce(torch.add, ((weight * J).mT @ J for weight, J in pairs))


class _PlainPReLU(TorchFunctionMode):
    """``F.prelu`` by ``where``: under two ``vmap`` its own backward fails, with a weight a channel."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (_prelu if func is F.prelu else func)(*args, **(kwargs or {}))


def _prelu(input: Tensor, weight: Tensor) -> Tensor:
    weight = weight.view(-1, *(1,) * (input.dim() - 2))
    return torch.where(input > 0.0, input, weight * input)


def _parts(length: int, size: int) -> list[slice]:
    return [slice(i, min(i + size, length)) for i in range(0, length, size)]


def _basis(like: Tensor, length: int, part: slice) -> Tensor:
    """The unit vectors (k, length) of a part."""
    E = torch.zeros(part.stop - part.start, length, dtype=like.dtype, device=like.device)
    E.diagonal(part.start).fill_(1.0)
    return E
