"""attention over parts of the keys on a GPU: added up they are one call, forward and backward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kernel_pytorch.functional as F
import pytest
import torch
import torch.distributed as distributed
from kernel_pytorch._ops.attention_part import empty_parts
from kernel_pytorch.attention.distributed import context_parallel_attention, gather_sequence, shard_sequence
from kernel_pytorch.functional import attention

pytestmark = pytest.mark.gpu

OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "window": {"window": (100, 30), "softcap": 5.0},
    "dropout": {"causal": True, "dropout_p": 0.25},
    "mask_mod": {"mask_mod": lambda b, h, q, k: (k <= q) | (k < 40 * h)},
}


@pytest.mark.parametrize("dtype, tolerance", [(torch.bfloat16, 0.02), (torch.float32, 1e-5)], ids=str)
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("name", OPTIONS)
def test_parts_are_one_call(name: str, size: int, dtype: torch.dtype, tolerance: float) -> None:
    torch.manual_seed(1)
    options = dict(OPTIONS[name])
    if "dropout_p" in options:
        options["seed"] = torch.tensor([3, 4], device="cuda")
    shapes = [(2, 272, heads, size) for heads in (4, 2, 2)]
    tensors = [torch.randn(shape, device="cuda", dtype=dtype, requires_grad=True) for shape in shapes]
    gradient = torch.randn(shapes[0], device="cuda", dtype=dtype)
    expected, lse = attention(*tensors, layout="bshd", return_lse=True, **options)
    wanted = torch.autograd.grad(expected, tensors, gradient)
    output, parts_lse = context_parallel_attention(*tensors, key_chunk=96, return_lse=True, **options)
    found = torch.autograd.grad(output, tensors, gradient)
    torch.testing.assert_close(parts_lse, lse, rtol=max(tolerance / 20, 2e-6), atol=max(tolerance / 20, 2e-6))
    torch.testing.assert_close(output, expected, rtol=tolerance, atol=tolerance)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=2 * tolerance, atol=2 * tolerance * float(other.abs().max()))


def _double_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    scores = torch.einsum("bqhd,bkhd->bhqk", query.double(), key.double()) * scale
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), value.double())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [64, 128, 256])
def test_rows_done_again_are_added_once(size: int, dtype: torch.dtype) -> None:
    """Scores so far apart that rows leave the range of floats, some warps' and not others', in every part alike."""
    torch.manual_seed(2)
    query, keys = (torch.randn(1, rows, 2, size, device="cuda", dtype=dtype) for rows in (400, 300))
    query[:, ::3] *= 0.01  # rows that stay in range, beside and between others
    key = torch.cat([keys, keys.flip(1), keys], 1)  # equal scores in every part: each has its share of the output
    value = torch.randn(1, 900, 2, size, device="cuda", dtype=dtype)
    scale = 40 * size**-0.5
    expected = _double_attention(query, key, value, scale)
    for chunk in (300, 900):
        output = context_parallel_attention(query, key, value, key_chunk=chunk, scale=scale)
        torch.testing.assert_close(output.double(), expected, rtol=0.02, atol=0.02)


def test_what_other_keys_gave_outweighs_these() -> None:
    """And the other way round: the sum so far is far above, or far below, what a part adds."""
    torch.manual_seed(3)
    query, key, value = (torch.randn(1, 200, 2, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    for order in ([0, 1, 2], [2, 1, 0], [1, 2, 0]):
        output, lse = empty_parts(query, value, "bshd")
        output.fill_(float("nan"))  # not to be read
        factors = (1.0, 30.0, 900.0)
        keys = [key * factors[i] for i in order]
        for part in keys:
            F.attention_part_(output, lse, query, part, value, layout="bshd")
        expected = _double_attention(query, torch.cat(keys, 1), value.repeat(1, 3, 1, 1), 128**-0.5)
        torch.testing.assert_close(output.double(), expected, rtol=0.02, atol=0.02)


def test_a_ring_of_one_over_nccl(tmp_path: Path) -> None:
    if not distributed.is_nccl_available():
        pytest.skip("torch has no NCCL here")
    torch.manual_seed(4)
    tensors = [torch.randn(1, 300, 2, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    expected = attention(*tensors, layout="bshd", causal=True)
    wanted = torch.autograd.grad(expected.sum(), tensors)
    distributed.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        group = distributed.group.WORLD
        parts = [shard_sequence(tensor, group=group, schedule="zigzag") for tensor in tensors]
        for chunk in (None, 128):
            output = context_parallel_attention(*parts, group=group, schedule="zigzag", causal=True, key_chunk=chunk)
            output = gather_sequence(output, group=group, schedule="zigzag")
            found = torch.autograd.grad(output.sum(), tensors)
            torch.testing.assert_close(output, expected, rtol=0.02, atol=0.02)
            for one, other in zip(found, wanted, strict=True):
                torch.testing.assert_close(one, other, rtol=0.04, atol=0.04 * float(other.abs().max()))
    finally:
        distributed.destroy_process_group()
