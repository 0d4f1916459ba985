"""What to say of a program that cannot run under ``torch.func.vmap``: where, why, and the way out."""

from collections.abc import Callable, Collection
from pathlib import Path
from types import FrameType, TracebackType

import pyro
import torch

__all__ = ["CannotBatch", "vmap_error"]

_PACKAGES = {
    name: Path(module.__file__ or "").parent for name, module in (("torch", torch), ("Pyro", pyro))
}
_OURS = Path(__file__).parent
#: where a line of theirs is at fault, rather than a way from one line of the user's to the next
_LIBRARY = ("distributions", "ops", "contrib", "nn")
_INSTEAD = {
    "OrderedLogistic": "Categorical, with probabilities put together by torch.cat, is the same",
}


class CannotBatch(RuntimeError):
    """A program cannot run under ``torch.func.vmap``; ``where`` it stopped."""

    def __init__(self, message: str, where: str) -> None:
        super().__init__(message)
        self.where = where


def vmap_error(
    error: RuntimeError, reached: Collection[str], all_sites: Callable[[], Collection[str]]
) -> CannotBatch:
    """The sentence for ``error``, raised after the sites ``reached`` of ``all_sites()``."""
    where = next(iter(getattr(error, "__notes__", ())), None) or _where(reached, all_sites)
    reason = next(iter(str(error).splitlines()), type(error).__name__).rstrip(". ")
    return CannotBatch(
        f"The program cannot run under torch.func.vmap ({where}): {reason}. "
        f"Under vmap a program cannot bring the value of a latent site into Python (.item(), "
        f"if, while, NumPy), write it in place into a tensor made without it, or use an operation "
        f"that has no batching rule. {_remedy(error.__traceback__)} pyro.infer.Trace_ELBO, which "
        f"runs the program once for each particle.",
        where,
    )


def _where(reached: Collection[str], all_sites: Callable[[], Collection[str]]) -> str:
    where = f"the last site it reached is {list(reached)[-1]!r}" if reached else "at its start"
    try:
        following = [name for name in all_sites() if name not in reached]
    except Exception:  # the program is wrong without vmap too: the first error is the one to tell
        following = []
    return f"{where}, on the way to {following[0]!r}" if following else where


def _remedy(trace: TracebackType | None) -> str:
    found: tuple[str, FrameType] | None = None
    while trace is not None:
        path, frame = Path(trace.tb_frame.f_code.co_filename), trace.tb_frame
        packages = [name for name, root in _PACKAGES.items() if path.is_relative_to(root)]
        if not packages and not path.is_relative_to(_OURS):
            found = None  # the user's own line
        for name in packages:
            if path.relative_to(_PACKAGES[name]).parts[0] in _LIBRARY:
                found = name, frame
        trace = trace.tb_next
    if found is None:
        return "Rewrite that line, or use"
    package, frame = found
    owner = frame.f_locals.get("self")
    what = frame.f_code.co_name if owner is None else type(owner).__name__
    instead = _INSTEAD.get(what, "write the model without it")
    return f"The line is not yours but in {package}'s {what}: {instead}; or use"
