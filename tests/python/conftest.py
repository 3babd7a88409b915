"""Set before torch is loaded: an instruction level that oneDNN survives on any virtual machine, and our own cache.

Tests marked `gpu` are skipped, with the reason, where torch has no CUDA device.
"""

from __future__ import annotations

import os
import tempfile

import pytest

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
_cache_directory = tempfile.TemporaryDirectory(prefix="kernel_pytorch_tests_")
os.environ["KERNEL_PYTORCH_CACHE_DIR"] = _cache_directory.name


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        torch = pytest.importorskip("torch")
        if not torch.cuda.is_available():
            pytest.skip(f"no CUDA device: torch {torch.__version__} sees none")


def pytest_sessionfinish() -> None:
    _cache_directory.cleanup()
