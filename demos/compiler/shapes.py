"""Changing shapes: lengths padded to a few buckets, so that each can have its own graph or compilation."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import torch
from common import Demo
from kernel_pytorch.optimization_patterns import (
    BucketingStrategy,
    DynamicShapeModule,
    create_optimal_bucketing_system,
)

demo = Demo("Dynamic shapes: buckets for lengths that change", compare_strategies="all strategies on the same lengths")
width, count = (64, 60) if demo.quick else (256, 300)
lengths = (torch.randn(count).exp() * 60 + 8).long().clamp(max=512).tolist()
samples = [(4, length, width) for length in lengths]
strategies = list(BucketingStrategy) if demo.options.compare_strategies else [BucketingStrategy.HARDWARE_AWARE]
print(f"  {len(set(lengths))} lengths from {min(lengths)} to {max(lengths)}")
print(f"  {'strategy':16} {'buckets':>8} {'padding':>8}")
for strategy in strategies:
    system = create_optimal_bucketing_system(samples, strategy=strategy, max_buckets=8)
    shapes = [system.bucket_shape(system.find_optimal_bucket(sample)) for sample in samples]
    padded, real = sum(shape[1] for shape in shapes), sum(lengths)
    print(f"  {strategy.value:16} {len(set(shapes)):8} {padded / real - 1:8.1%}")
    demo.require(
        strategy.value,
        all(shape[1] >= length for shape, length in zip(shapes, lengths)),
        "every length fits its bucket",
    )

layer = torch.nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True).to(demo.device).eval()
system = create_optimal_bucketing_system(samples, max_buckets=8)
bucketed = DynamicShapeModule(layer, system, padding="always" if demo.device.type == "cpu" else "auto")
inputs = [torch.randn(sample, device=demo.device) for sample in samples[:20]]
with torch.no_grad():
    worst = max(inputs, key=lambda x: float((bucketed(x) - layer(x)).abs().max()))
    demo.check("padded and cut back", bucketed(worst), layer(worst), 1e-4)
    demo.compare(
        {"as they come": lambda: [layer(x) for x in inputs], "in buckets": lambda: [bucketed(x) for x in inputs]}
    )
if demo.device.type == "cpu":
    print('  On a CPU a bucket has no graph, so padding only costs time; without padding="always" it is skipped here.')
demo.finish()
