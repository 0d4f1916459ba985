"""A state that is loaded into a guide before the call that makes its parameters."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

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

    def _load_waiting_state(self) -> None:
        """At the end of the first call's set-up.

        Raises:
            RuntimeError: where the state does not fit, in the words of ``load_state_dict``.
        """
        if self._waiting_state is not None:
            module: Any = self
            state, strict = self._waiting_state
            module.load_state_dict(state, strict=strict)
            self._waiting_state = None
