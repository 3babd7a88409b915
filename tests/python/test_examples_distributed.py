"""examples/torch: what people copy runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def losses_of(example: str, ranks: int, *words: str) -> tuple[list[float], str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "python"), "CUDA_VISIBLE_DEVICES": ""}
    command += [str(ROOT / "examples/torch" / example), *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return [float(value) for value in re.findall(r"loss ([\d.]+)", done.stdout)], done.stdout


def test_a_sharded_model_learns() -> None:
    losses, shown = losses_of("fsdp2.py", 2, "--steps", "11")
    assert losses[0] > 3 and losses[-1] < 0.5
    assert sorted(re.findall(r"rank (\d) holds ([\d,]+) of ([\d,]+)", shown)) == [
        ("0", "68,128", "136,256"),
        ("1", "68,128", "136,256"),
    ]


def test_a_model_on_a_mesh_learns() -> None:
    losses, _ = losses_of("mesh.py", 4, "--steps", "16", "--length", "32", "--tensor", "2", "--context", "2")
    assert losses[0] > 3 and losses[-1] < 0.5
