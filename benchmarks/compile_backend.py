"""torch.compile(backend="kernel_pytorch") against eager torch and torch.compile's own modes, in turns in one process.

    python benchmarks/compile_backend.py [--only WORDS,...] [--ways default,reduce-overhead] [--choose timed,always]
        [--seconds-per-model N] [--limit N] [--output FILE]

Hugging Face models from their configurations, 2048 wide in bf16: prefill B2 S1024 of 4 layers with and without a cache,
one decoding step of 8 layers with a static cache of 1024 that holds 512 (B1, B8), a training step B4 S2048 of 4 layers.
Times are back to back: the median over rounds of the mean of a round. The reports name each pattern with the times that
decided. On a CPU the models are tiny, which only shows that the script runs.

Each model has a process of its own. All of them compile torch's ways at once; then one after the other compiles ours
and measures its rows, alone on the machine, first without and then with the max-autotune ways, which are slow to
compile. A process that takes longer than its limit is ended; what it has measured by then counts.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from compile_cases import Case, Row, rows
from kernel_pytorch.compile_backend.entry import compile_graph
from kernel_pytorch.compile_backend.report import CompileReport
from kernel_pytorch.compile_backend.settings import settings_of
from processes import log, measured, wait_for_turn
from table import print_table
from torch_norms import describe_machine

OURS = "kernel_pytorch"
SLOW = "max-autotune"


def chosen_rows(arguments: argparse.Namespace, device: torch.device) -> list[Row]:
    words = [word for word in arguments.only.split(",") if word]
    found = [row for row in rows(device.type == "cpu") if not words or any(word in row.name for word in words)]
    return [row for row in found if arguments.model in ("", row.model)]


def ours(case: Case, name: str, mode: str | None, options: dict[str, Any]) -> Callable[[Any], Any]:
    settings = settings_of(mode, options)

    def compiler(function: Any) -> Any:
        report = CompileReport()

        def compile_and_note(module: Any, inputs: Any) -> Any:
            made = compile_graph(module, inputs, settings, report)
            case.reports[name] = str(report)
            return made

        return torch.compile(function, backend=compile_and_note, dynamic=False)

    return compiler


def add_torch(case: Case, ways: list[str], inner: str) -> None:
    for way in ways:
        if way == "eager":
            case.add("eager", lambda function: function)
        else:
            plain = {"backend": inner} if inner else {"mode": way}
            case.add(
                f"torch.compile {way}", lambda function, plain=plain: torch.compile(function, dynamic=False, **plain)
            )


def add_ours(case: Case, arguments: argparse.Namespace) -> None:
    given: dict[str, Any] = {}
    if arguments.budget:
        given["kernel_pytorch.budget_seconds"] = arguments.budget
    if arguments.inner:
        given["kernel_pytorch.inner"] = arguments.inner
    for mode in [one for one in arguments.ours.split(",") if one]:
        for choose in arguments.choose.split(","):
            name = f"{OURS} {mode}, {choose}"
            case.add(name, ours(case, name, mode, {**given, "kernel_pytorch.choose": choose}))
            log(f"{case.row.name}: {name}:\n{case.reports.get(name, 'no report')}")


def text_of(row: dict[str, float]) -> str:
    return f"{row['median_us'] / 1e3:.3f} ms ({row['low_us'] / 1e3:.3f} to {row['high_us'] / 1e3:.3f})"


def result_of(case: Case, rounds: int, seconds: float) -> dict[str, Any]:
    times = case.times(rounds, seconds)
    peers = {name: row for name, row in times.items() if not name.startswith(OURS)}
    best_peer = min((row["median_us"] for row in peers.values()), default=0.0)
    ratios = {name: best_peer / row["median_us"] for name, row in times.items() if name not in peers}
    for name, row in times.items():
        log(f"{case.row.name}: {name}: {text_of(row)}" + (f", {ratios[name]:.2f}x" if name in ratios else ""))
    return {
        "what": case.row.name,
        "rows": times,
        "ratios": ratios,
        "failed": case.notes,
        "seconds_to_compile": case.seconds_to_compile,
        "reports": case.reports,
    }


def profiled(case: Case, result: dict[str, Any]) -> dict[str, Any]:
    kernels = {name: case.kernels(name) for name in case.steps}
    return {**result, "kernels": kernels, "busy": {name: case.busy(name) for name in case.steps}}


def run_model(arguments: argparse.Namespace, device: torch.device) -> None:
    """What the process of one model does; its results so far are in its file at any moment."""
    ways = [one for one in arguments.ways.split(",") if one]
    slow = [one for one in ways if one.startswith(SLOW)]
    cases = [Case(row, device, log) for row in chosen_rows(arguments, device)]
    for case in cases:
        add_torch(case, [one for one in ways if one not in slow], arguments.inner)
    if not wait_for_turn():
        return
    rounds = (3, 0.05) if device.type == "cpu" else (7, arguments.seconds_per_round)
    results: dict[str, Any] = {}
    for additions in (True, False):
        if not additions and not slow:
            break
        for case in cases:
            if additions:
                add_ours(case, arguments)
            else:
                add_torch(case, slow, arguments.inner)
            results[case.row.name] = result_of(case, *rounds)
            arguments.output.write_text(json.dumps(list(results.values())))
            if arguments.profile:  # which may take longer than there is time
                results[case.row.name] = profiled(case, results[case.row.name])
                arguments.output.write_text(json.dumps(list(results.values())))


def figures(result: dict[str, Any]) -> list[dict[str, str]]:
    """A line for each way of ours: against every peer."""
    times = result["rows"]
    peers = {name: row for name, row in times.items() if not name.startswith(OURS)}
    lines = []
    for name in result["ratios"]:
        row = times[name]
        against = ", ".join(f"{p['median_us'] / row['median_us']:.2f}x of {peer}" for peer, p in peers.items())
        texts = "; ".join(f"{peer}: {text_of(p)}" for peer, p in peers.items())
        lines.append({"what": f"{result['what']}: {name}", "ours": f"{text_of(row)}; {against}", "torch": texts})
    return lines


def run_all(arguments: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    machine = {**describe_machine(device), "transformers": transformers.__version__}
    record: dict[str, Any] = {"machine": machine, "figures": [], "results": []}
    models = list(dict.fromkeys(row.model for row in chosen_rows(arguments, device)))
    seconds = (arguments.seconds_to_compile, arguments.seconds_per_model, arguments.limit)
    with tempfile.TemporaryDirectory() as folder:
        for results in measured(models, lambda model: ["--model", model], Path(folder), seconds):
            for result in results:
                record["results"].append(result)
                record["figures"] += figures(result)
            if arguments.output:
                stored = {"benchmark": "compile_backend", "runs": [record]}
                arguments.output.write_text(json.dumps(stored, indent=1) + "\n")
    return record


def print_short(record: dict[str, Any]) -> None:
    """A line per row: the best of torch's ways, the best of ours, their ratio."""
    for result in record["results"]:
        by_side = {True: [], False: []}  # type: dict[bool, list[tuple[float, str]]]
        for name, row in result["rows"].items():
            by_side[name.startswith(OURS)].append((row["median_us"], name))
        if not all(by_side.values()):
            print(f"{result['what']}: {result['failed']}")
            continue
        (mine, my_way), (theirs, their_way) = min(by_side[True]), min(by_side[False])
        times = f"{mine / 1e3:.3f} ms ({my_way}) against {theirs / 1e3:.3f} ms ({their_way})"
        print(f"{result['what']}: {theirs / mine:.2f}x: {times}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), help="the GPU where there is one, by default")
    parser.add_argument("--only", default="", help="words that a row's name must hold one of, separated by commas")
    parser.add_argument(
        "--ways",
        default="eager,default,reduce-overhead,max-autotune-no-cudagraphs",
        help="torch's: eager and modes of torch.compile",
    )
    parser.add_argument("--ours", default="default,reduce-overhead", help="modes in which ours runs")
    parser.add_argument("--choose", default="timed", help="how ours chooses patterns: timed, always or both")
    parser.add_argument("--budget", type=float, help="seconds of timing in a compilation of ours, if not as by default")
    parser.add_argument("--inner", default="", help="another compiler than Inductor, such as aot_eager, for all")
    parser.add_argument("--seconds-per-round", type=float, default=0.15, help="seven rounds measure a way on a GPU")
    parser.add_argument("--seconds-per-model", type=float, default=600.0, help="for compiling ours and measuring")
    parser.add_argument("--seconds-to-compile", type=float, default=600.0, help="for compiling torch's ways, of all")
    parser.add_argument("--limit", type=float, default=1e6, help="seconds after which everything is ended")
    parser.add_argument("--profile", action="store_true", help="store the kernels of a step with their times")
    parser.add_argument("--short", action="store_true", help="print a line per row")
    parser.add_argument("--output", type=Path, help="write the figures as JSON, after each model")
    parser.add_argument("--model", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    device = torch.device(arguments.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if arguments.model:
        run_model(arguments, device)
        return 0
    record = run_all(arguments, device)
    if arguments.short:
        print_short(record)
    elif record["figures"]:
        print_table(record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
