r"""Inducing points: Gaussian processes seen through their values at the same M inputs Z.

    u^c = f^c(Z) = mean^c(Z) + L^c eps^c,  eps = (eps^1, ..., eps^C) ~ N(0, I),
    f^c_n = m^c_n + a^c_n' eps^c + rest^c_n,      h_n = H_n (f^1_n, ..., f^C_n) + b_n,
    q(eps) propto N(eps; 0, I) prod_n exp(nu_n' g_n - g_n' Lambda_n g_n / 2),   g_n = E[h_n | eps],
    ELBO = log Z + sum_n E log p(y_n | h_n) - E log t_n(g_n),

with a_n and rest_n as in :mod:`pyro_ngvi.sites.new_inputs`: g_n = A_n eps + H_n m_n + b_n,
A_n = (H_n[:, 1] a^1_n', ..., H_n[:, C] a^C_n').  With S the covariance of q(eps), E log p is under the
mean of g_n and A_n S A_n' + sum_c H_n[:, c] H_n[:, c]' var rest^c_n.

Of data of shape (N,) datum n is at input n; where they have more dimensions, such as N inputs with K
outputs each, its input i(n) is the number along one of them.  H and b are found by running the model at
the C unit vectors, at all inputs at once.

The sites are the dual parameters of Adam, Chang, Khan & Solin (2021); for a Gaussian likelihood the
bound is that of Titsias (2009) after one step.  A minibatch replaces its own share of the evidence,
O(k B (C M)^2 + (C M)^3): minibatches converge to where all data do.

Where minibatches learn hyperparameters, what the other sites say would be that of an older prior.  It
is then kept for u, in which f_n is an interpolation with weights L^-T a_n that hardly change, and is a
*running* average, of which one pass of the data replaces a tenth by its own estimate.
``guide.refresh`` with all data, or a step with them, makes it exact again.

Not for other latent sites in the same block, processes that depend on each other a priori, nor for data
that see them at inputs other than their own; the dense algebra does these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..distributions.gaussian_process import GaussianProcess, factor
from ..linalg.cholesky import inverse_triangle
from ..linalg.host import fixed_normal
from ..linalg.products import matvec
from .algebra import Algebra, GaussianPotential, SiteTensors, View
from .bound_model import BoundModel, affine_maps
from .checks import other_priors
from .dense import WhitePosterior
from .new_inputs import Maker, Regression, probe, regress
from .probe_points import by_halves
from .structure import Group, Kept, LinearMap, ModelStructure, learns

#: share of a running average that one pass of the data replaces: more is noise, less is old
FORGOTTEN = 0.1


class InducingAlgebra(Algebra):
    """White noise eps (C M,) of C processes at ``inducing`` (M, ...)."""

    inducing: Tensor

    def __init__(self, plan: ModelStructure, call: BoundModel, inducing: Tensor) -> None:
        only_processes(plan, call, inducing)
        super().__init__(GaussianPotential.none(plan.zero(), len(plan.shapes) * len(inducing)))
        #: along which dimension of its data the inputs are, by group
        self.axes = find_axes(plan, call)
        #: the processes at the inputs of the last steps, and of the last draws with their joint q
        self._regressed, self._drawn = Kept(), Kept()
        self.register_buffer("inducing", None)
        self.inducing = inducing  # an nn.Parameter is that of the guide, not a second one

    def view(self, call: BoundModel) -> View:
        """The maps at the inputs of the call."""
        maps, processes = {}, self._regress(call, self._regressed.value)
        for name, (seen, i) in seen_by_group(call, self.axes).items():
            there = [r if i is None else r.at(i) for r in processes.values()]
            maps[name] = on_inducing(seen, there)
            if learns(seen) and not call.whole:
                raise ValueError(
                    f"AutoSites: this step has a minibatch, and the numbers by which the data of "
                    f"{name!r} see the latent processes have parameters that are learned. Learn "
                    f"them in steps with all data, or hold them by .detach()."
                )
        kept = {name: r for name, r in processes.items() if not learns(r)}
        self._regressed.put(kept if call.whole else None)
        # in direct runs f at the probe is the probe itself, and would not show another prior
        call.at_probe = {name: _at_probe(at) for name, at in maps.items()}
        return View(maps, processes=tuple(processes.values()))

    def _regress(
        self, call: BoundModel, before: Mapping[str, Regression] | None = None
    ) -> dict[str, Regression]:
        """Every process of a call on its values at the inducing inputs."""
        old = before or {}
        return {n: regress(fn, self.inducing, old.get(n)) for n, fn in call.block.items()}

    def begin_running(self, view: View) -> None:
        if not self.running:
            root, level = _values(view)
            inverse = inverse_triangle(root)
            self.evidence, self.running = self.evidence.of(inverse, -inverse @ level), True

    def after(
        self, view: View, change: SiteTensors, sites: SiteTensors, call: BoundModel
    ) -> GaussianPotential:
        if not self.running:
            return super().after(view, change, sites, call)
        root, level = _values(view)
        lasting = View({name: _of_values(at, root, level) for name, at in view.maps.items()})
        replaced = super().after(lasting, change, sites, call)
        weights = {name: call.weight(name) for name in sites}
        scaled = {n: (weights[n] * nu, weights[n] * Lambda) for n, (nu, Lambda) in sites.items()}
        away = self.collect(lasting, scaled).plus(replaced, -1.0)
        return replaced.plus(away, FORGOTTEN / max(weights.values()))

    def posterior(self, view: Any, evidence: GaussianPotential) -> WhitePosterior:
        return WhitePosterior(evidence.of(*_values(view)) if self.running else evidence)

    def mean_and_sd(self, call: BoundModel) -> tuple[Tensor, Tensor]:
        processes, M = self._regress(call), len(self.inducing)
        q, found = self.posterior(View({}, None, tuple(processes.values())), self.evidence), []
        for c, at in enumerate(processes.values()):
            # the rows of the first processes are 0, and those of the last are left out
            rows = nn.functional.pad(at.design, (c * M, 0)) if c else at.design
            mean = at.design @ q.mean[c * M : (c + 1) * M] + at.offset
            found.append((mean, q.half(rows).square().sum(0) + at.rest))
        means, variances = map(torch.cat, zip(*found, strict=True))
        return means, variances.sqrt()

    def joint(self, call: BoundModel) -> tuple[Tensor, Tensor]:
        before, *_ = self._drawn.value or (None,)
        found = self._regress(call, before)
        marks = [*found.values(), self.linear]
        last = self._drawn.get(marks)
        if last is not None:
            return last[1:]
        q = self.posterior(View({}, None, tuple(found.values())), self.evidence)
        design = torch.block_diag(*(r.design for r in found.values()))
        half = q.half(design)
        rests = [found[n].left(fn) for n, fn in call.block.items()]
        jitter = max(fn.jitter for fn in call.block.values())
        root = factor(torch.block_diag(*rests) + half.mT @ half, jitter)
        mean = design @ q.mean + torch.cat([r.offset for r in found.values()])
        self._drawn.put(None if learns(*found.values()) else (found, mean, root), marks)
        return mean, root


def _at_probe(at: LinearMap) -> Tensor:
    """h (n, k) at one fixed eps, plus the sd of its rest: another prior changes it."""
    rest: Any = at.rest
    sd = rest.diagonal(dim1=-2, dim2=-1).sqrt()
    return at.design @ probe(at.design.movedim(-1, 0)) + at.offset + sd


def _values(view: View) -> tuple[Tensor, Tensor]:
    """L and mean(Z) of all processes, u = mean(Z) + L eps."""
    root = torch.block_diag(*(r.root for r in view.processes))
    return root, torch.cat([r.level for r in view.processes])


def _of_values(at: LinearMap, root: Tensor, level: Tensor) -> LinearMap:
    """A map of eps as one of u."""
    A = torch.linalg.solve_triangular(root, at.design.flatten(0, 1), upper=False, left=False)
    offset = at.offset - (A @ level).reshape(at.offset.shape)
    return LinearMap(A.reshape(at.design.shape), offset, at.rest)


# --- what data see of the processes


def on_inducing(seen: LinearMap, processes: Sequence[Regression]) -> LinearMap:
    """h on the white values (C M,) of all processes at their inducing inputs; H and b are ``seen``."""
    H = seen.design
    rows = [H[..., c, None] * r.design.unsqueeze(1) for c, r in enumerate(processes)]
    means = torch.stack([r.offset for r in processes], -1)
    rests = torch.stack([r.rest for r in processes], -1)
    offset = matvec(H, means) + seen.offset
    return LinearMap(torch.cat(rows, -1), offset, (H * rests.unsqueeze(1)) @ H.mT)


def seen_by_group(
    call: BoundModel, axes: Mapping[str, int]
) -> dict[str, tuple[LinearMap, Tensor | None]]:
    """H (n, k, C) and b (n, k) of every group, with i (n,), ``None`` for 0, 1, 2, ...; ``axes``: along
    which dimension of its data the inputs are."""
    _ = call.at_probe  # refuses processes at other inputs than those of the data
    plan, count, found, maps = call.plan, _count(call), {}, {}
    units = torch.eye(len(call.block), dtype=plan.dtype, device=plan.device)
    # all values of a process are one entry of the noise
    makers = dict.fromkeys(call.block, Maker(1, lambda noise, _: noise.repeat(count)))
    for group in plan.groups:
        name, shape, chosen = group.name, call.shapes[group.name], _columns(plan, group)
        if chosen is not None:
            H = units[chosen].expand(count, -1, -1)
            found[name] = LinearMap(H, H.new_zeros(count, len(chosen))), None
            continue
        maps = maps or affine_maps(lambda noise: call.predictors(noise, makers), units)
        i = None if len(shape) == 1 else _numbers(shape, axes[name], plan.device)
        found[name] = maps[name], i
    return found


def only_processes(plan: ModelStructure, call: BoundModel, inducing: Tensor) -> None:
    """Refuse a block that is not of independent processes at inputs of the kind of ``inducing``."""
    block = call.block
    if not all(isinstance(fn, GaussianProcess) for fn in block.values()):
        found = ", ".join(f"{name!r} ({type(fn).__name__})" for name, fn in block.items())
        raise ValueError(
            f"AutoSites(inducing=...) is for a model whose Gaussian latent sites are all of them "
            f"GaussianProcess, and this model has {found}. Put linear terms into a kernel, give other "
            f"sites to other guides of an AutoGuideList, or leave inducing out."
        )
    for name, fn in block.items():
        wanted = (_count(call), *inducing.shape[1:])
        if tuple(fn.inputs.shape) != wanted or not len(inducing):
            raise ValueError(
                f"AutoSites: inducing has shape {tuple(inducing.shape)}, and the inputs of the "
                f"GaussianProcess {name!r} have {tuple(fn.inputs.shape)} instead of {wanted}: all "
                f"processes are at the inputs of the data, and inducing is some of such inputs."
            )
    if len(block) > 1:
        runs = [call.runner(x, look_at=plan.block_places).own for x in (plan.zero(), call.probe)]
        for name in other_priors(*runs):
            raise ValueError(
                f"AutoSites(inducing=...): the prior of the GaussianProcess {name!r} depends on "
                "the value of another one, by mean, kernel or inputs. With inducing points "
                "processes must be independent a priori: write a sum of two as f + g in the model."
            )


def find_axes(plan: ModelStructure, call: BoundModel) -> dict[str, int]:
    """Along which dimension of a group's data the inputs of the processes are, at the first call;
    refuses data that see processes at other inputs than their own."""
    count = _count(call)
    axes = {group.name: 0 for group in plan.groups if _columns(plan, group) is not None}
    others = [group for group in plan.groups if group.name not in axes]
    if not others:
        return axes
    values = fixed_normal(len(call.block), count, seed=count).to(plan.zero())
    stay = by_halves(lambda z: call.predictors(z.mT.reshape(-1)), values.mT)
    for group in others:
        shape = call.shapes[group.name]
        for axis in [d for d, size in enumerate(shape) if size == count]:
            if stay(group.name, _numbers(shape, axis, plan.device)):
                axes[group.name] = axis
                break
        else:
            where = " and ".join(str(place) for place in group.places)
            raise ValueError(
                f"AutoSites(inducing=...): the data of {group.name!r}, of shape {tuple(group.batch)}, "
                f"see {' and '.join(map(repr, call.block))} through {where}, not each at its own "
                f"input only. Datum n must see a process at input n: GaussianProcess(kernel, X), X in "
                f"the order of the data."
            )
    return axes


def _count(call: BoundModel) -> int:
    return len(next(iter(call.block.values())).inputs)


def _columns(plan: ModelStructure, group: Group) -> list[int] | None:
    """The numbers of the processes whose values are what a datum sees; ``None`` for anything else."""
    sites = list(plan.shapes)
    chosen = [sites.index(p.site) for p in group.places if p.site in plan.shapes]
    return chosen if len(chosen) == len(group.places) == group.width else None


def _numbers(shape: torch.Size, axis: int, device: torch.device) -> Tensor:
    """i (n,) of data of this shape in a row, whose inputs are along ``axis``."""
    along = [-1 if d == axis else 1 for d in range(len(shape))]
    return torch.arange(shape[axis], device=device).reshape(along).expand(shape).reshape(-1)
