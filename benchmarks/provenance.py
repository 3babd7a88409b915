"""Where a result came from: commit, command, date, state of the machine. A test refuses a result without them."""

from __future__ import annotations

import os
import resource
import shlex
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CHANGED = ", with uncommitted changes"
GPU_FACTS = ("clocks.sm", "clocks.mem", "power.draw", "power.limit", "temperature.gpu")


def commit() -> str:
    """KP_COMMIT where the machine has the files without their history, otherwise what git says of this checkout now."""
    named = os.environ.get("KP_COMMIT", "")
    if named:
        return named

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else ""

    try:
        head = git("rev-parse", "HEAD")
        # A result that is being stored changes the tree and not what was measured.
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!benchmarks/results")
    except OSError:
        head = ""
    return head + (CHANGED if changed else "") if head else "unknown: no git here, set KP_COMMIT"


def command(arguments: list[str] | None = None) -> str:
    """The command line of this process, without the folders of this machine."""

    def shown(word: str) -> str:
        if not os.path.isabs(word):
            return word
        path = Path(word).resolve()
        return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name

    return shlex.join(["python", *(shown(word) for word in (arguments or sys.argv))])


def _cpu_seconds() -> tuple[float, float]:
    """CPU seconds since the machine started, of all processes, and of this one with its finished children."""
    ticks = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    user, nice, system, _idle, _waiting, interrupts, soft_interrupts, _stolen = ticks
    busy = (user + nice + system + interrupts + soft_interrupts) / os.sysconf("SC_CLK_TCK")
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return busy, sum(usage.ru_utime + usage.ru_stime for usage in usages)


# Of the moment when this module is loaded, before anything is measured: the checkout may change during a long run.
_begin_commit, _begin, (_begin_busy, _begin_own) = commit(), time.monotonic(), _cpu_seconds()


def conditions() -> dict[str, object]:
    """The state of the machine: how many CPUs other processes kept busy, on average since this module was loaded, and
    the clocks, power and temperature that each GPU reports at this moment."""
    busy, own = _cpu_seconds()
    others = ((busy - _begin_busy) - (own - _begin_own)) / max(time.monotonic() - _begin, 1e-3)
    state: dict[str, object] = {"cpus": os.cpu_count(), "cpus_busy_with_others": round(max(others, 0.0), 2)}
    try:
        done = subprocess.run(
            ["nvidia-smi", f"--query-gpu={','.join(GPU_FACTS)}", "--format=csv,noheader"],
            capture_output=True, text=True, check=False, timeout=10,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return state
    if done.returncode == 0:
        state["gpus"] = [dict(zip(GPU_FACTS, line.split(", "))) for line in done.stdout.splitlines()]
    return state


def record(arguments: list[str] | None = None) -> dict[str, object]:
    """What every stored run says of itself, besides its device and the versions of libraries."""
    return {
        "date": time.strftime("%Y-%m-%d"),
        "commit": _begin_commit,
        "command": command(arguments),
        "conditions": conditions(),
    }
