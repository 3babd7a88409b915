"""What `kpt optimize` becomes: a model and its sample from words, then the report to the terminal and to files."""

from __future__ import annotations

import argparse
import importlib
import os
import re
import shlex
import sys
from typing import Any

try:  # first: it says what is missing where torch is missing or old
    from .. import _torch as _torch
except ImportError as error:
    sys.exit(f"kpt: optimize: {error}")

import torch  # isort: skip

from .demo_models import DEMOS  # isort: skip
from .optimize import optimize  # isort: skip

_INPUT = re.compile(
    r"(?:(?P<name>[A-Za-z_]\w*)=)?(?P<shape>\d+(?:x\d+)*)(?::(?P<dtype>[a-z]+\d*)(?:<(?P<bound>\d+))?)?"
)


def main(words: list[str]) -> int:
    arguments = _parser().parse_args(words)
    try:
        model, inputs = _model_and_inputs(arguments)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        print(f"kpt: optimize: {error}", file=sys.stderr)
        return 2
    if arguments.compile:
        model = torch.compile(model)  # type: ignore[assignment]
    try:
        result = optimize(
            model,
            inputs,
            goal=arguments.goal,
            accuracy=arguments.accuracy,
            budget_seconds=arguments.budget,
            tune=arguments.tune,
        )
    except KeyboardInterrupt:
        print("kpt: stopped; nothing was changed", file=sys.stderr)
        return 130
    result.report.data["command"] = shlex.join(["kpt", "optimize", *words])
    print(result.report)
    for path in (arguments.html, arguments.json):
        if path:
            result.report.save(path)
            print(f"written: {path}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kpt optimize")
    parser.add_argument("model", nargs="?")
    parser.add_argument("--input", action="append", default=[])
    parser.add_argument("--demo")
    parser.add_argument("--goal", default="inference")
    parser.add_argument("--accuracy", default="exact")
    parser.add_argument("--budget", type=float, default=60.0)
    parser.add_argument("--tune", default="model")
    parser.add_argument("--html")
    parser.add_argument("--json")
    parser.add_argument("--dtype")
    parser.add_argument("--device")
    parser.add_argument("--compile", action="store_true")
    return parser


def _model_and_inputs(arguments: argparse.Namespace) -> tuple[torch.nn.Module, Any]:
    torch.manual_seed(0)
    device = torch.device(arguments.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if arguments.demo:
        make, sample = DEMOS[arguments.demo]
        model, inputs = make(), sample()
    else:
        model, inputs = _factory(arguments.model)(), [input_of(text) for text in arguments.input]
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"{arguments.model} returned a {type(model).__name__}; it must return an nn.Module")
    dtype = getattr(torch, arguments.dtype) if arguments.dtype else None
    model = model.to(device=device, dtype=dtype).train(arguments.goal == "train")

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device=device, dtype=dtype if tensor.is_floating_point() else None)

    if isinstance(inputs, torch.Tensor):
        return model, moved(inputs)
    named = {name: moved(tensor) for name, tensor in inputs if name}
    positional = [moved(tensor) for name, tensor in inputs if not name]
    if named and positional:
        raise ValueError("inputs are either all named or all positional")
    return model, named or tuple(positional)


def _factory(text: str) -> Any:
    module, _, name = text.partition(":")
    if not module or not name:
        raise ValueError(f"{text!r} names no model; write module:factory")
    sys.path.insert(0, os.getcwd())
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found


def input_of(text: str) -> tuple[str | None, torch.Tensor]:
    """[name=]1x2048[:int64[<bound]] -> the name and random numbers: normal ones, or below the bound (1000)."""
    match = _INPUT.fullmatch(text)
    dtype = getattr(torch, match["dtype"] or "float32", None) if match else None
    if match is None or not isinstance(dtype, torch.dtype):
        raise ValueError(f"input {text!r} is not [name=]SHAPE[:TYPE[<BOUND]], e.g. 1x2048:int64<32000")
    shape = [int(size) for size in match["shape"].split("x")]
    if dtype is torch.bool:
        return match["name"], torch.ones(shape, dtype=dtype)
    if dtype.is_floating_point:
        return match["name"], torch.randn(shape).to(dtype)
    return match["name"], torch.randint(int(match["bound"] or 1000), shape, dtype=dtype)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
