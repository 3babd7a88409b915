"""FP8 codes and products of them. No graphs here: rounding has no derivative, and the layers (kernel_pytorch/precision)
say what stands in for it.
"""

from __future__ import annotations

from typing import Any, NamedTuple, overload

import torch
from torch import Tensor

from .grouped_matmul import ends_of
from .quantized_matmul import QuantizedWeight, quantize_weight
from .support.declare import without_gradient
from .support.seed import seed_for

GRANULARITIES = ("tensor", "row", "1x128", "128x128")
_FORMATS = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
_OUTPUT_TYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", **_FORMATS}


class Quantized(NamedTuple):
    """What quantize gives: codes [rows, columns], transposed codes [columns, rows], and the scales of both.

    What was not asked for is None. value = scale * code; transposed_scales are laid out for the transposed codes.
    """

    codes: Tensor | None
    transposed: Tensor | None
    scales: Tensor
    transposed_scales: Tensor | None


@overload
def quantize(
    x: Tensor, format: str, *, group: int | None = ..., stochastic: bool = ..., seed: Tensor | None = ...
) -> QuantizedWeight: ...
@overload
def quantize(
    x: Tensor, format: None = ..., *, group: None = ..., stochastic: bool = ..., dtype: torch.dtype = ...,
    granularity: str = ..., scale: Tensor | None = ..., margin: int = ..., power_of_two: bool = ...,
    seed: Tensor | None = ..., amax: Tensor | None = ..., found_nonfinite: Tensor | None = ..., codes: bool = ...,
    transposed: bool = ..., square_transpose: bool = ...,
) -> Quantized: ...  # fmt: skip
def quantize(
    x: Tensor,
    format: str | None = None,
    *,
    group: int | None = None,
    stochastic: bool = False,
    dtype: torch.dtype = torch.float8_e4m3fn,
    granularity: str = "tensor",
    scale: Tensor | None = None,
    margin: int = 0,
    power_of_two: bool = False,
    seed: Tensor | None = None,
    amax: Tensor | None = None,
    found_nonfinite: Tensor | None = None,
    codes: bool = True,
    transposed: bool = False,
    square_transpose: bool = False,
) -> Quantized | QuantizedWeight:
    """x [rows, columns] as FP8 codes with scales, in one visit (two where the scale of the whole is measured); with a
    format in few bits, what `quantize_weight` gives.

    Args:
        x: fp32, bf16 or fp16, any strides.
        format: as quantize_weight takes it, "nvfp4" or "int4" and so on; None for FP8, which the options after
            `stochastic` are for.
        group: columns that share a scale, of integers: 32, 64 or 128.
        stochastic: draws a seed where none is given.
        dtype: torch.float8_e4m3fn or torch.float8_e5m2.
        granularity: of the scales: "tensor", "row", "1x128" or "128x128" blocks.
        scale: fp32, one element: the scale to use, instead of that of x (granularity "tensor").
        margin: scales are 2^margin larger than needed.
        power_of_two: scales are rounded up to powers of two.
        seed: int64[2], for stochastic rounding; None rounds to nearest even.
        amax: fp32, one element, raised to the largest finite magnitude.
        found_nonfinite: fp32, one element, set to 1 where x has an infinity or a NaN.
        codes, transposed: which of the two to make.
        square_transpose: with 1x128 blocks, the transposed codes have 128x128 ones.
    """
    if stochastic:
        seed = seed_for(x, seed)
    if format is not None:
        return quantize_weight(x, format, group=group, seed=seed)
    if group is not None:
        raise ValueError(f"quantize: group is {group} without a format; FP8 has a granularity instead")
    if x.dim() != 2:
        raise ValueError(f"quantize: x has shape {tuple(x.shape)}; it must be [rows, columns]")
    outs = OutputBuffers(x, x.shape[0], x.shape[1], dtype, granularity, scale, codes, transposed, square_transpose)
    _quantize(
        x.detach(), scale, seed, outs.codes, outs.transposed, outs.scales, outs.transposed_scales, amax,
        found_nonfinite, granularity, margin, power_of_two, square_transpose,
    )  # fmt: skip
    return outs.result()


class OutputBuffers:
    """What a quantisation of [rows, columns] writes into. `like` says where; the rest is as for `quantize`."""

    def __init__(
        self, like: Tensor, rows: Any, columns: Any, dtype: torch.dtype, granularity: str, scale: Tensor | None,
        codes: bool, transposed: bool, square_transpose: bool,
    ) -> None:  # fmt: skip
        if dtype not in _FORMATS:
            raise ValueError(f"quantize: dtype is {dtype}; it must be torch.float8_e4m3fn or torch.float8_e5m2")
        self._given = scale
        self._has_own = granularity in ("row", "1x128")
        self.codes = _new_codes(like, rows, columns, dtype) if codes else None
        self.transposed = _new_codes(like, columns, rows, dtype) if transposed else None
        self.scales = _new_scales(like, granularity, rows, columns) if scale is None else None
        across = "128x128" if square_transpose else granularity
        has_own = transposed and self._has_own
        self.transposed_scales = _new_scales(like, across, columns, rows) if has_own else None

    def result(self) -> Quantized:
        known = self.scales if self.scales is not None else self._given
        assert known is not None
        shared = known.t() if known.dim() == 2 else known
        own = self.transposed_scales if self._has_own else shared if self.transposed is not None else None
        return Quantized(self.codes, self.transposed, known, own)


def scaled_matmul(
    a: Tensor | None,
    b: Tensor | None,
    scale_a: Tensor | None,
    scale_b: Tensor | None,
    *,
    bias: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
    accurate: bool = True,
    output_scale: Tensor | None = None,
) -> Tensor:
    """(scale_a * a) @ (scale_b * b).T + bias for FP8 codes a [m, k] and b [n, k], as [m, n] of dtype.

    Args:
        scale_a, scale_b: fp32: one element; one per row; [rows, ceil(k / 128)] for 1x128 blocks; [ceil(rows / 128),
            ceil(k / 128)] for 128x128. As quantize gives them.
        accurate: sums leave Hopper's FP8 accumulator, which keeps about 14 bits, every 128 of k. Always so elsewhere.
        output_scale: fp32, one element, with an FP8 dtype: what the result is multiplied by before it is rounded.
    """
    if dtype not in _OUTPUT_TYPES:
        raise ValueError(f"scaled_matmul: dtype is {dtype}; it must be fp32, bf16, fp16, float8_e4m3fn or float8_e5m2")
    return _scaled_matmul(a, b, scale_a, scale_b, bias, output_scale, _OUTPUT_TYPES[dtype], accurate)  # type: ignore[no-any-return]


def scaled_grouped_matmul(
    x: Tensor,
    weight: Tensor,
    scale_x: Tensor,
    scale_weight: Tensor,
    offsets: Tensor,
    *,
    bias: Tensor | None = None,
    gather: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
    accurate: bool = True,
) -> Tensor:
    """`grouped_matmul` of FP8 codes: row r of scale_x * x times the transposed matrix of r's group, with its scales.

    Args:
        x: [rows, k], or with gather [any, k]; float8_e4m3fn or float8_e5m2, as weight.
        weight: [groups, n, k], as linear layers store theirs.
        scale_x: fp32: one element, one per row of x, or [rows, ceil(k / 128)] for 1x128 blocks.
        scale_weight: fp32: one element, [groups], [groups, n], [groups, n, ceil(k / 128)] for 1x128 blocks, or [groups,
            ceil(n / 128), ceil(k / 128)] for 128x128.
        offsets: [groups], where each group ends, or [groups + 1] with a 0 in front, as in `grouped_matmul`.
        bias: [groups, n], fp32 or of dtype.
        gather: [rows], int32: row r is x[gather[r]], with its scales.
        dtype: fp32, bf16 or fp16.
        accurate: as in `scaled_matmul`.

    Returns:
        [rows, n]; zeros for rows behind the last group. It has no gradient. On GPUs it needs Hopper, rows of codes that
        begin at multiples of 16 bytes, and n in multiples of 16 bytes.
    """
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"scaled_grouped_matmul: dtype is {dtype}; it must be fp32, bf16 or fp16")
    gather = None if gather is None else gather.int()
    rows = x.shape[0] if gather is None else gather.shape[0]
    ends = ends_of(offsets, weight.shape[0])
    name = _OUTPUT_TYPES[dtype]
    return _scaled_grouped(x, weight, scale_x, scale_weight, ends, gather, bias, name, accurate, rows)  # type: ignore[no-any-return]


def dequantize(codes: Tensor, scales: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """scale * code: scales with one element, one per row, or of 1x128 or 128x128 blocks, as quantize gives them."""
    values = codes.to(torch.float32)
    if scales.numel() == 1:
        return (values * scales.reshape(())).to(dtype)
    if codes.dim() != 2 or scales.dim() > 2:
        raise ValueError(
            f"dequantize: codes have shape {tuple(codes.shape)}, scales {tuple(scales.shape)}; "
            "scales of rows and blocks are for matrices"
        )
    rows, columns = codes.shape
    blocks, groups = -(-columns // 128), -(-rows // 128)
    known = [(rows,), (rows, 1), (rows, blocks), (groups, blocks)]
    if tuple(scales.shape) not in known:
        raise ValueError(
            f"dequantize: codes have shape {[rows, columns]}, scales {list(scales.shape)}; scales are one, "
            f"{list(known[0])} (rows), {list(known[2])} (1x128 blocks) or {list(known[3])} (128x128)"
        )
    spread = scales.reshape(-1, 1) if scales.dim() == 1 else scales
    if spread.shape[1] > 1:
        spread = spread.repeat_interleave(128, 1)[:, :columns]
    if spread.shape[0] != rows:
        spread = spread.repeat_interleave(128, 0)[:rows]
    return (values * spread).to(dtype)


def _padded(size: Any, to: int) -> Any:
    return (size + to - 1) // to * to


# Rows begin at multiples of 16 bytes, as the copy engine of a GPU asks.
def _new_codes(x: Tensor, rows: Any, columns: Any, dtype: torch.dtype) -> Tensor:
    return x.new_empty_strided((rows, columns), (_padded(columns, 16), 1), dtype=dtype)


# For 1x128 blocks the scales of adjacent rows are adjacent in memory, and each column of scales is 16-byte aligned.
def _new_scales(x: Tensor, granularity: str, rows: Any, columns: Any) -> Tensor:
    if granularity == "1x128":
        return x.new_empty_strided((rows, (columns + 127) // 128), (1, _padded(rows, 4)), dtype=torch.float32)
    if granularity == "128x128":
        return x.new_empty(((rows + 127) // 128, (columns + 127) // 128), dtype=torch.float32)
    return x.new_empty((rows if granularity == "row" else 1, 1), dtype=torch.float32)


_quantize = without_gradient("quantize_")
_scaled_matmul = without_gradient("scaled_matmul")
_scaled_grouped = without_gradient("scaled_grouped_matmul")
