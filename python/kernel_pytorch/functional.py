"""Functions on tensors, in the manner of torch.nn.functional: each is one call to the best kernel for this machine."""

from __future__ import annotations

from . import _torch as _torch  # first: it says what is missing where torch is missing or old
from ._ops.activation import activation, gelu, relu, relu_squared, silu
from ._ops.attention import attention
from ._ops.attention_fp8 import attention_fp8
from ._ops.attention_part import attention_part_, attention_part_backward_
from ._ops.block_list import BlockLists, block_lists, select_blocks, select_by_scores
from ._ops.causal_conv1d import causal_conv1d, causal_conv1d_step_
from ._ops.cross_entropy import (
    combine_cross_entropy_partials,
    cross_entropy,
    cross_entropy_,
    cross_entropy_partials,
    parallel_cross_entropy,
)
from ._ops.delta_rule import delta_rule, delta_rule_step_
from ._ops.dropout import dropout
from ._ops.embedding import embedding
from ._ops.float8 import dequantize, quantize, scaled_grouped_matmul, scaled_matmul
from ._ops.float8_fused import (
    gated_activation_backward_quantized,
    gated_activation_quantized,
    rms_norm_quantized,
)
from ._ops.gated_activation import (
    gated_activation,
    gated_activation_packed,
    geglu,
    geglu_packed,
    reglu,
    reglu_packed,
    swiglu,
    swiglu_packed,
)
from ._ops.grouped_matmul import grouped_matmul
from ._ops.int8_matmul import int8_matmul
from ._ops.layer_norm import layer_norm
from ._ops.lightning_indexer import lightning_indexer
from ._ops.linear import interleave_gate_up, linear, mlp
from ._ops.linear_attention import linear_attention, linear_attention_step_
from ._ops.linear_cross_entropy import linear_cross_entropy
from ._ops.matmul import matmul
from ._ops.mean_pooling import chunk_mean_pool, mean_pool
from ._ops.merge_attention import merge_attention
from ._ops.moe import Routing, moe_combine, moe_mlp, route, route_chosen
from ._ops.native_sparse_attention import native_sparse_attention
from ._ops.norm_rope import norm_rope
from ._ops.paged_attention import append_kv, mla_decode, paged_attention, plan_decode
from ._ops.quantized_grouped_matmul import quantized_grouped_matmul
from ._ops.quantized_matmul import (
    QuantizedTensor,
    QuantizedWeight,
    dequantize_weight,
    quantize_weight,
    quantized_matmul,
)
from ._ops.rms_norm import add_rms_norm, rms_norm
from ._ops.rope import rope, rope_, rope_frequencies, rope_from_frequencies, rope_tables
from ._ops.sample import sample
from ._ops.softmax import log_softmax, log_softmax_, softmax, softmax_
from ._ops.sparse_matmul import Sparse24Tensor, sparse_compress, sparse_matmul
from ._ops.ssd import ssd

__all__ = [
    "BlockLists",
    "QuantizedTensor",
    "QuantizedWeight",
    "Routing",
    "Sparse24Tensor",
    "activation",
    "add_rms_norm",
    "append_kv",
    "attention",
    "attention_fp8",
    "attention_part_",
    "attention_part_backward_",
    "block_lists",
    "causal_conv1d",
    "causal_conv1d_step_",
    "chunk_mean_pool",
    "combine_cross_entropy_partials",
    "cross_entropy",
    "cross_entropy_",
    "cross_entropy_partials",
    "delta_rule",
    "delta_rule_step_",
    "dequantize",
    "dequantize_weight",
    "dropout",
    "embedding",
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
    "linear_attention_step_",
    "linear_cross_entropy",
    "log_softmax",
    "log_softmax_",
    "matmul",
    "mean_pool",
    "merge_attention",
    "mla_decode",
    "mlp",
    "moe_combine",
    "moe_mlp",
    "native_sparse_attention",
    "norm_rope",
    "paged_attention",
    "parallel_cross_entropy",
    "plan_decode",
    "quantize",
    "quantize_weight",
    "quantized_grouped_matmul",
    "quantized_matmul",
    "reglu",
    "reglu_packed",
    "relu",
    "relu_squared",
    "rms_norm",
    "rms_norm_quantized",
    "rope",
    "rope_",
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
    "softmax_",
    "sparse_compress",
    "sparse_matmul",
    "ssd",
    "swiglu",
    "swiglu_packed",
]
