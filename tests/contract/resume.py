"""Resuming: what a run that was saved and begun again has to give, bit for bit."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyro
import torch


def assert_resumes(
    make: Callable[[], Any], args: tuple[Any, ...], before: int, after: int, path: Path
) -> None:
    """``make()`` has ``guide`` (called with ``args``), ``optim`` and ``steps(n)``, giving n losses."""
    pyro.set_rng_seed(2)
    unbroken = make()
    unbroken.steps(before)
    unbroken.optim.save(str(path / "optim"))
    torch.save((unbroken.guide.state_dict(), torch.get_rng_state()), path / "rest")
    losses = unbroken.steps(after)

    pyro.clear_param_store()
    resumed = make()
    resumed.guide(*args)  # it learns its sites
    state, rng = torch.load(path / "rest")
    resumed.guide.load_state_dict(state)
    resumed.optim.load(str(path / "optim"))
    torch.set_rng_state(rng)
    assert resumed.steps(after) == losses
    for name, p in unbroken.guide.natural_params().items():
        assert torch.equal(p, resumed.guide.natural_params()[name]), name
