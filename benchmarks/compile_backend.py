"""torch.compile(backend="kernel_pytorch") against eager torch and torch.compile's own modes, in turns in one process.

    python benchmarks/compile_backend.py [--quick] [--device cpu|cuda] [--only WORDS,...]
        [--ways default,reduce-overhead] [--choose timed,always] [--output FILE]

Hugging Face models from their configurations, 4 layers of 2048 in bf16: prefill B2 S1024 with and without a cache, one
decoding step with a static cache of 1024 that holds 512 (B1, B8), a training step B4 S2048 of Qwen3. Every way compiles
a function with a code object of its own: Dynamo keeps its decisions per code object. Times are back to back: the median
over rounds of the mean of a round. The reports name each pattern with the times that decided. On a CPU the models are
tiny, which only shows that the script runs.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from kernel_pytorch.compile_backend.entry import compile_graph
from kernel_pytorch.compile_backend.report import CompileReport
from kernel_pytorch.compile_backend.settings import settings_of
from table import print_table
from torch import nn
from torch_norms import describe_machine

Step = Callable[[], object]
SIZES = {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 4, "num_attention_heads": 16}
MORE = {"num_key_value_heads": 8, "vocab_size": 32000, "max_position_embeddings": 4096, "pad_token_id": 0}
TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
TINY_MORE = {"num_key_value_heads": 2, "vocab_size": 128, "max_position_embeddings": 256, "pad_token_id": 0}
WINDOWS = {"sliding_window": 512, "layer_types": ["sliding_attention", "full_attention"]}
MODELS = {"qwen3": "Qwen3Config", "olmo2": "Olmo2Config", "phi3": "Phi3Config", "gemma3": "Gemma3TextConfig"}
OURS = "kernel_pytorch"


def log(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


def model_of(name: str, device: torch.device) -> nn.Module:
    is_small = device.type == "cpu"
    sizes = {**TINY, **TINY_MORE} if is_small else {**SIZES, **MORE}
    if name in ("qwen3", "gemma3"):
        sizes["head_dim"] = sizes["hidden_size"] // sizes["num_attention_heads"]
    if name == "gemma3":
        sizes["layer_types"] = WINDOWS["layer_types"] * (sizes["num_hidden_layers"] // 2)
        sizes["sliding_window"] = 16 if is_small else WINDOWS["sliding_window"]
    torch.manual_seed(0)
    config = getattr(transformers, MODELS[name])(**sizes)
    return transformers.AutoModelForCausalLM.from_config(config).to(device, torch.bfloat16)


class StaticState:
    """A static cache, and its counters as they were: they count each step, and a measurement has many."""

    def __init__(self, model: nn.Module, ids: torch.Tensor, length: int, filled: int) -> None:
        self.cache = transformers.StaticCache(config=model.config, max_cache_len=length)
        with torch.no_grad():
            model(input_ids=ids[:, :1].expand(-1, filled), past_key_values=self.cache)
        self.counters = [
            (layer, name, value.clone() if isinstance(value, torch.Tensor) else value)
            for layer in self.cache.layers
            for name, value in vars(layer).items()
            if (isinstance(value, torch.Tensor) and value.numel() == 1) or type(value) is int
        ]

    def rewind(self) -> None:
        for layer, name, value in self.counters:
            if isinstance(value, torch.Tensor):
                getattr(layer, name).copy_(value)
            else:
                setattr(layer, name, value)


class Case:
    """One comparison: a model, what a step does with it, and the ways to run that."""

    def __init__(self, name: str, model: nn.Module, kind: str, batch: int, length: int, filled: int) -> None:
        self.name, self.model, self.kind = name, model.train(kind == "train"), kind
        self.device = next(model.parameters()).device
        self.ids = torch.randint(1, model.config.vocab_size, (batch, length), device=self.device)
        self.filled = filled
        self.steps: dict[str, tuple[Step, Step]] = {}
        self.notes: dict[str, str] = {}
        self.reports: dict[str, str] = {}

    def add(self, name: str, compiler: Callable[[Any], Any]) -> None:
        """A way by what it makes of the function that is measured; one that fails is noted and left out."""
        begin = time.perf_counter()
        try:
            step, before = self.step(compiler)
            for _ in range(3):
                before()
                step()
            synchronize(self.device)
        except Exception as error:
            self.notes[name] = f"{type(error).__name__}: {error}"[:300]
            log(f"{self.name}: {name} failed: {self.notes[name]}")
            return
        self.steps[name] = (step, before)
        log(f"{self.name}: {name} runs after {time.perf_counter() - begin:.1f} s")

    def step(self, compiler: Callable[[Any], Any]) -> tuple[Step, Step]:
        model = copy.deepcopy(self.model)
        if self.kind == "decode":
            length = 1024 if self.device.type == "cuda" else 128
            state = StaticState(model, self.ids, length, self.filled)

            def forward(ids: torch.Tensor, cache: Any) -> Any:
                return model(input_ids=ids, past_key_values=cache).logits

            call = compiler(own_code(forward))
            return without_gradients(lambda: call(self.ids, state.cache)), without_gradients(state.rewind)
        if self.kind == "train":

            def loss(ids: torch.Tensor) -> Any:
                return model(input_ids=ids, labels=ids, use_cache=False).loss

            call = compiler(own_code(loss))

            def train() -> None:
                call(self.ids).backward()
                model.zero_grad(set_to_none=True)

            return train, nothing
        with_cache = self.kind == "prefill with cache"

        def prefill(ids: torch.Tensor) -> Any:
            return model(input_ids=ids, use_cache=with_cache)

        call = compiler(own_code(prefill))
        return without_gradients(lambda: call(self.ids)), nothing

    def times(self, rounds: int, seconds: float) -> dict[str, dict[str, float]]:
        taken: dict[str, list[float]] = {name: [] for name in self.steps}
        for _ in range(rounds):
            for name, (step, before) in self.steps.items():
                taken[name].append(self.round(step, before, seconds))
        return {
            name: {"median_us": statistics.median(all_), "low_us": min(all_), "high_us": max(all_)}
            for name, all_ in taken.items()
        }

    def round(self, step: Step, before: Step, seconds: float) -> float:
        before()
        synchronize(self.device)
        begin = time.perf_counter()
        step()
        synchronize(self.device)
        repeats = max(2, min(100, int(seconds / (time.perf_counter() - begin))))
        before()
        synchronize(self.device)
        begin = time.perf_counter()
        for _ in range(repeats):
            step()
        synchronize(self.device)
        return (time.perf_counter() - begin) / repeats * 1e6


def nothing() -> None:
    pass


def without_gradients(step: Step) -> Step:
    def run() -> object:
        with torch.no_grad():
            torch.compiler.cudagraph_mark_step_begin()
            return step()

    return run


def own_code(function: types.FunctionType) -> Any:
    function.__code__ = function.__code__.replace()
    return function


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def ours(case: Case, name: str, mode: str | None, options: dict[str, Any]) -> Callable[[Any], Any]:
    settings = settings_of(mode, options)

    def compiler(function: Any) -> Any:
        report = CompileReport()

        def compile_and_note(module: Any, inputs: Any) -> Any:
            made = compile_graph(module, inputs, settings, report)
            case.reports[name] = str(report)
            return made

        return torch.compile(function, backend=compile_and_note)

    return compiler


def add_ways(case: Case, arguments: argparse.Namespace) -> None:
    inner = {"kernel_pytorch.inner": arguments.inner} if arguments.inner else {}
    budget = {"kernel_pytorch.budget_seconds": arguments.budget}
    ways = arguments.ways.split(",")
    if "eager" in ways:
        case.add("eager", lambda function: function)
    modes = [one for one in ways if one != "eager"]
    for mode in modes:
        plain = {"backend": arguments.inner} if arguments.inner else {"mode": mode}
        case.add(f"torch.compile {mode}", lambda function, plain=plain: torch.compile(function, **plain))
    for mode in [one for one in modes if one in ("default", "reduce-overhead")]:
        for choose in arguments.choose.split(","):
            name = f"{OURS} {mode}, {choose}"
            case.add(name, ours(case, name, mode, {**inner, **budget, "kernel_pytorch.choose": choose}))
            log(f"{case.name}: {name}:\n{case.reports.get(name, 'no report')}")


def cases(device: torch.device, quick: bool) -> dict[str, Callable[[], Case]]:
    is_small = device.type == "cpu"
    long, filled, trained = (32, 16, 32) if is_small else (1024, 512, 2048)
    found: dict[str, Callable[[], Case]] = {}
    for model in MODELS:
        for kind, batch, length in (
            ("prefill", 2, long),
            ("prefill with cache", 2, long),
            ("decode", 1, 1),
            ("decode", 8, 1),
            ("train", 4, trained),
        ):
            if kind == "train" and model != "qwen3":
                continue
            if quick and (model, batch) not in (("qwen3", 2), ("qwen3", 8), ("gemma3", 2), ("qwen3", 4)):
                continue
            name = f"{model} {kind} B{batch}" + (f" S{length}" if length > 1 else "")
            found[name] = lambda name=name, model=model, kind=kind, batch=batch, length=length: Case(
                name, model_of(model, device), kind, batch, length, filled
            )
    return found


def text_of(row: dict[str, float]) -> str:
    return f"{row['median_us'] / 1e3:.3f} ms ({row['low_us'] / 1e3:.3f} to {row['high_us'] / 1e3:.3f})"


def result_of(case: Case, arguments: argparse.Namespace) -> dict[str, Any]:
    add_ways(case, arguments)
    rows = case.times(*((3, 0.05) if arguments.quick else (9, 0.3)))
    peers = {name: row for name, row in rows.items() if not name.startswith(OURS)}
    mine = {name: row for name, row in rows.items() if name.startswith(OURS)}
    best_peer = min((row["median_us"] for row in peers.values()), default=0.0)
    ratios = {name: best_peer / row["median_us"] for name, row in mine.items()}
    for name, row in rows.items():
        log(f"{case.name}: {name}: {text_of(row)}" + (f", {ratios[name]:.2f}x" if name in ratios else ""))
    return {"what": case.name, "rows": rows, "ratios": ratios, "failed": case.notes, "reports": case.reports}


def figures(result: dict[str, Any]) -> list[dict[str, str]]:
    """A line for each way of ours: against every peer."""
    rows = result["rows"]
    peers = {name: row for name, row in rows.items() if not name.startswith(OURS)}
    lines = []
    for name in result["ratios"]:
        row = rows[name]
        against = ", ".join(f"{p['median_us'] / row['median_us']:.2f}x of {peer}" for peer, p in peers.items())
        texts = "; ".join(f"{peer}: {text_of(p)}" for peer, p in peers.items())
        lines.append({"what": f"{result['what']}: {name}", "ours": f"{text_of(row)}; {against}", "torch": texts})
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer cases and seconds")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="the GPU where there is one, by default")
    parser.add_argument("--only", default="", help="words that a case's name must hold one of, separated by commas")
    parser.add_argument(
        "--ways",
        default="eager,default,reduce-overhead,max-autotune-no-cudagraphs",
        help="eager and modes of torch.compile; ours runs in default and reduce-overhead of those",
    )
    parser.add_argument("--choose", default="timed", help="how ours chooses patterns: timed, always or both")
    parser.add_argument("--budget", type=float, default=20.0, help="seconds of timing in a compilation of ours")
    parser.add_argument("--inner", default="", help="another compiler than Inductor, such as aot_eager, for all")
    parser.add_argument("--limit", type=float, default=float("inf"), help="seconds after which nothing new is begun")
    parser.add_argument("--output", type=Path, help="write the figures as JSON, after each case")
    arguments = parser.parse_args()
    device = torch.device(arguments.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    wanted = [word for word in arguments.only.split(",") if word]
    machine = {**describe_machine(device), "transformers": transformers.__version__}
    record: dict[str, Any] = {"machine": machine, "figures": [], "results": []}
    end = time.monotonic() + arguments.limit
    for name, make in cases(device, arguments.quick).items():
        if (wanted and not any(word in name for word in wanted)) or time.monotonic() > end:
            continue
        result = result_of(make(), arguments)
        record["results"].append(result)
        record["figures"] += figures(result)
        if arguments.output:
            stored = {"benchmark": "compile_backend", "runs": [record]}
            arguments.output.write_text(json.dumps(stored, indent=1) + "\n")
        torch._dynamo.reset()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    print_table(record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
