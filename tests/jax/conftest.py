"""Four CPU devices, for the tests of sharding, and quick compilations; set before jax starts."""

from __future__ import annotations

import os
import tempfile

import pytest

_cache_directory = tempfile.TemporaryDirectory(prefix="kernel_pytorch_test_")
os.environ.setdefault("KERNEL_PYTORCH_CACHE_DIR", _cache_directory.name)

_FLAGS = "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FLAGS}".strip()
jax = pytest.importorskip("jax", reason="jax is not installed")
jax.config.update("jax_default_matmul_precision", "highest")  # references in fp32 on a GPU too
