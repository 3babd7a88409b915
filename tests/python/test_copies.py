"""Every public class of the layers, patterns, backends and tools: copied, pickled, saved, in a process that is spawned,
and with a repr that says what it is. Objects with a live CUDA graph leave it behind."""

from __future__ import annotations

import copy
import importlib
import inspect
import io
import multiprocessing
import pickle
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

PACKAGES = ("core", "optimization_patterns", "hardware", "backends", "attention.fusion")
TOOLS = ("utils.performance", "utils.profiling", "utils.validation_framework")


def inner() -> nn.Module:
    return nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16)).eval()


# How to make one; a class that needs no arguments is not listed.
ARGUMENTS: dict[str, Callable[[], tuple[Any, ...]]] = {
    "AttentionLayer": lambda: (16, 2),
    "DynamicSparseAttention": lambda: (16, 2),
    "FlashAttention3": lambda: (16, 2),
    "SegmentedAttentionMemory": lambda: (16, 2),
    "CompilerOptimizedMultiHeadAttention": lambda: (16, 2),
    "OptimizedMultiHeadAttention": lambda: (16, 2),
    "FusedLayerNormActivation": lambda: (16,),
    "FusedLinearActivation": lambda: (16, 16),
    "FusedSwiGLU": lambda: (16,),
    "OptimizedEmbedding": lambda: (16, 16),
    "OptimizedLayerNorm": lambda: (16,),
    "OptimizedLinear": lambda: (16, 16),
    "OptimizedMLP": lambda: (16,),
    "OptimizedRMSNorm": lambda: (16,),
    "OptimizedTransformerBlock": lambda: (16, 2),
    "RotaryPositionalEncoding": lambda: (16,),
    "DynamicShapeModule": lambda: (inner(),),
    "PyGraph": lambda: (inner(),),
    "UnifiedAttentionFusion": lambda: (inner(),),
    "GraphDecision": lambda: (False, "no GPU"),
    "MaskArgument": lambda: ("mask", "keep"),
    "ShapeBucket": lambda: (0, (1, 2)),
    "CpuDetails": lambda: ("v3", "v3", 2, 1, 1, 1, False, 2, 2, 0, 1, 1, (2,), 0.0, "", 0, ""),
    "DeviceDescription": lambda: ("cpu",),
    "CudaDetails": lambda: ("", (9, 0), 1, 1, 1, 1, 1, 1, 1, 1),
    "DeviceInfo": lambda: ("cpu", "a CPU", 1, "x"),
    "LaunchCounts": lambda: (1, 2),
    "Timing": lambda: ("name", 2.0, 1.0, 3.0, 5),
    "Comparison": lambda: ((),),
    "PerformanceHistory": lambda: ("history.json",),
    "SeriesChange": lambda: ("name", "kernel", "none", 1.0, 1.0, 1.0, None, 1.0, True),
    "ValidationResult": lambda: ("name", True),
    "BackendUnavailableError": lambda: ("no device",),
}
ABSTRACT = {"Backend"}


def public_classes() -> dict[str, type]:
    found: dict[str, type] = {}
    for package in (*PACKAGES, *TOOLS):
        module = importlib.import_module(f"kernel_pytorch.{package}")
        for name in getattr(module, "__all__", vars(module)):
            value = getattr(module, name)
            is_its_own = getattr(value, "__module__", "").startswith("kernel_pytorch") and not name.startswith("_")
            if is_its_own and inspect.isclass(value) and not issubclass(value, importlib.import_module("enum").Enum):
                found[name] = value
    for name in ("amd.AMDBackend", "intel.IntelBackend", "nvidia.NVIDIABackend", "tpu.TPUBackend"):
        file, kind = name.split(".")
        found[kind] = getattr(importlib.import_module(f"kernel_pytorch.backends.{file}"), kind)
    return {name: kind for name, kind in found.items() if name not in ABSTRACT}


def make(name: str) -> Any:
    return public_classes()[name](*ARGUMENTS.get(name, tuple)())


@pytest.mark.parametrize("name", sorted(public_classes()))
def test_public_objects_are_copied_and_say_what_they_are(name: str) -> None:
    one = make(name)
    stored = io.BytesIO()
    torch.save(one, stored)
    stored.seek(0)
    twins = [copy.deepcopy(one), pickle.loads(pickle.dumps(one)), torch.load(stored, weights_only=False)]
    for twin in twins:
        assert type(twin) is type(one)
        if not isinstance(one, BaseException):
            assert repr(twin) == repr(one) and " object at 0x" not in repr(one)
        if isinstance(one, nn.Module):
            assert list(twin.state_dict()) == list(one.state_dict())


def _in_another_process(one: Any, answer: Any) -> None:
    answer.send(repr(one))


@pytest.mark.parametrize("name", ["DynamicShapeBucketing", "DynamicShapeModule", "UnifiedAttentionFusion"])
def test_public_objects_travel_to_a_spawned_process(name: str) -> None:
    one = make(name)
    spawned = multiprocessing.get_context("spawn")
    mine, theirs = spawned.Pipe()
    process = spawned.Process(target=_in_another_process, args=(one, theirs))
    process.start()
    assert mine.poll(60) and mine.recv() == repr(one)
    process.join(60)
    assert process.exitcode == 0


def test_an_optimized_model_is_pickled_as_it_was_before(monkeypatch) -> None:
    from forced_verdicts import take_first
    from kernel_pytorch._optimize import choose, whole
    from kernel_pytorch._optimize.changes import changes_of

    import kernel_pytorch

    monkeypatch.setattr(choose, "judge", take_first)
    monkeypatch.setattr(whole, "pays", lambda before, after: True)
    model, x = nn.Sequential(nn.LayerNorm(64), nn.GELU()).eval(), torch.randn(64, 64)
    want = model(x)
    kernel_pytorch.optimize(model, x, budget_seconds=5)
    assert changes_of(model) is not None
    twin = pickle.loads(pickle.dumps(model))
    assert changes_of(twin) is None and torch.equal(twin(x), want)
    again = kernel_pytorch.optimize(twin, x, budget_seconds=5)  # and it can be optimized itself
    assert again.report.data["replacements"]
