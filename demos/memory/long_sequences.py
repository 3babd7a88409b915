"""Long sequences by segments: each sees its own keys and a bounded memory of those before, in constant memory."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import torch
import torch.nn.functional as F
from common import Demo
from kernel_pytorch.advanced_memory import LongSequenceOptimizer, SegmentedAttentionMemory

demo = Demo("Long sequences: segments with a memory")
length, width, heads, segment = (512, 64, 4, 64) if demo.quick else (8192, 256, 8, 1024)
x = torch.randn(1, length, width, device=demo.device)
whole = SegmentedAttentionMemory(width, heads, segment_length=segment, memory_length=length).to(demo.device).eval()
short = SegmentedAttentionMemory(width, heads, segment_length=segment, memory_length=segment).to(demo.device).eval()
short.load_state_dict(whole.state_dict())


def by_torch(x: torch.Tensor) -> torch.Tensor:
    """Full causal attention with the same parameters."""
    part = whole.attention
    q, k, v = (each(x).unflatten(-1, (heads, -1)).transpose(1, 2) for each in (part.q_proj, part.k_proj, part.v_proj))
    return part.out_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


with torch.no_grad():
    demo.check("with all keys as memory: full attention", whole(x), by_torch(x), 1e-4)
    parts = [short(part) for part in LongSequenceOptimizer(segment).segment_sequence(x)]
    demo.check("segment by segment: as at once", torch.cat(parts, 1), short(x), 1e-4)
    demo.compare({"torch, full attention": lambda: by_torch(x), "segments, short memory": lambda: short(x)})
demo.finish()
