"""Minibatches without end, which go on after a checkpoint where they were; random states as data."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import SequentialSampler, WeightedRandomSampler

from ..diagnostics.over_batches import as_arguments, samplers_of
from ..linalg.host import random_states, set_random_states
from ..runtime.density import Sites, is_latent, is_minibatch, site_kind


class Batches:
    """Minibatches without end, each as a tuple of arguments: epoch after epoch of ``source``.

    A run that is resumed goes on with the very minibatch that would have been next, shuffled loaders
    included, and loads those before once more.  Not for iterators that can be gone through once, such
    as generators, nor for data that change by more than torch's, NumPy's and Python's random states.

    Args:
        source: a ``DataLoader``, or another iterable that can be gone through again, of tuples or lists
            of arguments, or of single ones; of other ``Batches`` it is their source.

    Attributes:
        epoch: how many epochs were begun.
        position: how many minibatches of this one were taken.

    Raises:
        ValueError: where an epoch is empty.

    Example:
        >>> batches = Batches([("a", 1), ("b", 2)])
        >>> [next(batches) for _ in range(3)], batches.epoch, batches.position
        ([('a', 1), ('b', 2), ('a', 1)], 2, 1)
    """

    #: the place of minibatches that are not at hand
    awaited: dict[str, Any] | None = None

    def __init__(self, source: Iterable[Any]) -> None:
        warned = isinstance(source, Batches)
        source = source.source if isinstance(source, Batches) else source
        if not isinstance(source, Iterable) or isinstance(source, Iterator):
            raise ValueError(
                f"Minibatches come from an iterable that can be gone through again, and this is "
                f"{type(source).__name__}. Pass a DataLoader or a list of tuples of arguments."
            )
        if hasattr(source, "shape") or isinstance(source, Mapping):
            raise ValueError(
                f"Minibatches come from a DataLoader or a list of tuples of arguments, and this is "
                f"{type(source).__name__}. A model takes its data by position, fit(model, y), or "
                f"bound: functools.partial(model, data=y)."
            )
        if not warned and any(isinstance(s, WeightedRandomSampler) for s in samplers_of(source)):
            warnings.warn(
                "The loader draws data by weights, where a subsampled plate takes all of them to be "
                "equally likely: the posterior is that of data weighted so. Take one that shuffles.",
                stacklevel=2,
            )
        self.source = source
        self.epoch = self.position = 0
        self._running: Iterator[Any] | None = None
        self._start: dict[str, Any] | None = None

    @staticmethod
    def after(before: Batches | None, source: Iterable[Any]) -> Batches:
        """Those of ``source``, from the place of ``before`` where that waits for them."""
        found = Batches(source)
        if before is not None and before.awaited is not None:
            found.load_state_dict(before.awaited)
        return found

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> tuple[Any, ...]:
        for _ in range(2):
            if self._running is None:
                self.epoch, self.position = self.epoch + 1, 0
                self._start = all_random_states(self._generators())
                self._running = iter(self.source)
            try:
                batch = next(self._running)
            except StopIteration:
                self._running = None
            else:
                self.position += 1
                return as_arguments(batch)
        raise ValueError("The iterable of minibatches is empty: there is nothing to go over.")

    def warn_of_no_share(self, sites: Sites) -> None:
        """Warn where a run of the model at a minibatch takes it for all data of a global variable."""
        count = len(self.source) if isinstance(self.source, Sized) else 1
        plates = {name: {f.name for f in s["cond_indep_stack"]} for name, s in sites.items()}
        observed = {name: s for name, s in sites.items() if site_kind(s) == "observed"}
        of_data = {plate for name in observed for plate in plates[name]}
        has_globals = any(is_latent(s) and not plates[name] & of_data for name, s in sites.items())
        weighed = any(map(is_minibatch, sites.values())) or any(
            isinstance(s["scale"], Tensor) or s["scale"] != 1.0 for s in observed.values()
        )
        if count > 1 and observed and has_globals and not weighed:
            warnings.warn(
                f"The model takes each of {count} minibatches for all data: the posterior will be as "
                f"wide as that of one. Put {sorted(observed)} into a plate that knows how many there "
                f"are: pyro.plate(name, N, subsample_size=len(x)).",
                stacklevel=2,
            )

    def reshuffle(self) -> None:
        """Begin an epoch in an order of torch's random state alone, but of loaders that do not shuffle
        and iterables of no length, which go on."""
        source, order = self.source, None
        if isinstance(source, Sequence):
            order = [source[i] for i in torch.randperm(len(source)).tolist()]
        elif not isinstance(getattr(source, "sampler", None), SequentialSampler | None):
            for generator in self._generators():
                generator.manual_seed(int(torch.randint(2**31, ())))
            order = source
        if order is not None:
            self._running, self._start, self.position = iter(order), None, 0

    def _generators(self) -> list[torch.Generator]:
        """Generators of the source's own: those of a loader and its samplers."""
        holders = self.source, *samplers_of(self.source)
        found = {id(g): g for g in (getattr(holder, "generator", None) for holder in holders)}
        return [g for g in found.values() if isinstance(g, torch.Generator)]

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Within it minibatches are taken without a trace in the generators of the source."""
        before = [(g, g.get_state()) for g in self._generators()]
        try:
            yield
        finally:
            for generator, state in before:
                generator.set_state(state)

    def state_dict(self) -> dict[str, Any]:
        """The place, as plain data, for :func:`pyro_ngvi.save`."""
        own = [g.get_state() for g in self._generators()]
        return {"epoch": self.epoch, "position": self.position, "start": self._start, "own": own}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a place, refused of a loader that is too short; other random states are left alone."""
        own = self._generators()
        if len(own) != len(state["own"]):
            raise ValueError(
                f"The saved run's minibatches came from a loader with {len(state['own'])} generators "
                f"of its own, and this one has {len(own)}: pass the loader of that run."
            )
        before = all_random_states()
        self._running, self._start = None, state["start"]
        if self._start is not None:
            set_all_random_states(self._start, own)
            self._running = iter(self.source)
            for taken in range(state["position"]):
                if next(self._running, self) is self:
                    raise ValueError(
                        f"The saved run was at minibatch {state['position']} of an epoch, and this "
                        f"loader has {taken}: pass the loader of that run."
                    )
        self.epoch, self.position = state["epoch"], state["position"]
        set_all_random_states(before)
        for generator, saved in zip(own, state["own"], strict=True):
            generator.set_state(saved)


@dataclass(frozen=True)
class Epoch:
    """One epoch of the minibatches, as often as it is gone through, which leaves no trace in them."""

    batches: Batches

    @property
    def source(self) -> Any:
        """The loader."""
        return self.batches.source

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        with self.batches.apart():
            yield from map(as_arguments, self.batches.source)


def all_random_states(own: Iterable[torch.Generator] = ()) -> dict[str, Any]:
    """The random states of torch, its devices in use, NumPy, Python, and further generators."""
    numpy: Any = np.random.get_state(legacy=False)
    key = numpy["state"].pop("key", None)
    on_cpu, *on_gpu = random_states()
    return {
        "torch": on_cpu,
        "cuda": on_gpu,
        "numpy": numpy | {"key": None if key is None else torch.from_numpy(key.astype(np.int64))},
        "python": random.getstate(),
        "own": [g.get_state() for g in own],
    }


def set_all_random_states(states: dict[str, Any], own: Iterable[torch.Generator] = ()) -> None:
    """Put back what :func:`all_random_states` gave."""
    set_random_states([states["torch"], *states["cuda"]])
    numpy = dict(states["numpy"])
    key = numpy.pop("key")
    if key is not None:
        numpy["state"] = numpy["state"] | {"key": key.numpy().astype(np.uint32)}
    np.random.set_state(numpy)
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    for generator, state in zip(own, states["own"], strict=False):
        generator.set_state(state)
