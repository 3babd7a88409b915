"""Which blocks of scores a sparse attention layer computes: patterns that a shape decides, and the gate of a learned
one. Content decides in functional.select_blocks.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .._ops.block_list import pool_packed, sequence_lengths
from ..functional import BlockLists, block_lists, chunk_mean_pool, select_by_scores


class SparsePattern(enum.Enum):
    """How blocks are chosen. Each row of blocks keeps its own place, and as many as the sparsity leaves."""

    RANDOM = "random"  # any others, of each head its own
    BLOCK_SPARSE = "block_sparse"  # the first block and the neighbours, and random ones (BigBird)
    STRIDED = "strided"  # the neighbours, and blocks at even distances from its own on (Sparse Transformer)
    LOCAL_GLOBAL = "local_global"  # the first block, and a window (Longformer)
    DYNAMIC_THRESHOLD = "dynamic_threshold"  # those in which queries and keys agree best
    LEARNED = "learned"  # those that a trained gate opens


@dataclasses.dataclass(frozen=True)
class Pack:
    """Sequences one after the other: where each begins, on the device, and how long the longest is."""

    cu_seqlens: Tensor
    longest: int

    def lengths(self) -> Tensor:
        return sequence_lengths(self.cu_seqlens)

    def positions(self, tokens: int) -> Tensor:
        """The position of each token in its sequence."""
        ends = self.cu_seqlens[1:].contiguous()
        places = torch.arange(tokens, device=ends.device, dtype=ends.dtype)
        sequences = torch.searchsorted(ends, places, right=True).clamp(max=max(ends.shape[0] - 1, 0))
        return (places - self.cu_seqlens[sequences]).clamp(max=max(self.longest - 1, 0))

    def visible_blocks(self, block: int, causal: bool) -> Tensor:
        """bool [sequences, 1, rows, columns]: the blocks that a sequence has and causality leaves."""
        places = torch.arange(-(-self.longest // block), device=self.cu_seqlens.device)
        inside = places * block < self.lengths()[:, None]
        visible = inside[:, :, None] & inside[:, None, :]
        return (visible & (places <= places[:, None]) if causal else visible)[:, None]


# Most blocks of a sequence that the default block size makes: 32 rows tell more than 4, and large blocks run faster.
_LEAST_BLOCKS, _SMALL_BLOCK, _LARGEST_BLOCK = 32, 16, 128
_PRECISION = 0.01  # of sparsity, below which a larger block is worth more


def usual_block(queries: int, keys: int, sparsity: float, causal: bool, reached: Callable[[int], float]) -> int:
    """The largest power of two up to 128 that cuts the sequence into 32 blocks, or into 16 tokens each where it is
    short; smaller where rows must keep more of such blocks than the sparsity leaves, or one block is a large share of
    all. reached(block) is the sparsity that they can have.
    """
    block = _LARGEST_BLOCK
    while block > _SMALL_BLOCK and keys < _LEAST_BLOCKS * block:
        block //= 2
    while block > 1 and sparsity > 0.0:
        is_coarse = keys < _LEAST_BLOCKS * block and visible_blocks(queries, keys, block, causal) < 1 / _PRECISION
        if not is_coarse and reached(block) >= sparsity - _PRECISION:
            break
        block //= 2
    return block


def reachable_sparsity(
    queries: int, keys: int, block: int, *, causal: bool, sinks: int, local: int, wanted: float
) -> float:
    """The share of visible blocks that no row must keep; `wanted` where it is at least that for certain."""
    columns = -(-keys // block)
    most_kept = sinks + 1 + 2 * local  # of a row; causal rows see half of the columns on average
    if queries == keys and most_kept <= (1 - wanted) * columns / (2 if causal else 1):
        return wanted
    return _counted_sparsity(queries, keys, block, causal, sinks, local)


@functools.lru_cache(maxsize=256)
def _counted_sparsity(queries: int, keys: int, block: int, causal: bool, sinks: int, local: int) -> float:
    scores = torch.zeros(1, 1, -(-queries // block), -(-keys // block))
    lists = select_by_scores(
        scores, queries, keys, sparsity=1.0, block_size=block, causal=causal, sinks=sinks, local=local, gradients=False
    )
    return 1 - int(lists.counts().sum()) / max(visible_blocks(queries, keys, block, causal), 1)


# What torch.compiler.assume_constant_result sets, without importing the compiler: the answer depends on sizes alone.
_counted_sparsity._dynamo_marked_constant = True  # type: ignore[attr-defined]


def visible_blocks(queries: int, keys: int, block: int, causal: bool) -> int:
    """Blocks of one head that causality leaves."""
    rows, columns = -(-queries // block), -(-keys // block)
    if not causal:
        return rows * columns
    last = [min((row + 1) * block, queries) - 1 + keys - queries for row in range(rows)]
    return sum(min(max(place // block + 1, 0), columns) for place in last)


class Computed(NamedTuple):
    """What a forward was given to compute."""

    lists: BlockLists
    batch: int
    queries: int
    keys: int
    block: int
    pack: Pack | None

    def blocks(self, heads: int, causal: bool) -> dict[str, int]:
        """Counts of visible and of computed blocks; waits for the device."""
        if self.pack is None:
            counts, batch_heads = self.lists.counts(), self.batch * heads
            total = batch_heads * visible_blocks(self.queries, self.keys, self.block, causal)
            computed = batch_heads // max(counts.shape[0] * counts.shape[1], 1) * int(counts.sum())
        else:  # lists of the longest sequence may name blocks that another does not have
            visible, listed = self.pack.visible_blocks(self.block, causal), self.lists.block_map()
            total, computed = heads * int(visible.sum()), heads // listed.shape[1] * int((visible & listed).sum())
        return {"block_size": self.block, "blocks_total": total, "blocks_computed": computed}


def fixed_lists(
    pattern: SparsePattern,
    queries: int,
    keys: int,
    *,
    heads: int,
    block: int,
    sparsity: float,
    causal: bool,
    sinks: int,
    local: int,
    seed: int,
    device: torch.device,
) -> BlockLists:
    """The lists of a pattern that depends on the shape alone."""
    if pattern is SparsePattern.STRIDED:
        kept = _strided_map(_distances(queries, keys, block), sparsity, causal, local)
        return block_lists(kept[None, None].to(device), block)
    if pattern is SparsePattern.RANDOM:
        sinks = local = 0
    return select_by_scores(
        fixed_scores(pattern, queries, keys, heads=heads, block=block, seed=seed, device=device), queries, keys,
        sparsity=sparsity, block_size=block, causal=causal, sinks=sinks, local=local,
    )  # fmt: skip


def fixed_scores(
    pattern: SparsePattern, queries: int, keys: int, *, heads: int, block: int, seed: int, device: torch.device
) -> Tensor:
    """[1, heads, rows, columns], heads 1 for all: which blocks such a pattern prefers."""
    distance = _distances(queries, keys, block)
    if pattern is SparsePattern.LOCAL_GLOBAL:
        return -distance.abs()[None, None].float().to(device)
    scores = torch.rand(1, heads, *distance.shape, generator=torch.Generator().manual_seed(seed))
    return scores.to(device)


def _distances(queries: int, keys: int, block: int) -> Tensor:
    """The distance of each column from the one that holds the last query of the row, in blocks."""
    rows, columns = -(-queries // block), -(-keys // block)
    places = torch.arange(rows).add(1).mul(block).clamp(max=queries).sub(1).add(keys - queries)
    return places.div(block, rounding_mode="floor")[:, None] - torch.arange(columns)


def _strided_map(distance: Tensor, sparsity: float, causal: bool, local: int) -> Tensor:
    seen = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
    near = seen & (distance.abs() <= local)
    budget = int((1 - sparsity) * int(seen.sum()) + 1e-6)
    low, high = 0.0, 2.0  # shares of evenly spread blocks: the largest that keeps the budget
    for _ in range(48):
        share = (low + high) / 2
        fits = int((near | (seen & _spread(distance, share))).sum()) <= budget
        low, high = (share, high) if fits else (low, share)
    return near | (seen & _spread(distance, low))


def _spread(distance: Tensor, share: float) -> Tensor:
    """Every n-th block from its own on where the share is 1 / n, and as evenly where it is no such number."""
    places = distance.double()
    return (places * share + 1e-6).floor() > ((places - 1) * share + 1e-6).floor()


class SparsityGate(nn.Module):
    """A number for each block, from the means of its queries and keys: open where it is not negative.

    logit = scale * dot(mean query @ query_weight, mean key @ key_weight) + offset, of each head its own. It begins as
    the choice by content that needs no training, and leaves the attention's own projections alone.
    """

    def __init__(
        self, heads: int, size: int, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        eye = torch.eye(size, device=device, dtype=dtype)
        self.query_weight = nn.Parameter(eye.repeat(heads, 1, 1))
        self.key_weight = nn.Parameter(eye.repeat(heads, 1, 1))
        self.offset = nn.Parameter(torch.zeros(heads, 1, 1, device=device, dtype=dtype))

    def forward(self, query: Tensor, key: Tensor, block: int, pack: Pack | None = None) -> Tensor:
        """query [batch, queries, heads, size], key [batch, keys, key heads, size] -> [batch, heads, rows, columns].

        With a pack: [tokens, heads, size] -> [sequences, heads, rows, columns] of the longest.
        """
        heads, size = self.query_weight.shape[:2]

        def pool(x: Tensor) -> Tensor:
            if pack is None:
                return chunk_mean_pool(x.detach(), block).transpose(1, 2)
            return pool_packed(x.detach(), pack.cu_seqlens, pack.longest, block).transpose(1, 2)

        rows, columns = pool(query), pool(key)
        columns = columns.repeat_interleave(heads // columns.shape[1], 1)
        logits = (rows @ self.query_weight) @ (columns @ self.key_weight).transpose(-1, -2)
        return logits * size**-0.5 + self.offset  # type: ignore[no-any-return]
