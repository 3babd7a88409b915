"""torch's own attention functions while this library is their flash attention."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
import torch.nn.functional as torch_functional  # noqa: E402
from kernel_pytorch.compat import torch_sdpa  # noqa: E402

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture
def active():
    torch_sdpa.register()
    assert "kernel_pytorch" in torch.nn.attention.list_flash_attention_impls()
    torch.nn.attention.activate_flash_attention_impl("kernel_pytorch")
    yield
    torch.nn.attention.restore_flash_attention_impl()


def launches(function):
    """What ops of ours ran."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        function()
    return {event.name for event in profile.events() if event.name.startswith("kernel_pytorch::")}


def attend(q, k, v, **options):
    output = torch_functional.scaled_dot_product_attention(q, k, v, **options)
    return output, *torch.autograd.grad(output.float().square().sum(), (q, k, v))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("causal", [False, True])
def test_values_and_gradients(device, causal, request):
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, 33, 32, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
    expected = attend(q, k, v, is_causal=causal)
    request.getfixturevalue("active")
    actual = attend(q, k, v, is_causal=causal)
    bound = 1e-5 if device == "cpu" else 3e-2
    for mine, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=bound, atol=bound)
    ran = launches(lambda: attend(q, k, v, is_causal=causal))
    assert {"kernel_pytorch::attention_forward", "kernel_pytorch::attention_backward"} <= ran


def test_masks_on_the_cpu(request):
    torch.manual_seed(1)
    q, k, v = (torch.randn(2, 3, 9, 16, requires_grad=True) for _ in range(3))
    mask = torch.rand(2, 1, 9, 9) < 0.7
    mask[..., 0] = True
    expected = attend(q, k, v, attn_mask=mask, scale=0.3)
    request.getfixturevalue("active")
    torch.testing.assert_close(attend(q, k, v, attn_mask=mask, scale=0.3), expected, rtol=1e-5, atol=1e-5)
    assert launches(lambda: attend(q, k, v, attn_mask=mask))


def test_a_whole_module(request):
    torch.manual_seed(2)
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    x = torch.randn(2, 11, 32)
    expected = layer(x)
    request.getfixturevalue("active")
    torch.testing.assert_close(layer(x), expected, rtol=1e-5, atol=1e-5)
    compiled = torch.compile(layer, fullgraph=True)
    torch.testing.assert_close(compiled(x), expected, rtol=1e-4, atol=1e-5)


def test_inactive_again_afterwards():
    torch_sdpa.register()
    torch.nn.attention.activate_flash_attention_impl("kernel_pytorch")
    torch.nn.attention.restore_flash_attention_impl()
    q = torch.randn(1, 2, 5, 16)
    assert not launches(lambda: torch_functional.scaled_dot_product_attention(q, q, q))
