"""The Walsh-Hadamard transform beside a dense product, a butterfly and two factors; bytes a second.

Run from the root of the repository: ``python -m benchmarks.whvi_paper.transform --help``.

On one thread of a CPU, or on a GPU, 256 rows of length D in float32:

* dense:      x @ H with the D x D matrix;
* butterfly:  log2(D) passes of sums and differences, in plain torch;
* two factors: H_a X H_b with a b = D, a and b as equal as can be, as two products of matrices.

The times of the other and ours are taken in turn, and a ratio is above 1 where ours takes less.
Bytes a second: those that the transform of a large tensor reads and writes, as a share of what
``y.copy_(x)`` reaches on the same tensor.  On a CPU that part is a trial of the program only.
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from pyro_ngvi.linalg import walsh_hadamard_transform

from ..stepping import Step, Timing, circumstances, compare, heading, line

LENGTHS = tuple(2**p for p in range(6, 14))
ROWS = 256
#: numbers in the tensor of the second part: beyond the caches of a GPU; small on a CPU
NUMBERS = {"cuda": 2**26, "cpu": 2**20}


@dataclass(frozen=True)
class Ratios:
    """Time of each other way over ours, rows of length ``D``."""

    D: int
    timings: dict[str, Timing]

    def __str__(self) -> str:
        ours = min(t.second.median for t in self.timings.values())
        cells = [t.cells()[-1] for t in self.timings.values()]
        return line(self.D, f"{1e3 * ours:.3f}", *cells)


@dataclass(frozen=True)
class Bytes:
    """``timing`` is of a copy over the transform: the share of the copy's bytes a second."""

    D: int
    dtype: str
    gigabytes_a_second: float
    timing: Timing

    def __str__(self) -> str:
        share = self.timing.cells()[-1]
        return line(self.D, self.dtype, f"{self.gigabytes_a_second:.0f}", share)


def sylvester(n: int, device: str) -> Tensor:
    """The matrix of +-1, (n, n)."""
    H = torch.ones(1, 1, device=device)
    while len(H) < n:
        H = torch.cat([torch.cat([H, H], 1), torch.cat([H, -H], 1)])
    return H


def butterfly(x: Tensor) -> Tensor:
    """x H for ``x`` (rows, D), unnormalised."""
    rows, D = x.shape
    half = 1
    while half < D:
        a, b = x.view(rows, D // (2 * half), 2, half).unbind(2)
        x = torch.stack([a + b, a - b], 2)
        half *= 2
    return x.view(rows, D)


def two_factors(x: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """H_a X H_b for each row of ``x`` (rows, a b), unnormalised."""
    return (left @ x.view(-1, len(left), len(right)) @ right).view(x.shape)


def ways(x: Tensor) -> dict[str, Callable[[], Tensor]]:
    """The other ways to transform ``x`` (rows, D); scales are in the matrices, or left out."""
    D, device = x.shape[-1], str(x.device)
    a = 2 ** ((D.bit_length() - 1) // 2)
    left, right = sylvester(a, device), sylvester(D // a, device) / D**0.5
    dense = sylvester(D, device) / D**0.5
    return {
        "dense": lambda: x @ dense,
        "butterfly": lambda: butterfly(x),
        "two factors": lambda: two_factors(x, left, right),
    }


def ratios(D: int, device: str, rounds: int) -> Ratios:
    x = torch.randn(ROWS, D, device=device)
    ours = walsh_hadamard_transform(x)
    timings = {}
    for name, other in ways(x).items():
        scale = D**-0.5 if name == "butterfly" else 1.0
        torch.testing.assert_close(scale * other(), ours, rtol=1e-3, atol=1e-3)
        timings[name] = timed(other, lambda: walsh_hadamard_transform(x), device, rounds)
    return Ratios(D, timings)


def bytes_a_second(D: int, dtype: torch.dtype, device: str, rounds: int) -> Bytes:
    x = torch.randn(NUMBERS[device] // D, D, device=device).to(dtype)
    y = torch.empty_like(x)
    timing = timed(lambda: y.copy_(x), lambda: walsh_hadamard_transform(x), device, rounds)
    moved = 2 * x.numel() * x.element_size()
    return Bytes(D, str(dtype), 1e-9 * moved / timing.second.median, timing)


def timed(first: Step, second: Step, device: str, rounds: int) -> Timing:
    if device == "cuda":
        return compare(first, second, rounds, time.perf_counter, torch.cuda.synchronize)
    return compare(first, second, rounds)


def main(arguments: list[str] | None = None) -> None:
    """Runs the benchmark, prints the tables and writes the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument(
        "--only", nargs="+", default=("ratios", "bytes"), choices=("ratios", "bytes")
    )
    parser.add_argument("--lengths", nargs="+", default=LENGTHS, type=int, help="powers of two")
    parser.add_argument("--rounds", default=11, type=int, help="at least 2")
    parser.add_argument("--json", type=Path, help="write all results to this file")
    p = parser.parse_args(arguments)
    torch.set_num_threads(1)
    results: list[Ratios | Bytes] = []
    if "ratios" in p.only:
        print(heading("D", "ours, ms", "dense / ours", "butterfly / ours", "two factors / ours"))
        for D in p.lengths:
            results.append(ratios(D, p.device, p.rounds))
            print(results[-1], flush=True)
    if "bytes" in p.only:
        print(heading("D", "dtype", "GB/s", "share of a copy's"))
        for dtype in (torch.float32, torch.bfloat16):
            for D in p.lengths:
                results.append(bytes_a_second(D, dtype, p.device, p.rounds))
                print(results[-1], flush=True)
    if p.json is not None:
        name = torch.cuda.get_device_name() if p.device == "cuda" else "one thread of a CPU"
        record = circumstances() | {
            "machine": name,
            "rounds": p.rounds,
            "results": [asdict(result) for result in results],
        }
        p.json.write_text(json.dumps(record, indent=1))
        print(f"All results are in {p.json}.")


if __name__ == "__main__":
    main()
