"""A state that is loaded into a guide before the call that makes its parameters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

from ..linalg.host import own_random_state

__all__ = ["MadeAtFirstCall"]


class MadeAtFirstCall:
    """Mixed into an ``AutoGuide``: what ``load_state_dict`` gets before the first call waits for it."""

    prototype_trace: Any
    _waiting_state: tuple[dict[str, Any], bool] | None = None

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        if self.prototype_trace is None:
            own = {k.removeprefix(prefix): v for k, v in state_dict.items() if k.startswith(prefix)}
            self._waiting_state = deepcopy(own), strict
            return
        module: Any = super()
        lists = missing_keys, unexpected_keys, error_msgs
        module._load_from_state_dict(state_dict, prefix, local_metadata, strict, *lists)

    @contextmanager
    def _loading_waiting_state(self) -> Iterator[None]:
        """Around the set-up of the first call, which then leaves the random state alone.

        So it may have been restored before, and the run goes on as if nothing had come between.

        Raises:
            RuntimeError: where the state does not fit, in the words of ``load_state_dict``.
        """
        if self._waiting_state is None:
            yield
            return
        with own_random_state():
            yield
        module: Any = self
        state, strict = self._waiting_state
        module.load_state_dict(state, strict=strict)
        self._waiting_state = None
