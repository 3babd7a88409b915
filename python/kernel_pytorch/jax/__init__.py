"""KernelPyTorch's ops for JAX: functions of arrays that jit, grad and vmap take like jax's own.

    import kernel_pytorch.jax as kp
    output = kp.attention(query, key, value, causal=True)   # [batch, sequence, heads, size]

Calls go through the XLA FFI to the kernels of the core, on CPUs and NVIDIA GPUs. torch is not needed.
"""

from __future__ import annotations

from . import _registration as _registration  # first: it says what is missing where jax is missing
from . import optim, policies
from ._static_options import check_options as _check_options
from .attention import attention
from .attentions.block_masks import (
    BlockMask,
    block_lists,
    block_mask,
    create_block_mask,
    select_blocks,
    select_by_scores,
)
from .attentions.convolution import causal_conv1d
from .attentions.delta import delta_rule
from .attentions.fp8 import attention_fp8
from .attentions.linear import linear_attention
from .attentions.native_sparse import lightning_indexer, native_sparse_attention
from .attentions.packed import attention_packed
from .attentions.pages import append_kv, mla_decode, paged_attention, plan_decode, sample
from .attentions.ring import merge_attention, ring_attention
from .attentions.ssd import ssd
from .experts import (
    Routing,
    expert_parallel_mlp,
    grouped_matmul,
    moe_combine,
    moe_mlp,
    quantized_grouped_matmul,
    ragged_dot,
    route,
    route_chosen,
)
from .few_bits import (
    QuantizedWeight,
    Sparse24Tensor,
    dequantize_weight,
    int8_matmul,
    quantize_weight,
    quantized_matmul,
    sparse_compress,
    sparse_matmul,
)
from .float8 import (
    Quantized,
    QuantizedGate,
    QuantizedNorm,
    dequantize,
    gated_activation_backward_quantized,
    gated_activation_quantized,
    quantize,
    rms_norm_quantized,
    scaled_grouped_matmul,
    scaled_matmul,
)
from .losses import (
    combine_cross_entropy_partials,
    cross_entropy,
    cross_entropy_partials,
    linear_cross_entropy,
    parallel_cross_entropy,
)
from .norms import add_rms_norm, layer_norm, rms_norm
from .pointwise import (
    activation,
    dropout,
    gated_activation,
    gated_activation_packed,
    geglu,
    geglu_packed,
    gelu,
    log_softmax,
    reglu,
    reglu_packed,
    relu,
    relu_squared,
    silu,
    softmax,
    swiglu,
    swiglu_packed,
)
from .products import interleave_gate_up, linear, matmul, mlp
from .tables import (
    chunk_mean_pool,
    embedding,
    mean_pool,
    norm_rope,
    rope,
    rope_frequencies,
    rope_from_frequencies,
    rope_tables,
)

__all__ = [
    "BlockMask",
    "Quantized",
    "QuantizedGate",
    "QuantizedNorm",
    "QuantizedWeight",
    "Routing",
    "Sparse24Tensor",
    "activation",
    "add_rms_norm",
    "append_kv",
    "attention",
    "attention_fp8",
    "attention_packed",
    "block_lists",
    "block_mask",
    "causal_conv1d",
    "chunk_mean_pool",
    "combine_cross_entropy_partials",
    "create_block_mask",
    "cross_entropy",
    "cross_entropy_partials",
    "delta_rule",
    "dequantize",
    "dequantize_weight",
    "dropout",
    "embedding",
    "expert_parallel_mlp",
    "gated_activation",
    "gated_activation_backward_quantized",
    "gated_activation_packed",
    "gated_activation_quantized",
    "geglu",
    "geglu_packed",
    "gelu",
    "grouped_matmul",
    "int8_matmul",
    "interleave_gate_up",
    "layer_norm",
    "lightning_indexer",
    "linear",
    "linear_attention",
    "linear_cross_entropy",
    "log_softmax",
    "matmul",
    "mean_pool",
    "merge_attention",
    "mla_decode",
    "mlp",
    "moe_combine",
    "moe_mlp",
    "native_sparse_attention",
    "norm_rope",
    "optim",
    "paged_attention",
    "parallel_cross_entropy",
    "plan_decode",
    "policies",
    "quantize",
    "quantize_weight",
    "quantized_grouped_matmul",
    "quantized_matmul",
    "ragged_dot",
    "reglu",
    "reglu_packed",
    "relu",
    "relu_squared",
    "ring_attention",
    "rms_norm",
    "rms_norm_quantized",
    "rope",
    "rope_frequencies",
    "rope_from_frequencies",
    "rope_tables",
    "route",
    "route_chosen",
    "sample",
    "scaled_grouped_matmul",
    "scaled_matmul",
    "select_blocks",
    "select_by_scores",
    "silu",
    "softmax",
    "sparse_compress",
    "sparse_matmul",
    "ssd",
    "swiglu",
    "swiglu_packed",
]

_check_options(globals(), __all__)
_registration.register()
