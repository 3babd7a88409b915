"""2:4 sparsity: weights of which two of each four neighbours are kept, and products with them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ._call import Array, call, parameter_for
from ._gradients import differentiable
from .pointwise import activation as _activation
from .products import linear


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
    return differentiable("sparse_matmul", tensors, options, _gradient, saves=saves)[0]  # type: ignore[no-any-return]


def _gradient(values: Any, grads: Any, wanted: Any) -> Any:
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
