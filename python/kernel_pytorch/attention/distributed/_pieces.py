"""Which places of a sequence a member of a group holds, and which keys a run of queries sees. No communication."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import NamedTuple

SCHEDULES = ("ring", "zigzag", "allgather", "ulysses")
_KEY_STEP = 128  # keys are cut off in steps of this: parts begin where tiles of kernels do


class Piece(NamedTuple):
    """A run of neighbours: places [first, first + length) of the whole, from row `start` of what its member holds."""

    first: int
    length: int
    start: int

    @property
    def end(self) -> int:
        return self.first + self.length


def pieces_of(schedule: str, rank: int, members: int, rows: int) -> list[Piece]:
    """What member `rank` holds: one run in order of rank, or for zigzag run `rank` from both ends of the sequence."""
    if schedule != "zigzag":
        return [Piece(rank * rows, rows, 0)]
    half = rows // 2
    return [Piece(rank * half, half, 0), Piece((2 * members - 1 - rank) * half, half, half)]


class Bounds(NamedTuple):
    """left <= k - (q + offset) <= right; None is unbounded."""

    left: int | None
    right: int | None
    offset: int

    def keys_seen(self, queries: Piece, keys: Piece) -> tuple[int, int]:
        """The keys among these that any of the queries may see; none where the end is not behind the beginning."""
        begin, end = keys.first, keys.end
        if self.right is not None:
            end = min(end, queries.end - 1 + self.offset + self.right + 1)
        if self.left is not None:
            begin = max(begin, queries.first + self.offset + self.left)
            begin = keys.first + (begin - keys.first) // _KEY_STEP * _KEY_STEP
        return begin, end if queries.length else begin

    def are_kept(self, queries: Piece, begin: int, end: int) -> bool:
        """Whether all of the queries see all of the keys [begin, end)."""
        nearest = begin - (queries.end - 1) - self.offset
        furthest = end - 1 - queries.first - self.offset
        is_right = self.right is None or furthest <= self.right
        return is_right and (self.left is None or nearest >= self.left)


class Packs:
    """Sequences one behind another, of which a piece may hold parts of several."""

    def __init__(self, starts: Sequence[int]) -> None:
        self.starts = list(starts)

    def share_a_sequence(self, one: Piece, other: Piece) -> bool:
        first, second = self._sequences(one), self._sequences(other)
        return max(first[0], second[0]) <= min(first[1], second[1])

    def _sequences(self, piece: Piece) -> tuple[int, int]:
        count = len(self.starts) - 1
        first = bisect.bisect_right(self.starts, piece.first) - 1
        last = min(bisect.bisect_right(self.starts, piece.end - 1), count) - 1
        return first, last
