"""Is the estimate of the inverse Fisher matrix the right size?  Eigenvalues of (estimate x Fisher).

All are 1 for the exact inverse.  The recursion, the window as printed (K vectors) and the low-rank
estimate see the same scores, drawn from a Gaussian with the Fisher matrix as covariance.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from pyro_ngvi.fisher import InverseFisher, LowRank

from ..baselines import PaperDense, PaperWindow
from .report import Row, save

__all__ = ["eigenvalues", "fisher_matrix", "run"]

WINDOW = 100
FORMS = ("dense", "printed window", "low rank")


def fisher_matrix(name: str, d: int) -> Tensor:
    """A Fisher matrix (d, d): eigenvalues 100 / i "decaying", or a "spread" diagonal plus rank 10."""
    g = torch.Generator().manual_seed(0)
    if name == "decaying":
        Q, _ = torch.linalg.qr(torch.randn(d, d, generator=g))
        return (Q * (100.0 / torch.arange(1, d + 1))) @ Q.T
    diagonal = torch.logspace(-1, 1, d)
    B = diagonal.sqrt()[:, None] * torch.randn(d, 10, generator=g)
    return torch.diag(diagonal) + B @ B.T


def forms(rank: int = WINDOW) -> dict[str, InverseFisher]:
    return dict(zip(FORMS, (PaperDense(), PaperWindow(WINDOW), LowRank(rank)), strict=True))


def eigenvalues(
    estimate: InverseFisher, F: Tensor, counts: list[int], seed: int = 0
) -> dict[int, tuple[float, float, float]]:
    """{n: (min, median, max)} of the eigenvalues of L' P L, F = L L', after n scores."""
    d = len(F)
    L = torch.linalg.cholesky(F)
    g = torch.Generator().manual_seed(seed)
    scores = torch.randn(max(counts), d, generator=g) @ L.T
    state = estimate.init(scores[:4].square().mean(0), 1.0)
    found = {}
    for n, row in enumerate(scores, 1):
        state = estimate.update(state, row[None])
        if n in counts:
            P = torch.func.vmap(lambda g, s=state: estimate.product(s, g))(L.T)
            values = torch.linalg.eigvalsh((P @ L + (P @ L).T) / 2)
            found[n] = (float(values[0]), float(values.median()), float(values[-1]))
    return found


def run(quick: bool, out: Path | None = None) -> list[Row]:
    """min / median / max of the eigenvalues, one row for a Fisher matrix and number of scores."""
    counts = [50, 100, 200, 500, 1000] + ([] if quick else [2000, 3000])
    rows = []
    for d in (50, 400):
        for name in ("decaying", "spread"):
            F = fisher_matrix(name, d)
            found = {form: eigenvalues(est, F, counts) for form, est in forms().items()}
            lines, styles = {}, {}
            for color, (form, values) in zip(("C0", "C3", "C2"), found.items(), strict=True):
                for i, (which, dash) in enumerate((("min", ":"), ("median", "-"), ("max", "--"))):
                    styles[f"{form}, {which}"] = {"color": color, "linestyle": dash}
                    lines[f"{form}, {which}"] = (counts, [values[n][i] for n in counts])
            figure = f"calibration_{d}_{name}"
            save(out, figure, lines, "scores", "eigenvalues of P F", ("log", "log"), styles)
            n = counts[-1]
            text = {k: " / ".join(f"{x:.3g}" for x in v[n]) for k, v in found.items()}
            rows.append(
                Row(
                    f"D = {d}, {name}, {n:,} scores: min / median / max",
                    f"window of {WINDOW}: {text['printed window']}",
                    f"recursion: {text['dense']}",
                    f"low rank, K = {WINDOW}: {text['low rank']}",
                )
            )
    return rows
