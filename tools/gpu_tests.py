"""Runs the tests that need a GPU, and `kpt verify` of every op, and stores the counts with commit, date and machine.

python tools/gpu_tests.py --output benchmarks/results/h200_tests.json --minutes 9

For a machine with torch and pytest and nothing else: the checkout, build/ and, where pytest or libsqlite3 is missing,
build/carry (`benchmarks/h200.sh pack`). Several pytest processes run at once, each with a share of the tests and a time
limit, and two of kpt. What fails runs again alone: a test that only fails next to others is listed as such. Tests that
the time did not suffice for are counted as not reached, and named. Without git, KP_COMMIT names the commit.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

import provenance  # noqa: E402 (benchmarks/ is on the path now)
from table import print_table  # noqa: E402

OUTCOMES = ("passed", "failed", "skipped", "not reached")
TESTS_PER_PROCESS = 40  # so that a long file is shared and a killed process loses little


@dataclass
class Part:
    """One row of the result: the tests of a file, or the problems of an op."""

    what: str
    outcomes: dict[str, str] = field(default_factory=dict)  # name -> one of OUTCOMES
    reasons: dict[str, str] = field(default_factory=dict)  # of failures and skips
    seconds: float = 0

    def counts(self) -> Counter[str]:
        return Counter(self.outcomes.values())

    def named(self, outcome: str) -> list[str]:
        return [name for name, found in self.outcomes.items() if found == outcome]


class Clock:
    def __init__(self, minutes: float) -> None:
        self.end = time.monotonic() + 60 * minutes

    def left(self, reserve: float = 0) -> float:
        return self.end - time.monotonic() - reserve


def environment() -> dict[str, str]:
    """The environment of every process started here: this package, then packages carried along for a bare machine."""
    carry = ROOT / "build/carry"
    found = dict(os.environ)

    def join(*paths: str | None) -> str:
        return os.pathsep.join(path for path in paths if path)

    found["PYTHONPATH"] = join(str(ROOT / "python"), found.get("PYTHONPATH"), str(carry / "python"))
    found["LD_LIBRARY_PATH"] = join(found.get("LD_LIBRARY_PATH"), str(carry / "lib"))
    found["PYTHONDONTWRITEBYTECODE"] = "1"
    found.setdefault("OMP_WAIT_POLICY", "passive")
    if (ROOT / "build/bundle").is_dir():
        found.setdefault("KERNEL_PYTORCH_BUNDLE", str(ROOT / "build/bundle"))
    return found


def run(command: list[str], seconds: float) -> tuple[str, str]:
    """What it wrote, and why it ended early ("" where it did not)."""
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        return process.communicate(timeout=max(seconds, 1))[0], ""
    except subprocess.TimeoutExpired:
        process.kill()
        return process.communicate()[0], f"stopped after {seconds:.0f} s"


class Recorder:
    """A plugin of pytest: one JSON line per collected test or report, so that a killed process keeps what it had."""

    def __init__(self, path: Path) -> None:
        self.file = path.open("w")
        self.root = ROOT

    def pytest_configure(self, config: Any) -> None:
        self.root = config.rootpath

    def name(self, nodeid: str) -> str:
        """As it can be given to pytest again, from ROOT: pytest's own is relative to a root that it chose."""
        path, *rest = nodeid.split("::")
        return "::".join([os.path.relpath(self.root / path, ROOT), *rest])

    def write(self, **facts: Any) -> None:
        self.file.write(json.dumps(facts) + "\n")
        self.file.flush()

    def pytest_collection_finish(self, session: Any) -> None:
        for item in session.items:
            self.write(collected=self.name(item.nodeid))

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.write(test=self.name(report.nodeid), outcome="failed", reason=str(report.longrepr)[-600:])

    def pytest_runtest_logreport(self, report: Any) -> None:
        facts = {"test": self.name(report.nodeid), "seconds": report.duration}
        # A test passes when its call does; a fixture that fails, before or after, fails it.
        if report.when == "call" or not report.passed:
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr or "")
            facts |= {"outcome": report.outcome, "reason": reason[-600:]}
        self.write(**facts)


def be_pytest(record: str, words: list[str]) -> int:
    try:
        import pytest
    except ImportError:
        sys.exit(
            "gpu_tests: no pytest for this Python; `pip install pytest`, or carry build/carry (benchmarks/h200.sh pack)"
        )

    return int(pytest.main([*words, "-q", "-p", "no:cacheprovider", "-m", "gpu"], plugins=[Recorder(Path(record))]))


def shares_of(parts: dict[str, Part]) -> list[list[str]]:
    """What one process each runs: a long file in pieces, several short files together, the fullest first."""
    shares: list[list[str]] = []
    for part in sorted(parts.values(), key=lambda part: -len(part.outcomes)):
        names = part.named("not reached")
        for begin in range(0, len(names), TESTS_PER_PROCESS):
            piece = names[begin : begin + TESTS_PER_PROCESS]
            room = next((share for share in shares if len(share) + len(piece) <= TESTS_PER_PROCESS), None)
            if room is None:
                shares.append(piece)
            else:
                room += piece
    return sorted(shares, key=len, reverse=True)


class Tests:
    """The tests marked gpu, of every file, in processes of their own."""

    def __init__(self, folder: Path, clock: Clock, seconds_per_process: float) -> None:
        self.folder, self.clock, self.seconds = folder, clock, seconds_per_process
        self.started = 0

    def pytest(self, words: list[str], seconds: float) -> tuple[list[dict[str, Any]], str, str]:
        self.started += 1
        record = self.folder / f"{self.started}.jsonl"
        text, early = run([sys.executable, __file__, "--as-pytest", str(record), *words], seconds)
        lines = record.read_text().splitlines() if record.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")], text, early

    def collect(self, paths: list[str]) -> dict[str, Part]:
        found, text, early = self.pytest(["--collect-only", "--continue-on-collection-errors", *paths], 180)
        parts: dict[str, Part] = {}
        for line in found:
            name = line.get("collected") or line["test"]
            part = parts.setdefault(name.split("::")[0], Part(name.split("::")[0]))
            part.outcomes[name] = line.get("outcome", "not reached")
            if "reason" in line:
                part.reasons[name] = line["reason"]
        if not parts:
            sys.exit(f"gpu_tests: pytest collected nothing {early}; its last words:\n{text[-2000:]}")
        return parts

    def run_share(self, parts: dict[str, Part], names: list[str]) -> None:
        """In one process; where a test ends it or outlasts its limit, what comes after that test in another."""
        while names and (seconds := min(self.seconds, self.clock.left(reserve=20))) >= 10:
            found, text, early = self.pytest(names, seconds)
            self.note(parts, found)
            names = [name for name in names if parts[name.split("::")[0]].outcomes[name] == "not reached"]
            if names:  # the first without an outcome is the one it was at
                part = parts[names[0].split("::")[0]]
                part.reasons[names[0]] = f"{early} here" if early else f"the process ended here: {text[-500:]}"
                if not early:
                    part.outcomes[names[0]] = "failed"
                names = names[1:]

    def note(self, parts: dict[str, Part], found: list[dict[str, Any]]) -> None:
        for line in found:
            part = parts.get(line.get("test", "").split("::")[0])
            if part is None:
                continue
            part.seconds += line.get("seconds", 0)
            if "outcome" in line and part.outcomes.get(line["test"]) != "failed":
                part.outcomes[line["test"]] = line["outcome"]
                part.reasons[line["test"]] = line["reason"]

    def run(self, parts: dict[str, Part], processes: int) -> None:
        with concurrent.futures.ThreadPoolExecutor(processes) as pool:
            for done in [pool.submit(self.run_share, parts, share) for share in shares_of(parts)]:
                done.result()

    def run_failures_alone(self, parts: dict[str, Part]) -> list[str]:
        """Names of those that passed then; their outcome becomes that of the second run."""
        recovered = []
        for part in parts.values():
            failures = [name for name in part.named("failed") if "::" in name]
            if not failures or self.clock.left(reserve=20) < 20:
                continue
            found, _, _ = self.pytest(failures, min(self.seconds, self.clock.left(reserve=20)))
            outcomes: dict[str, str] = {}
            for line in found:
                if "outcome" in line and outcomes.get(line["test"]) != "failed":
                    outcomes[line["test"]] = line["outcome"]
            passed = [name for name in failures if outcomes.get(name) == "passed"]
            part.outcomes.update(dict.fromkeys(passed, "passed"))
            recovered += passed
        return recovered


def verify_ops(device: str, clock: Clock, processes: int) -> list[Part]:
    """`kpt verify` of every op. Each is a process, so one that hangs or dies takes no other with it."""
    kpt = str(ROOT / "build/kpt")
    listed, early = run([kpt, "kernels", "--json"], 30)
    try:
        names = [operation["op"] for operation in json.loads(listed)["operations"]]
    except ValueError:
        sys.exit(f"gpu_tests: build/kpt kernels does not work here {early}:\n{listed[-1000:]}")

    def verify(name: str) -> Part:
        part = Part(f"kpt verify {name}", {f"{name}: all": "not reached"})
        seconds, begin = clock.left(reserve=5), time.monotonic()
        if seconds < 5:
            return part
        text, early = run([kpt, "verify", name, "--device", device, "--json"], seconds)
        part.seconds = time.monotonic() - begin
        try:
            problems = json.loads(text[text.index("{") :])["problems"]
        except ValueError:
            if not early:
                part.outcomes = {f"{name}: all": "failed"}
            part.reasons[f"{name}: all"] = early or text[-600:]
            return part
        part.outcomes = {}
        for index, problem in enumerate(problems):
            label = f"{name} {index}: {json.dumps(problem.get('problem', problem))[:160]}"
            failures = problem["failures"]
            part.outcomes[label] = "failed" if failures else "passed" if problem["kernels"] else "skipped"
            if failures:
                part.reasons[label] = "; ".join(failures)[:600]
        return part

    with concurrent.futures.ThreadPoolExecutor(processes) as pool:
        return list(pool.map(verify, names))


def machine() -> dict[str, Any]:
    text, _ = run([sys.executable, "-c", _MACHINE], 120)
    facts = dict(json.loads(text.splitlines()[-1]))
    return {**facts, **provenance.record()}


_MACHINE = """
import json, torch, kernel_pytorch
from kernel_pytorch.hardware import devices
cuda = torch.cuda.is_available()
name = torch.cuda.get_device_name() if cuda else devices()[0].name
print(json.dumps({"device": name, "threads": torch.get_num_threads(), "torch": torch.__version__,
                  "kernel_pytorch": kernel_pytorch.__version__, "cuda": cuda}))
"""


def result_of(facts: dict[str, Any], parts: list[Part], recovered: list[str], seconds: float) -> dict[str, Any]:
    def row(what: str, counted: Counter[str], took: float) -> dict[str, str]:
        return {"what": what, **{name: str(counted[name]) for name in OUTCOMES}, "seconds": f"{took:.0f}"}

    total: Counter[str] = sum((part.counts() for part in parts), Counter())
    named = {
        outcome: [
            {"name": name, "reason": part.reasons.get(name, "")} for part in parts for name in part.named(outcome)
        ]
        for outcome in ("failed", "not reached")
    }
    return {
        "machine": facts,
        "columns": ["what", *OUTCOMES, "seconds"],
        "figures": [*(row(part.what, part.counts(), part.seconds) for part in parts), row("all", total, seconds)],
        "failed": named["failed"],
        "not reached": named["not reached"],
        "failed next to others, passed alone": recovered,
        "skipped": dict(Counter(part.reasons.get(name, "") for part in parts for name in part.named("skipped"))),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="store the result as JSON")
    parser.add_argument("--minutes", type=float, default=9, help="for everything; what is left over is named")
    parser.add_argument("--processes", type=int, default=4, help="at once")
    parser.add_argument("--seconds-per-process", type=float, default=240, help="limit of one pytest process")
    parser.add_argument("--no-verify", action="store_true", help="only pytest")
    parser.add_argument("paths", nargs="*", default=["tests/python", "tests/cli"], help="test files or folders")
    arguments = parser.parse_args()
    begin, clock = time.monotonic(), Clock(arguments.minutes)
    facts = machine()
    with tempfile.TemporaryDirectory() as folder:
        tests = Tests(Path(folder), clock, arguments.seconds_per_process)
        found = tests.collect(arguments.paths)
        print(f"{sum(len(part.outcomes) for part in found.values())} tests in {len(found)} files", flush=True)
        device = "cuda" if facts["cuda"] else "cpu"
        with concurrent.futures.ThreadPoolExecutor(1) as pool:  # both at once: neither takes the other's time
            verified = pool.submit(lambda: [] if arguments.no_verify else verify_ops(device, clock, 2))
            tests.run(found, arguments.processes)
            recovered = tests.run_failures_alone(found)
            parts = [*found.values(), *verified.result()]
    result = result_of(facts, parts, recovered, time.monotonic() - begin)
    if arguments.output is not None:
        arguments.output.write_text(json.dumps({"benchmark": "gpu_tests", "runs": [result]}, indent=1) + "\n")
    for kind in ("failed", "not reached"):
        for each in result[kind][:40]:
            print(f"{kind}: {each['name']}: {' '.join(each['reason'].split())[-200:]}")
    print_table(result)
    return 1 if result["failed"] or result["not reached"] else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--as-pytest"]:
        sys.exit(be_pytest(sys.argv[2], sys.argv[3:]))
    sys.exit(main())
