"""The op that ends a step of delayed scaling: histories, scales and magnitudes of all layers, in one launch."""

from __future__ import annotations

from typing import Any

from .support.declare import without_gradient

delayed_scales_: Any = without_gradient("delayed_scales_")
