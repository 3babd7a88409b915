"""kernel_pytorch.optimize against eager torch and torch.compile, whole models in turns in one process.

    python benchmarks/optimize_models.py [--quick] [--device cpu|cuda] [--only WORDS,...] [--output FILE]

On a GPU: a Llama block (4096 wide, 14336 inside, 32 heads on 8) in bf16, training and inference, and a training step of
Hugging Face's GPT-2 small. On a CPU: the bundled models, inference. Each way has a copy of the model of its own; peaks
of memory are of one step, with the model's weights, gradients and optimizer, and without the copies of the others.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from kernel_pytorch._optimize.changes import uncompiled
from kernel_pytorch._optimize.demo_models import DEMOS, LlamaBlock
from kernel_pytorch._optimize.measure import clock_of
from kernel_pytorch._optimize.patterns.graphs import graph_bytes
from processes import log
from table import print_table
from torch import nn
from torch_norms import describe_machine

import kernel_pytorch

Step = Callable[[], object]


class Case:
    """One comparison: a model, its arguments, and the ways to run it."""

    def __init__(self, name: str, model: nn.Module, arguments: Any, goal: str) -> None:
        self.name, self.model, self.arguments, self.goal = name, model, arguments, goal
        self.device = next(model.parameters()).device
        self.steps: dict[str, Step] = {}
        self.models: dict[str, nn.Module] = {}
        self.notes: dict[str, str] = {}
        self.autocast: torch.dtype | None = None
        self.optimizer = False

    def context(self) -> Any:
        enabled = self.autocast is not None
        return torch.autocast(self.device.type, dtype=self.autocast or torch.bfloat16, enabled=enabled)

    def add(self, name: str, make: Callable[[nn.Module], nn.Module]) -> None:
        """A way by what it makes of a copy of the model; one that fails is noted and left out. The limit of time is for
        whole cases: one without its peers would compare nothing."""
        log(f"{self.name}: {name}")
        try:
            with self.context():
                model = make(copy.deepcopy(self.model))
            step = self.step_of(model)
            begin = time.perf_counter()
            for _ in range(3):
                step()
            synchronize(self.device)
            log(f"{self.name}: {name} runs after {time.perf_counter() - begin:.1f} s")
        except Exception as error:
            self.notes[name] = f"{type(error).__name__}: {error}"[:300]
            log(f"{self.name}: {name} failed: {self.notes[name]}")
            return
        self.steps[name], self.models[name] = step, model

    def step_of(self, model: nn.Module) -> Step:
        parameters = list(model.parameters())
        given = self.arguments.values() if isinstance(self.arguments, dict) else self.arguments
        inputs = [one for one in given if isinstance(one, torch.Tensor)]
        optimizer = torch.optim.AdamW(parameters, lr=1e-5, fused=True) if self.optimizer else None

        def infer() -> object:
            with torch.no_grad(), self.context():
                return call(model, self.arguments)

        def train() -> object:
            with self.context():
                output = call(model, self.arguments)
            loss = output.loss if hasattr(output, "loss") else None
            if loss is not None:
                loss.backward()
            else:
                output.backward(self.gradient(output))
            if optimizer is not None:
                optimizer.step()
            for tensor in (*parameters, *inputs):  # a block's input is no leaf in a model: nothing is added to
                tensor.grad = None
            return None

        return infer if self.goal == "inference" else train

    def gradient(self, output: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "_gradient"):
            self._gradient = torch.randn_like(output)
        return self._gradient

    def times(self, seconds: float) -> dict[str, tuple[float, float, float]]:
        """Medians and quartiles in microseconds, in turns, whose order is drawn anew each time: a GPU at its limit of
        power is slower after hot work than after cool."""
        samples: dict[str, list[float]] = {name: [] for name in self.steps}
        # Calls of a turn follow each other: the host is ahead of the device from the second one on, and what it takes
        # for the first must not count.
        is_cuda = self.device.type == "cuda"
        turn_us, least, turns = (6e4, 3, 9) if is_cuda else (2e4, 1, 15)
        repeats = {
            name: min(100, max(least, int(turn_us / elapsed_us(step, self.device, 1))))
            for name, step in self.steps.items()
        }
        end, order = time.monotonic() + seconds, random.Random(0)
        while time.monotonic() < end or min(map(len, samples.values())) < turns:
            for name in order.sample(list(self.steps), len(self.steps)):
                samples[name].append(elapsed_us(self.steps[name], self.device, repeats[name]))
        return {name: quartiles(values) for name, values in samples.items()}

    def peak(self, name: str) -> int | None:
        """Bytes of one step's peak and of the model itself."""
        if self.device.type != "cuda":
            return None
        own = sum(p.nbytes for p in self.models[name].parameters()) * (3 if self.optimizer else 1)
        synchronize(self.device)
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        self.steps[name]()
        synchronize(self.device)
        peak = torch.cuda.max_memory_allocated(self.device) - before + own
        return peak + graph_bytes(uncompiled(self.models[name]))  # which were there before

    def launches(self, name: str) -> int | None:
        if self.device.type != "cuda":
            return None
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            self.steps[name]()
            synchronize(self.device)
        events = [event for event in profiler.events() if event.device_type.name == "CUDA"]
        return sum(not event.name.startswith(("Memcpy", "Memset")) for event in events)


def call(model: nn.Module, arguments: Any) -> Any:
    return model(**arguments) if isinstance(arguments, dict) else model(*arguments)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def elapsed_us(step: Step, device: torch.device, repeats: int) -> float:
    step()
    synchronize(device)
    clock = clock_of(device)
    begin = clock()
    for _ in range(repeats):
        step()
    synchronize(device)
    return (clock() - begin) / 1e3 / repeats


def quartiles(values: list[float]) -> tuple[float, float, float]:
    low, median, high = statistics.quantiles(values, n=4)
    return median, low, high


def optimized(case: Case, reports: dict[str, Any], accuracy: str = "exact", budget: float = 40.0) -> Any:
    def make(model: nn.Module) -> nn.Module:
        result = kernel_pytorch.optimize(model, case.arguments, case.goal, budget, accuracy)
        reports[f"{case.name}, {accuracy}"] = result.report.data
        log(str(result.report))
        return result.model

    return make


def llama_block(device: torch.device, batch: int, length: int, goal: str) -> Case:
    small = device.type == "cpu"
    dim, heads, key_heads, hidden = (256, 4, 2, 512) if small else (4096, 32, 8, 14336)
    block = LlamaBlock(dim, heads, key_heads, hidden).to(device, torch.bfloat16).train(goal == "train")
    x = torch.randn(batch, length, dim, device=device, dtype=torch.bfloat16).requires_grad_(goal == "train")
    head = dim // heads
    angles = torch.outer(torch.arange(length), 1e4 ** (-torch.arange(0, head, 2) / head)).to(device)
    cos, sin = (torch.cat([f(angles)] * 2, -1)[None].to(torch.bfloat16) for f in (torch.cos, torch.sin))
    return Case(f"Llama block, {goal} B{batch} S{length}", block, (x, cos, sin), goal)


def gpt2(device: torch.device) -> Case:
    from transformers import GPT2Config, GPT2LMHeadModel

    small = device.type == "cpu"
    config = GPT2Config(n_embd=64, n_layer=2, n_head=2, vocab_size=512) if small else GPT2Config()
    config.use_cache = False
    batch, length = (2, 64) if small else (8, 1024)
    ids = torch.randint(0, config.vocab_size, (batch, length), device=device)
    model = GPT2LMHeadModel(config).to(device).train()
    case = Case("GPT-2 small, training step", model, {"input_ids": ids, "labels": ids}, "train")
    case.autocast, case.optimizer = torch.bfloat16, True
    return case


def bundled(name: str) -> Case:
    make, sample = DEMOS[name]
    return Case(f"bundled {name}, inference", make().eval(), (sample(),), "inference")


def run(case: Case, ways: dict[str, Any], plan: Plan) -> dict[str, Any]:
    for name, make in ways.items():
        if name not in plan.without and (not plan.warm or "compile" in name or "autotune" in name):
            case.add(name, make)
    if plan.warm or not case.steps:
        return {"what": case.name, "rows": {}, "failed": case.notes}
    times = case.times(plan.seconds)
    rows = {
        name: {
            "median_us": t[0],
            "low_us": t[1],
            "high_us": t[2],
            "peak_bytes": case.peak(name),
            "launches": case.launches(name),
        }
        for name, t in times.items()
    }
    for name, row in rows.items():
        log(f"{case.name}: {name}: {text_of(row)}")
    return {"what": case.name, "rows": rows, "failed": case.notes}


def text_of(row: dict[str, Any]) -> str:
    scale, unit = (1e3, "ms") if row["median_us"] >= 1e4 else (1.0, "µs")
    text = f"{row['median_us'] / scale:.1f} {unit} ({row['low_us'] / scale:.1f} to {row['high_us'] / scale:.1f})"
    text += f", {row['peak_bytes'] / 2**30:.2f} GiB" if row["peak_bytes"] is not None else ""
    return text + (f", {row['launches']} launches" if row["launches"] is not None else "")


def figures(result: dict[str, Any]) -> list[dict[str, str]]:
    """A line for each way of ours: against every peer."""
    rows = result["rows"]
    peers = {name: row for name, row in rows.items() if not name.startswith("optimize")}
    lines = []
    for name, row in rows.items():
        if name in peers:
            continue
        against = ", ".join(f"{p['median_us'] / row['median_us']:.2f}x of {peer}" for peer, p in peers.items())
        texts = "; ".join(f"{peer}: {text_of(p)}" for peer, p in peers.items())
        lines.append({"what": f"{result['what']}: {name}", "ours": f"{text_of(row)}; {against}", "torch": texts})
    return lines


@dataclass
class Plan:
    """How long things may take."""

    quick: bool
    warm: bool
    seconds: float
    budget: float
    deadline: float
    without: list[str]


def compiled(mode: str | None = None) -> Any:
    return lambda model: torch.compile(model, mode=mode) if mode else torch.compile(model)


def cases(device: torch.device, plan: Plan, reports: dict[str, Any]) -> dict[str, Callable[[], dict[str, Any]]]:
    def eager(model: nn.Module) -> nn.Module:
        return model

    def block(batch: int, length: int, goal: str) -> dict[str, Any]:
        case = llama_block(device, batch, length, goal)
        ways: dict[str, Any] = {"eager": eager, "torch.compile": compiled()}
        ways["optimize"] = optimized(case, reports, "exact", plan.budget)
        if goal == "train":
            ways["optimize, tolerant"] = optimized(case, reports, "tolerant", plan.budget)
        else:  # "reduce-overhead" is torch.compile with CUDA graphs, the larger part of what max-autotune gains
            for mode in ("reduce-overhead",) if plan.quick else ("reduce-overhead", "max-autotune"):
                ways[f"torch.compile {mode}"] = compiled(mode)
        return run(case, ways, plan)

    def language_model() -> dict[str, Any]:
        case = gpt2(device)
        ours = optimized(case, reports, "exact", plan.budget)
        ways = {"eager": eager, "torch.compile": compiled(), "optimize": ours}
        # Graphs of forward and backward are left alone by torch.compile: it then runs what optimize made.
        inner = ours if device.type == "cuda" else lambda model: heavy_parts(case, model, plan.budget)
        ways["optimize + torch.compile"] = lambda model: torch.compile(inner(model))
        return run(case, ways, plan)

    def demo(name: str) -> dict[str, Any]:
        case = bundled(name)
        ways = {"eager": eager, "optimize": optimized(case, reports, "exact", plan.budget)}
        ways["optimize, tolerant"] = optimized(case, reports, "tolerant", plan.budget)
        return run(case, ways, plan)

    if device.type == "cpu":
        found: dict[str, Any] = {name: (lambda name=name: demo(name)) for name in DEMOS}
        small = {
            "block": lambda: block(1, 64, "train"),
            "step": language_model,
            "infer": lambda: block(1, 64, "inference"),
        }
        return {**found, **(small if plan.quick else {})}  # the small ones try the GPU's cases
    return {
        "train": lambda: block(4, 4096, "train"),
        "gpt2": language_model,
        "s128": lambda: block(1, 128, "inference"),
        "s2048": lambda: block(1, 2048, "inference"),
    }


def heavy_parts(case: Case, model: nn.Module, budget: float) -> nn.Module:
    """Attention and loss on our kernels, the rest left to the compiler."""
    patterns = ["transformers_attention", "transformers_loss"]
    return kernel_pytorch.optimize(model, case.arguments, case.goal, budget, patterns=patterns).model


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer seconds, no max-autotune")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="the GPU where there is one, by default")
    parser.add_argument("--only", default="", help="names of cases, separated by commas")
    parser.add_argument(
        "--warm", action="store_true", help="only compile, so that a later run finds torch's caches full"
    )
    parser.add_argument("--without", default="", help="names of ways to leave out, separated by commas")
    parser.add_argument("--limit", type=float, default=float("inf"), help="seconds after which nothing new is begun")
    parser.add_argument("--budget", type=float, help="of each optimize")
    parser.add_argument("--threads", type=int, help="of torch, on a CPU")
    parser.add_argument("--output", type=Path, help="write the figures as JSON, after each case")
    parser.add_argument("--reports", type=Path, help="write the whole reports of optimize as JSON, after each case")
    arguments = parser.parse_args()
    device = torch.device(arguments.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    reports: dict[str, Any] = {}
    wanted = [word for word in arguments.only.split(",") if word]
    record: dict[str, Any] = {"machine": describe_machine(device), "figures": [], "results": []}
    quick = arguments.quick
    without = arguments.without.split(",")
    budget = arguments.budget or (15.0 if quick else 40.0)
    plan = Plan(quick, arguments.warm, 2.0 if quick else 8.0, budget, time.monotonic() + arguments.limit, without)
    for name, case in cases(device, plan, reports).items():
        if (wanted and name not in wanted) or time.monotonic() > plan.deadline:
            continue
        result = case()
        record["results"].append(result)
        record["figures"] += figures(result)
        if arguments.output:
            stored = {"benchmark": "optimize_models", "runs": [record]}
            arguments.output.write_text(json.dumps(stored, indent=1) + "\n")
        if arguments.reports:
            arguments.reports.write_text(json.dumps(reports, indent=1, default=str) + "\n")
        torch._dynamo.reset()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    print_table(record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
