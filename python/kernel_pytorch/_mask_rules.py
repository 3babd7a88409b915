"""What the dimensions of an attention mask mean, for every front end.

Shape: two dimensions are [batch, keys], a mask of keys for all queries, or [queries, keys], for all of the batch. Where
batch and queries are the same number, integers are [batch, keys] and the others are refused. Three dimensions are
[heads, queries, keys], refused where they could be [batch, queries, keys]. Four are [batch, heads, queries, keys].
Sizes of 1 are for all.
"""

from __future__ import annotations

from typing import NamedTuple


class Sizes(NamedTuple):
    """Sizes of the scores that a mask applies to."""

    batch: int
    heads: int
    queries: int
    keys: int


def form_of(what: str, shape: tuple[int, ...], is_integers: bool, sizes: Sizes) -> str:
    """The form: "keys" for [batch, keys]; "last" where its dimensions are the last of [batch, heads, queries, keys]."""
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
