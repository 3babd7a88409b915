"""Whether this package became slower on this machine: times ops in turns, and tests them against a stored baseline.

    python3 benchmarks/regression_benchmark.py --quick

The first run stores the baseline, in the cache or in --baseline FILE. Later runs are compared with it by a rank test on
interleaved samples (kernel_pytorch.utils.performance): exit code 1 where something is slower by more than --threshold,
which is not chance and not the machine's own change. A run without a regression joins the baseline.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

_PACKAGES = Path(__file__).resolve().parents[1] / "python"
if _PACKAGES.is_dir():  # a clone: the package need not be installed
    sys.path.insert(0, str(_PACKAGES))

import torch  # noqa: E402  after the path above
from kernel_pytorch.utils.performance import PerformanceHistory, SeriesChange  # noqa: E402

from kernel_pytorch import functional as kp  # noqa: E402


def cases(quick: bool, device: str) -> dict[str, Callable[[], object]]:
    """One call per group of kernels: rows, products, attention, a loss, and gradients."""
    rows, width, length = (256, 512, 128) if quick else (4096, 4096, 1024)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    x = torch.randn(rows, width, device=device).to(dtype)
    weight, matrix = torch.ones(width, device=device, dtype=dtype), torch.randn(width, width, device=device).to(dtype)
    q, k, v = (torch.randn(1, 8, length, 64, device=device).to(dtype) for _ in range(3))
    learning = x.clone().requires_grad_()
    target = torch.randint(0, width, (rows,), device=device)
    return {
        "rms_norm": lambda: kp.rms_norm(x, weight),
        "rms_norm, gradient": lambda: kp.rms_norm(learning, weight).backward(x),
        "swiglu": lambda: kp.swiglu(x, x),
        "softmax": lambda: kp.softmax(x),
        "linear": lambda: kp.linear(x, matrix),
        "attention": lambda: kp.attention(q, k, v, causal=True),
        "cross_entropy": lambda: kp.cross_entropy(x, target),
    }


def default_baseline(device: str, quick: bool) -> Path:
    named = os.environ.get("KERNEL_PYTORCH_CACHE_DIR")
    general = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    folder = Path(named) if named else Path(general) / "kernel_pytorch"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder / f"regression_{device}{'_quick' if quick else ''}.json"


def compared(
    baseline: Path, ways: dict[str, Callable[[], object]], device: str, iterations: int, threshold: float
) -> list[SeriesChange]:
    """Measures into a copy of the baseline, which replaces it unless something is slower."""
    with tempfile.TemporaryDirectory() as folder:
        new = Path(folder) / "history.json"
        if baseline.exists():
            shutil.copy(baseline, new)
        history = PerformanceHistory(new)
        history.measure(ways, device, iterations)
        changes = history.compare(threshold)
        if not any(change.change == "slower" for change in changes):
            shutil.copy(new, baseline)
        return changes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes, some seconds")
    parser.add_argument("--baseline", type=Path, help="the file of earlier runs; in the cache where not given")
    parser.add_argument("--renew", action="store_true", help="forget the baseline and store this run as a new one")
    parser.add_argument("--threshold", type=float, default=0.1, help="share; smaller changes are none (0.1)")
    words = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if words.quick and device == "cpu":
        torch.set_num_threads(1)  # sizes at which waiting for other threads costs more than they do
    baseline = words.baseline or default_baseline(device, words.quick)
    if words.renew:
        baseline.unlink(missing_ok=True)
    torch.manual_seed(0)
    changes = compared(baseline, cases(words.quick, device), device, 60 if words.quick else 200, words.threshold)
    if not changes:
        print(f"stored as the baseline of this machine: {baseline}")
        return 0
    for change in changes:
        print(f"  {change}")
    slower = [change for change in changes if change.change == "slower"]
    print(f"{len(slower)} of {len(changes)} slower than {baseline}")
    return 1 if slower else 0


if __name__ == "__main__":
    sys.exit(main())
