"""KernelPyTorch's ops for JAX: functions of arrays that jit, grad and vmap take like jax's own.

    import kernel_pytorch.jax as kp
    output = kp.attention(query, key, value, causal=True)   # [batch, sequence, heads, size]

Calls go through the XLA FFI to the kernels of the core, on CPUs and NVIDIA GPUs. torch is not needed.
"""

from __future__ import annotations

from . import _registration as _registration  # first: it says what is missing where jax is missing
from . import optim, policies
from .attention import attention
from .block_masks import BlockMask, block_mask, create_block_mask
from .float8 import Quantized, quantize, scaled_matmul
from .losses import cross_entropy, linear_cross_entropy
from .norms import layer_norm, rms_norm
from .pointwise import (
    activation,
    dropout,
    gated_activation,
    gated_activation_packed,
    geglu,
    gelu,
    log_softmax,
    reglu,
    relu,
    relu_squared,
    silu,
    softmax,
    swiglu,
)
from .products import interleave_gate_up, linear, matmul, mlp
from .ring import merge_attention, ring_attention
from .tables import chunk_mean_pool, embedding, mean_pool, rope

__all__ = [
    "BlockMask",
    "Quantized",
    "activation",
    "attention",
    "block_mask",
    "chunk_mean_pool",
    "create_block_mask",
    "cross_entropy",
    "dropout",
    "embedding",
    "gated_activation",
    "gated_activation_packed",
    "geglu",
    "gelu",
    "interleave_gate_up",
    "layer_norm",
    "linear",
    "linear_cross_entropy",
    "log_softmax",
    "matmul",
    "mean_pool",
    "merge_attention",
    "mlp",
    "optim",
    "policies",
    "quantize",
    "reglu",
    "relu",
    "relu_squared",
    "ring_attention",
    "rms_norm",
    "rope",
    "scaled_matmul",
    "silu",
    "softmax",
    "swiglu",
]

_registration.register()
