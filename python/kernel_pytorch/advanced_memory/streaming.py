"""Sequences that come in pieces: whole segments for a model that carries a state, and keys and values that grow."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

__all__ = ["IncrementalSequenceCache", "StreamingSequenceProcessor"]


class _Streams(Protocol):
    def stream(self, x: Tensor, state: Any = None) -> tuple[Tensor, Any]: ...


class StreamingSequenceProcessor:
    """Gives a model segments of `buffer_size` places however long the pieces are that come.

    Args:
        model: has `stream(x, state) -> (output, state)`, as `SegmentedAttentionMemory`.
        buffer_size: places that are gathered before the model is called.
    """

    def __init__(self, model: _Streams, buffer_size: int = 1024) -> None:
        if not callable(getattr(model, "stream", None)):
            raise TypeError(
                f"StreamingSequenceProcessor: the model is {type(model).__name__}, which has no stream(x, state); "
                "without a state it would see every segment alone"
            )
        if buffer_size < 1:
            raise ValueError(f"StreamingSequenceProcessor: buffer_size is {buffer_size}; use 1 or more")
        self.model, self.buffer_size = model, buffer_size
        self._waiting: list[Tensor] = []
        self._state: Any = None

    def process(self, x: Tensor) -> Tensor | None:
        """The output of all segments that x [batch, places, ...] completes; None while there is none."""
        places = sum(part.shape[1] for part in self._waiting) + x.shape[1]
        whole = places // self.buffer_size * self.buffer_size
        if whole == 0:
            self._waiting.append(x)
            return None
        gathered = torch.cat([*self._waiting, x], 1)
        self._waiting = [gathered[:, whole:]] if whole < places else []
        return self._output(gathered[:, :whole])

    def flush(self) -> Tensor | None:
        """The output of what waits, shorter than a segment; the next piece begins a new sequence."""
        rest = self._output(torch.cat(self._waiting, 1)) if self._waiting else None
        self.reset()
        return rest

    def reset(self) -> None:
        """Forgets what waits and what is carried: the next piece begins a new sequence."""
        self._waiting, self._state = [], None

    def _output(self, x: Tensor) -> Tensor:
        outputs = []
        for segment in torch.split(x, self.buffer_size, 1):
            output, self._state = self.model.stream(segment, self._state)
            outputs.append(output)
        return torch.cat(outputs, 1)


class IncrementalSequenceCache:
    """The last `max_length` keys and values of a sequence that grows, without copying all of them for every place.

    Memory is taken for twice as many places as there are, up to twice max_length; only when it is full are the kept
    ones moved to its front.
    """

    def __init__(self, max_length: int = 10000) -> None:
        if max_length < 1:
            raise ValueError(f"IncrementalSequenceCache: max_length is {max_length}; use 1 or more")
        self.max_length = max_length
        self._memory: tuple[Tensor, Tensor] | None = None
        self._begin = self._end = 0

    def __len__(self) -> int:
        return self._end - self._begin

    @torch.no_grad()
    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """All kept keys and values, [batch, places, ...], with these at their end; views that the next call changes."""
        if key.shape[:2] != value.shape[:2]:
            raise ValueError(
                f"IncrementalSequenceCache: key is {tuple(key.shape)}, value {tuple(value.shape)}; batch and places "
                "must be the same"
            )
        if self._memory is not None and self._memory[0].shape[0] != key.shape[0]:
            raise ValueError(
                f"IncrementalSequenceCache: key has {key.shape[0]} sequences, the cache {self._memory[0].shape[0]}; "
                "reset() begins anew"
            )
        new = [tensor[:, -self.max_length :] for tensor in (key, value)]
        added = new[0].shape[1]
        kept = min(len(self), self.max_length - added)
        self._begin = self._end - kept
        if self._memory is None or self._end + added > self._memory[0].shape[1]:
            places = min(2 * (kept + added), 2 * self.max_length)
            made = [tensor.new_empty(tensor.shape[0], places, *tensor.shape[2:]) for tensor in new]
            if self._memory is not None:
                for target, source in zip(made, self._memory, strict=True):
                    target[:, :kept] = source[:, self._begin : self._end]
            self._memory, self._begin, self._end = (made[0], made[1]), 0, kept
        for target, source in zip(self._memory, new, strict=True):
            target[:, self._end : self._end + added] = source
        self._end += added
        keys, values = (memory[:, self._begin : self._end] for memory in self._memory)
        return keys, values

    def reset(self) -> None:
        """A new sequence; the memory is kept."""
        self._begin = self._end = 0
