"""kernel_pytorch.optimize on architectures of other libraries, against eager torch and torch.compile's modes, and with
torch.compile on top of it; the ways of a model in turns in one process.

    python benchmarks/optimize_architectures.py [--device cpu|cuda] [--only WORDS,...] [--ways WORDS,...]
        [--seconds S] [--budget S] [--budgets WORD=S,...] [--layers N] [--at-once N] [--profile] [--output FILE]

Hugging Face models from their configurations, in bf16 on a GPU and fp32 on a CPU: prefill of decoders with and without
the default cache (4 layers of 2048, B2 S1024), encoders for tokens, images and sound, training steps. On a CPU smaller
ones, and the bundled models. `host` is the time until a call returns on an idle GPU. The last column is the time of
the best peer over ours; of torch.compile on top, that of the better of torch.compile and optimize over it. With
--threads 1 a CPU's times are those of the thread, which others' work does not lengthen.

Each model has a process of its own, of which --at-once many compile torch's ways at the same time; then one after the
other is optimised and measured, alone on the machine.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from compile_cases import DECODERS, Row, kernels_of, model_of
from kernel_pytorch._optimize.demo_models import DEMOS
from optimize_models import Case, synchronize, text_of
from processes import log, measured, wait_for_turn
from table import print_table
from torch import nn
from torch_norms import describe_machine

import kernel_pytorch

OURS, COMPILED, BOTH = "optimize", "optimize, compile=True", "optimize + torch.compile"
OF_OURS = (OURS, COMPILED, BOTH)
LOOP = "eager, a loop over experts"
MODES = ("reduce-overhead", "max-autotune-no-cudagraphs")


class TimedCase(Case):
    """A case that also knows how long the host takes for a call."""

    def host_us(self, name: str) -> float:
        taken = []
        for _ in range(9):
            synchronize(self.device)
            begin = time.perf_counter_ns()
            self.steps[name]()
            taken.append((time.perf_counter_ns() - begin) / 1e3)
        synchronize(self.device)
        return statistics.median(taken)


def tokens(batch: int, length: int, vocabulary: int, device: torch.device) -> torch.Tensor:
    return torch.randint(1, vocabulary, (batch, length), device=device)


def encoders(device: torch.device, layers: int) -> dict[str, Callable[[], tuple[nn.Module, dict[str, Any]]]]:
    """Models and their arguments, of the sizes of the published base models but for the number of layers."""
    is_small = device.type == "cpu"
    dim, heads = (384, 6) if is_small else (768, 12)
    batch = 1 if is_small else 16
    sizes = {"hidden_size": dim, "num_hidden_layers": layers, "num_attention_heads": heads}
    sizes["intermediate_size"] = 4 * dim

    def images(size: int = 224) -> torch.Tensor:
        dtype = torch.float32 if is_small else torch.bfloat16
        return torch.randn(batch, 3, size, size, device=device, dtype=dtype)

    def modernbert() -> tuple[nn.Module, dict[str, Any]]:
        config = transformers.ModernBertConfig(**{**sizes, "intermediate_size": dim * 3 // 2}, vocab_size=8192,
                                               pad_token_id=0)  # fmt: skip
        return transformers.ModernBertModel(config), {"input_ids": tokens(batch, 512, 8192, device)}

    def dinov2() -> tuple[nn.Module, dict[str, Any]]:
        config = transformers.Dinov2Config(hidden_size=dim, num_hidden_layers=layers, num_attention_heads=heads)
        return transformers.Dinov2Model(config), {"pixel_values": images()}

    def siglip() -> tuple[nn.Module, dict[str, Any]]:
        return transformers.SiglipVisionModel(transformers.SiglipVisionConfig(**sizes)), {"pixel_values": images()}

    def swin() -> tuple[nn.Module, dict[str, Any]]:
        depths = [2, 2, layers, 2] if not is_small else [2, 2, 2, 2]
        return transformers.SwinModel(transformers.SwinConfig(depths=depths)), {"pixel_values": images()}

    def whisper() -> tuple[nn.Module, dict[str, Any]]:
        config = transformers.WhisperConfig(
            d_model=dim, encoder_layers=layers, encoder_attention_heads=heads, encoder_ffn_dim=4 * dim,
            decoder_layers=1, decoder_attention_heads=heads,
        )  # fmt: skip
        dtype = torch.float32 if is_small else torch.bfloat16
        sound = torch.randn(1 if is_small else 8, 80, 3000, device=device, dtype=dtype)
        return transformers.WhisperModel(config).encoder, {"input_features": sound}

    return {"modernbert": modernbert, "dinov2": dinov2, "siglip": siglip, "swin": swin, "whisper": whisper}


def decoder_on_cpu() -> nn.Module:
    config = transformers.Qwen3Config(
        hidden_size=256, intermediate_size=768, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        head_dim=64, vocab_size=1024, max_position_embeddings=1024, pad_token_id=0,
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config)


def gpt2(device: torch.device) -> nn.Module:
    small = {"n_embd": 256, "n_layer": 2, "n_head": 4, "vocab_size": 1024} if device.type == "cpu" else {}
    config = transformers.GPT2Config(**small, use_cache=False, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    return transformers.GPT2LMHeadModel(config)


def mixtral_block(device: torch.device) -> nn.Module:
    """One layer of Mixtral 8x7B, with an embedding and a head of a thousand words."""
    sizes: dict[str, Any] = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32}
    if device.type == "cpu":
        sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4}
    config = transformers.MixtralConfig(
        **sizes, num_hidden_layers=1, num_key_value_heads=sizes["num_attention_heads"] // 4, num_local_experts=8,
        num_experts_per_tok=2, vocab_size=1024, use_cache=False, sliding_window=None, pad_token_id=0,
    )  # fmt: skip
    with device:
        return transformers.MixtralForCausalLM(config)


def looped(model: nn.Module) -> nn.Module:
    """Hugging Face's loop over the experts, where its default is torch's grouped product."""
    model.set_experts_implementation("eager")
    return model


def cases(device: torch.device, layers: int) -> dict[str, Callable[[], TimedCase]]:
    is_small = device.type == "cpu"
    dtype = torch.float32 if is_small else torch.bfloat16
    found: dict[str, Callable[[], TimedCase]] = {}

    def case_of(name: str, goal: str, make: Callable[[], tuple[nn.Module, Any]]) -> Callable[[], TimedCase]:
        def built() -> TimedCase:
            torch.manual_seed(0)
            model, arguments = make()
            return TimedCase(name, model.to(device, dtype).train(goal == "train"), arguments, goal)

        return built

    def add(name: str, goal: str, make: Callable[[], tuple[nn.Module, Any]]) -> None:
        found[name] = case_of(name, goal, make)

    batch, length = (1, 256) if is_small else (2, 1024)
    for name in DECODERS[:1] if is_small else DECODERS:
        for cached in (True, False):

            def prefill(name: str = name, cached: bool = cached) -> tuple[nn.Module, Any]:
                model = decoder_on_cpu() if is_small else model_of(Row(name, "prefill", batch, length), device)
                ids = tokens(batch, length, model.config.vocab_size, device)
                return model, {"input_ids": ids, "use_cache": cached}

            add(f"{name}{' cached' if cached else ''} prefill B{batch} S{length}", "inference", prefill)
    for name, make in encoders(device, layers).items():
        add(f"{name} encoder", "inference", make)

    def training(make: Callable[[], nn.Module], batch: int, length: int) -> Callable[[], tuple[nn.Module, Any]]:
        def made() -> tuple[nn.Module, Any]:
            model = make()
            ids = tokens(batch, length, model.config.vocab_size, device)
            return model, {"input_ids": ids, "labels": ids}

        return made

    def modernbert_to_train() -> nn.Module:
        config = encoders(device, layers)["modernbert"]()[0].config
        return transformers.ModernBertForMaskedLM(config)

    def qwen3_to_train() -> nn.Module:
        model = decoder_on_cpu() if is_small else model_of(Row("qwen3", "train", 4, 2048), device)
        model.config.use_cache = False
        return model

    add("qwen3 training step", "train", training(qwen3_to_train, *((1, 128) if is_small else (4, 2048))))
    add("gpt2 training step", "train", training(lambda: gpt2(device), *((1, 128) if is_small else (8, 1024))))
    add("modernbert training step", "train", training(modernbert_to_train, *((1, 128) if is_small else (16, 512))))
    block = training(lambda: mixtral_block(device), *((1, 128) if is_small else (2, 4096)))
    add("mixtral block training step", "train", block)
    if is_small:
        for name, (make, sample) in DEMOS.items():
            add(f"bundled {name}", "inference", lambda make=make, sample=sample: (make().eval(), (sample(),)))
    return found


def budget_of(name: str, arguments: argparse.Namespace) -> float:
    words = (one.partition("=") for one in arguments.budgets.split(",") if one)
    return next((float(seconds) for word, _, seconds in words if word in name), arguments.budget)


def ways_of(case: TimedCase, arguments: argparse.Namespace, reports: dict[str, Any]) -> dict[str, Any]:
    """Of torch first, then ours."""

    def optimized(model: nn.Module, compiles: bool = False) -> nn.Module:
        begin = time.perf_counter()
        seconds = budget_of(case.name, arguments)
        result = kernel_pytorch.optimize(model, case.arguments, case.goal, seconds, compile=compiles)
        reports[COMPILED if compiles else OURS] = result.report.data
        log(f"{case.name}: optimize took {time.perf_counter() - begin:.1f} s of {seconds:g}\n{result.report}")
        return result.model

    def both(model: nn.Module) -> nn.Module:
        """The same optimised model, compiled: two calls of optimize may choose differently."""
        return torch.compile(case.models[OURS] if OURS in case.models else optimized(model))

    ways: dict[str, Any] = {"eager": lambda model: model, "torch.compile": torch.compile, LOOP: looped}
    for mode in MODES:
        ways[f"torch.compile {mode}"] = lambda model, mode=mode: torch.compile(model, mode=mode)
    ways |= {OURS: optimized, COMPILED: lambda model: optimized(model, True), BOTH: both}
    short = {"compile": "torch.compile", "optimize": OURS, "optimize-compile": COMPILED, "both": BOTH}
    short |= {"eager": "eager", "loop": LOOP}
    names = {short.get(word, f"torch.compile {word}") for word in arguments.ways.split(",")}
    return {name: make for name, make in ways.items() if name in names}


def result_of(case: TimedCase, arguments: argparse.Namespace) -> dict[str, Any] | None:
    """What the process of one model does."""
    reports: dict[str, Any] = {}
    ways = ways_of(case, arguments, reports)
    for name in (name for name in ways if name not in OF_OURS):
        case.add(name, ways[name])
    if not wait_for_turn():
        return None
    warm_clocks(case.device)
    for name in (name for name in ways if name in OF_OURS):
        case.add(name, ways[name])
    if not case.steps:
        return {"what": case.name, "rows": {}, "ratios": {}, "failed": case.notes, "reports": reports}
    warm_clocks(case.device)
    times = case.times(arguments.seconds)
    rows: dict[str, dict[str, Any]] = {}
    for name, (median, low, high) in times.items():
        rows[name] = {"median_us": median, "low_us": low, "high_us": high, "peak_bytes": case.peak(name)}
        rows[name].update(launches=None, host_us=case.host_us(name) if case.device.type == "cuda" else None)
        log(f"{case.name}: {name}: {text_of(rows[name])}{host_text(rows[name])}")
    result = {"what": case.name, "rows": rows, "ratios": ratios_of(rows), "failed": case.notes, "reports": reports}
    arguments.output.write_text(json.dumps([result], default=str))  # what follows may take longer than there is time
    if arguments.profile:
        result["kernels"] = {name: kernels_of(step, case.device) for name, step in case.steps.items()}
    return result


def host_text(row: dict[str, Any]) -> str:
    """Of a GPU's host; on a CPU a call returns when it is done."""
    return "" if row["host_us"] is None else f", host {row['host_us'] / 1e3:.3f} ms"


def warm_clocks(device: torch.device) -> None:
    """A GPU that waited for the host runs slower at first."""
    if device.type == "cuda":
        a = torch.randn(4096, 4096, device=device, dtype=torch.bfloat16)
        end = time.monotonic() + 0.3
        while time.monotonic() < end:
            for _ in range(20):
                a @ a
            synchronize(device)


def ratios_of(rows: dict[str, dict[str, Any]]) -> dict[str, float]:
    def best(names: list[str]) -> float:
        return min((rows[name]["median_us"] for name in names if name in rows), default=float("nan"))

    peers = [name for name in rows if name not in OF_OURS]
    found = {}
    for name in (OURS, COMPILED):
        if name in rows:
            found[name] = best(peers) / rows[name]["median_us"]
    if BOTH in rows:
        found[BOTH] = best(["torch.compile", OURS]) / rows[BOTH]["median_us"]
    return found


def figures(result: dict[str, Any]) -> list[dict[str, str]]:
    rows = result["rows"]
    texts = [f"{name} {rows[name]['median_us'] / 1e3:.3f}" for name in rows if name not in OF_OURS]
    return [
        {
            "what": f"{result['what']}: {name}",
            "ours": f"{rows[name]['median_us'] / 1e3:.3f} ms{host_text(rows[name])}; {ratio:.2f}x",
            "torch": ", ".join(texts),
        }
        for name, ratio in result["ratios"].items()
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), help="the GPU where there is one, by default")
    parser.add_argument("--only", default="", help="words that a case's name must hold one of, separated by commas")
    parser.add_argument(
        "--ways", default="eager,compile,reduce-overhead,optimize,both",
        help="of eager, loop (of models with experts), compile, reduce-overhead, max-autotune-no-cudagraphs, optimize, "
        "optimize-compile, both",
    )  # fmt: skip
    parser.add_argument("--seconds", type=float, default=2.0, help="of timing per case")
    parser.add_argument("--budget", type=float, default=20.0, help="of each optimize")
    parser.add_argument("--budgets", default="", help="WORD=SECONDS,... for cases whose name holds the word")
    parser.add_argument("--layers", type=int, default=6, help="of encoders")
    parser.add_argument("--threads", type=int, help="of torch, on a CPU")
    parser.add_argument(
        "--at-once", type=int, default=8, help="models that compile at the same time, on a GPU's machine"
    )
    parser.add_argument("--seconds-per-model", type=float, default=600.0, help="for optimising and measuring")
    parser.add_argument("--seconds-to-compile", type=float, default=600.0, help="for compiling torch's ways, at once")
    parser.add_argument("--limit", type=float, default=1e6, help="seconds after which everything is ended")
    parser.add_argument("--profile", action="store_true", help="store the kernels of a step with their times")
    parser.add_argument("--output", type=Path, help="write the figures as JSON, after each case")
    parser.add_argument("--reports", type=Path, help="write the reports of optimize as JSON, after each case")
    parser.add_argument("--case", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    device = torch.device(arguments.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    found = cases(device, arguments.layers)
    if arguments.case:
        result = result_of(found[arguments.case](), arguments)
        arguments.output.write_text(json.dumps([] if result is None else [result], default=str))
        return 0
    words = [word for word in arguments.only.split(",") if word]
    names = list(dict.fromkeys(name for word in words for name in found if word in name)) if words else list(found)
    machine = {**describe_machine(device), "transformers": transformers.__version__}
    record: dict[str, Any] = {"machine": machine, "figures": [], "results": []}
    reports: dict[str, Any] = {}
    end = time.monotonic() + arguments.limit
    at_once = arguments.at_once if device.type == "cuda" else 1
    with tempfile.TemporaryDirectory() as folder:
        for some in (names[begin : begin + at_once] for begin in range(0, len(names), at_once)):
            seconds = (arguments.seconds_to_compile, arguments.seconds_per_model, end - time.monotonic())
            found_here = measured(some, lambda name: ["--case", name], Path(folder), seconds)
            for result in itertools.chain.from_iterable(found_here):
                reports[result["what"]] = result.pop("reports")
                record["results"].append(result)
                record["figures"] += figures(result)
                if arguments.output:
                    stored = {"benchmark": "optimize_architectures", "runs": [record]}
                    arguments.output.write_text(json.dumps(stored, indent=1) + "\n")
                if arguments.reports:
                    arguments.reports.write_text(json.dumps(reports, indent=1) + "\n")
    print_table(record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
