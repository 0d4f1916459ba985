"""Latent sites that are marked for enumeration, and a model that hides them."""

from typing import Any

from pyro.poutine.messenger import Messenger

__all__ = ["HidesMarked", "is_marked"]


def is_marked(site: Any) -> bool:
    """Whether a message is a latent site with ``infer={"enumerate": "parallel"}``, to be summed out."""
    if site["type"] != "sample" or site["is_observed"]:
        return False
    infer = site["infer"] or {}
    return infer.get("enumerate") == "parallel" and infer.get("num_samples") is None


class HidesMarked(Messenger):
    """Draws marked sites from the model, out of sight of what is around: a guide has none of them."""

    def _pyro_sample(self, msg: Any) -> None:
        if is_marked(msg):
            msg["stop"] = True
