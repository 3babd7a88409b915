"""Training in less memory: activations kept, recomputed and moved by `fit_memory`, against torch's own ways in one run.

    python benchmarks/memory.py [--device cpu|cuda] [--quick] [--only blocks|model|float8|planner] [--output FILE]

`blocks`: eight Llama blocks (d 4096, ff 14336, 8,192 tokens, bf16): everything kept, torch.utils.checkpoint, torch's
selective checkpointing of everything but products and attention, save_on_cpu, and fit_memory at 80 % and at 40 % of the
activations. `model`: a step of a model of 1.5 billion parameters with torch's AdamW in fp32 under autocast and
everything kept, against bf16 with compact states and released gradients, with everything kept and with fit_memory at
40 % and 30 % of the first one's peak. `float8`: one Llama block in bf16 and in FP8. `planner`: the plan's added time
against exhaustive search on small random models. Peaks are the allocator's, times are medians of interleaved turns. On
a CPU the shapes are small, and only whether the numbers hang together can be seen.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from kernel_pytorch.advanced_memory import MemoryFit, fit_memory
from kernel_pytorch.optim import AdamW, release_gradients
from kernel_pytorch.optim.release import GradientRelease
from memory_float8 import steps_of
from memory_planner import run_planner
from table import print_and_store
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch_norms import describe_machine

from kernel_pytorch import functional as F

GIB = 1 << 30


class Layer(nn.Module):
    """A Llama block on this library's functions and torch's attention."""

    def __init__(self, dim: int, hidden: int, head: int) -> None:
        super().__init__()
        self.heads, self.key_heads, self.head = dim // head, max(dim // head // 4, 1), head
        self.norms = nn.ParameterList([nn.Parameter(torch.ones(dim)) for _ in range(2)])
        sizes = {"q": (dim, dim), "k": (dim, self.key_heads * head), "v": (dim, self.key_heads * head), "o": (dim, dim)}
        sizes |= {"gate": (dim, hidden), "up": (dim, hidden), "down": (hidden, dim)}
        for name, (columns, rows) in sizes.items():
            setattr(self, name, nn.Linear(columns, rows, bias=False))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        def split(y: Tensor) -> Tensor:
            return y.view(*y.shape[:2], -1, self.head)

        normed = F.rms_norm(x, self.norms[0], 1e-5)
        query, key = F.rope(split(self.q(normed)), split(self.k(normed)), cos, sin)
        attended = nn.functional.scaled_dot_product_attention(
            query.transpose(1, 2),
            key.transpose(1, 2),
            split(self.v(normed)).transpose(1, 2),
            is_causal=True,
            enable_gqa=self.heads != self.key_heads,
        )
        x = x + self.o(attended.transpose(1, 2).flatten(2))
        normed = F.rms_norm(x, self.norms[1], 1e-5)
        return x + self.down(F.swiglu(self.gate(normed), self.up(normed)))


class Stack(nn.Module):
    """Layers; with words, a language model with its loss."""

    def __init__(self, layers: int, dim: int, hidden: int, head: int, length: int, words: int = 0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(dim, hidden, head) for _ in range(layers))
        if words:
            self.table, self.head = nn.Embedding(words, dim), nn.Linear(dim, words, bias=False)
        self.words, self.rope, self.way = words, (length, head), "plain"

    def forward(self, x: Tensor) -> Tensor:
        cos, sin = F.rope_tables(*self.rope, device=x.device)
        tokens = x
        if self.words:
            x = self.table(x)
        for layer in self.layers:
            x = self.called(layer, x, cos, sin)
        if not self.words:
            return x
        return nn.functional.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    def called(self, layer: nn.Module, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if self.way == "checkpoint":
            return checkpoint(layer, x, cos, sin, use_reentrant=False)  # type: ignore[no-any-return]
        if self.way == "selective":
            return checkpoint(layer, x, cos, sin, use_reentrant=False, context_fn=_selective)  # type: ignore[no-any-return]
        output: Tensor = layer(x, cos, sin)
        return output


def _selective() -> Any:
    """torch's usual policy: products and attention are saved, the rest is computed again."""
    aten = torch.ops.aten
    saved = {
        aten.mm.default,
        aten.addmm.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
    }

    def policy(_context: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op in saved else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


class Way:
    """One way of training: a step, its peak and the activations that are alive between forward and backward."""

    def __init__(self, step: Callable[[Callable[[], None]], None], device: torch.device) -> None:
        self.step, self.device = step, device
        self.milliseconds: list[float] = []

    def memory(self) -> tuple[int, int, int]:
        """Bytes before a step, between its forward and backward, and at its peak; zeros on a CPU."""
        between: list[int] = []
        if self.device.type != "cuda":
            self.step(lambda: None)
            return 0, 0, 0
        self.step(lambda: None)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        self.step(lambda: between.append(torch.cuda.memory_allocated()))
        return before, between[0], torch.cuda.max_memory_allocated()

    def turn(self) -> None:
        self._wait()
        start = time.perf_counter()
        self.step(lambda: None)
        self._wait()
        self.milliseconds.append((time.perf_counter() - start) * 1e3)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def figures_of(ways: dict[str, Way], turns: int) -> list[dict[str, Any]]:
    memory = {name: way.memory() for name, way in ways.items()}
    for _ in range(turns):
        for way in ways.values():
            way.turn()
    first = next(iter(ways))
    plain_ms = statistics.median(ways[first].milliseconds)
    plain_kept = max(memory[first][1] - memory[first][0], 1)
    figures = []
    for name, way in ways.items():
        before, between, peak = memory[name]
        ms = statistics.median(way.milliseconds)
        figures.append(
            {
                "way": name,
                "peak_gib": peak / GIB,
                "before_gib": before / GIB,
                "activations_gib": (between - before) / GIB,
                "activations_share": (between - before) / plain_kept,
                "ms": ms,
                "least_ms": min(way.milliseconds),
                "most_ms": max(way.milliseconds),
                "slowdown": ms / plain_ms - 1,
            }
        )
    return figures


def backward_step(model: Stack, x: Tensor, upstream: Tensor, context: Callable[[], Any]) -> Any:
    def step(between: Callable[[], None]) -> None:
        with context():
            output = model(x)
        between()
        output.backward(upstream)
        del output
        x.grad = None

    return step


def _drop_gradient(parameter: Tensor) -> None:
    parameter.grad = None


def describe_fit(fit: MemoryFit) -> dict[str, Any]:
    first = next(iter(fit.treatments.values()))
    return {
        "predicted_peak_gib": fit.predicted_peak / GIB,
        "measured_peak_gib": fit.measured_peak / GIB,
        "peak_error": fit.measured_peak / fit.predicted_peak - 1,
        "predicted_slowdown": fit.predicted_ms / max(fit.everything_ms, 1e-9) - 1,
        "host_gib": fit.slab_bytes / GIB,
        "moved_gib": fit.plan["moved_bytes"] / GIB,
        "stall_ms": fit.plan["stall_us"] / 1e3,
        "recompute_ms": fit.plan["recompute_us"] / 1e3,
        "is_exact": fit.plan["is_exact"],
        "first_block_bytes": first,
        "other_paths": fit.other_paths,
    }


def run_blocks(device: torch.device, quick: bool) -> dict[str, Any]:
    sizes = {"layers": 8, "dim": 4096, "hidden": 14336, "head": 128, "length": 8192}
    if device.type == "cpu":
        sizes = {"layers": 4, "dim": 128, "hidden": 448, "head": 32, "length": 128}
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(0)
    with torch.device(device):
        model = Stack(**sizes).to(dtype)
        x = torch.randn(1, sizes["length"], sizes["dim"], dtype=dtype, requires_grad=True)
        upstream = torch.randn_like(x)
    # As with an optimizer that steps inside backward: what is compared are activations.
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(_drop_gradient)
    nothing: Callable[[], Any] = contextlib.nullcontext

    # One model; each way sets it up for its turn.
    def way(name: str, fit: MemoryFit | None = None, context: Callable[[], Any] = nothing) -> Way:
        plain = backward_step(model, x, upstream, context)

        def step(between: Callable[[], None]) -> None:
            model.way = name
            if fit is not None:
                fit.install()
            plain(between)
            if fit is not None:
                fit.remove()

        return Way(step, device)

    ways = {"everything kept": way("plain")}
    before, between, peak = ways["everything kept"].memory()
    kept = between - before
    fits: dict[str, MemoryFit] = {}
    if device.type == "cuda":
        shares = {"fit_memory, offload only, 80 %": (0.80, False), "fit_memory, 40 %": (0.40, True)}
        for name, (share, recompute) in shares.items():
            try:
                budget = int(peak - (1 - share) * kept)
                fits[name] = fit_memory(model, x, budget, recompute=recompute, gradients="released")
                fits[name].remove()
                print(fits[name], flush=True)
            except MemoryError as error:
                print(name, error, flush=True)
    else:
        free = fit_memory(model, x, "1TiB")
        free.remove()
        half = (free.everything_peak + int(free.plan["least_bytes"])) // 2
        fits["fit_memory, half way"] = fit_memory(model, x, half)
        fits["fit_memory, half way"].remove()
    ways["torch checkpoint"] = way("checkpoint")
    ways["torch selective"] = way("selective")
    ways |= {name: way("plain", fit) for name, fit in fits.items()}
    turns = 3 if quick or device.type == "cpu" else 7
    figures = figures_of(ways, turns)
    # Allocates pinned memory in the step and copies in turn: few turns are enough.
    on_cpu = way("plain", context=lambda: torch.autograd.graph.save_on_cpu(pin_memory=device.type == "cuda"))
    slow = figures_of({"everything kept": ways["everything kept"], "save_on_cpu": on_cpu}, 1)[1]
    return {
        "sizes": sizes,
        "figures": [*figures, slow],
        "fits": {name: describe_fit(fit) for name, fit in fits.items()},
    }


def run_model(device: torch.device, quick: bool) -> dict[str, Any]:
    sizes = {"layers": 26, "dim": 2048, "hidden": 7168, "head": 128, "length": 2048, "words": 32000}
    batch = 4
    if device.type == "cpu":
        sizes, batch = {"layers": 3, "dim": 64, "hidden": 224, "head": 32, "length": 64, "words": 500}, 2
    torch.manual_seed(0)
    tokens = torch.randint(sizes["words"], (batch, sizes["length"]), device=device)
    turns = 3 if quick or device.type == "cpu" else 5

    def theirs() -> Way:
        with torch.device(device):
            model = Stack(**sizes)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

        def step(between: Callable[[], None]) -> None:
            with torch.autocast(device.type, torch.bfloat16):
                loss = model(tokens)
            between()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        return Way(step, device)

    def ours(budget: int | None) -> tuple[Way, MemoryFit | None, GradientRelease]:
        with torch.device(device):
            model = Stack(**sizes).to(torch.bfloat16)
        optimizer = AdamW(model.parameters(), lr=1e-4, state="compact")
        with release_gradients(optimizer):
            model(tokens).backward()  # states
        fit = None
        if budget is not None:
            fit = fit_memory(model, tokens, budget, loss=lambda loss: loss, gradients="released")
            print(fit, flush=True)
        released = release_gradients(optimizer)

        def step(between: Callable[[], None]) -> None:
            loss = model(tokens)
            between()
            loss.backward()
            optimizer.step()

        return Way(step, device), fit, released

    figures, fits = [], {}
    first = theirs()
    peak = first.memory()[2] or 1 << 40
    figures += figures_of({"torch AdamW, autocast, everything kept": first}, turns)
    base = statistics.median(first.milliseconds)
    del first
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    for share in (None, 0.40, 0.30):
        try:
            way, fit, released = ours(None if share is None else int(share * peak))
        except MemoryError as error:
            print(error, flush=True)
            continue
        name = "bf16, compact states, " + ("everything kept" if share is None else f"fit_memory at {share:.0%}")
        one = figures_of({name: way}, turns)[0]
        one |= {"slowdown": one["ms"] / base - 1, "peak_share": one["peak_gib"] * GIB / peak}
        figures.append(one)
        if fit is not None:
            fits[name] = describe_fit(fit)
        released.remove()  # its hooks know the optimizer, which knows the parameters: Python does not see that circle
        del way, fit
        gc.collect()
    return {"sizes": {**sizes, "batch": batch}, "figures": figures, "fits": fits}


def run_float8(device: torch.device, quick: bool) -> dict[str, Any]:
    ways = {name: Way(step, device) for name, step in steps_of(device)}
    return {"figures": figures_of(ways, 3 if quick else 7), "fits": {}}


def run_plans(_device: torch.device, quick: bool) -> dict[str, Any]:
    return {"planner": run_planner(60 if quick else 300), "figures": [], "fits": {}}


def text_of(part: str, result: dict[str, Any]) -> list[dict[str, str]]:
    rows = []
    if "planner" in result:
        plans = result["planner"]
        what = f"{part}: {plans['plans']} plans of small models, {plans['equal']} as fast as the best of all"
        row = dict.fromkeys(("peak", "activations", "step", "slower by", "predicted peak", "error"), "")
        rows.append({"what": what, **row, "slower by": f"{100 / max(plans['worst'], 1e-9) - 100:.1f} % at most"})
    for one in result["figures"]:
        fit = result["fits"].get(one["way"])
        rows.append(
            {
                "what": f"{part}: {one['way']}",
                "peak": f"{one['peak_gib']:.2f} GiB" if one["peak_gib"] else "not counted",
                "activations": f"{one['activations_gib']:.2f} GiB" if one["peak_gib"] else "not counted",
                "step": f"{one['ms']:.1f} ms",
                "slower by": f"{100 * one['slowdown']:.1f} %",
                "predicted peak": "" if fit is None else f"{fit['predicted_peak_gib']:.2f} GiB",
                "error": "" if fit is None else f"{100 * fit['peak_error']:+.1f} %",
            }
        )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="three turns")
    parser.add_argument("--only", choices=tuple(PARTS), help="one part")
    parser.add_argument("--output", type=Path, help="write the results as JSON")
    options = parser.parse_args()
    device = torch.device(options.device)
    run: dict[str, Any] = {"machine": describe_machine(device), "figures": [], "results": {}}
    for name, part in PARTS.items():
        if options.only in (None, name):
            run["results"][name] = part(device, options.quick)
            run["figures"] += text_of(name, run["results"][name])
            run["columns"] = list(run["figures"][0])
            print_and_store(run, options.output)  # after each part: the next may not fit into what time there is
    return 0


PARTS = {"blocks": run_blocks, "model": run_model, "float8": run_float8, "planner": run_plans}

if __name__ == "__main__":
    sys.exit(main())
