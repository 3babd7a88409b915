"""Four CPU devices, for the tests of sharding; set before jax starts."""

from __future__ import annotations

import os

import pytest

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4".strip()
pytest.importorskip("jax", reason="jax is not installed")
