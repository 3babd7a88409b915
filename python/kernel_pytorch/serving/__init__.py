"""Serving on one machine: a cache of pages, and text generation that batches requests continuously over it.

`generate` serves Hugging Face's causal language models. For fleets of machines use a server; examples/serving shows how
one uses these kernels.
"""

from __future__ import annotations

from .engine import Engine
from .generate import generate
from .pages import LayerShape, PagedCache
from .prefix import shared_prefix_attention
from .requests import Completion, Sampling

__all__ = ["Completion", "Engine", "LayerShape", "PagedCache", "Sampling", "generate", "shared_prefix_attention"]
