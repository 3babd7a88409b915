"""Which pieces of a ring are one part: what a join sees is what its pieces see by their places."""

from __future__ import annotations

import itertools

import pytest
from kernel_pytorch.attention.distributed._pieces import Bounds, Join, Piece, join, pieces_of


def _seen(bounds: Bounds, queries: list[Piece], keys: list[Piece]) -> set[tuple[int, int]]:
    """(row, row) of every pair that sees each other, as members hold them."""
    right = bounds.right
    return {
        (one.start + i, other.start + k)
        for one, other in itertools.product(queries, keys)
        for i, k in itertools.product(range(one.length), range(other.length))
        if right is None or other.first + k <= one.first + i + bounds.offset + right
    }


def _seen_joined(joined: Join) -> set[tuple[int, int]]:
    return {
        (joined.queries.start + i, joined.keys.start + k)
        for i, k in itertools.product(range(joined.queries.length), range(joined.keys.length))
        if joined.diagonal is None or k <= i + joined.diagonal
    }


@pytest.mark.parametrize("schedule", ["ring", "zigzag"])
@pytest.mark.parametrize("right", [None, 0, 2])
@pytest.mark.parametrize("offset", [0, 3, -3])
def test_a_join_sees_what_its_pieces_see(schedule: str, right: int | None, offset: int) -> None:
    bounds = Bounds(None, right, offset)
    for members, rows in itertools.product((2, 3, 8), (2, 4, 10)):
        for one, other in itertools.product(range(members), repeat=2):
            queries, keys = (pieces_of(schedule, member, members, rows) for member in (one, other))
            joined, seen = join(bounds, queries, keys), _seen(bounds, queries, keys)
            if joined is not None:
                assert _seen_joined(joined) == seen
            elif offset == 0 and right != 2:
                assert not seen  # every step of a causal or full ring is one part


def test_a_causal_zigzag_ring_has_equal_parts() -> None:
    members, rows = 8, 32
    causal = Bounds(None, 0, 0)
    for one, other in itertools.product(range(members), repeat=2):
        joined = join(causal, *(pieces_of("zigzag", member, members, rows) for member in (one, other)))
        assert joined is not None
        pairs = joined.queries.length * joined.keys.length
        assert pairs == (rows * rows if one == other else rows * rows // 2)
        assert (joined.diagonal is not None) == (one == other)


def test_a_window_is_not_joined() -> None:
    assert join(Bounds(-5, 0, 0), *(pieces_of("zigzag", 0, 2, 8) for _ in range(2))) is None
