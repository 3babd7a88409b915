"""Functions of others with ours under the names that they call."""

from __future__ import annotations

import torch
from kernel_pytorch._rebind import rebind
from torch import nn
from torch.nn import functional as F


def test_rebinding_changes_nothing_outside():
    def ours(x):
        return x * 0

    def helper(x):
        return F.gelu(x)

    scope = {"torch": torch, "F": F, "helper": helper}
    source = "def forward(self, x):\n    return torch.nn.functional.gelu(x) + helper(x) + F.relu(x) + torch.exp(x)\n"
    exec(source, scope)
    x = torch.randn(5)
    made = rebind(scope["forward"], {F.gelu: ours})
    torch.testing.assert_close(made(None, x), F.relu(x) + x.exp())
    torch.testing.assert_close(scope["forward"](None, x), 2 * F.gelu(x) + F.relu(x) + x.exp())
    assert rebind(scope["forward"], {F.silu: ours}) is None


def test_a_rebound_function_hands_itself_to_modes():
    """torch's Python functions ask has_torch_function and hand themselves over where a mode is active."""

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    called = []

    def ours(*args, **kwargs):
        called.append(1)
        return F.scaled_dot_product_attention(*args, **kwargs)

    layer, x = nn.MultiheadAttention(8, 2), torch.randn(3, 1, 8)
    made = rebind(nn.MultiheadAttention.forward, {F.scaled_dot_product_attention: ours})
    with torch.no_grad(), Mode():
        found, _ = made(layer, x, x[:2], x[:2], need_weights=False)
    assert called == [1]
    torch.testing.assert_close(found, layer(x, x[:2], x[:2], need_weights=False)[0])
