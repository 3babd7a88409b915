"""What a training step does with memory, measured block by block for the plan (kernel_pytorch/plan/activation_plan.h).

Two passes of the real model, both small: a forward in which nothing of the blocks is saved gives the ops, their times
and how long each storage lives by itself; a step in which the blocks make everything again gives the order in which
backward reads, and what else is alive then. On CUDA the allocator counts, so that workspaces inside ops are seen; on a
CPU the storages that ops return are counted.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ._activations import DECODE, KEEP, RECOMPUTE, BlockCall, BlockTreatment, OpPlan
from ._float8 import code_bytes
from ._meter import Meter

_GROUPS = ("c10d", "_c10d_functional", "c10d_functional")  # of ops that talk to other processes
_DROPOUTS = ("dropout_p", "p")
_WAIT_CYCLES = 400_000  # of a GPU before each op, 0.2 ms: longer than the host needs to queue it


@dataclass
class Made:
    """A storage of a block's forward."""

    bytes: int
    op: int
    place: int  # leaf of the op's result, or of the block's arguments
    inputs: list[int] = field(default_factory=list)
    dies: int = -1  # -1: after the block
    saved: bool = False
    can_recompute: bool = False
    can_move: bool = True
    changed: int = -1  # the last op that wrote to it
    code_bytes: int = 0  # in FP8; 0: not coded


@dataclass
class BlockTrace:
    """One forward of a block with nothing saved."""

    name: str
    ops: list[Any] = field(default_factory=list)
    microseconds: list[float] = field(default_factory=list)
    made: list[Made] = field(default_factory=list)
    bytes: list[int] = field(default_factory=list)  # alive at each op, less the start's
    start: int = 0  # alive when it began

    def signature(self) -> Any:
        return tuple(self.ops), tuple((one.bytes, one.op, one.saved, one.can_recompute) for one in self.made)

    def numbers(self) -> list[int]:
        """Those of `made` that a plan has to know: saved ones, and what they can be made of."""
        wanted: set[int] = set()
        for number in range(len(self.made) - 1, -1, -1):
            one = self.made[number]
            if one.saved or number in wanted:
                wanted.add(number)
                if one.code_bytes:
                    wanted.add(self.codes_of(number))
                elif one.can_recompute:
                    wanted.update(one.inputs)
        return sorted(wanted, key=lambda number: (self.coded(number), number < len(self.made)))

    def codes_of(self, number: int) -> int:
        """The number of the codes of a storage."""
        return len(self.made) + number

    def size_of(self, number: int) -> int:
        """Bytes of a storage, or of codes with their scales."""
        one = self.made[self.coded(number)]
        return one.bytes if number < len(self.made) else one.code_bytes

    def stored_bytes(self, number: int) -> int:
        """As size_of, without scales: those stay on the device."""
        one = self.made[self.coded(number)]
        return one.bytes if number < len(self.made) else one.code_bytes * 32 // 33

    def coded(self, number: int) -> int:
        """The storage itself, or the one that these are the codes of."""
        return number % len(self.made)

    def treatment(self, treatments: dict[int, str], with_codes: bool = True) -> BlockTreatment:
        """For the runtime: by number in `made`."""
        result = BlockTreatment()
        for number, treatment in treatments.items():
            one = self.made[self.coded(number)]
            if number >= len(self.made):
                result.codes[self.coded(number)] = (number, treatment)
                continue
            if treatment == RECOMPUTE and with_codes and one.code_bytes:
                treatment = DECODE
            if one.op < 0:
                result.inputs[one.place] = (number, treatment)
            else:
                result.ops.setdefault(one.op, OpPlan(self.ops[one.op])).outputs[one.place] = (number, treatment)
        return result

    def everything_again(self) -> dict[int, str]:
        """Whatever can be made again is."""
        treatments: dict[int, str] = {}
        needed = {number for number, one in enumerate(self.made) if one.saved}
        for number in range(len(self.made) - 1, -1, -1):
            if number in needed:
                one = self.made[number]
                treatments[number] = RECOMPUTE if one.can_recompute else KEEP
                needed.update(one.inputs if one.can_recompute else ())
        return treatments


class Tracing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The forward in which nothing of the blocks is saved."""

    def __init__(self, meter: Meter) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.traces: list[BlockTrace] = []
        self.outside = 0  # greatest before the first block
        self._meter = meter
        self._block: BlockTrace | None = None
        self._by_storage: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._clocks: list[list[Any]] = []
        self._inputs_seen: dict[int, tuple[weakref.ref[Any], Made]] = {}
        self._outputs_held: dict[int, weakref.ref[Any]] = {}  # that the block which made them needs in backward

    def run(self, name: str, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if not self.traces:
            self.outside = self._meter.greatest()
        block = self._block = BlockTrace(name, start=self._meter.now())
        self._by_storage = {}
        self._clocks.append([])
        for place, leaf in enumerate(pytree.tree_leaves((args, kwargs))):
            if isinstance(leaf, Tensor) and leaf.requires_grad and not leaf.is_leaf:
                self._given(leaf, place)
        with torch.autograd.graph.saved_tensors_hooks(self._pack, _no_unpack):
            output = forward(*args, **kwargs)
        for leaf in pytree.tree_leaves(output):
            if isinstance(leaf, Tensor):  # the next block's input: it is alive anyway
                number = self._number_of(leaf)
                if number is not None and block.made[number].op >= 0:
                    if block.made[number].saved:
                        storage = leaf.untyped_storage()
                        self._outputs_held[storage._cdata] = weakref.ref(storage)
                    block.made[number].saved = block.made[number].can_recompute = block.made[number].can_move = False
        self._block = None
        self.traces.append(block)
        return output

    def _given(self, tensor: Tensor, place: int) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata in self._by_storage:
            return
        made = Made(storage.nbytes(), -1, place, code_bytes=code_bytes(tensor))
        seen = self._inputs_seen.get(storage._cdata)
        if seen is not None and seen[0]() is storage:  # another block has it as well: moving it frees nothing
            made.can_move = seen[1].can_move = False
        held = self._outputs_held.get(storage._cdata)
        if held is not None and held() is storage:  # a tanh holds its result, the next block's input
            made.can_move, made.code_bytes = False, 0
        self._inputs_seen[storage._cdata] = (weakref.ref(storage), made)
        self._add(tensor, made)

    def _add(self, tensor: Tensor, made: Made) -> None:
        block = self._block
        assert block is not None
        storage = tensor.untyped_storage()
        block.made.append(made)

        def died(_: Any) -> None:
            if made.dies < 0 and self._block is block:
                made.dies = len(block.ops)

        self._by_storage[storage._cdata] = (weakref.ref(storage, died), len(block.made) - 1)

    def _number_of(self, tensor: Tensor) -> int | None:
        storage = tensor.untyped_storage()
        known = self._by_storage.get(storage._cdata)
        return known[1] if known is not None and known[0]() is storage else None

    def _pack(self, tensor: Tensor) -> None:
        number = self._number_of(tensor)
        if number is not None and self._block is not None:
            self._block.made[number].saved = True

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        block = self._block
        if block is None:
            result = function(*args, **kwargs)
            self._count(result)
            return result
        self._meter.reset()
        clock = _start(self._meter)
        result = function(*args, **kwargs)
        self._clocks[-1].append(_stop(self._meter, clock))
        self._count(result)
        block.bytes.append(self._meter.greatest() - block.start)
        number = len(block.ops)
        block.ops.append(function)
        read = self._read(function, args, kwargs, number)
        can_recompute = _is_repeatable(function, args, kwargs)
        for place, leaf in enumerate(pytree.tree_leaves(result)):
            if isinstance(leaf, Tensor) and leaf.device.type == self._meter.device.type:
                known = self._number_of(leaf)
                if known is None and not self._is_old(leaf, args, kwargs):
                    made = Made(leaf.untyped_storage().nbytes(), number, place, read, can_recompute=can_recompute)
                    made.code_bytes = code_bytes(leaf)
                    self._add(leaf, made)
        return result

    def _count(self, result: Any) -> None:
        if not self._meter.is_cuda:
            for leaf in pytree.tree_leaves(result):
                if isinstance(leaf, Tensor):
                    self._meter.note(leaf)

    def _is_old(self, tensor: Tensor, args: Any, kwargs: Any) -> bool:
        """A view of an argument that is no activation."""
        storage = tensor.untyped_storage()._cdata
        leaves = pytree.tree_leaves((args, kwargs))
        return any(isinstance(leaf, Tensor) and leaf.untyped_storage()._cdata == storage for leaf in leaves)

    def _read(self, function: Any, args: Any, kwargs: Any, number: int) -> list[int]:
        block = self._block
        assert block is not None
        read: list[int] = []
        for leaf in pytree.tree_leaves((args, kwargs)):
            one = self._number_of(leaf) if isinstance(leaf, Tensor) else None
            if one is not None and one not in read:
                read.append(one)
        for place, argument in enumerate(function._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            written = kwargs.get(argument.name) if place >= len(args) else args[place]
            for leaf in pytree.tree_leaves(written):
                one = self._number_of(leaf) if isinstance(leaf, Tensor) else None
                if one is not None:
                    block.made[one].changed = number
        return read

    def finish(self) -> list[BlockTrace]:
        """With times, and without what was changed in place after it was read."""
        if self._meter.is_cuda:
            torch.cuda.synchronize(self._meter.device)
        for block, clocks in zip(self.traces, self._clocks, strict=True):
            block.microseconds = [_microseconds(clock) for clock in clocks]
            for one in block.made:
                if one.changed > one.op:
                    one.can_recompute = one.can_move = False
                    one.code_bytes = 0
                if any(block.made[i].changed >= one.op for i in one.inputs):
                    one.can_recompute = False
        return self.traces


def _no_unpack(_: Any) -> Tensor:
    raise RuntimeError("fit_memory: backward ran in the pass that saves nothing")


def _is_repeatable(function: Any, args: Any, kwargs: Any) -> bool:
    """Whether running it again gives the same and does nothing else."""
    if function._schema.is_mutable or function.namespace in _GROUPS or "batch_norm" in str(function):
        return False  # a batch norm updates its running statistics, whatever its schema says
    if torch.Tag.nondeterministic_seeded not in function.tags:
        return True
    for place, argument in enumerate(function._schema.arguments):
        if argument.name in _DROPOUTS:
            value = kwargs.get(argument.name, args[place] if place < len(args) else argument.default_value)
            return bool(value == 0)
    return False


def _start(meter: Meter) -> Any:
    if not meter.is_cuda:
        return time.perf_counter()
    # A device that waits for the host would count the host's time for every op: a norm would cost as much as a product.
    torch.cuda._sleep(_WAIT_CYCLES)  # type: ignore[no-untyped-call]
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def _stop(meter: Meter, clock: Any) -> Any:
    if not meter.is_cuda:
        return (time.perf_counter() - clock) * 1e6
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return clock, event


def _microseconds(clock: Any) -> float:
    return float(clock) if isinstance(clock, float) else float(clock[0].elapsed_time(clock[1])) * 1e3


@dataclass
class BlockReads:
    """Backward of one block: by event, what was read, and what else is alive. What one function of autograd reads, it
    holds until its end: reads without an op between them are one event."""

    start: int
    numbers: list[list[int]] = field(default_factory=list)
    at: list[int] = field(default_factory=list)
    greatest: list[int] = field(default_factory=list)


class Reading:
    """Hears of a step whose blocks make everything again."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._reads: dict[int, BlockReads] = {}
        self._order: list[BlockCall] = []
        self._last: BlockReads | None = None
        self._ops = -1  # that had run at the last read
        self.between = 0

    def left(self, call: BlockCall) -> None:
        """A block's forward has ended."""
        for tensor in call.stored():
            self._meter.claim(tensor)
        self._order.append(call)
        self._meter.others = self._meter.now() - self._meter.own

    def made(self, tensor: Tensor) -> None:
        self._meter.claim(tensor)

    def read(self, call: BlockCall, number: int) -> None:
        if self._ops == self._meter.ops and self._last is self._reads.get(id(call)):
            assert self._last is not None
            self._last.numbers[-1].append(number)
            return
        self._ops = self._meter.ops
        self._close()
        at = self._meter.now() - self._meter.own
        reads = self._reads.setdefault(id(call), BlockReads(at))
        reads.numbers.append([number])
        reads.at.append(at - reads.start)
        reads.greatest.append(at - reads.start)
        self._last = reads

    def was_read(self) -> None:
        """What was asked for is there."""
        self._meter.others = 0

    def _close(self) -> None:
        greatest = self._meter.others
        if self._last is None:
            self.between = max(self.between, greatest)
        else:
            self._last.greatest[-1] = max(self._last.greatest[-1], greatest - self._last.start)

    def finish(self) -> list[BlockReads]:
        """By block, in the order of their forwards."""
        self._close()
        return [self._reads.get(id(call), BlockReads(0)) for call in self._order]
