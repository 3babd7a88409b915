"""A layer of native sparse attention: projections, gates of the three branches, optional rotary embedding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .. import functional as F


class NativeSparseAttention(nn.Module):
    """Causal self-attention to means of blocks, to the blocks that these choose, and to a window.

    A linear layer with sigmoid gives each token and head the gates of the three branches. Meant to be trained with from
    the start.

    Args:
        embed_dim, num_heads: as torch.nn.MultiheadAttention's.
        num_kv_heads: heads of keys and values, which share a choice; None: num_heads.
        head_dim: None: embed_dim / num_heads.
        block_size, blocks, window, form, compress_block, compress_stride, first_blocks, local_blocks: as
            `functional.native_sparse_attention`'s.
        bias: whether the projections have one. The gates have.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        block_size: int = 64,
        blocks: int = 16,
        window: int = 512,
        form: str = "paper",
        compress_block: int | None = None,
        compress_stride: int | None = None,
        first_blocks: int | None = None,
        local_blocks: int | None = None,
        bias: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if num_kv_heads < 1 or num_heads % num_kv_heads != 0:
            raise ValueError(
                f"NativeSparseAttention: num_heads is {num_heads}, num_kv_heads is {num_kv_heads}; it must divide them"
            )
        if head_dim is None and embed_dim % num_heads != 0:
            raise ValueError(
                f"NativeSparseAttention: embed_dim is {embed_dim}, num_heads is {num_heads}; give head_dim, "
                "or heads that divide it"
            )
        self.embed_dim, self.num_heads, self.num_kv_heads = embed_dim, num_heads, num_kv_heads
        self.head_dim = embed_dim // num_heads if head_dim is None else head_dim
        self.block_size, self.blocks, self.window, self.form = block_size, blocks, window, form
        self.compress_block, self.compress_stride = compress_block, compress_stride
        self.first_blocks, self.local_blocks = first_blocks, local_blocks
        made = {"device": device, "dtype": dtype}
        self.q_proj = nn.Linear(embed_dim, num_heads * self.head_dim, bias=bias, **made)
        self.k_proj = nn.Linear(embed_dim, num_kv_heads * self.head_dim, bias=bias, **made)
        self.v_proj = nn.Linear(embed_dim, num_kv_heads * self.head_dim, bias=bias, **made)
        self.gate_proj = nn.Linear(embed_dim, num_heads * 3, **made)
        self.out_proj = nn.Linear(num_heads * self.head_dim, embed_dim, bias=bias, **made)

    def forward(
        self,
        hidden_states: Tensor,
        rotary: tuple[Tensor, Tensor] | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor:
        """hidden_states: [batch, tokens, embed_dim]; rotary: cosines and sines as `functional.rope` takes them;
        cu_seqlens: [sequences + 1], the batch being 1."""
        query, key, value = (
            project(hidden_states).unflatten(-1, (heads, self.head_dim))
            for project, heads in (
                (self.q_proj, self.num_heads), (self.k_proj, self.num_kv_heads), (self.v_proj, self.num_kv_heads)
            )
        )  # fmt: skip
        if rotary is not None:
            query, key = F.rope(query, key, *rotary)
        gates = self.gate_proj(hidden_states).unflatten(-1, (self.num_heads, 3)).sigmoid()
        output = F.native_sparse_attention(
            query,
            key,
            value,
            gates=gates,
            block_size=self.block_size,
            blocks=self.blocks,
            window=self.window,
            form=self.form,
            compress_block=self.compress_block,
            compress_stride=self.compress_stride,
            first_blocks=self.first_blocks,
            local_blocks=self.local_blocks,
            cu_seqlens=cu_seqlens,
        )
        return self.out_proj(output.flatten(-2))  # type: ignore[no-any-return]

    def extra_repr(self) -> str:
        return (
            f"{self.embed_dim}, {self.num_heads}, num_kv_heads={self.num_kv_heads}, block_size={self.block_size}, "
            f"blocks={self.blocks}, window={self.window}, form={self.form!r}"
        )
