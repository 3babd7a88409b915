"""The seeds' second path to kernel_pytorch.optimization_patterns."""

from __future__ import annotations

from ...optimization_patterns import *  # noqa: F403
from ...optimization_patterns import __all__ as __all__
