"""Attention in plain torch, in the type of its arguments, every option: what tests compare with."""

from __future__ import annotations

import torch


def kept_places(queries, keys, offset, *, causal=False, window=(-1, -1)):
    """[queries, keys], whether position alone keeps a score."""
    distance = torch.arange(keys)[None, :] - (torch.arange(queries)[:, None] + offset)
    kept = torch.ones(queries, keys, dtype=torch.bool)
    if causal:
        kept &= distance <= 0
    if window[0] >= 0:
        kept &= distance >= -window[0]
    if window[1] >= 0:
        kept &= distance <= window[1]
    return kept, distance


def attend(
    query, key, value, *, causal=False, causal_offset=None, scale=None, window=None, alibi_slopes=None, bias=None,
    softcap=None, softcap_after_bias=False, sinks=None, query_segment_ids=None, key_segment_ids=None, key_lengths=None,
    mask=None, keep_probabilities=None,
):  # fmt: skip
    """output and lse of [batch, heads, sequence, size]; one batch entry after another where lengths differ.

    keep_probabilities: what dropout multiplies them by, [batch, heads, queries, keys].
    """
    batch, heads, queries, size = query.shape
    keys = key.shape[2]
    group = heads // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = query @ key.transpose(-1, -2) * (size**-0.5 if scale is None else scale)
    lengths = [keys] * batch if key_lengths is None else [max(0, min(keys, int(n))) for n in key_lengths]
    kept = torch.zeros(batch, heads, queries, keys, dtype=torch.bool)
    sloped = torch.zeros(batch, heads, queries, keys, dtype=scores.dtype)
    for i, length in enumerate(lengths):
        aligned = max(length - queries, min(0, keys - queries))
        offset = aligned if causal_offset is None else causal_offset
        places, distance = kept_places(queries, keys, offset, causal=causal, window=window or (-1, -1))
        kept[i] = places & (torch.arange(keys) < length)
        if alibi_slopes is not None:
            sloped[i] = alibi_slopes.expand(batch, heads)[i][:, None, None] * distance.abs()
    if softcap is not None and not softcap_after_bias:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias
    scores = scores - sloped
    if softcap is not None and softcap_after_bias:
        scores = torch.where(scores == -torch.inf, scores, softcap * torch.tanh(scores / softcap))
    if query_segment_ids is not None:
        of_query, of_key = query_segment_ids[:, None, :, None], key_segment_ids[:, None, None, :]
        kept &= (of_query == of_key) & (of_query != -1)
    if mask is not None:
        kept &= mask
    scores = scores.masked_fill(~kept, -torch.inf)
    logits = scores
    if sinks is not None:
        logits = torch.cat([scores, sinks[None, :, None, None].expand(batch, heads, queries, 1)], -1)
    lse = torch.logsumexp(logits, -1) if logits.shape[-1] else scores.new_full((batch, heads, queries), -torch.inf)
    is_empty = ~(scores > -torch.inf).any(-1) if keys else torch.ones(batch, heads, queries, dtype=torch.bool)
    safe = lse.masked_fill(is_empty, 0.0)
    probabilities = torch.exp(scores - safe[..., None]).masked_fill(is_empty[..., None], 0.0)
    if keep_probabilities is not None:
        probabilities = probabilities * keep_probabilities
    return probabilities @ value, lse
