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
    (run,) = json.loads(output.read_text())["runs"]
    results = run["results"]
    recipes = {"delayed", "delayed, all sums", "current, all sums", "rowwise, all sums", "blockwise"}
    assert set(results) == {"bf16", "bf16, weights 8", "current, all sums, head"} | recipes
    assert len(run["figures"]) == 2 * (len(results) - 1) and run["settings"]["steps"] == 40
    for name, result in results.items():
        assert len(result["curve"]) == 2 and not result["overflows"], name
        assert max(result["end"], result["held_out"]) < result["first"] - 1.5, name
        if name.startswith("bf16"):
            continue
        assert max(abs(result["end_percent"]), abs(result["held_out_percent"])) < 1.5, name
        assert result["curve"] != results["bf16"]["curve"], name
        assert 0.02 < result["numerics"]["input"]["error"] < 0.04, name
