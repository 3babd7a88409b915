"""`kpt learn` without words lists the steps; with a number it runs one."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from course import report, run
from course.catalog import STEPS, step
from course.lines import Result, Row
from course.shipped import on_gpu


def list_steps() -> None:
    kept = report.stored()
    for each in STEPS:
        mark = "measured" if str(each.number) in kept else ""
        print(f"  {each.number:2}  {each.title:45} {each.road:6} {'GPU' if each.needs_gpu else 'CPU':4} {mark}")
    print("\n  kpt learn 5                    run a step: predicted, then measured")
    print("  kpt learn 5 --check mine.cpp   check your solutions of its exercises")
    print(f"  start with {STEPS[0].path.parent / 'README.md'}")


def run_step(number: int, cuda: bool, quick: bool) -> tuple[Result, list[Row]]:
    this = step(number)
    print(report.heading(this), flush=True)
    gpu = run.has_gpu()
    if cuda and not gpu:
        raise RuntimeError("learn: --cuda needs a CUDA GPU and a torch that sees it")
    if this.needs_gpu and not gpu:
        result = run.preview(this)
        result.notes.append("There is no GPU here, so nothing was timed; the page says what to expect and why.")
        return result, []
    earlier = [row for before in this.before for row in run.run(step(before), quick).rows]
    result = run.run(this, quick, report.show)
    if cuda and not this.needs_gpu and number < 7:
        result.rows += on_gpu(number, quick)
    return result, earlier


def main() -> int:
    parser = argparse.ArgumentParser(prog="kpt learn")
    parser.add_argument("step", nargs="?", type=int)
    parser.add_argument("--check", type=Path)
    parser.add_argument("--cuda", action="store_true")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--html", type=Path)
    parser.add_argument("--json", type=Path)
    words = parser.parse_args()
    if words.step is None:
        if words.html is None:
            list_steps()
        if words.check is not None:
            raise RuntimeError("learn: --check needs the step's number")
    elif words.check is not None:
        return run.check(step(words.step), words.check)
    else:
        result, earlier = run_step(words.step, words.cuda, words.quick)
        print(report.text(result, earlier))
        if words.json is not None:
            words.json.write_text(json.dumps(asdict(result), indent=1))
        if result.failure:
            print(f"kpt learn: {result.failure}", file=sys.stderr)
            return 1
        if not words.quick and result.rows:
            report.keep(step(words.step), result)
    if words.html is not None:
        words.html.write_text(report.page(report.stored()))
        print(f"wrote {words.html}")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (RuntimeError, ValueError, ImportError) as error:
        print(f"kpt: {error}", file=sys.stderr)
        sys.exit(1)
