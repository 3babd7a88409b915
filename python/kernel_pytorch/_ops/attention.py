"""attention: its arguments as the core takes them, and its gradient."""

from __future__ import annotations

import functools
from collections import namedtuple
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec

import torch
import torch.nn.functional as torch_functional
from torch import Tensor

from .._shape_rules import window_sides
from ..expression import trace
from .support.autograd import transforms_active, wants_gradient
from .support.casting import autocast, statistics_dtype, torch_allows_tf32
from .support.declare import backward, differentiable
from .support.declared import declared, saves_of
from .support.masks import Sizes, join_masks
from .support.seed import seed_for

_TORCH_ATTENTION = torch_functional.scaled_dot_product_attention
_PRODUCTS = ("query", "key", "value")
_OPTIONS = [one for one in declared()["attention"]["arguments"] if one["name"] not in (*_PRODUCTS, "return_lse")]
# The options of the ops, by name and in the order of their schemas, with the core's defaults: `op(query, key, value,
# *options, return_lse)`. Plainer than those of `attention`: numbers for a window, texts for functions, lists for masks.
_named: Any = namedtuple  # its fields are data, which type checkers do not read
AttentionOptions = _named(
    "AttentionOptions", [one["name"] for one in _OPTIONS], defaults=[one["default"] for one in _OPTIONS]
)
AttentionOptions.__doc__ = """The options of the raw ops: by name, and as a tuple in the order of their schemas.

Args:
    mask: bool, True keeps; broadcasts to [batch, heads, queries, keys].
    heads_first: the layout: [batch, heads, sequence, size], else [batch, sequence, heads, size].
    softcap: scores become softcap * tanh(score / softcap); 0 for none.
    softcap_after_bias: the softcap follows the bias.
    window_left, window_right: keys that a query sees on each side of its own place; -1 is unbounded.
    max_seqlen_q, max_seqlen_k: no packed sequence is longer; 0 for the number of tokens.
    seed: int64 (seed, offset) of the dropout; None without dropout.
    query_block, key_block: the size of a tile of `blocks`; 0 without them.
    score_mod, mask_mod: a program of kernel_pytorch.expression as text; empty for none.
    deterministic: bitwise equal gradients from run to run.
    allow_tf32: fp32 on a GPU: operands of products may be rounded to tf32.
    blocks: tiles of scores that exist: counts and indices by query, for gradients by key too, and of full tiles.
"""

P = ParamSpec("P")
Mod = Callable[..., Any]


def _attends(options_of: Callable[P, Any]) -> Callable[P, Any]:
    """The function of these arguments that attends, of one that makes options and `return_lse` of them."""

    @functools.wraps(options_of)
    def attend(query: Tensor, key: Tensor, value: Tensor, **arguments: Any) -> Any:
        if torch_functional.scaled_dot_product_attention is not _TORCH_ATTENTION:
            _refuse_inside_context_parallel()
        query, key, value = autocast(query, key, value)
        options, return_lse = options_of(query, key, value, **arguments)  # type: ignore[arg-type]
        output, lse = _attention(query, key, value, *options, return_lse)
        return (output, lse) if return_lse else output

    return attend  # type: ignore[return-value]


@_attends
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    causal: bool = False,
    causal_offset: int | None = None,
    layout: str = "bhsd",
    scale: float | None = None,
    window: int | tuple[int, int] | None = None,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    query_segment_ids: Tensor | None = None,
    key_segment_ids: Tensor | None = None,
    key_lengths: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    mask: Tensor | None = None,
    attention_mask: Tensor | None = None,
    block_mask: Any = None,
    score_mod: Mod | None = None,
    mask_mod: Mod | None = None,
    captured: Sequence[Tensor] = (),
    deterministic: bool | None = None,
    batch_invariant: bool = False,
    return_lse: bool = False,
    softcap_after_bias: bool = False,
    allow_tf32: bool | None = None,
) -> Any:
    """softmax(scale * query key^T, changed and masked as asked) value, exact, with the gradients of everything.

    Args:
        query, key, value: [batch, heads, sequence, size], or [batch, sequence, heads, size] with layout="bshd", or
            packed [tokens, heads, size] with cu_seqlens; any strides, so slices of a packed QKV are not copied. value
            may have another size; query may have a multiple of key's heads (head h reads key head h / group).
        causal: query i sees keys up to i + causal_offset; None aligns the ends, keys - queries, or what key_lengths
            makes of it. 0 is torch's is_causal.
        scale: of the scores; None is size ** -0.5.
        window: (left, right), keeps -left <= k - (q + offset) <= right, -1 is unbounded; a number is both.
        alibi_slopes: [heads] or [batch, heads], subtracts slope * |k - (q + offset)|; offsets up to 2^24. Without a
            gradient.
        bias: added to the scores; broadcasts to [batch, heads, queries, keys]. Its gradient is reduced in the kernel.
        softcap: scores become softcap * tanh(score / softcap), before the bias (after it with softcap_after_bias).
        sinks: [heads], logits in the denominator alone.
        query_segment_ids, key_segment_ids: [batch, sequence] integers of 32 bits, or [sequence] for the whole batch
            (packed: [tokens]); equal ids attend, -1 (padding) attends to none. Without key_segment_ids the query's are
            used.
        key_lengths: [batch], clamped to 0..keys: keys from there on are padding, which no query sees. Without a
            causal_offset it also says where the queries of causal, window and ALiBi stand: offset = max(length -
            queries, min(0, keys - queries)). A cache that is longer than what it holds is thus aligned at its last real
            key; padding on the right of queries and keys alike gives 0, so query i sees keys up to i; a length of
            `keys` changes nothing. Of packed sequences each by itself.
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k: [sequences + 1], where packed sequences begin; no
            sequence is longer than the bounds (None: all tokens). Read on the device; tokens past the last give zeros.
            Offsets that do not ascend from 0 within the tokens, or a bound that is too small, raise on the CPU, and on
            a GPU with KERNEL_PYTORCH_CHECK=1.
        dropout_p, seed: probabilities are dropped in steps of 1/256; int64[2] (seed, offset), None draws one.
        mask: broadcasts as bias; True keeps. Integers and floating numbers as in attention_mask.
        attention_mask: bool (True keeps), integers (1 keeps, 0 hides) or floating numbers (added to the scores), of
            shape [batch, keys], [queries, keys], [heads, queries, keys] or [batch, heads, queries, keys] (the rule:
            support/masks.py). mask, bias and attention_mask hold together.
        block_mask: a torch BlockMask, or what has its attributes; its mask_mod is taken as well.
        score_mod: (score, batch, head, q, k, *captured) -> score; mask_mod: (batch, head, q, k, *captured) -> bool.
        captured: tensors that the mods read; those of floating types get gradients.
        deterministic: bitwise equal gradients from run to run; None asks torch.are_deterministic_algorithms_enabled().
        batch_invariant: a row's bits do not depend on what else is in the batch; on the CPU nor on how many queries
            its sequence has.
        allow_tf32: fp32 on a GPU: operands of products may be rounded to tf32's 11 bits, for a third of the work; None
            asks torch.backends.cuda.matmul.fp32_precision.

    Returns:
        The output in the query's layout, and with return_lse the natural logarithm of the sum of exponentials in fp32
        (fp64 for fp64), [batch, heads, queries] ([heads, tokens] where packed). A row that sees nothing gives zeros
        and -inf.
    """
    if layout not in ("bhsd", "bshd"):
        raise ValueError(f'attention: layout is "{layout}"; it is "bhsd" or "bshd"')
    if softcap is not None and softcap <= 0.0:
        raise ValueError(f"attention: softcap is {softcap}; it must be positive, or None for none")
    if alibi_slopes is not None and wants_gradient(alibi_slopes):
        raise RuntimeError(
            "attention: alibi_slopes require a gradient, which they do not have; detach them, or capture them"
        )
    if mask is not None or bias is not None or attention_mask is not None:
        sizes = _sizes_of(query, key, layout, cu_seqlens_q, max_seqlen_q, max_seqlen_k)
        mask, bias = join_masks("attention", mask, bias, attention_mask, sizes)
        bias = None if bias is None else _bias_for(query, bias, sizes.keys)
    blocks: list[Tensor] = []
    query_block, key_block = 0, 0
    score_text, mask_text, tensors = "", "", list(captured)
    if block_mask is not None:  # full blocks skip mask_mod, which must be the block mask's own
        inputs = (query, key, bias, sinks, *captured)
        blocks, query_block, key_block, block_mod = _block_list(block_mask, inputs)
        score_mod = score_mod if mask_mod is None else _masked(score_mod, mask_mod)
        mask_mod = block_mod
    if score_mod is not None or mask_mod is not None:
        score_text, mask_text, tensors = _programs_of(score_mod, mask_mod, captured)
    elif captured:
        raise ValueError("attention: tensors are captured, and there is no score_mod or mask_mod that reads them")
    left, right = window_sides("attention", window)
    if query_segment_ids is not None and key_segment_ids is None:
        key_segment_ids = query_segment_ids
    options = AttentionOptions(
        bias=bias,
        sinks=None if sinks is None else sinks.to(statistics_dtype(query)),
        alibi_slopes=None if alibi_slopes is None else alibi_slopes.to(statistics_dtype(query)),
        mask=mask,
        query_segment_ids=None if query_segment_ids is None else query_segment_ids.to(torch.int32),
        key_segment_ids=None if key_segment_ids is None else key_segment_ids.to(torch.int32),
        key_lengths=None if key_lengths is None else _counts(key_lengths),
        cu_seqlens_q=None if cu_seqlens_q is None else _counts(cu_seqlens_q),
        cu_seqlens_k=None if cu_seqlens_k is None else _counts(cu_seqlens_k),
        seed=None if dropout_p == 0.0 else seed_for(query, seed),
        heads_first=layout == "bhsd",
        scale=scale,
        softcap=0.0 if softcap is None else softcap,
        softcap_after_bias=softcap_after_bias,
        causal=causal,
        causal_offset=causal_offset,
        window_left=left,
        window_right=right,
        max_seqlen_q=0 if max_seqlen_q is None else max_seqlen_q,
        max_seqlen_k=0 if max_seqlen_k is None else max_seqlen_k,
        query_block=query_block,
        key_block=key_block,
        dropout_p=dropout_p,
        score_mod=score_text,
        mask_mod=mask_text,
        deterministic=torch.are_deterministic_algorithms_enabled() if deterministic is None else deterministic,
        batch_invariant=batch_invariant,
        allow_tf32=query.is_cuda
        and query.dtype is torch.float32
        and (torch_allows_tf32() if allow_tf32 is None else allow_tf32),
        blocks=blocks,
        captured=tensors,
    )
    return options, return_lse


def attention_options(query: Tensor, key: Tensor, **arguments: Any) -> Any:
    """AttentionOptions of what `attention` takes besides its tensors: for those who call the ops themselves."""
    options, return_lse = attention.__wrapped__(query, key, key, **arguments)  # type: ignore[attr-defined]
    if return_lse:
        raise TypeError("attention: return_lse is no option of a part, which has an lse always")
    return options


def _refuse_inside_context_parallel() -> None:
    """Refuses torch's context_parallel, which patches torch's function: this op would see one part only."""
    patched = getattr(torch_functional.scaled_dot_product_attention, "__module__", None) or ""
    if patched.startswith("torch.distributed."):
        raise RuntimeError(
            "attention: inside torch's context_parallel this call would attend to this rank's part of the sequence "
            "alone; use kernel_pytorch.compat.torch_context_parallel with torch's scaled_dot_product_attention, or "
            "kernel_pytorch.attention.distributed.context_parallel_attention"
        )


def _counts(tensor: Tensor) -> Tensor:
    """As int32. What does not fit is as far beyond every sequence as what does."""
    if tensor.dtype is torch.int64:
        tensor = tensor.clamp(-(2**30), 2**31 - 1)
    return tensor.to(torch.int32)


def _bias_for(query: Tensor, bias: Tensor, keys: int) -> Tensor:
    """The bias in a type that the kernels take. If it has a gradient, repeated elements become one, with their sum."""
    if bias.dtype is not query.dtype:
        bias = bias.to(statistics_dtype(query))
    if bias.requires_grad and bias.is_leaf and 0 in bias.stride():
        return bias.contiguous().expand(*bias.shape[:-1], keys)  # each of its elements has a gradient of its own
    if bias.requires_grad:
        for dim, stride in enumerate(bias.stride()[:-1]):
            if stride == 0 and bias.shape[dim] > 1:
                bias = bias.narrow(dim, 0, 1)
    return bias.expand(*bias.shape[:-1], keys) if bias.shape[-1] == 1 else bias


def _sizes_of(
    query: Tensor,
    key: Tensor,
    layout: str,
    cu_seqlens_q: Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
) -> Sizes:
    rows, heads = (2, 1) if layout == "bhsd" else (1, 2)
    keys = key.shape[rows] if key.dim() == 4 else max_seqlen_k or key.shape[0]
    if query.dim() != 4:
        sequences = 1 if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
        return Sizes(sequences, query.shape[-2], max_seqlen_q or query.shape[0], keys)
    return Sizes(query.shape[0], query.shape[heads], query.shape[rows], keys)


def _block_list(mask: Any, inputs: Sequence[Tensor | None]) -> tuple[list[Tensor], int, int, Mod | None]:
    lists = [mask.kv_num_blocks, mask.kv_indices]
    if mask.q_num_blocks is not None and mask.q_indices is not None:
        lists += [mask.q_num_blocks, mask.q_indices]
    elif wants_gradient(*inputs) or mask.full_kv_num_blocks is not None:
        raise ValueError(
            "attention: block_mask has no q_indices, which gradients need; make it with compute_q_blocks=True"
        )
    if mask.full_kv_num_blocks is not None:
        lists += [mask.full_kv_num_blocks, mask.full_kv_indices, mask.full_q_num_blocks, mask.full_q_indices]
    query_block, key_block = mask.BLOCK_SIZE
    is_trivial = mask.mask_mod is None or getattr(mask.mask_mod, "__name__", "") == "noop_mask"
    mod = None if is_trivial else mask.mask_mod
    return [tensor.contiguous() for tensor in lists], query_block, key_block, mod


def _programs_of(
    score_mod: Mod | None, mask_mod: Mod | None, captured: Sequence[Tensor]
) -> tuple[str, str, list[Tensor]]:
    """The texts of both programs and the tensors that they read: those given, then those that they close over."""
    traced = trace(score_mod, mask_mod, captured)
    if traced.captured and transforms_active():
        raise RuntimeError(
            "attention: torch.func does not see captured tensors; use autograd, or bias in place of them"
        )
    return traced.score_mod, traced.mask_mod, list(traced.captured)


def _masked(score_mod: Mod | None, mask_mod: Mod) -> Mod:
    """A score function that is -inf where the mask function does not keep: a mask that holds in full blocks too."""

    def changed(score: Any, batch: Any, head: Any, query: Any, key: Any, *captured: Any) -> Any:
        if score_mod is not None:
            score = score_mod(score, batch, head, query, key, *captured)
        return torch.where(mask_mod(batch, head, query, key, *captured), score, -torch.inf)

    return changed


def captured_gradients(row: Tensor, captured: Sequence[Tensor], wants_captured: int) -> list[Tensor | None]:
    """Of each captured tensor, from the one row that the ops return; None where its bit is not set."""
    gradients: list[Tensor | None] = []
    begin = 0
    for i, tensor in enumerate(captured):
        end = begin + (tensor.numel() if wants_captured >> i & 1 else 0)
        gradients.append(row[begin:end].view(tensor.shape).to(tensor.dtype) if wants_captured >> i & 1 else None)
        begin = end
    return gradients


def _gradient(grads: Any, saved: Any, wanted: Any) -> Any:
    grad_output, grad_lse = grads
    query, key, value, output, lse, *rest = saved
    options = AttentionOptions._make(rest)
    of_options = dict(zip(_TENSORS, wanted[len(_PRODUCTS) :]))
    wants_captured = sum(1 << i for i, one in enumerate(of_options["captured"] or ()) if one)
    if grad_output is None:
        grad_output = torch.zeros_like(output)
    grad_query, grad_key, grad_value, grad_bias, grad_sinks, grad_captured = _backward(
        grad_output, query, key, value, output, lse, grad_lse, wants_captured, *options,
        of_options["bias"], of_options["sinks"],
    )  # fmt: skip
    gradients = {
        "bias": grad_bias.to(options.bias.dtype) if of_options["bias"] else None,
        "sinks": grad_sinks,
        "captured": captured_gradients(grad_captured, options.captured, wants_captured),
    }
    return grad_query, grad_key, grad_value, *(gradients.get(name) for name in _TENSORS)


_TENSORS = [one["name"] for one in _OPTIONS if one["kind"] in ("tensor", "tensors")]
_SAVED = saves_of("attention_forward", "attention_backward")
assert [*_PRODUCTS, "output", "lse", *AttentionOptions._fields] == _SAVED, "_gradient reads them in this order"
_INSTEAD = "torch.nn.functional.scaled_dot_product_attention with torch.nn.attention.SDPBackend.MATH"

_backward = backward("attention", instead=_INSTEAD)
_attention = differentiable("attention", gradient=_gradient, instead=_INSTEAD)
