"""Weights in few bits: the same codes as torch's front end, products and gradients of what they stand for."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kernel_pytorch.jax as kp

torch = pytest.importorskip("torch", reason="it compares with torch's front end")
from kernel_pytorch import functional  # noqa: E402

CASES: list[tuple[str, dict[str, Any]]] = [
    ("nvfp4", {}),
    ("mxfp4", {}),
    ("mxfp8", {}),
    ("int4", {"group": 32, "asymmetric": True}),
    ("int8", {"group": 64}),
]


@pytest.mark.parametrize(("format", "options"), CASES)
def test_codes_products_and_gradients(format: str, options: dict[str, Any]) -> None:
    rng = np.random.default_rng(0)
    weight, x, bias = (rng.standard_normal(shape, np.float32) for shape in ((12, 64), (2, 3, 64), (12,)))
    made = kp.quantize_weight(weight, format, **options)
    theirs = functional.quantize_weight(torch.from_numpy(weight), format, **options)
    np.testing.assert_array_equal(np.asarray(made.codes).view(np.uint8), theirs.codes.numpy())
    values = kp.dequantize_weight(made, jnp.float32)
    np.testing.assert_array_equal(values, theirs.dequantize(torch.float32).numpy())

    def loss(product: Any, x: Any, bias: Any) -> Any:
        return jnp.sin(product(x, bias)).sum()

    mine = jax.jit(jax.grad(loss, (1, 2)), static_argnums=0)(
        lambda x, bias: kp.quantized_matmul(x, made, bias=bias, activation="silu"), x, bias
    )
    plain = jax.grad(loss, (1, 2))(lambda x, bias: jax.nn.silu(x @ values.T + bias), x, bias)
    for one, other in zip(mine, plain):
        np.testing.assert_allclose(one, other, rtol=2e-4, atol=2e-4)


def test_a_weight_is_a_pytree() -> None:
    weight = kp.quantize_weight(jnp.ones((4, 32)), "mxfp4")
    product = jax.jit(lambda x, weight: kp.quantized_matmul(x, weight))(jnp.ones((2, 32)), weight)
    np.testing.assert_array_equal(product, 32.0)
    with pytest.raises(ValueError, match="last sizes must be equal"):
        kp.quantized_matmul(jnp.ones((2, 30)), weight)


def test_places_products_and_gradients() -> None:
    rng = np.random.default_rng(0)
    weight, x, bias = (rng.standard_normal(shape, np.float32) for shape in ((12, 72), (2, 3, 72), (12,)))
    made = kp.sparse_compress(weight)
    theirs = functional.sparse_compress(torch.from_numpy(weight))
    np.testing.assert_array_equal(made.values, theirs.values.numpy())
    np.testing.assert_array_equal(made.metadata, theirs.metadata.numpy())
    values = made.to_dense()
    np.testing.assert_array_equal(values, theirs.to_dense().numpy())

    def loss(product: Any, x: Any, bias: Any) -> Any:
        return jnp.sin(product(x, bias)).sum()

    mine = jax.jit(jax.grad(loss, (1, 2)), static_argnums=0)(
        lambda x, bias: kp.sparse_matmul(x, made, bias=bias, activation="silu"), x, bias
    )
    plain = jax.grad(loss, (1, 2))(lambda x, bias: jax.nn.silu(x @ values.T + bias), x, bias)
    for one, other in zip(mine, plain):
        np.testing.assert_allclose(one, other, rtol=2e-4, atol=2e-4)


def test_a_sparse_weight_is_a_pytree() -> None:
    weight = kp.sparse_compress(jnp.ones((4, 32)))
    product = jax.jit(lambda x, weight: kp.sparse_matmul(x, weight))(jnp.ones((2, 32)), weight)
    np.testing.assert_array_equal(product, 16.0)
    with pytest.raises(ValueError, match="last sizes must be equal"):
        kp.sparse_matmul(jnp.ones((2, 28)), weight)
    with pytest.raises(ValueError, match="multiple of 4"):
        kp.sparse_compress(jnp.ones((2, 6)))
