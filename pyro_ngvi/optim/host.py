"""The only glue between pure rules and ``pyro.infer.SVI``.

``SVI`` hands an optimizer the unordered *set* of tensors that took part in a step.  The optimizer
here finds the natural parameters through the guide, never by order, and gives the rest to an
ordinary optimizer.  A step happens as a whole or not at all, wherever an exception cuts it off.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar

import pyro
import torch
from pyro.optim import PyroOptim
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ..families.base import Tensors
from ..linalg.host import host_bool, outside_autocast
from ..runtime.told_in import told_in
from .rule import Report, State, StepReport, restart_average
from .state import (
    ADAM,
    DefaultAdam,
    OthersState,
    fitted,
    flat,
    is_power_of_two,
    moved,
    refuse_wrappers,
    whole_step,
)


def find_blocks(guide: Any) -> Iterator[tuple[str, Any]]:
    """Our guides within ``guide``: itself, or its parts, each with its path ("" for itself)."""
    if isinstance(guide, nn.Module):
        for path, module in guide.named_modules():
            if hasattr(type(module), "make_family"):
                yield path, module


class NaturalGradientOptim(PyroOptim):
    """A ``PyroOptim`` that steps the natural blocks of a guide by a rule, which subclasses make."""

    #: kinds of curvature that the optimizer takes; ``None`` stands for a loss without any
    accepts: tuple[str | None, ...] = (None, "price")
    #: whether a step takes the gradients of the loss in the guide's parameters
    needs_gradients: ClassVar[bool] = True
    #: a guide to use, where the optimizer cannot do without one of ours
    suits: ClassVar[str] = ""

    def __init__(self, guide: Any, others: PyroOptim | None = ADAM, rule: Any = None) -> None:
        super().__init__(refuse_wrappers, {})  # __call__ does the work
        name = type(self).__name__
        if others is not None and not isinstance(others, PyroOptim):
            raise ValueError(
                f"others must be a pyro.optim.PyroOptim such as pyro.optim.Adam({{'lr': 1e-3}}), "
                f"got {type(others).__name__}."
            )
        if getattr(guide, "holds_sites", False) and "sites" not in self.accepts:
            raise ValueError(
                f"{name} cannot step the sites of AutoSites. Use pyro_ngvi.CVI(guide) and SVI's "
                f"loss=pyro_ngvi.SitesELBO()."
            )
        self.guide = guide
        self.rule = rule
        self.others = DefaultAdam() if others is ADAM else others
        self._is_to_tell = isinstance(self.others, DefaultAdam)
        self._has_others = False
        self._others_state = OthersState(guide)
        self._rules: dict[str, Any] = {}
        self._states: dict[str, State] = {}
        self._waiting: dict[str, Tensors] = {}
        self._reports: dict[str, Report] = {}
        for path, block in self._blocks():
            self._adopt(path, block)
        if self.suits and not self._rules:
            raise ValueError(
                f"{name} steps guides of this package, and found none in {describe(guide)}. Use for "
                f"instance {self.suits}, the guide itself. For other guides there is pyro_ngvi.IFVB."
            )
        if self.suits and None not in self.accepts and "" not in self._rules:
            raise ValueError(
                f"{name} needs curvature, which a loss can leave on one guide over all latent sites "
                f"only. Use one guide of this package in the place of {describe(guide)}, or "
                f"pyro_ngvi.NGVB."
            )

    def make_rule(self, family: Any) -> Any:
        """The rule for a block with that family."""
        return self.rule(family)

    def _blocks(self) -> Iterable[tuple[str, Any]]:
        """The blocks that this optimizer steps, by path: our guides within the guide."""
        return find_blocks(self.guide)

    def _init_state(self, path: str, block: Any, values: Tensors) -> State:
        return self._rules[path].init(values)

    def _beside_gradients(
        self, path: str, block: Any, values: Tensors, parts: Tensors
    ) -> Mapping[str, Any]:
        """What the rule takes beside gradients at the iterate ``values``: ``parts``, of the loss."""
        return parts

    def _adopt(self, path: str, block: Any) -> None:
        rule = self._rules[path] = self.make_rule(block.family)
        reason = rule.refuses(block.family)
        if reason:
            raise ValueError(f"{type(self).__name__} cannot step {type(block).__name__}: {reason}")
        block.set_iterate_offset(None)  # an optimizer before this one may have left its own
        block.curvature = block.path_share = None  # as may a step that failed
        block.averaged = block.holds_average and rule.averaging is not None

    def holders(self) -> list[Any]:
        """The objects whose attributes, and entries of whose dicts, a step of the blocks replaces."""
        blocks = [block for _, block in self._blocks()]
        return [self, *blocks, *(b.algebra for b in blocks if hasattr(b, "algebra"))]

    def natural_params(self) -> list[Tensor]:
        """The parameters that this optimizer steps by itself."""
        return [p for _, block in self._blocks() for p in block.natural_params().values()]

    @property
    def reports(self) -> dict[str, Report]:
        """What the last step did, by block, as tensors."""
        return dict(self._reports)

    def take_reports(self, reports: dict[str, Report]) -> None:
        """Keep the reports of a step that was done elsewhere, and warn where it was skipped."""
        self._reports = reports
        for path, block in self._blocks():
            if path in reports and host_bool(reports[path].finite) is False:
                self._warn_skipped(block, reports[path])

    @outside_autocast
    def __call__(self, params: Iterable[Tensor], *args: Any, **kwargs: Any) -> None:
        """One step for every parameter in ``params``, which uses the gradients in ``.grad`` up."""
        params = list(params)
        with whole_step(self, params):
            self.step_others(self.step_blocks(params))

    def step_blocks(self, params: list[Tensor]) -> list[Tensor]:
        """Step the natural blocks among ``params`` and return the other parameters, sorted."""
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
        return others

    def step_others(self, others: list[Tensor]) -> None:
        """Step by ``others=`` what :meth:`step_blocks` left."""
        if others and self.others is not None:
            self._others_state.step(self.others, others, type(self).__name__)

    @torch.no_grad()
    def _step_block(self, path: str, block: Any, tensors: dict[str, Any]) -> None:
        values = {name: p.detach() for name, p in tensors.items()}
        state = self._state_of(path, block, values)
        curvature, block.curvature = block.curvature, None
        self._check_curvature(block, curvature)
        if self.needs_gradients and all(p.grad is None for p in tensors.values()):
            raise ValueError(
                f"{type(self).__name__}: the loss has no gradient in the parameters of "
                f"{type(block).__name__}. Is this under torch.no_grad(), or are they frozen? Losses "
                f"like ReweightedWakeSleep need a guide with sticking_the_landing=False."
            )
        grads: Tensors = {
            name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in tensors.items()
        }
        like, halves = next(iter(values.values())), (torch.float16, torch.bfloat16)  # autocast's
        parts = {} if curvature is None else curvature.parts
        parts = {k: v.to(like) if v.dtype in halves else v for k, v in parts.items()}
        # the gradient was taken at the iterate, which lies at an offset from an averaged answer
        intact = block.offset_is_intact()
        offset = block.iterate_offset(intact)
        if offset:
            values = {name: p + offset[name] for name, p in values.items()}
            if not host_bool(intact):
                # averages of what was there before somebody else wrote to the parameters are void
                state = restart_average(state, values, intact)
        beside = self._beside_gradients(path, block, values, parts)
        new, state, report = self._rules[path].update(values, grads, state, beside)
        answer = state["average"] if block.averaged else new
        for name, p in tensors.items():
            p.copy_(answer[name])
        if block.averaged:
            block.set_iterate_offset({name: new[name] - answer[name] for name in new}, answer)
        block.path_share = state.get("path_share")
        self._states[path], self._reports[path] = state, report
        if host_bool(report.finite) is False:
            self._warn_skipped(block, report)

    def _check_curvature(self, block: Any, curvature: Any) -> None:
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

    def _state_of(self, path: str, block: Any, values: Tensors) -> State:
        if path in self._waiting:
            fresh = self._rules[path].init(values)
            self._states[path] = fitted(path, fresh, self._waiting.pop(path))
        if path not in self._states:
            self._states[path] = self._init_state(path, block, values)
        state, like = self._states[path], next(iter(values.values()))
        if state["count"].device != like.device or state["count"].dtype != like.dtype:
            # the guide was moved, for instance by guide.to(device)
            state = tree_map(lambda v: moved(v, like), state)
        return state

    @told_in("steps.md#was-given-no-parameter-of-its-guide")
    def _sorted_others(self, remaining: dict[int, Tensor], natural: bool) -> list[Tensor]:
        if not natural:
            raise ValueError(
                f"{type(self).__name__} was given no parameter of its guide {describe(self.guide)}: "
                f"SVI trains another guide. Build the optimizer with the guide that SVI gets. (Load a "
                f"store before the guide's first call. Deep copies of Pyro's guides do not work.)"
            )
        store = pyro.get_param_store()
        # a set has no order; sorting by name makes runs repeatable
        learnt = (p for p in remaining.values() if p.requires_grad)  # frozen ones want no trainer
        ordered = sorted(learnt, key=lambda p: str(store.param_name(p)))
        self._has_others = self._has_others or bool(ordered)
        if ordered and (self.others is None or self._is_to_tell):
            names = ", ".join(str(store.param_name(p)) for p in ordered[:3])
            names += ", ..." * (len(ordered) > 3)
            name = type(self).__name__
            if self.others is None:
                raise ValueError(
                    f"{name} trains the guide's natural parameters only, and this step has others: "
                    f"{names}. Say who trains them, for instance "
                    f"others=pyro.optim.Adam({{'lr': 1e-3}})."
                )
            self._is_to_tell = False
            warnings.warn(
                f"{name} leaves what is not natural ({names}) to {self.others!r}. Pass others= for "
                f"another rate or optimizer, or others=None to have it refused.",
                UserWarning,
                stacklevel=6,
            )
        return ordered

    def _warn_skipped(self, block: Any, report: Report) -> None:
        count = int(report.skipped)
        if not is_power_of_two(count):
            return
        what = "log p or log q of some draw"
        if self.needs_gradients:
            what = "gradient" if None in self.accepts else "gradient or curvature"
        sites = ", ".join(map(repr, _sites(block, report.bad_entries))) or "the whole latent vector"
        warnings.warn(
            f"{type(self).__name__} skipped a step: the {what} is not finite at {sites} "
            f"({count} skipped so far; the parameters are unchanged). If this goes on, look for NaN "
            f"in the data, a likelihood of -inf at the start, or lower init_scale.",
            RuntimeWarning,
            stacklevel=8,
        )

    def report(self, path: str | None = None) -> StepReport:
        """A :class:`~pyro_ngvi.optim.rule.StepReport` of the last step; waits for the device.

        ``path`` names a part of an ``AutoGuideList`` ("0", "1", ...); by default the only part.
        """
        if not self._reports:
            raise RuntimeError("There is no report before the first step.")
        if path is None:
            if len(self._reports) > 1:
                raise ValueError(f"Name one of the parts: {', '.join(map(repr, self._reports))}.")
            path = next(iter(self._reports))
        block, report = dict(self._blocks())[path], self._reports[path]
        taken = "damped" if bool(report.damped) else "accepted"
        outcome = taken if bool(report.finite) else "skipped"
        numbers = {name: getattr(report, name).item() for name in ("step_norm", "gain", "radius")}
        skipped, sites = int(report.skipped), _sites(block, report.bad_entries)
        return StepReport(outcome, **numbers, skipped=skipped, skipped_sites=sites)

    def get_state(self) -> dict[str, Any]:
        """Everything that the next step depends on, except parameters and the random state."""
        natural = {path: dict(state) for path, state in (self._states | self._waiting).items()}
        for path, block in self._blocks():
            if path in natural and block.natural_params() and block.iterate_offset():
                natural[path]["lag"] = block.iterate_offset()
        return {
            "natural": tree_map(torch.clone, natural),
            "others": self._others_state.save(self.others),
        }

    def set_state(self, state_dict: dict[str, Any]) -> None:
        """Continue from ``get_state()``, whether or not a step has been taken since construction.

        The states of version 0.1, with dots in their names in place of dicts in dicts, load too.
        """
        if set(state_dict) != {"natural", "others"}:
            raise ValueError(
                f"This is not the state of {type(self).__name__}: it has the entries "
                f"{sorted(map(str, state_dict))} instead of 'natural' and 'others'."
            )
        self._others_state.load(self.others, state_dict["others"])
        self._states.clear()
        self._waiting = {path: flat(state) for path, state in state_dict["natural"].items()}
        for path, block in self._blocks():
            # the parameters may be restored before or after this call
            state = self._waiting.get(path, {})
            lag = {k[4:]: state.pop(k) for k in [*state] if k.startswith("lag.")}
            block.set_iterate_offset(lag or None)
            block.path_share = state.get("path_share")


def _sites(block: Any, bad_entries: Tensor) -> tuple[str, ...]:
    if len(bad_entries) != getattr(block, "latent_dim", len(bad_entries)):
        return ()  # entries of parameters, in a frame that knows of no sites
    found = (block.site_of(int(i)) for i in bad_entries.nonzero().reshape(-1).tolist())
    return tuple(dict.fromkeys(found))


def describe(guide: Any) -> str:
    return getattr(guide, "__name__", None) or type(guide).__name__
