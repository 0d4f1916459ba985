"""Where version 0.1 had ``AutoSites``: its pickles name this module."""

__all__: list[str] = []


def __getattr__(name: str) -> None:
    if name.startswith("__"):
        raise AttributeError(name)
    raise ImportError(
        f"{name} was pickled by pyro_ngvi 0.1, and is made of other parts now. Load what 0.1 saved as "
        f"state_dict() and get_state() into a new AutoSites and its CVI, or unpickle it there."
    )
