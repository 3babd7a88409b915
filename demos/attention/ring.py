"""Ring attention: exact attention over a sequence in pieces. Memory grows with the length, not with its square."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import torch
from common import Demo
from kernel_pytorch.attention import create_attention, create_ring_attention

demo = Demo("Ring attention: long sequences in linear memory")
width, heads = 64, 4
ring = create_ring_attention(width, heads).to(demo.device).eval()
whole = create_attention(embed_dim=width, num_heads=heads).to(demo.device).eval()
whole.load_state_dict(ring.state_dict())
length = 512 if demo.quick else 4096
x = torch.randn(1, length, width, device=demo.device)


def by_scores(x: torch.Tensor) -> torch.Tensor:
    """The textbook: all scores in memory."""
    q, k, v = (
        each(x).unflatten(-1, (heads, -1)).transpose(1, 2) for each in (whole.q_proj, whole.k_proj, whole.v_proj)
    )
    scores = (q @ k.mT) / (width // heads) ** 0.5
    return whole.out_proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


with torch.no_grad():
    demo.check("output", ring(x), by_scores(x), 1e-4)
    demo.compare({"all scores in memory": lambda: by_scores(x), "ring attention": lambda: ring(x)})
    long = 8192 if demo.quick else 131072 if demo.device.type == "cuda" else 32768
    many = torch.randn(1, long, width, device=demo.device)
    some = slice(0, 1)
    q, k, v = (
        each(many).unflatten(-1, (heads, -1)).transpose(1, 2) for each in (whole.q_proj, whole.k_proj, whole.v_proj)
    )
    row = (((q[:, :, some] @ k.mT) / (width // heads) ** 0.5).softmax(-1) @ v).transpose(1, 2).flatten(2)
    demo.check(f"first row of {long:,} tokens", ring(many)[:, some], whole.out_proj(row), 1e-4)
    print(
        f"  {long:,} tokens: the scores would take {heads * long * long * 4 / 1e9:.1f} GB, q, k, v and the output take "
        f"{4 * many.nbytes / 1e6:.1f} MB"
    )
demo.finish()
