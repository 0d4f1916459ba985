"""What a guide that makes its parameters at its first call says of a state loaded before it."""

from typing import Any

__all__ = ["MadeAtFirstCall"]


class MadeAtFirstCall:
    """Mixed into an ``AutoGuide``: ``load_state_dict`` before the first call names the remedy."""

    prototype_trace: Any

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
        module: Any = super()
        before = len(unexpected_keys)
        lists = missing_keys, unexpected_keys, error_msgs
        module._load_from_state_dict(state_dict, prefix, local_metadata, strict, *lists)
        if len(unexpected_keys) > before and self.prototype_trace is None:
            error_msgs.append(
                f"{type(self).__name__} has no parameters before its first call: call the guide once "
                f"with the model's arguments, then load."
            )
