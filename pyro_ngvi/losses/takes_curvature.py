"""Which guides take which curvature."""

from typing import Any

from ..guides.base import AutoFamily

#: by the form of curvature that a family takes, the kinds that it does not
_NO_USE = {
    "diagonal": ("kronecker",),
    "dense": ("kronecker", "squared_gradient"),
    "low_rank": ("kronecker", "squared_gradient", "hessian"),
}


def check_takes_curvature(guide: Any, kind: str, joint: bool) -> None:
    """At the first step: refuse a guide that a curvature would train wrongly or not at all."""
    ours = joint and isinstance(guide, AutoFamily)
    form = guide.family.curvature_form if ours else None
    takes = kind not in _NO_USE[form] if form in _NO_USE else form == kind
    if not ours or not (takes or kind == "scores"):
        taker = "AutoMatrixNormal, for NoisyKFAC," if kind == "kronecker" else "AutoMeanFieldNormal"
        raise ValueError(
            f"{type(guide).__name__} has no use for BatchedELBO(curvature={kind!r}). Take {taker} "
            f"itself (not within an AutoGuideList), or leave curvature out."
        )
    own = {id(p) for p in guide.natural_params().values()}
    rest = [k for k, p in guide.named_parameters() if p.requires_grad and id(p) not in own]
    if kind == "scores" and rest:
        raise ValueError(
            f'BatchedELBO(curvature="scores") would not train {", ".join(rest)} of '
            f"{type(guide).__name__}, which are not its family's parameters. Leave curvature out and "
            f"take pyro_ngvi.NGVB or pyro_ngvi.IFVB."
        )
