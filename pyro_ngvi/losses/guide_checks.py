"""Guides that have no use for a curvature, and programs that would scale it."""

from typing import Any

from ..guides.base import AutoFamily

#: by the form of curvature that a family takes, the kinds that do not have it
_OF_OTHER_FORM = {"dense": ["squared_gradient"], "low_rank": ["squared_gradient", "hessian"]}

#: by kind, the guides to take
_GUIDES = {
    "hessian": "AutoMeanFieldNormal or AutoFullRankNormal",
    "squared_gradient": "AutoMeanFieldNormal",
    "kronecker": "AutoMatrixNormal with pyro_ngvi.optim.NoisyKFAC",
}


def _takes(form: str | None, kind: str) -> bool:
    if kind == "scores":
        return True
    if form is None or "kronecker" in (form, kind):
        return form == kind
    return kind not in _OF_OTHER_FORM.get(form, ())


def check_guide_takes_curvature(guide: Any, kind: str, joint: bool) -> None:
    """Refuse a guide that has no use for curvature, in a sentence that names the fix."""
    what = f"BatchedELBO(curvature={kind!r})"
    if not isinstance(guide, AutoFamily) or not joint:
        raise ValueError(
            f"{what} leaves its curvature on a guide of this package, and the guide is "
            f"{type(guide).__name__}. Pass for instance pyro_ngvi.AutoMeanFieldNormal(model) itself "
            f"(not within an AutoGuideList), or leave curvature out."
        )
    form = guide.family.curvature_form
    if not _takes(form, kind):
        own = "kronecker" if form == "kronecker" else "gauss_newton"
        takes = "has no use for a curvature" if form is None else f'takes curvature="{own}"'
        guides = _GUIDES.get(kind, "AutoMeanFieldNormal, AutoFullRankNormal or AutoFactorPrecision")
        raise ValueError(
            f"{what}: {type(guide.family).__name__}, the family of {type(guide).__name__}, {takes}. "
            f"Take {guides}, or leave curvature out."
        )


def check_all_have_scores(guide: AutoFamily) -> None:
    """Refuse a guide with parameters beside its family's to a loss that gives them no gradient."""
    own = {id(p) for p in guide.natural_params().values()}
    rest = [k for k, p in guide.named_parameters() if p.requires_grad and id(p) not in own]
    if rest:
        raise ValueError(
            f'BatchedELBO(curvature="scores") gives the parameters of a guide no gradient, and '
            f"{type(guide).__name__} has some that are not its family's: {', '.join(rest)}. Nothing "
            f"would train them; leave curvature out and take pyro_ngvi.NGVB or pyro_ngvi.IFVB."
        )


def check_unscaled(log_q: Any, kind: str) -> None:
    """Refuse a scale or mask around model and guide: rules set the curvature against q's own."""
    scale = log_q["scale"]
    unscaled = isinstance(scale, int | float) and scale == 1.0 and log_q["mask"] is None
    if kind != "price" and not unscaled:
        raise ValueError(
            f"BatchedELBO(curvature={kind!r}) stands under a poutine.scale or mask around model "
            "and guide, which changes the curvature but not the precision of q that it becomes. "
            "Leave it out; to temper the posterior there is kl_weight."
        )
