"""Attention layers: projections around functional.attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .._ops.support.masks import Sizes, mask_options
from ..core._checks import check_device, check_sequences
from ..core._names import accepts_mask_names
from ..functional import attention, attention_fp8, rope
from .config import AttentionConfig, AttentionPatterns, config_of
from .plain import plain_attention
from .score_mods import FlexAttentionMaskMods, alibi_slopes, name_of_mod

_FP8_OPTIONS = {"causal", "window", "scale"}  # what attention_fp8 has of attention's


class FlashAttention3(nn.Module):
    """Multi-head (or grouped-query) attention of [batch, sequence, embed_dim], on this library's kernels.

    Parameters are q_proj, k_proj, v_proj and out_proj, as in Llama's layers; nn.MultiheadAttention's state_dict, whose
    three projections are one tensor, loads as well.

    Args:
        config: an AttentionConfig; or embed_dim, with num_heads and further fields of AttentionConfig by name.
    """

    alibi_slopes: Tensor | None

    def __init__(
        self,
        config: AttentionConfig | int | None = None,
        num_heads: int | None = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **fields: Any,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        config = config_of(name, config, num_heads, fields)
        check_device(name, device)
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
        self.register_load_state_dict_pre_hook(_unpack_projections)  # type: ignore[no-untyped-call]

    @property
    def embed_dim(self) -> int:
        return self.config.embed_dim

    @property
    def num_heads(self) -> int:
        return self.config.num_heads

    @property
    def head_dim(self) -> int:
        assert self.config.head_dim is not None
        return self.config.head_dim

    @accepts_mask_names
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
            attention_mask: bool (True keeps), integers (1 keeps, 0 hides) or floating numbers (added to the scores,
                with their gradient), as [batch, keys], [queries, keys] or [batch, heads, queries, keys] with 1 for all;
                the rule is in _ops/support/masks.py and API.md. Also by the names attn_mask and mask.
            key_lengths: int32 [batch]; keys from there on are padding.
            rotary: cos and sin, as RotaryPositionalEncoding(head_dim) gives them.
        """
        q, k, v = self._projected(query, key, value)
        if rotary is not None:
            q, k = rope(q, k, *rotary)
        attended = self._attention(q, k, v, **self._options(q, k, attention_mask, key_lengths))
        return self.out_proj(attended.flatten(-2))  # type: ignore[no-any-return]

    def _projected(self, query: Tensor, key: Tensor | None, value: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Heads of query, key and value, [batch, sequence, heads, head_dim]."""
        key = query if key is None else key
        value = key if value is None else value
        self._check_inputs(query=query, key=key, value=value)
        return self._heads(self.q_proj(query)), self._heads(self.k_proj(key)), self._heads(self.v_proj(value))

    def _check_inputs(self, **inputs: Tensor) -> None:
        for name, tensor in inputs.items():
            check_sequences(self, tensor, self.config.embed_dim, name)

    def _attention(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        if not self.config.use_flash_attention:
            if "cu_seqlens_q" in options:
                raise ValueError(
                    f"{type(self).__name__}: plain attention has no packed sequences; use use_flash_attention=True"
                )
            return plain_attention(q, k, v, **options)
        fp8 = self.config.fp8_config
        if fp8 is not None and fp8.use_fp8 and k.shape[1] >= fp8.sequence_length_threshold:
            given = {name: value for name, value in options.items() if value is not None}
            if given.get("dropout_p") == 0.0:
                del given["dropout_p"]
            differentiates = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
            if not differentiates and given.keys() <= _FP8_OPTIONS and max(q.shape[-1], v.shape[-1]) <= 256:
                return attention_fp8(q, k, v, layout="bshd", rotate=fp8.rotate, **given)  # type: ignore[no-any-return]
        return attention(q, k, v, layout="bshd", **options)  # type: ignore[no-any-return]

    def _heads(self, projected: Tensor) -> Tensor:
        size = self.config.head_dim or 1
        return projected.view(*projected.shape[:-1], projected.shape[-1] // size, size)

    def _options(self, q: Tensor, k: Tensor, mask: Tensor | None, key_lengths: Tensor | None) -> dict[str, Any]:
        """functional.attention's, of q and k [batch, sequence, heads, head_dim]."""
        config = self.config
        options: dict[str, Any] = {
            "softcap": config.soft_cap,
            "alibi_slopes": self.alibi_slopes,
            "key_lengths": key_lengths,
            "dropout_p": config.attention_dropout if self.training else 0.0,
        }
        if mask is not None:
            options |= mask_options(type(self).__name__, mask, *self._sizes(q, k))
        if config.pattern is AttentionPatterns.PREFIX_LM:
            assert config.prefix_length is not None
            options["mask_mod"] = FlexAttentionMaskMods.prefix_lm(config.prefix_length)
        elif config.pattern is not AttentionPatterns.FULL:
            reach = (config.sliding_window_size or 0) - 1
            options["causal"] = config.causal
            if config.pattern is not AttentionPatterns.CAUSAL:
                options["window"] = (reach, 0 if config.causal else reach)
        return options

    def _sizes(self, q: Tensor, k: Tensor) -> Sizes:
        """Sizes of the scores that a mask applies to."""
        return Sizes(q.shape[0], q.shape[2], q.shape[1], k.shape[1])

    def extra_repr(self) -> str:
        config = self.config
        parts = [f"{config.embed_dim}", f"num_heads={config.num_heads}", f"kv_heads={config.kv_heads}"]
        parts.append(f"pattern={AttentionPatterns(config.pattern).value}")
        parts.append(f"causal={config.causal}")
        for name in ("sliding_window_size", "prefix_length", "soft_cap"):
            if getattr(config, name) is not None:
                parts.append(f"{name}={getattr(config, name)}")
        parts += ["alibi=True"] * config.alibi
        parts += [f"attention_dropout={config.attention_dropout}"] * bool(config.attention_dropout)
        parts += ["use_flash_attention=False"] * (not config.use_flash_attention)
        return ", ".join(parts)


def _unpack_projections(module: FlashAttention3, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """nn.MultiheadAttention keeps query, key and value in one tensor."""
    config = module.config
    assert config.head_dim is not None and config.kv_heads is not None
    rows = [config.num_heads * config.head_dim, *[config.kv_heads * config.head_dim] * 2]
    for kind in ("weight", "bias"):
        packed = state.get(f"{prefix}in_proj_{kind}")
        if packed is None or packed.shape[0] != sum(rows) or (kind == "bias" and not config.bias):
            continue  # load_state_dict names what does not fit
        del state[f"{prefix}in_proj_{kind}"]
        for name, part in zip(("q_proj", "k_proj", "v_proj"), packed.split(rows), strict=True):
            state[f"{prefix}{name}.{kind}"] = part


class FlexAttentionLayer(FlashAttention3):
    """FlashAttention3 whose scores go through functions of (score, batch, head, q, k), compiled into the kernel.

    Args:
        config: as FlashAttention3's; with embed_dim in its place give num_heads by name.
        score_mod: see FlexAttentionScoreMods; tensors it reads may be parameters of the model, and get gradients.
        mask_mod: a function of (batch, head, q, k), True where the query sees the key.
    """

    def __init__(
        self,
        config: AttentionConfig | int | None = None,
        score_mod: Callable[..., Any] | None = None,
        mask_mod: Callable[..., Any] | None = None,
        *,
        num_heads: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **fields: Any,
    ) -> None:
        for name, mod in (("score_mod", score_mod), ("mask_mod", mask_mod)):
            if mod is not None and not callable(mod):
                raise TypeError(
                    f"FlexAttentionLayer: {name} is {mod!r}, which is no function; give num_heads by its name"
                )
        super().__init__(config, num_heads, device=device, dtype=dtype, **fields)
        if mask_mod is not None and self.config.pattern is AttentionPatterns.PREFIX_LM:
            raise ValueError("FlexAttentionLayer: pattern 'prefix_lm' is a mask_mod itself; give one of the two")
        self.score_mod = score_mod
        self.mask_mod = mask_mod

    def _options(self, q: Tensor, k: Tensor, mask: Tensor | None, key_lengths: Tensor | None) -> dict[str, Any]:
        options = super()._options(q, k, mask, key_lengths)
        options["score_mod"] = self.score_mod
        if self.mask_mod is not None:
            options["mask_mod"] = self.mask_mod
        return options

    def extra_repr(self) -> str:
        mods = f"score_mod={name_of_mod(self.score_mod)}, mask_mod={name_of_mod(self.mask_mod)}"
        return f"{super().extra_repr()}, {mods}"
