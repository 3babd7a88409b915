"""What members of a process group send each other: a header first, then tensors, and errors that name the member.

Before any tensor moves, every member sends every other a line that says what it is about to do. So a member that died,
hangs, or has another shape is named by all of them, within the group's time-out. A failure later is written into the
group's store by whoever sees it first, its neighbour; the others read there who began it.
"""

from __future__ import annotations

import collections
import json
import weakref
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as distributed
from torch import Tensor

_HEADER_BYTES = 2048
_HEADER, KEYS, GRADIENTS = 7011, 7012, 7013  # tags of gloo; NCCL goes by order
_twins: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


class ContextParallelError(RuntimeError):
    """A member of the group died, hangs, or does not agree with the others."""


class Exchange:
    """One group as a member of it sees it. `ranks` are the members' ranks in the default group, which errors name."""

    def __init__(self, group: Any, what: str) -> None:
        self.group = distributed.group.WORLD if group is None else group
        self.what = what
        self.ranks: list[int] = distributed.get_process_group_ranks(self.group)
        self.size = len(self.ranks)
        self.member = self.ranks.index(distributed.get_rank())

    def agree(self, header: dict[str, Any]) -> None:
        """Raises on every member, naming who differs, unless all give the same header."""
        lines = self._headers(json.dumps(header, default=str))
        headers = [json.loads(line) for line in lines]
        for field in dict.fromkeys(name for one in headers for name in one):
            values = [json.dumps(one.get(field)) for one in headers]
            if len(set(values)) == 1:
                continue
            usual = collections.Counter(values).most_common(1)[0][0]
            if values.count(usual) <= self.size // 2:
                usual = values[0]
            others = [f"rank {self.ranks[i]} has {values[i]}" for i in range(self.size) if values[i] != usual]
            raise ContextParallelError(
                f"{self.what}: {field} must be the same on all ranks of the group; {', '.join(others)},"
                f" rank {self.ranks[values.index(usual)]} has {usual}"
            )

    def _headers(self, line: str) -> list[str]:
        text = line.encode()[:_HEADER_BYTES]
        mine = torch.zeros(_HEADER_BYTES, dtype=torch.uint8)
        mine[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        theirs = [torch.empty_like(mine) for _ in self.ranks]
        group = _header_group(self.group, self.ranks)
        others = [i for i in range(self.size) if i != self.member]
        waits: list[tuple[int, Any]] = []
        for i in others:
            with self._blames(i):
                waits.append((i, distributed.isend(mine, self.ranks[i], group, _HEADER)))
                waits.append((i, distributed.irecv(theirs[i], self.ranks[i], group, _HEADER)))
        for i, work in waits:
            with self._blames(i):
                work.wait()
        theirs[self.member] = mine
        return [bytes(one.tolist()).rstrip(b"\0").decode() for one in theirs]

    def shift(self, tensor: Tensor, tag: int = KEYS) -> Incoming:
        """Sends the tensor to the next member and receives the one of the member before, without waiting."""
        after, before = (self.member + 1) % self.size, (self.member - 1) % self.size
        received = torch.empty_like(tensor)
        sends = distributed.P2POp(distributed.isend, tensor, self.ranks[after], self.group, tag)
        receives = distributed.P2POp(distributed.irecv, received, self.ranks[before], self.group, tag)
        with self._blames(before):
            works = distributed.batch_isend_irecv([sends, receives])
        peers = [after, before] if len(works) == 2 else [before]
        return Incoming(self, tensor, received, list(zip(peers, works, strict=True)))

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Everyone's tensor, in order of rank."""
        flat = tensor.contiguous().view(-1).view(torch.uint8)
        gathered = [torch.empty_like(flat) for _ in self.ranks]
        with self._blames(None):
            distributed.all_gather(gathered, flat, self.group)
        return [one.view(tensor.dtype).view(tensor.shape) for one in gathered]

    def swap(self, tensor: Tensor) -> Tensor:
        """[members, ...] -> [members, ...]: entry i goes to member i, and entry i of the result came from it."""
        flat = tensor.contiguous().view(self.size, -1).view(torch.uint8)
        received = torch.empty_like(flat)
        with self._blames(None):
            distributed.all_to_all_single(received, flat, group=self.group)
        return received.view(tensor.dtype).view(tensor.shape)

    def broadcast(self, tensor: Tensor) -> Tensor:
        """The first member's."""
        tensor = tensor.contiguous().clone()
        with self._blames(None):
            distributed.broadcast(tensor, self.ranks[0], self.group)
        return tensor

    def _blames(self, member: int | None) -> _Blame:
        return _Blame(self, member)

    def fail(self, member: int | None, error: BaseException) -> NoReturn:
        """Raises an error that names who failed first, as far as the group's store knows."""
        suspect = "" if member is None else str(self.ranks[member])
        first = suspect
        try:
            store = distributed.distributed_c10d._get_default_store()
            key = f"kernel_pytorch/context_parallel/{self.ranks}"
            first = store.compare_set(key, "", suspect).decode() if suspect else store.get(key).decode()
        except Exception as lost:  # the process that kept the store may be the one that died
            error = RuntimeError(f"{error}; the group's store does not answer either: {lost}")
        who = f"rank {first}" if first else "a rank of the group"
        raise ContextParallelError(
            f"{self.what}: {who} died, hangs or left this call; on rank {self.ranks[self.member]}: {error}"
        ) from error


class _Blame:
    """Turns an error of the transport into one that names the member it concerned."""

    def __init__(self, exchange: Exchange, member: int | None) -> None:
        self.exchange, self.member = exchange, member

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, _: Any) -> None:
        if isinstance(error, RuntimeError) and not isinstance(error, ContextParallelError):
            self.exchange.fail(self.member, error)


class Incoming:
    """A tensor on its way. Holds what is sent until it has gone."""

    def __init__(self, exchange: Exchange, sent: Tensor, received: Tensor, works: Sequence[tuple[int, Any]]) -> None:
        self.exchange, self.sent, self.received, self.works = exchange, sent, received, works

    def wait(self) -> Tensor:
        for member, work in self.works:
            with self.exchange._blames(member):
                work.wait()
        return self.received


def _header_group(group: Any, ranks: list[int]) -> Any:
    """The group, or one of gloo with the same members: headers are read by the host, which no GPU should wait for."""
    if distributed.get_backend(group) == "gloo":
        return group
    twin = _twins.get(group)
    if twin is None:
        time_out = group._get_backend(torch.device("cuda")).options._timeout
        twin = distributed.new_group(ranks, time_out, backend="gloo", use_local_synchronization=True)
        _twins[group] = twin
    return twin
