"""Functions over (score, batch, head, q, k) for FlexAttentionLayer, functional.attention and torch's flex_attention.

A mask said as a score mod still computes what it keeps out; mask mods and the options of functional.attention (causal,
window, segment ids) skip it. What a maker returns is a functools.partial of a function of this module, so that layers
with it can be pickled and copied. All of them also take plain numbers in place of traced values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

ScoreMod = Callable[..., Any]
MaskMod = Callable[..., Any]


def alibi_slopes(num_heads: int) -> Tensor:
    """fp32 [num_heads]: the geometric sequence of Press et al.; past a power of two, every other slope of the next."""

    def of_power_of_two(heads: int) -> list[float]:
        return [2.0 ** (-8.0 * (head + 1) / heads) for head in range(heads)]

    if num_heads < 1:
        raise ValueError(f"alibi_slopes: num_heads is {num_heads}; use 1 or more")
    below = 2 ** int(math.log2(num_heads))
    slopes = of_power_of_two(below) + of_power_of_two(2 * below)[::2][: num_heads - below]
    return torch.tensor(slopes, dtype=torch.float32)


def name_of_mod(mod: Callable[..., Any] | None) -> str:
    """For reprs: the function's name, and what it was made with."""
    if isinstance(mod, partial):
        arguments = [f"{name}={_short(value)}" for name, value in mod.keywords.items()]
        return f"{name_of_mod(mod.func)}({', '.join([*map(_short, mod.args), *arguments])})"
    return str(None if mod is None else getattr(mod, "__name__", type(mod).__name__)).strip("_").removesuffix("_score")


def _short(value: Any) -> str:
    return f"{value.dtype}{list(value.shape)}" if isinstance(value, Tensor) else repr(value)


def _masked(is_kept: Any, score: Any) -> Any:
    """The score, or -inf where it is not kept; is_kept may be a plain bool."""
    if isinstance(is_kept, bool):
        return score if is_kept else score - math.inf
    return torch.where(is_kept, score, -math.inf)


def _causal(batch: Any, head: Any, q: Any, k: Any) -> Any:
    return q >= k


def _sliding_window(batch: Any, head: Any, q: Any, k: Any, *, window_size: int) -> Any:
    return (q >= k) & (q - k < window_size)


def _local(batch: Any, head: Any, q: Any, k: Any, *, window_size: int) -> Any:
    return abs(q - k) < window_size


def _prefix_lm(batch: Any, head: Any, q: Any, k: Any, *, prefix_length: int) -> Any:
    return (k < prefix_length) | (q >= k)


def _document(batch: Any, head: Any, q: Any, k: Any, *, document_ids: Tensor) -> Any:
    if document_ids.ndim == 2:
        return document_ids[batch, q] == document_ids[batch, k]
    return document_ids[q] == document_ids[k]


def _causal_score(score: Any, batch: Any, head: Any, q: Any, k: Any) -> Any:
    return _masked(_causal(batch, head, q, k), score)


def _sliding_window_score(score: Any, batch: Any, head: Any, q: Any, k: Any, *, window_size: int) -> Any:
    return _masked(_sliding_window(batch, head, q, k, window_size=window_size), score)


def _local_score(score: Any, batch: Any, head: Any, q: Any, k: Any, *, window_size: int) -> Any:
    return _masked(_local(batch, head, q, k, window_size=window_size), score)


def _prefix_lm_score(score: Any, batch: Any, head: Any, q: Any, k: Any, *, prefix_length: int) -> Any:
    return _masked(_prefix_lm(batch, head, q, k, prefix_length=prefix_length), score)


def _document_score(score: Any, batch: Any, head: Any, q: Any, k: Any, *, document_ids: Tensor) -> Any:
    return _masked(_document(batch, head, q, k, document_ids=document_ids), score)


def _alibi(score: Any, batch: Any, head: Any, q: Any, k: Any, *, slopes: Tensor) -> Any:
    return score - slopes[head] * abs(q - k)


def _relative_position_bias(score: Any, batch: Any, head: Any, q: Any, k: Any, *, table: Tensor) -> Any:
    most = table.shape[1] // 2
    distance = k - q
    near = min(max(distance, -most), most) if isinstance(distance, int) else torch.clamp(distance, -most, most)
    return score + table[head, near + most]


def _soft_cap(score: Any, batch: Any, head: Any, q: Any, k: Any, *, cap: float) -> Any:
    return cap * (math.tanh(score / cap) if isinstance(score, float) else torch.tanh(score / cap))


class FlexAttentionScoreMods:
    """The score mods that models use, each a function or a maker of one."""

    causal = staticmethod(_causal_score)

    @staticmethod
    def sliding_window(window_size: int) -> ScoreMod:
        """The window_size keys that end with the query's own position."""
        return partial(_sliding_window_score, window_size=window_size)

    causal_sliding_window = sliding_window

    @staticmethod
    def local(window_size: int) -> ScoreMod:
        """Keys less than window_size away, on both sides."""
        return partial(_local_score, window_size=window_size)

    @staticmethod
    def alibi(num_heads: int, slopes: Tensor | Sequence[float] | None = None) -> ScoreMod:
        """A bias of -slope * |q - k|, one slope per head."""
        table = alibi_slopes(num_heads) if slopes is None else torch.as_tensor(slopes, dtype=torch.float32)
        if table.shape != (num_heads,):
            raise ValueError(f"alibi: slopes have shape {tuple(table.shape)}; give one for each of {num_heads} heads")
        return partial(_alibi, slopes=table)

    @staticmethod
    def relative_position_bias(table: Tensor) -> ScoreMod:
        """table [heads, 2 * max_distance + 1], trainable: its entry for k - q, clamped, is added to the score."""
        if table.ndim != 2 or table.shape[1] % 2 == 0:
            raise ValueError(
                f"relative_position_bias: table has shape {tuple(table.shape)}; use [heads, 2 * max_distance + 1]"
            )
        return partial(_relative_position_bias, table=table)

    @staticmethod
    def document_masking(document_ids: Tensor) -> ScoreMod:
        """document_ids [tokens] or [batch, tokens]: a token sees those of its own document."""
        return partial(_document_score, document_ids=document_ids)

    @staticmethod
    def prefix_lm(prefix_length: int) -> ScoreMod:
        """Causal, and everybody sees the first prefix_length keys."""
        return partial(_prefix_lm_score, prefix_length=prefix_length)

    @staticmethod
    def soft_cap(cap: float = 50.0) -> ScoreMod:
        """cap * tanh(score / cap)."""
        return partial(_soft_cap, cap=cap)


class FlexAttentionMaskMods:
    """The same as masks over (batch, head, q, k): what they keep out is not computed."""

    causal = staticmethod(_causal)

    @staticmethod
    def sliding_window(window_size: int) -> MaskMod:
        """The window_size keys that end with the query's own position."""
        return partial(_sliding_window, window_size=window_size)

    causal_sliding_window = sliding_window

    @staticmethod
    def local(window_size: int) -> MaskMod:
        """Keys less than window_size away, on both sides."""
        return partial(_local, window_size=window_size)

    @staticmethod
    def prefix_lm(prefix_length: int) -> MaskMod:
        """Causal, and everybody sees the first prefix_length keys."""
        return partial(_prefix_lm, prefix_length=prefix_length)

    @staticmethod
    def document(document_ids: Tensor) -> MaskMod:
        """document_ids [tokens] or [batch, tokens]: a token sees those of its own document."""
        return partial(_document, document_ids=document_ids)
