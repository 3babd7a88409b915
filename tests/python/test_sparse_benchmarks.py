"""Short runs of the benchmarks of sparse attention: they check what they time, and measure what they say."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
ROOT = Path(__file__).resolve().parent.parent.parent


def run(tmp_path, name, *arguments):
    output = tmp_path / "result.json"
    command = [sys.executable, ROOT / "benchmarks" / name, "--device", "cpu", *arguments, "--output", output]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(output.read_text())["runs"][0]


def test_times_of_sparse_attention(tmp_path):
    rows = run(tmp_path, "sparse_attention.py", "--quick", "--tokens", "1024", "--threads", "1")["attention"]
    assert [row["direction"] for row in rows] == ["forward", *["forward", "backward"] * 3]
    assert all(0.85 < row["sparsity"] < 0.95 for row in rows if "random" in row["op"])
    assert all(row["speedup"] > 0 for row in rows)


def test_perplexity_of_every_pattern(tmp_path):
    sizes = [
        "--steps",
        "10",
        "--dim",
        "32",
        "--layers",
        "1",
        "--length",
        "256",
        "--block",
        "8",
        "--held-out",
        "2",
        "--threads",
        "1",
    ]
    results = run(tmp_path, "sparse_perplexity.py", *sizes, "--limit", "1000")["results"]
    assert len(results) == 1 + 6 * 3 and results[0]["pattern"] == "dense"
    assert all(1 < row["perplexity"] < 300 for row in results)
    assert all(row["sparsity"] >= 0.7 for row in results if row["ratio"] == 0.75)
