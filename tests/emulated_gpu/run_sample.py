"""Verifies a sample of every op's CUDA kernels on the emulated GPU: `python tests/emulated_gpu/run_sample.py`.

Each line of sample.txt is one `kpt verify`: all kernels and configs that take the problem, against the reference. With
another seed threads run in another order. --amd runs the kernels that AMD's GPUs have, on an emulated one, by HIP.
Exits with 1 where a problem fails, exceeds its time or has no CUDA kernel, and where an op is neither in sample.txt nor
left out there.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parent.parent


# Ops whose every kernel is for sm_90a alone.
NOT_ON_AMD = {"scaled_grouped_matmul"}


@dataclass(frozen=True)
class Problem:
    """A line of sample.txt."""

    capability: str
    op: str
    shape: str
    dtype: str
    options: tuple[str, ...]

    def text(self) -> str:
        return " ".join([self.capability, self.op, self.shape, self.dtype, *self.options])


def read_sample(path: Path) -> tuple[list[Problem], set[str]]:
    """The problems, and the ops that are left out."""
    lines = [line.split() for line in path.read_text().splitlines() if line and not line.startswith("#")]
    problems = [Problem(line[0], line[1], line[2], line[3], tuple(line[4:])) for line in lines if line[0] != "without"]
    return problems, {line[1].rstrip(":") for line in lines if line[0] == "without"}


def for_amd(problems: list[Problem]) -> list[Problem]:
    return list(
        dict.fromkeys(replace(problem, capability="gfx90a") for problem in problems if problem.op not in NOT_ON_AMD)
    )


def missing_ops(problems: list[Problem], left_out: set[str], build: Path) -> list[str]:
    listed = subprocess.run([build / "kpt", "kernels", "--json"], capture_output=True, text=True, check=True).stdout
    ops = [operation["op"] for operation in json.loads(listed)["operations"]]
    return [op for op in ops if op not in left_out and all(problem.op != op for problem in problems)]


def verify(problem: Problem, build: Path, seed: int, limit: float) -> str:
    """What was wrong, or an empty text."""
    command = [str(ROOT / "tools" / "emulate"), "--build", str(build), "--capability", problem.capability]
    command += ["--seed", str(seed), str(build / "kpt"), "verify", problem.op, "--device", "cuda", "--json"]
    command += ["--shape", problem.shape, "--dtype", problem.dtype]
    for option in problem.options:
        command += ["--option", option]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit, cwd=ROOT, check=False)
    except subprocess.TimeoutExpired:
        return f"not done after {limit:.0f} s"
    if done.returncode < 0:
        return f"ended by signal {-done.returncode}\n{done.stderr[-2000:]}"
    try:
        outcomes = json.loads(done.stdout)["problems"]
    except json.JSONDecodeError:
        return f"exit code {done.returncode}\n{done.stdout[-1000:]}{done.stderr[-2000:]}"
    failures = [failure for outcome in outcomes for failure in outcome["failures"]]
    if failures:
        return "\n".join(failure[:1500] for failure in failures)
    if any(outcome["kernels"] < 1 for outcome in outcomes) or done.returncode != 0:
        return f"exit code {done.returncode}: no kernel of CUDA takes it\n{done.stderr[-500:]}"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--build", type=Path, default=ROOT / "build")
    parser.add_argument("--only", default="", help="problems whose text contains this")
    parser.add_argument("--amd", action="store_true", help="as an AMD GPU, by HIP")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--limit", type=float, default=90, help="seconds for each problem")
    parser.add_argument("--jobs", type=int, default=min(4, os.cpu_count() or 1))
    arguments = parser.parse_args()
    sample, left_out = read_sample(FOLDER / "sample.txt")
    problems = [
        problem for problem in (for_amd(sample) if arguments.amd else sample) if arguments.only in problem.text()
    ]
    start = time.monotonic()
    failed = 0
    with ThreadPoolExecutor(arguments.jobs) as pool:

        def timed(problem: Problem) -> tuple[str, float]:
            begin = time.monotonic()
            return verify(problem, arguments.build.resolve(), arguments.seed, arguments.limit), time.monotonic() - begin

        for problem, (failure, seconds) in zip(problems, pool.map(timed, problems), strict=True):
            failed += bool(failure)
            print(f"{'FAILED' if failure else 'ok':<7} {problem.text():<78} {seconds:6.1f} s", flush=True)
            if failure:
                print("    " + failure.replace("\n", "\n    "), flush=True)
    for op in missing_ops(sample, left_out, arguments.build):
        print(f"FAILED  {op} is not in sample.txt: give it a small problem, or a line `without {op}: REASON`")
        failed += 1
    print(f"{len(problems)} problems, {failed} failed, {time.monotonic() - start:.0f} s")
    return 1 if failed or not problems else 0


if __name__ == "__main__":
    sys.exit(main())
