"""Vendors' devices: what is there, what is missing, and a model made ready for it.

The library has kernels for CPUs and for CUDA. `nvidia` and, on an Intel CPU, `intel` prepare a model by moving it and
optimising it; on `amd`, `tpu` and Intel GPUs there are none of ours: a model is moved there and torch's own run. A
backend can always be made; preparing a model for one that is not there raises, with what is missing and the cure.
"""

from __future__ import annotations

from .amd import AMDBackend
from .base import Backend, BackendUnavailableError
from .intel import IntelBackend
from .nvidia import NVIDIABackend
from .tpu import TPUBackend

__all__ = ["Backend", "BackendUnavailableError", "available_backends"]


def available_backends() -> list[Backend]:
    """Those that this machine has."""
    found: list[Backend] = [NVIDIABackend(), AMDBackend(), TPUBackend(), IntelBackend()]
    return [backend for backend in found if backend.is_available()]
