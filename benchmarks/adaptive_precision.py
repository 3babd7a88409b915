"""What weights of few bits cost a language model: perplexity on held-out text, one format for all layers against
formats chosen for each layer within the same bytes.

    python benchmarks/adaptive_precision.py [--device cuda|cpu] [--steps N] [--dim N] [--length N] [--output FILE]

The transformer over bytes of sparse_perplexity.py is trained in fp32 (bf16 autocast on a GPU) and converted to bf16;
then its linear layers, the head among them, are kept in few bits. Formats are chosen, and GPTQ rounds, by sequences of
the training text. Adaptive lines have the bytes of uniform nvfp4 and are compared twice with the best uniform format of
no more bytes: at the same rounding, which shows what the choice of formats alone is worth, and rounded to nearest,
which shows what formats and rounding by calibration data are worth together. Time is that of one forward of four
sequences. One line is judged, named beforehand (JUDGED), since the best of many would be chosen by the held-out
text itself: it fails where that line's degradation is not --least percent less than that of the best uniform format
rounded to nearest.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from pathlib import Path
from typing import Any

import sparse_perplexity as language
import torch
import torch.nn.functional as torch_functional
from kernel_pytorch.precision import (
    AllocationStrategy,
    PrecisionConfig,
    QuantizationMode,
    UltraPrecisionModule,
    WeightFormat,
)
from table import print_and_store
from torch import Tensor, nn
from torch_norms import describe_machine

JUDGED = "adaptive, content_adaptive, gptq"
UNIFORM = (
    WeightFormat("int4", 128), WeightFormat("int4", 32), WeightFormat("nvfp4"), WeightFormat("mxfp4"),
    WeightFormat("int8", 128),
)  # fmt: skip


def next_token_loss(output: Tensor, tokens: Tensor) -> Tensor:
    return torch_functional.cross_entropy(output[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def divergence(output: Tensor, reference: Tensor) -> Tensor:
    """Of the predicted distributions from those before: what perplexity loses, to second order."""
    before = torch_functional.log_softmax(reference.float(), -1)
    after = torch_functional.log_softmax(output.float(), -1)
    return torch_functional.kl_div(after, before, log_target=True, reduction="none").sum(-1).mean()


@torch.no_grad()
def perplexity(model: nn.Module, rows: Tensor) -> float:
    model.eval()
    losses = [
        torch_functional.cross_entropy(model(one[:, :-1]).flatten(0, 1).float(), one[:, 1:].flatten())
        for one in rows.split(4)
    ]
    return float(torch.stack(losses).mean().exp())


@torch.no_grad()
def milliseconds(model: nn.Module, tokens: Tensor) -> float:
    times = []
    for _ in range(7):
        if tokens.is_cuda:
            torch.cuda.synchronize()
        begin = time.perf_counter()
        model(tokens)
        if tokens.is_cuda:
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - begin))
    return sorted(times)[3]


def kept(model: nn.Module, config: PrecisionConfig, calibration: list[Tensor]) -> UltraPrecisionModule:
    return UltraPrecisionModule(
        copy.deepcopy(model), config, calibration=calibration, loss=next_token_loss, metric=divergence
    )


def measure(
    model: nn.Module,
    calibration: list[Tensor],
    rows: Tensor,
    roundings: list[str],
    strategies: list[AllocationStrategy],
) -> list[dict[str, Any]]:
    dense = perplexity(model, rows)
    tokens = rows[:4, :-1]
    results = [
        {
            "weights": "bf16",
            "bits": 16.0,
            "bytes": 0,
            "perplexity": dense,
            "percent": 0.0,
            "ms": milliseconds(model, tokens),
        }
    ]

    def add(name: str, made: UltraPrecisionModule) -> float:
        value = perplexity(made, rows)
        stats = made.get_precision_stats()
        percent = 100 * (value / dense - 1)
        line = {
            "weights": name, "bits": stats.average_bits, "bytes": stats.nbytes, "perplexity": value, "percent": percent,
            "ms": milliseconds(made, tokens), "layers": made.get_precision_analysis(),
        }  # fmt: skip
        results.append(line)
        print(f"{name}: {value:.4f} ({percent:+.3f} %), {stats.average_bits:.3f} bits", file=sys.stderr, flush=True)
        return stats.nbytes

    static = QuantizationMode.STATIC
    budget = 0
    for rounding in roundings:
        for one in UNIFORM:
            config = PrecisionConfig(
                allocation_strategy=AllocationStrategy.ACTIVATION_AWARE, quantization_mode=static, formats=[one],
                rounding=rounding, target_memory_reduction=0,
            )  # fmt: skip
            size = add(f"{one}, {rounding}", kept(model, config, calibration))
            budget = size if one.format == "nvfp4" else budget
        for strategy in strategies:
            config = PrecisionConfig(
                allocation_strategy=strategy, quantization_mode=static, budget_bytes=budget, rounding=rounding
            )
            made = kept(model, config, calibration)
            add(f"adaptive, {strategy.value}, {rounding}", made)
            print(made.allocation, file=sys.stderr)
    return results


def main() -> int:
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if on_gpu else "cpu")
    parser.add_argument("--steps", type=int, default=3000 if on_gpu else 400)
    parser.add_argument("--dim", type=int, default=384 if on_gpu else 128)
    parser.add_argument("--layers", type=int, default=6 if on_gpu else 3)
    parser.add_argument("--length", type=int, default=1024 if on_gpu else 512)
    parser.add_argument("--batch", type=int, default=32 if on_gpu else 4)
    parser.add_argument("--rate", type=float, default=1e-3 if on_gpu else 3e-3)
    parser.add_argument("--held-out", type=int, default=64 if on_gpu else 24, help="sequences of the perplexities")
    parser.add_argument("--calibration", type=int, default=32 if on_gpu else 8, help="sequences of the training text")
    parser.add_argument("--roundings", nargs="*", default=["nearest", "clipped", "gptq"])
    parser.add_argument("--strategies", nargs="*", default=[one.value for one in AllocationStrategy])
    parser.add_argument(
        "--least", type=float, default=30.0, help="percent of the best uniform format's degradation that must go"
    )
    parser.add_argument("--model", type=Path, help="trained parameters: read where the file is there, else written")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device(options.device)
    train_data, held_out = language.corpus(device)
    model = language.Transformer(options.dim, options.layers, block=16).to(device)
    if options.model is not None and options.model.exists():
        model.load_state_dict(torch.load(options.model, map_location=device))
    else:
        language.train(model, train_data, options, options.steps, list(model.parameters()))
        if options.model is not None:
            torch.save(model.state_dict(), options.model)
    model = model.to(torch.bfloat16).eval()
    rows = language.batches(held_out, 1, options.held_out, options.length, seed=3)(0)
    sequences = language.batches(train_data, 1, options.calibration, options.length - 1, seed=4)(0)
    results = measure(
        model,
        list(sequences.split(8)),
        rows,
        options.roundings,
        [AllocationStrategy(name) for name in options.strategies],
    )
    budget = max((r["bytes"] for r in results if r["weights"].startswith("nvfp4")), default=0)
    for row in results:
        name, _, rounding = row["weights"].rpartition(", ")
        if name.startswith("adaptive"):  # against the best format for all layers that takes no more bytes
            uniform = [r for r in results if r["weights"].endswith(f", {rounding}") and "adaptive" not in r["weights"]]
            best = min((r for r in uniform if r["bytes"] <= budget), key=lambda r: r["percent"])
            row["less"], row["uniform"] = 100 * (1 - row["percent"] / best["percent"]), best["weights"]
            plain = [r for r in results if r["weights"].endswith(", nearest") and "adaptive" not in r["weights"]]
            least = min((r["percent"] for r in plain if r["bytes"] <= budget), default=best["percent"])
            row["less_together"] = 100 * (1 - row["percent"] / least)
    figures = []
    for row in results:
        less = row.get("less")
        figures.append(
            {
                "weights": row["weights"], "bits": f"{row['bits']:.2f}", "perplexity": f"{row['perplexity']:.4f}",
                "against bf16": f"{row['percent']:+.3f} %",
                "less than the best uniform": "" if less is None else f"{less:.0f} % ({row['uniform']})",
                "less than that rounded to nearest": "" if less is None else f"{row['less_together']:.0f} %",
                "ms": f"{row['ms']:.2f}",
            }
        )  # fmt: skip
    names = ("steps", "dim", "layers", "length", "batch", "held_out", "calibration")
    run = {
        "machine": describe_machine(device),
        "settings": {n: getattr(options, n) for n in names} | {"train_bytes": len(train_data)},
        "columns": list(figures[0]), "figures": figures, "results": results,
    }  # fmt: skip
    print_and_store(run, options.output)
    judged = next((row["less_together"] for row in results if row["weights"] == JUDGED), None)
    if judged is not None and judged < options.least:
        print(
            f"adaptive_precision: {JUDGED}: {judged:.0f} % less degradation, less than {options.least}", file=sys.stderr
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
