"""Attention: exact, tiled, with every option of the op that is an array or known while tracing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from .._shape_rules import Sizes, fits, form_of, forms, window_sides
from ._call import Array, call, seed_words
from ._gradients import differentiable
from ._mods import Mod, programs_of
from .attentions.block_masks import BlockMask, masked

_LAYOUTS = ("bshd", "bhsd")
# Of every one backward needs the same as forward had.
_TENSORS = (
    "bias",
    "sinks",
    "alibi_slopes",
    "mask",
    "query_segment_ids",
    "key_segment_ids",
    "key_lengths",
    "cu_seqlens_q",
    "cu_seqlens_k",
    "seed",
    "blocks",
    "captured",
)


def attention(
    query: Array,
    key: Array,
    value: Array,
    *,
    causal: bool = False,
    causal_offset: int | None = None,
    layout: str = "bshd",
    scale: float | None = None,
    window: int | tuple[int, int] | None = None,
    alibi_slopes: Array | None = None,
    bias: Array | None = None,
    softcap: float | None = None,
    softcap_after_bias: bool = False,
    sinks: Array | None = None,
    query_segment_ids: Array | None = None,
    key_segment_ids: Array | None = None,
    key_lengths: Array | None = None,
    cu_seqlens_q: Array | None = None,
    cu_seqlens_k: Array | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dropout_p: float = 0.0,
    seed: Any = None,
    mask: Array | None = None,
    attention_mask: Array | None = None,
    block_mask: BlockMask | None = None,
    score_mod: Mod | None = None,
    mask_mod: Mod | None = None,
    captured: Sequence[Array] = (),
    deterministic: bool = False,
    batch_invariant: bool = False,
    allow_tf32: bool = False,
    return_lse: bool = False,
) -> Any:
    """softmax(scale * query key^T + bias) value, computed by tiles: scores are never stored.

    Args:
        query: [batch, queries, heads, size] ("bshd") or [batch, heads, queries, size] ("bhsd"); with cu_seqlens_q
            [tokens, heads, size].
        key, value: likewise; heads of the query are a multiple of theirs, and value's size may differ.
        causal: query i sees keys j <= i + keys - queries, or with causal_offset j <= i + causal_offset.
        scale: None is 1 / sqrt(size).
        window: (left, right) keeps -left <= j - i <= right after alignment; one number stands for both.
        bias: added to scores, mask: bool, True keeps; [batch, heads, queries, keys] with 1 for all.
        attention_mask: bool (True keeps), integers (1 keeps, 0 hides) or floating numbers (added to the scores), of
            shape [batch, keys], [queries, keys], [heads, queries, keys] or [batch, heads, queries, keys]; it holds
            together with mask and bias.
        alibi_slopes: [heads] or [batch, heads]. softcap: scores become softcap * tanh(scores / softcap) before bias.
        sinks: [heads], an extra score in each row's sum, with a gradient.
        query_segment_ids, key_segment_ids: [batch, length]: only equal ones see each other. key_lengths: [batch].
        block_mask: tiles of scores that exist (`create_block_mask`); its mask_mod holds as well.
        score_mod: (score, batch, head, query, key, *captured) -> the new score, a function of jnp scalars that may read
            elements of arrays; mask_mod: (batch, head, query, key, *captured) -> whether the score is kept.
        captured: arrays that the functions are given; those that they close over are found. Both get gradients.
        allow_tf32: products of fp32 may round to tf32 on a GPU.
        dropout_p, seed: dropout of probabilities; the seed is a key of jax.random.
        return_lse: return (output, log of the sum of exponentials [batch, heads, queries]).

    Returns:
        The output in query's layout and type. A row that sees no key is 0.
    """
    if layout not in _LAYOUTS:
        raise ValueError(f'attention: layout is "{layout}"; it is one of {", ".join(_LAYOUTS)}')
    query, key, value = jnp.asarray(query), jnp.asarray(key), jnp.asarray(value)
    left, right = window_sides("attention", window)
    if attention_mask is not None:
        mask, bias = _joined(jnp.asarray(attention_mask), mask, bias, _scores_of(query, key, layout))
    blocks: tuple[Array, ...] = ()
    query_block, key_block = 0, 0
    if block_mask is not None:  # full tiles skip mask_mod, which must be the block mask's own
        blocks, (query_block, key_block) = block_mask.lists, block_mask.block_size
        score_mod = score_mod if mask_mod is None else masked(score_mod, mask_mod)
        mask_mod = block_mask.mask_mod
    programs = programs_of(score_mod, mask_mod, captured)
    if captured and score_mod is None and mask_mod is None:
        raise ValueError("attention: arrays are captured, and there is no score_mod or mask_mod that reads them")
    keys = key.shape[1 if layout == "bshd" else 2] if key.ndim == 4 else None
    statistic = jnp.float64 if query.dtype == jnp.float64 else jnp.float32
    tensors = {
        "query": query,
        "key": key,
        "value": value,
        "bias": _scores_like("bias", bias, keys, None if bias is None else _bias_type(query, bias)),
        "sinks": _cast(sinks, statistic),
        "alibi_slopes": _cast(alibi_slopes, statistic),
        "mask": _scores_like("mask", mask, keys, jnp.bool_),
        "query_segment_ids": _cast(query_segment_ids, jnp.int32),
        "key_segment_ids": _cast(key_segment_ids, jnp.int32),
        "key_lengths": _cast(key_lengths, jnp.int32),
        "cu_seqlens_q": _cast(cu_seqlens_q, jnp.int32),
        "cu_seqlens_k": _cast(cu_seqlens_k, jnp.int32),
        "seed": seed_words("attention", seed) if dropout_p else None,
        "blocks": blocks,
        "captured": programs.captured,
    }
    options = {
        "heads_first": layout == "bhsd",
        "scale": None if scale is None else float(scale),
        "softcap": float(softcap or 0.0),
        "softcap_after_bias": bool(softcap_after_bias),
        "causal": bool(causal),
        "causal_offset": causal_offset,
        "window_left": left,
        "window_right": right,
        "max_seqlen_q": max_seqlen_q,
        "max_seqlen_k": max_seqlen_k,
        "query_block": query_block,
        "key_block": key_block,
        "dropout_p": float(dropout_p),
        "score_mod": programs.score_mod,
        "mask_mod": programs.mask_mod,
        "deterministic": bool(deterministic),
        "batch_invariant": bool(batch_invariant),
        "allow_tf32": bool(allow_tf32),
    }
    saves = ("query", "key", "value", "output", "lse", *_TENSORS)
    results = ("output", "lse") if return_lse else ("output",)
    made = differentiable(
        "attention",
        tensors,
        options,
        _gradient,
        results=results,
        saves=saves,
        wanted=("return_lse",) if return_lse else (),
        forward_wanted=("return_lse",),
    )
    return made if return_lse else made[0]


def _scores_of(query: Array, key: Array, layout: str) -> Sizes:
    if query.ndim != 4 or key.ndim != 4:
        raise ValueError("attention: attention_mask is given with packed sequences; give a mask or a bias")
    length, heads = (1, 2) if layout == "bshd" else (2, 1)
    return Sizes(query.shape[0], query.shape[heads], query.shape[length], key.shape[length])


def _joined(given: Array, mask: Any, bias: Any, sizes: Sizes) -> tuple[Any, Any]:
    """mask and bias together with what an attention_mask says."""
    is_integers = jnp.issubdtype(given.dtype, jnp.integer)
    form = form_of("attention", given.shape, bool(is_integers), sizes)
    spread = given[:, None, None, :] if form == "keys" else given.reshape((1,) * (4 - given.ndim) + given.shape)
    if not all(fits(size, wanted) for size, wanted in zip(spread.shape, sizes)):
        raise ValueError(f"attention: attention_mask has shape {list(given.shape)}; give {forms(sizes)}")
    if jnp.issubdtype(given.dtype, jnp.floating):
        return mask, spread if bias is None else spread + bias
    kept = spread != 0
    return kept if mask is None else kept & mask, bias


def _cast(array: Any, dtype: Any) -> Any:
    return None if array is None else jnp.asarray(array).astype(dtype)


def _bias_type(query: Array, bias: Any) -> Any:
    bias = jnp.asarray(bias)
    if not jnp.issubdtype(bias.dtype, jnp.floating):
        raise TypeError(f"attention: bias has the type {bias.dtype}; give floating numbers, or a mask of bool as mask")
    if bias.dtype == query.dtype:
        return bias.dtype
    return jnp.float64 if query.dtype == jnp.float64 else jnp.float32


def _scores_like(name: str, array: Any, keys: int | None, dtype: Any) -> Any:
    """[batch, heads, queries, keys] with 1 for all but keys."""
    if array is None:
        return None
    array = jnp.asarray(array)
    if name == "mask" and array.dtype != jnp.bool_:
        raise TypeError(f"attention: mask has the type {array.dtype}; give bool (True keeps), or numbers as bias")
    if array.ndim > 4:
        raise ValueError(f"attention: {name} has shape {list(array.shape)}; it has at most four dimensions")
    if keys is not None and array.ndim > 0 and array.shape[-1] not in (1, keys):
        raise ValueError(
            f"attention: {name} has shape {list(array.shape)}; its last size must be 1 or {keys}, the keys"
        )
    array = array.astype(dtype).reshape((1,) * (4 - array.ndim) + array.shape)
    return array if keys is None or array.shape[-1] == keys else jnp.broadcast_to(array, (*array.shape[:-1], keys))


def _gradient(values: Any, grads: Any, wanted: Any) -> Any:
    output = values["output"]
    tensors = {name: values.get(name) for name in ("query", "key", "value", "output", "lse", *_TENSORS)}
    tensors["grad_output"] = grads["output"] if "output" in grads else jnp.zeros_like(output)
    tensors["grad_lse"] = grads.get("lse")
    options = {name: option for name, option in values.items() if name not in tensors}
    flags = [f"wants_{name}" for name in ("bias", "sinks") if name in wanted]
    arrays = values.get("captured", [])
    read = [i for i in range(len(arrays)) if f"captured:{i}" in wanted]
    options["wants_captured"] = sum(1 << i for i in read)
    outputs = call("attention_backward", tensors, options, wanted=flags)
    gradients = {name.removeprefix("grad_"): value for name, value in outputs.items()}
    begin = 0
    for i in read:  # one row holds all of them
        end = begin + arrays[i].size
        gradients[f"captured:{i}"] = outputs["grad_captured"][begin:end].reshape(arrays[i].shape)
        begin = end
    return gradients
