"""What sparse attention costs a language model that is trained with it from its first step, against dense attention.

    python benchmarks/sparse_training.py [--selections NAME...] [--seeds N] [--length N] [--output FILE]

sparse_perplexity.py replaces dense layers after training; here the same transformer, on the same text, is trained anew
with each selection. A seed gives all selections the same first weights, batches and steps. Perplexity is that of files
left out, at the full length; "far" is the perplexity of those of their bytes whose eight bytes before stand in the
sequence once more, farther back than the window of `window` reaches, and nowhere nearer.

How sparse a selection is: the score entries (one query of one head with one key, or with one mean of keys) that it
computes for a sequence of the full length, those that choose blocks included, out of the length * (length + 1) / 2 of
dense causal attention. Mean percents over the seeds have their standard error behind them. `--state FOLDER` keeps a
file for each training that is done, so that a run that was stopped goes on, and several can share the work (those
without dense in --selections show no figures); results of another text, of other settings or of another commit are
refused. Fails where `native` leaves out less than 90 % or costs more than --limit percent.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import provenance
import torch
import torch.nn.functional as torch_functional
from kernel_pytorch.attention import DynamicSparseAttention, NativeSparseAttention
from kernel_pytorch.functional import attention, rope
from sparse_perplexity import HEAD_SIZE, ROOT, Transformer, batches, corpus, train
from table import print_and_store
from torch import Tensor, nn
from torch_norms import describe_machine

CONTEXT = 8  # bytes that stand once more


class Window(nn.Module):
    """Attention to the latest keys alone, the control: what a selection must beat where text is far away."""

    def __init__(self, dim: int, width: int) -> None:
        super().__init__()
        self.width = width
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(dim, dim, bias=False) for _ in range(4))

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        query, key, value = (p(x).unflatten(-1, (-1, HEAD_SIZE)) for p in (self.q_proj, self.k_proj, self.v_proj))
        query, key = rope(query, key, *rotary)
        attended = attention(query, key, value, causal=True, window=(self.width - 1, 0), layout="bshd")
        return self.out_proj(attended.flatten(-2))


def native_numbers(length: int) -> dict[str, int]:
    """Means of length / 64 keys, two blocks of as many, and a window that fills a tenth of dense causal attention."""
    block = max(length // 64, 4)
    numbers = {"block_size": block, "blocks": 2, "first_blocks": 0, "local_blocks": 1, "window": 1}
    numbers |= {"compress_block": block, "compress_stride": block}
    while native_entries(length, numbers | {"window": numbers["window"] + 1}) <= 0.1 * dense_entries(length):
        numbers["window"] += 1
    return numbers


def dense_entries(length: int) -> int:
    return length * (length + 1) // 2


def native_entries(length: int, numbers: dict[str, int]) -> int:
    entries = 0
    for token in range(length):
        entries += min(token + 1, numbers["window"])
        entries += max((token + 1 - numbers["compress_block"]) // numbers["compress_stride"] + 1, 0)
        listed = min(numbers["blocks"], token // numbers["block_size"] + 1)  # its own block is among them
        entries += (listed - 1) * numbers["block_size"] + token % numbers["block_size"] + 1
    return entries


def window_width(length: int) -> int:
    width = 1
    while window_entries(length, width + 1) <= 0.1 * dense_entries(length):
        width += 1
    return width


def window_entries(length: int, width: int) -> int:
    return sum(min(token + 1, width) for token in range(length))


def dynamic_layer(dim: int, length: int, block: int, parts: int) -> DynamicSparseAttention:
    """With its scores of means of queries and parts of keys counted, a tenth of the entries."""
    scores = length // block * (length // block * parts) / 2 / dense_entries(length)
    return DynamicSparseAttention(
        dim, dim // HEAD_SIZE, 0.9 + scores, causal=True, block_size=block, key_parts=parts, local=1, sinks=1
    )


Make = Callable[[int, int], nn.Module]  # of features and length


def selections(length: int) -> dict[str, Make | None]:
    return {
        "dense": None,
        "native": lambda dim, n: NativeSparseAttention(dim, dim // HEAD_SIZE, **native_numbers(n)),
        "window": lambda dim, n: Window(dim, window_width(n)),
        "dynamic": lambda dim, n: dynamic_layer(dim, n, 16, 4),
        "dynamic, blocks of 8": lambda dim, n: dynamic_layer(dim, n, 8, 2),
    }


def build(name: str, options: argparse.Namespace, seed: int) -> Transformer:
    torch.manual_seed(seed)
    model = Transformer(options.dim, options.layers, 16)
    make = selections(options.length)[name]
    for layer in model.layers if make is not None else ():
        new = make(options.dim, options.length)  # after all shared weights are drawn: gates change none of them
        new.load_state_dict(layer.attention.state_dict(), strict=False)
        layer.attention, layer.is_dense = new, False
    return model


def entries_left_out(model: Transformer, options: argparse.Namespace) -> float:
    """1 - computed / dense, of the full length; a layer of chosen blocks tells what its latest forward computed."""
    length, shares = options.length, []
    for layer in model.layers:
        one = layer.attention
        if layer.is_dense:
            shares.append(1.0)
        elif isinstance(one, NativeSparseAttention):
            names = ("block_size", "blocks", "window", "compress_block", "compress_stride")
            shares.append(native_entries(length, {n: getattr(one, n) for n in names}) / dense_entries(length))
        elif isinstance(one, Window):
            shares.append(window_entries(length, one.width) / dense_entries(length))
        else:
            rows = length // one.block_size
            computed = one.get_attention_stats()["computed_share"]  # of blocks, the diagonal's as a whole
            shares.append(computed + rows * rows * one.key_parts / 2 / dense_entries(length))
    return 1 - sum(shares) / len(shares)


@torch.no_grad()
def losses(model: Transformer, rows: Tensor) -> Tensor:
    model.eval()
    parts = []
    for part in rows.split(2):
        logits = model(part[:, :-1])
        parts.append(torch_functional.cross_entropy(logits.transpose(1, 2), part[:, 1:], reduction="none"))
    return torch.cat(parts)


def stands_far_before(rows: Tensor, distance: int) -> Tensor:
    """bool [rows, length]: whether the bytes before the target stand in the row `distance` or more bytes earlier too,
    and nowhere nearer."""
    found = torch.zeros(rows.shape[0], rows.shape[1] - 1, dtype=torch.bool)
    for i, row in enumerate(rows.tolist()):
        latest: dict[tuple[int, ...], int] = {}
        for place in range(CONTEXT, len(row)):
            context = tuple(row[place - CONTEXT : place])
            if context in latest and place - latest[context] > distance:
                found[i, place - 1] = True
            latest[context] = place
    return found


def run_one(name: str, seed: int, data: Tensor, rows: Tensor, options: argparse.Namespace) -> dict[str, Any]:
    model = build(name, options, seed)
    final = train(model, data, options, options.steps, list(model.parameters()), seed=seed)
    of_bytes = losses(model, rows)
    far = stands_far_before(rows, window_width(options.length))
    return {
        "selection": name, "seed": seed, "left_out": entries_left_out(model, options), "last_loss": final,
        "perplexity": math.exp(float(of_bytes.mean())), "far": math.exp(float(of_bytes[far].mean())),
        "far_bytes": int(far.sum()), "numbers": describe(model.layers[0].attention),
    }  # fmt: skip


def describe(layer: nn.Module) -> str:
    if isinstance(layer, Window):
        return f"{layer.width} keys"
    if isinstance(layer, NativeSparseAttention):
        return f"means of {layer.compress_block}, {layer.blocks} blocks of {layer.block_size}, window {layer.window}"
    return f"blocks of {layer.block_size}"


def percents(results: list[dict[str, Any]], name: str, what: str) -> list[float]:
    dense = {one["seed"]: one[what] for one in results if one["selection"] == "dense"}
    return [100 * (one[what] / dense[one["seed"]] - 1) for one in results if one["selection"] == name]


def spread_text(values: list[float]) -> str:
    error = f" ± {statistics.stdev(values) / math.sqrt(len(values)):.2f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):+.2f}{error} %"


def figures_of(results: list[dict[str, Any]]) -> list[dict[str, str]]:
    figures = []
    for name in dict.fromkeys(one["selection"] for one in results):
        own = [one for one in results if one["selection"] == name]
        figures.append(
            {
                "trained with": name if name == "dense" else f"{name}: {own[0]['numbers']}",
                "entries left out": f"{100 * own[0]['left_out']:.1f} %",
                "perplexity": f"{statistics.mean(one['perplexity'] for one in own):.3f}",
                "against dense": spread_text(percents(results, name, "perplexity")),
                "far": f"{statistics.mean(one['far'] for one in own):.3f}",
                "far, against dense": spread_text(percents(results, name, "far")),
                "seeds": str(len(own)),
            }
        )
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu"], help="a run is minutes there")
    parser.add_argument("--selections", nargs="+", default=list(selections(1024)), choices=list(selections(1024)))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--held-out", type=int, default=24, help="sequences of the perplexities")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--limit", type=float, default=1.0, help="percent that `native` may cost")
    parser.add_argument("--text", type=Path, default=ROOT, help="a folder with documents and sources to train on")
    parser.add_argument("--state", type=Path, help="a folder: what is done so far")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    data, held_out = corpus(torch.device("cpu"), options.text)
    rows = batches(held_out, 1, options.held_out, options.length, seed=3)(0)
    settings = {n: getattr(options, n) for n in ("steps", "dim", "layers", "length", "batch", "rate", "held_out")}
    text = hashlib.sha256(data.numpy().tobytes() + held_out.numpy().tobytes()).hexdigest()[:16]
    state = {"settings": settings, "text": text, "commit": provenance.commit()}
    results = []
    for seed in range(options.seeds):
        for name in options.selections:
            file = None if options.state is None else options.state / f"{name} {seed}.json"
            if file is not None and file.exists():
                stored = json.loads(file.read_text())
                if stored["state"] != state:
                    print(f"sparse_training: {file} is of {stored['state']}, this is {state}", file=sys.stderr)
                    return 2
                results.append(stored["result"])
                continue
            results.append(run_one(name, seed, data, rows, options))
            print(json.dumps(results[-1]), file=sys.stderr, flush=True)
            if file is not None:
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(json.dumps({"state": state, "result": results[-1]}, indent=1))
    if "dense" not in options.selections:
        return 0  # its part of the work is in --state
    results.sort(key=lambda one: (options.selections.index(one["selection"]), one["seed"]))
    figures = figures_of(results)
    run = {
        "machine": describe_machine(torch.device("cpu")), "settings": settings, "text": text,
        "columns": list(figures[0]), "figures": figures, "results": results,
    }  # fmt: skip
    print_and_store(run, options.output)
    native = [one for one in results if one["selection"] == "native"]
    if native:
        cost = statistics.mean(percents(results, "native", "perplexity"))
        if cost > options.limit or native[0]["left_out"] < 0.8995:
            print(f"sparse_training: native costs {cost:.2f} % at {native[0]['left_out']:.1%}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
