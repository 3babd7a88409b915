"""Import paths of the seeds."""

from __future__ import annotations

from ...attention.factory import create_advanced_flex_attention

__all__ = ["create_advanced_flex_attention"]
