"""A short run of benchmarks/fp8_convergence.py: every recipe follows bf16, and learns."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_every_recipe_follows_bf16(tmp_path: Path) -> None:
    output = tmp_path / "runs.json"
    options = {"steps": 40, "dim": 64, "layers": 1, "length": 32, "batch": 8, "rate": 3e-3, "limit": 1.5}
    sizes = [f"--{name}={value}" for name, value in options.items()]
    command = [sys.executable, ROOT / "benchmarks/fp8_convergence.py", "--device", "cpu", *sizes, "--output", output]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'python'}:{ROOT / 'benchmarks'}", "OMP_NUM_THREADS": "1"}
    subprocess.run(command, env=environment, check=True, timeout=300, stdout=subprocess.DEVNULL)
    runs = json.loads(output.read_text())["runs"]
    assert set(runs) == {"bf16", "delayed", "delayed, fast", "current", "blockwise"}
    for name, run in runs.items():
        assert len(run["losses"]) == 40 and run["end"] < run["losses"][0] - 1.5, name
        assert abs(run["percent"]) < 1.5 and not run["overflows"], name
        assert name == "bf16" or run["losses"] != runs["bf16"]["losses"]
