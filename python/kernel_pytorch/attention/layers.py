"""Attention layers: projections around functional.attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..functional import attention, rope
from .config import AttentionConfig, AttentionPatterns
from .score_mods import FlexAttentionMaskMods, alibi_slopes


class FlashAttention3(nn.Module):
    """Multi-head (or grouped-query) attention of [batch, sequence, embed_dim], on this library's kernels.

    Parameters are q_proj, k_proj, v_proj and out_proj, as in Llama's layers.
    """

    alibi_slopes: Tensor | None

    def __init__(
        self,
        config: AttentionConfig,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        assert config.head_dim is not None and config.kv_heads is not None  # AttentionConfig has made them
        query_features = config.num_heads * config.head_dim
        key_features = config.kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.embed_dim, query_features, config.bias, device, dtype)
        self.k_proj = nn.Linear(config.embed_dim, key_features, config.bias, device, dtype)
        self.v_proj = nn.Linear(config.embed_dim, key_features, config.bias, device, dtype)
        self.out_proj = nn.Linear(query_features, config.embed_dim, config.bias, device, dtype)
        slopes = alibi_slopes(config.num_heads).to(device=device) if config.alibi else None
        self.register_buffer("alibi_slopes", slopes, persistent=False)

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        attention_mask: Tensor | None = None,
        key_lengths: Tensor | None = None,
        rotary: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """query [batch, queries, embed_dim] -> the same shape.

        Args:
            key, value: [batch, keys, embed_dim]; absent, the query is all three; without a value the key is both.
            attention_mask: broadcasts to [batch, heads, queries, keys]; True where a query sees a key, or a number
                added to the score (with its gradient).
            key_lengths: int32 [batch]; keys from there on are padding.
            rotary: cos and sin, as RotaryPositionalEncoding(head_dim) gives them.
        """
        key = query if key is None else key
        value = key if value is None else value
        q, k, v = self._heads(self.q_proj(query)), self._heads(self.k_proj(key)), self._heads(self.v_proj(value))
        if rotary is not None:
            q, k = rope(q, k, *rotary)
        attended = attention(q, k, v, layout="bshd", **self._options(q, k, attention_mask, key_lengths))
        return self.out_proj(attended.flatten(-2))  # type: ignore[no-any-return]

    def _heads(self, projected: Tensor) -> Tensor:
        size = self.config.head_dim or 1
        return projected.view(*projected.shape[:-1], projected.shape[-1] // size, size)

    def _options(self, q: Tensor, k: Tensor, mask: Tensor | None, key_lengths: Tensor | None) -> dict[str, Any]:
        config = self.config
        options: dict[str, Any] = {
            "softcap": config.soft_cap,
            "alibi_slopes": self.alibi_slopes,
            "key_lengths": key_lengths,
            "dropout_p": config.attention_dropout if self.training else 0.0,
        }
        if mask is not None:
            options["mask" if mask.dtype == torch.bool else "bias"] = mask
        if config.pattern is AttentionPatterns.PREFIX_LM:
            assert config.prefix_length is not None
            options["mask_mod"] = FlexAttentionMaskMods.prefix_lm(config.prefix_length)
        elif config.pattern is not AttentionPatterns.FULL:
            reach = (config.sliding_window_size or 0) - 1
            options["causal"] = config.causal
            if config.pattern is not AttentionPatterns.CAUSAL:
                options["window"] = (reach, 0 if config.causal else reach)
        return options

    def extra_repr(self) -> str:
        config = self.config
        heads = f"num_heads={config.num_heads}, kv_heads={config.kv_heads}"
        return f"{config.embed_dim}, {heads}, pattern={AttentionPatterns(config.pattern).value}"


class FlexAttentionLayer(FlashAttention3):
    """FlashAttention3 whose scores go through functions of (score, batch, head, q, k), compiled into the kernel.

    Args:
        score_mod: see FlexAttentionScoreMods; tensors it reads may be parameters of the model, and get gradients.
        mask_mod: a function of (batch, head, q, k), True where the query sees the key.
    """

    def __init__(
        self,
        config: AttentionConfig,
        score_mod: Callable[..., Any] | None = None,
        mask_mod: Callable[..., Any] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(config, device, dtype)
        if mask_mod is not None and config.pattern is AttentionPatterns.PREFIX_LM:
            raise ValueError("FlexAttentionLayer: pattern 'prefix_lm' is a mask_mod itself; give one of the two")
        self.score_mod = score_mod
        self.mask_mod = mask_mod

    def _options(self, q: Tensor, k: Tensor, mask: Tensor | None, key_lengths: Tensor | None) -> dict[str, Any]:
        options = super()._options(q, k, mask, key_lengths)
        options["score_mod"] = self.score_mod
        if self.mask_mod is not None:
            options["mask_mod"] = self.mask_mod
        return options


def create_attention(config: AttentionConfig | int, num_heads: int | None = None, **options: Any) -> FlashAttention3:
    """The layer of a config, or of embed_dim, num_heads and the fields of AttentionConfig by name.

    `score_mod` or `mask_mod` among the options make a FlexAttentionLayer; `device` and `dtype` are the parameters'.
    """
    mods = {name: options.pop(name) for name in ("score_mod", "mask_mod") if name in options}
    place = {name: options.pop(name) for name in ("device", "dtype") if name in options}
    if isinstance(config, int):
        if num_heads is None:
            raise TypeError("create_attention: give an AttentionConfig, or embed_dim and num_heads")
        config = AttentionConfig(config, num_heads, **options)
    elif num_heads is not None or options:
        given = ", ".join(["num_heads"] * (num_heads is not None) + list(options))
        raise TypeError(f"create_attention: {given} belongs into the AttentionConfig that was given")
    return FlexAttentionLayer(config, **mods, **place) if mods else FlashAttention3(config, **place)


def create_flex_attention(
    embed_dim: int,
    num_heads: int,
    pattern: AttentionPatterns | str = "full",
    score_mod: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    **options: Any,
) -> FlexAttentionLayer:
    """A FlexAttentionLayer; options are fields of AttentionConfig, `device` and `dtype`."""
    place = {name: options.pop(name) for name in ("device", "dtype") if name in options}
    config = AttentionConfig(embed_dim, num_heads, pattern=pattern, **options)
    return FlexAttentionLayer(config, score_mod, mask_mod, **place)
