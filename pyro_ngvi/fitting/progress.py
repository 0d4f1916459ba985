"""What a fit shows while it runs, and how it is broken off.

What a user may have to act on is a Python warning, here as in the whole package; what passes by is a
bar or a line on stderr, of this file and of ``runtime.waiting``.  Nothing uses ``logging``.
"""

from __future__ import annotations

import math
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

from tqdm.auto import tqdm

from ..guides.deadline import end_soon, until_asked

#: seconds until the first line where the output is no terminal, and by what factor pauses grow
FIRST_LINE, GROWTH = 10.0, 2.0
#: losses whose median is shown, at most
NEWEST = 100


def gap_of_late(stop: Any) -> Any:
    """The nats still to gain at a rule's last look, ``None`` where that is long ago."""
    late = stop.looks and 4 * stop.looks[-1][0] >= 3 * stop.steps
    return stop.gap if late else None


class Progress:
    """A tqdm bar in terminals and notebooks; in logs a line after 10 s, 20 s, 40 s ..."""

    def __init__(self, stop: Any, shown: bool) -> None:
        self.stop, self.shown = stop, shown
        in_notebook = "notebook" in tqdm.__module__
        self._is_bar = shown and (in_notebook or sys.stderr.isatty())
        self._bar = tqdm(initial=stop.steps, unit="step", disable=not self._is_bar, leave=False)
        self._first = stop.steps
        self._start = time.monotonic()
        self._next = FIRST_LINE

    def update(self) -> None:
        """After a step that the rule has seen."""
        if not self.shown:
            return
        if self._is_bar:
            self._bar.total = self.steps_in_all()
            self._bar.set_postfix_str(self._words(), refresh=False)
            self._bar.update()
            return
        seconds = time.monotonic() - self._start
        if seconds >= self._next:
            self._next = GROWTH * seconds
            rate = (self.stop.steps - self._first) / seconds
            line = f"step {self.stop.steps}, {seconds:.0f} s, {rate:.3g} steps/s, {self._words()}"
            print(line, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Take the bar away."""
        self._bar.close()

    def steps_in_all(self) -> int | None:
        """When the rule is likely to end the run, by how the gap fell between its last two looks."""
        stop, found = self.stop, None
        if len(stop.looks) >= 2:
            (k, before), (n, now) = stop.looks[-2:]
            if before.nats > now.nats > stop.tol:
                rate = math.log(before.nats / now.nats) / (n - k)
                found = n + math.ceil(math.log(now.nats / stop.tol) / rate)
        if stop.max_steps is not None:
            found = min(found or stop.max_steps, stop.max_steps)
        return None if found is None else max(found, stop.steps)

    def _words(self) -> str:
        """The median ELBO of the last quarter of the steps, and what is left."""
        gap, losses = gap_of_late(self.stop), self.stop.losses
        last = losses[-max(1, min(len(losses) // 4, NEWEST)) :]
        finite = [x for x in last if math.isfinite(x)]
        if not finite:
            return "ELBO not finite"
        left = f", {gap.nats:.2g} nats to go" if gap is not None and math.isfinite(gap.nats) else ""
        return f"ELBO {-median(finite):.5g}{left}"


@contextmanager
def signals(alone: bool = True) -> Iterator[list[str]]:
    """Within it Ctrl-C and SIGTERM are noted, and no step is cut off; of a process that is ``alone`` a
    search or a look after some seconds.  A second Ctrl-C raises at once.  Other threads than the main
    one cannot listen."""
    noted: list[str] = []
    names = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}

    def note(number: int, frame: Any) -> None:
        if noted and number == signal.SIGINT:
            raise KeyboardInterrupt
        noted.append(names[signal.Signals(number)])
        if alone:  # ranks leave a look together, or wait for each other
            end_soon()

    if threading.current_thread() is not threading.main_thread():
        yield noted
        return
    with until_asked():
        before = {number: signal.signal(number, note) for number in names}
        try:
            yield noted
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
