"""What an optimisation did, collected into one plain dict and shown as text, HTML and JSON."""

from __future__ import annotations

from .report import Report

__all__ = ["Report"]
