"""Functions over (score, batch, head, q, k) for FlexAttentionLayer, functional.attention and torch's flex_attention.

A mask said as a score mod still computes what it keeps out; mask mods and the options of functional.attention (causal,
window, segment ids) skip it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

ScoreMod = Callable[..., Any]


def alibi_slopes(num_heads: int) -> Tensor:
    """fp32 [num_heads]: the geometric sequence of Press et al.; past a power of two, every other slope of the next."""

    def of_power_of_two(heads: int) -> list[float]:
        return [2.0 ** (-8.0 * (head + 1) / heads) for head in range(heads)]

    if num_heads < 1:
        raise ValueError(f"alibi_slopes: num_heads is {num_heads}; use 1 or more")
    below = 2 ** int(math.log2(num_heads))
    slopes = of_power_of_two(below) + of_power_of_two(2 * below)[::2][: num_heads - below]
    return torch.tensor(slopes, dtype=torch.float32)


class FlexAttentionScoreMods:
    """The score mods that models use, each a function or a maker of one."""

    @staticmethod
    def causal(score: Any, batch: Any, head: Any, q: Any, k: Any) -> Any:
        return torch.where(q >= k, score, -math.inf)

    @staticmethod
    def sliding_window(window_size: int) -> ScoreMod:
        """Keys less than window_size away, on both sides."""

        def sliding_window(score: Any, batch: Any, head: Any, q: Any, k: Any) -> Any:
            return torch.where(abs(q - k) < window_size, score, -math.inf)

        return sliding_window

    @staticmethod
    def causal_sliding_window(window_size: int) -> ScoreMod:
        """The window_size keys that end with the query's own position."""

        def causal_sliding_window(score: Any, batch: Any, head: Any, q: Any, k: Any) -> Any:
            return torch.where((q >= k) & (q - k < window_size), score, -math.inf)

        return causal_sliding_window

    @staticmethod
    def alibi(num_heads: int, slopes: Tensor | Sequence[float] | None = None) -> ScoreMod:
        """A bias of -slope * |q - k|, one slope per head."""
        table = alibi_slopes(num_heads) if slopes is None else torch.as_tensor(slopes, dtype=torch.float32)
        if table.shape != (num_heads,):
            raise ValueError(f"alibi: slopes have shape {tuple(table.shape)}; give one for each of {num_heads} heads")

        def alibi(score: Any, batch: Any, head: Any, q: Any, k: Any) -> Any:
            return score - table[head] * abs(q - k)

        return alibi

    @staticmethod
    def relative_position_bias(table: Tensor) -> ScoreMod:
        """table [heads, 2 * max_distance + 1], trainable: its entry for k - q, clamped, is added to the score."""
        if table.ndim != 2 or table.shape[1] % 2 == 0:
            raise ValueError(
                f"relative_position_bias: table has shape {tuple(table.shape)}; use [heads, 2 * max_distance + 1]"
            )
        max_distance = table.shape[1] // 2

        def relative_position_bias(score: Any, batch: Any, head: Any, q: Any, k: Any) -> Any:
            return score + table[head, torch.clamp(k - q, -max_distance, max_distance) + max_distance]

        return relative_position_bias

    @staticmethod
    def document_masking(document_ids: Tensor) -> ScoreMod:
        """document_ids [tokens] or [batch, tokens]: a token sees those of its own document."""

        def document_masking(score: Any, batch: Any, head: Any, q: Any, k: Any) -> Any:
            of_query = document_ids[batch, q] if document_ids.ndim == 2 else document_ids[q]
            of_key = document_ids[batch, k] if document_ids.ndim == 2 else document_ids[k]
            return torch.where(of_query == of_key, score, -math.inf)

        return document_masking

    @staticmethod
    def prefix_lm(prefix_length: int) -> ScoreMod:
        """Causal, and everybody sees the first prefix_length keys."""

        def prefix_lm(score: Any, batch: Any, head: Any, q: Any, k: Any) -> Any:
            return torch.where((k < prefix_length) | (q >= k), score, -math.inf)

        return prefix_lm

    @staticmethod
    def soft_cap(cap: float = 50.0) -> ScoreMod:
        """cap * tanh(score / cap)."""

        def soft_cap(score: Any, batch: Any, head: Any, q: Any, k: Any) -> Any:
            return cap * torch.tanh(score / cap)

        return soft_cap


class FlexAttentionMaskMods:
    """The same as masks over (batch, head, q, k): what they keep out is not computed."""

    @staticmethod
    def causal(batch: Any, head: Any, q: Any, k: Any) -> Any:
        return q >= k

    @staticmethod
    def sliding_window(window_size: int) -> Callable[..., Any]:
        return lambda batch, head, q, k: (q >= k) & (q - k < window_size)

    @staticmethod
    def prefix_lm(prefix_length: int) -> Callable[..., Any]:
        return lambda batch, head, q, k: (k < prefix_length) | (q >= k)

    @staticmethod
    def document(document_ids: Tensor) -> Callable[..., Any]:
        if document_ids.ndim == 2:
            return lambda batch, head, q, k: document_ids[batch, q] == document_ids[batch, k]
        return lambda batch, head, q, k: document_ids[q] == document_ids[k]
