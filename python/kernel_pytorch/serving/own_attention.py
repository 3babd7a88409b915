"""Layers of Hugging Face's that compute attention themselves and not by its interface: Bloom, Falcon, GPT-J, CodeGen,
GPT-Neo, MPT and XGLM. Each family's function does what its layer does around the scores, and gives the rest to the
pages."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .attention import attention_forward


@dataclass
class OwnLayer:
    """`function` takes the place of the method `name` of `module`."""

    module: nn.Module
    name: str
    function: Callable[..., Any]
    slopes: Tensor | None = None  # of ALiBi: such a layer needs no positions
    wants_mask: bool = False  # its model does more with the mask than hand it on


def own_layers(model: nn.Module) -> list[OwnLayer]:
    found = []
    for module in model.modules():
        family = _FAMILIES.get(type(module).__name__)
        if family is not None and type(module).__module__.startswith("transformers."):
            found.append(family(module))
    return found


def _slopes(layer: Any) -> Tensor:
    """As the model's own file makes them: what the bias grows by from a key to the next."""
    file: Any = sys.modules[type(layer).__module__]
    held = next(itertools.chain(layer.parameters(), layer.buffers()))  # a layer in few bits may have buffers alone
    two_keys = torch.ones(1, 2, dtype=torch.int64, device=held.device)
    bias: Tensor = file.build_alibi_tensor(two_keys, layer.num_heads, dtype=torch.float32)
    return bias[:, 0, 1].float().contiguous()


def _bloom(layer: Any) -> OwnLayer:
    slopes = _slopes(layer) * layer.beta

    def forward(hidden_states: Tensor, residual: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        query, key, value = layer._reshape(layer.query_key_value(hidden_states))
        mixed, _weights = attention_forward(layer, query, key, value, None, layer.inv_norm_factor, alibi_slopes=slopes)
        return layer.dense(mixed.flatten(2)) + residual, None

    return OwnLayer(layer, "forward", forward, slopes)


def _falcon(layer: Any) -> OwnLayer:
    scale = layer.head_dim**-0.5
    slopes = _slopes(layer) * layer.inv_norm_factor if layer.config.alibi else None
    # Keys come once for each query head of a group: one of them is kept.
    step = layer.num_heads // layer.num_kv_heads if layer.new_decoder_architecture else 1
    file: Any = sys.modules[type(layer).__module__]

    def forward(hidden_states: Tensor, *_: Any, position_embeddings: Any = None, **__: Any) -> tuple[Tensor, None]:
        query, key, value = (x.transpose(1, 2) for x in layer._split_heads(layer.query_key_value(hidden_states)))
        key, value = key[:, ::step], value[:, ::step]
        if slopes is None:
            query, key = file.apply_rotary_pos_emb(query, key, *position_embeddings)
        mixed, _weights = attention_forward(layer, query, key, value, None, scale, alibi_slopes=slopes)
        return layer.dense(mixed.flatten(2)), None

    return OwnLayer(layer, "forward", forward, slopes)


def _scores(layer: Any) -> OwnLayer:
    """Layers whose method `_attn` is attention without the projections."""
    scale = 1 / float(layer.scale_attn) if hasattr(layer, "scale_attn") else 1.0
    is_local = getattr(layer, "attention_type", None) == "local"
    window = layer.config.window_size if is_local else None

    def attend(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        query, key = query.to(value.dtype), key.to(value.dtype)
        mixed, _weights = attention_forward(layer, query, key, value, None, scale, sliding_window=window)
        return mixed.transpose(1, 2), None

    return OwnLayer(layer, "_attn", attend)


def _mpt(layer: Any) -> OwnLayer:
    file: Any = sys.modules[type(layer).__module__]
    bias: Tensor = file.build_mpt_alibi_tensor(layer.n_heads, 2, device=layer.Wqkv.weight.device)
    slopes = (bias[:, 0, 1] - bias[:, 0, 0]).float().contiguous()

    def forward(hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        mixed = layer.Wqkv(hidden_states)
        if layer.clip_qkv:
            mixed = mixed.clamp(min=-layer.clip_qkv, max=layer.clip_qkv)
        query, key, value = (x.unflatten(2, (layer.n_heads, -1)).transpose(1, 2) for x in mixed.chunk(3, dim=2))
        mixed, _weights = attention_forward(layer, query, key, value, None, layer.softmax_scale, alibi_slopes=slopes)
        return layer.out_proj(mixed.flatten(2)), None

    return OwnLayer(layer, "forward", forward, slopes, wants_mask=True)


def _xglm(layer: Any) -> OwnLayer:
    def forward(hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        parts = (projection(hidden_states) for projection in (layer.q_proj, layer.k_proj, layer.v_proj))
        query, key, value = (x.unflatten(2, (layer.num_heads, -1)).transpose(1, 2) for x in parts)
        mixed, _weights = attention_forward(layer, query, key, value, None, layer.scaling)
        return layer.out_proj(mixed.flatten(2)), None

    return OwnLayer(layer, "forward", forward)


_FAMILIES: dict[str, Callable[[Any], OwnLayer]] = {
    "BloomAttention": _bloom,
    "FalconAttention": _falcon,
    "GPTJAttention": _scores,
    "CodeGenAttention": _scores,
    "GPTNeoSelfAttention": _scores,
    "MptAttention": _mpt,
    "XGLMAttention": _xglm,
}
