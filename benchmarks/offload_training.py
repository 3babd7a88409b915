"""A training step with AdamW's 8-bit states streamed from the host's memory, against states on the GPU.

    python benchmarks/offload_training.py [--layers 40] [--tokens 16384] [--turns 5] [--output FILE]

A decoder of bf16 blocks (2048 wide, 5632 inside; 51 million parameters a block, 2.06 billion in 40). What has to be
hidden, bytes of states over operations, depends on the tokens of a step alone, so that a few blocks stand for a larger
model. States are streamed inside backward, gradients released; or, with clipping, under the next forward. A pair's
losses are apart because attention's backward adds in another order from run to run.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from kernel_pytorch.optim import AdamW, overlap_forward, release_gradients
from table import print_and_store
from torch import Tensor, nn
from torch_norms import describe_machine

WIDTH, INSIDE, HEADS, LENGTH = 2048, 5632, 16, 4096


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ParameterList(torch.ones(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 2 * INSIDE, bias=False), nn.Linear(INSIDE, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        normed = F.rms_norm(x, (WIDTH,), self.norms[0])
        query, key, value = self.qkv(normed).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, WIDTH))
        gate, up = self.up(F.rms_norm(x, (WIDTH,), self.norms[1])).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


def make(layers: int, options: dict[str, Any]) -> tuple[nn.Module, AdamW]:
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = nn.Sequential(*(Block().to(torch.bfloat16) for _ in range(layers)))
    optimizer = AdamW(model.parameters(), lr=1e-4, state="compact", **options)
    if optimizer.max_grad_norm is None:
        release_gradients(optimizer)
    elif "offload" in options:
        overlap_forward(optimizer, model)
    return model, optimizer


def apart(losses: list[float], others: list[float]) -> float:
    return max(abs(one / other - 1) for one, other in zip(losses, others, strict=True))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("offload_training: torch sees no CUDA device here")
    options: dict[str, dict[str, Any]] = {"resident": {}, "streamed": {"offload": "stream"}}
    options |= {f"{name}, clipped": {**one, "max_grad_norm": 1.0} for name, one in options.items()}
    ways = {name: make(arguments.layers, one) for name, one in options.items()}
    x = torch.randn(max(arguments.tokens // LENGTH, 1), min(LENGTH, arguments.tokens), WIDTH, device="cuda").bfloat16()
    times: dict[str, list[float]] = {name: [] for name in ways}
    losses: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(arguments.turns + 2):
        for name, (model, optimizer) in ways.items():
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(2):  # the second forward begins while the first step's last states are on their way
                loss = model(x).float().square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            torch.cuda.synchronize()
            if turn >= 2:
                times[name].append((time.perf_counter() - begin) / 2)
            losses[name].append(float(loss.detach()))
    parameters = sum(parameter.numel() for parameter in ways["resident"][0].parameters())
    medians = {name: statistics.median(taken) for name, taken in times.items()}
    figures = [
        {
            "way": name,
            "a step": f"{medians[name] * 1e3:.2f} ms ({min(taken) * 1e3:.2f} to {max(taken) * 1e3:.2f})",
            "of resident": f"{medians[name] / medians[name.replace('streamed', 'resident')]:.3f}x",
            "losses apart": f"{100 * apart(losses[name], losses[name.replace('streamed', 'resident')]):.4f} %",
            "seconds": taken,
        }
        for name, taken in times.items()
    ]
    run = {
        "machine": describe_machine(torch.device("cuda")),
        "parameters": parameters,
        "tokens": arguments.tokens,
        "columns": ["way", "a step", "of resident", "losses apart"],
        "figures": figures,
    }
    print_and_store(run, arguments.output)
    print(f"{parameters:,} parameters, {arguments.tokens} tokens")
    return 0


if __name__ == "__main__":
    sys.exit(main())
