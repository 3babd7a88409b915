"""vLLM on this library's paged attention: an attention backend, registered as vLLM's CUSTOM one.

    import vllm_backend
    vllm_backend.register()
    # then start vLLM with attention_backend="CUSTOM" (VLLM_ATTENTION_BACKEND=CUSTOM)

Decoder attention with grouped heads, windows, softcaps, sinks, ALiBi and FP8 caches with a scale per tensor; decoding,
drafts and chunks of prompts in one call, inside CUDA graphs too, since nothing is planned on the host. Written against
the interface of vLLM's v1 engine (vllm/v1/attention/backend.py, 2026); tests/python/test_vllm_backend.py records what
of it this file relies on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from kernel_pytorch import functional

_FP8 = ("fp8", "fp8_e4m3")


@dataclass
class Metadata(AttentionMetadata):
    num_actual_tokens: int
    max_query_len: int
    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    causal: bool


class MetadataBuilder(AttentionMetadataBuilder):
    """Tensors go to the kernels as they are: lengths are read on the device."""

    _cudagraph_support: ClassVar[Any] = AttentionCGSupport.ALWAYS

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Metadata:
        common = common_attn_metadata
        if isinstance(common.causal, Tensor):
            raise NotImplementedError("kernel_pytorch: requests of one batch that are causal and not; keep them apart")
        return Metadata(
            num_actual_tokens=common.num_actual_tokens,
            max_query_len=common.max_query_len,
            query_start_loc=common.query_start_loc,
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping,
            causal=bool(common.causal),
        )


class Impl(AttentionImpl):
    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: Any = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
        **_: Any,
    ) -> None:
        if attn_type != AttentionType.DECODER:
            raise NotImplementedError(f"kernel_pytorch: attention of the type {attn_type}; it serves decoders")
        self.num_heads, self.num_kv_heads, self.head_size = num_heads, num_kv_heads, head_size
        self.scale = float(scale)  # vLLM asks every implementation for these
        self.kv_cache_dtype, self.shares_cache = kv_cache_dtype, kv_sharing_target_layer_name is not None
        self.alibi_slopes = None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32)
        self.options: dict[str, Any] = {
            "scale": self.scale,
            "window": None if sliding_window is None else (sliding_window - 1, 0),  # vLLM counts the token itself
            "softcap": logits_soft_cap or None,
            "sinks": None if sinks is None else sinks.float(),
        }

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor,
        attn_metadata: Metadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("kernel_pytorch: outputs in FP8 or FP4; switch their fusion off")
        if attn_metadata is None:  # vLLM measures memory
            return output.fill_(0)
        count = attn_metadata.num_actual_tokens
        caches, scales = [kv_cache[:, 0], kv_cache[:, 1]], {}
        if self.kv_cache_dtype in _FP8:
            caches = [cache.view(torch.float8_e4m3fn) for cache in caches]
            scales = {"key_scale": layer._k_scale.reshape(1), "value_scale": layer._v_scale.reshape(1)}
        if key is not None and value is not None and not self.shares_cache:
            slots = attn_metadata.slot_mapping[:count]
            functional.append_kv(key[:count], value[:count], *caches, slots, **scales)
        if self.alibi_slopes is not None:
            self.alibi_slopes = self.alibi_slopes.to(query.device)
        result = functional.paged_attention(
            query[:count].view(count, self.num_heads, self.head_size),
            *caches,
            attn_metadata.block_table,
            attn_metadata.seq_lens,
            cu_seqlens_q=attn_metadata.query_start_loc,
            max_seqlen_q=attn_metadata.max_query_len,
            causal=attn_metadata.causal,
            alibi_slopes=self.alibi_slopes,
            **self.options,
            **scales,
        )
        output.view(-1, self.num_heads, self.head_size)[:count].copy_(result)
        return output


class Backend(AttentionBackend):
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "float16", "bfloat16", *_FP8]

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[Impl]:
        return Impl

    @staticmethod
    def get_builder_cls() -> type[MetadataBuilder]:
        return MetadataBuilder

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        return (num_blocks, 2, block_size, num_kv_heads, head_size)

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        return True


def register() -> None:
    register_backend(AttentionBackendEnum.CUSTOM, f"{Backend.__module__}.{Backend.__qualname__}")
