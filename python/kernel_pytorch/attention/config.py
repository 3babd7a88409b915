"""What an attention layer is made from: sizes, who sees whom, and what is done to scores."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

from ..core._checks import check_probability


class AttentionPatterns(enum.Enum):
    """Which keys a query sees; its own position is that of the last key for the last query."""

    FULL = "full"
    CAUSAL = "causal"  # keys up to its own position
    SLIDING_WINDOW = "sliding_window"  # the sliding_window_size keys that end with its own position
    LOCAL = "local"  # keys less than sliding_window_size away, on both sides
    PREFIX_LM = "prefix_lm"  # causal, and the first prefix_length keys


@dataclasses.dataclass
class AttentionConfig:
    """Of one attention layer.

    Args:
        embed_dim: features in and out.
        head_dim: of one head; embed_dim / num_heads where not given.
        kv_heads: heads of keys and values, a divisor of num_heads: grouped-query attention. None: num_heads.
        pattern: an AttentionPatterns or its name; `causal=True` is pattern "causal" said otherwise.
        sliding_window_size: of the patterns "sliding_window" and "local".
        prefix_length: of the pattern "prefix_lm".
        soft_cap: scores become soft_cap * tanh(score / soft_cap).
        alibi: a linear bias by distance, of the slopes that Press et al. give their heads.
        attention_dropout: probability, in training, of dropping an attention weight.
        bias: of the four projections.
    """

    embed_dim: int
    num_heads: int
    head_dim: int | None = None
    kv_heads: int | None = None
    pattern: AttentionPatterns | str = AttentionPatterns.FULL
    causal: bool = False
    sliding_window_size: int | None = None
    prefix_length: int | None = None
    soft_cap: float | None = None
    alibi: bool = False
    attention_dropout: float = 0.0
    bias: bool = False

    def __post_init__(self) -> None:
        self.pattern = _pattern(self.pattern)
        if self.causal and self.pattern is AttentionPatterns.FULL:
            self.pattern = AttentionPatterns.CAUSAL
        self.causal = self.pattern not in (AttentionPatterns.FULL, AttentionPatterns.LOCAL)
        self.head_dim = _head_dim(self.embed_dim, self.num_heads, self.head_dim)
        self.kv_heads = self.num_heads if self.kv_heads is None else self.kv_heads
        if self.kv_heads < 1 or self.num_heads % self.kv_heads:
            raise ValueError(
                f"AttentionConfig: num_heads is {self.num_heads}, kv_heads {self.kv_heads}; use a divisor of num_heads"
            )
        self._check_needed("sliding_window_size", (AttentionPatterns.SLIDING_WINDOW, AttentionPatterns.LOCAL))
        self._check_needed("prefix_length", (AttentionPatterns.PREFIX_LM,))
        check_probability("AttentionConfig", self.attention_dropout, "attention_dropout")

    def _check_needed(self, field: str, patterns: tuple[AttentionPatterns, ...]) -> None:
        size = getattr(self, field)
        if self.pattern in patterns and (size is None or size < 1):
            raise ValueError(
                f"AttentionConfig: pattern {_pattern(self.pattern).value!r} needs {field}, not {size}; give 1 or more"
            )

    def to_dict(self) -> dict[str, Any]:
        """Plain values, from which from_dict makes the same config."""
        fields = dataclasses.asdict(self)
        fields["pattern"] = _pattern(self.pattern).value
        return fields

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> AttentionConfig:
        return cls(**fields)


def _pattern(pattern: AttentionPatterns | str) -> AttentionPatterns:
    try:
        return AttentionPatterns(pattern)
    except ValueError:
        known = ", ".join(p.value for p in AttentionPatterns)
        raise ValueError(f"AttentionConfig: pattern is {pattern!r}; use one of {known}") from None


def _head_dim(embed_dim: int, num_heads: int, head_dim: int | None) -> int:
    if num_heads < 1:
        raise ValueError(f"AttentionConfig: num_heads is {num_heads}; use 1 or more")
    if head_dim is not None:
        return head_dim
    if embed_dim % num_heads:
        raise ValueError(
            f"AttentionConfig: embed_dim is {embed_dim}, which {num_heads} heads cannot share;"
            " use a multiple of it, or give head_dim"
        )
    return embed_dim // num_heads
