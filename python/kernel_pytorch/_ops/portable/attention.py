"""Attention, by torch operations; ops/attention/attention.h has the formulas.

Scores are whole matrices here. Packed sequences, lists of blocks, score and mask functions, dropout and lengths of keys
are the host's.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from ..._shape_rules import declared
from .numbers import NoFormula, wide


@dataclass
class _Options:
    bias: Tensor | None
    sinks: Tensor | None
    alibi_slopes: Tensor | None
    mask: Tensor | None
    query_segment_ids: Tensor | None
    key_segment_ids: Tensor | None
    heads_first: bool
    scale: float | None
    softcap: float
    softcap_after_bias: bool
    causal: bool
    causal_offset: int | None
    window_left: int
    window_right: int


_UNTAKEN = ("cu_seqlens_q", "key_lengths", "score_mod", "mask_mod", "blocks", "dropout_p", "captured")


def _read(op: str, args: tuple[Any, ...]) -> tuple[dict[str, Any], _Options]:
    """Arguments by name. Raises NoFormula for what the host takes."""
    values = {one["name"]: value for one, value in zip(declared()[op]["arguments"], args)}
    for name in _UNTAKEN:
        given = values[name]
        if given is not None and not (given == 0 if isinstance(given, int | float) else len(given) == 0):
            raise NoFormula
    return values, _Options(**{one.name: values[one.name] for one in fields(_Options)})


class _Scores:
    """Scores [batch, heads, queries, keys] with what stands between the products, and their derivatives."""

    def __init__(self, query: Tensor, key: Tensor, options: _Options) -> None:
        self.options = options
        self.heads_first = options.heads_first
        self.query, self.key = self.by_heads(query), self.by_heads(key)
        self.group = self.query.shape[1] // max(self.key.shape[1], 1)
        self.scale = self.query.shape[-1] ** -0.5 if options.scale is None else options.scale
        queries, keys = self.query.shape[2], self.key.shape[2]
        offset = keys - queries if options.causal_offset is None else options.causal_offset
        place = torch.arange(queries, device=query.device).unsqueeze(1) + offset
        self.distance = torch.arange(keys, device=query.device) - place

    def by_heads(self, x: Tensor) -> Tensor:
        value: Tensor = wide(x)
        return value if self.heads_first else value.transpose(1, 2)

    def repeated(self, x: Tensor) -> Tensor:
        return x.repeat_interleave(self.group, 1)

    def compute(self) -> tuple[Tensor, Tensor, Tensor]:
        """Scores with -inf where not kept, d score / d product and d score / d bias."""
        options = self.options
        score = self.scale * (self.query @ self.repeated(self.key).mT)
        of_product, of_bias = torch.full_like(score, self.scale), torch.ones_like(score)
        if options.softcap and not options.softcap_after_bias:
            score, slope = self._cap(score)
            of_product = of_product * slope
        if options.bias is not None:
            score = score + wide(options.bias)
        if options.alibi_slopes is not None:
            slopes = options.alibi_slopes
            slopes = slopes.reshape(-1, slopes.shape[-1], 1, 1)
            score = score - slopes * self.distance.abs()
        if options.softcap and options.softcap_after_bias:
            score, slope = self._cap(score)
            of_product, of_bias = of_product * slope, of_bias * slope
        return score.masked_fill(~self._kept(score), float("-inf")), of_product, of_bias

    def _cap(self, score: Tensor) -> tuple[Tensor, Tensor]:
        t = torch.tanh(score / self.options.softcap)
        return self.options.softcap * t, 1 - t * t

    def _kept(self, score: Tensor) -> Tensor:
        options = self.options
        kept = torch.ones_like(score, dtype=torch.bool)
        if options.causal:
            kept = kept & (self.distance <= 0)
        if options.window_left >= 0:
            kept = kept & (self.distance >= -options.window_left)
        if options.window_right >= 0:
            kept = kept & (self.distance <= options.window_right)
        if options.mask is not None:
            kept = kept & options.mask
        if options.query_segment_ids is not None and options.key_segment_ids is not None:
            ids, others = (
                one.reshape(-1, one.shape[-1]) for one in (options.query_segment_ids, options.key_segment_ids)
            )
            same = (ids.unsqueeze(2) == others.unsqueeze(1)) & (ids >= 0).unsqueeze(2)
            kept = kept & same.unsqueeze(1)
        return kept

    def lse(self, score: Tensor) -> Tensor:
        sinks = self.options.sinks
        if sinks is not None:
            column = sinks.to(score.dtype).view(1, -1, 1, 1).expand(score.shape[0], -1, score.shape[2], 1)
            score = torch.cat([score, column], -1)
        return torch.logsumexp(score, -1) if score.shape[-1] else score.new_full(score.shape[:-1], float("-inf"))

    @staticmethod
    def probabilities(score: Tensor, lse: Tensor) -> Tensor:
        nothing = (lse == float("-inf")).unsqueeze(-1)
        return torch.exp(score - lse.unsqueeze(-1)).masked_fill(nothing | (score == float("-inf")), 0.0)


def attention_forward(*args: Any) -> tuple[Tensor | None, ...]:
    values, options = _read("attention_forward", args)
    scores = _Scores(values["query"], values["key"], options)
    score, _, _ = scores.compute()
    lse = scores.lse(score)
    out = scores.probabilities(score, lse) @ scores.repeated(scores.by_heads(values["value"]))
    return out if options.heads_first else out.transpose(1, 2), lse


def attention_backward(*args: Any) -> tuple[Tensor | None, ...]:
    values, options = _read("attention_backward", args)
    scores = _Scores(values["query"], values["key"], options)
    score, of_product, of_bias = scores.compute()
    lse = wide(values["lse"]).reshape(score.shape[:-1])
    probability = scores.probabilities(score, lse)
    grad, value = scores.by_heads(values["grad_output"]), scores.repeated(scores.by_heads(values["value"]))
    delta = (grad * scores.by_heads(values["output"])).sum(-1)
    if values["grad_lse"] is not None:
        delta = delta - wide(values["grad_lse"]).reshape(delta.shape)
    of_score = probability * (grad @ value.mT - delta.unsqueeze(-1))
    through = of_score * of_product

    def summed(x: Tensor) -> Tensor:  # over the query heads of a key head
        return x.reshape(x.shape[0], -1, scores.group, *x.shape[2:]).sum(2)

    of_query = through @ scores.repeated(scores.key)
    of_key, of_value = summed(through.mT @ scores.query), summed(probability.mT @ grad)
    gradients = [one if options.heads_first else one.transpose(1, 2) for one in (of_query, of_key, of_value)]
    of_bias_tensor = of_sinks = None
    if values["wants_bias"]:
        of_bias_tensor = _summed_to(of_score * of_bias, values["bias"].shape)
    if values["wants_sinks"]:
        share = torch.exp(wide(values["sinks"]).view(1, -1, 1) - lse).masked_fill(lse == float("-inf"), 0.0)
        of_sinks = -(share * delta).sum((0, 2))
    return *gradients, of_bias_tensor, of_sinks, None


def _summed_to(x: Tensor, shape: torch.Size) -> Tensor:
    whole = (*(1,) * (x.dim() - len(shape)), *shape)
    over = [i for i, size in enumerate(whole) if size == 1 and x.shape[i] != 1]
    return (x.sum(over, keepdim=True) if over else x).reshape(shape)
