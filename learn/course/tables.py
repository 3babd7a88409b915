"""The tables in the pages, printed from stored results: `python learn/course/tables.py --update` writes them.

A page has a mark `<!-- results: h200 7 8 -->` (a file of learn/results, then steps) and `<!-- end -->` after the table.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from course import report
from course.build import LEARN
from course.lines import Row

MARK = re.compile(r"(<!-- results: (\w+) ([\d ]+)-->\n).*?(<!-- end -->)", re.DOTALL)


def _table(stored: dict[str, Any], numbers: list[str]) -> str:
    lines = ["| " + " | ".join(report.HEADER) + " |", "| --- | " + "---: | " * (len(report.HEADER) - 1)]
    for number in numbers:
        for row in stored["steps"][number]["rows"]:
            lines.append("| " + " | ".join(report.cells(Row(**row))) + " |")
    own = stored["steps"][numbers[-1]]
    roofs = "; ".join(f"{name} {value:.4g} {unit}" for name, value, unit in own["roofs"])
    return f"{own['problem']}, {stored['machine']}, {stored['date']}. Roofs: {roofs}.\n\n" + "\n".join(lines) + "\n"


def filled(text: str) -> str:
    def write(found: re.Match[str]) -> str:
        stored = json.loads((LEARN / "results" / f"{found[2]}.json").read_text())
        return f"{found[1]}{_table(stored, found[3].split())}{found[4]}"

    return MARK.sub(write, text)


def outdated(update: bool = False) -> list[str]:
    """Pages whose tables are not those of the results; written anew where asked."""
    changed = []
    for page in sorted(LEARN.rglob("*.md")):
        text = page.read_text()
        if filled(text) != text:
            changed.append(str(page.relative_to(LEARN)))
            if update:
                page.write_text(filled(text))
    return changed


if __name__ == "__main__":
    changed = outdated("--update" in sys.argv)
    print("\n".join(changed))
    sys.exit(1 if changed and "--update" not in sys.argv else 0)
