"""Flexible attention: score and mask functions compiled into the kernel, against a mask of all scores in torch."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import torch
import torch.nn.functional as F
from common import Demo
from kernel_pytorch.attention import alibi_slopes

from kernel_pytorch import functional as kp

demo = Demo("Flexible attention: window, ALiBi, soft cap")
batch, heads, length, size = (1, 4, 512, 64) if demo.quick else (2, 8, 2048, 64)
q, k, v = (torch.randn(batch, heads, length, size, device=demo.device) for _ in range(3))
at = torch.arange(length, device=demo.device)
distance = at[None, :] - at[:, None]  # key minus query
window = 128
in_window = (distance <= 0) & (distance > -window)
slopes = alibi_slopes(heads).to(demo.device)


def capped(mask: torch.Tensor, cap: float) -> torch.Tensor:
    scores = torch.tanh(q @ k.mT / size**0.5 / cap) * cap
    return scores.masked_fill(~mask, float("-inf")).softmax(-1) @ v


cases = {
    "sliding window of 128": (
        lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=in_window),
        lambda: kp.attention(q, k, v, causal=True, window=(window - 1, 0)),
    ),
    "ALiBi, causal": (
        lambda: F.scaled_dot_product_attention(
            q, k, v, attn_mask=(slopes[:, None, None] * distance).masked_fill(distance > 0, float("-inf"))
        ),
        lambda: kp.attention(q, k, v, causal=True, alibi_slopes=slopes),
    ),
    "soft cap of 20, causal": (
        lambda: capped(distance <= 0, 20.0),
        lambda: kp.attention(q, k, v, causal=True, softcap=20.0),
    ),
    "a mask function of one's own": (
        lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=(distance % 3 == 0)),
        lambda: kp.attention(q, k, v, mask_mod=lambda b, h, q_at, k_at: (k_at - q_at) % 3 == 0),
    ),
}
for name, (torch_way, our_way) in cases.items():
    demo.check(name, our_way(), torch_way(), 1e-4)
    demo.compare({f"{name}: torch": torch_way, f"{name}: kernel_pytorch": our_way}, 0.3 if demo.quick else 2.0)
demo.finish()
