"""What an optimisation did, as text for a terminal, as one HTML page and as JSON: three views of one plain dict.

The dict's fields are those that schema.py lists; nothing here measures or decides.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from . import schema
from .html import page
from .numbers import (
    Row,
    Verdict,
    count_text,
    duration,
    grouped,
    percent,
    ratio_text,
    roof_share,
    size,
    small,
    verdict,
)

__all__ = ["Report"]

_SHOWN_KERNELS = 6
_FILE_LIMIT_BYTES = 64 << 20


class Report:
    """One optimisation: what was replaced, what it gained, what was refused, how far the numbers moved.

    >>> print(result.report)
    >>> result.report.save("report.html")  # one file, opens anywhere; .json keeps it for programs
    """

    def __init__(self, data: Mapping[str, Any]) -> None:
        self.data = schema.check(data)

    @classmethod
    def from_json(cls, text: str | bytes) -> Report:
        """What `to_json` gave; a ValueError says what is wrong with other text."""
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"report: not JSON: {error}") from error
        return cls(data)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Report:
        """A report that `save` wrote as .json."""
        file = Path(path)
        length = file.stat().st_size
        if length > _FILE_LIMIT_BYTES:
            raise ValueError(f"report: {file} has {length} bytes; a report has at most {_FILE_LIMIT_BYTES}")
        return cls.from_json(file.read_bytes())

    def to_json(self) -> str:
        return json.dumps(schema.jsonable(self.data), indent=1, ensure_ascii=False, allow_nan=False) + "\n"

    def to_html(self) -> str:
        return page(self)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Writes .html, .json or .txt, by the name's end; a reader never sees half a file."""
        file = Path(path)
        view = {".html": self.to_html, ".json": self.to_json, ".txt": self.__str__}.get(file.suffix.lower())
        if view is None:
            raise ValueError(f"report: cannot save {file.name!r}: the name must end in .html, .json or .txt")
        partial = file.with_name(f".{file.name}.{os.getpid()}")
        try:
            partial.write_text(view(), encoding="utf-8")
            partial.replace(file)
        finally:
            partial.unlink(missing_ok=True)
        return file

    def measurement(self, name: str) -> Row | None:
        """The measurement called `name`: "before", "after" or a peer's."""
        return next((row for row in self.data["measurements"] if row["name"] == name), None)

    def verdict(self, name: str = "after") -> Verdict | None:
        """How `name` stands to "before"; None where either was not measured."""
        before, after = self.measurement("before"), self.measurement(name)
        return verdict(before, after) if before and after else None

    @property
    def speedup(self) -> float | None:
        """Median before over median after."""
        found = self.verdict()
        return found.ratio if found else None

    @property
    def is_changed(self) -> bool:
        """Whether a part was replaced or a kernel chosen by measuring."""
        return bool(self.data["replacements"]) or any(row["kept"] for row in self.data["tuning"])

    @property
    def headline(self) -> str:
        """What came of it, in a few words."""
        if not self.is_changed:
            return "nothing was replaced, the model is as it was"
        found = self.verdict()
        return found.words if found else "not measured before and after"

    @property
    def worst_numerics(self) -> Row | None:
        """The comparison that came closest to its tolerance or went furthest beyond it; a NaN is beyond all."""
        rows: list[Row] = self.data["numerics"]
        return max(rows, key=_use_of_tolerance, default=None)

    def __str__(self) -> str:
        parts = [self._head(), self._measurements(), self._numerics(), self._replaced(), self._tuned()]
        parts += [
            self._refused(),
            self._kernels(),
            "\n".join(f"note: {note}" for note in self.data["notes"]),
            self._command(),
        ]
        text = "\n\n".join(part for part in parts if part)
        # Names come from models and files: nothing in them may steer the terminal.
        return "".join(letter if letter.isprintable() or letter == "\n" else "?" for letter in text)

    def __repr__(self) -> str:
        return f"<Report {self.data['title']!r}: {self.headline}, {len(self.data['replacements'])} replaced>"

    def _head(self) -> str:
        data, environment = self.data, self.data["environment"]
        shown = [environment.get(key) for key in ("device", "dtype")]
        shown += [f"{key} {environment[key]}" for key in ("torch", "kernel_pytorch") if environment.get(key)]
        if environment.get("threads"):
            shown.append(f"{environment['threads']} thread{'' if environment['threads'] == 1 else 's'}")
        model = data["model"]
        inputs = f" on {', '.join(model['inputs'])}" if model["inputs"] else ""
        return "\n".join(
            [
                f"{data['title']}: {self.headline}",
                f"{model['name']}, {count_text(model['parameters'])} parameters{inputs}; "
                f"goal {data['goal']}, accuracy {data['accuracy']}",
                ", ".join(str(value) for value in shown if value),
            ]
        )

    def _measurements(self) -> str:
        rows = [["", "median", "low", "high", "memory", "launches", "against before"]]
        for row in self.data["measurements"]:
            found = self.verdict(row["name"])
            against = "" if row["name"] == "before" or not found else ratio_text(found.ratio)
            rows.append(
                [
                    row["name"],
                    *(duration(row[key]) for key in ("median_us", "low_us", "high_us")),
                    "-" if row["peak_bytes"] is None else size(row["peak_bytes"]),
                    "-" if row["launches"] is None else str(row["launches"]),
                    against + ("" if not against or (found and found.clear) else " ?"),
                ]
            )
        doubt = "\n? the ranges overlap: it may be noise" if any(row[-1].endswith("?") for row in rows) else ""
        return _aligned(rows) + doubt if len(rows) > 1 else ""

    def _numerics(self) -> str:
        rows = self.data["numerics"]
        worst = self.worst_numerics
        if worst is None:
            return "Numbers: not compared."
        failed = [row for row in rows if not row["ok"]]
        said = "all within tolerance" if not failed else f"{len(failed)} BEYOND TOLERANCE"
        lines = [f"Numbers: {_counted(len(rows), 'comparison')}, {said}; closest to its limit: {_numeric_line(worst)}"]
        return "\n".join(lines + [f"  failed: {_numeric_line(row)}" for row in failed[:_SHOWN_KERNELS]])

    def _replaced(self) -> str:
        rows = self.data["replacements"]
        if not rows:
            return "Replaced: nothing."
        table = []
        for group in grouped(rows, "pattern", "from", "to"):
            saved = [row["predicted_us_before"] - row["predicted_us_after"] for row in group if _is_predicted(row)]
            gain = f"predicted {duration(sum(saved))} less" if saved else ""
            table.append([f"  {len(group)}x", group[0]["pattern"], f"{group[0]['from']} -> {group[0]['to']}", gain])
        return f"Replaced {_counted(len(rows), 'part')}:\n" + _aligned(table, left=3)

    def _tuned(self) -> str:
        rows = self.data["tuning"]
        if not rows:
            return ""
        lines = []
        for row in sorted(rows, key=lambda row: not row["kept"]):
            lines.append(f"  {row['calls']}x  {row['op']} {row['problem']}"[:110])
            if row["kept"]:
                times = " -> ".join("?" if row[key] is None else duration(row[key]) for key in ("from_us", "to_us"))
                lines.append(f"      {row['from']} -> {row['to']}: {times}, {row['reason']}")
            else:
                lines.append(f"      {'not tuned' if row['to'] is None else row['from'] + ' stays'}: {row['reason']}")
        taken = sum(row["kept"] for row in rows)
        return f"Tuned, {taken} of {_counted(len(rows), 'problem')} changed:\n" + "\n".join(lines)

    def _refused(self) -> str:
        rows = self.data["refusals"]
        if not rows:
            return ""
        lines = []
        for group in grouped(rows, "pattern", "reason"):
            where = group[0]["path"] or "the model"
            more = f" and {len(group) - 1} more" if len(group) > 1 else ""
            lines.append(f"  {group[0]['pattern']}: {group[0]['reason']} ({where}{more})")
        return f"Left alone, {_counted(len(rows), 'part')}:\n" + "\n".join(lines)

    def _kernels(self) -> str:
        kernels = sorted(self.data["kernels"]["after"], key=lambda row: -row["total_us"])
        total = sum(row["total_us"] for row in kernels)
        if not total > 0:
            return ""
        table = []
        for row in kernels[:_SHOWN_KERNELS]:
            share = roof_share(row, self.data["roofs"])
            name = row["name"] if len(row["name"]) <= 60 else row["name"][:57] + "..."
            roof = "" if share is None else f"{percent(share)} of the roof"
            table.append(["  *" if row["ours"] else "   ", percent(row["total_us"] / total), name, roof])
        rest = len(kernels) - len(table)
        more = f"\n  and {rest} more" if rest > 0 else ""
        return "Where the time goes now (* ours):\n" + _aligned(table, left=3) + more

    def _command(self) -> str:
        return f"Again: {self.data['command']}" if self.data["command"] else ""


def _use_of_tolerance(row: Row) -> float:
    if row["relative"] != row["relative"]:
        return float("inf")
    if row["tolerance"] > 0:
        return float(row["relative"] / row["tolerance"])
    return 0.0 if row["relative"] == 0 else float("inf")


def _numeric_line(row: Row) -> str:
    where = row["path"] or "the whole model"
    return f"{where}, {row['quantity']}, {small(row['relative'])} of {small(row['tolerance'])}"


def _is_predicted(row: Row) -> bool:
    return row["predicted_us_before"] is not None and row["predicted_us_after"] is not None


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _aligned(rows: list[list[str]], left: int = 1) -> str:
    """Columns of equal width, the first `left` to the left and the others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
