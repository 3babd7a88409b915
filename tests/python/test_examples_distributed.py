"""examples/torch: what people copy runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_a_sharded_model_learns() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "python"), "CUDA_VISIBLE_DEVICES": ""}
    words = [str(ROOT / "examples/torch/fsdp2.py"), "--steps", "11"]
    done = subprocess.run([*command, *words], env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    losses = [float(value) for value in re.findall(r"loss ([\d.]+)", done.stdout)]
    assert losses[0] > 3 and losses[-1] < 0.5
    assert sorted(re.findall(r"rank (\d) holds ([\d,]+) of ([\d,]+)", done.stdout)) == [
        ("0", "68,128", "136,256"),
        ("1", "68,128", "136,256"),
    ]
