"""A step of a rule from one dict: gradients by name, and curvature under "curvature." and its name."""

from typing import Any

from pyro_ngvi.optim.rule import Rule


def update(rule: Rule, params: Any, grads: dict[str, Any], state: Any) -> Any:
    own, curvature = {}, {}
    for name, v in grads.items():
        kind, *rest = name.split(".")
        if kind != "curvature":
            own[name] = v
        elif len(rest) == 1:
            curvature[rest[0]] = v
        else:  # of one part of a family
            curvature.setdefault(rest[0], {})[rest[1]] = v
    return rule.update(params, own, state, curvature)
