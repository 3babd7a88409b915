"""FP8AttentionConfig, by the name that code written for other libraries asks for. Attention has no FP8 kernel here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(init=False)
class FP8AttentionConfig:
    """Attention outside FP8: what there is. Asking for FP8 in it is refused, and so is what would choose its kernels.

    Args:
        use_fp8: False; True is refused.
        fp8_format: "e4m3" or "e5m2", of no effect while use_fp8 is False.
        unknown: refused. Kernels are chosen for the device and the problem, not by a configuration.
    """

    use_fp8: bool
    fp8_format: str

    def __init__(self, use_fp8: bool = False, fp8_format: str = "e4m3", **unknown: Any) -> None:
        if use_fp8:
            raise ValueError(
                "FP8AttentionConfig: use_fp8 is True; attention has no FP8 kernel here and runs in bf16, fp16 or fp32. "
                "precision.convert_model_to_fp8 trains the projections around it in FP8"
            )
        if fp8_format not in ("e4m3", "e5m2"):
            raise ValueError(f"FP8AttentionConfig: fp8_format is {fp8_format!r}; it must be e4m3 or e5m2")
        if unknown:
            raise ValueError(
                f"FP8AttentionConfig: {', '.join(unknown)} would have no effect: the kernel of an attention call is "
                "chosen for its device, type and shape; leave it out"
            )
        self.use_fp8, self.fp8_format = use_fp8, fp8_format
