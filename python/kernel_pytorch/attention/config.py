"""What an attention layer is made from: sizes, who sees whom, and what is done to scores."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any

from ..core._checks import check_probability
from ..core._names import SIZES, accepts_names, check_known, renamed
from .fp8 import FP8AttentionConfig


class AttentionPatterns(enum.Enum):
    """Which keys a query sees; its own position is that of the last key for the last query."""

    FULL = "full"
    CAUSAL = "causal"  # keys up to its own position
    SLIDING_WINDOW = "sliding_window"  # the sliding_window_size keys that end with its own position
    LOCAL = "local"  # keys less than sliding_window_size away, on both sides; with causal=True up to its own position
    PREFIX_LM = "prefix_lm"  # causal, and the first prefix_length keys


# Further names of `pattern`, and the fields that they stand for.
_NAMED_PATTERNS: dict[str, dict[str, Any]] = {
    "standard": {"pattern": "full"},
    "alibi": {"pattern": "causal", "alibi": True},
    "soft_cap": {"pattern": "full", "soft_cap": 50.0},
}


@accepts_names(**SIZES)
@dataclasses.dataclass
class AttentionConfig:
    """The settings of one attention layer.

    Args:
        embed_dim: features in and out; also by the name d_model.
        num_heads: also by the name n_heads.
        head_dim: of one head; embed_dim / num_heads where not given.
        kv_heads: heads of keys and values, a divisor of num_heads: grouped-query attention. None: num_heads.
        pattern: an AttentionPatterns or its name; "alibi" is causal with ALiBi, "soft_cap" full with a soft cap of 50.
        causal: a query sees no key after its own position, whatever the pattern.
        sliding_window_size: of the patterns "sliding_window" and "local". With pattern "full" it makes the pattern
            "local", with "causal" (or causal=True) "sliding_window".
        prefix_length: of the pattern "prefix_lm".
        soft_cap: scores become soft_cap * tanh(score / soft_cap).
        alibi: a linear bias by distance, of the slopes that Press et al. give their heads.
        attention_dropout: probability, in training, of dropping an attention weight.
        bias: of the four projections.
        use_flash_attention: True computes with this library's kernels; False with plain torch operations and the whole
            matrix of scores, which gives the same values and has derivatives of every order.
        implementation: which layer create_attention makes; None: FlashAttention3, or FlexAttentionLayer for mods.
        fp8_config: an FP8AttentionConfig, or its fields: calls that it names multiply in FP8.
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
    use_flash_attention: bool = True
    implementation: str | None = None
    fp8_config: FP8AttentionConfig | None = None

    def __post_init__(self) -> None:
        if isinstance(self.fp8_config, Mapping):
            self.fp8_config = FP8AttentionConfig(**self.fp8_config)
        if isinstance(self.pattern, str) and self.pattern in _NAMED_PATTERNS:
            self._take_named_pattern(_NAMED_PATTERNS[self.pattern])
        self.pattern = self._with_window(_pattern(self.pattern))
        is_two_sided = self.pattern in (AttentionPatterns.FULL, AttentionPatterns.LOCAL)
        self.causal = self.causal or not is_two_sided
        self.head_dim = _head_dim(self.embed_dim, self.num_heads, self.head_dim)
        self.kv_heads = self.num_heads if self.kv_heads is None else self.kv_heads
        if self.kv_heads < 1 or self.num_heads % self.kv_heads:
            raise ValueError(
                f"AttentionConfig: num_heads is {self.num_heads}, kv_heads {self.kv_heads}; use a divisor of num_heads"
            )
        self._check_needed("sliding_window_size", (AttentionPatterns.SLIDING_WINDOW, AttentionPatterns.LOCAL))
        self._check_needed("prefix_length", (AttentionPatterns.PREFIX_LM,))
        check_probability("AttentionConfig", self.attention_dropout, "attention_dropout")

    def _take_named_pattern(self, fields: Mapping[str, Any]) -> None:
        for name, value in fields.items():
            if name == "pattern" or not getattr(self, name):  # a soft_cap that was given stays
                setattr(self, name, value)

    def _with_window(self, pattern: AttentionPatterns) -> AttentionPatterns:
        """The pattern that causal and sliding_window_size make of it."""
        if pattern is AttentionPatterns.FULL and self.causal:
            pattern = AttentionPatterns.CAUSAL
        if self.sliding_window_size is None:
            return pattern
        windows = {
            AttentionPatterns.FULL: AttentionPatterns.LOCAL,
            AttentionPatterns.CAUSAL: AttentionPatterns.SLIDING_WINDOW,
        }
        return windows.get(pattern, pattern)

    def _check_needed(self, field: str, patterns: tuple[AttentionPatterns, ...]) -> None:
        size, pattern = getattr(self, field), _pattern(self.pattern)
        if pattern in patterns and (size is None or size < 1):
            raise ValueError(f"AttentionConfig: pattern {pattern.value!r} needs {field}, not {size}; give 1 or more")
        if pattern not in patterns and size is not None:
            those = " or ".join(repr(one.value) for one in patterns)
            raise ValueError(
                f"AttentionConfig: {field} is {size}, and pattern {pattern.value!r} has none; give pattern {those}, or "
                f"leave {field} out"
            )

    def to_dict(self) -> dict[str, Any]:
        """Plain values, from which from_dict makes the same config."""
        fields = dataclasses.asdict(self)
        fields["pattern"] = _pattern(self.pattern).value
        return fields

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> AttentionConfig:
        return cls(**fields)


FIELDS = tuple(field.name for field in dataclasses.fields(AttentionConfig))


def config_of(
    call: str,
    config: AttentionConfig | int | None,
    num_heads: int | None,
    fields: Mapping[str, Any],
    others: tuple[str, ...] = (),
) -> AttentionConfig:
    """The config that a call was given, or the one of embed_dim, num_heads and fields by name.

    `others` are what else the call takes by name: a misspelt one is among the fields.
    """
    fields = renamed(call, fields, SIZES)
    check_known(call, [name for name in fields if name not in FIELDS], (*FIELDS, *others))
    if num_heads is not None:
        fields = {"num_heads": num_heads, **fields}
    if isinstance(config, AttentionConfig):
        if fields:
            raise TypeError(f"{call}: {', '.join(fields)} belongs into the AttentionConfig that was given")
        return config
    if config is not None:
        if not isinstance(config, int):
            raise TypeError(f"{call}: config is {config!r}; give an AttentionConfig, or embed_dim and num_heads")
        if "embed_dim" in fields:
            raise TypeError(f"{call}: embed_dim is given twice, {config} and {fields['embed_dim']}; give it once")
        fields = {"embed_dim": config, **fields}
    if "embed_dim" not in fields or "num_heads" not in fields:
        raise TypeError(f"{call}: give an AttentionConfig, or embed_dim and num_heads")
    return AttentionConfig(**fields)


def _pattern(pattern: AttentionPatterns | str) -> AttentionPatterns:
    try:
        return AttentionPatterns(pattern)
    except ValueError:
        known = ", ".join([*(p.value for p in AttentionPatterns), *_NAMED_PATTERNS])
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
