"""Errors against fp64 are no larger than torch's own: benchmarks/accuracy.py on small sizes, and what it must catch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))


def test_errors_are_at_most_torchs(tmp_path):
    output = tmp_path / "result.json"
    command = [sys.executable, ROOT / "benchmarks" / "accuracy.py", "--quick", "--output", output]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    failed = [line for line in done.stdout.splitlines() if "FAILS" in line]
    assert done.returncode == 0, "\n".join(failed) + done.stderr
    rows = json.loads(output.read_text())["runs"][0]["rows"]
    assert {row["dtype"] for row in rows} == {"fp32", "bf16", "fp16"}
    assert {"linear+gelu_tanh", "layer_norm", "attention causal", "softmax"} <= {row["op"] for row in rows}


@pytest.mark.parametrize("activation", [None, "gelu_tanh"])
def test_long_sums_of_a_linear_layer(activation):
    from accuracy import rows_of
    from accuracy_cases import CASES

    name = f"linear+{activation}" if activation else "linear"
    (case,) = [case for case in CASES if case.name == name]
    for size in ((64, 64, 8192), (5, 300, 8192), (257, 129, 1024)):
        for row in rows_of(case, size, "fp32", torch.device("cpu")):
            assert row.passes, row


def test_a_worse_result_fails():
    from accuracy import Row

    good = Row("op", "output", "fp32", "1x1", 1.1e-7, 1e-7, 3e-7, 2e-7, 100)
    assert good.passes
    assert not Row("op", "output", "fp32", "1x1", 1.3e-7, 1e-7, 3e-7, 2e-7, 100).passes
    assert not Row("op", "output", "fp32", "1x1", 1e-7, 1e-7, 5e-7, 2e-7, 100).passes


def test_constant_rows_of_a_layer_norm():
    from kernel_pytorch import functional

    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        for columns in (1, 3, 768, 1000, 4096, 1 << 20):
            for value in (0.1, 33.3, -1000.3, 12345.678):
                x = torch.full((2, columns), value, dtype=dtype, requires_grad=True)
                output = functional.layer_norm(x)
                assert output.count_nonzero() == 0, (dtype, columns, value)
                output.sum().backward()
                assert x.grad is not None and x.grad.isfinite().all()
