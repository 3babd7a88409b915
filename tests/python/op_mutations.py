"""Calls the ops named with one tensor changed in rank, size or type, for each of their tensors and each change.

A call must raise, or give what the op's shape function says, twice the same with other numbers in freed memory. Run by
test_torch_border.py as a process of its own, so that a crash is the failure of the last case printed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
from op_samples import (
    Sample,
    argument_name,
    clone,
    is_written,
    map_tensors,
    ops,
    samples,
    tensor_at,
    tensor_paths,
    with_tensor,
)
from torch import Tensor

TYPES = (
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int64, torch.int32,
    torch.int8, torch.uint8, torch.bool, torch.complex64,
)  # fmt: skip


def changes(tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    first = tensor.flatten()[:1] if tensor.numel() else tensor.new_zeros(1)
    yield "0-d", first.reshape(())
    yield "1-d", first.expand(3).contiguous()
    yield "[0]", tensor.new_empty(0)
    yield "a dimension more", tensor[None]
    yield "two dimensions more", tensor[None, None]
    if tensor.dim() > 0:
        yield "a dimension less", tensor[0]
        yield "no columns", tensor[..., :0]
        yield "no rows", tensor[:0]
        yield "fewer rows", tensor[:-1]
        yield "a column more", torch.cat([tensor, tensor[..., :1]], -1)
        yield "fewer columns", tensor[..., :-1]
        yield "expanded", first.reshape([1] * tensor.dim()).expand(tensor.shape)
        yield "strided", torch.stack([tensor, tensor], -1)[..., 0]
    for dtype in TYPES:
        if dtype is not tensor.dtype:
            yield str(dtype), tensor.to(dtype)


def results(args: Sample, outputs: Any, op: str) -> list[Tensor]:
    """What a call returned and wrote."""
    returned = [] if outputs is None else [outputs] if isinstance(outputs, Tensor) else list(outputs)
    return [*returned, *(tensor_at(args, path) for path in tensor_paths(args) if is_written(op, path))]


def call_with_freed_memory(op: str, args: Sample, like: list[Tensor], number: int) -> list[Tensor]:
    """The results of a call whose new tensors probably lie where others full of `number` lay."""
    args = map_tensors(args, clone)
    garbage = [
        torch.empty(tensor.shape, dtype=tensor.dtype).view(torch.uint8).fill_(number) for tensor in like if tensor.dim()
    ]
    del garbage
    return results(args, getattr(ops, op)(*args), op)


def check(op: str, args: Sample) -> str:
    if any(_overlaps(tensor_at(args, path)) and is_written(op, path) for path in tensor_paths(args)):
        try:
            getattr(ops, op)(*args)
        except Exception as error:
            return f"refused: {error}"
        return "WRONG: wrote into expanded memory"
    try:
        first = call_with_freed_memory(op, args, [], 0)
    except Exception as error:
        return f"refused: {error}"
    again = [call_with_freed_memory(op, args, first, number) for number in (0x7F, 0x3A)]
    for one, other in zip(*again):
        if not torch.equal(*(torch.nan_to_num(x.double()) for x in (one, other))):
            return "WRONG: results depend on freed memory"
    if op == "evaluate_expression":  # has no shape function
        return "taken"
    try:
        meta = map_tensors(args, lambda tensor: tensor.to("meta"))
        shapes = results(meta, getattr(ops, op)(*meta), op)
    except Exception as error:
        return f"WRONG: taken, but its shape function refuses it: {error}"
    for one, shape in zip(first, shapes, strict=True):
        if one.shape != shape.shape or one.dtype is not shape.dtype:
            return f"WRONG: {tuple(one.shape)} {one.dtype}, its shape function says {tuple(shape.shape)} {shape.dtype}"
    return "taken"


def _overlaps(tensor: Tensor) -> bool:
    return any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride())) and tensor.numel() > 0


def main() -> None:
    for op in sys.argv[1:]:
        for number, args in enumerate(samples()[op]):
            for path in tensor_paths(args):
                for what, tensor in changes(tensor_at(args, path)):
                    print(f"{op} {number}, {argument_name(op, path)} {what}: ", end="", flush=True)
                    print(check(op, with_tensor(args, path, tensor)), flush=True)
    print("done")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
