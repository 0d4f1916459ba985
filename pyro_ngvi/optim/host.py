"""The only glue between pure rules and ``pyro.infer.SVI``.

``SVI`` hands an optimizer the unordered *set* of tensors that took part in a step.  The optimizer
here finds the natural parameters through the guide, never by order, and gives the rest to an
ordinary optimizer.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any, ClassVar

import pyro
import torch
from pyro.optim import PyroOptim
from torch import Tensor

from ..curvature.record import Curvature
from ..families.base import Tensors
from ..linalg.host import host_bool, outside_autocast
from ._atomic import all_or_nothing
from ._saved_state import check_state, moved
from .block import find_blocks
from .others_state import ADAM, DefaultAdam, OthersState, own_others
from .rule import Report, StepReport, part, restart_average


class NaturalGradientOptim(PyroOptim):
    """A ``PyroOptim`` that steps the natural blocks of a guide by a rule.  Subclasses make the rule."""

    #: kinds of curvature that the optimizer takes; ``None`` stands for a loss without any
    accepts: tuple[str | None, ...] = (None, "price")

    #: whether the optimizer learns the Fisher matrix where the family does not know it
    learns_fisher: ClassVar[bool] = False

    #: whether a step takes the gradients of the loss in the guide's parameters
    needs_gradients: ClassVar[bool] = True

    def __init__(self, guide: Any, others: PyroOptim | None = ADAM) -> None:
        super().__init__(_refuse_wrappers, {})  # __call__ does the work
        if others is not None and not isinstance(others, PyroOptim):
            raise ValueError(
                f"others must be a pyro.optim.PyroOptim such as pyro.optim.Adam({{'lr': 1e-3}}), "
                f"got {type(others).__name__}."
            )
        if getattr(guide, "holds_sites", False) and "sites" not in self.accepts:
            raise ValueError(
                f"{type(self).__name__} cannot step the sites of AutoSites. Use pyro_ngvi.CVI(guide) "
                f"and SVI's loss=pyro_ngvi.SitesELBO()."
            )
        self.guide = guide
        self.others = own_others(others)
        self._is_to_tell = isinstance(self.others, DefaultAdam)
        self._has_others = False
        self._others_state = OthersState(guide)
        self._rules: dict[str, Any] = {}
        for path, block in self._blocks():
            self._adopt(path, block)
        self._states: dict[str, Tensors] = {}
        self._waiting: dict[str, Tensors] = {}
        self._bad_others = 0
        self._reports: dict[str, Report] = {}

    def make_rule(self, family: Any) -> Any:
        """The rule for a block with that family; it has ``averaging``, ``init`` and ``update``."""
        raise NotImplementedError

    def _blocks(self) -> Iterable[tuple[str, Any]]:
        """The blocks of parameters that this optimizer steps, by path: our guides within the guide."""
        return find_blocks(self.guide)

    def _init_state(self, path: str, block: Any, values: Tensors) -> Tensors:
        return self._rules[path].init(values)

    def _update(
        self, path: str, block: Any, values: Tensors, grads: Tensors, state: Tensors
    ) -> tuple[Tensors, Tensors, Report]:
        return self._rules[path].update(values, grads, state)

    def _adopt(self, path: str, block: Any) -> None:
        if not (self.learns_fisher or block.family.known_fisher):
            raise ValueError(
                f"{type(self).__name__} needs a Fisher matrix in closed form, and "
                f"{type(block).__name__} has none. Use pyro_ngvi.optim.SPRING, pyro_ngvi.IFVB or "
                f"pyro_ngvi.AIFVB, which learn it from scores."
            )
        self._rules[path] = self.make_rule(block.family)
        block.set_iterate_offset(None)  # an optimizer before this one may have left its own
        block.curvature = None  # as may a step that failed
        block.averaged = block.holds_average and self._rules[path].averaging is not None

    @outside_autocast
    def __call__(self, params: Iterable[Tensor], *args: Any, **kwargs: Any) -> None:
        """One step for every parameter in ``params``, from the gradients in ``.grad``.

        It uses the gradients up: they are ``None`` afterwards.  An exception, Ctrl-C included, leaves
        parameters and states as they were, without gradients.
        """
        params = list(params)
        with all_or_nothing(self, params):
            self._step(params)

    def _step(self, params: list[Tensor]) -> None:
        remaining = {id(p): p for p in params}
        blocks = []
        for path, block in self._blocks():
            tensors = block.natural_params()
            if any(id(p) in remaining for p in tensors.values()):
                blocks.append((path, block, tensors))
            for p in tensors.values():
                remaining.pop(id(p), None)
        others = self._sorted_others(remaining, bool(blocks))
        for path, block, tensors in blocks:
            if path not in self._rules:  # appended to a list of guides after construction
                self._adopt(path, block)
            self._step_block(path, block, tensors)
        if others and self.others is not None:
            self._zero_bad(others)
            self._others_state.restore(self.others)
            self.others(others)

    def _zero_bad(self, others: list[Tensor]) -> None:
        """One gradient that is not finite would stay in the moments of Adam for good."""
        bad = []
        for p in others:
            if p.grad is not None:
                finite = torch.isfinite(p.grad).all()
                p.grad = torch.where(finite, p.grad, 0.0)
                if host_bool(finite) is False:
                    bad.append(str(pyro.get_param_store().param_name(p)))
        self._bad_others += bool(bad)
        if bad and not self._bad_others & (self._bad_others - 1):  # 1, 2, 4, 8, ... times
            warnings.warn(
                f"{type(self).__name__}: the gradient of {', '.join(bad[:3])} is not finite; it "
                f"counted as zero ({self._bad_others} steps so far). Look for NaN in the model there.",
                RuntimeWarning,
                stacklevel=6,
            )

    @torch.no_grad()
    def _step_block(self, path: str, block: Any, tensors: dict[str, Any]) -> None:
        values = {name: p.detach() for name, p in tensors.items()}
        state = self._state_of(path, block, values)
        curvature = block.take_curvature() if hasattr(block, "take_curvature") else None
        self._check_curvature(block, curvature)
        if self.needs_gradients and all(p.grad is None for p in tensors.values()):
            raise ValueError(
                f"{type(self).__name__}: the loss has no gradient in the parameters of "
                f"{type(block).__name__}. With sticking_the_landing=True log q(z) at a fixed z has "
                f"none, so ReweightedWakeSleep and the like need sticking_the_landing=False."
            )
        grads: Tensors = {
            name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in tensors.items()
        }
        parts = {} if curvature is None else curvature.parts
        like = next(iter(values.values()))
        halves = (torch.float16, torch.bfloat16)  # of a model under autocast
        parts = {k: v.to(like) if v.dtype in halves else v for k, v in parts.items()}
        grads |= {"curvature." + name: v for name, v in parts.items()}
        # the gradient was taken at the iterate, which lies at a lag from an averaged answer
        intact = block.offset_is_intact()
        lag = block.iterate_offset(intact)
        if lag:
            values = {name: p + lag[name] for name, p in values.items()}
            if not host_bool(intact):
                # averages of what was there before somebody else wrote to the parameters are void
                state = restart_average(state, values, intact)
        new, state, report = self._update(path, block, values, grads, state)
        answer = (block.averaged and part(state, "average.")) or new
        for name, p in tensors.items():
            p.copy_(answer[name])
        if block.averaged:
            block.set_iterate_offset({name: new[name] - answer[name] for name in new}, answer)
        self._states[path] = state
        self._reports[path] = report
        if host_bool(report.finite) is False:
            self._warn_skipped(block, report)

    def _require_one_guide(self) -> None:
        """Refuse a list of guides to an optimizer that cannot do without curvature."""
        if None not in self.accepts and any(path for path, _ in self._blocks()):
            raise ValueError(
                f"{type(self).__name__} needs curvature, which a loss can leave on one guide over all "
                f"latent sites only. Use one guide of this package in the place of "
                f"{describe(self.guide)}, or pyro_ngvi.NGVB."
            )

    def _check_curvature(self, block: Any, curvature: Curvature | None) -> None:
        """Refuse curvature of which no use would be made, and a loss without what is needed."""
        kind = None if curvature is None else curvature.kind
        if kind in self.accepts:
            return
        name = type(self).__name__
        if None in self.accepts:
            takers = {"kronecker": "NoisyKFAC", "scores": "SPRING"}
            raise RuntimeError(
                f'{name} makes no use of curvature="{kind}". Leave it out of BatchedELBO(...), or take '
                f"pyro_ngvi.optim.{takers.get(str(kind), 'NGVB, VON or VOGN')}."
            )
        found = "the loss left none" if kind is None else f'the loss leaves "{kind}"'
        if self.accepts == ("sites",):
            raise RuntimeError(
                f"{name} steps the sites of {type(block).__name__} by expectations under q, and "
                f"{found}. Pass SVI loss=pyro_ngvi.SitesELBO()."
            )
        raise RuntimeError(
            f"{name} steps {type(block).__name__} by a curvature, and {found}. "
            f'Pass SVI loss=pyro_ngvi.BatchedELBO(num_particles, curvature="{self.accepts[0]}").'
        )

    def _state_of(self, path: str, block: Any, values: Tensors) -> Tensors:
        if path in self._waiting:
            saved = self._waiting.pop(path)
            fresh = self._rules[path].init(values)
            check_state(path, fresh, saved)
            # a copy, since a rule may write into the state that it is given
            self._states[path] = {k: saved[k].to(fresh[k], copy=True) for k in fresh}
        if path not in self._states:
            self._states[path] = self._init_state(path, block, values)
        state, like = self._states[path], next(iter(values.values()))
        if state["count"].device != like.device or state["count"].dtype != like.dtype:
            # the guide was moved, for instance by guide.to(device)
            state = {k: moved(v, like) for k, v in state.items()}
        return state

    def _sorted_others(self, remaining: dict[int, Tensor], natural: bool) -> list[Tensor]:
        if not natural:
            raise ValueError(
                f"{type(self).__name__} was given no parameter of its guide "
                f"{describe(self.guide)}: SVI trains another guide. Build the optimizer with the "
                f"guide that SVI gets. (Load a parameter store before the guide's first call.)"
            )
        store = pyro.get_param_store()
        # a set has no order; sorting by name makes runs repeatable
        learnt = (p for p in remaining.values() if p.requires_grad)  # frozen ones want no trainer
        ordered = sorted(learnt, key=lambda p: str(store.param_name(p)))
        self._has_others = self._has_others or bool(ordered)
        if ordered and (self.others is None or self._is_to_tell):
            names = ", ".join(str(store.param_name(p)) for p in ordered[:3])
            self._tell_of_others(names + ", ..." * (len(ordered) > 3))
        return ordered

    def _tell_of_others(self, names: str) -> None:
        if self.others is None:
            raise ValueError(
                f"{type(self).__name__} trains the guide's natural parameters only, and this step "
                f"has others: {names}. Say who trains them, for instance "
                f"others=pyro.optim.Adam({{'lr': 1e-3}})."
            )
        self._is_to_tell = False
        warnings.warn(
            f"{type(self).__name__} leaves what is not natural ({names}) to {self.others!r}. Pass "
            f"others= for another rate or optimizer, or others=None to have it refused.",
            UserWarning,
            stacklevel=7,
        )

    def _warn_skipped(self, block: Any, report: Report) -> None:
        count = int(report.skipped)
        if count & (count - 1):  # warn at 1, 2, 4, 8, ... skips
            return
        what = "gradient" if None in self.accepts else "gradient or curvature"
        if not self.needs_gradients:
            what = "log p or log q of some draw"
        sites = ", ".join(map(repr, _sites(block, report.bad_entries))) or "the whole latent vector"
        warnings.warn(
            f"{type(self).__name__} skipped a step: the {what} is not finite at {sites} "
            f"({count} skipped so far; the parameters are unchanged). If this goes on, look for NaN "
            f"in the data, a likelihood of -inf at the start, or lower init_scale.",
            RuntimeWarning,
            stacklevel=8,
        )

    def report(self, path: str | None = None) -> StepReport:
        """What the last step did.  Waits for the device, so do not call it at every step on a GPU.

        ``path`` names a part of an ``AutoGuideList`` ("0", "1", ...); by default the only part.
        """
        if not self._reports:
            raise RuntimeError("There is no report before the first step.")
        if path is None:
            if len(self._reports) > 1:
                raise ValueError(f"Name one of the parts: {', '.join(map(repr, self._reports))}.")
            path = next(iter(self._reports))
        r = self._reports[path]
        block = dict(self._blocks())[path]
        outcome = "damped" if bool(r.damped) else "accepted"
        return StepReport(
            outcome=outcome if bool(r.finite) else "skipped",
            step_norm=r.step_norm.item(),
            gain=r.gain.item(),
            radius=r.radius.item(),
            skipped=int(r.skipped.item()),
            skipped_sites=_sites(block, r.bad_entries),
        )

    def get_state(self) -> dict[str, Any]:
        """Everything that the next step depends on, except parameters and the random state."""
        natural = {path: dict(state) for path, state in (self._states | self._waiting).items()}
        for path, block in self._blocks():
            if path in natural and block.natural_params():
                natural[path] |= {"lag." + k: v for k, v in block.iterate_offset().items()}
        return {
            "natural": {path: {k: v.clone() for k, v in s.items()} for path, s in natural.items()},
            "others": self._others_state.save(self.others),
        }

    def set_state(self, state_dict: dict[str, Any]) -> None:
        """Continue from ``get_state()``, whether or not a step has been taken since construction."""
        if set(state_dict) != {"natural", "others"}:
            raise ValueError(
                f"This is not the state of {type(self).__name__}: it has the entries "
                f"{sorted(map(str, state_dict))} instead of 'natural' and 'others'."
            )
        self._others_state.load(self.others, state_dict["others"])
        self._states.clear()
        self._waiting = {
            path: {k: v for k, v in state.items() if not k.startswith("lag.")}
            for path, state in state_dict["natural"].items()
        }
        for path, block in self._blocks():
            # the parameters may be restored before or after this call
            saved = state_dict["natural"].get(path, {})
            block.set_iterate_offset(part(saved, "lag.") or None)


def _refuse_wrappers(*args: Any, **kwargs: Any) -> None:
    raise RuntimeError(
        "An optimizer of pyro_ngvi steps a whole guide; Pyro's HorovodOptimizer and learning-rate "
        "schedulers want one for each tensor. Give it to SVI itself; for falling rates there is "
        "NGVB(guide, schedule=lambda k: 0.5 / (1 + k))."
    )


def _sites(block: Any, bad_entries: Tensor) -> tuple[str, ...]:
    found = (block.site_of(int(i)) for i in bad_entries.nonzero().reshape(-1).tolist())
    return tuple(dict.fromkeys(found))


def describe(guide: Any) -> str:
    return getattr(guide, "__name__", None) or type(guide).__name__
