"""The tables of the leaderboard, in Markdown: shares over problems and seeds, medians of the seeds."""

import math
from statistics import median_high
from typing import Any

NEAR = 0.1
BESIDE = "\u00a0/\u00a0"  # no line breaks within a cell
FIXED, BEST = "Adam, rate .01", "Adam, best of five rates"
RACERS = {"Adam": "", "NumPyro": "NumPyro's "}
OURS = ("fit", "NGVB loop")
LABELS = {"fit": "`ngvi.fit`", "NGVB loop": "`NGVB`, plain loop"}
LABELS |= {f"{racer} 0.01": of + FIXED for racer, of in RACERS.items()}
Errors = tuple[float, ...]
#: by problem and seed, by method: the error at each budget
Table = dict[tuple[str, int, int], dict[str, Errors]]


def collect(rows: list[dict[str, Any]], family: str) -> Table:
    """The rows of one family, Adam's as the best of its rates at each budget and as the fixed one."""
    table: Table = {}
    for row in rows:
        if row["family"] != family:
            continue
        entry = table.setdefault((row["problem"], row["dim"], row["seed"]), {})
        errors, method = tuple(row["errors"]), str(row["method"])
        racer = method.split()[0]
        if racer in RACERS:
            name = RACERS[racer] + BEST
            best = entry.get(name, (math.inf,) * len(errors))
            entry[name] = tuple(map(min, best, errors))
        if racer not in RACERS or method in LABELS:
            entry[LABELS.get(method, method)] = errors
    return table


def shown(error: float) -> str:
    """An error in nats, three digits where it is small."""
    if not error < math.inf:
        return "none"
    if error < 1.0:
        return f"{max(error, 0.0):.3f}"
    return f"{error:.1f}" if error < 100.0 else f"{error:,.0f}" if error < 1e6 else "> 1e6"


def line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def summary(table: Table, budgets: tuple[float, ...]) -> str:
    """For each method: problems within 0.1 nat by budget, and the largest error."""
    marks = [f"{b:g} s" for b in budgets]
    heads = ["method", *(f"≤ {NEAR} nat, {m}" for m in marks), *(f"worst, {m}" for m in marks)]
    lines = [line(*heads), line(*("---" for _ in heads))]
    methods = list(dict.fromkeys(method for entry in table.values() for method in entry))

    def near(method: str) -> list[int]:
        return [sum(e[method][i] <= NEAR for e in table.values()) for i in range(len(budgets))]

    for method in sorted(methods, key=lambda m: near(m)[::-1], reverse=True):
        n = len(table)
        cells = [f"{100.0 * k / n:.0f} %" for k in near(method)]
        worst = [max(e[method][i] for e in table.values()) for i in range(len(budgets))]
        lines.append(line(method, *cells, *map(shown, worst)))
    return "\n".join(lines)


def medians(table: Table) -> Table:
    """The errors of each problem at the median of its seeds, the larger of two."""
    seeds: dict[tuple[str, int], list[dict[str, Errors]]] = {}
    for (problem, dim, _), entry in table.items():
        seeds.setdefault((problem, dim), []).append(entry)
    found: Table = {}
    for (problem, dim), entries in seeds.items():
        by_budget = {m: zip(*(e[m] for e in entries), strict=True) for m in entries[0]}
        found[problem, dim, -1] = {m: tuple(map(median_high, x)) for m, x in by_budget.items()}
    return found


def details(table: Table, budgets: tuple[float, ...]) -> str:
    """The error of every method on every problem, at all budgets."""
    methods = list(dict.fromkeys(method for entry in table.values() for method in entry))
    lines = [line("problem", *methods), line(*("---" for _ in range(len(methods) + 1)))]
    for (problem, dim, _), entry in table.items():
        cells = [BESIDE.join(shown(e) for e in entry[method]) for method in methods]
        lines.append(line(f"{problem}, d = {dim}", *cells))
    return "\n".join(lines)


def losses(table: Table, budgets: tuple[float, ...]) -> str:
    """Where another method is within 0.1 nat at a budget at which neither of ours is."""
    lines = []
    ours = [LABELS[method] for method in OURS]
    for (problem, dim, _), entry in table.items():
        for i, budget in enumerate(budgets):
            mine = min((entry[m][i] for m in ours if m in entry), default=-math.inf)
            ahead = {m: e[i] for m, e in entry.items() if m not in ours and e[i] <= NEAR}
            if mine > NEAR and ahead:
                others = ", ".join(f"{m} {shown(e)}" for m, e in ahead.items())
                lines.append(line(f"{problem}, d = {dim}", f"{budget:g} s", shown(mine), others))
    heads = [
        line("problem", "budget", "best of ours", "within 0.1 nat"),
        line(*("---" for _ in range(4))),
    ]
    return "\n".join(heads + lines) if lines else "None."


def report(rows: list[dict[str, Any]], budgets: tuple[float, ...]) -> str:
    """All tables."""
    parts = []
    for family in dict.fromkeys(row["family"] for row in rows):
        table = collect(rows, family)
        spread = max(row["standard_error"] or 0.0 for row in rows if row["family"] == family)
        parts += [f"\n### {family}: {len(table)} problems and seeds", summary(table, budgets)]
        parts += [f"Largest standard error of an ELBO: {spread:.4f} nats.", "#### Where we lose"]
        table = medians(table)
        parts += [losses(table, budgets), "#### Every problem", details(table, budgets)]
    return "\n\n".join(parts)
