"""python -m zoo: workers, their rows, a table, and the result as JSON."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from .coverage import KINDS
from .models import names
from .worker import LIMIT_SECONDS

TESTS = Path(__file__).resolve().parents[1]
_BATCH = 24  # models of one process: starting one takes as long as two of them


def environment() -> dict[str, str]:
    paths = [str(TESTS), str(TESTS / "python"), str(TESTS.parent / "python"), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path), "OMP_NUM_THREADS": "1"}


def run(wanted: list[str], budget: float) -> list[dict[str, Any]]:
    """A row for each model, from workers that follow on one that died."""
    rows: list[dict[str, Any]] = []
    left = list(wanted)
    while left:
        rows += _run_worker(left, budget)
        done = {row["model"] for row in rows}
        left = [name for name in left if name not in done]
    return rows


def _run_worker(wanted: list[str], budget: float) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    current: str | None = None
    with tempfile.TemporaryFile("w+") as errors:
        words = [sys.executable, "-m", "zoo.worker", str(budget), *wanted]
        worker = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment())
        assert worker.stdout is not None
        for line in worker.stdout:
            try:
                said = json.loads(line)
            except json.JSONDecodeError:
                continue  # a library's own print
            current = said.get("begins")
            if "row" in said:
                rows.append(said["row"])
                print(line_of(said["row"]), flush=True)
        code = worker.wait()
        errors.seek(0)
        last = errors.read()[-1500:]
    if code != 0:
        if current is None:
            raise RuntimeError(f"zoo: a worker ended with {code} before its first model:\n{last}")
        how = f"no end after {LIMIT_SECONDS:g} s" if "Timeout" in last else f"the process died ({code})"
        rows.append({"model": current, "outcome": "fails", "failures": {"process": f"{how}: {last}"}, "coverage": {}})
        print(line_of(rows[-1]), flush=True)
    return rows


def line_of(row: dict[str, Any]) -> str:
    if row["outcome"] == "not built":
        return f"-  {row['model']}: {row['reason'][:150]}"
    failures = "; ".join(f"{name}: {text[:160]}" for name, text in row["failures"].items())
    parts = ", ".join(f"{kind} {seen} of {exist}" for kind, (seen, exist) in row["coverage"].items() if seen < exist)
    return f"{'ok' if not failures else '!!'} {row['model']} {row.get('seconds', 0)} s {parts} {failures}".rstrip()


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Counts of what was run: models, failures by check, parts recognised."""
    run_plainly = [row for row in rows if row["outcome"] != "not built"]
    checks = Counter(name for row in run_plainly for name in row["failures"])
    coverage = {
        kind: [sum(row["coverage"].get(kind, (0, 0))[i] for row in run_plainly) for i in range(2)] for kind in KINDS
    }
    return {
        "models": len(rows),
        "run plainly": len(run_plainly),
        "pass everything": sum(row["outcome"] == "passes" for row in run_plainly),
        "failures by check": dict(checks.most_common()),
        "recognised of those that exist": coverage,
    }


def table(found: dict[str, Any]) -> str:
    ran, passed = found["run plainly"], found["pass everything"]
    lines = [
        f"{found['models']} models, {ran} run plainly, {passed} pass everything ({100 * passed / max(ran, 1):.1f} %)"
    ]
    lines += [f"  {count:4} fail {name}" for name, count in found["failures by check"].items()]
    for kind, (seen, exist) in found["recognised of those that exist"].items():
        lines.append(f"  {kind:10} {seen:5} of {exist:5} recognised ({100 * seen / max(exist, 1):.1f} %)")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="zoo", description="optimize on other people's architectures, built small")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="models whose names contain one of these")
    parser.add_argument("--every", type=int, default=1, help="every n-th model alone")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--budget", type=float, default=1.0, help="seconds of a run by the clock; 0 leaves it out")
    parser.add_argument("--output", type=Path, help="where the result goes, as JSON")
    asked = parser.parse_args(arguments)
    wanted = [name for name in names() if not asked.only or any(one in name for one in asked.only)][:: asked.every]
    batches = [wanted[i : i + _BATCH] for i in range(0, len(wanted), _BATCH)]
    with ThreadPoolExecutor(asked.jobs) as pool:
        rows = [row for found in pool.map(lambda batch: run(batch, asked.budget), batches) for row in found]
    found = summary(rows)
    print(table(found))
    if asked.output:
        asked.output.write_text(json.dumps(_stored(rows, found), indent=1) + "\n")
    return 1 if found["run plainly"] != found["pass everything"] else 0


def _stored(rows: list[dict[str, Any]], found: dict[str, Any]) -> dict[str, Any]:
    sys.path.insert(0, str(TESTS.parent / "benchmarks"))
    import provenance  # a benchmark's file, which is no package
    import torch
    import transformers

    import kernel_pytorch

    machine = {
        "device": "CPU, one thread",
        "threads": 1,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "kernel_pytorch": kernel_pytorch.__version__,
        **provenance.record(["-m", "zoo", *sys.argv[1:]]),
    }
    kept = ("model", "outcome", "reason", "failures", "coverage", "inference seconds", "train seconds", "clock seconds")
    shown = [{key: row[key] for key in kept if row.get(key)} for row in rows]
    rows_shown = figures(found)
    run_stored = {"machine": machine, "columns": list(rows_shown[0]), "figures": rows_shown, "models": shown}
    return {"benchmark": "zoo", "runs": [run_stored]}


def figures(found: dict[str, Any]) -> list[dict[str, str]]:
    """What benchmarks/table.py shows."""
    ran = str(found["run plainly"])
    lines = [("models that pass everything, of those that run plainly", str(found["pass everything"]), ran)]
    lines += [(f"models that fail {name}", str(count), ran) for name, count in found["failures by check"].items()]
    for kind, (seen, exist) in found["recognised of those that exist"].items():
        lines.append((f"{kind} recognised, of those that exist", str(seen), str(exist)))
    return [{"what": what, "count": count, "of": of} for what, count, of in lines]
