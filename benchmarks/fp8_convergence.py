"""Whether training in FP8 arrives where bf16 does: a small transformer on this project's own documents and sources.

    python benchmarks/fp8_convergence.py [--device cuda|cpu] [--steps N] [--dim N] [--layers N] [--runs NAME...]

The same model, seed, batches and optimizer, once in bf16 and once for each recipe; all linear layers of the blocks and
the head compute in FP8 (convert="all": what pays is not the question here). Bytes are the vocabulary. The losses
compared are means over the last tenth of the steps, on batches that all runs share. Default: 10 million parameters.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as torch_functional
from torch import Tensor, nn
from torch_norms import describe_machine

from kernel_pytorch import precision

ROOT = Path(__file__).resolve().parent.parent
# By name: the recipe, and whose sums leave the FP8 accumulator every 128 of k.
WAYS: dict[str, tuple[str | None, str]] = {
    "bf16": (None, "all"),
    "delayed": ("delayed", "backward"),
    "delayed, fast": ("delayed", "none"),
    "current": ("current", "backward"),
    "blockwise": ("blockwise", "all"),
}


def corpus() -> Tensor:
    """The bytes of the project's documents and sources, in the order of their names."""
    files = sorted(
        path
        for pattern in ("*.md", "docs/**/*.md", "python/**/*.py", "kernel_pytorch/**/*.h", "kernel_pytorch/**/*.c*")
        for path in ROOT.glob(pattern)
        if path.is_file()
    )
    data = b"\n".join(path.read_bytes() for path in files)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


class Layer(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(self.norm1(x)).unflatten(-1, (3 * self.heads, -1)).transpose(1, 2).chunk(3, 1)
        attended = torch_functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(torch_functional.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    def __init__(self, dim: int, layers: int, length: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, dim), nn.Embedding(length, dim)
        self.layers = nn.ModuleList([Layer(dim, max(dim // 64, 1)) for _ in range(layers)])
        self.norm, self.head = nn.RMSNorm(dim), nn.Linear(dim, 256, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Run:
    """One training run, whose every step needs nothing but the device: a step counter, batches by it, rates by it."""

    def __init__(self, recipe: str | None, sums: str, data: Tensor, options: argparse.Namespace) -> None:
        torch.manual_seed(0)
        self.options, self.data, device = options, data, data.device
        config = precision.FP8Config(
            scaling_strategy=recipe or "current", accurate_sums=sums, convert="all" if recipe else "none"
        )
        model = Transformer(options.dim, options.layers, options.length).to(device)
        self.model = precision.convert_model_to_fp8(model, config)
        generator = torch.Generator().manual_seed(1)
        last = len(data) - options.length - 1
        self.starts = torch.randint(0, last, (options.steps, options.batch, 1), generator=generator).to(device)
        self.places = torch.arange(options.length + 1, device=device)
        step = torch.arange(options.steps)
        warm = ((step + 1) / max(options.steps // 20, 1)).clamp(max=1)
        self.rates = (options.rate * warm * (0.55 + 0.45 * torch.cos(math.pi * step / options.steps))).to(device)
        self.losses = torch.zeros(options.steps, device=device)
        self.step = torch.zeros(1, dtype=torch.int64, device=device)
        self.rate = torch.zeros((), device=device)
        on_gpu = device.type == "cuda"
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=self.rate if on_gpu else options.rate, betas=(0.9, 0.95), weight_decay=0.1,
            capturable=on_gpu,
        )  # fmt: skip

    def take_step(self) -> None:
        rows = self.data[self.starts[self.step][0] + self.places].long()
        with torch.autocast(self.data.device.type, torch.bfloat16, cache_enabled=False):
            logits = self.model(rows[:, :-1])
        loss = torch_functional.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0, foreach=True)
        self.rate.copy_(self.rates[self.step][0])
        if self.data.device.type != "cuda":
            self.optimizer.param_groups[0]["lr"] = float(self.rate)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)
        precision.update_fp8_scales(self.model)
        self.losses[self.step] = loss.detach()
        self.step += 1

    def train(self) -> list[float]:
        """The losses of all steps, or of those that fit into the time allowed."""
        end = time.perf_counter() + self.options.seconds
        take = self._captured_step() if self.data.device.type == "cuda" else self.take_step
        for step in range(self.options.steps):
            take()
            if step % 50 == 49:
                done = self.losses[: step + 1].tolist()  # waits for the device
                if time.perf_counter() > end:
                    return done
        return self.losses.tolist()

    def _captured_step(self) -> Callable[[], None]:
        """A few steps to warm up, back to the start, then one captured step replayed: launches are not waited for."""
        begin = [parameter.detach().clone() for parameter in self.model.parameters()]
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(3):
                self.take_step()
            graph = torch.cuda.CUDAGraph()
            stream.synchronize()
            with torch.cuda.graph(graph, stream=stream):
                self.take_step()
            with torch.no_grad():
                torch._foreach_copy_(list(self.model.parameters()), begin)
                for state in self.optimizer.state.values():
                    for value in state.values():
                        value.zero_()
                self.step.zero_()
        torch.cuda.synchronize()
        return graph.replay


def run_one(name: str, data: Tensor, options: argparse.Namespace) -> dict[str, object]:
    begin = time.perf_counter()
    run = Run(*WAYS[name], data, options)
    losses = run.train()
    overflows = precision.take_overflows(run.model)
    print(f"{name}: {len(losses)} steps, {time.perf_counter() - begin:.0f} s, last loss {losses[-1]:.4f}", flush=True)
    return {"losses": losses, "overflows": overflows}


def compare(runs: dict[str, dict[str, Any]]) -> float:
    """Prints each run against bf16, over the last tenth of the steps that all of them took; the largest excess."""
    steps = min(len(run["losses"]) for run in runs.values())
    tail = max(steps // 10, 1)
    ends = {name: sum(run["losses"][steps - tail : steps]) / tail for name, run in runs.items()}
    for name, run in runs.items():
        run["end"], run["percent"] = ends[name], 100 * (ends[name] / ends["bf16"] - 1)
        overflows = f", overflows in {run['overflows']}" if run["overflows"] else ""
        print(f"{name:14} {steps} steps: loss {ends[name]:.4f}, {run['percent']:+.3f} % of bf16{overflows}")
    return max(run["percent"] for run in runs.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--dim", type=int, default=384)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--seconds", type=float, default=math.inf, help="of training for each run")
    parser.add_argument("--runs", nargs="*", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--join", nargs="*", type=Path, default=[], help="files of runs taken apart, to be compared")
    parser.add_argument("--limit", type=float, default=1.0, help="percent by which a recipe's loss may exceed bf16's")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    files = [json.loads(path.read_text()) for path in options.join]
    runs = {name: run for file in files for name, run in file["runs"].items()}
    if not files:
        data = corpus().to(options.device)
        runs = {name: run_one(name, data, options) for name in options.runs}
    worst = compare(runs) if "bf16" in runs else 0.0
    if options.output:
        settings = {name: getattr(options, name) for name in ("steps", "dim", "layers", "length", "batch", "rate")}
        machine = describe_machine(torch.device(options.device))
        options.output.write_text(json.dumps({"machine": machine, "settings": settings, "runs": runs}))
    if worst > options.limit:
        raise SystemExit(f"fp8_convergence: a recipe ends {worst:.2f} % above bf16; at most {options.limit} % may be")


if __name__ == "__main__":
    main()
