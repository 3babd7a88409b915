"""Block masks: which tiles of attention's scores exist. Kernels skip the others."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ._call import Array, call
from ._mods import Mod


class BlockMask(NamedTuple):
    """Lists of tiles, as `block_mask` and `create_block_mask` make them."""

    lists: tuple[Array, ...]
    block_size: tuple[int, int]
    mask_mod: Mod | None = None


jax.tree_util.register_pytree_node(
    BlockMask,
    lambda mask: (mask.lists, (mask.block_size, mask.mask_mod)),
    lambda static, lists: BlockMask(tuple(lists), *static),
)


def block_mask(blocks: Array, block_size: int | tuple[int, int] = 128, mask_mod: Mod | None = None) -> BlockMask:
    """The lists of a map of tiles.

    Args:
        blocks: [batch, heads, rows, columns], batch and heads 1 where shared: bool, or int8 with 0 for an empty tile, 1
            for one where mask_mod is asked, 2 for a full one, where it holds everywhere.
        block_size: of queries and of keys.
        mask_mod: (batch, head, query, key) -> whether a score in a tile of 1 is kept.
    """
    blocks = jnp.asarray(blocks)
    if blocks.dtype != jnp.bool_:
        blocks = blocks.astype(jnp.int8)
    size = (block_size, block_size) if isinstance(block_size, int) else (int(block_size[0]), int(block_size[1]))
    has_full = blocks.dtype != jnp.bool_
    made = call("block_list", {"map": blocks}, wanted=("rows", "columns", *(("full",) if has_full else ())))
    names = [f"{line}_{what}" for line in ("row", "column") for what in ("counts", "blocks")]
    if has_full:
        names += [f"full_{name}" for name in names]
    return BlockMask(tuple(made[name] for name in names), size, mask_mod)


def create_block_mask(
    mask_mod: Mod,
    batch: int | None,
    heads: int | None,
    queries: int,
    keys: int,
    block_size: int | tuple[int, int] = 128,
) -> BlockMask:
    """The block mask of a mask function, found by asking it for every pair of positions.

    Args:
        mask_mod: (batch, head, query, key) -> whether the score is kept.
        batch, heads: None where the function does not depend on it.
    """
    size = (block_size, block_size) if isinstance(block_size, int) else block_size
    asked: Any = mask_mod
    for axes in ((None, None, None, 0), (None, None, 0, None), (None, 0, None, None), (0, None, None, None)):
        asked = jax.vmap(asked, axes)
    kept = asked(*(jnp.arange(count) for count in (batch or 1, heads or 1, queries, keys)))
    rows, columns = -(-queries // size[0]), -(-keys // size[1])
    padding = [(0, 0), (0, 0), (0, rows * size[0] - queries), (0, columns * size[1] - keys)]

    def tiles(fill: bool) -> Any:
        whole = jnp.pad(kept, padding, constant_values=fill)
        return whole.reshape(*whole.shape[:2], rows, size[0], columns, size[1])

    some, every = tiles(False).any((3, 5)), tiles(True).all((3, 5))
    return block_mask(jnp.where(every, 2, some).astype(jnp.int8), size, mask_mod)


def masked(score_mod: Mod | None, mask_mod: Mod) -> Mod:
    """A score function that is -inf where the mask function does not keep: a mask that holds in full tiles too."""

    def changed(score: Any, batch: Any, head: Any, query: Any, key: Any, *captured: Any) -> Any:
        if score_mod is not None:
            score = score_mod(score, batch, head, query, key, *captured)
        return jnp.where(mask_mod(batch, head, query, key, *captured), score, -jnp.inf)

    return changed
