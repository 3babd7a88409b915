"""Prints stored results as markdown tables, and keeps the tables of BENCHMARKS.md and README.md equal to them.

python benchmarks/table.py FILE.json...           print
python benchmarks/table.py --update DOCUMENT...   rewrite what stands between its marks and `<!-- end -->`
python benchmarks/table.py --check DOCUMENT...    fail when a table differs from its results

`<!-- table: FILE -->` is followed by all of a file's results, `<!-- summary -->` by summary.py's tables of all files.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from pathlib import Path
from typing import Any

import summary

ROOT = Path(__file__).resolve().parent.parent
MARKED = re.compile(r"(<!-- table: (\S+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
SUMMARY = re.compile(r"(<!-- summary -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def time_text(timing: dict[str, Any]) -> str:
    return f"{timing['median_us']:.0f} ({timing['p25_us']:.0f} to {timing['p75_us']:.0f})"


def machine_text(machine: dict[str, Any]) -> str:
    facts = [str(machine["device"])]
    facts += [f"{library} {machine[library]}" for library in ("jax", "torch", "kernel_pytorch") if library in machine]
    if "threads" in machine:
        facts.append(f"{machine['threads']} threads")
    return ", ".join([*facts, str(machine["date"]), f"commit {machine['commit'][:8]}"])


def norm_lines(run: dict[str, Any]) -> list[str]:
    peers = [name for name in run["rows"][0]["timings"] if name not in ("ours", "copy")]
    head = [
        "op",
        "dtype",
        "shape",
        "ours, µs",
        *(f"{peer}, µs" for peer in peers),
        "faster than torch",
        "share of a copy",
    ]
    counts = all("launches" in row for row in run["rows"])
    head += ["launches"] * counts
    lines = [machine_text(run["machine"]), "", row_text(head), row_text(["---"] * 3 + ["---:"] * (len(head) - 3))]
    for row in run["rows"]:
        cells = [f"{row['op']} {row['direction']}".strip(), row["dtype"], f"{row['rows']}x{row['columns']}"]
        cells += [time_text(row["timings"][name]) for name in ("ours", *peers)]
        cells += [f"{row['speedup']:.2f}x", f"{100 * row['share']:.0f} %"]
        lines.append(row_text([*cells, *([str(row["launches"])] if counts else [])]))
    return lines


def figure_lines(run: dict[str, Any]) -> list[str]:
    columns = run.get("columns", ["what", "ours", "torch"])
    lines = [machine_text(run["machine"]), "", row_text(columns), row_text(["---"] + ["---:"] * (len(columns) - 1))]
    return lines + [row_text([row[column] for column in columns]) for row in run["figures"]]


def accuracy_lines(run: dict[str, Any]) -> list[str]:
    """Of each type: how many errors were compared, and how they stand against torch's."""
    head = ["dtype", "tensors compared", "rms error no larger than torch's", "median by torch's"]
    lines = [machine_text(run["machine"]), "", row_text(head), row_text(["---", "---:", "---:", "---:"])]
    for dtype in dict.fromkeys(row["dtype"] for row in run["rows"]):
        rows = [row for row in run["rows"] if row["dtype"] == dtype]
        ratio = statistics.median(row["rms"] / row["torch_rms"] for row in rows if row["torch_rms"] > 0)
        smaller = sum(row["rms"] <= row["torch_rms"] for row in rows)
        lines.append(row_text([dtype, str(len(rows)), str(smaller), f"{ratio:.2f}"]))
    return lines


def rate_text(tflops: float) -> str:
    return f"{tflops:.0f}" if tflops >= 10 else f"{tflops:.3f}"  # a GPU's, a CPU's


def attention_lines(run: dict[str, Any]) -> list[str]:
    rows = run.get("attention") or run["products"]
    has_computed = any(row.get("computed_tflops") for row in rows)
    head = ["what", "ours, TFLOP/s", "peer", "peer's, TFLOP/s", "ours, µs", "faster than the peer"]
    rule = ["---", "---:", "---", "---:", "---:", "---:"]
    if has_computed:
        head, rule = [*head, "computed, TFLOP/s", "of plain causal's"], [*rule, "---:", "---:"]
    lines = [machine_text(run["machine"]), "", row_text(head), row_text(rule)]
    for row in rows:
        mine, theirs = row["tflops"]["ours"], row["tflops"][row["peer"]]
        cells = [f"{row['op']} {row['direction']}".strip(), rate_text(mine), row["peer"], rate_text(theirs)]
        cells += [time_text(row["timings"]["ours"]), f"{row['speedup']:.2f}x"]
        if has_computed:
            computed, share = row.get("computed_tflops"), row.get("share_of_plain")
            cells += [rate_text(computed) if computed else "", f"{share:.2f}" if share else ""]
        lines.append(row_text(cells))
    return lines


def jax_lines(run: dict[str, Any]) -> list[str]:
    """Rows against a peer in JAX, then what a call costs the host and what importing costs."""
    by_profilers = any("device_timings" in row for row in run["rows"])
    from_torch = "kernels' time by that from torch" if by_profilers else "time by that from torch"
    head = ["what", "ours, µs", "peer", "peer's, µs", "faster than the peer", from_torch]
    lines = [machine_text(run["machine"]), "", row_text(head), row_text(["---", "---:", "---", "---:", "---:", "---:"])]
    for row in run["rows"]:
        peer = next(name for name in row["timings"] if not name.startswith("ours"))
        ours, theirs = (time_text(row["timings"][name]) for name in ("ours", peer))
        by_torch = f"{row['against_torch']:.3f}x" if "against_torch" in row else ""
        lines.append(row_text([row["op"], ours, peer, theirs, f"{row['speedup']:.2f}x", by_torch]))
    for figure in run.get("host", []):
        ours, empty = f"{figure['ours_us']:.2f}", f"{figure['empty_us']:.2f}"
        beyond = f"{figure['beyond_us']:.2f} µs beyond it"
        lines.append(row_text([figure["what"], ours, "an empty handler", empty, beyond, ""]))
    if "import_ms" in run:
        lines.append(row_text(["import beyond jax's", f"{1e3 * run['import_ms']:.0f}", "", "", "", ""]))
    if "inserted" in run:
        counts = ", ".join(f"{count} {name}" for name, count in run["inserted"].items())
        lines.append(row_text(["in the compiled Llama step", counts, "", "", "", ""]))
    return lines


def row_text(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def lines_of(run: dict[str, Any]) -> list[str]:
    if "jax" in run["machine"]:
        return jax_lines(run)
    if "attention" in run or "products" in run:
        return attention_lines(run)
    if "torch_rms" in (run.get("rows") or [{}])[0]:
        return accuracy_lines(run)
    return figure_lines(run) if "figures" in run else norm_lines(run)


def print_table(run: dict[str, Any]) -> None:
    """The run as aligned text for a terminal."""
    lines = lines_of(run)
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:] if "---" not in line]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    print(lines[0])
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def print_and_store(run: dict[str, Any], output: Path | None) -> None:
    """How a benchmark ends: its run as a table, and as JSON where a file is named."""
    print_table(run)
    if output is not None:
        output.write_text(json.dumps({"benchmark": Path(sys.argv[0]).stem, "runs": [run]}, indent=1) + "\n")


def markdown(path: Path) -> str:
    if not path.exists():
        return "No run is stored yet.\n\n"
    runs = json.loads(path.read_text())["runs"]
    return "\n".join("\n".join([*lines_of(run), ""]) for run in runs)


def with_tables(document: Path) -> str:
    def fill(match: re.Match[str]) -> str:
        return match[1] + markdown(ROOT / match[2]) + match[4]

    def summarise(match: re.Match[str]) -> str:
        return match[1] + summary.markdown() + match[3]

    return SUMMARY.sub(summarise, MARKED.sub(fill, document.read_text()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--update", type=Path, nargs="+", default=[])
    parser.add_argument("--check", type=Path, nargs="+", default=[])
    parser.add_argument("results", type=Path, nargs="*")
    arguments = parser.parse_args()
    for path in arguments.results:
        print(markdown(path))
    for document in arguments.update:
        document.write_text(with_tables(document))
    stale = [document for document in arguments.check if document.read_text() != with_tables(document)]
    for document in stale:
        print(f"table: {document} differs from its results; run benchmarks/table.py --update", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
