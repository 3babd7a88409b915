"""What one forward of a block leaves for backward, treated as a plan says: kept, moved to the host, or made again.

Inside a block's forward a dispatch mode counts the ops, and hooks see what autograd saves. A tensor that is to be made
again is saved as its op with the arguments: backward runs that op alone, not the block's Python, so that hooks, random
numbers and counters of the model are as without a plan. A storage is what is kept, moved or made again; views of it are
rebuilt. What a plan does not know is kept: a forward that takes another path than the one measured is right, and only
needs the memory that it would without a plan.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ._float8 import code_bytes, decode, encode, relative_error
from ._host import Slot, raw
from ._modes import alias_of, without_modes

KEEP, MOVE, RECOMPUTE = "keep", "move", "recompute"
DECODE = "decode"  # made again, of codes


@dataclass
class OpPlan:
    """What to do with the outputs of one op of a block's forward."""

    function: Any
    outputs: dict[int, tuple[int, str]] = field(default_factory=dict)  # leaf: activation, treatment


@dataclass
class BlockTreatment:
    """A block's part of a plan."""

    ops: dict[int, OpPlan] = field(default_factory=dict)
    inputs: dict[int, tuple[int, str]] = field(default_factory=dict)  # leaf of the arguments: activation, treatment
    codes: dict[int, tuple[int, str]] = field(default_factory=dict)  # by activation: that of its codes, its treatment
    slots: dict[int, Slot] = field(default_factory=dict)  # by activation, of those that are moved


class _Geometry:
    """A view of a storage, without the storage."""

    __slots__ = ("dtype", "offset", "size", "stride")

    def __init__(self, tensor: Tensor) -> None:
        self.dtype = tensor.dtype
        self.size, self.stride, self.offset = tensor.size(), tensor.stride(), tensor.storage_offset()

    def of(self, storage: torch.UntypedStorage) -> Tensor:
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, self.offset, self.size, self.stride)


class Activation:
    """A storage that backward needs."""

    __slots__ = ("__weakref__", "call", "event", "number", "op", "reads", "slot", "storage", "users", "value")

    def __init__(self, call: BlockCall, number: int, storage: torch.UntypedStorage) -> None:
        self.call, self.number = call, number
        self.storage = weakref.ref(storage)  # as long as it is alive, tensors on it are this activation's
        self.value: Tensor | None = None  # its bytes or a tensor on them
        self.op: _Op | None = None  # that makes it again
        self.slot: Slot | None = None
        self.event: Any = None  # to wait for before `value` is read
        self.reads = 0  # that are to come
        self.users = 0  # ops that are to be run again with it

    def keep(self, tensor: Tensor) -> None:
        # An alias: the tensor itself will know its graph, and the graph knows this object.
        self.value = tensor.detach()

    def fetch(self) -> None:
        """Starts to bring it back."""
        if self.value is None and self.slot is not None:
            self.value, self.event = self.slot.get(self.call.device)
            self.call.note_made(self.value)

    def bytes(self) -> torch.UntypedStorage:
        if self.value is None and self.op is not None:
            _run_again(self.op)
        self.fetch()
        value = self.value
        assert value is not None
        if self.event is not None:
            torch.cuda.current_stream(value.device).wait_event(self.event)
            self.event = None
        return value.untyped_storage()

    def forget(self) -> None:
        """Drops what was made again when nothing will read it."""
        if self.op is not None and self.reads <= 0 and self.users <= 0:
            self.value = None

    def __del__(self) -> None:
        if self.slot is not None:
            self.slot.release()


class _Reference:
    """An argument that is a view of an activation."""

    __slots__ = ("activation", "geometry")

    def __init__(self, activation: Activation, tensor: Tensor) -> None:
        self.activation, self.geometry = activation, _Geometry(tensor)


class _Held:
    """A tensor that is held as it is, and must not change."""

    __slots__ = ("activation", "tensor", "version")

    def __init__(self, tensor: Tensor, version: int, activation: Activation | None = None) -> None:
        self.tensor, self.version, self.activation = tensor, version, activation

    def get(self, user: Any) -> Tensor:
        if self.tensor._version != self.version:
            raise RuntimeError(
                f"fit_memory: a tensor of {tuple(self.tensor.shape)} that {user} needs was changed in place since "
                f"forward (version {self.tensor._version}, then {self.version}); change a copy, or after backward"
            )
        return self.tensor


class _Op:
    """An op of a block's forward that backward may run again."""

    __slots__ = ("function", "leaves", "number", "outputs", "spec")

    def __init__(self, number: float, function: Any, leaves: list[Any], spec: Any) -> None:
        self.number, self.function, self.leaves, self.spec = number, function, leaves, spec
        self.outputs: dict[int, weakref.ref[Activation]] = {}

    def inputs(self) -> list[Activation]:
        return [leaf.activation for leaf in self.leaves if isinstance(leaf, _Reference)]


def _run_again(last: _Op) -> None:
    """Runs the op and those before it whose results it needs and that are not there, in their order."""
    wanted: dict[float, _Op] = {}
    asked = [last]
    while asked:
        op = asked.pop()
        if op.number not in wanted:
            wanted[op.number] = op
            asked.extend(one.op for one in op.inputs() if one.value is None and one.op is not None)
    with torch.no_grad(), without_modes():
        for number in sorted(wanted):
            op = wanted[number]
            leaves: list[Any] = []
            device = "cpu"
            for leaf in op.leaves:
                if isinstance(leaf, _Reference):
                    leaf = leaf.geometry.of(leaf.activation.bytes())
                elif isinstance(leaf, _Held):
                    leaf = leaf.get(op.function)
                if isinstance(leaf, Tensor) and leaf.device.type != "cpu":
                    device = leaf.device.type
                leaves.append(leaf)
            args, kwargs = pytree.tree_unflatten(leaves, op.spec)
            del leaves
            # Casts are ops of their own here. Leaving autocast clears its cache, so it is left only where it is on.
            with torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext():
                results = pytree.tree_leaves(op.function(*args, **kwargs))
            del args, kwargs
            for place, reference in op.outputs.items():
                activation = reference()
                if activation is not None:
                    activation.value = results[place]
                    activation.call.note_made(results[place])
            del results
            for one in op.inputs():
                one.users -= 1
                one.forget()


class _Saved:
    """What autograd holds in place of a tensor."""

    __slots__ = ("activation", "geometry")

    def __init__(self, activation: Activation, tensor: Tensor) -> None:
        self.activation, self.geometry = activation, _Geometry(tensor)
        activation.reads += 1

    def tensor(self) -> Tensor:
        activation = self.activation
        with torch.no_grad(), without_modes():
            tensor = self.geometry.of(activation.bytes())
        activation.reads -= 1
        activation.forget()
        return tensor


class Session:
    """The blocks of a model in the order of their calls: what a block moved leaves after the next block."""

    def __init__(self) -> None:
        self.before: weakref.ref[BlockCall] | None = None
        self.listener: Any = None  # of a measurement: told of reads and of blocks
        self.other_paths: set[str] = set()  # blocks whose forward was not the measured one
        self.errors: list[float] | None = None  # of a measurement: of each tensor that is coded


class BlockCall(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """One forward of a block under a plan."""

    def __init__(self, name: str, treatment: BlockTreatment, session: Session) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.name, self._treatment, self._session = name, treatment, session
        self.device = torch.device("cpu")
        self._op = 0
        self._known: dict[int, Activation] = {}
        self._by_number: dict[int, weakref.ref[Activation]] = {}
        self._leaving: list[tuple[Activation, Any]] = []  # being copied to the host
        self._before: weakref.ref[BlockCall] | None = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # the block's forward is kept from dynamo as a whole: no second guard at every op

    def run(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        session = self._session
        self._before = session.before
        session.before = weakref.ref(self)
        leaves = pytree.tree_leaves((args, kwargs))
        for place, (number, treatment) in self._treatment.inputs.items():
            if place < len(leaves) and isinstance(leaves[place], Tensor):
                self._treat(leaves[place], number, treatment, -1)
        del leaves
        if self._treatment.ops or self._treatment.inputs:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack), self:
                output = forward(*args, **kwargs)
        else:
            output = forward(*args, **kwargs)
        before = self._before() if self._before is not None else None
        if before is not None and before._leaving:
            before.leave()
            self._fetch_before_backward(output)
        if session.listener is not None:
            session.listener.left(self)
        self._known.clear()
        return output

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        number = self._op
        self._op += 1
        plan = self._treatment.ops.get(number)
        if plan is None or self.name in self._session.other_paths:
            return result
        if function is not plan.function:
            self._session.other_paths.add(self.name)
            return result
        op: _Op | None = None
        leaves = pytree.tree_leaves(result)
        for place, (activation, treatment) in plan.outputs.items():
            if treatment != RECOMPUTE:
                self._treat(leaves[place], activation, treatment, number)
                continue
            op = op or self._captured(number, function, args, kwargs or {})
            made = self._new(leaves[place], activation)
            made.op = op
            op.outputs[place] = weakref.ref(made)
        return result

    def _captured(self, number: int, function: Any, args: Any, kwargs: Any) -> _Op:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        kept: list[Any] = []
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                activation = self._of(leaf)
                if activation is not None:
                    activation.users += 1
                    leaf = _Reference(activation, leaf)
                elif leaf.is_leaf:
                    leaf = _Held(leaf, leaf._version)
                else:  # an alias: the tensor itself knows its graph, which may come to know this op
                    alias = leaf.detach()
                    leaf = _Held(alias, alias._version)
            kept.append(leaf)
        return _Op(number, function, kept, spec)

    def _new(self, tensor: Tensor, number: int) -> Activation:
        storage = tensor.untyped_storage()
        activation = Activation(self, number, storage)
        self.device = tensor.device
        self._known[storage._cdata] = activation
        self._by_number[number] = weakref.ref(activation)
        return activation

    def _treat(self, tensor: Tensor, number: int, treatment: str, op: int) -> None:
        if treatment != DECODE or code_bytes(tensor) == 0:
            self._store(tensor, number, treatment)
            return
        codes_number, codes_treatment = self._treatment.codes[number]
        with torch.no_grad(), without_modes():
            codes, scales = encode(tensor)
            if self._session.errors is not None:
                self._session.errors.append(relative_error(tensor, codes, scales))
        self._store(codes, codes_number, codes_treatment)
        stored = self._of(codes)
        assert stored is not None
        stored.users += 1
        arguments: Any = ((_Reference(stored, codes), _Held(scales, scales._version), tensor.dtype), {})
        leaves, spec = pytree.tree_flatten(arguments)
        made = self._new(tensor, number)
        # Beside the op that made the tensor, and apart from those of its other outputs.
        made.op = _Op(op + (1 + number) / (2 + len(self._treatment.codes) + number), decode, leaves, spec)
        made.op.outputs[0] = weakref.ref(made)

    def _store(self, tensor: Tensor, number: int, treatment: str) -> None:
        activation = self._new(tensor, number)
        activation.keep(tensor)
        slot = self._treatment.slots.get(number) if treatment == MOVE else None
        storage = tensor.untyped_storage()
        if slot is None or slot.busy or slot.size != storage.nbytes():
            return  # a second forward before the first one's backward, or another size: kept
        with without_modes():
            event = slot.put(raw(storage))
        activation.slot = slot
        self._leaving.append((activation, event))

    def leave(self) -> None:
        """The device's copies of what was moved are given back, on the stream that computes."""
        for activation, event in self._leaving:
            if event is not None:
                torch.cuda.current_stream(self.device).wait_event(event)
            activation.value = None
        self._leaving = []

    def _fetch_before_backward(self, output: Any) -> None:
        """The first gradient that reaches this block brings back what the block before it moved."""
        before = self._before

        def fetch(_gradient: Tensor) -> None:
            call = before() if before is not None else None
            if call is not None:
                call.fetch()

        for leaf in pytree.tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(fetch)  # type: ignore[no-untyped-call]
                return

    def fetch(self) -> None:
        with torch.no_grad(), without_modes():
            for number in sorted(self._treatment.slots):
                reference = self._by_number.get(number)
                activation = reference() if reference is not None else None
                if activation is not None:
                    activation.fetch()

    def note_made(self, tensor: Tensor) -> None:
        if self._session.listener is not None:
            self._session.listener.made(tensor)

    def stored(self) -> list[Tensor]:
        """What is kept of this forward on the device."""
        values = [activation.value for activation in self._known.values()]
        return [value for value in values if value is not None]

    def _of(self, tensor: Tensor) -> Activation | None:
        storage = tensor.untyped_storage()
        activation = self._known.get(storage._cdata)
        return activation if activation is not None and activation.storage() is storage else None

    def _pack(self, tensor: Tensor) -> Any:
        activation = self._of(tensor)
        if activation is not None and (activation.op is not None or activation.slot is not None):
            return _Saved(activation, tensor)
        return _Held(alias_of(tensor), tensor._version, activation)

    def _unpack(self, saved: Any) -> Tensor:
        listener = self._session.listener if saved.activation is not None else None
        if listener is not None:
            listener.read(self, saved.activation.number)
        tensor: Tensor = saved.tensor() if isinstance(saved, _Saved) else saved.get("backward")
        if listener is not None:
            listener.was_read()
        return tensor
