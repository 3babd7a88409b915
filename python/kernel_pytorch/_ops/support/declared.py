"""What follows from an op's list of fields in the core: shapes of fake tensors, batching rules, what forward saves.

The lists are C++ (ops/<op>/<op>.h); the core exports them as data, whose rules of shapes are read by _shape_rules.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..._shape_rules import Output, outputs_of
from ..._shape_rules import declared as declared

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
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def name_of(dtype: torch.dtype) -> Any:
    """The core's name of a type. One that it does not name is its own: the op refuses it, with a better message."""
    return _NAMES.get(dtype, dtype)


def described(op: str, args: Sequence[Any]) -> tuple[dict[str, Any], list[Output]]:
    """Arguments by name (types as the core names them), and the outputs of the call."""
    arguments = declared()[op]["arguments"]
    values = {argument["name"]: value for argument, value in zip(arguments, args)}
    for argument in arguments:
        if argument["kind"] == "type" and values.get(argument["name"]) is not None:
            values[argument["name"]] = name_of(values[argument["name"]])
    return values, outputs_of(op, values, lambda tensor: name_of(tensor.dtype))


def shapes_of(op: str) -> Callable[..., Any]:
    """(arguments of the schema) -> empty tensors like the outputs, also for sizes that a compiler does not know."""

    def shapes(*args: Any) -> Any:
        values, outputs = described(op, args)
        made = empties(op, values, outputs)
        return None if not made else made[0] if len(made) == 1 else tuple(made)

    return shapes


def empties(op: str, values: dict[str, Any], outputs: Sequence[Output]) -> list[Tensor]:
    """A tensor like each of these outputs, which may be some of the op's."""
    declaration = declared()[op]
    on = values.get(declaration.get("leading"))
    if on is None:  # whatever tensor there is says where
        tensors = (one for value in values.values() for one in (value if isinstance(value, list | tuple) else [value]))
        on = next(one for one in tensors if isinstance(one, Tensor))
    fields = {field["name"]: field for field in declaration["outputs"]}
    return [_empty(fields[output.name], output, on, values) for output in outputs]


def _empty(field: dict[str, Any], output: Output, on: Tensor, values: dict[str, Any]) -> Tensor:
    """A tensor like the output; one without elements where there is none, as the adapter returns it."""
    if output.shape is None:
        has_own_type = output.dtype is not None and ("dtype" in field or "statistic" in field)
        return on.new_empty((0,), dtype=torch_dtype(output.dtype) if has_own_type else on.dtype)
    made = on.new_empty(output.shape, dtype=torch_dtype(output.dtype))
    return made if "order_of" not in field or output.is_last else _reordered(made, values[field["order_of"]])


def torch_dtype(name: Any) -> torch.dtype:
    return name if isinstance(name, torch.dtype) else _DTYPES[name]


def _reordered(made: Tensor, order: Tensor) -> Tensor:
    if made.dim() == 2 and order.stride(0) == 1 and 1 < order.stride(1) >= order.shape[0]:
        return made.new_empty_strided(made.shape, (1, made.shape[0]))
    if made.dim() < 4 or order.dim() < 4 or order.stride(1) >= order.stride(2):
        return made
    return made.new_empty((made.shape[0], made.shape[2], made.shape[1], *made.shape[3:])).transpose(1, 2)


def _folds(field: dict[str, Any]) -> bool:
    """Whether vmap can put its batch in front: the dimensions there are any, or the tensor is empty."""
    return all(shape[:1] == ["..."] or shape == [0] for shape in field.get("shapes", [[]]))


def parameters_of(op: str) -> list[str]:
    """Tensor arguments that vmap cannot fold a batch into: with one, it calls the op once per sample.

    Those are the ones without any dimensions in front; and all of them where an output has none, being a sum over rows.
    """
    declaration = declared()[op]
    sums = [output for output in declaration["outputs"] if "wanted" not in output and not _folds(output)]
    tensors = [one for one in declaration["arguments"] if one["kind"] in ("tensor", "tensors")]
    return [argument["name"] for argument in tensors if sums or not _folds(argument)]


def sums_of(op: str) -> list[str]:
    """Flags that ask for a sum over rows (an output without any dimensions in front), of which a sample has its own."""
    outputs = [output for output in declared()[op]["outputs"] if "wanted" in output and not _folds(output)]
    return list(dict.fromkeys(flag for output in outputs for flag in output["wanted"].split()))


def saves_of(forward: str, backward: str, besides: Sequence[str] = ()) -> list[str]:
    """What `forward` keeps for `backward`, if there is one: those of the latter's arguments that it has, in order, and
    then `besides`; tensors before numbers before lists.
    """
    entries = [entry for kind in ("arguments", "outputs") for entry in declared()[forward][kind]]
    kinds = {entry["name"]: entry.get("kind", "tensor") for entry in entries}
    saved = []
    for argument in declared().get(backward, {"arguments": []})["arguments"]:
        name = next((name for name in argument.get("from", argument["name"]).split(" or ") if name in kinds), None)
        saved += [] if name is None else [name]
    order = {"tensor": 0, "tensors": 2}
    return sorted([*saved, *besides], key=lambda name: order.get(kinds.get(name, ""), 1))
