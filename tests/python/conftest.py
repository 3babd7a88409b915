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


@pytest.fixture(autouse=True)
def unhurried(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests of what `optimize` replaces look at every part, however slow this machine is at the moment; those of the
    budget itself are marked `hurried`."""
    if "optimize" in request.node.path.name and not request.node.get_closest_marker("hurried"):
        pytest.importorskip("torch")
        from kernel_pytorch._optimize.budget import Budget

        monkeypatch.setattr(Budget, "is_spent", lambda self, *_: False)
        monkeypatch.setattr(Budget, "is_too_small", False)
        for question in ("has_time_for", "may_take"):
            monkeypatch.setattr(Budget, question, lambda self, *_: True)


def pytest_sessionfinish() -> None:
    _cache_directory.cleanup()
