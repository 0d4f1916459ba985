"""A run that goes on from a file, by hand or by ``fit``."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

from pyro.infer import SVI

from ..runtime.told_in import told_in
from .advice import advise
from .batches import Batches
from .checkpoint import read, restore
from .fit import Fit
from .ladder import Rung
from .stop import StopRule


class _Elsewhere(Batches):
    """Minibatches that are not at hand, of a fit that is read alone, at the arguments of ``source``."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.awaited = state

    def state_dict(self) -> dict[str, Any]:
        return self.awaited or {}

    def __next__(self) -> Any:
        raise ValueError(
            "The fit was loaded without its minibatches: give resume, or load, data=, to take steps."
        )


@told_in("verdicts.md#a-checkpoint-that-does-not-load")
def load(
    path: str | os.PathLike[str],
    run: SVI | Callable[..., Any],
    *args: Any,
    stop: StopRule | None = None,
    batches: Batches | None = None,
    guide: Any = None,
    optim: Any = None,
    loss: Any = None,
    data: Iterable[Any] | None = None,
    **kwargs: Any,
) -> Any:
    """Go on where a run was saved: the steps after it are those of an unbroken run, bit for bit.

    Of a hand-written loop (:func:`pyro_ngvi.save`, whose example has both) make model, guide, optimizer
    and loss by the same code as then, and pass the SVI.  Of a fit pass the model.  The file may come
    from another device: values come to where guide and model are.

    Returns:
        What :func:`save` got as ``extra``; for a model the :class:`Fit`.

    Args:
        path: the file.
        run: the ``pyro.infer.SVI``, new or used; or for a fit the model.
        args: arguments of the model, and ``kwargs``, which of a fit may come later; of a fit with
            ``data`` they are enough to read it.
        stop: a stop rule for the SVI, which takes over what that of the run had seen.
        batches: minibatches of the loop, of the same data.
        guide: for a fit that was given a guide of its own, as then; so ``optim`` and ``loss``.
        data: minibatches of a fit.

    Raises:
        FileNotFoundError: where there is no file.
        ValueError: for a file that is damaged or something else, and for a run of another model, guide,
            optimizer or precision; where shapes differ it may be torch's RuntimeError.

    Example:
        >>> import os, tempfile, pyro, pyro.distributions as dist, pyro_ngvi as ngvi
        >>> model = lambda: pyro.sample("x", dist.Gamma(9.0, 3.0))
        >>> path = os.path.join(tempfile.mkdtemp(), "fit.ngvi")
        >>> ngvi.fit(model, max_steps=3, seed=0, progress=False).save(path)
        >>> fit = ngvi.load(path, model)  # tomorrow
        >>> fit.steps, fit.resume(progress=False).why_stopped
        (3, 'converged')
    """
    saved = read(path)
    if isinstance(run, SVI):
        return restore(saved, run, args, kwargs, stop, batches, f"load: {path}")
    if stop is not None or batches is not None:
        raise ValueError(
            "load: stop= and batches= go with an SVI; a fit has them, and takes data=."
        )
    record = (saved["extra"] or {}).get("fit") if isinstance(saved["extra"], dict) else None
    if record is None:
        raise ValueError(
            f"load: {path} is of a hand-written loop: pass its pyro.infer.SVI, not a model."
        )
    recipe, given = record["recipe"], {"guide": guide, "optim": optim, "loss": loss}
    for name, value in given.items():
        if value is None and recipe[name] is None:
            raise ValueError(
                f"load: {path} is of a fit with a {name} of its own: pass {name}= as it was then."
            )
        given[name] = recipe[name] if value is None else value
    particles = recipe["num_particles"] if loss is None else None
    made = advise(
        run, guide=given["guide"], optim=given["optim"], loss=loss, num_particles=particles
    )
    how = record.get("compile", False), record.get("distributed")
    found = Fit(made, args, kwargs, data, record["tol"], *how)
    if data is None and (args or kwargs) and saved["batches"] is not None:
        found.batches = _Elsewhere([args])
    made.reasons = record["reasons"]
    found._seconds, found.why_stopped = list(record["seconds"]), record["why_stopped"]
    found.rungs = tuple(Rung(*rung) for rung in record["rungs"])
    found.stop.load_state_dict(saved["stop"] | {"batches": None})
    found._saved, found._path = saved, path
    if args or kwargs:
        found.put_back()
    return found
