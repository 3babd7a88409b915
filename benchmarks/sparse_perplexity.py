"""What sparse attention costs a language model: perplexity on held-out text, dense against every pattern.

    python benchmarks/sparse_perplexity.py [--device cuda|cpu] [--steps N] [--dim N] [--length N] [--output FILE]

A transformer over bytes is trained with dense attention on this project's documents and sources, every 20th file left
out; then its attention layers are replaced by sparse ones with the same weights, and the perplexity of the files left
out is taken again. The gate of the learned pattern, and nothing else, is trained for a tenth of the steps. The content
chooses anew in every layer and head. Fails where dynamic selection at 75 % costs more than --limit percent.

"Scores" are the entries that dynamic selection computes to choose (a mean of queries with a mean of keys), out of those
of dense causal attention: they add to what is not left out. --blocks tries several sizes of blocks on one model.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as torch_functional
from kernel_pytorch.attention import DynamicSparseAttention, SparsePattern
from kernel_pytorch.functional import rope_tables
from table import print_and_store
from torch import Tensor, nn
from torch_norms import describe_machine

ROOT = Path(__file__).resolve().parent.parent
RATIOS = (0.5, 0.75, 0.9)
HEAD_SIZE = 32


def corpus(device: torch.device, root: Path = ROOT) -> tuple[Tensor, Tensor]:
    """The bytes to train on and those held out, of a folder's documents and sources in the order of their names."""
    files = sorted(
        path
        for pattern in ("*.md", "docs/**/*.md", "python/**/*.py", "kernel_pytorch/**/*.h", "kernel_pytorch/**/*.c*")
        for path in root.glob(pattern)
        if path.is_file()
    )
    parts = [
        b"\n".join(p.read_bytes() for i, p in enumerate(files) if (i % 20 == 10) == held) for held in (False, True)
    ]
    train, held_out = (torch.frombuffer(bytearray(part), dtype=torch.uint8).to(device) for part in parts)
    return train, held_out


class Layer(nn.Module):
    def __init__(self, dim: int, block: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.attention = DynamicSparseAttention(dim, dim // HEAD_SIZE, causal=True, block_size=block)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
        self.is_dense = True

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        attend = self.attention.dense if self.is_dense else self.attention
        x = x + attend(self.norm1(x), rotary=rotary)
        return x + self.down(torch_functional.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    def __init__(self, dim: int, layers: int, block: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, dim)
        self.layers = nn.ModuleList([Layer(dim, block) for _ in range(layers)])
        self.norm, self.head = nn.RMSNorm(dim), nn.Linear(dim, 256, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                adds_to_the_sum = "out_proj" in name or "down" in name
                nn.init.normal_(parameter, std=0.02 if adds_to_the_sum or parameter.shape[0] == 256 else dim**-0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        rotary = tuple(table.to(x.device) for table in rope_tables(tokens.shape[1], HEAD_SIZE))
        for layer in self.layers:
            x = layer(x, rotary)
        return self.head(self.norm(x))

    def sparse_layers(self) -> list[Any]:
        return [layer.attention for layer in self.layers]


def loss_of(model: Transformer, rows: Tensor) -> Tensor:
    with torch.autocast(rows.device.type, torch.bfloat16, enabled=rows.device.type == "cuda"):
        logits = model(rows[:, :-1])
    return torch_functional.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten())


def batches(data: Tensor, count: int, batch: int, length: int, seed: int) -> Callable[[int], Tensor]:
    starts = torch.randint(0, len(data) - length - 1, (count, batch, 1), generator=torch.Generator().manual_seed(seed))
    places = torch.arange(length + 1, device=data.device)
    return lambda step: data[starts[step].to(data.device) + places].long()


def train(model: Transformer, data: Tensor, options: argparse.Namespace, steps: int, parameters: list[nn.Parameter],
          extra: Callable[[], Tensor | float] = lambda: 0.0, seed: int = 0) -> float:  # fmt: skip
    optimizer = torch.optim.AdamW(parameters, lr=options.rate, betas=(0.9, 0.95), weight_decay=0.1)
    short_seed, long_seed = 1 + 10 * seed, 2 + 10 * seed
    short = batches(data, steps // 2, 2 * options.batch, options.length // 4, short_seed)  # first, they teach faster
    long = batches(data, steps, options.batch, options.length, long_seed)
    loss = torch.zeros(())
    begin = time.perf_counter()
    for step in range(steps):
        warm = min((step + 1) / max(steps // 20, 1), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = options.rate * warm * (0.55 + 0.45 * math.cos(math.pi * step / steps))
        loss = loss_of(model, short(step) if step < steps // 2 else long(step))
        optimizer.zero_grad()
        (loss + extra()).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        if step % 50 == 49:
            passed = time.perf_counter() - begin
            print(f"step {step + 1}: loss {float(loss.detach()):.3f}, {passed:.0f} s", file=sys.stderr, flush=True)
    return float(loss.detach())


def replace_attention(model: Transformer, pattern: SparsePattern | None, ratio: float, block: int) -> None:
    """Layers of the pattern with the weights they have; None: dense."""
    for number, layer in enumerate(model.layers):
        old = layer.attention
        layer.is_dense = pattern is None
        if pattern is None:
            continue
        config = old.config
        new = DynamicSparseAttention(
            config.embed_dim, config.num_heads, ratio, pattern, causal=True, block_size=block, seed=number
        ).to(next(old.parameters()).device)
        new.load_state_dict(old.state_dict(), strict=False)
        layer.attention = new


def train_gates(model: Transformer, data: Tensor, options: argparse.Namespace) -> None:
    gates = [p for layer in model.sparse_layers() for p in layer.gate.parameters()]
    layers = model.sparse_layers()
    model.train()
    model.requires_grad_(False)
    for parameter in gates:
        parameter.requires_grad_(True)
    steps = max(options.steps // 10, 1)
    train(model, data, options, steps, gates, lambda: torch.stack([layer.sparsity_loss() for layer in layers]).mean())
    model.requires_grad_(True)


@torch.no_grad()
def perplexity(model: Transformer, rows: Tensor) -> float:
    model.eval()
    return math.exp(sum(float(loss_of(model, one)) for one in rows.split(4)) / len(rows.split(4)))


def score_share(length: int, block: int) -> float:
    """Entries by which DynamicSparseAttention chooses: a row of blocks with the parts of the blocks up to its own."""
    rows = -(-length // block)
    return rows * (rows + 1) / 2 * math.gcd(block, 4) / (length * (length + 1) / 2)


def measure(model: Transformer, train_data: Tensor, rows: Tensor, options: argparse.Namespace) -> list[dict[str, Any]]:
    replace_attention(model, None, 0.0, 0)
    dense = perplexity(model, rows)
    results = [{"pattern": "dense", "ratio": 0.0, "sparsity": 0.0, "scores": 0.0, "perplexity": dense, "percent": 0.0}]
    cases = [(pattern, block) for pattern in map(SparsePattern, options.patterns) for block in options.blocks]
    for pattern, block in cases:
        for ratio in options.ratios:
            replace_attention(model, pattern, ratio, block)
            if pattern is SparsePattern.LEARNED:
                train_gates(model, train_data, options)
            value = perplexity(model, rows)
            stats = [layer.get_attention_stats() for layer in model.sparse_layers()]
            sparsity = sum(one["actual_sparsity"] for one in stats) / len(stats)
            percent = 100 * (value / dense - 1)
            results.append(
                {
                    "pattern": pattern.value,
                    "ratio": ratio,
                    "block": block,
                    "sparsity": sparsity,
                    "scores": score_share(options.length, block) if pattern is SparsePattern.DYNAMIC_THRESHOLD else 0.0,
                    "perplexity": value,
                    "percent": percent,
                }
            )
            print(
                f"{pattern.value} {ratio:.0%}, blocks of {block}: {value:.3f} ({percent:+.2f} %)",
                file=sys.stderr,
                flush=True,
            )
    return results


def main() -> int:
    on_gpu = torch.cuda.is_available()
    names = [pattern.value for pattern in SparsePattern]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if on_gpu else "cpu")
    parser.add_argument("--steps", type=int, default=3000 if on_gpu else 400)
    parser.add_argument("--dim", type=int, default=384 if on_gpu else 128)
    parser.add_argument("--layers", type=int, default=6 if on_gpu else 3)
    parser.add_argument("--length", type=int, default=2048 if on_gpu else 1024)
    parser.add_argument("--blocks", type=int, nargs="+", default=[16])
    parser.add_argument("--patterns", nargs="+", default=list(names), choices=names)
    parser.add_argument("--ratios", type=float, nargs="+", default=RATIOS)
    parser.add_argument("--batch", type=int, default=16 if on_gpu else 4)
    parser.add_argument("--rate", type=float, default=1e-3 if on_gpu else 3e-3)
    parser.add_argument("--held-out", type=int, default=64 if on_gpu else 12, help="sequences of the perplexities")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--limit", type=float, default=2.0, help="percent that dynamic selection at 75 %% may cost")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    device = torch.device(options.device)
    train_data, held_out = corpus(device)
    model = Transformer(options.dim, options.layers, options.blocks[0]).to(device)
    train(model, train_data, options, options.steps, list(model.parameters()))
    rows = batches(held_out, 1, options.held_out, options.length, seed=3)(0)
    results = measure(model, train_data, rows, options)
    figures = [
        {
            "blocks": f"{row['pattern']} {row['ratio']:.0%}, of {row['block']}" if row["ratio"] else "dense",
            "left out": f"{100 * row['sparsity']:.1f} %",
            "scores": f"{100 * row['scores']:.1f} %",
            "perplexity": f"{row['perplexity']:.3f}",
            "against dense": f"{row['percent']:+.2f} %",
        }
        for row in results
    ]
    settings = {n: getattr(options, n) for n in ("steps", "dim", "layers", "length", "blocks", "batch", "held_out")}
    run = {
        "machine": describe_machine(device), "settings": settings, "columns": list(figures[0]), "figures": figures,
        "results": results,
    }  # fmt: skip
    print_and_store(run, options.output)
    dynamic = [row for row in results if row["pattern"] == "dynamic_threshold" and row["ratio"] == 0.75]
    worst = max((row["percent"] for row in dynamic), default=0.0)
    if worst > options.limit:
        print(
            f"sparse_perplexity: dynamic selection at 75 % costs {worst:.2f} %, more than {options.limit}",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
