"""Multi-head latent attention (DeepSeek V2, V3 and their kin) of Hugging Face's layers over latent rows.

These layers keep a latent row and a rope row of each token and expand both to keys and values of all heads before they
attend (`expand_kv`). Few queries over many rows are cheaper absorbed: the queries are multiplied with the keys' weights
and the latent output with the values' (`functional.mla_decode`). Prompts are cheaper expanded.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..functional import attention, mla_decode

_SIZES = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank")


def is_latent(module: Any) -> bool:
    """Whether a layer keeps latent rows and expands them by one product."""
    if not hasattr(module, "expand_kv") or not all(isinstance(getattr(module, name, None), int) for name in _SIZES):
        return False
    up = getattr(module, "kv_b_proj", None)
    return type(up) is nn.Linear and up.bias is None and not up._forward_hooks and not up._forward_pre_hooks


def as_they_are(latent: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
    """In the place of a layer's expand_kv: attention gets the rows."""
    return latent, rope


def gives_rows(module: Any) -> bool:
    return getattr(module, "expand_kv", None) is as_they_are


@contextlib.contextmanager
def latent_rows(model: nn.Module) -> Iterator[None]:
    """While this holds, attention gets latent rows and rope rows from such layers in place of keys and values."""
    layers: list[Any] = [module for module in model.modules() if is_latent(module)]
    layers = [layer for layer in layers if not gives_rows(layer)]  # optimize has done it
    for layer in layers:
        layer.expand_kv = as_they_are
    try:
        yield
    finally:
        for layer in layers:
            del layer.expand_kv


@dataclass
class Expansion:
    """From latent rows to keys and values: [heads, size, latent size] each."""

    keys: Tensor
    values: Tensor

    @classmethod
    def of(cls, layer: Any) -> Expansion:
        rows = [layer.qk_nope_head_dim, layer.v_head_dim]
        keys, values = torch.split(layer.kv_b_proj.weight.view(-1, sum(rows), layer.kv_lora_rank), rows, 1)
        return cls(keys, values)

    def attend_expanded(self, query: Tensor, latent: Tensor, rope: Tensor, **options: Any) -> Tensor:
        """Over the rows of these tokens alone: [tokens, heads, size], [tokens, latent size], [tokens, rope size]."""
        heads, size = self.keys.shape[:2]
        key = query.new_empty(latent.shape[0], heads, query.shape[2])
        key[..., :size] = torch.einsum("tr,hnr->thn", latent, self.keys)
        key[..., size:] = rope[:, None]
        value = torch.einsum("tr,hvr->thv", latent, self.values)
        output: Tensor = attention(query, key, value, causal=True, **options)
        return output

    def attend_rows(self, query: Tensor, latent: Tensor, rope: Tensor, is_token: Tensor | None, scale: float) -> Tensor:
        """[batch, heads, queries, size] over [batch, 1, rows, size] of both kinds, the last rows being the queries';
        is_token [batch, rows] or None: [batch, queries, heads, value size]."""
        batch, heads, queries, size = query.shape
        rows = latent.shape[2]
        tokens = query.transpose(1, 2).reshape(batch * queries, heads, size)
        cache = latent[:, 0], rope[:, 0]  # a request's rows are one page
        pages = torch.arange(batch, dtype=torch.int32, device=query.device)
        if is_token is None:
            lengths = torch.full_like(pages, rows)
            output = self.attend_pages(tokens, cache, pages[:, None], lengths, scale=scale)
        else:
            slots = pages[:, None] * rows + torch.arange(rows, dtype=torch.int32, device=query.device)
            listed = torch.where(is_token, slots, -1)
            output = self.attend_pages(tokens, cache, indices=listed, scale=scale)
        return output.view(batch, queries, heads, -1)

    def attend_pages(self, query: Tensor, cache: tuple[Tensor, Tensor], *where: Tensor, **options: Any) -> Tensor:
        """Over pages of latent rows and rope rows."""
        parts = torch.split(query, [self.keys.shape[1], query.shape[2] - self.keys.shape[1]], 2)
        absorbed = torch.cat([torch.einsum("thn,hnr->thr", parts[0], self.keys), parts[1]], -1)
        mixed = mla_decode(absorbed, cache, *where, head_size_v=self.keys.shape[2], **options)
        output: Tensor = torch.einsum("thr,hvr->thv", mixed, self.values)
        return output
