"""The names of a tensor's dimensions, and how vmap's axis becomes one of a call's own.

Names come from the op's list of fields, or from the tables below where it says none. "..." stands for any leading ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._shape_rules import declared, picked_shape

Array = jax.Array

_ATTENTION = {
    "bias": {4: "batch heads queries keys"},
    "mask": {4: "batch heads queries keys"},
    "query_segment_ids": {2: "batch queries"},
    "key_segment_ids": {2: "batch keys"},
    "key_lengths": {1: "batch"},
    "alibi_slopes": {1: "heads", 2: "batch heads"},
}
_QUERY = {3: "... sequence heads size", 4: "batch sequence heads size"}
_KEY = {3: "... sequence key_heads size", 4: "batch sequence key_heads size"}
_TABLE = {2: "positions width", 3: "batch sequence width"}
_ROPE = {
    **{"query": _QUERY, "grad_query": _QUERY, "x": _QUERY, "grad_output": _QUERY},
    **{"key": _KEY, "grad_key": _KEY, "cos": _TABLE, "sin": _TABLE},
    "weight": {1: "size"},
    "inverse_frequencies": {1: "pairs"},
    "positions": {1: "sequence", 2: "batch sequence"},
}
_TABLES = {"attention": _ATTENTION, "rope": _ROPE, "norm_rope": _ROPE}


class Dimensions:
    """Names of the dimensions of one op's tensors, for these arguments: arrays, options and flags by name."""

    def __init__(self, op: str, values: Mapping[str, Any]) -> None:
        declaration = declared()[op]
        self.fields = {field["name"]: field for field in (*declaration["arguments"], *declaration["outputs"])}
        self.choices = {name: one["choices"].split() for name, one in self.fields.items() if "choices" in one}
        self.values = {name: one.get("default") for name, one in self.fields.items()} | dict(values)
        self.table = _TABLES.get(op.removesuffix("_forward").removesuffix("_backward"), {})

    def field(self, name: str) -> dict[str, Any]:
        """The field whose shape this one has."""
        field: dict[str, Any] = self.fields[name]
        while "like" in field:
            field = self.fields[field["like"]]
        return field

    def words(self, name: str, rank: int) -> list[Any]:
        """One name for each dimension, perhaps "..." for several; empty where nothing says them."""
        field = self.field(name)
        if "shapes" in field:
            return list(picked_shape(field, self.values, self.choices))
        found = self.table.get(field["name"], {}).get(rank, "").split()
        if self.table is _ROPE and self.values.get("heads_first") and "sequence" in found and "size" in found:
            at = found.index("sequence")
            found[at], found[at + 1] = found[at + 1], found[at]
        return found


class _Part(NamedTuple):
    """What vmap does with one array."""

    is_mapped: bool
    folds: bool
    batch: int  # that the array is spread to before it is folded; 0: as it is


def folded(
    op: str, names: Sequence[str], values: Mapping[str, Any], size: int, mapped: Sequence[bool], arrays: Sequence[Array]
) -> Callable[[Callable[..., dict[str, Array]]], dict[str, Array]] | None:
    """(run) -> outputs of one call for all samples; None where samples need a call each.

    Shapes that begin with "..." take vmap's axis there, those that begin with "batch" have it multiplied into that
    dimension. An operand that all samples share is passed once. Random numbers and score functions see an element's
    position, so a sample has its own call's only where it is its own call.

    Args:
        names: of the arrays, a list's repeated. values: the call's arguments by name, options included.
    """
    if "seed" in names or values.get("score_mod") or values.get("mask_mod"):
        return None
    dimensions = Dimensions(op, values)
    ranks = [_rank(array) - is_mapped for array, is_mapped in zip(arrays, mapped)]
    words = [dimensions.words(name, rank) for name, rank in zip(names, ranks)]
    own_batch = {
        name: array.shape[1 if is_mapped else 0]
        for name, array, is_mapped, one in zip(names, arrays, mapped, words)
        if one and one[0] == "batch"
    }
    batch = max(own_batch.values(), default=0)
    outputs = _computed(op, values, dimensions, dict(zip(names, words)))
    fronts = {one[0] if one else None for one in outputs.values()}
    if len(fronts) != 1:
        return None
    (front,) = fronts
    if front not in ("...", "batch"):
        return None
    parts = []
    for name, is_mapped, one in zip(names, mapped, words):
        own = own_batch.get(name, 0)
        folds = bool(one) and one[0] == front
        if folds and front == "batch" and own == 1 != batch and not is_mapped:
            folds = False  # it serves every sample as it is
        if is_mapped and not folds:
            return None
        if not folds and not is_mapped and (not one or (one[0] == "batch" and own != 1)):
            return None  # nothing says what its dimensions are
        parts.append(_Part(is_mapped, folds, batch if folds and own == 1 != batch else 0))
    for name in outputs:  # a gradient of an array that serves several samples, or several of a batch, is a sum
        source = dimensions.field(name)["name"]
        if "like" in dimensions.fields[name] and source in names:
            part = parts[list(names).index(source)]
            if not part.folds or part.batch:
                return None

    def run_folded(run: Callable[..., dict[str, Array]]) -> dict[str, Array]:
        made = run(*(_moved(array, part, size, front == "batch") for array, part in zip(arrays, parts)))
        return {
            name: one if front == "..." and name in outputs else one.reshape(size, one.shape[0] // size, *one.shape[1:])
            for name, one in made.items()
        }

    return run_folded


def _moved(array: Array, part: _Part, size: int, into_batch: bool) -> Array:
    if not part.folds:
        return array
    if not part.is_mapped:
        array = jnp.broadcast_to(array, (size, *array.shape))
    if part.batch:
        array = jnp.broadcast_to(array, (size, part.batch, *array.shape[2:]))
    return array.reshape(-1, *array.shape[2:]) if into_batch else array


def _rank(array: Any) -> int:
    """Of the array as the op sees it: pairs of words are 64-bit integers."""
    rank: int = array.ndim
    return rank - 1 if array.dtype == jnp.uint32 else rank


def _computed(
    op: str, values: Mapping[str, Any], dimensions: Dimensions, given: Mapping[str, list[Any]]
) -> dict[str, list[Any]]:
    """Names of the dimensions of the outputs that this call computes; one that has no elements does not count."""
    found = {}
    for output in declared()[op]["outputs"]:
        source = dimensions.field(output["name"])
        is_absent = (
            not all(values.get(flag) for flag in output.get("wanted", "").split())
            or ("when" in output and dimensions.values.get(output["when"]) is None)
            or ("like" in output and source["name"] not in given)
            or ("row" in output and not values.get(output["row"][1]))
        )
        words = given.get(source["name"], []) if "like" in output else dimensions.words(output["name"], 0)
        if not is_absent and words[:1] != [0]:
            found[output["name"]] = words
    return found
