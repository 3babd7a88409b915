"""Weights in few bits or with two of each four kept, and products with them. Rounding and pruning have no derivative;
those of x and the bias exist.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from ._call import Array, call, name_of_dtype, parameter_for, seed_words
from ._gradients import differentiable
from .pointwise import activation as _activation
from .products import linear

# By format: sizes of groups, the usual one first; bits of a code.
_FORMATS = {
    "nvfp4": ((16,), 4),
    "mxfp4": ((32,), 4),
    "mxfp8": ((32,), 8),
    **{f"int{bits}": ((128, 64, 32), bits) for bits in (4, 8, 2, 3, 5, 6)},
}
_SCALE_TYPES = {"nvfp4": jnp.float8_e4m3fn, "mxfp4": jnp.int8, "mxfp8": jnp.int8}  # others: the weight's


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class QuantizedWeight:
    """A matrix in few bits: int8 arrays hold bytes. A pytree, whose format, group and columns are static.

    Attributes:
        codes: [rows, ceil(columns * bits / 8)]: the codes of a row behind each other, lowest bits first.
        scales: [rows, ceil(columns / group)]: float8_e4m3fn (nvfp4), E8M0's bytes (mxfp4, mxfp8), else floats.
        zeros: bytes, for asymmetric integers, or None; tensor_scale: fp32, one element (nvfp4), or None.
        columns: None: as many as the bytes of a row hold.
    """

    codes: Array
    scales: Array
    zeros: Array | None
    tensor_scale: Array | None
    format: str = field(metadata={"static": True})
    group: int = field(metadata={"static": True})
    columns: int | None = field(default=None, metadata={"static": True})

    @property
    def held_columns(self) -> int:
        """As many as the bytes of a row hold."""
        return self.codes.shape[1] * 8 // _FORMATS[self.format][1]

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.held_columns if self.columns is None else self.columns

    def dequantize(self, dtype: Any = jnp.bfloat16) -> Array:
        return dequantize_weight(self, dtype)


def quantize_weight(
    weight: Array,
    format: str = "nvfp4",
    *,
    group: int | None = None,
    asymmetric: bool = False,
    tensor_scale: Array | None = None,
    seed: Any = None,
) -> QuantizedWeight:
    """A weight [rows, columns] in few bits.

    Args:
        weight: fp32, bf16 or fp16.
        format: "nvfp4", "mxfp4", "mxfp8", or "int2", "int3", "int4", "int5", "int6", "int8".
        group: 32, 64 or 128 (the default) for integers; the others have one size.
        asymmetric: integers: a zero for each group.
        tensor_scale: nvfp4: fp32, one element; None takes the smallest power of two with which no scale saturates.
        seed: a key of jax.random, for stochastic rounding; None rounds to nearest even.
    """
    if format not in _FORMATS:
        raise ValueError(f'quantize_weight: format is "{format}"; it is one of {", ".join(_FORMATS)}')
    groups, _ = _FORMATS[format]
    weight = jax.lax.stop_gradient(jnp.asarray(weight))
    if weight.ndim != 2:
        raise ValueError(f"quantize_weight: weight has shape {list(weight.shape)}; it must be [rows, columns]")
    if format == "nvfp4" and tensor_scale is None:
        tensor_scale = _tensor_scale(weight)
    group = groups[0] if group is None else group
    tensors = {
        "x": weight,
        "tensor_scale": tensor_scale,
        "seed": None if seed is None else seed_words("quantize_weight", seed),
    }
    options = {"format": format, "group": group, "bytes": -(-weight.shape[1] * _FORMATS[format][1] // 8)}
    made = call(
        "group_quantize", tensors, options, wanted=("asymmetric",) if asymmetric else (),
        types={"scales_dtype": _SCALE_TYPES.get(format, weight.dtype)},
    )  # fmt: skip
    return QuantizedWeight(
        made["codes"], made["scales"], made.get("zeros"), tensor_scale, format, group, weight.shape[1]
    )


def dequantize_weight(weight: QuantizedWeight, dtype: Any = jnp.bfloat16) -> Array:
    """The values of a quantised weight as fp32, bf16, fp16 or float8_e4m3fn (saturated)."""
    options = {
        "format": weight.format,
        "group": weight.group,
        "columns": weight.shape[1],
        "dtype": name_of_dtype(dtype),
    }
    return call("group_dequantize", tensors_of(weight), options)["output"]  # type: ignore[no-any-return]


def quantized_matmul(
    x: Array, weight: QuantizedWeight, *, bias: Array | None = None, activation: str | None = None
) -> Array:
    """activation(x @ weight.T + bias) with a weight that is decoded on its way to the multipliers.

    Args:
        x: [..., columns of the weight]; fp32, bf16 or fp16.
        bias: [rows of the weight].
        activation: a name that `activation` takes, or None. Its gradient computes the product again.
    """
    x = jnp.asarray(x)
    if x.ndim == 0 or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"quantized_matmul: x has shape {list(x.shape)}, the weight has {list(weight.shape)}; "
            "their last sizes must be equal"
        )
    if missing := weight.held_columns - weight.shape[1]:  # the gradient knows a row's bytes alone
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)])
    tensors = {"x": x, **tensors_of(weight), "bias": None if bias is None else parameter_for(x, bias)}
    if weight.format.startswith("int"):
        tensors["scales"] = tensors["scales"].astype(x.dtype)
    options = {"format": weight.format, "group": weight.group, "activation": activation or "identity"}
    saves = [name for name in ("x", "codes", "scales", "zeros", "tensor_scale", "bias") if tensors[name] is not None]
    return differentiable("quantized_matmul", tensors, options, _gradient, saves=saves)[0]  # type: ignore[no-any-return]


def int8_matmul(
    x: Array,
    weight: Array,
    scale_weight: Array,
    *,
    scale_x: Array | None = None,
    bias: Array | None = None,
    activation: str | None = None,
    dtype: Any = None,
) -> Array:
    """activation(scales * (x @ weight.T) + bias) of 8-bit integers, whose products are summed exactly in int32.

    Args:
        x: [..., k]: fp32, bf16 or fp16, rounded to 8 bits on its way with a scale for each row; or int8 with scale_x.
        weight: [rows, k], int8.
        scale_weight: fp32: [rows], [rows, 1], or [rows, ceil(k / group)] with groups of 32, 64 or 128 columns.
        scale_x: fp32, of x's shape less the last dimension; with codes, and only then.
        bias: [rows].
        activation: a name that `activation` takes, or None. Its gradient computes the product again.
        dtype: of the result; None: x's, of codes bf16. The gradient of x is the one without rounding x.
    """
    x, weight, scales = jnp.asarray(x), jnp.asarray(weight), jnp.asarray(scale_weight, jnp.float32)
    scales = scales[:, None] if scales.ndim == 1 else scales
    if weight.ndim != 2 or weight.dtype != jnp.int8 or x.ndim == 0 or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"int8_matmul: x has shape {list(x.shape)}, weight is {weight.dtype} {list(weight.shape)}; it must be int8 "
            "[rows, k] with x's last size"
        )
    if (x.dtype == jnp.int8) != (scale_x is not None):
        raise ValueError(
            f"int8_matmul: x is {x.dtype} and scale_x is {'missing' if scale_x is None else 'given'}; int8 codes need "
            "one scale for each row, other types are rounded with one of their own"
        )
    columns = weight.shape[1]
    sizes = {1: 0} | {-(-columns // g): g for g in (32, 64, 128) if -(-columns // g) > 1}
    if scales.ndim != 2 or scales.shape[0] != weight.shape[0] or scales.shape[1] not in sizes:
        raise ValueError(
            f"int8_matmul: scale_weight has shape {list(scales.shape)}, weight has {list(weight.shape)}; it must be "
            f"[{weight.shape[0]}], or [{weight.shape[0]}, groups] with groups of 32, 64 or 128 columns"
        )
    made = jnp.dtype(dtype) if dtype is not None else jnp.dtype(jnp.bfloat16) if x.dtype == jnp.int8 else x.dtype
    tensors = {
        "x": x, "weight": weight, "scale_weight": scales,
        "scale_x": None if scale_x is None else jnp.asarray(scale_x, jnp.float32),
        "bias": None if bias is None else jnp.asarray(bias, made if bias.dtype != jnp.float32 else jnp.float32),
    }  # fmt: skip
    options = {"group": sizes[scales.shape[1]], "activation": activation or "identity", "dtype": name_of_dtype(made)}
    saves = [name for name, value in tensors.items() if value is not None]
    return differentiable("int8_matmul", tensors, options, _integer_gradient, saves=saves)[0]  # type: ignore[no-any-return]


def _integer_gradient(values: Any, grads: Any, wanted: Any) -> Any:
    x, weight, scales, bias = values["x"], values["weight"], values["scale_weight"], values.get("bias")
    grad = grads["output"]
    if values["activation"] != "identity":
        sums = int8_matmul(x, weight, scales, scale_x=values.get("scale_x"), bias=bias, dtype=grad.dtype)
        _, pull = jax.vjp(lambda v: _activation(v, values["activation"]), sums)
        (grad,) = pull(grad)
    gradients = {}
    if "x" in wanted:
        each = jnp.repeat(scales, values["group"], 1)[:, : weight.shape[1]] if values["group"] else scales
        gradients["x"] = linear(grad, (weight.astype(jnp.float32) * each).astype(grad.dtype).T).astype(x.dtype)
    if "bias" in wanted:
        gradients["bias"] = grad.astype(jnp.float32).sum(tuple(range(grad.ndim - 1))).astype(bias.dtype)
    return gradients


def _gradient(values: Any, grads: Any, wanted: Any) -> Any:
    weight = QuantizedWeight(
        values["codes"], values["scales"], values.get("zeros"), values.get("tensor_scale"), values["format"],
        values["group"],
    )  # fmt: skip
    x, bias, grad = values["x"], values.get("bias"), grads["output"]
    if values["activation"] != "identity":
        _, pull = jax.vjp(lambda v: _activation(v, values["activation"]), quantized_matmul(x, weight, bias=bias))
        (grad,) = pull(grad)
    gradients = {}
    if "x" in wanted:
        gradients["x"] = linear(grad, dequantize_weight(weight, x.dtype).T)
    if "bias" in wanted:
        gradients["bias"] = grad.astype(jnp.float32).sum(tuple(range(grad.ndim - 1))).astype(bias.dtype)
    return gradients


def tensors_of(weight: QuantizedWeight) -> dict[str, Any]:
    return {name: getattr(weight, name) for name in ("codes", "scales", "zeros", "tensor_scale")}


def _tensor_scale(weight: Array) -> Array:
    """The smallest power of two that 6 * 448 times reaches the largest magnitude; 1 where there is none."""
    largest = jnp.max(jnp.abs(weight.astype(jnp.float32)), initial=0.0).reshape(1) / (6.0 * 448.0)
    mantissa, exponent = jnp.frexp(largest)
    power = jnp.ldexp(jnp.ones_like(largest), exponent - (mantissa == 0.5))
    return jnp.where(jnp.isfinite(largest) & (largest > 0), jnp.clip(power, 2.0**-100, 2.0**100), 1.0)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sparse24Tensor:
    """A matrix [rows, columns] of which two of each four neighbours of a row are kept. A pytree.

    Attributes:
        values: [rows, columns / 2]: what is kept, in order.
        metadata: int32 [ceil(columns / 64), rows, 2]: the places of the kept values, first | second << 2 in four bits
            for each four columns.
    """

    values: Array
    metadata: Array

    @property
    def shape(self) -> tuple[int, int]:
        return self.values.shape[0], self.values.shape[1] * 2

    def to_dense(self) -> Array:
        """The matrix with zeros where nothing is kept."""
        return call("sparse_decompress", {"values": self.values, "metadata": self.metadata}, {})["output"]  # type: ignore[no-any-return]


def sparse_compress(weight: Array) -> Sparse24Tensor:
    """The two values of largest magnitude of each four neighbours of a row; of equal ones the first. No gradient.

    Args:
        weight: [rows, columns], fp32, bf16 or fp16; columns a multiple of 4.
    """
    weight = jax.lax.stop_gradient(jnp.asarray(weight))
    if weight.ndim != 2 or weight.shape[1] % 4:
        raise ValueError(
            f"sparse_compress: weight has shape {list(weight.shape)}; it must be [rows, columns] with a multiple of 4 "
            "columns"
        )
    made = call("sparse_compress", {"x": weight}, {})
    return Sparse24Tensor(made["values"], made["metadata"])


def sparse_matmul(
    x: Array, weight: Sparse24Tensor, *, bias: Array | None = None, activation: str | None = None
) -> Array:
    """activation(x @ weight.T + bias) with a 2:4 weight: only what is kept is multiplied.

    Args:
        x: [..., columns of the weight]; fp32, bf16 or fp16. Gradients of x and bias exist; the weight has none.
        bias: [rows of the weight].
        activation: a name that `activation` takes, or None. Its gradient computes the product again.
    """
    x = jnp.asarray(x)
    if x.ndim == 0 or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"sparse_matmul: x has shape {list(x.shape)}, the weight has {list(weight.shape)}; "
            "their last sizes must be equal"
        )
    tensors = {
        "x": x,
        "values": weight.values.astype(x.dtype),
        "metadata": weight.metadata,
        "bias": None if bias is None else parameter_for(x, bias),
    }
    saves = [name for name in tensors if tensors[name] is not None]
    options = {"activation": activation or "identity"}
    return differentiable("sparse_matmul", tensors, options, _sparse_gradient, saves=saves)[0]  # type: ignore[no-any-return]


def _sparse_gradient(values: Any, grads: Any, wanted: Any) -> Any:
    weight = Sparse24Tensor(values["values"], values["metadata"])
    x, bias, grad = values["x"], values.get("bias"), grads["output"]
    if values["activation"] != "identity":
        _, pull = jax.vjp(lambda v: _activation(v, values["activation"]), sparse_matmul(x, weight, bias=bias))
        (grad,) = pull(grad)
    gradients = {}
    if "x" in wanted:
        gradients["x"] = linear(grad, weight.to_dense().T)
    if "bias" in wanted:
        gradients["bias"] = grad.astype(jnp.float32).sum(tuple(range(grad.ndim - 1))).astype(bias.dtype)
    return gradients
