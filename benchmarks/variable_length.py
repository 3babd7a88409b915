"""A trace of requests of many lengths: bucketed, with CUDA graphs and our kernels, against torch as it is.

    python benchmarks/variable_length.py [--device cpu|cuda] [--quick] [--models vit,bert] [--output FILE]

1,000 requests, lengths by Zipf's law from 16 to 2048, for a ViT-like model (patches in, logits out) and a BERT-like one
(tokens in, states of every token out). Two ways of serving, each with its own peers:
  one at a time   eager and torch.compile(dynamic=True) at the request's own length; ours padded to its bucket
  in batches      eager and torch.compile(dynamic=True) on requests sorted by length, each batch padded to its longest
                  and masked; ours batched within buckets
Buckets are learned from another draw of the same law. A pass is the whole trace, timed to the last result; passes of
all ways take turns, after two that verify buckets and capture; medians, with the least and the most. Results are
compared first.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from encoder import Encoder, Size
from kernel_pytorch.optimization_patterns import BucketingStrategy, DynamicShapeModule, create_optimal_bucketing_system
from table import print_table
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch_norms import describe_machine

BEGAN = time.perf_counter()
WARM = 2  # passes before the timed ones: they verify buckets, capture and compile
BOUND = {torch.bfloat16: 0.1, torch.float32: 1e-3}  # of the largest value, through all layers


FULL = Size(layers=12, dim=768, heads=12, requests=1000, longest=2048, passes=5, batch_tokens=16384)
QUICK = Size(layers=6, dim=768, heads=12, requests=1000, longest=2048, passes=3, batch_tokens=16384)
CPU = Size(layers=4, dim=256, heads=4, requests=1000, longest=2048, passes=3, batch_tokens=2048)
CPU_QUICK = Size(layers=2, dim=128, heads=4, requests=60, longest=256, passes=3, batch_tokens=512)


def zipf_lengths(count: int, longest: int, seed: int, shortest: int = 16) -> list[int]:
    ranks = torch.arange(1, longest - shortest + 2, dtype=torch.float64)
    drawn = torch.multinomial(1 / ranks, count, replacement=True, generator=torch.Generator().manual_seed(seed))
    return (drawn + shortest).tolist()


class Trace:
    """A model in three kinds and the requests, each way of serving them a function that runs all."""

    def __init__(self, name: str, size: Size, device: torch.device, alternatives: Sequence[str]) -> None:
        self.name, self.size, self.device = name, size, device
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        takes_tokens = name == "bert"
        with device:
            self.model = Encoder(size, takes_tokens, "torch").to(self.dtype).eval()
        self.others = []
        for kernels in alternatives:
            with torch.device("meta"):
                other = Encoder(size, takes_tokens, kernels).eval()
            other.load_state_dict(self.model.state_dict(), assign=True)  # the same tensors
            self.others.append(other)
        generator = torch.Generator(device).manual_seed(1)
        self.lengths = zipf_lengths(size.requests, size.longest, seed=2)
        self.requests: list[Tensor] = []
        for length in self.lengths:
            request = (
                torch.randint(30000, (length,), generator=generator, device=device)
                if takes_tokens
                else torch.randn(length, size.dim, generator=generator, device=device).to(self.dtype)
            )
            self.requests.append(request)

    def bucketed(self) -> DynamicShapeModule:
        """Learned from another draw; the longest is known. Products take 24 d^2 flops a token, attention 4 d times the
        length: that is the cost."""
        others = zipf_lengths(1000, self.size.longest, seed=3)
        rest = () if self.name == "bert" else (self.size.dim,)
        system = create_optimal_bucketing_system(
            [(1, length, *rest) for length in others],
            BucketingStrategy.OPTIMAL,
            max_buckets=48,
            dimensions=[1],
            cost={"linear": 1.0, "quadratic": 1 / (6 * self.size.dim)},
            alignment=8,
            longest={1: self.size.longest},
            enable_adaptive_optimization=False,
            memory_limit_gb=40.0,
        )
        return DynamicShapeModule(self.model, system, alternatives=self.others, max_plans=1024).eval()

    def load_kernels(self) -> None:
        """Ours are compiled at their first use, for ranges of shapes: done before anybody waits for the device."""
        for length in sorted({min(length, self.size.longest) for length in (16, 40, 96, 200, 400, 900, 2048)}):
            request = self.requests[0][:1].expand(length, *self.requests[0].shape[1:])[None].contiguous()
            lengths = torch.full((1,), length, dtype=torch.int32, device=self.device)
            for other in self.others:
                other(request, lengths)
                synchronize(self.device)
                say(f"{self.name}: kernels of {other.kernels} at {length} positions")

    def sorted_batches(self) -> list[list[int]]:
        order = sorted(range(len(self.requests)), key=lambda index: self.lengths[index])
        batches: list[list[int]] = [[]]
        for index in order:
            if batches[-1] and (len(batches[-1]) + 1) * self.lengths[index] > self.size.batch_tokens:
                batches.append([])
            batches[-1].append(index)
        return batches

    def in_batches(self, model: Callable[..., Tensor]) -> Tensor:
        for members in self.sorted_batches():
            batch = pad_sequence([self.requests[index] for index in members], batch_first=True)
            lengths = torch.tensor([self.lengths[index] for index in members], dtype=torch.int32)
            if self.device.type == "cuda":
                lengths = lengths.pin_memory().to(self.device, non_blocking=True)
            result = model(batch, lengths)
        return result

    def one_by_one(self, model: Callable[..., Tensor]) -> Tensor:
        for request in self.requests:
            result = model(request[None])
        return result


def say(what: str) -> None:
    """Where the time goes, for runs with a limit."""
    print(f"{time.perf_counter() - BEGAN:6.1f} s  {what}", file=sys.stderr, flush=True)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def largest_difference(trace: Trace, results: Callable[[list[int]], list[Tensor]]) -> float:
    """The difference of bucketed from plain results, as a share of the largest value; infinite if a shape is wrong."""
    chosen = list(range(0, len(trace.requests), max(len(trace.requests) // 40, 1)))
    worst = 0.0
    for index, found in zip(chosen, results(chosen), strict=True):
        expected = trace.model(trace.requests[index][None])[0]
        if found.shape != expected.shape:
            return float("inf")
        worst = max(worst, ((found - expected).abs().max() / expected.abs().max()).item())
    return worst


def passes(trace: Trace, ways: dict[str, Callable[[], object]], count: int) -> dict[str, list[float]]:
    """Seconds of whole traces; the ways take turns."""
    samples: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(count):
        for name, way in ways.items():
            synchronize(trace.device)
            begin = time.perf_counter()
            way()
            synchronize(trace.device)
            samples[name].append(time.perf_counter() - begin)
            say(f"{trace.name}: {name}, {samples[name][-1]:.2f} s")
    return samples


@contextlib.contextmanager
def alone(lock: Path | None) -> Iterator[None]:
    """No other process that names the same file is inside: two can compile at once, but the GPU is one's."""
    if lock is None:
        yield
        return
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def compiled_or_none(trace: Trace) -> Callable[..., Tensor] | None:
    compiled = torch.compile(trace.model, dynamic=True)
    try:
        for request in trace.requests[:3]:
            compiled(request[None])
    except Exception as error:  # a peer that cannot be built here is left out, and said so
        print(f"variable_length: torch.compile is left out: {type(error).__name__}: {error}", file=sys.stderr)
        return None
    return compiled


def measure(trace: Trace, arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """What is known so far, after each stage: eager, torch.compile, batches."""
    trace.load_kernels()
    single = trace.bucketed()
    with alone(arguments.lock):
        for turn in range(WARM):
            trace.one_by_one(single)
            say(f"{trace.name}: pass {turn + 1} that verifies and captures, {single.statistics()['graphs']} graphs")
        row = describe(trace, single)
        row["largest_difference"] = largest_difference(
            trace, lambda chosen: [single(trace.requests[index][None])[0] for index in chosen]
        )
        ways: dict[str, Callable[[], object]] = {
            "ours": lambda: trace.one_by_one(single),
            "eager": lambda: trace.one_by_one(trace.model),
        }
        row["seconds"] = passes(trace, ways, 1 if arguments.quick else trace.size.passes)
    yield row
    compiled = None if arguments.no_compile else compiled_or_none(trace)
    if compiled is not None:
        say(f"{trace.name}: torch.compile has compiled")
        ways["torch.compile"] = lambda: trace.one_by_one(compiled)
        with alone(arguments.lock):
            ways["torch.compile"]()
            row["seconds"] = passes(trace, ways, trace.size.passes)
        yield row
    if not arguments.single:
        with alone(arguments.lock):
            measure_batches(trace, None if arguments.quick else compiled, row)
        yield row


def measure_batches(trace: Trace, compiled: Callable[..., Tensor] | None, row: dict[str, Any]) -> None:
    batched = trace.bucketed()
    ways: dict[str, Callable[[], object]] = {
        "ours in batches": lambda: batched.run_many(trace.requests, trace.size.batch_tokens),
        "eager in batches": lambda: trace.in_batches(trace.model),
    }
    if compiled is not None:  # with a mask it is another compilation
        ways["torch.compile in batches"] = lambda: trace.in_batches(compiled)
    for _ in range(WARM):
        for way in ways.values():
            way()
    many = batched.run_many(trace.requests, trace.size.batch_tokens)
    difference = largest_difference(trace, lambda chosen: [many[index] for index in chosen])
    row["largest_difference"] = max(row["largest_difference"], difference)
    row["refusals"] = sorted({*row["refusals"], *batched.refusals()})
    row["batch_graphs"] = batched.statistics()["graphs"]
    row["seconds"] |= passes(trace, ways, trace.size.passes)


def describe(trace: Trace, single: DynamicShapeModule) -> dict[str, Any]:
    statistics_of = single.statistics()
    names = ["torch", *(other.kernels for other in trace.others)]
    kinds = [names[plan.chosen or 0] for plan in single._plans.values()]
    return {
        "model": trace.name,
        "layers": trace.size.layers,
        "dim": trace.size.dim,
        "requests": len(trace.requests),
        "tokens": sum(trace.lengths),
        "buckets": single.bucketing.sizes(1),
        "padding_overhead": statistics_of["padding_overhead"] if single.pads(trace.requests[:1]) else 0.0,
        "refusals": sorted(set(single.refusals())),
        "graphs": statistics_of["graphs"],
        "graph_bytes": statistics_of["graph_bytes"],
        "graphs_refused": sorted({decision.reason for decision in single.graph_decisions() if not decision.pays})[:8],
        "kernels_of_buckets": {kind: kinds.count(kind) for kind in sorted(set(kinds))},
        "largest_difference_allowed": BOUND[trace.dtype],
    }


def figures_of(row: dict[str, Any]) -> list[dict[str, str]]:
    names = {"vit": "ViT-like", "bert": "BERT-like"}
    figures = []
    for ours, peers in (
        ("ours", ("eager", "torch.compile")),
        ("ours in batches", ("eager in batches", "torch.compile in batches")),
    ):
        for peer in peers:
            if peer not in row["seconds"]:
                continue
            mine, theirs = (statistics.median(row["seconds"][name]) for name in (ours, peer))
            texts = {
                name: f"{1e3 * statistics.median(row['seconds'][name]):.0f} ms "
                f"({1e3 * min(row['seconds'][name]):.0f} to {1e3 * max(row['seconds'][name]):.0f})"
                for name in (ours, peer)
            }
            way = "in batches" if "batches" in ours else "one at a time"
            model = f"{names[row['model']]} ({row['layers']} layers of {row['dim']})"
            what = f"{model}, {row['requests']} requests {way}, against {peer.removesuffix(' in batches')}"
            overhead = f"padding {100 * row['padding_overhead']:.1f} %"
            figures.append(
                {"what": what, "ours": f"{texts[ours]}, {overhead}, {theirs / mine:.2f}x", "torch": texts[peer]}
            )
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), help="the GPU where there is one, by default")
    parser.add_argument("--quick", action="store_true", help="fewer layers and passes")
    parser.add_argument("--models", default="vit,bert", help="which of vit and bert")
    parser.add_argument("--no-compile", action="store_true", help="without torch.compile, which takes a while")
    parser.add_argument("--alternatives", default="ours,mixed", help="kernels to try beside torch's")
    parser.add_argument("--single", action="store_true", help="one at a time alone, without batches")
    parser.add_argument("--lock", type=Path, help="a file by which several of these take turns on the device")
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    arguments = parser.parse_args()
    device = torch.device(arguments.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    size = (QUICK if arguments.quick else FULL) if device.type == "cuda" else (CPU_QUICK if arguments.quick else CPU)
    torch.manual_seed(0)
    gc.freeze()  # captures collect garbage, and there is none in what was imported
    rows: dict[str, dict[str, Any]] = {}
    run: dict[str, Any] = {"machine": describe_machine(device)}
    with torch.no_grad():
        for name in arguments.models.split(","):
            for row in measure(Trace(name, size, device, arguments.alternatives.split(",")), arguments):
                rows[name] = row
                run["figures"] = [figure for known in rows.values() for figure in figures_of(known)]
                run["traces"] = list(rows.values())
                if arguments.output:  # after each stage: kept if a later one fails or the time is up
                    text = json.dumps({"benchmark": "variable_length", "runs": [run]}, indent=1)
                    arguments.output.write_text(text + "\n")
    print_table(run)
    wrong = [
        name
        for name, row in rows.items()
        if row["refusals"] or row["largest_difference"] > row["largest_difference_allowed"]
    ]
    if wrong:
        print(f"variable_length: results differ or buckets were refused: {wrong}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
