"""FlashLightKernelCompiler: functions in, a kernel object out."""

from __future__ import annotations

import pytest
import torch
from kernel_pytorch.optimizations.next_gen import FlashLightKernelCompiler

from kernel_pytorch import functional


def test_a_compiled_kernel_is_the_attention_of_its_functions() -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 4, 12, 16, requires_grad=True) for _ in range(3))
    slopes = torch.rand(4)

    def score(score, batch, head, q, k):
        return score - slopes[head] * (q - k).abs()

    kernel = FlashLightKernelCompiler(scale=0.3).compile(score, lambda b, h, q, k: q >= k, sample=(query, key, value))
    assert kernel.score_program and kernel.mask_program
    ours = kernel(query, key, value)
    places = torch.arange(12)
    distance = (places[:, None] - places).abs()
    scores = 0.3 * query @ key.mT - slopes[:, None, None] * distance
    theirs = scores.masked_fill(places[:, None] < places, -torch.inf).softmax(-1) @ value
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    for a, b in zip(
        torch.autograd.grad(ours.square().sum(), (query, key, value)),
        torch.autograd.grad(theirs.square().sum(), (query, key, value)), strict=True,
    ):  # fmt: skip
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def test_options_of_a_call_and_functions_that_no_program_can_be() -> None:
    query = torch.randn(1, 2, 8, 16)
    compiler = FlashLightKernelCompiler(causal=True)
    plain = compiler.compile()
    assert plain.score_program == "" and torch.equal(
        plain(query, query, query), functional.attention(query, query, query, causal=True)
    )
    assert torch.equal(plain(query, query, query, causal=False), functional.attention(query, query, query))
    with pytest.raises(TypeError):
        compiler.compile(lambda score, b, h, q, k: score if score > 0 else -score)
