"""Medians, spreads and ratios of the time-to-target benchmark as a table."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from statistics import median


@dataclass(frozen=True)
class Result:
    """One run: ``reached`` maps a target in nats to the steps and seconds it took."""

    problem: str
    family: str
    method: str
    rate: float | None
    seed: int
    reached: dict[str, tuple[int, float]]
    seconds: float
    compile_seconds: float
    best_elbo: float
    optimum: float


def _seconds(runs: Sequence[Result], target: float) -> list[float]:
    return [run.reached.get(str(target), (0, inf))[1] for run in runs]


def best_rate(runs: Sequence[Result], targets: Sequence[float]) -> list[Result]:
    """The runs of the learning rate with the smallest median time, target by target.

    Rates that reach no target in the median are ranked by how near they came.
    """
    rates = sorted({run.rate for run in runs}, key=lambda rate: rate or 0.0)

    def rank(rate: float | None) -> tuple[float, ...]:
        group = [run for run in runs if run.rate == rate]
        gap = median(run.optimum - run.best_elbo for run in group)
        return (*(median(_seconds(group, target)) for target in targets), gap)

    best = min(rates, key=rank)
    return [run for run in runs if run.rate == best]


def _cell(runs: Sequence[Result], target: float) -> tuple[str, str]:
    """Median steps, and median seconds with their range, or that the target was missed."""
    hits = [run.reached.get(str(target)) for run in runs]
    seconds = _seconds(runs, target)
    if median(seconds) == inf:
        longest = max(run.seconds for run in runs)
        return "-", f"not in {longest:.1f}"
    steps = median(hit[0] if hit else inf for hit in hits)
    highest = f"{max(seconds):.2f}" if max(seconds) < inf else "never"
    return f"{steps:.0f}", f"{median(seconds):.2f} ({min(seconds):.2f}-{highest})"


def ratio(runs: Sequence[Result], ours: Sequence[Result], targets: Sequence[float]) -> str:
    """Seconds of a method to the first target over seconds of NGVB to the last, which is harder."""
    if not ours or runs[0].method == "ngvb":
        return "-"
    denominator = median(_seconds(ours, targets[-1]))
    numerator = median(_seconds(runs, targets[0]))
    if denominator == inf:
        return "NGVB missed"
    if numerator == inf:  # all that is known is that it takes longer than it was given
        return f"> {median(run.seconds for run in runs) / denominator:.3g}"
    return f"{numerator / denominator:.3g}"


def table(results: Sequence[Result], targets: Sequence[float]) -> str:
    """A Markdown table of one problem and family, Adam at its best learning rate."""
    first = results[0]
    head = f"\n### {first.problem}, {first.family} (optimum {first.optimum:.4f} nats)\n\n"
    columns = ["method"]
    for target in targets:
        columns += [f"steps to {target}", f"s to {target}"]
    columns += ["compile s", "best ELBO", f"s to {targets[0]} / NGVB's s to {targets[-1]}"]
    lines = [" | ".join(columns), " | ".join("---" for _ in columns)]
    ours = [run for run in results if run.method == "ngvb"]
    for method in dict.fromkeys(run.method for run in results):
        runs = best_rate([run for run in results if run.method == method], targets)
        label = method if runs[0].rate is None else f"{method} Adam {runs[0].rate:g}"
        cells = [cell for target in targets for cell in _cell(runs, target)]
        compiled = runs[0].compile_seconds
        cells += [f"{compiled:.1f}" if compiled else "-"]
        cells += [f"{median(run.best_elbo for run in runs):.3f}", ratio(runs, ours, targets)]
        lines.append(" | ".join([label, *cells]))
    return head + "\n".join(f"| {line} |" for line in lines)
