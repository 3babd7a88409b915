"""attention_part_ and its backward: parts added up are one call, and torch knows what they write."""

from __future__ import annotations

import kernel_pytorch.functional as F
import pytest
import torch
from kernel_pytorch._ops.attention_part import empty_parts


def _whole_and_parts(dtype: torch.dtype, layout: str, **options: object) -> None:
    torch.manual_seed(3)
    shape = (2, 4, 70, 24) if layout == "bhsd" else (2, 70, 4, 24)
    dim = 2 if layout == "bhsd" else 1
    query, key, value = (torch.randn(shape, dtype=dtype, requires_grad=True) for _ in range(3))
    expected, expected_lse = F.attention(query, key, value, layout=layout, return_lse=True, **options)
    gradient = torch.randn_like(expected)
    lse_gradient = torch.randn_like(expected_lse)
    expected.mul(gradient).sum().add(expected_lse.mul(lse_gradient).sum()).backward()

    numbers = torch.promote_types(dtype, torch.float32)
    output, lse = empty_parts(query, value, layout)
    ranges = [(33, 70), (0, 33), (33, 33)]
    for first, end in ranges:
        keys, values = (
            key.detach()[(slice(None),) * dim + (slice(first, end),)],
            value.detach().narrow(dim, first, end - first),
        )
        F.attention_part_(
            output, lse, query.detach(), keys, values, first_key=first, layout=layout, causal_offset=0, **options
        )
    tolerance = 2e-6 if numbers is dtype or dtype is torch.float32 else 0.02
    torch.testing.assert_close(output, expected.to(numbers), rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse, expected_lse, rtol=2e-6, atol=2e-6)
    grads = [torch.zeros(shape, dtype=numbers), *(torch.full(shape, torch.nan, dtype=numbers) for _ in range(2))]
    for first, end in ranges:
        part = [tensor.detach().narrow(dim, first, end - first) for tensor in (key, value)]
        into = [grad.narrow(dim, first, end - first) for grad in grads[1:]]
        F.attention_part_backward_(
            grads[0], *into, gradient, query.detach(), *part, expected.detach(), expected_lse.detach(), lse_gradient,
            first_key=first, writes_keys=True, layout=layout, causal_offset=0, **options,
        )  # fmt: skip
    for grad, tensor in zip(grads, (query, key, value), strict=True):
        assert tensor.grad is not None
        torch.testing.assert_close(grad, tensor.grad.to(numbers), rtol=4 * tolerance, atol=4 * tolerance)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_parts_are_the_whole(dtype: torch.dtype, layout: str) -> None:
    _whole_and_parts(dtype, layout, causal=True)
    seed = torch.tensor([5, 7])
    _whole_and_parts(dtype, layout, causal=True, window=(20, 0), dropout_p=0.25, seed=seed, softcap=3.0)
    _whole_and_parts(dtype, layout, mask_mod=lambda b, h, q, k: (k <= q) | (k < 7 * h))


def test_a_part_has_no_gradient_of_its_own() -> None:
    query = torch.randn(1, 1, 4, 8, requires_grad=True)
    output, lse = empty_parts(query, query)
    F.attention_part_(output, lse, query, query, query)
    assert not output.requires_grad
    with pytest.raises(RuntimeError, match="lse is fp64"):
        F.attention_part_(output, lse.double(), query, query, query)


def test_torch_knows_what_a_part_writes() -> None:
    query, key, value = (torch.randn(1, 2, 8, 8) for _ in range(3))

    def added(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        output, lse = empty_parts(query, value)
        F.attention_part_(output, lse, query, key[:, :, :5], value[:, :, :5])
        F.attention_part_(output, lse, query, key[:, :, 5:], value[:, :, 5:], first_key=5)
        return output + lse[..., None]

    compiled = torch.compile(added, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(query, key, value), added(query, key, value))
