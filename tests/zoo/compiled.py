"""Models of the zoo under torch.compile(backend="kernel_pytorch"), every pattern taken where it agrees:

    PYTHONPATH=python:tests:tests/python python -m zoo.compiled [--every N] [--only WORDS,...] [--output FILE]

A model passes if its outputs, those of a second shape, and a causal language model's gradients are eager torch's, and
nothing inside the backend raised. What torch.compile itself cannot trace is not counted. Prints a line for each model.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from compile_models import Compiled

from . import models
from .case import Case, NotBuilt, redraw
from .checks import differs, gradients_of, outputs_of

_SECONDS = 120  # for one model


class _TooLong(BaseException):
    pass


@contextmanager
def _limited(seconds: int) -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise _TooLong

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def row_of(name: str) -> dict[str, Any]:
    """What became of one model: outcome "passes", "fails" or "not counted", failures by check, what was replaced."""
    begin = time.monotonic()
    row: dict[str, Any] = {"model": name, "outcome": "not counted", "failures": {}, "replaced": {}, "left": {}}
    torch._dynamo.reset()
    try:
        with _limited(_SECONDS):
            case = models.build(name)
            redraw(case.model)
            _check(case, row)
    except NotBuilt as reason:
        row["reason"] = str(reason)[:300]
    except _TooLong:
        row["reason"] = f"it took more than {_SECONDS} s"
    row["seconds"] = round(time.monotonic() - begin, 1)
    return row


def _check(case: Case, row: dict[str, Any]) -> None:
    shapes = {"values": case.inputs, "a second shape": case.other_inputs}
    inputs = {name: one for name, one in shapes.items() if one is not None}
    expected = {name: outputs_of(case.model, one) for name, one in inputs.items()}
    try:
        plain = torch.compile(case.model, backend="eager")
        outputs_of(plain, case.inputs)  # type: ignore[arg-type]
    except Exception as error:
        row["reason"] = f"torch.compile raises {type(error).__name__}: {error}"[:300]
        return
    torch._dynamo.reset()
    compiled = Compiled(case.model)
    failures = row["failures"]
    for name, one in inputs.items():
        try:
            failures[name] = differs(outputs_of(compiled.call, one), expected[name])
        except Exception as error:
            failures[name] = f"raises {type(error).__name__}: {error}"[:300]
    if case.is_causal_lm:
        torch._dynamo.reset()
        labelled = {**case.inputs, "labels": case.inputs["input_ids"]}
        trained = Compiled(case.model)
        try:
            wanted = gradients_of(case.model, labelled)
        except Exception:
            wanted = None  # it has no loss in this form
        if wanted is not None:
            parameters = case.model.parameters
            trained.call.parameters = parameters  # type: ignore[attr-defined]
            try:
                failures["gradients"] = differs(gradients_of(trained.call, labelled), wanted)  # type: ignore[arg-type]
            except Exception as error:
                failures["gradients"] = f"raises {type(error).__name__}: {error}"[:300]
        _note(trained, row, failures)
    _note(compiled, row, failures)
    row["failures"] = {name: text for name, text in failures.items() if text}
    row["outcome"] = "fails" if row["failures"] else "passes"


def _note(compiled: Compiled, row: dict[str, Any], failures: dict[str, str]) -> None:
    row["replaced"] = dict(Counter(row["replaced"]) + compiled.replaced)
    for graph in compiled.report.graphs:
        known = ("it holds", "no input is a tensor", "the graph holds tensors", "an input is a", "a constant of")
        if graph.problem and not graph.problem.startswith(known):
            failures["backend"] = graph.problem
        for line in graph.lines:
            if "raise" in line.reason and not line.taken:
                failures["pattern"] = f"{line.pattern}: {line.reason}"
            elif not line.taken:
                text = f"{line.pattern}: {line.reason}"[:120]
                row["left"][text] = row["left"].get(text, 0) + 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=int, default=1, help="every N-th model")
    parser.add_argument("--only", default="", help="words that a model's name must hold one of")
    parser.add_argument("--seconds", type=float, default=1e6, help="after which no model is begun")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    models.prepare()
    words = [word for word in arguments.only.split(",") if word]
    names = [name for name in models.names() if not words or any(word in name for word in words)]
    rows = []
    end = time.monotonic() + arguments.seconds
    for name in names[:: arguments.every]:
        if time.monotonic() > end:
            break
        row = row_of(name)
        rows.append(row)
        said = row["failures"] or row.get("reason", "") or row["replaced"]
        print(f"{row['outcome']:12} {name:40} {row['seconds']:6.1f} s  {said}"[:400], flush=True)
        if arguments.output:
            arguments.output.write_text(json.dumps(rows, indent=1) + "\n")
    counts = Counter(row["outcome"] for row in rows)
    print(f"{counts['passes']} of {counts['passes'] + counts['fails']} pass, {counts['not counted']} not counted")
    return 1 if counts["fails"] else 0


if __name__ == "__main__":
    sys.exit(main())
