"""Compares a new result with the stored one of the same benchmark, row by row.

python benchmarks/compare.py STORED.json NEW.json [--limit 2]

Two machines of one kind differ by a few percent, and so do two runs. So a row counts as slower only where ours takes
more than `limit` percent longer than before by the clock, and also next to what was timed in the same run: the peers,
or the copy. Exits with 1 where a row is slower, and names every row that only one of the two files has.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path

ROW_LISTS = ("rows", "attention", "products")
RESULTS = ("timings", "tflops", "speedup", "share", "bytes", "buffers", "launches", "computed_tflops", "share_of_plain")


def place(key: str) -> tuple[int, str]:
    """The op stands first in a row's name."""
    return ("op", "direction", "dtype", key).index(key), key


def rows_of(path: Path) -> dict[str, dict[str, float]]:
    """Medians in microseconds by the way, of each row; a row's name is all that says what was measured."""
    found = {}
    for run in json.loads(path.read_text())["runs"]:
        for row in (row for name in ROW_LISTS for row in run.get(name, [])):
            if "timings" not in row:
                continue
            facts = {key: value for key, value in row.items() if key not in RESULTS and isinstance(value, (str, int))}
            name = " ".join(str(facts[key]) for key in sorted(facts, key=place) if key != "device")
            found[name] = {way: timing["median_us"] for way, timing in row["timings"].items()}
    return found


def change(old: dict[str, float], new: dict[str, float]) -> tuple[float, float]:
    """By which factor ours takes longer: by the clock, and next to the others of its run."""
    others = [way for way in old if way in new and way != "ours"]
    machine = statistics.median([new[way] / old[way] for way in others]) if others else 1.0
    clock = new["ours"] / old["ours"]
    return clock, clock / machine


def compare(stored: Path, new: Path, limit: float) -> list[str]:
    """Prints every row that is in both; returns the names of those that are slower."""
    before, after = rows_of(stored), rows_of(new)
    slower = []
    for name in (name for name in before if name in after):
        old, now = before[name], after[name]
        if "ours" not in old or "ours" not in now:
            continue
        clock, relative = change(old, now)
        is_slower = min(clock, relative) > 1 + limit / 100
        slower += [name] * is_slower
        times = f"{old['ours']:10.1f} {now['ours']:10.1f} us {clock:6.3f} {relative:6.3f}"
        print(f"{'SLOWER' if is_slower else '':7}{times}  {name}")
    for only, names in (("stored", before.keys() - after.keys()), ("new", after.keys() - before.keys())):
        for name in sorted(names):
            print(f"only in the {only} file: {name}")
    return slower


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stored", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--limit", type=float, default=2.0, help="percent")
    arguments = parser.parse_args()
    slower = compare(arguments.stored, arguments.new, arguments.limit)
    print(f"{len(slower)} slower by more than {arguments.limit:g} %")
    return 1 if slower else 0


if __name__ == "__main__":
    sys.exit(main())
