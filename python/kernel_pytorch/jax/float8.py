"""FP8 codes with scales, and products of them. Rounding has no derivative: a layer says what stands in for it."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ._call import Array, call, name_of_dtype, parameter_for, seed_words

_GRANULARITIES = ("tensor", "row", "1x128", "128x128")
_FORMATS = (jnp.float8_e4m3fn, jnp.float8_e5m2)


class Quantized(NamedTuple):
    """What `quantize` gives: codes [rows, columns], transposed codes [columns, rows], and the scales of both.

    What was not asked for is None. value = scale * code. amax and found_nonfinite are those given, updated.
    """

    codes: Array | None
    transposed: Array | None
    scales: Array
    transposed_scales: Array | None
    amax: Array | None = None
    found_nonfinite: Array | None = None


class QuantizedNorm(NamedTuple):
    """Codes of the output, the output itself where asked for, x + residual where there was one, and rstd [rows]."""

    quantized: Quantized
    output: Array | None
    sum: Array | None
    rstd: Array


class QuantizedGate(NamedTuple):
    """Codes of the output, and the output itself where asked for."""

    quantized: Quantized
    output: Array | None


def quantize(
    x: Array,
    *,
    dtype: Any = jnp.float8_e4m3fn,
    granularity: str = "tensor",
    scale: Array | None = None,
    margin: int = 0,
    power_of_two: bool = False,
    seed: Any = None,
    amax: Array | None = None,
    found_nonfinite: Array | None = None,
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
        amax: fp32, one element, raised to the largest finite magnitude; found_nonfinite: fp32, one element, set to 1
            where x has an infinity or a NaN. Both are returned.
        codes, transposed: which of the two to make.
        square_transpose: with 1x128 blocks, the transposed codes have 128x128 ones.
    """
    x = jnp.asarray(x)
    if x.ndim != 2:
        raise ValueError(f"quantize: x has shape {list(x.shape)}; it must be [rows, columns]")
    options = {
        "dtype": dtype,
        "granularity": granularity,
        "scale": scale,
        "margin": margin,
        "power_of_two": power_of_two,
        "seed": seed,
        "amax": amax,
        "found_nonfinite": found_nonfinite,
        "codes": codes,
        "transposed": transposed,
        "square_transpose": square_transpose,
    }
    return _quantized("quantize", "quantize_", {"x": x}, x.shape[1], {}, {}, **options)[0]


def rms_norm_quantized(
    x: Array,
    weight: Array | None = None,
    eps: float = 1e-6,
    *,
    residual: Array | None = None,
    weight_offset: float = 0.0,
    with_output: bool = False,
    **options: Any,
) -> QuantizedNorm:
    """`quantize` of `rms_norm(x, weight, eps, residual=residual)`, x [rows, columns]; `options` are quantize's."""
    x = _matrix("rms_norm_quantized", x)
    like = jax.ShapeDtypeStruct(x.shape, x.dtype)
    written = {"rstd": jax.ShapeDtypeStruct((x.shape[0],), jnp.float32)}
    written |= {"value": like} if with_output else {}
    written |= {"sum": like} if residual is not None else {}
    tensors = {"x": x, "residual": None if residual is None else jnp.asarray(residual, x.dtype)}
    tensors["weight"] = parameter_for(x, weight)
    more = {"source": "norm", "eps": float(eps), "weight_offset": float(weight_offset)}
    made, others = _quantized("rms_norm_quantized", "quantize_produced_", tensors, x.shape[1], written, more, **options)
    return QuantizedNorm(made, others.get("value"), others.get("sum"), others["rstd"])


def gated_activation_quantized(
    gate: Array, up: Array, kind: str = "silu", *, with_output: bool = False, **options: Any
) -> QuantizedGate:
    """`quantize` of `gated_activation(gate, up, kind)`, both [rows, columns]; `options` are quantize's."""
    gate = _matrix("gated_activation_quantized", gate)
    tensors = {"x": gate, "up": jnp.asarray(up, gate.dtype)}
    return _quantized_gate("gated_activation_quantized", tensors, gate.shape[1], "gate", kind, with_output, options)


def gated_activation_backward_quantized(
    grad_output: Array, gate: Array, up: Array, kind: str = "silu", *, with_output: bool = False, **options: Any
) -> QuantizedGate:
    """`quantize` of the gradients of `gated_activation`, that of the gate before that of up: [rows, 2 columns]."""
    name = "gated_activation_backward_quantized"
    gate = _matrix(name, gate)
    tensors = {"x": gate, "up": jnp.asarray(up, gate.dtype), "grad_output": jnp.asarray(grad_output, gate.dtype)}
    return _quantized_gate(name, tensors, 2 * gate.shape[1], "gate_gradient", kind, with_output, options)


def dequantize(codes: Array, scales: Array, dtype: Any = jnp.float32) -> Array:
    """scale * code: scales with one element, one per row, or of 1x128 or 128x128 blocks, as quantize gives them."""
    codes, scales = jnp.asarray(codes), jnp.asarray(scales)
    values = codes.astype(jnp.float32)
    if scales.size == 1:
        return (values * scales.reshape(())).astype(dtype)
    rows, columns = codes.shape if codes.ndim == 2 else (0, 0)
    blocks, groups = -(-columns // 128), -(-rows // 128)
    known = [(rows,), (rows, 1), (rows, blocks), (groups, blocks)]
    if codes.ndim != 2 or scales.shape not in known:
        raise ValueError(
            f"dequantize: codes have shape {list(codes.shape)}, scales {list(scales.shape)}; scales are one, one per "
            "row, or of 1x128 or 128x128 blocks of a matrix"
        )
    spread = scales.reshape(-1, 1) if scales.ndim == 1 else scales
    if spread.shape[1] > 1:
        spread = jnp.repeat(spread, 128, 1)[:, :columns]
    if spread.shape[0] != rows:
        spread = jnp.repeat(spread, 128, 0)[:rows]
    return (values * spread).astype(dtype)


def _matrix(name: str, x: Any) -> Array:
    x = jnp.asarray(x)
    if x.ndim != 2:
        raise ValueError(f"{name}: its first tensor has shape {list(x.shape)}; it must be [rows, columns]")
    return x  # type: ignore[no-any-return]


def _quantized_gate(
    name: str, tensors: Any, columns: int, source: str, kind: str, with_output: bool, options: Any
) -> QuantizedGate:
    gate = tensors["x"]
    written = {"value": jax.ShapeDtypeStruct((gate.shape[0], columns), gate.dtype)} if with_output else {}
    more = {"source": source, "kind": kind}
    made, others = _quantized(name, "quantize_produced_", tensors, columns, written, more, **options)
    return QuantizedGate(made, others.get("value"))


def _quantized(
    name: str,
    op: str,
    tensors: Any,
    columns: int,
    written: Any,
    more: Any,
    *,
    dtype: Any = jnp.float8_e4m3fn,
    granularity: str = "tensor",
    scale: Any = None,
    margin: int = 0,
    power_of_two: bool = False,
    seed: Any = None,
    amax: Any = None,
    found_nonfinite: Any = None,
    codes: bool = True,
    transposed: bool = False,
    square_transpose: bool = False,
) -> tuple[Quantized, dict[str, Any]]:
    if jnp.dtype(dtype) not in [jnp.dtype(one) for one in _FORMATS]:
        raise ValueError(f"{name}: dtype is {jnp.dtype(dtype)}; it must be float8_e4m3fn or float8_e5m2")
    if granularity not in _GRANULARITIES:
        raise ValueError(f'{name}: granularity is "{granularity}"; it is one of {", ".join(_GRANULARITIES)}')
    rows = tensors["x"].shape[0]
    has_own = granularity in ("row", "1x128")
    written = dict(written)
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
        raise ValueError(f"{name}: neither codes nor transposed codes nor scales are asked for")
    tensors = {
        **tensors,
        "scale": None if scale is None else jnp.asarray(scale, jnp.float32),
        "amax": None if amax is None else jnp.asarray(amax, jnp.float32),
        "found_nonfinite": None if found_nonfinite is None else jnp.asarray(found_nonfinite, jnp.float32),
        "seed": None if seed is None else seed_words(name, seed),
    }
    options = {
        **more,
        "granularity": granularity,
        "margin": int(margin),
        "power_of_two": bool(power_of_two),
        "square_transpose": bool(square_transpose),
    }
    made = call(op, tensors, options, written=written)
    own = made.get("scales")
    known = jnp.asarray(scale, jnp.float32) if own is None else own
    across_scales = made.get("transposed_scales")
    if transposed and not has_own:
        across_scales = known.T if known.ndim == 2 else known
    names = ("amax", "found_nonfinite")
    found = Quantized(
        made.get("codes"), made.get("transposed"), known, across_scales, *(made.get(one) for one in names)
    )
    return found, made


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


def scaled_grouped_matmul(
    x: Array,
    weight: Array,
    scale_x: Array,
    scale_weight: Array,
    offsets: Array,
    *,
    bias: Array | None = None,
    gather: Array | None = None,
    dtype: Any = jnp.bfloat16,
    accurate: bool = True,
) -> Array:
    """`grouped_matmul` of FP8 codes x [rows, k] and weight [groups, n, k], with their scales; it has no gradient.

    Args:
        scale_x: fp32: one element, one per row of x, or [rows, ceil(k / 128)] for 1x128 blocks.
        scale_weight: fp32: one element, [groups], [groups, n], [groups, n, ceil(k / 128)] for 1x128 blocks, or [groups,
            ceil(n / 128), ceil(k / 128)] for 128x128.
        offsets, gather, bias: as in `grouped_matmul`; dtype, accurate: as in `scaled_matmul`.
    """
    offsets = jnp.asarray(offsets)
    tensors = {
        "a": x,
        "b": weight,
        "scale_a": scale_x,
        "scale_b": scale_weight,
        "offsets": (offsets[1:] if offsets.shape == (weight.shape[0] + 1,) else offsets).astype(jnp.int32),
        "gather": None if gather is None else jnp.asarray(gather).astype(jnp.int32),
        "bias": bias,
    }
    rows = x.shape[0] if gather is None else gather.shape[0]
    options = {"dtype": name_of_dtype(dtype), "accurate": bool(accurate), "rows": rows}
    return call("scaled_grouped_matmul", tensors, options)["output"]  # type: ignore[no-any-return]


def _scales(granularity: str, rows: int, columns: int) -> jax.ShapeDtypeStruct:
    shapes = {
        "tensor": (1, 1),
        "row": (rows, 1),
        "1x128": (rows, -(-columns // 128)),
        "128x128": (-(-rows // 128), -(-columns // 128)),
    }
    return jax.ShapeDtypeStruct(shapes[granularity], jnp.float32)
