"""Whether training in FP8 arrives where bf16 does: a small transformer on this project's own documents and sources.

    python benchmarks/fp8_convergence.py [--device cuda|cpu] [--steps N] [--dim N] [--layers N] [--output FILE]

The same model, seed, batches and optimizer, once in bf16 and once for each recipe; all linear layers of the blocks and
the head compute in FP8 (convert="all": what pays is not the question here). Bytes are the vocabulary. The losses
compared are means over the last tenth of the steps, on batches that all runs share. Default: 10 million parameters.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path

import torch
import torch.nn.functional as torch_functional
from torch import Tensor, nn
from torch_norms import describe_machine

from kernel_pytorch import precision

ROOT = Path(__file__).resolve().parent.parent
# Recipes, and whose sums leave the FP8 accumulator every 128 of k.
WAYS = (("delayed", "backward"), ("delayed", "none"), ("current", "backward"), ("blockwise", "all"))


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
        if self.data.device.type != "cuda":
            for _ in range(self.options.steps):
                self.take_step()
            return self.losses.tolist()
        self._train_by_graph()
        return self.losses.tolist()

    def _train_by_graph(self) -> None:
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
            for _ in range(self.options.steps):
                graph.replay()
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--dim", type=int, default=384)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--recipes", nargs="*", default=("delayed", "current", "blockwise"))
    parser.add_argument("--limit", type=float, default=1.0, help="percent by which a recipe's loss may exceed bf16's")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    data = corpus().to(options.device)
    tail = max(options.steps // 10, 1)
    runs: dict[str, dict[str, object]] = {}
    for recipe, sums in ((None, "all"), *(way for way in WAYS if way[0] in options.recipes)):
        begin = time.perf_counter()
        run = Run(recipe, sums, data, options)
        losses = run.train()
        last = sum(losses[-tail:]) / tail
        base = runs["bf16"]["loss"] if runs else last
        name = f"{recipe}, accurate: {sums}" if recipe else "bf16"
        overflows = precision.take_overflows(run.model)
        runs[name] = {"loss": last, "percent": 100 * (last / base - 1), "overflows": overflows, "losses": losses[::20]}
        print(
            f"{name:28} loss {losses[0]:.4f} -> {last:.4f}  {runs[name]['percent']:+.3f} % of bf16, "
            f"{len(overflows)} layers overflowed, {time.perf_counter() - begin:.0f} s",
            flush=True,
        )
    if options.output:
        settings = {name: value for name, value in vars(options).items() if name not in ("output", "recipes")}
        machine = describe_machine(torch.device(options.device))
        options.output.write_text(json.dumps({"machine": machine, "settings": settings, "runs": runs}, indent=1))
    worst = max(float(run["percent"]) for run in runs.values())  # type: ignore[arg-type]
    if worst > options.limit:
        raise SystemExit(
            f"fp8_convergence: a recipe ends {worst:.2f} % above bf16; at most {options.limit} % is allowed"
        )


if __name__ == "__main__":
    main()
