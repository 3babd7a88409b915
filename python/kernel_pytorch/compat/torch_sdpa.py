"""Unmodified models on this library's attention: a provider for torch's registry of flash attentions.

    from kernel_pytorch.compat.torch_sdpa import register
    register()
    torch.nn.attention.activate_flash_attention_impl("kernel_pytorch")    # torch.nn.attention.restore_... undoes it

While it is active, F.scaled_dot_product_attention runs here, forward and backward, where torch would take its flash
attention: on the CPU, and on CUDA devices, where cuDNN's is switched off for that time since torch prefers it.
varlen_attn comes along.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor
from torch.library import Library

from .._ops.attention import AttentionOptions
from .._ops.support.seed import seed_for

__all__ = ["register"]

NAME = "kernel_pytorch"


def register(name: str = NAME) -> None:
    """Makes the provider known to torch, which leaves it inactive until it is asked for."""
    if not hasattr(torch.nn.attention, "register_flash_attention_impl"):
        raise RuntimeError(
            f"torch {torch.__version__} has no registry of flash attentions; call kernel_pytorch.functional.attention"
        )
    torch.nn.attention.register_flash_attention_impl(name, register_fn=_activate)


@dataclasses.dataclass
class _Handle:
    """What torch keeps while the provider is active."""

    libraries: list[Library]
    cudnn_was_enabled: bool

    def remove(self) -> None:
        self.libraries.clear()
        torch.backends.cuda.enable_cudnn_sdp(self.cudnn_was_enabled)


def _activate() -> _Handle:
    sdpa = "_scaled_dot_product_flash_attention"
    libraries = [_replace("CPU", {f"{sdpa}_for_cpu": _cpu_forward, f"{sdpa}_for_cpu_backward": _cpu_backward})]
    if torch.version.cuda is not None:
        dense = {sdpa: _cuda_forward, f"{sdpa}_backward": _cuda_backward}
        packed = {"_flash_attention_forward": _packed_forward, "_flash_attention_backward": _packed_backward}
        libraries.append(_replace("CUDA", {**dense, **packed}))
    handle = _Handle(libraries, torch._C._get_cudnn_sdp_enabled())
    torch.backends.cuda.enable_cudnn_sdp(False)
    return handle


def _replace(device: str, functions: dict[str, Any]) -> Library:
    library = Library("aten", "IMPL", device)  # type: ignore[no-untyped-call]
    for name, function in functions.items():
        library.impl(name, function, allow_override=True)  # type: ignore[no-untyped-call]
    return library


def _options(scale: float | None, causal: bool, dropout: float, seed: Tensor | None, **others: Any) -> Any:
    """torch's causal counts queries and keys from the start; sequences that are packed, from the end."""
    return AttentionOptions(
        scale=scale,
        causal=causal,
        causal_offset=0 if causal and "cu_seqlens_q" not in others else None,
        dropout_p=dropout,
        seed=seed if dropout > 0.0 else None,
        deterministic=torch.are_deterministic_algorithms_enabled(),
        **others,
    )


def _forward(query: Tensor, key: Tensor, value: Tensor, options: Any) -> tuple[Tensor, Tensor]:
    output, lse = torch.ops.kernel_pytorch.attention_forward(query, key, value, *options, True)
    return output, lse


def _backward(
    grad_output: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor, options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    gradients = torch.ops.kernel_pytorch.attention_backward(
        grad_output, query, key, value, output, lse.contiguous(), None, 0, *options, False, False
    )
    return gradients[0], gradients[1], gradients[2]


def _cpu_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    output, lse = _forward(query, key, value, _options(scale, is_causal, dropout_p, None, bias=attn_mask))
    return _laid_out_as(output, query), lse.transpose(1, 2).contiguous().transpose(1, 2)


def _cpu_backward(
    grad_output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    options = _options(scale, is_causal, dropout_p, None, bias=attn_mask)
    gradients = _backward(grad_output, query, key, value, output, lse, options)
    return tuple(gradient.transpose(1, 2).contiguous().transpose(1, 2) for gradient in gradients)


def _cuda_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    _refuse_debug_mask(return_debug_mask)
    seed = _new_seed(query, dropout_p)
    output, lse = _forward(query, key, value, _options(scale, is_causal, dropout_p, seed))
    nothing = query.new_empty(0)
    output = _laid_out_as(output, query)
    return output, lse, None, None, query.shape[2], key.shape[2], seed, nothing, nothing


def _cuda_backward(
    grad_output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor,
    philox_offset: Tensor,
    *,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    options = _options(scale, is_causal, dropout_p, philox_seed)
    gradients = _backward(grad_output, query, key, value, output, lse, options)
    return tuple(map(_laid_out_as, gradients, (query, key, value)))


def _packed_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> tuple[Any, ...]:
    _refuse_debug_mask(return_debug_mask)
    if block_table is not None:
        raise RuntimeError("kernel_pytorch: _flash_attention_forward has no block tables; gather the pages first")
    seed = _new_seed(query, dropout_p)
    sequences = _sequences(cum_seq_q, cum_seq_k, max_q, max_k, window_size_left, window_size_right)
    options = _options(scale, is_causal, dropout_p, seed, **sequences)
    options.update(key_lengths=seqused_k, alibi_slopes=alibi_slopes)
    output, lse = _forward(query, key, value, options)
    nothing = query.new_empty(0)
    return output, lse, seed, nothing, nothing


def _packed_backward(
    grad_output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Tensor,
    unused: Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[Tensor, ...]:
    sequences = _sequences(cum_seq_q, cum_seq_k, max_q, max_k, window_size_left, window_size_right)
    options = _options(scale, is_causal, dropout_p, rng_state, **sequences)
    return _backward(grad_output, query, key, value, output, lse, options)


def _sequences(
    cum_seq_q: Tensor | None, cum_seq_k: Tensor | None, max_q: int, max_k: int, left: int | None, right: int | None
) -> dict[str, Any]:
    """Options for packed [tokens, heads, size] tensors, or for [batch, sequence, heads, size] without offsets."""
    window = {"window_left": -1 if left is None else left, "window_right": -1 if right is None else right}
    if cum_seq_q is None:
        return {"heads_first": False, "causal_offset": None, **window}
    lengths = {"max_seqlen_q": max_q, "max_seqlen_k": max_k}
    return {"cu_seqlens_q": cum_seq_q, "cu_seqlens_k": cum_seq_k, "heads_first": False, **lengths, **window}


def _laid_out_as(result: Tensor, like: Tensor) -> Tensor:
    """torch.compile expects empty_like's strides."""
    wanted = torch.empty_like(like)
    return result if result.stride() == wanted.stride() else wanted.copy_(result)


def _new_seed(query: Tensor, dropout: float) -> Tensor:
    """What torch keeps for the backward, drawn only where it will be read."""
    return seed_for(query, None) if dropout > 0.0 else torch.empty(2, dtype=torch.int64, device=query.device)


def _refuse_debug_mask(return_debug_mask: bool) -> None:
    if return_debug_mask:
        raise RuntimeError("kernel_pytorch: a fused attention stores no probabilities; ask without return_debug_mask")
