"""KernelPyTorch: one call to the best kernel for this machine.

Nothing here imports torch: `kernel_pytorch.hardware`, tuning and explain work without it. What needs torch
(`functional`, `core`) is imported, and its library loaded, at the first use.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.5.0"

# Name here -> module that has it; a name that is its own module stands for the module.
_LAZY: dict[str, str] = {
    "HardwareAbstractionLayer": "hardware",
    "KernelPyTorchError": "_library",
    "PyGraphCUDAOptimizer": "core.compilers",
    "autotune": "tuning",
    "cache": "cache",
    "collect_env": "_environment",
    "compile_backend": "compile_backend",
    "core": "core",
    "explain": "tuning",
    "explain_compile": "compile_backend",
    "expression": "expression",
    "fit_memory": "advanced_memory",
    "functional": "functional",
    "hardware": "hardware",
    "kernels": "tuning",
    "optim": "optim",
    "optimization_patterns": "optimization_patterns",
    "optimize": "_optimize.optimize",
    "overlay": "tuning",
    "record": "tuning",
    "recorded": "tuning",
    "restore": "_optimize.optimize",
    "serving": "serving",
    "testing_framework": "testing_framework",
    "tune": "tuning",
    "tuning": "tuning",
    "utils": "utils",
}

__all__ = ["__version__", *sorted(_LAZY)]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{_LAZY[name]}")
    value = module if name == _LAZY[name] else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
