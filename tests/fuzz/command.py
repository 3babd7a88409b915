"""python -m fuzz: workers, their findings, and a table."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from .worker import FINISHED

TESTS = Path(__file__).resolve().parents[1]


@dataclass
class Tally:
    """Of one function."""

    name: str
    calls: int = 0
    values: int = 0
    refused: int = 0
    seconds: float = 0.0
    findings: list[tuple[int, str]] = field(default_factory=list)

    def add(self, call: int, outcome: str, text: str) -> None:
        self.calls += 1
        self.values += outcome == "value"
        self.refused += outcome == "refused"
        if outcome == "finding":
            self.findings.append((call, text))


def environment() -> dict[str, str]:
    paths = [str(TESTS), str(TESTS.parent / "python"), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}


def run_calls(names: list[str], seed: int, first: int, calls: int) -> dict[str, Tally]:
    """Calls [first, first + calls) of each function, in workers that follow on one that died."""
    tallies = {name: Tally(name) for name in names}
    todo = [(name, first, calls) for name in names]
    while todo:
        # Functions that begin at `first` share a process; one that was interrupted goes on alone.
        together = (
            [entry for entry in todo if entry[1:] == (first, calls)] if todo[0][1:] == (first, calls) else todo[:1]
        )
        died = _run_worker(together, seed, tallies)
        todo = todo[len(together) :]
        if died is not None:
            name, call = died
            place = [entry[0] for entry in together].index(name)
            rest = together[place][1] + together[place][2] - call - 1
            todo = ([(name, call + 1, rest)] if rest else []) + together[place + 1 :] + todo
    return tallies


def _run_worker(entries: list[tuple[str, int, int]], seed: int, tallies: dict[str, Tally]) -> tuple[str, int] | None:
    """None, or the function and call in which the worker died."""
    _, first, calls = entries[0]
    words = [sys.executable, "-m", "fuzz.worker", str(seed), str(first), str(calls), *(name for name, _, _ in entries)]
    current: tuple[str, int] | None = None
    began = time.monotonic()
    with tempfile.TemporaryFile("w+") as errors:
        worker = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment())
        assert worker.stdout is not None
        for line in worker.stdout:
            said = json.loads(line)
            if "begins" in said:
                current = (said["begins"][0], said["begins"][1])
                began = time.monotonic()
            elif said["outcome"] == FINISHED:
                current = None
            else:
                assert current is not None
                tallies[current[0]].seconds += time.monotonic() - began
                tallies[current[0]].add(current[1], said["outcome"], said["text"])
        code = worker.wait()
        errors.seek(0)
        last_output = errors.read()[-3000:]
    if code == 0:
        return None
    if current is None:
        raise RuntimeError(f"fuzz: a worker ended with {code} before its first call:\n{last_output}")
    is_late = "Timeout" in last_output
    tallies[current[0]].add(
        current[1], "finding", f"{'no end after five seconds' if is_late else f'died ({code})'}:\n{last_output}"
    )
    return current


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="fuzz", description="random calls of every functional, against torch in fp64")
    parser.add_argument("--calls", type=int, default=2000, help="of each function")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these functions alone")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--call", type=int, help="this call alone, which a finding names")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 1)))
    asked = parser.parse_args(arguments)
    from .generators import GENERATORS

    names = asked.only or sorted(GENERATORS)
    if unknown := [name for name in names if name not in GENERATORS]:
        parser.error(f"there is no generator for {', '.join(unknown)}")
    first, calls = (asked.call, 1) if asked.call is not None else (0, asked.calls)
    began = time.monotonic()
    tallies: list[Tally] = []
    # Few processes, each of several functions: starting one takes as long as hundreds of calls.
    groups = [names[i :: asked.jobs * 2] for i in range(min(asked.jobs * 2, len(names)))]
    with ThreadPoolExecutor(asked.jobs) as pool:
        for found in pool.map(lambda group: run_calls(group, asked.seed, first, calls), groups):
            for tally in found.values():
                tallies.append(tally)
                print(f"[{len(tallies)}/{len(names)}] {line_of(tally)}", flush=True)
    return report(tallies, asked.seed, time.monotonic() - began)


def line_of(tally: Tally) -> str:
    counts = f"{tally.calls:6} calls {tally.values:6} valid {tally.refused:6} refused {len(tally.findings):4} findings"
    return f"{tally.name:38}{counts} {tally.seconds:7.1f} s"


def report(tallies: list[Tally], seed: int, seconds: float) -> int:
    """Findings with how to see them again, the total, and the exit status."""
    findings = 0
    for tally in tallies:
        findings += len(tally.findings)
        for call, text in tally.findings[:5]:
            again = f"PYTHONPATH=python:tests python -m fuzz --only {tally.name} --seed {seed} --call {call}"
            print(f"\n{tally.name}: {again}")
            print(f"  {text}")
        if len(tally.findings) > 5:
            print(f"  and {len(tally.findings) - 5} more of {tally.name}")
    calls = sum(tally.calls for tally in tallies)
    print(f"\n{len(tallies)} functions, {calls} calls, {findings} findings, {seconds:.0f} s, seed {seed}")
    return 1 if findings else 0
