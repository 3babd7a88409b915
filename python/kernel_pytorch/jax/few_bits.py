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

# By format: sizes of groups, the usual one first; codes in a byte.
_FORMATS = {
    "nvfp4": ((16,), 2),
    "mxfp4": ((32,), 2),
    "mxfp8": ((32,), 1),
    "int4": ((128, 64, 32), 2),
    "int8": ((128, 64, 32), 1),
}
_SCALE_TYPES = {"nvfp4": jnp.float8_e4m3fn, "mxfp4": jnp.int8, "mxfp8": jnp.int8}  # others: the weight's


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class QuantizedWeight:
    """A matrix in few bits: int8 arrays hold bytes. A pytree, whose format and group are static.

    Attributes:
        codes: [rows, columns / codes in a byte]; of two 4-bit codes the even column's is in the low half.
        scales: [rows, ceil(columns / group)]: float8_e4m3fn (nvfp4), E8M0's bytes (mxfp4, mxfp8), else floats.
        zeros: bytes, for asymmetric int4 and int8, or None; tensor_scale: fp32, one element (nvfp4), or None.
    """

    codes: Array
    scales: Array
    zeros: Array | None
    tensor_scale: Array | None
    format: str = field(metadata={"static": True})
    group: int = field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1] * _FORMATS[self.format][1]

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
        weight: fp32, bf16 or fp16; an even number of columns for formats of 4 bits.
        format: "nvfp4", "mxfp4", "mxfp8", "int4" or "int8".
        group: 32, 64 or 128 (the default) for int4 and int8; the others have one size.
        asymmetric: int4 and int8: a zero for each group.
        tensor_scale: nvfp4: fp32, one element; None takes the smallest power of two with which no scale saturates.
        seed: a key of jax.random, for stochastic rounding; None rounds to nearest even.
    """
    if format not in _FORMATS:
        raise ValueError(f'quantize_weight: format is "{format}"; it is one of {", ".join(_FORMATS)}')
    groups, in_byte = _FORMATS[format]
    weight = jax.lax.stop_gradient(jnp.asarray(weight))
    if weight.ndim != 2 or weight.shape[1] % in_byte:
        raise ValueError(
            f"quantize_weight: weight has shape {list(weight.shape)}; it must be [rows, columns] with a multiple of "
            f"{in_byte} columns"
        )
    if format == "nvfp4" and tensor_scale is None:
        tensor_scale = _tensor_scale(weight)
    group = groups[0] if group is None else group
    tensors = {
        "x": weight,
        "tensor_scale": tensor_scale,
        "seed": None if seed is None else seed_words("quantize_weight", seed),
    }
    made = call(
        "group_quantize", tensors, {"format": format, "group": group}, wanted=("asymmetric",) if asymmetric else (),
        types={"scales_dtype": _SCALE_TYPES.get(format, weight.dtype)},
    )  # fmt: skip
    return QuantizedWeight(made["codes"], made["scales"], made.get("zeros"), tensor_scale, format, group)


def dequantize_weight(weight: QuantizedWeight, dtype: Any = jnp.bfloat16) -> Array:
    """The values of a quantised weight as fp32, bf16, fp16 or float8_e4m3fn (saturated)."""
    options = {
        "format": weight.format,
        "group": weight.group,
        "columns": weight.shape[1],
        "dtype": name_of_dtype(dtype),
    }
    return call("group_dequantize", _tensors(weight), options)["output"]  # type: ignore[no-any-return]


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
    tensors = {"x": x, **_tensors(weight), "bias": None if bias is None else parameter_for(x, bias)}
    if weight.format in ("int4", "int8"):
        tensors["scales"] = tensors["scales"].astype(x.dtype)
    options = {"format": weight.format, "group": weight.group, "activation": activation or "identity"}
    saves = [name for name in ("x", "codes", "scales", "zeros", "tensor_scale", "bias") if tensors[name] is not None]
    return differentiable("quantized_matmul", tensors, options, _gradient, saves=saves)[0]  # type: ignore[no-any-return]


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


def _tensors(weight: QuantizedWeight) -> dict[str, Any]:
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
