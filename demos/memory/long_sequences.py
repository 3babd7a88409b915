"""Long sequences by segments: each sees its own keys and a bounded memory of those before."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import torch
from common import Demo
from kernel_pytorch.advanced_memory import LongSequenceOptimizer

demo = Demo("Long sequences: segments")
length, width = (1000, 32) if demo.quick else (100_000, 256)
x = torch.randn(2, length, width, device=demo.device)
optimizer = LongSequenceOptimizer(max_segment_length=256)
segments = optimizer.segment_sequence(x)
demo.require("segments", all(segment.shape[1] <= 256 for segment in segments), f"{len(segments)} of at most 256 tokens")
demo.check("joined again", torch.cat(list(segments), 1), x, 0.0)
demo.finish()
