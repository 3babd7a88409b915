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


def is_declared(op: str) -> bool:
    return op in declared()


def shapes_of(op: str) -> Callable[..., Any]:
    """(arguments of the schema) -> empty tensors like the outputs, also for sizes that a compiler does not know."""
    declaration = declared()[op]
    arguments = declaration["arguments"]
    names = [argument["name"] for argument in arguments]
    shaped = [argument for argument in arguments if "shapes" in argument]
    integers = [argument["name"] for argument in arguments if argument["kind"] == "integer"]
    choices = {argument["name"]: argument["choices"].split() for argument in arguments if "choices" in argument}
    outputs = declaration["outputs"]

    def shapes(*args: Any) -> Any:
        values = dict(zip(names, args))
        sizes: dict[str, Any] = {name: values[name] for name in integers}
        for argument in shaped:
            if values.get(argument["name"]) is not None:
                _bind(sizes, _picked_shape(argument, values, choices), values[argument["name"]])
        if not outputs:
            return None
        made = tuple(_output(output, sizes, values, choices, declaration.get("leading")) for output in outputs)
        return made[0] if len(made) == 1 else made

    return shapes


def _picked_shape(field: dict[str, Any], values: dict[str, Any], choices: dict[str, list[str]]) -> list[Any]:
    """The alternative of a shape that holds for these values, as `picked_shape` in C++ (base/field.h)."""
    alternative = 0
    for name in field.get("shape_by", ()):
        if name in choices:
            alternative = choices[name].index(values[name])
            break
        if values.get(name) is not None and values[name] is not False and not _is_zero(values[name]):
            break
        alternative += 1
    shapes: list[list[Any]] = field["shapes"]
    return shapes[min(alternative, len(shapes) - 1)]


def _is_zero(value: Any) -> bool:
    return isinstance(value, int) and value == 0


def _bind(sizes: dict[str, Any], shape: Sequence[Any], tensor: Tensor) -> None:
    """The first tensor that has a name gives its size."""
    front = shape.index("...") if "..." in shape else len(shape)
    behind = shape[front + 1 :]
    extra = tensor.dim() - front - len(behind)
    if extra < 0 or (extra > 0 and front == len(shape)):
        return
    if front < len(shape):
        sizes.setdefault("...", tuple(tensor.shape[front : front + extra]))
    for name, size in zip([*shape[:front], *behind], [*tensor.shape[:front], *tensor.shape[front + extra :]]):
        if isinstance(name, str):
            sizes.setdefault(name, size)


def _size(word: Any, sizes: dict[str, Any]) -> Any:
    """The size that a word of a shape stands for; None where it has none."""
    if not isinstance(word, str) or word in sizes:
        return sizes.get(word, word)
    formula = word.removeprefix("ceil(").removesuffix(")")
    for operation in ("/", "-", "*"):
        if operation in formula:
            left, right = (_size(int(one) if one.isdigit() else one, sizes) for one in formula.split(operation))
            if left is None or right is None or (operation == "/" and right == 0):
                return None
            if operation != "/":
                return left - right if operation == "-" else left * right
            return -(-left // right) if word.startswith("ceil(") else left // right
    return None


def _output(
    output: dict[str, Any], sizes: dict[str, Any], values: dict[str, Any], choices: dict[str, list[str]], leading: Any
) -> Tensor:
    dtype = _dtype(output, values)
    size = _output_size(output, sizes, values, choices)
    is_wanted = all(values[flag] for flag in output.get("wanted", "").split())
    has_cause = "when" not in output or values.get(output["when"]) is not None
    on = values.get(leading)
    if on is None:  # whatever tensor there is says where
        tensors = (
            item for value in values.values() for item in (value if isinstance(value, list | tuple) else [value])
        )
        on = next(item for item in tensors if isinstance(item, Tensor))
    if dtype is None or size is None or not is_wanted or not has_cause:
        own = dtype if dtype is not None and ("dtype" in output or "statistic" in output) else on.dtype
        return on.new_empty((0,), dtype=own)
    chosen = values.get(output["dtype_option"]) if "dtype_option" in output else None
    made: Tensor = on.new_empty(size, dtype=dtype if chosen is None else chosen)
    return _reordered(output, made, values, choices)


def _output_size(
    output: dict[str, Any], sizes: dict[str, Any], values: dict[str, Any], choices: dict[str, list[str]]
) -> list[Any] | None:
    if "like" in output:
        return None if values[output["like"]] is None else list(values[output["like"]].shape)
    if "row" in output:
        tensors, bits = (values[name] for name in output["row"])
        return [sum(tensor.numel() for i, tensor in enumerate(tensors) if bits >> i & 1)]
    size: list[Any] = []
    for word in _picked_shape(output, values, choices):
        if word == "..." and word in sizes:
            size.extend(sizes["..."])
        elif (one := _size(word, sizes)) is not None:
            size.append(one)
        else:
            return None
    return size


def _reordered(output: dict[str, Any], made: Tensor, values: dict[str, Any], choices: dict[str, list[str]]) -> Tensor:
    shapes = output.get("shapes", [])
    is_last = len(shapes) > 1 and _picked_shape(output, values, choices) is shapes[-1]
    if "order_of" not in output or is_last:
        return made
    order = values[output["order_of"]]
    if made.dim() == 2 and order.stride(0) == 1 and 1 < order.stride(1) >= order.shape[0]:
        return made.new_empty_strided(made.shape, (1, made.shape[0]))
    if made.dim() < 4 or order.dim() < 4 or order.stride(1) >= order.stride(2):
        return made
    return made.new_empty((made.shape[0], made.shape[2], made.shape[1], *made.shape[3:])).transpose(1, 2)


def _dtype(output: dict[str, Any], values: dict[str, Any]) -> torch.dtype | None:
    if "dtype" in output:
        return _DTYPES[output["dtype"]]
    if "dtype_named" in output:
        return _DTYPES[values[output["dtype_named"]]]
    source = values[output["dtype_of"]]
    if source is None:
        return None
    is_statistic = output.get("statistic") and values.get(output.get("statistic_if", ""), True)
    if isinstance(source, list | tuple) or is_statistic:
        tensors = source if isinstance(source, list | tuple) else [source]
        return torch.float64 if any(tensor.dtype is torch.float64 for tensor in tensors) else torch.float32
    return source.dtype  # type: ignore[no-any-return]


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
    """What `forward` keeps for `backward`: those of the latter's arguments that it has, in order, and then `besides`;
    tensors before numbers before lists.
    """
    entries = [entry for kind in ("arguments", "outputs") for entry in declared()[forward][kind]]
    kinds = {entry["name"]: entry.get("kind", "tensor") for entry in entries}
    saved = []
    for argument in declared()[backward]["arguments"]:
        name = next((name for name in argument.get("from", argument["name"]).split(" or ") if name in kinds), None)
        saved += [] if name is None else [name]
    order = {"tensor": 0, "tensors": 2}
    return sorted([*saved, *besides], key=lambda name: order.get(kinds[name], 1))
