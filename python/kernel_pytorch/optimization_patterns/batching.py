"""Requests of many lengths, run in batches within buckets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils import _pytree as pytree

from .verification import OutputMap

if TYPE_CHECKING:
    from .module import DynamicShapeModule

__all__ = ["run_many"]


def run_many(module: DynamicShapeModule, requests: Sequence[Tensor], max_tokens: int) -> list[Any]:
    """See DynamicShapeModule.run_many."""
    mask = module.mask
    if mask is None or module.sequence_dim != 1:
        raise ValueError(
            "run_many: requests of different lengths share a batch, so the base module's forward needs a mask over "
            "dimension 1 (see mask_argument)"
        )
    if any(request.dim() == 0 or len(request) == 0 for request in requests):
        raise ValueError("run_many: a request is [length, ...] and has at least one position")
    if not requests:
        return []
    outputs = _sequence_outputs(module, requests[0])
    batches = _batches(module, requests, max_tokens)
    device = requests[0].device
    lengths = torch.tensor([len(requests[i]) for _, members in batches for i in members], dtype=torch.int32)
    if device.type == "cuda":  # one copy for all batches, which the host does not wait for
        lengths = lengths.pin_memory().to(device, non_blocking=True)
    results: list[Any] = [None] * len(requests)
    begin = 0
    for size, members in batches:
        batch = pad_sequence([requests[i] for i in members], batch_first=True)
        rows = lengths[begin : begin + len(members)]
        begin += len(members)
        shape = (len(members), size, *batch.shape[2:])
        given = {mask.name: mask.of_rows(rows, batch.shape[1])}
        result = module.run_at(shape, batch, (batch,), given)
        for row, member in enumerate(members):
            results[member] = _row(result, outputs, row, len(requests[member]))
    return results


def _batches(module: DynamicShapeModule, requests: Sequence[Tensor], max_tokens: int) -> list[tuple[int, list[int]]]:
    """Bucket size and members of each batch: powers of two, so that few shapes occur and no row is padding. Where
    buckets are not padded to, as many neighbours in length as fit."""
    groups: dict[int, list[int]] = {}
    for index, request in enumerate(requests):
        bucket = module.bucketing.find_optimal_bucket((1, *request.shape))
        groups.setdefault(module.bucketing.bucket_shape(bucket)[1], []).append(index)
    batches = []
    if not module.pads([requests[0]]):
        order = sorted(range(len(requests)), key=lambda index: -len(requests[index]))
        while order:
            taken = max(max_tokens // len(requests[order[0]]), 1)  # the longest comes first
            batches.append((len(requests[order[0]]), order[:taken]))
            order = order[taken:]
        return batches
    for size, members in sorted(groups.items()):
        members.sort(key=lambda index: len(requests[index]))
        while members:
            most = min(len(members), max(max_tokens // size, 1))
            taken = 1 << (most.bit_length() - 1)
            batches.append((size, members[:taken]))
            members = members[taken:]
    return batches


def _sequence_outputs(module: DynamicShapeModule, request: Tensor) -> OutputMap:
    """Which dimensions of the outputs follow the length: seen once, by running a request with one position more."""
    if module.sequence_outputs is None:
        batch = request[None]
        shape = (1, len(request) + 1, *request.shape[1:])
        call = module.call_at(shape, batch, (batch,), {})
        if 1 not in call.padded:
            raise ValueError(f"run_many: dimension 1 is not bucketed, only {module.bucketing.dimensions}")
        with torch.no_grad():
            found = module.try_padded(call, module.base_module(batch), module.base_module)
        if isinstance(found, str):
            raise ValueError(f"run_many: padding changes what the module gives: {found}")
        module.sequence_outputs = found
    return module.sequence_outputs


def _row(result: Any, outputs: OutputMap, row: int, length: int) -> Any:
    leaves, spec = pytree.tree_flatten(result)
    links = iter(outputs)
    rows = []
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            leaf = leaf[row]
            for dim in (dim for dim, source in next(links, {}).items() if source == 1):
                leaf = leaf.narrow(dim - 1, 0, length)
        rows.append(leaf)
    return pytree.tree_unflatten(rows, spec)
