"""Block fusion: torch's encoder layer, and the same layer with its parts fused where that measurably pays."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import torch
from common import Demo
from kernel_pytorch.attention import FusionConfig, create_unified_attention_fusion

demo = Demo("Block fusion: attention, feed-forward and norms of a transformer layer")
width, heads, length = (128, 4, 64) if demo.quick else (768, 12, 512)
layer = torch.nn.TransformerEncoderLayer(width, heads, 4 * width, batch_first=True, activation="gelu")
layer = layer.to(demo.device).eval()
fused = create_unified_attention_fusion(layer, config=FusionConfig(budget_seconds=3 if demo.quick else 15))
x = torch.randn(4, length, width, device=demo.device)
with torch.no_grad():
    demo.check("output", fused(x), layer(x), 1e-4)
    demo.compare({"torch": lambda: layer(x), "fused": lambda: fused(x)})
print("  " + str(fused.report).replace("\n", "\n  "))
demo.finish()
