"""The report as data: a plain dict, every key present, null where unknown. How it looks is report.py's matter."""

from __future__ import annotations

import datetime
import platform
import shlex
import sys
from typing import Any

import torch
from torch import nn

from ... import __version__
from ..choose import Outcome
from ..measure import Timing
from ..patterns.context import Context
from ..plan import Plan
from ..roofs import roofs
from ..run import Sample
from ..sites import Refusal
from ..tuned import Tuning
from ..whole import Measured


def collect(
    model: nn.Module, context: Context, outcome: Outcome, plan: Plan, tuned: Tuning, measured: Measured, sample: Sample
) -> dict[str, Any]:
    inner = context.model
    notes = [*plan.notes, *tuned.notes, *measured.notes]
    final = roofs(context.device, sample.dtype, again=bool(measured.peaks.get("before")))
    if final["busy"]:
        notes.append("the machine was busy while its roofs were measured, so shares of the roof are left out")
    return {
        "title": f"{type(inner).__name__}, {context.goal}",
        "goal": context.goal,
        "accuracy": context.accuracy,
        "command": _command(),
        "environment": _environment(context, sample),
        "model": {
            "name": type(inner).__name__,
            "parameters": sum(parameter.numel() for parameter in inner.parameters()),
            "inputs": [f"{'x'.join(map(str, t.shape))} {_dtype_name(t.dtype)}" for t in sample.call.tensors()],
        },
        "measurements": [
            {
                "name": name,
                "median_us": timing.median_us,
                "low_us": timing.low_us,
                "high_us": timing.high_us,
                "samples": timing.samples,
                "peak_bytes": measured.peaks.get(name),
                "launches": measured.launches.get(name),
            }
            for name, timing in measured.timings.items()
        ],
        "replacements": [_replacement(kept, plan) for kept in outcome.kept],
        "refusals": [{"path": one.path, "pattern": one.pattern, "reason": one.reason} for one in outcome.refusals],
        "tuning": tuned.rows,
        "numerics": [difference.as_dict() for difference in outcome.differences],
        "kernels": {"before": measured.kernels.get("before", []), "after": measured.kernels.get("after", [])},
        "roofs": None if final["busy"] else {name: final[name] for name in final if name != "busy"},
        "notes": notes,
    }


def collect_nothing(
    model: nn.Module, context: Context, step_seconds: float, reason: str, sample: Sample
) -> dict[str, Any]:
    """The report of a call that could try nothing, with the reason and the one run that was timed."""
    step_us = step_seconds * 1e6
    once = Timing(step_us, step_us, step_us, 1)
    measured = Measured(
        timings={"before": once, "after": once},
        peaks={"before": None, "after": None},
        launches={"before": None, "after": None},
        notes=[reason],
    )
    outcome = Outcome(refusals=[Refusal("", "every pattern", reason)])
    return collect(model, context, outcome, Plan(), Tuning(), measured, sample)


def _replacement(kept: Any, plan: Plan) -> dict[str, Any]:
    predicted = plan.prediction(kept.proposal)
    reason = predicted.get("reason", "")
    if kept.before is not None and kept.after is not None:
        ratio = kept.before.median_us / kept.after.median_us
        measured = f"measured {kept.before.median_us:.0f} us before, {kept.after.median_us:.0f} us after ({ratio:.2f}x)"
        reason = f"{measured}; {reason}" if reason else measured
    return {
        "path": kept.proposal.path,
        "pattern": kept.proposal.pattern,
        "from": kept.proposal.source,
        "to": kept.way.name,
        "predicted_us_before": predicted.get("before_us"),
        "predicted_us_after": predicted.get("after_us"),
        "reason": reason,
        "kernel": None,
    }


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _command() -> str:
    """How this process was started, which runs the same again; a program given in words is not repeated."""
    words = list(getattr(sys, "orig_argv", sys.argv))
    return shlex.join("..." if "\n" in word else word for word in words)


def _environment(context: Context, sample: Sample) -> dict[str, Any]:
    on_gpu = context.device.type == "cuda"
    cpu = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as info:
            cpu = next((line.split(":", 1)[1].strip() for line in info if line.startswith("model name")), cpu)
    except OSError:
        pass  # not Linux: the architecture's name has to do
    return {
        "device": torch.cuda.get_device_name(context.device) if on_gpu else cpu,
        "cpu": cpu,
        "torch": torch.__version__,
        "kernel_pytorch": __version__,
        "threads": torch.get_num_threads(),
        "dtype": _dtype_name(sample.dtype),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "compiled": context.compiled,
        "python": platform.python_version(),
    }
