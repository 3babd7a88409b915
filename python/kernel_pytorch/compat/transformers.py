"""Hugging Face transformers on this library's attention: register() once, then attn_implementation="kernel_pytorch".

    from kernel_pytorch.compat.transformers import register
    register()
    model.set_attn_implementation("kernel_pytorch")

Causal, sliding-window and padding masks are never built: the kernel computes them. Any other mask of a model is built
as transformers builds it for torch's attention, and given to the kernel.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..functional import attention
from ._latent import Expansion, gives_rows

__all__ = ["attention_forward", "attention_mask", "register"]

NAME = "kernel_pytorch"


def register(name: str = NAME) -> None:
    """Makes attn_implementation=name known to transformers."""
    from transformers import AttentionInterface, AttentionMaskInterface  # optional

    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, attention_mask)


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    is_causal: bool | None = None,
    output_attentions: bool | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor | None]:
    """query [batch, heads, queries, size], key and value alike -> [batch, queries, heads, size].

    `attention_mask` is what this module's attention_mask made: None, the padding of causal attention [batch, keys], the
    padding of attention in both directions [batch, 1, keys], or a whole mask. As in transformers' own attention,
    `is_causal` holds where there is no mask; a mask says itself what is seen. Whoever asks for the probabilities
    (`output_attentions`) gets them from torch's functions: the kernel never has them as a whole.
    """
    if gives_rows(module):
        latent = _latent_attention(module, query, key, value, attention_mask, scaling, (dropout, sliding_window, s_aux))
        if latent is not None:
            return latent, None
        key, value = type(module).expand_kv(module, key, value)  # type: ignore[attr-defined]
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    is_padding = attention_mask is not None and attention_mask.ndim in (2, 3)
    if attention_mask is not None and is_padding:
        causal = attention_mask.ndim == 2
    options: dict[str, Any] = {"causal": causal, "bias": position_bias}
    if sliding_window is not None:  # a causal window counts the query's own position
        options["window"] = (sliding_window - 1, 0) if causal else (sliding_window, sliding_window)
    if attention_mask is not None and is_padding:
        keys_seen = attention_mask.flatten(1)[:, -key.shape[2] :].bool()
        options["key_segment_ids"] = torch.where(keys_seen, 0, -1).to(torch.int32)
        options["query_segment_ids"] = torch.zeros(
            query.shape[0], query.shape[2], dtype=torch.int32, device=query.device
        )
    elif attention_mask is not None and not is_padding:
        options = _whole_mask(attention_mask, position_bias)
    if output_attentions is None:
        output_attentions = getattr(getattr(module, "config", None), "output_attentions", False)
    if output_attentions:
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        return _written_out(query, key, value, scale, softcap, s_aux, dropout, options)
    output = attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        layout="bshd",
        scale=scaling,
        dropout_p=dropout,
        softcap=softcap,
        sinks=s_aux,
        **options,
    )
    return output, None


_FEW_QUERIES = 8  # that are absorbed: more cost more products than the expansion of their keys


def _latent_attention(
    module: Any,
    query: Tensor,
    latent: Tensor,
    rope: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    others: tuple[Any, ...],
) -> Tensor | None:
    """Few queries over the latent rows themselves; None where keys and values must be expanded: for gradients, prompts,
    masks of several queries, and options that attention over such rows lacks."""
    queries, rows = query.shape[2], latent.shape[2]
    is_padding = mask is not None and mask.ndim == 2 and queries == 1
    if queries > _FEW_QUERIES or rows <= queries or any(others) or not (mask is None or is_padding):
        return None
    if torch.is_grad_enabled() or getattr(getattr(module, "config", None), "output_attentions", False):
        return None
    scale = query.shape[3] ** -0.5 if scaling is None else scaling
    is_token = mask[:, -rows:].bool() if mask is not None else None
    output: Tensor = Expansion.of(module).attend_rows(query, latent, rope, is_token, scale)
    return output


def _written_out(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
    dropout: float,
    options: dict[str, Any],
) -> tuple[Tensor, Tensor]:
    """The output and the probabilities [batch, heads, queries, keys], of the options that the kernel would get."""
    groups = query.shape[1] // key.shape[1]
    key, value = (one.repeat_interleave(groups, 1) for one in (key, value))
    scores = (query @ key.transpose(-1, -2)).float() * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    given = options.get("attention_mask")
    for added in (options.get("bias"), None if given is None or given.dtype is torch.bool else given):
        scores = scores if added is None else scores + added
    queries, keys = scores.shape[-2:]
    row = torch.arange(queries, device=query.device)[:, None] + keys - queries
    column = torch.arange(keys, device=query.device)
    seen = given if given is not None and given.dtype is torch.bool else torch.ones_like(scores, dtype=torch.bool)
    if options.get("causal"):
        seen = seen & (column <= row)
    if "window" in options:
        before, after = options["window"]
        seen = seen & (column >= row - before) & (column <= row + after)
    if "key_segment_ids" in options:
        seen = seen & (options["key_segment_ids"] >= 0)[:, None, None]
    scores = scores.masked_fill(~seen, torch.finfo(scores.dtype).min)
    if sinks is not None:
        sink = sinks.float().reshape(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sink], -1)
    weights = scores.softmax(-1)[..., :keys].to(query.dtype)
    weights = torch.nn.functional.dropout(weights, dropout) if dropout else weights
    return (weights @ value).transpose(1, 2).contiguous(), weights


def _whole_mask(mask: Tensor, position_bias: Tensor | None) -> dict[str, Any]:
    """A 4-D mask says everything: causality and window are in it."""
    return {"attention_mask": mask, "bias": position_bias}


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: Any = 0,
    mask_function: Any = None,
    attention_mask: Tensor | None = None,
    **options: Any,
) -> Tensor | None:
    """None, or the padding where the kernel's causal and window options say the rest (attention_forward says in which
    shape), else the whole mask."""
    from transformers import masking_utils  # optional

    if mask_function is None:
        mask_function = masking_utils.causal_mask_function
    is_bidirectional = mask_function is masking_utils.bidirectional_mask_function
    # A model that forbids leaving the mask out reads it itself (to add ALiBi), or its layers do not say what is causal.
    may_skip = options.get(
        *(("allow_is_bidirectional_skip", False) if is_bidirectional else ("allow_is_causal_skip", True))
    )
    if not may_skip or not _kernel_knows(mask_function, q_length, kv_length, q_offset, kv_offset):
        options["allow_is_causal_skip"] = False
        whole: Tensor | None = masking_utils.sdpa_mask(
            batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask, **options
        )
        return whole
    if attention_mask is None:
        return None
    padding: Tensor | None = masking_utils.prepare_padding_mask(attention_mask, kv_length, kv_offset)
    assert padding is not None  # a mask was given
    padding = padding[:, kv_offset : kv_offset + kv_length]
    if not torch.compiler.is_compiling() and bool(padding.all()):
        return None
    return padding[:, None] if is_bidirectional else padding


def _kernel_knows(mask_function: Any, q_length: int, kv_length: int, q_offset: Any, kv_offset: Any) -> bool:
    """Whether the mask is causal (the last query at the last key), maybe within a window, or keeps everything."""
    from transformers import masking_utils  # optional

    if mask_function is masking_utils.bidirectional_mask_function:
        return True
    offsets_are_numbers = isinstance(q_offset, int) and isinstance(kv_offset, int)
    if not offsets_are_numbers or q_offset - kv_offset != kv_length - q_length:
        return False
    parts = [mask_function]
    if getattr(mask_function, "__qualname__", "") == "and_masks.<locals>.and_mask":
        parts = list(mask_function.__closure__[0].cell_contents)
    windows = [p for p in parts if getattr(p, "__qualname__", "") == "sliding_window_overlay.<locals>.inner_mask"]
    others = [p for p in parts if p not in windows]
    return len(windows) <= 1 and others == [masking_utils.causal_mask_function]
