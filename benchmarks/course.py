"""The course's steps on this machine: what each predicts, what it measures.

    python benchmarks/course.py --steps 7 8 9 10 11 12 --output benchmarks/results/h200_course.json

`kpt learn N` shows the same of one step, next to the steps before it. A step that fails is named, the others are kept.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path

import torch
from table import print_and_store
from torch_norms import describe_machine

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "learn"))
from course import run
from course.catalog import STEPS, step
from course.report import HEADER, cells

COLUMNS = ["what", *HEADER[1:]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, nargs="+", default=[each.number for each in STEPS])
    parser.add_argument("--quick", action="store_true", help="small sizes: whether it works, not how fast")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    results, failed = {}, []
    for number in options.steps:
        result = run.run(step(number), options.quick)
        if result.failure:
            failed.append(number)
            print(f"step {number}: {result.failure}", file=sys.stderr)
        results[number] = result
        done = {
            "machine": describe_machine(torch.device("cuda" if torch.cuda.is_available() else "cpu")),
            "columns": COLUMNS,
            "figures": [dict(zip(COLUMNS, cells(row))) for each in results.values() for row in each.rows],
            "steps": {str(number): asdict(each) for number, each in results.items()},
        }
        if number == options.steps[-1] or options.output is not None:  # after each step: a later one may not end
            print_and_store(done, options.output)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
