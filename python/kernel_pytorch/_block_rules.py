"""Blocks of attention's scores: what both front ends ask of their sizes. Free of any framework."""

from __future__ import annotations

from collections.abc import Sequence


def pair(what: str, block_size: int | tuple[int, int]) -> tuple[int, int]:
    """Sizes of queries and of keys; one number stands for both."""
    queries, keys = (block_size, block_size) if isinstance(block_size, int) else block_size
    if queries < 1 or keys < 1:
        raise ValueError(f"{what}: blocks are {queries} by {keys}; both sizes must be at least 1")
    return int(queries), int(keys)


def selection_blocks(block_size: int | tuple[int, int], layout: str, key_parts: int) -> tuple[int, int]:
    """The blocks of select_blocks, with its other arguments checked."""
    if layout not in ("bhsd", "bshd"):
        raise ValueError(f'select_blocks: layout is "{layout}"; it is "bhsd" or "bshd"')
    queries, keys = pair("select_blocks", block_size)
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
