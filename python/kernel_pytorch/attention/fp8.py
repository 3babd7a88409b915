"""FP8AttentionConfig: whether, and from which length on, a layer's attention multiplies in FP8."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(init=False)
class FP8AttentionConfig:
    """Attention in FP8 (`functional.attention_fp8`), for layers by AttentionConfig(fp8_config=...).

    A layer multiplies in FP8 where a call needs no gradient, has as many keys, and asks for nothing but causal and
    window: attention_fp8 has no more. Other calls run as without it.

    Args:
        use_fp8: False changes nothing.
        fp8_format: "e4m3", of both products. "e5m2" has a bit less, and no kernel: refused with use_fp8.
        sequence_length_threshold: keys from which on it pays.
        rotate: incoherent processing: outliers of queries and keys are spread before they are rounded.
        unknown: refused. Kernels are chosen for the device and the problem, not by a configuration.
    """

    use_fp8: bool
    fp8_format: str
    sequence_length_threshold: int
    rotate: bool

    def __init__(
        self, use_fp8: bool = False, fp8_format: str = "e4m3", sequence_length_threshold: int = 8192,
        rotate: bool = False, **unknown: Any,
    ) -> None:  # fmt: skip
        if fp8_format not in ("e4m3", "e5m2"):
            raise ValueError(f"FP8AttentionConfig: fp8_format is {fp8_format!r}; it must be e4m3 or e5m2")
        if use_fp8 and fp8_format != "e4m3":
            raise ValueError("FP8AttentionConfig: fp8_format is 'e5m2'; attention multiplies in e4m3, use that")
        if sequence_length_threshold < 0:
            raise ValueError(
                f"FP8AttentionConfig: sequence_length_threshold is {sequence_length_threshold}; give 0 or more"
            )
        if unknown:
            raise ValueError(
                f"FP8AttentionConfig: {', '.join(unknown)} would have no effect: the kernel of an attention call is "
                "chosen for its device, type and shape; leave it out"
            )
        self.use_fp8, self.fp8_format = use_fp8, fp8_format
        self.sequence_length_threshold, self.rotate = sequence_length_threshold, rotate
