"""The lines that a step prints and `kpt learn` reads; see ../support/measure.h."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field


def problem(text: str) -> None:
    print(f"problem\t{text}", flush=True)


def roof(name: str, value: float, unit: str) -> None:
    print(f"roof\t{name}\t{value:.9g}\t{unit}", flush=True)


def predicted(name: str, seconds: float, how: str) -> None:
    print(f"predicted\t{name}\t{seconds:.9g}\t{how}", flush=True)


def note(text: str) -> None:
    print(f"note\t{text}", flush=True)


def measured(name: str, seconds: float, bytes_: float, flops: float, error: float, allowed: float) -> None:
    print(f"measured\t{name}\t{seconds:.9g}\t{bytes_:.9g}\t{flops:.9g}\t{error:.3g}", flush=True)
    if not error <= allowed:
        print(f"wrong\t{name}\terror {error:.3g}, allowed {allowed:.3g}", flush=True)
        sys.exit(1)


@dataclass
class Row:
    name: str
    seconds: float
    bytes: float
    flops: float
    error: float
    predicted: float | None = None
    how: str = ""


@dataclass
class Result:
    """What one step said."""

    problem: str = ""
    roofs: list[tuple[str, float, str]] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    failure: str = ""


def parse(text: str) -> Result:
    result = Result()
    predictions: dict[str, tuple[float, str]] = {}
    for line in text.splitlines():
        kind, *words = line.split("\t")
        if kind == "problem":
            result.problem = words[0]
        elif kind == "roof":
            result.roofs.append((words[0], float(words[1]), words[2]))
        elif kind == "predicted":
            predictions[words[0]] = (float(words[1]), words[2])
        elif kind == "measured":
            seconds, how = predictions.get(words[0], (None, ""))
            numbers = [float(word) for word in words[1:5]]
            result.rows.append(Row(words[0], *numbers, seconds, how))
        elif kind in ("note", "on the CPU"):
            result.notes.append(words[0])
        elif kind == "wrong":
            result.failure = f"{words[0]}: {words[1]}"
    return result
