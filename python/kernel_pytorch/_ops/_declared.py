"""What follows from an op's list of fields in the core: shapes of fake tensors, batching rules, what forward saves.

The lists are C++ (ops/<op>/<op>.h); the core exports them as data, and this is the one interpreter of it for torch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import _library

_DTYPES = {
    "fp32": torch.float32,
    "fp64": torch.float64,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "int8": torch.int8,
    "int32": torch.int32,
    "int64": torch.int64,
    "bool": torch.bool,
}


@functools.cache
def declared() -> dict[str, Any]:
    """The declarations by name."""
    return {declaration["name"]: declaration for declaration in _library.declarations()}


def shapes_of(op: str) -> Callable[..., Any]:
    """(arguments of the schema) -> empty tensors like the outputs, also for sizes that a compiler does not know."""
    declaration = declared()[op]
    arguments = declaration["arguments"]
    names = [argument["name"] for argument in arguments]
    shaped = [(i, argument["shape"]) for i, argument in enumerate(arguments) if "shape" in argument]

    def shapes(*args: Any) -> Any:
        values = dict(zip(names, args))
        sizes: dict[str, Any] = {}
        for i, shape in shaped:
            if values.get(names[i]) is not None:
                _bind(sizes, shape, values[names[i]])
        outputs = tuple(_output(output, sizes, values, declaration["leading"]) for output in declaration["outputs"])
        return outputs[0] if len(outputs) == 1 else outputs

    return shapes


def _bind(sizes: dict[str, Any], shape: Sequence[Any], tensor: Tensor) -> None:
    """The first tensor that has a name gives its size."""
    leads = shape[:1] == ["..."]
    named = shape[1:] if leads else shape
    if leads and tensor.dim() >= len(named):
        sizes.setdefault("...", tuple(tensor.shape[: tensor.dim() - len(named)]))
    if tensor.dim() < len(named):
        return
    for name, size in zip(named, tensor.shape[tensor.dim() - len(named) :]):
        if isinstance(name, str):
            sizes.setdefault(name, size)


def _output(output: dict[str, Any], sizes: dict[str, Any], values: dict[str, Any], leading: str) -> Tensor:
    source = values[leading if output["fixed_dtype"] else output["dtype"]]
    is_wanted = "wanted" not in output or values[output["wanted"]]
    has_cause = "when" not in output or values.get(output["when"]) is not None
    if source is None or not is_wanted or not has_cause:
        empty: Tensor = values[leading].new_empty((0,))
        return empty
    size: list[Any] = []
    for name in output["shape"]:
        size.extend(sizes["..."] if name == "..." else [sizes.get(name, name)])
    made: Tensor = source.new_empty(size, dtype=_dtype(output, source, values))
    return made


def _dtype(output: dict[str, Any], source: Tensor, values: dict[str, Any]) -> torch.dtype:
    chosen: torch.dtype | None = values.get(output["dtype_option"]) if "dtype_option" in output else None
    if chosen is not None:
        return chosen
    if output["fixed_dtype"]:
        return _DTYPES[output["dtype"]]
    if output["statistic"]:
        return torch.float64 if source.dtype is torch.float64 else torch.float32
    return source.dtype


def parameters_of(op: str) -> list[str]:
    """Tensor arguments without leading dimensions: vmap cannot fold a batch into them."""
    return [argument["name"] for argument in declared()[op]["arguments"] if "..." not in argument.get("shape", ["..."])]


def sums_of(op: str) -> list[str]:
    """Flags that ask for an output without leading dimensions: a sum over rows, of which each sample has its own."""
    asked = [output for output in declared()[op]["outputs"] if "wanted" in output]
    return [output["wanted"] for output in asked if "..." not in output["shape"]]


def saves_of(forward: str, backward: str) -> list[str]:
    """What `forward` keeps for `backward`: those of the latter's arguments that it has, tensors first."""
    known = [entry["name"] for kind in ("arguments", "outputs") for entry in declared()[forward][kind]]
    tensors: list[str] = []
    others: list[str] = []
    for argument in declared()[backward]["arguments"]:
        name = next((name for name in argument.get("from", argument["name"]).split(" or ") if name in known), None)
        if name is not None:
            (tensors if argument["kind"] == "tensor" else others).append(name)
    return [*tensors, *others]
