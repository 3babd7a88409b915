"""examples/jax/llama.py learns, and with our ops exactly as with jax.numpy."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np


def example() -> Any:
    path = Path(__file__).resolve().parents[2] / "examples/jax/llama.py"
    spec = importlib.util.spec_from_file_location("llama_example", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_llama_learns_as_in_plain_jax() -> None:
    llama = example()
    size = llama.SMALL
    (ours, _), (plain, _) = (llama.train(size, one(size), 12) for one in (llama.ours, llama.plain))
    np.testing.assert_allclose(ours, plain, rtol=2e-3)
    assert ours[-1] < 0.75 * ours[0]
