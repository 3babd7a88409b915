"""A graph on the caller's own tensors: calls that come back with the same memory need no copies of their inputs.

It reads what is in that memory when it is replayed, as the call itself would, and is replayed only for tensors that lie
there, in the same type, sizes and strides: who passes others has the graph of the shape, with its copies. One is kept,
of the call that came several times in a row.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .addresses import Addresses
from .capturing import Looked
from .results import CONSTANTS, Results, is_configuration

__all__ = ["Binder", "BoundGraph", "key_of", "places_of"]

_CALLS_IN_A_ROW = 4  # without a graph of their own, before one is captured
_MOST_CAPTURES = 8  # callers that move on every few calls have the graph with copies
_PLAIN = (int, float, bool, str, type(None))


def places_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
    """Where a call's tensors lie and how, and its plain values; None of a call with anything else, or whose result may
    need gradients or is being recorded."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return None
    found: list[Any] = [len(args), *kwargs]
    for leaf in (*args, *kwargs.values()):
        if type(leaf) is Tensor:
            if leaf.is_inference():
                return None
            found.append((leaf.data_ptr(), leaf.shape, leaf.stride(), leaf.dtype, leaf.device))
        elif type(leaf) in _PLAIN:
            found.append((type(leaf), leaf))
        else:
            return None
    return tuple(found)


def key_of(leaves: list[Any], spec: Any) -> Hashable | None:
    """What a graph is kept under; None of a call with an argument that has no hash or may hold state (a cache): a
    capture runs a call many times, and would leave its traces there."""
    parts: list[Any] = [str(spec)]
    for leaf in leaves:
        if not isinstance(leaf, (Tensor, *CONSTANTS)) and not is_configuration(leaf):
            return None
        parts.append((tuple(leaf.shape), leaf.dtype, leaf.device) if isinstance(leaf, Tensor) else (type(leaf), leaf))
    key = tuple(parts)
    try:
        hash(key)
    except TypeError:
        return None
    return key


@dataclass
class BoundGraph:
    """A graph, the call that it is for, and its memory."""

    places: tuple[Any, ...]
    ambient: Any
    graph: Any
    output: Any
    results: Results
    looked: Looked  # with tensors that the graph reads
    addresses: Addresses
    device: torch.device
    bytes: int

    def serves(self, places: tuple[Any, ...], ambient: Any) -> bool:
        return self.places == places and self.ambient == ambient and self.addresses.hold()


class Binder:
    """Knows the graph, and counts calls until one is worth having."""

    def __init__(self) -> None:
        self.bound: BoundGraph | None = None
        self.refusal = ""
        self._last: Any = None
        self._calls = 0
        self._captures = 0

    def find(self, places: tuple[Any, ...], ambient: Any) -> BoundGraph | None:
        if self.bound is None or not self.bound.serves(places, ambient):
            return None
        self._last, self._calls = None, 0
        return self.bound

    def is_due(self, places: tuple[Any, ...], ambient: Any) -> bool:
        """Counts a call; whether it came often enough, which counts as a capture."""
        self._calls = self._calls + 1 if self._last == (places, ambient) else 1
        self._last = (places, ambient)
        if self.refusal or self._calls < _CALLS_IN_A_ROW or self._captures == _MOST_CAPTURES:
            return False
        self._calls, self._captures = 0, self._captures + 1
        return True

    def clear(self) -> None:
        self.bound, self._last, self._calls = None, None, 0
