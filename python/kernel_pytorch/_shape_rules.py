"""Shapes and types of an op's outputs, from its list of fields in the core. Free of any framework.

The lists are C++ (ops/<op>/<op>.h) and exported as data (kp_declarations). A tensor is whatever has a `shape`; types
are the core's names ("fp32"), which a front end translates.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from . import _library


@functools.cache
def declared() -> dict[str, Any]:
    """The declarations by name."""
    return {declaration["name"]: declaration for declaration in _library.declarations()}


class Output(NamedTuple):
    """One output of a call. No shape: it is not computed (not wanted, or what it depends on is absent)."""

    name: str
    shape: tuple[Any, ...] | None
    dtype: Any  # the core's name; None where it is that of an absent tensor
    is_last: bool = False  # of several shapes that its list has, the last one holds
    is_undetermined: bool = False  # it is to be computed, and the arguments' shapes do not tell its own


def outputs_of(op: str, values: Mapping[str, Any], dtype_name: Callable[[Any], Any]) -> list[Output]:
    """The outputs of a call with these arguments (absent ones missing or None), in the order of the list.

    Args:
        values: arguments by name; "wanted" flags and "type" options (as the core names types) among them.
        dtype_name: (tensor) -> the core's name of its type.
    """
    complete, choices = _completed(op, values)
    arguments = declared()[op]["arguments"]
    sizes = {one["name"]: complete[one["name"]] for one in arguments if one["kind"] == "integer"}
    for words, tensor in _shaped(arguments, complete, choices).values():
        bind(sizes, words, tensor.shape)
    return [_output(output, sizes, complete, choices, dtype_name) for output in declared()[op]["outputs"]]


def misfit(op: str, values: Mapping[str, Any]) -> str | None:
    """Which tensor has another number of dimensions than its list says."""
    complete, choices = _completed(op, values)
    for name, (words, tensor) in _shaped(declared()[op]["arguments"], complete, choices).items():
        least = len(words) - ("..." in words)
        if len(tensor.shape) < least or (len(tensor.shape) > least and "..." not in words):
            return f"{name} has shape {list(tensor.shape)}; it must be [{', '.join(map(str, words))}]"
    return None


def _completed(op: str, values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, list[str]]]:
    """All arguments, with their defaults, and the words of those that have a choice."""
    arguments = declared()[op]["arguments"]
    given = {one["name"]: values.get(one["name"]) for one in arguments}
    complete = {
        one["name"]: one.get("default") if given[one["name"]] is None else given[one["name"]] for one in arguments
    }
    return complete, {one["name"]: one["choices"].split() for one in arguments if "choices" in one}


def _shaped(arguments: Sequence[Any], complete: dict[str, Any], choices: dict[str, list[str]]) -> dict[str, Any]:
    """(the words of its shape, the tensor) by name, of tensors that are given and whose list has words for them."""
    return {
        one["name"]: (picked_shape(one, complete, choices), complete[one["name"]])
        for one in arguments
        if "shapes" in one and complete[one["name"]] is not None
    }


def _output(
    output: dict[str, Any],
    sizes: dict[str, Any],
    values: dict[str, Any],
    choices: dict[str, list[str]],
    dtype_name: Callable[[Any], Any],
) -> Output:
    is_wanted = all(values.get(flag) for flag in output.get("wanted", "").split())
    has_cause = "when" not in output or values.get(output["when"]) is not None
    dtype = _dtype(output, values, dtype_name)
    is_computed = is_wanted and has_cause and dtype is not None
    shape = _shape(output, sizes, values, choices) if is_computed else None
    is_undetermined = is_computed and shape is None and values.get(output.get("like", ""), 0) is not None
    shapes = output.get("shapes", [])
    is_last = len(shapes) > 1 and picked_shape(output, values, choices) is shapes[-1]
    return Output(output["name"], shape, dtype, is_last, is_undetermined)


def picked_shape(field: dict[str, Any], values: Mapping[str, Any], choices: dict[str, list[str]]) -> list[Any]:
    """The alternative of a shape that holds for these values, as `picked_shape` in C++ (base/field.h)."""
    alternative = 0
    for name in field.get("shape_by", ()):
        if name in choices:
            if values[name] not in choices[name]:
                raise ValueError(f"{name} is {values[name]!r}; known are {', '.join(choices[name])}")
            alternative = choices[name].index(values[name])
            break
        value = values.get(name)
        if value is not None and value is not False and not (isinstance(value, int) and value == 0):
            break
        alternative += 1
    shapes: list[list[Any]] = field["shapes"]
    return shapes[min(alternative, len(shapes) - 1)]


def bind(sizes: dict[str, Any], words: Sequence[Any], shape: Sequence[Any]) -> None:
    """The first tensor that has a name gives its size."""
    front = words.index("...") if "..." in words else len(words)
    behind = words[front + 1 :]
    extra = len(shape) - front - len(behind)
    if extra < 0 or (extra > 0 and front == len(words)):
        return
    if front < len(words):
        sizes.setdefault("...", tuple(shape[front : front + extra]))
    for name, size in zip([*words[:front], *behind], [*shape[:front], *shape[front + extra :]]):
        if isinstance(name, str):
            sizes.setdefault(name, size)


def size_of(word: Any, sizes: Mapping[str, Any]) -> Any:
    """The size that a word of a shape stands for; None where it has none."""
    if not isinstance(word, str) or word in sizes:
        return sizes.get(word, word) if isinstance(word, str) else word
    formula = word.removeprefix("ceil(").removesuffix(")")
    for operation in ("/", "-", "*"):
        if operation in formula:
            left, right = (size_of(int(one) if one.isdigit() else one, sizes) for one in formula.split(operation))
            if left is None or right is None or (operation == "/" and right == 0):
                return None
            if operation != "/":
                return left - right if operation == "-" else left * right
            return -(-left // right) if word.startswith("ceil(") else left // right
    return None


def _shape(
    output: dict[str, Any], sizes: dict[str, Any], values: dict[str, Any], choices: dict[str, list[str]]
) -> tuple[Any, ...] | None:
    if "like" in output:
        like = values[output["like"]]
        return None if like is None else tuple(like.shape)
    if "row" in output:
        tensors, bits = (values[name] for name in output["row"])
        counts = [functools.reduce(lambda a, b: a * b, tensor.shape, 1) for tensor in tensors]
        return (sum(count for i, count in enumerate(counts) if bits >> i & 1),)
    shape: list[Any] = []
    for word in picked_shape(output, values, choices):
        if word == "..." and word in sizes:
            shape.extend(sizes["..."])
        elif (one := size_of(word, sizes)) is not None:
            shape.append(one)
        else:
            return None
    return tuple(shape)


def _dtype(output: dict[str, Any], values: dict[str, Any], dtype_name: Callable[[Any], Any]) -> Any:
    chosen = values.get(output["dtype_option"]) if "dtype_option" in output else None
    if chosen is not None:
        return chosen
    if "dtype" in output:
        return str(output["dtype"])
    if "dtype_named" in output:
        return values[output["dtype_named"]]
    source = values.get(output["dtype_of"])
    if source is None:
        return None
    is_statistic = output.get("statistic") and values.get(output.get("statistic_if", ""), True)
    names = [dtype_name(tensor) for tensor in (source if isinstance(source, list | tuple) else [source])]
    if isinstance(source, list | tuple) or is_statistic:
        return "fp64" if "fp64" in names else "fp32"
    return names[0]


class Sizes(NamedTuple):
    """Sizes of the scores that a mask applies to."""

    batch: int
    heads: int
    queries: int
    keys: int


def form_of(what: str, shape: tuple[int, ...], is_integers: bool, sizes: Sizes) -> str:
    """What the dimensions of an attention mask are: "keys" for [batch, keys], "last" for the last of four.

    Two dimensions are [batch, keys], a mask of keys for all queries, or [queries, keys], for all of the batch. Where
    batch and queries are the same number, integers are [batch, keys] and the others are refused. Three dimensions are
    [heads, queries, keys], refused where they could be [batch, queries, keys]. Four are [batch, heads, queries, keys].
    Sizes of 1 are for all.
    """
    batch, heads, queries, _ = sizes
    if len(shape) == 4:
        return "last"
    if len(shape) == 3:
        if shape[0] == batch == heads > 1:
            raise ValueError(
                f"{what}: attention_mask has shape {list(shape)}, and batch and heads are both {batch}; give "
                "mask[None] where its first dimension is heads, mask[:, None] where it is the batch"
            )
        if not fits(shape[0], heads):
            raise ValueError(
                f"{what}: attention_mask has shape {list(shape)}; three dimensions are [heads, queries, keys] with "
                f"{heads} heads. Give mask[:, None] where the first is the batch, or {forms(sizes)}"
            )
        return "last"
    if len(shape) != 2:
        raise ValueError(f"{what}: attention_mask has shape {list(shape)}; give {forms(sizes)}")
    of_batch, of_queries = shape[0] == batch, shape[0] == queries
    if is_integers:
        of_queries = False
    if of_batch and of_queries and batch > 1:
        raise ValueError(
            f"{what}: attention_mask has shape {list(shape)}, and batch and queries are both {batch}; give "
            "mask[:, None, None, :] where it is a padding mask [batch, keys], mask[None, None] where it is [queries, "
            "keys]"
        )
    if of_batch or shape[0] == 1:
        return "keys"
    if of_queries:
        return "last"
    raise ValueError(f"{what}: attention_mask has shape {list(shape)}; give {forms(sizes)}")


def fits(size: int, wanted: int) -> bool:
    """Not `size in (1, wanted)`, which a compiler with symbolic sizes takes for false."""
    return size == 1 or size == wanted


def forms(sizes: Sizes) -> str:
    batch, heads, queries, keys = sizes
    return (
        f"[batch, keys] = [{batch}, {keys}], [queries, keys] = [{queries}, {keys}] (not of integers), or "
        f"[batch, heads, queries, keys] = [{batch}, {heads}, {queries}, {keys}] with 1 for all"
    )


def block_pair(what: str, block_size: int | tuple[int, int]) -> tuple[int, int]:
    """Sizes of queries and of keys; one number stands for both."""
    queries, keys = (block_size, block_size) if isinstance(block_size, int) else block_size
    if queries < 1 or keys < 1:
        raise ValueError(f"{what}: blocks are {queries} by {keys}; both sizes must be at least 1")
    return int(queries), int(keys)


def window_sides(what: str, window: int | tuple[int, int] | None) -> tuple[int, int]:
    """How many keys are seen on the left and on the right; one number stands for both, -1 is unbounded."""
    if window is None:
        return -1, -1
    if isinstance(window, int):
        return window, window
    if len(window) != 2:
        raise ValueError(f"{what}: window is {window!r}; it must be (left, right), or one number for both")
    return window


def selection_blocks(block_size: int | tuple[int, int], layout: str, key_parts: int) -> tuple[int, int]:
    """The blocks of select_blocks, with its other arguments checked."""
    if layout not in ("bhsd", "bshd"):
        raise ValueError(f'select_blocks: layout is "{layout}"; it is "bhsd" or "bshd"')
    queries, keys = block_pair("select_blocks", block_size)
    if key_parts < 1 or keys % key_parts:
        raise ValueError(f"select_blocks: a block of {keys} keys is cut into {key_parts} parts; use a divisor of it")
    return queries, keys


def longest(what: str, shape: Sequence[int], bound: int | None) -> int:
    """The bound of packed sequences, of tensors of this shape: lists have its length, not that of all tokens."""
    if len(shape) != 3:
        raise ValueError(
            f"{what}: cu_seqlens are given and a tensor has shape {list(shape)}; pack it as [tokens, heads, size]"
        )
    if bound is None:
        raise ValueError(
            f"{what}: cu_seqlens are given without the longest sequence; give max_seqlen_q and max_seqlen_k"
        )
    if not 0 <= bound < 2**31:
        raise ValueError(f"{what}: the longest sequence has {bound} tokens; give a length from 0 to 2^31 - 1")
    return bound
