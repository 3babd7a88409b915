"""Embeddings of tokens and of positions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..functional import embedding, rope, rope_tables


class OptimizedEmbedding(nn.Embedding):
    """nn.Embedding whose gradient is summed in a fixed order: two runs give the same bits.

    With max_norm, scale_grad_by_freq or sparse, which this library's kernels do not have, torch's own are used.

    Args:
        vocab_size: rows of the table.
        embed_dim: columns of the table.
        padding_idx: a row that starts at zero and gets no gradient.
    """

    def __init__(
        self,
        vocab_size: int,
        embed_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if padding_idx is not None and not -vocab_size <= padding_idx < vocab_size:
            raise ValueError(f"OptimizedEmbedding: padding_idx is {padding_idx}, the table has {vocab_size} rows")
        super().__init__(
            vocab_size,
            embed_dim,
            padding_idx,
            max_norm,
            scale_grad_by_freq=scale_grad_by_freq,
            sparse=sparse,
            device=device,
            dtype=dtype,
        )

    def forward(self, input_ids: Tensor) -> Tensor:
        """input_ids, any shape -> [input_ids' shape, embed_dim]."""
        if self.max_norm is not None or self.scale_grad_by_freq or self.sparse:
            return super().forward(input_ids)
        return embedding(input_ids, self.weight, self.padding_idx)


class RotaryPositionalEncoding(nn.Module):
    """Tables of the angles by which rotary position embedding turns the pairs of a head, and the turning.

    The tables are fp32 whatever the module is cast to, and no part of the state_dict.

    Args:
        embed_dim: columns of a head that are turned, an even number.
        max_seq_len: positions that are kept; for longer sequences the tables are computed anew in every call.
        base: the lowest frequency is about 1 / base.
        scaling: the words of `functional.rope_frequencies` that stretch the context: scaling="llama3", factor=8.0, ...
    """

    cos_cached: Tensor
    sin_cached: Tensor

    def __init__(
        self,
        embed_dim: int,
        max_seq_len: int = 2048,
        base: float = 10000.0,
        *,
        device: torch.device | str | None = None,
        **scaling: Any,
    ) -> None:
        super().__init__()
        if embed_dim <= 0 or embed_dim % 2:
            raise ValueError(f"RotaryPositionalEncoding: embed_dim is {embed_dim}; it must be even and positive")
        self.embed_dim = embed_dim
        self.max_seq_len = max_seq_len
        self.base = base
        self.scaling = scaling
        cos, sin = self._tables(max_seq_len, device)
        self.register_buffer("cos_cached", cos, persistent=False)
        self.register_buffer("sin_cached", sin, persistent=False)

    def forward(self, x: Tensor, seq_len: int | None = None) -> tuple[Tensor, Tensor]:
        """cos and sin [seq_len, embed_dim / 2], fp32; the length is x's, [..., seq_len, columns], where not given."""
        length = x.shape[-2] if seq_len is None else seq_len
        if length > self.max_seq_len:
            return self._tables(length, x.device)
        return self.cos_cached[:length], self.sin_cached[:length]

    @staticmethod
    def apply_rotary_encoding(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """`rotary_embedding`."""
        return rotary_embedding(x, cos, sin)

    def _tables(self, length: int, device: torch.device | str | None) -> tuple[Tensor, Tensor]:
        return rope_tables(length, self.embed_dim, base=self.base, device=device, **self.scaling)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Moves the tables; makes them anew where a cast would round them or a meta device has left them empty."""
        was_meta = self.cos_cached.is_meta
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        device = self.cos_cached.device
        if self.cos_cached.dtype != torch.float32 or (was_meta and device.type != "meta"):
            self.cos_cached, self.sin_cached = self._tables(self.max_seq_len, device)
        return self

    def extra_repr(self) -> str:
        words = "".join(f", {name}={value!r}" for name, value in self.scaling.items())
        return f"{self.embed_dim}, max_seq_len={self.max_seq_len}, base={self.base}{words}"


def rotary_embedding(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [..., sequence, columns] with column i and i + columns / 2 turned by the angles of cos and sin.

    cos and sin are [sequence, columns / 2], or narrower where the later columns are not turned. `functional.rope` turns
    queries and keys in one launch and knows the other layouts.
    """
    if x.dim() < 2:
        raise RuntimeError(f"rotary_embedding: x has shape {list(x.shape)}; it needs a sequence and its columns")
    heads_first = x.flatten(0, -3).unsqueeze(0) if x.dim() > 2 else x[None, None]
    return rope(heads_first, None, cos, sin, heads_first=True)[0].view(x.shape)
