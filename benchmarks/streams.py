"""A pass over data that are read from a file: rows a second beside reading alone, and memory.

Run from the root of the repository: ``python -m benchmarks.streams --help``.  One thread, and one more
process where a worker reads ahead.  See ``benchmarks/README.md`` for what is measured.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI
from torch.utils.data import DataLoader, Dataset, IterableDataset

import pyro_ngvi as ngvi

from .step_cost import quiet_and_single
from .stepping import circumstances, heading, line

COLUMNS = 30
#: rows that are made, or written to Parquet, at once
BLOCK = 100_000


def model(X: torch.Tensor, y: torch.Tensor, size: int) -> None:
    w = pyro.sample("w", dist.Normal(X.new_zeros(COLUMNS), 1.0).to_event(1))
    # with subsample_size=len(y) Pyro shuffles `size` numbers at each run: .4 s of 10^7
    with pyro.plate("data", size, subsample=torch.arange(len(y))):
        pyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)


class MemmapRows(Dataset):
    """Runs of rows of a raw file of float32, of which the last column is y.

    The file is mapped for each run alone: pages of a mapping that stays open would count as memory of
    the process.
    """

    def __init__(self, path: Path, rows: int, batch: int) -> None:
        self.path, self.rows, self.batch = path, rows, batch

    def __len__(self) -> int:
        return -(-self.rows // self.batch)

    def __getitem__(self, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        table = np.memmap(self.path, np.float32, "r", shape=(self.rows, COLUMNS + 1))
        part = torch.from_numpy(np.array(table[k * self.batch : (k + 1) * self.batch]))
        return part[:, :-1], part[:, -1]


class ParquetRows(IterableDataset):
    """The same of a Parquet file, by row groups in a random order, each of several minibatches."""

    def __init__(self, path: Path, batch: int) -> None:
        self.path, self.batch = path, batch

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        import pyarrow.parquet  # what reads ahead is another process

        file = pyarrow.parquet.ParquetFile(self.path)
        for group in torch.randperm(file.num_row_groups).tolist():
            table = file.read_row_group(group)
            part = torch.from_numpy(np.stack([c.to_numpy() for c in table.columns], 1))
            yield from zip(
                part[:, :-1].split(self.batch), part[:, -1].split(self.batch), strict=True
            )


def blocks(rows: int) -> Iterator[np.ndarray]:
    """Logistic regression data, (BLOCK, COLUMNS + 1) at a time."""
    generator = torch.Generator().manual_seed(0)
    truth = torch.randn(COLUMNS, generator=generator) / 4.0
    for start in range(0, rows, BLOCK):
        X = torch.randn(min(BLOCK, rows - start), COLUMNS, generator=generator)
        y = torch.bernoulli(torch.sigmoid(X @ truth), generator=generator)
        yield torch.cat([X, y[:, None]], 1).numpy()


def write(folder: Path, rows: int, kind: str) -> Path:
    path = folder / f"rows.{kind}"
    if kind == "memmap":
        with path.open("wb") as file:
            for block in blocks(rows):
                block.tofile(file)
        return path
    import pyarrow
    import pyarrow.parquet

    names = [f"x{k}" for k in range(COLUMNS)] + ["y"]
    schema = pyarrow.schema([(name, pyarrow.float32()) for name in names])
    with pyarrow.parquet.ParquetWriter(path, schema, compression="none") as writer:
        for block in blocks(rows):
            columns = [np.ascontiguousarray(column) for column in block.T]
            writer.write_table(pyarrow.table(columns, schema=schema), row_group_size=BLOCK)
    return path


def loader(kind: str, path: Path, rows: int, batch: int, workers: int) -> DataLoader:
    how: dict[str, Any] = {"batch_size": None, "num_workers": workers}
    if kind == "memmap":
        return DataLoader(MemmapRows(path, rows, batch), shuffle=True, **how)
    return DataLoader(ParquetRows(path, batch), **how)


def mib() -> float:
    """The largest memory so far of this process and of one that it has waited for."""
    who = resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN
    return sum(resource.getrusage(one).ru_maxrss for one in who) / 1024


def one_case(kind: str, path: Path, rows: int, batch: int, workers: int) -> str:
    """A line of the table; in a process of its own, whose memory is that of the case."""
    quiet_and_single()
    data = loader(kind, path, rows, batch, workers)
    start = time.perf_counter()
    reading = sum(len(y) for _, y in data) / (time.perf_counter() - start)
    guide = ngvi.AutoFullRankNormal(model, init=None)
    svi = SVI(model, guide, ngvi.NGVB(guide), ngvi.BatchedELBO(8))
    pyro.set_rng_seed(0)
    start = time.perf_counter()
    for X, y in data:
        svi.step(X, y, size=rows)
    stepping, first = rows / (time.perf_counter() - start), next(iter(data))
    start = time.perf_counter()
    program = ngvi.diagnostics.OverBatches(model, data)
    found = ngvi.khat(program, guide, *first, size=rows, num_samples=100, seed=0)
    figures = f"{reading:,.0f}", f"{stepping:,.0f}", f"{time.perf_counter() - start:.0f}"
    return line(kind, workers, *figures, f"{found.khat:.2f}", f"{mib():,.0f}")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--batch", type=int, default=10_000)
    parser.add_argument("--kinds", nargs="+", default=["memmap", "parquet"])
    parser.add_argument("--folder", type=Path, help="where the file is written, and deleted again")
    options = parser.parse_args(argv)
    print(circumstances())
    print(f"{options.rows:,} rows x {COLUMNS}, {options.batch:,} a step; 8 particles, full rank\n")
    speeds = "reading, rows/s", "steps, rows/s"
    print(heading("file", "workers", *speeds, "verdict, s", "k-hat", "MiB"))
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for kind in options.kinds:
            path = write(Path(folder), options.rows, kind)
            with ProcessPoolExecutor(1, spawn, max_tasks_per_child=1) as processes:
                for workers in (0, 1):
                    case = kind, path, options.rows, options.batch, workers
                    print(processes.submit(one_case, *case).result(), flush=True)
            path.unlink()


if __name__ == "__main__":
    main()
