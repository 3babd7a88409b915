"""FP8 codes with scales, and products of them. Rounding has no derivative: a layer says what stands in for it."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ._arguments import seed_words
from ._call import Array, call, name_of_dtype

_GRANULARITIES = ("tensor", "row", "1x128", "128x128")
_FORMATS = (jnp.float8_e4m3fn, jnp.float8_e5m2)


class Quantized(NamedTuple):
    """What `quantize` gives: codes [rows, columns], transposed codes [columns, rows], and the scales of both.

    What was not asked for is None. value = scale * code.
    """

    codes: Array | None
    transposed: Array | None
    scales: Array
    transposed_scales: Array | None


def quantize(
    x: Array,
    *,
    dtype: Any = jnp.float8_e4m3fn,
    granularity: str = "tensor",
    scale: Array | None = None,
    margin: int = 0,
    power_of_two: bool = False,
    seed: Any = None,
    codes: bool = True,
    transposed: bool = False,
    square_transpose: bool = False,
) -> Quantized:
    """x [rows, columns] as FP8 codes with scales, in one visit (two where the scale of the whole is measured).

    Args:
        x: fp32, bf16 or fp16.
        dtype: float8_e4m3fn or float8_e5m2.
        granularity: of the scales: "tensor", "row", "1x128" or "128x128" blocks.
        scale: fp32, one element: the scale to use, instead of that of x (granularity "tensor").
        margin: scales are 2^margin larger than needed.
        power_of_two: scales are rounded up to powers of two.
        seed: a key of jax.random, for stochastic rounding; None rounds to nearest even.
        codes, transposed: which of the two to make.
        square_transpose: with 1x128 blocks, the transposed codes have 128x128 ones.
    """
    x = jnp.asarray(x)
    if x.ndim != 2:
        raise ValueError(f"quantize: x has shape {list(x.shape)}; it must be [rows, columns]")
    if jnp.dtype(dtype) not in [jnp.dtype(one) for one in _FORMATS]:
        raise ValueError(f"quantize: dtype is {jnp.dtype(dtype)}; it must be float8_e4m3fn or float8_e5m2")
    if granularity not in _GRANULARITIES:
        raise ValueError(f'quantize: granularity is "{granularity}"; it is one of {", ".join(_GRANULARITIES)}')
    rows, columns = x.shape
    has_own = granularity in ("row", "1x128")
    written = {}
    if codes:
        written["codes"] = jax.ShapeDtypeStruct((rows, columns), dtype)
    if transposed:
        written["transposed"] = jax.ShapeDtypeStruct((columns, rows), dtype)
    if scale is None:
        written["scales"] = _scales(granularity, rows, columns)
    if transposed and has_own:
        across = "128x128" if square_transpose else granularity
        written["transposed_scales"] = _scales(across, columns, rows)
    if not written:
        raise ValueError("quantize: neither codes nor transposed codes nor scales are asked for")
    tensors = {
        "x": x,
        "scale": None if scale is None else jnp.asarray(scale, jnp.float32),
        "seed": None if seed is None else seed_words("quantize", seed),
    }
    options = {
        "granularity": granularity,
        "margin": int(margin),
        "power_of_two": bool(power_of_two),
        "square_transpose": bool(square_transpose),
    }
    made = call("quantize_", tensors, options, written=written)
    own = made.get("scales")
    known = jnp.asarray(scale, jnp.float32) if own is None else own
    across_scales = made.get("transposed_scales")
    if transposed and not has_own:
        across_scales = known.T if known.ndim == 2 else known
    return Quantized(made.get("codes"), made.get("transposed"), known, across_scales)


def scaled_matmul(
    a: Array,
    b: Array,
    scale_a: Array,
    scale_b: Array,
    *,
    bias: Array | None = None,
    dtype: Any = jnp.bfloat16,
    accurate: bool = True,
    output_scale: Array | None = None,
) -> Array:
    """(scale_a * a) @ (scale_b * b).T + bias for FP8 codes a [m, k] and b [n, k], as [m, n] of dtype.

    Args:
        scale_a, scale_b: fp32, as `quantize` gives them: of the whole, of rows, of 1x128 or of 128x128 blocks.
        accurate: sums leave Hopper's FP8 accumulator, which keeps about 14 bits, every 128 of k. Always so elsewhere.
        output_scale: fp32, one element, with an FP8 dtype: what the result is multiplied by before it is rounded.
    """
    tensors = {
        "a": a,
        "b": b,
        "scale_a": scale_a,
        "scale_b": scale_b,
        "bias": bias,
        "output_scale": output_scale,
    }
    return call("scaled_matmul", tensors, {"dtype": name_of_dtype(dtype), "accurate": bool(accurate)})["output"]  # type: ignore[no-any-return]


def _scales(granularity: str, rows: int, columns: int) -> jax.ShapeDtypeStruct:
    shapes = {
        "tensor": (1, 1),
        "row": (rows, 1),
        "1x128": (rows, -(-columns // 128)),
        "128x128": (-(-rows // 128), -(-columns // 128)),
    }
    return jax.ShapeDtypeStruct(shapes[granularity], jnp.float32)
