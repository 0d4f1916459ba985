r"""log q at fixed values of a guide that computes its sites from noise *and* from parameters.

Pyro's ``AutoStructured`` and ``AutoGaussian`` put z = f(e, lambda), e ~ p_lambda, into ``Delta`` sites
whose log density is -log|det df/de|.  With e held fixed z moves with lambda, and the gradient of the
sum of log densities is not the score (its part in a location is even zero).  At a fixed z the noise
moves instead,

    log q_lambda(z) = log p_lambda(e) - log|det df/de|,    f(e, lambda) = z,

which Newton's steps solve for e, from the noise that made z.  The derivative is that of the implicit
function,

    de/dlambda = -J^+ df/dlambda,    J = df/de,

J^+ the least squares solution by Q R, for sites such as simplices that have more entries than freedom.

Not for guides with more noise than entries of z, whose density is an integral.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pyro.distributions as dist
import torch
from pyro.poutine.messenger import Messenger
from torch import Tensor

from ..families.base import Tensors
from ..linalg.host import host_bool
from ..linalg.products import each_gradient
from ..runtime.density import Site, innermost, is_auxiliary

#: Newton's steps; each squares the error
NEWTON = 6
#: least entry of R, in roundings of the largest, from which on J has full rank
FULL = 1e3
#: relative error of a log density, and slope of z across its surface, that count as none
TOLERANCE = 1e-3


class FreeDraws(Messenger):
    """Watches one run of a guide: what it draws, and the ``Delta`` sites that it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.draws: dict[str, Tensor] = {}
        self.deltas: dict[str, Tensor] = {}
        self.helpers: set[str] = set()

    def _pyro_post_sample(self, msg: Site) -> None:
        fn, value = innermost(msg["fn"]), msg["value"]
        if msg["is_observed"] or not isinstance(value, Tensor):
            return
        if isinstance(fn, dist.Delta):
            self.deltas[msg["name"]] = value
        elif value.is_floating_point():
            msg["value"] = self.draws[msg["name"]] = value.detach().requires_grad_()
            if is_auxiliary(msg):
                self.helpers.add(msg["name"])

    def moved(self, leaves: list[Tensor]) -> list[str]:
        """The Delta sites that depend on draws and on ``leaves``."""
        return [n for n in self._computed() if depends([self.deltas[n]], leaves)]

    def targets(self) -> list[str]:
        """The sites that make up z: computed from draws, or drawn and not on the way to others."""
        return [*self._computed(), *(name for name in self.draws if name not in self.helpers)]

    def _computed(self) -> list[str]:
        draws = list(self.draws.values())
        return [name for name, value in self.deltas.items() if depends([value], draws)]


def depends(outputs: Iterable[Tensor], leaves: Iterable[Tensor]) -> bool:
    """Whether any of ``outputs`` depends on any of ``leaves``."""
    return any(reached(list(outputs), list(leaves)))


def reached(outputs: list[Tensor], leaves: list[Tensor]) -> list[bool]:
    """Which of ``leaves`` any of ``outputs`` depends on."""
    live = [value.sum() for value in outputs if value.requires_grad]
    if not live or not leaves:
        return [False] * len(leaves)
    total = torch.stack(live).sum()
    found = torch.autograd.grad(total, leaves, allow_unused=True, retain_graph=True)
    return [g is not None for g in found]


class MovedDraws:
    """n draws of such a guide; calls give log q (n,) of them, by its parameters as they are then.

    The first call, at the parameters of the draws, says what z is.  ``run`` gives the log density (n,),
    that of the Delta sites alone (n,), and z (n, K), at the ``noise`` of n runs by site.
    """

    def __init__(
        self, run: Callable[[Tensors], tuple[Tensor, Tensor, Tensor]], noise: Tensors
    ) -> None:
        self._run, self._noise = run, noise
        self._z: Tensor | None = None

    def __call__(self) -> Tensor:
        noise = self._noise
        for left in reversed(range(NEWTON)):
            at, log_q, residual = self._at(noise)
            near = self._near(residual)
            Q, R = torch.linalg.qr(self._jacobian(at, residual))
            if not left or host_bool(near.all()):
                break
            back = torch.linalg.solve_triangular(R, Q.mT @ residual.detach()[..., None], upper=True)
            parts = back[..., 0].split([e[0].numel() for e in at.values()], 1)
            noise = {
                name: e - part.view_as(e)
                for (name, e), part in zip(noise.items(), parts, strict=True)
            }
        # one more step of e by its effect on log q: in the value, and in the gradient
        with torch.enable_grad():
            slopes = each_gradient(log_q.sum()[None], list(at.values()))
        slope = torch.cat([g.reshape(len(log_q), -1) for g in slopes], 1)[..., None]
        pull = Q @ torch.linalg.solve_triangular(R.mT, slope, upper=False)
        found = torch.where(near, log_q - (pull[..., 0] * residual).sum(1), torch.nan)
        return found if torch.is_grad_enabled() else found.detach()

    def _at(self, noise: Tensors) -> tuple[Tensors, Tensor, Tensor]:
        """Leaves that hold ``noise``, and log q (n,) and f(e, lambda) - z (n, K) there."""
        with torch.enable_grad():
            at = {name: e.detach().requires_grad_() for name, e in noise.items()}
            log_q, _, z = self._run(at)
            if self._z is None:
                self._z = z.detach()
            return at, log_q, z - self._z

    def _near(self, residual: Tensor) -> Tensor:
        z: Any = self._z
        # what the last step leaves is its square
        bound = torch.finfo(z.dtype).eps ** (1 / 3) * z.abs().amax(-1).clamp_min(1.0)
        return residual.detach().abs().amax(-1) <= bound

    def _jacobian(self, at: Tensors, residual: Tensor) -> Tensor:
        """J (n, K, L)."""
        with torch.enable_grad():
            columns = each_gradient(residual.sum(0), list(at.values()))
        J = torch.cat([c.reshape(*residual.mT.shape, -1) for c in columns], 2)
        return J.transpose(0, 1)

    def flaw(self, leaves: list[Tensor]) -> str | None:
        """Why log q (of one draw) has no scores in ``leaves``; ``None``: it has."""
        at, _, residual = self._at(self._noise)
        J = self._jacobian(at, residual)
        K, L = J.shape[1:]
        if K < L:
            return f"from {L} random numbers for its {K} entries"
        Q, R = torch.linalg.qr(J[0])
        size = R.diagonal().abs()
        if bool(size.min() <= FULL * torch.finfo(R.dtype).eps * size.max()):
            return "from noise that does not move it in every direction"
        # across the surface on which z lies
        across = torch.randn_like(residual[0])
        across = across - Q @ (Q.mT @ across)
        moves = torch.autograd.grad(residual[0] @ across, leaves, allow_unused=True)
        slopes = [float(g.abs().max()) for g in moves if g is not None]
        if max(slopes, default=0.0) > TOLERANCE:
            return "that lies on a surface which moves with them"
        given, wanted = float(self._run(self._noise)[1].detach()), -float(size.log().sum())
        if K == L and abs(given - wanted) > TOLERANCE * (1.0 + abs(wanted)):
            return f"with log_density={given:.4g}, where -log|det| of its Jacobian is {wanted:.4g}"
        return None
