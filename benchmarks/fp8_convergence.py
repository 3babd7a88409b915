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
RECIPES = ("delayed", "current", "blockwise")


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


def batch_at(data: Tensor, step: int, batch: int, length: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 + step)
    starts = torch.randint(0, len(data) - length - 1, (batch,), generator=generator)
    rows = data[starts[:, None].to(data.device) + torch.arange(length + 1, device=data.device)].long()
    return rows[:, :-1], rows[:, 1:]


def train(recipe: str | None, data: Tensor, options: argparse.Namespace) -> tuple[list[float], int]:
    """Losses of all steps, by bf16 (None) or a recipe; and how many steps were skipped."""
    torch.manual_seed(0)
    device = data.device
    model = Transformer(options.dim, options.layers, options.length).to(device)
    config = precision.FP8Config(scaling_strategy=recipe or "current", convert="all", max_grad_norm=1.0)
    trainer = precision.FP8TrainingEngine(model, config)
    if recipe is None:
        trainer._is_set_up = True  # the same engine without a conversion
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.rate, betas=(0.9, 0.95), weight_decay=0.1)
    losses: list[Tensor] = []
    for step in range(options.steps):
        warm = min(1.0, (step + 1) / max(options.steps // 20, 1))
        falls = 0.55 + 0.45 * math.cos(math.pi * step / options.steps)
        for group in optimizer.param_groups:
            group["lr"] = options.rate * warm * falls
        with torch.autocast(device.type, torch.bfloat16):
            losses.append(trainer.training_step(*batch_at(data, step, options.batch, options.length)).detach())
        trainer.optimizer_step(optimizer)
    return torch.stack(losses).tolist(), trainer.get_training_statistics()["overflows"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--dim", type=int, default=384)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--recipes", nargs="*", default=RECIPES)
    parser.add_argument("--limit", type=float, default=1.0, help="percent by which a recipe's loss may exceed bf16's")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    data = corpus().to(options.device)
    tail = max(options.steps // 10, 1)
    runs: dict[str, dict[str, object]] = {}
    for recipe in (None, *options.recipes):
        begin = time.perf_counter()
        losses, skipped = train(recipe, data, options)
        last = sum(losses[-tail:]) / tail
        base = runs["bf16"]["loss"] if runs else last
        name = recipe or "bf16"
        runs[name] = {"loss": last, "percent": 100 * (last / base - 1), "skipped": skipped, "losses": losses[::20]}
        print(
            f"{name:10} loss {losses[0]:.4f} -> {last:.4f}  {runs[name]['percent']:+.3f} % of bf16, "
            f"{skipped} skipped, {time.perf_counter() - begin:.0f} s",
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
