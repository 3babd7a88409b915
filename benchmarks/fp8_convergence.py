"""Whether training in FP8 arrives where bf16 does: a small transformer on this project's own documents and sources.

    python benchmarks/fp8_convergence.py [--device cuda|cpu] [--steps N] [--dim N] [--layers N] [--runs NAME...]

The same model, seed, batches and optimizer, once in bf16 and once for each recipe; the linear layers of the blocks
compute in FP8 whether that pays or not. The head stays in bf16, as is usual: a tenth of its gradient, small
probabilities beside large ones, would underflow in one tensor's scale, which "head" shows. Bytes are the vocabulary.
"all sums": no product's sums stay in the FP8 accumulator; else those of the forward do. Two losses are
compared: the mean over the last tenth of the steps, on batches that all runs share, and that of text which none has
seen. "weights 8" are other random ones to begin with: how far equals end apart. All runs take their first step,
then all their second, and so on, so that they have come equally far when the time is up. On a GPU a step is a CUDA
graph: its hundreds of small kernels would else wait for their launches. Default: 10 million parameters.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as torch_functional
from torch import Tensor, nn
from torch_norms import describe_machine

from kernel_pytorch import precision

ROOT = Path(__file__).resolve().parent.parent
HELD_OUT = 16  # of as many bytes one is kept from training: the last of all
HELD_OUT_BATCHES = 16
CURVE_STEPS = 20  # a stored curve has the means of as many steps


class Way(NamedTuple):
    recipe: str | None
    sums: str = "backward"  # whose sums leave the FP8 accumulator every 128 of k
    seed: int = 0  # of the weights
    head: bool = False  # whether the last layer, whose outputs are the logits, is in FP8 too


WAYS = {
    "bf16": Way(None),
    "bf16, weights 8": Way(None, seed=8),
    "delayed, all sums": Way("delayed", "all"),
    "delayed": Way("delayed"),
    "current, all sums": Way("current", "all"),
    "current, all sums, head": Way("current", "all", head=True),
    "rowwise, all sums": Way("rowwise", "all"),
    "blockwise": Way("blockwise", "all"),
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

    def __init__(self, way: Way, data: Tensor, options: argparse.Namespace) -> None:
        torch.manual_seed(way.seed)
        self.options, self.data, device = options, data, data.device
        config = precision.FP8Config(
            scaling_strategy=way.recipe or "current",
            accurate_sums=way.sums,
            convert="all" if way.recipe else "none",
            skip=() if way.head else ("head",),
        )
        model = Transformer(options.dim, options.layers, options.length).to(device)
        self.model = precision.convert_model_to_fp8(model, config)
        self.trained = len(data) - len(data) // HELD_OUT  # bytes
        generator = torch.Generator().manual_seed(1)
        last = self.trained - options.length - 1
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
        self.overflows: set[str] = set()
        self.numerics: dict[str, Any] = {}  # of the end
        self.take = self._captured_step() if on_gpu else self.take_step

    def loss_at(self, starts: Tensor) -> Tensor:
        rows = self.data[starts + self.places].long()
        with torch.autocast(self.data.device.type, torch.bfloat16, cache_enabled=False):
            logits = self.model(rows[:, :-1])
        return torch_functional.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten())

    def take_step(self) -> None:
        loss = self.loss_at(self.starts[self.step][0])
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

    @torch.no_grad()
    def held_out_loss(self) -> float:
        """The loss on held-out text, at evenly spaced positions."""
        count = HELD_OUT_BATCHES * self.options.batch
        places = torch.linspace(self.trained, len(self.data) - self.options.length - 1, count, device=self.data.device)
        self.model.eval()  # magnitudes are not recorded
        losses = [self.loss_at(starts) for starts in places.long().view(HELD_OUT_BATCHES, -1, 1)]
        self.model.train()
        return float(torch.stack(losses).mean())

    def look_at_numerics(self) -> None:
        """For each kind of tensor: the mean relative rounding error over layers, and the worst underflow."""
        report = precision.fp8_numerics_report(self.model, lambda: self.loss_at(self.starts[0]))
        for kind in ("input", "weight", "gradient"):
            seen = [(layer.tensors[kind], name) for name, layer in report.items() if kind in layer.tensors]
            if seen:
                least, where = max((numerics.underflow, name) for numerics, name in seen)
                error = sum(numerics.error for numerics, _ in seen) / len(seen)
                self.numerics[kind] = {"error": round(error, 5), "underflow": round(least, 5), "where": where}

    def overflows_so_far(self) -> list[str]:
        self.overflows.update(precision.take_overflows(self.model))
        return sorted(self.overflows)

    def _captured_step(self) -> Callable[[], None]:
        """A few steps to warm up, back to the start, then one captured step replayed: launches are not waited for."""
        begin = [parameter.detach().clone() for parameter in self.model.parameters()]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
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


def train_all(runs: dict[str, Run], options: argparse.Namespace, keep: Callable[[int], None]) -> int:
    """Steps that every run has taken: all, or those that fit into the time. `keep` is called three times on the way."""
    end = time.perf_counter() + options.seconds
    for step in range(options.steps):
        for run in runs.values():
            run.take()
        if (step + 1) % max(options.steps // 4, 1) == 0 and step + 1 < options.steps:
            keep(step + 1)
        if step % 20 == 19:
            [float(run.losses[step]) for run in runs.values()]  # waits for the device
            if time.perf_counter() > end:
                return step + 1
    return options.steps


def ways_of(options: argparse.Namespace) -> dict[str, Way]:
    """The runs by name; those of further first weights are named after their seed."""
    ways = {name: WAYS[name] for name in options.runs}
    repeats = {
        f"{name}, seed {seed}": way._replace(seed=seed)
        for seed in range(1, options.seeds)
        for name, way in ways.items()
    }
    return ways | repeats


def peer_of(name: str) -> str:
    """The bf16 run that a run is compared with: of the same first weights where there is one."""
    _, comma, seed = name.partition(", seed ")
    return f"bf16{comma}{seed}"


def results_of(runs: dict[str, Run], steps: int) -> dict[str, dict[str, Any]]:
    """Losses of every run after so many steps, and by how many percent they exceed those of bf16."""
    tail = max(steps // 10, 1)
    results: dict[str, dict[str, Any]] = {}
    for name, run in runs.items():
        losses = run.losses[:steps]
        whole = steps - steps % CURVE_STEPS
        curve = losses[:whole].view(-1, CURVE_STEPS).mean(1).tolist()
        results[name] = {
            "first": float(losses[0]),
            "end": float(losses[-tail:].mean()),
            "held_out": run.held_out_loss(),
            "curve": [round(value, 4) for value in curve],
            "overflows": run.overflows_so_far(),
            "numerics": run.numerics,
        }
    for name, result in results.items():
        for loss in ("end", "held_out"):
            result[f"{loss}_percent"] = 100 * (result[loss] / results[peer_of(name)][loss] - 1)
    return results


def pairs_of(results: dict[str, dict[str, Any]], options: argparse.Namespace, title: str) -> list[dict[str, str]]:
    """A row for each recipe: the mean over first weights of what it ends above bf16, with its standard error."""

    def shown(percents: list[float]) -> str:
        return f"{statistics.mean(percents):+.3f} % ± {statistics.stdev(percents) / math.sqrt(len(percents)):.3f}"

    rows = []
    for recipe in options.runs:
        if recipe == "bf16":
            continue
        pairs = [result for name, result in results.items() if name.partition(", seed ")[0] == recipe]
        ends, unseen = ([pair[f"{loss}_percent"] for pair in pairs] for loss in ("end", "held_out"))
        plain = [results[name] for name in results if name.partition(", seed ")[0] == "bf16"]
        rows.append(
            {
                "what": f"{title}, {options.seeds} first weights, loss at the end over bf16's: {recipe}",
                "ours": f"{shown(ends)}, held out {shown(unseen)}",
                "torch": f"bf16: {statistics.mean(run['end'] for run in plain):.4f}",
            }
        )
    return rows


def figures_of(results: dict[str, dict[str, Any]], options: argparse.Namespace, steps: int) -> list[dict[str, str]]:
    """Rows as table.py prints them; bf16, which is torch's, is the other column."""
    title = f"{options.parameters / 1e6:.1f} M parameters, {steps} steps of {options.batch * options.length} bytes"
    if options.seeds > 1:
        return pairs_of(results, options, title)
    plain = results["bf16"]
    rows = []
    for loss, what in (("end", f"mean of the last {max(steps // 10, 1)}"), ("held_out", "of text held out")):
        for name, result in results.items():
            if name == "bf16":
                continue
            overflows = f", overflows in {', '.join(result['overflows'])}" if result["overflows"] else ""
            rows.append(
                {
                    "what": f"{title}, loss {what}: {name}",
                    "ours": f"{result[loss]:.4f}, {result[loss + '_percent']:+.2f} %{overflows}",
                    "torch": f"bf16: {plain[loss]:.4f}",
                }
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--dim", type=int, default=384)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--seconds", type=float, default=math.inf, help="of training")
    parser.add_argument("--runs", nargs="*", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--seeds", type=int, default=1, help="first weights of each run")
    parser.add_argument("--limit", type=float, default=1.0, help="percent by which a recipe's loss may exceed bf16's")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if "bf16" not in options.runs:
        parser.error("--runs: bf16 must be among them; the others are compared with it")
    begin = time.perf_counter()
    data = corpus().to(options.device)
    runs: dict[str, Run] = {}
    ways = ways_of(options)
    for name, way in ways.items():
        runs[name] = Run(way, data, options)
        print(f"{name}: ready after {time.perf_counter() - begin:.1f} s", flush=True)
    options.parameters = sum(parameter.numel() for parameter in runs["bf16"].model.parameters())

    def keep(steps: int) -> dict[str, dict[str, Any]]:
        results = results_of(runs, steps)
        figures = figures_of(results, options, steps)
        names = ("parameters", "dim", "layers", "length", "batch", "rate")
        settings = {"steps": steps, "corpus_bytes": len(data), **{name: getattr(options, name) for name in names}}
        if options.output:
            machine = describe_machine(torch.device(options.device))
            run = {"machine": machine, "figures": figures, "settings": settings, "results": results}
            options.output.write_text(json.dumps({"benchmark": "fp8_convergence", "runs": [run]}, indent=1))
        print(f"{steps} steps after {time.perf_counter() - begin:.1f} s")
        if options.seeds > 1:
            print("\n".join(f"  {row['what']}: {row['ours']}" for row in figures))
        for name, result in results.items():
            ends = f"loss {result['end']:.4f} ({result['end_percent']:+.2f} %)"
            unseen = f"held out {result['held_out']:.4f} ({result['held_out_percent']:+.2f} %)"
            print(f"  {name:20} {ends}, {unseen} {' '.join(result['overflows'])}", flush=True)
        return results

    steps = train_all(runs, options, keep)
    for run in runs.values():
        run.look_at_numerics()
    results = keep(steps)
    recipes = [result for name, result in results.items() if ways[name].recipe and not ways[name].head]
    worst = max((max(result["end_percent"], result["held_out_percent"]) for result in recipes), default=0.0)
    if worst > options.limit:
        raise SystemExit(f"fp8_convergence: a recipe ends {worst:.2f} % above bf16; at most {options.limit} % may be")


if __name__ == "__main__":
    main()
