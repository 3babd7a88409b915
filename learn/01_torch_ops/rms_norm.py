"""Step 1: rms_norm as torch ops, row by row in a Python loop, and on the whole tensor.

The loop is bound by calls: every torch op costs about a microsecond before it touches a number. On the whole tensor
the calls no longer matter, but every op reads its input from memory and writes its result back.
"""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import torch
from course import lines
from torch import Tensor


def row_by_row(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    y = torch.empty_like(x)
    for i in range(x.shape[0]):
        row = x[i]
        scale = torch.rsqrt((row * row).mean() + eps)
        y[i] = row * scale * weight
    return y


CALLS_PER_ROW = 9  # x[i], *, mean, +, rsqrt, *, *, y[i], copy


def whole_tensor(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps) * weight


PASSES = 7  # x * x reads and writes x's size, mean reads it, two products read and write it


QUICK = "--quick" in sys.argv


def seconds_of(run, total: float = 0.02 if QUICK else 0.4) -> float:
    """The lower quartile: what other programs on the machine do can only add time."""
    run()
    times, end = [], time.perf_counter() + total
    while not times or (time.perf_counter() < end and len(times) < 1000):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 4]


def main() -> None:
    rows, columns = (64 if QUICK else 2048), 4096
    lines.problem(f"rms_norm of {rows} x {columns} fp32")
    x, weight = torch.rand(rows, columns) * 2 - 1, torch.rand(columns) * 2 - 1
    elements = float(x.numel())

    one, row, y = torch.ones(1), x[0].clone(), torch.empty_like(x)
    call = seconds_of(lambda: [one * one for _ in range(1000)]) / 1000
    row_pass = max(seconds_of(lambda: [row * row for _ in range(1000)]) / 1000 - call, 0.0)
    copy = 8 * elements / seconds_of(lambda: y.copy_(x))
    lines.roof("a torch call on one number", call * 1e6, "us")
    lines.roof("what a row of 4,096 adds to it", row_pass * 1e6, "us")
    lines.roof("copy (torch)", copy / 1e9, "GB/s")
    in_loop = rows * (CALLS_PER_ROW * call + 5 * row_pass)
    lines.predicted("1 Python loop", in_loop, "rows * (9 calls + 5 passes over a row in the cache)")
    lines.predicted("1 torch ops", PASSES * 4 * elements / copy, "7 passes over x's bytes / copy")

    expected = torch.nn.functional.rms_norm(x.double(), (columns,), weight.double(), 1e-6)
    for name, kernel in (("1 Python loop", row_by_row), ("1 torch ops", whole_tensor)):
        seconds = seconds_of(lambda kernel=kernel: kernel(x, weight, 1e-6))
        error = float((kernel(x, weight, 1e-6) - expected).abs().max() / expected.abs().max())
        lines.measured(name, seconds, 8 * elements, 4 * elements, error, 1e-5)


if __name__ == "__main__":
    main()
