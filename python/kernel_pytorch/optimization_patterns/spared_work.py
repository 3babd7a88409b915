"""Work that the replays of a captured call are spared. A run of the call is watched; its capture then leaves out

- joins with nothing: a cache joins its keys to what it holds, which is nothing at first. The result is a copy; in the
  capture it is the tensor itself.
- ops on constants alone: masks and positions come from nothing but numbers in the model's code. A replay reads what the
  first run made of them.
- the op that makes a large result, such as logits: it runs behind each replay, into memory of the caller's, where a
  result in the graph's memory would have to be copied out.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from .results import Results

__all__ = ["Plan", "Sparing", "Watching", "plan_of"]

LARGE_BYTES = 1 << 24  # of a result, whose copy takes longer than a launch
MOST_KEPT_BYTES = 1 << 26  # of constants


def storage_of(tensor: Tensor) -> int | None:
    return tensor.untyped_storage()._cdata if type(tensor) in (Tensor, torch.nn.Parameter) else None


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]


def _joined(args: Any) -> Tensor | None:
    """The one tensor that a cat consists of, or None."""
    found = [tensor for tensor in args[0] if tensor.numel()]
    is_plain = len(found) == 1 and len({(tensor.dtype, tensor.device) for tensor in args[0]}) == 1
    return found[0] if is_plain and storage_of(found[0]) is not None else None


def _is_upload(function: Any, args: Any, result: Any) -> bool:
    """Whether it sends numbers of the host's to the device, which are those of the first run in every replay."""
    return function.overloadpacket is torch.ops.aten._to_copy and args[0].is_cpu and not result.is_cpu


def _is_view(function: Any) -> bool:
    """Whether it makes nothing. Such are not counted: torch detaches what it made itself and somebody else holds."""
    returns = function._schema.returns
    return bool(returns) and all(one.alias_info is not None and not one.alias_info.is_write for one in returns)


def _reads(result: Any, sources: list[int | None]) -> bool:
    """Whether an op read its tensors; some make no more than a view of one, whatever they say of themselves."""
    return not isinstance(result, Tensor) or storage_of(result) not in sources


@dataclass
class _Made:
    """A tensor in memory of its own, by the op that made it."""

    index: int
    function: Any
    sources: list[int | None]
    is_alone: bool  # the op returns this one only, and would make it again
    sizes: tuple[Any, ...]  # and strides, type, device
    nbytes: int


@dataclass(frozen=True)
class Plan:
    """What a capture of the call leaves out: joins of one tensor, by their number among all joins; constants and makers
    of results, by their number among all ops, of which there are `count`, or None where no one counted."""

    joins: frozenset[int] = frozenset()
    constants: dict[int, tuple[Any, Tensor]] = field(default_factory=dict)  # function and result
    last: dict[int, _Made] = field(default_factory=dict)
    count: int | None = None


class Watching(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees what a call does; `plan` then says what its capture may leave out."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._count = self._cats = 0
        self._seen: dict[int | None, StorageWeakRef] = {}  # no other storage gets the number of one that is gone
        self._made: dict[int, _Made] = {}
        self._read: dict[int | None, int] = {}
        self._written: dict[int | None, int] = {}
        self._joins: list[tuple[int, int, int | None]] = []  # number, index, storage
        self._constant: set[int | None] = set()
        self._kept: dict[int, tuple[Any, Tensor]] = {}  # index -> function and result, both constant
        self._kept_bytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _is_view(function):
            return function(*args, **(kwargs or {}))
        index, self._count = self._count, self._count + 1
        result = function(*args, **(kwargs or {}))
        given = _tensors((args, kwargs))
        sources = [self._storage(tensor) for tensor in given]
        writes = function._schema.is_mutable
        for source in sources:
            if writes:
                self._written[source] = index
            if writes or _reads(result, sources):
                self._read[source] = index
        is_anew = not writes and torch.Tag.nondeterministic_seeded not in function.tags
        is_constant = is_anew and (self._constant.issuperset(sources) or _is_upload(function, args, result))
        if writes:
            self._constant.difference_update(sources)
        for tensor in _tensors(result):
            storage = self._storage(tensor)
            if storage is not None and storage not in sources:
                is_alone = is_anew and result is tensor and tensor.storage_offset() == 0
                sizes = (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
                self._made[storage] = _Made(index, function, sources, is_alone, sizes, tensor.nbytes)
                (self._constant.add if is_constant else self._constant.discard)(storage)
                if is_constant and is_alone:
                    self._keep(index, function, tensor, given)
        if function.overloadpacket is torch.ops.aten.cat:
            number, self._cats, joined = self._cats, self._cats + 1, _joined(args)
            if joined is not None and storage_of(joined) in self._made:  # an input is the caller's, and stays apart
                self._joins += [(number, index, storage_of(joined)), (number, index, storage_of(result))]
        return result

    def _storage(self, tensor: Tensor) -> int | None:
        storage = storage_of(tensor)
        if storage is not None and storage not in self._seen:
            self._seen[storage] = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        return storage

    def _keep(self, index: int, function: Any, made: Tensor, given: list[Tensor]) -> None:
        """What the host makes stays its own: it sends it to the device, see capturing.py."""
        is_here = all(tensor.device == made.device for tensor in given)
        if is_here and self._kept_bytes + made.nbytes <= MOST_KEPT_BYTES:
            self._kept[index] = (function, made)
            self._kept_bytes += made.nbytes

    def plan(self, results: list[Tensor]) -> Plan:
        """`results`: the call's."""
        changed = {number for number, at, one in self._joins if self._written.get(one, -1) > at}
        joins = frozenset(number for number, *_ in self._joins) - changed
        storages = [storage_of(tensor) for tensor in results]
        last: dict[int, _Made] = {}
        for storage in storages:
            made = None if storage is None else self._made.get(storage)
            if made is None or not made.is_alone or made.nbytes < LARGE_BYTES or storages.count(storage) > 1:
                continue
            is_changed = any(self._written.get(one, -1) > made.index for one in (storage, *made.sources))
            if not is_changed and self._read.get(storage, -1) <= made.index:
                last[made.index] = made
        device = results[0].device if results else None
        constants = {
            index: (function, made)
            for index, (function, made) in self._kept.items()
            if made.device == device and storage_of(made) not in self._written and index not in last
        }
        return Plan(joins, constants, last, self._count)


class Sparing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs the call as planned. `makers` are the ops that it left out, by the storage that stands for their result."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._plan = plan
        self._count = self._cats = 0
        self.makers: dict[int | None, Callable[[], Tensor]] = {}
        self._stands: list[Tensor] = []  # no other storage gets the number of one that is gone

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _is_view(function):
            return function(*args, **kwargs)
        index, self._count = self._count, self._count + 1
        left = self._plan.last.get(index)
        if left is not None:
            if left.function is not function:
                raise RuntimeError(_OTHER_WAY)
            sizes, strides, dtype, device = left.sizes
            stands = torch.empty_strided(sizes, strides, dtype=dtype, device=device)
            self._stands.append(stands)
            self.makers[storage_of(stands)] = lambda: _as_it_was(function, args, kwargs, device.type)
            return stands
        if index in self._plan.constants:
            known, constant = self._plan.constants[index]
            if known is not function:
                raise RuntimeError(_OTHER_WAY)
            return torch.ops.aten.alias.default(constant)
        if function.overloadpacket is torch.ops.aten.cat:
            number, self._cats = self._cats, self._cats + 1
            if number in self._plan.joins:
                joined = _joined(args)
                if joined is None:
                    raise RuntimeError(_OTHER_WAY)
                return torch.ops.aten.alias.default(joined)
        result = function(*args, **kwargs)
        if self.makers:
            sources = [storage_of(tensor) for tensor in _tensors((args, kwargs))]
            if _reads(result, sources) and any(source in self.makers for source in sources):
                raise RuntimeError(_OTHER_WAY)
        return result

    def __exit__(self, kind: Any, value: Any, trace: Any) -> None:
        super().__exit__(kind, value, trace)  # type: ignore[no-untyped-call]
        if kind is None and self._plan.count not in (None, self._count):
            raise RuntimeError(_OTHER_WAY)

    def made_for(self, result: Tensor) -> Callable[[], Tensor] | None:
        """What makes a result of the call anew, behind a replay; None of one that lies in the graph's memory."""
        maker = self.makers.get(storage_of(result))
        if maker is None:
            return None
        sizes, strides, offset = result.shape, result.stride(), result.storage_offset()
        return lambda: maker().as_strided(sizes, strides, offset)


def _as_it_was(function: Any, args: Any, kwargs: Any, device: str) -> Tensor:
    """The op on what autocast made of its arguments in the capture: the caller's must not cast them again."""
    is_cast = torch.is_autocast_enabled(device)
    with torch.no_grad(), torch.autocast(device, enabled=False) if is_cast else contextlib.nullcontext():
        return function(*args, **kwargs)  # type: ignore[no-any-return]


def plan_of(call: Callable[[], Any], watching: Watching, results: list[Tensor]) -> Plan | None:
    """What to leave out of a call that `watching` saw, and whose results these are. Runs it once more where it joins:
    what is no copy may lie otherwise in memory than the copy would, so that other ops follow, or none that take it."""
    plan = watching.plan(results)
    if plan.joins:
        again = Watching()
        try:
            with Sparing(Plan(plan.joins)), again:
                output = call()
            plan = dataclasses.replace(again.plan(Results(output).tensors), joins=plan.joins)
        except RuntimeError:
            plan = dataclasses.replace(plan, joins=frozenset())
    if not (plan.joins or plan.constants or plan.last):
        return None
    try:  # a capture that breaks off costs more than a run
        with Sparing(plan):
            call()
    except RuntimeError:
        return None
    return plan


_OTHER_WAY = "the call went another way than in the run before"
