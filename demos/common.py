"""What the demos share: their options, comparisons with plain torch, and tables of measured times."""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

_PACKAGES = Path(__file__).resolve().parents[1] / "python"
if _PACKAGES.is_dir():  # a clone: the package need not be installed
    sys.path.insert(0, str(_PACKAGES))

import torch  # noqa: E402  after the path above
from torch import Tensor  # noqa: E402


class Demo:
    """One demo: `check` compares, `compare` times, `finish` is the exit code."""

    def __init__(self, title: str, **flags: str) -> None:
        parser = argparse.ArgumentParser(description=title)
        parser.add_argument("--quick", action="store_true", help="small sizes")
        parser.add_argument("--validate", action="store_true", help="only compare with plain torch, no timing")
        for name, help_text in flags.items():
            parser.add_argument("--" + name.replace("_", "-"), action="store_true", help=help_text)
        self.options = parser.parse_args()
        self.quick: bool = self.options.quick
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._failures = 0
        torch.manual_seed(0)
        if self.quick:
            torch.set_num_threads(1)  # sizes at which waiting for other threads costs more than they do
        print(f"{title}\n  on {torch.cuda.get_device_name() if self.device.type == 'cuda' else 'the CPU'}")

    def check(self, name: str, result: Tensor, expected: Tensor, tolerance: float) -> None:
        """The error's norm as a share of the expected norm."""
        error = float(
            (result.detach().double() - expected.detach().double()).norm() / expected.detach().double().norm()
        )
        self.require(name, error <= tolerance, f"error {error:.2g}, allowed {tolerance:.2g}")

    def require(self, name: str, holds: bool, what: str) -> None:
        print(f"  {'ok    ' if holds else 'FAILED'} {name}: {what}")
        self._failures += not holds

    def compare(self, ways: dict[str, Callable[[], object]], seconds: float | None = None) -> dict[str, float]:
        """Medians of interleaved runs, printed relative to the first way; nothing with --validate."""
        if self.options.validate:
            return {}
        budget = seconds if seconds is not None else (0.5 if self.quick else 3.0)
        times: dict[str, list[float]] = {name: [] for name in ways}
        for run in ways.values():
            run()
        end = time.perf_counter() + budget
        while time.perf_counter() < end or len(next(iter(times.values()))) < 3:
            for name, run in ways.items():
                self._synchronize()
                start = time.perf_counter()
                run()
                self._synchronize()
                times[name].append(time.perf_counter() - start)
        medians = {name: statistics.median(each) for name, each in times.items()}
        first = next(iter(medians.values()))
        width = max(map(len, medians))
        for name, each in medians.items():
            print(f"  {name:{width}}  {each * 1e3:9.3f} ms  {first / each:6.2f}x")
        return medians

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def finish(self) -> None:
        sys.exit(1 if self._failures else 0)
