"""Takes models one after another and says on standard output, a line of JSON each, which begins and what came of it.

A model that takes too long ends the process with the stacks of its threads on standard error; whoever reads the lines
knows which one it was, as for a crash.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import tempfile
import time
import traceback
import warnings
from typing import Any

FINISHED = "finished"
LIMIT_SECONDS = 150.0


def main(arguments: list[str]) -> None:
    budget, names = float(arguments[0]), arguments[1:]
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
    os.environ["HF_HUB_OFFLINE"] = "1"
    warnings.filterwarnings("ignore")
    with tempfile.TemporaryDirectory(prefix="kernel_pytorch_zoo_") as directory:
        os.environ["KERNEL_PYTORCH_CACHE_DIR"] = directory
        import torch

        torch.set_num_threads(1)
        faulthandler.enable()
        from .models import prepare

        prepare()
        for name in names:
            say({"begins": name})
            faulthandler.dump_traceback_later(LIMIT_SECONDS, exit=True)
            say({"row": row_of(name, budget)})
            faulthandler.cancel_dump_traceback_later()
    say({FINISHED: True})


def row_of(name: str, budget: float) -> dict[str, Any]:
    """Everything about one model."""
    from .models import build

    began = time.monotonic()
    row: dict[str, Any] = {"model": name, "outcome": "passes", "failures": {}, "coverage": {}, "unseen": []}
    try:
        case = build(name)
        from .case import redraw
        from .checks import Before

        redraw(case.model)
        before = Before(case)
    except Exception as error:  # the library's own failure: the model is not counted
        return {**row, "outcome": "not built", "reason": f"{type(error).__name__}: {str(error)[:600]}"}
    row["parameters"] = sum(p.numel() for p in case.model.parameters())
    for goal in ("inference", "train") if case.is_causal_lm else ("inference",):
        row["failures"].update({f"{goal}: {k}": v for k, v in _checked(before, goal, budget, row).items() if v})
    row["outcome"] = "fails" if row["failures"] else "passes"
    row["seconds"] = round(time.monotonic() - began, 1)
    return row


def _checked(before: Any, goal: str, budget: float, row: dict[str, Any]) -> dict[str, str]:
    """The forced run with every check, and for inference one with the real clock."""
    import torch
    from forced_clock import everything_is_kept

    import kernel_pytorch

    from .checks import check, check_restored, differs, gradients_of, outputs_of, same_state
    from .coverage import Coverage

    case = before.case
    inputs = case.inputs
    if goal == "train":
        inputs = {**inputs, "labels": inputs["input_ids"]}
        try:
            expected = gradients_of(case.model, inputs)
        except Exception:  # it does not train plainly
            return {}
    found: dict[str, str] = {}
    coverage = Coverage(case) if goal == "inference" else None
    numbers = torch.get_rng_state()
    try:
        with everything_is_kept():
            began = time.monotonic()
            result = kernel_pytorch.optimize(case.model, inputs, goal, budget_seconds=90, tune="off")
            row[f"{goal} seconds"] = round(time.monotonic() - began, 2)
    except Exception as error:
        text = traceback.format_exc().strip().splitlines()
        return {"optimize": f"raised {type(error).__name__}: {str(error)[:300]} {' '.join(text[-5:])[:500]}"}
    if not torch.equal(numbers, torch.get_rng_state()):
        found["random numbers"] = "they moved"
    row["unseen"] += [
        f"{one['path']}: {one['pattern']}: {one['reason']}"[:300] for one in result.report.data["refusals"]
    ]
    if goal == "inference":
        assert coverage is not None
        found |= check(before)
        row["coverage"] = coverage.after()
    else:
        try:
            found["values"] = differs(gradients_of(case.model, inputs), expected)
        except Exception as error:
            found["values"] = f"raised {type(error).__name__}: {str(error)[:300]}"
        found["state_dict"] = same_state(case.model, before.state)
    result.restore()
    found |= check_restored(before)
    if goal == "inference" and budget:
        began = time.monotonic()
        try:
            result = kernel_pytorch.optimize(case.model, inputs, goal, budget_seconds=budget, tune="off")
            row["clock seconds"] = round(time.monotonic() - began, 2)
            found["by the clock"] = differs(outputs_of(case.model, inputs), before.outputs)
            result.restore()
        except Exception as error:
            found["by the clock"] = f"raised {type(error).__name__}: {str(error)[:300]}"
    return found


def say(line: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
