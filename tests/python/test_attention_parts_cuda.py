"""attention over parts of the keys on a GPU: added up they are one call, forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernel_pytorch.attention.distributed import context_parallel_attention
from kernel_pytorch.functional import attention

pytestmark = pytest.mark.gpu

OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "window": {"window": (100, 30), "softcap": 5.0},
    "dropout": {"causal": True, "dropout_p": 0.25},
    "mask_mod": {"mask_mod": lambda b, h, q, k: (k <= q) | (k < 40 * h)},
}


@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("name", OPTIONS)
def test_parts_are_one_call(name: str, size: int) -> None:
    torch.manual_seed(1)
    options = dict(OPTIONS[name])
    if "dropout_p" in options:
        options["seed"] = torch.tensor([3, 4], device="cuda")
    shapes = [(2, 272, heads, size) for heads in (4, 2, 2)]
    tensors = [torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for shape in shapes]
    gradient = torch.randn(shapes[0], device="cuda", dtype=torch.bfloat16)
    expected, lse = attention(*tensors, layout="bshd", return_lse=True, **options)
    wanted = torch.autograd.grad(expected, tensors, gradient)
    output, parts_lse = context_parallel_attention(*tensors, key_chunk=96, return_lse=True, **options)
    found = torch.autograd.grad(output, tensors, gradient)
    torch.testing.assert_close(parts_lse, lse, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(output, expected, rtol=0.02, atol=0.02)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=0.04, atol=0.04 * float(other.abs().max()))
