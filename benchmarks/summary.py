"""The summary of README.md: every stored result against the fastest peer of its row.

A row is one problem. Its peers are the other libraries that were timed with it (eager torch, torch.compile, a vendor's
kernel); the fastest one counts. Our own alternatives (a dense attention, separate ops instead of one) are no peers.
A file without peers is in NO_COMPARISON with its reason, and the summary lists it.
"""

from __future__ import annotations

import json
import re
import statistics
from collections import defaultdict
from collections.abc import Iterator
from fnmatch import fnmatch
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks/results"

NO_COMPARISON = {
    "*_tests.json": "counts of tests",
    "*_accuracy.json": "errors, not times",
    "cpu_zoo.json": "counts of models",
    "*.txt": "notes of single measurements",
    "cpu_sparse_attention.json": "its peer is our own dense attention",
    "h200_native_sparse_attention.json": "its peer is our own dense attention",
    "h200_delta_rule.json": "ours alone",
    "h200_mla_decode.json": "ours alone",
    "h200_paged_decode.json": "ours alone",
    "cpu_sparse_perplexity.json": "perplexities",
    "cpu_sparse_blocks.json": "perplexities",
    "cpu_sparse_training.json": "perplexities",
    "h200_course.json": "the course's kernels, against their predictions",
    "cpu_adaptive_precision.json": "perplexities",
    "h200_*_convergence.json": "losses",
    "*_memory.json": "peaks of memory",
    "h200_fp8_fused.json": "its peers are our own ops in parts, and a copy",
    "h200_offload.json": "its ways are our own, and two naive ones written for it",
    "h200_offload_training.json": "its peer is our own step with states on the GPU",
    "h200_ring_attention.json": "its peer is one call of our own",
}
FEW_BITS = ("nvfp4", "mxfp4", "int4", "int8")
OTHER_CONFIGS = (", 16 warps", ", two sets", ", paired")  # timed beside the one that a call gets
TITLES = {  # by file, or by the benchmark that wrote it
    "attention_cuda": "attention",
    "cpu_architectures": "architectures of Hugging Face and the bundled models by `optimize`",
    "h200_attention_flex": "attention with masks and scores",
    "h200_attention_fp32": "attention in fp32 and tf32",
    "h200_gpt2_beside_fp32": "GPT-2's training step by `optimize`",
    "h200_gpt2_graphs": "GPT-2, forward and backward, by `optimize`, without and with CUDA graphs",
    "h200_sparse_order": "sparse attention in two orders of its lists",
    "jax_ops": "ops for JAX",
    "compile_backend": '`torch.compile(backend="kernel_pytorch")`',
    "paged_attention": "attention over pages",
    "mla_decode": "attention over latent rows (MLA)",
    "quantized_matmul": "products with weights in few bits",
    "h200_few_bits": "products with weights in few bits, large weights",
    "few_rows": "linear layers of 1 to 16 rows",
    "fp8_linear": "layers and a block in FP8",
    "kpt bench": "GEMMs by `kpt bench`",
    "linear_cross_entropy": "linear layer and cross entropy",
    "linear_attention": "linear attention and the delta rule",
    "llama_block": "a Llama block without its GEMMs and attention",
    "matmul_cuda": "GEMMs",
    "moe": "mixtures of experts",
    "optimize_architectures": "architectures of Hugging Face by `optimize`",
    "optimize_models": "whole models by `optimize`",
    "optimize_models, ways forced": "a Llama block, each variant of `optimize` forced",
    "overhead": "calls on 4x64 elements, host time included",
    "serving": "text generation by `serving.generate`",
    "sparse_attention": "sparse attention",
    "sparse_matmul": "products with 2:4 weights",
    "tf32_cuda": "GEMMs in fp32",
    "torch_attention": "attention",
    "torch_matmul": "GEMMs",
    "torch_norms": "norms",
    "torch_ops": "activations, gates, rope, softmax, losses, embeddings",
    "torch_optim": "optimizers",
    "variable_length": "requests of many lengths",
}
TOLERANT, COMPILED = ', `accuracy="tolerant"`', ", `compile=True`"


class Comparison(NamedTuple):
    kind: str  # what is special about it: "", TOLERANT or COMPILED
    speedup: float  # the fastest peer's time by ours
    peers: tuple[str, ...]


def is_ours(way: str) -> bool:
    return way.startswith(
        ("ours", "cuda_", "optimize", "exact", "tolerant", "delayed", "current", "rowwise", "blockwise")
    )


def kind_of(way: str) -> str:
    return TOLERANT if "tolerant" in way else COMPILED if "compile=True" in way else ""


def of_times(times: dict[str, float]) -> Iterator[Comparison]:
    """Each of our ways of one problem against the fastest peer; nothing where there is none."""
    peers = {way: time for way, time in times.items() if not is_ours(way)}
    for way, time in times.items():
        if peers and is_ours(way):
            yield Comparison(kind_of(way), min(peers.values()) / time, tuple(peers))


def best_mode(times: dict[str, float]) -> dict[str, float]:
    """Ways of compile_backend.py are modes of one backend, which a user chooses among: its fastest is "ours"."""
    modes = {way: time for way, time in times.items() if way.startswith("kernel_pytorch")}
    others = {way: time for way, time in times.items() if way not in modes}
    return {**others, "ours": min(modes.values())} if modes else times


def of_timings(rows: list[dict[str, Any]]) -> Iterator[Comparison]:
    """Rows with a timing per way. Rows of one problem may name one peer each, with the median of the turns' ratios."""
    problems: dict[str, dict[str, float]] = defaultdict(dict)
    for row in rows:
        name = json.dumps([row.get(key) for key in ("op", "direction", "dtype", "rows", "columns")])
        times = {way: timing["median_us"] for way, timing in row["timings"].items()}
        for peer in times:
            if peer != "copy" and not is_ours(peer):
                is_named = peer == row.get("peer")
                problems[name][peer] = row["speedup"] if is_named else times[peer] / times["ours"]
    for speedups in problems.values():
        yield Comparison("", min(speedups.values()), tuple(speedups))


def of_ways(rows: list[dict[str, Any]]) -> Iterator[Comparison]:
    """Rows that are one way of one case each."""
    cases: dict[str, dict[str, float]] = defaultdict(dict)
    for row in rows:
        cases[row.get("case", "")][row["way"]] = row.get("us") or row["median_us"]
    for times in cases.values():
        yield from of_times(times)


def microseconds(text: str) -> float | None:
    found = re.search(r"([\d.]+) (µs|us|ms)", text)
    return float(found[1]) * {"µs": 1, "us": 1, "ms": 1000}[found[2]] if found else None


def of_texts(figures: list[dict[str, str]]) -> Iterator[Comparison]:
    """Figures that are text alone: every column besides ours is a peer, or "..., against X" names it. Without a column
    "ours" those of formats in few bits are ours, each by itself; a copy is no peer of quantising.
    """
    problems: dict[str, dict[str, float]] = defaultdict(dict)
    if figures and "way" in figures[0]:  # a line for each way (quantized_matmul.py --targets)
        for figure in figures:
            way, name = figure["way"], "ours, " if figure["way"].startswith((*FEW_BITS, "fp8")) else ""
            if way != "copy" and not way.endswith(OTHER_CONFIGS):
                problems[figure["what"]][name + way] = float(figure["µs"])
        for times in problems.values():
            yield from of_times(times)
        return
    for figure in figures:
        what, _, peer = figure["what"].partition(", against ")
        own = ["ours"] if "ours" in figure else [name for name in FEW_BITS if "copy" not in what and name in figure]
        for way, (column, text) in product(own, figure.items()):
            ours, theirs = microseconds(figure[way]), None if column in ("what", *own) else microseconds(text)
            if ours is not None and theirs is not None:
                problems[what if way == "ours" else f"{what}, {way}"] |= {"ours": ours, peer or column: theirs}
    for times in problems.values():
        yield from of_times(times)


def comparisons_of(run: dict[str, Any]) -> list[Comparison]:
    rows = run.get("attention") or run.get("products") or run.get("rows") or []
    if rows and "timings" in rows[0]:
        return list(of_timings(rows))
    if rows:
        return list(of_ways(rows))
    if "results" in run and all("rows" in result for result in run["results"]):
        medians = [
            best_mode({way: row["median_us"] for way, row in result["rows"].items()}) for result in run["results"]
        ]
        return [each for times in medians for each in of_times(times)]
    if "traces" in run:
        seconds = [
            {way: statistics.median(times) for way, times in trace["seconds"].items()} for trace in run["traces"]
        ]
        return [each for times in seconds for each in of_times(times)]
    if "benchmarks" in run:  # of kpt bench: the best config of each
        best: list[dict[str, float]] = []
        for benchmark in run["benchmarks"]:
            times: dict[str, float] = {}
            for row in benchmark["rows"]:
                way = row["kernel"] if row["kernel"] == "cublaslt" else "ours"
                times[way] = min(row["median_us"], times.get(way, row["median_us"]))
            best.append(times)
        return [each for times in best for each in of_times(times)]
    return list(of_texts(run.get("figures", [])))


def reason_against(path: Path) -> str:
    """Why the file is no comparison with a peer; "" where it is one."""
    return next((reason for pattern, reason in NO_COMPARISON.items() if fnmatch(path.name, pattern)), "")


class Row(NamedTuple):
    machine: str
    what: str
    compared: list[Comparison]

    def text(self) -> str:
        speedups = [each.speedup for each in self.compared]
        shown = [statistics.median(speedups), min(speedups), max(speedups)]
        peers = "; ".join(dict.fromkeys(peer for each in self.compared for peer in each.peers))
        cells = [self.what, peers, str(len(speedups)), *(f"{value:.2f}x" for value in shown)]
        return "| " + " | ".join(cells) + " |"


def rows_of(path: Path) -> list[Row]:
    stored = json.loads(path.read_text())
    kinds: dict[tuple[str, str], list[Comparison]] = defaultdict(list)
    for run in stored["runs"]:
        for comparison in comparisons_of(run):
            kinds[str(run["machine"]["device"]), comparison.kind].append(comparison)
    if not kinds:
        raise ValueError(
            f"{path.name}: summary.py finds no comparison in it; teach it, or name the file in NO_COMPARISON"
        )
    title = TITLES.get(path.stem) or TITLES.get(stored["benchmark"], path.stem.replace("_", " "))
    link = f"[{title}](benchmarks/results/{path.name})"
    return [Row(machine, link + kind, compared) for (machine, kind), compared in sorted(kinds.items())]


def markdown(folder: Path = RESULTS) -> str:
    files = sorted(path for path in folder.iterdir() if path.is_file())
    reasons = {path: reason_against(path) for path in files}
    machines: dict[str, list[Row]] = defaultdict(list)
    for path in files:
        for row in [] if reasons[path] else rows_of(path):
            machines[row.machine].append(row)
    every = [each.speedup for rows in machines.values() for row in rows for each in row.compared]
    slower = sum(speedup < 1 for speedup in every)
    compared = sum(not reason for reason in reasons.values())
    lines = [
        f"{len(every)} comparisons in {compared} files, each with the fastest of its peers: "
        f"{len(every) - slower} at least as fast, {slower} slower; the median is {statistics.median(every):.2f}x.",
        "",
    ]
    for machine, rows in sorted(machines.items(), key=lambda each: -len(each[1])):
        lines += [
            f"| {machine} | peers | results | median | worst | best |",
            "| --- | --- | ---: | ---: | ---: | ---: |",
        ]
        lines += [*(row.text() for row in rows), ""]
    left_out = [
        f"[{path.name}](benchmarks/results/{path.name}) ({reason})" for path, reason in reasons.items() if reason
    ]
    return "\n".join([*lines, "Stored, and no comparison with another library: " + ", ".join(left_out) + ".", ""])
