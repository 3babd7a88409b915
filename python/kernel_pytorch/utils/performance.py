"""A history of timings on disk, and whether the newest are slower: by ranks of interleaved samples, never by a mean.

The file is `kpt bench --save`'s, and the verdict is the core's (kernel_pytorch/tuning/comparison.h), so that
`kpt bench --compare` says the same of it. A change is reported when it is larger than a threshold, unlikely to be
chance (Mann-Whitney, adjusted for the number of series), and not the machine's: a copy takes turns with what is
measured, and what changed no more than the copy did is called "machine".
"""

from __future__ import annotations

import datetime
import fcntl
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import __version__, _library
from .._devices import device_info

if TYPE_CHECKING:
    import torch

__all__ = ["PerformanceHistory", "SeriesChange", "compare_files"]

_FORMAT = {"format": "kernel_pytorch samples", "version": 1}
_CONTROL_BYTES = 8 << 20


@dataclass(frozen=True)
class SeriesChange:
    """One series before and after: medians in microseconds, and "none", "faster", "slower", "machine" or "too few
    samples". `ratio` is after over before; `control_ratio` the copy's, None where there was none; `p` two-sided and
    adjusted for the number of series."""

    name: str
    kernel: str
    change: str
    before_us: float
    after_us: float
    ratio: float
    control_ratio: float | None
    p: float
    exact: bool

    def __str__(self) -> str:
        control = "" if self.control_ratio is None else f", the copy {self.control_ratio:.2f}x"
        times = f"{self.before_us:.1f} to {self.after_us:.1f} us, {self.ratio:.2f}x the time{control}"
        return f"{self.name}: {self.change} ({times}, p {self.p:.2g})"


class PerformanceHistory:
    """Runs of timings in a JSON file, oldest first; made at the first record.

    >>> history = PerformanceHistory("history.json")
    >>> history.measure({"block": lambda: block(x)}, device="cuda")
    >>> for change in history.regressions():
    ...     print(change)
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def __repr__(self) -> str:
        return f"PerformanceHistory({str(self.path)!r})"

    @property
    def runs(self) -> list[dict[str, Any]]:
        """What the file holds: dicts with "date", "device", "fingerprint", "library_version" and "series"."""
        return list(_read(self.path)["runs"]) if self.path.exists() else []

    def record(
        self,
        samples_us: Mapping[str, Sequence[float]],
        control_us: Sequence[float] | None = None,
        device: str | torch.device = "cpu",
        kernels: Mapping[str, str] | None = None,
    ) -> None:
        """Adds a run: microseconds by name, in the order they were taken.

        Args:
            control_us: times of something that stays the same, of every series' rounds; `measure` takes a copy's.
            kernels: what ran, by name, for people.
        """
        info = device_info(device)
        control = [] if control_us is None else [float(value) for value in control_us]
        run = {
            "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "device": info.name,
            "fingerprint": info.fingerprint,
            "library_version": __version__,
            "series": [
                {
                    "name": name,
                    "kernel": (kernels or {}).get(name, ""),
                    "samples_us": [round(float(value), 3) for value in values],
                    "control_us": control,
                }
                for name, values in samples_us.items()
            ],
        }
        content = {**_FORMAT, "runs": [run]}
        _library.call("compare", request={"before": content, "after": content})  # what cannot be compared is not kept
        with _locked(self.path):
            runs = self.runs
            if runs and runs[0]["fingerprint"] != run["fingerprint"]:
                raise ValueError(
                    f"history: {self.path} is of {runs[0]['device']}, this run of {info.name}; name another file"
                )
            _write(self.path, {**_FORMAT, "runs": [*runs, run]})

    def measure(
        self,
        ways: Mapping[str, Callable[[], object]],
        device: str | torch.device | None = None,
        iterations: int = 100,
        warmup: int = 10,
    ) -> dict[str, list[float]]:
        """Times each way in turns with the others and with a copy, adds the run, and returns the samples by name."""
        from .profiling import KernelProfiler  # needs torch, which the rest of this module does not

        import torch  # isort: skip # optional for the rest of this module

        profiler = KernelProfiler(device)
        source = torch.ones(_CONTROL_BYTES // 4, device=profiler.device)
        target = torch.empty_like(source)
        control = "the copy that tells of the machine"
        if control in ways:
            raise ValueError(f"history: {control!r} is taken by the control; name yours otherwise")
        everything = {**ways, control: lambda: target.copy_(source)}
        samples = profiler.sample(everything, (), iterations, warmup)
        control_us = samples.pop(control)
        self.record(samples, control_us, profiler.device)
        return samples

    def compare(
        self, threshold: float = 0.05, significance: float = 0.01, baseline_runs: int | None = None
    ) -> list[SeriesChange]:
        """The newest run against those before it: all of them, or the `baseline_runs` newest of them.

        Series that are not in both are left out. Empty where there are not two runs yet.
        """
        runs = self.runs
        if baseline_runs is not None and baseline_runs < 1:
            raise ValueError(f"history: baseline_runs is {baseline_runs}; at least one run is compared with")
        if len(runs) < 2:
            return []
        earlier = runs[:-1] if baseline_runs is None else runs[:-1][-baseline_runs:]
        before, after = {**_FORMAT, "runs": earlier}, {**_FORMAT, "runs": runs[-1:]}
        return _compare(before, after, threshold, significance)

    def regressions(
        self, threshold: float = 0.05, significance: float = 0.01, baseline_runs: int | None = None
    ) -> list[SeriesChange]:
        """What `compare` calls slower, the worst first."""
        changes = self.compare(threshold, significance, baseline_runs)
        return sorted((row for row in changes if row.change == "slower"), key=lambda row: -row.ratio)


def compare_files(
    before: str | os.PathLike[str],
    after: str | os.PathLike[str],
    threshold: float = 0.05,
    significance: float = 0.01,
) -> list[SeriesChange]:
    """As `kpt bench --compare before after`: all runs of one file against all of the other's."""
    return _compare(_read(Path(before)), _read(Path(after)), threshold, significance)


def _compare(before: Any, after: Any, threshold: float, significance: float) -> list[SeriesChange]:
    request = {"before": before, "after": after, "threshold": threshold, "significance": significance}
    return [SeriesChange(**row) for row in _library.call("compare", request=request)["rows"]]


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"history: {path} is not JSON: {error}") from error
    if not isinstance(content, dict) or content.get("format") != _FORMAT["format"]:
        raise ValueError(f"history: {path} is no file of timings; `kpt bench --save` and PerformanceHistory make them")
    if content.get("version") != _FORMAT["version"] or not isinstance(content.get("runs"), list):
        raise ValueError(f"history: {path} has version {content.get('version')}; this reads {_FORMAT['version']}")
    return content


def _write(path: Path, content: dict[str, Any]) -> None:
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_text(json.dumps(content, allow_nan=False) + "\n")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Two processes that add a run to one file take turns."""
    with path.with_name(f".{path.name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
