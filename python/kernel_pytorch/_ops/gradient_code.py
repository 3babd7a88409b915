"""The ops of gradients in few bits: to codes with error feedback, and back, in one visit each."""

from __future__ import annotations

from typing import Any

from .support.declare import without_gradient

gradient_encode_: Any = without_gradient("gradient_encode_")
gradient_decode_: Any = without_gradient("gradient_decode_")
