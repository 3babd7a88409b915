"""Which places of a sequence a member of a group holds, and which keys a run of queries sees. No communication."""

from __future__ import annotations

import bisect
import itertools
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


class Join(NamedTuple):
    """All pairs of some pieces as one part: row r of `queries` sees row k of `keys` where k <= r + diagonal, or all."""

    queries: Piece
    keys: Piece
    diagonal: int | None


def join(bounds: Bounds, queries: list[Piece], keys: list[Piece]) -> Join | None:
    """All pairs as one part, rows counted as members hold them; None where no diagonal says who sees whom.

    A zigzag ring's own keys are its causal square; of later members its second run sees all, of earlier ones both runs
    see the first.
    """
    if bounds.left is not None:
        return None
    seen = [(one, other) for one in queries for other in keys if _has_work(bounds, one, other)]
    rows = [one for one in queries if any(one == pair[0] for pair in seen)]
    columns = [one for one in keys if any(one == pair[1] for pair in seen)]
    if not seen or not _are_neighbours(rows) or not _are_neighbours(columns):
        return None
    found = [_diagonal(bounds, *pair, rows[0].start, columns[0].start) for pair in seen]
    for diagonal in (None, *dict.fromkeys(found)):
        joined = Join(_run(rows), _run(columns), diagonal)
        if all(_agrees(bounds, joined, one, other) for one in rows for other in columns):
            return joined
    return None


def _agrees(bounds: Bounds, joined: Join, queries: Piece, keys: Piece) -> bool:
    """Whether these pieces see of each other in the join what they see by their places."""
    first, begin = queries.start - joined.queries.start, keys.start - joined.keys.start
    last, end = first + queries.length - 1, begin + keys.length - 1
    diagonal = end if joined.diagonal is None else joined.diagonal
    if bounds.are_kept(queries, keys.first, keys.end):
        return end <= first + diagonal
    if not _has_work(bounds, queries, keys):
        return begin > last + diagonal
    return joined.diagonal == _diagonal(bounds, queries, keys, joined.queries.start, joined.keys.start)


def _has_work(bounds: Bounds, queries: Piece, keys: Piece) -> bool:
    begin, end = bounds.keys_seen(queries, keys)
    return begin < end


def _diagonal(bounds: Bounds, queries: Piece, keys: Piece, first_row: int, first_key: int) -> int:
    """The last key that query row 0 sees, both counted from the first rows, if these pieces went on."""
    right = bounds.right or 0
    return (queries.first - queries.start + first_row) - (keys.first - keys.start + first_key) + bounds.offset + right


def _are_neighbours(pieces: list[Piece]) -> bool:
    return all(one.start + one.length == other.start for one, other in itertools.pairwise(pieces))


def _run(pieces: list[Piece]) -> Piece:
    return Piece(0, sum(piece.length for piece in pieces), pieces[0].start)


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
