"""Sparse attention: the blocks of scores that matter. What is computed is exact; what leaving the rest out costs is
measured."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import torch
import torch.nn.functional as F
from common import Demo
from kernel_pytorch.attention import create_sparse_attention

demo = Demo("Sparse attention: fewer blocks of scores")
width, heads, length = (128, 2, 1024) if demo.quick else (512, 8, 4096)
x = torch.randn(1, length, width, device=demo.device)


def by_torch(layer: torch.nn.Module) -> torch.Tensor:
    q, k, v = (
        each(x).unflatten(-1, (heads, -1)).transpose(1, 2) for each in (layer.q_proj, layer.k_proj, layer.v_proj)
    )
    return layer.out_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


with torch.no_grad():
    for ratio in (0.0, 0.5, 0.9):
        layer = create_sparse_attention(width, heads, sparsity_ratio=ratio, causal=True).to(demo.device).eval()
        stats = layer.get_attention_stats(x)
        print(
            f"  sparsity {ratio}: "
            + ", ".join(f"{key} {value:.3g}" for key, value in stats.items() if isinstance(value, float))
        )
        if ratio == 0.0:
            demo.check("nothing left out", layer(x), by_torch(layer), 1e-4)
        else:
            demo.compare(
                {
                    "torch, dense": lambda layer=layer: by_torch(layer),
                    f"{ratio:.0%} left out": lambda layer=layer: layer(x),
                }
            )
print("  Random tokens attend to everything: leaving blocks out costs most here. Text: benchmarks/sparse_perplexity.py")
demo.finish()
